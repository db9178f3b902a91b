//! Errors of a full disk.

use std::io::ErrorKind;
use std::path::Path;

use stoker_api::names::{ENV_DATA_CACHE, ENV_DATA_CACHE_BYTES};

use crate::Error;

/// A full disk, or an exhausted quota of the file system. An infrastructure failure would repeat
/// the build up to ten times without counting it, although each build fails in the same way. So
/// this is an error of the user.
#[derive(Debug, thiserror::Error)]
#[error(
    "the data cache cannot {act}: {reason}{size}{free}; free some space, set {ENV_DATA_CACHE} to a \
     directory with more space, or set {ENV_DATA_CACHE_BYTES} so low that older sets are deleted"
)]
pub(super) struct DiskFull {
    act: String,
    reason: String,
    /// Required size of the set.
    size: String,
    /// Free space on the file system.
    free: String,
}

impl DiskFull {
    /// Returns the error if a failed operation on `path` has this cause.
    pub(super) fn new(act: &str, path: &Path, error: &std::io::Error) -> Option<Self> {
        if !matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded) {
            return None;
        }
        let free = path.parent().and_then(|folder| rustix::fs::statvfs(folder).ok());
        // The quota of a user may leave less.
        let free = free.filter(|_| error.kind() == ErrorKind::StorageFull);
        let bytes = free.map(|disk| disk.f_bavail.saturating_mul(disk.f_frsize));
        Some(Self {
            act: format!("{act} {}", path.display()),
            reason: error.to_string(),
            size: String::new(),
            free: bytes.map(|bytes| format!("; {bytes} bytes are free")).unwrap_or_default(),
        })
    }

    /// Adds the required size of a set to an error of this kind without one, for example `set x
    /// needs 5 bytes`. Returns other errors unchanged.
    pub(super) fn with_size(error: Error, size: impl FnOnce() -> String) -> Error {
        match error.downcast::<Self>() {
            Ok(full) if full.size.is_empty() => {
                Self { size: format!("; {}", size()), ..*full }.into()
            }
            Ok(full) => full,
            Err(error) => error,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::dataset_dir::io_error;
    use crate::error::exit_code;

    #[test]
    fn full_disk_is_a_user_error_with_remedies() {
        use stoker_api::contract::ExitCode;

        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("00003.seg");
        let fail = |kind: ErrorKind| {
            let error = io_error("write", &path, &kind.into());
            DiskFull::with_size(error, || "data set a v1 (training) needs 700 bytes".into())
        };
        for kind in [ErrorKind::StorageFull, ErrorKind::QuotaExceeded] {
            let error = fail(kind);
            assert_eq!(exit_code(&*error), ExitCode::UserError, "{error}");
            let text = error.to_string();
            let start = format!("the data cache cannot write {}: ", path.display());
            assert!(text.starts_with(&start), "{text}");
            assert!(text.contains("data set a v1 (training) needs 700 bytes; "), "{text}");
            assert_eq!(
                text.contains(" bytes are free; "),
                kind == ErrorKind::StorageFull,
                "{text}"
            );
            assert!(text.contains("STOKER_DATA_CACHE_BYTES"), "{text}");
        }
        assert_eq!(exit_code(&*fail(ErrorKind::TimedOut)), ExitCode::Infrastructure);
    }
}

//! Lock on the directory of a program without a runner.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Read as _, Seek as _, Write as _};
use std::path::Path;

use crate::Result;

/// Name of the lock file in the directory.
const LOCK: &str = ".stoker-lock";

/// Locks a directory for this process until the returned file is dropped.
///
/// # Errors
///
/// Fails if another program uses the directory, or if the directory is unusable.
pub(super) fn lock(folder: &Path) -> Result<File> {
    let path = folder.join(LOCK);
    let unusable =
        |error: &io::Error| format!("cannot use directory {}: {error}", folder.display());
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    let mut file = options.open(&path).map_err(|error| unusable(&error))?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let mut owner = String::new();
            let read = file.read_to_string(&mut owner);
            let owner = match read {
                Ok(_) if !owner.is_empty() => owner,
                _ => "another process".to_owned(),
            };
            return Err(format!(
                "directory {} is in use by {owner}; wait until it ends, or train in another one",
                folder.display()
            )
            .into());
        }
        Err(TryLockError::Error(error)) if is_unsupported(&error) => {
            eprintln!("stoker: cannot lock directory {}: {error}", folder.display());
            return Ok(file);
        }
        Err(TryLockError::Error(error)) => return Err(unusable(&error).into()),
    }
    // Name this process for the error of another program. The lock does not depend on it.
    let _ = file.set_len(0).and_then(|()| file.rewind());
    let _ = write!(file, "process {}{}", std::process::id(), host());
    Ok(file)
}

/// Returns whether the file system does not support locks. NFS without a lock manager has no locks
/// available.
fn is_unsupported(error: &io::Error) -> bool {
    error.kind() == ErrorKind::Unsupported || error.raw_os_error() == Some(libc::ENOLCK)
}

fn host() -> String {
    let name = rustix::system::uname();
    name.nodename().to_str().map(|name| format!(" on {name}")).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_locked_directory_is_refused_by_name() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path();
        let first = lock(folder).unwrap();
        let error = lock(folder).unwrap_err().to_string();
        let expected = format!(
            "directory {} is in use by process {}{}; wait until it ends, or train in another one",
            folder.display(),
            std::process::id(),
            host()
        );
        assert_eq!(error, expected);
        drop(first);
        lock(folder).unwrap();
    }

    #[test]
    fn file_systems_without_locks_are_accepted() {
        let check = |code, expected| {
            let error = io::Error::from_raw_os_error(code);
            assert_eq!(is_unsupported(&error), expected, "{error}");
        };
        [libc::ENOSYS, libc::EOPNOTSUPP, libc::ENOLCK]
            .into_iter()
            .for_each(|code| check(code, true));
        check(libc::EACCES, false);
    }

    #[test]
    fn an_unusable_directory_is_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = lock(&file.path().join("below")).unwrap_err().to_string();
        assert!(error.starts_with("cannot use directory "), "{error}");
    }
}

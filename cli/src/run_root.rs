//! Location of a run's files and its record.
//!
//! ```text
//! ROOT/NAMESPACE/EXPERIMENT-UID8/trials/INDEX/...   checkpoints, metrics, logs (directory, bucket)
//! LOCAL/local/NAMESPACE.EXPERIMENT.current          UID of the latest run
//! LOCAL/local/NAMESPACE.EXPERIMENT.lock             locked by the runner
//! LOCAL/local/EXPERIMENT-UID8/record/               the record
//! ```
//!
//! LOCAL is ROOT if ROOT is a directory. If ROOT is a bucket, the record stays on this machine, in
//! `$XDG_STATE_HOME/stoker/HASH8` (default `~/.local/state/stoker/HASH8`). HASH8 is the start of
//! the SHA-256 of ROOT. Locks and atomic file replacement require a file system.

use std::path::{Path, PathBuf};

use stoker_storage::hash::sha256_hex;

use crate::failure::Failure;

/// Root if neither `--root` nor the experiment's file specifies one.
const ROOT_DEFAULT: &str = ".stoker";

/// Storage root and the directory of its records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RunRoot {
    /// Storage root: an absolute path or a bucket URL.
    pub(crate) root: String,
    /// Directory that contains `local/`.
    pub(crate) state_dir: PathBuf,
}

impl RunRoot {
    /// Resolves the root from `--root`, else `checkpointStorage.url` of the file, else `./.stoker`.
    pub(crate) fn resolve(flag: Option<&str>, file: Option<&str>) -> Result<Self, Failure> {
        let (named_by, root) = match (flag, file) {
            (Some(root), _) => ("--root", root),
            (None, Some(root)) => ("spec.checkpointStorage.url", root),
            (None, None) => ("--root", ROOT_DEFAULT),
        };
        if root.is_empty() {
            return Err(Failure::Input(format!(
                "{named_by} is empty; write a directory or the URL of a bucket, or omit it"
            )));
        }
        if root.starts_with("memory:") {
            return Err(Failure::Input(format!(
                "{named_by} {root} is unusable: memory is not shared with the trainer processes; \
                 use a directory or a bucket"
            )));
        }
        if !root.contains("://")
            && let Some((scheme, _)) = root.split_once(":/")
            && !scheme.contains('/')
        {
            return Err(Failure::Input(format!(
                "{named_by} {root} is ambiguous; write {scheme}:// with two slashes for a bucket, \
                 or ./{root} for a directory"
            )));
        }
        match local_dir(root) {
            Some(local_dir) => {
                let local_dir = std::path::absolute(&local_dir)
                    .map_err(|error| Failure::Input(format!("{named_by} {root}: {error}")))?;
                Ok(Self { root: local_dir.display().to_string(), state_dir: local_dir })
            }
            None => {
                Ok(Self { root: root.to_owned(), state_dir: state_home()?.join(root_hash(root)) })
            }
        }
    }

    /// Returns the root, for messages that find nothing there.
    pub(crate) fn searched(&self) -> String {
        // The record of a run in a bucket has another directory.
        let is_missing = Path::new(&self.root) == self.state_dir && !self.state_dir.exists();
        let missing = if is_missing { " (the directory does not exist)" } else { "" };
        format!("{}{missing}", self.root)
    }

    /// Returns the directory of all records.
    pub(crate) fn records_dir(&self) -> PathBuf {
        self.state_dir.join("local")
    }

    /// Returns the directory of one experiment's record.
    pub(crate) fn record_dir(&self, name: &str, uid: &str) -> PathBuf {
        self.records_dir().join(run_id(name, uid)).join("record")
    }
}

/// Returns the run ID shown to users and used in paths: name and first 8 characters of the UID.
pub(crate) fn run_id(name: &str, uid: &str) -> String {
    format!("{name}-{}", uid.get(..8).unwrap_or(uid))
}

/// Returns the directory of `root`, or `None` for a bucket.
fn local_dir(root: &str) -> Option<PathBuf> {
    if !root.contains("://") {
        return Some(PathBuf::from(root));
    }
    let url = url::Url::parse(root).ok().filter(|url| url.scheme() == "file")?;
    url.to_file_path().ok()
}

fn root_hash(root: &str) -> String {
    sha256_hex(root.trim_end_matches('/').as_bytes()).get(..8).unwrap_or_default().to_owned()
}

fn state_home() -> Result<PathBuf, Failure> {
    let of = |name: &str| std::env::var_os(name).filter(|path| Path::new(path).is_absolute());
    of("XDG_STATE_HOME")
        .map(PathBuf::from)
        .or_else(|| of("HOME").map(|home| Path::new(&home).join(".local/state")))
        .map(|local_dir| local_dir.join("stoker"))
        .ok_or_else(|| {
            Failure::Input(
                "cannot locate the local record of a run in a bucket: neither XDG_STATE_HOME nor \
                 HOME is an absolute path; set one of them"
                    .to_owned(),
            )
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(flag: Option<&str>, file: Option<&str>, expected: &str) {
        assert_eq!(RunRoot::resolve(flag, file).unwrap().root, expected, "{flag:?} {file:?}");
    }

    #[test]
    fn flag_precedes_file_and_paths_become_absolute() {
        let here = std::env::current_dir().unwrap();
        check(None, None, &here.join(".stoker").display().to_string());
        check(None, Some("s3://bucket/a"), "s3://bucket/a");
        check(Some("/tmp/x"), Some("s3://bucket/a"), "/tmp/x");
        check(Some("file:///tmp/a%20b"), None, "/tmp/a b");
        check(Some("runs"), None, &here.join("runs").display().to_string());
    }

    #[test]
    fn messages_tell_that_the_directory_is_missing() {
        let folder = tempfile::tempdir().unwrap();
        let searched = |root: &str| RunRoot::resolve(Some(root), None).unwrap().searched();
        let root = folder.path().to_str().unwrap();
        assert_eq!(searched(root), root);
        let typo = format!("{root}/typo");
        assert_eq!(searched(&typo), format!("{typo} (the directory does not exist)"));
        assert_eq!(searched("s3://bucket/a"), "s3://bucket/a");
    }

    #[test]
    fn url_with_one_slash_is_refused() {
        let error = RunRoot::resolve(Some("s3:/bucket"), None).unwrap_err().to_string();
        assert!(error.contains("s3:// with two slashes"), "{error}");
        assert!(RunRoot::resolve(Some("./s3:/bucket"), None).is_ok());
    }

    #[test]
    fn empty_root_is_refused() {
        let error = |flag, file| RunRoot::resolve(flag, file).unwrap_err().to_string();
        assert!(error(Some(""), None).starts_with("--root is empty; write a directory"));
        assert!(error(None, Some("")).starts_with("spec.checkpointStorage.url is empty; write"));
    }

    #[test]
    fn memory_root_is_refused() {
        let error = RunRoot::resolve(Some("memory:///"), None).unwrap_err();
        assert_eq!(error.code(), 2);
        assert!(error.to_string().contains("not shared"), "{error}");
    }
}

//! Where a run's files and its record lie.
//!
//! ```text
//! ROOT/NAMESPACE/EXPERIMENT-UID8/trials/INDEX/...   checkpoints, metrics, logs: folder or bucket
//! LOCAL/local/NAMESPACE.EXPERIMENT.current          the unique id of the latest run
//! LOCAL/local/NAMESPACE.EXPERIMENT.lock             held by the one runner
//! LOCAL/local/EXPERIMENT-UID8/record/               the record
//! ```
//!
//! LOCAL is ROOT where that is a folder. Where it is a bucket, the record stays on this machine,
//! under `$XDG_STATE_HOME/stoker/BUCKET-HASH8` (`~/.local/state/stoker/...` unless set): a lock and
//! an atomic replacement of files need a file system.

use std::path::{Path, PathBuf};

use stoker_storage::hash::sha256_hex;

use crate::failure::Failure;

/// The folder used when neither `--root` nor the experiment's file names one.
const ROOT_DEFAULT: &str = ".stoker";

/// A storage root and the folder of its records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// The root: an absolute path or a bucket's URL.
    pub(crate) root: String,
    /// The folder under which `local/` lies.
    pub(crate) local: PathBuf,
}

impl Place {
    /// The place that `--root` names, else the file's `checkpointStorage.url`, else `./.stoker`.
    pub(crate) fn resolve(flag: Option<&str>, file: Option<&str>) -> Result<Self, Failure> {
        let (named_by, root) = match (flag, file) {
            (Some(root), _) => ("--root", root),
            (None, Some(root)) => ("spec.checkpointStorage.url", root),
            (None, None) => ("--root", ROOT_DEFAULT),
        };
        if root.starts_with("memory:") {
            return Err(Failure::Input(format!(
                "{named_by} {root}: memory is not shared with the trainers' processes; \
                 name a folder or a bucket"
            )));
        }
        if !root.contains("://")
            && let Some((scheme, _)) = root.split_once(":/")
            && !scheme.contains('/')
        {
            return Err(Failure::Input(format!(
                "{named_by} {root}: write {scheme}:// with two slashes for a bucket, or ./{root} \
                 for a folder of that name"
            )));
        }
        match folder(root) {
            Some(folder) => {
                let folder = std::path::absolute(&folder)
                    .map_err(|error| Failure::Input(format!("{named_by} {root}: {error}")))?;
                Ok(Self { root: folder.display().to_string(), local: folder })
            }
            None => Ok(Self { root: root.to_owned(), local: state_folder()?.join(bucket(root)) }),
        }
    }

    /// The folder that holds the records of all experiments.
    pub(crate) fn local(&self) -> PathBuf {
        self.local.join("local")
    }

    /// The folder that holds the record of one experiment.
    pub(crate) fn record(&self, name: &str, uid: &str) -> PathBuf {
        self.local().join(id(name, uid)).join("record")
    }
}

/// The id under which people and folders know a run: name and the first 8 characters of its unique
/// id.
pub(crate) fn id(name: &str, uid: &str) -> String {
    format!("{name}-{}", uid.get(..8).unwrap_or(uid))
}

/// The folder that `root` names; `None` for a bucket.
fn folder(root: &str) -> Option<PathBuf> {
    if !root.contains("://") {
        return Some(PathBuf::from(root));
    }
    let url = url::Url::parse(root).ok().filter(|url| url.scheme() == "file")?;
    url.to_file_path().ok()
}

fn bucket(root: &str) -> String {
    sha256_hex(root.trim_end_matches('/').as_bytes()).get(..8).unwrap_or_default().to_owned()
}

fn state_folder() -> Result<PathBuf, Failure> {
    let of = |name: &str| std::env::var_os(name).filter(|it| Path::new(it).is_absolute());
    of("XDG_STATE_HOME")
        .map(PathBuf::from)
        .or_else(|| of("HOME").map(|home| Path::new(&home).join(".local/state")))
        .map(|folder| folder.join("stoker"))
        .ok_or_else(|| {
            Failure::Input(
                "the record of a run in a bucket is kept on this machine: set HOME or \
                 XDG_STATE_HOME to an absolute path"
                    .to_owned(),
            )
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(flag: Option<&str>, file: Option<&str>, expected: &str) {
        assert_eq!(Place::resolve(flag, file).unwrap().root, expected, "{flag:?} {file:?}");
    }

    #[test]
    fn the_flag_goes_before_the_file_and_folders_become_absolute() {
        let here = std::env::current_dir().unwrap();
        check(None, None, &here.join(".stoker").display().to_string());
        check(None, Some("s3://bucket/a"), "s3://bucket/a");
        check(Some("/tmp/x"), Some("s3://bucket/a"), "/tmp/x");
        check(Some("file:///tmp/a%20b"), None, "/tmp/a b");
        check(Some("runs"), None, &here.join("runs").display().to_string());
    }

    #[test]
    fn an_address_with_one_slash_is_taken_for_no_folder() {
        let error = Place::resolve(Some("s3:/bucket"), None).unwrap_err().to_string();
        assert!(error.contains("s3:// with two slashes"), "{error}");
        assert!(Place::resolve(Some("./s3:/bucket"), None).is_ok());
    }

    #[test]
    fn memory_is_refused_because_processes_do_not_share_it() {
        let error = Place::resolve(Some("memory:///"), None).unwrap_err();
        assert_eq!(error.code(), 2);
        assert!(error.to_string().contains("not shared"), "{error}");
    }
}

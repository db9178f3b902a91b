//! Where a data set lies.

use std::fmt;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::Split;
use super::manifest::CHECKED;
use crate::error::Infrastructure;
use crate::{Error, Result};

/// How names of folders begin that are being removed.
pub(super) const GONE: &str = ".gone-";

/// The folder of one set, and what is beside it.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) id: String,
    pub(super) version: String,
    pub(super) split: Split,
    /// `ROOT/ID/VERSION`.
    parent: PathBuf,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "data set {} {} ({})", self.id, self.version, self.split.name())
    }
}

impl Place {
    pub(super) fn new(root: &Path, id: &str, version: &str, split: Split) -> Result<Self> {
        for (what, name) in [("id", id), ("version", version)] {
            let is_plain = |it: char| it.is_ascii_alphanumeric() || "._-".contains(it);
            if name.is_empty() || name.starts_with('.') || !name.chars().all(is_plain) {
                let text = format!(
                    "the {what} of a data set is {name:?}, but must be letters, digits, `.`, `_` and \
                     `-` alone, the first of them no `.`"
                );
                return Err(text.into());
            }
        }
        let parent = root.join(id).join(version);
        fs::create_dir_all(&parent).map_err(|error| failed("make", &parent, &error))?;
        Ok(Self { id: id.into(), version: version.into(), split, parent })
    }

    /// The set, whole.
    pub(super) fn folder(&self) -> PathBuf {
        self.parent.join(self.split.name())
    }

    /// What is being made.
    pub(super) fn half(&self) -> PathBuf {
        half_of(&self.parent, self.split)
    }

    pub(super) fn lock_file(&self, of: &str) -> PathBuf {
        self.parent.join(format!("{}.{of}", self.split.name()))
    }

    /// Notes that the set is used now.
    pub(super) fn touch(&self, reader: &File) -> Result<()> {
        let path = self.lock_file("use");
        reader.set_modified(SystemTime::now()).map_err(|error| failed("touch", &path, &error))
    }

    /// The whole set is checked when it is opened next.
    pub(super) fn distrust(&self) {
        // Where it cannot be removed, records are still checked one by one.
        let _ = fs::remove_file(self.folder().join(CHECKED));
    }

    /// Removes what a builder has left half done, and a set that is not whole, and makes room for
    /// another. Whoever reads it goes on.
    pub(super) fn clear(&self) -> Result<()> {
        let (folder, half) = (self.folder(), self.half());
        for path in [&half, &folder] {
            if path.exists() {
                remove(path)?;
            }
        }
        fs::create_dir(&half).map_err(|error| failed("make", &half, &error))
    }

    /// Gives the set that is made its name, once all of it is on the disk.
    pub(super) fn publish(&self) -> Result<()> {
        let (half, folder) = (self.half(), self.folder());
        sync(&half)?;
        fs::rename(&half, &folder).map_err(|error| failed("rename", &half, &error))?;
        sync(&self.parent)
    }
}

/// Where a set of this version is made.
pub(super) fn half_of(version: &Path, split: Split) -> PathBuf {
    version.join(format!(".{}.half", split.name()))
}

/// Removes a folder in one step for those who look, then what is in it.
pub(super) fn remove(folder: &Path) -> Result<()> {
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    let gone = folder.with_file_name(format!("{GONE}{}-{name}", std::process::id()));
    // Of an earlier process with this number.
    let _ = fs::remove_dir_all(&gone);
    match fs::rename(folder, &gone) {
        // Another process was faster.
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        done => done.map_err(|error| failed("rename", folder, &error))?,
    }
    match fs::remove_dir_all(&gone) {
        // Another process has swept it away.
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        done => done.map_err(|error| failed("remove", &gone, &error)),
    }
}

/// Brings a folder's names to the disk.
fn sync(folder: &Path) -> Result<()> {
    let synced = File::open(folder).and_then(|it| it.sync_all());
    synced.map_err(|error| failed("store", folder, &error))
}

/// What cannot be done to a path.
pub(super) fn failed(act: &str, path: &Path, error: &std::io::Error) -> Error {
    let text = format!("the cache of data sets cannot {act} {}: {error}", path.display());
    Infrastructure(text).into()
}

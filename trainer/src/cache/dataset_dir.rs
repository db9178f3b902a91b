//! Paths of a data set.

use std::fmt;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use stoker_api::contract::ExitCode;

use super::Split;
use super::disk_full::DiskFull;
use super::manifest::{FORMAT, VERIFIED_FILE};
use crate::error::{Infrastructure, Interrupted};
use crate::stop::StopSignal;
use crate::{Error, Result};

/// Name prefix of directories that are being removed.
pub(super) const REMOVED_PREFIX: &str = ".gone-";

/// Paths of one set: its directory, staging directory and lock files.
#[derive(Clone, Debug)]
pub(super) struct DatasetDir {
    pub(super) id: String,
    pub(super) version: String,
    pub(super) split: Split,
    /// `ROOT/ID/VERSION`.
    parent: PathBuf,
}

impl fmt::Display for DatasetDir {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "data set {} {} ({})", self.id, self.version, self.split.name())
    }
}

impl DatasetDir {
    pub(super) fn new(root: &Path, id: &str, version: &str, split: Split) -> Result<Self> {
        for (what, name) in [("id", id), ("version", version)] {
            let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
            if name.is_empty() || name.starts_with('.') || !name.chars().all(is_plain) {
                let text = format!(
                    "the {what} of a data set is {name:?}, but must consist of letters, digits, \
                     `.`, `_` and `-`, and not start with `.`"
                );
                return Err(text.into());
            }
        }
        let parent = root.join(id).join(version);
        fs::create_dir_all(&parent).map_err(|error| io_error("create", &parent, &error))?;
        Ok(Self { id: id.into(), version: version.into(), split, parent })
    }

    /// Fails if a stop is requested.
    pub(super) fn check_interrupt(&self, stop: &StopSignal) -> Result<()> {
        match stop.is_set() {
            true => Err(self.interrupted()),
            false => Ok(()),
        }
    }

    /// Returns the error of a process that stops before it has opened the set.
    pub(super) fn interrupted(&self) -> Error {
        let why = format!("preempted before {self} was ready");
        Interrupted { code: ExitCode::Preempted, fenced: false, why }.into()
    }

    /// Returns the name of the set's directory.
    pub(super) fn name(&self) -> String {
        set_name(self.split, FORMAT)
    }

    /// Returns the directory of the complete set.
    pub(super) fn folder(&self) -> PathBuf {
        self.parent.join(self.name())
    }

    /// Returns the staging directory.
    pub(super) fn staging_dir(&self) -> PathBuf {
        self.parent.join(format!(".{}.half", self.name()))
    }

    pub(super) fn lock_file(&self, of: &str) -> PathBuf {
        self.parent.join(format!("{}.{of}", self.name()))
    }

    /// Records that the set is used now.
    pub(super) fn touch(&self, reader: &File) -> Result<()> {
        let path = self.lock_file("use");
        reader.set_modified(SystemTime::now()).map_err(|error| io_error("touch", &path, &error))
    }

    /// Forces a full verification when the set is next opened.
    pub(super) fn invalidate_check(&self) {
        // Ignore the error: each record still has a checksum that is verified when it is read.
        let _ = fs::remove_file(self.folder().join(VERIFIED_FILE));
    }

    /// Removes an incomplete set. Existing readers are not affected.
    pub(super) fn remove_incomplete(&self) -> Result<()> {
        let folder = self.folder();
        if folder.exists() { remove(&folder) } else { Ok(()) }
    }

    /// Removes the staging directory of an interrupted build and an incomplete set, then creates an
    /// empty staging directory. Existing readers are not affected.
    pub(super) fn prepare_staging(&self) -> Result<()> {
        let staging_dir = self.staging_dir();
        if staging_dir.exists() {
            remove(&staging_dir)?;
        }
        self.remove_incomplete()?;
        fs::create_dir(&staging_dir).map_err(|error| io_error("create", &staging_dir, &error))
    }

    /// Moves the staging directory to the final name, after syncing it to disk.
    pub(super) fn publish(&self) -> Result<()> {
        let (staging_dir, folder) = (self.staging_dir(), self.folder());
        sync(&staging_dir)?;
        fs::rename(&staging_dir, &folder)
            .map_err(|error| io_error("rename", &staging_dir, &error))?;
        sync(&self.parent)
    }
}

/// Returns the name of the directory for a split in a format. Each format has another name, so that
/// different versions of Stoker leave each other's sets alone. `FORMAT` 1 came before this
/// rule.
pub(super) fn set_name(split: Split, format: u32) -> String {
    match format {
        1 => split.name().into(),
        _ => format!("{}.v{format}", split.name()),
    }
}

/// Returns `true` if [`set_name`] returns this name for a split and a format.
pub(super) fn is_set_name(name: &str) -> bool {
    [Split::Training, Split::Validation].into_iter().any(|split| {
        let format = name.strip_prefix(split.name()).and_then(|rest| rest.strip_prefix(".v"));
        name == set_name(split, format.and_then(|format| format.parse().ok()).unwrap_or(1))
    })
}

/// Removes a directory atomically for other processes, by renaming it before deleting its contents.
pub(super) fn remove(folder: &Path) -> Result<()> {
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    let removed = folder.with_file_name(format!("{REMOVED_PREFIX}{}-{name}", std::process::id()));
    // An earlier process with the same ID may have left this directory.
    let _ = fs::remove_dir_all(&removed);
    match fs::rename(folder, &removed) {
        // Another process removed it first.
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        done => done.map_err(|error| io_error("rename", folder, &error))?,
    }
    match fs::remove_dir_all(&removed) {
        // Another process deleted it meanwhile.
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        done => done.map_err(|error| io_error("remove", &removed, &error)),
    }
}

/// Syncs a directory's entries to disk.
fn sync(folder: &Path) -> Result<()> {
    let synced = File::open(folder).and_then(|folder| folder.sync_all());
    synced.map_err(|error| io_error("store", folder, &error))
}

/// Builds the error for a failed operation on a path.
pub(super) fn io_error(act: &str, path: &Path, error: &std::io::Error) -> Error {
    if let Some(full) = DiskFull::new(act, path, error) {
        return full.into();
    }
    let text = format!("the data cache cannot {act} {}: {error}", path.display());
    Infrastructure(text).into()
}

//! Mark of a set that was built, but may not be in its bucket yet.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::dataset_dir::io_error;
use crate::Result;

/// An upload that is due. A file of the set's directory until the set is uploaded.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(super) struct PendingUpload {
    /// Location of data sets in the bucket.
    pub(super) bucket: String,
    /// Whether to replace a damaged copy in the bucket.
    pub(super) replace: bool,
}

impl PendingUpload {
    pub(super) fn path(folder: &Path) -> PathBuf {
        folder.join("upload.json")
    }

    /// Reads the mark of a set; `None` if no upload is due.
    pub(super) fn read(folder: &Path) -> Option<Self> {
        let text = fs::read(Self::path(folder)).ok()?;
        serde_json::from_slice(&text).ok()
    }

    /// Writes the mark and syncs it to disk.
    pub(super) fn write(&self, folder: &Path) -> Result<()> {
        let (path, text) = (Self::path(folder), serde_json::to_vec(self)?);
        let written = File::create(&path)
            .and_then(|mut file| file.write_all(&text).and_then(|()| file.sync_all()));
        written.map_err(|error| io_error("write", &path, &error))
    }
}

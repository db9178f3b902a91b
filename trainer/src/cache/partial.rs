//! Interrupted downloads: their verified segments stay in the staging directory.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};

use super::dataset_dir::{DatasetDir, io_error};
use super::manifest::{Manifest, SegmentEntry, check_each};
use crate::Result;
use crate::stop::StopSignal;

/// A download into the staging directory of a set. A process needs the lock of the set's builder.
pub(super) struct PartialDownload<'a> {
    dir: &'a DatasetDir,
    manifest: &'a Manifest,
}

impl<'a> PartialDownload<'a> {
    /// Prepares the staging directory for a download of `manifest`, whose text is `text` in the
    /// bucket. Keeps the segments of an earlier download of the same text.
    pub(super) fn open(dir: &'a DatasetDir, manifest: &'a Manifest, text: &[u8]) -> Result<Self> {
        let this = Self { dir, manifest };
        let path = Self::path(&dir.staging_dir());
        if fs::read(&path).is_ok_and(|earlier| earlier == text) {
            dir.remove_incomplete()?;
            return Ok(this);
        }
        dir.prepare_staging()?;
        let written = File::create(&path)
            .and_then(|mut file| file.write_all(text).and_then(|()| file.sync_all()));
        written.map_err(|error| io_error("write", &path, &error))?;
        Ok(this)
    }

    /// Returns the path of the file that marks a staging directory as a partial download, with the
    /// text of the manifest in the bucket.
    pub(super) fn path(staging_dir: &Path) -> PathBuf {
        staging_dir.join("download.json")
    }

    /// Verifies the segments that an earlier download has stored, on all cores. Deletes the damaged
    /// ones, and returns the missing ones.
    ///
    /// # Errors
    ///
    /// Fails if a stop request interrupts the verification, or if the disk fails.
    pub(super) fn missing(&self, stop: &StopSignal) -> Result<Vec<SegmentEntry>> {
        let folder = self.dir.staging_dir();
        let is_stored = |entry: &&SegmentEntry| folder.join(&entry.file).exists();
        let stored: Vec<&SegmentEntry> = self.manifest.segments.iter().filter(is_stored).collect();
        let mut intact = BTreeSet::new();
        for (file, result) in check_each(&stored, &folder, stop) {
            if result.is_ok() {
                intact.insert(file);
                continue;
            }
            let path = folder.join(file);
            match fs::remove_file(&path) {
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    return Err(io_error("remove", &path, &error));
                }
                _ => {}
            }
        }
        self.dir.check_interrupt(stop)?;
        if !intact.is_empty() {
            let (set, num, all) = (self.dir, intact.len(), self.manifest.segments.len());
            eprintln!("stoker: continuing the download of {set}: {num} of {all} segments stored");
        }
        let is_missing = |entry: &&SegmentEntry| !intact.contains(entry.file.as_str());
        Ok(self.manifest.segments.iter().filter(is_missing).cloned().collect())
    }

    /// Completes the staging directory.
    pub(super) fn finish(self) -> Result<()> {
        let folder = self.dir.staging_dir();
        self.manifest.write(&folder)?;
        let path = Self::path(&folder);
        fs::remove_file(&path).map_err(|error| io_error("remove", &path, &error))
    }
}

//! Complete data sets.

use std::fs;
use std::io::ErrorKind;

use stoker_api::names::ENV_DATA_CACHE;
use stoker_storage::hash::sha256_hex;

use super::dataset_dir::{DatasetDir, io_error};
use super::manifest::{MANIFEST_FILE, Manifest, has_other_format};
use super::segment::Segment;
use crate::Result;
use crate::stop::StopSignal;

/// The segments of a data set.
#[derive(Debug)]
pub(super) struct Dataset {
    segments: Vec<Segment>,
    /// Index of the first sample of each segment, then the total number of samples.
    firsts: Vec<usize>,
    sha256: String,
}

/// State of a set's directory.
pub(super) enum CacheState {
    Complete(Dataset),
    /// Describes the defect.
    Corrupt(String),
    Missing,
}

impl Dataset {
    /// Opens a set, verifying the segments that changed since their last verification. Fails if a
    /// stop request interrupts the verification.
    pub(super) fn open(dir: &DatasetDir, stop: &StopSignal) -> Result<CacheState> {
        let folder = dir.folder();
        let path = folder.join(MANIFEST_FILE);
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound && !folder.exists() => {
                return Ok(CacheState::Missing);
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Ok(CacheState::Corrupt(format!("{MANIFEST_FILE} is missing")));
            }
            Err(error) => return Err(io_error("read", &path, &error)),
        };
        // Each format has its own path, so this is unexpected. Do not delete the set.
        if has_other_format(&text) {
            let text = format!(
                "{dir}: {} has the format of another version of Stoker; set {ENV_DATA_CACHE} to \
                 another directory, or delete the set",
                path.display()
            );
            return Err(text.into());
        }
        let set = Manifest::parse(dir, &text).and_then(|manifest| {
            manifest.check(&folder, stop)?;
            let open = manifest.segments.iter().map(|entry| Segment::open(&folder, entry));
            let segments = open.collect::<Result<Vec<_>, _>>()?;
            let mut firsts = vec![0];
            for entry in &manifest.segments {
                firsts.push(firsts[firsts.len() - 1] + entry.records);
            }
            let hashes = manifest.segments.iter().map(|entry| entry.sha256.as_str());
            let sha256 = sha256_hex(hashes.collect::<Vec<_>>().concat().as_bytes());
            Ok(Self { segments, firsts, sha256 })
        });
        match set {
            Ok(set) => Ok(CacheState::Complete(set)),
            // The segments were not all verified. The next attempt finds the defect, if any.
            Err(_) if stop.is_set() => Err(dir.interrupted()),
            Err(why) => Ok(CacheState::Corrupt(why)),
        }
    }

    /// Returns a hash of the samples and their order.
    pub(super) fn sha256(&self) -> String {
        self.sha256.clone()
    }

    pub(super) fn len(&self) -> usize {
        self.firsts.last().copied().unwrap_or_default()
    }

    /// Returns the bytes of a sample, whose index must be below [`len`](Self::len).
    pub(super) fn record(&self, sample: usize) -> Result<&[u8], String> {
        let segment = self.firsts.partition_point(|first| *first <= sample) - 1;
        self.segments[segment].record(sample - self.firsts[segment])
    }
}

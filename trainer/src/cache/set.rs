//! Complete data sets.

use std::fs;
use std::io::ErrorKind;

use super::manifest::{MANIFEST, Manifest};
use super::place::{Place, failed};
use super::segment::Segment;
use crate::Result;

/// The segments of a data set.
#[derive(Debug)]
pub(super) struct Set {
    segments: Vec<Segment>,
    /// Index of the first sample of each segment, then the total number of samples.
    firsts: Vec<usize>,
}

/// State of a set's folder.
pub(super) enum Found {
    Whole(Set),
    /// Describes the defect.
    Damaged(String),
    Nothing,
}

impl Set {
    /// Opens a set, verifying the segments that changed since their last verification.
    pub(super) fn find(place: &Place) -> Result<Found> {
        let folder = place.folder();
        let path = folder.join(MANIFEST);
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound && !folder.exists() => {
                return Ok(Found::Nothing);
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Ok(Found::Damaged(format!("{MANIFEST} is missing")));
            }
            Err(error) => return Err(failed("read", &path, &error)),
        };
        let set = Manifest::parse(place, &text).and_then(|manifest| {
            manifest.check(&folder)?;
            let open = manifest.segments.iter().map(|entry| Segment::open(&folder, entry));
            let segments = open.collect::<Result<Vec<_>, _>>()?;
            let mut firsts = vec![0];
            for entry in &manifest.segments {
                firsts.push(firsts[firsts.len() - 1] + entry.records);
            }
            Ok(Self { segments, firsts })
        });
        Ok(set.map_or_else(Found::Damaged, Found::Whole))
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

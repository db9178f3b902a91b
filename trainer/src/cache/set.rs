//! A data set that is whole.

use std::fs;
use std::io::ErrorKind;

use super::manifest::{MANIFEST, Manifest};
use super::place::{Place, failed};
use super::segment::Segment;
use crate::Result;

/// All segments of a data set.
#[derive(Debug)]
pub(super) struct Set {
    segments: Vec<Segment>,
    /// The first sample of each segment, and the number of all.
    firsts: Vec<usize>,
}

/// What lies where a set is looked for.
pub(super) enum Found {
    Whole(Set),
    /// With what is wrong.
    Damaged(String),
    Nothing,
}

impl Set {
    /// Looks for a set and checks what was not checked since it was written.
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
        let whole = Manifest::parse(place, &text).and_then(|manifest| {
            manifest.check(&folder)?;
            let open = manifest.segments.iter().map(|entry| Segment::open(&folder, entry));
            let segments = open.collect::<Result<Vec<_>, _>>()?;
            let mut firsts = vec![0];
            for entry in &manifest.segments {
                firsts.push(firsts[firsts.len() - 1] + entry.records);
            }
            Ok(Self { segments, firsts })
        });
        Ok(whole.map_or_else(Found::Damaged, Found::Whole))
    }

    pub(super) fn len(&self) -> usize {
        self.firsts.last().copied().unwrap_or_default()
    }

    /// The bytes of a sample, of which there are [`len`](Self::len).
    pub(super) fn record(&self, sample: usize) -> Result<&[u8], String> {
        let segment = self.firsts.partition_point(|first| *first <= sample) - 1;
        self.segments[segment].record(sample - self.firsts[segment])
    }
}

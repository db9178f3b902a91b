//! Makes a data set of samples.

use serde::Serialize;

use super::manifest::Manifest;
use super::place::Place;
use super::room::Room;
use super::segment::Writer;
use crate::Result;

/// Bytes after which a segment ends: what is stored, downloaded and checked at once.
pub(super) const SEGMENT_BYTES: u64 = 64 << 20;

/// Writes all samples beside where the set will be.
pub(super) fn write<T: Serialize>(
    place: &Place,
    items: impl IntoIterator<Item = Result<T>>,
    room: &Room,
) -> Result<()> {
    let folder = place.half();
    let (mut segments, mut writer, mut record, mut stored) = (vec![], None, vec![], 0);
    for item in items {
        record.clear();
        record = postcard::to_extend(&item?, record)
            .map_err(|error| format!("{place}: a sample cannot be stored: {error}"))?;
        let current = match &mut writer {
            Some(current) => current,
            None => {
                room.make(stored + SEGMENT_BYTES)?;
                writer.insert(Writer::new(&folder, segments.len())?)
            }
        };
        current.record(&record)?;
        if current.bytes() >= SEGMENT_BYTES {
            let entry = writer.take().map(Writer::finish).transpose()?;
            stored += entry.as_ref().map_or(0, |it| it.bytes);
            segments.extend(entry);
        }
    }
    segments.extend(writer.map(Writer::finish).transpose()?);
    if segments.is_empty() {
        return Err(format!("{place} was built without a sample").into());
    }
    Manifest::new(place, segments).write(&folder)
}

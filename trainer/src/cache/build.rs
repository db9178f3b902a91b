//! Builds a data set from samples.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::manifest::Manifest;
use super::place::Place;
use super::room::Room;
use super::segment::Writer;
use crate::Result;

/// Size at which a segment ends. Segments are the unit of storage, download and verification.
pub(super) const SEGMENT_BYTES: u64 = 64 << 20;

/// Writes all samples to the staging folder of the set.
pub(super) fn write<T: Serialize + DeserializeOwned>(
    place: &Place,
    items: impl IntoIterator<Item = Result<T>>,
    room: &Room,
) -> Result<()> {
    let folder = place.half();
    let (mut segments, mut writer, mut record, mut stored) = (vec![], None, vec![], 0);
    for item in items {
        record.clear();
        record = postcard::to_extend(&item?, record)
            .map_err(|error| format!("{place}: cannot serialize a sample: {error}"))?;
        // Verify deserialization now, not after hours of building.
        decode::<T>(&record).map_err(|why| {
            format!(
                "{place}: cannot read back a serialized sample: {why}; values are stored without \
                 names and types, so remove serde's `untagged`, `tag`, `flatten` and \
                 `skip_serializing_if`"
            )
        })?;
        let current = match &mut writer {
            Some(current) => current,
            None => {
                room.make(stored + SEGMENT_BYTES)?;
                writer.insert(Writer::new(&folder, segments.len())?)
            }
        };
        current.record(&record)?;
        room.admit(stored + current.bytes())?;
        if current.bytes() >= SEGMENT_BYTES {
            let entry = writer.take().map(Writer::finish).transpose()?;
            stored += entry.as_ref().map_or(0, |entry| entry.bytes);
            segments.extend(entry);
        }
    }
    segments.extend(writer.map(Writer::finish).transpose()?);
    if segments.is_empty() {
        return Err(format!("{place} was built without a sample").into());
    }
    Manifest::new(place, segments).write(&folder)
}

/// Deserializes a sample that must use all bytes: a sample of another type may decode from a
/// prefix.
pub(super) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    match postcard::take_from_bytes(bytes) {
        Ok((sample, [])) => Ok(sample),
        Ok((_, rest)) => Err(format!("{} of its {} bytes are unused", rest.len(), bytes.len())),
        Err(error) => Err(error.to_string()),
    }
}

//! Makes a data set of samples.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::manifest::Manifest;
use super::place::Place;
use super::room::Room;
use super::segment::Writer;
use crate::Result;

/// Bytes after which a segment ends: what is stored, downloaded and checked at once.
pub(super) const SEGMENT_BYTES: u64 = 64 << 20;

/// Writes all samples beside where the set will be.
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
            .map_err(|error| format!("{place}: a sample cannot be stored: {error}"))?;
        // Now, not after hours of building.
        decode::<T>(&record).map_err(|why| {
            format!(
                "{place}: a sample cannot be read back from what is stored of it: {why}; values are stored \
                 without names and types, so leave out serde's `untagged`, `tag`, `flatten` and \
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

/// The sample in these bytes, which are to be all of it: of another type, a sample may be read from some of them.
pub(super) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    match postcard::take_from_bytes(bytes) {
        Ok((sample, [])) => Ok(sample),
        Ok((_, rest)) => Err(format!("{} of its {} bytes are left over", rest.len(), bytes.len())),
        Err(error) => Err(error.to_string()),
    }
}

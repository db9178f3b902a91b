//! Builds a data set from samples.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::dataset_dir::DatasetDir;
use super::disk_full::DiskFull;
use super::manifest::Manifest;
use super::quota::CacheQuota;
use super::segment::Writer;
use crate::Result;

/// Size at which a segment ends. Segments are the unit of storage, download and verification.
pub(super) const SEGMENT_BYTES: u64 = 64 << 20;

/// Writes all samples to the staging directory of the set.
pub(super) fn write<T: Serialize + DeserializeOwned>(
    dir: &DatasetDir,
    items: impl IntoIterator<Item = Result<T>>,
    quota: &CacheQuota,
) -> Result<()> {
    let mut bytes = 0;
    write_samples(dir, items, quota, &mut bytes).map_err(|error| {
        DiskFull::with_size(error, || format!("{dir} needs more than {bytes} bytes"))
    })
}

/// Same as [`write`]. Counts the bytes of the set in `bytes`.
fn write_samples<T: Serialize + DeserializeOwned>(
    dir: &DatasetDir,
    items: impl IntoIterator<Item = Result<T>>,
    quota: &CacheQuota,
    bytes: &mut u64,
) -> Result<()> {
    let folder = dir.staging_dir();
    let (mut segments, mut writer, mut record, mut stored) = (vec![], None, vec![], 0);
    for item in items {
        record.clear();
        record = postcard::to_extend(&item?, record)
            .map_err(|error| format!("{dir}: cannot serialize a sample: {error}"))?;
        // Verify deserialization now, not after hours of building.
        decode::<T>(&record).map_err(|why| {
            format!(
                "{dir}: cannot read back a serialized sample: {why}; values are stored without \
                 names and types, so remove serde's `untagged`, `tag`, `flatten` and \
                 `skip_serializing_if`"
            )
        })?;
        let current = match &mut writer {
            Some(current) => current,
            None => {
                quota.evict_for(stored + SEGMENT_BYTES)?;
                writer.insert(Writer::new(&folder, segments.len())?)
            }
        };
        *bytes = stored + current.bytes();
        current.record(&record)?;
        quota.check_size(stored + current.bytes())?;
        if current.bytes() >= SEGMENT_BYTES {
            let entry = writer.take().map(Writer::finish).transpose()?;
            stored += entry.as_ref().map_or(0, |entry| entry.bytes);
            segments.extend(entry);
        }
    }
    segments.extend(writer.map(Writer::finish).transpose()?);
    if segments.is_empty() {
        return Err(format!("{dir} was built without a sample").into());
    }
    Manifest::new(dir, segments).write(&folder)
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

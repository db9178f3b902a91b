//! Manifest of a data set.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read as _;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use stoker_storage::hash::hex;

use super::dataset_dir::{DatasetDir, io_error};
use crate::Result;
use crate::stop::StopSignal;

/// Version of the file formats. Part of the paths, see [`set_name`](super::dataset_dir::set_name).
pub(super) const FORMAT: u32 = 1;
/// Name of the manifest file.
pub(super) const MANIFEST_FILE: &str = "manifest.json";
/// Name of the file that records the verified segments and their state at that time.
pub(super) const VERIFIED_FILE: &str = "checked.json";
/// Buffer size for hashing, in bytes.
const HASH_BYTES: usize = 1 << 20;

/// Segments of a data set, in order.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Manifest {
    format: u32,
    id: String,
    version: String,
    split: String,
    pub(super) segments: Vec<SegmentEntry>,
}

/// Manifest entry of a segment.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(super) struct SegmentEntry {
    pub(super) file: String,
    pub(super) records: usize,
    pub(super) bytes: u64,
    pub(super) sha256: String,
}

/// Size, modification time and inode of a verified file.
type Stamp = (u64, u128, u64);

impl Manifest {
    pub(super) fn new(dir: &DatasetDir, segments: Vec<SegmentEntry>) -> Self {
        let (id, version) = (dir.id.clone(), dir.version.clone());
        Self { format: FORMAT, id, version, split: dir.split.name().into(), segments }
    }

    /// Parses a manifest and checks that it belongs to this set.
    pub(super) fn parse(dir: &DatasetDir, text: &[u8]) -> Result<Self, String> {
        let manifest: Self =
            serde_json::from_slice(text).map_err(|error| format!("{MANIFEST_FILE}: {error}"))?;
        if manifest.format != FORMAT {
            return Err(format!(
                "{MANIFEST_FILE} has format {}, expected {FORMAT}",
                manifest.format
            ));
        }
        if manifest != Self::new(dir, manifest.segments.clone()) {
            let Self { id, version, split, .. } = manifest;
            return Err(format!("{MANIFEST_FILE} is of data set {id} {version} ({split})"));
        }
        let is_plain = |file: &str| Path::new(file).file_name().is_some_and(|name| name == file);
        match manifest.segments.iter().find(|entry| !is_plain(&entry.file)) {
            Some(entry) => {
                Err(format!("{MANIFEST_FILE} has the invalid file name {:?}", entry.file))
            }
            None => Ok(manifest),
        }
    }

    /// Returns the total size of the segments.
    pub(super) fn bytes(&self) -> u64 {
        self.segments.iter().map(|entry| entry.bytes).sum()
    }

    /// Writes the manifest and syncs it to disk.
    pub(super) fn write(&self, folder: &Path) -> Result<()> {
        let path = folder.join(MANIFEST_FILE);
        let text = serde_json::to_vec_pretty(self)?;
        let written = fs::write(&path, text).and_then(|()| File::open(&path)?.sync_all());
        written.map_err(|error| io_error("write", &path, &error))
    }

    /// Verifies, on all cores, the segments that changed since their last verification. Fails if a
    /// stop request interrupts this; the next verification then continues.
    pub(super) fn check(&self, folder: &Path, stop: &StopSignal) -> Result<(), String> {
        let known: BTreeMap<String, Stamp> = fs::read(folder.join(VERIFIED_FILE))
            .ok()
            .and_then(|text| serde_json::from_slice(&text).ok())
            .unwrap_or_default();
        let mut stamps = BTreeMap::new();
        for entry in &self.segments {
            stamps.insert(entry.file.clone(), stamp(&folder.join(&entry.file))?);
        }
        let is_new = |entry: &&SegmentEntry| known.get(&entry.file) != stamps.get(&entry.file);
        let new: Vec<&SegmentEntry> = self.segments.iter().filter(is_new).collect();
        if new.is_empty() {
            return Ok(());
        }
        let checked = check_each(&new, folder, stop);
        let is_complete = checked.len() == new.len();
        stamps.retain(|file, stamp| {
            checked.contains_key(file.as_str()) || known.get(file) == Some(stamp)
        });
        if let Some(why) = checked.into_values().find_map(Result::err) {
            return Err(why);
        }
        // Ignore errors: the file only avoids another verification.
        let temporary = folder.join(format!(".{VERIFIED_FILE}-{}", std::process::id()));
        let text = serde_json::to_vec(&stamps).unwrap_or_default();
        let _ = fs::write(&temporary, text)
            .and_then(|()| fs::rename(&temporary, folder.join(VERIFIED_FILE)));
        match is_complete {
            true => Ok(()),
            false => Err("the verification was interrupted".into()),
        }
    }
}

/// Verifies segments on all cores. Returns the result of each file. After a stop request, leaves
/// the other segments out.
pub(super) fn check_each<'a>(
    segments: &[&'a SegmentEntry],
    folder: &Path,
    stop: &StopSignal,
) -> BTreeMap<&'a str, Result<(), String>> {
    let (next, checked) = (AtomicUsize::new(0), Mutex::new(BTreeMap::new()));
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..cores.min(segments.len()) {
            scope.spawn(|| {
                while !stop.is_set()
                    && let Some(entry) = segments.get(next.fetch_add(1, Ordering::Relaxed))
                {
                    let result = entry.check(folder);
                    let mut checked = checked.lock().unwrap_or_else(PoisonError::into_inner);
                    checked.insert(entry.file.as_str(), result);
                }
            });
        }
    });
    checked.into_inner().unwrap_or_else(PoisonError::into_inner)
}

impl SegmentEntry {
    /// Verifies size and hash of the file.
    fn check(&self, folder: &Path) -> Result<(), String> {
        let Self { file, bytes, sha256, .. } = self;
        let (actual, hash) =
            hash(&folder.join(file)).map_err(|error| format!("{file}: {error}"))?;
        if actual != *bytes {
            return Err(format!("{file} has {actual} bytes, but {MANIFEST_FILE} lists {bytes}"));
        }
        match hash == *sha256 {
            true => Ok(()),
            false => Err(format!("{file} has SHA-256 {hash}, but {MANIFEST_FILE} lists {sha256}")),
        }
    }
}

/// Returns `true` if a manifest has the format of another version.
pub(super) fn has_other_format(text: &[u8]) -> bool {
    #[derive(Deserialize)]
    struct Versioned {
        format: u32,
    }
    serde_json::from_slice::<Versioned>(text).is_ok_and(|found| found.format != FORMAT)
}

/// Returns size and SHA-256 of a file.
fn hash(path: &Path) -> std::io::Result<(u64, String)> {
    let mut file = File::open(path)?;
    let (mut sha256, mut buffer, mut bytes) = (Sha256::new(), vec![0; HASH_BYTES], 0);
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok((bytes, hex(&sha256.finalize()))),
            num => {
                sha256.update(&buffer[..num]);
                bytes += num as u64;
            }
        }
    }
}

fn stamp(path: &Path) -> Result<Stamp, String> {
    use std::os::unix::fs::MetadataExt as _;

    let file = path.file_name().unwrap_or_default().to_string_lossy();
    let meta = fs::metadata(path).map_err(|error| format!("{file}: {error}"))?;
    let changed = meta.modified().map_err(|error| format!("{file}: {error}"))?;
    let nanos = changed.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos();
    Ok((meta.len(), nanos, meta.ino()))
}

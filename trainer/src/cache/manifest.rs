//! What a data set is made of.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read as _;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::place::{Place, failed};
use crate::Result;

/// The version of the files.
const FORMAT: u32 = 1;
/// The file of the manifest.
pub(super) const MANIFEST: &str = "manifest.json";
/// The file that says which segments were checked, and what they were then.
pub(super) const CHECKED: &str = "checked.json";
/// Bytes that are hashed at once.
const HASH_BYTES: usize = 1 << 20;

/// A data set's parts, in order.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Manifest {
    format: u32,
    id: String,
    version: String,
    split: String,
    pub(super) segments: Vec<Entry>,
}

/// One segment.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(super) struct Entry {
    pub(super) file: String,
    pub(super) records: usize,
    pub(super) bytes: u64,
    pub(super) sha256: String,
}

/// Size, time of change and number of a file that was checked.
type Stamp = (u64, u128, u64);

impl Manifest {
    pub(super) fn new(place: &Place, segments: Vec<Entry>) -> Self {
        let (id, version) = (place.id.clone(), place.version.clone());
        Self { format: FORMAT, id, version, split: place.split.name().into(), segments }
    }

    /// The manifest in these bytes, if it is of the set.
    pub(super) fn parse(place: &Place, text: &[u8]) -> Result<Self, String> {
        let manifest: Self =
            serde_json::from_slice(text).map_err(|error| format!("{MANIFEST}: {error}"))?;
        if manifest.format != FORMAT {
            return Err(format!("{MANIFEST} has format {}, not {FORMAT}", manifest.format));
        }
        if manifest != Self::new(place, manifest.segments.clone()) {
            let Self { id, version, split, .. } = manifest;
            return Err(format!("{MANIFEST} is of data set {id} {version} ({split})"));
        }
        let is_plain = |file: &str| Path::new(file).file_name().is_some_and(|it| it == file);
        match manifest.segments.iter().find(|it| !is_plain(&it.file)) {
            Some(entry) => Err(format!("{MANIFEST} names {:?}, which is no file", entry.file)),
            None => Ok(manifest),
        }
    }

    /// All bytes of the segments.
    pub(super) fn bytes(&self) -> u64 {
        self.segments.iter().map(|it| it.bytes).sum()
    }

    /// Writes it, and brings it to the disk.
    pub(super) fn write(&self, folder: &Path) -> Result<()> {
        let path = folder.join(MANIFEST);
        let text = serde_json::to_vec_pretty(self)?;
        let written = fs::write(&path, text).and_then(|()| File::open(&path)?.sync_all());
        written.map_err(|error| failed("write", &path, &error))
    }

    /// Checks the segments that were not checked since they were written, on all cores.
    pub(super) fn check(&self, folder: &Path) -> Result<(), String> {
        let known: BTreeMap<String, Stamp> = fs::read(folder.join(CHECKED))
            .ok()
            .and_then(|text| serde_json::from_slice(&text).ok())
            .unwrap_or_default();
        let mut stamps = BTreeMap::new();
        for entry in &self.segments {
            stamps.insert(entry.file.clone(), stamp(&folder.join(&entry.file))?);
        }
        let new: Vec<&Entry> =
            self.segments.iter().filter(|it| known.get(&it.file) != stamps.get(&it.file)).collect();
        if new.is_empty() {
            return Ok(());
        }
        let (next, wrong) = (AtomicUsize::new(0), Mutex::new(BTreeMap::new()));
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        std::thread::scope(|scope| {
            for _ in 0..cores.min(new.len()) {
                scope.spawn(|| {
                    while let Some(entry) = new.get(next.fetch_add(1, Ordering::Relaxed)) {
                        if let Err(why) = entry.check(folder) {
                            let mut wrong = wrong.lock().unwrap_or_else(PoisonError::into_inner);
                            wrong.insert(&entry.file, why);
                        }
                    }
                });
            }
        });
        let wrong = wrong.into_inner().unwrap_or_else(PoisonError::into_inner);
        if let Some(why) = wrong.into_values().next() {
            return Err(why);
        }
        // It only saves time: a process that cannot write it checks again.
        let mine = folder.join(format!(".{CHECKED}-{}", std::process::id()));
        let text = serde_json::to_vec(&stamps).unwrap_or_default();
        let _ = fs::write(&mine, text).and_then(|()| fs::rename(&mine, folder.join(CHECKED)));
        Ok(())
    }
}

impl Entry {
    /// Reads the whole file.
    fn check(&self, folder: &Path) -> Result<(), String> {
        let Self { file, bytes, sha256, .. } = self;
        let (actual, hash) =
            hash(&folder.join(file)).map_err(|error| format!("{file}: {error}"))?;
        if actual != *bytes {
            return Err(format!("{file} has {actual} bytes, {MANIFEST} says {bytes}"));
        }
        match hash == *sha256 {
            true => Ok(()),
            false => Err(format!("{file} has SHA-256 {hash}, {MANIFEST} says {sha256}")),
        }
    }
}

/// Size and SHA-256 of a file.
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

/// Bytes in small letters.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn stamp(path: &Path) -> Result<Stamp, String> {
    use std::os::unix::fs::MetadataExt as _;

    let file = path.file_name().unwrap_or_default().to_string_lossy();
    let meta = fs::metadata(path).map_err(|error| format!("{file}: {error}"))?;
    let changed = meta.modified().map_err(|error| format!("{file}: {error}"))?;
    let nanos = changed.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos();
    Ok((meta.len(), nanos, meta.ino()))
}

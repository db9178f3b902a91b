//! Size limit of the cache, enforced by deleting least recently used sets.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use stoker_api::names::ENV_DATA_CACHE_BYTES;

use super::Split;
use super::manifest::{MANIFEST, Manifest};
use super::place::{GONE, Place, failed, half_of, remove};
use crate::Result;

/// Size limit of a cache, while a new set is built.
pub(super) struct Room {
    root: PathBuf,
    bytes_max: u64,
    /// The set that is being built.
    own: Place,
}

/// A set that may be deleted.
struct Other {
    used: SystemTime,
    folder: PathBuf,
    lock: PathBuf,
    bytes: u64,
}

impl Room {
    pub(super) fn new(root: &Path, bytes_max: Option<u64>, own: &Place) -> Result<Self> {
        let mut room = Self { root: root.into(), bytes_max: u64::MAX, own: own.clone() };
        room.bytes_max = match bytes_max {
            Some(bytes) => bytes,
            None => {
                let disk = rustix::fs::statvfs(root)
                    .map_err(|error| failed("measure", root, &error.into()))?;
                let free = disk.f_bavail.saturating_mul(disk.f_frsize);
                let taken: u64 = room.others().iter().map(|other| other.bytes).sum();
                (free + taken + room.building()) / 2
            }
        };
        Ok(room)
    }

    /// Checks the size of the new set against the limit.
    ///
    /// # Errors
    ///
    /// Fails if the set alone exceeds the limit.
    pub(super) fn admit(&self, bytes: u64) -> Result<()> {
        if bytes > self.bytes_max && bytes > super::build::SEGMENT_BYTES {
            let text = format!(
                "{} exceeds the cache limit ({} bytes); raise {ENV_DATA_CACHE_BYTES} or check for \
                 an endless iterator",
                self.own, self.bytes_max
            );
            return Err(text.into());
        }
        Ok(())
    }

    /// Deletes other sets until the new set can have this many bytes, at most the limit.
    ///
    /// # Errors
    ///
    /// Fails if a set cannot be deleted.
    pub(super) fn make(&self, bytes: u64) -> Result<()> {
        let bytes = bytes.min(self.bytes_max);
        self.sweep();
        let mut others = self.others();
        let mut taken = self.building() + others.iter().map(|other| other.bytes).sum::<u64>();
        others.sort_by(|a, b| (a.used, &a.folder).cmp(&(b.used, &b.folder)));
        for other in others {
            if taken.saturating_add(bytes) <= self.bytes_max {
                break;
            }
            // Skip sets in use. If all are in use, the limit is exceeded.
            let Some(_lock) = Place::lock_alone(&other.lock)? else { continue };
            remove(&other.folder)?;
            taken -= other.bytes;
        }
        Ok(())
    }

    /// Deletes files that killed processes left in other sets. Ignores errors.
    fn sweep(&self) {
        for version in folders(&self.root).iter().flat_map(|id| folders(id)) {
            for folder in folders(&version) {
                let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
                if name.starts_with(GONE) {
                    let _ = fs::remove_dir_all(&folder);
                    continue;
                }
                let split = name.strip_prefix('.').and_then(|name| name.strip_suffix(".half"));
                let Some(split) = split.filter(|_| folder != self.own.half()) else { continue };
                if let Ok(Some(_lock)) = Place::lock_alone(&version.join(format!("{split}.build")))
                {
                    let _ = fs::remove_dir_all(&folder);
                }
            }
        }
    }

    /// Returns the current size of all sets that other processes are building.
    fn building(&self) -> u64 {
        let versions = folders(&self.root).into_iter().flat_map(|id| folders(&id));
        let halves = versions.flat_map(|version| {
            [Split::Training, Split::Validation].map(|split| half_of(&version, split))
        });
        let others = halves.filter(|half| *half != self.own.half());
        let files = others.flat_map(|half| fs::read_dir(half).into_iter().flatten().flatten());
        files.filter_map(|file| file.metadata().ok()).map(|meta| meta.len()).sum()
    }

    /// Returns all complete sets except the new one.
    fn others(&self) -> Vec<Other> {
        let mut others = vec![];
        for id in folders(&self.root) {
            for version in folders(&id) {
                for split in [Split::Training, Split::Validation] {
                    let folder = version.join(split.name());
                    let lock = version.join(format!("{}.use", split.name()));
                    let text = fs::read(folder.join(MANIFEST)).unwrap_or_default();
                    let manifest: Option<Manifest> = serde_json::from_slice(&text).ok();
                    let Some(manifest) = manifest.filter(|_| folder != self.own.folder()) else {
                        continue;
                    };
                    let used = fs::metadata(&lock).and_then(|meta| meta.modified());
                    let used = used.unwrap_or(SystemTime::UNIX_EPOCH);
                    others.push(Other { used, folder, lock, bytes: manifest.bytes() });
                }
            }
        }
        others
    }
}

/// Returns the subfolders of a folder.
fn folders(of: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(of).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect()
}

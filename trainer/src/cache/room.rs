//! Room for a data set: those used least recently go.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use stoker_api::names::ENV_DATA_CACHE_BYTES;

use super::Split;
use super::manifest::{MANIFEST, Manifest};
use super::place::{GONE, Place, failed, half_of, remove};
use crate::Result;

/// The bound of a cache, seen from a set that is being made.
pub(super) struct Room {
    root: PathBuf,
    bytes_max: u64,
    /// The set that is being made.
    own: Place,
}

/// A set that could go.
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
                let taken: u64 = room.others().iter().map(|it| it.bytes).sum();
                (free + taken + room.building()) / 2
            }
        };
        Ok(room)
    }

    /// Whether the new set may be so large.
    ///
    /// # Errors
    ///
    /// It alone takes more than all may.
    pub(super) fn admit(&self, bytes: u64) -> Result<()> {
        if bytes > self.bytes_max && bytes > super::build::SEGMENT_BYTES {
            let text = format!(
                "{} is larger than the cache may be, {} bytes: set {ENV_DATA_CACHE_BYTES} to more, or is it \
                 repeated without an end?",
                self.own, self.bytes_max
            );
            return Err(text.into());
        }
        Ok(())
    }

    /// Makes room for so many bytes of the new set, which may have no more than all may.
    ///
    /// # Errors
    ///
    /// What is to go cannot be removed.
    pub(super) fn make(&self, bytes: u64) -> Result<()> {
        let bytes = bytes.min(self.bytes_max);
        self.sweep();
        let mut others = self.others();
        let mut taken = self.building() + others.iter().map(|it| it.bytes).sum::<u64>();
        others.sort_by(|a, b| (a.used, &a.folder).cmp(&(b.used, &b.folder)));
        for other in others {
            if taken.saturating_add(bytes) <= self.bytes_max {
                break;
            }
            // In use: the next one goes, and where all are, the bound gives way.
            let Some(_lock) = Place::lock_alone(&other.lock)? else { continue };
            remove(&other.folder)?;
            taken -= other.bytes;
        }
        Ok(())
    }

    /// Removes what processes that were killed have left of other sets, as far as it can be.
    fn sweep(&self) {
        for version in folders(&self.root).iter().flat_map(|id| folders(id)) {
            for folder in folders(&version) {
                let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
                if name.starts_with(GONE) {
                    let _ = fs::remove_dir_all(&folder);
                    continue;
                }
                let split = name.strip_prefix('.').and_then(|it| it.strip_suffix(".half"));
                let Some(split) = split.filter(|_| folder != self.own.half()) else { continue };
                if let Ok(Some(_lock)) = Place::lock_alone(&version.join(format!("{split}.build")))
                {
                    let _ = fs::remove_dir_all(&folder);
                }
            }
        }
    }

    /// Bytes so far of all sets that other processes are making.
    fn building(&self) -> u64 {
        let versions = folders(&self.root).into_iter().flat_map(|id| folders(&id));
        let halves = versions
            .flat_map(|it| [Split::Training, Split::Validation].map(|split| half_of(&it, split)));
        let others = halves.filter(|it| *it != self.own.half());
        let files = others.flat_map(|it| fs::read_dir(it).into_iter().flatten().flatten());
        files.filter_map(|it| it.metadata().ok()).map(|it| it.len()).sum()
    }

    /// All whole sets but the own.
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
                    let used = fs::metadata(&lock).and_then(|it| it.modified());
                    let used = used.unwrap_or(SystemTime::UNIX_EPOCH);
                    others.push(Other { used, folder, lock, bytes: manifest.bytes() });
                }
            }
        }
        others
    }
}

/// The folders in a folder.
fn folders(of: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(of).into_iter().flatten().flatten();
    entries.map(|it| it.path()).filter(|it| it.is_dir()).collect()
}

//! Size limit of the cache, enforced by deleting least recently used sets.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use stoker_api::names::ENV_DATA_CACHE_BYTES;

use super::dataset_dir::{DatasetDir, REMOVED_PREFIX, io_error, is_set_name, remove};
use super::manifest::{MANIFEST_FILE, Manifest, has_other_format};
use super::partial::PartialDownload;
use crate::Result;

/// Size limit of a cache, while a new set is built.
pub(super) struct CacheQuota {
    root: PathBuf,
    bytes_max: u64,
    /// The set that is being built.
    own: DatasetDir,
}

/// A set or an interrupted download that may be deleted.
struct EvictionCandidate {
    used: SystemTime,
    folder: PathBuf,
    /// Exclusive while this process deletes the directory.
    lock: PathBuf,
    bytes: u64,
}

impl CacheQuota {
    pub(super) fn new(root: &Path, bytes_max: Option<u64>, own: &DatasetDir) -> Result<Self> {
        let mut quota = Self { root: root.into(), bytes_max: u64::MAX, own: own.clone() };
        quota.bytes_max = match bytes_max {
            Some(bytes) => bytes,
            None => {
                let disk = rustix::fs::statvfs(root)
                    .map_err(|error| io_error("measure", root, &error.into()))?;
                let free = disk.f_bavail.saturating_mul(disk.f_frsize);
                let used_bytes: u64 =
                    quota.candidates().iter().map(|candidate| candidate.bytes).sum();
                // An interrupted download of the set counts too, since the set will contain it.
                let own_bytes = files_bytes(&own.staging_dir());
                (free + used_bytes + quota.staging_bytes() + own_bytes) / 2
            }
        };
        Ok(quota)
    }

    /// Checks the size of the new set against the limit.
    ///
    /// # Errors
    ///
    /// Fails if the set alone exceeds the limit.
    pub(super) fn check_size(&self, bytes: u64) -> Result<()> {
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
    pub(super) fn evict_for(&self, bytes: u64) -> Result<()> {
        let bytes = bytes.min(self.bytes_max);
        self.delete_leftovers();
        let mut candidates = self.candidates();
        let mut used_bytes =
            self.staging_bytes() + candidates.iter().map(|candidate| candidate.bytes).sum::<u64>();
        candidates.extend(self.partial_downloads());
        candidates.sort_by(|a, b| (a.used, &a.folder).cmp(&(b.used, &b.folder)));
        for candidate in candidates {
            if used_bytes.saturating_add(bytes) <= self.bytes_max {
                break;
            }
            // Skip sets in use. If all are in use, the limit is exceeded.
            let Some(_lock) = DatasetDir::try_lock_exclusive(&candidate.lock)? else { continue };
            remove(&candidate.folder)?;
            // A partial download may have grown since it was counted.
            used_bytes = used_bytes.saturating_sub(candidate.bytes);
        }
        Ok(())
    }

    /// Deletes files that killed processes left in other sets, except interrupted downloads.
    /// Ignores errors.
    fn delete_leftovers(&self) {
        for (folder, name) in self.version_dirs() {
            if name.starts_with(REMOVED_PREFIX) {
                let _ = fs::remove_dir_all(&folder);
                continue;
            }
            let is_own = folder == self.own.staging_dir();
            let Some(set) = staged_set(&name).filter(|_| !is_own) else { continue };
            if PartialDownload::path(&folder).exists() {
                continue;
            }
            let lock = folder.with_file_name(format!("{set}.build"));
            if let Ok(Some(_lock)) = DatasetDir::try_lock_exclusive(&lock) {
                let _ = fs::remove_dir_all(&folder);
            }
        }
    }

    /// Returns the current size of all sets that other processes are building, and of interrupted
    /// downloads.
    fn staging_bytes(&self) -> u64 {
        self.staging_dirs().map(|(staging_dir, _)| files_bytes(&staging_dir)).sum()
    }

    /// Returns the staging directories of other sets, each with the lock file of its builder.
    fn staging_dirs(&self) -> impl Iterator<Item = (PathBuf, PathBuf)> {
        let dirs = self.version_dirs().filter_map(|(folder, name)| {
            let set = staged_set(&name).filter(|set| is_set_name(set))?;
            let lock = folder.with_file_name(format!("{set}.build"));
            Some((folder, lock))
        });
        dirs.filter(|(staging_dir, _)| *staging_dir != self.own.staging_dir())
    }

    /// Returns the directories of all versions of sets, with their names.
    fn version_dirs(&self) -> impl Iterator<Item = (PathBuf, String)> {
        let versions = folders(&self.root).into_iter().flat_map(|id| folders(&id));
        versions.flat_map(|version| folders(&version)).map(|folder| {
            let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
            (folder, name)
        })
    }

    /// Returns the downloads of other sets, which are interrupted if their lock is free.
    fn partial_downloads(&self) -> Vec<EvictionCandidate> {
        let dirs = self.staging_dirs().filter(|(dir, _)| PartialDownload::path(dir).exists());
        let candidates = dirs.map(|(folder, lock)| {
            // A directory changes when a segment is added.
            let used = fs::metadata(&folder).and_then(|meta| meta.modified());
            let used = used.unwrap_or(SystemTime::UNIX_EPOCH);
            let bytes = files_bytes(&folder);
            EvictionCandidate { used, folder, lock, bytes }
        });
        candidates.collect()
    }

    /// Returns all complete sets except the new one, also those in other formats.
    fn candidates(&self) -> Vec<EvictionCandidate> {
        let of_set = |(folder, name): (PathBuf, String)| {
            let text = fs::read(folder.join(MANIFEST_FILE)).ok()?;
            let bytes = match serde_json::from_slice::<Manifest>(&text) {
                Ok(manifest) => manifest.bytes(),
                Err(_) if has_other_format(&text) => files_bytes(&folder),
                Err(_) => return None,
            };
            let lock = folder.with_file_name(format!("{name}.use"));
            let used = fs::metadata(&lock).and_then(|meta| meta.modified());
            let used = used.unwrap_or(SystemTime::UNIX_EPOCH);
            Some(EvictionCandidate { used, folder, lock, bytes })
        };
        let sets = self.version_dirs().filter(|(_, name)| is_set_name(name));
        sets.filter(|(folder, _)| *folder != self.own.folder()).filter_map(of_set).collect()
    }
}

/// Returns the name of the set whose staging directory has this name.
fn staged_set(name: &str) -> Option<&str> {
    name.strip_prefix('.')?.strip_suffix(".half")
}

/// Returns the total size of the files in a directory.
fn files_bytes(folder: &Path) -> u64 {
    let files = fs::read_dir(folder).into_iter().flatten().flatten();
    files.filter_map(|file| file.metadata().ok()).map(|meta| meta.len()).sum()
}

/// Returns the subdirectories of a directory.
fn folders(of: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(of).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect()
}

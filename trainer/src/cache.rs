//! Cached data sets: one process per machine builds a set while others wait. Later trials read it
//! from disk; in a cluster, other machines download it from the bucket.
//!
//! ```text
//! ROOT/ID/VERSION/training/{manifest.json, 00000.seg, 00001.seg, ...}    complete, or absent
//!                 training.build     locked by the process that builds or downloads the set
//!                 training.upload    locked by the process that uploads the set
//!                 training.use       shared lock of readers; mtime: when the set was last opened
//!                 .training.half     staging directory during the build or download
//! ```
//!
//! `training` is the name in format 1; later formats add their number.
//!
//! `docs/data-cache.md` describes when files are verified, and
//! `docs/decisions/0021-dataset-cache.md` the reasons.

use std::fs::File;
use std::path::PathBuf;

use serde::Serialize;
use serde::de::DeserializeOwned;
use stoker_api::names::{ENV_DATA_CACHE, ENV_DATA_CACHE_BYTES};
use stoker_storage::Storage;

use crate::Result;
use crate::context::Context;
use crate::error::Infrastructure;
use crate::stop::StopSignal;

mod bucket;
mod build;
mod cached;
mod dataset;
mod dataset_dir;
mod disk_full;
mod lock;
mod manifest;
mod mapped_file;
mod partial;
mod pending;
mod quota;
mod ranks;
mod segment;

#[cfg(test)]
mod tests;

use bucket::DatasetBucket;
pub use cached::Cached;
use dataset::{CacheState, Dataset};
use dataset_dir::DatasetDir;
pub(crate) use ranks::OpenedSets;

/// Number of times a set is made again if it is damaged each time.
const ATTEMPTS_MAX: u32 = 3;

/// Purpose of the samples; each split is a separate set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// Training data.
    Training,
    /// Validation data.
    Validation,
}

impl Split {
    fn name(self) -> &'static str {
        match self {
            Self::Training => "training",
            Self::Validation => "validation",
        }
    }
}

/// A directory of cached data sets.
#[derive(Clone, Debug)]
pub struct DataCache {
    root: PathBuf,
    bytes_max: Option<u64>,
    bucket: Option<DatasetBucket>,
    /// Stop request, checked while a set is built, transferred, verified or waited for.
    stop: StopSignal,
}

impl DataCache {
    /// Creates a cache in this directory.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        let stop = StopSignal::default();
        Self { root: root.into(), bytes_max: None, bucket: None, stop }
    }

    /// Creates the default cache of this machine. The directory is `STOKER_DATA_CACHE`, or
    /// `stoker-data` in the user's cache directory. `STOKER_DATA_CACHE_BYTES` limits its size; see
    /// [`bytes_max`](Self::bytes_max).
    ///
    /// # Errors
    ///
    /// Fails if the size limit is not a number, or if neither `STOKER_DATA_CACHE` nor
    /// `XDG_CACHE_HOME` nor `HOME` is set.
    pub fn standard() -> Result<Self> {
        let of = |name| std::env::var_os(name).filter(|path| !path.is_empty()).map(PathBuf::from);
        let root = of(ENV_DATA_CACHE)
            .or_else(|| of("XDG_CACHE_HOME").map(|path| path.join("stoker-data")))
            .or_else(|| of("HOME").map(|path| path.join(".cache/stoker-data")))
            .ok_or_else(|| {
                format!(
                    "cannot locate the data cache: XDG_CACHE_HOME and HOME are unset; set \
                     {ENV_DATA_CACHE}"
                )
            })?;
        let cache = Self::new(root);
        match std::env::var(ENV_DATA_CACHE_BYTES).ok().filter(|text| !text.is_empty()) {
            None => Ok(cache),
            Some(text) => Ok(cache.bytes_max(text.parse().map_err(|_| {
                format!(
                    "{ENV_DATA_CACHE_BYTES} is {text:?}, but must be a number of bytes, such as \
                     50000000000"
                )
            })?)),
        }
    }

    /// Sets the maximum total size of all sets, in bytes. Least recently used sets are deleted to
    /// stay below it. By default, the limit is half of the disk's free space and the cache's
    /// current size together.
    #[must_use]
    pub fn bytes_max(self, bytes: u64) -> Self {
        Self { bytes_max: Some(bytes), ..self }
    }

    /// Also stores sets in a bucket.
    fn with_bucket(self, bucket: Option<DatasetBucket>) -> Self {
        Self { bucket, ..self }
    }

    /// Opens the set with this name. If it is neither in the cache nor in the bucket, calls
    /// `build`, in one process per machine. Blocks while another process builds the set.
    ///
    /// # Errors
    ///
    /// Fails if `build` does, if `id` or `version` is not a valid name, if the storage is
    /// unavailable, or if the disk fails or is full.
    pub fn open<T, I>(
        &self,
        id: &str,
        version: &str,
        split: Split,
        build: impl FnOnce() -> Result<I>,
    ) -> Result<Cached<T>>
    where
        T: Serialize + DeserializeOwned,
        I: IntoIterator<Item = Result<T>>,
    {
        let dir = DatasetDir::new(&self.root, id, version, split)?;
        let mut build = Some(build);
        // Keep a new set locked until it is open, so that it cannot be deleted in between.
        let mut new_set_lock = None;
        for _ in 0..ATTEMPTS_MAX {
            let reader = dir.lock_for_reading()?;
            match Dataset::open(&dir, &self.stop)? {
                CacheState::Complete(set) => {
                    dir.touch(&reader)?;
                    if let (Some(bucket), None) = (&self.bucket, &new_set_lock) {
                        bucket.resume_upload(&dir, &self.stop);
                    }
                    return Ok(Cached::new(set, dir, reader));
                }
                CacheState::Corrupt(why) => eprintln!("stoker: {dir}: {why}; building it again"),
                CacheState::Missing => {}
            }
            drop(reader);
            drop(new_set_lock.take());
            new_set_lock = self.build_or_download(&dir, &mut build)?;
        }
        Err(Infrastructure(format!(
            "{dir} was damaged or missing {ATTEMPTS_MAX} times right after it was built; check \
             the disk under {}",
            self.root.display()
        ))
        .into())
    }

    /// Downloads or builds a missing set, unless another process did so meanwhile. Returns the
    /// reader's lock of the new set.
    fn build_or_download<T, I, F>(
        &self,
        dir: &DatasetDir,
        build: &mut Option<F>,
    ) -> Result<Option<File>>
    where
        T: Serialize + DeserializeOwned,
        I: IntoIterator<Item = Result<T>>,
        F: FnOnce() -> Result<I>,
    {
        let builder = dir.lock_for_building(|| dir.check_interrupt(&self.stop))?;
        if let CacheState::Complete(_) = Dataset::open(dir, &self.stop)? {
            return Ok(None);
        }
        let quota = quota::CacheQuota::new(&self.root, self.bytes_max, dir)?;
        let mut is_corrupt = false;
        if let Some(bucket) = &self.bucket {
            match bucket.download(dir, &quota, &self.stop) {
                Ok(true) => return publish(dir).map(Some),
                Ok(false) => {}
                Err(error) if bucket::is_unusable(&error) => {
                    is_corrupt = bucket::is_corruption(&error);
                    eprintln!("stoker: cannot download {dir} from the bucket: {error}");
                }
                // The bucket may have the set, so do not build it: that may take hours.
                Err(error) => return Err(error),
            }
        }
        let Some(build) = build.take() else {
            let text = format!(
                "{dir} was just built, but is missing or damaged; check the disk under {}",
                self.root.display()
            );
            return Err(Infrastructure(text).into());
        };
        dir.prepare_staging()?;
        let built = build().and_then(|items| {
            let unless_stopped = |item| dir.check_interrupt(&self.stop).and(item);
            build::write(dir, items.into_iter().map(unless_stopped), &quota)
        });
        if let Err(error) = built {
            dir.prepare_staging()?;
            return Err(error);
        }
        let upload = |bucket: &DatasetBucket| bucket.prepare_upload(dir, is_corrupt);
        let upload = self.bucket.as_ref().map(upload).transpose()?;
        let reader = publish(dir)?;
        drop(builder);
        if let (Some(bucket), Some(lock)) = (&self.bucket, upload) {
            bucket.upload(dir, lock, &self.stop);
            // The next open continues an interrupted upload.
            dir.check_interrupt(&self.stop)?;
        }
        Ok(Some(reader))
    }
}

/// Moves the built set to its final name and marks it as just used.
fn publish(dir: &DatasetDir) -> Result<File> {
    let reader = dir.lock_for_reading()?;
    dir.touch(&reader)?;
    dir.publish().map(|()| reader)
}

impl Context {
    /// Opens a data set that `build` creates once per machine, and that later runs read from disk:
    /// the same samples in the same order. In a cluster, the bucket stores it for other machines
    /// too. Change `version` whenever `build` returns different samples.
    ///
    /// `build` must return the same samples each time, and a finite number of them. Blocks while
    /// another process builds the set.
    ///
    /// # Errors
    ///
    /// Fails if `build` does, if `id` or `version` is not a valid name, if the storage is
    /// unavailable, or if the disk fails or is full. Returns
    /// [`Interrupted`](crate::Interrupted) on preemption.
    pub fn cached<T, I>(
        &self,
        id: &str,
        version: &str,
        split: Split,
        build: impl FnOnce() -> Result<I>,
    ) -> Result<Cached<T>>
    where
        T: Serialize + DeserializeOwned,
        I: IntoIterator<Item = Result<T>>,
    {
        let cache = DataCache::standard()?.with_bucket(self.shared_bucket()?);
        let cache = DataCache { stop: self.stop.clone(), ..cache };
        // Building may take long: keep the watchdog from reporting this rank as stuck.
        let open = || cache.open(id, version, split, build);
        let cached = self.distributed().progress.while_waiting(open)?;
        let inner = &cached.inner;
        self.opened_sets.add(inner.dir.to_string(), inner.set.sha256());
        Ok(cached)
    }

    /// Returns the data sets in the experiment's bucket; `None` for a local directory, which needs
    /// no second copy.
    fn shared_bucket(&self) -> Result<Option<DatasetBucket>> {
        let config = &self.config.storage;
        let is_remote = config.url.contains("://") && !config.url.starts_with("file:");
        let Some((namespace, _)) = config.trial_path.split_once('/').filter(|_| is_remote) else {
            return Ok(None);
        };
        let storage = Storage::open(&config.url, config.endpoint.as_deref())?;
        let io = self.io();
        Ok(Some(DatasetBucket::new(
            io.runtime().clone(),
            storage,
            &format!("{namespace}/datasets"),
        )))
    }
}

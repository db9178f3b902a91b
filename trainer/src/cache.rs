//! Data sets that are made once: built by one process of a machine while others wait, kept on its disk
//! for later trials, and in a cluster in the bucket for other machines.
//!
//! ```text
//! ROOT/ID/VERSION/training/{manifest.json, 00000.seg, 00001.seg, ...}    whole, or not there
//!                 training.build     locked by whoever builds or downloads it
//!                 training.use       locked, shared, by those who read it; its time: the last opening
//!                 .training.half     what is being built
//! ```
//!
//! `docs/data-cache.md` says what is checked when, `docs/decisions/0021-dataset-cache.md` why it is so.

use std::fmt;
use std::fs::File;
use std::marker::PhantomData;
use std::path::PathBuf;
use std::sync::Arc;

use burn::tensor::Device;
use serde::Serialize;
use serde::de::DeserializeOwned;
use stoker_api::contract::ExitCode;
use stoker_api::names::{ENV_DATA_CACHE, ENV_DATA_CACHE_BYTES};
use stoker_storage::Storage;

use crate::collective::Doing;
use crate::context::Context;
use crate::data::{At, Data, Source};
use crate::error::{Infrastructure, Interrupted};
use crate::stop::StopSignal;
use crate::{Error, Result};

mod build;
mod lock;
mod manifest;
mod map;
mod place;
mod room;
mod segment;
mod set;
mod shared;

#[cfg(test)]
mod tests;

use place::Place;
use set::{Found, Set};
use shared::Shared;

/// How often a set is made that is found damaged each time.
const ATTEMPTS_MAX: u32 = 3;

/// What samples are for; each has a set of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// To train on.
    Training,
    /// To validate on.
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

/// A folder of data sets.
#[derive(Clone, Debug)]
pub struct DataCache {
    root: PathBuf,
    bytes_max: Option<u64>,
    shared: Option<Shared>,
    /// Asks to leave, where a set is made or waited for.
    stop: StopSignal,
}

impl DataCache {
    /// The cache in this folder.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        let stop = StopSignal::default();
        Self { root: root.into(), bytes_max: None, shared: None, stop }
    }

    /// That of this machine: `STOKER_DATA_CACHE`, or else `stoker-data` in the user's cache folder, of
    /// at most `STOKER_DATA_CACHE_BYTES`.
    ///
    /// # Errors
    ///
    /// A variable makes no sense, or there is no home.
    pub fn standard() -> Result<Self> {
        let of = |name| std::env::var_os(name).filter(|path| !path.is_empty()).map(PathBuf::from);
        let root = of(ENV_DATA_CACHE)
            .or_else(|| of("XDG_CACHE_HOME").map(|path| path.join("stoker-data")))
            .or_else(|| of("HOME").map(|path| path.join(".cache/stoker-data")))
            .ok_or_else(|| {
                format!("there is no home for data sets: set {ENV_DATA_CACHE} to a folder")
            })?;
        let cache = Self::new(root);
        match std::env::var(ENV_DATA_CACHE_BYTES).ok().filter(|text| !text.is_empty()) {
            None => Ok(cache),
            Some(text) => Ok(cache.bytes_max(text.parse().map_err(|_| {
                format!(
                    "{ENV_DATA_CACHE_BYTES} is {text:?}, but must be a number of bytes, such as 50000000000"
                )
            })?)),
        }
    }

    /// The most bytes that all sets may take together; those used least recently go. Without it, the
    /// cache takes no more of a disk than it leaves free.
    #[must_use]
    pub fn bytes_max(self, bytes: u64) -> Self {
        Self { bytes_max: Some(bytes), ..self }
    }

    /// Keeps sets in a bucket too, below this path.
    fn shared(self, shared: Option<Shared>) -> Self {
        Self { shared, ..self }
    }

    /// The set of this name, which `build` makes where it is nowhere: called in one process of the
    /// machine, at most.
    ///
    /// # Errors
    ///
    /// What `build` failed with; a name that is no file's; a disk that fails or is full.
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
        let place = Place::new(&self.root, id, version, split)?;
        let mut build = Some(build);
        // What was just made is held until it is opened: it is not to go before.
        let mut held = None;
        for _ in 0..ATTEMPTS_MAX {
            let reader = place.lock_for_use()?;
            match Set::find(&place)? {
                Found::Whole(set) => {
                    place.touch(&reader)?;
                    let samples = set.len();
                    let inner = Inner { set, place, _reader: reader };
                    return Ok(Cached { inner: Arc::new(inner), samples, items: PhantomData });
                }
                Found::Damaged(why) => eprintln!("stoker: {place}: {why}; it is made anew"),
                Found::Nothing => {}
            }
            drop(reader);
            drop(held.take());
            held = self.make(&place, &mut build)?;
        }
        Err(Infrastructure(format!(
            "{place} was made and then found damaged or gone {ATTEMPTS_MAX} times: look at the disk \
             under {}",
            self.root.display()
        ))
        .into())
    }

    fn leave_if_asked(&self, place: &Place) -> Result<()> {
        match self.stop.is_set() {
            true => {
                let why = format!("asked to leave before {place} was there");
                Err(Interrupted { code: ExitCode::Preempted, fenced: false, why }.into())
            }
            false => Ok(()),
        }
    }

    /// Downloads or builds what is not there, unless another process has while this one waited. Gives
    /// the lock of one who uses what was made.
    fn make<T, I, F>(&self, place: &Place, build: &mut Option<F>) -> Result<Option<File>>
    where
        T: Serialize + DeserializeOwned,
        I: IntoIterator<Item = Result<T>>,
        F: FnOnce() -> Result<I>,
    {
        let builder = place.lock_to_build(|| self.leave_if_asked(place))?;
        if let Found::Whole(_) = Set::find(place)? {
            return Ok(None);
        }
        place.clear()?;
        let room = room::Room::new(&self.root, self.bytes_max, place)?;
        let mut is_damaged = false;
        if let Some(shared) = &self.shared {
            match shared.download(place, &room) {
                Ok(true) => return publish(place).map(Some),
                Ok(false) => {}
                Err(error) => {
                    is_damaged = shared::is_damage(&error);
                    eprintln!("stoker: {place} is not taken from the bucket: {error}");
                }
            }
        }
        let Some(build) = build.take() else {
            let text = format!(
                "{place} was built a moment ago, and is gone or damaged: look at the disk under {}",
                self.root.display()
            );
            return Err(Infrastructure(text).into());
        };
        let built = build().and_then(|items| {
            let asked = |item| self.leave_if_asked(place).and(item);
            build::write(place, items.into_iter().map(asked), &room)
        });
        if let Err(error) = built {
            place.clear()?;
            return Err(error);
        }
        let reader = publish(place)?;
        drop(builder);
        if let Some(shared) = &self.shared
            && let Err(error) = shared.upload(place, is_damaged)
        {
            eprintln!("stoker: {place} is not in the bucket, other machines build it: {error}");
        }
        Ok(Some(reader))
    }
}

/// Gives a set its name, as the one that was used last.
fn publish(place: &Place) -> Result<File> {
    let reader = place.lock_for_use()?;
    place.touch(&reader)?;
    place.publish().map(|()| reader)
}

impl Context {
    /// A data set that is built once for each machine, by `build`, and read from its disk thereafter:
    /// the same samples in the same order. Another `version` is another set. In a cluster it is kept in
    /// the bucket too, where other machines find it.
    ///
    /// `build` must give the same samples each time, and must end.
    ///
    /// # Errors
    ///
    /// What `build` failed with; a name that is no file's; a disk that fails or is full;
    /// [`Interrupted`] where it was asked to leave meanwhile.
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
        let cache = DataCache::standard()?.shared(self.shared_sets()?);
        let cache = DataCache { stop: self.stop.clone(), ..cache };
        // Building takes as long as it takes: nobody is to take this rank for stuck.
        self.distributed().tick(Doing::Wait);
        let cached = cache.open(id, version, split, build);
        self.distributed().tick(Doing::Train);
        cached
    }

    /// Where the experiment's bucket has data sets; a folder is of this machine already.
    fn shared_sets(&self) -> Result<Option<Shared>> {
        let config = &self.config.storage;
        let is_remote = config.url.contains("://") && !config.url.starts_with("file:");
        let Some((namespace, _)) = config.trial_path.split_once('/').filter(|_| is_remote) else {
            return Ok(None);
        };
        let storage = Storage::open(&config.url, config.endpoint.as_deref())?;
        let outlet = self.outlet();
        Ok(Some(Shared::new(outlet.runtime().clone(), storage, &format!("{namespace}/datasets"))))
    }
}

/// A data set on this machine's disk. It stays there for as long as this lives.
pub struct Cached<T> {
    inner: Arc<Inner>,
    samples: usize,
    items: PhantomData<fn() -> T>,
}

struct Inner {
    set: Set,
    place: Place,
    _reader: File,
}

impl<T> Clone for Cached<T> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), ..*self }
    }
}

impl<T> fmt::Debug for Cached<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cached")
            .field("set", &self.inner.place.to_string())
            .field("samples", &self.samples)
            .finish_non_exhaustive()
    }
}

impl<T: DeserializeOwned> Cached<T> {
    /// The number of samples, at least 1.
    #[expect(clippy::len_without_is_empty, reason = "there are no empty sets")]
    pub fn len(&self) -> usize {
        self.samples
    }

    /// The sample at this place, from 0. Any number of threads may read at once.
    ///
    /// # Errors
    ///
    /// There is none; its bytes were changed since they were written, which is checked each time; it is
    /// of another type.
    pub fn get(&self, sample: usize) -> Result<T> {
        let Inner { set, place, .. } = &*self.inner;
        if sample >= self.samples {
            return Err(format!("{place} has no sample {sample}, but {}", self.samples).into());
        }
        let bytes = set.record(sample).map_err(|why| -> Error {
            place.distrust();
            let text = format!("{place}: {why}; it is made anew when it is opened next");
            Infrastructure(text).into()
        })?;
        Ok(build::decode(bytes).map_err(|why| {
            format!(
                "{place}: sample {sample} is of another type than the program's: {why}; give what \
                 is stored now another version"
            )
        })?)
    }
}

impl<T: DeserializeOwned + Send + 'static> Cached<T> {
    /// The samples as data, with what makes a batch of them.
    pub fn data<B: Send + 'static>(
        &self,
        batcher: impl Fn(Vec<T>, &Device) -> B + Send + Sync + 'static,
    ) -> Data<B> {
        Data::new(Items { set: self.clone(), batcher })
    }
}

struct Items<T, F> {
    set: Cached<T>,
    batcher: F,
}

impl<T: DeserializeOwned, B, F: Fn(Vec<T>, &Device) -> B + Send + Sync> Source<B> for Items<T, F> {
    fn samples(&self) -> usize {
        self.set.len()
    }

    fn batch(&self, samples: &[usize], at: &At) -> Result<B> {
        let items =
            samples.iter().map(|sample| self.set.get(*sample)).collect::<Result<Vec<_>>>()?;
        Ok((self.batcher)(items, at.device))
    }
}

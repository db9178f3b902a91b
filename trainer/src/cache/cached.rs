//! Samples of an open data set.

use std::fmt;
use std::fs::File;
use std::marker::PhantomData;
use std::sync::Arc;

use burn::tensor::Device;
use serde::de::DeserializeOwned;

use super::build;
use super::dataset::Dataset;
use super::dataset_dir::DatasetDir;
use crate::data::{BatchContext, Data, Source};
use crate::error::Infrastructure;
use crate::{Error, Result};

/// A data set on the local disk. It is not deleted while this value or a clone of it exists.
pub struct Cached<T> {
    pub(super) inner: Arc<Inner>,
    samples: usize,
    items: PhantomData<fn() -> T>,
}

pub(super) struct Inner {
    pub(super) set: Dataset,
    pub(super) dir: DatasetDir,
    _reader: File,
}

impl<T> Cached<T> {
    /// Wraps an open set. `reader` is the lock that protects it from deletion.
    pub(super) fn new(set: Dataset, dir: DatasetDir, reader: File) -> Self {
        let samples = set.len();
        let inner = Inner { set, dir, _reader: reader };
        Self { inner: Arc::new(inner), samples, items: PhantomData }
    }
}

impl<T> Clone for Cached<T> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), ..*self }
    }
}

impl<T> fmt::Debug for Cached<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cached")
            .field("set", &self.inner.dir.to_string())
            .field("samples", &self.samples)
            .finish_non_exhaustive()
    }
}

impl<T: DeserializeOwned> Cached<T> {
    /// Returns the number of samples, at least 1.
    #[expect(clippy::len_without_is_empty, reason = "there are no empty sets")]
    pub fn len(&self) -> usize {
        self.samples
    }

    /// Returns the sample at this index, from 0. Any number of threads may read concurrently.
    ///
    /// # Errors
    ///
    /// Fails if the index is out of range, if the checksum of the sample's bytes is wrong, or if
    /// the stored sample has another type.
    pub fn get(&self, sample: usize) -> Result<T> {
        let Inner { set, dir, .. } = &*self.inner;
        if sample >= self.samples {
            let num = self.samples;
            return Err(format!("sample {sample} not found: {dir} has {num} samples").into());
        }
        let bytes = set.record(sample).map_err(|why| -> Error {
            dir.invalidate_check();
            let text = format!("{dir}: {why}; the next `open` builds the set again");
            Infrastructure(text).into()
        })?;
        Ok(build::decode(bytes).map_err(|why| {
            format!(
                "{dir}: the type of sample {sample} differs from the program's: {why}; change \
                 the version of the set"
            )
        })?)
    }
}

impl<T: DeserializeOwned + Send + 'static> Cached<T> {
    /// Creates [`Data`] from the samples and a batcher.
    pub fn data<B: Send + 'static>(
        &self,
        batcher: impl Fn(Vec<T>, &Device) -> B + Send + Sync + 'static,
    ) -> Data<B> {
        Data::new(CachedSource { set: self.clone(), batcher })
    }
}

struct CachedSource<T, F> {
    set: Cached<T>,
    batcher: F,
}

impl<T: DeserializeOwned, B, F: Fn(Vec<T>, &Device) -> B + Send + Sync> Source<B>
    for CachedSource<T, F>
{
    fn samples(&self) -> usize {
        self.set.len()
    }

    fn batch(&self, samples: &[usize], at: &BatchContext) -> Result<B> {
        let items =
            samples.iter().map(|sample| self.set.get(*sample)).collect::<Result<Vec<_>>>()?;
        Ok((self.batcher)(items, at.device))
    }
}

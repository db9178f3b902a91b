//! Transfer of large objects in parts, several at a time.

use std::collections::BTreeMap;
use std::error::Error;
use std::sync::atomic::{AtomicU32, Ordering};

use bytes::Bytes;
use futures::{Stream, StreamExt, TryStreamExt, stream};
use object_store::multipart::{MultipartStore, PartId};
use object_store::path::Path;
use object_store::{MultipartId, ObjectStoreExt, PutPayload};
use tokio::time::Instant;

use super::Storage;
use crate::buffer::Buffer;
use crate::error::{Subject, classify, has_code};
use crate::{StorageError, open};

/// Size of a part: at least 5 MiB, as S3 requires, and small enough to retry.
const PART_BYTES: usize = 8 << 20;
/// Maximum number of parts of an object; S3 allows 10,000.
const PARTS_MAX: usize = 9_000;
/// Maximum number of concurrent transfers of one object's parts. `Transfers` may permit fewer.
const PARTS_IN_FLIGHT: usize = 8;

impl Storage {
    /// Uploads an object in parts.
    pub(super) async fn put_parts(
        &self,
        store: &dyn MultipartStore,
        path: &str,
        location: &Path,
        bytes: &[Bytes],
    ) -> Result<(), StorageError> {
        let len: usize = bytes.iter().map(Bytes::len).sum();
        let payloads = payloads(bytes, part_bytes(len)).into_iter();
        self.put_stream(store, path, location, stream::iter(payloads.map(Ok))).await
    }

    /// Uploads an object that consists of the `payloads`, one part each.
    ///
    /// # Errors
    ///
    /// Returns the first error of `payloads` or of the storage.
    pub(super) async fn put_stream<E: From<StorageError>>(
        &self,
        store: &dyn MultipartStore,
        path: &str,
        location: &Path,
        payloads: impl Stream<Item = Result<PutPayload, E>>,
    ) -> Result<(), E> {
        let id = self.retry_write(path, || store.create_multipart(location)).await?;
        let put = |(idx, payload): (usize, Result<PutPayload, E>)| {
            let id = &id;
            async move {
                let payload = payload?;
                let len = payload.content_length() as u64;
                let put = || store.put_part(location, id, idx, payload.clone());
                let part = self.transfer(path, len, put).await?;
                Ok::<_, E>((idx, (part, len)))
            }
        };
        // Unordered, so that an error does not wait for earlier parts.
        let parts = payloads.enumerate().map(put).buffer_unordered(PARTS_IN_FLIGHT);
        let stored: Result<BTreeMap<usize, (PartId, u64)>, E> = parts.try_collect().await;
        let done = match stored {
            Ok(parts) => {
                let (parts, lens): (Vec<PartId>, Vec<u64>) = parts.into_values().unzip();
                let len = lens.iter().sum();
                self.complete_parts(store, path, location, &id, parts, len).await.map_err(E::from)
            }
            Err(error) => Err(error),
        };
        let Err(error) = done else { return Ok(()) };
        // Abandoned parts cost money on some stores. Ignore the error: there is no other remedy.
        let _ = store.abort_multipart(location, &id).await;
        Err(error)
    }

    /// Completes an upload of `len` bytes.
    async fn complete_parts(
        &self,
        store: &dyn MultipartStore,
        path: &str,
        location: &Path,
        id: &MultipartId,
        parts: Vec<PartId>,
        len: u64,
    ) -> Result<(), StorageError> {
        let (num_requests, start) = (AtomicU32::new(0), Instant::now());
        let complete = || {
            num_requests.fetch_add(1, Ordering::Relaxed);
            store.complete_multipart(location, id, parts.clone())
        };
        let Err(error) = self.retry_write(path, complete).await else { return Ok(()) };
        // The store retries within a request, but not earlier.
        let is_repeated =
            num_requests.into_inner() > 1 || start.elapsed() >= open::RETRY_WAIT_FIRST;
        // The response to the first request may have been lost. Most stores then forget the upload
        // or its parts. Readers verify the object's hash.
        if is_repeated && is_unknown_upload(&error) && self.size(path).await == Ok(Some(len)) {
            return Ok(());
        }
        Err(error)
    }

    /// Reads the first `len` bytes of an object in parts, in order. At most 8 parts of 8 MiB are in
    /// memory at a time.
    pub fn get_in_order(
        &self,
        path: &str,
        len: u64,
    ) -> impl Stream<Item = Result<Bytes, StorageError>> {
        let get = move |start: u64| {
            let end = len.min(start + PART_BYTES as u64);
            async move { self.get_range(path, start..end).await }
        };
        stream::iter((0..len).step_by(PART_BYTES).map(get)).buffered(PARTS_IN_FLIGHT)
    }

    /// Downloads a byte range of an object in parts.
    pub(super) async fn get_parts(
        &self,
        path: &str,
        location: &Path,
        range: std::ops::Range<u64>,
    ) -> Result<Bytes, StorageError> {
        let (first, end) = (range.start, range.end);
        let get = |start: u64| async move {
            let range = start..end.min(start + PART_BYTES as u64);
            let get = || self.store.get_range(location, range.clone());
            let part = self.transfer(path, range.end - range.start, get).await?;
            Ok::<_, StorageError>((start, part))
        };
        let failed = |source: Box<dyn Error + Send + Sync>| {
            let source = object_store::Error::Generic { store: "parts", source };
            classify(Subject { url: &self.url, path }, 1, &source).0
        };
        let num_bytes = usize::try_from(end - first).map_err(|error| failed(error.into()))?;
        let mut buffer = Buffer::zeroed(num_bytes).map_err(|error| failed(error.into()))?;
        let parts = stream::iter(range.step_by(PART_BYTES).map(get));
        let mut parts = parts.buffer_unordered(PARTS_IN_FLIGHT);
        let mut filled = 0;
        while let Some((start, part)) = parts.try_next().await? {
            let rest = &mut buffer.bytes_mut()[(start - first) as usize..];
            let target = rest.get_mut(..part.len());
            let target = target.ok_or_else(|| failed("a part is too long".into()))?;
            target.copy_from_slice(&part);
            filled += part.len();
        }
        // Parts are short if the object shrank meanwhile.
        Ok(buffer.freeze().slice(..filled))
    }
}

/// Returns the size of the parts of an object with `len` bytes.
pub(super) fn part_bytes(len: usize) -> usize {
    PART_BYTES.max(len.div_ceil(PARTS_MAX))
}

/// Returns `true` if a store does not know an upload, or its parts on Azure.
fn is_unknown_upload(error: &StorageError) -> bool {
    match error {
        StorageError::NotFound { .. } => true,
        StorageError::Unavailable { reason, .. } => has_code(reason, "InvalidBlockList"),
        _ => false,
    }
}

/// Splits the concatenated `bytes` into payloads of `len` bytes, without copying. The last one may
/// be shorter.
fn payloads(bytes: &[Bytes], len: usize) -> Vec<PutPayload> {
    let (mut payloads, mut payload, mut free) = (vec![], vec![], len);
    for piece in bytes {
        let mut rest = piece.clone();
        while !rest.is_empty() {
            let slice = rest.split_to(rest.len().min(free));
            free -= slice.len();
            payload.push(slice);
            if free == 0 {
                payloads.push(payload.drain(..).collect());
                free = len;
            }
        }
    }
    if !payload.is_empty() {
        payloads.push(payload.into_iter().collect());
    }
    payloads
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn payloads_cover_all_pieces_in_order() {
        let check = |pieces: &[&'static str], len: usize, expected: &[&str]| {
            let pieces: Vec<Bytes> = pieces.iter().map(|piece| Bytes::from(*piece)).collect();
            let payloads: Vec<Bytes> =
                payloads(&pieces, len).into_iter().map(Bytes::from).collect();
            assert_eq!(payloads, expected);
        };
        check(&[], 3, &[]);
        check(&["abcdefg"], 3, &["abc", "def", "g"]);
        check(&["a", "", "bcdef", "g"], 3, &["abc", "def", "g"]);
        check(&["ab", "cdef"], 3, &["abc", "def"]);
    }
}

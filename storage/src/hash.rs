//! SHA-256 in hex, the format of manifests, and hashes of large files in chunks.
//!
//! A file of at most [`CHUNK_BYTES`] has its plain SHA-256. A larger file is hashed in chunks by
//! several threads. Its hash is the SHA-256 of the concatenated SHA-256 of its chunks, and its
//! entry in the manifest has the size of a chunk (`chunkBytes`).

use std::fmt::Write as _;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use sha2::{Digest, Sha256};
use stoker_api::contract::FileEntry;

/// Size of a chunk of new files, in bytes.
pub const CHUNK_BYTES: u64 = 16 << 20;

/// Smallest size of a chunk that is read. Smaller chunks would need much memory for their hashes.
const CHUNK_BYTES_MIN: u64 = 4 << 10;

/// Maximum number of threads that hash one file. More than these exceed the memory bandwidth.
const THREADS_MAX: usize = 8;

/// Number of bytes that are read before they are hashed, while they are in the CPU's cache.
const BLOCK_BYTES: usize = 256 << 10;

/// SHA-256 of a chunk.
type ChunkHash = [u8; 32];

/// Returns the SHA-256 of `bytes` as 64 lowercase hex digits.
///
/// # Examples
///
/// ```
/// let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
/// assert_eq!(stoker_storage::hash::sha256_hex(b""), empty);
/// ```
pub fn sha256_hex(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// Returns the manifest's entry of a new file, whose contents are the concatenated `parts`. Blocks
/// while several threads hash a large file.
pub fn file_entry<B: AsRef<[u8]> + Sync>(parts: &[B]) -> FileEntry {
    let bytes = parts.iter().map(|part| part.as_ref().len() as u64).sum();
    let chunk_bytes = (bytes > CHUNK_BYTES).then_some(CHUNK_BYTES);
    FileEntry { bytes, sha256: file_hash(parts, chunk_bytes), chunk_bytes }
}

/// Returns the hash of a file as in a manifest entry with this `chunk_bytes`. The contents are the
/// concatenated `parts`.
pub fn file_hash<B: AsRef<[u8]> + Sync>(parts: &[B], chunk_bytes: Option<u64>) -> String {
    let Some(chunk_bytes) = chunk_bytes else {
        let mut hasher = Sha256::new();
        parts.iter().for_each(|part| hasher.update(part));
        return hex(&hasher.finalize());
    };
    let hashes = hash_chunks(chunks_of(parts, chunk_bytes), |slices| {
        let mut hasher = Sha256::new();
        slices.iter().for_each(|slice| hasher.update(slice));
        Ok(hasher.finalize().into())
    });
    // Hashing bytes in memory cannot fail.
    hashes.map(|hashes| sha256_hex(hashes.as_flattened())).unwrap_or_default()
}

/// Reads a file and returns its contents and hash, as in a manifest entry with this `chunk_bytes`.
/// Several threads read and hash the chunks.
///
/// # Errors
///
/// The file cannot be read, or changes its length meanwhile.
pub fn read_file(file: &File, chunk_bytes: Option<u64>) -> io::Result<(Vec<u8>, String)> {
    let len = usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?;
    let mut bytes = vec![0; len];
    let chunk_len = chunk_len(chunk_bytes.unwrap_or(len as u64));
    let chunks = bytes.chunks_mut(chunk_len).enumerate().collect();
    let hashes = hash_chunks(chunks, |(idx, chunk): (usize, &mut [u8])| {
        let mut hasher = Sha256::new();
        let mut at = (idx * chunk_len) as u64;
        for block in chunk.chunks_mut(BLOCK_BYTES) {
            file.read_exact_at(block, at)?;
            hasher.update(&*block);
            at += block.len() as u64;
        }
        Ok(hasher.finalize().into())
    })?;
    let hash = match (chunk_bytes, hashes.first()) {
        (Some(_), _) => sha256_hex(hashes.as_flattened()),
        (None, Some(hash)) => hex(hash),
        (None, None) => sha256_hex(b""),
    };
    Ok((bytes, hash))
}

/// Returns the length of a chunk in memory.
fn chunk_len(chunk_bytes: u64) -> usize {
    usize::try_from(chunk_bytes.max(CHUNK_BYTES_MIN)).unwrap_or(usize::MAX)
}

/// Returns the slices of each chunk.
fn chunks_of<B: AsRef<[u8]>>(parts: &[B], chunk_bytes: u64) -> Vec<Vec<&[u8]>> {
    let chunk_len = chunk_len(chunk_bytes);
    let (mut chunks, mut chunk, mut free) = (vec![], vec![], chunk_len);
    for part in parts {
        let mut rest = part.as_ref();
        while !rest.is_empty() {
            let (slice, after) = rest.split_at(rest.len().min(free));
            chunk.push(slice);
            (rest, free) = (after, free - slice.len());
            if free == 0 {
                chunks.push(std::mem::take(&mut chunk));
                free = chunk_len;
            }
        }
    }
    if !chunk.is_empty() {
        chunks.push(chunk);
    }
    chunks
}

/// Calls `hash` for each chunk on several threads, and returns the hashes in the order of `chunks`.
///
/// # Errors
///
/// Returns the first error of `hash`.
fn hash_chunks<T: Send>(
    chunks: Vec<T>,
    hash: impl Fn(T) -> io::Result<ChunkHash> + Sync,
) -> io::Result<Vec<ChunkHash>> {
    let num_threads = thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX);
    let num_threads = num_threads.min(chunks.len());
    let done = Mutex::new((vec![[0; 32]; chunks.len()], None));
    let queue = Mutex::new(chunks.into_iter().enumerate());
    let work = || {
        loop {
            let next = lock(&queue).next();
            let Some((idx, chunk)) = next else { return };
            let outcome = hash(chunk);
            let mut done = lock(&done);
            match outcome {
                Ok(hash) => done.0[idx] = hash,
                Err(error) => done.1 = done.1.take().or(Some(error)),
            }
            if done.1.is_some() {
                return;
            }
        }
    };
    thread::scope(|scope| {
        for _ in 1..num_threads {
            let thread = thread::Builder::new().name("stoker-hash".to_owned());
            // Ignore the error: without this thread, the others hash its chunks.
            let _ = thread.spawn_scoped(scope, work);
        }
        work();
    });
    let (hashes, error) = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    error.map_or(Ok(hashes), Err)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn hex(hash: &[u8]) -> String {
    hash.iter().fold(String::with_capacity(64), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}

#[cfg(test)]
mod tests {
    use std::io::{Seek as _, Write as _};

    use proptest::prelude::*;

    use super::*;

    fn file_of(bytes: &[u8]) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        file.rewind().unwrap();
        file
    }

    /// Hashes by the definition, on one thread.
    fn expected(bytes: &[u8], chunk_bytes: Option<u64>) -> String {
        let Some(chunk_bytes) = chunk_bytes else { return sha256_hex(bytes) };
        let chunks = bytes.chunks(usize::try_from(chunk_bytes).unwrap());
        sha256_hex(&chunks.flat_map(|chunk| Sha256::digest(chunk).to_vec()).collect::<Vec<_>>())
    }

    #[test]
    fn entries_have_chunks_above_the_chunk_size() {
        let bytes: Vec<u8> = (0..(CHUNK_BYTES as usize + 5)).map(|idx| (idx % 251) as u8).collect();
        let check = |len: usize, chunk_bytes: Option<u64>| {
            let entry = file_entry(&[&bytes[..len]]);
            assert_eq!((entry.bytes, entry.chunk_bytes), (len as u64, chunk_bytes));
            assert_eq!(entry.sha256, expected(&bytes[..len], chunk_bytes), "{len} bytes");
            let (read, hash) = read_file(&file_of(&bytes[..len]), chunk_bytes).unwrap();
            assert!(read == bytes[..len] && hash == entry.sha256, "{len} bytes");
        };
        check(0, None);
        check(3, None);
        check(CHUNK_BYTES as usize, None);
        check(CHUNK_BYTES as usize + 1, Some(CHUNK_BYTES));
        check(CHUNK_BYTES as usize + 5, Some(CHUNK_BYTES));
    }

    #[test]
    fn tiny_chunks_of_a_manifest_are_not_used() {
        let bytes = vec![7; 3 * CHUNK_BYTES_MIN as usize];
        assert_eq!(
            file_hash(&[&bytes], Some(0)),
            expected(&bytes, Some(CHUNK_BYTES_MIN)),
            "a chunk of no bytes"
        );
        assert_eq!(read_file(&file_of(&bytes), Some(1)).unwrap().1, file_hash(&[&bytes], Some(0)));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

        /// The hash depends on neither the parts nor the threads, and covers every bit and the
        /// length.
        #[test]
        fn hashes_detect_flipped_bits_and_truncation(
            bytes in proptest::collection::vec(any::<u8>(), 1..40_000),
            cuts in proptest::collection::vec(any::<proptest::sample::Index>(), 0..6),
            chunk_bytes in prop_oneof![
                Just(None), (CHUNK_BYTES_MIN..12_000).prop_map(Some), Just(Some(CHUNK_BYTES))
            ],
            bit in any::<proptest::sample::Index>(),
            end in any::<proptest::sample::Index>(),
        ) {
            let hash = expected(&bytes, chunk_bytes);
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len())).collect();
            cuts.extend([0, bytes.len()]);
            cuts.sort_unstable();
            let parts: Vec<&[u8]> = cuts.windows(2).map(|cut| &bytes[cut[0]..cut[1]]).collect();
            prop_assert_eq!(&file_hash(&parts, chunk_bytes), &hash);
            prop_assert_eq!(&read_file(&file_of(&bytes), chunk_bytes).unwrap().1, &hash);
            let mut flipped = bytes.clone();
            let bit = bit.index(8 * bytes.len());
            flipped[bit / 8] ^= 1 << (bit % 8);
            prop_assert_ne!(&file_hash(&[&flipped], chunk_bytes), &hash);
            prop_assert_ne!(&read_file(&file_of(&flipped), chunk_bytes).unwrap().1, &hash);
            let shorter = &bytes[..end.index(bytes.len())];
            prop_assert_ne!(&read_file(&file_of(shorter), chunk_bytes).unwrap().1, &hash);
        }
    }
}

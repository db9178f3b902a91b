//! Hashes of files in manifests.
//!
//! A file of at most [`LARGE_BYTES`] is hashed with SHA-256, a larger one with BLAKE3. BLAKE3 is a
//! tree: several threads hash pieces of a file, and the hashes of the pieces give that of the file.
//! Older versions of Stoker hashed large files with SHA-256, in chunks that the manifest names.

use std::fmt::{self, Write as _};
use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use blake3::hazmat::{HasherExt as _, Mode, merge_subtrees_non_root, merge_subtrees_root};
use bytes::Bytes;
use sha2::{Digest as _, Sha256};
use stoker_api::contract::{FileEntry, FileHash, HashAlgorithm};

use crate::buffer::Buffer;

/// Size in bytes above which a file is hashed with BLAKE3, and of the pieces that threads hash. A
/// power of two, so that a piece is a subtree of BLAKE3's tree.
pub const LARGE_BYTES: u64 = 16 << 20;

/// Smallest size of a chunk of SHA-256 that is read. Smaller chunks would need much memory for
/// their hashes.
const CHUNK_BYTES_MIN: u64 = 4 << 10;

/// Maximum number of threads that hash one file. More than these exceed the memory bandwidth.
const THREADS_MAX: usize = 8;

/// Number of bytes that are read before they are hashed, while they are in the CPU's cache.
const BLOCK_BYTES: usize = 256 << 10;

/// Hash of a piece.
type PieceHash = [u8; 32];

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

/// Returns `bytes` as lowercase hex digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}

/// Returns the manifest's entry of a new file, whose contents are the concatenated `parts`. Blocks
/// while several threads hash a large file.
pub fn file_entry<B: AsRef<[u8]> + Sync>(parts: &[B]) -> FileEntry {
    let bytes = parts.iter().map(|part| part.as_ref().len() as u64).sum();
    FileEntry { bytes, hash: file_hash(parts, algorithm_of(bytes)) }
}

/// Returns the algorithm for a new file of this length.
pub(crate) fn algorithm_of(bytes: u64) -> HashAlgorithm {
    if bytes > LARGE_BYTES { HashAlgorithm::Blake3 } else { HashAlgorithm::Sha256 }
}

/// Returns the manifest's entry of a file on this machine. Reads it in blocks.
///
/// # Errors
///
/// The file cannot be read.
pub fn entry_of_file(path: &Path) -> io::Result<FileEntry> {
    let mut file = File::open(path)?;
    let mut hasher = FileHasher::new(algorithm_of(file.metadata()?.len()));
    let (mut block, mut bytes) = (vec![0; BLOCK_BYTES], 0);
    loop {
        match file.read(&mut block) {
            Ok(0) => return Ok(FileEntry { bytes, hash: hasher.finish() }),
            Ok(num) => {
                hasher.update(&block[..num]);
                bytes += num as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Returns the hash of a file, whose contents are the concatenated `parts`.
pub fn file_hash<B: AsRef<[u8]> + Sync>(parts: &[B], algorithm: HashAlgorithm) -> FileHash {
    let pieces = pieces_of(parts, piece_len(algorithm));
    let num = pieces.len();
    let hashes = hash_pieces(pieces, |idx, slices| {
        let mut hasher = PieceHasher::new(algorithm, idx);
        slices.iter().for_each(|slice| hasher.update(slice));
        Ok(hasher.finish(num))
    });
    // Hashing bytes in memory cannot fail.
    combine(algorithm, &hashes.unwrap_or_default())
}

/// Reads a file and returns its contents and hash. Several threads read and hash its pieces.
///
/// # Errors
///
/// The file cannot be read, or changes its length meanwhile.
pub fn read_file(file: &File, algorithm: HashAlgorithm) -> io::Result<(Bytes, FileHash)> {
    read_file_with(file, algorithm, &|| ())
}

/// Same as [`read_file`]. Calls `on_piece` after each piece that was read. Pieces have
/// [`LARGE_BYTES`], unless an older version of Stoker chose another size.
///
/// # Errors
///
/// Same as [`read_file`].
pub fn read_file_with(
    file: &File,
    algorithm: HashAlgorithm,
    on_piece: &(dyn Fn() + Sync),
) -> io::Result<(Bytes, FileHash)> {
    let len = usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?;
    let mut buffer = Buffer::zeroed(len)?;
    let piece_len = piece_len(algorithm);
    let pieces: Vec<&mut [u8]> = buffer.bytes_mut().chunks_mut(piece_len).collect();
    let num = pieces.len();
    let hashes = hash_pieces(pieces, |idx, piece| {
        let mut hasher = PieceHasher::new(algorithm, idx);
        let mut at = idx as u64 * piece_len as u64;
        for block in piece.chunks_mut(BLOCK_BYTES) {
            file.read_exact_at(block, at)?;
            hasher.update(block);
            at += block.len() as u64;
        }
        on_piece();
        Ok(hasher.finish(num))
    })?;
    let hash = combine(algorithm, &hashes);
    Ok((buffer.freeze(), hash))
}

/// Hasher of a file whose contents arrive in order. Needs no more memory for larger files.
///
/// # Examples
///
/// ```
/// use stoker_api::contract::HashAlgorithm;
/// use stoker_storage::hash::{FileHasher, file_hash};
///
/// let mut hasher = FileHasher::new(HashAlgorithm::Blake3);
/// hasher.update(b"te");
/// hasher.update(b"xt");
/// assert_eq!(hasher.finish(), file_hash(&["text"], HashAlgorithm::Blake3));
/// ```
pub struct FileHasher {
    algorithm: HashAlgorithm,
    /// Hashes of the complete chunks.
    hashes: Vec<PieceHash>,
    chunk: PieceHasher,
    /// Number of bytes until the chunk is complete.
    free: usize,
}

impl fmt::Debug for FileHasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileHasher").field("algorithm", &self.algorithm).finish_non_exhaustive()
    }
}

impl FileHasher {
    /// Returns the hasher of an empty file.
    pub fn new(algorithm: HashAlgorithm) -> Self {
        let chunk = PieceHasher::new(algorithm, 0);
        Self { algorithm, hashes: vec![], chunk, free: chunk_len(algorithm) }
    }

    /// Adds the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        let mut rest = bytes;
        while !rest.is_empty() {
            let (slice, after) = rest.split_at(rest.len().min(self.free));
            self.chunk.update(slice);
            (rest, self.free) = (after, self.free - slice.len());
            if self.free == 0 {
                self.end_chunk();
            }
        }
    }

    fn end_chunk(&mut self) {
        let next = PieceHasher::new(self.algorithm, 0);
        self.hashes.push(std::mem::replace(&mut self.chunk, next).finish(1));
        self.free = chunk_len(self.algorithm);
    }

    /// Returns the hash of all bytes.
    pub fn finish(mut self) -> FileHash {
        if self.free < chunk_len(self.algorithm) {
            self.end_chunk();
        }
        combine(self.algorithm, &self.hashes)
    }
}

/// Returns the length of the parts whose hashes are hashed again. Bytes in order are hashed as one
/// part with the other algorithms.
fn chunk_len(algorithm: HashAlgorithm) -> usize {
    match algorithm {
        HashAlgorithm::Sha256Chunks(_) => piece_len(algorithm),
        HashAlgorithm::Sha256 | HashAlgorithm::Blake3 => usize::MAX,
    }
}

/// Hasher of one piece.
enum PieceHasher {
    Sha256(Sha256),
    Blake3(Box<blake3::Hasher>),
}

impl PieceHasher {
    fn new(algorithm: HashAlgorithm, idx: usize) -> Self {
        match algorithm {
            HashAlgorithm::Blake3 => {
                let mut hasher = Box::new(blake3::Hasher::new());
                hasher.set_input_offset(idx as u64 * LARGE_BYTES);
                Self::Blake3(hasher)
            }
            HashAlgorithm::Sha256 | HashAlgorithm::Sha256Chunks(_) => Self::Sha256(Sha256::new()),
        }
    }

    fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Sha256(hasher) => hasher.update(bytes),
            Self::Blake3(hasher) => {
                hasher.update(bytes);
            }
        }
    }

    /// Returns the hash of one of `num` pieces.
    fn finish(self, num: usize) -> PieceHash {
        match self {
            Self::Sha256(hasher) => hasher.finalize().into(),
            // The root of the tree is hashed differently.
            Self::Blake3(hasher) if num == 1 => hasher.finalize().into(),
            Self::Blake3(hasher) => hasher.finalize_non_root(),
        }
    }
}

/// Returns the hash of a file from those of its pieces.
fn combine(algorithm: HashAlgorithm, hashes: &[PieceHash]) -> FileHash {
    let hex = match (algorithm, hashes) {
        (HashAlgorithm::Sha256Chunks(_), _) => sha256_hex(hashes.as_flattened()),
        (_, [hash]) => hex(hash),
        (HashAlgorithm::Blake3, [_, _, ..]) => hex(blake3_root(hashes).as_bytes()),
        (HashAlgorithm::Blake3, []) => hex(blake3::hash(b"").as_bytes()),
        (HashAlgorithm::Sha256, _) => sha256_hex(b""),
    };
    algorithm.hash(hex)
}

/// Returns the root of BLAKE3's tree over at least two pieces. A left subtree has as many pieces as
/// the largest power of two below the number of all.
fn blake3_root(pieces: &[PieceHash]) -> blake3::Hash {
    let (left, right) = pieces.split_at(pieces.len().next_power_of_two() / 2);
    merge_subtrees_root(&blake3_subtree(left), &blake3_subtree(right), Mode::Hash)
}

fn blake3_subtree(pieces: &[PieceHash]) -> PieceHash {
    let [_, _, ..] = pieces else { return pieces.first().copied().unwrap_or_default() };
    let (left, right) = pieces.split_at(pieces.len().next_power_of_two() / 2);
    merge_subtrees_non_root(&blake3_subtree(left), &blake3_subtree(right), Mode::Hash)
}

/// Returns the length of a piece in memory.
fn piece_len(algorithm: HashAlgorithm) -> usize {
    let bytes = match algorithm {
        HashAlgorithm::Blake3 => LARGE_BYTES,
        HashAlgorithm::Sha256Chunks(bytes) => bytes.max(CHUNK_BYTES_MIN),
        HashAlgorithm::Sha256 => u64::MAX,
    };
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

/// Returns the slices of each piece.
fn pieces_of<B: AsRef<[u8]>>(parts: &[B], piece_len: usize) -> Vec<Vec<&[u8]>> {
    let (mut pieces, mut piece, mut free) = (vec![], vec![], piece_len);
    for part in parts {
        let mut rest = part.as_ref();
        while !rest.is_empty() {
            let (slice, after) = rest.split_at(rest.len().min(free));
            piece.push(slice);
            (rest, free) = (after, free - slice.len());
            if free == 0 {
                pieces.push(std::mem::take(&mut piece));
                free = piece_len;
            }
        }
    }
    if !piece.is_empty() {
        pieces.push(piece);
    }
    pieces
}

/// Calls `hash` for each piece and its index on several threads, and returns the hashes in the
/// order of `pieces`.
///
/// # Errors
///
/// Returns the first error of `hash`.
fn hash_pieces<T: Send>(
    pieces: Vec<T>,
    hash: impl Fn(usize, T) -> io::Result<PieceHash> + Sync,
) -> io::Result<Vec<PieceHash>> {
    let num_threads = thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX);
    let num_threads = num_threads.min(pieces.len());
    let done = Mutex::new((vec![[0; 32]; pieces.len()], None));
    let queue = Mutex::new(pieces.into_iter().enumerate());
    let work = || {
        loop {
            let next = lock(&queue).next();
            let Some((idx, piece)) = next else { return };
            let outcome = hash(idx, piece);
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
            // Ignore the error: without this thread, the others hash its pieces.
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
    fn expected(bytes: &[u8], algorithm: HashAlgorithm) -> FileHash {
        algorithm.hash(match algorithm {
            HashAlgorithm::Blake3 => blake3::hash(bytes).to_hex().to_string(),
            HashAlgorithm::Sha256 => sha256_hex(bytes),
            HashAlgorithm::Sha256Chunks(len) => {
                let chunks = bytes.chunks(usize::try_from(len).unwrap());
                let hashes = chunks.flat_map(|chunk| Sha256::digest(chunk).to_vec());
                sha256_hex(&hashes.collect::<Vec<_>>())
            }
        })
    }

    fn pattern(len: usize) -> Vec<u8> {
        (0..len).map(|idx| (idx % 251) as u8).collect()
    }

    #[test]
    fn large_files_are_hashed_with_blake3() {
        const LARGE: usize = LARGE_BYTES as usize;
        let bytes = pattern(5 * LARGE + 1029);
        let check = |len: usize, algorithm: HashAlgorithm| {
            let entry = file_entry(&[&bytes[..len]]);
            assert_eq!((entry.bytes, entry.hash.algorithm()), (len as u64, algorithm));
            assert_eq!(entry.hash, expected(&bytes[..len], algorithm), "{len} bytes");
            let (read, hash) = read_file(&file_of(&bytes[..len]), algorithm).unwrap();
            assert!(read == bytes[..len] && hash == entry.hash, "{len} bytes");
            let mut hasher = FileHasher::new(algorithm);
            bytes[..len].chunks(LARGE / 2).for_each(|part| hasher.update(part));
            assert_eq!(hasher.finish(), hash, "{len} bytes");
        };
        for len in [0, 3, LARGE] {
            check(len, HashAlgorithm::Sha256);
        }
        // Trees of two to six pieces, the last one complete or short.
        for len in [LARGE + 1, 2 * LARGE, 3 * LARGE + 1024, 4 * LARGE + 5, 5 * LARGE, bytes.len()] {
            check(len, HashAlgorithm::Blake3);
        }
    }

    #[test]
    fn pieces_are_counted_while_they_are_read() {
        let num = std::sync::atomic::AtomicUsize::new(0);
        let count = || {
            num.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        };
        let file = file_of(&pattern(2 * LARGE_BYTES as usize + 1));
        read_file_with(&file, HashAlgorithm::Blake3, &count).unwrap();
        assert_eq!(num.into_inner(), 3);
    }

    #[test]
    fn small_files_can_be_hashed_with_blake3() {
        for len in [0, 1, 5000] {
            let bytes = pattern(len);
            let hash = expected(&bytes, HashAlgorithm::Blake3);
            assert_eq!(file_hash(&[&bytes], HashAlgorithm::Blake3), hash);
            assert_eq!(read_file(&file_of(&bytes), HashAlgorithm::Blake3).unwrap().1, hash);
        }
    }

    #[test]
    fn tiny_chunks_of_a_manifest_are_not_used() {
        let bytes = vec![7; 3 * CHUNK_BYTES_MIN as usize];
        let hex = |len| file_hash(&[&bytes], HashAlgorithm::Sha256Chunks(len)).hex().to_owned();
        assert_eq!(hex(0), hex(CHUNK_BYTES_MIN), "a chunk of no bytes");
        let read = read_file(&file_of(&bytes), HashAlgorithm::Sha256Chunks(1)).unwrap().1;
        assert_eq!(read.hex(), hex(0));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

        /// The hash depends on neither the parts nor the threads, and covers every bit and the
        /// length.
        #[test]
        fn hashes_detect_flipped_bits_and_truncation(
            bytes in proptest::collection::vec(any::<u8>(), 1..40_000),
            cuts in proptest::collection::vec(any::<proptest::sample::Index>(), 0..6),
            algorithm in prop_oneof![
                Just(HashAlgorithm::Sha256), Just(HashAlgorithm::Blake3),
                (CHUNK_BYTES_MIN..12_000).prop_map(HashAlgorithm::Sha256Chunks),
            ],
            bit in any::<proptest::sample::Index>(),
            end in any::<proptest::sample::Index>(),
        ) {
            let hash = expected(&bytes, algorithm);
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len())).collect();
            cuts.extend([0, bytes.len()]);
            cuts.sort_unstable();
            let parts: Vec<&[u8]> = cuts.windows(2).map(|cut| &bytes[cut[0]..cut[1]]).collect();
            prop_assert_eq!(&file_hash(&parts, algorithm), &hash);
            let mut hasher = FileHasher::new(algorithm);
            parts.iter().for_each(|part| hasher.update(part));
            prop_assert_eq!(&hasher.finish(), &hash);
            prop_assert_eq!(&read_file(&file_of(&bytes), algorithm).unwrap().1, &hash);
            let mut flipped = bytes.clone();
            let bit = bit.index(8 * bytes.len());
            flipped[bit / 8] ^= 1 << (bit % 8);
            prop_assert_ne!(&file_hash(&[&flipped], algorithm), &hash);
            prop_assert_ne!(&read_file(&file_of(&flipped), algorithm).unwrap().1, &hash);
            let shorter = &bytes[..end.index(bytes.len())];
            prop_assert_ne!(&read_file(&file_of(shorter), algorithm).unwrap().1, &hash);
        }
    }
}

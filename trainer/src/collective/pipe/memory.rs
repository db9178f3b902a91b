//! Memory that two processes share: a ring buffer of bytes, and its positions. See
//! `docs/decisions/0063-shared-memory.md`.

#![expect(unsafe_code, reason = "another process writes into the memory")]

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicU64;

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, fstat,
    memfd_create,
};

/// Size of the ring buffer, which should fit into the processor's cache.
pub(super) const CAPACITY: usize = 1 << 20;
/// Start of the ring buffer, behind the words.
const DATA: usize = 4096;
const SIZE: usize = DATA + CAPACITY;

/// A number beside the ring buffer. Each has a cache line and the adjacent one, which processors
/// fetch together.
#[derive(Clone, Copy, Debug)]
#[repr(usize)]
pub(super) enum Word {
    /// Number of bytes written so far. Only the sender changes it.
    Written = 0,
    /// Number of bytes read so far. Only the receiver changes it.
    Read = 128,
    /// 1 while the receiver sleeps, until the sender wakes it.
    ReceiverSleeps = 256,
    /// 1 while the sender sleeps, until the receiver wakes it.
    SenderSleeps = 384,
}

#[derive(Debug)]
pub(super) struct Memory(MmapRaw);

impl Memory {
    /// Creates memory of zeros, and the file by which another process maps it. The file has no
    /// path; it is deleted with its last mapping.
    ///
    /// # Errors
    ///
    /// Fails if the system rejects such files, or lacks memory.
    pub(super) fn create() -> io::Result<(Self, OwnedFd)> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        // Linux before 6.3 does not know `NOEXEC_SEAL`; later versions may require it.
        let file = memfd_create("stoker-ranks", flags | MemfdFlags::NOEXEC_SEAL)
            .or_else(|_| memfd_create("stoker-ranks", flags))?;
        // Reserve the pages: a first access that finds no memory would end the process.
        fallocate(&file, FallocateFlags::empty(), 0, SIZE as u64)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)?;
        Ok((Self::map(&file)?, file))
    }

    /// Maps the memory of another process.
    ///
    /// # Errors
    ///
    /// Fails if [`create`](Self::create) did not create the file, or if the system lacks memory.
    pub(super) fn map(file: &OwnedFd) -> io::Result<Self> {
        // An access beyond the end of the file would end this process.
        let is_fixed = fcntl_get_seals(file)?.contains(SealFlags::SHRINK);
        if !is_fixed || fstat(file)?.st_size as u64 != SIZE as u64 {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "not the shared memory"));
        }
        MmapOptions::new().len(SIZE).map_raw(file).map(Self)
    }

    pub(super) fn word(&self, word: Word) -> &AtomicU64 {
        // SAFETY: all words are within the mapping, which lives as long as `self`, and aligned,
        // because a mapping begins at a page. Both processes access words only as atomics.
        unsafe { AtomicU64::from_ptr(self.0.as_mut_ptr().add(word as usize).cast()) }
    }

    /// Copies `bytes` to the ring buffer, from `position` on.
    ///
    /// These positions must be free: from [`Word::Written`] to [`Word::Read`] plus [`CAPACITY`].
    pub(super) fn copy_in(&self, position: u64, bytes: &[u8]) {
        let (at, first) = split(position, bytes.len());
        let (first, rest) = bytes.split_at(first);
        // SAFETY: `split` keeps both ranges within the ring buffer, and so within the mapping. It
        // does not overlap with `bytes`, because no reference into the mapping exists. The other
        // process, which runs the same program, reads these bytes only after `Word::Written` has
        // passed them, and writes none. No value is made of the bytes here.
        unsafe {
            let data = self.0.as_mut_ptr().add(DATA);
            data.add(at).copy_from_nonoverlapping(first.as_ptr(), first.len());
            data.copy_from_nonoverlapping(rest.as_ptr(), rest.len());
        }
    }

    /// Copies bytes from the ring buffer, from `position` on. They must be written, but not read:
    /// from [`Word::Read`] to [`Word::Written`].
    pub(super) fn copy_out(&self, position: u64, bytes: &mut [u8]) {
        let (at, first) = split(position, bytes.len());
        let (first, rest) = bytes.split_at_mut(first);
        // SAFETY: the ranges are as in `copy_in`. The other process writes to them only after
        // `Word::Read` has passed them. If it broke this rule, the copies would hold other bytes,
        // and each byte is a valid `u8`.
        unsafe {
            let data = self.0.as_ptr().add(DATA);
            data.add(at).copy_to_nonoverlapping(first.as_mut_ptr(), first.len());
            data.copy_to_nonoverlapping(rest.as_mut_ptr(), rest.len());
        }
    }
}

/// Returns the offset of `position` in the ring buffer, and how many of `num` bytes fit before its
/// end. The others follow from its start.
fn split(position: u64, num: usize) -> (usize, usize) {
    assert!(num <= CAPACITY, "the ring buffer has {CAPACITY} bytes");
    let at = (position % CAPACITY as u64) as usize;
    (at, num.min(CAPACITY - at))
}

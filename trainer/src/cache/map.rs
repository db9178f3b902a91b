//! Files in memory, as the system brings them in. The only unsafe code of the cache: see
//! `docs/decisions/0021-dataset-cache.md`.

#![expect(
    unsafe_code,
    reason = "a file that others change while it is mapped is undefined behaviour"
)]

use std::fs::File;
use std::ops::Deref;

/// A whole file.
#[derive(Debug)]
pub(super) struct Map(memmap2::Mmap);

impl Map {
    /// The file, which nobody writes to any more: segments are written under another name, once, and
    /// only ever removed, which leaves what is mapped as it is.
    pub(super) fn new(file: &File) -> std::io::Result<Self> {
        // SAFETY: no process of the cache opens a segment for writing or truncates it after it got its
        // name, and the cache's folder is the user's own. Somebody else who writes into it could make
        // bytes change under a reader: these are only ever read as `u8`, checked against a checksum and
        // decoded by code that takes any bytes, so that no value is assumed to stay.
        unsafe { memmap2::Mmap::map(file) }.map(Self)
    }
}

impl Deref for Map {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

//! Memory-mapped files. This is the only unsafe code of the cache: see
//! `docs/decisions/0021-dataset-cache.md`.

#![expect(unsafe_code, reason = "changing a file while it is mapped is undefined behavior")]

use std::fs::File;
use std::ops::Deref;

/// A memory-mapped file.
#[derive(Debug)]
pub(super) struct MappedFile(memmap2::Mmap);

impl MappedFile {
    /// Maps a file that no process writes to any more. Segments are written once, under another
    /// name, and are only ever deleted, which leaves existing mappings intact.
    pub(super) fn new(file: &File) -> std::io::Result<Self> {
        // SAFETY: no process of the cache opens a segment for writing or truncates it once it has
        // its final name. The cache's directory belongs to the user. Another program that writes
        // into the directory could change bytes under a reader. The bytes are only ever read as
        // `u8`, checked against a checksum, and decoded by code that accepts any bytes. No code
        // assumes that a value stays the same.
        unsafe { memmap2::Mmap::map(file) }.map(Self)
    }
}

impl Deref for MappedFile {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

//! Fingerprint of this process's program, so that ranks refuse to train with a different program.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::FileExt as _;
use std::sync::OnceLock;

use sha2::{Digest as _, Sha256};

use crate::Result;
use crate::error::Infrastructure;

/// Maximum size of the tables of segments and notes; linkers write smaller ones.
const HEADER_BYTES_MAX: u64 = 1 << 16;
/// Minimum length of a build ID; shorter IDs could be equal by chance.
const BUILD_ID_BYTES_MIN: usize = 8;
const SEGMENT_NOTE: u32 = 4;
const NOTE_BUILD_ID: u32 = 3;

/// Returns the digest of this program, computed once per process.
///
/// # Errors
///
/// Fails if the program's file cannot be read.
pub(super) fn digest() -> Result<[u8; 32]> {
    static DIGEST: OnceLock<[u8; 32]> = OnceLock::new();
    if let Some(digest) = DIGEST.get() {
        return Ok(*digest);
    }
    let computed = File::open("/proc/self/exe").and_then(|file| file_digest(&file));
    let computed = computed.map_err(|error| {
        Infrastructure(format!("cannot read the program's own file /proc/self/exe: {error}"))
    })?;
    Ok(*DIGEST.get_or_init(|| computed))
}

/// Returns the digest of a program's build ID; without one, of the whole file, since hashing 100 MB
/// delays every start.
fn file_digest(file: &File) -> io::Result<[u8; 32]> {
    if let Some(id) = build_id(file) {
        return Ok(Sha256::new().chain_update(b"build id ").chain_update(id).finalize().into());
    }
    let (mut file, mut hasher, mut bytes) = (file, Sha256::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut bytes)? {
            0 => break,
            num => hasher.update(&bytes[..num]),
        }
    }
    Ok(hasher.finalize().into())
}

/// Returns the build ID from a 64-bit little-endian ELF file: a hash of its contents, written by
/// the linker.
fn build_id(file: &File) -> Option<Vec<u8>> {
    let header = read(file, 0, 64)?;
    // Magic number, 64-bit, little-endian.
    if header[..6] != *b"\x7fELF\x02\x01" {
        return None;
    }
    let (offset, size, num) = (u64_at(&header, 32)?, u16_at(&header, 54)?, u16_at(&header, 56)?);
    let segments = read(file, offset, u64::from(size) * u64::from(num))?;
    segments.chunks_exact(usize::from(size).max(1)).find_map(|segment| {
        if u32_at(segment, 0)? != SEGMENT_NOTE {
            return None;
        }
        let notes = read(file, u64_at(segment, 8)?, u64_at(segment, 32)?)?;
        let align = if u64_at(segment, 48)? == 8 { 8 } else { 4 };
        build_id_of(&notes, align)
    })
}

/// Finds the build ID among the notes of a segment.
fn build_id_of(mut notes: &[u8], align: usize) -> Option<Vec<u8>> {
    loop {
        let name_bytes = usize::try_from(u32_at(notes, 0)?).ok()?;
        let id_bytes = usize::try_from(u32_at(notes, 4)?).ok()?;
        let kind = u32_at(notes, 8)?;
        let id_start = (12 + name_bytes).next_multiple_of(align);
        let name = notes.get(12..12 + name_bytes)?;
        let id = notes.get(id_start..id_start + id_bytes)?;
        if kind == NOTE_BUILD_ID && name == b"GNU\0" {
            return (id.len() >= BUILD_ID_BYTES_MIN).then(|| id.to_vec());
        }
        notes = notes.get((id_start + id_bytes).next_multiple_of(align)..)?;
    }
}

fn read(file: &File, offset: u64, num_bytes: u64) -> Option<Vec<u8>> {
    let mut bytes = vec![0; usize::try_from(num_bytes.min(HEADER_BYTES_MAX)).ok()?];
    file.read_exact_at(&mut bytes, offset).ok()?;
    Some(bytes)
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use std::io::{Seek as _, Write as _};

    use super::*;

    /// Creates a file with these contents, positioned at its start.
    fn file(contents: &[u8]) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(contents).unwrap();
        file.rewind().unwrap();
        file
    }

    /// Creates an ELF file with one segment of notes, followed by other bytes.
    fn elf(notes: &[u8], rest: &[u8]) -> Vec<u8> {
        let mut bytes = b"\x7fELF\x02\x01".to_vec();
        bytes.resize(32, 0);
        bytes.extend(64_u64.to_le_bytes());
        bytes.resize(54, 0);
        bytes.extend(56_u16.to_le_bytes());
        bytes.extend(1_u16.to_le_bytes());
        bytes.resize(64, 0);
        bytes.extend(SEGMENT_NOTE.to_le_bytes());
        bytes.extend(0_u32.to_le_bytes());
        bytes.extend(120_u64.to_le_bytes());
        bytes.resize(96, 0);
        bytes.extend((notes.len() as u64).to_le_bytes());
        bytes.resize(112, 0);
        bytes.extend(4_u64.to_le_bytes());
        [&bytes, notes, rest].concat()
    }

    fn note(kind: u32, contents: &[u8]) -> Vec<u8> {
        let mut bytes = 4_u32.to_le_bytes().to_vec();
        bytes.extend((contents.len() as u32).to_le_bytes());
        bytes.extend(kind.to_le_bytes());
        bytes.extend(b"GNU\0");
        bytes.extend(contents);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    #[test]
    fn build_id_identifies_a_program() {
        let of = |notes: &[Vec<u8>], rest: &[u8]| file_digest(&file(&elf(&notes.concat(), rest)));
        let abi = note(1, &[0; 15]);
        let digest = |id: u8, rest: &[u8]| of(&[abi.clone(), note(3, &[id; 20])], rest).unwrap();
        assert_eq!(digest(1, b"with symbols"), digest(1, b"stripped"));
        assert_ne!(digest(1, b""), digest(2, b""));
    }

    #[test]
    fn program_without_build_id_is_hashed() {
        let without = [
            elf(&note(1, &[0; 16]), b"first"),
            // Too short, and longer than the file.
            elf(&note(3, &[1; 4]), b"first"),
            elf(&note(3, &[1; 20])[..20], b"first"),
            b"#!/bin/sh\nfirst".to_vec(),
            b"".to_vec(),
        ];
        for contents in without {
            let hashed: [u8; 32] = Sha256::digest(&contents).into();
            assert_eq!(file_digest(&file(&contents)).unwrap(), hashed, "{contents:?}");
        }
    }

    #[test]
    fn programs_on_this_machine_differ() {
        let open = |path: &str| file_digest(&File::open(path).unwrap()).unwrap();
        assert_eq!(open("/proc/self/exe"), digest().unwrap());
        assert_ne!(open("/bin/sh"), digest().unwrap());
        // A copy of the program has the same digest.
        let copy = tempfile::NamedTempFile::new().unwrap();
        std::fs::copy("/proc/self/exe", copy.path()).unwrap();
        assert_eq!(open(copy.path().to_str().unwrap()), digest().unwrap());
    }
}

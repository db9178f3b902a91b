//! Segment files: records, and an index of their positions.
//!
//! ```text
//! "STKRSEG1"                       8 bytes
//! record 0, record 1, ...          variable length
//! start of each record, end        u64 each, offset from the start of the file
//! ```
//!
//! Numbers are little-endian. Equal records make equal files.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};
use stoker_storage::hash::hex;

use super::dataset_dir::io_error;
use super::manifest::SegmentEntry;
use super::mapped_file::MappedFile;
use crate::Result;

const START_MARK: &[u8; 8] = b"STKRSEG1";
const END_MARK: &[u8; 8] = b"STKREND1";
/// Size of the record count and the tail, after the tables.
const FOOTER_BYTES: usize = 16;

/// A segment being written.
pub(super) struct Writer {
    file: BufWriter<File>,
    path: PathBuf,
    name: String,
    sha256: Sha256,
    starts: Vec<u64>,
    checksums: Vec<u32>,
    /// Bytes written so far.
    bytes: u64,
}

impl Writer {
    pub(super) fn new(folder: &Path, number: usize) -> Result<Self> {
        let name = format!("{number:05}.seg");
        let path = folder.join(&name);
        let file = File::create_new(&path).map_err(|error| io_error("create", &path, &error))?;
        let file = BufWriter::with_capacity(1 << 20, file);
        let (starts, checksums) = (vec![], vec![]);
        let sha256 = Sha256::new();
        let mut writer = Self { file, path, name, sha256, starts, checksums, bytes: 0 };
        writer.put(START_MARK)?;
        Ok(writer)
    }

    /// Returns the size including the future tables, so that empty records fill a segment too.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes + 12 * self.starts.len() as u64
    }

    pub(super) fn record(&mut self, record: &[u8]) -> Result<()> {
        self.starts.push(self.bytes);
        self.checksums.push(crc32fast::hash(record));
        self.put(record)
    }

    /// Completes the file and syncs it to disk.
    pub(super) fn finish(mut self) -> Result<SegmentEntry> {
        let records = self.starts.len();
        self.starts.push(self.bytes);
        let starts = std::mem::take(&mut self.starts);
        starts.into_iter().try_for_each(|start| self.put(&start.to_le_bytes()))?;
        let checksums = std::mem::take(&mut self.checksums);
        checksums.into_iter().try_for_each(|checksum| self.put(&checksum.to_le_bytes()))?;
        self.put(&(records as u64).to_le_bytes())?;
        self.put(END_MARK)?;
        let Self { file, path, name, sha256, bytes, .. } = self;
        let stored = file.into_inner().map_err(|error| error.into_error());
        let stored = stored.and_then(|file| file.sync_all());
        stored.map_err(|error| io_error("write", &path, &error))?;
        Ok(SegmentEntry { file: name, records, bytes, sha256: hex(&sha256.finalize()) })
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.sha256.update(bytes);
        self.bytes += bytes.len() as u64;
        self.file.write_all(bytes).map_err(|error| io_error("write", &self.path, &error))
    }
}

/// A segment being read.
#[derive(Debug)]
pub(super) struct Segment {
    map: MappedFile,
    name: String,
    records: usize,
    /// Offset of the table of record positions.
    table: usize,
}

impl Segment {
    /// Opens a segment and validates its structure; returns the first defect found.
    pub(super) fn open(folder: &Path, entry: &SegmentEntry) -> Result<Self, String> {
        let SegmentEntry { file: name, records, bytes, .. } = entry;
        let mapped = File::open(folder.join(name)).and_then(|file| MappedFile::new(&file));
        let map = mapped.map_err(|error| format!("{name}: {error}"))?;
        let defect = |why: &str| format!("{name} {why}");
        let actual = map.len();
        if actual as u64 != *bytes {
            return Err(defect(&format!("has {actual} bytes, expected {bytes}")));
        }
        let tables = (records + 1) * 8 + records * 4 + FOOTER_BYTES;
        let is_segment = map.starts_with(START_MARK) && map.ends_with(END_MARK);
        let Some(table) =
            actual.checked_sub(tables).filter(|table| is_segment && *table >= START_MARK.len())
        else {
            return Err(defect("is not a segment of this format version"));
        };
        let segment = Self { map, name: name.clone(), records: *records, table };
        let mut last = START_MARK.len();
        for record in 0..=segment.records {
            let start = segment.start_of(record);
            if start < last || start > table {
                return Err(defect(&format!("has an invalid start of record {record}: {start}")));
            }
            last = start;
        }
        Ok(segment)
    }

    /// Returns the bytes of a record after verifying their checksum.
    pub(super) fn record(&self, record: usize) -> Result<&[u8], String> {
        let (start, end) = (self.start_of(record), self.start_of(record + 1));
        // The table may have changed on disk since `open`, so do not assume valid offsets.
        let bytes = self.map.get(start..end).unwrap_or_default();
        let at = self.table + (self.records + 1) * 8 + record * 4;
        let expected = u32::from_le_bytes(self.map[at..at + 4].try_into().unwrap_or_default());
        match crc32fast::hash(bytes) == expected {
            true => Ok(bytes),
            false => {
                Err(format!("record {record} of {}, bytes {start} to {end}, is damaged", self.name))
            }
        }
    }

    fn start_of(&self, record: usize) -> usize {
        let at = self.table + record * 8;
        let bytes = self.map[at..at + 8].try_into().unwrap_or_default();
        usize::try_from(u64::from_le_bytes(bytes)).unwrap_or(usize::MAX)
    }
}

//! Divides a file into shards and computes hashes, in one pass.

use std::io::{self, BufRead, BufReader, Read};

use sha2::{Digest, Sha256};
use stoker_api::inference::RowFormat;
use stoker_storage::hash::{hex, sha256_hex};

use super::rows::is_blank;
use crate::datasets::csv::ends_in_quotes;
use crate::{InvalidInput, Result};

/// Buffer size for reading, in bytes.
const BUFFER_BYTES: usize = 256 << 10;

/// Maximum number of shards of a job, because the plan and the manifest must fit in memory.
pub(super) const SHARDS_MAX: usize = 100_000;

/// How to divide a file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Division {
    /// Rows per shard; the last shard of a file may be smaller.
    pub(super) shard_rows: u32,
    /// Maximum number of shards: those that earlier files leave of [`SHARDS_MAX`].
    pub(super) shards_max: usize,
}

impl Division {
    /// Adds a shard of the file.
    ///
    /// # Errors
    ///
    /// Fails if there are too many.
    pub(super) fn add(self, ranges: &mut Vec<ShardRange>, range: ShardRange) -> Result<()> {
        let Self { shard_rows, shards_max } = self;
        if ranges.len() >= shards_max {
            let why =
                format!("more than {SHARDS_MAX} shards of {shard_rows} rows; raise shardRows");
            return Err(InvalidInput(why).into());
        }
        ranges.push(range);
        Ok(())
    }
}

/// Result of scanning a file.
#[derive(Debug, Default, PartialEq)]
pub(super) struct ScannedFile {
    pub(super) bytes: u64,
    pub(super) sha256: String,
    pub(super) rows: u64,
    /// Column names, for CSV only.
    pub(super) columns: Vec<String>,
    pub(super) ranges: Vec<ShardRange>,
}

/// Rows and byte range of one shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ShardRange {
    pub(super) rows: u32,
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) sha256: String,
}

/// Divides a file into shards.
///
/// # Errors
///
/// Fails if the file cannot be read or parsed, or as soon as it has too many shards.
pub(super) fn scan(
    format: RowFormat,
    file: &str,
    from: impl Read,
    division: Division,
) -> Result<ScannedFile> {
    match format {
        RowFormat::JsonLines => lines(file, from, division),
        RowFormat::Csv => csv(file, from, division),
        #[cfg(feature = "parquet")]
        typed => super::table::scan(typed, file, from, division),
        #[cfg(not(feature = "parquet"))]
        typed => Err(super::unsupported_format(typed)),
    }
}

/// Reader that hashes all bytes and keeps those since the last shard.
struct HashingReader<R> {
    inner: R,
    kept: Vec<u8>,
    /// Offset of the first byte of `kept`.
    base: u64,
    whole: Sha256,
    bytes: u64,
    /// Whether the end of the file was read.
    is_at_end: bool,
}

impl<R: Read> HashingReader<R> {
    fn new(inner: R) -> Self {
        let whole = Sha256::new();
        Self { inner, kept: vec![], base: 0, whole, bytes: 0, is_at_end: false }
    }

    /// Ends a shard of this many rows at offset `end`, and drops its bytes.
    fn end_shard(&mut self, rows: u32, end: u64) -> ShardRange {
        let num = usize::try_from(end - self.base).unwrap_or(usize::MAX).min(self.kept.len());
        let sha256 = sha256_hex(&self.kept[..num]);
        self.kept.drain(..num);
        let start = std::mem::replace(&mut self.base, end);
        ShardRange { rows, start, end, sha256 }
    }

    /// Fails if the end of the file was read within quotes in the row that starts at this position.
    /// The parser does not: all further lines belong to that row.
    fn check_quotes(&self, file: &str, start: &csv::Position) -> Result<()> {
        if !self.is_at_end {
            return Ok(());
        }
        let num = usize::try_from(start.byte() - self.base).unwrap_or(usize::MAX);
        match ends_in_quotes(self.kept.get(num..).unwrap_or_default(), b',') {
            true => {
                let line = start.line();
                let why = format!(
                    "cannot parse {file}: the row at line {line} has a quote that is not closed; \
                     close the quote, or write a quote within a field as `\"\"`"
                );
                Err(InvalidInput(why).into())
            }
            false => Ok(()),
        }
    }

    fn finish(self, rows: u64, columns: Vec<String>, ranges: Vec<ShardRange>) -> ScannedFile {
        let sha256 = hex(&self.whole.finalize());
        ScannedFile { bytes: self.bytes, sha256, rows, columns, ranges }
    }
}

impl<R: Read> Read for HashingReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let num = self.inner.read(buffer)?;
        self.whole.update(&buffer[..num]);
        self.kept.extend_from_slice(&buffer[..num]);
        self.bytes += num as u64;
        self.is_at_end |= num == 0;
        Ok(num)
    }
}

/// Counts rows and detects when a shard is full.
#[derive(Debug, Default)]
struct Counter {
    rows: u64,
    in_shard: u32,
}

impl Counter {
    fn count(&mut self, shard_rows: u32) -> bool {
        self.rows += 1;
        self.in_shard += 1;
        self.in_shard == shard_rows
    }

    fn take(&mut self) -> u32 {
        std::mem::take(&mut self.in_shard)
    }
}

/// Returns the SHA-256 of all bytes, in hex.
///
/// # Errors
///
/// Fails if the bytes cannot be read.
pub(super) fn hash(from: &mut impl Read) -> io::Result<String> {
    let (mut whole, mut buffer) = (Sha256::new(), vec![0; BUFFER_BYTES]);
    loop {
        match from.read(&mut buffer)? {
            0 => break,
            num => whole.update(&buffer[..num]),
        }
    }
    Ok(hex(&whole.finalize()))
}

fn lines(file: &str, from: impl Read, division: Division) -> Result<ScannedFile> {
    let mut reader = BufReader::with_capacity(BUFFER_BYTES, HashingReader::new(from));
    let (mut counter, mut ranges, mut end, mut line) = (Counter::default(), vec![], 0, vec![]);
    loop {
        line.clear();
        let num = reader.read_until(b'\n', &mut line).map_err(|error| read_error(file, &error))?;
        if num == 0 {
            break;
        }
        if end == 0 {
            refuse_compressed(file, &line)?;
        }
        let is_row = !is_blank(&line, end == 0);
        end += num as u64;
        if is_row && counter.count(division.shard_rows) {
            division.add(&mut ranges, reader.get_mut().end_shard(counter.take(), end))?;
        }
    }
    if counter.in_shard > 0 {
        division.add(&mut ranges, reader.get_mut().end_shard(counter.take(), end))?;
    }
    Ok(reader.into_inner().finish(counter.rows, vec![], ranges))
}

fn csv(file: &str, from: impl Read, division: Division) -> Result<ScannedFile> {
    let mut reader = csv::ReaderBuilder::new()
        .flexible(true)
        .buffer_capacity(BUFFER_BYTES)
        .from_reader(HashingReader::new(from));
    let failed = |error: csv::Error| match error.into_kind() {
        csv::ErrorKind::Io(error) => read_error(file, &error),
        other => InvalidInput(format!("cannot parse the first line of {file}: {other:?}")).into(),
    };
    reader.byte_headers().map_err(failed)?;
    refuse_compressed(file, &reader.get_ref().kept)?;
    reader.get_ref().check_quotes(file, &csv::Position::new())?;
    let header = reader.headers().map_err(failed)?;
    let columns: Vec<String> = header.iter().map(|name| name.trim().to_owned()).collect();
    check_columns(file, &columns)?;
    let (mut counter, mut ranges, mut record) =
        (Counter::default(), vec![], csv::ByteRecord::new());
    let (mut start, mut end) = (reader.position().clone(), reader.position().byte());
    reader.get_mut().end_shard(0, end);
    while reader.read_byte_record(&mut record).map_err(failed)? {
        reader.get_ref().check_quotes(file, &start)?;
        start.clone_from(reader.position());
        end = start.byte();
        if counter.count(division.shard_rows) {
            division.add(&mut ranges, reader.get_mut().end_shard(counter.take(), end))?;
        }
    }
    if counter.in_shard > 0 {
        division.add(&mut ranges, reader.get_mut().end_shard(counter.take(), end))?;
    }
    Ok(reader.into_inner().finish(counter.rows, columns, ranges))
}

fn check_columns(file: &str, columns: &[String]) -> Result<()> {
    let repeated = columns.iter().enumerate().find(|(i, name)| columns[..*i].contains(name));
    match repeated {
        Some((_, name)) => {
            let why = format!(
                "{file} contains column {name:?} twice; rename one of them in the first line"
            );
            Err(InvalidInput(why).into())
        }
        None => Ok(()),
    }
}

fn refuse_compressed(file: &str, bytes: &[u8]) -> Result<()> {
    match bytes.starts_with(&[0x1f, 0x8b]) {
        true => {
            Err(InvalidInput(format!("{file} is compressed with gzip; decompress it first")).into())
        }
        false => Ok(()),
    }
}

fn read_error(file: &str, error: &io::Error) -> crate::Error {
    super::infrastructure(format!("cannot read input {file}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks the texts of the shards, or the error.
    fn check(
        format: RowFormat,
        text: &str,
        shard_rows: u32,
        expected: Result<&[(u32, &str)], &str>,
    ) {
        // The result must not depend on how many bytes each read returns.
        let scanned = [1, 1 << 20].map(|bytes_per_read| {
            let from = ChunkedReader { bytes: text.as_bytes(), bytes_per_read };
            scan(format, "file", from, Division { shard_rows, shards_max: SHARDS_MAX })
        });
        for scanned in scanned {
            match (scanned, expected) {
                (Ok(scanned), Ok(expected)) => {
                    let bytes =
                        |range: &ShardRange| &text[range.start as usize..range.end as usize];
                    let ranges: Vec<_> =
                        scanned.ranges.iter().map(|range| (range.rows, bytes(range))).collect();
                    assert_eq!(ranges, expected);
                    let rows: u32 = expected.iter().map(|(rows, _)| rows).sum();
                    assert_eq!((scanned.rows, scanned.bytes), (rows.into(), text.len() as u64));
                    assert_eq!(scanned.sha256, sha256_hex(text.as_bytes()));
                    for range in &scanned.ranges {
                        assert_eq!(range.sha256, sha256_hex(bytes(range).as_bytes()), "{range:?}");
                    }
                }
                (Err(error), Err(expected)) => {
                    assert!(error.to_string().contains(expected), "{error}");
                }
                (scanned, expected) => panic!("{scanned:?} is not {expected:?}"),
            }
        }
    }

    struct ChunkedReader<'a> {
        bytes: &'a [u8],
        bytes_per_read: usize,
    }

    impl Read for ChunkedReader<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let num = buffer.len().min(self.bytes_per_read);
            self.bytes.read(&mut buffer[..num])
        }
    }

    #[test]
    fn blank_lines_are_not_rows() {
        let json = RowFormat::JsonLines;
        check(json, "", 2, Ok(&[]));
        check(json, "\n  \n", 2, Ok(&[]));
        check(json, "1\n2\n3\n", 2, Ok(&[(2, "1\n2\n"), (1, "3\n")]));
        check(json, "1\n2\n3", 2, Ok(&[(2, "1\n2\n"), (1, "3")]));
        check(json, "1\r\n\r\n\r\n2\r\n", 1, Ok(&[(1, "1\r\n"), (1, "\r\n\r\n2\r\n")]));
        check(json, "1\n2\n\n\n", 2, Ok(&[(2, "1\n2\n")]));
        check(
            json,
            "\u{feff}\"ä\"\n\"日本\"\n",
            1,
            Ok(&[(1, "\u{feff}\"ä\"\n"), (1, "\"日本\"\n")]),
        );
        check(json, "\u{feff}\n", 1, Ok(&[]));
    }

    #[test]
    fn quoted_fields_may_contain_line_breaks() {
        let csv = RowFormat::Csv;
        check(csv, "", 2, Ok(&[]));
        check(csv, "a,b\n", 2, Ok(&[]));
        check(csv, "a,b\n1,2\n3,4\n5,6", 2, Ok(&[(2, "1,2\n3,4\n"), (1, "5,6")]));
        let quoted = "a,b\n\"1\n1\",\"x\"\"\n\"\n\"2\",ü\n";
        check(csv, quoted, 1, Ok(&[(1, "\"1\n1\",\"x\"\"\n\"\n"), (1, "\"2\",ü\n")]));
        check(csv, "a\n\n1\n\n2\n\n", 1, Ok(&[(1, "\n1\n"), (1, "\n2\n")]));
        check(csv, "\"a\nx\",b\n1,2\n", 9, Ok(&[(1, "1,2\n")]));
        check(csv, "a,a\n1,2\n", 9, Err("contains column \"a\" twice"));
    }

    /// The parser would return all further lines as part of the field.
    #[test]
    fn unclosed_quotes_are_refused() {
        let csv = RowFormat::Csv;
        let error = "the row at line 2 has a quote that is not closed";
        for rows in ["1,\"x\n2,y\n", "1,\"x", "1,\"x\"\"\n2,y\n"] {
            check(csv, &format!("a,b\n{rows}"), 9, Err(error));
        }
        check(csv, "a,b\n1,2\n3,\"4\n", 1, Err("the row at line 3 has"));
        check(csv, "\"a,b\n1,2\n", 9, Err("the row at line 1 has"));
        check(csv, "a\n\"1\"", 9, Ok(&[(1, "\"1\"")]));
        check(csv, "a\n6\" x", 9, Ok(&[(1, "6\" x")]));
    }

    #[test]
    fn carriage_returns_are_handled_at_buffer_ends() {
        for bytes_per_read in [1, 2, 3, 100] {
            let from = ChunkedReader { bytes: b"a\r\n1\r\n2\r\n3\r\n", bytes_per_read };
            let division = Division { shard_rows: 1, shards_max: 3 };
            let scanned = scan(RowFormat::Csv, "file", from, division).unwrap();
            assert_eq!((scanned.rows, scanned.ranges.len()), (3, 3));
        }
    }

    #[test]
    fn compressed_files_are_refused() {
        for format in [RowFormat::JsonLines, RowFormat::Csv] {
            let from: &[u8] = &[0x1f, 0x8b, 8, 0, b'\n'];
            let division = Division { shard_rows: 1, shards_max: SHARDS_MAX };
            let error = scan(format, "a.gz", from, division).unwrap_err().to_string();
            assert!(error.contains("gzip"), "{error}");
        }
    }

    /// The scan does not read the rest of the file.
    #[test]
    fn scan_ends_at_too_many_shards() {
        struct Broken;
        impl Read for Broken {
            fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
                Err(io::Error::other("torn"))
            }
        }
        for (format, text) in
            [(RowFormat::JsonLines, "1\n2\n3\n"), (RowFormat::Csv, "a\n1\n2\n3\n")]
        {
            let error = |shards_max| {
                let from = ChunkedReader { bytes: text.as_bytes(), bytes_per_read: 1 };
                let division = Division { shard_rows: 1, shards_max };
                scan(format, "file", from.chain(Broken), division).unwrap_err().to_string()
            };
            assert!(error(3).contains("torn"), "{}", error(3));
            assert_eq!(error(2), "more than 100000 shards of 1 rows; raise shardRows");
        }
    }
}

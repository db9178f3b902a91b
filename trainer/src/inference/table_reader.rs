//! Reads rows of Parquet and Arrow files at any position. Reading forward does not decode earlier
//! rows again.

use std::io::Cursor;
use std::ops::Range;
use std::sync::Arc;

use arrow_array::cast::AsArray as _;
use arrow_array::types::{
    Float32Type, Float64Type, Int8Type, Int16Type, Int32Type, Int64Type, UInt8Type, UInt16Type,
    UInt32Type, UInt64Type,
};
use arrow_array::{Array, ArrayRef, RecordBatch};
use arrow_ipc::MessageHeader;
use arrow_ipc::reader::{FileReader, read_footer_length};
use arrow_schema::{DataType, Field, Schema};
use bytes::Bytes;
use parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReader,
    ParquetRecordBatchReaderBuilder,
};
use serde::de::DeserializeOwned;
use stoker_api::inference::RowFormat;

use super::cell::Cell;
use super::rows::{Row, with_path};

/// Length of the end of an Arrow file, in bytes: the length of the footer and a magic string.
const ARROW_END_BYTES: usize = 10;
/// Number of Parquet rows that are skipped in the time in which one is decoded. Measured with
/// numbers and short texts; to skip lists, they are partly decoded.
const SKIPPED_PER_DECODED: u64 = 32;
/// Maximum number of rows that are decoded together.
const BATCH_ROWS_MAX: u32 = 1024;
/// First bytes of an Arrow message, except in files of old versions.
const ARROW_CONTINUATION: [u8; 4] = [0xff; 4];

/// An open file, with the last batch of rows that was decoded.
///
/// After an error, the position is unspecified, and the file must be opened again.
pub(super) struct TableReader {
    file: OpenFile,
    /// First row of each Parquet row group or Arrow record batch, and the number of rows.
    starts: Vec<u64>,
    batch: RecordBatch,
    /// Rows of the file that `batch` contains. The next batch starts at the end.
    rows: Range<u64>,
}

struct ParquetFile {
    bytes: Bytes,
    metadata: ArrowReaderMetadata,
    batch_rows: usize,
}

enum OpenFile {
    Parquet { file: ParquetFile, reader: ParquetRecordBatchReader },
    Arrow(FileReader<Cursor<Bytes>>),
}

impl TableReader {
    /// Opens a file and reads its metadata. Parquet is decoded in batches of at most `batch_rows`
    /// rows, so that large rows take little memory; Arrow in the batches of the file.
    ///
    /// # Errors
    ///
    /// Fails if the metadata is invalid.
    pub(super) fn open(format: RowFormat, bytes: Bytes, batch_rows: u32) -> Result<Self, String> {
        let (file, lengths) = match format {
            RowFormat::Parquet => {
                let metadata = ArrowReaderMetadata::load(&bytes, ArrowReaderOptions::default());
                let metadata = metadata.map_err(text)?;
                let groups = metadata.metadata().row_groups().iter();
                let lengths = groups.map(|group| group.num_rows()).collect();
                let batch_rows = batch_rows.clamp(1, BATCH_ROWS_MAX) as usize;
                let file = ParquetFile { bytes, metadata, batch_rows };
                let reader = file.reader(0, 0)?;
                (OpenFile::Parquet { file, reader }, lengths)
            }
            _ => {
                let reader = FileReader::try_new(Cursor::new(bytes.clone()), None);
                (OpenFile::Arrow(reader.map_err(text)?), arrow_lengths(&bytes)?)
            }
        };
        let (mut starts, mut end) = (vec![0], 0_u64);
        for length in lengths {
            let next = u64::try_from(length).ok().and_then(|num| end.checked_add(num));
            end = next.ok_or_else(|| format!("a batch of rows has length {length}"))?;
            starts.push(end);
        }
        let batch = RecordBatch::new_empty(Arc::new(Schema::empty()));
        Ok(Self { file, starts, batch, rows: 0..0 })
    }

    /// Returns the number of rows of the file.
    pub(super) fn num_rows(&self) -> u64 {
        self.starts.last().copied().unwrap_or(0)
    }

    /// Decodes the batch that contains a row, and returns the rows of that batch. These are empty
    /// after the last row.
    ///
    /// # Errors
    ///
    /// Fails if the batch, or one before it in the same row group, cannot be decoded.
    pub(super) fn load(&mut self, row: u64) -> Result<Range<u64>, String> {
        if row >= self.num_rows() {
            return Ok(row..row);
        }
        if let Some(group) = group_to_open(&self.starts, &self.rows, row) {
            self.seek(group, row)?;
        }
        while !self.rows.contains(&row) {
            let batch = match &mut self.file {
                OpenFile::Parquet { reader, .. } => reader.next(),
                OpenFile::Arrow(reader) => reader.next(),
            };
            let Some(batch) = batch else { return Ok(row..row) };
            self.batch = batch.map_err(text)?;
            self.rows = self.rows.end..self.rows.end + self.batch.num_rows() as u64;
        }
        Ok(self.rows.clone())
    }

    /// Moves to a row, or for Arrow to the start of the record batch that contains it.
    fn seek(&mut self, group: usize, row: u64) -> Result<(), String> {
        let start = self.starts[group];
        let next = match &mut self.file {
            OpenFile::Parquet { file, reader } => {
                *reader = file.reader(group, row - start)?;
                row
            }
            OpenFile::Arrow(reader) => {
                reader.set_index(group).map_err(text)?;
                start
            }
        };
        self.rows = next..next;
        Ok(())
    }

    /// Returns `num` rows from row `first`, or fewer at the end of the file.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be read. A column of an unsupported type is an error of the rows
    /// that read it.
    pub(super) fn rows<T: DeserializeOwned>(
        &mut self,
        first: u64,
        num: u32,
    ) -> Result<Vec<Row<T>>, String> {
        let mut rows = Vec::with_capacity(num as usize);
        let (mut row, end) = (first, first + u64::from(num));
        while row < end {
            let loaded = self.load(row)?;
            if loaded.is_empty() {
                break;
            }
            let schema = self.batch.schema();
            let until = end.min(loaded.end);
            for i in (row - loaded.start) as usize..(until - loaded.start) as usize {
                let columns = schema.fields().iter().zip(self.batch.columns());
                let cells = columns.map(|(field, column)| (field.name().clone(), cell(column, i)));
                let read = serde_path_to_error::deserialize(Cell::Struct(cells.collect()));
                let bad_row = |error: serde_path_to_error::Error<_>| {
                    with_path(&error.path().to_string(), error.inner()).into()
                };
                rows.push(read.map_err(bad_row));
            }
            row = until;
        }
        Ok(rows)
    }
}

/// Returns the row group or record batch to open for a row; `None` to continue after the last
/// batch. Continuing decodes the rows in between; opening only skips those of the group.
fn group_to_open(starts: &[u64], last: &Range<u64>, row: u64) -> Option<usize> {
    let group = starts.partition_point(|start| *start <= row).saturating_sub(1);
    let (num_decoded, num_skipped) = (row.saturating_sub(last.end), row - starts[group]);
    (row < last.start || num_decoded > num_skipped / SKIPPED_PER_DECODED).then_some(group)
}

impl ParquetFile {
    /// Returns a reader from a row of a row group on. It skips complete pages without decoding.
    fn reader(&self, group: usize, skip: u64) -> Result<ParquetRecordBatchReader, String> {
        let groups = (group..self.metadata.metadata().num_row_groups()).collect();
        let (bytes, metadata) = (self.bytes.clone(), self.metadata.clone());
        ParquetRecordBatchReaderBuilder::new_with_metadata(bytes, metadata)
            .with_row_groups(groups)
            .with_offset(usize::try_from(skip).map_err(text)?)
            .with_batch_size(self.batch_rows)
            .build()
            .map_err(text)
    }
}

/// Returns the number of rows of each record batch, from the headers of their messages.
fn arrow_lengths(bytes: &Bytes) -> Result<Vec<i64>, String> {
    let invalid = || "the footer is invalid".to_owned();
    let end = bytes.len().checked_sub(ARROW_END_BYTES).ok_or_else(invalid)?;
    let tail = bytes[end..].try_into().map_err(text)?;
    let start = end.checked_sub(read_footer_length(tail).map_err(text)?).ok_or_else(invalid)?;
    let footer = arrow_ipc::root_as_footer(&bytes[start..end]).map_err(text)?;
    let mut lengths = vec![];
    for block in footer.recordBatches().iter().flatten() {
        let start = usize::try_from(block.offset()).map_err(text)?;
        let message = bytes.get(start..).ok_or_else(invalid)?;
        let prefix_bytes = if message.starts_with(&ARROW_CONTINUATION) { 8 } else { 4 };
        let message = message.get(prefix_bytes..).ok_or_else(invalid)?;
        let message = arrow_ipc::root_as_message(message).map_err(text)?;
        match (message.header_as_record_batch(), message.header_type()) {
            (Some(batch), _) => lengths.push(batch.length()),
            // The reader ends here, too.
            (None, MessageHeader::NONE) => break,
            (None, other) => return Err(format!("messages of type {other:?} are not supported")),
        }
    }
    Ok(lengths)
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// Returns one value of a column.
fn cell(column: &ArrayRef, i: usize) -> Cell {
    if column.is_null(i) {
        return Cell::Null;
    }
    let list = |items: ArrayRef| Cell::List((0..items.len()).map(|i| cell(&items, i)).collect());
    match column.data_type() {
        DataType::Null => Cell::Null,
        DataType::Boolean => Cell::Boolean(column.as_boolean().value(i)),
        DataType::Int8 => Cell::Integer(column.as_primitive::<Int8Type>().value(i).into()),
        DataType::Int16 => Cell::Integer(column.as_primitive::<Int16Type>().value(i).into()),
        DataType::Int32 => Cell::Integer(column.as_primitive::<Int32Type>().value(i).into()),
        DataType::Int64 => Cell::Integer(column.as_primitive::<Int64Type>().value(i)),
        DataType::UInt8 => Cell::Unsigned(column.as_primitive::<UInt8Type>().value(i).into()),
        DataType::UInt16 => Cell::Unsigned(column.as_primitive::<UInt16Type>().value(i).into()),
        DataType::UInt32 => Cell::Unsigned(column.as_primitive::<UInt32Type>().value(i).into()),
        DataType::UInt64 => Cell::Unsigned(column.as_primitive::<UInt64Type>().value(i)),
        DataType::Float32 => Cell::Double(column.as_primitive::<Float32Type>().value(i).into()),
        DataType::Float64 => Cell::Double(column.as_primitive::<Float64Type>().value(i)),
        DataType::Utf8 => Cell::Text(column.as_string::<i32>().value(i).into()),
        DataType::LargeUtf8 => Cell::Text(column.as_string::<i64>().value(i).into()),
        DataType::Utf8View => Cell::Text(column.as_string_view().value(i).into()),
        DataType::List(_) => list(column.as_list::<i32>().value(i)),
        DataType::LargeList(_) => list(column.as_list::<i64>().value(i)),
        DataType::FixedSizeList(..) => list(column.as_fixed_size_list().value(i)),
        DataType::Struct(fields) => {
            let members = fields.iter().zip(column.as_struct().columns());
            let member =
                |(field, column): (&Arc<Field>, &ArrayRef)| (field.name().clone(), cell(column, i));
            Cell::Struct(members.map(member).collect())
        }
        other => Cell::Unreadable(format!(
            "columns of type {other} are not supported; write booleans, integers, floating-point \
             numbers, texts, lists or structs"
        )),
    }
}

#[cfg(test)]
mod tests;

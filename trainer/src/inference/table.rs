//! Tables with typed columns: Parquet and Arrow IPC files.

use std::io::{Cursor, Read};
use std::sync::Arc;

use arrow_array::builder::{BooleanBuilder, Float64Builder, Int64Builder, StringBuilder};
use arrow_array::cast::AsArray as _;
use arrow_array::types::{
    Float32Type, Float64Type, Int8Type, Int16Type, Int32Type, Int64Type, UInt8Type, UInt16Type,
    UInt32Type, UInt64Type,
};
use arrow_array::{Array, ArrayRef, RecordBatch};
use arrow_schema::{DataType, Field, Schema};
use bytes::Bytes;
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use parquet::basic::Compression;
use parquet::file::properties::WriterProperties;
use serde::Serialize;
use serde::de::DeserializeOwned;
use stoker_api::inference::{Column, ColumnType, RowFormat};
use stoker_storage::hash::sha256_hex;

use super::cell::Cell;
use super::rows::{Row, Shard, with_path};
use super::scan::{Division, ScannedFile, ShardRange};
use crate::{InvalidInput, Result};

/// Divides a file into shards by row index; the rows have no byte ranges.
pub(super) fn scan(
    format: RowFormat,
    file: &str,
    mut from: impl Read,
    division: Division,
) -> Result<ScannedFile> {
    let mut bytes = vec![];
    from.read_to_end(&mut bytes)
        .map_err(|error| super::infrastructure(format!("cannot read input {file}: {error}")))?;
    let (size, sha256) = (bytes.len() as u64, sha256_hex(&bytes));
    let mut rows = 0;
    let invalid_input = |why: String| InvalidInput(format!("{file}: {why}"));
    match format {
        RowFormat::Parquet => {
            let bytes = Bytes::from(bytes);
            let reader = ParquetRecordBatchReaderBuilder::try_new(bytes.clone());
            let reader = reader.map_err(|error| invalid_input(error.to_string()))?;
            rows = u64::try_from(reader.metadata().file_metadata().num_rows()).unwrap_or(0);
            // Detect unsupported compression now, not after the model is loaded.
            for batch in batches(format, bytes, 0, 1).map_err(invalid_input)? {
                batch.map_err(invalid_input)?;
            }
        }
        _ => {
            for batch in
                batches(format, Bytes::from(bytes), 0, usize::MAX).map_err(invalid_input)?
            {
                rows += batch.map_err(invalid_input)?.num_rows() as u64;
            }
        }
    }
    let mut ranges = vec![];
    let mut left = rows;
    while left > 0 {
        let taken = left.min(division.shard_rows.into());
        let (rows, sha256) = (u32::try_from(taken)?, String::new());
        division.add(&mut ranges, ShardRange { rows, start: 0, end: 0, sha256 })?;
        left -= taken;
    }
    Ok(ScannedFile { bytes: size, sha256, rows, columns: vec![], ranges })
}

type Batches = Box<dyn Iterator<Item = Result<RecordBatch, String>>>;

/// Returns batches of at most `num` rows in total, starting from row `first`.
fn batches(format: RowFormat, bytes: Bytes, first: usize, num: usize) -> Result<Batches, String> {
    if format == RowFormat::Parquet {
        let reader = ParquetRecordBatchReaderBuilder::try_new(bytes).map_err(text)?;
        let reader = reader.with_offset(first).with_limit(num).build().map_err(text)?;
        return Ok(Box::new(reader.map(|batch| batch.map_err(text))));
    }
    let reader = arrow_ipc::reader::FileReader::try_new(Cursor::new(bytes), None).map_err(text)?;
    Ok(Box::new(slice_rows(reader.map(|batch| batch.map_err(text)), first, num)))
}

/// Returns `num` rows starting from row `first`. Does not read further batches.
fn slice_rows(
    mut batches: impl Iterator<Item = Result<RecordBatch, String>>,
    first: usize,
    num: usize,
) -> impl Iterator<Item = Result<RecordBatch, String>> {
    let (mut skip, mut left) = (first, num);
    std::iter::from_fn(move || {
        if left == 0 {
            return None;
        }
        Some(batches.next()?.map(|batch| {
            let start = skip.min(batch.num_rows());
            let taken = left.min(batch.num_rows() - start);
            skip -= start;
            left -= taken;
            batch.slice(start, taken)
        }))
    })
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// Returns the rows of a shard.
///
/// # Errors
///
/// Fails if the file cannot be read. A column of an unsupported type is an error of the rows that
/// read it.
pub(super) fn rows<T: DeserializeOwned>(shard: &Shard<'_>) -> Result<Vec<Row<T>>> {
    let invalid_input = |why: String| crate::Error::from(InvalidInput(why));
    let (first, num) = (usize::try_from(shard.first_row)?, shard.num_rows as usize);
    let mut rows = Vec::with_capacity(num);
    for batch in batches(shard.format, shard.bytes.clone(), first, num).map_err(invalid_input)? {
        let batch = batch.map_err(invalid_input)?;
        let schema = batch.schema();
        for i in 0..batch.num_rows() {
            let columns = schema.fields().iter().zip(batch.columns());
            let row = columns.map(|(field, column)| (field.name().clone(), cell(column, i)));
            let read = serde_path_to_error::deserialize(Cell::Struct(row.collect()));
            rows.push(read.map_err(|error| with_path(&error.path().to_string(), error.inner())));
        }
    }
    Ok(rows)
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

/// A part with typed columns.
pub(super) struct Table {
    format: RowFormat,
    columns: Vec<(Column, Builder)>,
}

enum Builder {
    Boolean(BooleanBuilder),
    Integer(Int64Builder),
    Double(Float64Builder),
    Text(StringBuilder),
}

impl Table {
    pub(super) fn new(format: RowFormat, columns: &[Column]) -> Self {
        let builder = |column: &Column| match column.kind {
            ColumnType::Boolean => Builder::Boolean(BooleanBuilder::new()),
            ColumnType::Integer => Builder::Integer(Int64Builder::new()),
            ColumnType::Double => Builder::Double(Float64Builder::new()),
            ColumnType::String => Builder::Text(StringBuilder::new()),
        };
        let columns = columns.iter().map(|column| (column.clone(), builder(column))).collect();
        Self { format, columns }
    }

    pub(super) fn push(&mut self, row: &impl Serialize) -> Result<()> {
        let row = Cell::of(row)
            .map_err(|error| InvalidInput(format!("the program's output: {error}")))?;
        let Cell::Struct(mut fields) = row else {
            let why = format!("the program's output is {row}, but a table requires a struct");
            return Err(InvalidInput(why).into());
        };
        for (column, builder) in &mut self.columns {
            let index = fields.iter().position(|(name, _)| *name == column.name);
            let value = index.map_or(Cell::Null, |i| fields.swap_remove(i).1);
            if !builder.push(&value) {
                let why = format!(
                    "the program's output has {value} in {:?}, but output.columns declares type \
                     {:?}",
                    column.name, column.kind
                );
                return Err(InvalidInput(why).into());
            }
        }
        match fields.first() {
            None => Ok(()),
            Some((name, _)) => {
                let why = format!(
                    "the program's output has a field {name:?} that output.columns lacks; add it"
                );
                Err(InvalidInput(why).into())
            }
        }
    }

    pub(super) fn finish(self) -> Result<Vec<u8>> {
        let (fields, columns): (Vec<Field>, Vec<ArrayRef>) =
            self.columns.into_iter().map(|(column, builder)| builder.finish(&column.name)).unzip();
        let schema = Arc::new(Schema::new(fields));
        let batch = RecordBatch::try_new(schema.clone(), columns)?;
        let mut bytes = vec![];
        if self.format == RowFormat::Parquet {
            let properties = WriterProperties::builder().set_compression(Compression::SNAPPY);
            let mut writer = ArrowWriter::try_new(&mut bytes, schema, Some(properties.build()))?;
            writer.write(&batch)?;
            writer.close()?;
        } else {
            let mut writer = arrow_ipc::writer::FileWriter::try_new(&mut bytes, &schema)?;
            writer.write(&batch)?;
            writer.finish()?;
        }
        Ok(bytes)
    }
}

impl Builder {
    /// Appends a value; returns `false` if it has another type than the column.
    fn push(&mut self, value: &Cell) -> bool {
        match (self, value) {
            (Self::Boolean(builder), Cell::Null) => builder.append_null(),
            (Self::Integer(builder), Cell::Null) => builder.append_null(),
            (Self::Double(builder), Cell::Null) => builder.append_null(),
            (Self::Text(builder), Cell::Null) => builder.append_null(),
            (Self::Boolean(builder), Cell::Boolean(value)) => builder.append_value(*value),
            (Self::Integer(builder), Cell::Integer(value)) => builder.append_value(*value),
            (Self::Double(builder), Cell::Double(value)) => builder.append_value(*value),
            // Accept integers, as in JSON, where a whole number may lack a decimal point.
            (Self::Double(builder), Cell::Integer(value)) => builder.append_value(*value as f64),
            (Self::Double(builder), Cell::Unsigned(value)) => builder.append_value(*value as f64),
            (Self::Text(builder), Cell::Text(value)) => builder.append_value(value),
            _ => return false,
        }
        true
    }

    fn finish(self, name: &str) -> (Field, ArrayRef) {
        let array: ArrayRef = match self {
            Self::Boolean(mut builder) => Arc::new(builder.finish()),
            Self::Integer(mut builder) => Arc::new(builder.finish()),
            Self::Double(mut builder) => Arc::new(builder.finish()),
            Self::Text(mut builder) => Arc::new(builder.finish()),
        };
        (Field::new(name, array.data_type().clone(), true), array)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn columns() -> Vec<Column> {
        use ColumnType::{Boolean, Double, Integer, String};
        let of = |name: &str, kind| Column { name: name.into(), kind };
        vec![of("flag", Boolean), of("count", Integer), of("size", Double), of("name", String)]
    }

    fn written(format: RowFormat, rows: &[Value]) -> Bytes {
        let mut table = Table::new(format, &columns());
        rows.iter().for_each(|row| table.push(row).unwrap());
        table.finish().unwrap().into()
    }

    #[test]
    fn tables_round_trip_by_shards() {
        let row = |i: i64| match i % 3 {
            0 => json!({"flag": true, "count": i, "size": 0.1, "name": "日\n本"}),
            1 => json!({"flag": false, "count": -i, "size": 1e300, "name": ""}),
            _ => json!({"flag": null, "count": null, "size": null, "name": null}),
        };
        let rows: Vec<Value> = (0..7).map(row).collect();
        for format in [RowFormat::Parquet, RowFormat::Arrow] {
            let bytes = written(format, &rows);
            let division = Division { shard_rows: 3, shards_max: 3 };
            let scanned = scan(format, "file", bytes.as_ref(), division).unwrap();
            let shard_rows: Vec<u32> = scanned.ranges.iter().map(|range| range.rows).collect();
            assert_eq!((scanned.rows, shard_rows), (7, vec![3, 3, 1]), "{format:?}");
            let mut actual = vec![];
            for (first_row, num_rows) in [(0, 3), (3, 3), (6, 1)] {
                let (bytes, columns) = (bytes.clone(), &[][..]);
                let shard = Shard { format, bytes, columns, first_row, num_rows, is_first: false };
                actual.extend(shard.rows::<Value>().unwrap().into_iter().map(Result::unwrap));
            }
            assert_eq!(actual, rows, "{format:?}");
            let scan = |file: &str, bytes: &[u8], shards_max| {
                scan(format, file, bytes, Division { shards_max, ..division })
            };
            assert_eq!(scan("file", &written(format, &[]), 3).unwrap().rows, 0);
            let error = scan("a.file", b"no table", 3).unwrap_err().to_string();
            assert!(error.contains("a.file"), "{error}");
            let error = scan("file", &bytes, 2).unwrap_err().to_string();
            assert!(error.starts_with("more than 100000 shards"), "{error}");
        }
    }

    #[test]
    fn shards_may_span_arrow_batches() {
        let batch = |range: std::ops::Range<i64>| {
            let column: ArrayRef = Arc::new(arrow_array::Int64Array::from_iter_values(range));
            RecordBatch::try_from_iter([("count", column)]).unwrap()
        };
        let mut bytes = vec![];
        let schema = batch(0..1).schema();
        let mut writer = arrow_ipc::writer::FileWriter::try_new(&mut bytes, &schema).unwrap();
        for range in [0..3, 3..3, 3..4, 4..9] {
            writer.write(&batch(range)).unwrap();
        }
        writer.finish().unwrap();
        drop(writer);
        let (bytes, format) = (Bytes::from(bytes), RowFormat::Arrow);
        for (first_row, num_rows) in [(0, 2), (2, 3), (5, 4), (0, 9)] {
            let (bytes, columns) = (bytes.clone(), &[][..]);
            let shard = Shard { format, bytes, columns, first_row, num_rows, is_first: false };
            let rows = shard.rows::<Value>().unwrap().into_iter().map(Result::unwrap);
            let actual: Vec<u64> = rows.map(|row| row["count"].as_u64().unwrap()).collect();
            let expected: Vec<u64> = (first_row..first_row + u64::from(num_rows)).collect();
            assert_eq!(actual, expected);
        }
    }

    #[derive(Debug, serde::Deserialize, PartialEq, Serialize)]
    struct Sized {
        size: Option<f64>,
    }

    /// JSON cannot represent these values.
    #[test]
    fn nan_and_infinities_are_preserved() {
        let sizes =
            [Some(f64::NAN), Some(f64::INFINITY), None, Some(f64::NEG_INFINITY), Some(-0.0)];
        for format in [RowFormat::Parquet, RowFormat::Arrow] {
            let column = Column { name: "size".into(), kind: ColumnType::Double };
            let mut table = Table::new(format, &[column]);
            sizes.iter().for_each(|size| table.push(&Sized { size: *size }).unwrap());
            let bytes = table.finish().unwrap().into();
            let (columns, num_rows) = (&[][..], sizes.len() as u32);
            let shard = Shard { format, bytes, columns, first_row: 0, num_rows, is_first: false };
            let bits = |value: Option<f64>| value.map(f64::to_bits);
            let rows = shard.rows::<Sized>().unwrap().into_iter();
            let actual: Vec<_> = rows.map(|row| bits(row.unwrap().size)).collect();
            assert_eq!(actual, sizes.map(bits), "{format:?}");
        }
    }

    #[test]
    fn unreadable_columns_fail_only_when_read() {
        #[derive(Debug, serde::Deserialize)]
        struct Timed {
            #[serde(rename = "time")]
            _time: i64,
        }
        let size: ArrayRef = Arc::new(arrow_array::Float64Array::from(vec![0.5, 1.5]));
        let time: ArrayRef = Arc::new(arrow_array::TimestampSecondArray::from(vec![1, 2]));
        let batch = RecordBatch::try_from_iter([("time", time), ("size", size)]).unwrap();
        let mut bytes = vec![];
        let mut writer = ArrowWriter::try_new(&mut bytes, batch.schema(), None).unwrap();
        writer.write(&batch).unwrap();
        writer.close().unwrap();
        let (bytes, columns, format) = (Bytes::from(bytes), &[][..], RowFormat::Parquet);
        let shard = Shard { format, bytes, columns, first_row: 0, num_rows: 2, is_first: false };
        let sizes = shard.rows::<Sized>().unwrap().into_iter().map(|row| row.unwrap().size);
        assert_eq!(sizes.collect::<Vec<_>>(), [Some(0.5), Some(1.5)]);
        for row in shard.rows::<Timed>().unwrap() {
            let why = row.unwrap_err();
            assert!(
                why.starts_with("time: columns of type Timestamp")
                    && why.contains("write booleans"),
                "{why}"
            );
        }
    }

    #[test]
    fn batches_after_a_shard_are_not_read() {
        let column: ArrayRef = Arc::new(arrow_array::Int64Array::from(vec![1, 2, 3]));
        let batch = RecordBatch::try_from_iter([("count", column)]).unwrap();
        let mut num_read = 0;
        let all = std::iter::repeat_n(batch, 5).inspect(|_| num_read += 1).map(Ok);
        let rows: usize = slice_rows(all, 2, 3).map(|batch| batch.unwrap().num_rows()).sum();
        assert_eq!((rows, num_read), (3, 2));
    }

    #[test]
    fn mismatched_rows_are_refused_by_name() {
        let check = |row: Value, expected: &str| {
            let error = Table::new(RowFormat::Parquet, &columns()).push(&row).unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
        };
        check(json!({"count": 0.5}), "0.5 in \"count\"");
        check(json!({"name": 1}), "1 in \"name\"");
        check(json!({"other": 1}), "a field \"other\"");
        check(json!(1), "requires a struct");
    }
}

//! Tables with typed columns: Parquet, and Arrow's files of record batches.

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
use serde_json::{Map, Value};
use stoker_api::inference::{Column, ColumnType, RowFormat};
use stoker_storage::hash::sha256_hex;

use super::rows::{Row, Shard, named};
use super::scan::{Cut, Scanned};
use crate::{InvalidInput, Result};

/// Cuts a file into shards by its rows, which have no bytes of their own.
pub(super) fn scan(
    format: RowFormat,
    file: &str,
    mut from: impl Read,
    shard_rows: u32,
) -> Result<Scanned> {
    let mut bytes = vec![];
    from.read_to_end(&mut bytes)
        .map_err(|error| super::infrastructure(format!("input {file} cannot be read: {error}")))?;
    let (size, sha256) = (bytes.len() as u64, sha256_hex(&bytes));
    let mut rows = 0;
    let broken = |why: String| InvalidInput(format!("{file}: {why}"));
    match format {
        RowFormat::Parquet => {
            let reader = ParquetRecordBatchReaderBuilder::try_new(Bytes::from(bytes));
            let reader = reader.map_err(|error| broken(error.to_string()))?;
            rows = u64::try_from(reader.metadata().file_metadata().num_rows()).unwrap_or(0);
        }
        _ => {
            for batch in batches(format, Bytes::from(bytes), 0, usize::MAX).map_err(broken)? {
                rows += batch.map_err(broken)?.num_rows() as u64;
            }
        }
    }
    let mut cuts = vec![];
    let mut left = rows;
    while left > 0 {
        let taken = left.min(shard_rows.into());
        cuts.push(Cut { rows: u32::try_from(taken)?, start: 0, end: 0, sha256: String::new() });
        left -= taken;
    }
    Ok(Scanned { bytes: size, sha256, rows, columns: vec![], cuts })
}

type Batches = Box<dyn Iterator<Item = Result<RecordBatch, String>>>;

/// Batches of at most `num` rows from the row `first` on.
fn batches(format: RowFormat, bytes: Bytes, first: usize, num: usize) -> Result<Batches, String> {
    if format == RowFormat::Parquet {
        let reader = ParquetRecordBatchReaderBuilder::try_new(bytes).map_err(text)?;
        let reader = reader.with_offset(first).with_limit(num).build().map_err(text)?;
        return Ok(Box::new(reader.map(|it| it.map_err(text))));
    }
    let reader = arrow_ipc::reader::FileReader::try_new(Cursor::new(bytes), None).map_err(text)?;
    let (mut skip, mut left) = (first, num);
    Ok(Box::new(reader.map(move |batch| {
        let batch = batch.map_err(text)?;
        let start = skip.min(batch.num_rows());
        let taken = left.min(batch.num_rows() - start);
        skip -= start;
        left -= taken;
        Ok(batch.slice(start, taken))
    })))
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// The rows of a shard.
///
/// # Errors
///
/// The file cannot be read, or a column is of a type that rows cannot have.
pub(super) fn rows<T: DeserializeOwned>(shard: &Shard<'_>) -> Result<Vec<Row<T>>> {
    let broken = |why: String| crate::Error::from(InvalidInput(why));
    let (first, num) = (usize::try_from(shard.first_row)?, shard.num_rows as usize);
    let mut rows = Vec::with_capacity(num);
    for batch in batches(shard.format, shard.bytes.clone(), first, num).map_err(broken)? {
        let batch = batch.map_err(broken)?;
        let schema = batch.schema();
        for i in 0..batch.num_rows() {
            let mut row = Map::new();
            for (field, column) in schema.fields().iter().zip(batch.columns()) {
                let value = value(column, i)
                    .map_err(|why| broken(format!("column {:?}: {why}", field.name())))?;
                row.insert(field.name().clone(), value);
            }
            let read = serde_path_to_error::deserialize(Value::Object(row));
            rows.push(read.map_err(|error| named(&error.path().to_string(), error.inner())));
        }
    }
    Ok(rows)
}

/// One value of a column as JSON.
fn value(column: &ArrayRef, i: usize) -> Result<Value, String> {
    if column.is_null(i) {
        return Ok(Value::Null);
    }
    let list = |items: ArrayRef| {
        let values = (0..items.len()).map(|i| value(&items, i));
        values.collect::<Result<Vec<_>, String>>().map(Value::Array)
    };
    Ok(match column.data_type() {
        DataType::Null => Value::Null,
        DataType::Boolean => column.as_boolean().value(i).into(),
        DataType::Int8 => column.as_primitive::<Int8Type>().value(i).into(),
        DataType::Int16 => column.as_primitive::<Int16Type>().value(i).into(),
        DataType::Int32 => column.as_primitive::<Int32Type>().value(i).into(),
        DataType::Int64 => column.as_primitive::<Int64Type>().value(i).into(),
        DataType::UInt8 => column.as_primitive::<UInt8Type>().value(i).into(),
        DataType::UInt16 => column.as_primitive::<UInt16Type>().value(i).into(),
        DataType::UInt32 => column.as_primitive::<UInt32Type>().value(i).into(),
        DataType::UInt64 => column.as_primitive::<UInt64Type>().value(i).into(),
        DataType::Float32 => f64::from(column.as_primitive::<Float32Type>().value(i)).into(),
        DataType::Float64 => column.as_primitive::<Float64Type>().value(i).into(),
        DataType::Utf8 => column.as_string::<i32>().value(i).into(),
        DataType::LargeUtf8 => column.as_string::<i64>().value(i).into(),
        DataType::Utf8View => column.as_string_view().value(i).into(),
        DataType::List(_) => list(column.as_list::<i32>().value(i))?,
        DataType::LargeList(_) => list(column.as_list::<i64>().value(i))?,
        DataType::FixedSizeList(..) => list(column.as_fixed_size_list().value(i))?,
        DataType::Struct(fields) => {
            let columns = column.as_struct().columns();
            let members = fields.iter().zip(columns);
            let members = members.map(|(it, column)| Ok((it.name().clone(), value(column, i)?)));
            Value::Object(members.collect::<Result<_, String>>()?)
        }
        other => {
            return Err(format!(
                "{other} cannot be read: write booleans, integers, floating-point numbers, texts, lists or structs"
            ));
        }
    })
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
        let builder = |it: &Column| match it.kind {
            ColumnType::Boolean => Builder::Boolean(BooleanBuilder::new()),
            ColumnType::Integer => Builder::Integer(Int64Builder::new()),
            ColumnType::Double => Builder::Double(Float64Builder::new()),
            ColumnType::String => Builder::Text(StringBuilder::new()),
        };
        Self { format, columns: columns.iter().map(|it| (it.clone(), builder(it))).collect() }
    }

    pub(super) fn push(&mut self, row: &impl Serialize) -> Result<()> {
        let row = serde_json::to_value(row)?;
        let Value::Object(mut fields) = row else {
            let why = format!("the program's output is {row}, but a table's row must be a struct");
            return Err(InvalidInput(why).into());
        };
        for (column, builder) in &mut self.columns {
            let value = fields.remove(&column.name).unwrap_or(Value::Null);
            if !builder.push(&value) {
                let why = format!(
                    "the program's output has {value} in {:?}, which output.columns says is of type {:?}",
                    column.name, column.kind
                );
                return Err(InvalidInput(why).into());
            }
        }
        match fields.keys().next() {
            None => Ok(()),
            Some(name) => {
                let why = format!(
                    "the program's output has a field {name:?} that is not among output.columns: add it"
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
    /// Whether the value is of the column's type.
    fn push(&mut self, value: &Value) -> bool {
        let is_null = value.is_null();
        match self {
            Self::Boolean(it) if is_null || value.is_boolean() => it.append_option(value.as_bool()),
            Self::Integer(it) if is_null || value.is_i64() => it.append_option(value.as_i64()),
            Self::Double(it) if is_null || value.is_number() => it.append_option(value.as_f64()),
            Self::Text(it) if is_null || value.is_string() => it.append_option(value.as_str()),
            _ => return false,
        }
        true
    }

    fn finish(self, name: &str) -> (Field, ArrayRef) {
        let array: ArrayRef = match self {
            Self::Boolean(mut it) => Arc::new(it.finish()),
            Self::Integer(mut it) => Arc::new(it.finish()),
            Self::Double(mut it) => Arc::new(it.finish()),
            Self::Text(mut it) => Arc::new(it.finish()),
        };
        (Field::new(name, array.data_type().clone(), true), array)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn columns() -> Vec<Column> {
        use ColumnType::{Boolean, Double, Integer, String};
        let of = |name: &str, kind| Column { name: name.into(), kind };
        vec![of("flag", Boolean), of("count", Integer), of("size", Double), of("name", String)]
    }

    fn written(format: RowFormat, rows: &[Value]) -> Bytes {
        let mut table = Table::new(format, &columns());
        rows.iter().for_each(|it| table.push(it).unwrap());
        table.finish().unwrap().into()
    }

    #[test]
    fn what_is_written_is_read_back_shard_by_shard() {
        let row = |i: i64| match i % 3 {
            0 => json!({"flag": true, "count": i, "size": 0.1, "name": "日\n本"}),
            1 => json!({"flag": false, "count": -i, "size": 1e300, "name": ""}),
            _ => json!({"flag": null, "count": null, "size": null, "name": null}),
        };
        let rows: Vec<Value> = (0..7).map(row).collect();
        for format in [RowFormat::Parquet, RowFormat::Arrow] {
            let bytes = written(format, &rows);
            let scanned = scan(format, "file", bytes.as_ref(), 3).unwrap();
            let cut: Vec<u32> = scanned.cuts.iter().map(|it| it.rows).collect();
            assert_eq!((scanned.rows, cut), (7, vec![3, 3, 1]), "{format:?}");
            let mut found = vec![];
            for (first_row, num_rows) in [(0, 3), (3, 3), (6, 1)] {
                let (bytes, columns) = (bytes.clone(), &[][..]);
                let shard = Shard { format, bytes, columns, first_row, num_rows, is_first: false };
                found.extend(shard.rows::<Value>().unwrap().into_iter().map(Result::unwrap));
            }
            assert_eq!(found, rows, "{format:?}");
            assert_eq!(scan(format, "file", written(format, &[]).as_ref(), 3).unwrap().rows, 0);
            let error = scan(format, "a.file", &b"no table"[..], 3).unwrap_err().to_string();
            assert!(error.contains("a.file"), "{error}");
        }
    }

    #[test]
    fn shards_reach_over_batches_of_an_arrow_file() {
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
            let found: Vec<u64> = rows.map(|it| it["count"].as_u64().unwrap()).collect();
            let expected: Vec<u64> = (first_row..first_row + u64::from(num_rows)).collect();
            assert_eq!(found, expected);
        }
    }

    #[test]
    fn rows_that_do_not_fit_are_refused_by_name() {
        let check = |row: Value, expected: &str| {
            let error = Table::new(RowFormat::Parquet, &columns()).push(&row).unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
        };
        check(json!({"count": 0.5}), "0.5 in \"count\"");
        check(json!({"name": 1}), "1 in \"name\"");
        check(json!({"other": 1}), "a field \"other\"");
        check(json!(1), "must be a struct");
    }
}

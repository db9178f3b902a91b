//! Tables with typed columns: Parquet and Arrow IPC files.

use std::io::Read;
use std::sync::Arc;

use arrow_array::builder::{BooleanBuilder, Float64Builder, Int64Builder, StringBuilder};
use arrow_array::{Array, ArrayRef, RecordBatch};
use arrow_schema::{Field, Schema};
use parquet::arrow::ArrowWriter;
use parquet::basic::Compression;
use parquet::file::properties::WriterProperties;
use serde::Serialize;
use stoker_api::inference::{Column, ColumnType, RowFormat};
use stoker_storage::hash::sha256_hex;

use super::cell::Cell;
use super::scan::{Division, ScannedFile, ShardRange};
use super::table_reader::TableReader;
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
    let invalid_input = |why: String| InvalidInput(format!("{file}: {why}"));
    let mut reader = TableReader::open(format, bytes.into(), 1).map_err(invalid_input)?;
    let rows = reader.num_rows();
    // Detect errors now, not after the model is loaded: in Parquet, unsupported compression.
    let num_checked = if format == RowFormat::Parquet { rows.min(1) } else { rows };
    let mut checked = 0;
    while checked < num_checked {
        let batch = reader.load(checked).map_err(invalid_input)?;
        if batch.is_empty() {
            return Err(invalid_input(format!("the file ends before row {}", checked + 1)).into());
        }
        checked = batch.end;
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

/// A part with typed columns.
pub(super) struct Table {
    format: RowFormat,
    columns: Vec<PartColumn>,
    num_rows: usize,
}

struct PartColumn {
    column: Column,
    builder: Builder,
    /// Whether a row had this field, with a value or null.
    is_present: bool,
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
        let part_column = |column: &Column| PartColumn {
            column: column.clone(),
            builder: builder(column),
            is_present: false,
        };
        Self { format, columns: columns.iter().map(part_column).collect(), num_rows: 0 }
    }

    pub(super) fn push(&mut self, row: &impl Serialize) -> Result<(), InvalidInput> {
        let row = Cell::of(row)
            .map_err(|error| InvalidInput(format!("the program's output: {error}")))?;
        let Cell::Struct(mut fields) = row else {
            let why = format!("the program's output is {row}, but a table requires a struct");
            return Err(InvalidInput(why));
        };
        self.num_rows += 1;
        for PartColumn { column, builder, is_present } in &mut self.columns {
            let index = fields.iter().position(|(name, _)| *name == column.name);
            *is_present |= index.is_some();
            let value = match index.map(|i| fields.swap_remove(i).1) {
                None | Some(Cell::Skipped) => Cell::Null,
                Some(value) => value,
            };
            if !builder.push(&value) {
                let why = format!(
                    "the program's output has {value} in {:?}, but output.columns declares type \
                     {:?}",
                    column.name, column.kind
                );
                return Err(InvalidInput(why));
            }
        }
        match fields.iter().find(|(_, value)| *value != Cell::Skipped) {
            None => Ok(()),
            Some((name, _)) => {
                let why = format!(
                    "the program's output has a field {name:?} that output.columns lacks; add it"
                );
                Err(InvalidInput(why))
            }
        }
    }

    /// Returns a warning if the part has rows, but a column in none of them. The program may have
    /// renamed the field, or writes it only into rare rows.
    pub(super) fn absent_column(&self) -> Option<String> {
        let names = |is_present: bool| {
            let columns = self.columns.iter().filter(move |column| column.is_present == is_present);
            columns.map(|column| column.column.name.as_str())
        };
        let absent = names(false).next().filter(|_| self.num_rows > 0)?;
        Some(format!(
            "output.columns lists {absent:?}, but the {} outputs for these rows have only the \
             fields {}, so this column is null; correct output.columns if the program has renamed \
             a field",
            self.num_rows,
            names(true).collect::<Vec<_>>().join(", ")
        ))
    }

    pub(super) fn finish(self) -> Result<Vec<u8>> {
        let columns = self.columns.into_iter();
        let (fields, columns): (Vec<Field>, Vec<ArrayRef>) =
            columns.map(|PartColumn { column, builder, .. }| builder.finish(&column.name)).unzip();
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
    use bytes::Bytes;
    use serde_json::{Value, json};

    use super::*;

    fn columns() -> Vec<Column> {
        use ColumnType::{Boolean, Double, Integer, String};
        let of = |name: &str, kind| Column { name: name.into(), kind };
        vec![of("flag", Boolean), of("count", Integer), of("size", Double), of("name", String)]
    }

    fn open(format: RowFormat, bytes: Bytes) -> TableReader {
        TableReader::open(format, bytes, 1000).unwrap()
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
            let (mut actual, mut reader) = (vec![], open(format, bytes.clone()));
            for (first, num) in [(0, 3), (3, 3), (6, 1)] {
                let rows = reader.rows::<Value>(first, num).unwrap();
                actual.extend(rows.into_iter().map(Result::unwrap));
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
            let mut reader = open(format, table.finish().unwrap().into());
            let bits = |value: Option<f64>| value.map(f64::to_bits);
            let rows = reader.rows::<Sized>(0, sizes.len() as u32).unwrap().into_iter();
            let actual: Vec<_> = rows.map(|row| bits(row.unwrap().size)).collect();
            assert_eq!(actual, sizes.map(bits), "{format:?}");
        }
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

    #[test]
    fn columns_without_a_field_are_named() {
        #[derive(Serialize)]
        struct Output {
            count: Option<i64>,
            #[serde(skip_serializing_if = "Option::is_none")]
            size: Option<f64>,
            #[serde(skip_serializing_if = "Option::is_none")]
            unlisted: Option<f64>,
        }
        let check = |rows: &[Value], expected: Option<&str>| {
            let mut table = Table::new(RowFormat::Parquet, &columns()[1..3]);
            rows.iter().for_each(|row| table.push(row).unwrap());
            let why = table.absent_column();
            assert_eq!(why.is_some(), expected.is_some(), "{why:?}");
            assert!(why.unwrap_or_default().contains(expected.unwrap_or_default()));
        };
        check(&[], None);
        check(&[json!({"count": null}), json!({"size": 0.5})], None);
        check(
            &[json!({"count": 1}), json!({"count": null})],
            Some("lists \"size\", but the 2 outputs for these rows have only the fields count, so"),
        );
        // Fields that the program skips in all rows exist in its type.
        let mut table = Table::new(RowFormat::Parquet, &columns()[1..3]);
        table.push(&Output { count: None, size: None, unlisted: None }).unwrap();
        assert_eq!(table.absent_column(), None);
        let unlisted = Output { count: None, size: None, unlisted: Some(1.0) };
        let error = table.push(&unlisted).unwrap_err().to_string();
        assert!(error.contains("a field \"unlisted\" that output.columns lacks"), "{error}");
    }
}

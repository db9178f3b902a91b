//! Values as a Parquet file.

use std::io::Write;

use parquet::basic::Compression;
use parquet::data_type::{ByteArray, ByteArrayType, DataType, DoubleType, Int64Type};
use parquet::errors::{ParquetError, Result};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use parquet::schema::parser::parse_message_type;
use stoker_storage::metrics::Row;

/// The columns of the CSV output, with the types that pandas, Polars and DuckDB infer from the CSV.
const SCHEMA: &str = "message metrics {
    required int64 trial;
    required binary group (string);
    required int64 batches;
    required int64 epoch;
    required int64 attempt;
    optional double time;
    required binary metric (string);
    required double value;
}";

/// Number of values in memory until a row group is written.
const GROUP_VALUES: usize = 1 << 17;

/// A Parquet file with one row per value, written to `W` as a stream.
pub(super) struct ParquetFile<W: Write + Send> {
    writer: SerializedFileWriter<W>,
    columns: Columns,
}

/// Values that are not written yet.
#[derive(Default)]
struct Columns {
    trial: Vec<i64>,
    group: Vec<ByteArray>,
    batches: Vec<i64>,
    epoch: Vec<i64>,
    attempt: Vec<i64>,
    /// Times of the values that have one.
    time: Vec<f64>,
    /// For each value, 1 if it has a time, and 0 if it has none.
    has_time: Vec<i16>,
    metric: Vec<ByteArray>,
    value: Vec<f64>,
}

impl<W: Write + Send> ParquetFile<W> {
    /// Begins a file.
    pub(super) fn new(output: W) -> Result<Self> {
        let schema = parse_message_type(SCHEMA)?;
        let properties = WriterProperties::builder().set_compression(Compression::SNAPPY).build();
        let writer = SerializedFileWriter::new(output, schema.into(), properties.into())?;
        Ok(Self { writer, columns: Columns::default() })
    }

    /// Adds the values of a trial's rows.
    pub(super) fn add(&mut self, trial: u32, rows: &[Row]) -> Result<()> {
        for row in rows {
            for (name, value) in &row.metrics {
                self.columns.push(trial, row, name, *value);
            }
            if self.columns.value.len() >= GROUP_VALUES {
                self.write_group()?;
            }
        }
        Ok(())
    }

    /// Writes the remaining values and the end of the file.
    pub(super) fn finish(mut self) -> Result<W> {
        if !self.columns.value.is_empty() {
            self.write_group()?;
        }
        let mut output = self.writer.into_inner()?;
        // The end of the process would ignore a failure.
        output.flush()?;
        Ok(output)
    }

    fn write_group(&mut self) -> Result<()> {
        let Columns { trial, group, batches, epoch, attempt, time, has_time, metric, value } =
            std::mem::take(&mut self.columns);
        let mut rows = self.writer.next_row_group()?;
        write::<Int64Type, _>(&mut rows, &trial, None)?;
        write::<ByteArrayType, _>(&mut rows, &group, None)?;
        write::<Int64Type, _>(&mut rows, &batches, None)?;
        write::<Int64Type, _>(&mut rows, &epoch, None)?;
        write::<Int64Type, _>(&mut rows, &attempt, None)?;
        write::<DoubleType, _>(&mut rows, &time, Some(&has_time))?;
        write::<ByteArrayType, _>(&mut rows, &metric, None)?;
        write::<DoubleType, _>(&mut rows, &value, None)?;
        rows.close()?;
        Ok(())
    }
}

impl Columns {
    fn push(&mut self, trial: u32, row: &Row, metric: &str, value: f64) {
        let integer = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
        self.trial.push(trial.into());
        self.group.push(row.group.as_bytes().to_vec().into());
        self.batches.push(integer(row.batches));
        self.epoch.push(integer(row.epoch));
        self.attempt.push(row.attempt.into());
        self.time.extend(row.time);
        self.has_time.push(row.time.is_some().into());
        self.metric.push(metric.as_bytes().to_vec().into());
        self.value.push(value);
    }
}

/// Writes the next column of a row group. `levels` is 1 for each row with a value and 0 for others,
/// or `None` if all rows have one.
fn write<T: DataType, W: Write + Send>(
    rows: &mut SerializedRowGroupWriter<'_, W>,
    values: &[T::T],
    levels: Option<&[i16]>,
) -> Result<()> {
    let no_column = || ParquetError::General("the schema has too few columns".to_owned());
    let mut column = rows.next_column()?.ok_or_else(no_column)?;
    column.typed::<T>().write_batch(values, levels, None)?;
    column.close()
}

#[cfg(test)]
mod tests {
    use parquet::file::reader::{FileReader as _, SerializedFileReader};
    use parquet::record::Field;

    use super::*;

    /// Returns the rows of a file with the columns of [`SCHEMA`].
    fn read(file: Vec<u8>) -> Vec<Vec<Field>> {
        let reader = SerializedFileReader::new(bytes::Bytes::from(file)).unwrap();
        let rows = reader.get_row_iter(None).unwrap().map(Result::unwrap);
        rows.map(|row| row.get_column_iter().map(|(_, field)| field.clone()).collect()).collect()
    }

    fn row(batches: u64, time: Option<f64>, metrics: &[(&str, f64)]) -> Row {
        let metrics = metrics.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
        Row { group: "training".to_owned(), batches, epoch: 1, attempt: 2, time, metrics }
    }

    #[test]
    fn values_become_rows() {
        let mut file = ParquetFile::new(Vec::new()).unwrap();
        file.add(3, &[row(20, Some(1.5), &[("a", 0.1), ("b", f64::INFINITY)])]).unwrap();
        file.add(4, &[row(30, None, &[("a", f64::NAN)])]).unwrap();
        let rows = read(file.finish().unwrap());
        let text = |text: &str| Field::Str(text.to_owned());
        let expected = |trial, batches, time, metric, value| {
            let [trial, batches, epoch, attempt] = [trial, batches, 1, 2].map(Field::Long);
            let (metric, value) = (text(metric), Field::Double(value));
            vec![trial, text("training"), batches, epoch, attempt, time, metric, value]
        };
        assert_eq!(rows[0], expected(3, 20, Field::Double(1.5), "a", 0.1));
        assert_eq!(rows[1], expected(3, 20, Field::Double(1.5), "b", f64::INFINITY));
        assert_eq!(rows[2][..7], expected(4, 30, Field::Null, "a", 0.0)[..7]);
        assert!(matches!(rows[2][7], Field::Double(value) if value.is_nan()), "{rows:?}");
        assert_eq!(rows.len(), 3);
    }

    #[test]
    fn files_without_values_are_valid() {
        let file = ParquetFile::new(Vec::new()).unwrap();
        assert!(read(file.finish().unwrap()).is_empty());
    }

    #[test]
    fn long_files_have_several_row_groups() {
        let mut file = ParquetFile::new(Vec::new()).unwrap();
        let rows: Vec<Row> = (0..GROUP_VALUES as u64 + 1)
            .map(|batches| row(batches, Some(0.5), &[("loss", 1.0)]))
            .collect();
        file.add(0, &rows).unwrap();
        let file = file.finish().unwrap();
        let reader = SerializedFileReader::new(bytes::Bytes::from(file.clone())).unwrap();
        assert_eq!(reader.metadata().num_row_groups(), 2);
        let read = read(file);
        assert_eq!(read.len(), rows.len());
        assert_eq!(read.last().unwrap()[2], Field::Long(GROUP_VALUES as i64));
    }
}

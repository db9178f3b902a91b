//! Tests of reading tables at any position.

use arrow_array::types::Int32Type;
use arrow_array::{Float64Array, Int64Array, ListArray, StringArray, TimestampSecondArray};
use parquet::arrow::ArrowWriter;
use parquet::file::properties::WriterProperties;
use proptest::prelude::*;
use serde::Deserialize;
use serde_json::Value;

use super::*;

const FORMATS: [RowFormat; 2] = [RowFormat::Parquet, RowFormat::Arrow];

/// Returns rows with numbers, repeated texts, lists and nulls.
fn batch(rows: Range<i64>) -> RecordBatch {
    let is_null = |row: &i64| row % 5 == 0;
    let index: ArrayRef = Arc::new(Int64Array::from_iter_values(rows.clone()));
    let name = rows.clone().map(|row| (!is_null(&row)).then(|| format!("name {}", row % 7)));
    let name: ArrayRef = Arc::new(name.collect::<StringArray>());
    let list = rows.map(|row| (!is_null(&row)).then(|| (0..row as i32 % 3).map(Some)));
    let list: ArrayRef = Arc::new(ListArray::from_iter_primitive::<Int32Type, _, _>(list));
    RecordBatch::try_from_iter_with_nullable([
        ("row", index, false),
        ("name", name, true),
        ("list", list, true),
    ])
    .unwrap()
}

/// Writes a file with row groups or record batches of these lengths.
fn file(format: RowFormat, lengths: &[i64]) -> Bytes {
    let (mut bytes, schema, mut row) = (vec![], batch(0..0).schema(), 0);
    let batches = lengths.iter().map(|length| {
        row += length;
        batch(row - length..row)
    });
    if format == RowFormat::Parquet {
        // Small pages: skipping starts in other pages and within a page.
        let properties = WriterProperties::builder()
            .set_data_page_row_count_limit(50)
            .set_write_batch_size(10)
            .build();
        let mut writer = ArrowWriter::try_new(&mut bytes, schema, Some(properties)).unwrap();
        for batch in batches {
            writer.write(&batch).unwrap();
            writer.flush().unwrap();
        }
        writer.close().unwrap();
    } else {
        let mut writer = arrow_ipc::writer::FileWriter::try_new(&mut bytes, &schema).unwrap();
        batches.for_each(|batch| writer.write(&batch).unwrap());
        writer.finish().unwrap();
    }
    bytes.into()
}

fn open(format: RowFormat, bytes: Bytes) -> Result<TableReader, String> {
    TableReader::open(format, bytes, 1000)
}

fn read(reader: &mut TableReader, first: u64, num: u32) -> Vec<Value> {
    reader.rows(first, num).unwrap().into_iter().map(Result::unwrap).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// The ranges may be in any order, overlap, and end after the last row.
    #[test]
    fn rows_do_not_depend_on_earlier_reads(
        lengths in prop::collection::vec(
            prop_oneof![Just(0_i64), 1..10_i64, 100..1500_i64], 0..6
        ),
        ranges in prop::collection::vec((0.0..1.1_f64, 0..400_u32), 1..12),
        is_sorted in any::<bool>(),
    ) {
        let num: i64 = lengths.iter().sum();
        let mut ranges: Vec<(u64, u32)> =
            ranges.iter().map(|(at, rows)| ((at * num as f64) as u64, *rows)).collect();
        if is_sorted {
            ranges.sort_unstable();
        }
        for format in FORMATS {
            let bytes = file(format, &lengths);
            let mut reader = open(format, bytes.clone()).unwrap();
            prop_assert_eq!(reader.num_rows(), num as u64);
            let all = read(&mut reader, 0, num as u32);
            prop_assert!(all.iter().enumerate().all(|(i, row)| row["row"] == i));
            let mut reader = open(format, bytes).unwrap();
            for (first, rows) in &ranges {
                let start = (*first as usize).min(all.len());
                let end = (start + *rows as usize).min(all.len());
                prop_assert_eq!(&read(&mut reader, *first, *rows), &all[start..end]);
            }
        }
    }
}

/// Neither rows of other groups nor long gaps are decoded, and short gaps are not skipped again
/// from the start of the group.
#[test]
fn reading_forward_decodes_and_skips_few_rows() {
    let starts = [0, 10, 10, 20, 1000];
    for (last, row, expected) in [
        (0..0, 0, None),
        (0..0, 9, Some(0)),
        (4..8, 4, None),
        (4..8, 8, None),
        (4..8, 3, Some(0)),
        (4..8, 10, Some(2)),
        (5..10, 10, None),
        (5..10, 12, Some(2)),
        (18..22, 17, Some(2)),
        (500..600, 600, None),
        (500..600, 615, None),
        (500..600, 630, Some(3)),
        (0..5, 999, Some(3)),
    ] {
        assert_eq!(group_to_open(&starts, &last, row), expected, "{last:?} {row}");
    }
}

#[test]
fn shards_share_a_decoded_batch() {
    for format in FORMATS {
        let mut reader = open(format, file(format, &[1000, 1000])).unwrap();
        let address = |reader: &TableReader| reader.batch.column(0).to_data().buffers()[0].as_ptr();
        read(&mut reader, 0, 10);
        let before = address(&reader);
        for (first, num) in [(10, 10), (90, 400), (300, 5)] {
            assert_eq!(read(&mut reader, first, num).len(), num as usize);
            assert_eq!(address(&reader), before, "{format:?}: decoded again for row {first}");
        }
        // The rows of the first batch are not decoded on the way to the second one.
        let mut reader = open(format, file(format, &[1000, 1000])).unwrap();
        let start = if format == RowFormat::Arrow { 1000 } else { 1500 };
        assert_eq!(reader.load(1500).unwrap().start, start, "{format:?}");
    }
}

#[test]
fn damaged_footers_are_errors() {
    for format in FORMATS {
        let bytes = file(format, &[3]);
        for num in [0, 5, bytes.len() / 2, bytes.len() - 1] {
            assert!(open(format, bytes.slice(..num)).is_err(), "{format:?} {num}");
        }
    }
}

#[test]
fn unreadable_columns_fail_only_when_read() {
    #[derive(Debug, Deserialize)]
    struct Timed {
        #[serde(rename = "time")]
        _time: i64,
    }
    #[derive(Debug, Deserialize)]
    struct Sized {
        size: f64,
    }
    let size: ArrayRef = Arc::new(Float64Array::from(vec![0.5, 1.5]));
    let time: ArrayRef = Arc::new(TimestampSecondArray::from(vec![1, 2]));
    let batch = RecordBatch::try_from_iter([("time", time), ("size", size)]).unwrap();
    let mut bytes = vec![];
    let mut writer = ArrowWriter::try_new(&mut bytes, batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
    let mut reader = open(RowFormat::Parquet, bytes.into()).unwrap();
    let sizes = reader.rows::<Sized>(0, 2).unwrap().into_iter().map(|row| row.unwrap().size);
    assert_eq!(sizes.collect::<Vec<_>>(), [0.5, 1.5]);
    for row in reader.rows::<Timed>(0, 2).unwrap() {
        let why = row.unwrap_err().reason;
        assert!(
            why.starts_with("time: columns of type Timestamp") && why.contains("write booleans"),
            "{why}"
        );
    }
}

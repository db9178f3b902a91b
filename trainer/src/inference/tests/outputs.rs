//! Tests of outputs that the format of the parts cannot represent.

use serde::Serialize;

use super::*;

/// Returns other fields for rows without a size.
struct Mixed;

#[derive(Serialize)]
#[serde(untagged)]
enum Output {
    Sized { name: String, size: i64 },
    Unsized { name: String, why: &'static str },
}

impl Inference for Mixed {
    type Input = Row;
    type Output = Output;

    fn new(_: &Context) -> Result<Self> {
        Ok(Self)
    }

    fn batch(&mut self, rows: Vec<Row>) -> Result<Vec<Output>> {
        let output = |Row { name, size }| match size {
            Some(size) => Output::Sized { name, size },
            None => Output::Unsized { name, why: "no size" },
        };
        Ok(rows.into_iter().map(output).collect())
    }
}

fn work_on_mixed(job: &TestJob) -> Result<()> {
    let context = job.context(0, 1, 0);
    plan::plan(&context)?;
    work::work::<Mixed>(&context)
}

/// Row numbers count the rows of the input, including rejected rows.
#[test]
fn csv_rows_with_other_fields_fail_the_job() {
    let text = row("a", 1) + "no json\n" + &row("b", Value::Null);
    let mut job = TestJob::new(&[("a.jsonl", &text)]);
    (job.task.output.format, job.task.on_error) = (RowFormat::Csv, OnError::Skip);
    let expected = "a.jsonl: row 3: the program's output has the fields name, why, but the first \
                    row of this part, which names the columns of CSV, has name, size; return";
    check_error(work_on_mixed(&job), ExitCode::InvalidHyperparameters, expected);
    assert!(!job.commit(0).exists());
}

/// Variants of an enum may have fields that no row of a shard has.
#[cfg(feature = "parquet")]
#[test]
fn columns_that_no_row_has_are_null() {
    use stoker_api::inference::{Column, ColumnType};
    let sized: String = (0..3).map(|i| row("x", i)).collect();
    let mut job = TestJob::new(&[("a.jsonl", &sized)]);
    job.task.output.format = RowFormat::Arrow;
    let (text, integer) = (ColumnType::String, ColumnType::Integer);
    let columns = [("name", text), ("size", integer), ("why", text)];
    job.task.output.columns =
        columns.map(|(name, kind)| Column { name: name.into(), kind }).to_vec();
    work_on_mixed(&job).unwrap();
    assert!(job.commit(0).exists());
}

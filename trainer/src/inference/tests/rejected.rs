//! Tests of rejected rows: stop requests, lengths of reasons, and inputs without a valid row.

use std::cell::Cell;

use super::*;
use crate::stop::StopSignal;

/// Rejects all rows, and requests a stop with the row whose index is in `data`.
struct Reject {
    stop: StopSignal,
    stop_at: u64,
    num_checked: Cell<u64>,
}

impl Inference for Reject {
    type Input = Row;
    type Output = Value;

    fn new(context: &Context) -> Result<Self> {
        let (stop, stop_at) = (context.stop.clone(), context.data()?);
        Ok(Self { stop, stop_at, num_checked: Cell::new(0) })
    }

    fn check(&self, _: &Row) -> Result<()> {
        if self.num_checked.get() == self.stop_at {
            self.stop.set();
        }
        self.num_checked.set(self.num_checked.get() + 1);
        Err("rejected".into())
    }

    fn batch(&mut self, _: Vec<Row>) -> Result<Vec<Value>> {
        unreachable!("no row is valid")
    }
}

/// Returns the number of shards that were committed before the stop.
fn commits_before_stop(num_rows: i64, shard_rows: u32, stop_at: u64) -> u32 {
    let text: String = (0..num_rows).map(|i| row("x", i)).collect();
    let mut job = TestJob::new(&[("a.jsonl", &text)]);
    (job.task.shard_rows, job.task.on_error) = (shard_rows, OnError::Skip);
    let mut context = job.context(0, 1, 0);
    context.config.data = json!(stop_at);
    plan::plan(&context).unwrap();
    check_error(work::work::<Reject>(&context), ExitCode::Preempted, "committed shards are kept");
    (0..).find(|shard| !job.commit(*shard).exists()).unwrap()
}

#[test]
fn rejected_rows_do_not_delay_a_stop() {
    assert_eq!(commits_before_stop(9, 3, 0), 1);
    assert_eq!(commits_before_stop(9, 3, 4), 2);
    // Within a shard, the stop takes effect after at most 1,024 rows.
    assert_eq!(commits_before_stop(2000, 2000, 10), 0);
    assert_eq!(commits_before_stop(6000, 3000, 3000), 1);
}

#[test]
fn long_reasons_are_shortened_in_the_middle() {
    let long = "ä".repeat(100_000);
    let mut job = TestJob::new(&[("a.jsonl", &(row("a", 1) + &row("b", long.as_str())))]);
    let message = job.run().unwrap_err().to_string();
    assert!(message.contains("use --skip-errors") && message.len() < 1000, "{message}");
    job.task.on_error = OnError::Skip;
    job.run().unwrap();
    let errors = job.manifest().errors.unwrap();
    let listed: Value = read(&job.out(&errors.name));
    let reason = listed["reason"].as_str().unwrap();
    assert_eq!(reason.chars().count(), 200, "{reason}");
    assert!(reason.starts_with("size: invalid type: string \"ää"), "{reason}");
    assert!(reason.contains("ä ... ä") && reason.contains("ä\", expected i64"), "{reason}");
}

#[test]
fn jobs_without_a_valid_row_fail() {
    let text: String = (0..5).map(|i| format!("{{\"nom\":{i}}}\n")).collect();
    let mut job = TestJob::new(&[("a.jsonl", &text), ("b.jsonl", "")]);
    job.task.on_error = OnError::Skip;
    let code = ExitCode::InvalidHyperparameters;
    let expected = "all 5 rows of the input were rejected: a.jsonl: row 1: missing field `name`";
    check_error(job.run(), code, expected);
    let error = job.run().unwrap_err().to_string();
    assert!(error.contains("; a.jsonl: row 3: ") && !error.contains("row 4"), "{error}");
    assert!(error.contains("; correct the input or the program"), "{error}");
    assert!(job.commit(0).exists() && !job.out("manifest.json").exists());
    // One valid row is enough, and an input without rows has none to reject.
    for text in [text + &row("x", 1), String::new()] {
        let mut job = TestJob::new(&[("a.jsonl", &text)]);
        job.task.on_error = OnError::Skip;
        job.run().unwrap();
        assert!(job.out("manifest.json").exists());
    }
}

#[test]
fn missing_column_is_not_to_be_skipped() {
    let mut job = TestJob::new(&[("a.csv", "nom,size\nx,1\n"), ("b.csv", "name,size\ny,2\n")]);
    let error = job.run().unwrap_err().to_string();
    let expected = "a.csv: no column `name`; the columns are nom, size; correct the input";
    assert!(error.starts_with(expected), "{error}");
    // Another file has the column.
    job.task.on_error = OnError::Skip;
    job.run().unwrap();
    assert_eq!(job.manifest().rejected, 1);
}

//! Tests of rejected rows.

use super::*;

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

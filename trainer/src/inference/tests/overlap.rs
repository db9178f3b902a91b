//! Tests of reads and commits that overlap with the model.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use stoker_api::inference::FILES_FORMAT;

use super::*;
use crate::collective::ProgressState;
use crate::inference::commits::Commits;
use crate::inference::input_reader::InputReader;
use crate::inference::output_folder::OutputFolder;
use crate::inference::source::Source;

fn wait_until(is_done: impl Fn() -> bool) {
    for _ in 0..12_000 {
        if is_done() {
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    panic!("not done after 60 s");
}

/// Returns a job with these rows in shards of one row, and its context.
fn planned_job(names: &[&str]) -> (TestJob, Context) {
    let text: String = names.iter().map(|name| row(name, 1)).collect();
    let mut job = TestJob::new(&[("a.jsonl", &text)]);
    job.task.shard_rows = 1;
    let context = job.context(0, 1, 0);
    plan::plan(&context).unwrap();
    (job, context)
}

#[test]
fn prefetched_shards_are_not_read_again() {
    let (job, context) = planned_job(&["a", "b", "c"]);
    let output = OutputFolder::open(&context).unwrap();
    let plan = output.plan().unwrap();
    let source = Source::open(&job.task.input, &output.rt).unwrap();
    let mut reader = InputReader::new(&context, &plan, source, output.rt.clone());
    let names = |reader: &mut InputReader<'_>, shard: u32| -> Result<Vec<String>> {
        let rows = reader.rows::<Row>(shard, &plan.shards[shard as usize])?;
        Ok(rows.into_iter().map(|row| row.unwrap().name).collect())
    };
    reader.prefetch(1, &plan.shards[1]);
    wait_until(|| reader.is_prefetched());
    let path = job.folder.path().join("in/a.jsonl");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace("\"b\"", "\"B\"").replace("\"c\"", "\"C\"")).unwrap();
    assert_eq!(names(&mut reader, 1).unwrap(), ["b"]);
    // The hashes of prefetched bytes are verified, too, and another shard may be read instead.
    for is_prefetched in [false, true] {
        if is_prefetched {
            reader.prefetch(2, &plan.shards[2]);
        }
        let error = names(&mut reader, 2).unwrap_err().to_string();
        assert!(error.contains("bytes 44 to 66 are not what they were"), "{error}");
    }
    reader.prefetch(1, &plan.shards[1]);
    assert_eq!(names(&mut reader, 0).unwrap(), ["a"]);
}

/// The part of a commit exists before the commit, and a commit before the next one begins.
#[test]
fn commits_are_written_one_at_a_time() {
    let (job, context) = planned_job(&["a", "b", "c"]);
    let output = OutputFolder::open(&context).unwrap();
    let mut commits = Commits::new(&context, &output, 0, 3);
    let commit = |shard: u32| Commit {
        format: FILES_FORMAT,
        shard,
        of: String::new(),
        part: format!("part-{shard}"),
        bytes: 1,
        sha256: String::new(),
        rows: 1,
        rejected: vec![],
        attempt: 0,
    };
    commits.start(commit(0), Bytes::from_static(b"0"), 1).unwrap();
    commits.start(commit(1), Bytes::from_static(b"1"), 1).unwrap();
    assert!(job.out("part-0").exists() && job.commit(0).exists());
    // A part that cannot be written has no commit. The next call reports this.
    std::fs::create_dir_all(job.out("part-2/file")).unwrap();
    commits.start(commit(2), Bytes::from_static(b"2"), 1).unwrap();
    assert!(job.commit(1).exists());
    let failed = |error: Error| error.to_string().contains("part-2");
    assert!(commits.start(commit(1), Bytes::new(), 1).is_err_and(failed));
    assert!(!job.commit(2).exists());
    std::fs::remove_dir_all(job.out("part-2")).unwrap();
    commits.start(commit(2), Bytes::from_static(b"2"), 1).unwrap();
    drop(commits);
    assert!(job.commit(2).exists(), "the commit was dropped");
}

/// Fails with the second shard.
struct Fail;

impl Inference for Fail {
    type Input = Row;
    type Output = Value;

    fn new(_: &Context) -> Result<Self> {
        Ok(Self)
    }

    fn batch(&mut self, rows: Vec<Row>) -> Result<Vec<Value>> {
        match rows[0].name.as_str() {
            "panic" => panic!("a bad row"),
            "error" => Err("a bad row".into()),
            _ => Ok(vec![Value::Null; rows.len()]),
        }
    }
}

#[test]
fn shards_before_a_failure_are_committed() {
    for name in ["error", "panic"] {
        let (job, context) = planned_job(&["a", name, "c"]);
        let work = || work::work::<Fail>(&context);
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        assert!(result.is_err() || result.is_ok_and(|worked| worked.is_err()));
        let committed = (0..3).map(|shard| job.commit(shard).exists());
        assert_eq!(committed.collect::<Vec<_>>(), [true, false, false], "{name}");
    }
}

/// Without overlap, the second shard would not have been processed.
#[test]
fn a_failed_commit_precedes_later_errors() {
    let (job, context) = planned_job(&["a", "error"]);
    let part = "part-00000-of-00002-0b3f9c1e-0.jsonl";
    std::fs::create_dir_all(job.out(part).join("file")).unwrap();
    let error = work::work::<Fail>(&context).unwrap_err();
    assert!(error.to_string().contains(part), "{error}");
    assert!(!job.commit(0).exists());
}

/// Returns its position as output.
struct Position(Arc<ProgressState>);

impl Inference for Position {
    type Input = Row;
    type Output = Value;

    fn new(context: &Context) -> Result<Self> {
        Ok(Self(context.distributed().progress.clone()))
    }

    fn batch(&mut self, rows: Vec<Row>) -> Result<Vec<Value>> {
        Ok(vec![Value::from(self.0.position()); rows.len()])
    }
}

/// The watchdog ends a process whose batch takes too long.
#[test]
fn batches_are_steps_of_the_watchdog() {
    let (job, context) = planned_job(&["a", "b"]);
    work::work::<Position>(&context).unwrap();
    let position = context.distributed().progress.position();
    assert_eq!(position, "before its first step waiting for the storage or the runner");
    finish::finish(&context).unwrap();
    let of_step = |step| format!("\"at step {step} after 0 collective calls\"\n");
    assert_eq!(job.parts(), [of_step(0), of_step(1)]);
}

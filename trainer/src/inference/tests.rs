//! Tests of jobs from plan to manifest, in one process.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Value, json};
use stoker_api::contract::ExitCode;
use stoker_api::inference::{
    Commit, InferenceInput, InferenceOutput, InferenceTask, OnError, OutputManifest, Role,
    RowFormat, commit_path, plan_path,
};

use super::{Inference, finish, plan, work};
use crate::context::Context;
use crate::error::exit_code;
use crate::train::Standalone;
use crate::{Error, Result};

mod output_folder;
mod outputs;
mod overlap;
mod rejected;

/// Returns each row as output.
struct Echo;

#[derive(Debug, Deserialize)]
struct Row {
    name: String,
    size: Option<i64>,
}

impl Inference for Echo {
    type Input = Row;
    type Output = Value;

    fn new(_: &Context) -> Result<Self> {
        Ok(Self)
    }

    fn batch(&mut self, rows: Vec<Row>) -> Result<Vec<Value>> {
        assert!(rows.len() <= 2, "a batch exceeds the limit");
        Ok(rows.into_iter().map(|row| json!({"name": row.name, "size": row.size})).collect())
    }
}

/// A job with files in a temporary directory.
struct TestJob {
    folder: tempfile::TempDir,
    task: InferenceTask,
}

impl TestJob {
    /// Creates a job with these input files and shards of three rows.
    fn new(files: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let input = folder.path().join("in");
        std::fs::create_dir(&input).unwrap();
        for (name, text) in files {
            std::fs::write(input.join(name), text).unwrap();
        }
        let url = |name: &str| folder.path().join(name).display().to_string();
        let task = InferenceTask {
            role: Role::Work,
            slot: 0,
            slots: 1,
            input: InferenceInput { url: url("in"), endpoint: None, format: None },
            output: InferenceOutput { url: Some(url("out")), ..InferenceOutput::default() },
            checkpoint: None,
            has_hyperparameters: true,
            replace: false,
            replaced_job: None,
            shard_rows: 3,
            batch_rows: 2,
            on_error: OnError::Fail,
        };
        Self { folder, task }
    }

    fn context(&self, slot: u32, slots: u32, attempt: u32) -> Context {
        let mut context = Standalone { quiet: true, ..Standalone::default() }.context().unwrap();
        context.config.experiment_id = "0b3f9c1e-77aa".into();
        context.config.attempt = attempt;
        context.config.inference = Some(InferenceTask { slot, slots, ..self.task.clone() });
        context
    }

    /// Starts the same program again.
    fn again(&self) -> Result<()> {
        let context = self.context(0, 1, 1);
        super::prepare(context, true).map(drop)
    }

    fn run(&self) -> Result<()> {
        let context = self.context(0, 1, 0);
        plan::plan(&context)?;
        work::work::<Echo>(&context)?;
        finish::finish(&context)
    }

    fn out(&self, path: &str) -> std::path::PathBuf {
        self.folder.path().join("out").join(path)
    }

    fn manifest(&self) -> OutputManifest {
        read(&self.out("manifest.json"))
    }

    /// Returns the texts of the parts.
    fn parts(&self) -> Vec<String> {
        let parts = self.manifest().parts;
        parts.iter().map(|part| std::fs::read_to_string(self.out(&part.name)).unwrap()).collect()
    }

    fn commit(&self, shard: u32) -> std::path::PathBuf {
        self.out(&commit_path("0b3f9c1e-77aa", shard))
    }
}

fn read<T: serde::de::DeserializeOwned>(path: &Path) -> T {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn row(name: &str, size: impl Into<Value>) -> String {
    format!("{}\n", json!({"name": name, "size": size.into()}))
}

#[track_caller]
fn check_error(result: Result<()>, code: ExitCode, expected: &str) {
    let error: Error = result.unwrap_err();
    assert!(error.to_string().contains(expected), "{error}");
    assert_eq!(exit_code(&*error), code, "{error}");
}

#[test]
fn shards_do_not_span_files() {
    let lines = |range: std::ops::Range<i64>| range.map(|i| row("x", i)).collect::<String>();
    let job =
        TestJob::new(&[("b.jsonl", &lines(10..12)), ("a.jsonl", &lines(0..4)), ("c.jsonl", "")]);
    job.run().unwrap();
    assert_eq!(job.parts(), [lines(0..3), lines(3..4), lines(10..12)]);
    let manifest = job.manifest();
    let positions: Vec<_> =
        manifest.parts.iter().map(|part| (part.file, part.first_row, part.input_rows)).collect();
    assert_eq!(positions, [(0, 0, 3), (0, 3, 1), (1, 0, 2)]);
    let files: Vec<_> = manifest.input.iter().map(|file| (file.name.as_str(), file.rows)).collect();
    assert_eq!(files, [("a.jsonl", 4), ("b.jsonl", 2), ("c.jsonl", 0)]);
    assert_eq!(manifest.parts[1].name, "part-00001-of-00003-0b3f9c1e-0.jsonl");
}

#[test]
fn csv_input_is_converted_to_json() {
    let text = "\u{feff}size,name\r\n1,\"a, \"\"b\"\"\nc\"\r\n,日本\r\n3,\r\n4,d\r\n";
    let mut job = TestJob::new(&[("a.csv", text)]);
    job.task.output.format = RowFormat::JsonLines;
    job.run().unwrap();
    let first = row("a, \"b\"\nc", 1) + &row("日本", Value::Null) + &row("", 3);
    assert_eq!(job.parts(), [first, row("d", 4)]);
}

#[test]
fn slots_share_the_shards() {
    let text: String = (0..20).map(|i| row("x", i)).collect();
    let single = TestJob::new(&[("a.jsonl", &text)]);
    single.run().unwrap();
    let shared = TestJob::new(&[("a.jsonl", &text)]);
    plan::plan(&shared.context(0, 1, 0)).unwrap();
    work::work::<Echo>(&shared.context(1, 2, 1)).unwrap();
    check_error(
        finish::finish(&shared.context(0, 2, 2)),
        ExitCode::Infrastructure,
        "including 0, 2, 4, 6",
    );
    // The remaining shards are distributed over another number of slots.
    for slot in 0..3 {
        work::work::<Echo>(&shared.context(slot, 3, 3 + slot)).unwrap();
    }
    finish::finish(&shared.context(0, 3, 9)).unwrap();
    assert_eq!(shared.parts(), single.parts());
    let attempts: Vec<_> =
        (0..7).map(|shard| read::<Commit>(&shared.commit(shard)).attempt).collect();
    assert_eq!(attempts, [3, 1, 5, 1, 4, 1, 3]);
}

#[test]
fn duplicate_work_leaves_one_part() {
    let text: String = (0..5).map(|i| row("x", i)).collect();
    let job = TestJob::new(&[("a.jsonl", &text)]);
    plan::plan(&job.context(0, 1, 0)).unwrap();
    work::work::<Echo>(&job.context(0, 1, 1)).unwrap();
    let late = std::fs::read(job.commit(0)).unwrap();
    std::fs::remove_file(job.commit(0)).unwrap();
    work::work::<Echo>(&job.context(0, 1, 2)).unwrap();
    std::fs::write(job.out("part-00001-of-00002-0b3f9c1e-1.jsonl#1"), "half").unwrap();
    finish::finish(&job.context(0, 1, 3)).unwrap();
    assert!(!job.out("part-00001-of-00002-0b3f9c1e-1.jsonl#1").exists(), "staged file remains");
    let manifest = job.manifest();
    assert_eq!(manifest.parts[0].name, "part-00000-of-00002-0b3f9c1e-2.jsonl");
    assert!(!job.out("part-00000-of-00002-0b3f9c1e-1.jsonl").exists(), "other part remains");
    // A late writer may replace the commit, but readers follow the manifest.
    std::fs::write(job.commit(0), late).unwrap();
    finish::finish(&job.context(0, 1, 4)).unwrap();
    work::work::<Echo>(&job.context(0, 1, 5)).unwrap();
    assert_eq!(job.manifest(), manifest);
    assert_eq!(job.parts().concat(), text);
}

#[test]
fn incomplete_commits_are_processed_again() {
    let text: String = (0..7).map(|i| row("x", i)).collect();
    let check = |damage: &dyn Fn(&TestJob, Commit)| {
        let job = TestJob::new(&[("a.jsonl", &text)]);
        plan::plan(&job.context(0, 1, 0)).unwrap();
        work::work::<Echo>(&job.context(0, 1, 1)).unwrap();
        damage(&job, read(&job.commit(1)));
        check_error(
            finish::finish(&job.context(0, 1, 2)),
            ExitCode::Infrastructure,
            "including 1;",
        );
        assert!(!job.out("manifest.json").exists());
        work::work::<Echo>(&job.context(0, 1, 3)).unwrap();
        finish::finish(&job.context(0, 1, 4)).unwrap();
        assert_eq!(job.parts().concat(), text);
    };
    let write = |job: &TestJob, commit: &Commit| {
        std::fs::write(job.commit(1), serde_json::to_vec(commit).unwrap()).unwrap();
    };
    check(&|job, commit| std::fs::remove_file(job.out(&commit.part)).unwrap());
    check(&|job, commit| std::fs::write(job.out(&commit.part), "half").unwrap());
    check(&|job, _| std::fs::write(job.commit(1), "{").unwrap());
    check(&|job, _| std::fs::remove_file(job.commit(1)).unwrap());
    check(&|job, commit| write(job, &Commit { rows: 2, ..commit }));
    check(&|job, commit| write(job, &Commit { of: "another".into(), ..commit }));
    check(&|job, commit| write(job, &Commit { shard: 2, ..commit }));
}

#[test]
fn invalid_rows_fail_the_job_or_are_listed() {
    let text = row("a", 1) + "\n{\"name\": 2}\n" + &row("c", 3) + "no json\n" + &row("e", 5);
    let mut job = TestJob::new(&[("a.jsonl", &text)]);
    let expected = "a.jsonl: row 2: name: invalid type: integer `2`, expected a string at line 1 \
                    column 10; use --skip-errors, or correct it and use --fresh; both process \
                    all rows again";
    check_error(job.run(), ExitCode::InvalidHyperparameters, expected);
    job.task.on_error = OnError::Skip;
    job.run().unwrap();
    assert_eq!(job.parts(), [row("a", 1) + &row("c", 3), row("e", 5)]);
    let manifest = job.manifest();
    assert_eq!((manifest.rows, manifest.input_rows, manifest.rejected), (3, 5, 2));
    let errors = manifest.errors.unwrap();
    let listed = std::fs::read_to_string(job.out(&errors.name)).unwrap();
    let listed: Vec<Value> =
        listed.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(listed[0]["row"], 1);
    assert_eq!(
        listed[1],
        json!({"file": "a.jsonl", "row": 3, "reason": "expected ident at line 1 column 2"})
    );
}

#[test]
fn plan_is_written_once() {
    let text: String = (0..7).map(|i| row("x", i)).collect();
    let mut job = TestJob::new(&[("a.jsonl", &text)]);
    plan::plan(&job.context(0, 1, 0)).unwrap();
    let path = job.out(&plan_path("0b3f9c1e-77aa"));
    let planned = std::fs::read(&path).unwrap();
    plan::plan(&job.context(0, 1, 1)).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), planned);
    job.task.shard_rows = 4;
    check_error(
        plan::plan(&job.context(0, 1, 2)),
        ExitCode::InvalidHyperparameters,
        "shardRows was 3, now 4",
    );
    job.task.shard_rows = 3;
    std::fs::write(job.folder.path().join("in/a.jsonl"), text.replace("6}", "9}")).unwrap();
    plan::plan(&job.context(0, 1, 3)).unwrap();
    check_error(
        work::work::<Echo>(&job.context(0, 1, 4)),
        ExitCode::InvalidHyperparameters,
        "are not what they were",
    );
    std::fs::write(job.folder.path().join("in/a.jsonl"), text.clone()).unwrap();
    work::work::<Echo>(&job.context(0, 1, 5)).unwrap();
    finish::finish(&job.context(0, 1, 6)).unwrap();
    assert_eq!(job.parts().concat(), text);
}

#[test]
fn preemption_takes_effect_between_batches() {
    let job = TestJob::new(&[("a.jsonl", &row("x", 1))]);
    let context = job.context(0, 1, 0);
    let stopped = job.context(0, 1, 1);
    stopped.stop.set();
    check_error(plan::plan(&stopped), ExitCode::Preempted, "committed shards are kept");
    plan::plan(&context).unwrap();
    context.stop.set();
    check_error(work::work::<Echo>(&context), ExitCode::Preempted, "committed shards are kept");
    assert!(!job.commit(0).exists());
}

#[cfg(feature = "parquet")]
#[test]
fn typed_tables_round_trip() {
    use stoker_api::inference::{Column, ColumnType};
    let text: String =
        (0..7).map(|i| row("日\n本", if i == 3 { Value::Null } else { i.into() })).collect();
    for format in [RowFormat::Parquet, RowFormat::Arrow] {
        let mut job = TestJob::new(&[("a.jsonl", &text)]);
        job.task.output.format = format;
        let of = |name: &str, kind| Column { name: name.into(), kind };
        job.task.output.columns =
            vec![of("name", ColumnType::String), of("size", ColumnType::Integer)];
        job.run().unwrap();
        let back = TestJob::new(&[]);
        for part in job.manifest().parts {
            std::fs::copy(job.out(&part.name), back.folder.path().join("in").join(&part.name))
                .unwrap();
        }
        back.run().unwrap();
        assert_eq!(back.parts().concat(), text, "{format:?}");
    }
}

#[cfg(not(feature = "parquet"))]
#[test]
fn missing_parquet_feature_is_reported() {
    let mut job = TestJob::new(&[("a.jsonl", "")]);
    job.task.output.format = RowFormat::Parquet;
    check_error(job.run(), ExitCode::InvalidHyperparameters, "the feature `parquet`");
    let job = TestJob::new(&[("a.parquet", "")]);
    check_error(job.run(), ExitCode::InvalidHyperparameters, "the feature `parquet`");
}

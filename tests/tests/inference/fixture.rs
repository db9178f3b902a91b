//! A job that doubles numbers: its program, its input and checks of its output.

use std::path::PathBuf;
use std::process::{Child, Output, Stdio};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use stoker_tests::{describe_output, stoker};
use stoker_trainer::{Context, Inference, Result};

#[derive(Deserialize, Serialize)]
pub(super) struct Row {
    id: u64,
    text: String,
}

#[derive(Deserialize, Serialize)]
pub(super) struct Doubled {
    pub(super) id: u64,
    twice: u64,
    text: String,
}

/// Faults of the program, from the job's `data`.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct Script {
    /// Duration of a batch in milliseconds.
    sleep_ms: u64,
    /// Number of missing outputs per batch.
    lacks: usize,
    /// ID of a row that `check` refuses.
    refuse: Option<u64>,
    /// ID of a row whose batch fails.
    crash: Option<u64>,
}

pub(super) struct Doubler(Script);

impl Inference for Doubler {
    type Input = Row;
    type Output = Doubled;

    fn new(context: &Context) -> Result<Self> {
        Ok(Self(context.data()?))
    }

    fn check(&self, row: &Row) -> Result<()> {
        match self.0.refuse {
            Some(id) if id == row.id => Err("it is not wanted".into()),
            _ => Ok(()),
        }
    }

    fn batch(&mut self, rows: Vec<Row>) -> Result<Vec<Doubled>> {
        std::thread::sleep(Duration::from_millis(self.0.sleep_ms));
        if rows.iter().any(|row| Some(row.id) == self.0.crash) {
            return Err("boom: the model does not like it".into());
        }
        let kept = rows.len() - self.0.lacks;
        let doubled = |row: Row| Doubled { id: row.id, twice: 2 * row.id, text: row.text };
        Ok(rows.into_iter().take(kept).map(doubled).collect())
    }
}

/// A directory with a job file, its input and a storage root.
pub(super) struct JobFixture {
    pub(super) folder: tempfile::TempDir,
    pub(super) spec: Value,
}

impl JobFixture {
    /// Creates a job of two slots. `files` has the number of rows of each input file; IDs are
    /// consecutive over all files.
    pub(super) fn new(files: &[u64], extra: Value) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let input = folder.path().join("in");
        std::fs::create_dir(&input).unwrap();
        let mut id = 0;
        for (index, rows) in files.iter().enumerate() {
            let mut text = String::new();
            for _ in 0..*rows {
                let row = Row { id, text: format!("Zeile {id}: \"ä\", 日本\n") };
                text.push_str(&serde_json::to_string(&row).unwrap());
                text.push('\n');
                id += 1;
            }
            std::fs::write(input.join(format!("{index}.jsonl")), text).unwrap();
        }
        let this = std::env::current_exe().unwrap();
        let mut spec = json!({
            "entrypoint": {"command": [this, "--exact", "inference::program", "--nocapture"]},
            "input": {"url": "in/*.jsonl"},
            "output": {"url": "out"},
            "shardRows": 100,
            "batchRows": 32,
            "resources": {"slots": 2},
            "maxRestarts": 1,
        });
        spec.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        Self { folder, spec }
    }

    pub(super) fn root(&self) -> PathBuf {
        self.folder.path().join("root")
    }

    pub(super) fn out(&self) -> PathBuf {
        self.folder.path().join("out")
    }

    pub(super) fn command(&self, more: &[&str]) -> std::process::Command {
        let file = self.folder.path().join("job.yaml");
        let object = json!({
            "apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceJob",
            "metadata": {"name": "double"}, "spec": self.spec,
        });
        std::fs::write(&file, object.to_string()).unwrap();
        let mut command = stoker(["job", "run", "--output", "json"]);
        command.arg(file).arg(self.folder.path()).arg("--root").arg(self.root()).args(more);
        command.stdin(Stdio::null());
        command
    }

    pub(super) fn run(&self, more: &[&str]) -> Output {
        self.command(more).output().unwrap()
    }

    /// Returns the description of the latest job.
    pub(super) fn describe(&self) -> String {
        let mut command = stoker(["job", "describe", "double", "--root"]);
        let output = command.arg(self.root()).output().unwrap();
        check(&output, 0, "");
        String::from_utf8(output.stdout).unwrap()
    }

    pub(super) fn start(&self) -> Child {
        let log = self.folder.path().join("log");
        let log = std::fs::File::options().create(true).append(true).open(log).unwrap();
        let errors = log.try_clone().unwrap();
        self.command(&[]).stdout(log).stderr(errors).spawn().unwrap()
    }

    pub(super) fn commits(&self) -> usize {
        let state = std::fs::read_dir(self.out().join("_stoker")).into_iter().flatten().flatten();
        let commits = |job: std::fs::DirEntry| std::fs::read_dir(job.path().join("commits")).ok();
        // A process that is killed while it writes leaves `NAME#NUMBER`.
        let is_complete =
            |file: &std::fs::DirEntry| !file.file_name().to_string_lossy().contains('#');
        state.filter_map(commits).flatten().flatten().filter(is_complete).count()
    }

    pub(super) fn wait_for_commits(&self, num: usize) {
        let end = Instant::now() + stoker_test_cluster::PATIENCE;
        while self.commits() < num {
            assert!(Instant::now() < end, "no {num} commits in time");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    pub(super) fn manifest(&self) -> Value {
        let text = std::fs::read(self.out().join("manifest.json")).unwrap();
        serde_json::from_slice(&text).unwrap()
    }

    /// Returns the rows of all parts in manifest order, and checks size and hash of each part.
    pub(super) fn rows(&self) -> Vec<Doubled> {
        let mut rows = vec![];
        for part in self.manifest()["parts"].as_array().unwrap() {
            let bytes = std::fs::read(self.out().join(part["name"].as_str().unwrap())).unwrap();
            let sha256: String =
                Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(
                (part["bytes"].as_u64(), &part["sha256"]),
                (Some(bytes.len() as u64), &json!(sha256))
            );
            let before = rows.len();
            for line in String::from_utf8(bytes).unwrap().lines() {
                rows.push(serde_json::from_str::<Doubled>(line).unwrap());
            }
            assert_eq!(part["rows"], json!(rows.len() - before));
        }
        rows
    }

    /// Returns the files in the output directory, except the job's state.
    pub(super) fn files(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.out()).unwrap().map(|entry| entry.unwrap());
        let names = entries.map(|entry| entry.file_name().into_string().unwrap());
        let mut names: Vec<_> = names.filter(|name| name != "_stoker").collect();
        names.sort();
        names
    }

    #[track_caller]
    pub(super) fn check_each_once(&self, num: u64, context: &str) {
        let rows = self.rows();
        let ids: Vec<u64> = rows.iter().map(|row| row.id).collect();
        assert_eq!(ids, (0..num).collect::<Vec<_>>(), "{context}");
        for row in &rows {
            assert_eq!(row.twice, 2 * row.id);
            assert_eq!(row.text, format!("Zeile {}: \"ä\", 日本\n", row.id), "{context}");
        }
        let manifest = self.manifest();
        assert_eq!((&manifest["rows"], &manifest["inputRows"]), (&json!(num), &json!(num)));
        // Files of killed workers are deleted: only the manifest and the parts that it names are
        // left.
        let mut named: Vec<String> = manifest["parts"]
            .as_array()
            .unwrap()
            .iter()
            .map(|part| part["name"].as_str().unwrap().to_owned())
            .collect();
        named.push("manifest.json".to_owned());
        named.sort();
        assert_eq!(self.files(), named, "{context}");
    }
}

#[track_caller]
pub(super) fn check(output: &Output, code: i32, contains: &str) {
    assert_eq!(output.status.code(), Some(code), "{}", describe_output(output));
    assert!(
        describe_output(output).contains(contains),
        "{contains:?} is not in: {}",
        describe_output(output)
    );
}

pub(super) fn last_line(output: &Output) -> Value {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    serde_json::from_str(
        text.lines().last().unwrap_or_else(|| panic!("{}", describe_output(output))),
    )
    .unwrap()
}

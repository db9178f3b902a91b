//! Test directory with an experiment file, and helpers to run `stoker` and inspect its files.

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// Directory with an experiment file and a storage root.
pub(crate) struct RunFixture {
    pub(crate) folder: tempfile::TempDir,
    /// Name of the experiment.
    pub(crate) name: &'static str,
    pub(crate) spec: Value,
    pub(crate) labels: Value,
}

impl RunFixture {
    /// Creates an experiment with one searcher, whose trainers follow `script`.
    pub(crate) fn new(searcher: Value, script: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let pids = folder.path().join("pids");
        std::fs::create_dir(&pids).unwrap();
        let mut all = json!({"metric": "loss", "maxLength": {"batches": 10}});
        all.as_object_mut().unwrap().extend(searcher.as_object().unwrap().clone());
        let this = std::env::current_exe().unwrap();
        let spec = json!({
            "entrypoint": {"command": [this, "--exact", "scripted_trainer", "--nocapture"]},
            "data": {"script": script, "pids": pids, "sleepMs": 1},
            "hyperparameters": {"x": {"double": {"min": 0.0, "max": 1.0, "count": 3}}},
            "searcher": all,
            "maxRestarts": 1,
            "reproducibility": {"experimentSeed": 7},
        });
        Self { folder, name: "scripted", spec, labels: json!({}) }
    }

    /// Starts the trainer from a shell, like a script would.
    pub(crate) fn run_in_shell(mut self) -> Self {
        let command = self.spec["entrypoint"]["command"].as_array_mut().unwrap();
        let script = r#""$0" "$@"; code=$?; echo after it; exit $code"#;
        command.splice(0..0, ["sh", "-c", script].map(Value::from));
        self
    }

    pub(crate) fn root(&self) -> PathBuf {
        self.folder.path().join("root")
    }

    pub(crate) fn command(&self, more: &[&str]) -> Command {
        let file = self.folder.path().join("experiment.yaml");
        let object = json!({
            "apiVersion": "stoker.dev/v1alpha1", "kind": "Experiment",
            "metadata": {"name": self.name, "labels": self.labels}, "spec": self.spec,
        });
        std::fs::write(&file, object.to_string()).unwrap();
        let mut command = stoker();
        command.args(["run", "--output", "json"]).arg(file).arg("--root").arg(self.root());
        command.args(more).stdin(Stdio::null());
        command
    }

    pub(crate) fn run(&self, more: &[&str]) -> Output {
        self.command(more).output().unwrap()
    }

    /// Runs `stoker experiment continue`.
    pub(crate) fn continue_(&self, more: &[&str]) -> Output {
        let mut command = stoker();
        command.args(["experiment", "continue", self.name, "--root"]).arg(self.root());
        command.args(more).stdin(Stdio::null()).output().unwrap()
    }

    /// Returns another command on the local runs.
    pub(crate) fn stoker(&self, arguments: &str) -> Command {
        let mut command = stoker();
        command.args(arguments.split_whitespace()).arg("--root").arg(self.root());
        command.stdin(Stdio::null());
        command
    }

    /// Runs a command on the local runs, and checks exit code and a part of the output. Returns
    /// the standard output.
    #[track_caller]
    pub(crate) fn check(&self, arguments: &str, code: i32, contains: &str) -> String {
        let output = self.stoker(arguments).output().unwrap();
        check(&output, code, contains);
        String::from_utf8(output.stdout).unwrap()
    }

    /// Returns the JSON that a command on the local runs prints.
    #[track_caller]
    pub(crate) fn json(&self, arguments: &str) -> Value {
        let text = self.check(&format!("{arguments} --output json"), 0, "");
        serde_json::from_str(&text).unwrap()
    }

    pub(crate) fn start(&self) -> Child {
        self.command(&[]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    /// Returns the experiment of the only run.
    pub(crate) fn experiment(&self) -> Value {
        let runs = files(&self.root().join("local"));
        let run = runs.iter().find(|path| path.is_dir()).expect("no run");
        serde_json::from_slice(&std::fs::read(run.join("record/experiment.json")).unwrap()).unwrap()
    }

    /// Returns the trials of all runs, sorted by index.
    pub(crate) fn trials(&self) -> Vec<Value> {
        let mut trials = Vec::new();
        for run in files(&self.root().join("local")).iter().filter(|path| path.is_dir()) {
            let read =
                |path: &PathBuf| serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
            let is_json = |path: &&PathBuf| path.extension().is_some_and(|text| text == "json");
            trials.extend(files(&run.join("record/trials")).iter().filter(is_json).map(read));
        }
        trials.sort_by_key(|trial: &Value| trial["spec"]["index"].as_u64());
        trials
    }

    /// Returns the checkpoints in the record, as trial and name.
    pub(crate) fn checkpoints(&self) -> BTreeSet<(u64, String)> {
        let mut all = BTreeSet::new();
        for trial in self.trials() {
            let index = trial["spec"]["index"].as_u64().unwrap();
            let checkpoints = trial["status"]["checkpoints"].as_array().cloned();
            let names = checkpoints.unwrap_or_default();
            let names = names.iter().map(|checkpoint| checkpoint["name"].as_str().unwrap());
            all.extend(names.map(|name| (index, name.to_owned())));
        }
        all
    }

    /// Returns the checkpoints in the storage, as trial and name.
    pub(crate) fn stored_checkpoints(&self) -> BTreeSet<(u64, String)> {
        let name = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().to_owned();
        let mut all = BTreeSet::new();
        for run in files(&self.root().join("default")) {
            for trial in files(&run.join("trials")) {
                let index = name(&trial).parse().unwrap();
                let checkpoints = files(&trial.join("checkpoints"));
                all.extend(checkpoints.iter().map(|checkpoint| (index, name(checkpoint))));
            }
        }
        all
    }

    /// Returns the weights in a stored checkpoint.
    pub(crate) fn model(&self, trial: u64, checkpoint: &str) -> String {
        let runs = files(&self.root().join("default"));
        let path =
            |run: &PathBuf| run.join(format!("trials/{trial}/checkpoints/{checkpoint}/model"));
        let path = runs.iter().map(path).find(|path| path.exists()).unwrap();
        std::fs::read_to_string(path).unwrap()
    }

    /// Writes manifests without files, because the trainer's are not valid.
    pub(crate) fn complete_checkpoints(&self) {
        let runs = files(&self.root().join("local"));
        let records = runs.iter().flat_map(|run| files(&run.join("record/trials")));
        for path in records {
            let mut trial: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
            let index = trial["spec"]["index"].as_u64().unwrap();
            let manifest = json!({
                "format": 1, "experimentId": "x", "trial": index, "attempt": 0, "batches": 10,
                "files": {},
            });
            let manifest = manifest.to_string();
            let sha256 = stoker_storage::hash::sha256_hex(manifest.as_bytes());
            for checkpoint in trial["status"]["checkpoints"].as_array_mut().unwrap() {
                checkpoint["manifestSha256"] = json!(sha256);
                let name = checkpoint["name"].as_str().unwrap();
                let folder = format!("trials/{index}/checkpoints/{name}");
                for run in files(&self.root().join("default")) {
                    std::fs::write(run.join(&folder).join("manifest.json"), &manifest).unwrap();
                }
            }
            std::fs::write(&path, trial.to_string()).unwrap();
        }
    }

    /// Waits until a trial has a checkpoint.
    pub(crate) fn wait_for_checkpoint(&self) {
        self.wait_for_checkpoint_after(&BTreeSet::new());
    }

    /// Waits until a trial has a checkpoint that is not in `before`.
    pub(crate) fn wait_for_checkpoint_after(&self, before: &BTreeSet<(u64, String)>) {
        wait_until("a new checkpoint", || !self.checkpoints().is_subset(before));
    }

    /// Waits until trial 0 has trained this number of batches.
    pub(crate) fn wait_for_batch(&self, batches: u64) {
        let trained = |pid: &PathBuf| {
            let text = std::fs::read_to_string(pid).ok()?;
            text.strip_prefix("0 ")?.parse::<u64>().ok()
        };
        let pids = self.folder.path().join("pids");
        wait_until("the batch", || {
            files(&pids).iter().filter_map(trained).any(|trained| trained >= batches)
        });
    }

    /// Holds each trial at this batch until [`release`](Self::release) is called.
    pub(crate) fn pause_at(mut self, batches: u64) -> Self {
        self.spec["data"]["holdAt"] = json!(batches);
        self
    }

    pub(crate) fn release(&self) {
        std::fs::write(self.folder.path().join("release"), "").unwrap();
    }

    /// Returns `true` if any trainer is still alive.
    pub(crate) fn is_any_trainer_alive(&self) -> bool {
        let this = std::env::current_exe().unwrap();
        files(&self.folder.path().join("pids")).iter().any(|pid| {
            let exe = Path::new("/proc").join(pid.file_name().unwrap()).join("exe");
            std::fs::read_link(exe).is_ok_and(|path| path == this)
        })
    }
}

/// Lines of a running `stoker`, which ends when they are dropped.
pub(crate) struct Lines {
    child: Child,
    lines: std::io::Lines<BufReader<ChildStdout>>,
}

impl Lines {
    pub(crate) fn start(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines }
    }
}

impl Iterator for Lines {
    type Item = String;

    fn next(&mut self) -> Option<String> {
        self.lines.next().map(Result::unwrap)
    }
}

impl Drop for Lines {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits for a condition.
#[track_caller]
pub(crate) fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + stoker_test_cluster::PATIENCE;
    while !condition() {
        assert!(Instant::now() < end, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Returns a command for `stoker` with default signal dispositions: the tests themselves may run
/// under `nohup`.
pub(crate) fn stoker() -> Command {
    let mut command = Command::new("env");
    command.args(["--default-signal=HUP,INT", env!("CARGO_BIN_EXE_stoker")]);
    command
}

pub(crate) fn files(folder: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(folder)
        .map_or_else(|_| Vec::new(), |entries| entries.map(|entry| entry.unwrap().path()).collect())
}

pub(crate) fn random(max_trials: u32) -> Value {
    json!({"random": {"maxTrials": max_trials}})
}

pub(crate) fn output_text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

pub(crate) fn last_line(output: &Output) -> Value {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    serde_json::from_str(text.lines().last().unwrap_or_else(|| panic!("{}", output_text(output))))
        .unwrap()
}

#[track_caller]
pub(crate) fn check(output: &Output, code: i32, contains: &str) {
    assert_eq!(output.status.code(), Some(code), "{}", output_text(output));
    assert!(
        output_text(output).contains(contains),
        "{contains:?} is not in: {}",
        output_text(output)
    );
}

/// Returns the parts of trials that must not depend on interruptions.
pub(crate) fn deterministic_fields(trials: &[Value]) -> Vec<Value> {
    let of = |trial: &Value| {
        let (spec, status) = (&trial["spec"], &trial["status"]);
        let mut facts = status["facts"].clone();
        for fact in facts.as_array_mut().into_iter().flatten() {
            let fields = fact.as_object_mut().into_iter().flat_map(|fact| fact.values_mut());
            fields.filter_map(Value::as_object_mut).for_each(|fact| drop(fact.remove("at")));
        }
        json!([spec["seed"], spec["requestId"], spec["hyperparameters"], facts])
    };
    trials.iter().map(of).collect()
}

pub(crate) fn signal(child: &Child, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_child(child);
    rustix::process::kill_process(pid, signal).unwrap();
}

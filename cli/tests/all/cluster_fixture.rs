//! Fixture for tests of the cluster commands: a namespace with objects, and a directory with a
//! program and a storage.

use std::io::{BufRead as _, BufReader, Read as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;

use serde_json::{Value, json};
use stoker_test_cluster::ControlPlane;

use crate::fixture::Lines;

/// Name of the checkpoint in all tests.
pub(crate) const CHECKPOINT: &str = "000000000010-0";

/// API server of all tests, and outputs of `stoker` before the CRDs were installed.
pub(crate) struct Shared {
    plane: ControlPlane,
    pub(crate) list_before: Output,
    pub(crate) version_before: Output,
}

/// Returns the API server. All tests share it, because starting one takes seconds.
pub(crate) fn shared() -> &'static Shared {
    static SHARED: OnceLock<Shared> = OnceLock::new();
    SHARED.get_or_init(|| {
        let plane = ControlPlane::start().unwrap();
        let output = |arguments: &[&str]| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_stoker"));
            command.args(arguments).env("KUBECONFIG", plane.kubeconfig()).output().unwrap()
        };
        let list_before = output(&["experiment", "list"]);
        let version_before = output(&["version"]);
        plane.apply_crds(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../crds")).unwrap();
        Shared { plane, list_before, version_before }
    })
}

/// Namespace, and a directory with a program and a storage.
pub(crate) struct ClusterFixture {
    pub(crate) plane: &'static ControlPlane,
    pub(crate) namespace: &'static str,
    folder: tempfile::TempDir,
}

impl ClusterFixture {
    /// Creates a fixture with a separate namespace, or records the calling test as skipped.
    #[track_caller]
    pub(crate) fn new(namespace: &'static str) -> Option<Self> {
        if !stoker_test_cluster::clusters_enabled() {
            return None;
        }
        let plane = &shared().plane;
        plane.make_namespace(namespace).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("program");
        std::fs::create_dir_all(program.join("data")).unwrap();
        std::fs::write(program.join("train"), "#!/bin/sh\n").unwrap();
        std::fs::write(program.join("data/large"), "0").unwrap();
        std::fs::write(program.join(".stokerignore"), "data/\n").unwrap();
        let fixture = Self { plane, namespace, folder };
        fixture.write("experiment.yaml", &fixture.experiment().to_string());
        fixture.write("job.yaml", &fixture.job().to_string());
        Some(fixture)
    }

    pub(crate) fn experiment(&self) -> Value {
        json!({
            "apiVersion": "stoker.dev/v1alpha1", "kind": "Experiment",
            "metadata": {"name": "mnist", "labels": {"team": "a"}},
            "spec": {
                "entrypoint": {"command": ["./train"]},
                "hyperparameters": {"x": {"double": {"min": 0.0, "max": 1.0}}},
                "searcher": {"metric": "loss", "maxLength": {"batches": 10},
                    "random": {"maxTrials": 2}},
                "checkpointStorage": {"url": "s3://bucket"},
            },
        })
    }

    pub(crate) fn job(&self) -> Value {
        json!({
            "apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceJob",
            "metadata": {"name": "species", "labels": {"team": "a"}},
            "spec": {
                "entrypoint": {"command": ["./infer"]},
                "input": {"url": "s3://data/*.csv"},
                "output": {"url": "predictions"},
                "storage": {"url": "s3://bucket"},
                "resources": {"slots": 2},
            },
        })
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, text: &str) {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    pub(crate) fn stoker(&self, kubeconfig: &Path, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_stoker"));
        let store = format!("file://{}", self.path("store").display());
        command.args(arguments).stdin(Stdio::null()).current_dir(self.folder.path());
        command.env("KUBECONFIG", kubeconfig);
        if ["create", "logs", "metrics", "download"].iter().any(|word| arguments.contains(word)) {
            command.args(["--storage-url", &store]);
        }
        command
    }

    /// Runs `stoker` in the namespace, and checks exit code and a part of the output.
    #[track_caller]
    pub(crate) fn check(&self, arguments: &str, code: i32, expected: &str) -> String {
        let mut words: Vec<&str> = arguments.split_whitespace().collect();
        words.extend(["-n", self.namespace]);
        let output = self.stoker(self.plane.kubeconfig(), &words).output().unwrap();
        check(&output, arguments, code, expected)
    }

    /// Starts `stoker` in the namespace and returns its lines. Dropping them ends the process.
    pub(crate) fn lines(&self, arguments: &str) -> Lines {
        let mut words: Vec<&str> = arguments.split_whitespace().collect();
        words.extend(["-n", self.namespace]);
        Lines::start(&mut self.stoker(self.plane.kubeconfig(), &words))
    }

    #[track_caller]
    pub(crate) fn json(&self, arguments: &str) -> Value {
        let mut words: Vec<&str> = arguments.split_whitespace().collect();
        words.extend(["-n", self.namespace, "--output", "json"]);
        let output = self.stoker(self.plane.kubeconfig(), &words).output().unwrap();
        check(&output, arguments, 0, "");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    pub(crate) fn object(&self, kind: &str, name: &str) -> Value {
        self.plane.get(&[kind, name, "-n", self.namespace]).unwrap()
    }

    pub(crate) fn apply(&self, mut object: Value) {
        object["metadata"]["namespace"] = json!(self.namespace);
        self.plane.apply(&object.to_string()).unwrap();
    }

    /// Writes the status of an object, as the operator would.
    pub(crate) fn set_status(&self, kind: &str, name: &str, status: &Value) {
        let patch = json!({ "status": status }).to_string();
        let to_status =
            ["--subresource=status", "--type=merge", "-n", self.namespace, "-p", &patch];
        self.plane.kubectl(&[&["patch", kind, name][..], &to_status].concat()).unwrap();
    }

    /// Creates an experiment with the status of a running one.
    pub(crate) fn start_experiment(&self) -> Value {
        self.apply(self.experiment());
        self.set_status(
            "experiment",
            "mnist",
            &json!({"phase": "Running", "trialsCreated": 1, "trialsRunning": 1, "trialsClosed": 0,
                "progressPercent": 50, "cleanedUp": false, "observedGeneration": 1,
                "best": {"index": 0, "metric": "0.5", "checkpoint": CHECKPOINT}}),
        );
        self.object("experiment", "mnist")
    }

    /// Creates a running experiment and its trial with one ended attempt. The trial's logs, metrics
    /// and checkpoint are in the storage. Returns the text of the checkpoint's manifest.
    pub(crate) fn start_trial(&self) -> String {
        let experiment = self.start_experiment();
        let uid = experiment["metadata"]["uid"].as_str().unwrap();
        self.apply(json!({
            "apiVersion": "stoker.dev/v1alpha1", "kind": "Trial",
            "metadata": {"name": "mnist-0",
                "labels": {"stoker.dev/experiment": "mnist"},
                "ownerReferences": [{"apiVersion": "stoker.dev/v1alpha1", "kind": "Experiment",
                    "name": "mnist", "uid": uid, "controller": true}]},
            "spec": {"experiment": "mnist", "index": 0, "requestId": "r", "seed": 7,
                "hyperparameters": {"x": 0.25}, "unit": "batches", "units": 10},
        }));
        let folder = format!("store/{}/mnist-{}/trials/0", self.namespace, &uid[..8]);
        self.write(&format!("{folder}/logs/0/0-00000000.log"), "first\n");
        self.write(&format!("{folder}/logs/0/0-00000001.log"), "second\n");
        for (segment, (batches, loss)) in [(5, 1.5), (10, 0.5)].into_iter().enumerate() {
            let row = json!({
                "group": "training", "batches": batches, "epoch": 0, "attempt": 0,
                "metrics": {"loss": loss},
            });
            self.write(&format!("{folder}/metrics/0-0000000{segment}.jsonl"), &row.to_string());
        }
        let manifest = json!({
            "format": 1, "experimentId": uid, "trial": 0, "attempt": 0, "batches": 10, "files": {},
        })
        .to_string();
        self.write(&format!("{folder}/checkpoints/{CHECKPOINT}/manifest.json"), &manifest);
        let sha256 = stoker_storage::hash::sha256_hex(manifest.as_bytes());
        self.set_status(
            "trial",
            "mnist-0",
            &json!({"phase": "Running", "batches": 10, "batchesTotal": 10, "bestMetric": "0.5",
                "metrics": {"loss": "0.5"}, "restarts": 0, "observedGeneration": 1,
                "attempts": [{"number": 0, "end": "Completed"}],
                "checkpoints": [{"name": CHECKPOINT, "batches": 10, "metric": "0.5",
                    "manifestSha256": sha256, "bytes": 0}]}),
        );
        manifest
    }

    /// Creates a job with the status of a running one.
    pub(crate) fn start_job(&self) {
        let mut job = self.job();
        job["spec"]["output"]["url"] = json!("s3://bucket/out");
        self.apply(job);
        let status = json!({
            "phase": "Running", "stage": "work", "attempts": 3, "running": 2, "rows": 20,
            "rowsTotal": 80, "rejected": 0, "restarts": 1, "progressPercent": 25,
            "observedGeneration": 1, "output": "s3://bucket/out", "workers": [],
        });
        self.set_status("inferencejob", "species", &status);
    }

    /// Runs `stoker`, and calls `act` after its first line on standard error.
    pub(crate) fn run_beside(&self, arguments: &str, act: impl FnOnce()) -> Output {
        let mut words: Vec<&str> = arguments.split_whitespace().collect();
        words.extend(["-n", self.namespace]);
        let mut command = self.stoker(self.plane.kubeconfig(), &words);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut errors = BufReader::new(child.stderr.take().unwrap());
        let mut stderr = String::new();
        errors.read_line(&mut stderr).unwrap();
        act();
        errors.read_to_string(&mut stderr).unwrap();
        let mut output = child.wait_with_output().unwrap();
        output.stderr = stderr.into_bytes();
        output
    }
}

#[track_caller]
pub(crate) fn check(output: &Output, what: &str, code: i32, expected: &str) -> String {
    let out = String::from_utf8_lossy(&output.stdout).into_owned();
    let text = out.clone() + &String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{what}: {text}");
    assert!(text.contains(expected), "{what}: {text}");
    out
}

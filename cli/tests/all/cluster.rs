//! Tests of the cluster commands with a real API server. The tests act as the operator.

use std::io::{BufRead as _, BufReader, Read as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;

use serde_json::{Value, json};
use stoker_test_cluster::ControlPlane;

/// Name of the checkpoint in all tests.
const CHECKPOINT: &str = "000000000010-0";

/// API server of all tests, and outputs of `stoker` before the CRDs were installed.
struct Shared {
    plane: ControlPlane,
    list_before: Output,
    version_before: Output,
}

/// Returns the API server, which is started only once because that takes seconds.
fn shared() -> &'static Shared {
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
struct Lab {
    plane: &'static ControlPlane,
    namespace: &'static str,
    folder: tempfile::TempDir,
}

impl Lab {
    /// Creates a lab with a separate namespace, or records the calling test as skipped.
    #[track_caller]
    fn new(namespace: &'static str) -> Option<Self> {
        if !stoker_test_cluster::wanted() {
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
        let lab = Self { plane, namespace, folder };
        lab.write("experiment.yaml", &lab.experiment().to_string());
        lab.write("job.yaml", &lab.job().to_string());
        Some(lab)
    }

    fn experiment(&self) -> Value {
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

    fn job(&self) -> Value {
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

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    fn stoker(&self, kubeconfig: &Path, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_stoker"));
        let store = format!("file://{}", self.path("store").display());
        command.args(arguments).stdin(Stdio::null()).current_dir(self.folder.path());
        command.env("KUBECONFIG", kubeconfig);
        if ["create", "logs", "download"].iter().any(|word| arguments.contains(word)) {
            command.args(["--storage-url", &store]);
        }
        command
    }

    /// Runs `stoker` in the namespace, and checks exit code and a part of the output.
    #[track_caller]
    fn check(&self, arguments: &str, code: i32, expected: &str) -> String {
        let mut words: Vec<&str> = arguments.split_whitespace().collect();
        words.extend(["-n", self.namespace]);
        let output = self.stoker(self.plane.kubeconfig(), &words).output().unwrap();
        check(&output, arguments, code, expected)
    }

    #[track_caller]
    fn json(&self, arguments: &str) -> Value {
        let mut words: Vec<&str> = arguments.split_whitespace().collect();
        words.extend(["-n", self.namespace, "--output", "json"]);
        let output = self.stoker(self.plane.kubeconfig(), &words).output().unwrap();
        check(&output, arguments, 0, "");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    fn object(&self, kind: &str, name: &str) -> Value {
        self.plane.get(&[kind, name, "-n", self.namespace]).unwrap()
    }

    fn apply(&self, mut object: Value) {
        object["metadata"]["namespace"] = json!(self.namespace);
        self.plane.apply(&object.to_string()).unwrap();
    }

    /// Writes the status of an object, as the operator would.
    fn set_status(&self, kind: &str, name: &str, status: &Value) {
        let patch = json!({ "status": status }).to_string();
        let to_status =
            ["--subresource=status", "--type=merge", "-n", self.namespace, "-p", &patch];
        self.plane.kubectl(&[&["patch", kind, name][..], &to_status].concat()).unwrap();
    }

    /// Creates an experiment with the status of a running one.
    fn start_experiment(&self) -> Value {
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

    /// Creates a running experiment and its trial with one ended attempt. The trial's logs and its
    /// checkpoint are in the storage. Returns the text of the checkpoint's manifest.
    fn start_trial(&self) -> String {
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
    fn start_job(&self) {
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
    fn run_beside(&self, arguments: &str, act: impl FnOnce()) -> Output {
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
fn check(output: &Output, what: &str, code: i32, expected: &str) -> String {
    let out = String::from_utf8_lossy(&output.stdout).into_owned();
    let text = out.clone() + &String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{what}: {text}");
    assert!(text.contains(expected), "{what}: {text}");
    out
}

#[test]
fn missing_installation_is_reported() {
    if !stoker_test_cluster::wanted() {
        return;
    }
    let shared = shared();
    check(&shared.list_before, "experiment list", 1, "Stoker is not installed");
    check(&shared.version_before, "version", 0, "Stoker is not installed");
}

#[test]
fn version_and_empty_lists_are_shown() {
    let Some(lab) = Lab::new("empty") else { return };
    lab.check("version", 0, "Kubernetes v1.");
    lab.check("experiment list", 0, "no experiments in namespace `empty`");
    lab.check("job list", 0, "no jobs in namespace `empty`");
    lab.check("experiment describe mnist", 2, "experiment `mnist` not found");
    lab.check("job describe other", 2, "job `other` not found");
    lab.check("trial describe mnist-7", 2, "trial `mnist-7` not found");
}

#[test]
fn dry_run_creates_nothing() {
    let Some(lab) = Lab::new("dry-run") else { return };
    lab.check("experiment create experiment.yaml program --dry-run", 0, "would be created");
    let test = "experiment create experiment.yaml program --test --dry-run";
    lab.check(test, 0, "mnist-test");
    let job = "job create job.yaml program --set output.url=s3://bucket/out --dry-run";
    lab.check(job, 0, "job species would be created");
    assert!(!lab.path("store").exists());
    lab.check("experiment describe mnist", 2, "experiment `mnist` not found");
    lab.check("job describe species", 2, "job `species` not found");
}

#[test]
fn create_uploads_the_program_once() {
    let Some(lab) = Lab::new("create") else { return };
    // The ignored file is not uploaded.
    lab.check("experiment create experiment.yaml program --paused", 0, "files: 2, ");
    let made = lab.object("experiment", "mnist");
    assert_eq!(made["spec"]["state"], "paused");
    assert_eq!(made["metadata"]["labels"]["team"], "a");
    let sha256 = made["spec"]["context"]["sha256"].as_str().unwrap();
    let uploaded = lab.path(&format!("store/create/contexts/{sha256}.tar.gz"));
    let written = uploaded.metadata().unwrap().modified().unwrap();
    let other = "experiment create experiment.yaml program --set metadata.name=other";
    lab.check(other, 0, "upload skipped");
    assert_eq!(uploaded.metadata().unwrap().modified().unwrap(), written);
}

#[test]
fn create_refuses_a_used_name() {
    let Some(lab) = Lab::new("used-name") else { return };
    lab.start_experiment();
    lab.check("experiment create experiment.yaml program", 2, "choose another name");
    lab.start_job();
    let job = "job create job.yaml program --set output.url=s3://bucket/out";
    lab.check(job, 2, "job `species` already exists in namespace `used-name`");
}

#[test]
fn create_shows_errors_of_the_api_server() {
    let Some(lab) = Lab::new("refused") else { return };
    let bad = "experiment create experiment.yaml --set metadata.name=bad --set \
               pod.volumeMounts=[{name:d,mountPath:\"\"}]";
    lab.check(bad, 2, "mountPath");
    lab.check("job create job.yaml", 2, "spec.output.url");
}

#[test]
fn experiment_list_and_describe_show_the_status() {
    let Some(lab) = Lab::new("show") else { return };
    lab.start_trial();
    let list = lab.check("experiment list", 0, "NAME");
    let row: Vec<&str> = list.lines().nth(1).unwrap().split_whitespace().collect();
    assert_eq!(row[..9], ["mnist", "Running", "1", "1", "0", "50%", "0.5", "(trial", "0)"]);
    lab.check("experiment describe mnist", 0, "trial 0 with loss 0.5");
    assert_eq!(lab.json("experiment describe mnist")["metadata"]["name"], "mnist");
    assert_eq!(lab.json("experiment list").as_array().unwrap().len(), 1);
}

#[test]
fn trial_list_and_describe_show_the_status() {
    let Some(lab) = Lab::new("show-trial") else { return };
    lab.start_trial();
    lab.check("trial list mnist", 0, "mnist-0  Running  0.50000  10");
    assert_eq!(lab.json("trial list mnist")[0]["kind"], "Trial");
    lab.check("trial describe mnist 0", 0, "Hyperparameters:  x=0.25");
}

#[test]
fn logs_come_from_the_storage() {
    let Some(lab) = Lab::new("logs") else { return };
    lab.start_trial();
    assert_eq!(lab.check("trial logs mnist-0", 0, ""), "first\nsecond\n");
    assert_eq!(lab.check("experiment logs mnist", 0, ""), "[trial=0] first\n[trial=0] second\n");
    lab.check("trial logs mnist-0 --attempt 3", 2, "the latest is 0");
    lab.check("trial logs mnist-0 --rank 1", 2, "has 1 ranks");
}

#[test]
fn checkpoints_are_listed_and_downloaded() {
    let Some(lab) = Lab::new("checkpoints") else { return };
    let manifest = lab.start_trial();
    lab.check("checkpoint list mnist", 0, CHECKPOINT);
    lab.check("checkpoint list mnist-0", 0, CHECKPOINT);
    lab.check("checkpoint download mnist got", 0, "checkpoint 000000000010-0 of trial mnist-0");
    assert_eq!(std::fs::read_to_string(lab.path("got/manifest.json")).unwrap(), manifest);
    lab.check("checkpoint download mnist-0 got", 2, "already contains a checkpoint");
}

#[test]
fn state_commands_change_the_experiment() {
    let Some(lab) = Lab::new("states") else { return };
    lab.start_experiment();
    let state = || lab.object("experiment", "mnist")["spec"]["state"].clone();
    lab.check("experiment pause mnist", 0, "is being paused");
    assert_eq!(state(), "paused");
    lab.check("experiment activate mnist", 0, "resumes");
    assert_eq!(state(), "active");
    lab.check("experiment activate mnist", 0, "already active");
    lab.check("experiment cancel mnist", 0, "its trials checkpoint and exit");
    let refused = lab.check("experiment activate mnist", 2, "a cancelled experiment stays");
    assert_eq!(refused, "");
    lab.check("experiment kill mnist", 0, "is being killed");
    assert_eq!(state(), "killed");
    lab.set_status("experiment", "mnist", &json!({ "phase": "Cancelled" }));
    lab.check("experiment pause mnist", 2, "has ended (Cancelled)");
}

#[test]
fn trial_kill_changes_the_trial() {
    let Some(lab) = Lab::new("trial-kill") else { return };
    lab.start_trial();
    lab.check("trial kill mnist-0", 0, "is being killed");
    assert_eq!(lab.object("trial", "mnist-0")["spec"]["wanted"], "kill");
    lab.set_status("trial", "mnist-0", &json!({ "phase": "Cancelled" }));
    lab.check("trial kill mnist-0", 2, "has ended (Cancelled)");
}

#[test]
fn wait_returns_the_code_of_the_phase() {
    let Some(lab) = Lab::new("wait") else { return };
    lab.start_experiment();
    for (phase, code, expected) in
        [("Completed", 0, "completed"), ("Failed", 1, "failed"), ("Cancelled", 3, "was cancelled")]
    {
        lab.set_status("experiment", "mnist", &json!({ "phase": "Running" }));
        // The first line is the progress, printed before the watch starts.
        let output = lab.run_beside("experiment wait mnist --timeout 1m", || {
            lab.set_status("experiment", "mnist", &json!({ "phase": phase }));
        });
        check(&output, phase, code, &format!("experiment mnist {expected}"));
    }
    assert_eq!(lab.json("experiment describe mnist")["status"]["phase"], "Cancelled");
}

#[test]
fn wait_ends_at_its_timeout() {
    let Some(lab) = Lab::new("timeout") else { return };
    lab.start_experiment();
    let expected = "timed out after 1s: experiment mnist is still Running";
    lab.check("experiment wait mnist --timeout 1s", 3, expected);
    lab.start_job();
    let expected = "timed out after 1s: job species is still Running";
    lab.check("job wait species --timeout 1s", 3, expected);
}

#[test]
fn job_create_uploads_the_program() {
    let Some(lab) = Lab::new("job-create") else { return };
    let create = "job create job.yaml program --set output.url=s3://bucket/out --paused";
    lab.check(create, 0, "job species created in namespace job-create");
    let made = lab.object("inferencejob", "species");
    assert_eq!(
        (&made["spec"]["state"], &made["metadata"]["labels"]["team"]),
        (&json!("paused"), &json!("a"))
    );
    let sha256 = made["spec"]["context"]["sha256"].as_str().unwrap();
    assert!(lab.path(&format!("store/job-create/contexts/{sha256}.tar.gz")).exists());
    lab.check("job logs species", 0, "no process of job species has started yet");
}

#[test]
fn job_list_and_describe_show_the_status() {
    let Some(lab) = Lab::new("job-show") else { return };
    lab.start_job();
    let list = lab.check("job list", 0, "NAME");
    let row: Vec<&str> = list.lines().nth(1).unwrap().split_whitespace().collect();
    assert_eq!(row[..8], ["species", "Running", "work", "2", "20", "80", "0", "1"]);
    lab.check("job describe species", 0, "25%, 20 of 80 rows");
    assert_eq!(lab.json("job describe species")["kind"], "InferenceJob");
}

#[test]
fn job_logs_come_from_each_slot() {
    let Some(lab) = Lab::new("job-logs") else { return };
    lab.start_job();
    let made = lab.object("inferencejob", "species");
    let uid = made["metadata"]["uid"].as_str().unwrap();
    let folder = format!("store/job-logs/species-{}/workers", &uid[..8]);
    lab.write(&format!("{folder}/0/logs/0/0-00000000.log"), "planned\n");
    lab.write(&format!("{folder}/1/logs/2/0-00000000.log"), "worked\n");
    let logs = lab.check("job logs species", 0, "");
    assert_eq!(logs, "[slot=0] planned\n[slot=1] worked\n");
    assert_eq!(lab.check("job logs species --slot 1", 0, ""), "[slot=1] worked\n");
    lab.check("job logs species --slot 2", 2, "has 2 slots, numbered from 0");
}

#[test]
fn state_commands_change_the_job() {
    let Some(lab) = Lab::new("job-states") else { return };
    lab.start_job();
    let state = || lab.object("inferencejob", "species")["spec"]["state"].clone();
    lab.check("job pause species", 0, "its workers exit after their current batch");
    assert_eq!(state(), "paused");
    lab.check("job activate species", 0, "resumes");
    assert_eq!(state(), "active");
    lab.check("job cancel species", 0, "job species is being cancelled");
    lab.check("job activate species", 2, "a cancelled job stays cancelled");
    lab.check("job kill species", 0, "is being killed");
    assert_eq!(state(), "killed");
}

#[test]
fn job_wait_prints_rows_and_output() {
    let Some(lab) = Lab::new("job-wait") else { return };
    lab.start_job();
    let done = json!({"phase": "Completed", "rows": 80, "rejected": 3});
    let output = lab.run_beside("job wait species --timeout 1m", || {
        lab.set_status("inferencejob", "species", &done);
    });
    let expected = "77 rows of 80, 3 rejected: s3://bucket/out/manifest.json";
    check(&output, "job wait species", 0, expected);
    assert_eq!(lab.json("job wait species")["rows"], 77);
    lab.check("job pause species", 2, "has ended (Completed)");
}

#[test]
fn delete_shows_where_files_remain() {
    let Some(lab) = Lab::new("delete") else { return };
    lab.start_experiment();
    lab.start_job();
    lab.check("experiment delete mnist", 0, "remain in s3://bucket/delete/mnist-");
    lab.check("experiment describe mnist", 2, "experiment `mnist` not found");
    lab.check("job delete species", 0, "remain in s3://bucket/delete/species-");
    lab.check("job describe species", 2, "job `species` not found");
}

#[test]
fn forbidden_requests_name_the_resource() {
    let Some(lab) = Lab::new("forbidden") else { return };
    let kubeconfig = lab.plane.kubeconfig_for(lab.namespace, "default").unwrap();
    let words = ["experiment", "list", "-n", lab.namespace];
    let output = lab.stoker(&kubeconfig, &words).output().unwrap();
    check(&output, "without permission", 1, "cannot list resource \"experiments\"");
}

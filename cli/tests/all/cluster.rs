//! What `stoker` does on a cluster, seen from outside: against a real API server, with the
//! operator's part played by the test.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use serde_json::{Value, json};
use stoker_test_cluster::ControlPlane;

const NAMESPACE: &str = "ml";

/// A control plane, a folder with a program, and a storage.
struct Lab {
    plane: ControlPlane,
    folder: tempfile::TempDir,
}

impl Lab {
    fn new() -> Self {
        let plane = ControlPlane::start().unwrap();
        plane.make_namespace(NAMESPACE).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("program");
        std::fs::create_dir_all(program.join("data")).unwrap();
        std::fs::write(program.join("train"), "#!/bin/sh\n").unwrap();
        std::fs::write(program.join("data/large"), "0").unwrap();
        std::fs::write(program.join(".stokerignore"), "data/\n").unwrap();
        let lab = Self { plane, folder };
        lab.write("experiment.yaml", &lab.experiment().to_string());
        lab
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
        if ["create", "logs", "download"].iter().any(|it| arguments.contains(it)) {
            command.args(["--storage-url", &store]);
        }
        command
    }

    /// Runs `stoker` in the namespace and checks its exit code and a part of what it says.
    fn check(&self, arguments: &str, code: i32, expected: &str) -> String {
        let mut words: Vec<&str> = arguments.split_whitespace().collect();
        words.extend(["-n", NAMESPACE]);
        let output = self.stoker(self.plane.kubeconfig(), &words).output().unwrap();
        check(&output, arguments, code, expected)
    }

    fn json(&self, arguments: &str) -> Value {
        let mut words: Vec<&str> = arguments.split_whitespace().collect();
        words.extend(["-n", NAMESPACE, "--output", "json"]);
        let output = self.stoker(self.plane.kubeconfig(), &words).output().unwrap();
        check(&output, arguments, 0, "");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    fn object(&self, kind: &str, name: &str) -> Value {
        self.plane.get(&[kind, name, "-n", NAMESPACE]).unwrap()
    }

    /// Says what the operator would say of an object.
    fn set_status(&self, kind: &str, name: &str, status: &Value) {
        let patch = json!({ "status": status }).to_string();
        let to_status = ["--subresource=status", "--type=merge", "-n", NAMESPACE, "-p", &patch];
        self.plane.kubectl(&[&["patch", kind, name][..], &to_status].concat()).unwrap();
    }

    /// A trial with one ended attempt, whose files are in the storage; returns their folder.
    fn make_trial(&self, experiment: &Value) -> String {
        let uid = experiment["metadata"]["uid"].as_str().unwrap();
        let trial = json!({
            "apiVersion": "stoker.dev/v1alpha1", "kind": "Trial",
            "metadata": {"name": "mnist-0", "namespace": NAMESPACE,
                "labels": {"stoker.dev/experiment": "mnist"},
                "ownerReferences": [{"apiVersion": "stoker.dev/v1alpha1", "kind": "Experiment",
                    "name": "mnist", "uid": uid, "controller": true}]},
            "spec": {"experiment": "mnist", "index": 0, "requestId": "r", "seed": 7,
                "hyperparameters": {"x": 0.25}, "unit": "batches", "units": 10},
        });
        self.plane.apply(&trial.to_string()).unwrap();
        let folder = format!("store/{NAMESPACE}/mnist-{}/trials/0", &uid[..8]);
        self.write(&format!("{folder}/logs/0/0-00000000.log"), "first\n");
        self.write(&format!("{folder}/logs/0/0-00000001.log"), "second\n");
        folder
    }
}

fn check(output: &Output, what: &str, code: i32, expected: &str) -> String {
    let out = String::from_utf8_lossy(&output.stdout).into_owned();
    let text = out.clone() + &String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{what}: {text}");
    assert!(text.contains(expected), "{what}: {text}");
    out
}

/// One control plane for all: it takes seconds to start.
#[test]
fn the_commands_do_on_a_cluster_what_they_say() {
    if !stoker_test_cluster::wanted() {
        return;
    }
    let lab = Lab::new();
    lab.check("experiment list", 1, "Stoker is not installed");
    lab.check("version", 0, "Stoker is not installed");
    let crds = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crds");
    lab.plane.apply_crds(&crds).unwrap();
    lab.check("version", 0, "Kubernetes v1.");
    lab.check("experiment list", 0, "no experiment in namespace `ml`");
    creates(&lab);
    shows(&lab);
    changes(&lab);
    waits(&lab);
    jobs(&lab);
    tells_what_is_forbidden(&lab);
    lab.check("experiment delete mnist", 0, "stay: s3://bucket/ml/mnist-");
    lab.check("experiment describe mnist", 2, "no experiment `mnist`");
}

fn creates(lab: &Lab) {
    lab.check("experiment create experiment.yaml program --dry-run", 0, "would be created");
    let tried = "experiment create experiment.yaml program --test --dry-run";
    lab.check(tried, 0, "mnist-test");
    assert!(!lab.path("store").exists());
    lab.check("experiment describe mnist", 2, "no experiment `mnist`");
    lab.check("experiment create experiment.yaml program --paused", 0, "files: 2, ");
    let made = lab.object("experiment", "mnist");
    assert_eq!(made["spec"]["state"], "paused");
    assert_eq!(made["metadata"]["labels"]["team"], "a");
    let sha256 = made["spec"]["context"]["sha256"].as_str().unwrap();
    let sent = lab.path(&format!("store/{NAMESPACE}/contexts/{sha256}.tar.gz"));
    let written = sent.metadata().unwrap().modified().unwrap();
    lab.check("experiment create experiment.yaml program", 2, "give this one another name");
    let other = "experiment create experiment.yaml program --set metadata.name=other";
    lab.check(other, 0, "nothing is sent");
    assert_eq!(sent.metadata().unwrap().modified().unwrap(), written);
    // What the file does not say and the server would refuse.
    let bad = "experiment create experiment.yaml --set metadata.name=bad --set \
               pod.volumeMounts=[{name:d,mountPath:\"\"}]";
    lab.check(bad, 2, "mountPath");
}

fn shows(lab: &Lab) {
    let made = lab.object("experiment", "mnist");
    let folder = lab.make_trial(&made);
    let manifest = json!({
        "format": 1, "experimentId": made["metadata"]["uid"], "trial": 0, "attempt": 0,
        "batches": 10, "files": {},
    })
    .to_string();
    let name = "000000000010-0";
    lab.write(&format!("{folder}/checkpoints/{name}/manifest.json"), &manifest);
    let sha256 = stoker_storage::hash::sha256_hex(manifest.as_bytes());
    lab.set_status(
        "trial",
        "mnist-0",
        &json!({"phase": "Running", "batches": 10, "batchesTotal": 10, "bestMetric": "0.5",
            "metrics": {"loss": "0.5"}, "restarts": 0, "observedGeneration": 1,
            "attempts": [{"number": 0, "end": "Completed"}],
            "checkpoints": [{"name": name, "batches": 10, "metric": "0.5",
                "manifestSha256": sha256, "bytes": 0}]}),
    );
    lab.set_status(
        "experiment",
        "mnist",
        &json!({"phase": "Running", "trialsCreated": 1, "trialsRunning": 1, "trialsClosed": 0,
            "progressPercent": 50, "cleanedUp": false, "observedGeneration": 1,
            "best": {"index": 0, "metric": "0.5", "checkpoint": name}}),
    );
    let list = lab.check("experiment list", 0, "NAME");
    let row: Vec<&str> = list.lines().nth(1).unwrap().split_whitespace().collect();
    assert_eq!(row[..9], ["mnist", "Running", "1", "1", "0", "50%", "0.5", "(trial", "0)"]);
    lab.check("experiment describe mnist", 0, "trial 0 with loss 0.5");
    assert_eq!(lab.json("experiment describe mnist")["metadata"]["name"], "mnist");
    assert_eq!(lab.json("experiment list").as_array().unwrap().len(), 2);
    lab.check("trial list mnist", 0, "mnist-0  Running  0.50000  10");
    assert_eq!(lab.json("trial list mnist")[0]["kind"], "Trial");
    lab.check("trial describe mnist 0", 0, "Hyperparameters:  x=0.25");
    lab.check("trial describe mnist-7", 2, "no trial `mnist-7`");
    assert_eq!(lab.check("trial logs mnist-0", 0, ""), "first\nsecond\n");
    assert_eq!(lab.check("experiment logs mnist", 0, ""), "[trial=0] first\n[trial=0] second\n");
    lab.check("trial logs mnist-0 --attempt 3", 2, "it has 1 from 0");
    lab.check("trial logs mnist-0 --rank 1", 2, "has 1 ranks");
    lab.check("checkpoint list mnist", 0, name);
    lab.check("checkpoint list mnist-0", 0, name);
    lab.check("checkpoint download mnist got", 0, "checkpoint 000000000010-0 of trial mnist-0");
    assert_eq!(std::fs::read_to_string(lab.path("got/manifest.json")).unwrap(), manifest);
    lab.check("checkpoint download mnist-0 got", 2, "holds a checkpoint already");
}

fn changes(lab: &Lab) {
    let state = || lab.object("experiment", "mnist")["spec"]["state"].clone();
    lab.check("experiment activate mnist", 0, "goes on");
    assert_eq!(state(), "active");
    lab.check("experiment activate mnist", 0, "already");
    lab.check("experiment pause mnist", 0, "pauses");
    assert_eq!(state(), "paused");
    lab.check("experiment cancel mnist", 0, "take a checkpoint and exit");
    let refused = lab.check("experiment activate mnist", 2, "a cancelled experiment stays");
    assert_eq!(refused, "");
    lab.check("experiment kill mnist", 0, "ends now");
    assert_eq!(state(), "killed");
    lab.check("trial kill mnist-0", 0, "ends now");
    assert_eq!(lab.object("trial", "mnist-0")["spec"]["wanted"], "kill");
    lab.set_status("trial", "mnist-0", &json!({ "phase": "Cancelled" }));
    lab.check("trial kill mnist-0", 2, "has ended (Cancelled)");
}

fn waits(lab: &Lab) {
    lab.check("experiment wait mnist --timeout 1s", 3, "has not ended within 1s: it is Running");
    for (phase, code, said) in
        [("Completed", 0, "completed"), ("Failed", 1, "failed"), ("Cancelled", 3, "was cancelled")]
    {
        lab.set_status("experiment", "mnist", &json!({ "phase": "Running" }));
        let words = ["experiment", "wait", "mnist", "-n", NAMESPACE, "--timeout", "1m"];
        let waiting = lab
            .stoker(lab.plane.kubeconfig(), &words)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(500));
        lab.set_status("experiment", "mnist", &json!({ "phase": phase }));
        let output = waiting.wait_with_output().unwrap();
        check(&output, phase, code, &format!("experiment mnist {said}"));
    }
    let ended = lab.json("experiment describe mnist");
    assert_eq!(ended["status"]["phase"], "Cancelled");
    lab.check("experiment pause mnist", 2, "has ended (Cancelled)");
}

fn jobs(lab: &Lab) {
    lab.check("job list", 0, "no job in namespace `ml`");
    let job = json!({
        "apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceJob",
        "metadata": {"name": "species", "labels": {"team": "a"}},
        "spec": {
            "entrypoint": {"command": ["./infer"]},
            "input": {"url": "s3://data/*.csv"},
            "output": {"url": "predictions"},
            "storage": {"url": "s3://bucket"},
            "resources": {"slots": 2},
        },
    });
    lab.write("job.yaml", &job.to_string());
    lab.check("job create job.yaml", 2, "spec.output.url");
    let create = "job create job.yaml program --set output.url=s3://bucket/out";
    lab.check(&format!("{create} --dry-run"), 0, "job species would be created");
    lab.check(&format!("{create} --paused"), 0, "job species is created in namespace ml");
    lab.check(create, 2, "there is a job `species` in namespace `ml` already");
    let made = lab.object("inferencejob", "species");
    assert_eq!(
        (&made["spec"]["state"], &made["metadata"]["labels"]["team"]),
        (&json!("paused"), &json!("a"))
    );
    let sha256 = made["spec"]["context"]["sha256"].as_str().unwrap();
    assert!(lab.path(&format!("store/{NAMESPACE}/contexts/{sha256}.tar.gz")).exists());
    lab.check("job logs species", 0, "no process of job species has started yet");
    let status = json!({
        "phase": "Running", "stage": "work", "attempts": 3, "running": 2, "rows": 20,
        "rowsTotal": 80, "rejected": 0, "restarts": 1, "progressPercent": 25,
        "observedGeneration": 1, "output": "s3://bucket/out", "workers": [],
    });
    lab.set_status("inferencejob", "species", &status);
    let list = lab.check("job list", 0, "NAME");
    let row: Vec<&str> = list.lines().nth(1).unwrap().split_whitespace().collect();
    assert_eq!(row[..8], ["species", "Running", "work", "2", "20", "80", "0", "1"]);
    lab.check("job describe species", 0, "25%, 20 of 80 rows");
    lab.check("job describe other", 2, "no job `other`");
    assert_eq!(lab.json("job describe species")["kind"], "InferenceJob");
    let uid = made["metadata"]["uid"].as_str().unwrap();
    let folder = format!("store/{NAMESPACE}/species-{}/workers", &uid[..8]);
    lab.write(&format!("{folder}/0/logs/0/0-00000000.log"), "planned\n");
    lab.write(&format!("{folder}/1/logs/2/0-00000000.log"), "worked\n");
    let logs = lab.check("job logs species", 0, "");
    assert_eq!(logs, "[slot=0] planned\n[slot=1] worked\n");
    assert_eq!(lab.check("job logs species --slot 1", 0, ""), "[slot=1] worked\n");
    lab.check("job logs species --slot 2", 2, "has 2 slots, from 0");
    lab.check("job activate species", 0, "goes on");
    lab.check("job pause species", 0, "after the batch that they are at");
    lab.check("job cancel species", 0, "job species ends");
    lab.check("job activate species", 2, "a cancelled job stays cancelled");
    lab.check("job kill species", 0, "ends now");
    lab.check("job wait species --timeout 1s", 3, "has not ended within 1s: it is Running");
    let done = json!({"phase": "Completed", "rows": 80, "rejected": 3});
    lab.set_status("inferencejob", "species", &done);
    let said = "77 rows of 80, 3 rejected: s3://bucket/out/manifest.json";
    lab.check("job wait species", 0, said);
    assert_eq!(lab.json("job wait species")["rows"], 77);
    lab.check("job pause species", 2, "has ended (Completed)");
    lab.check("job delete species", 0, "stay: s3://bucket/ml/species-");
}

fn tells_what_is_forbidden(lab: &Lab) {
    let kubeconfig = lab.plane.kubeconfig_for(NAMESPACE, "default").unwrap();
    let words = ["experiment", "list", "-n", NAMESPACE];
    let output = lab.stoker(&kubeconfig, &words).output().unwrap();
    check(&output, "as nobody", 1, "cannot list resource \"experiments\"");
}

//! `stoker mlflow` beside the real tracking server, read by MLflow's Python client.

use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::{Value, json};
use stoker_test_cluster::wait_until;
use stoker_tests::{describe_output, has_data, repository, stoker};

use crate::local_run::run;
use crate::readers::{glob_trials, tool};

/// A tracking server on loopback. Dropping it ends its processes.
struct Server {
    process: Child,
    url: String,
}

impl Server {
    /// Starts a server that keeps its files in `folder`.
    fn start(folder: &Path) -> Self {
        let [port] = stoker_test_cluster::free_ports().unwrap_or_else(|error| panic!("{error}"));
        let log = std::fs::File::create(folder.join("mlflow.log")).unwrap();
        let mut process = Command::new(tool("mlflow"))
            .args(["server", "--host", "127.0.0.1", "--workers", "1"])
            .args(["--port", &port.to_string()])
            .arg("--backend-store-uri")
            .arg(format!("sqlite:///{}", folder.join("mlflow.db").display()))
            .arg("--artifacts-destination")
            .arg(folder.join("artifacts"))
            .env("MLFLOW_DISABLE_TELEMETRY", "true")
            .env("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "false")
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .process_group(0)
            .spawn()
            .unwrap();
        let log = || std::fs::read_to_string(folder.join("mlflow.log")).unwrap_or_default();
        let started = wait_until("the MLflow server", || {
            let ended = process.try_wait().unwrap();
            assert!(ended.is_none(), "the MLflow server has ended: {ended:?}\n{}", log());
            std::net::TcpStream::connect(("127.0.0.1", port)).map_err(|error| error.to_string())
        });
        let server = Self { process, url: format!("http://127.0.0.1:{port}") };
        started.unwrap_or_else(|error| panic!("{error}\n{}", log()));
        server
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The command `mlflow` starts the server as a child.
        let _ = kill_process_group(Pid::from_child(&self.process), Signal::KILL);
        let _ = self.process.wait();
    }
}

/// Returns a command that runs a program with MLflow's client.
fn python(program: &str, url: &str) -> Command {
    let mut command = Command::new(tool("python"));
    command.args(["-c", program, url]).env("MLFLOW_DISABLE_TELEMETRY", "true");
    command
}

/// Compares the runs in MLflow with the metrics that `stoker` prints and the trials' records. Then
/// makes one copy look incomplete.
const COMPARE: &str = r#"
import csv, json, math, sys
from mlflow import MlflowClient
url, folder = sys.argv[1:]
client = MlflowClient(url)
experiment = client.get_experiment_by_name("iris-asha")
runs = client.search_runs([experiment.experiment_id])
assert len(runs) == 12, len(runs)
expected = {}
for row in csv.DictReader(open("metrics.csv")):
    name = f"{row['group']}/{row['metric']}".replace("(", "_28_").replace(")", "_29_")
    # MLflow stores infinities as the largest number.
    value = repr(max(-sys.float_info.max, min(float(row["value"]), sys.float_info.max)))
    if math.isnan(float(row["value"])):
        value = "nan"
    expected.setdefault((row["trial"], name), set()).add((int(row["batches"]), value))
copied, values = {}, 0
for run in runs:
    trial = run.data.tags["stoker.trial"]
    record = json.load(open(f"{folder}/trials/{trial}/record.json"))
    assert run.info.run_name == f"iris-asha-{trial}", run.info
    assert run.info.status == "FINISHED" and run.info.end_time >= run.info.start_time, run.info
    location = run.data.tags["stoker.location"].removeprefix("file://")
    assert location == f"{folder}/trials/{trial}", location
    assert run.data.tags["stoker.seed"] == str(record["spec"]["seed"])
    params = {name: float(value) for name, value in run.data.params.items()}
    assert params == record["spec"]["hyperparameters"], (params, record["spec"])
    for name in run.data.metrics:
        history = client.get_metric_history(run.info.run_id, name)
        values += len(history)
        points = {(metric.step, repr(float(metric.value))) for metric in history}
        assert len(points) == len(history), (name, history)
        copied[trial, name] = points
differ = [key for key in copied.keys() | expected.keys() if copied.get(key) != expected.get(key)]
assert not differ, [(key, copied.get(key), expected.get(key)) for key in differ[:2]]
assert copied["0", "training/loss _28_log_29_"] == {(999, "-2.5")}, "the unusual row is missing"
print(values)
client.delete_tag(runs[3].info.run_id, "stoker.exported")
"#;

/// Adds a row with numbers that JSON lacks, and with a name that MLflow refuses.
fn add_unusual_row(trial: &Path) {
    let record = std::fs::read_to_string(trial.join("record.json")).unwrap();
    let record: Value = serde_json::from_str(&record).unwrap();
    // A row of an earlier attempt would be superseded.
    let attempt = &record["status"]["attempts"].as_array().unwrap().last().unwrap()["number"];
    let row = json!({
        "group": "training", "batches": 999, "epoch": 0, "attempt": attempt, "time": 1.5,
        "metrics": { "loss": null, "up": null, "down": null, "loss (log)": -2.5 },
        "nonfinite": { "loss": "NaN", "up": "inf", "down": "-inf" },
    });
    let path = trial.join(format!("metrics/{attempt}-00000099.jsonl"));
    std::fs::write(path, format!("{row}\n")).unwrap();
}

#[test]
fn mlflow_shows_the_values_of_an_experiment() {
    if !has_data("iris") {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let server = Server::start(root.path());
    let runs = root.path().join("runs");
    let output = run(&repository().join("examples/iris/asha.yaml"), &runs, &[]);
    assert!(output.status.success(), "{}", describe_output(&output));
    let trial = glob_trials(&runs).remove(0);
    add_unusual_row(&trial);
    let experiment = trial.parent().unwrap().parent().unwrap();
    let csv = ["experiment", "metrics", "iris-asha", "--output", "csv", "--root"];
    let csv = stoker(csv).arg(&runs).output().unwrap();
    assert!(csv.status.success(), "{}", describe_output(&csv));
    std::fs::write(root.path().join("metrics.csv"), csv.stdout).unwrap();

    let copy = |name: &str, more: &[&str]| {
        let mut command = stoker(["mlflow", name, "--output", "json"]);
        command.args(["--tracking-uri", &server.url, "--root"]).arg(&runs).args(more);
        command.output().unwrap()
    };
    let check = |name: &str, created: u32, updated: u32, unchanged: u32| {
        let output = copy(name, &[]);
        assert!(output.status.success(), "{}", describe_output(&output));
        let value: Value = serde_json::from_slice(&output.stdout).unwrap();
        let counts = ["created", "updated", "unchanged"].map(|field| value[field].clone());
        assert_eq!(counts, [created, updated, unchanged].map(Value::from), "{value}");
        value["url"].as_str().unwrap().to_owned()
    };
    let compare = || {
        let mut compare = python(COMPARE, &server.url);
        let compare = compare.arg(experiment).current_dir(root.path()).output().unwrap();
        assert!(compare.status.success(), "{}", describe_output(&compare));
        String::from_utf8(compare.stdout).unwrap()
    };
    let url = check("iris-asha", 12, 0, 0);
    assert_eq!(url, format!("{}/#/experiments/1", server.url));
    check("iris-asha", 0, 0, 12);
    check("iris-asha-5", 0, 0, 1);
    let num_values = compare();
    // An incomplete copy is completed, and no value is stored twice.
    check("iris-asha", 0, 1, 11);
    assert_eq!(compare(), num_values);

    let delete = "import sys; from mlflow import MlflowClient; \
                  MlflowClient(sys.argv[1]).delete_experiment('1')";
    let deleted = python(delete, &server.url).output().unwrap();
    assert!(deleted.status.success(), "{}", describe_output(&deleted));
    let output = copy("iris-asha", &[]);
    let text = describe_output(&output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("experiment iris-asha is deleted in MLflow; restore it"), "{text}");
    let output = copy("iris-asha-5", &["--experiment", "other"]);
    assert!(output.status.success(), "{}", describe_output(&output));
}

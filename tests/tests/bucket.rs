//! A bucket without the record of its runner: commands and TensorBoard read it alone.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;
use stoker_test_cluster::wait_until;
use stoker_tests::{describe_output, has_data, repository, stoker};

use crate::local_run::run;
use crate::readers::tool;

/// Longest wait for a part of TensorBoard's response. The test then sends another request.
const READ_MAX: Duration = Duration::from_secs(10);

/// Commands whose output depends only on the records and the metrics.
const COMMANDS: [&[&str]; 6] = [
    &["experiment", "list"],
    &["experiment", "describe", "iris-asha"],
    &["experiment", "metrics", "iris-asha"],
    &["trial", "list", "iris-asha"],
    &["trial", "describe", "iris-asha-5"],
    &["checkpoint", "list", "iris-asha"],
];

fn read(root: &Path, command: &[&str]) -> String {
    let output = stoker(command).arg("--root").arg(root).output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", describe_output(&output));
    let text = String::from_utf8(output.stdout).unwrap();
    // The age of the run changes. The lists have it in the last column.
    let lines = text.lines().filter(|line| !line.contains(" ago)"));
    let is_list = [COMMANDS[0], COMMANDS[3]].contains(&command);
    let without_age = |line: &str| match is_list {
        true => line.rsplit_once("  ").map_or_else(String::new, |(start, _)| start.to_owned()),
        false => line.to_owned(),
    };
    lines.map(without_age).collect::<Vec<_>>().join("\n")
}

/// Reads the trials as TensorBoard's HParams plugin shows them, and compares them with the records.
const READ_HPARAMS: &str = r#"
import glob, json, sys
from tensorboard.backend.event_processing import data_provider, plugin_event_multiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins import base_plugin
from tensorboard.plugins.hparams import api_pb2, backend_context, list_session_groups
folder = sys.argv[1]
multiplexer = plugin_event_multiplexer.EventMultiplexer()
multiplexer.AddRunsFromDirectory(folder)
multiplexer.Reload()
provider = data_provider.MultiplexerDataProvider(multiplexer, folder)
context = base_plugin.TBContext(
    logdir=folder, multiplexer=multiplexer, data_provider=provider)
backend, request = backend_context.Context(context), RequestContext()
experiment = backend.experiment_from_metadata(
    request, "", True, backend.hparams_metadata(request, ""),
    backend.hparams_from_data_provider(request, "", None))
infos = {info.name: info for info in experiment.hparam_infos}
assert sorted(infos) == ["global_batch_size", "hidden", "learning_rate"], infos
interval = infos["learning_rate"].domain_interval
assert (interval.min_value, interval.max_value) == (1e-4, 1.0), interval
metrics = [info.name.tag for info in experiment.metric_infos]
assert metrics == ["validation/validation_loss", "validation/validation_accuracy"], metrics
query = api_pb2.ListSessionGroupsRequest(
    start_index=0, slice_size=100, allowed_statuses=[0, 1, 2, 3], include_metrics=True)
for name in infos:
    query.col_params.add(hparam=name, include_in_result=True)
for info in experiment.metric_infos:
    query.col_params.add(metric=info.name)
groups = list_session_groups.Handler(request, backend, "", query).run().session_groups
records = [json.load(open(path)) for path in glob.glob(folder + "/*/record.json")]
assert len(groups) == len(records) == 12, (len(groups), len(records))
statuses = set()
for group in groups:
    session = group.sessions[0]
    index = int(group.name.split("/")[0])
    record = [record for record in records if record["spec"]["index"] == index][0]
    expected = record["spec"]["hyperparameters"]
    found = {name: value.number_value for name, value in group.hparams.items()}
    assert found == expected, (found, expected)
    loss = [metric.value for metric in group.metric_values if metric.name.tag == metrics[0]][0]
    latest = float(record["status"]["metrics"]["validation_loss"])
    assert abs(loss - latest) < 1e-6 * max(1, latest), (loss, latest)
    statuses.add(session.status)
assert api_pb2.STATUS_SUCCESS in statuses, statuses
print(len(groups), "trials agree")
"#;

/// Starts TensorBoard for `name`, waits until it has `num` runs, and returns their names.
fn tensorboard_runs(root: &Path, name: &str, num: usize) -> Vec<String> {
    let mut command = stoker(["tensorboard", name, "--port", "0", "--output", "json", "--program"]);
    let command = command.arg(tool("tensorboard")).arg("--root").arg(root);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let value: Value = serde_json::from_str(&line).unwrap_or_else(|error| {
        let _ = child.kill();
        let mut reason = String::new();
        child.stderr.take().unwrap().read_to_string(&mut reason).unwrap();
        panic!("{error}: {line:?}: {reason}")
    });
    let address = value["url"].as_str().unwrap().trim_start_matches("http://");
    let address = address.trim_end_matches('/').to_owned();
    // TensorBoard loads the files after it accepts connections, one directory after another.
    let runs = wait_until(&format!("TensorBoard has {num} runs"), || {
        let text = get(&address, "/data/runs").map_err(|error| error.to_string())?;
        match serde_json::from_str::<Vec<String>>(&text) {
            Ok(runs) if runs.len() >= num => Ok(runs),
            _ => Err(text),
        }
    });
    let runs = runs.unwrap_or_else(|error| panic!("{error}"));
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    assert!(child.wait().unwrap().success());
    assert!(TcpStream::connect(&address).is_err(), "TensorBoard still runs");
    runs
}

fn get(address: &str, path: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(READ_MAX))?;
    write!(stream, "GET {path} HTTP/1.0\r\nHost: {address}\r\n\r\n")?;
    let mut response = Vec::new();
    stream.read_to_end(&mut response)?;
    let text = String::from_utf8_lossy(&response).into_owned();
    Ok(text.split_once("\r\n\r\n").map(|(_, body)| body.to_owned()).unwrap_or_default())
}

#[test]
fn a_bucket_alone_tells_the_whole_story() {
    if !has_data("iris") {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let output = run(&repository().join("examples/iris/asha.yaml"), root.path(), &[]);
    assert!(output.status.success(), "{}", describe_output(&output));
    let before = COMMANDS.map(|command| read(root.path(), command));
    std::fs::remove_dir_all(root.path().join("local")).unwrap();
    for (command, before) in COMMANDS.iter().zip(before) {
        assert_eq!(read(root.path(), command), before, "{command:?}");
    }

    let namespace = root.path().join("default");
    let experiment = std::fs::read_dir(namespace).unwrap().next().unwrap().unwrap().path();
    let trials = experiment.join("trials");
    let hparams =
        Command::new(tool("python")).args(["-c", READ_HPARAMS]).arg(trials).output().unwrap();
    assert!(hparams.status.success(), "{}", describe_output(&hparams));

    assert_eq!(tensorboard_runs(root.path(), "iris-asha", 12).len(), 12);
    assert_eq!(tensorboard_runs(root.path(), "iris-asha-5", 1), ["."]);
}

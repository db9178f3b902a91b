//! Third-party software reads the results of a run: pandas, Polars, DuckDB, an S3 server.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use stoker_tests::{cache, describe_output, has_data, repository, stoker};

use crate::local_run::run;

/// Returns the path of a tool that scripts/fetch-tools installs: Python with the readers, or the S3
/// server.
pub(crate) fn tool(name: &str) -> std::path::PathBuf {
    let path = cache().join("tools/python-5/bin").join(name);
    assert!(path.exists(), "{} is missing; run scripts/fetch-tools", path.display());
    path
}

/// Lines of docs/metrics.md that read all metrics of an experiment: from the CSV, from the files.
const DOCUMENTED: [&str; 6] = [
    r#"pandas.read_csv("metrics.csv")"#,
    r#"polars.read_csv("metrics.csv")"#,
    "SELECT * FROM 'metrics.csv'",
    concat!(
        "pandas.concat(pandas.read_json(path, lines=True).assign(path=path) for path in ",
        r#"glob.glob("trials/*/metrics/*.jsonl"))"#
    ),
    concat!(
        r#"polars.concat([polars.read_ndjson(path, include_file_paths="path") for path in "#,
        r#"glob.glob("trials/*/metrics/*.jsonl")], how="diagonal_relaxed")"#
    ),
    "SELECT * FROM read_json('trials/*/metrics/*.jsonl', filename=true)",
];

/// Lines of docs/metrics.md that read all metrics of an experiment from Parquet.
const DOCUMENTED_PARQUET: [&str; 3] = [
    r#"pandas.read_parquet("metrics.parquet")"#,
    r#"polars.read_parquet("metrics.parquet")"#,
    "SELECT * FROM 'metrics.parquet'",
];

/// Further lines of docs/metrics.md, about the tables `data` of pandas and Polars, and of DuckDB.
const ABOUT_ROWS: [&str; 6] = [
    concat!(
        r#"data.query("metric == 'validation_loss'")"#,
        r#".pivot(index="batches", columns="trial", values="value")"#
    ),
    concat!(
        "SELECT trial, min(value) FROM 'metrics.csv' WHERE metric = 'validation_loss' ",
        "GROUP BY trial ORDER BY 2 LIMIT 1"
    ),
    r#"data["path"].str.extract(r"trials/(\d+)/")"#,
    r#"data["metrics"].str.get("loss")"#,
    concat!(
        r#"data[data["attempt"] == data.groupby(["trial", "group", "batches"])"#,
        r#"["attempt"].transform("max")]"#
    ),
    r#"data.unnest("metrics")"#,
];

/// Runs the documented lines in the directory of an experiment, and compares their tables.
const READ_ALL: &str = r#"
import glob, json, math, sys
import duckdb, pandas, polars
read, about, parquet = json.loads(sys.argv[1])
lines = open("metrics.csv").read().splitlines()[1:]
from_pandas, from_polars, from_duckdb = eval(read[0]), eval(read[1]), duckdb.sql(read[2]).df()
assert len(lines) == len(from_pandas) == len(from_polars) == len(from_duckdb) > 0
assert from_pandas["value"].dtype == "float64" and from_duckdb["value"].dtype == "float64"
assert from_polars["value"].dtype == polars.Float64, from_polars["value"].dtype
nans = [int(values.isna().sum()) for values in (from_pandas["value"], from_duckdb["value"])]
assert nans == [1, 1] and from_polars["value"].is_nan().sum() == 1, nans
data = from_pandas
by_trial = eval(about[0])
assert list(by_trial.columns) == sorted(data["trial"].unique()), by_trial
best = duckdb.sql(about[1]).fetchall()[0]
assert best[0] == by_trial.min().idxmin(), best
assert math.isclose(best[1], by_trial.min().min()), (best, by_trial.min().min())
exact = pandas.read_csv("metrics.csv", float_precision="round_trip")["value"]
values = duckdb.sql(read[2]).df()["value"]
assert exact.equals(values), "DuckDB is not exact"
assert exact.equals(pandas.Series(from_polars["value"].to_list())), "Polars is not exact"
exact = pandas.read_csv("metrics.csv", float_precision="round_trip")
pandas.testing.assert_frame_equal(eval(parquet[0]), exact)
pandas.testing.assert_frame_equal(duckdb.sql(parquet[2]).df(), exact)
assert eval(parquet[1]).equals(from_polars), "Polars reads other values from Parquet"
rows = sum(len(open(path).read().splitlines()) for path in glob.glob("trials/*/metrics/*.jsonl"))
data = eval(read[3])
from_files = duckdb.sql(read[5])
assert rows == len(data) == len(eval(read[4])) == len(from_files.df()), rows
losses = eval(about[3])
expected = duckdb.sql(f"SELECT avg(metrics.loss) FROM ({read[5]}) WHERE \"group\" = 'training'")
assert math.isclose(losses[data["group"] == "training"].mean(), expected.fetchall()[0][0])
data["trial"] = eval(about[2])[0].astype(int)
assert 0 < len(eval(about[4])) <= rows
data = eval(read[4])
assert math.isclose(eval(about[5])["loss"].mean(), losses.mean())
print(rows, "rows agree")
"#;

#[test]
fn pandas_polars_and_duckdb_read_an_experiment() {
    if !has_data("iris") {
        return;
    }
    let documentation = std::fs::read_to_string(repository().join("docs/metrics.md")).unwrap();
    for line in DOCUMENTED.iter().chain(&ABOUT_ROWS).chain(&DOCUMENTED_PARQUET) {
        assert!(documentation.contains(line), "docs/metrics.md does not contain {line}");
    }
    let root = tempfile::tempdir().unwrap();
    let more = ["--set", "schedulingUnit=8"];
    let output = run(&repository().join("examples/iris/asha.yaml"), root.path(), &more);
    assert!(output.status.success(), "{}", describe_output(&output));
    let trial = glob_trials(root.path()).remove(0);
    // NaN must not turn the numbers into text.
    let row = concat!(
        r#"{"group":"training","batches":999,"epoch":0,"attempt":0,"#,
        r#""metrics":{"loss":null},"nonfinite":{"loss":"NaN"}}"#
    );
    std::fs::write(trial.join("metrics/0-00000099.jsonl"), format!("{row}\n")).unwrap();
    let experiment = trial.parent().unwrap().parent().unwrap();
    for format in ["csv", "parquet"] {
        let metrics = ["experiment", "metrics", "iris-asha", "--output", format, "--root"];
        let output = stoker(metrics).arg(root.path()).output().unwrap();
        assert!(output.status.success(), "{}", describe_output(&output));
        std::fs::write(experiment.join(format!("metrics.{format}")), output.stdout).unwrap();
    }
    let lines = serde_json::json!([DOCUMENTED, ABOUT_ROWS, DOCUMENTED_PARQUET]).to_string();
    let mut read = Command::new(tool("python"));
    let read = read.args(["-c", READ_ALL, &lines]).current_dir(experiment).output().unwrap();
    assert!(read.status.success(), "{}", describe_output(&read));
}

/// Returns the directories `NAMESPACE/EXPERIMENT/trials/INDEX` under a root, sorted.
pub(crate) fn glob_trials(root: &Path) -> Vec<std::path::PathBuf> {
    let mut trials = Vec::new();
    let folders = |path: &Path| -> Vec<_> {
        let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect()
    };
    for namespace in folders(root) {
        for experiment in folders(&namespace) {
            trials.extend(folders(&experiment.join("trials")));
        }
    }
    trials.sort();
    assert!(!trials.is_empty(), "no trial under {}", root.display());
    trials
}

/// An S3 server on loopback with one bucket, `runs`. Dropping it ends the server.
#[derive(Debug)]
pub(crate) struct S3Server {
    process: Child,
    /// Port of the S3 API. The access key is `test`, the secret key is `secret`.
    pub(crate) port: u16,
    master: String,
    filer: String,
    folder: PathBuf,
}

impl S3Server {
    /// Returns the tree of the objects in a folder of a bucket. Its last line has their number.
    fn tree(&self, path: &str) -> String {
        let output = self.shell(&format!("fs.tree /buckets/{path}\n"));
        assert!(output.status.success(), "{}", describe_output(&output));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Runs commands in `weed shell`, which waits for ever for a dead server.
    fn shell(&self, commands: &str) -> Output {
        let path = self.folder.join("commands");
        std::fs::write(&path, commands).unwrap();
        Command::new("timeout")
            .arg("60")
            .arg(tool("weed"))
            .args(["shell", &format!("-master={}", self.master)])
            .arg(format!("-filer={}", self.filer))
            .current_dir(&self.folder)
            .stdin(std::fs::File::open(path).unwrap())
            .output()
            .unwrap()
    }
}

impl Drop for S3Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Starts an S3 server that keeps its files in `folder`.
pub(crate) fn s3_server(folder: &Path) -> S3Server {
    let [s3, filer, master, volume, s3_grpc, filer_grpc, master_grpc, volume_grpc] =
        stoker_test_cluster::free_ports().unwrap_or_else(|error| panic!("{error}"));
    let config = folder.join("s3.json");
    let identity = serde_json::json!({"identities": [{
        "name": "test",
        "credentials": [{"accessKey": "test", "secretKey": "secret"}],
        "actions": ["Admin", "Read", "Write", "List"],
    }]});
    std::fs::write(&config, identity.to_string()).unwrap();
    let log = std::fs::File::create(folder.join("weed.log")).unwrap();
    let process = Command::new(tool("weed"))
        .args(["server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3", "-filer", "-volume.max=10"])
        .args([format!("-s3.port={s3}"), format!("-s3.port.grpc={s3_grpc}")])
        // These catalogs have fixed ports by default, so a second server would end.
        .args(["-s3.port.iceberg=0", "-s3.port.lance=0"])
        .args([format!("-filer.port={filer}"), format!("-filer.port.grpc={filer_grpc}")])
        .args([format!("-master.port={master}"), format!("-master.port.grpc={master_grpc}")])
        .args([format!("-volume.port={volume}"), format!("-volume.port.grpc={volume_grpc}")])
        .args([format!("-dir={}", folder.display()), format!("-s3.config={}", config.display())])
        .current_dir(folder)
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .unwrap();
    let master = format!("127.0.0.1:{master}.{master_grpc}");
    let filer = format!("127.0.0.1:{filer}.{filer_grpc}");
    let mut server = S3Server { process, port: s3, master, filer, folder: folder.to_owned() };
    let deadline = Instant::now() + stoker_test_cluster::PATIENCE;
    loop {
        let buckets = server.shell("s3.bucket.create -name runs\ns3.bucket.list\n");
        // The first command fails if the bucket exists.
        let is_created = String::from_utf8_lossy(&buckets.stdout).contains("runs");
        if is_created && std::net::TcpStream::connect(("127.0.0.1", s3)).is_ok() {
            return server;
        }
        let log = || std::fs::read_to_string(folder.join("weed.log")).unwrap_or_default();
        let status = server.process.try_wait().unwrap();
        assert!(status.is_none(), "the S3 server has ended: {status:?}\n{}", log());
        assert!(
            Instant::now() < deadline,
            "no S3 server: {}\n{}",
            describe_output(&buckets),
            log()
        );
        std::thread::sleep(Duration::from_millis(500));
    }
}

/// Returns a command with the credentials of the bucket. Local records are in `state`.
fn with_bucket(arguments: &[&str], state: &Path) -> Command {
    let mut command = stoker(arguments);
    command.env("AWS_ACCESS_KEY_ID", "test").env("AWS_SECRET_ACCESS_KEY", "secret");
    command.env("XDG_STATE_HOME", state).stdin(Stdio::null());
    command
}

/// Returns the command that runs the random search of the iris example with a bucket as its root.
fn bucket_run(root: &str, port: u16, state: &Path, more: &[&str]) -> Command {
    let endpoint = format!("checkpointStorage.endpoint=http://127.0.0.1:{port}");
    let mut command =
        with_bucket(&["run", "--output", "json", "--root", root, "--set", &endpoint], state);
    command.args(more).arg(repository().join("examples/iris/random.yaml"));
    command
}

/// Runs the command of [`bucket_run`].
pub(crate) fn run_in_bucket(root: &str, port: u16, state: &Path, more: &[&str]) -> Output {
    bucket_run(root, port, state, more).output().unwrap()
}

#[test]
fn runs_can_be_stored_in_s3() {
    if !has_data("iris") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let server = s3_server(folder.path());
    let (state, root) = (folder.path().join("state"), "s3://runs/team");
    let mut command = bucket_run(root, server.port, &state, &[]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut runner = Runner(command.spawn().unwrap());
    let mut messages = BufReader::new(runner.0.stderr.take().unwrap()).lines();
    let begin = messages.find(|line| line.as_ref().is_ok_and(|line| line.starts_with("new run ")));
    assert!(begin.is_some(), "the runner has ended");
    let messages = std::thread::spawn(move || messages.collect::<Result<Vec<String>, _>>());
    let results = runner.0.stdout.take().unwrap();
    let results = std::thread::spawn(move || std::io::read_to_string(results));
    let call = |arguments: &[&str]| {
        let output = with_bucket(arguments, &state).args(["--root", root]).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", describe_output(&output));
        String::from_utf8(output.stdout).unwrap()
    };
    let lines = |text: String| {
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    let followed = lines(call(&["experiment", "logs", "iris-random", "--follow"]));
    let status = runner.0.wait().unwrap();
    assert!(status.success(), "{:#?}", messages.join().unwrap());
    let results = results.join().unwrap().unwrap();
    let line: serde_json::Value = serde_json::from_str(results.lines().last().unwrap()).unwrap();
    assert_eq!(line["phase"], "Completed", "{line}");
    let checkpoint = line["best"]["checkpoint"].as_str();
    assert!(checkpoint.is_some_and(|name| !name.is_empty()), "{line}");
    // No trial restarts, so its only attempt is printed both times.
    assert_eq!(followed, lines(call(&["experiment", "logs", "iris-random"])));
    assert!(!followed.is_empty());
    let tree = server.tree("runs/team");
    assert!(tree.contains("manifest.json"), "{tree}");
    call(&["experiment", "delete", "iris-random"]);
    // The S3 server keeps empty folders.
    let tree = server.tree("runs/team");
    assert!(tree.trim_end().ends_with(", 0 files"), "{tree}");
}

/// A process that is killed when it is dropped.
struct Runner(Child);

impl Drop for Runner {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

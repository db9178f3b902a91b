//! Infrastructure failures and user errors end a run with a clear message.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use stoker_test_cluster::{has_root, wait_until};
use stoker_tests::{cache, describe_output, has_data, repository, stoker, write_random_cifar10};

use crate::interrupted::trials;
use crate::local_run::{last_line, run};
use crate::proxy::Proxy;
use crate::readers::{run_in_bucket, s3_server};

/// A small separate file system. Dropping it unmounts it. Mounting needs root.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn mount(at: &Path, bytes: u32) -> Self {
        std::fs::create_dir_all(at).unwrap();
        let size = format!("size={bytes}");
        let output =
            Command::new("mount").args(["-t", "tmpfs", "-o", &size, "tmpfs"]).arg(at).output();
        let output = output.unwrap();
        assert!(output.status.success(), "mounting needs root: {}", describe_output(&output));
        Self(at.to_owned())
    }

    fn resize(&self, bytes: u32) {
        let size = format!("remount,size={bytes}");
        let output = Command::new("mount").args(["-o", &size]).arg(&self.0).output().unwrap();
        assert!(output.status.success(), "{}", describe_output(&output));
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

fn example(name: &str) -> PathBuf {
    repository().join("examples").join(name).join("const.yaml")
}

/// The experiment continues as soon as there is space again.
#[test]
fn full_disks_are_reported_and_outlived() {
    if !has_root("mounting a file system") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("disk");
    let disk = SmallDisk::mount(&root, 256 * 1024);
    let data = folder.path().join("data");
    write_random_cifar10(&data);
    let log = folder.path().join("log");
    let file = std::fs::File::create(&log).unwrap();
    let mut run = stoker(["run", "--output", "json", "--set", "searcher.maxLength={batches: 5}"])
        .arg("--set")
        .arg(format!("data.root={}", data.display()))
        .arg("--root")
        .arg(&root)
        .arg(example("cifar10"))
        .stdout(file.try_clone().unwrap())
        .stderr(file)
        .spawn()
        .unwrap();
    let reported = wait_until("the full disk is reported", || {
        let text = std::fs::read_to_string(&log).unwrap();
        if text.contains("is full") { Ok(text) } else { Err(text) }
    });
    disk.resize(64 << 20);
    let status = run.wait().unwrap();
    let text = reported.unwrap();
    assert!(text.contains("free some space or choose another root"), "{text}");
    assert!(status.success(), "{status} {}", std::fs::read_to_string(&log).unwrap());
}

#[test]
fn invalid_files_are_refused_with_all_errors() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("wrong.yaml");
    let text = std::fs::read_to_string(example("iris")).unwrap();
    let text =
        text.replace("metric:", "metrik:").replace("single: {}", "single: {}\n    random: {}");
    std::fs::write(&file, text).unwrap();
    let output = run(&file, folder.path(), &[]);
    assert_eq!(output.status.code(), Some(2), "{}", describe_output(&output));
    let text = describe_output(&output);
    for part in ["metrik", "metric", "maxTrials"] {
        assert!(text.contains(part), "{part} is not in: {text}");
    }
}

/// Runs the iris example with `set`, and checks the exit code and that the output contains `parts`.
#[track_caller]
fn check_iris(set: &[&str], code: i32, parts: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let set: Vec<&str> = set.iter().flat_map(|set| ["--set", set]).collect();
    let output = run(&example("iris"), folder.path(), &set);
    assert_eq!(output.status.code(), Some(code), "{}", describe_output(&output));
    let text = describe_output(&output);
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in: {text}");
    }
}

/// Returns a directory with the iris data, changed.
fn irises(change: impl FnOnce(String) -> String) -> tempfile::TempDir {
    let mut text = String::new();
    let packed = std::fs::File::open(cache().join("data/iris/iris.csv.gz")).unwrap();
    flate2::read::GzDecoder::new(packed).read_to_string(&mut text).unwrap();
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("iris.csv"), change(text)).unwrap();
    folder
}

#[test]
fn unusable_data_is_named_in_the_error() {
    if !has_data("iris") {
        return;
    }
    let once = "maxRestarts=0";
    let check = |folder: &Path, more: &str, parts: &[&str]| {
        let data = format!("data={{root: {}{more}}}", folder.display());
        check_iris(&[once, &data], 1, parts);
    };
    let complete = irises(|text| text);
    let hash = format!(", sha256: {{iris.csv: \"{}\"}}", "0".repeat(64));
    check(complete.path(), &hash, &["iris.csv", "SHA-256", &"0".repeat(64)]);
    check(Path::new("/no/such/folder"), "", &["/no/such/folder/iris.csv", "data.root"]);
    let header = irises(|text| text.lines().next().unwrap().to_owned() + "\n");
    check(header.path(), "", &["iris.csv", "at least one row"]);
    let cut = irises(|text| text[..text.len() - 9].to_owned());
    check(cut.path(), "", &["iris.csv", "line 151"]);
    let large = "hyperparameters.global_batch_size=1000";
    check_iris(&[once, large], 1, &["1000", "120", "global_batch_size"]);
}

#[test]
fn nan_losses_rank_last() {
    if !has_data("iris") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let set = [
        "--set",
        // With the first rate the model learns, with the second it diverges.
        "hyperparameters.learning_rate={log: {min: -2, max: 38, count: 2}}",
        "--set",
        "searcher={metric: validation_loss, maxLength: {epochs: 2}, grid: {}}",
    ];
    let output = run(&example("iris"), folder.path(), &set);
    assert!(output.status.success(), "{}", describe_output(&output));
    let line = last_line(&output);
    assert_eq!(line["best"]["hyperparameters"]["learning_rate"], 0.01, "{line}");
    let trials: Vec<_> = trials(folder.path()).into_values().collect();
    let metric = |trial: &Value| trial["facts"][0]["result"]["metric"].clone();
    assert_eq!(trials.iter().map(metric).filter(|metric| metric == "NaN").count(), 1, "{trials:?}");
}

#[test]
fn failing_store_requests_change_no_result() {
    if !has_data("iris") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let server = s3_server(folder.path());
    let proxy = Proxy::start(server.port, 20);
    let seed = ["--set", "reproducibility={experimentSeed: 5}"];
    let often = ["--set", "minCheckpointPeriod={batches: 20}"];
    let set = [seed, often].concat();
    let mut outcomes = vec![];
    for (name, port) in [("good", server.port), ("bad", proxy.port)] {
        let state = folder.path().join(name);
        let root = format!("s3://runs/{name}");
        let output = run_in_bucket(&root, port, &state, &set);
        assert!(output.status.success(), "{}", describe_output(&output));
        let local = std::fs::read_dir(state.join("stoker")).unwrap().flatten().next().unwrap();
        outcomes.push(trials(&local.path()));
    }
    let (requests, failed) = proxy.counts();
    assert!(failed >= 20, "only {failed} of {requests} requests failed");
    assert_eq!(outcomes[0], outcomes[1]);
}

#[test]
fn a_missing_free_port_is_reported() {
    if !has_root("a network namespace") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    // A separate network namespace has only one ephemeral port, which is already in use.
    let script = r#"
        ip link set lo up
        echo 40000 40000 > /proc/sys/net/ipv4/ip_local_port_range
        exec python3 - "$@" <<'END'
import socket, subprocess, sys
taken = socket.socket()
taken.bind(("127.0.0.1", 40000))
taken.listen()
sys.exit(subprocess.run(sys.argv[1:]).returncode)
END
    "#;
    let output = Command::new("unshare")
        .args(["--net", "sh", "-c", script, "sh"])
        .arg(stoker_tests::program("stoker"))
        .args(["run", "--root"])
        .arg(folder.path())
        .arg(example("iris"))
        .output()
        .unwrap();
    let text = describe_output(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("cannot listen on 127.0.0.1") && text.contains("port"), "{text}");
}

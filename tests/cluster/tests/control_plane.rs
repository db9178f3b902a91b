//! Tests of the control plane without nodes.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use stoker_test_cluster::{ControlPlane, Options, clusters_enabled, wait_until};

fn crds() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../crds")
}

#[test]
fn api_server_serves_objects_and_logs_requests() {
    if !clusters_enabled() {
        return;
    }
    let start = Instant::now();
    let plane = ControlPlane::start().unwrap();
    println!("control plane ready in {:?}", start.elapsed());
    plane.make_namespace("one").unwrap();
    plane.apply("{apiVersion: v1, kind: ConfigMap, metadata: {name: a}, data: {k: v}}").unwrap();
    let map = plane.get(&["configmap", "a"]).unwrap();
    assert_eq!(map["data"]["k"], "v", "{map}");

    // A service account has only the rights that it was given.
    let account = plane.client_for("one", "default").unwrap();
    let refused = account.kubectl(&["get", "pods", "-n", "one"]).unwrap_err().to_string();
    assert!(refused.contains("cannot list resource \"pods\""), "{refused}");
    let requests = plane.requests().unwrap();
    let logged = requests
        .iter()
        .find(|request| {
            request.user == "system:serviceaccount:one:default" && request.resource == "pods"
        })
        .map(|request| (request.verb.as_str(), request.resource.as_str(), request.code));
    assert_eq!(logged, Some(("list", "pods", 403)));

    // Objects survive a restart of the API server.
    plane.stop_api();
    assert!(plane.kubectl(&["get", "--raw", "/readyz"]).is_err());
    let start = Instant::now();
    plane.start_api().unwrap();
    println!("API server back in {:?}", start.elapsed());
    assert_eq!(plane.get(&["configmap", "a"]).unwrap()["data"]["k"], "v");
}

#[test]
fn custom_resources_are_established() {
    if !clusters_enabled() {
        return;
    }
    let plane = ControlPlane::start().unwrap();
    plane.apply_crds(&crds()).unwrap();
    let listed = plane.kubectl(&["get", "experiments,trials", "-A"]).unwrap();
    assert_eq!(listed, "");
}

#[test]
fn control_plane_ends_when_dropped() {
    if !clusters_enabled() {
        return;
    }
    let plane = ControlPlane::start().unwrap();
    let folder = plane.folder().to_path_buf();
    let pid = std::fs::read_to_string(folder.join("pids/kube-apiserver")).unwrap();
    let process = Path::new("/proc").join(pid.trim());
    assert!(process.exists());
    drop(plane);
    assert!(!process.exists());
    assert!(!folder.exists());
}

#[test]
fn control_plane_ends_when_its_process_is_killed() {
    if !clusters_enabled() {
        return;
    }
    let mut owner = Command::new(env!("CARGO_BIN_EXE_stoker-test-cluster"))
        .args(["up", "--control-plane", "--wait"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(owner.stdout.take().unwrap()).lines().map_while(Result::ok);
    let kubeconfig =
        lines.find_map(|line| line.strip_prefix("export KUBECONFIG=").map(PathBuf::from)).unwrap();
    let folder = kubeconfig.parent().unwrap();
    let pids = std::fs::read_dir(folder.join("pids")).unwrap();
    let pids = pids.map(|entry| std::fs::read_to_string(entry.unwrap().path()).unwrap());
    let processes: Vec<_> = pids.map(|pid| Path::new("/proc").join(pid.trim())).collect();
    assert_eq!(processes.len(), 4, "{processes:?}");
    assert!(processes.iter().all(|process| process.exists()), "{processes:?}");
    owner.kill().unwrap();
    owner.wait().unwrap();
    wait_until("directory and processes are gone", || {
        // A zombie process has no command line.
        let is_running = |process: &&PathBuf| {
            std::fs::read(process.join("cmdline")).is_ok_and(|command| !command.is_empty())
        };
        let left = processes.iter().filter(is_running).count();
        if left == 0 && !folder.exists() { Ok(()) } else { Err(format!("{left} processes")) }
    })
    .unwrap();
}

#[test]
fn controllers_and_scheduler_work() {
    if !clusters_enabled() {
        return;
    }
    let options = Options { controllers: true, scheduler: true, ..Options::default() };
    let start = Instant::now();
    let plane = ControlPlane::start_with(options).unwrap();
    println!("with controllers and scheduler ready in {:?}", start.elapsed());
    plane.make_namespace("two").unwrap();
    let pod = "{apiVersion: v1, kind: Pod, metadata: {name: p, namespace: two}, \
               spec: {containers: [{name: c, image: x}]}}";
    plane.apply(pod).unwrap();
    wait_until("the scheduler finds no node", || {
        let pod = plane.get(&["pod", "p", "-n", "two"]).map_err(|error| error.to_string())?;
        let reason = &pod["status"]["conditions"][0]["reason"];
        if reason == "Unschedulable" { Ok(()) } else { Err(pod["status"].to_string()) }
    })
    .unwrap();
    let start = Instant::now();
    plane.kubectl(&["delete", "namespace", "two", "--timeout=60s"]).unwrap();
    assert!(start.elapsed() < Duration::from_secs(60));
}

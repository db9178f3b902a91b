//! The level without nodes.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use stoker_test_cluster::{ControlPlane, Options, wait_until, wanted};

fn crds() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../crds")
}

#[test]
fn it_serves_what_it_is_given_and_writes_down_who_asked() {
    if !wanted() {
        return;
    }
    let begun = Instant::now();
    let plane = ControlPlane::start().unwrap();
    println!("control plane ready in {:?}", begun.elapsed());
    plane.make_namespace("one").unwrap();
    plane.apply("{apiVersion: v1, kind: ConfigMap, metadata: {name: a}, data: {k: v}}").unwrap();
    let map = plane.get(&["configmap", "a"]).unwrap();
    assert_eq!(map["data"]["k"], "v", "{map}");

    // A service account may only what it was given.
    let account = plane.client_for("one", "default").unwrap();
    let refused = account.kubectl(&["get", "pods", "-n", "one"]).unwrap_err().to_string();
    assert!(refused.contains("cannot list resource \"pods\""), "{refused}");
    let requests = plane.requests().unwrap();
    let logged = requests
        .iter()
        .find(|it| it.user == "system:serviceaccount:one:default" && it.resource == "pods");
    let logged = logged.map(|it| (it.verb.as_str(), it.resource.as_str(), it.code));
    assert_eq!(logged, Some(("list", "pods", 403)));

    // Objects survive a restart of the API server.
    plane.stop_api();
    assert!(plane.kubectl(&["get", "--raw", "/readyz"]).is_err());
    let begun = Instant::now();
    plane.start_api().unwrap();
    println!("API server back in {:?}", begun.elapsed());
    assert_eq!(plane.get(&["configmap", "a"]).unwrap()["data"]["k"], "v");
}

#[test]
fn our_custom_resources_are_established() {
    if !wanted() {
        return;
    }
    let plane = ControlPlane::start().unwrap();
    plane.apply_crds(&crds()).unwrap();
    let listed = plane.kubectl(&["get", "experiments,trials", "-A"]).unwrap();
    assert_eq!(listed, "");
}

#[test]
fn it_ends_with_its_owner() {
    if !wanted() {
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
fn it_ends_when_its_owner_is_killed() {
    if !wanted() {
        return;
    }
    let mut owner = Command::new(env!("CARGO_BIN_EXE_stoker-test-cluster"))
        .args(["up", "--control-plane", "--wait"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let said = BufReader::new(owner.stdout.take().unwrap()).lines().map_while(Result::ok);
    let kubeconfig = said.filter_map(|it| it.strip_prefix("export KUBECONFIG=").map(PathBuf::from));
    let kubeconfig = { kubeconfig }.next().unwrap();
    let folder = kubeconfig.parent().unwrap();
    let pids = std::fs::read_dir(folder.join("pids")).unwrap();
    let pids = pids.map(|it| std::fs::read_to_string(it.unwrap().path()).unwrap());
    let processes: Vec<_> = pids.map(|it| Path::new("/proc").join(it.trim())).collect();
    assert_eq!(processes.len(), 4, "{processes:?}");
    assert!(processes.iter().all(|it| it.exists()), "{processes:?}");
    owner.kill().unwrap();
    owner.wait().unwrap();
    wait_until("folder and processes are gone", 30, || {
        // A process that has ended and was not waited for has no command line.
        let runs = |it: &&PathBuf| std::fs::read(it.join("cmdline")).is_ok_and(|it| !it.is_empty());
        let left = processes.iter().filter(runs).count();
        if left == 0 && !folder.exists() { Ok(()) } else { Err(format!("{left} processes")) }
    })
    .unwrap();
}

#[test]
fn controllers_and_scheduler_do_their_part() {
    if !wanted() {
        return;
    }
    let options = Options { controllers: true, scheduler: true, ..Options::default() };
    let begun = Instant::now();
    let plane = ControlPlane::start_with(options).unwrap();
    println!("with controllers and scheduler ready in {:?}", begun.elapsed());
    plane.make_namespace("two").unwrap();
    plane
        .apply("{apiVersion: v1, kind: Pod, metadata: {name: p, namespace: two}, spec: {containers: [{name: c, image: x}]}}")
        .unwrap();
    wait_until("the scheduler finds no node", 30, || {
        let pod = plane.get(&["pod", "p", "-n", "two"]).map_err(|it| it.to_string())?;
        let reason = &pod["status"]["conditions"][0]["reason"];
        if reason == "Unschedulable" { Ok(()) } else { Err(pod["status"].to_string()) }
    })
    .unwrap();
    let begun = Instant::now();
    plane.kubectl(&["delete", "namespace", "two", "--timeout=60s"]).unwrap();
    assert!(begun.elapsed() < Duration::from_secs(60));
}

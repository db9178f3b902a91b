//! Tests of log commands against a scripted API server.

use std::sync::{Arc, Mutex};

use axum::Json;
use axum::extract::{Path, Query, State};
use axum::routing::get;
use serde_json::{Value, json};

use super::*;

const GANG: Gang = Gang { world_size: 2, ranks_per_pod: 1 };

fn trial_object(phase: &str, num_attempts: u32) -> Value {
    let attempts: Vec<_> = (0..num_attempts).map(|number| json!({ "number": number })).collect();
    json!({
        "apiVersion": "stoker.dev/v1alpha1", "kind": "Trial", "metadata": {"name": "m-0"},
        "spec": {"experiment": "m", "index": 0, "requestId": "", "seed": 1,
            "hyperparameters": {}, "unit": "epochs", "units": 1},
        "status": {"phase": phase, "attempts": attempts},
    })
}

fn pod_object(attempt: u32, index: u32, is_over: bool) -> Value {
    let name = format!("m-0-a{attempt}-r{index}");
    let (phase, state) = match is_over {
        true => ("Failed", json!({"terminated": {"exitCode": 1}})),
        false => ("Running", json!({"running": {}})),
    };
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "uid": name, "labels": {
            "stoker.dev/trial": "m-0", "stoker.dev/experiment": "m",
            "stoker.dev/attempt": attempt.to_string(), "stoker.dev/pod-index": index.to_string(),
        }},
        "status": {"phase": phase, "containerStatuses": [{
            "name": "trainer", "image": "", "imageID": "", "ready": true, "restartCount": 0,
            "state": state,
        }]},
    })
}

/// State of the scripted API server.
#[derive(Debug, Default)]
struct Script {
    /// Responses to successive log requests, by pod name. After the last one, the pod has ended.
    logs: Vec<(String, Vec<String>)>,
    /// Pod name and `sinceTime` of each log request.
    requests: Vec<(String, Option<String>)>,
}

type Shared = Arc<Mutex<Script>>;

impl Script {
    fn pod(&self, name: &str) -> Value {
        let numbers: Vec<u32> =
            name.rsplit('-').take(2).map(|part| part[1..].parse().unwrap()).collect();
        let logs = self.logs.iter().find(|(pod, _)| pod == name);
        let num_left = logs.map_or(0, |(_, responses)| responses.len());
        pod_object(numbers[1], numbers[0], num_left == 0)
    }

    /// Returns the pods. An attempt's pods appear after all earlier attempts have ended.
    fn pods(&self) -> Vec<Value> {
        let mut pods = Vec::new();
        for attempt in 0.. {
            let prefix = format!("m-0-a{attempt}-");
            let names = self.logs.iter().map(|(name, _)| name);
            let names: Vec<&String> = names.filter(|name| name.starts_with(&prefix)).collect();
            pods.extend(names.iter().map(|name| self.pod(name)));
            if names.is_empty() || !self.is_over(&prefix) {
                return pods;
            }
        }
        pods
    }

    fn is_over(&self, prefix: &str) -> bool {
        let mut logs = self.logs.iter().filter(|(name, _)| name.starts_with(prefix));
        logs.all(|(_, responses)| responses.is_empty())
    }
}

async fn serve(logs: &[(&str, &[&str])]) -> (Cluster, Shared) {
    let owned = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
    let logs = logs.iter().map(|(name, logs)| ((*name).to_owned(), owned(logs))).collect();
    let shared: Shared = Arc::new(Mutex::new(Script { logs, requests: vec![] }));
    let log = async |State(shared): State<Shared>,
                     Path(name): Path<String>,
                     Query(query): Query<Vec<(String, String)>>| {
        let mut script = shared.lock().unwrap();
        let since = query.iter().find(|(key, _)| key == "sinceTime");
        let since = since.map(|(_, value)| value.clone());
        script.requests.push((name.clone(), since));
        let (_, logs) = script.logs.iter_mut().find(|(pod, _)| *pod == name).unwrap();
        if logs.is_empty() { String::new() } else { logs.remove(0) }
    };
    let app = axum::Router::new()
        .route(
            "/api/v1/namespaces/ns/pods",
            get(async |State(shared): State<Shared>| {
                let items = shared.lock().unwrap().pods();
                Json(json!({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items}))
            }),
        )
        .route(
            "/api/v1/namespaces/ns/pods/{name}",
            get(async |State(shared): State<Shared>, Path(name): Path<String>| {
                Json(shared.lock().unwrap().pod(&name))
            }),
        )
        .route("/api/v1/namespaces/ns/pods/{name}/log", get(log))
        .route(
            "/apis/stoker.dev/v1alpha1/namespaces/ns/trials/{name}",
            get(async |State(shared): State<Shared>| {
                let is_over = shared.lock().unwrap().is_over("m-0-");
                Json(trial_object(if is_over { "Completed" } else { "Running" }, 1))
            }),
        )
        .with_state(shared.clone());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let server = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, app).await });
    let config = kube::Config::new(server.parse().unwrap());
    let client = kube::Client::try_from(config).unwrap();
    (Cluster { client, namespace: "ns".to_owned(), server }, shared)
}

#[tokio::test]
async fn lines_of_pods_are_merged_by_time() {
    let (cluster, shared) = serve(&[
        ("m-0-a0-r0", &["2026-01-01T00:00:01.000000000Z a\n2026-01-01T00:00:03.000000000Z c\n"]),
        ("m-0-a0-r1", &["2026-01-01T00:00:02.000000000Z b\n2026-01-01T00:00:04.000000000Z d\n"]),
    ])
    .await;
    let objects = shared.lock().unwrap().pods();
    let pods: Vec<(Pod, Tag)> = objects
        .into_iter()
        .map(|object| serde_json::from_value::<Pod>(object).unwrap())
        .map(|pod| (pod.clone(), Tag::of_pod(&pod, GANG, false).unwrap()))
        .collect();
    let mut lines = Vec::new();
    let show = |tag: &Tag, line: &LogLine| lines.push(format!("{} {}", tag.pod, line.text));
    pods::print(&cluster, &pods, LogRequest::default(), show).await.unwrap();
    assert_eq!(lines, ["0 a", "1 b", "0 c", "1 d"]);
}

/// Follows a trial until it ends. Returns the lines as `ATTEMPT/POD LINE`, sorted.
async fn follow(cluster: &Cluster, attempt: Option<u32>, rank: Option<u32>) -> Vec<String> {
    let mut lines = Vec::new();
    let show = |tag: &Tag, line: &LogLine| {
        lines.push(format!("{}/{} {}", tag.attempt, tag.pod, line.text));
    };
    let target = LogTarget::Trial { name: "m-0".to_owned(), attempt };
    LogFollower::new(cluster, target, GANG, rank, LogRequest::default()).run(show).await.unwrap();
    lines.sort();
    lines
}

#[tokio::test]
async fn broken_connection_neither_loses_nor_repeats_lines() {
    let first = "2026-01-01T00:00:01.500000000Z a\n2026-01-01T00:00:02.000000000Z b\n";
    // `sinceTime` has a resolution of seconds: the server repeats a line.
    let again = "2026-01-01T00:00:02.000000000Z b\n2026-01-01T00:00:02.000000001Z c\n";
    let (cluster, shared) = serve(&[("m-0-a0-r0", &[first, again])]).await;
    assert_eq!(follow(&cluster, None, None).await, ["0/0 a", "0/0 b", "0/0 c"]);
    let requests = shared.lock().unwrap().requests.clone();
    let [(_, first), (_, second), ..] = &requests[..] else { panic!("{requests:?}") };
    assert_eq!(*first, None);
    let second = second.as_ref().unwrap();
    assert!(second.starts_with("2026-01-01T00:00:02"), "{requests:?}");
}

#[tokio::test]
async fn errors_of_the_kubelet_do_not_move_the_cursor() {
    let error = "failed to try resolving symlinks in path \"/var/log/pods/0.log\"\n";
    let first = format!("2026-01-01T00:00:01.500000000Z a\n{error}");
    let again = "2026-01-01T00:00:01.500000000Z a\n2026-01-01T00:00:02.000000000Z b\n";
    let (cluster, shared) = serve(&[("m-0-a0-r0", &[&first, error, again])]).await;
    let shown = format!("0/0 {}", error.trim_end());
    assert_eq!(follow(&cluster, None, None).await, ["0/0 a", "0/0 b", &shown]);
    let requests = shared.lock().unwrap().requests.clone();
    let times: Vec<_> = requests.iter().map(|(_, since)| since.as_deref()).collect();
    let [None, Some(second), Some(third), ..] = times[..] else { panic!("{requests:?}") };
    assert_eq!(second, third);
    assert!(second.starts_with("2026-01-01T00:00:01"), "{requests:?}");
}

#[tokio::test]
async fn lines_with_equal_timestamps_are_kept() {
    let first = "2026-01-01T00:00:01.500000000Z a\n2026-01-01T00:00:01.500000000Z b\n";
    let again = format!("{first}2026-01-01T00:00:01.500000000Z c\n");
    let (cluster, _) = serve(&[("m-0-a0-r0", &[first, &again])]).await;
    assert_eq!(follow(&cluster, None, None).await, ["0/0 a", "0/0 b", "0/0 c"]);
}

#[tokio::test]
async fn follow_includes_later_attempts_until_trial_ends() {
    let (cluster, _) = serve(&[
        ("m-0-a0-r0", &["2026-01-01T00:00:01.0Z a\n"]),
        ("m-0-a0-r1", &["2026-01-01T00:00:01.0Z b\n"]),
        ("m-0-a1-r0", &["2026-01-01T00:00:02.0Z c\n"]),
        ("m-0-a1-r1", &["2026-01-01T00:00:02.0Z d\n"]),
    ])
    .await;
    assert_eq!(follow(&cluster, None, None).await, ["0/0 a", "0/1 b", "1/0 c", "1/1 d"]);
}

#[tokio::test]
async fn follow_reads_only_pods_of_the_rank() {
    let (cluster, shared) =
        serve(&[("m-0-a0-r0", &[]), ("m-0-a0-r1", &["2026-01-01T00:00:01.0Z b\n"])]).await;
    assert_eq!(follow(&cluster, None, Some(1)).await, ["0/1 b"]);
    assert!(shared.lock().unwrap().requests.iter().all(|(pod, _)| pod == "m-0-a0-r1"));
}

#[test]
fn attempt_is_the_chosen_or_the_latest() {
    let check = |num: u32, number: Option<u32>, expected: Result<Option<u32>, &str>| {
        let trial: Trial = serde_json::from_value(trial_object("Running", num)).unwrap();
        let selection = LogSelection { attempt: number, ..LogSelection::default() };
        match (attempt(&trial, "m-0", selection), expected) {
            (Ok(attempt), Ok(expected)) => {
                assert_eq!(attempt.map(|attempt| attempt.number), expected);
            }
            (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
            (actual, expected) => panic!("{actual:?} is not {expected:?}"),
        }
    };
    check(0, None, Ok(None));
    check(3, None, Ok(Some(2)));
    check(3, Some(1), Ok(Some(1)));
    check(3, Some(3), Err("the latest is 2"));
    check(0, Some(0), Err("has not started yet"));
}

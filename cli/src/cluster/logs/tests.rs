//! Logs of pods whose API server follows a script.

use std::sync::{Arc, Mutex};

use axum::Json;
use axum::extract::{Path, Query, State};
use axum::routing::get;
use serde_json::{Value, json};

use super::*;

const GANG: Gang = Gang { world_size: 2, ranks_per_pod: 1 };

fn trial_object(phase: &str, num_attempts: u32) -> Value {
    let attempts: Vec<_> = (0..num_attempts).map(|it| json!({ "number": it })).collect();
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

/// What the server has, changed by what it is asked.
#[derive(Debug, Default)]
struct Script {
    /// Logs of pods, by name: what each request in turn gets. After the last, the pod is over.
    logs: Vec<(String, Vec<String>)>,
    /// Of each request for a log: whose it was, and since when.
    asked: Vec<(String, Option<String>)>,
}

type Shared = Arc<Mutex<Script>>;

impl Script {
    fn pod(&self, name: &str) -> Value {
        let numbers: Vec<u32> =
            name.rsplit('-').take(2).map(|it| it[1..].parse().unwrap()).collect();
        let left = self.logs.iter().find(|it| it.0 == name).map_or(0, |it| it.1.len());
        pod_object(numbers[1], numbers[0], left == 0)
    }

    /// Pods of a later attempt come once those before it are over.
    fn pods(&self) -> Vec<Value> {
        let mut pods = Vec::new();
        for attempt in 0.. {
            let prefix = format!("m-0-a{attempt}-");
            let of: Vec<&String> =
                self.logs.iter().map(|it| &it.0).filter(|it| it.starts_with(&prefix)).collect();
            pods.extend(of.iter().map(|name| self.pod(name)));
            if of.is_empty() || !self.is_over(&prefix) {
                return pods;
            }
        }
        pods
    }

    fn is_over(&self, prefix: &str) -> bool {
        self.logs.iter().filter(|it| it.0.starts_with(prefix)).all(|it| it.1.is_empty())
    }
}

async fn serve(logs: &[(&str, &[&str])]) -> (Cluster, Shared) {
    let own = |it: &[&str]| it.iter().map(|it| (*it).to_owned()).collect();
    let logs = logs.iter().map(|(name, logs)| ((*name).to_owned(), own(logs))).collect();
    let shared: Shared = Arc::new(Mutex::new(Script { logs, asked: vec![] }));
    let log = async |State(shared): State<Shared>,
                     Path(name): Path<String>,
                     Query(query): Query<Vec<(String, String)>>| {
        let mut script = shared.lock().unwrap();
        let since = query.iter().find(|it| it.0 == "sinceTime").map(|it| it.1.clone());
        script.asked.push((name.clone(), since));
        let logs = script.logs.iter_mut().find(|it| it.0 == name).unwrap();
        if logs.1.is_empty() { String::new() } else { logs.1.remove(0) }
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
async fn pods_that_ran_at_once_are_shown_in_the_order_of_time() {
    let (cluster, shared) = serve(&[
        ("m-0-a0-r0", &["2026-01-01T00:00:01.000000000Z a\n2026-01-01T00:00:03.000000000Z c\n"]),
        ("m-0-a0-r1", &["2026-01-01T00:00:02.000000000Z b\n2026-01-01T00:00:04.000000000Z d\n"]),
    ])
    .await;
    let objects = shared.lock().unwrap().pods();
    let pods: Vec<(Pod, Tag)> = objects
        .into_iter()
        .map(|it| serde_json::from_value::<Pod>(it).unwrap())
        .map(|pod| (pod.clone(), Tag::of_pod(&pod, GANG, false).unwrap()))
        .collect();
    let mut found = Vec::new();
    let show = |tag: &Tag, line: &str| found.push(format!("{} {line}", tag.pod));
    pods::print(&cluster, &pods, show).await.unwrap();
    assert_eq!(found, ["0 a", "1 b", "0 c", "1 d"]);
}

/// Follows a trial to its end; returns the lines, by attempt and pod.
async fn follow(cluster: &Cluster, attempt: Option<u32>, rank: Option<u32>) -> Vec<String> {
    let mut found = Vec::new();
    let show = |tag: &Tag, line: &str| found.push(format!("{}/{} {line}", tag.attempt, tag.pod));
    let of = Of::Trial { name: "m-0".to_owned(), attempt };
    Follow::new(cluster, of, GANG, rank).run(show).await.unwrap();
    found.sort();
    found
}

#[tokio::test]
async fn a_connection_that_is_cut_loses_no_line_and_shows_none_twice() {
    let first = "2026-01-01T00:00:01.500000000Z a\n2026-01-01T00:00:02.000000000Z b\n";
    // The server knows whole seconds: it begins with what was read already.
    let again = "2026-01-01T00:00:02.000000000Z b\n2026-01-01T00:00:02.000000001Z c\n";
    let (cluster, shared) = serve(&[("m-0-a0-r0", &[first, again])]).await;
    assert_eq!(follow(&cluster, None, None).await, ["0/0 a", "0/0 b", "0/0 c"]);
    let asked = shared.lock().unwrap().asked.clone();
    assert_eq!(asked[0].1, None);
    assert!(
        asked[1].1.as_ref().is_some_and(|it| it.starts_with("2026-01-01T00:00:02")),
        "{asked:?}"
    );
}

#[tokio::test]
async fn following_goes_on_to_the_next_attempt_and_ends_with_the_trial() {
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
async fn one_rank_is_followed_without_the_others() {
    let (cluster, shared) =
        serve(&[("m-0-a0-r0", &[]), ("m-0-a0-r1", &["2026-01-01T00:00:01.0Z b\n"])]).await;
    assert_eq!(follow(&cluster, None, Some(1)).await, ["0/1 b"]);
    assert!(shared.lock().unwrap().asked.iter().all(|it| it.0 == "m-0-a0-r1"));
}

#[test]
fn the_attempt_is_the_one_asked_for_or_the_latest() {
    let check = |num: u32, wanted: Option<u32>, expected: Result<Option<u32>, &str>| {
        let trial: Trial = serde_json::from_value(trial_object("Running", num)).unwrap();
        let wanted = Wanted { attempt: wanted, ..Wanted::default() };
        match (attempt(&trial, "m-0", wanted), expected) {
            (Ok(found), Ok(expected)) => assert_eq!(found.map(|it| it.number), expected),
            (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
            (found, expected) => panic!("{found:?} is not {expected:?}"),
        }
    };
    check(0, None, Ok(None));
    check(3, None, Ok(Some(2)));
    check(3, Some(1), Ok(Some(1)));
    check(3, Some(3), Err("it has 3 from 0"));
    check(0, Some(0), Err("has not started yet"));
}

//! Scripted API server for tests of log commands.

use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Json;
use axum::body::Body;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use futures::{StreamExt as _, stream};
use serde_json::{Value, json};

use crate::cluster::connect::Cluster;

pub(super) fn trial_object(phase: &str, num_attempts: u32) -> Value {
    let attempts: Vec<_> = (0..num_attempts).map(|number| json!({ "number": number })).collect();
    json!({
        "apiVersion": "stoker.dev/v1alpha1", "kind": "Trial", "metadata": {"name": "m-0"},
        "spec": {"experiment": "m", "index": 0, "requestId": "", "seed": 1,
            "hyperparameters": {}, "unit": "epochs", "units": 1},
        "status": {"phase": phase, "attempts": attempts},
    })
}

pub(super) fn experiment_object() -> Value {
    json!({
        "apiVersion": "stoker.dev/v1alpha1", "kind": "Experiment",
        "metadata": {"name": "m", "namespace": "ns", "uid": "0b3f9c1e-77aa"},
        "spec": {
            "entrypoint": {"command": ["x"]},
            "searcher": {"metric": "loss", "maxLength": {"epochs": 2}, "single": {}},
            "checkpointStorage": {"url": "s3://b"},
        },
    })
}

/// Returns a job that has started as many processes.
fn job_object(num_attempts: usize) -> Value {
    json!({
        "apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceJob",
        "metadata": {"name": "j", "namespace": "ns", "uid": "0b3f9c1e-77aa"},
        "spec": {
            "entrypoint": {"command": ["x"]}, "input": {"url": "s3://b/*.csv"},
            "resources": {"slots": 2},
        },
        "status": {"phase": "Running", "stage": "work", "attempts": num_attempts},
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
pub(super) struct Script {
    /// Responses to successive log requests, by pod name, in the syntax of [`respond`]. After the
    /// last one, the pod has ended.
    logs: Vec<(String, Vec<String>)>,
    /// Status code of log requests for ended pods; `None` for an empty log.
    pub(super) lost: Option<u16>,
    /// Number of further lists in which all pods are pending.
    pub(super) num_pending_lists: u32,
    /// Number of reads of pending pods.
    pub(super) num_pending_reads: u32,
    /// Pod name and `sinceTime` of each log request.
    pub(super) requests: Vec<(String, Option<String>)>,
}

pub(super) type Shared = Arc<Mutex<Script>>;

impl Script {
    fn pod(&self, name: &str) -> Value {
        let numbers: Vec<u32> =
            name.rsplit('-').take(2).map(|part| part[1..].parse().unwrap()).collect();
        let logs = self.logs.iter().find(|(pod, _)| pod == name);
        let num_left = logs.map_or(0, |(_, responses)| responses.len());
        let mut pod = pod_object(numbers[1], numbers[0], num_left == 0);
        if self.num_pending_lists > 0 {
            pod["status"] = json!({"phase": "Pending"});
        }
        pod
    }

    /// Returns the pods. An attempt's pods appear after all earlier attempts have ended.
    pub(super) fn pods(&self) -> Vec<Value> {
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

/// Returns a response with lines. After `!silent` at the end of `log`, the connection stays open.
/// After `!broken`, it breaks. A log `!CODE` is a status code.
fn respond(log: &str) -> Response {
    let Some((lines, end)) = log.split_once('!') else { return log.to_owned().into_response() };
    let lines = stream::iter([Ok::<String, io::Error>(lines.to_owned())]);
    match end {
        "silent" => Body::from_stream(lines.chain(stream::pending())).into_response(),
        "broken" => {
            let error = async {
                // Lines that the server has not sent yet would be lost.
                tokio::time::sleep(Duration::from_millis(50)).await;
                Err::<String, io::Error>(io::Error::other("broken"))
            };
            Body::from_stream(lines.chain(stream::once(error))).into_response()
        }
        code => StatusCode::from_u16(code.parse().unwrap()).unwrap().into_response(),
    }
}

/// Serves the logs of pods, a trial, an experiment, and a job to which all pods belong.
pub(super) async fn serve(logs: &[(&str, &[&str])]) -> (Cluster, Shared) {
    let owned = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
    let logs = logs.iter().map(|(name, logs)| ((*name).to_owned(), owned(logs))).collect();
    let shared: Shared = Arc::new(Mutex::new(Script { logs, ..Script::default() }));
    let log = async |State(shared): State<Shared>,
                     Path(name): Path<String>,
                     Query(query): Query<Vec<(String, String)>>| {
        let mut script = shared.lock().unwrap();
        let since = query.iter().find(|(key, _)| key == "sinceTime");
        let since = since.map(|(_, value)| value.clone());
        script.requests.push((name.clone(), since));
        let lost = script.lost.map_or_else(String::new, |code| format!("!{code}"));
        let (_, logs) = script.logs.iter_mut().find(|(pod, _)| *pod == name).unwrap();
        respond(&if logs.is_empty() { lost } else { logs.remove(0) })
    };
    let app = axum::Router::new()
        .route(
            "/api/v1/namespaces/ns/pods",
            get(async |State(shared): State<Shared>| {
                let mut script = shared.lock().unwrap();
                let items = script.pods();
                script.num_pending_lists = script.num_pending_lists.saturating_sub(1);
                Json(json!({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items}))
            }),
        )
        .route(
            "/api/v1/namespaces/ns/pods/{name}",
            get(async |State(shared): State<Shared>, Path(name): Path<String>| {
                let mut script = shared.lock().unwrap();
                script.num_pending_reads += u32::from(script.num_pending_lists > 0);
                Json(script.pod(&name))
            }),
        )
        .route("/api/v1/namespaces/ns/pods/{name}/log", get(log))
        .route(
            "/apis/stoker.dev/v1alpha1/namespaces/ns/experiments/m",
            get(async || Json(experiment_object())),
        )
        .route(
            "/apis/stoker.dev/v1alpha1/namespaces/ns/trials",
            get(async || {
                let trial = trial_object("Running", 1);
                Json(json!({"kind": "TrialList", "apiVersion": "v1", "items": [trial, trial]}))
            }),
        )
        .route(
            "/apis/stoker.dev/v1alpha1/namespaces/ns/trials/{name}",
            get(async |State(shared): State<Shared>| {
                let is_over = shared.lock().unwrap().is_over("m-0-");
                Json(trial_object(if is_over { "Completed" } else { "Running" }, 1))
            }),
        )
        .route(
            "/apis/stoker.dev/v1alpha1/namespaces/ns/inferencejobs/j",
            get(async |State(shared): State<Shared>| {
                let num_pods = shared.lock().unwrap().pods().len();
                Json(job_object(num_pods))
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

//! Tests of stops without a plan, against an API server in memory.

use std::sync::Mutex;
use std::task::{Context as TaskContext, Poll};

use axum::http::{Request as HttpRequest, Response};
use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};
use tower_service::Service;

use super::*;
use crate::fixture;
use crate::objects::CachedPod;

/// An API server that refuses each request, and records its method and path.
#[derive(Clone, Default)]
struct Server(Arc<Mutex<Vec<String>>>);

impl Service<HttpRequest<Body>> for Server {
    type Response = Response<Body>;
    type Error = std::convert::Infallible;
    type Future = std::future::Ready<Result<Response<Body>, Self::Error>>;

    fn poll_ready(&mut self, _: &mut TaskContext<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: HttpRequest<Body>) -> Self::Future {
        let path = request.uri().path().rsplit('/').next().unwrap_or_default();
        self.0.lock().unwrap().push(format!("{} {path}", request.method()));
        std::future::ready(Ok(Response::builder().status(500).body(Body::empty()).unwrap()))
    }
}

fn metadata(name: &str, uid: &str, owner: &str) -> Value {
    json!({
        "name": name, "namespace": "ns", "uid": uid, "resourceVersion": "7",
        "labels": { "stoker.dev/trial": "e-0" },
        "ownerReferences": [{
            "apiVersion": "v1", "kind": "Owner", "name": "owner", "uid": owner, "controller": true,
        }],
    })
}

/// Returns the sorted requests for an experiment in this state, whose trial has a running pod.
async fn requests(state: DesiredState) -> Vec<String> {
    let server = Server::default();
    let context = fixture::context(Client::new(server.clone(), "default"));
    let trial = json!({
        "metadata": metadata("e-0", "trial-uid", "experiment-uid"),
        "spec": {
            "experiment": "e", "index": 0, "requestId": "r", "seed": 1, "hyperparameters": {},
            "unit": "batches", "units": 8,
        },
        "status": { "attempts": [{ "number": 0, "hasPods": true }] },
    });
    context.trials.put(CachedTrial::new(serde_json::from_value(trial).unwrap()));
    let pod = json!({
        "metadata": metadata("e-0-a0-r0", "pod-uid", "trial-uid"),
        "spec": { "containers": [] },
        "status": { "phase": "Running" },
    });
    context.pods.put(CachedPod::new(serde_json::from_value::<Pod>(pod).unwrap()));
    let mut experiment = json!({
        "metadata": { "name": "e", "namespace": "ns", "uid": "experiment-uid" },
        "spec": {
            "entrypoint": { "command": ["program"] }, "hyperparameters": {},
            "searcher": {
                "single": {}, "metric": "loss", "smallerIsBetter": true,
                "maxLength": { "batches": 8 },
            },
        },
    });
    experiment["spec"]["state"] = json!(state);
    let experiment = serde_json::from_value(experiment).unwrap();
    let trials = apply::trials_of(&context, &Key::new("ns", "e"), "experiment-uid");
    stop_trials(&context, &experiment, trials).await;
    let mut requests = server.0.lock().unwrap().clone();
    requests.sort();
    requests
}

#[tokio::test]
async fn trials_of_an_invalid_experiment_can_be_stopped() {
    assert_eq!(requests(DesiredState::Active).await, [""; 0]);
    for state in [DesiredState::Paused, DesiredState::Cancelled, DesiredState::Killed] {
        assert_eq!(requests(state).await, ["DELETE e-0-a0-r0", "PATCH e-0"], "{state:?}");
    }
}

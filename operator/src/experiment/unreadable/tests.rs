//! Tests of stops without a plan, against an API server in memory.

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};
use stoker_api::trial::DesiredTrialState;

use super::*;
use crate::fixture::{self, RefusingServer};
use crate::objects::CachedPod;

fn metadata(name: &str, uid: &str, owner: &str) -> Value {
    json!({
        "name": name, "namespace": "ns", "uid": uid, "resourceVersion": "7",
        "labels": { "stoker.dev/trial": "e-0" },
        "ownerReferences": [{
            "apiVersion": "v1", "kind": "Owner", "name": "owner", "uid": owner, "controller": true,
        }],
    })
}

/// Returns the sorted requests for an experiment in this state, whose trial in this state has a
/// running pod.
async fn requests(state: DesiredState, of_trial: DesiredTrialState) -> Vec<String> {
    let server = RefusingServer::default();
    let context = fixture::context(server.client());
    let trial = json!({
        "metadata": metadata("e-0", "trial-uid", "experiment-uid"),
        "spec": {
            "experiment": "e", "index": 0, "requestId": "r", "seed": 1, "hyperparameters": {},
            "unit": "batches", "units": 8, "wanted": of_trial,
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
    let mut requests = server.requests();
    requests.sort();
    requests
}

#[tokio::test]
async fn trials_of_an_invalid_experiment_can_be_stopped() {
    let run = DesiredTrialState::Run;
    assert_eq!(requests(DesiredState::Active, run).await, [""; 0]);
    for state in [DesiredState::Paused, DesiredState::Cancelled, DesiredState::Killed] {
        assert_eq!(requests(state, run).await, ["DELETE e-0-a0-r0", "PATCH e-0"], "{state:?}");
    }
}

#[tokio::test]
async fn one_trial_of_an_invalid_experiment_can_be_stopped() {
    for of_trial in [DesiredTrialState::Pause, DesiredTrialState::Stop, DesiredTrialState::Kill] {
        let requests = requests(DesiredState::Active, of_trial).await;
        assert_eq!(requests, ["DELETE e-0-a0-r0"], "{of_trial:?}");
    }
}

//! Runs and jobs for tests.

use std::sync::Arc;

use serde_json::{Value, json};
use stoker_api::experiment::Experiment;
use stoker_api::time::Timestamp;
use stoker_api::trial::TrialSpec;
use stoker_engine::trial::TrialRecord;
use stoker_storage::Storage;

use crate::job::Job;
use crate::store::Run;

/// UID of all runs and jobs.
pub(crate) const UID: &str = "0123456789abcdef";

/// Returns the experiment `ml/iris` with these fields of the spec, and trials with these statuses.
pub(crate) fn run(spec: Value, status: Value, trials: &[Value]) -> Run {
    let mut experiment = json!({
        "apiVersion": "stoker.dev/v1alpha1", "kind": "Experiment",
        "metadata": {"name": "iris", "namespace": "ml", "uid": UID},
        "spec": {
            "entrypoint": {"command": ["true"]},
            "searcher": {"metric": "loss", "maxLength": {"batches": 4},
                "random": {"maxTrials": 8}},
        },
        "status": status,
    });
    for (name, value) in spec.as_object().into_iter().flatten() {
        experiment["spec"][name] = value.clone();
    }
    let experiment: Experiment = serde_json::from_value(experiment).unwrap();
    let record = |(index, status): (u32, &Value)| {
        let spec: TrialSpec = serde_json::from_value(json!({
            "experiment": "iris", "index": index, "requestId": "", "seed": 1,
            "hyperparameters": {}, "unit": "batches", "units": 4,
        }))
        .unwrap();
        let status = serde_json::from_value(status.clone()).unwrap();
        (index, Arc::new(TrialRecord { spec, status }))
    };
    let trials = (0..).zip(trials).map(record).collect();
    Run::new(experiment, trials, true, Err("no storage".to_owned()))
}

/// Returns the job `ml/species`, created in 1970, with an empty output directory.
pub(crate) fn job(status: Value, is_running: bool) -> Job {
    let job = serde_json::from_value(json!({
        "apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceJob",
        "metadata": {"name": "species", "namespace": "ml", "uid": UID},
        "spec": {"entrypoint": {"command": ["true"]}, "input": {"url": "rows.csv"}},
        "status": status,
    }));
    let output = Storage::open("memory://", None).unwrap();
    let output = Ok(Arc::new(output));
    Job::new(job.unwrap(), is_running, Some(Timestamp(0)), "memory://".to_owned(), output)
}

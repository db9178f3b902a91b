//! Results of a round, and how its attempts ended.

use std::collections::BTreeMap;
use std::fmt;

use serde_json::{Value, json};
use stoker_api::time::Timestamp;
use stoker_test_cluster::Cluster;

use super::faults::{Fault, FaultKind};
use super::{NUM_TRIALS, counts, names};
use crate::two_nodes::{NAMESPACE, get, weights};
use stoker_tests::facts_without_times;

/// An attempt may end this many seconds after the fault that ended it was undone. A rank gives up
/// on its peer or on the store after 30 s or more, and records are late while the operator is
/// unavailable.
const EFFECT_SECONDS_MAX: u64 = 180;

/// Results of a round's trials by experiment and index, and their statuses.
#[derive(Debug)]
pub(super) struct Round {
    results: BTreeMap<String, Value>,
    statuses: Vec<(String, Value)>,
}

/// Reads the results of a round: everything that faults must not change.
pub(super) fn of(cluster: &Cluster, round: &str) -> Round {
    let folder = tempfile::tempdir().unwrap();
    let mut results = BTreeMap::new();
    let mut statuses = vec![];
    for experiment in names(round) {
        let strip = |name: &str| name.trim_start_matches(round).to_owned();
        let status = get(cluster, "experiment", &experiment)["status"].clone();
        let kept =
            ["phase", "trialsCreated", "trialsClosed"].map(|field| (field, status[field].clone()));
        let mut kept: BTreeMap<_, _> = kept.into();
        // Leave out the checkpoint: its name contains the attempt number.
        kept.insert("best", json!([status["best"]["index"], status["best"]["metric"]]));
        results.insert(strip(&experiment), json!(kept));
        let label = format!("stoker.dev/experiment={experiment}");
        let trials = cluster.get(&["-n", NAMESPACE, "trials", "-l", &label]).unwrap();
        for trial in trials["items"].as_array().unwrap() {
            let name = trial["metadata"]["name"].as_str().unwrap();
            let (spec, status) = (&trial["spec"], &trial["status"]);
            let mut weights = weights(cluster, name, folder.path());
            // Leave out the state: it contains reports that could not be sent in time.
            weights.as_object_mut().unwrap().retain(|file, _| !file.contains("state"));
            let result = json!({
                "sampled":
                    [spec["index"], spec["requestId"], spec["seed"], spec["hyperparameters"]],
                "phase": status["phase"],
                "facts": facts_without_times(&status["facts"]),
                "metrics": status["metrics"],
                "bestMetric": status["bestMetric"],
                "batches": status["batches"],
                "weights": weights,
            });
            results.insert(strip(name), result);
            statuses.push((name.to_owned(), status.clone()));
        }
    }
    Round { results, statuses }
}

/// Returns the differences from the expected results, one line each.
pub(super) fn differences(round: &str, expected: &Round, actual: &Round) -> Vec<String> {
    let mut differences = vec![];
    if actual.statuses.len() != NUM_TRIALS {
        differences.push(format!("{round}: {} of {NUM_TRIALS} trials", actual.statuses.len()));
    }
    for (name, expected) in &expected.results {
        let actual = actual.results.get(name).unwrap_or(&Value::Null);
        for (field, expected) in expected.as_object().unwrap() {
            if actual[field] != *expected {
                differences
                    .push(format!("{round}{name}: {field}: {} is not {expected}", actual[field]));
            }
        }
    }
    differences
}

/// An attempt that has ended.
#[derive(Debug)]
struct Attempt {
    trial: String,
    status: Value,
}

impl Attempt {
    fn text(&self, field: &str) -> &str {
        self.status[field].as_str().unwrap_or_default()
    }

    /// Returns the kinds of faults that can end an attempt in this way; `None` if no fault can.
    fn causes(&self) -> Option<&'static [FaultKind]> {
        use FaultKind::{
            ApiUnavailable, NodeCutOff, NodeStopped, PodDeleted, ReportsRefused, StoreUnavailable,
        };
        match (self.text("end"), self.text("reason")) {
            ("Preempted", _) | (_, "PodDeleted") => {
                Some(&[PodDeleted, NodeStopped, NodeCutOff, ApiUnavailable])
            }
            (_, "NodeLost" | "DeletionByTaintManager") => {
                Some(&[NodeStopped, NodeCutOff, ApiUnavailable])
            }
            ("Infrastructure", "PeerFailed" | "PodFailed" | "InfrastructureError") => Some(&[
                PodDeleted,
                NodeStopped,
                NodeCutOff,
                ApiUnavailable,
                StoreUnavailable,
                ReportsRefused,
            ]),
            // The kubelet of a node that returns quickly finds containers without processes.
            ("Infrastructure", "ContainerLost") => Some(&[NodeStopped]),
            // The programs of a gang may also fail before its last pod starts.
            ("NotStarted", _) => {
                Some(&[NodeStopped, NodeCutOff, ApiUnavailable, StoreUnavailable, ReportsRefused])
            }
            _ => None,
        }
    }

    fn is_explained(&self, faults: &[Fault]) -> bool {
        let Ok(ended_at) = self.text("endedAt").parse::<Timestamp>() else { return false };
        let causes = self.causes().unwrap_or_default();
        let explains = |fault: &&Fault| {
            let is_in_time =
                fault.from <= ended_at.plus(1) && ended_at <= fault.to.plus(EFFECT_SECONDS_MAX);
            causes.contains(&fault.kind) && is_in_time
        };
        faults.iter().any(|fault| explains(&fault))
    }
}

/// All attempts of all rounds.
#[derive(Debug)]
pub(super) struct Attempts(Vec<Attempt>);

impl Attempts {
    pub(super) fn of(rounds: &[Round]) -> Self {
        let statuses = rounds.iter().flat_map(|round| &round.statuses);
        let of_trial = |(trial, status): &(String, Value)| {
            let attempts = status["attempts"].as_array().cloned().unwrap_or_default();
            let attempt = |status| Attempt { trial: trial.clone(), status };
            attempts.into_iter().map(attempt).collect::<Vec<_>>()
        };
        Self(statuses.flat_map(of_trial).collect())
    }

    /// Returns the attempts that no fault explains, one line each.
    pub(super) fn unexplained(&self, faults: &[Fault]) -> Vec<String> {
        let unexplained = self
            .0
            .iter()
            .filter(|attempt| attempt.text("end") != "Completed" && !attempt.is_explained(faults));
        unexplained
            .map(|attempt| format!("{}: no fault explains {}", attempt.trial, attempt.status))
            .collect()
    }
}

impl fmt::Display for Attempts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ends: Vec<_> = self
            .0
            .iter()
            .map(|attempt| format!("{} {}", attempt.text("end"), attempt.text("reason")))
            .collect();
        write!(f, "{} attempts: {}", self.0.len(), counts(ends.iter().map(String::as_str)))
    }
}

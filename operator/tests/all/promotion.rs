//! Searches that stop trials early: paused trials free their pods and resume from their rung.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use kube::ResourceExt as _;
use serde_json::{Value, json};
use stoker_api::condition::find;
use stoker_api::experiment::{Experiment, Phase};
use stoker_api::trial::{AttemptEnd, Trial};
use stoker_api::validate::validate;
use stoker_engine::experiment::{Ledger, Record};
use stoker_engine::search::SearchConfig;
use stoker_engine::trial::TrialRecord;
use tokio::sync::watch;

use crate::events::events_of;
use crate::kubelet::{Kubelet, Script};
use crate::setup::{TestNamespace, operator_port, runtime};

const RUNGS: [u64; 3] = [2, 6, 18];

fn asha(max_trials: u32, concurrent: u32) -> Value {
    json!({
        "entrypoint": { "command": ["stoker-trainer", "mnist"] },
        "hyperparameters": { "x": { "double": { "min": 0.0, "max": 1.0 } } },
        "searcher": {
            "metric": "loss", "maxLength": { "batches": RUNGS[2] }, "releaseSeconds": 30,
            "asyncHalving": {
                "maxTrials": max_trials, "numRungs": 3, "divisor": 3,
                "maxConcurrentTrials": concurrent,
            },
        },
        "reproducibility": { "experimentSeed": 5 },
    })
}

/// Rebuilds the search from the objects, and returns it. Nothing may be missing in them.
pub(crate) async fn rebuilt(ns: &TestNamespace, name: &str) -> Ledger {
    let experiment = ns.experiment(name).await;
    let valid = validate(name, &experiment.spec).unwrap();
    let status = experiment.status.unwrap();
    let trials: Vec<TrialRecord> = ns
        .trials_of(name)
        .await
        .into_iter()
        .map(|trial| TrialRecord { spec: trial.spec, status: trial.status.unwrap() })
        .collect();
    let by_index = trials.iter().map(|trial| (trial.spec.index, trial)).collect();
    let record =
        Record { log: &status.log, trials: &by_index, trials_created: status.trials_created };
    let (ledger, missing) = Ledger::rebuild(&SearchConfig::new(&valid, 5), record).unwrap();
    assert_eq!(missing, [], "effects are missing in the record");
    ledger
}

/// Checks that each attempt after the first resumed from the checkpoint of a rung.
fn check_resumes(trial: &Trial) {
    let status = trial.status.as_ref().unwrap();
    for pair in status.attempts.windows(2) {
        assert_eq!(pair[0].end, Some(AttemptEnd::Preempted), "{status:#?}");
        let from = pair[1].resumed_from.as_ref().unwrap();
        let batches: u64 = from.split('-').next().unwrap().parse().unwrap();
        assert!(RUNGS.contains(&batches), "{from} is not a rung");
    }
}

/// Waits until a trial meets a condition.
async fn wait_for_trial(ns: &TestNamespace, condition: impl Fn(&Trial) -> bool) {
    let end = Instant::now() + stoker_test_cluster::PATIENCE;
    while !ns.trials_of("asha").await.iter().any(&condition) {
        assert!(Instant::now() < end, "{}", ns.logs());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Waits for events of promotions, pauses and stops, and checks that each decision has one, with
/// the rank of the trial. An operator that was killed may have lost some.
async fn check_decision_events(ns: &TestNamespace, trials: &[Trial]) {
    let end = Instant::now() + stoker_test_cluster::PATIENCE;
    loop {
        let reasons = decision_events(ns, trials).await;
        if reasons.len() == 3 {
            return;
        }
        assert!(Instant::now() < end, "{reasons:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Returns the reasons of the events about decisions.
async fn decision_events(ns: &TestNamespace, trials: &[Trial]) -> BTreeSet<String> {
    let mut reasons = BTreeSet::new();
    for trial in trials {
        let name = format!("asha-{}", trial.spec.index);
        let mut actions = BTreeSet::new();
        for event in events_of(ns, "Trial", &name).await {
            let reason = event.reason.unwrap_or_default();
            if ["Promoted", "PausedBySearch", "StoppedBySearch"].contains(&reason.as_str()) {
                let note = event.note.unwrap_or_default();
                assert!(note.contains(" ranks "), "{name}: {note}");
                let action = event.action.unwrap_or_default();
                assert!(actions.insert(action.clone()), "{name} has two events of {action}");
                reasons.insert(reason);
            }
        }
    }
    reasons
}

#[test]
fn promotion_survives_the_death_of_the_operator() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("promotion").await;
        let ports = operator_port();
        let mut operator = ns.operator("a", ports);
        operator.wait_ready(&ns);
        // Resumed trials wait for the second operator, so that the first one cannot end the search.
        let (open, gate) = watch::channel(false);
        let kubelet = Kubelet::start(&ns.client, &ns.namespace, move |pod| {
            match pod.name_any().ends_with("-a0-r0") {
                true => Script::Train { unit_ms: 20 },
                false => Script::TrainAfter { gate: gate.clone(), unit_ms: 20 },
            }
        });
        ns.apply("asha", asha(9, 3));
        // One trial has been promoted when the operator dies.
        let has_resumed =
            |trial: &Trial| trial.status.as_ref().is_some_and(|status| status.attempts.len() > 1);
        wait_for_trial(&ns, has_resumed).await;
        operator.kill();
        let mut operator = ns.operator("b", ports);
        operator.wait_ready(&ns);
        open.send(true).unwrap();
        let ended = ns.wait_for("asha", &[Phase::Completed, Phase::Failed]).await;
        let status = ended.status.unwrap();
        assert_eq!((status.phase, status.trials_created), (Phase::Completed, 9), "{}", ns.logs());
        let trials = ns.trials_of("asha").await;
        trials.iter().for_each(check_resumes);
        let ledger = rebuilt(&ns, "asha").await;
        assert!(ledger.book().is_finished());
        // Every trial reached the first rung, and at least one the last.
        let trained = |index: u32| ledger.book().trial(index).trained();
        let mut by_length = BTreeMap::<u64, u32>::new();
        (0..9).for_each(|index| *by_length.entry(trained(index)).or_default() += 1);
        assert!(by_length.keys().all(|length| RUNGS.contains(length)), "{by_length:?}");
        assert!(by_length.contains_key(&RUNGS[2]) && by_length[&RUNGS[0]] >= 5, "{by_length:?}");
        // No unit was trained twice.
        let units: u64 = (0..9).map(trained).sum();
        assert_eq!(kubelet.units(), units);
        check_decision_events(&ns, &trials).await;
        // A pod of every attempt, and no other.
        let expected: BTreeSet<String> = trials
            .iter()
            .flat_map(|trial| {
                let attempts = trial.status.as_ref().unwrap().attempts.len();
                let index = trial.spec.index;
                (0..attempts).map(move |attempt| format!("asha-{index}-a{attempt}-r0"))
            })
            .collect();
        assert_eq!(kubelet.started().into_iter().collect::<BTreeSet<_>>(), expected);
    });
}

#[test]
fn deleted_trial_leaves_every_comparison() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("asha-deleted").await;
        let mut operator = ns.operator("a", operator_port());
        operator.wait_ready(&ns);
        let _kubelet = Kubelet::start(&ns.client, &ns.namespace, |_| Script::Train { unit_ms: 20 });
        ns.apply("asha", asha(7, 2));
        let has_result =
            |trial: &Trial| trial.status.as_ref().is_some_and(|status| !status.facts.is_empty());
        wait_for_trial(&ns, |trial| trial.spec.index == 0 && has_result(trial)).await;
        ns.plane
            .kubectl(&["delete", "trial", "asha-0", "-n", &ns.namespace, "--wait=false"])
            .unwrap();
        let ended = ns.wait_for("asha", &[Phase::Completed, Phase::Failed]).await;
        let status = ended.status.unwrap();
        assert_eq!((status.phase, status.trials_created), (Phase::Completed, 7), "{}", ns.logs());
        let events: Vec<Value> = status.log.iter().map(|entry| json!(entry.event)).collect();
        assert_eq!(events.len(), 2, "{events:?}");
        assert_eq!(events[1]["deleted"]["trials"][0]["index"], 0);
        let trials = ns.trials_of("asha").await;
        assert_eq!(trials.len(), 6);
        assert!(rebuilt(&ns, "asha").await.book().is_finished());
    });
}

#[test]
fn experiment_with_unreadable_search_can_be_cancelled() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("unreadable-search").await;
        let mut operator = ns.operator("a", operator_port());
        operator.wait_ready(&ns);
        let _kubelet =
            Kubelet::start(&ns.client, &ns.namespace, |_| Script::Train { unit_ms: 100 });
        ns.apply("long", crate::flow::grid(2, 1000, 1));
        ns.wait_for_trials("long", 2, |status| !status.checkpoints.is_empty()).await;
        // No search writes an entry twice. The operator writes the status, too, so try again.
        let is_reported = |experiment: &Experiment| {
            let conditions = &experiment.status.as_ref().unwrap().conditions;
            find(conditions, "Valid").is_some_and(|valid| valid.reason == "Unreadable")
        };
        let mut experiment = ns.experiment("long").await;
        let end = Instant::now() + stoker_test_cluster::PATIENCE;
        while !is_reported(&experiment) {
            assert!(Instant::now() < end, "{:#?}", experiment.status);
            let log = &experiment.status.as_ref().unwrap().log;
            if log.len() == 1 {
                let change = json!({ "status": { "log": [log[0], log[0]] } }).to_string();
                let patch = ["patch", "experiment", "long", "-n", &ns.namespace];
                let options = ["--subresource=status", "--type=merge", "-p", &change];
                // Ignore the error: the next round reads the status again.
                let _ = ns.plane.kubectl(&[&patch[..], &options].concat());
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
            experiment = ns.experiment("long").await;
        }
        ns.patch("long", &json!({ "spec": { "state": "cancelled" } })).unwrap();
        ns.wait_for_trials("long", 2, |status| status.phase == Phase::Cancelled).await;
    });
}

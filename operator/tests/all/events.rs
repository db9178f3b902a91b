//! Events and conditions, as `kubectl describe` shows them.

use std::time::{Duration, Instant};

use k8s_openapi::api::events::v1::Event;
use kube::{Api, ResourceExt as _};
use serde_json::{Value, json};
use stoker_api::condition::Condition;
use stoker_api::experiment::Phase;
use stoker_api::names::{LABEL_ATTEMPT, LABEL_JOB};

use crate::flow::grid;
use crate::jobs::{apply_job, job, wait_for_job};
use crate::kubelet::{Kubelet, Script};
use crate::setup::{TestNamespace, operator_port, runtime};
use crate::worker::Work;

/// Expected type, reason and note parts of an event.
type Expected<'a> = (&'a str, &'a str, &'a [&'a str]);

/// Returns the events of one object, oldest first.
pub(crate) async fn events_of(ns: &TestNamespace, kind: &str, name: &str) -> Vec<Event> {
    let api: Api<Event> = Api::namespaced(ns.client.clone(), &ns.namespace);
    let mut events = api.list(&Default::default()).await.unwrap().items;
    events.retain(|event| {
        let about = event.regarding.clone().unwrap_or_default();
        about.kind.as_deref() == Some(kind) && about.name.as_deref() == Some(name)
    });
    events.sort_by_key(|event| event.event_time.clone().map(|time| time.0));
    events
}

fn is(event: &Event, (type_, reason, parts): &Expected<'_>) -> bool {
    let note = event.note.as_deref().unwrap_or_default();
    event.type_.as_deref() == Some(type_)
        && event.reason.as_deref() == Some(reason)
        && parts.iter().all(|part| note.contains(part))
}

/// Waits until the object's events are exactly these, in this order, and checks their references.
/// The operator writes an event after the status that it describes.
async fn check_events(
    ns: &TestNamespace,
    kind: &str,
    name: &str,
    uid: &str,
    expected: &[Expected<'_>],
) {
    let end = Instant::now() + stoker_test_cluster::PATIENCE;
    let events = loop {
        let events = events_of(ns, kind, name).await;
        let all = events.len() == expected.len();
        if all && events.iter().zip(expected).all(|(event, expected)| is(event, expected)) {
            break events;
        }
        let read = |event: &Event| json!([event.type_, event.reason, event.note]);
        let actual: Vec<Value> = events.iter().map(read).collect();
        assert!(Instant::now() < end, "{kind} {name}: {actual:#?}, expected: {expected:#?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    for event in events {
        let about = event.regarding.as_ref().unwrap();
        assert_eq!(about.uid.as_deref(), Some(uid), "{event:#?}");
        assert_eq!(about.api_version.as_deref(), Some("stoker.dev/v1alpha1"), "{event:#?}");
        let controller = event.reporting_controller.as_deref().unwrap_or_default();
        assert!(controller.starts_with("stoker"), "{event:#?}");
    }
}

/// Returns type, status and reason of the conditions, sorted by type.
fn summary(conditions: &[Condition]) -> Vec<(String, String, String)> {
    let mut all: Vec<_> = conditions
        .iter()
        .map(|condition| {
            let status = format!("{:?}", condition.status);
            (condition.type_.clone(), status, condition.reason.clone())
        })
        .collect();
    all.sort();
    all
}

/// Checks that the conditions have these values and this generation, and changed during the test.
#[track_caller]
fn check_conditions(conditions: &[Condition], generation: i64, expected: &[(&str, &str, &str)]) {
    let actual = summary(conditions);
    let owned = |(type_, status, reason): &(&str, &str, &str)| {
        (type_.to_string(), status.to_string(), reason.to_string())
    };
    assert_eq!(actual, expected.iter().map(owned).collect::<Vec<_>>(), "{conditions:#?}");
    for condition in conditions {
        assert_eq!(condition.observed_generation, generation, "{condition:?}");
        let age = stoker_operator::context::now().seconds_since(condition.last_transition_time);
        assert!(age < 600, "{age} s old: {condition:?}");
    }
}

/// Conditions of an experiment that ended in this phase.
fn conditions_after(phase: &str) -> Vec<(&str, &str, &str)> {
    let ends = ["Cancelled", "Completed", "Failed"];
    let mut all: Vec<_> = ends
        .iter()
        .map(|end| (*end, if *end == phase { "True" } else { "False" }, phase))
        .collect();
    all.extend([("Running", "False", "Ended"), ("Valid", "True", "Accepted")]);
    all
}

#[test]
fn experiment_events_follow_its_phases() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("events").await;
        let mut operator = ns.operator("a", operator_port());
        operator.wait_ready(&ns);
        // The operator may write up to 3 s late that a trial runs, so these trials train for
        // longer.
        let _kubelet =
            Kubelet::start(&ns.client, &ns.namespace, |_| Script::Train { unit_ms: 100 });
        ns.apply("grid", grid(3, 80, 1));
        let ended = ns.wait_for("grid", &[Phase::Completed, Phase::Failed]).await;
        let uid = ended.uid().unwrap();
        let expected: [Expected<'_>; 3] = [
            ("Normal", "Accepted", &["0 of 3 trials ended"]),
            ("Normal", "Running", &["0 of 3 trials ended"]),
            ("Normal", "Completed", &["3 of 3 trials ended", "best: trial "]),
        ];
        check_events(&ns, "Experiment", "grid", &uid, &expected).await;
        for trial in ns.trials_of("grid").await {
            let expected: [Expected<'_>; 1] = [("Normal", "Completed", &[])];
            let uid = trial.uid().unwrap();
            check_events(&ns, "Trial", &trial.name_any(), &uid, &expected).await;
        }
        let status = ended.status.unwrap();
        check_conditions(
            &status.conditions,
            status.observed_generation,
            &conditions_after("Completed"),
        );
    });
}

#[test]
fn pause_and_cancel_write_events() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("events-states").await;
        let mut operator = ns.operator("a", operator_port());
        operator.wait_ready(&ns);
        let _kubelet = Kubelet::start(&ns.client, &ns.namespace, |_| Script::Train { unit_ms: 50 });
        ns.apply("long", grid(2, 1000, 1));
        ns.wait_for("long", &[Phase::Running]).await;
        ns.patch("long", &json!({"spec": {"state": "paused"}})).unwrap();
        ns.wait_for("long", &[Phase::Paused]).await;
        ns.patch("long", &json!({"spec": {"state": "cancelled"}})).unwrap();
        let ended = ns.wait_for("long", &[Phase::Cancelled]).await;
        let expected: [Expected<'_>; 4] = [
            ("Normal", "Accepted", &["0 of 2 trials ended"]),
            ("Normal", "Running", &["0 of 2 trials ended"]),
            ("Normal", "Paused", &["0 of 2 trials ended"]),
            ("Normal", "Cancelled", &["2 of 2 trials ended"]),
        ];
        check_events(&ns, "Experiment", "long", &ended.uid().unwrap(), &expected).await;
        let status = ended.status.unwrap();
        check_conditions(
            &status.conditions,
            status.observed_generation,
            &conditions_after("Cancelled"),
        );
    });
}

#[test]
fn each_failed_attempt_writes_a_warning() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("events-failed").await;
        let mut operator = ns.operator("a", operator_port());
        operator.wait_ready(&ns);
        let _kubelet = Kubelet::start(&ns.client, &ns.namespace, |pod| {
            let attempt = pod.labels()[LABEL_ATTEMPT].parse::<i32>().unwrap();
            Script::Exit { after_ms: 10, code: 41 + attempt }
        });
        let mut spec = grid(1, 2, 1);
        spec["maxRestarts"] = json!(1);
        ns.apply("grid", spec);
        let ended = ns.wait_for("grid", &[Phase::Completed, Phase::Failed]).await;
        let trial = ns.trials_of("grid").await.pop().unwrap();
        let expected: [Expected<'_>; 3] = [
            ("Warning", "AttemptEnded", &["attempt 0: UserError", "exit code 41"]),
            ("Warning", "AttemptEnded", &["attempt 1: UserError", "exit code 42"]),
            ("Warning", "Failed", &["exit code 42"]),
        ];
        check_events(&ns, "Trial", "grid-0", &trial.uid().unwrap(), &expected).await;
        // Programs that exit this soon are not reported as running.
        let expected: [Expected<'_>; 2] = [
            ("Normal", "Accepted", &["0 of 1 trials ended"]),
            ("Warning", "Failed", &["1 of 1 trials ended"]),
        ];
        check_events(&ns, "Experiment", "grid", &ended.uid().unwrap(), &expected).await;
        let status = ended.status.unwrap();
        check_conditions(
            &status.conditions,
            status.observed_generation,
            &conditions_after("Failed"),
        );
        let status = trial.status.unwrap();
        let expected = [
            ("Completed", "False", "Failed"),
            ("Failed", "True", "Failed"),
            ("Running", "False", "Ended"),
            ("Scheduled", "False", "Ended"),
        ];
        check_conditions(&status.conditions, status.observed_generation, &expected);
    });
}

#[test]
fn invalid_experiment_writes_one_warning() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("events-invalid").await;
        let mut operator = ns.operator("a", operator_port());
        operator.wait_ready(&ns);
        let mut spec = grid(2, 2, 1);
        spec["hyperparameters"] = json!({ "x": { "int": { "min": 5, "max": 1 } } });
        ns.apply("bad", spec);
        let ended = ns.wait_for("bad", &[Phase::Failed]).await;
        let expected: [Expected<'_>; 1] = [("Warning", "Invalid", &["spec.hyperparameters.x"])];
        check_events(&ns, "Experiment", "bad", &ended.uid().unwrap(), &expected).await;
        let status = ended.status.unwrap();
        let expected = [
            ("Completed", "False", "Invalid"),
            ("Failed", "True", "Invalid"),
            ("Running", "False", "Invalid"),
            ("Valid", "False", "Invalid"),
        ];
        check_conditions(&status.conditions, status.observed_generation, &expected);
    });
}

#[test]
fn job_events_follow_its_phases() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("events-job").await;
        let mut operator = ns.operator("a", operator_port());
        operator.wait_ready(&ns);
        let _kubelet = Kubelet::start(&ns.client, &ns.namespace, |pod| {
            let is_good = pod.labels()[LABEL_JOB] == "good";
            match is_good {
                true => Script::Work(Work { shards: 2, shard_ms: 10 }),
                false => Script::Exit { after_ms: 10, code: 42 },
            }
        });
        apply_job(&ns, "good", job(1));
        apply_job(&ns, "bad", job(1));
        let good = wait_for_job(&ns, "good", &[Phase::Completed, Phase::Failed]).await;
        let bad = wait_for_job(&ns, "bad", &[Phase::Completed, Phase::Failed]).await;
        let uid = |name: &str| {
            let arguments = ["inferencejob", name, "-n", "events-job"];
            let object = tokio::task::block_in_place(|| ns.plane.get(&arguments)).unwrap();
            object["metadata"]["uid"].as_str().unwrap().to_owned()
        };
        let expected: [Expected<'_>; 2] = [
            ("Normal", "Running", &["0 of 0 rows processed"]),
            ("Normal", "Completed", &["20 of 20 rows processed"]),
        ];
        check_events(&ns, "InferenceJob", "good", &uid("good"), &expected).await;
        let expected: [Expected<'_>; 4] = [
            ("Normal", "Running", &[]),
            ("Warning", "AttemptEnded", &["attempt 0: UserError", "exit code 42"]),
            ("Warning", "AttemptEnded", &["attempt 1: UserError", "exit code 42"]),
            ("Warning", "Failed", &["exit code 42"]),
        ];
        check_events(&ns, "InferenceJob", "bad", &uid("bad"), &expected).await;
        for (status, phase) in [(good, "Completed"), (bad, "Failed")] {
            let mut expected = conditions_after(phase);
            expected.insert(4, ("Scheduled", "False", "Ended"));
            check_conditions(&status.conditions, status.observed_generation, &expected);
        }
    });
}

//! Experiments from creation to end.

use kube::ResourceExt as _;
use serde_json::{Value, json};
use stoker_api::condition::{ConditionStatus, find};
use stoker_api::experiment::Phase;
use stoker_api::trial::{AttemptEnd, CloseCause, Fact, TrialStatus};

use crate::kubelet::{Kubelet, Script};
use crate::setup::{SCHEMA, TestNamespace, operator_port, own_plane, runtime};

/// Spec of a grid search over `x` with this many points, batches per trial and slots per trial.
pub(crate) fn grid(points: u32, batches: u64, slots: u32) -> Value {
    json!({
        "entrypoint": { "command": ["stoker-trainer", "mnist"] },
        "hyperparameters": { "x": { "double": { "min": 0.0, "max": 1.0, "count": points } } },
        "searcher": {
            "metric": "loss", "maxLength": { "batches": batches },
            "grid": { "maxConcurrentTrials": 3 },
        },
        "resources": { "slotsPerTrial": slots, "slotsPerPod": 1 },
        "reproducibility": { "experimentSeed": 5 },
    })
}

#[test]
fn experiment_completes_and_reports_its_best_trial() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("flow").await;
        let mut operator = ns.operator("a", operator_port());
        operator.wait_ready(&ns);
        let kubelet =
            Kubelet::start(&ns.client, &ns.namespace, |_| Script::Train { unit_ms: 30 });
        ns.apply("grid", grid(4, 3, 2));
        let ended = ns.wait_for("grid", &[Phase::Completed, Phase::Failed]).await;
        let status = ended.status.unwrap();
        assert_eq!(status.phase, Phase::Completed, "{status:#?}");
        let best = status.best.as_ref().unwrap();
        // x takes the values 0, 1/3, 2/3 and 1 in some order; 1/3 is nearest to 0.3.
        let trials = ns.trials_of("grid").await;
        let x = trials[best.index as usize].spec.hyperparameters["x"].as_f64().unwrap();
        assert!((x - 1.0 / 3.0).abs() < 1e-9, "{x}");
        assert_eq!((status.trials_created, status.trials_closed), (4, 4));
        assert_eq!(best.checkpoint.as_deref(), Some("000000000003-0"));
        assert_eq!(status.progress_percent, 100);
        let completed = find(&status.conditions, "Completed").unwrap();
        assert_eq!(completed.status, ConditionStatus::True);
        assert_eq!(completed.observed_generation, status.observed_generation);
        let mut started = kubelet.started();
        started.sort();
        let expected: Vec<String> =
            (0..4).flat_map(|t| (0..2).map(move |r| format!("grid-{t}-a0-r{r}"))).collect();
        assert_eq!(started, expected);
        for trial in ns.trials_of("grid").await {
            let status = trial.status.unwrap();
            assert_eq!((status.phase, status.attempts.len()), (Phase::Completed, 1));
            let closed = |fact: &Fact| {
                matches!(fact, Fact::Closed(closed) if closed.cause == CloseCause::Completed)
            };
            assert!(status.facts.iter().any(closed));
        }
        let waited =
            ["wait", "experiment/grid", "-n", "flow", "--for=condition=Completed", "--timeout=5s"];
        ns.plane.kubectl(&waited).unwrap();
        let columns = ns.plane.kubectl(&["get", "stoker", "-n", "flow"]).unwrap();
        assert!(columns.contains("Completed") && columns.contains("BEST"), "{columns}");
    });
}

#[test]
fn experiment_can_be_paused_resumed_and_cancelled() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("pause").await;
        let mut operator = ns.operator("a", operator_port());
        operator.wait_ready(&ns);
        let kubelet = Kubelet::start(&ns.client, &ns.namespace, |_| Script::Train { unit_ms: 100 });
        ns.apply("long", grid(2, 1000, 1));
        // Each trial has trained, so each is preempted with a checkpoint.
        let has_trained = |status: &TrialStatus| !status.checkpoints.is_empty();
        ns.wait_for_trials("long", 2, has_trained).await;
        ns.patch("long", &json!({"spec": {"state": "paused"}})).unwrap();
        ns.wait_for("long", &[Phase::Paused]).await;
        for trial in ns.trials_of("long").await {
            let attempts = trial.status.unwrap().attempts;
            assert_eq!(attempts[0].end, Some(AttemptEnd::Preempted), "{attempts:?}");
        }
        ns.patch("long", &json!({"spec": {"state": "active"}})).unwrap();
        let has_resumed = |status: &TrialStatus| {
            status.attempts.get(1).is_some_and(|attempt| attempt.resumed_from.is_some())
        };
        ns.wait_for_trials("long", 2, has_resumed).await;
        for pod in ["long-0-a1-r0", "long-1-a1-r0"] {
            assert!(kubelet.started().contains(&pod.to_owned()), "{:?}", kubelet.started());
        }
        ns.patch("long", &json!({"spec": {"state": "cancelled"}})).unwrap();
        let ended = ns.wait_for("long", &[Phase::Cancelled, Phase::Completed]).await;
        assert_eq!(ended.status.unwrap().phase, Phase::Cancelled);
        let refused = ns.patch("long", &json!({"spec": {"state": "active"}})).unwrap_err();
        assert!(refused.contains("stays cancelled"), "{refused}");
    });
}

#[test]
fn killed_experiment_ends_at_once() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("killed").await;
        let mut operator = ns.operator("a", operator_port());
        operator.wait_ready(&ns);
        let _kubelet = Kubelet::start(&ns.client, &ns.namespace, |_| Script::Hang);
        ns.apply("deaf", grid(2, 1000, 1));
        ns.wait_for("deaf", &[Phase::Running]).await;
        ns.patch("deaf", &json!({"spec": {"state": "killed"}})).unwrap();
        ns.wait_for("deaf", &[Phase::Cancelled]).await;
        let list = || ns.plane.kubectl(&["get", "pods", "-n", "killed", "-o", "name"]);
        stoker_test_cluster::wait_until("its pods are deleted", || match list() {
            Ok(text) if text.trim().is_empty() => Ok(()),
            other => Err(format!("{other:?}")),
        })
        .unwrap();
    });
}

#[test]
fn invalid_experiment_reports_errors_and_stops_no_other() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("invalid").await;
        let mut operator = ns.operator("a", operator_port());
        operator.wait_ready(&ns);
        let _kubelet = Kubelet::start(&ns.client, &ns.namespace, |_| Script::Train { unit_ms: 10 });
        let mut spec = grid(2, 2, 1);
        spec["hyperparameters"] =
            json!({ "x": { "int": { "min": 5, "max": 1 } }, "y": { "log": {} } });
        ns.apply("bad", spec);
        ns.apply("good", grid(2, 2, 1));
        let bad = ns.wait_for("bad", &[Phase::Failed]).await.status.unwrap();
        let valid = find(&bad.conditions, "Valid").unwrap();
        assert_eq!((valid.status, valid.reason.as_str()), (ConditionStatus::False, "Invalid"));
        for field in ["spec.hyperparameters.x", "spec.hyperparameters.y"] {
            assert!(valid.message.contains(field), "{}", valid.message);
        }
        ns.wait_for("good", &[Phase::Completed]).await;
    });
}

#[test]
fn deleted_trial_is_closed_and_index_not_reused() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("deleted").await;
        let mut operator = ns.operator("a", operator_port());
        operator.wait_ready(&ns);
        // Trial 1 must not end before it is deleted.
        let _kubelet = Kubelet::start(&ns.client, &ns.namespace, |pod| {
            match pod.name_any().starts_with("grid-1-") {
                true => Script::Hang,
                false => Script::Train { unit_ms: 20 },
            }
        });
        ns.apply("grid", grid(3, 8, 1));
        ns.wait_for_trials("grid", 3, |status| !status.attempts.is_empty()).await;
        ns.plane.kubectl(&["delete", "trial", "grid-1", "-n", "deleted", "--wait=false"]).unwrap();
        let ended = ns.wait_for("grid", &[Phase::Completed]).await.status.unwrap();
        assert_eq!((ended.trials_created, ended.trials_closed), (3, 3));
        assert_ne!(ended.best.unwrap().index, 1);
        let names: Vec<u32> =
            ns.trials_of("grid").await.iter().map(|trial| trial.spec.index).collect();
        assert_eq!(names, [0, 2]);
    });
}

/// Schemas reject objects that cannot be parsed, but an older operator with newer CRDs can
/// encounter one.
#[test]
fn unparsable_object_is_reported_and_stops_no_other() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let plane = own_plane(Default::default(), |definition| {
            let path = format!("{SCHEMA}/spec/properties/maxRestarts");
            let is_experiment = definition["spec"]["names"]["kind"] == "Experiment";
            if let Some(schema) = definition.pointer_mut(&path).filter(|_| is_experiment) {
                *schema = json!({ "x-kubernetes-int-or-string": true, "default": 5 });
            }
        });
        let ns = TestNamespace::on(plane, "unreadable").await;
        let mut operator = ns.operator("a", operator_port());
        operator.wait_ready(&ns);
        let _kubelet = Kubelet::start(&ns.client, &ns.namespace, |_| Script::Train { unit_ms: 10 });
        let mut newer = grid(2, 2, 1);
        newer["maxRestarts"] = json!("five");
        ns.apply("newer", newer);
        ns.apply("good", grid(2, 2, 1));
        ns.wait_for("good", &[Phase::Completed]).await;
        let valid = stoker_test_cluster::wait_until("the error is reported", || {
            let object = ns.plane.get(&["experiment", "newer", "-n", "unreadable"]);
            let object = object.map_err(|error| error.to_string())?;
            let conditions = object["status"]["conditions"].as_array().cloned().unwrap_or_default();
            let valid = conditions.into_iter().find(|condition| condition["type"] == "Valid");
            valid.ok_or_else(|| object.to_string())
        });
        let valid = valid.unwrap();
        assert_eq!((&valid["status"], &valid["reason"]), (&json!("False"), &json!("Unreadable")));
        assert!(valid["message"].as_str().unwrap().contains("five"), "{valid}");
    });
}

/// An older operator after a rollback can encounter such a trial.
#[test]
fn unparsable_trial_is_reported_until_repaired() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let plane = own_plane(Default::default(), |definition| {
            let path = format!("{SCHEMA}/status/properties/restarts");
            let is_trial = definition["spec"]["names"]["kind"] == "Trial";
            if let Some(schema) = definition.pointer_mut(&path).filter(|_| is_trial) {
                *schema = json!({ "x-kubernetes-int-or-string": true, "default": 0 });
            }
        });
        let ns = TestNamespace::on(plane, "newer-trial").await;
        let mut operator = ns.operator("a", operator_port());
        operator.wait_ready(&ns);
        let _kubelet = Kubelet::start(&ns.client, &ns.namespace, |_| Script::Hang);
        ns.apply("grid", grid(2, 1000, 1));
        ns.wait_for_trials("grid", 2, |status| status.phase == Phase::Running).await;
        let set_restarts = |restarts: Value| {
            let change = json!({ "status": { "restarts": restarts } }).to_string();
            let trial = ["patch", "trial", "grid-1", "-n", "newer-trial", "--subresource=status"];
            ns.plane.kubectl(&[&trial[..], &["--type=merge", "-p", &change]].concat()).unwrap();
        };
        let wait_for_reason = |reason: &str| {
            let valid = stoker_test_cluster::wait_until(reason, || {
                let object = ns.plane.get(&["experiment", "grid", "-n", "newer-trial"]);
                let object = object.map_err(|error| error.to_string())?;
                let conditions = object["status"]["conditions"].as_array().cloned();
                let valid = conditions.into_iter().flatten().find(|condition| {
                    condition["type"] == "Valid" && condition["reason"] == reason
                });
                valid.ok_or_else(|| object.to_string())
            });
            valid.unwrap()
        };
        set_restarts(json!("few"));
        let valid = wait_for_reason("Unreadable");
        assert_eq!(valid["status"], "False");
        for part in ["trial grid-1 cannot be parsed: ", "few"] {
            assert!(valid["message"].as_str().unwrap().contains(part), "{valid}");
        }
        set_restarts(json!(0));
        assert_eq!(wait_for_reason("Accepted")["status"], "True");
        set_restarts(json!("few"));
        wait_for_reason("Unreadable");
        ns.patch("grid", &json!({ "spec": { "state": "killed" } })).unwrap();
        let killed = stoker_test_cluster::wait_until("the pods of both trials are deleted", || {
            let pods = ns.plane.get(&["pods", "-n", "newer-trial"]);
            let pods = pods.map_err(|error| error.to_string())?;
            let mut all = pods["items"].as_array().into_iter().flatten();
            let are_deleted = all.all(|pod| !pod["metadata"]["deletionTimestamp"].is_null());
            are_deleted.then_some(()).ok_or_else(|| pods.to_string())
        });
        killed.unwrap();
    });
}

/// Kubernetes deletes the trials of an experiment only after the experiment itself.
#[test]
fn trials_stop_while_a_finalizer_holds_the_experiment() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("finalizer").await;
        let mut operator = ns.operator("a", operator_port());
        operator.wait_ready(&ns);
        let _kubelet =
            Kubelet::start(&ns.client, &ns.namespace, |_| Script::Train { unit_ms: 100 });
        ns.apply("long", grid(2, 1000, 1));
        ns.wait_for_trials("long", 2, |status| !status.checkpoints.is_empty()).await;
        ns.patch("long", &json!({ "metadata": { "finalizers": ["example.com/backup"] } })).unwrap();
        let delete = ["delete", "experiment", "long", "-n", "finalizer", "--wait=false"];
        ns.plane.kubectl(&delete).unwrap();
        ns.wait_for_trials("long", 2, |status| status.phase == Phase::Cancelled).await;
        // The control plane outlives the test, so do not leave the experiment.
        ns.patch("long", &json!({ "metadata": { "finalizers": null } })).unwrap();
    });
}

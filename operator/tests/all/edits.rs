//! Edits and limits of a search.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use stoker_api::condition::{self, ConditionStatus};
use stoker_api::decisions::LogEvent;
use stoker_api::experiment::{Experiment, Phase};
use stoker_api::trial::{Fact, Trial};

use crate::bench::metric;
use crate::kubelet::{Kubelet, Script};
use crate::proxy::{Fault, Proxy};
use crate::setup::{SCHEMA, TestNamespace, client_of, operator_port, own_plane, runtime};

fn random(searcher: &Value) -> Value {
    let mut all = json!({ "metric": "loss", "maxLength": { "batches": 4 } });
    crate::setup::merge(&mut all, searcher);
    json!({
        "entrypoint": { "command": ["stoker-trainer", "mnist"] },
        "hyperparameters": { "x": { "double": { "min": 0.0, "max": 1.0 } } },
        "searcher": all,
        "reproducibility": { "experimentSeed": 5 },
    })
}

/// Waits until an experiment has completed with this number of trials.
async fn wait_for_end(ns: &TestNamespace, name: &str, trials: u32) -> Experiment {
    let end = Instant::now() + stoker_test_cluster::PATIENCE;
    loop {
        let experiment = ns.experiment(name).await;
        let status = experiment.status.as_ref();
        let has_ended = status.is_some_and(|status| {
            status.phase == Phase::Completed && status.trials_closed == trials
        });
        if has_ended {
            return experiment;
        }
        assert!(Instant::now() < end, "{status:#?}\n{}", ns.logs());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Waits until the condition `Refused` is this. Returns its reason and the phase.
async fn wait_for_refusal(ns: &TestNamespace, name: &str, holds: bool) -> (String, Phase) {
    let end = Instant::now() + stoker_test_cluster::PATIENCE;
    loop {
        let status = ns.experiment(name).await.status.unwrap();
        if let Some(refused) = condition::find(&status.conditions, "Refused")
            && refused.status == ConditionStatus::from(holds)
        {
            return (refused.reason.clone(), status.phase);
        }
        assert!(Instant::now() < end, "{status:#?}\n{}", ns.logs());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn is_reopened(trial: &Trial) -> bool {
    let facts = trial.status.iter().flat_map(|status| &status.facts);
    facts.into_iter().any(|fact| matches!(fact, Fact::Reopened(_)))
}

#[test]
fn edited_search_continues_after_its_end() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("edits").await;
        let mut operator = ns.operator("a", operator_port());
        operator.wait_ready(&ns);
        let _kubelet = Kubelet::start(&ns.client, &ns.namespace, |_| Script::Train { unit_ms: 5 });
        ns.apply("edited", random(&json!({ "random": { "maxTrials": 2 } })));
        wait_for_end(&ns, "edited", 2).await;
        let edit =
            |searcher: Value| ns.patch("edited", &json!({ "spec": { "searcher": searcher } }));
        // The API server refuses other edits, and names the remedy.
        for (searcher, expected) in [
            (json!({ "metric": "accuracy" }), "metric, smallerIsBetter"),
            (json!({ "maxLength": { "batches": 3 } }), "maxLength can only be raised"),
            (json!({ "random": null, "grid": {} }), "the search method cannot change"),
            (json!({ "random": { "maxTrials": 200_000 } }), "less than or equal to 100000"),
        ] {
            let error = edit(searcher).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
        edit(json!({ "random": { "maxTrials": 5 } })).unwrap();
        let ended = wait_for_end(&ns, "edited", 5).await;
        // The search cannot follow a total below the trials that exist. It reports that, and ends
        // its clean-up.
        edit(json!({ "random": { "maxTrials": 3 } })).unwrap();
        let refused = wait_for_refusal(&ns, "edited", true).await;
        assert_eq!((&*refused.0, refused.1), ("EditRefused", Phase::Completed));
        edit(json!({ "random": { "maxTrials": 5 } })).unwrap();
        wait_for_refusal(&ns, "edited", false).await;
        // The log has the beginning and the edit.
        let log = ended.status.unwrap().log;
        assert_eq!(log.len(), 2, "{log:#?}");
        let indexes = ns.trials_of("edited").await.into_iter().map(|trial| trial.spec.index);
        let mut indexes: Vec<u32> = indexes.collect();
        indexes.sort_unstable();
        assert_eq!(indexes, [0, 1, 2, 3, 4]);
    });
}

/// The operator would find such an edit invalid, and `maxLength` cannot be lowered again.
#[test]
fn median_stopping_limits_raised_lengths() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("median").await;
        let searcher =
            json!({ "random": { "maxTrials": 2 }, "medianStopping": { "everyUnits": 2 } });
        ns.apply("median", random(&searcher));
        let raise = |batches: u64| {
            let searcher = json!({ "maxLength": { "batches": batches } });
            ns.patch("median", &json!({ "spec": { "searcher": searcher } }))
        };
        let error = raise(257).unwrap_err();
        assert!(error.contains("at most 128 times medianStopping.everyUnits"), "{error}");
        raise(256).unwrap();
    });
}

/// The API server does not answer the write of a turn, and stores it after the search has decided
/// something else. The second write to the trial is held too, whether it is a turn or a fence.
#[test]
fn late_turns_are_fenced() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("late-turn").await;
        let proxy = Proxy::start(client_of(&ns.kubeconfig).await, ns.folder.path()).await;
        let num_writes = AtomicU32::new(0);
        proxy.set_rule(move |name| {
            let is_spec = name.starts_with("PATCH") && name.ends_with("/trials/late-0");
            let is_held = is_spec && num_writes.fetch_add(1, Ordering::Relaxed) < 2;
            is_held.then_some(Fault::Held)
        });
        let mut operator = ns.operator_by("a", operator_port(), &proxy.kubeconfig, &[]);
        operator.wait_ready(&ns);
        let _kubelet = Kubelet::start(&ns.client, &ns.namespace, |_| Script::Train { unit_ms: 5 });
        let method = json!({ "maxTrials": 2, "maxConcurrentTrials": 1 });
        ns.apply("late", random(&json!({ "random": method })));
        proxy.wait_faults(1).await;
        let edit = json!({ "random": { "maxTrials": 3 } });
        ns.patch("late", &json!({ "spec": { "searcher": edit } })).unwrap();
        let end = Instant::now() + stoker_test_cluster::PATIENCE;
        while ns.experiment("late").await.status.unwrap().log.len() < 2 {
            assert!(Instant::now() < end, "{}", ns.logs());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        proxy.clear_rule();
        proxy.wait_released(2).await;
        wait_for_end(&ns, "late", 3).await;
    });
}

/// A pass takes in new facts. It reads the whole record only after an edit or an error.
#[test]
fn search_stays_in_memory_between_passes() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("kept").await;
        let mut operator = ns.operator("a", operator_port());
        operator.wait_ready(&ns);
        let _kubelet = Kubelet::start(&ns.client, &ns.namespace, |_| Script::Train { unit_ms: 5 });
        let method = json!({ "maxTrials": 8, "maxConcurrentTrials": 2 });
        ns.apply("kept", random(&json!({ "random": method })));
        wait_for_end(&ns, "kept", 8).await;
        let passes = metric(&operator, "stoker_reconcile_seconds_count{kind=\"experiment\"}");
        let rebuilt = metric(&operator, "stoker_searches_rebuilt_total");
        assert!((1.0..passes / 2.0).contains(&rebuilt), "{rebuilt} of {passes} passes");
    });
}

/// CRDs that are older than the operator drop fields. A pass whose write was not stored whole keeps
/// no search, so the next pass rebuilds it.
#[test]
fn search_with_dropped_fields_is_rebuilt() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let plane = own_plane(Default::default(), |definition| {
            let path = format!("{SCHEMA}/spec/properties/grants/items");
            if let Some(grant) = definition.pointer_mut(&path) {
                // The rules of the schema name the field.
                grant.as_object_mut().unwrap().remove("x-kubernetes-validations").unwrap();
                grant["properties"].as_object_mut().unwrap().remove("steps").unwrap();
            }
        });
        let ns = TestNamespace::on(plane, "dropped").await;
        let mut operator = ns.operator("a", operator_port());
        operator.wait_ready(&ns);
        let _kubelet = Kubelet::start(&ns.client, &ns.namespace, |_| Script::Train { unit_ms: 5 });
        let method = json!({ "maxTrials": 8, "maxConcurrentTrials": 1 });
        ns.apply("dropped", random(&json!({ "random": method })));
        wait_for_end(&ns, "dropped", 8).await;
        let trials = ns.trials_of("dropped").await;
        let mut grants = trials.iter().flat_map(|trial| &trial.spec.grants);
        assert!(grants.all(|grant| grant.steps.is_none()), "the field was not dropped");
        // Once at the start, and after the result of each trial.
        let rebuilt = metric(&operator, "stoker_searches_rebuilt_total");
        assert!(rebuilt >= 9.0, "{rebuilt}");
    });
}

/// The API server checks what the types of fields cannot say.
#[test]
fn api_server_checks_lengths_in_units() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("units").await;
        let one = |length: Value, time_metric: Option<&str>| {
            let mut spec = random(&json!({ "single": {} }));
            spec["searcher"]["maxLength"] = length;
            if let Some(name) = time_metric {
                spec["searcher"]["timeMetric"] = json!(name);
            }
            spec
        };
        let counted = one(json!({ "units": 9 }), Some("steps"));
        ns.apply("counted", counted.clone());
        let fixed = json!({ "spec": { "searcher": { "timeMetric": "frames" } } });
        let error = ns.patch("counted", &fixed).unwrap_err();
        assert!(error.contains("timeMetric, sampler"), "{error}");
        let mut periodic = counted;
        periodic["minValidationPeriod"] = json!({ "units": 3 });
        let both = one(json!({ "batches": 4, "units": 9 }), None);
        for (spec, expected) in [
            (periodic, "must be in records, batches or epochs"),
            (one(json!({ "batches": 4 }), Some("steps")), "timeMetric requires maxLength.units"),
            (both, "exactly one of records, batches, epochs and units"),
        ] {
            let error = ns.try_apply("refused", spec).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    });
}

#[test]
fn limit_on_units_ends_the_search() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("limits").await;
        let mut operator = ns.operator("a", operator_port());
        operator.wait_ready(&ns);
        let _kubelet = Kubelet::start(&ns.client, &ns.namespace, |_| Script::Train { unit_ms: 5 });
        let searcher = json!({
            "random": { "maxTrials": 50, "maxConcurrentTrials": 2 },
            "limits": { "units": 12 },
        });
        ns.apply("limited", random(&searcher));
        let ended = ns.wait_for("limited", &[Phase::Completed, Phase::Failed]).await;
        let status = ended.status.unwrap();
        assert_eq!(status.phase, Phase::Completed, "{status:#?}");
        // Three trials have four units each. Few others had begun.
        assert!((3..10).contains(&status.trials_created), "{status:#?}");
        assert_eq!(status.trials_closed, status.trials_created);
        let completed = status.conditions.iter().find(|condition| condition.type_ == "Completed");
        assert_eq!(completed.unwrap().reason, "LimitReached");
        let message = status.message.unwrap();
        assert!(message.contains("units") && message.contains("12"), "{message}");
        // Without the limit, the stopped trials continue.
        let created = status.trials_created;
        let searcher = json!({ "limits": null, "random": { "maxTrials": created } });
        ns.patch("limited", &json!({ "spec": { "searcher": searcher } })).unwrap();
        let end = Instant::now() + stoker_test_cluster::PATIENCE;
        while !ns.trials_of("limited").await.iter().any(is_reopened) {
            assert!(Instant::now() < end, "{}", ns.logs());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        wait_for_end(&ns, "limited", created).await;
        let trials = ns.trials_of("limited").await;
        for trial in &trials {
            let status = trial.status.as_ref().unwrap();
            assert_eq!(status.phase, Phase::Completed, "{status:#?}");
            assert!(status.facts.iter().any(|fact| matches!(fact, Fact::Result(_))));
        }
    });
}

#[test]
fn failed_trials_continue_by_a_request() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("reopened").await;
        let mut operator = ns.operator("a", operator_port());
        operator.wait_ready(&ns);
        let is_broken = Arc::new(AtomicBool::new(true));
        let broken = is_broken.clone();
        let kubelet = Kubelet::start(&ns.client, &ns.namespace, move |_| {
            match broken.load(Ordering::Relaxed) {
                true => Script::Exit { after_ms: 5, code: 1 },
                false => Script::Train { unit_ms: 5 },
            }
        });
        let mut spec = random(&json!({ "random": { "maxTrials": 2 } }));
        spec["maxRestarts"] = json!(0);
        ns.apply("failing", spec);
        ns.wait_for("failing", &[Phase::Failed]).await;
        is_broken.store(false, Ordering::Relaxed);
        let request = |reopen: Value| ns.patch("failing", &json!({ "spec": { "reopen": reopen } }));
        request(json!({ "number": 2, "trials": "failed" })).unwrap();
        // The API server refuses to change or remove a request.
        for reopen in [json!({ "number": 1 }), json!({ "trials": "stopped" }), Value::Null] {
            let error = request(reopen).unwrap_err();
            assert!(error.contains("request with a greater number"), "{error}");
        }
        let ended = wait_for_end(&ns, "failing", 2).await;
        for trial in ns.trials_of("failing").await {
            let status = trial.status.as_ref().unwrap();
            let numbers: Vec<u32> = status.attempts.iter().map(|attempt| attempt.number).collect();
            assert_eq!((numbers, status.restarts), (vec![0, 1], 0), "{status:#?}");
            let [Fact::Closed(_), Fact::Reopened(reopened), Fact::Result(_), Fact::Closed(_)] =
                &status.facts[..]
            else {
                panic!("{status:#?}");
            };
            assert_eq!(reopened.attempt, 1);
            let failed = condition::find(&status.conditions, "Failed").unwrap();
            assert_eq!(failed.status, ConditionStatus::False, "{status:#?}");
        }
        let log = ended.status.unwrap().log;
        let is_request = |event: &LogEvent| matches!(event, LogEvent::Reopened(_));
        assert_eq!(log.iter().filter(|entry| is_request(&entry.event)).count(), 1, "{log:#?}");
        assert_eq!(kubelet.started().len(), 4);
        // The request has taken effect, and another operator does not repeat it.
        drop(operator);
        let mut second = ns.operator("b", operator_port());
        second.wait_ready(&ns);
        request(json!({ "number": 3, "trials": "failed" })).unwrap();
        let end = Instant::now() + stoker_test_cluster::PATIENCE;
        while ns.experiment("failing").await.status.unwrap().log.len() < log.len() + 1 {
            assert!(Instant::now() < end, "{}", ns.logs());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        assert_eq!(kubelet.started().len(), 4);
        assert_eq!(ns.experiment("failing").await.status.unwrap().phase, Phase::Completed);
    });
}

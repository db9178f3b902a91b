//! Edits and limits of a search.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use stoker_api::experiment::{Experiment, Phase};

use crate::kubelet::{Kubelet, Script};
use crate::setup::{TestNamespace, free_ports, runtime};

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

/// Waits at most two minutes until an experiment has completed with this number of trials.
async fn wait_for_end(ns: &TestNamespace, name: &str, trials: u32) -> Experiment {
    let end = Instant::now() + Duration::from_secs(120);
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

#[test]
fn edited_search_continues_after_its_end() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("edits").await;
        let mut operator = ns.operator("a", free_ports());
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
        ] {
            let error = edit(searcher).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
        edit(json!({ "random": { "maxTrials": 5 } })).unwrap();
        let ended = wait_for_end(&ns, "edited", 5).await;
        // The log has the beginning and the edit.
        let log = ended.status.unwrap().log;
        assert_eq!(log.len(), 2, "{log:#?}");
        let indexes = ns.trials_of("edited").await.into_iter().map(|trial| trial.spec.index);
        let mut indexes: Vec<u32> = indexes.collect();
        indexes.sort_unstable();
        assert_eq!(indexes, [0, 1, 2, 3, 4]);
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
        let mut operator = ns.operator("a", free_ports());
        operator.wait_ready(&ns);
        let _kubelet = Kubelet::start(&ns.client, &ns.namespace, |_| Script::Train { unit_ms: 5 });
        let searcher = json!({
            "random": { "maxTrials": 50, "maxConcurrentTrials": 2 },
            "limits": { "units": 12 },
        });
        ns.apply("limited", random(&searcher));
        let ended = ns.wait_for("limited", &[Phase::Completed, Phase::Failed], 120).await;
        let status = ended.status.unwrap();
        assert_eq!(status.phase, Phase::Completed, "{status:#?}");
        // Three trials have four units each. Few others had begun.
        assert!((3..10).contains(&status.trials_created), "{status:#?}");
        assert_eq!(status.trials_closed, status.trials_created);
        let completed = status.conditions.iter().find(|condition| condition.type_ == "Completed");
        assert_eq!(completed.unwrap().reason, "LimitReached");
        let message = status.message.unwrap();
        assert!(message.contains("units") && message.contains("12"), "{message}");
    });
}

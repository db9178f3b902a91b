//! Writes that the API server refuses. The experiment shows the message, and independent writes
//! continue.

use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::events::v1::Event;
use kube::api::{Patch, PatchParams};
use kube::{Api, ResourceExt as _};
use serde_json::{Value, json};
use stoker_api::condition::{ConditionStatus, find};
use stoker_api::decisions::LogEvent;
use stoker_api::experiment::{ExperimentStatus, Phase};

use crate::flow::grid;
use crate::kubelet::{Kubelet, Script};
use crate::proxy::{Fault, Proxy};
use crate::setup::{TestNamespace, client_of, merge, operator_port, runtime};
use crate::writes;

/// Waits until the status of an experiment satisfies `is_wanted`, and returns it.
pub(crate) async fn wait_status(
    ns: &TestNamespace,
    name: &str,
    is_wanted: impl Fn(&ExperimentStatus) -> bool,
) -> ExperimentStatus {
    let end = Instant::now() + stoker_test_cluster::PATIENCE;
    loop {
        let status = ns.experiment(name).await.status.unwrap_or_default();
        if is_wanted(&status) {
            return status;
        }
        assert!(Instant::now() < end, "{status:#?}\n{}", ns.logs());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Reason and message of the condition `Refused`, if it is true.
pub(crate) fn refused(status: &ExperimentStatus) -> Option<(&str, &str)> {
    let condition = find(&status.conditions, "Refused")?;
    let is_true = condition.status == ConditionStatus::True;
    is_true.then_some((condition.reason.as_str(), condition.message.as_str()))
}

/// Waits for an event on an experiment with this reason and text.
pub(crate) async fn wait_event(ns: &TestNamespace, name: &str, reason: &str, words: &str) {
    let events: Api<Event> = Api::namespaced(ns.client.clone(), &ns.namespace);
    let end = Instant::now() + stoker_test_cluster::PATIENCE;
    loop {
        let all = events.list(&Default::default()).await.unwrap().items;
        let of_experiment = all.iter().filter(|event| {
            let object = event.regarding.clone().unwrap_or_default();
            (object.kind.as_deref(), object.name.as_deref()) == (Some("Experiment"), Some(name))
        });
        let exists = of_experiment.clone().any(|event| {
            event.reason.as_deref() == Some(reason)
                && event.note.as_ref().is_some_and(|note| note.contains(words))
        });
        if exists {
            return;
        }
        assert!(Instant::now() < end, "{:#?}", of_experiment.collect::<Vec<_>>());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Waits until this many pods were started.
pub(crate) async fn wait_started(ns: &TestNamespace, kubelet: &Kubelet, num: usize) {
    let end = Instant::now() + stoker_test_cluster::PATIENCE;
    while kubelet.started().len() < num {
        assert!(Instant::now() < end, "{}", ns.logs());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn quota(ns: &TestNamespace, name: &str, resource: &str, hard: &str) {
    let quota = json!({
        "apiVersion": "v1", "kind": "ResourceQuota",
        "metadata": { "name": name, "namespace": ns.namespace },
        "spec": { "hard": { resource: hard } },
    });
    ns.plane.apply(&quota.to_string()).unwrap();
    let get = ["get", "resourcequota", name, "-n", &ns.namespace, "-o", "json"];
    stoker_test_cluster::wait_until("the quota is counted", || {
        let text = ns.plane.kubectl(&get).map_err(|error| error.to_string())?;
        let quota: serde_json::Value = serde_json::from_str(&text).unwrap();
        let is_counted = quota["status"]["hard"][resource] == hard;
        if is_counted { Ok(()) } else { Err(text) }
    })
    .unwrap();
}

fn delete_quota(ns: &TestNamespace, name: &str) {
    ns.plane.kubectl(&["delete", "resourcequota", name, "-n", &ns.namespace]).unwrap();
}

#[test]
fn refused_pod_is_reported_on_its_experiment() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("refused-pod").await;
        quota(&ns, "slots", "requests.test.stoker/slot", "0");
        let mut operator = ns.operator("a", operator_port());
        operator.wait_ready(&ns);
        let _kubelet = Kubelet::start(&ns.client, &ns.namespace, |_| Script::Train { unit_ms: 10 });
        let mut spec = grid(1, 2, 1);
        merge(&mut spec, &json!({ "resources": { "slotResource": "test.stoker/slot" } }));
        ns.apply("grid", spec);
        let status = wait_status(&ns, "grid", |status| refused(status).is_some()).await;
        let (reason, message) = refused(&status).unwrap();
        assert_eq!(reason, "QuotaExceeded");
        assert!(message.contains("exceeded quota: slots"), "{message}");
        assert_eq!(status.message.as_deref(), Some(message));
        wait_event(&ns, "grid", "QuotaExceeded", "exceeded quota: slots").await;
        delete_quota(&ns, "slots");
        let status = ns.wait_for("grid", &[Phase::Completed]).await.status.unwrap();
        assert_eq!(refused(&status), None, "{status:#?}");
    });
}

#[test]
fn search_waits_for_the_experiment_with_prior_trials() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("prior-trials").await;
        let mut operator = ns.operator("a", operator_port());
        operator.wait_ready(&ns);
        let _kubelet = Kubelet::start(&ns.client, &ns.namespace, |_| Script::Train { unit_ms: 10 });
        let mut spec = grid(3, 1, 1);
        spec["state"] = json!("paused");
        ns.apply("first", spec.clone());
        ns.wait_for("first", &[Phase::Paused]).await;
        spec["state"] = json!("active");
        spec["searcher"]["grid"] = json!(null);
        spec["searcher"]["random"] = json!({ "maxTrials": 4 });
        for (name, earlier, words) in [
            ("misspelled", "frist", "is `frist`: namespace prior-trials has no such experiment"),
            ("second", "first", "is `first`, which is Paused; the search begins when it has ended"),
        ] {
            spec["searcher"]["priorTrials"] = json!({ "experiments": [earlier] });
            ns.apply(name, spec.clone());
            let status = wait_status(&ns, name, |status| refused(status).is_some()).await;
            let (reason, message) = refused(&status).unwrap();
            assert_eq!((reason, status.trials_created), ("PriorTrials", 0));
            assert!(message.contains(words), "{message}");
        }

        ns.patch("first", &json!({ "spec": { "state": "active" } })).unwrap();
        let first = ns.wait_for("first", &[Phase::Completed]).await;
        let second = ns.wait_for("second", &[Phase::Completed]).await.status.unwrap();
        assert_eq!((second.trials_created, refused(&second)), (4, None));
        let LogEvent::Began(began) = &second.log[0].event else { panic!("{second:#?}") };
        let best = first.status.unwrap().best.unwrap();
        let prior: Vec<_> = began.prior_trials.iter().map(|trial| &trial.hyperparameters).collect();
        let trials = ns.trials_of("second").await;
        let trained: Vec<_> = trials.iter().map(|trial| &trial.spec.hyperparameters).collect();
        assert_eq!(began.prior_trials[0].name, format!("first-{}", best.index));
        assert_eq!((prior.len(), prior), (3, trained[..3].to_vec()));
    });
}

#[test]
fn refused_trial_is_reported_on_its_experiment() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("refused-trial").await;
        let proxy = Proxy::start(client_of(&ns.kubeconfig).await, ns.folder.path()).await;
        const WORDS: &str = "trials.stoker.dev \"grid-0\" is forbidden: exceeded quota: few";
        proxy.set_rule(|name| {
            let is_create =
                name == "POST /apis/stoker.dev/v1alpha1/namespaces/refused-trial/trials";
            is_create.then_some(Fault::Refused(403, "Forbidden", WORDS))
        });
        let mut operator = ns.operator_by("a", operator_port(), &proxy.kubeconfig, &[]);
        operator.wait_ready(&ns);
        let _kubelet = Kubelet::start(&ns.client, &ns.namespace, |_| Script::Train { unit_ms: 10 });
        ns.apply("grid", grid(2, 2, 1));
        let status = wait_status(&ns, "grid", |status| refused(status).is_some()).await;
        let (reason, message) = refused(&status).unwrap();
        assert_eq!(reason, "QuotaExceeded");
        assert!(message.contains(WORDS), "{message}");
        // Trials that were not created are not counted.
        assert_eq!((status.trials_created, status.phase), (0, Phase::Pending));
        wait_event(&ns, "grid", "QuotaExceeded", WORDS).await;
        proxy.clear_rule();
        let status = ns.wait_for("grid", &[Phase::Completed]).await.status.unwrap();
        assert_eq!((status.trials_created, refused(&status)), (2, None));
    });
}

#[test]
fn refused_clean_up_is_reported() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("refused-clean-up").await;
        let mut operator = ns.operator("a", operator_port());
        operator.wait_ready(&ns);
        let kubelet = Kubelet::start(&ns.client, &ns.namespace, |_| Script::Hang);
        // The clean-up pod has the experiment's limits, so a quota on limits applies to it too.
        let mut spec = grid(1, 2, 1);
        merge(&mut spec, &json!({ "resources": { "limits": { "cpu": "2" } } }));
        ns.apply("grid", spec);
        wait_started(&ns, &kubelet, 1).await;
        quota(&ns, "limits", "limits.cpu", "1");
        ns.patch("grid", &json!({ "spec": { "state": "killed" } })).unwrap();
        let status = wait_status(&ns, "grid", |status| {
            status.phase == Phase::Cancelled && refused(status).is_some()
        });
        let status = status.await;
        let (reason, message) = refused(&status).unwrap();
        assert_eq!(reason, "QuotaExceeded");
        assert!(
            message.contains("grid-cleanup-0") && message.contains("limits.cpu=2"),
            "{message}"
        );
        wait_event(&ns, "grid", "QuotaExceeded", "grid-cleanup-0").await;
    });
}

#[test]
fn taken_name_of_a_clean_up_pod_is_reported() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("taken-clean-up").await;
        let mut operator = ns.operator("a", operator_port());
        operator.wait_ready(&ns);
        let kubelet = Kubelet::start(&ns.client, &ns.namespace, |_| Script::Hang);
        ns.apply("grid", grid(1, 2, 1));
        wait_started(&ns, &kubelet, 1).await;
        let other = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": { "name": "grid-cleanup-0", "namespace": ns.namespace },
            "spec": {
                "schedulingGates": [{ "name": "test.stoker/other" }],
                "containers": [{ "name": "other", "image": "other" }],
            },
        });
        ns.plane.apply(&other.to_string()).unwrap();
        ns.patch("grid", &json!({ "spec": { "state": "killed" } })).unwrap();
        let status = wait_status(&ns, "grid", |status| refused(status).is_some()).await;
        let (reason, message) = refused(&status).unwrap();
        assert_eq!(reason, "NameTaken");
        assert!(message.contains("grid-cleanup-0"), "{message}");
    });
}

/// The storage's Secret is missing. Later, a sidecar runs on after the program.
#[test]
fn clean_up_that_cannot_start_is_reported() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("stuck-clean-up").await;
        let mut operator =
            ns.operator_with("a", operator_port(), &["--pull-deadline-seconds", "1"]);
        operator.wait_ready(&ns);
        let kubelet = Kubelet::start(&ns.client, &ns.namespace, |_| Script::Hang);
        ns.apply("grid", grid(1, 2, 1));
        wait_started(&ns, &kubelet, 1).await;
        // The pod of the trial still ends. The clean-up pod does not start.
        drop(kubelet);
        ns.patch("grid", &json!({ "spec": { "state": "killed" } })).unwrap();
        let pods: Api<Pod> = Api::namespaced(ns.client.clone(), &ns.namespace);
        let set_state = async |phase: &str, state: Value| {
            let trainer = json!({
                "name": "trainer", "image": "", "imageID": "", "ready": false, "restartCount": 0,
                "state": state,
            });
            let patch = json!({ "status": { "phase": phase, "containerStatuses": [trainer] } });
            let (parameters, patch) = (PatchParams::default(), Patch::Merge(&patch));
            let end = Instant::now() + stoker_test_cluster::PATIENCE;
            while let Err(error) = pods.patch_status("grid-cleanup-0", &parameters, &patch).await {
                assert!(Instant::now() < end, "{error}\n{}", ns.logs());
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        const REASON: &str = "CreateContainerConfigError";
        let waiting = json!({ "reason": REASON, "message": "secret \"s3\" not found" });
        set_state("Pending", json!({ "waiting": waiting })).await;
        let status = wait_status(&ns, "grid", |status| refused(status).is_some()).await;
        let (reason, message) = refused(&status).unwrap();
        assert_eq!(reason, REASON);
        assert!(
            message.contains("grid-cleanup-0") && message.contains("secret \"s3\" not found"),
            "{message}"
        );
        wait_event(&ns, "grid", REASON, "grid-cleanup-0").await;
        set_state("Running", json!({ "running": {} })).await;
        wait_status(&ns, "grid", |status| refused(status).is_none()).await;
        set_state("Running", json!({ "terminated": { "exitCode": 0 } })).await;
        wait_status(&ns, "grid", |status| status.cleaned_up).await;
    });
}

/// All writes of one trial's spec fail.
#[test]
fn kill_reaches_trials_beside_a_failing_one() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("kill-first").await;
        let proxy = Proxy::start(client_of(&ns.kubeconfig).await, ns.folder.path()).await;
        let mut operator = ns.operator_by("a", operator_port(), &proxy.kubeconfig, &[]);
        operator.wait_ready(&ns);
        let kubelet = Kubelet::start(&ns.client, &ns.namespace, |_| Script::Hang);
        ns.apply("grid", grid(3, 5, 1));
        wait_started(&ns, &kubelet, 3).await;
        proxy.set_rule(|name| {
            let is_spec = name.ends_with("/trials/grid-0") && !name.starts_with("POST");
            is_spec.then_some(Fault::Refused(409, "Conflict", "the object has been modified"))
        });
        ns.patch("grid", &json!({ "spec": { "state": "killed" } })).unwrap();
        let status = wait_status(&ns, "grid", |status| status.trials_closed == 2).await;
        assert!(!status.phase.is_terminal(), "{status:#?}");
        assert_eq!(status.observed_generation, 2);
        let first = &ns.trials_of("grid").await[0];
        assert!(first.status.as_ref().is_some_and(|status| !status.phase.is_terminal()));
        proxy.clear_rule();
        ns.wait_for("grid", &[Phase::Cancelled]).await;
    });
}

/// The end of the first trial cannot be ordered by a grant, so nothing that follows from it is
/// written.
#[test]
fn no_trial_follows_from_an_unrecorded_fact() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("grant-first").await;
        let proxy = Proxy::start(client_of(&ns.kubeconfig).await, ns.folder.path()).await;
        proxy.set_rule(|name| {
            let is_spec = name.ends_with("/trials/grid-0") && !name.starts_with("POST");
            is_spec.then_some(Fault::Refused(500, "InternalError", "no space left"))
        });
        let mut operator = ns.operator_by("a", operator_port(), &proxy.kubeconfig, &[]);
        operator.wait_ready(&ns);
        // The first trial exits without a report, so only the operator records its end.
        let _kubelet = Kubelet::start(&ns.client, &ns.namespace, |pod| {
            match pod.name_any().starts_with("grid-0-") {
                true => Script::Exit { after_ms: 10, code: 0 },
                false => Script::Train { unit_ms: 10 },
            }
        });
        let mut spec = grid(2, 2, 1);
        merge(&mut spec, &json!({ "searcher": { "grid": { "maxConcurrentTrials": 1 } } }));
        ns.apply("grid", spec);
        // The status is written nevertheless.
        wait_status(&ns, "grid", |status| status.trials_closed == 1).await;
        proxy.wait_faults(3).await;
        let status = ns.experiment("grid").await.status.unwrap();
        assert_eq!((status.trials_created, status.phase), (1, Phase::Pending));
        assert_eq!(ns.trials_of("grid").await.len(), 1);
        proxy.clear_rule();
        let status = ns.wait_for("grid", &[Phase::Completed]).await.status.unwrap();
        assert_eq!(status.trials_created, 2);
        for trial in ns.trials_of("grid").await {
            assert!(writes::has_placed_results(&trial), "{trial:?}");
        }
    });
}

//! Pods and trials that the API server rejects as malformed. The first ones fail their experiment;
//! later ones are retried, because a change in the cluster causes the rejection.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, PostParams};
use kube::{Api, ResourceExt as _};
use serde_json::json;
use stoker_api::experiment::{Experiment, Phase};
use stoker_api::trial::DesiredTrialState;

use crate::flow::grid;
use crate::kubelet::{Kubelet, Script};
use crate::proxy::{Fault, Proxy};
use crate::refusals::{refused, wait_event, wait_started, wait_status};
use crate::setup::{TestNamespace, client_of, merge, operator_port, runtime};

/// The API server accepts two trials, of which one runs, and rejects the third as malformed.
#[test]
fn trial_malformed_by_the_cluster_is_retried() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("trial-later").await;
        let proxy = Proxy::start(client_of(&ns.kubeconfig).await, ns.folder.path()).await;
        const WORDS: &str = "Trial.stoker.dev \"grid-2\" is invalid: spec.index: Invalid value";
        let num_created = AtomicU32::new(0);
        proxy.set_rule(move |name| {
            let is_create = name == "POST /apis/stoker.dev/v1alpha1/namespaces/trial-later/trials";
            let is_later = is_create && num_created.fetch_add(1, Ordering::Relaxed) >= 2;
            is_later.then_some(Fault::Refused(422, "Invalid", WORDS))
        });
        let mut operator = ns.operator_by("a", operator_port(), &proxy.kubeconfig, &[]);
        operator.wait_ready(&ns);
        let _kubelet = Kubelet::start(&ns.client, &ns.namespace, |pod| {
            match pod.name_any().starts_with("grid-1-") {
                true => Script::Hang,
                false => Script::Train { unit_ms: 10 },
            }
        });
        let mut spec = grid(3, 2, 1);
        merge(&mut spec, &json!({ "searcher": { "grid": { "maxConcurrentTrials": 2 } } }));
        ns.apply("grid", spec);
        let status = wait_status(&ns, "grid", |status| refused(status).is_some()).await;
        let (reason, message) = refused(&status).unwrap();
        assert_eq!((reason, status.trials_created), ("AdmissionRefused", 2), "{status:#?}");
        assert!(message.contains(WORDS) && !status.phase.is_terminal(), "{status:#?}");
        proxy.clear_rule();
        wait_status(&ns, "grid", |status| status.trials_closed == 2).await;
        let trials = ns.trials_of("grid").await;
        assert_eq!((trials.len(), trials[1].spec.desired_state), (3, DesiredTrialState::Run));
    });
}

#[test]
fn malformed_pod_fails_its_experiment_at_once() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("malformed").await;
        let mut operator = ns.operator("a", operator_port());
        operator.wait_ready(&ns);
        let kubelet = Kubelet::start(&ns.client, &ns.namespace, |_| Script::Train { unit_ms: 10 });
        let overrides = |value| {
            let mut spec = grid(2, 2, 1);
            merge(&mut spec, &json!({ "podOverrides": value }));
            spec
        };
        ns.apply("odd", overrides(json!({ "spec": { "dnsPolicy": "Sometimes" } })));
        ns.apply("typo", overrides(json!({ "spec": { "hostNetwrok": true } })));
        let odd: Experiment = ns.wait_for("odd", &[Phase::Failed]).await;
        let status = odd.status.unwrap();
        let message = status.message.clone().unwrap();
        assert!(message.contains("spec.dnsPolicy"), "{message}");
        assert_eq!(refused(&status).map(|(reason, _)| reason), Some("PodInvalid"), "{status:#?}");
        wait_event(&ns, "odd", "PodInvalid", "spec.dnsPolicy").await;
        wait_event(&ns, "odd", "Failed", "spec.dnsPolicy").await;
        wait_status(&ns, "odd", |status| status.cleaned_up).await;
        for trial in ns.trials_of("odd").await {
            let status = trial.status.unwrap();
            assert!(status.phase.is_terminal() && status.attempts.len() <= 1, "{status:#?}");
        }
        let typo = ns.wait_for("typo", &[Phase::Failed]).await.status.unwrap();
        let message = typo.message.unwrap();
        assert!(message.contains("spec.podOverrides.spec.hostNetwrok"), "{message}");
        assert!(ns.trials_of("typo").await.is_empty());
        assert_eq!(kubelet.started(), Vec::<String>::new());
    });
}

/// Waits until the API server rejects a pod that requests 4 GiB.
async fn wait_large_pods_are_rejected(ns: &TestNamespace) {
    let pods: Api<Pod> = Api::namespaced(ns.client.clone(), &ns.namespace);
    let large = json!({ "metadata": { "name": "probe" }, "spec": { "containers": [{
        "name": "probe", "image": "probe",
        "resources": { "requests": { "memory": "4Gi" } },
    }] } });
    let large: Pod = serde_json::from_value(large).unwrap();
    let dry_run = PostParams { dry_run: true, ..PostParams::default() };
    let end = Instant::now() + stoker_test_cluster::PATIENCE;
    loop {
        match pods.create(&dry_run, &large).await {
            Err(kube::Error::Api(status)) if status.code == 422 => return,
            other => assert!(Instant::now() < end, "{other:?}"),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// A new LimitRange sets a limit below the request, which makes later pods malformed.
#[test]
fn pods_malformed_by_the_cluster_are_retried() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("malformed-later").await;
        let mut operator = ns.operator("a", operator_port());
        operator.wait_ready(&ns);
        let kubelet = Kubelet::start(&ns.client, &ns.namespace, |pod| {
            match pod.name_any().contains("-a0-") {
                true => Script::Hang,
                false => Script::Train { unit_ms: 10 },
            }
        });
        let mut spec = grid(1, 2, 1);
        merge(&mut spec, &json!({ "resources": { "requests": { "memory": "4Gi" } } }));
        ns.apply("grid", spec);
        wait_started(&ns, &kubelet, 1).await;
        let limits = json!({
            "apiVersion": "v1", "kind": "LimitRange",
            "metadata": { "name": "small", "namespace": ns.namespace },
            "spec": { "limits": [{ "type": "Container", "default": { "memory": "2Gi" } }] },
        });
        ns.plane.apply(&limits.to_string()).unwrap();
        wait_large_pods_are_rejected(&ns).await;
        let pods: Api<Pod> = Api::namespaced(ns.client.clone(), &ns.namespace);
        let at_once = DeleteParams::default().grace_period(0);
        pods.delete(&kubelet.started()[0], &at_once).await.unwrap();
        let status = wait_status(&ns, "grid", |status| refused(status).is_some()).await;
        let (reason, message) = refused(&status).unwrap();
        assert_eq!((reason, status.phase), ("AdmissionRefused", Phase::Pending), "{status:#?}");
        assert!(message.contains("must be less than or equal to memory limit"), "{message}");
        ns.plane.kubectl(&["delete", "limitrange", "small", "-n", &ns.namespace]).unwrap();
        ns.wait_for("grid", &[Phase::Completed]).await;
    });
}

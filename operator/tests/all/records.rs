//! Records that the operator hands to pods for the storage.

use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use stoker_api::contract::{
    CONTRACT_VERSION, Cleanup, Report, ReportEvent, ReportResponse, StartRecords, StoredRecord,
};
use stoker_api::experiment::{Experiment, Phase};
use stoker_api::names::{ANNOTATION_TRIAL_CONFIG, LABEL_ATTEMPT};
use stoker_api::packed::unpack;
use stoker_api::trial::{AttemptEnd, CloseCause, Fact, Trial};

use crate::flow::grid;
use crate::kubelet::{Kubelet, Script};
use crate::setup::{TestNamespace, operator_port, runtime};
use crate::trainer::{ReportConnection, config_of, token};

/// Waits until a kubelet has observed a pod, and returns it.
async fn pod(ns: &TestNamespace, kubelet: &Kubelet, name: &str) -> Pod {
    let end = Instant::now() + stoker_test_cluster::PATIENCE;
    loop {
        if let Some(pod) = kubelet.pod(name) {
            return pod;
        }
        assert!(Instant::now() < end, "no pod {name}\n{}", ns.logs());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Returns the records in the configuration of an attempt.
fn start_records(pod: &Pod) -> (Experiment, Trial) {
    let records: StartRecords = unpack(&config_of(pod).records.unwrap()).unwrap().remove(0);
    let experiment = serde_json::from_value(records.experiment.unwrap()).unwrap();
    (experiment, serde_json::from_value(records.trial).unwrap())
}

#[test]
fn pods_get_the_records_of_their_experiment() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("records").await;
        let mut operator = ns.operator("a", operator_port());
        operator.wait_ready(&ns);
        let script = |pod: &Pod| match pod.labels()[LABEL_ATTEMPT].as_str() {
            "0" => Script::Exit { after_ms: 10, code: 1 },
            _ => Script::Train { unit_ms: 10 },
        };
        let kubelet = Kubelet::start(&ns.client, "records", script);
        ns.apply("grid", grid(2, 2, 1));
        let (experiment, trial) = start_records(&pod(&ns, &kubelet, "grid-0-a0-r0").await);
        assert_eq!(experiment.metadata.name.as_deref(), Some("grid"));
        assert_eq!(trial.status.unwrap().attempts.len(), 1);
        let (_, trial) = start_records(&pod(&ns, &kubelet, "grid-0-a1-r0").await);
        let attempts = trial.status.unwrap().attempts;
        assert_eq!(attempts[0].end, Some(AttemptEnd::UserError), "{attempts:?}");
        assert_eq!((attempts.len(), attempts[1].end), (2, None));

        let cleanup = pod(&ns, &kubelet, "grid-cleanup-0").await;
        let cleanup: Cleanup =
            serde_json::from_str(&cleanup.annotations()[ANNOTATION_TRIAL_CONFIG]).unwrap();
        let records: Vec<StoredRecord> = unpack(&cleanup.records.unwrap()).unwrap();
        let ended = ns.wait_for("grid", &[Phase::Completed]).await;
        let storage = ended.status.unwrap().storage.unwrap();
        let paths: Vec<&str> = records.iter().map(|record| record.path.as_str()).collect();
        let expected = ["/trials/0/record.json", "/trials/1/record.json", "/record.json"];
        assert_eq!(paths, expected.map(|end| format!("{}{end}", storage.path)));
        for record in &records[..2] {
            let trial: Trial = serde_json::from_value(record.record.clone()).unwrap();
            let status = trial.status.unwrap();
            assert_eq!((status.phase, status.attempts.len()), (Phase::Completed, 2));
            let results = status.facts.iter().filter(|fact| matches!(fact, Fact::Result(_)));
            assert_eq!(results.count(), 1, "{:?}", status.facts);
            let closed = |fact: &Fact| {
                matches!(fact, Fact::Closed(closed) if closed.cause == CloseCause::Completed)
            };
            assert!(status.facts.iter().any(closed), "{:?}", status.facts);
        }
        let experiment: Experiment = serde_json::from_value(records[2].record.clone()).unwrap();
        let status = experiment.status.unwrap();
        assert_eq!((status.phase, status.cleaned_up), (Phase::Completed, true));
        assert!(status.best.is_some());
    });
}

#[test]
fn report_responses_contain_the_record_on_request() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("responses").await;
        let mut operator = ns.operator("a", operator_port());
        operator.wait_ready(&ns);
        let kubelet = Kubelet::start(&ns.client, "responses", |_| Script::Hang);
        ns.apply("grid", grid(1, 2, 1));
        let pod = pod(&ns, &kubelet, "grid-0-a0-r0").await;
        let token = token(&ns.client, "responses", &pod).await.unwrap();
        let connection = ReportConnection::new(&config_of(&pod), token);
        let checkpointed = ReportEvent::Checkpointed {
            name: "000000000001-0".to_owned(),
            manifest_sha256: "0".repeat(64),
            bytes: 1,
            metric: None,
        };
        let progress = ReportEvent::Progress { batches_total: 2, activity: None };
        for (event, has_record) in [(checkpointed, true), (progress, false)] {
            let report = Report { version: CONTRACT_VERSION, attempt: 0, batches: 1, event };
            let end = Instant::now() + stoker_test_cluster::PATIENCE;
            let response = loop {
                // The pod may not run yet in the operator's cache.
                if let Some(response) = connection.post_for_record(&report).await {
                    break response;
                }
                assert!(Instant::now() < end, "no response\n{}", ns.logs());
                tokio::time::sleep(Duration::from_millis(100)).await;
            };
            match response {
                ReportResponse::Recorded { record, .. } => {
                    let trial: Trial = serde_json::from_value(record).unwrap();
                    assert!(has_record, "heartbeats contain no record");
                    assert_eq!(trial.status.unwrap().checkpoints.len(), 1);
                }
                ReportResponse::Plain(directive) => assert!(!has_record, "{directive:?}"),
            }
        }
    });
}

//! Inference jobs from creation to end: failures, an operator that dies at its writes, pause,
//! cancellation.

mod failures;

use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt as _};
use serde_json::{Value, json};
use stoker_api::condition::{ConditionStatus, find};
use stoker_api::experiment::Phase;
use stoker_api::inference::{InferenceJob, InferenceStatus};
use stoker_api::names::LABEL_JOB;
use tokio::task::block_in_place;

use crate::kubelet::{Kubelet, Script};
use crate::operator_process::Operator;
use crate::proxy::{KillTime, Proxy};
use crate::setup::{TestNamespace, client_of, merge, operator_port, runtime};
use crate::trainer::{ReportConnection, config_of, token};
use crate::worker::Work;

/// Spec of a job with this number of slots.
pub(crate) fn job(slots: u32) -> Value {
    json!({
        "entrypoint": { "command": ["stoker-trainer", "iris-predict"] },
        "input": { "url": "s3://data/rows.jsonl" },
        "resources": { "slots": slots },
        "maxRestarts": 1,
    })
}

pub(crate) fn is_of_job(pod: &Pod) -> bool {
    pod.labels().contains_key(LABEL_JOB)
}

pub(crate) fn apply_job(ns: &TestNamespace, name: &str, spec: Value) {
    let object = json!({
        "apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceJob",
        "metadata": { "name": name, "namespace": ns.namespace }, "spec": spec,
    });
    block_in_place(|| ns.plane.apply(&object.to_string())).unwrap();
}

async fn status(ns: &TestNamespace, name: &str) -> InferenceStatus {
    let api: Api<InferenceJob> = Api::namespaced(ns.client.clone(), &ns.namespace);
    api.get(name).await.unwrap().status.unwrap_or_default()
}

/// Waits until a job's status satisfies `is_expected`, and returns it.
async fn wait_for_status(
    ns: &TestNamespace,
    name: &str,
    what: &str,
    is_expected: impl Fn(&InferenceStatus) -> bool,
) -> InferenceStatus {
    let end = Instant::now() + stoker_test_cluster::PATIENCE;
    loop {
        let current = status(ns, name).await;
        if is_expected(&current) {
            return current;
        }
        let late = Instant::now() > end;
        assert!(!late, "{name} is not {what}: {current:#?}\n{}", ns.logs());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

pub(crate) async fn wait_for_job(
    ns: &TestNamespace,
    name: &str,
    phases: &[Phase],
) -> InferenceStatus {
    let is_expected = |status: &InferenceStatus| phases.contains(&status.phase);
    wait_for_status(ns, name, &format!("{phases:?}"), is_expected).await
}

fn set_state(ns: &TestNamespace, name: &str, state: &str) -> Result<String, String> {
    patch(ns, name, &json!({ "spec": { "state": state } }))
}

fn patch(ns: &TestNamespace, name: &str, patch: &Value) -> Result<String, String> {
    let patch = patch.to_string();
    let space = ns.namespace.as_str();
    let arguments = ["patch", "inferencejob", name, "-n", space, "--type=merge", "-p", &patch];
    ns.plane.kubectl(&arguments).map_err(|error| error.to_string())
}

const QUICK: Script = Script::Work(Work { shards: 6, shard_ms: 20 });

#[test]
fn job_is_planned_worked_and_finished() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("jobs").await;
        let label = "pod-security.kubernetes.io/enforce=restricted";
        ns.plane.kubectl(&["label", "namespace", "jobs", label]).unwrap();
        let mut operator = ns.operator("a", operator_port());
        operator.wait_ready(&ns);
        let kubelet = Kubelet::start(&ns.client, &ns.namespace, |_| QUICK);
        apply_job(&ns, "species", job(3));
        let ended = wait_for_job(&ns, "species", &[Phase::Completed, Phase::Failed]).await;
        assert_eq!(ended.phase, Phase::Completed, "{ended:#?}");
        assert_eq!((ended.rows, ended.rows_total, ended.rejected), (60, 60, 0), "{ended:#?}");
        assert_eq!((ended.attempts, ended.restarts, ended.progress_percent), (5, 0, 100));
        assert!(ended.started_at <= ended.ended_at && ended.started_at.is_some(), "{ended:#?}");
        let output = ended.output.as_deref().unwrap_or_default();
        assert!(output.starts_with("memory:///jobs/species-") && output.ends_with("/output"));
        for type_ in ["Valid", "Completed"] {
            let condition = find(&ended.conditions, type_).unwrap();
            assert_eq!(condition.status, ConditionStatus::True, "{condition:?}");
            assert_eq!(condition.observed_generation, ended.observed_generation);
        }
        let mut started = kubelet.started();
        started.sort();
        let names = ["a0-plan", "a1-w0", "a2-w1", "a3-w2", "a4-finish"];
        assert_eq!(started, names.map(|name| format!("species-{name}")));
        assert_eq!(kubelet.outputs().num_done(), 6);
        let wait = ["wait", "inferencejob/species", "-n", "jobs", "--for=condition=Completed"];
        ns.plane.kubectl(&[&wait[..], &["--timeout=5s"]].concat()).unwrap();
        let columns = ns.plane.kubectl(&["get", "stoker", "-n", "jobs"]).unwrap();
        assert!(columns.contains("REJECTED") && columns.contains("Completed"), "{columns}");
        let metrics = operator.metrics();
        assert!(metrics.contains("stoker_jobs_ended_total{kind=\"completed\"} 1"), "{metrics}");
        assert!(metrics.contains("stoker_attempts_ended_total{kind=\"completed\"} 5"));
        // The job's pods are deleted with it.
        ns.plane.kubectl(&["delete", "inferencejob", "species", "-n", "jobs"]).unwrap();
        stoker_test_cluster::wait_until("the job's pods are deleted", || {
            match ns.plane.kubectl(&["get", "pods", "-n", "jobs", "-o", "name"]) {
                Ok(text) if text.trim().is_empty() => Ok(()),
                other => Err(format!("{other:?}")),
            }
        })
        .unwrap();
    });
}

#[test]
fn invalid_job_reports_all_errors_and_is_immutable() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("job-invalid").await;
        let mut operator = ns.operator("a", operator_port());
        operator.wait_ready(&ns);
        let _kubelet = Kubelet::start(&ns.client, &ns.namespace, |_| Script::Hang);
        let mut bad = job(1);
        merge(
            &mut bad,
            &json!({ "output": { "url": "predictions" }, "checkpoint": { "trial": "iris" } }),
        );
        apply_job(&ns, "bad", bad);
        let failed = wait_for_job(&ns, "bad", &[Phase::Failed]).await;
        let valid = find(&failed.conditions, "Valid").unwrap();
        assert_eq!((valid.status, valid.reason.as_str()), (ConditionStatus::False, "Invalid"));
        for field in ["spec.checkpoint.trial", "spec.output.url"] {
            assert!(valid.message.contains(field), "{}", valid.message);
        }
        apply_job(&ns, "good", job(1));
        let refused = patch(&ns, "good", &json!({ "spec": { "shardRows": 7 } })).unwrap_err();
        assert!(refused.contains("only state may be changed"), "{refused}");
        let refused = patch(&ns, "good", &json!({ "spec": { "checkpoint": { "trial": "a-0" } } }));
        assert!(refused.unwrap_err().contains("only state may be changed"));
    });
}

#[test]
fn job_can_be_paused_resumed_cancelled_and_killed() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("job-pause").await;
        let mut operator = ns.operator("a", operator_port());
        operator.wait_ready(&ns);
        let kubelet = Kubelet::start(&ns.client, &ns.namespace, |pod| {
            match pod.labels()[LABEL_JOB].as_str() {
                "deaf" => Script::Hang,
                _ => Script::Work(Work { shards: 40, shard_ms: 100 }),
            }
        });
        apply_job(&ns, "long", job(2));
        wait_for_status(&ns, "long", "making progress", |status| status.rows > 0).await;
        set_state(&ns, "long", "paused").unwrap();
        let paused = wait_for_job(&ns, "long", &[Phase::Paused]).await;
        assert!(paused.workers.iter().all(|worker| worker.attempt.is_none()), "{paused:#?}");
        assert_eq!((paused.restarts, paused.running), (0, 0), "{paused:#?}");
        let done = kubelet.outputs().num_done();
        set_state(&ns, "long", "active").unwrap();
        let completed = wait_for_job(&ns, "long", &[Phase::Completed]).await;
        assert_eq!((completed.rows, completed.restarts), (400, 0), "{completed:#?}");
        assert!(done > 0 && kubelet.outputs().num_done() <= 42, "{done}");

        apply_job(&ns, "ends", job(2));
        wait_for_status(&ns, "ends", "making progress", |status| status.rows > 0).await;
        set_state(&ns, "ends", "cancelled").unwrap();
        let ended = wait_for_job(&ns, "ends", &[Phase::Cancelled, Phase::Completed]).await;
        assert_eq!((ended.phase, ended.rows < 400), (Phase::Cancelled, true), "{ended:#?}");
        let refused = set_state(&ns, "ends", "active").unwrap_err();
        assert!(refused.contains("stays cancelled"), "{refused}");

        apply_job(&ns, "deaf", job(2));
        wait_for_status(&ns, "deaf", "running", |status| status.running > 0).await;
        set_state(&ns, "deaf", "killed").unwrap();
        wait_for_job(&ns, "deaf", &[Phase::Cancelled]).await;
    });
}

/// An operator behind a proxy that can kill it at a write.
struct ProxiedOperator {
    ns: TestNamespace,
    proxy: Proxy,
    operator: Option<Operator>,
    port: u16,
}

impl ProxiedOperator {
    async fn new(namespace: &str) -> Self {
        let ns = TestNamespace::new(namespace).await;
        let proxy = Proxy::start(client_of(&ns.kubeconfig).await, ns.folder.path()).await;
        let mut proxied_operator = Self { ns, proxy, operator: None, port: operator_port() };
        proxied_operator.begin();
        proxied_operator
    }

    fn begin(&mut self) {
        let kubeconfig = &self.proxy.kubeconfig;
        let mut operator = self.ns.operator_by("a", self.port, kubeconfig, &[]);
        operator.wait_ready(&self.ns);
        self.operator = Some(operator);
    }

    /// Runs a job whose operator dies at its n-th write. Returns whether the job has that many
    /// writes.
    async fn run(&mut self, kubelet: &Kubelet, n: usize, when: KillTime) -> bool {
        let name = format!("{when:?}-{n}").to_lowercase();
        let pid = self.operator.as_ref().unwrap().pid();
        let mut death = self.proxy.arm(n, when, pid);
        apply_job(&self.ns, &name, job(2));
        let triggered_by = tokio::select! {
            triggered_by = &mut death => Some(triggered_by.unwrap()),
            _ = wait_for_job(&self.ns, &name, &[Phase::Completed, Phase::Failed]) => None,
        };
        let is_late = !self.proxy.disarm() && triggered_by.is_none();
        let triggered_by = if is_late { death.await.ok() } else { triggered_by };
        if triggered_by.is_some() {
            self.operator.take().unwrap().kill();
            self.begin();
        }
        let ends = [Phase::Completed, Phase::Failed];
        let ended = wait_for_job(&self.ns, &name, &ends).await;
        let what = format!("killed {when:?} write {n}, {triggered_by:?}: {ended:#?}");
        assert_eq!((ended.phase, ended.rows, ended.attempts), (Phase::Completed, 60, 4), "{what}");
        let mut started = kubelet.started();
        started.retain(|pod| pod.starts_with(&format!("{name}-")));
        started.sort();
        let names = ["a0-plan", "a1-w0", "a2-w1", "a3-finish"].map(|pod| format!("{name}-{pod}"));
        assert_eq!(started, names, "{what}");
        triggered_by.is_some()
    }
}

#[test]
fn operator_death_at_a_write_repeats_no_process() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let mut proxied_operator = ProxiedOperator::new("job-writes").await;
        let kubelet = Kubelet::start(&proxied_operator.ns.client, "job-writes", |_| QUICK);
        let mut num_deaths = 0;
        for n in 1..=100 {
            let when = [KillTime::Before, KillTime::After, KillTime::Late][n % 3];
            if !proxied_operator.run(&kubelet, n, when).await {
                break;
            }
            num_deaths += 1;
        }
        assert!(num_deaths >= 8, "a job had only {num_deaths} writes");
        assert_eq!(kubelet.outputs().num_done(), 6 * (num_deaths + 1));
    });
}

#[test]
fn job_report_is_accepted_for_own_attempt_only() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("job-door").await;
        let mut operator = ns.operator("a", operator_port());
        operator.wait_ready(&ns);
        let _kubelet = Kubelet::start(&ns.client, &ns.namespace, |_| Script::Hang);
        apply_job(&ns, "one", job(1));
        apply_job(&ns, "other", job(1));
        wait_for_status(&ns, "one", "running", |status| status.running > 0).await;
        wait_for_status(&ns, "other", "running", |status| status.running > 0).await;
        let pods: Api<Pod> = Api::namespaced(ns.client.clone(), &ns.namespace);
        let pod = pods.get("one-a0-plan").await.unwrap();
        let config = config_of(&pod);
        let token = token(&ns.client, &ns.namespace, &pod).await.unwrap();
        let connection = ReportConnection::new(&config, token.clone());
        let url = config.report_endpoint.url.clone();
        let others = url.replace("/one/", "/other/");
        let trials = url.replace("/jobs/", "/trials/");
        let check = async |url: &str,
                           token: Option<&str>,
                           attempt: u32,
                           code: u16,
                           expected: &str| {
            let report = json!({
                "version": 1, "attempt": attempt, "batches": 0,
                "event": { "progress": { "batchesTotal": 77 } },
            });
            let answer =
                connection.send(report.to_string().into_bytes(), token, url).await.unwrap();
            assert!(answer.0 == code && answer.1.contains(expected), "{url} {attempt}: {answer:?}");
        };
        let token_of_one = Some(token.as_str());
        check(&url, None, 0, 401, "no bearer token").await;
        check(&others, token_of_one, 0, 403, "does not belong to job").await;
        check(&trials, token_of_one, 0, 403, "does not belong to trial").await;
        check(&url, token_of_one, 1, 403, "belongs to attempt 0").await;
        assert_eq!(status(&ns, "one").await.rows_total, 0);
        check(&url, token_of_one, 0, 200, "continue").await;
        assert_eq!(status(&ns, "one").await.rows_total, 77);
        assert_eq!(status(&ns, "other").await.rows_total, 0);
    });
}

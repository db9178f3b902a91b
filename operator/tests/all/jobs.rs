//! Inference jobs from creation to end: failures, an operator that dies at its writes, pause,
//! cancellation.

use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt as _};
use serde_json::{Value, json};
use stoker_api::condition::{ConditionStatus, find};
use stoker_api::experiment::Phase;
use stoker_api::inference::{InferenceJob, InferenceStatus};
use stoker_api::names::{LABEL_ATTEMPT, LABEL_JOB};
use stoker_api::trial::AttemptEnd;
use tokio::task::block_in_place;

use crate::kubelet::{Kubelet, Line, Script, config_of, ended, token};
use crate::proxy::{Proxy, When};
use crate::setup::{Operator, Place, client_of, free_ports, merge, runtime};
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

pub(crate) fn apply_job(place: &Place, name: &str, spec: Value) {
    let object = json!({
        "apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceJob",
        "metadata": { "name": name, "namespace": place.namespace }, "spec": spec,
    });
    block_in_place(|| place.plane.apply(&object.to_string())).unwrap();
}

async fn status(place: &Place, name: &str) -> InferenceStatus {
    let api: Api<InferenceJob> = Api::namespaced(place.client.clone(), &place.namespace);
    api.get(name).await.unwrap().status.unwrap_or_default()
}

/// Waits until a job's status satisfies `is_so`, and returns it.
async fn until(
    place: &Place,
    name: &str,
    what: &str,
    seconds: u64,
    is_so: impl Fn(&InferenceStatus) -> bool,
) -> InferenceStatus {
    let end = Instant::now() + Duration::from_secs(seconds);
    loop {
        let current = status(place, name).await;
        if is_so(&current) {
            return current;
        }
        let late = Instant::now() > end;
        assert!(!late, "{name} is not {what}: {current:#?}\n{}", place.logs());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

pub(crate) async fn wait_for_job(
    place: &Place,
    name: &str,
    phases: &[Phase],
    seconds: u64,
) -> InferenceStatus {
    let is_so = |status: &InferenceStatus| phases.contains(&status.phase);
    until(place, name, &format!("{phases:?}"), seconds, is_so).await
}

fn set_state(place: &Place, name: &str, state: &str) -> Result<String, String> {
    patch(place, name, &json!({ "spec": { "state": state } }))
}

fn patch(place: &Place, name: &str, patch: &Value) -> Result<String, String> {
    let patch = patch.to_string();
    let space = place.namespace.as_str();
    let arguments = ["patch", "inferencejob", name, "-n", space, "--type=merge", "-p", &patch];
    place.plane.kubectl(&arguments).map_err(|error| error.to_string())
}

const QUICK: Script = Script::Work(Work { shards: 6, shard_ms: 20 });

#[test]
fn job_is_planned_worked_and_finished() {
    if !stoker_test_cluster::wanted() {
        return;
    }
    runtime().block_on(async {
        let place = Place::new("jobs").await;
        let label = "pod-security.kubernetes.io/enforce=restricted";
        place.plane.kubectl(&["label", "namespace", "jobs", label]).unwrap();
        let mut operator = place.operator("a", free_ports());
        operator.wait_ready(&place);
        let kubelet = Kubelet::start(&place.client, &place.namespace, |_| QUICK);
        apply_job(&place, "species", job(3));
        let ended = wait_for_job(&place, "species", &[Phase::Completed, Phase::Failed], 60).await;
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
        place.plane.kubectl(&[&wait[..], &["--timeout=5s"]].concat()).unwrap();
        let columns = place.plane.kubectl(&["get", "stoker", "-n", "jobs"]).unwrap();
        assert!(columns.contains("REJECTED") && columns.contains("Completed"), "{columns}");
        let metrics = operator.metrics();
        assert!(metrics.contains("stoker_jobs_ended_total{kind=\"completed\"} 1"), "{metrics}");
        assert!(metrics.contains("stoker_attempts_ended_total{kind=\"completed\"} 5"));
        // The job's pods are deleted with it.
        place.plane.kubectl(&["delete", "inferencejob", "species", "-n", "jobs"]).unwrap();
        stoker_test_cluster::wait_until("the job's pods are deleted", 30, || {
            match place.plane.kubectl(&["get", "pods", "-n", "jobs", "-o", "name"]) {
                Ok(text) if text.trim().is_empty() => Ok(()),
                other => Err(format!("{other:?}")),
            }
        })
        .unwrap();
    });
}

/// A failure, and what must be recorded.
struct Case {
    name: &'static str,
    /// Merged into the job's spec.
    spec: Value,
    /// Script of the pods with these attempt numbers. Attempt 0 plans.
    script: Script,
    attempts: &'static [u32],
    phase: Phase,
    restarts: u32,
    /// Class and reason of the first failed attempt.
    end: Option<(AttemptEnd, &'static str)>,
    /// Part of the job's message.
    says: &'static str,
}

fn cases() -> Vec<Case> {
    use AttemptEnd::{Infrastructure, InvalidHyperparameters, NotStarted, UserError};
    let exit = |code: i32| Script::Exit { after_ms: 20, code };
    let case = |name, script, attempts, end, reason| Case {
        name,
        spec: json!({}),
        script,
        attempts,
        phase: Phase::Completed,
        restarts: u32::from(end == UserError),
        end: Some((end, reason)),
        says: "",
    };
    let failed = |case: Case, says| Case { phase: Phase::Failed, says, ..case };
    let of_status = |more: Value| {
        let mut status = ended(137);
        status.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        Script::Status(status)
    };
    let evicted =
        json!({ "reason": "Evicted", "message": "The node was low on resource: memory." });
    let mut oom = ended(137);
    oom["containerStatuses"][0]["state"]["terminated"]["reason"] = json!("OOMKilled");
    let twice =
        Case { restarts: 2, ..case("exit-1-twice", exit(1), &[1, 3], UserError, "ProgramFailed") };
    let invalid = "InvalidHyperparameters";
    let over =
        json!({ "podOverrides": { "spec": { "dnsPolicy": "Sometimes" } }, "maxRestarts": 0 });
    let refused = case("pod-invalid", QUICK, &[], UserError, "PodInvalid");
    let quota = json!({ "resources": { "requests": { "test.stoker/slot": "1" },
        "limits": { "test.stoker/slot": "1" } } });
    let over_quota = case("quota", QUICK, &[], NotStarted, "QuotaExceeded");
    vec![
        case("exit-1", exit(1), &[1], UserError, "ProgramFailed"),
        failed(twice, "worker 0 failed 2 times"),
        failed(
            case("exit-78", exit(78), &[1], InvalidHyperparameters, invalid),
            "worker 0: pod exit-78-a1-w0: exit code 78",
        ),
        failed(case("plan-78", exit(78), &[0], InvalidHyperparameters, invalid), "planning: "),
        case("exit-80", exit(80), &[1], Infrastructure, "InfrastructureError"),
        case("oom", Script::Status(oom), &[1], UserError, "OOMKilled"),
        case("evicted", of_status(evicted), &[1], Infrastructure, "Evicted"),
        failed(Case { spec: over, ..refused }, "spec.dnsPolicy"),
        Case { spec: quota, phase: Phase::Running, ..over_quota },
    ]
}

#[test]
fn process_failures_are_classified_and_reported() {
    if !stoker_test_cluster::wanted() {
        return;
    }
    runtime().block_on(async {
        let place = Place::new("job-failures").await;
        let quota = json!({
            "apiVersion": "v1", "kind": "ResourceQuota",
            "metadata": { "name": "slots", "namespace": "job-failures" },
            "spec": { "hard": { "requests.test.stoker/slot": "0" } },
        });
        place.plane.apply(&quota.to_string()).unwrap();
        let mut operator = place.operator("a", free_ports());
        operator.wait_ready(&place);
        let scripts = cases();
        let _kubelet = Kubelet::start(&place.client, &place.namespace, move |pod| {
            let label = |name: &str| pod.labels().get(name).map_or("", String::as_str);
            let case = scripts.iter().find(|case| case.name == label(LABEL_JOB));
            let attempt: u32 = label(LABEL_ATTEMPT).parse().unwrap();
            match case {
                Some(case) if case.attempts.contains(&attempt) => case.script.clone(),
                _ => QUICK,
            }
        });
        for case in cases() {
            let mut spec = job(2);
            merge(&mut spec, &case.spec);
            apply_job(&place, case.name, spec);
        }
        for case in cases() {
            let what = format!("{:?} after its failure", case.phase);
            let failed = until(&place, case.name, &what, 60, |status| {
                let is_settled = status.phase == Phase::Running || status.ended_at.is_some();
                status.phase == case.phase && !status.ends.is_empty() && is_settled
            });
            let failed = failed.await;
            let name = case.name;
            let first = failed.ends.first().map(|end| (end.end, end.reason.as_str()));
            assert_eq!(first, case.end, "{name}: {failed:#?}");
            assert_eq!(failed.restarts, case.restarts, "{name}: {failed:#?}");
            let message = failed.message.clone().unwrap_or_default();
            assert!(message.contains(case.says), "{name}: {message}");
            if case.phase == Phase::Failed {
                let condition = find(&failed.conditions, "Failed").unwrap();
                assert_eq!(
                    (condition.status, &condition.message),
                    (ConditionStatus::True, &message)
                );
            }
        }
    });
}

#[test]
fn invalid_job_reports_all_errors_and_is_immutable() {
    if !stoker_test_cluster::wanted() {
        return;
    }
    runtime().block_on(async {
        let place = Place::new("job-invalid").await;
        let mut operator = place.operator("a", free_ports());
        operator.wait_ready(&place);
        let _kubelet = Kubelet::start(&place.client, &place.namespace, |_| Script::Hang);
        let mut bad = job(1);
        merge(
            &mut bad,
            &json!({ "output": { "url": "predictions" }, "checkpoint": { "trial": "iris" } }),
        );
        apply_job(&place, "bad", bad);
        let failed = wait_for_job(&place, "bad", &[Phase::Failed], 20).await;
        let valid = find(&failed.conditions, "Valid").unwrap();
        assert_eq!((valid.status, valid.reason.as_str()), (ConditionStatus::False, "Invalid"));
        for field in ["spec.checkpoint.trial", "spec.output.url"] {
            assert!(valid.message.contains(field), "{}", valid.message);
        }
        apply_job(&place, "good", job(1));
        let refused = patch(&place, "good", &json!({ "spec": { "shardRows": 7 } })).unwrap_err();
        assert!(refused.contains("only state may be changed"), "{refused}");
        let refused =
            patch(&place, "good", &json!({ "spec": { "checkpoint": { "trial": "a-0" } } }));
        assert!(refused.unwrap_err().contains("only state may be changed"));
    });
}

#[test]
fn job_can_be_paused_resumed_cancelled_and_killed() {
    if !stoker_test_cluster::wanted() {
        return;
    }
    runtime().block_on(async {
        let place = Place::new("job-pause").await;
        let mut operator = place.operator("a", free_ports());
        operator.wait_ready(&place);
        let kubelet = Kubelet::start(&place.client, &place.namespace, |pod| {
            match pod.labels()[LABEL_JOB].as_str() {
                "deaf" => Script::Hang,
                _ => Script::Work(Work { shards: 40, shard_ms: 100 }),
            }
        });
        apply_job(&place, "long", job(2));
        until(&place, "long", "making progress", 30, |status| status.rows > 0).await;
        set_state(&place, "long", "paused").unwrap();
        let paused = wait_for_job(&place, "long", &[Phase::Paused], 20).await;
        assert!(paused.workers.iter().all(|worker| worker.attempt.is_none()), "{paused:#?}");
        assert_eq!((paused.restarts, paused.running), (0, 0), "{paused:#?}");
        let done = kubelet.outputs().num_done();
        set_state(&place, "long", "active").unwrap();
        let completed = wait_for_job(&place, "long", &[Phase::Completed], 40).await;
        assert_eq!((completed.rows, completed.restarts), (400, 0), "{completed:#?}");
        assert!(done > 0 && kubelet.outputs().num_done() <= 42, "{done}");

        apply_job(&place, "ends", job(2));
        until(&place, "ends", "making progress", 30, |status| status.rows > 0).await;
        set_state(&place, "ends", "cancelled").unwrap();
        let ended = wait_for_job(&place, "ends", &[Phase::Cancelled, Phase::Completed], 20).await;
        assert_eq!((ended.phase, ended.rows < 400), (Phase::Cancelled, true), "{ended:#?}");
        let refused = set_state(&place, "ends", "active").unwrap_err();
        assert!(refused.contains("stays cancelled"), "{refused}");

        apply_job(&place, "deaf", job(2));
        until(&place, "deaf", "running", 20, |status| status.running > 0).await;
        set_state(&place, "deaf", "killed").unwrap();
        wait_for_job(&place, "deaf", &[Phase::Cancelled], 20).await;
    });
}

/// An operator behind a proxy that can kill it at a write.
struct Lane {
    place: Place,
    proxy: Proxy,
    operator: Option<Operator>,
    port: u16,
}

impl Lane {
    async fn new(namespace: &str) -> Self {
        let place = Place::new(namespace).await;
        let proxy = Proxy::start(client_of(&place.kubeconfig).await, place.folder.path()).await;
        let mut lane = Self { place, proxy, operator: None, port: free_ports() };
        lane.begin();
        lane
    }

    fn begin(&mut self) {
        let kubeconfig = &self.proxy.kubeconfig;
        let mut operator = self.place.operator_by("a", self.port, kubeconfig, &[]);
        operator.wait_ready(&self.place);
        self.operator = Some(operator);
    }

    /// Runs a job whose operator dies at its n-th write. Returns whether the job has that many
    /// writes.
    async fn run(&mut self, kubelet: &Kubelet, n: usize, when: When) -> bool {
        let name = format!("{when:?}-{n}").to_lowercase();
        let pid = self.operator.as_ref().unwrap().pid();
        let mut death = self.proxy.arm(n, when, pid);
        apply_job(&self.place, &name, job(2));
        let sprung = tokio::select! {
            sprung = &mut death => Some(sprung.unwrap()),
            _ = wait_for_job(&self.place, &name, &[Phase::Completed, Phase::Failed], 60) => None,
        };
        let is_late = !self.proxy.disarm() && sprung.is_none();
        let sprung = if is_late { death.await.ok() } else { sprung };
        if sprung.is_some() {
            self.operator.take().unwrap().kill();
            self.begin();
        }
        let ends = [Phase::Completed, Phase::Failed];
        let ended = wait_for_job(&self.place, &name, &ends, 60).await;
        let what = format!("killed {when:?} write {n}, {sprung:?}: {ended:#?}");
        assert_eq!((ended.phase, ended.rows, ended.attempts), (Phase::Completed, 60, 4), "{what}");
        let mut started = kubelet.started();
        started.retain(|pod| pod.starts_with(&format!("{name}-")));
        started.sort();
        let names = ["a0-plan", "a1-w0", "a2-w1", "a3-finish"].map(|pod| format!("{name}-{pod}"));
        assert_eq!(started, names, "{what}");
        sprung.is_some()
    }
}

#[test]
fn operator_death_at_a_write_repeats_no_process() {
    if !stoker_test_cluster::wanted() {
        return;
    }
    runtime().block_on(async {
        let mut lane = Lane::new("job-writes").await;
        let kubelet = Kubelet::start(&lane.place.client, "job-writes", |_| QUICK);
        let mut num_deaths = 0;
        for n in 1..=100 {
            let when = [When::Before, When::After, When::Late][n % 3];
            if !lane.run(&kubelet, n, when).await {
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
    if !stoker_test_cluster::wanted() {
        return;
    }
    runtime().block_on(async {
        let place = Place::new("job-door").await;
        let mut operator = place.operator("a", free_ports());
        operator.wait_ready(&place);
        let _kubelet = Kubelet::start(&place.client, &place.namespace, |_| Script::Hang);
        apply_job(&place, "one", job(1));
        apply_job(&place, "other", job(1));
        until(&place, "one", "running", 20, |status| status.running > 0).await;
        until(&place, "other", "running", 20, |status| status.running > 0).await;
        let pods: Api<Pod> = Api::namespaced(place.client.clone(), &place.namespace);
        let pod = pods.get("one-a0-plan").await.unwrap();
        let config = config_of(&pod);
        let token = token(&place.client, &place.namespace, &pod).await.unwrap();
        let line = Line::new(&config, token.clone());
        let url = config.report_endpoint.url.clone();
        let others = url.replace("/one/", "/other/");
        let trials = url.replace("/jobs/", "/trials/");
        let check = async |url: &str, token: Option<&str>, attempt: u32, code: u16, says: &str| {
            let report = json!({
                "version": 1, "attempt": attempt, "batches": 0,
                "event": { "progress": { "batchesTotal": 77 } },
            });
            let answer = line.send(report.to_string().into_bytes(), token, url).await.unwrap();
            assert!(answer.0 == code && answer.1.contains(says), "{url} {attempt}: {answer:?}");
        };
        let own = Some(token.as_str());
        check(&url, None, 0, 401, "no bearer token").await;
        check(&others, own, 0, 403, "does not belong to job").await;
        check(&trials, own, 0, 403, "does not belong to trial").await;
        check(&url, own, 1, 403, "belongs to attempt 0").await;
        assert_eq!(status(&place, "one").await.rows_total, 0);
        check(&url, own, 0, 200, "continue").await;
        assert_eq!(status(&place, "one").await.rows_total, 77);
        assert_eq!(status(&place, "other").await.rows_total, 0);
    });
}

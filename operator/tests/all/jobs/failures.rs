//! Failures of a job's processes: class, cost and message of each.

use kube::ResourceExt as _;
use serde_json::{Value, json};
use stoker_api::condition::{ConditionStatus, find};
use stoker_api::experiment::Phase;
use stoker_api::names::{LABEL_ATTEMPT, LABEL_JOB};
use stoker_api::trial::AttemptEnd;

use super::{QUICK, apply_job, job, wait_for_status};
use crate::kubelet::{Kubelet, Script, ended};
use crate::setup::{TestNamespace, merge, operator_port, runtime};

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
    expected: &'static str,
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
        expected: "",
    };
    let failed = |case: Case, expected| Case { phase: Phase::Failed, expected, ..case };
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
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("job-failures").await;
        let quota = json!({
            "apiVersion": "v1", "kind": "ResourceQuota",
            "metadata": { "name": "slots", "namespace": "job-failures" },
            "spec": { "hard": { "requests.test.stoker/slot": "0" } },
        });
        ns.plane.apply(&quota.to_string()).unwrap();
        let mut operator = ns.operator("a", operator_port());
        operator.wait_ready(&ns);
        let scripts = cases();
        let _kubelet = Kubelet::start(&ns.client, &ns.namespace, move |pod| {
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
            apply_job(&ns, case.name, spec);
        }
        for case in cases() {
            let what = format!("{:?} after its failure", case.phase);
            let failed = wait_for_status(&ns, case.name, &what, |status| {
                let is_settled = status.phase == Phase::Running || status.ended_at.is_some();
                status.phase == case.phase && !status.ends.is_empty() && is_settled
            });
            let failed = failed.await;
            let name = case.name;
            let first = failed.ends.first().map(|end| (end.end, end.reason.as_str()));
            assert_eq!(first, case.end, "{name}: {failed:#?}");
            assert_eq!(failed.restarts, case.restarts, "{name}: {failed:#?}");
            let message = failed.message.clone().unwrap_or_default();
            assert!(message.contains(case.expected), "{name}: {message}");
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

//! Ways in which an attempt ends, and what must be recorded.

use serde_json::{Value, json};
use stoker_api::experiment::Phase;
use stoker_api::trial::AttemptEnd;

use super::NAMESPACE;
use crate::kubelet::{Script, ended, now, unschedulable};
use AttemptEnd::{
    Completed, Infrastructure, InvalidHyperparameters, NotStarted, Preempted, UserError,
};

/// Action of the test during a case.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum TestAction {
    None,
    /// Deletes the first attempt's pod, with a grace period of 0 if forced.
    DeletePod {
        is_forced: bool,
    },
    /// Deletes the node of the first attempt.
    DeleteNode,
    /// Sets the node of the first attempt to not ready.
    NodeNotReady,
    /// Deletes the pod with a long grace period, then sets its node to not ready.
    DrainThenNodeNotReady,
    /// Waits until the trial backs off, then removes the cause with this kubectl command.
    RemoveCause(&'static [&'static str]),
}

/// A failure, and what must be recorded. If there are several attempts, the last one succeeds.
pub(super) struct Case {
    pub(super) name: &'static str,
    /// Merged into the experiment's spec.
    pub(super) spec: Value,
    /// Script of the first attempt's pods.
    pub(super) first: Script,
    pub(super) action: TestAction,
    pub(super) end: AttemptEnd,
    pub(super) reason: &'static str,
    /// Part of the attempt's message. If the trial waits or fails because of it, also part of a
    /// condition's message.
    pub(super) message: &'static str,
    pub(super) restarts: u32,
    pub(super) attempts: usize,
    pub(super) phase: Phase,
}

impl Case {
    pub(super) fn new(
        name: &'static str,
        first: Script,
        end: AttemptEnd,
        reason: &'static str,
    ) -> Self {
        let restarts = u32::from(end == UserError);
        let (spec, action, message) = (json!({}), TestAction::None, "");
        let (attempts, phase) = (2, Phase::Completed);
        Self { name, spec, first, action, end, reason, message, restarts, attempts, phase }
    }

    pub(super) fn spec(self, spec: Value) -> Self {
        Self { spec, ..self }
    }

    pub(super) fn action(self, action: TestAction) -> Self {
        Self { action, ..self }
    }

    pub(super) fn message(self, message: &'static str) -> Self {
        Self { message, ..self }
    }

    /// The trial fails because of this failure.
    pub(super) fn fatal(self) -> Self {
        Self { attempts: 1, phase: Phase::Failed, ..self }
    }

    /// Same as [`fatal`](Self::fatal), because of `maxRestarts: 0`.
    pub(super) fn fatal_without_restarts(mut self) -> Self {
        self.spec["maxRestarts"] = json!(0);
        self.fatal()
    }
}

pub(super) fn exit(code: i32) -> Script {
    Script::Exit { after_ms: 50, code }
}

/// Sets the status of a container that exited with this code and reason.
pub(super) fn killed(code: i32, reason: &str, more: Value) -> Script {
    let mut status = ended(code);
    status["containerStatuses"][0]["state"]["terminated"]["reason"] = json!(reason);
    status.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    Script::Status(status)
}

pub(super) fn disrupted(reason: &str) -> Value {
    json!({ "conditions": [{
        "type": "DisruptionTarget", "status": "True", "reason": reason, "lastTransitionTime": now(),
    }] })
}

pub(super) fn waiting(reason: &str, message: &str) -> Script {
    Script::Status(json!({
        "phase": "Pending",
        "conditions": [{ "type": "PodScheduled", "status": "True", "lastTransitionTime": now() }],
        "containerStatuses": [{
            "name": "trainer", "image": "", "imageID": "", "ready": false, "restartCount": 0,
            "state": { "waiting": { "reason": reason, "message": message } },
        }],
    }))
}

pub(super) fn on_node(case: &str) -> Script {
    Script::OnNode(format!("node-{case}"))
}

pub(super) fn program_failures() -> Vec<Case> {
    let oom = || killed(137, "OOMKilled", json!({}));
    vec![
        Case::new("exit-0", exit(0), Completed, "Completed")
            .message("without having reported a validation")
            .fatal(),
        Case::new("exit-1", exit(1), UserError, "ProgramFailed").message("exit code 1"),
        Case::new("exit-42", exit(42), UserError, "ProgramFailed")
            .message("exit code 42")
            .fatal_without_restarts(),
        Case::new("signal", exit(139), UserError, "ProgramFailed").message("signal 11"),
        Case::new("exit-78", exit(78), InvalidHyperparameters, "InvalidHyperparameters")
            .message("exit code 78")
            .fatal(),
        Case::new("exit-79", exit(79), Preempted, "Preempted"),
        Case::new("exit-80", exit(80), Infrastructure, "InfrastructureError")
            .spec(json!({ "maxRestarts": 0 })),
        Case::new("exit-81", exit(81), Infrastructure, "PeerFailed"),
        Case::new("oom", oom(), UserError, "OOMKilled")
            .message("raise spec.resources.limits.memory"),
        Case::new("oom-fatal", oom(), UserError, "OOMKilled")
            .message("raise spec.resources.limits.memory")
            .fatal_without_restarts(),
    ]
}

pub(super) fn infrastructure_failures() -> Vec<Case> {
    let evicted = json!({ "reason": "Evicted", "message": "the node was low on memory" });
    let never_ran = json!({ "phase": "Failed", "reason": "Evicted", "message": "low on disk" });
    let pull = "back-off pulling image";
    vec![
        Case::new("evicted", killed(137, "Error", evicted), Infrastructure, "Evicted")
            .message("low on memory"),
        Case::new("evicted-early", Script::Status(never_ran), Infrastructure, "Evicted")
            .message("low on disk"),
        Case::new(
            "preempted",
            killed(143, "Error", disrupted("PreemptionByScheduler")),
            Infrastructure,
            "PreemptionByScheduler",
        )
        .spec(json!({ "maxRestarts": 0 })),
        Case::new(
            "tainted",
            killed(137, "Error", disrupted("DeletionByTaintManager")),
            Infrastructure,
            "DeletionByTaintManager",
        ),
        Case::new("pull", waiting("ImagePullBackOff", pull), Infrastructure, "ImagePullBackOff")
            .message(pull),
        Case::new("image", waiting("InvalidImageName", "no name"), UserError, "InvalidImageName")
            .message("no name")
            .fatal_without_restarts(),
        Case::new(
            "config",
            waiting("CreateContainerConfigError", "secret \"s\" not found"),
            UserError,
            "CreateContainerConfigError",
        )
        .message("secret \"s\" not found"),
        Case::new("deleted", Script::Hang, Infrastructure, "PodDeleted")
            .action(TestAction::DeletePod { is_forced: false }),
        Case::new("deleted-now", Script::Hang, Infrastructure, "PodDeleted")
            .action(TestAction::DeletePod { is_forced: true }),
        Case::new("node-deleted", on_node("node-deleted"), Infrastructure, "NodeLost")
            .action(TestAction::DeleteNode)
            .message("was deleted"),
        Case::new("node-silent", on_node("node-silent"), Infrastructure, "NodeLost")
            .action(TestAction::NodeNotReady)
            .message("does not answer"),
        Case::new("node-drained", on_node("node-drained"), Infrastructure, "NodeLost")
            .action(TestAction::DrainThenNodeNotReady)
            .message("does not answer"),
    ]
}

pub(super) fn refused_pods() -> Vec<Case> {
    let full = json!({ "conditions": [unschedulable()] });
    let overrides = |body: Value| json!({ "podOverrides": body });
    let slots = json!({ "resources": { "slotResource": "test.stoker/slot" } });
    let quota = TestAction::RemoveCause(&["delete", "resourcequota", "slots", "-n", NAMESPACE]);
    let policy = TestAction::RemoveCause(&[
        "label",
        "namespace",
        NAMESPACE,
        "pod-security.kubernetes.io/enforce-",
    ]);
    let two_pods = json!({ "resources": { "slotsPerTrial": 2 } });
    let service = TestAction::RemoveCause(&["delete", "service", "service-0", "-n", NAMESPACE]);
    vec![
        Case::new("full", Script::Status(full), NotStarted, "Unschedulable")
            .spec(two_pods.clone())
            .message("2 Insufficient slots"),
        Case::new("unseen", Script::Status(json!({})), NotStarted, "Unschedulable")
            .spec(two_pods.clone())
            .message("no scheduler has processed it yet"),
        Case::new("quota", exit(1), NotStarted, "QuotaExceeded")
            .spec(slots)
            .action(quota)
            .message("exceeded quota"),
        Case::new("policy", exit(1), NotStarted, "AdmissionRefused")
            .spec(overrides(json!({ "spec": { "hostNetwork": true } })))
            .action(policy)
            .message("violates PodSecurity"),
        Case::new("odd-pod", exit(1), UserError, "PodInvalid")
            .spec(overrides(json!({ "spec": { "dnsPolicy": "Sometimes" } })))
            .message("spec.dnsPolicy")
            .fatal(),
        Case::new("pod", exit(1), NotStarted, "NameTaken").message("has another owner"),
        Case::new("service", exit(1), NotStarted, "NameTaken")
            .spec(two_pods)
            .action(service)
            .message("has another owner"),
    ]
}

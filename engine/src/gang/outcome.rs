//! Classifies how a pod ended.

use stoker_api::contract::Termination;
use stoker_api::exit::ExitClass;
use stoker_api::time::Timestamp;

use super::{Exit, NodeState, ObservedPod, PodPhase, Timeouts, Waiting};

/// Outcome of a pod.
#[derive(Clone, Debug, PartialEq)]
pub struct PodOutcome {
    /// Class of the exit: whether the program or the infrastructure is at fault.
    pub class: ExitClass,
    /// Machine-readable reason, one word.
    pub reason: String,
    /// Human-readable reason.
    pub message: String,
    /// When the container exited; unset if unknown.
    pub finished_at: Option<Timestamp>,
    /// Termination message of the program, if it wrote one.
    pub termination: Option<Termination>,
}

impl PodOutcome {
    /// Returns whether the program was not started, perhaps because of a change in the cluster.
    pub(super) fn cannot_start(&self) -> bool {
        USER_ERROR_REASONS.contains(&self.reason.as_str())
    }
}

/// Waiting reasons that are permanent, because the experiment's spec causes them.
const PERMANENT_REASONS: [&str; 2] = ["InvalidImageName", "ErrImageNeverPull"];
/// Reasons why a container does not start that the user caused, but that a change in the cluster
/// may resolve.
const USER_ERROR_REASONS: [&str; 4] =
    ["CreateContainerConfigError", "CreateContainerError", "RunContainerError", "StartError"];

/// Reasons of an exit whose code is made up: containerd lost the process, as after a power loss, or
/// the kubelet lost the container.
const LOST_CONTAINER_REASONS: [&str; 2] = ["Unknown", "ContainerStatusUnknown"];

/// Returns the outcome of a pod; `None` while the pod runs or may still start.
pub fn pod_outcome(pod: &ObservedPod, timeouts: &Timeouts, now: Timestamp) -> Option<PodOutcome> {
    if pod.is_lost(timeouts, now) {
        let why = if pod.node == NodeState::Deleted { "was deleted" } else { "does not answer" };
        return Some(without_exit(
            pod,
            ExitClass::Infrastructure,
            "NodeLost",
            &format!("the node {why}"),
        ));
    }
    match (pod.phase, &pod.exit) {
        (PodPhase::Succeeded | PodPhase::Failed, Some(exit)) => Some(from_exit(pod, exit)),
        (PodPhase::Succeeded, None) => {
            Some(without_exit(pod, ExitClass::Completed, "Completed", "exit code unknown"))
        }
        (PodPhase::Failed, None) => {
            let reason = pod.reason.as_deref().or(pod.disruption.as_deref()).unwrap_or("PodFailed");
            let message =
                pod.message.as_deref().unwrap_or("the pod failed before its program started");
            Some(without_exit(pod, ExitClass::Infrastructure, reason, message))
        }
        // Other containers of the pod may run forever, or never start.
        (PodPhase::Pending | PodPhase::Running, Some(exit)) if !exit.is_setup => {
            Some(from_exit(pod, exit))
        }
        (PodPhase::Pending | PodPhase::Running | PodPhase::Unknown, _) => {
            from_waiting(pod, pod.waiting.as_ref()?, timeouts, now)
        }
    }
}

/// Classifies an exit. The program's exit code takes precedence: a code with a meaning keeps it
/// even if the pod is evicted a moment later.
fn from_exit(pod: &ObservedPod, exit: &Exit) -> PodOutcome {
    let termination: Option<Termination> = serde_json::from_str(&exit.message).ok();
    // A launcher that was killed while it waited for stragglers had already reported the exit code
    // of its ranks.
    let reported = termination.as_ref().filter(|_| exit.code > 128);
    let code = reported.map_or(exit.code, |termination| i32::from(termination.code));
    let disruption = pod.disruption.as_deref().or(pod.reason.as_deref());
    let disruption = disruption.or(pod.deletion.map(|_| "PodDeleted"));
    let class = ExitClass::of_code(code);
    let (class, reason) = match (class, disruption) {
        (ExitClass::Completed, _) => (class, "Completed"),
        (ExitClass::Preempted, _) => (class, "Preempted"),
        (ExitClass::InvalidHyperparameters, _) => (class, "InvalidHyperparameters"),
        (ExitClass::Unrecoverable, _) => (class, "Unrecoverable"),
        (ExitClass::PeerFailed, _) => (class, "PeerFailed"),
        (ExitClass::Infrastructure, _) => (class, "InfrastructureError"),
        (ExitClass::UserError, Some(reason)) => (ExitClass::Infrastructure, reason),
        (ExitClass::UserError, None) if LOST_CONTAINER_REASONS.contains(&exit.reason.as_str()) => {
            (ExitClass::Infrastructure, "ContainerLost")
        }
        (ExitClass::UserError, None) => match exit.reason.as_str() {
            reason @ ("OOMKilled" | "StartError") => (class, reason),
            _ => (class, "ProgramFailed"),
        },
    };
    let program_message = match &termination {
        Some(termination) => termination.message.clone().unwrap_or_default(),
        None => exit.message.trim().to_owned(),
    };
    let message = exit_message(pod, exit, reason, &program_message);
    PodOutcome {
        class,
        reason: reason.to_owned(),
        message,
        finished_at: exit.finished_at,
        termination,
    }
}

/// Returns a message for users. `program_message` is the message that the program wrote on exit.
fn exit_message(pod: &ObservedPod, exit: &Exit, reason: &str, program_message: &str) -> String {
    let setup = if exit.is_setup { " (setup)" } else { "" };
    let how = match exit.code {
        code @ 129..=192 => format!("ended by signal {}", code - 128),
        code => format!("exit code {code}"),
    };
    let hint = match reason {
        "OOMKilled" => {
            "; out of memory: raise spec.resources.limits.memory or lower the batch size"
        }
        _ => "",
    };
    let pod_message =
        pod.message.as_deref().map_or(String::new(), |message| format!("; {message}"));
    let program_suffix =
        if program_message.is_empty() { String::new() } else { format!(": {program_message}") };
    format!("pod {}{setup}: {how}{hint}{pod_message}{program_suffix}", pod.name)
}

fn from_waiting(
    pod: &ObservedPod,
    waiting: &Waiting,
    timeouts: &Timeouts,
    now: Timestamp,
) -> Option<PodOutcome> {
    let reason = waiting.reason.as_str();
    let message = &waiting.message;
    if PERMANENT_REASONS.contains(&reason) {
        return Some(without_exit(pod, ExitClass::UserError, reason, message));
    }
    let is_late = waiting.deadline(timeouts) <= now;
    let class = match USER_ERROR_REASONS.contains(&reason) {
        true => ExitClass::UserError,
        false => ExitClass::Infrastructure,
    };
    is_late.then(|| without_exit(pod, class, reason, message))
}

fn without_exit(pod: &ObservedPod, class: ExitClass, reason: &str, message: &str) -> PodOutcome {
    let message = format!("pod {}: {reason}: {message}", pod.name);
    PodOutcome { class, reason: reason.to_owned(), message, finished_at: None, termination: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUTS: Timeouts = Timeouts {
        start_deadline_seconds: 600,
        pull_deadline_seconds: 300,
        node_lost_seconds: 60,
        finished_pods_seconds: 600,
        end_grace_seconds: 30,
        preemption_timeout_seconds: 3600,
    };

    fn failed(code: i32, reason: &str) -> ObservedPod {
        let exit = Exit { code, reason: reason.to_owned(), ..Exit::default() };
        ObservedPod { phase: PodPhase::Failed, exit: Some(exit), ..ObservedPod::default() }
    }

    fn waiting(reason: &str) -> ObservedPod {
        // The pod was scheduled long before.
        let since = Timestamp(1000);
        let waiting = Waiting { reason: reason.to_owned(), message: String::new(), since };
        ObservedPod {
            waiting: Some(waiting),
            scheduled_at: Some(Timestamp(0)),
            ..ObservedPod::default()
        }
    }

    #[track_caller]
    fn check(pod: ObservedPod, now: i64, expected: Option<(ExitClass, &str)>) {
        let outcome = pod_outcome(&pod, &TIMEOUTS, Timestamp(now));
        let outcome = outcome.as_ref().map(|outcome| (outcome.class, outcome.reason.as_str()));
        assert_eq!(outcome, expected, "{pod:?}");
    }

    /// Lists every way in which a pod ends. The table of `trial::end_attempt` has the effect of
    /// each class on the restart budget.
    #[test]
    fn each_end_has_its_class() {
        use ExitClass::{
            Completed, Infrastructure, InvalidHyperparameters, PeerFailed, Preempted,
            Unrecoverable, UserError,
        };
        let succeeded = ObservedPod { phase: PodPhase::Succeeded, ..failed(0, "Completed") };
        check(succeeded, 0, Some((Completed, "Completed")));
        check(failed(79, "Error"), 0, Some((Preempted, "Preempted")));
        check(failed(78, "Error"), 0, Some((InvalidHyperparameters, "InvalidHyperparameters")));
        check(failed(80, "Error"), 0, Some((Infrastructure, "InfrastructureError")));
        check(failed(81, "Error"), 0, Some((PeerFailed, "PeerFailed")));
        check(failed(82, "Error"), 0, Some((Unrecoverable, "Unrecoverable")));
        let mut killed = failed(137, "Error");
        killed.exit.as_mut().unwrap().message = r#"{"code":79}"#.to_owned();
        check(killed.clone(), 0, Some((Preempted, "Preempted")));
        // Code 128 is not a signal, so the launcher was not killed.
        killed.exit.as_mut().unwrap().code = 128;
        check(killed, 0, Some((UserError, "ProgramFailed")));
        let with_sidecar = ObservedPod { phase: PodPhase::Running, ..failed(0, "Completed") };
        check(with_sidecar, 0, Some((Completed, "Completed")));
        let stuck_sidecar =
            ObservedPod { exit: failed(0, "Completed").exit, ..waiting("ImagePullBackOff") };
        check(stuck_sidecar, 0, Some((Completed, "Completed")));
        // The program has not exited. A failed setup container fails the pod.
        let mut setup = failed(80, "Error");
        setup.exit.as_mut().unwrap().is_setup = true;
        check(ObservedPod { phase: PodPhase::Running, ..setup.clone() }, 0, None);
        check(setup, 0, Some((Infrastructure, "InfrastructureError")));
        check(failed(1, "Error"), 0, Some((UserError, "ProgramFailed")));
        check(failed(42, "Error"), 0, Some((UserError, "ProgramFailed")));
        check(failed(139, "Error"), 0, Some((UserError, "ProgramFailed")));
        check(failed(137, "OOMKilled"), 0, Some((UserError, "OOMKilled")));
        check(failed(128, "StartError"), 0, Some((UserError, "StartError")));
        check(waiting("InvalidImageName"), 0, Some((UserError, "InvalidImageName")));
        check(waiting("ErrImageNeverPull"), 0, Some((UserError, "ErrImageNeverPull")));
        check(waiting("ImagePullBackOff"), 1299, None);
        check(waiting("ImagePullBackOff"), 1300, Some((Infrastructure, "ImagePullBackOff")));
        check(waiting("CreateContainerConfigError"), 1299, None);
        let config = (UserError, "CreateContainerConfigError");
        check(waiting("CreateContainerConfigError"), 1300, Some(config));
        check(waiting("SignatureValidationFailed"), 1299, None);
        let other = (Infrastructure, "SignatureValidationFailed");
        check(waiting("SignatureValidationFailed"), 1300, Some(other));
    }

    #[test]
    fn disruptions_are_not_the_programs_fault() {
        use ExitClass::{Infrastructure, Preempted, UserError};
        let disrupted = |reason: &str, pod: ObservedPod| ObservedPod {
            disruption: Some(reason.to_owned()),
            ..pod
        };
        let evicted = |pod| ObservedPod { reason: Some("Evicted".to_owned()), ..pod };
        let deleted = |pod| ObservedPod { deletion: Some(Timestamp(5)), ..pod };
        let taint = "DeletionByTaintManager";
        check(disrupted(taint, failed(143, "Error")), 0, Some((Infrastructure, taint)));
        let preemption = "PreemptionByScheduler";
        check(disrupted(preemption, failed(137, "Error")), 0, Some((Infrastructure, preemption)));
        check(disrupted(preemption, failed(79, "Error")), 0, Some((Preempted, "Preempted")));
        check(evicted(failed(137, "OOMKilled")), 0, Some((Infrastructure, "Evicted")));
        check(deleted(failed(143, "Error")), 0, Some((Infrastructure, "PodDeleted")));
        check(failed(143, "Error"), 0, Some((UserError, "ProgramFailed")));
        let lost = (Infrastructure, "ContainerLost");
        check(failed(255, "Unknown"), 0, Some(lost));
        check(failed(137, "ContainerStatusUnknown"), 0, Some(lost));
        check(failed(255, "Error"), 0, Some((UserError, "ProgramFailed")));
        let evicted_before_start = ObservedPod { exit: None, ..evicted(failed(0, "")) };
        check(evicted_before_start, 0, Some((Infrastructure, "Evicted")));
        let unexplained = ObservedPod { exit: None, ..failed(0, "") };
        check(unexplained, 0, Some((Infrastructure, "PodFailed")));
    }

    #[test]
    fn pods_are_lost_only_with_their_node() {
        use ExitClass::Infrastructure;
        let running = ObservedPod { phase: PodPhase::Running, ..ObservedPod::default() };
        let lost = Some((Infrastructure, "NodeLost"));
        let on = |node| ObservedPod { node, ..running.clone() };
        check(on(NodeState::Deleted), 0, lost);
        check(on(NodeState::NotReady(Timestamp(0))), 1000, None);
        let being_deleted = |until: i64| ObservedPod {
            deletion: Some(Timestamp(until)),
            ..on(NodeState::NotReady(Timestamp(0)))
        };
        check(being_deleted(30), 59, None);
        check(being_deleted(30), 60, lost);
        check(being_deleted(90), 90, None);
        check(being_deleted(90), 91, lost);
        check(being_deleted(660), 90, None);
        check(being_deleted(660), 91, lost);
        check(ObservedPod { phase: PodPhase::Unknown, ..being_deleted(90) }, 91, lost);
        let over = ObservedPod { phase: PodPhase::Failed, ..on(NodeState::Deleted) };
        check(over, 0, Some((Infrastructure, "PodFailed")));
    }

    #[test]
    fn messages_name_the_pod_and_a_remedy() {
        let check = |pod: ObservedPod, expected: &str| {
            let pod = ObservedPod { name: "t-a0-r1".to_owned(), ..pod };
            assert_eq!(pod_outcome(&pod, &TIMEOUTS, Timestamp(300)).unwrap().message, expected);
        };
        check(failed(3, "Error"), "pod t-a0-r1: exit code 3");
        check(failed(139, "Error"), "pod t-a0-r1: ended by signal 11");
        check(
            failed(137, "OOMKilled"),
            "pod t-a0-r1: ended by signal 9; out of memory: raise spec.resources.limits.memory or \
             lower the batch size",
        );
        let mut explained = failed(80, "Error");
        explained.exit.as_mut().unwrap().message =
            r#"{"code":80,"message":"the storage is unavailable"}"#.to_owned();
        check(explained, "pod t-a0-r1: exit code 80: the storage is unavailable");
        let mut plain = failed(1, "Error");
        plain.exit.as_mut().unwrap().message = "no such file\n".to_owned();
        check(plain, "pod t-a0-r1: exit code 1: no such file");
        let on = |node| ObservedPod { node, ..ObservedPod::default() };
        check(on(NodeState::Deleted), "pod t-a0-r1: NodeLost: the node was deleted");
        let silent = on(NodeState::NotReady(Timestamp(0)));
        let silent = ObservedPod { deletion: Some(Timestamp(30)), ..silent };
        check(silent, "pod t-a0-r1: NodeLost: the node does not answer");
    }
}

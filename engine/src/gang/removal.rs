//! When a pod is deleted, and with which grace period.

use stoker_api::experiment::DesiredState;
use stoker_api::time::Timestamp;
use stoker_api::trial::DesiredTrialState;

use super::{NodeState, ObservedPod, POD_GRACE_SECONDS_MAX, PodDeletion, Timeouts};

/// Seconds that a pod has to exit by itself after it is deleted.
pub const DELETE_GRACE_SECONDS: u32 = 30;
/// Least grace with which the node still confirms the end of a killed pod. With 0, the API server
/// would remove the pod at once.
const KILL_GRACE_SECONDS: u32 = 1;
/// Seconds that the API server's clock may be ahead of the operator's.
pub(super) const CLOCK_SKEW_SECONDS_MAX: u32 = 10;

/// Seconds between two plans while a deleted pod is on a node that does not respond.
const SILENT_NODE_SECONDS: u64 = 10;

/// Next step for a pod that is to be removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Removal {
    /// Plan again at this time.
    Wait(Timestamp),
    /// Delete the pod with this grace period in seconds. With 0, its node does not confirm the end.
    Delete(u32),
}

/// Returns the pods to delete of a trial without a plan, after the user has paused, cancelled or
/// killed its experiment, or the trial was paused, stopped or killed. The trial or its experiment
/// cannot be parsed, or the experiment is no longer valid, so its pods would keep their GPUs.
///
/// Unless the trial is killed, programs get the preemption timeout to store a checkpoint. Its
/// report cannot be recorded, but the next attempt of a repaired trial finds the checkpoint in the
/// storage.
pub fn pods_to_stop<'a>(
    pods: impl Iterator<Item = &'a ObservedPod>,
    (of_experiment, of_trial): (DesiredState, DesiredTrialState),
    preemption_timeout_seconds: u32,
    now: Timestamp,
) -> Vec<PodDeletion> {
    let grace_seconds = match (of_experiment, of_trial) {
        (DesiredState::Killed, _) | (_, DesiredTrialState::Kill) => KILL_GRACE_SECONDS,
        (DesiredState::Active, DesiredTrialState::Run) => return vec![],
        (DesiredState::Active, DesiredTrialState::Pause | DesiredTrialState::Stop)
        | (DesiredState::Paused | DesiredState::Cancelled, _) => {
            preemption_timeout_seconds.clamp(DELETE_GRACE_SECONDS, POD_GRACE_SECONDS_MAX)
        }
    };
    let deletion = |pod: &ObservedPod| match pod.removal_within(grace_seconds, now) {
        Removal::Wait(_) => None,
        Removal::Delete(grace_seconds) => {
            let (name, uid) = (pod.name.clone(), pod.uid.clone());
            Some(PodDeletion { name, uid, grace_seconds, is_for_node: false })
        }
    };
    pods.filter(|pod| !pod.is_terminal()).filter_map(deletion).collect()
}

impl Timeouts {
    /// Returns the grace period of a pod that may store a checkpoint.
    pub(crate) fn drain_grace_seconds(&self) -> u32 {
        let seconds = u32::try_from(self.preemption_timeout_seconds).unwrap_or(u32::MAX);
        seconds.clamp(DELETE_GRACE_SECONDS, POD_GRACE_SECONDS_MAX)
    }
}

impl ObservedPod {
    /// Returns how to remove a pod within a grace period: waits if an earlier deletion ends about
    /// as soon. An earlier deletion, such as a node drain, may have a grace period of minutes. It
    /// is cut short, because nothing waits for what the pod saves.
    pub(crate) fn removal_within(&self, grace_seconds: u32, now: Timestamp) -> Removal {
        let soon = u64::from(grace_seconds) + u64::from(CLOCK_SKEW_SECONDS_MAX);
        match self.deletion {
            // Its end cannot be observed. In an outage of many nodes, this may last for hours.
            Some(until) if until < now && matches!(self.node, NodeState::NotReady(_)) => {
                Removal::Wait(now.plus(SILENT_NODE_SECONDS))
            }
            Some(until) if until <= now.plus(soon) => Removal::Wait(until.plus(1)),
            Some(_) | None => Removal::Delete(grace_seconds),
        }
    }

    /// Returns how to remove a pod whose attempt has ended. `ended_at` is the end of the attempt or
    /// of the pod, and `is_killed` whether the user killed the trial or job.
    pub(crate) fn stale_removal(
        &self,
        ended_at: Timestamp,
        is_killed: bool,
        timeouts: &Timeouts,
        now: Timestamp,
    ) -> Removal {
        let until = ended_at.plus(timeouts.finished_pods_seconds);
        let report_deadline = ended_at.plus(DELETE_GRACE_SECONDS.into());
        if self.is_lost(timeouts, now) {
            Removal::Delete(0)
        } else if self.is_terminal() && now < until {
            Removal::Wait(until)
        } else if !self.is_terminal()
            && self.deletion.is_none()
            && self.has_program_exited()
            && now < report_deadline
        {
            // The program has exited. Wait for the node to report the pod as finished, so that the
            // pod is kept for its logs.
            Removal::Wait(report_deadline)
        } else {
            let grace = if is_killed { KILL_GRACE_SECONDS } else { DELETE_GRACE_SECONDS };
            self.removal_within(grace, now)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::PodPhase;
    use super::*;

    #[test]
    fn pods_of_a_trial_without_a_plan_stop() {
        let pod = |name: &str, phase: PodPhase, deletion: Option<i64>| ObservedPod {
            name: name.to_owned(),
            phase,
            deletion: deletion.map(Timestamp),
            ..ObservedPod::default()
        };
        let pods = [
            pod("running", PodPhase::Running, None),
            pod("pending", PodPhase::Pending, None),
            pod("ended", PodPhase::Failed, None),
            pod("drained", PodPhase::Running, Some(500)),
            pod("killed", PodPhase::Running, Some(101)),
        ];
        let check = |state, of_trial, timeout: u32, expected: &[(&str, u32)]| {
            let states = (state, of_trial);
            let deletions = pods_to_stop(pods.iter(), states, timeout, Timestamp(100));
            let found = deletions.iter().map(|pod| (&*pod.name, pod.grace_seconds));
            assert_eq!(found.collect::<Vec<_>>(), expected, "{states:?} {timeout}");
        };
        let (run, kill) = (DesiredTrialState::Run, DesiredTrialState::Kill);
        check(DesiredState::Active, run, 60, &[]);
        let graceful = [("running", 60), ("pending", 60), ("drained", 60)];
        for state in [DesiredState::Paused, DesiredState::Cancelled] {
            check(state, run, 60, &graceful);
        }
        for of_trial in [DesiredTrialState::Pause, DesiredTrialState::Stop] {
            check(DesiredState::Active, of_trial, 60, &graceful);
        }
        check(DesiredState::Cancelled, run, 9000, &[("running", 600), ("pending", 600)]);
        let killed = [("running", 1), ("pending", 1), ("drained", 1)];
        check(DesiredState::Killed, DesiredTrialState::Stop, 60, &killed);
        check(DesiredState::Active, kill, 60, &killed);
        check(DesiredState::Paused, kill, 60, &killed);
    }

    #[test]
    fn earlier_deletion_stays_if_it_ends_as_soon() {
        let check = |deletion: Option<i64>, grace_seconds: u32, expected: Removal| {
            let pod = ObservedPod { deletion: deletion.map(Timestamp), ..ObservedPod::default() };
            assert_eq!(pod.removal_within(grace_seconds, Timestamp(100)), expected, "{deletion:?}");
        };
        check(None, 30, Removal::Delete(30));
        check(Some(140), 30, Removal::Wait(Timestamp(141)));
        check(Some(141), 30, Removal::Delete(30));
        check(Some(141), u32::MAX, Removal::Wait(Timestamp(142)));
        // The node does not confirm the end, perhaps for hours.
        let silent = |until: i64| ObservedPod {
            deletion: Some(Timestamp(until)),
            node: NodeState::NotReady(Timestamp(100)),
            ..ObservedPod::default()
        };
        let removal = |until| silent(until).removal_within(30, Timestamp(100));
        assert_eq!(removal(99), Removal::Wait(Timestamp(110)));
        assert_eq!(removal(100), Removal::Wait(Timestamp(101)));
    }
}

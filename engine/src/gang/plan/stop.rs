//! Ends attempts of trials that were killed, or did not exit in time after a stop request.

use std::collections::BTreeMap;

use stoker_api::time::Timestamp;
use stoker_api::trial::{AttemptEnd, DesiredTrialState};

use super::super::{ObservedPod, pod_outcome};
use super::{GangView, Planner};

/// Seconds by which the clocks of two replicas may differ.
const REPLICA_SKEW_SECONDS_MAX: u64 = 300;

impl Planner<'_> {
    /// Ends the attempt if the trial was killed, or was paused or stopped and did not exit in time.
    /// Returns whether it ended the attempt.
    ///
    /// The exits of pods that have all ended determine the outcome, even if the runner was
    /// unavailable until after the deadline.
    pub(super) fn enforce_stop_deadline(
        &mut self,
        has_pods: bool,
        pods: &BTreeMap<u32, &ObservedPod>,
    ) -> bool {
        let view = self.view;
        let spec = &view.record.spec;
        let until = stop_deadline(view);
        match spec.desired_state {
            DesiredTrialState::Run => false,
            DesiredTrialState::Kill => {
                self.record_unsent_reports(pods);
                self.end(AttemptEnd::RunnerLost, "Killed", "killed".to_owned());
                true
            }
            DesiredTrialState::Pause | DesiredTrialState::Stop if until <= view.now => {
                let has_ended =
                    |pod: &&ObservedPod| pod_outcome(pod, &view.timeouts, view.now).is_some();
                if has_pods && pods.values().all(has_ended) {
                    return false;
                }
                let text = format!(
                    "killed: the trial did not exit within {} s (preemptionTimeoutSeconds)",
                    view.timeouts.preemption_timeout_seconds
                );
                self.record_unsent_reports(pods);
                self.end(AttemptEnd::RunnerLost, "PreemptionTimeout", text);
                true
            }
            DesiredTrialState::Pause | DesiredTrialState::Stop => {
                self.wake(until);
                false
            }
        }
    }
}

/// Returns when a trial that was paused or stopped must have exited.
///
/// The record has the time of the request, by the clock of the replica that wrote it. That clock
/// may have been minutes behind the clock of this replica, and the deadline would then pass before
/// the trial has received the request. So the trial also gets `preemption_timeout_seconds` since
/// the runner first observed the request, but of these at most five minutes: a replica that has
/// just started may not know how long the trial has been stopping. Clocks that differ by some
/// minutes therefore shorten the timeout at most by their difference, and leave at least five
/// minutes of a longer one.
fn stop_deadline(view: &GangView<'_>) -> Timestamp {
    let timeout = view.timeouts.preemption_timeout_seconds;
    let recorded = view.record.spec.desired_since.unwrap_or_default().plus(timeout);
    recorded.max(view.desired_state_seen_at.plus(timeout.min(REPLICA_SKEW_SECONDS_MAX)))
}

//! Ends attempts of trials that were killed, or did not exit in time after a stop request.

use std::collections::BTreeMap;

use stoker_api::trial::{AttemptEnd, DesiredTrialState};

use super::super::{ObservedPod, pod_outcome};
use super::Planner;

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
        let since = spec.desired_since.unwrap_or_default();
        let until = since.plus(view.timeouts.preemption_timeout_seconds);
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

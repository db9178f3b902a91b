//! Records ends of a job's processes, with the back-off of their slots.

use stoker_api::inference::{InferenceStatus, Role, WorkerStatus};
use stoker_api::time::Timestamp;
use stoker_api::trial::AttemptEnd;

use super::super::{MESSAGE_CHARS_MAX, ProcessEnd, back_off, record_process_end};
use crate::trial::BackOffLimits;

/// Message for a process that exited with code 0 without a report.
const EXIT_WITHOUT_REPORT: &str = "the process exited with code 0 without a report; the job's \
                                   program must implement `Inference`, and a wrapper script must \
                                   pass on its exit code";

/// Records the end of an attempt and the back-off of its slot.
#[expect(clippy::too_many_arguments, reason = "an end has this many parts")]
pub(super) fn record_end(
    status: &mut InferenceStatus,
    slot: u32,
    attempt: u32,
    end: AttemptEnd,
    reason: &str,
    message: &str,
    max_restarts: u32,
    now: Timestamp,
) {
    let is_known = |worker: &WorkerStatus| worker.attempt == Some(attempt);
    if !status.workers.get(slot as usize).is_some_and(is_known) {
        return;
    }
    let message: String = message.chars().take(MESSAGE_CHARS_MAX).collect();
    // A program without `Inference` may also exit with code 0, without having done anything.
    let lacks_report =
        end == AttemptEnd::Completed && status.stage != Role::Work && !status.reported;
    let (end, reason, message) = match lacks_report {
        true => (AttemptEnd::Infrastructure, "SaidNothing", EXIT_WITHOUT_REPORT.to_owned()),
        false => (end, reason, message),
    };
    let end_of_slot = ProcessEnd {
        slot,
        attempt,
        end,
        reason: reason.to_owned(),
        message: Some(message),
        // Not needed: the report of a commit has already reset the counts.
        has_committed: false,
        at: now,
    };
    record_process_end(status, end_of_slot, max_restarts);
    let Some(worker) = status.workers.get_mut(slot as usize) else { return };
    let wait = back_off(end, worker, &BackOffLimits::CLUSTER);
    worker.not_before = (!wait.is_zero()).then(|| now.plus(wait.as_secs()));
    worker.has_pod = false;
}

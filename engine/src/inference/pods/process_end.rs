//! Records ends of a job's processes, with the back-off of their slots.

use stoker_api::inference::{InferenceStatus, Role, WorkerEnd, WorkerStatus};
use stoker_api::time::Timestamp;
use stoker_api::trial::AttemptEnd;

use super::super::{ProcessEnd, back_off, record_process_end};
use crate::trial::BackOffLimits;

/// Message for a process that exited with code 0 without a report.
const EXIT_WITHOUT_REPORT: &str = "the process exited with code 0 without a report; the job's \
                                   program must implement `Inference`, and a wrapper script must \
                                   pass on its exit code";
/// Latest ends that are kept.
const ENDS_MAX: usize = 16;
/// Maximum length of an end's message, in characters. A status must stay small.
const MESSAGE_CHARS_MAX: usize = 1000;

/// Records the end of an attempt and the back-off of its slot. Keeps reason and message of an end
/// other than `Completed`.
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
    let role = status.stage;
    // A program without `Inference` may also exit with code 0, without having done anything.
    let lacks_report = end == AttemptEnd::Completed && role != Role::Work && !status.reported;
    let (end, reason, message) = match lacks_report {
        true => (AttemptEnd::Infrastructure, "SaidNothing", EXIT_WITHOUT_REPORT.to_owned()),
        false => (end, reason, message),
    };
    if end != AttemptEnd::Completed {
        let reason = reason.to_owned();
        let at = now;
        let message = message.clone();
        status.ends.push(WorkerEnd { attempt, role, slot, end, reason, message, at });
        let extra = status.ends.len().saturating_sub(ENDS_MAX);
        status.ends.drain(..extra);
    }
    // `has_committed` is not needed: the report of a commit has already reset the counts.
    let end_of_slot =
        ProcessEnd { slot, attempt, end, message: Some(message), has_committed: false };
    record_process_end(status, end_of_slot, max_restarts);
    let Some(worker) = status.workers.get_mut(slot as usize) else { return };
    let wait = back_off(end, worker, &BackOffLimits::CLUSTER);
    worker.not_before = (!wait.is_zero()).then(|| now.plus(wait.as_secs()));
    worker.has_pod = false;
}

//! Refusals by the API server, as an experiment reports them.

use std::borrow::Borrow;

use stoker_api::condition::{self, Condition, ConditionStatus};
use stoker_api::experiment::{ExperimentStatus, Phase};
use stoker_api::time::Timestamp;
use stoker_api::trial::{Attempt, AttemptEnd};

use super::TrialRecord;
use crate::trial::{closed, first_counted_attempt};

/// Reason of an attempt whose pods the API server refuses as malformed. They follow from the
/// experiment's spec, which cannot change.
pub const POD_INVALID: &str = "PodInvalid";
/// Reason for pods and trials that a policy, a webhook or a default of the cluster rejects.
pub const ADMISSION_REFUSED: &str = "AdmissionRefused";
/// Reason for the first trial of an experiment if the API server refuses it as malformed.
pub const TRIAL_INVALID: &str = "TrialInvalid";
/// Reasons of attempts that the API server refused, or that lack a storage.
const REFUSALS: [&str; 5] =
    [POD_INVALID, "QuotaExceeded", ADMISSION_REFUSED, "NameTaken", "NoStorage"];

/// A write that the API server refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Reason in one word.
    pub reason: String,
    /// Message of the API server.
    pub message: String,
}

impl Refusal {
    /// Returns whether a retry would be refused too.
    pub fn is_final(&self) -> bool {
        [POD_INVALID, TRIAL_INVALID].contains(&self.reason.as_str())
    }
}

/// Returns the refusal that stops one of these trials: a final one first, then that of the lowest
/// index.
pub fn refusal<R: Borrow<TrialRecord>>(trials: &[R]) -> Option<Refusal> {
    let refusals = trials.iter().map(Borrow::borrow).filter_map(|record: &TrialRecord| {
        let attempt = refused(record)?;
        let reason = attempt.reason.clone()?;
        let message = attempt.message.clone().unwrap_or_default();
        let refusal = Refusal { reason, message };
        (refusal.is_final() || closed(record).is_none()).then_some((
            !refusal.is_final(),
            record.spec.index,
            refusal,
        ))
    });
    refusals.min_by_key(|(can_pass, index, _)| (*can_pass, *index)).map(|(_, _, refusal)| refusal)
}

/// Returns the end and the reason of an attempt whose pod the API server rejects as malformed.
/// `trials` are those of its experiment.
///
/// Pods follow from the spec, which cannot change. Once the API server has accepted pods of the
/// experiment, a change in the cluster causes the rejection, such as a new LimitRange, and a retry
/// may succeed.
pub fn malformed_pod<'a>(
    mut trials: impl Iterator<Item = &'a TrialRecord>,
) -> (AttemptEnd, &'static str) {
    match trials.any(has_had_pods) {
        true => (AttemptEnd::NotStarted, ADMISSION_REFUSED),
        false => (AttemptEnd::UserError, POD_INVALID),
    }
}

/// Returns the reason for a trial that the API server rejects as malformed, if it has accepted
/// `num_created` trials of the experiment.
///
/// All trials have the same fields. Once the API server has accepted one, a change in the cluster
/// causes the rejection, such as other definitions or a webhook. A retry may succeed, and the other
/// trials continue.
pub fn malformed_trial(num_created: u32) -> &'static str {
    if num_created == 0 { TRIAL_INVALID } else { ADMISSION_REFUSED }
}

/// Returns whether the API server has accepted the pods of an attempt. It may no longer be listed,
/// but a trial that has trained had pods.
fn has_had_pods(record: &TrialRecord) -> bool {
    let status = &record.status;
    let has_trained = status.batches > 0 || !status.checkpoints.is_empty();
    has_trained || status.attempts.iter().any(|attempt| attempt.has_pods)
}

/// Returns the refused attempt because of which a trial waits or has failed. Attempts before the
/// trial was reopened do not count.
fn refused(record: &TrialRecord) -> Option<&Attempt> {
    let first = first_counted_attempt(record);
    let attempts = record.status.attempts.iter().rev();
    let mut attempts = attempts.filter(|attempt| attempt.number >= first);
    let mut last = attempts.next()?;
    // The API server has not answered yet about the pods of this attempt.
    if last.end.is_none() && !last.has_pods {
        last = attempts.next()?;
    }
    let reason = last.reason.as_deref()?;
    (last.end.is_some() && REFUSALS.contains(&reason)).then_some(last)
}

/// Reports by the condition `Valid` that nothing is decided, because the search or a trial cannot
/// be read. Returns whether the message is new. [`conditions`](super::conditions) of the next
/// decision sets the condition back.
pub fn set_unreadable(
    status: &mut ExperimentStatus,
    message: &str,
    generation: i64,
    now: Timestamp,
) -> bool {
    let mut valid = Condition {
        type_: "Valid".to_owned(),
        status: ConditionStatus::False,
        observed_generation: generation,
        last_transition_time: now,
        reason: "Unreadable".to_owned(),
        message: message.to_owned(),
    };
    condition::bound(&mut valid);
    let before = condition::find(&status.conditions, "Valid");
    let is_new = before
        .is_none_or(|before| (&before.reason, &before.message) != (&valid.reason, &valid.message));
    condition::set(&mut status.conditions, valid);
    is_new
}

/// Sets the condition `Refused` and the message of an experiment.
pub fn set_refusal(
    status: &mut ExperimentStatus,
    refusal: Option<&Refusal>,
    generation: i64,
    now: Timestamp,
) {
    let condition = |type_: &str, holds: bool, reason: &str, message: &str| Condition {
        type_: type_.to_owned(),
        status: ConditionStatus::from(holds),
        observed_generation: generation,
        last_transition_time: now,
        reason: reason.to_owned(),
        message: message.to_owned(),
    };
    let conditions = &mut status.conditions;
    let Some(Refusal { reason, message }) = refusal else {
        if condition::find(conditions, "Refused").is_some() {
            condition::set(conditions, condition("Refused", false, "Accepted", ""));
        }
        return;
    };
    condition::set(conditions, condition("Refused", true, reason, message));
    if status.phase.is_terminal() {
        return;
    }
    if status.trials_running == 0 {
        condition::set(conditions, condition("Running", false, reason, message));
    }
    if status.phase == Phase::Pending {
        status.reason = Some(reason.clone());
    }
    status.message = Some(message.clone());
}

/// Returns the status of an experiment that a final refusal fails.
pub fn failed(status: ExperimentStatus, refusal: &Refusal) -> ExperimentStatus {
    let message = Some(refusal.message.clone());
    ExperimentStatus { phase: Phase::Failed, reason: None, message, trials_running: 0, ..status }
}

#[cfg(test)]
mod tests {
    use stoker_api::trial::CloseCause;

    use super::*;
    use crate::experiment::conditions;
    use crate::fixture::plain_record;
    use crate::trial::close;

    /// Attempts are reasons of ended ones, `*` for one with pods, `?` for one without, and `.` for
    /// a closed trial.
    fn record(index: u32, text: &str) -> TrialRecord {
        let mut record = plain_record(index);
        for (number, word) in (0..).zip(text.split_whitespace().filter(|word| *word != ".")) {
            let is_live = ["*", "?"].contains(&word);
            record.status.attempts.push(Attempt {
                number,
                end: (!is_live).then_some(AttemptEnd::NotStarted),
                has_pods: word == "*",
                reason: (!is_live).then(|| word.to_owned()),
                message: Some(format!("{index}/{number}")),
                ..Attempt::default()
            });
        }
        if text.ends_with('.') {
            close(&mut record, CloseCause::Failed, None);
        }
        record
    }

    #[test]
    fn experiment_reports_the_first_refusal() {
        let check = |trials: &[&str], expected: Option<(&str, &str)>| {
            let records: Vec<_> =
                (0..).zip(trials).map(|(index, text)| record(index, text)).collect();
            let found = refusal(&records);
            let found = found.as_ref().map(|found| (found.reason.as_str(), found.message.as_str()));
            assert_eq!(found, expected, "{trials:?}");
        };
        check(&["", "*", "Unschedulable"], None);
        check(&["*", "QuotaExceeded", "NameTaken"], Some(("QuotaExceeded", "1/0")));
        check(&["QuotaExceeded ?"], Some(("QuotaExceeded", "0/0")));
        check(&["QuotaExceeded *"], None);
        check(&["QuotaExceeded NodeLost"], None);
        check(&["AdmissionRefused ."], None);
        check(&["QuotaExceeded", "PodInvalid ."], Some(("PodInvalid", "1/0")));
    }

    #[test]
    fn malformed_pods_wait_after_accepted_ones() {
        let check = |trials: &[&str], expected: (AttemptEnd, &str)| {
            let records: Vec<_> =
                (0..).zip(trials).map(|(index, text)| record(index, text)).collect();
            assert_eq!(malformed_pod(records.iter()), expected, "{trials:?}");
        };
        let fails = (AttemptEnd::UserError, "PodInvalid");
        let waits = (AttemptEnd::NotStarted, "AdmissionRefused");
        check(&["?"], fails);
        check(&["?", "?", ""], fails);
        check(&["QuotaExceeded ?"], fails);
        check(&["PodInvalid .", "?"], fails);
        check(&["* ?"], waits);
        check(&["?", "*"], waits);
        check(&["?", "* ."], waits);
        // The attempt with pods is no longer listed.
        let mut long = record(0, "AdmissionRefused AdmissionRefused ?");
        long.status.attempts.remove(0);
        assert_eq!(malformed_pod([&long].into_iter()), fails);
        long.status.batches = 1;
        assert_eq!(malformed_pod([&long].into_iter()), waits);
    }

    #[test]
    fn unreadable_objects_are_reported_until_repaired() {
        let mut status = ExperimentStatus { phase: Phase::Running, ..ExperimentStatus::default() };
        let set = |status: &mut ExperimentStatus, message: &str, generation, now| {
            set_unreadable(status, message, generation, Timestamp(now))
        };
        let valid = |status: &ExperimentStatus| {
            let valid = condition::find(&status.conditions, "Valid").unwrap();
            let holds = valid.status == ConditionStatus::True;
            (holds, valid.reason.clone(), valid.observed_generation, valid.last_transition_time.0)
        };
        status = conditions(&status.clone(), status, 1, Timestamp(1));
        assert!(set(&mut status, "trial a-0 cannot be parsed", 1, 2));
        assert_eq!(valid(&status), (false, "Unreadable".to_owned(), 1, 2));
        // An event is emitted once, but the condition follows edits.
        assert!(!set(&mut status, "trial a-0 cannot be parsed", 2, 3));
        assert_eq!(valid(&status), (false, "Unreadable".to_owned(), 2, 2));
        let long = "x".repeat(9999);
        assert!(set(&mut status, &long, 2, 4));
        assert!(!set(&mut status, &long, 2, 5));
        assert_eq!(condition::find(&status.conditions, "Valid").unwrap().message.len(), 1000);
        let repaired = conditions(&status.clone(), status, 2, Timestamp(6));
        assert_eq!(valid(&repaired), (true, "Accepted".to_owned(), 2, 6));
    }

    #[test]
    fn refusal_is_reported_until_it_passes() {
        let mut status = ExperimentStatus { phase: Phase::Running, ..ExperimentStatus::default() };
        set_refusal(&mut status, None, 1, Timestamp(1));
        assert_eq!(status.conditions, []);
        let refusal = Refusal { reason: "QuotaExceeded".into(), message: "exceeded quota".into() };
        set_refusal(&mut status, Some(&refusal), 1, Timestamp(2));
        let of = |status: &ExperimentStatus, type_: &str| {
            let found = condition::find(&status.conditions, type_).unwrap();
            (found.status == ConditionStatus::True, found.reason.clone(), found.message.clone())
        };
        let words = || ("QuotaExceeded".to_owned(), "exceeded quota".to_owned());
        let (reason, message) = words();
        assert_eq!(of(&status, "Refused"), (true, reason, message));
        let (reason, message) = words();
        assert_eq!(of(&status, "Running"), (false, reason, message));
        assert_eq!(status.message.as_deref(), Some("exceeded quota"));
        assert_eq!(status.reason, None, "only a pending experiment has a reason");
        set_refusal(&mut status, None, 1, Timestamp(3));
        assert_eq!(of(&status, "Refused"), (false, "Accepted".into(), String::new()));
        status.phase = Phase::Pending;
        set_refusal(&mut status, Some(&refusal), 1, Timestamp(4));
        assert_eq!(status.reason.as_deref(), Some("QuotaExceeded"));
        status.trials_running = 1;
        let failed = failed(status.clone(), &refusal);
        assert_eq!(failed.trials_running, 0);
        let message = Some("exceeded quota".to_owned());
        assert_eq!((failed.phase, failed.reason, failed.message), (Phase::Failed, None, message));
        assert_eq!(failed.conditions, status.conditions);
        let failed = super::failed(ExperimentStatus::default(), &refusal);
        assert_eq!(failed.message.as_deref(), Some("exceeded quota"));
    }
}

//! Messages of trials that rejected their hyperparameters.

use stoker_api::text::is_truncated;
use stoker_api::trial::{CloseCause, Fact, Grant};

use super::{Ledger, Record};
use crate::search::turn::Event;
use crate::trial::TrialRecord;

impl Ledger {
    /// Notes the message of a recorded rejection, whose turn is replayed next.
    pub(super) fn note_rejection(
        &mut self,
        trial: u32,
        grant: &Grant,
        events: &[Event],
        record: Record<'_>,
    ) {
        let has_ranks = self.has_ranks();
        let noted = record.trials.get(&trial).and_then(|record| {
            let fact = record.status.facts.get(grant.fact? as usize)?;
            message(fact, record, has_ranks)
        });
        if let (Some(message), [event]) = (noted, events) {
            self.search.note_rejection(event, message);
        }
    }

    /// Returns whether a trial may have several ranks, so that messages name the rank.
    pub(super) fn has_ranks(&self) -> bool {
        self.config.slots > 1
    }
}

/// Returns the message of a trial that rejected its hyperparameters, without the pod, the exit code
/// and the rank that reported it. A message that was cut may lack its values, so it is `None`.
pub(super) fn message<'a>(
    fact: &Fact,
    record: &'a TrialRecord,
    has_ranks: bool,
) -> Option<&'a str> {
    let cause = CloseCause::InvalidHyperparameters;
    let is_rejection = matches!(fact, Fact::Closed(closed) if closed.cause == cause);
    let message = record.status.message.as_deref().filter(|_| is_rejection)?;
    if is_truncated(message) {
        return None;
    }
    let is_number = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    let message = without(message, "pod ", |name| !name.contains(' '));
    let message = without(message, "exit code ", is_number);
    Some(if has_ranks { without(message, "rank ", is_number) } else { message })
}

/// Removes a prefix with what follows up to the next colon, if this `is_valid`.
fn without<'a>(text: &'a str, prefix: &str, is_valid: impl Fn(&str) -> bool) -> &'a str {
    let parts = text.strip_prefix(prefix).and_then(|rest| rest.split_once(": "));
    parts.filter(|(before, _)| is_valid(before)).map_or(text, |(_, rest)| rest)
}

#[cfg(test)]
mod tests {
    use stoker_api::experiment::Phase;

    use super::super::tests::case::{Case, random};
    use crate::experiment::Summary;

    /// Rejects the trials in order. Expects that the search creates no more after `expected` of
    /// them, but no earlier.
    fn check(first: u32, expected: u32, message: impl Fn(u32) -> String) {
        check_with(1, first, expected, message);
    }

    fn check_with(slots: u32, first: u32, expected: u32, message: impl Fn(u32) -> String) {
        let mut case = Case::new(random(4));
        case.config.slots = slots;
        case.ledger.config.slots = slots;
        for trial in first..first + expected {
            assert!(!case.ledger.has_given_up(), "{trial}");
            case.reject(trial, &message(trial));
        }
        assert!(case.ledger.has_given_up() || !case.ledger.book().may_replace());
    }

    #[test]
    fn equal_rejections_end_a_search_early() {
        check(0, 40, |_| "no batch size".to_owned());
        check(0, 40, |trial| format!("pod mnist-{trial}-0-0: exit code 78: no batch size"));
        // Parts of the program's message.
        check(0, 101, |trial| format!("rank {trial}: no multiple of 4"));
        check_with(2, 0, 101, |trial| format!("rank of layer {trial}: too large"));
        check(0, 101, |trial| format!("exit code of solver {trial}: no solution"));
        // Values may have been cut off.
        check(0, 101, |_| "no batch…".to_owned());
        check_with(2, 0, 40, |trial| format!("rank {}: no batch size", trial % 2));
        // Replacements end after more than 100 rejections.
        check(0, 101, |trial| format!("hidden {trial} is odd"));
        check(0, 101, |trial| if trial == 7 { "odd" } else { "no batch size" }.to_owned());
        // Trial 0 trains, so the program has accepted it.
        check(1, 101, |_| "no batch size".to_owned());
    }

    #[test]
    fn message_names_the_reason_of_equal_rejections() {
        let mut case = Case::new(random(4));
        (0..41).for_each(|trial| case.reject(trial, "no batch size"));
        assert!(case.ledger.book().is_finished());
        let summary = Summary::new(&case.config, case.trials.values());
        let status = summary.status(&case.ledger, false, "mnist", |trial| case.trials.get(&trial));
        let expected = "the program rejected the hyperparameters of all 41 trials with the same \
                        message, so no more were created: trial 0: no batch size; change \
                        spec.hyperparameters or the program's checks";
        assert_eq!((status.phase, status.message.as_deref()), (Phase::Failed, Some(expected)));
    }

    #[test]
    fn late_result_resumes_a_search_with_equal_rejections() {
        let mut case = Case::new(random(4));
        (0..40).for_each(|trial| case.reject(trial, "no batch size"));
        assert_eq!(case.ledger.book().next_index(), 41);
        case.result(40);
        assert_eq!(case.ledger.book().next_index(), 43);
    }
}

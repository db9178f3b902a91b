//! Messages of trials that rejected their hyperparameters.

use stoker_api::trial::{CloseCause, Fact, Grant};

use super::{Ledger, Record};
use crate::search::turn::Event;
use crate::trial::TrialRecord;

/// Beginnings of messages that differ between trials: the pod, its exit code and the rank.
const PREFIXES: [&str; 3] = ["pod ", "exit code ", "rank "];

impl Ledger {
    /// Notes the message of a recorded rejection, whose turn is replayed next.
    pub(super) fn note_rejection(
        &mut self,
        trial: u32,
        grant: &Grant,
        events: &[Event],
        record: Record<'_>,
    ) {
        let noted = record.trials.get(&trial).and_then(|record| {
            let fact = record.status.facts.get(grant.fact? as usize)?;
            message(fact, record)
        });
        if let (Some(message), [event]) = (noted, events) {
            self.search.note_rejection(event, message);
        }
    }
}

/// Returns the message of a trial that rejected its hyperparameters, without the pod and the rank
/// that reported it.
pub(super) fn message<'a>(fact: &Fact, record: &'a TrialRecord) -> Option<&'a str> {
    let cause = CloseCause::InvalidHyperparameters;
    let is_rejection = matches!(fact, Fact::Closed(closed) if closed.cause == cause);
    let message = record.status.message.as_deref().filter(|_| is_rejection)?;
    Some(PREFIXES.iter().fold(message, |text, prefix| without(text, prefix)))
}

/// Removes a prefix up to the next colon.
fn without<'a>(text: &'a str, prefix: &str) -> &'a str {
    let rest = text.strip_prefix(prefix).and_then(|rest| rest.split_once(": "));
    rest.map_or(text, |(_, rest)| rest)
}

#[cfg(test)]
mod tests {
    use stoker_api::experiment::Phase;

    use super::super::tests::case::{Case, random};
    use crate::experiment::Summary;

    /// Rejects the trials in order. Expects that the search creates no more after `expected` of
    /// them, but no earlier.
    fn check(first: u32, expected: u32, message: impl Fn(u32) -> String) {
        let mut case = Case::new(random(4));
        for trial in first..first + expected {
            assert!(!case.ledger.has_given_up(), "{trial}");
            case.reject(trial, &message(trial));
        }
        assert!(case.ledger.has_given_up() || !case.ledger.book().may_replace());
    }

    #[test]
    fn equal_rejections_end_a_search_early() {
        check(0, 40, |_| "no batch size".to_owned());
        check(0, 40, |trial| {
            format!("pod mnist-{trial}-0-{trial}: exit code 78: rank {trial}: no batch size")
        });
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

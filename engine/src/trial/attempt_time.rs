//! Time for which the attempts of a trial hold slots, and the end of a trial.

use stoker_api::time::Timestamp;
use stoker_api::trial::{Attempt, AttemptEnd, Fact, TrialStatus};

use super::TrialRecord;

/// Returns when an ended trial ended. Local runs record this only as a fact.
pub fn ended_at(status: &TrialStatus) -> Option<Timestamp> {
    let closed = |fact: &Fact| match fact {
        Fact::Closed(closed) => closed.at,
        Fact::Result(_) | Fact::Reopened(_) => None,
    };
    let last = || status.facts.iter().rev().find_map(closed);
    status.ended_at.or_else(last).filter(|_| status.phase.is_terminal())
}

/// Returns the seconds of the attempts that have ended.
pub(crate) fn ended_seconds(record: &TrialRecord) -> u64 {
    let listed: u64 = record.status.attempts.iter().map(seconds).sum();
    record.status.unlisted_attempt_seconds + listed
}

/// Returns since when the live attempt holds slots; `None` without one.
pub(crate) fn running_since(record: &TrialRecord) -> Option<Timestamp> {
    record.status.attempts.last().filter(|attempt| attempt.end.is_none()).and_then(since)
}

/// Returns the seconds for which attempts of a trial have held slots, as `limits.slotSeconds`
/// counts them. A live attempt counts up to `now`, or not at all without it.
pub fn held_seconds(record: &TrialRecord, now: Option<Timestamp>) -> u64 {
    let live = now.zip(running_since(record)).map_or(0, |(now, since)| now.seconds_since(since));
    ended_seconds(record) + live
}

/// Returns the seconds of [`held_seconds`] up to a time. Attempts that are no longer listed count
/// as a whole, because their times are unknown.
pub fn held_seconds_until(record: &TrialRecord, at: Timestamp) -> u64 {
    let of = |attempt: &Attempt| match (since(attempt), attempt.ended_at) {
        (Some(since), None) if attempt.end.is_none() => at.seconds_since(since),
        (Some(since), Some(_)) => seconds(attempt).min(at.seconds_since(since)),
        _ => 0,
    };
    record.status.unlisted_attempt_seconds + record.status.attempts.iter().map(of).sum::<u64>()
}

/// Returns the seconds of an attempt; 0 while it is alive.
pub(super) fn seconds(attempt: &Attempt) -> u64 {
    if attempt.end == Some(AttemptEnd::NotStarted) {
        return 0;
    }
    let times = since(attempt).zip(attempt.ended_at);
    times.map_or(0, |(since, ended_at)| ended_at.seconds_since(since))
}

/// Returns since when an attempt holds slots. Pods with scheduling gates hold none.
fn since(attempt: &Attempt) -> Option<Timestamp> {
    if attempt.has_pods { attempt.ungated_at } else { attempt.started_at }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::plain_record;
    use crate::trial::{ATTEMPTS_MAX, begin_attempt};

    /// Checks the seconds of an ended attempt that started at 10.
    fn check(has_pods: bool, ungated_at: Option<i64>, end: AttemptEnd, expected: u64) {
        let mut record = plain_record(0);
        record.status.attempts.push(Attempt {
            started_at: Some(Timestamp(10)),
            ungated_at: ungated_at.map(Timestamp),
            ended_at: Some(Timestamp(40)),
            end: Some(end),
            has_pods,
            ..Attempt::default()
        });
        assert_eq!(ended_seconds(&record), expected, "{record:?}");
        assert_eq!(held_seconds(&record, Some(Timestamp(50))), expected, "{record:?}");
        assert_eq!(held_seconds_until(&record, Timestamp(50)), expected, "{record:?}");
        let until = held_seconds_until(&record, Timestamp(30));
        assert_eq!(until, expected.saturating_sub(10), "{record:?}");
        assert_eq!(running_since(&record), None);
    }

    #[test]
    fn attempts_count_while_they_hold_slots() {
        check(false, None, AttemptEnd::Completed, 30);
        check(true, Some(25), AttemptEnd::UserError, 15);
        check(true, None, AttemptEnd::RunnerLost, 0);
        check(true, Some(25), AttemptEnd::NotStarted, 0);
    }

    #[test]
    fn attempts_that_are_no_longer_listed_count() {
        let mut record = plain_record(0);
        let num = ATTEMPTS_MAX as u32 + 3;
        for number in 0..num {
            begin_attempt(&mut record, number);
            let attempt = record.status.attempts.last_mut().unwrap();
            attempt.started_at = Some(Timestamp(0));
            attempt.ended_at = Some(Timestamp(2));
            attempt.end = Some(AttemptEnd::Preempted);
        }
        assert_eq!(record.status.attempts.len(), ATTEMPTS_MAX);
        assert_eq!(ended_seconds(&record), u64::from(num) * 2);
        begin_attempt(&mut record, num);
        record.status.attempts.last_mut().unwrap().started_at = Some(Timestamp(5));
        assert_eq!(ended_seconds(&record), u64::from(num) * 2);
        assert_eq!(running_since(&record), Some(Timestamp(5)));
        assert_eq!(held_seconds(&record, None), u64::from(num) * 2);
        assert_eq!(held_seconds(&record, Some(Timestamp(12))), u64::from(num) * 2 + 7);
        assert_eq!(held_seconds_until(&record, Timestamp(12)), u64::from(num) * 2 + 7);
    }
}

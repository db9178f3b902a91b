//! Attempts whose checkpoints the record may lack.

use super::{TrialRecord, attempt_of, first_counted_attempt};

/// Returns the first attempt before `number` that may have stored checkpoints which the record
/// lacks; `None` if there is none. For example, the report server was unavailable, and rank 0 was
/// killed before it could pass on its reports.
///
/// Attempt `number` looks for these checkpoints before it starts. So a checkpoint that an earlier
/// attempt stores later is without effect: if an attempt has reported a start from a checkpoint, or
/// a checkpoint, those of earlier attempts do not count. Neither do those from before the trial was
/// reopened, which a clean-up deletes.
pub fn unreported_since(record: &TrialRecord, number: u32) -> Option<u32> {
    let earlier = || record.status.attempts.iter().filter(move |attempt| attempt.number < number);
    let last = earlier().map(|attempt| attempt.number).max()?;
    let resumed = earlier().filter(|attempt| attempt.resumed_from.is_some());
    let resumed = resumed.map(|attempt| attempt.number).max();
    let checkpoints = record.status.checkpoints.iter();
    let saved = checkpoints.filter_map(|checkpoint| attempt_of(&checkpoint.name));
    let saved = saved.filter(|attempt| *attempt < number).max();
    let first = resumed.max(saved).unwrap_or_default().max(first_counted_attempt(record));
    (first <= last).then_some(first)
}

#[cfg(test)]
mod tests {
    use stoker_api::names::checkpoint_name;
    use stoker_api::trial::{Attempt, CheckpointRecord, Fact, ReopenedFact};

    use super::*;
    use crate::fixture::plain_record;

    /// Returns a record of attempts, with whether each reported a start from a checkpoint, and of
    /// checkpoints of these attempts.
    fn record(resumed: &[bool], saved: &[u32]) -> TrialRecord {
        let mut record = plain_record(0);
        for (number, resumed) in (0..).zip(resumed) {
            let resumed_from = resumed.then(|| checkpoint_name(10, 0));
            record.status.attempts.push(Attempt { number, resumed_from, ..Attempt::default() });
        }
        for attempt in saved {
            record.status.checkpoints.push(CheckpointRecord {
                name: checkpoint_name(20, *attempt),
                batches: 20,
                metric: None,
                manifest_sha256: String::new(),
                bytes: 1,
                refused: false,
            });
        }
        record
    }

    #[test]
    fn checkpoints_may_be_missing_since_the_last_reported_start() {
        let check = |resumed: &[bool], saved: &[u32], number, expected| {
            let record = record(resumed, saved);
            assert_eq!(unreported_since(&record, number), expected, "{resumed:?} {saved:?}");
        };
        check(&[], &[], 0, None);
        check(&[false], &[], 1, Some(0));
        check(&[false], &[0], 1, Some(0));
        // Attempt 1 reported nothing. It may have resumed from any checkpoint of attempt 0.
        check(&[false, false], &[0], 2, Some(0));
        check(&[false, true], &[0], 2, Some(1));
        check(&[false, false, false], &[0, 1], 3, Some(1));
        check(&[false, true, false, false], &[0], 4, Some(1));
        // The record already contains the attempt that starts.
        check(&[false], &[], 0, None);
        check(&[false, true], &[0, 1], 1, Some(0));
    }

    #[test]
    fn checkpoints_before_a_reopening_do_not_count() {
        let mut record = record(&[false, true], &[0]);
        let reopened = ReopenedFact { number: 1, attempt: 2, at: None };
        record.status.facts.push(Fact::Reopened(reopened));
        assert_eq!(unreported_since(&record, 2), None);
        record.status.attempts.push(Attempt { number: 2, ..Attempt::default() });
        assert_eq!(unreported_since(&record, 3), Some(2));
    }
}

//! Trained length of a trial, as it follows from its record.
//!
//! A trainer reports two numbers of batches: those trained, and those in its granted length. The
//! search grants a longer length after a result. Until the trainer reports again, the second number
//! belongs to the earlier length. The record does not contain that length, so it is inferred.

use stoker_api::trial::{Fact, ResultFact, TrialStatus};

use super::TrialRecord;

/// Returns the length that a trial has trained, in its unit: the length of its longest result, or
/// more if reported batches belong to a longer length. If the record does not show to which length
/// they belong, the shorter one counts.
pub fn trained_units(record: &TrialRecord) -> f64 {
    let TrialStatus { batches, batches_total, .. } = record.status;
    let of_result = longest_result(record).map_or(0, |result| result.units) as f64;
    match reported_length(record) {
        Some(units) if batches_total > 0 => {
            let of_batches = batches.min(batches_total) as f64 / batches_total as f64;
            of_result.max(units as f64 * of_batches)
        }
        _ => of_result,
    }
}

/// Returns the number of batches in one unit of a trial's length; `None` if no report has contained
/// the number of batches in a granted length.
pub fn batches_per_unit(record: &TrialRecord) -> Option<f64> {
    let TrialStatus { batches, batches_total, .. } = record.status;
    let (batches, units) = match reported_length(record) {
        Some(units) => (batches_total, units),
        // A short length may be complete before any report contains its number of batches.
        None => (batches.max(batches_total), longest_result(record)?.units),
    };
    (batches_total > 0 && units > 0).then(|| batches as f64 / units as f64)
}

/// Returns the length to which the reported batches belong, if it is longer than the longest
/// result.
///
/// A length has its result only after all of its batches. So the batches belong to a longer length
/// while some are missing. When none is missing, either the result of that length is still due, or
/// the batches are those of the longest result.
fn reported_length(record: &TrialRecord) -> Option<u64> {
    let TrialStatus { batches, batches_total, .. } = record.status;
    let result_units = longest_result(record).map_or(0, |result| result.units);
    let is_due = result_units == 0
        || batches < batches_total
        || has_resumed_since_result(record)
        || is_completing(record);
    let granted = record.spec.grants.iter().map(|grant| grant.units);
    let lengths = std::iter::once(record.spec.units).chain(granted);
    // Several lengths without a result exist only if the search promoted a trial that had ended.
    lengths.filter(|units| *units > result_units).min().filter(|_| is_due)
}

/// Returns whether an attempt that began after the longest result has reported its start. An
/// attempt begins only if the granted length lacks a result. Starts from scratch do not count: the
/// record does not show them.
fn has_resumed_since_result(record: &TrialRecord) -> bool {
    let mut newest_first = record.status.attempts.iter().rev();
    let resumed = newest_first.find(|attempt| attempt.resumed_from.is_some());
    let started_at = resumed.and_then(|attempt| attempt.started_at);
    let result_at = longest_result(record).and_then(|result| result.at);
    result_at.zip(started_at).is_some_and(|(result_at, started_at)| result_at < started_at)
}

/// Returns whether the live attempt has trained its granted length, and validates before it reports
/// the result. Programs save a checkpoint between the validation and the result, so the newest
/// checkpoint is of an earlier batch.
fn is_completing(record: &TrialRecord) -> bool {
    let TrialStatus { batches, batches_total, attempts, checkpoints, .. } = &record.status;
    let live = attempts.last().filter(|attempt| attempt.end.is_none());
    // A later attempt without a checkpoint to resume from may not have reported its start.
    let has_started =
        live.is_some_and(|attempt| attempt.resumed_from.is_some() || attempts.len() == 1);
    let is_unsaved = checkpoints.last().is_some_and(|newest| newest.batches < *batches);
    has_started && batches == batches_total && is_unsaved
}

fn longest_result(record: &TrialRecord) -> Option<&ResultFact> {
    let results = record.status.facts.iter().filter_map(|fact| match fact {
        Fact::Result(result) => Some(result),
        Fact::Closed(_) | Fact::Reopened(_) => None,
    });
    results.max_by_key(|result| result.units)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use stoker_api::contract::ReportEvent;
    use stoker_api::names::checkpoint_name;
    use stoker_api::time::Timestamp;
    use stoker_api::trial::{AttemptEnd, Grant};

    use super::*;
    use crate::fixture::{LOSS, checkpointed, plain_record, report, validated};
    use crate::trial::{
        BackOffLimits, ReportEffect, RestartLimits, begin_attempt, end_attempt, live_attempt,
        next_attempt, record_report, stamp_facts,
    };

    /// Change of a record. Trained batches come first; the second number of `Start` and `Progress`
    /// is the number of batches in the granted length, and that of `Complete` the length.
    #[derive(Clone, Copy, Debug)]
    enum Change {
        Begin,
        Start(u64, u64),
        Progress(u64, u64),
        Save(u64),
        Complete(u64, u64),
        Promote(u64),
        End(AttemptEnd),
    }

    use Change::{Begin, Complete, End, Progress, Promote, Save, Start};

    fn apply(record: &mut TrialRecord, change: Change, now: Timestamp) {
        let attempt = live_attempt(record).unwrap_or(0);
        let (batches, event) = match change {
            Begin => {
                let number = next_attempt(record);
                begin_attempt(record, number);
                record.status.attempts.last_mut().unwrap().started_at = Some(now);
                return;
            }
            Promote(units) => {
                record.spec.grants.push(Grant { units, ..Grant::default() });
                return;
            }
            End(end) => {
                let limits = RestartLimits::new(0, BackOffLimits::CLUSTER, false);
                end_attempt(record, end, None, &limits);
                return;
            }
            Start(batches, batches_total) => {
                let resumed_from = (batches > 0).then(|| checkpoint_name(batches, 0));
                let refused = BTreeMap::new();
                (batches, ReportEvent::Started { resumed_from, batches_total, refused })
            }
            Progress(batches, batches_total) => {
                (batches, ReportEvent::Progress { batches_total, activity: None })
            }
            Save(batches) => (batches, checkpointed(&checkpoint_name(batches, attempt), None)),
            Complete(batches, units) => (batches, validated("0.5", Some(units))),
        };
        let num_facts = record.status.facts.len();
        let effect = record_report(record, &report(attempt, batches, event), &LOSS);
        assert!(matches!(effect, ReportEffect::New | ReportEffect::Repeat), "{change:?}");
        stamp_facts(record, num_facts, now);
    }

    /// Applies changes to a trial with 100 batches per unit, and checks the trained length after
    /// each. `first` is the first length.
    #[track_caller]
    fn check(first: u64, rows: &[(Change, f64)]) {
        let mut record = plain_record(0);
        record.spec.units = first;
        for (at, (change, units)) in (0..).zip(rows) {
            apply(&mut record, *change, Timestamp(at));
            let per_unit = (record.status.batches_total > 0).then_some(100.0);
            let found = (trained_units(&record), batches_per_unit(&record));
            assert_eq!(found, (*units, per_unit), "{change:?}, change {at} of {rows:?}");
        }
    }

    #[test]
    fn promoted_trial_has_its_length_until_it_trains() {
        let rows = [
            (Begin, 0.0),
            (Start(0, 400), 0.0),
            (Progress(200, 400), 2.0),
            (Progress(400, 400), 4.0),
            (Save(400), 4.0),
            (Complete(400, 4), 4.0),
            (Promote(16), 4.0),
            (End(AttemptEnd::Preempted), 4.0),
            (Begin, 4.0),
            (Start(400, 1600), 4.0),
            (Progress(800, 1600), 8.0),
            (Save(800), 8.0),
            (End(AttemptEnd::Infrastructure), 8.0),
            (Begin, 8.0),
            (Start(800, 1600), 8.0),
            (Progress(1600, 1600), 16.0),
            // It is preempted between the checkpoint and the result.
            (Save(1600), 16.0),
            (End(AttemptEnd::Preempted), 16.0),
            (Begin, 16.0),
            (Start(1600, 1600), 16.0),
            (Complete(1600, 16), 16.0),
            (End(AttemptEnd::Completed), 16.0),
            // The user raises `maxLength`.
            (Promote(64), 16.0),
        ];
        check(4, &rows);
    }

    #[test]
    fn live_attempt_may_be_promoted() {
        let mut rows = vec![
            (Begin, 0.0),
            (Start(0, 400), 0.0),
            (Save(400), 4.0),
            (Complete(400, 4), 4.0),
            (Promote(16), 4.0),
            (Progress(400, 400), 4.0),
            (Progress(500, 1600), 5.0),
            // The validation before the result.
            (Progress(1600, 1600), 16.0),
            (Complete(1600, 16), 16.0),
        ];
        check(4, &rows);
        // It is killed before it trains further.
        rows.truncate(5);
        rows.push((End(AttemptEnd::RunnerLost), 4.0));
        check(4, &rows);
    }

    #[test]
    fn short_lengths_need_no_report_of_their_batches() {
        let rows = [
            (Begin, 0.0),
            (Start(0, 100), 0.0),
            (Complete(100, 1), 1.0),
            (Promote(4), 1.0),
            (Complete(400, 4), 4.0),
            (Promote(16), 4.0),
            (End(AttemptEnd::Preempted), 4.0),
            (Begin, 4.0),
            (Start(400, 1600), 4.0),
        ];
        check(1, &rows);
    }

    #[test]
    fn trained_length_needs_no_checkpoint_at_the_result() {
        let mut rows = vec![
            (Begin, 0.0),
            (Start(0, 400), 0.0),
            (Save(300), 3.0),
            (Complete(400, 4), 4.0),
            (End(AttemptEnd::Preempted), 4.0),
            (Promote(16), 4.0),
            (Begin, 4.0),
            (Start(300, 1600), 4.0),
            (Progress(600, 1600), 6.0),
        ];
        check(4, &rows);
        // Without a checkpoint, the trial starts from scratch.
        rows.remove(2);
        rows.truncate(6);
        rows.extend([(Start(0, 1600), 4.0), (Progress(600, 1600), 6.0)]);
        check(4, &rows);
    }

    #[test]
    fn ended_trial_that_is_promoted_trained_no_more() {
        let end = End(AttemptEnd::InvalidHyperparameters);
        let mut rows = vec![(Begin, 0.0), (Start(0, 400), 0.0), (Progress(200, 400), 2.0)];
        rows.extend([(end, 2.0), (Promote(16), 2.0)]);
        check(4, &rows);
    }

    /// The program counts its length by a metric.
    #[test]
    fn only_results_count_without_numbers_of_batches() {
        let rows = [(Begin, 0.0), (Start(0, 0), 0.0), (Complete(50, 4), 4.0), (Promote(16), 4.0)];
        check(4, &rows);
    }
}

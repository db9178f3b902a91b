//! What a report adds to a trial's record.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use stoker_api::contract::{ACTIVITY_CHARS_MAX, Report, ReportEvent};
use stoker_api::names::{checkpoint_name, parse_checkpoint_name};
use stoker_api::number;
use stoker_api::trial::{CheckpointRecord, Fact, ResultFact};

use super::{TrialRecord, attempt_of, budget, closed, live_attempt, result_at};

/// The metric by which trials are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SearchedMetric<'a> {
    /// Its name among those of a validation.
    pub name: &'a str,
    /// Whether a smaller one is better.
    pub smaller_is_better: bool,
}

impl SearchedMetric<'_> {
    /// Whether a metric of this name is the searched one, if a validation has it.
    pub(super) fn is_named(&self, name: &str) -> bool {
        let long = |suffix| name.strip_prefix("validation_") == Some(suffix);
        name == self.name || self.name.strip_prefix("val_").is_some_and(long)
    }

    /// The searched metric among those of a validation. The prefix `val_` stands for `validation_`.
    pub fn of<'m>(&self, metrics: &'m BTreeMap<String, String>) -> Option<&'m String> {
        let long = || metrics.get(&format!("validation_{}", self.name.strip_prefix("val_")?));
        metrics.get(self.name).or_else(long)
    }
}

/// What a report did to the record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Recorded {
    /// It changed the record, which must be written before the report is answered.
    New,
    /// It said nothing new.
    Repeat,
    /// It came from an attempt that is over; nothing was recorded.
    Fenced,
    /// It cannot be true; nothing was recorded. No report like it will ever be taken.
    Refused {
        /// What is wrong with it.
        why: String,
    },
}

/// Adds what a report says to the record. The first recorded wins: a report that comes twice, or a
/// result or checkpoint that a resumed attempt makes again, changes nothing.
///
/// Texts and maps of the report are cut to what a record has room for: see [`budget`](super::budget).
///
/// A result is taken at lengths that were granted, and only there. A searched metric that the
/// report lacks, or that is no number, is NaN. A checkpoint's name becomes part of paths: it must be
/// the one that this attempt, or one before it, gives a checkpoint of the report's batches.
pub fn record_report(
    record: &mut TrialRecord,
    report: &Report,
    searched: &SearchedMetric<'_>,
) -> Recorded {
    if closed(record).is_some() || live_attempt(record) != Some(report.attempt) {
        return Recorded::Fenced;
    }
    if let ReportEvent::Checkpointed { name, .. } = &report.event
        && let Err(why) = check_name(name, report)
    {
        return Recorded::Refused { why };
    }
    let before = record.status.clone();
    let is_latest = report.batches >= before.batches;
    match &report.event {
        ReportEvent::Started { resumed_from, batches_total, refused } => {
            record.status.batches = report.batches;
            record.status.batches_total = *batches_total;
            record.status.activity = None;
            if let Some(attempt) = record.status.attempts.last_mut() {
                attempt.resumed_from.clone_from(resumed_from);
                budget::bound_name(&mut attempt.resumed_from);
                let refused = refused.iter().map(|(name, why)| format!("{name}: {why}"));
                let refused: Vec<_> = refused.collect();
                if !refused.is_empty() {
                    attempt.message = Some(format!("passed over {}", refused.join("; ")));
                    budget::bound_message(&mut attempt.message);
                }
            }
        }
        ReportEvent::Progress { batches_total, activity } => {
            record.status.batches_total = *batches_total;
            if let Some(text) = activity {
                let text = text.chars().take(ACTIVITY_CHARS_MAX).collect();
                record.status.activity = Some(text);
                budget::bound_message(&mut record.status.activity);
            }
        }
        ReportEvent::Validated { metrics, granted_units } => {
            if is_latest {
                record.status.metrics = budget::bounded_metrics(metrics, searched);
            }
            record_best(record, searched.of(metrics), searched);
            if let Some(units) = *granted_units {
                record_result(record, units, searched.of(metrics));
            }
        }
        ReportEvent::Checkpointed { name, manifest_sha256, bytes, metric } => {
            let mut checkpoint = CheckpointRecord {
                name: name.clone(),
                batches: report.batches,
                metric: metric.clone(),
                manifest_sha256: manifest_sha256.clone(),
                bytes: *bytes,
            };
            budget::bound_checkpoint(&mut checkpoint);
            record_best(record, metric.as_ref(), searched);
            record_checkpoint(record, checkpoint);
        }
        ReportEvent::Exiting { code: _, message } => {
            if let (Some(attempt), Some(_)) = (record.status.attempts.last_mut(), message) {
                attempt.message.clone_from(message);
                budget::bound_message(&mut attempt.message);
            }
        }
    }
    record.status.batches = record.status.batches.max(report.batches);
    if record.status == before { Recorded::Repeat } else { Recorded::New }
}

fn record_result(record: &mut TrialRecord, units: u64, metric: Option<&String>) {
    let spec = &record.spec;
    let is_granted = units == spec.units || spec.grants.iter().any(|it| it.units == units);
    if !is_granted || result_at(record, units).is_some() {
        return;
    }
    let metric = metric.filter(|it| number::parse(it).is_some()).cloned();
    let mut metric = metric.unwrap_or_else(|| number::format(f64::NAN));
    number::bound(&mut metric);
    record.status.facts.push(Fact::Result(ResultFact { units, metric }));
}

/// A metric that is no number is none.
fn record_best(record: &mut TrialRecord, metric: Option<&String>, searched: &SearchedMetric<'_>) {
    let Some(metric) = metric.filter(|it| number::parse(it).is_some()) else { return };
    let best = &mut record.status.best_metric;
    let is_better = |best: &String| compare(metric, best, searched.smaller_is_better).is_lt();
    if best.as_ref().is_none_or(is_better) {
        let mut metric = metric.clone();
        number::bound(&mut metric);
        *best = Some(metric);
    }
}

/// Compares metrics as the record holds them: better first, NaN last.
pub(crate) fn compare(a: &str, b: &str, smaller_is_better: bool) -> Ordering {
    let loss = |text: &str| {
        let metric = number::parse(text).unwrap_or(f64::NAN);
        if smaller_is_better { metric } else { -metric }
    };
    compare_losses(loss(a), loss(b))
}

/// Compares by value, less first and NaN last. Zeros of either sign are equal, and so are NaNs.
pub(crate) fn compare_losses(a: f64, b: f64) -> Ordering {
    a.partial_cmp(&b).unwrap_or_else(|| a.is_nan().cmp(&b.is_nan()))
}

/// A report that an earlier attempt could not send comes as a later one's.
fn check_name(name: &str, report: &Report) -> Result<(), String> {
    let Report { batches, attempt, .. } = *report;
    match parse_checkpoint_name(name) {
        Some((of, by)) if of == batches && by <= attempt => Ok(()),
        _ => Err(format!(
            "name: {name:?} is not that of a checkpoint at batch {batches} of attempt {attempt} or \
             before: it must be {:?}",
            checkpoint_name(batches, attempt)
        )),
    }
}

/// Keeps the list in the order in which the checkpoints were written: a report may come late.
fn record_checkpoint(record: &mut TrialRecord, checkpoint: CheckpointRecord) {
    let checkpoints = &mut record.status.checkpoints;
    if checkpoints.iter().any(|it| it.name == checkpoint.name) {
        return;
    }
    let age = |it: &CheckpointRecord| (attempt_of(&it.name), it.batches);
    let place = checkpoints.partition_point(|it| age(it) <= age(&checkpoint));
    checkpoints.insert(place, checkpoint);
}

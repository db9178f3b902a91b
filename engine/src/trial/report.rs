//! Adds reports to a trial's record.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use stoker_api::contract::{ACTIVITY_CHARS_MAX, Report, ReportEvent, find_metric};
use stoker_api::experiment::Objective;
use stoker_api::names::{checkpoint_name, parse_checkpoint_name};
use stoker_api::number;
use stoker_api::trial::{CheckpointRecord, Fact, ResultCheckpoint, ResultFact};

use super::{TrialRecord, attempt_of, budget, closed, is_fresh_copy, live_attempt, result_at};

/// Metric by which trials are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SearchedMetric<'a> {
    /// Name of the metric in a validation.
    pub name: &'a str,
    /// Whether smaller values are better.
    pub smaller_is_better: bool,
    /// Other objectives, whose values results contain too.
    pub others: &'a [Objective],
    /// Whether the search copies trials. Results then contain the checkpoint to copy.
    pub is_copied: bool,
}

impl SearchedMetric<'_> {
    /// Returns the searched metric of a validation. The prefix `val_` stands for `validation_`.
    pub fn of<'m>(&self, metrics: &'m BTreeMap<String, String>) -> Option<&'m String> {
        find_metric(metrics, self.name)
    }
}

/// Effect of a report on the record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReportEffect {
    /// The report changed the record. Write the record before answering the report.
    New,
    /// The report changed nothing.
    Repeat,
    /// The report came from an attempt that has ended; nothing was recorded.
    Fenced,
    /// The report is invalid; nothing was recorded. Sending it again cannot help.
    Refused {
        /// Why the report is invalid.
        why: String,
    },
}

/// Adds a report to the record. The first recorded value wins: a repeated report, or a result or
/// checkpoint that a resumed attempt produces again, changes nothing.
///
/// Texts and maps of the report are truncated to their bounds: see [`budget`](super::budget).
///
/// A result is accepted only at granted lengths. If the report lacks the searched metric, or its
/// value is not a number, the result is NaN. A checkpoint's name becomes part of paths, so it must
/// be the name that this attempt or an earlier one gives a checkpoint at the report's batches.
pub fn record_report(
    record: &mut TrialRecord,
    report: &Report,
    searched: &SearchedMetric<'_>,
) -> ReportEffect {
    if closed(record).is_some() || live_attempt(record) != Some(report.attempt) {
        return ReportEffect::Fenced;
    }
    if let Err(why) = check_name(report).and_then(|()| check_is_copied(record, report)) {
        return ReportEffect::Refused { why };
    }
    let before = record.status.clone();
    let is_latest = report.batches >= before.batches;
    match &report.event {
        ReportEvent::Started { resumed_from, batches_total, refused } => {
            record.status.batches = report.batches;
            record.status.batches_total = *batches_total;
            record.status.activity = None;
            record_refusals(record, resumed_from.as_deref(), refused);
            if let Some(attempt) = record.status.attempts.last_mut() {
                attempt.has_started = true;
                attempt.resumed_from.clone_from(resumed_from);
                budget::bound_name(&mut attempt.resumed_from);
                if !refused.is_empty() {
                    attempt.message = Some(skipped(refused));
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
                record_result(record, units, metrics, searched);
            }
        }
        ReportEvent::Checkpointed { name, manifest_sha256, bytes, metric } => {
            let mut checkpoint = CheckpointRecord {
                name: name.clone(),
                batches: report.batches,
                metric: metric.clone(),
                manifest_sha256: manifest_sha256.clone(),
                bytes: *bytes,
                refused: false,
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
    if record.status == before { ReportEffect::Repeat } else { ReportEffect::New }
}

/// Returns the message of an attempt that could not use these checkpoints.
fn skipped(refused: &BTreeMap<String, String>) -> String {
    let refused: Vec<_> = refused.iter().map(|(name, why)| format!("{name}: {why}")).collect();
    format!("skipped checkpoints: {}", refused.join("; "))
}

fn record_result(
    record: &mut TrialRecord,
    units: u64,
    metrics: &BTreeMap<String, String>,
    searched: &SearchedMetric<'_>,
) {
    let spec = &record.spec;
    let is_granted = units == spec.units || spec.grants.iter().any(|grant| grant.units == units);
    if !is_granted || result_at(record, units).is_some() {
        return;
    }
    let value = |metric: Option<&String>| {
        let metric = metric.filter(|metric| number::parse(metric).is_some()).cloned();
        let mut metric = metric.unwrap_or_else(|| number::format(f64::NAN));
        number::bound(&mut metric);
        metric
    };
    let other = |objective: &Objective| {
        let Objective { metric, smaller_is_better } = objective;
        let name = metric.as_str();
        SearchedMetric {
            name,
            smaller_is_better: *smaller_is_better,
            others: &[],
            is_copied: false,
        }
        .of(metrics)
    };
    let metric = value(searched.of(metrics));
    let values = searched.others.iter().map(|objective| value(other(objective))).collect();
    let mut newest_first = record.status.checkpoints.iter().rev();
    let newest = newest_first.find(|checkpoint| searched.is_copied && !checkpoint.refused);
    let checkpoint = newest.map(|checkpoint| ResultCheckpoint {
        name: checkpoint.name.clone(),
        manifest_sha256: checkpoint.manifest_sha256.clone(),
    });
    let result = ResultFact { units, metric, values, checkpoint, at: None };
    record.status.facts.push(Fact::Result(result));
}

/// Updates the best metric. Ignores a metric that is not a number.
fn record_best(record: &mut TrialRecord, metric: Option<&String>, searched: &SearchedMetric<'_>) {
    let Some(metric) = metric.filter(|metric| number::parse(metric).is_some()) else { return };
    let best = &mut record.status.best_metric;
    let is_better = |best: &String| compare(metric, best, searched.smaller_is_better).is_lt();
    if best.as_ref().is_none_or(is_better) {
        let mut metric = metric.clone();
        number::bound(&mut metric);
        *best = Some(metric);
    }
}

/// Compares metrics in the record's text format: better first, NaN last.
pub(crate) fn compare(a: &str, b: &str, smaller_is_better: bool) -> Ordering {
    let loss = |text: &str| {
        let metric = number::parse(text).unwrap_or(f64::NAN);
        if smaller_is_better { metric } else { -metric }
    };
    compare_losses(loss(a), loss(b))
}

/// Compares by value: smaller first, NaN last. Zeros of either sign are equal, and so are NaNs.
pub(crate) fn compare_losses(a: f64, b: f64) -> Ordering {
    a.partial_cmp(&b).unwrap_or_else(|| a.is_nan().cmp(&b.is_nan()))
}

/// Checks the name of a reported checkpoint. An earlier attempt may have written it, because a
/// later attempt sends reports that an earlier one could not send.
fn check_name(report: &Report) -> Result<(), String> {
    let Report { batches, attempt, .. } = *report;
    let ReportEvent::Checkpointed { name, .. } = &report.event else { return Ok(()) };
    match parse_checkpoint_name(name) {
        Some((of, by)) if of == batches && by <= attempt => Ok(()),
        _ => Err(format!(
            "name: {name:?} is not a checkpoint at batch {batches} of attempt {attempt} or \
             earlier; expected {:?}",
            checkpoint_name(batches, attempt)
        )),
    }
}

/// Refuses the result of a copy that was trained from scratch, as by a program that does not
/// restore checkpoints.
fn check_is_copied(record: &TrialRecord, report: &Report) -> Result<(), String> {
    let is_result = matches!(report.event, ReportEvent::Validated { granted_units: Some(_), .. });
    let has_resumed =
        record.status.attempts.last().is_some_and(|attempt| attempt.resumed_from.is_some());
    match &record.spec.source {
        Some(source) if is_result && is_fresh_copy(record) && !has_resumed => Err(format!(
            "granted_units: this trial is a copy of trial {}, but the program has not resumed from \
             its checkpoint; restore the checkpoint before training",
            source.trial
        )),
        _ => Ok(()),
    }
}

/// Marks the checkpoints that an attempt refused. A refusal may be temporary, for example if the
/// attempt ran an older version of the trainer, so a checkpoint that was restored is usable again.
fn record_refusals(
    record: &mut TrialRecord,
    resumed_from: Option<&str>,
    refused: &BTreeMap<String, String>,
) {
    for checkpoint in &mut record.status.checkpoints {
        // A copy may restore its source's checkpoint of the same name, so check refusals first.
        if refused.contains_key(&checkpoint.name) {
            checkpoint.refused = true;
        } else if resumed_from == Some(&checkpoint.name) {
            checkpoint.refused = false;
        }
    }
}

/// Inserts a checkpoint in the order in which checkpoints were written; reports may arrive late.
fn record_checkpoint(record: &mut TrialRecord, checkpoint: CheckpointRecord) {
    let checkpoints = &mut record.status.checkpoints;
    if checkpoints.iter().any(|recorded| recorded.name == checkpoint.name) {
        return;
    }
    let age = |checkpoint: &CheckpointRecord| (attempt_of(&checkpoint.name), checkpoint.batches);
    let position = checkpoints.partition_point(|recorded| age(recorded) <= age(&checkpoint));
    checkpoints.insert(position, checkpoint);
}

//! Limits the size of a trial's status, regardless of what a program reports.
//!
//! | part | bound |
//! |---|---|
//! | facts | one result for each granted length, and one end; 32 reopenings with an end each |
//! | attempts | 128; messages of the latest 16 |
//! | messages, `activity` | 1,000 bytes of JSON each |
//! | metrics of the latest validation | 64, with names of 63 bytes |
//! | checkpoints | 384: two counts of `checkpointStorage`, 100 each and 16 refused, and others |
//!
//! With all parts at their bounds, and with the fields that are planned for facts, a status takes
//! less than [`STATUS_BYTES_MAX`].

use std::collections::BTreeMap;

use stoker_api::condition;
use stoker_api::contract::{METRIC_NAME_BYTES_MAX, METRICS_MAX, metrics_in_order};
use stoker_api::number;
use stoker_api::text::{self, MESSAGE_BYTES_MAX};
use stoker_api::trial::{CheckpointRecord, Fact, TrialStatus};

use super::SearchedMetric;

/// Maximum size of a trial's status, in bytes of compact JSON.
pub const STATUS_BYTES_MAX: usize = 288 << 10;
/// Maximum size of a reason and of a checkpoint's name, in bytes of JSON.
const NAME_BYTES_MAX: usize = 63;
/// Maximum size of a hash, in bytes: SHA-256 in hexadecimal.
const HASH_BYTES_MAX: usize = 64;

/// Truncates every part of `status` to its bound. Records that an older version wrote may exceed
/// the bounds.
pub fn bound(status: &mut TrialStatus) {
    for fact in &mut status.facts {
        if let Fact::Result(fact) = fact {
            number::bound(&mut fact.metric);
            fact.values.iter_mut().for_each(number::bound);
            if let Some(checkpoint) = &mut fact.checkpoint {
                text::bound(&mut checkpoint.name, NAME_BYTES_MAX);
                text::bound(&mut checkpoint.manifest_sha256, HASH_BYTES_MAX);
            }
        }
    }
    for attempt in &mut status.attempts {
        bound_name(&mut attempt.resumed_from);
        bound_name(&mut attempt.reason);
        bound_message(&mut attempt.message);
    }
    status.checkpoints.iter_mut().for_each(bound_checkpoint);
    status.metrics = bounded(status.metrics.iter());
    status.best_metric.as_mut().into_iter().for_each(number::bound);
    bound_message(&mut status.message);
    bound_message(&mut status.activity);
    status.conditions.iter_mut().for_each(condition::bound);
}

pub(super) fn bound_message(message: &mut Option<String>) {
    message.as_mut().into_iter().for_each(|message| text::bound(message, MESSAGE_BYTES_MAX));
}

pub(super) fn bound_name(name: &mut Option<String>) {
    name.as_mut().into_iter().for_each(|name| text::bound(name, NAME_BYTES_MAX));
}

pub(super) fn bound_checkpoint(checkpoint: &mut CheckpointRecord) {
    text::bound(&mut checkpoint.name, NAME_BYTES_MAX);
    text::bound(&mut checkpoint.manifest_sha256, HASH_BYTES_MAX);
    checkpoint.metric.as_mut().into_iter().for_each(number::bound);
}

/// Returns the metrics of a validation that a status keeps: the searched metric, other objectives,
/// then others in name order.
pub(super) fn bounded_metrics(
    metrics: &BTreeMap<String, String>,
    searched: &SearchedMetric<'_>,
) -> BTreeMap<String, String> {
    let mut first = vec![searched.name];
    first.extend(searched.others.iter().map(|objective| objective.metric.as_str()));
    bounded(metrics_in_order(metrics, &first).into_iter())
}

fn bounded<'a>(
    metrics: impl Iterator<Item = (&'a String, &'a String)>,
) -> BTreeMap<String, String> {
    let mut kept = BTreeMap::new();
    for (name, value) in metrics {
        if kept.len() == METRICS_MAX {
            break;
        }
        let (mut name, mut value) = (name.clone(), value.clone());
        text::bound(&mut name, METRIC_NAME_BYTES_MAX);
        number::bound(&mut value);
        kept.entry(name).or_insert(value);
    }
    kept
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};
    use stoker_api::condition::{Condition, ConditionStatus};
    use stoker_api::contract::ReportEvent;
    use stoker_api::experiment::{CheckpointStorage, SAVE_MAX};
    use stoker_api::names::checkpoint_name;
    use stoker_api::time::Timestamp;
    use stoker_api::trial::{AttemptEnd, Grant};

    use super::*;
    use crate::fixture::{LOSS, plain_record, report};
    use crate::retention::prunable;
    use crate::trial::{
        BackOffLimits, ReportEffect, RestartLimits, TrialRecord, begin_attempt, close, end_attempt,
        record_report,
    };

    const GRANTS_MAX: u32 = 512;
    const ATTEMPTS: u32 = 140;
    /// Worst case for JSON: each character takes six bytes.
    const CONTROL: &str = "\u{1}";
    const NUMBER: &str = "-1.7976931348623157e308";
    const LIMITS: RestartLimits = RestartLimits {
        max_restarts: u32::MAX,
        infrastructure_attempts_max: u32::MAX,
        back_off: BackOffLimits::CLUSTER,
        has_trained: false,
    };

    fn long(text: &str) -> String {
        text.repeat(1001)
    }

    fn take(record: &mut TrialRecord, attempt: u32, batches: u64, event: ReportEvent) {
        let recorded = record_report(record, &report(attempt, batches, event), &LOSS);
        assert_eq!(recorded, ReportEffect::New);
    }

    /// Deletes prunable checkpoints from the record, as the report server and the runner do.
    fn prune(record: &mut TrialRecord) {
        let policy = CheckpointStorage {
            save_experiment_best: SAVE_MAX,
            save_trial_best: SAVE_MAX,
            save_trial_latest: SAVE_MAX,
            ..CheckpointStorage::default()
        };
        let deleted = prunable(&policy, true, &record.status.checkpoints, &[]);
        record.status.checkpoints.retain(|checkpoint| !deleted.contains(&checkpoint.name));
    }

    /// Returns the record of a program that reports as much as possible in every field.
    fn worst() -> TrialRecord {
        let mut record = plain_record(99_999);
        record.spec.hyperparameters = json!({ "x": "x".repeat(16 << 10) });
        // Lengths with as many digits as the API server accepts.
        let units = |number: u32| i64::MAX as u64 - u64::from(GRANTS_MAX - number);
        record.spec.units = units(0);
        for number in 0..GRANTS_MAX {
            let (order, units) = (u64::from(u32::MAX) + u64::from(number), units(number + 1));
            record.spec.grants.push(Grant { order, fact: Some(number), units, ..Grant::default() });
        }
        let mut num_results = 0;
        for attempt in 0..ATTEMPTS {
            begin_attempt(&mut record, attempt);
            let text = long(CONTROL);
            let event = ReportEvent::Started {
                resumed_from: Some(text.clone()),
                batches_total: u64::MAX,
                refused: [(text.clone(), text.clone())].into(),
            };
            take(&mut record, attempt, 0, event);
            for _ in 0..4 {
                // Each metric is worse than all before, so best and latest checkpoints differ.
                let metric = format!("-1.{:0>16}e307", 9_999 - num_results);
                let batches = i64::MAX as u64 - 1000 + u64::from(num_results);
                let mut metrics: BTreeMap<_, _> = (0..METRICS_MAX + 1)
                    .map(|number| (format!("{number}{text}"), format!("0.{}", "3".repeat(99))))
                    .collect();
                metrics.insert("loss".to_owned(), metric.clone());
                let granted_units = (num_results <= GRANTS_MAX).then(|| units(num_results));
                let event = ReportEvent::Validated { metrics, granted_units };
                take(&mut record, attempt, batches, event);
                let event = ReportEvent::Checkpointed {
                    name: checkpoint_name(batches, attempt),
                    manifest_sha256: text.clone(),
                    bytes: u64::MAX,
                    metric: Some(metric),
                };
                take(&mut record, attempt, batches, event);
                prune(&mut record);
                num_results += 1;
            }
            let event =
                ReportEvent::Progress { batches_total: u64::MAX - 1, activity: Some(text.clone()) };
            take(&mut record, attempt, u64::MAX, event);
            let event = ReportEvent::Exiting { code: 80, message: Some(text.clone()) };
            take(&mut record, attempt, u64::MAX, event);
            let end = AttemptEnd::Infrastructure;
            end_attempt(&mut record, end, Some(long("\"")), &LIMITS);
            let attempt = record.status.attempts.last_mut().unwrap();
            attempt.reason = Some(text);
            (attempt.started_at, attempt.ended_at) = (Some(Timestamp(0)), Some(Timestamp(1)));
            attempt.has_pods = true;
            attempt.has_started = true;
        }
        close(&mut record, stoker_api::trial::CloseCause::InvalidHyperparameters, Some(long("é")));
        record.status.ended_at = Some(Timestamp(0));
        record.status.observed_generation = i64::MAX;
        record.status.conditions = ["Scheduled", "Running", "Completed", "Failed"]
            .map(|type_| Condition {
                type_: type_.to_owned(),
                status: ConditionStatus::Unknown,
                observed_generation: i64::MAX,
                last_transition_time: Timestamp(0),
                reason: long("a"),
                message: long(CONTROL),
            })
            .into();
        bound(&mut record.status);
        record
    }

    /// Adds the fields that are planned for the search, each with its largest value.
    fn with_planned_fields(record: &TrialRecord) -> Value {
        let checkpoint = checkpoint_name(i64::MAX as u64, 127);
        let (hash, at) = ("0".repeat(64), "2026-11-22T18:31:49Z");
        let mut all = serde_json::to_value(record).unwrap();
        let facts = all["status"]["facts"].as_array_mut().unwrap();
        for (number, fact) in facts.iter_mut().enumerate() {
            if let Some(result) = fact["result"].as_object_mut() {
                // Results of three objectives besides the searched one.
                result.insert("values".to_owned(), json!([NUMBER, NUMBER, NUMBER]));
                // A population has at most 128 rounds, with as many steps of median stopping.
                if number < 256 {
                    let saved = json!({ "name": checkpoint, "manifestSha256": hash });
                    result.insert("checkpoint".to_owned(), saved);
                }
                result.insert("at".to_owned(), json!(at));
            } else {
                fact["closed"]["units"] = json!(i64::MAX);
                fact["closed"]["metric"] = json!(NUMBER);
                fact["closed"]["at"] = json!(at);
            }
        }
        // Copies start from other checkpoints than the best and the latest.
        let checkpoints = all["status"]["checkpoints"].as_array_mut().unwrap();
        checkpoints[0]["refused"] = json!(true);
        checkpoints.resize(384, checkpoints[0].clone());
        all["status"]["slotSeconds"] = json!(i64::MAX);
        let step = json!({ "continue": { "trial": 99_999, "units": i64::MAX } });
        for grant in all["spec"]["grants"].as_array_mut().unwrap() {
            // A trial has up to 2,048 steps.
            grant["steps"] = json!(vec![step.clone(); 4]);
        }
        all["spec"]["pins"] = json!(vec![checkpoint.clone(); 128]);
        all["spec"]["order"] = json!(i64::MAX);
        all["spec"]["group"] = json!(u32::MAX);
        all["spec"]["randomWords"] = json!(i64::MAX);
        all["spec"]["source"] = json!({
            "trial": 99_999, "units": i64::MAX, "checkpoint": checkpoint, "manifestSha256": hash,
        });
        all
    }

    fn bytes(value: &Value) -> usize {
        value.to_string().len()
    }

    #[test]
    fn worst_case_status_fits_the_budget() {
        let record = worst();
        let status = &record.status;
        let num_messages =
            status.attempts.iter().filter(|attempt| attempt.message.is_some()).count();
        // Check that this is the worst case.
        assert_eq!((status.facts.len(), status.attempts.len(), num_messages), (514, 128, 16));
        assert_eq!((status.checkpoints.len(), status.metrics.len()), (200, 64));
        assert!(status.metrics.contains_key("loss"));
        let today = serde_json::to_value(&record).unwrap();
        let planned = with_planned_fields(&record);
        println!(
            "bytes: status {}, spec {}; with planned fields {} and {}",
            bytes(&today["status"]),
            bytes(&today["spec"]),
            bytes(&planned["status"]),
            bytes(&planned["spec"])
        );
        assert!(bytes(&today) < STATUS_BYTES_MAX);
        assert!(bytes(&planned["status"]) < STATUS_BYTES_MAX);
        assert!(bytes(&planned["spec"]) < STATUS_BYTES_MAX);
    }

    #[test]
    fn bounding_twice_changes_nothing() {
        let record = worst();
        let mut again = record.status.clone();
        bound(&mut again);
        assert_eq!(again, record.status);
    }

    fn any_text() -> BoxedStrategy<String> {
        let part = prop::sample::select(vec!["a", "\"", "\u{1}", "é", "🦀", "0", "-1.5"]);
        (part, 0..1500usize).prop_map(|(part, num)| part.repeat(num)).boxed()
    }

    fn any_event() -> impl Strategy<Value = ReportEvent> {
        let texts = prop::collection::btree_map(any_text(), any_text(), 0..100);
        let checkpointed = (any_text(), any_text(), any::<u64>(), prop::option::of(any_text()));
        prop_oneof![
            (prop::option::of(any_text()), any::<u64>(), texts.clone()).prop_map(
                |(resumed_from, batches_total, refused)| ReportEvent::Started {
                    resumed_from,
                    batches_total,
                    refused
                }
            ),
            (any::<u64>(), prop::option::of(any_text())).prop_map(|(batches_total, activity)| {
                ReportEvent::Progress { batches_total, activity }
            }),
            (texts, prop::option::of(9..10u64)).prop_map(|(metrics, granted_units)| {
                ReportEvent::Validated { metrics, granted_units }
            }),
            checkpointed.prop_map(|(name, manifest_sha256, bytes, metric)| {
                ReportEvent::Checkpointed { name, manifest_sha256, bytes, metric }
            }),
            prop::option::of(any_text())
                .prop_map(|message| ReportEvent::Exiting { code: 1, message }),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn reports_leave_every_part_within_its_bound(
            events in prop::collection::vec((any_event(), 0..1000u64), 1..20)
        ) {
            let mut record = plain_record(0);
            begin_attempt(&mut record, 0);
            for (event, batches) in events {
                record_report(&mut record, &report(0, batches, event), &LOSS);
            }
            let mut bounded = record.status.clone();
            bound(&mut bounded);
            prop_assert_eq!(&bounded, &record.status);
            let message = record.status.attempts[0].message.as_deref().unwrap_or_default();
            let json = serde_json::to_string(message).unwrap();
            prop_assert!(json.len() <= MESSAGE_BYTES_MAX + 2);
        }
    }
}

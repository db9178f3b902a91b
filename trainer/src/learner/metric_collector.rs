//! Collects burn's metrics.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};

use burn::train::logger::MetricLogger;
use burn::train::metric::store::{EpochSummary, MetricsUpdate, Split};
use burn::train::metric::{MetricAttributes, MetricDefinition, MetricId, NumericEntry};
use serde::{Deserialize, Serialize};

use super::locked;
use crate::callback::Logs;
use crate::step::Metrics;

/// Collects burn's metrics under names in `snake_case`.
#[derive(Clone, Default)]
pub(super) struct MetricCollector(Arc<Mutex<CollectorState>>);

#[derive(Default)]
pub(super) struct CollectorState {
    names: HashMap<MetricId, String>,
    /// A name that two metrics of burn share.
    pub(super) duplicate_name: Option<String>,
    /// Whether a pass is ending, so that values are of the whole pass.
    pub(super) is_end: bool,
    /// Sums since they were last taken.
    pub(super) sums: Metrics,
    /// Values of the last pass.
    pub(super) final_values: Logs,
    pub(super) history: History,
}

/// Metrics of each epoch over all ranks, as bits: training, then validation.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(super) struct History(BTreeMap<usize, [BTreeMap<String, u64>; 2]>);

impl History {
    pub(super) fn record(&mut self, epoch: usize, train: &Logs, valid: &Logs) {
        let bits = |logs: &Logs| -> BTreeMap<String, u64> {
            logs.iter().map(|(name, value)| (name.clone(), value.to_bits())).collect()
        };
        self.0.insert(epoch, [bits(train), bits(valid)]);
    }

    fn find(&self, name: &str, epoch: usize, split: &Split) -> Option<f64> {
        let [train, valid] = self.0.get(&epoch)?;
        let of = match split {
            Split::Train => train,
            Split::Valid => valid,
            Split::Test(_) => return None,
        };
        of.get(&snake_case(name)).map(|bits| f64::from_bits(*bits))
    }
}

impl MetricCollector {
    pub(super) fn lock(&self) -> MutexGuard<'_, CollectorState> {
        locked(&self.0)
    }
}

impl CollectorState {
    /// Returns the names of all numeric metrics of training and validation.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.names.values().map(String::as_str)
    }
}

impl MetricLogger for MetricCollector {
    fn log(&mut self, update: MetricsUpdate, _epoch: usize, _split: &Split) {
        let mut state = self.lock();
        let CollectorState { names, is_end, sums, final_values, .. } = &mut *state;
        for update in update.entries_numeric {
            let Some(name) = names.get(&update.entry.metric_id) else { continue };
            let Some(entry) = update.numeric_entry else { continue };
            match entry {
                _ if *is_end => drop(final_values.insert(name.clone(), entry.current())),
                NumericEntry::Value(value) => sums.add_one(name, value, 1.0),
                NumericEntry::Aggregated { count: 0, .. } => {}
                NumericEntry::Aggregated { aggregated_value, count } => {
                    sums.add_one(name, aggregated_value * count as f64, count as f64);
                }
                NumericEntry::Final(_) => {}
            }
        }
    }

    fn read_numeric(
        &mut self,
        name: &str,
        epoch: usize,
        split: &Split,
    ) -> Result<Vec<NumericEntry>, String> {
        let value = self.lock().history.find(name, epoch, split);
        Ok(value.map(NumericEntry::Final).into_iter().collect())
    }

    fn log_metric_definition(&mut self, definition: MetricDefinition) {
        if !matches!(definition.attributes, MetricAttributes::Numeric(_)) {
            return;
        }
        let mut state = self.lock();
        let name = snake_case(&definition.name);
        let is_other = |(id, of): (&MetricId, &String)| *of == name && *id != definition.metric_id;
        if state.names.iter().any(is_other) {
            state.duplicate_name = Some(name.clone());
        }
        state.names.insert(definition.metric_id, name);
    }

    fn log_epoch_summary(&mut self, _summary: EpochSummary) {}
}

/// Converts a name such as `Top-K Accuracy @ K = 5` to `top_k_accuracy_k_5`: letters and digits in
/// lower case, one `_` for everything between them, and a `_` before an upper-case letter that
/// follows a lower-case one.
pub(super) fn snake_case(name: &str) -> String {
    let (mut snake, mut is_small) = (String::new(), false);
    for letter in name.chars() {
        let is_gap = is_small && letter.is_uppercase() || !letter.is_alphanumeric();
        if is_gap && !snake.ends_with('_') && !snake.is_empty() {
            snake.push('_');
        }
        if letter.is_alphanumeric() {
            snake.extend(letter.to_lowercase());
        }
        is_small = letter.is_lowercase();
    }
    snake.trim_end_matches('_').to_owned()
}

//! Trials that one clean-up pod processes. Pure.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::Value;
use stoker_api::contract::{Cleanup, CleanupStorage, CleanupTrial, StoredRecord};
use stoker_api::experiment::{Experiment, ExperimentStatus, StorageRecord};
use stoker_api::names::{experiment_path, record_path, trial_path};
use stoker_api::packed::{self, Packer};
use stoker_api::time::Timestamp;
use stoker_api::validate::ValidExperiment;
use stoker_engine::experiment::POD_INVALID;
use stoker_engine::retention::deletable;
use stoker_engine::trial::TrialRecord;

use crate::objects::CachedTrial;
use crate::records;

/// Limit of one pod's instructions in bytes: Kubernetes limits annotations to 256 KiB.
const INSTRUCTIONS_BYTES_MAX: usize = 200_000;

/// A range of trials from one index on, with the checkpoints to delete and to keep, and the records
/// to store.
pub(super) struct CleanUpBatch {
    pub(super) cleanup: Cleanup,
    /// Names of checkpoints to delete, by trial. It also contains trials after the range.
    pub(super) deleted: BTreeMap<u32, Vec<String>>,
    /// First index after the range. It is greater than the number of trials if the batch contains
    /// the record of the experiment, which comes last.
    pub(super) end: u32,
}

/// An ended experiment with its trials, sorted by index.
pub(super) struct BatchContext<'a> {
    pub(super) namespace: &'a str,
    pub(super) experiment: &'a Experiment,
    pub(super) valid: &'a ValidExperiment,
    pub(super) status: &'a ExperimentStatus,
    pub(super) storage: &'a StorageRecord,
    pub(super) trials: &'a [Arc<CachedTrial>],
}

/// Instructions under construction.
#[derive(Default)]
struct Instructions {
    delete: Vec<CleanupTrial>,
    records: Packer,
    delete_bytes: usize,
}

impl Instructions {
    /// Adds a trial or a record if it fits. The first one fits in any case, if its record does.
    fn add(&mut self, delete: Option<&CleanupTrial>, record: Option<&StoredRecord>) -> bool {
        let delete_bytes =
            delete.map_or(0, |trial| serde_json::to_string(trial).map_or(0, |text| text.len() + 1));
        // A record takes less space after similar ones.
        let record_bytes = record.map_or(0, packed_bytes);
        let num_bytes = self.delete_bytes + self.records.len() + delete_bytes + record_bytes;
        let is_first = self.delete.is_empty() && self.records.is_empty();
        if num_bytes > INSTRUCTIONS_BYTES_MAX && !is_first {
            return false;
        }
        self.delete_bytes += delete_bytes;
        self.delete.extend(delete.cloned());
        // Ignore the error: a record is plain JSON.
        let _ = record.map(|record| self.records.push(record));
        true
    }
}

fn packed_bytes(record: &StoredRecord) -> usize {
    packed::pack(record).map_or(usize::MAX / 4, |text| text.len())
}

/// Returns the first record that fits one pod's instructions.
fn fitting(path: &str, candidates: [Value; 2]) -> Option<StoredRecord> {
    let records =
        candidates.into_iter().map(|record| StoredRecord { path: path.to_owned(), record });
    let fitting = records.into_iter().find(|record| packed_bytes(record) <= INSTRUCTIONS_BYTES_MAX);
    if fitting.is_none() {
        tracing::warn!(path, "the record is too large for a clean-up pod; the stored one is older");
    }
    fitting
}

impl BatchContext<'_> {
    fn uid(&self) -> &str {
        self.experiment.metadata.uid.as_deref().unwrap_or_default()
    }

    /// Collects trials from the first one that is not cleaned up, as many as fit one pod's
    /// instructions; `None` if no trial has files.
    pub(super) fn next(&self, now: Timestamp) -> Option<CleanUpBatch> {
        if !self.trials.iter().any(|trial| has_run(&trial.record)) {
            return None;
        }
        let deleted = self.deletions();
        let mut instructions = Instructions::default();
        let from = self.status.trials_cleaned;
        let (mut end, mut is_full) = (from, false);
        let rest = self.trials.iter().filter(|trial| trial.record.spec.index >= from);
        for trial in rest {
            let index = trial.record.spec.index;
            let names = deleted.get(&index).map_or(&[][..], Vec::as_slice);
            let delete = has_run(&trial.record).then(|| self.deletion(&trial.record, names));
            let record = self.trial_record(trial, names, now);
            if !instructions.add(delete.as_ref(), record.as_ref()) {
                is_full = true;
                break;
            }
            end = index + 1;
        }
        if !is_full && instructions.add(None, self.experiment_record(now).as_ref()) {
            end = self.status.trials_created.max(end) + 1;
        }
        let (url, endpoint) = (self.storage.url.clone(), self.storage.endpoint.clone());
        let storage = CleanupStorage { url, endpoint };
        let records = instructions.records.finish().ok();
        let cleanup = Cleanup { storage, delete: instructions.delete, records };
        Some(CleanUpBatch { cleanup, deleted, end })
    }

    /// Returns the checkpoints that no setting retains, by trial.
    fn deletions(&self) -> BTreeMap<u32, Vec<String>> {
        let records = self.trials.iter().map(|trial| &trial.record);
        let lists: Vec<_> = records
            .map(|record| (record.spec.index, record.status.checkpoints.as_slice()))
            .collect();
        let spec = &self.valid.spec;
        let mut deletions: BTreeMap<u32, Vec<String>> = BTreeMap::new();
        let smaller_is_better = spec.searcher.smaller_is_better;
        for (trial, name) in deletable(&spec.checkpoint_storage, smaller_is_better, &lists) {
            deletions.entry(trial).or_default().push(name);
        }
        deletions
    }

    fn trial_path(&self, index: u32) -> String {
        trial_path(self.namespace, &self.valid.name, self.uid(), index)
    }

    fn deletion(&self, record: &TrialRecord, deleted: &[String]) -> CleanupTrial {
        let status = &record.status;
        let all = status.checkpoints.iter().map(|checkpoint| checkpoint.name.clone());
        CleanupTrial {
            trial_path: self.trial_path(record.spec.index),
            checkpoints: deleted.to_vec(),
            keep: all.filter(|name| !deleted.contains(name)).collect(),
            attempts_over: status.attempts.last().map_or(0, |attempt| attempt.number + 1),
        }
    }

    /// Returns the record of a trial as it is after the clean-up.
    fn trial_record(
        &self,
        trial: &CachedTrial,
        deleted: &[String],
        now: Timestamp,
    ) -> Option<StoredRecord> {
        let mut status = trial.record.status.clone();
        status.checkpoints.retain(|checkpoint| !deleted.contains(&checkpoint.name));
        let record = records::of_trial(&trial.trial, &status, now);
        let path = record_path(&self.trial_path(trial.record.spec.index));
        fitting(&path, [record.clone(), records::shortened(record)])
    }

    /// Returns the record of the experiment as it is after the clean-up.
    fn experiment_record(&self, now: Timestamp) -> Option<StoredRecord> {
        let trials_cleaned = self.status.trials_created;
        let status = ExperimentStatus { cleaned_up: true, trials_cleaned, ..self.status.clone() };
        let record = records::of_experiment(self.experiment, &status, now);
        let without_log = ExperimentStatus { log: vec![], ..status };
        let short = records::of_experiment(self.experiment, &without_log, now);
        let path = experiment_path(self.namespace, &self.valid.name, self.uid());
        fitting(&record_path(&path), [record, short])
    }
}

/// Returns whether a trial has files. Trials without an attempt have none, and neither have those
/// with malformed pods only.
fn has_run(record: &TrialRecord) -> bool {
    let mut reasons = record.status.attempts.iter().map(|attempt| attempt.reason.as_deref());
    reasons.any(|reason| reason != Some(POD_INVALID))
}

#[cfg(test)]
mod tests;

//! Checkpoints of simulated trials, and copies that start from them.

use std::collections::BTreeSet;

use stoker_api::contract::ReportEvent;
use stoker_api::experiment::CheckpointStorage;
use stoker_api::names::parse_checkpoint_name;
use stoker_api::trial::CloseCause;
use stoker_api::validate::Method;

use super::Runner;
use crate::experiment::Ledger;
use crate::fixture::{LOSS, checkpointed, report, validated};
use crate::retention::{pinned, prunable};
use crate::trial::{ReportEffect, SearchedMetric, TrialRecord, closed, record_report};

/// Checkpoints that a trial saves at a time: more than are kept to fall back to.
const SAVES: u64 = 4;

impl Runner {
    fn searched(&self) -> SearchedMetric<'static> {
        SearchedMetric { is_copied: matches!(self.config.method, Method::Pbt { .. }), ..LOSS }
    }

    /// Adds pins to a trial.
    pub(super) fn pin(&mut self, trial: u32, checkpoints: Vec<String>) {
        let Some(json) = self.trials.get(&trial) else { return };
        let mut record: TrialRecord = serde_json::from_str(json).unwrap();
        let pins: BTreeSet<String> = record.spec.pins.into_iter().chain(checkpoints).collect();
        record.spec.pins = pins.into_iter().collect();
        self.write(&record);
    }

    /// Removes the pins that no copy needs any more.
    pub(super) fn unpin(&mut self, ledger: &Ledger) {
        let records = self.records();
        for (index, pins) in ledger.unpinned(&records) {
            let mut record: TrialRecord = serde_json::from_str(&self.trials[&index]).unwrap();
            record.spec.pins = pins;
            self.write(&record);
        }
    }

    /// Saves checkpoints, and deletes those that no setting retains.
    pub(super) fn save_checkpoints(
        &mut self,
        record: &mut TrialRecord,
        attempt: u32,
        batches: u64,
    ) {
        for batches in batches..batches + SAVES {
            let name = format!("{batches:012}-{attempt}");
            let report = report(attempt, batches, checkpointed(&name, None));
            assert_eq!(record_report(record, &report, &LOSS), ReportEffect::New);
            assert_eq!(record_report(record, &report, &LOSS), ReportEffect::Repeat);
            self.files.insert((record.spec.index, name));
        }
        let policy = CheckpointStorage { save_trial_best: 0, ..CheckpointStorage::default() };
        for name in prunable(&policy, true, &record.status.checkpoints, &pinned(record)) {
            record.status.checkpoints.retain(|checkpoint| checkpoint.name != name);
            self.files.remove(&(record.spec.index, name));
        }
    }

    /// Reports the result of a granted length. Most trials save a checkpoint before.
    pub(super) fn complete_length(
        &mut self,
        record: &mut TrialRecord,
        attempt: u32,
        units: u64,
        die: u8,
    ) {
        if die < 240 && self.searched().is_copied {
            self.save_checkpoints(record, attempt, record.status.batches + 1);
        }
        let loss = format!("0.{}", record.spec.seed % 5);
        let report = report(attempt, record.status.batches + 1, validated(&loss, Some(units)));
        let effect = record_report(record, &report, &self.searched());
        assert!(matches!(effect, ReportEffect::New | ReportEffect::Repeat), "{effect:?}");
    }

    /// Lets an attempt of a copy without checkpoints resume from its source. The checkpoint of the
    /// source exists, although the source may have trained further or may have been deleted.
    pub(super) fn start_copy(&self, record: &mut TrialRecord, attempt: u32) {
        let Some(source) = record.spec.source.clone() else { return };
        if !record.status.checkpoints.is_empty() {
            return;
        }
        let name = source.checkpoint.unwrap();
        let (batches, _) = parse_checkpoint_name(&name).unwrap();
        let result = report(attempt, batches, validated("0", Some(record.spec.units)));
        let effect = record_report(record, &result, &self.searched());
        assert!(matches!(effect, ReportEffect::Refused { .. }), "trained from scratch: {effect:?}");
        // A replaced copy may have rejected its hyperparameters after its own checkpoint.
        let is_replaced = self.records().iter().any(|other| {
            other.spec.source == record.spec.source
                && closed(other) == Some(CloseCause::InvalidHyperparameters)
        });
        let exists = self.files.contains(&(source.trial, name.clone()));
        assert!(exists || is_replaced, "checkpoint {name} of trial {} is gone", source.trial);
        let started = ReportEvent::Started {
            resumed_from: Some(name),
            batches_total: 0,
            refused: Default::default(),
        };
        let effect = record_report(record, &report(attempt, batches, started), &self.searched());
        assert_eq!(effect, ReportEffect::New);
    }

    /// Checks that an ended experiment keeps no checkpoints for copies.
    pub(super) fn check_unpinned(&self) {
        for record in self.records() {
            assert_eq!(record.spec.pins, Vec::<String>::new(), "trial {}", record.spec.index);
        }
    }
}

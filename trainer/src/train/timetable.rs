//! Schedule of rows, validations and checkpoints. A pure function of the number of batches, so that
//! a resumed run does the same as an uninterrupted one.

use stoker_api::contract::TrialConfig;
use stoker_api::experiment::{CheckpointPolicy, Length, Unit};

/// Schedule of validations, checkpoints and reports.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Timetable {
    /// Records per epoch if the experiment sets it, otherwise 0.
    records_per_epoch: u64,
    /// Batches per epoch.
    epoch_batches: u64,
    global_batch: u64,
    scheduling_unit: u64,
    validate_every: Option<u64>,
    checkpoint_every: Option<u64>,
    checkpoint_policy: CheckpointPolicy,
    initial_validation: bool,
    smaller_is_better: bool,
}

/// Actions that are due after a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Due {
    /// Write a row of training metrics and report progress.
    pub(crate) row: bool,
    /// Call the hooks for the end of an epoch.
    pub(crate) epoch_end: bool,
    /// Validate. The checkpoint policy may add a checkpoint.
    pub(crate) validation: bool,
    /// Save a checkpoint, regardless of the result of the validation.
    pub(crate) checkpoint: bool,
}

impl Timetable {
    /// Creates the timetable of a trial. One pass over its data takes `steps` batches of
    /// `global_batch` samples. This is one epoch, unless the experiment sets the records per epoch.
    pub(crate) fn new(config: &TrialConfig, steps: u64, global_batch: u64) -> Self {
        let records_per_epoch = config.records_per_epoch;
        let mut timetable = Self {
            records_per_epoch,
            epoch_batches: match records_per_epoch {
                0 => steps,
                records => (records / global_batch).max(1),
            },
            global_batch,
            scheduling_unit: config.scheduling_unit.max(1),
            validate_every: None,
            checkpoint_every: None,
            checkpoint_policy: config.checkpoint_policy,
            initial_validation: config.perform_initial_validation,
            smaller_is_better: config.smaller_is_better,
        };
        let every = |length: Option<Length>| {
            let (unit, units) = length?.get()?;
            (units > 0).then(|| timetable.batches(unit, units))
        };
        let (validate, checkpoint) =
            (every(config.validation_period), every(config.checkpoint_period));
        (timetable.validate_every, timetable.checkpoint_every) = (validate, checkpoint);
        timetable
    }

    /// Converts a length to batches, at least 1. Rounds records down to whole batches. With records
    /// per epoch set, rounds the total of all epochs, not each epoch.
    pub(crate) fn batches(&self, unit: Unit, units: u64) -> u64 {
        let batches = match unit {
            // A custom loop counts its own units where others count batches.
            Unit::Batches | Unit::Units => units,
            Unit::Records => units / self.global_batch,
            Unit::Epochs if self.records_per_epoch > 0 => {
                let records = u128::from(units) * u128::from(self.records_per_epoch);
                u64::try_from(records / u128::from(self.global_batch)).unwrap_or(u64::MAX)
            }
            Unit::Epochs => units.saturating_mul(self.epoch_batches),
        };
        batches.max(1)
    }

    /// Returns the number of batches before epoch `epoch`, counted from 0.
    pub(crate) fn epoch_start(&self, epoch: u64) -> u64 {
        if epoch == 0 { 0 } else { self.batches(Unit::Epochs, epoch) }
    }

    /// Returns how many epochs finished before this batch. Batches count from 1.
    pub(crate) fn epoch(&self, batches: u64) -> u64 {
        batches.saturating_sub(1) / self.epoch_batches
    }

    /// Returns how many epochs are finished after this many batches.
    pub(crate) fn epochs_finished(&self, batches: u64) -> u64 {
        batches / self.epoch_batches
    }

    /// Returns the epoch that begins after `batches` batches, if any.
    pub(crate) fn epoch_that_begins(&self, batches: u64) -> Option<u64> {
        batches.is_multiple_of(self.epoch_batches).then(|| batches / self.epoch_batches)
    }

    /// Returns the next scheduling boundary after `batches` batches: a row of metrics, a
    /// validation, a checkpoint, or the end of the granted length.
    pub(crate) fn workload_end(&self, batches: u64, granted: u64) -> u64 {
        let next = |period: u64| (batches / period + 1).saturating_mul(period);
        let periods = [Some(self.scheduling_unit), self.validate_every, self.checkpoint_every];
        periods.into_iter().flatten().map(next).chain([granted]).min().unwrap_or(granted)
    }

    /// Returns what is due after batch number `batches`, given a length of `granted` batches.
    pub(crate) fn due(&self, batches: u64, granted: u64) -> Due {
        let every =
            |period: Option<u64>| period.is_some_and(|period| batches.is_multiple_of(period));
        let is_end = batches >= granted;
        Due {
            row: is_end || batches.is_multiple_of(self.scheduling_unit),
            epoch_end: batches.is_multiple_of(self.epoch_batches),
            validation: is_end || every(self.validate_every),
            checkpoint: is_end || every(self.checkpoint_every),
        }
    }

    /// Returns whether to validate before the first batch.
    pub(crate) fn validates_first(&self, batches: u64, is_validated: bool) -> bool {
        self.initial_validation && batches == 0 && !is_validated
    }

    /// Returns whether `metric` is better than the best so far. NaN never is.
    pub(crate) fn is_best(&self, metric: f64, best: Option<f64>) -> bool {
        match best {
            None => !metric.is_nan(),
            Some(best) if self.smaller_is_better => metric < best,
            Some(best) => metric > best,
        }
    }

    /// Returns whether the policy requires a checkpoint after a periodic validation.
    pub(crate) fn saves_after_validation(&self, is_best: bool) -> bool {
        match self.checkpoint_policy {
            CheckpointPolicy::All => true,
            CheckpointPolicy::Best => is_best,
            CheckpointPolicy::None => false,
        }
    }
}

#[cfg(test)]
#[path = "timetable_tests.rs"]
mod tests;

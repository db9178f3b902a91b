//! State of all optimizers and schedules, as files of a checkpoint.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::lr_scheduler::LrSchedulerRecord;
use burn::optim::{ModuleOptimizer, OptimizerRecord};
use burn::tensor::Bytes as BurnBytes;
use serde::{Deserialize, Serialize};

use super::{Optimizers, Schedule};
use crate::checkpoint::{CheckpointContents, NewContents};
use crate::error::error_from_unwind;
use crate::{Error, Result, record};

/// File of the optimizers' tensors.
const OPTIMIZERS: &str = "optimizers.bpk";

/// Scalar part of the state.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub(crate) struct OptimizersState {
    steps: u64,
    /// Factor of the learning rates, as bits.
    scale: u64,
}

/// State of the learning rate schedules, by index.
type Schedules = BTreeMap<usize, LrSchedulerRecord>;

/// Snapshot of the state.
pub(crate) enum OptimizersSnapshot {
    /// State whose tensors are shared with the optimizers until a step replaces them.
    Shared(Box<ModuleOptimizer>, Schedules),
    /// State with its values on the host.
    Read(OptimizerRecord, Schedules),
    /// Why the state is unavailable.
    Unavailable(Error),
}

impl Optimizers {
    /// Returns a snapshot of the current state. With `shares`, it shares our own optimizers'
    /// tensors; otherwise it copies their values to the host now.
    pub(crate) fn snapshot(&self, shares: bool) -> (OptimizersState, OptimizersSnapshot) {
        let record = |(index, schedule): (usize, &Schedule)| match schedule {
            Schedule::Burn(scheduler) => Some((index, scheduler.to_record())),
            _ => None,
        };
        let schedules = self.rates.iter().map(|rate| &rate.schedule).enumerate();
        let schedules: Schedules = schedules.filter_map(record).collect();
        let state = OptimizersState { steps: self.steps, scale: self.scale.to_bits() };
        #[cfg(feature = "learner")]
        if let Some(external) = &self.external {
            let snapshot = match external.snapshot() {
                Ok((optimizer, schedule)) => {
                    OptimizersSnapshot::Read(optimizer, BTreeMap::from([(0, schedule)]))
                }
                Err(error) => OptimizersSnapshot::Unavailable(error),
            };
            return (state, snapshot);
        }
        if shares {
            let optimizer = Box::new(self.optimizer.clone());
            return (state, OptimizersSnapshot::Shared(optimizer, schedules));
        }
        let snapshot = match catch_unwind(AssertUnwindSafe(|| self.optimizer.to_record())) {
            Ok(record) => OptimizersSnapshot::Read(record, schedules),
            Err(panic) => OptimizersSnapshot::Unavailable(error_from_unwind(panic, |why| {
                format!("cannot read the state of the optimizers: {why}")
            })),
        };
        (state, snapshot)
    }

    /// Restores a saved state. Load the model first, because its record restores the parameter IDs.
    pub(crate) fn restore(
        mut self,
        state: &OptimizersState,
        contents: &CheckpointContents,
    ) -> Result<Self> {
        (self.steps, self.scale) = (state.steps, f64::from_bits(state.scale));
        #[cfg(feature = "learner")]
        if let Some(external) = &mut self.external {
            external.restore(part(contents, OPTIMIZERS)?, part(contents, &schedule_file(0))?)?;
            return Ok(self);
        }
        self.optimizer = self.optimizer.from_bytes(part(contents, OPTIMIZERS)?)?;
        for (index, rate) in self.rates.iter_mut().enumerate() {
            if let Schedule::Burn(scheduler) = &mut rate.schedule {
                let record = LrSchedulerRecord::from_bytes(part(contents, &schedule_file(index))?)?;
                *scheduler = scheduler.clone().load_record(record);
            }
        }
        Ok(self)
    }
}

impl OptimizersSnapshot {
    /// Adds the files of this snapshot to `contents`.
    pub(crate) fn write(self, contents: &mut NewContents) -> Result<()> {
        let (optimizer, schedules) = match self {
            Self::Shared(optimizer, schedules) => (optimizer.to_record(), schedules),
            Self::Read(optimizer, schedules) => (optimizer, schedules),
            Self::Unavailable(error) => return Err(error),
        };
        contents.insert(OPTIMIZERS.into(), record::to_canonical(optimizer.into_bytes()?)?);
        for (index, schedule) in schedules {
            contents.insert(schedule_file(index), record::to_bytes(schedule.into_bytes()?).into());
        }
        Ok(())
    }
}

fn schedule_file(index: usize) -> String {
    format!("schedule-{index}.bpk")
}

/// Returns a file of a checkpoint in burn's type.
fn part(contents: &CheckpointContents, name: &str) -> Result<BurnBytes> {
    let bytes =
        contents.get(name).ok_or_else(|| format!("file {name} is missing in the checkpoint"))?;
    Ok(record::to_burn_bytes(bytes))
}

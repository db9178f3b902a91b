//! State of all optimizers and schedules, as files of a checkpoint.

use std::collections::BTreeMap;

use burn::lr_scheduler::LrSchedulerRecord;
use burn::optim::ModuleOptimizer;
use burn::tensor::Bytes as BurnBytes;
use serde::{Deserialize, Serialize};

use super::{Optimizers, Schedule};
use crate::Result;
use crate::checkpoint::{CheckpointContents, NewContents};
use crate::record;

/// File of the optimizers' tensors.
const OPTIMIZERS: &str = "optimizers.bpk";

/// Scalar part of the state.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub(crate) struct OptimizersState {
    steps: u64,
    /// Factor of the learning rates, as bits.
    scale: u64,
}

/// Snapshot of the state. It shares tensors with the optimizers until a step replaces them.
pub(crate) enum OptimizersSnapshot {
    /// State of our own optimizers.
    Own { optimizer: Box<ModuleOptimizer>, schedules: BTreeMap<usize, LrSchedulerRecord> },
    /// State of another loop's optimizer, or why it is unavailable.
    #[cfg(feature = "learner")]
    External(Result<super::external::ExternalSnapshot>),
}

impl Optimizers {
    /// Returns a snapshot of the current state.
    pub(crate) fn snapshot(&self) -> (OptimizersState, OptimizersSnapshot) {
        let record = |(index, schedule): (usize, &Schedule)| match schedule {
            Schedule::Burn(scheduler) => Some((index, scheduler.to_record())),
            _ => None,
        };
        let schedules = self.rates.iter().map(|rate| &rate.schedule).enumerate();
        let schedules = schedules.filter_map(record).collect();
        let state = OptimizersState { steps: self.steps, scale: self.scale.to_bits() };
        #[cfg(feature = "learner")]
        if let Some(external) = &self.external {
            return (state, OptimizersSnapshot::External(external.snapshot()));
        }
        let optimizer = Box::new(self.optimizer.clone());
        (state, OptimizersSnapshot::Own { optimizer, schedules })
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
            Self::Own { optimizer, schedules } => (optimizer.to_record(), schedules),
            #[cfg(feature = "learner")]
            Self::External(snapshot) => {
                let (optimizer, schedule) = snapshot?;
                (optimizer, BTreeMap::from([(0, schedule)]))
            }
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

//! State of all optimizers and schedules, as files of a checkpoint.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::lr_scheduler::LrSchedulerRecord;
use burn::optim::{ModuleOptimizer, OptimizerRecord};
use burn::tensor::Bytes as BurnBytes;
use burn_pack::Reader;
use serde::{Deserialize, Serialize};

use super::{Optimizers, Schedule};
use crate::checkpoint::{CheckpointContents, NewContents};
use crate::error::error_from_unwind;
use crate::{Error, Result, record};

/// File of the optimizers' tensors.
const OPTIMIZERS: &str = "optimizers.bpk";

/// Remedy for the state of other optimizers.
const REMEDY: &str = "use the same optimizers and groups, or another `Fit::continue_id` to take \
                      only its weights";

/// Scalar part of the state.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub(crate) struct OptimizersState {
    steps: u64,
    /// Factor of the learning rates, as bits.
    scale: u64,
    /// Regular expressions of the groups. Missing in older checkpoints.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    groups: Option<Vec<String>>,
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
        let (scale, groups) = (self.scale.to_bits(), Some(self.groups()));
        let state = OptimizersState { steps: self.steps, scale, groups };
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

    /// Returns the regular expressions of the groups.
    fn groups(&self) -> Vec<String> {
        self.rates.iter().filter_map(|rate| rate.path.clone()).collect()
    }

    /// Restores a saved state. Load the model first, because its record restores the parameter IDs.
    ///
    /// # Errors
    ///
    /// Fails if the state is of other groups, or if the optimizers or schedulers cannot use all of
    /// it: burn skips such state without an error.
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
        if let Some(groups) = state.groups.as_ref().filter(|groups| **groups != self.groups()) {
            let is = self.groups();
            let text = format!("it has the optimizer groups {groups:?}, not {is:?}; {REMEDY}");
            return Err(text.into());
        }
        if let Some(unused) = self.unused_state(part(contents, OPTIMIZERS)?)? {
            let text = format!("it has the state of another optimizer ({unused}); {REMEDY}");
            return Err(text.into());
        }
        self.optimizer = self.optimizer.from_bytes(part(contents, OPTIMIZERS)?)?;
        for (index, rate) in self.rates.iter_mut().enumerate() {
            if let Schedule::Burn(scheduler) = &mut rate.schedule {
                let name = schedule_file(index);
                let record = LrSchedulerRecord::from_bytes(part(contents, &name)?)?;
                *scheduler = scheduler.clone().load_record(record);
                let restored = names(scheduler.to_record().into_bytes()?)?;
                if restored != names(part(contents, &name)?)? {
                    let text = format!(
                        "it has the state of another learning rate scheduler ({name}); {REMEDY}"
                    );
                    return Err(text.into());
                }
            }
        }
        Ok(self)
    }

    /// Returns a part of the saved state that these optimizers would skip. Loads values of one
    /// element instead of the saved ones, so that no second copy of the state is in memory.
    fn unused_state(&self, bytes: BurnBytes) -> Result<Option<String>> {
        let reader = Reader::from_bytes(bytes)?;
        let (paths, scalars) = (reader.metadata().clone(), reader.scalars().clone());
        let mut tensors = vec![];
        for tensor in reader.into_tensors()? {
            let (name, dtype, shape, id, _) = tensor.into_parts()?;
            let shape = vec![1; shape.num_dims()];
            let value = BurnBytes::from_bytes_vec(vec![0; dtype.size()]);
            tensors.push(burn_pack::Tensor::new(name, dtype, shape, id, value));
        }
        let mut writer = burn_pack::Writer::new(tensors);
        for (key, path) in &paths {
            writer = writer.with_metadata(key, path);
        }
        for (key, value) in &scalars {
            writer = writer.with_scalar(key, *value);
        }
        let small = writer.into_bytes()?;
        let saved = names(small.clone())?;
        let restored = self.optimizer.clone().from_bytes(small)?.to_record().into_bytes()?;
        let restored = names(restored)?;
        let unused = saved.difference(&restored);
        // A parameter without other state has only its rank.
        let first = unused.min_by_key(|name| (name.ends_with(".__rank"), *name));
        Ok(first.map(|name| {
            let (id, state) = name.split_once('.').unwrap_or((name, ""));
            let path = paths.get(id).map_or(id, String::as_str);
            match state {
                "__rank" => path.to_owned(),
                state => format!("{path}: {state}"),
            }
        }))
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

/// Returns the names of all values in a file of burn's format.
fn names(bytes: BurnBytes) -> Result<BTreeSet<String>> {
    let reader = Reader::from_bytes(bytes)?;
    let tensors = reader.tensor_names().into_iter().map(String::from);
    Ok(tensors.chain(reader.scalars().keys().cloned()).collect())
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

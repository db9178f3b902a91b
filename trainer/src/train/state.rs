//! State of a run except weights and optimizers, and its files in a checkpoint.

use std::collections::BTreeMap;
use std::fmt;

use burn::module::Module;
use burn::tensor::TensorData;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::Result;
use crate::callback::Logs;
use crate::checkpoint::{CheckpointContents, NewContents};
use crate::optim::{GradientSum, OptimizersState, PendingGradients};
use crate::record;
use crate::step::Metrics;

/// File of this state.
const STATE: &str = "state.json";
/// File of a gradient sum that no step has used yet; absent if there is none.
const GRADIENTS: &str = "gradients.bpk";

/// Counters, sums and callback states. Random streams and the position in the data are functions of
/// the seed and `batches`.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub(crate) struct RunState {
    /// Global batches trained since the last warm start.
    pub(crate) batches: u64,
    /// ID of the training. A training with another ID takes only the weights.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) continue_id: String,
    /// Global batches that the trial trained before this training.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(crate) base: u64,
    /// Samples per global batch; part of the position in the data.
    pub(crate) global_batch: usize,
    /// Samples per epoch; part of the position in the data.
    pub(crate) samples: usize,
    /// Inputs of the sample order and random numbers; part of the position. Missing in older
    /// checkpoints.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) order: Option<ReadOrder>,
    /// Metrics since the last row.
    pub(crate) since_row: Metrics,
    /// Metrics since the start of the epoch.
    pub(crate) since_epoch: Metrics,
    /// Last validation.
    pub(crate) validated: Option<Validated>,
    /// Best searched metric so far, as bits.
    pub(crate) best: Option<u64>,
    /// Callback states by callback name.
    pub(crate) callbacks: BTreeMap<String, Value>,
    /// Why a callback stopped the training.
    pub(crate) stopped: Option<String>,
    /// Why a callback stops the training in the first hook after this checkpoint: it requested the
    /// stop while the checkpoint was saved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) pending_stop: Option<String>,
    /// Whether a signal has interrupted the validation at this batch. It starts over after the
    /// resume, before what follows it.
    #[serde(default, skip_serializing_if = "is_false")]
    pub(crate) is_validation_due: bool,
    /// Metrics of each epoch, as bits.
    pub(crate) history: Vec<BTreeMap<String, u64>>,
    pub(crate) optimizers: OptimizersState,
    /// Number of gradients per parameter in the pending sum, and its sample count as bits.
    #[serde(rename = "seen")]
    pub(crate) num_gradients: Vec<u32>,
    pub(crate) count: u64,
    /// `num_gradients` and `count` of ranks 1, 2, ...
    #[serde(default, rename = "others", skip_serializing_if = "Vec::is_empty")]
    pub(crate) other_ranks: Vec<(Vec<u32>, u64)>,
    /// Validation of the weights that a callback keeps, if any; without metrics if there was no
    /// validation at that batch.
    #[serde(default, rename = "kept", skip_serializing_if = "Option::is_none")]
    pub(crate) best_weights_validation: Option<Validated>,
}

/// Inputs of the sample order and random numbers, in addition to the position.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) struct ReadOrder {
    pub(crate) seed: u32,
    pub(crate) shuffle: bool,
    pub(crate) reshuffle: bool,
    pub(crate) drop_last: bool,
}

impl fmt::Display for ReadOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seed, shuffle, reshuffle, drop_last } = self;
        write!(
            f,
            "the seed {seed} (shuffle {shuffle}, reshuffle {reshuffle}, drop_last {drop_last})"
        )
    }
}

/// Means of a validation as bits, named as in reports.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) struct Validated {
    pub(crate) batches: u64,
    metrics: BTreeMap<String, u64>,
}

impl Validated {
    pub(crate) fn new(batches: u64, metrics: &Logs) -> Self {
        Self { batches, metrics: to_bits(metrics) }
    }

    pub(crate) fn metrics(&self) -> Logs {
        from_bits(&self.metrics)
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_false(flag: &bool) -> bool {
    !flag
}

/// Returns values as bits: these are exact, and JSON cannot represent NaN.
pub(crate) fn to_bits(metrics: &Logs) -> BTreeMap<String, u64> {
    metrics.iter().map(|(name, value)| (name.clone(), value.to_bits())).collect()
}

pub(crate) fn from_bits(bits: &BTreeMap<String, u64>) -> Logs {
    bits.iter().map(|(name, bits)| (name.clone(), f64::from_bits(*bits))).collect()
}

impl RunState {
    /// Stores counts of a pending sum in this state and returns the sum's gradients.
    pub(crate) fn record_pending<M: Module>(
        &mut self,
        model: &M,
        sum: &GradientSum,
    ) -> Result<PendingTensors> {
        if sum.is_empty() {
            (self.num_gradients, self.count) = (vec![], 0);
            return Ok(vec![]);
        }
        let pending = sum.pending(model)?;
        (self.num_gradients, self.count) = (pending.num_gradients, pending.count.to_bits());
        Ok(pending.gradients)
    }

    /// Adds this state's files to `contents`. `others` are the packed pending gradients of ranks 1,
    /// 2, ...
    pub(crate) fn write(
        &self,
        gradients: PendingTensors,
        others: Vec<Bytes>,
        contents: &mut NewContents,
    ) -> Result<()> {
        contents.insert(STATE.into(), serde_json::to_vec(self)?.into());
        if !gradients.is_empty() {
            contents.insert(GRADIENTS.into(), Self::pack(gradients)?.into());
        }
        for (idx, packed) in others.into_iter().enumerate() {
            if !packed.is_empty() {
                contents.insert(gradients_file(idx + 1), packed.into());
            }
        }
        Ok(())
    }

    /// Packs pending gradients into a file. Without gradients, returns no bytes.
    pub(crate) fn pack(gradients: PendingTensors) -> Result<Bytes> {
        if gradients.is_empty() {
            return Ok(Bytes::new());
        }
        let tensors = gradients.into_iter().map(|(index, data)| {
            let (bytes, shape, dtype) = data.into_parts();
            burn_pack::Tensor::new(index.to_string(), dtype, shape, None, bytes)
        });
        let bytes = burn_pack::Writer::new(tensors.collect()).into_bytes()?;
        Ok(record::to_bytes(bytes))
    }

    /// Reads the state that [`RunState::write`] wrote.
    pub(crate) fn read(contents: &CheckpointContents) -> Result<Self> {
        let bytes = contents.get(STATE).ok_or("file state.json is missing in the checkpoint")?;
        Ok(serde_json::from_slice(bytes).map_err(|error| format!("state.json: {error}"))?)
    }

    /// Returns this rank's pending sum from a checkpoint. If the world size has changed, rank 0
    /// gets the total of all ranks, and the others get nothing.
    pub(crate) fn pending<M: Module>(
        &self,
        model: &M,
        contents: &CheckpointContents,
        rank: usize,
        size: usize,
    ) -> Result<GradientSum> {
        let of = |rank: usize| match rank {
            0 => self.pending_sum(
                model,
                contents.get(GRADIENTS),
                &(self.num_gradients.clone(), self.count),
            ),
            _ => self.pending_sum(
                model,
                contents.get(&gradients_file(rank)),
                &self.other_ranks[rank - 1],
            ),
        };
        let num_ranks = self.other_ranks.len() + 1;
        if num_ranks == size {
            return of(rank);
        }
        let mut sum = GradientSum::default();
        if rank == 0 {
            for rank in 0..num_ranks {
                sum.merge(model, of(rank)?);
            }
        }
        Ok(sum)
    }

    fn pending_sum<M: Module>(
        &self,
        model: &M,
        packed: Option<&Bytes>,
        (num_gradients, count): &(Vec<u32>, u64),
    ) -> Result<GradientSum> {
        let mut gradients = vec![];
        // Without a file, the losses had no gradients, but may have had samples.
        if let Some(bytes) = packed {
            let reader = burn_pack::Reader::from_bytes(record::to_burn_bytes(bytes))?;
            for tensor in reader.into_tensors()? {
                let (name, dtype, shape, _, bytes) = tensor.into_parts()?;
                let data = TensorData::from_bytes(bytes, shape, dtype);
                gradients.push((name.parse::<usize>()?, data));
            }
        }
        gradients.sort_by_key(|(index, _)| *index);
        let (num_gradients, count) = (num_gradients.clone(), f64::from_bits(*count));
        Ok(GradientSum::restore(model, PendingGradients { gradients, num_gradients, count }))
    }
}

/// Returns the file name of another rank's pending sum.
fn gradients_file(rank: usize) -> String {
    format!("gradients-{rank}.bpk")
}

/// Gradients by parameter index.
pub(crate) type PendingTensors = Vec<(usize, TensorData)>;

#[cfg(test)]
mod tests {
    use burn::module::Param;
    use burn::tensor::{Device, Tensor};

    use super::*;

    #[test]
    fn sums_without_tensors_keep_their_counts() {
        let model = Param::from_tensor(Tensor::<1>::ones([2], &Device::flex().autodiff()));
        let model = record::initialize(model);
        let state = RunState {
            num_gradients: vec![0],
            count: 3.0_f64.to_bits(),
            other_ranks: vec![(vec![0], 2.0_f64.to_bits()), (vec![], 0)],
            ..RunState::default()
        };
        let counts = |rank, size| {
            let sum = state.pending(&model, &CheckpointContents::default(), rank, size).unwrap();
            let pending = sum.pending(&model).unwrap();
            assert!(pending.gradients.is_empty());
            (pending.num_gradients, pending.count)
        };
        assert_eq!(
            [0, 1, 2].map(|rank| counts(rank, 3)),
            [(vec![0], 3.0), (vec![0], 2.0), (vec![], 0.0)]
        );
        assert_eq!([0, 1].map(|rank| counts(rank, 2)), [(vec![0], 5.0), (vec![], 0.0)]);
    }
}

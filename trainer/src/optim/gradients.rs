//! Sums of gradients over batches and ranks.

use std::collections::BTreeSet;

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::TensorData;

use super::Selection;
use crate::Result;
use crate::collective::Collective;
use crate::step::{Backward, StepOutput, UnreadMetrics};

mod all_reduce;
mod device_clipping;
mod flat_buffer;
mod parameters;

pub(crate) use all_reduce::AllReduceState;
use parameters::{for_each_parameter, total, try_for_each_parameter};

/// Sum of gradients over samples.
#[derive(Default)]
pub(crate) struct GradientSum {
    gradients: GradientsParams,
    /// For each trained parameter, in the order of visits to the model, how often it had a
    /// gradient. A parameter without any is not updated, so weight decay does not apply to it
    /// either.
    num_gradients: Vec<u32>,
    /// Number of samples, or the sum of their weights.
    count: f64,
}

impl GradientSum {
    /// Runs the backward pass of a batch and adds its gradients. `output` is `None` if this rank
    /// had no sample. If the batch is `whole`, the step learns only from it; see
    /// [`StepOutput::backward`].
    pub(crate) fn add<M: Module>(
        &mut self,
        model: &M,
        output: Option<StepOutput>,
        whole: bool,
    ) -> UnreadMetrics {
        self.add_selected(model, &Selection::default(), output, whole)
    }

    /// Same as [`add`](Self::add), for selected parameters.
    pub(crate) fn add_selected<M: Module>(
        &mut self,
        model: &M,
        selection: &Selection,
        output: Option<StepOutput>,
        whole: bool,
    ) -> UnreadMetrics {
        let Some(output) = output else { return UnreadMetrics::default() };
        let Backward { mut gradients, scale, count, metrics } = output.backward(model, whole);
        let Self { gradients: sum, num_gradients, .. } = self;
        for_each_parameter(model, &mut |index, param| {
            num_gradients.resize(num_gradients.len().max(index + 1), 0);
            if selection.has(index) && param.add(&mut gradients, sum, scale) {
                num_gradients[index] += 1;
            }
        });
        self.count += count;
        metrics
    }

    /// Returns whether nothing was added.
    pub(crate) fn is_empty(&self) -> bool {
        self.num_gradients.is_empty()
    }

    /// Returns whether there were samples, but no parameter has a gradient.
    pub(crate) fn lacks_gradients(&self) -> bool {
        self.count > 0.0 && self.num_gradients.iter().all(|num_gradients| *num_gradients == 0)
    }

    /// Returns the indices of the parameters with a gradient.
    pub(crate) fn indices(&self) -> impl Iterator<Item = usize> {
        (0..self.num_gradients.len()).filter(|index| self.has_gradient(*index))
    }

    /// Returns whether there are gradients and all are 0.
    fn is_zero<M: Module>(&self, model: &M) -> Result<bool> {
        Ok(!self.is_empty() && self.squares(model)? == 0.0)
    }

    /// Returns the sum of squares of all gradients. A parameter shared by several modules counts
    /// once.
    fn squares<M: Module>(&self, model: &M) -> Result<f64> {
        let (mut squares, mut counted) = (vec![], BTreeSet::new());
        for_each_parameter(model, &mut |_, param| {
            if counted.insert(param.id()) {
                squares.push(param.squares(&self.gradients));
            }
        });
        total(&squares)
    }

    /// Returns whether any rank had a gradient for the parameter at this index.
    fn has_gradient(&self, index: usize) -> bool {
        self.num_gradients.get(index).is_some_and(|num_gradients| *num_gradients > 0)
    }

    /// Turns the mean into a sum: the mean over all samples times the number of batches. For
    /// batches of equal size, this is the sum of their means.
    pub(crate) fn mean_to_sum(&mut self, batches: u64) {
        self.count /= batches as f64;
    }

    /// Returns the mean gradients, clipped to a global norm of at most `norm_max`. All `ranks` use
    /// the same factor.
    pub(super) fn normalize<M: Module>(
        mut self,
        model: &M,
        norm_max: Option<f64>,
        ranks: &dyn Collective,
    ) -> Result<GradientsParams> {
        let mut factor = 1.0 / self.count;
        if self.count == 0.0 && self.is_zero(model)? {
            // All sample weights are 0. As in Keras, take a step without gradients.
            factor = 0.0;
        } else if self.count.is_nan() || self.count <= 0.0 {
            let text = format!(
                "cannot step: the sample count is {}; pass a positive number of samples, or sum of \
                 weights, to `StepOutput::sum`",
                self.count
            );
            return Err(text.into());
        }
        if let Some(norm_max) = norm_max {
            if ranks.size() == 1 && self.is_on_one_gpu(model) {
                return Ok(self.clip_on_device(model, norm_max, factor));
            }
            let mut squares = self.squares(model)?;
            if ranks.size() > 1 {
                // The order of additions, and so the rounding, may differ between ranks: each tunes
                // its kernels for GPUs, and on CPUs it depends on the processor.
                let local = squares.to_le_bytes().to_vec();
                let of_first = ranks.broadcast(local.into())?;
                squares = of_first.as_ref().try_into().map(f64::from_le_bytes).unwrap_or(f64::NAN);
            }
            let norm = squares.sqrt() * factor;
            if norm > norm_max {
                factor *= norm_max / norm;
            }
        }
        let (mut sum, mut out) = (std::mem::take(&mut self.gradients), GradientsParams::new());
        for_each_parameter(model, &mut |_, param| {
            param.add(&mut sum, &mut out, factor);
        });
        Ok(out)
    }

    /// Returns the state for a checkpoint of a sum that no step has used yet.
    pub(crate) fn pending<M: Module>(&self, model: &M) -> Result<PendingGradients> {
        let mut gradients = vec![];
        try_for_each_parameter(model, &mut |index, param| {
            gradients.extend(param.data(&self.gradients)?.map(|data| (index, data)));
            Ok(())
        })?;
        Ok(PendingGradients {
            gradients,
            num_gradients: self.num_gradients.clone(),
            count: self.count,
        })
    }

    /// Adds another sum over the same model.
    pub(crate) fn merge<M: Module>(&mut self, model: &M, mut other: Self) {
        let Self { gradients: sum, .. } = self;
        for_each_parameter(model, &mut |_, param| {
            param.add(&mut other.gradients, sum, 1.0);
        });
        self.num_gradients.resize(self.num_gradients.len().max(other.num_gradients.len()), 0);
        self.num_gradients
            .iter_mut()
            .zip(&other.num_gradients)
            .for_each(|(num_gradients, other)| *num_gradients += other);
        self.count += other.count;
    }

    /// Restores the state that [`GradientSum::pending`] returned.
    pub(crate) fn restore<M: Module>(model: &M, pending: PendingGradients) -> Self {
        let PendingGradients { gradients, num_gradients, count } = pending;
        let mut sum = Self { gradients: GradientsParams::new(), num_gradients, count };
        let mut gradients = gradients.into_iter().peekable();
        for_each_parameter(model, &mut |index, param| {
            if let Some((_, data)) = gradients.next_if(|(of, _)| *of == index) {
                param.put(data, &mut sum.gradients);
            }
        });
        sum
    }
}

/// Sum of gradients on the host.
pub(crate) struct PendingGradients {
    /// Gradients by parameter index, in ascending order.
    pub(crate) gradients: Vec<(usize, TensorData)>,
    pub(crate) num_gradients: Vec<u32>,
    pub(crate) count: f64,
}

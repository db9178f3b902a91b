//! Sums of gradients over batches and ranks.

use std::collections::BTreeSet;

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Element, Tensor, TensorData, bf16, f16};
use half::slice::HalfFloatSliceExt as _;
use serde::{Deserialize, Serialize};
use stoker_api::experiment::GradientCompression;

use super::Selection;
use crate::Result;
use crate::collective::Collective;
use crate::record::{on_host, unreadable};
use crate::step::{Backward, Metrics, StepOutput};

/// Elements that are summed at once.
const SUM_ELEMENTS: usize = 1 << 20;

/// Sum of gradients over samples.
#[derive(Default)]
pub(crate) struct GradientSum {
    gradients: GradientsParams,
    /// For each trained parameter, in the order of visits to the model, how often it had a
    /// gradient. A parameter without any is not updated, so weight decay does not apply to it
    /// either.
    seen: Vec<u32>,
    /// Number of samples, or the sum of their weights.
    count: f64,
}

/// Buffers for summing gradients over ranks, reused because allocating memory is slow.
#[derive(Default)]
pub(crate) struct FlatGradients {
    single: Vec<f32>,
    /// Gradients of double-precision parameters, unless gradients are compressed.
    double: Vec<f64>,
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
    ) -> Metrics {
        self.add_of(model, &Selection::default(), output, whole)
    }

    /// Same as [`add`](Self::add), for selected parameters.
    pub(crate) fn add_of<M: Module>(
        &mut self,
        model: &M,
        selection: &Selection,
        output: Option<StepOutput>,
        whole: bool,
    ) -> Metrics {
        let Some(output) = output else { return Metrics::default() };
        let Backward { mut gradients, scale, count, metrics } = output.backward(model, whole);
        let Self { gradients: sum, seen, .. } = self;
        each_trained(model, &mut |index, param| {
            seen.resize(seen.len().max(index + 1), 0);
            if selection.has(index) && param.add(&mut gradients, sum, scale) {
                seen[index] += 1;
            }
        });
        self.count += count;
        metrics
    }

    /// Returns whether nothing was added.
    pub(crate) fn is_empty(&self) -> bool {
        self.seen.is_empty()
    }

    /// Returns this rank's contribution to the sum over all ranks, except the gradients.
    pub(crate) fn tally(&self) -> Tally {
        Tally { seen: self.seen.clone(), count: self.count.to_bits() }
    }

    /// All-reduces the sum to the mean over all ranks, given their tallies. With one rank, returns
    /// the sum unchanged. Sums gradients of double-precision parameters in double precision, all
    /// others in single.
    pub(crate) fn all_reduce<M: Module>(
        mut self,
        model: &M,
        ranks: &dyn Collective,
        tallies: &[Tally],
        compression: GradientCompression,
        flat: &mut FlatGradients,
    ) -> Result<Self> {
        if ranks.size() == 1 {
            return Ok(self);
        }
        let (mut sum, factor) = Self::of_all(tallies);
        let is_plain = compression == GradientCompression::None;
        if ranks.sums_on_device() {
            let (mut single, mut double) = (vec![], vec![]);
            each_trained(model, &mut |_, param| match is_plain && param.is_double() {
                true => double.push(param.take_tensor(&mut self.gradients, DType::F64)),
                false => single.push(param.take_tensor(&mut self.gradients, DType::F32)),
            });
            let mean = |parts: Vec<_>| match parts.is_empty() {
                true => Ok(None),
                false => {
                    mean_on_device(ranks, Tensor::cat(parts, 0), compression, factor).map(Some)
                }
            };
            let (single, double) = (mean(single)?, mean(double)?);
            let (mut at_single, mut at_double) = (0, 0);
            each_trained(model, &mut |index, param| {
                let (mean, at) = match is_plain && param.is_double() {
                    true => (&double, &mut at_double),
                    false => (&single, &mut at_single),
                };
                let start = std::mem::replace(at, *at + param.num_elements());
                if let (Some(mean), true) = (mean, sum.is_seen(index)) {
                    let local = mean.clone().slice(start..*at);
                    param.put_tensor(local, &mut sum.gradients);
                }
            });
            return Ok(sum);
        }
        let FlatGradients { single, double } = flat;
        single.clear();
        double.clear();
        try_each_trained(model, &mut |_, param| match is_plain && param.is_double() {
            true => param.take_double(&mut self.gradients, double),
            false => param.take_single(&mut self.gradients, single),
        })?;
        let single_factor = match compression {
            GradientCompression::None => {
                ranks.sum_f32(single)?;
                factor as f32
            }
            // Send means, because sums may exceed the range of half precision.
            GradientCompression::F16 => {
                let mut half: Vec<f16> = vec![f16::ZERO; single.len()];
                single.iter_mut().for_each(|value| *value *= factor as f32);
                half.convert_from_f32_slice(single);
                ranks.sum_f16(&mut half)?;
                half.convert_to_f32_slice(single);
                1.0
            }
            GradientCompression::Bf16 => {
                let mut half: Vec<bf16> = vec![bf16::ZERO; single.len()];
                single.iter_mut().for_each(|value| *value *= factor as f32);
                half.convert_from_f32_slice(single);
                ranks.sum_bf16(&mut half)?;
                half.convert_to_f32_slice(single);
                1.0
            }
        };
        // All ranks have the same parameters, so either all of them make this call or none does.
        if !double.is_empty() {
            ranks.sum_f64(double)?;
        }
        // Divide while copying, which touches every value anyway.
        let (mut single, mut double) = (single.as_slice(), double.as_slice());
        each_trained(model, &mut |index, param| {
            let is_seen = sum.is_seen(index);
            let mean = match is_plain && param.is_double() {
                true => {
                    let local = double.split_off(..param.num_elements()).unwrap_or_default();
                    let mean = || local.iter().map(|number| number * factor).collect::<Vec<_>>();
                    is_seen.then(|| TensorData::new(mean(), param.shape()))
                }
                false => {
                    let local = single.split_off(..param.num_elements()).unwrap_or_default();
                    let mean =
                        || local.iter().map(|number| number * single_factor).collect::<Vec<_>>();
                    is_seen.then(|| TensorData::new(mean(), param.shape()))
                }
            };
            if let Some(mean) = mean {
                param.put(mean, &mut sum.gradients);
            }
        });
        Ok(sum)
    }

    /// Returns the total of the tallies, without gradients, and the factor for their sum.
    fn of_all(tallies: &[Tally]) -> (Self, f64) {
        let mut sum = Self::default();
        for tally in tallies {
            sum.count += f64::from_bits(tally.count);
            sum.seen.resize(sum.seen.len().max(tally.seen.len()), 0);
            sum.seen.iter_mut().zip(&tally.seen).for_each(|(sum, seen)| *sum += seen);
        }
        let mut factor = 1.0;
        if sum.count > 0.0 {
            factor = 1.0 / sum.count;
            sum.count = 1.0;
        }
        (sum, factor)
    }

    /// Returns whether there are gradients and all are 0.
    fn is_zero<M: Module>(&self, model: &M) -> Result<bool> {
        Ok(!self.is_empty() && self.squares(model)? == 0.0)
    }

    /// Returns the sum of squares of all gradients. A parameter shared by several modules counts
    /// once.
    fn squares<M: Module>(&self, model: &M) -> Result<f64> {
        let (mut squares, mut counted) = (0.0, BTreeSet::new());
        try_each_trained(model, &mut |_, param| {
            if counted.insert(param.id()) {
                squares += param.squares(&self.gradients)?;
            }
            Ok(())
        })?;
        Ok(squares)
    }

    /// Returns whether any rank had a gradient for the parameter at this index.
    fn is_seen(&self, index: usize) -> bool {
        self.seen.get(index).is_some_and(|seen| *seen > 0)
    }

    /// Turns the mean into a sum: the mean over all samples times the number of batches. For
    /// batches of equal size, this is the sum of their means.
    pub(crate) fn sum_of(&mut self, batches: u64) {
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
            let mut squares = self.squares(model)?;
            if ranks.sums_on_device() {
                // Each process tunes its kernels separately, so rounding may differ between ranks.
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
        each_trained(model, &mut |_, param| {
            param.add(&mut sum, &mut out, factor);
        });
        Ok(out)
    }

    /// Returns the state for a checkpoint of a sum that no step has used yet.
    pub(crate) fn pending<M: Module>(&self, model: &M) -> Result<PendingGradients> {
        let mut gradients = vec![];
        try_each_trained(model, &mut |index, param| {
            gradients.extend(param.data(&self.gradients)?.map(|data| (index, data)));
            Ok(())
        })?;
        Ok(PendingGradients { gradients, seen: self.seen.clone(), count: self.count })
    }

    /// Adds another sum over the same model.
    pub(crate) fn absorb<M: Module>(&mut self, model: &M, mut other: Self) {
        let Self { gradients: sum, .. } = self;
        each_trained(model, &mut |_, param| {
            param.add(&mut other.gradients, sum, 1.0);
        });
        self.seen.resize(self.seen.len().max(other.seen.len()), 0);
        self.seen.iter_mut().zip(&other.seen).for_each(|(seen, other)| *seen += other);
        self.count += other.count;
    }

    /// Restores the state that [`GradientSum::pending`] returned.
    pub(crate) fn restore<M: Module>(model: &M, pending: PendingGradients) -> Self {
        let PendingGradients { gradients, seen, count } = pending;
        let mut sum = Self { gradients: GradientsParams::new(), seen, count };
        let mut gradients = gradients.into_iter().peekable();
        each_trained(model, &mut |index, param| {
            if let Some((_, data)) = gradients.next_if(|(of, _)| *of == index) {
                param.put(data, &mut sum.gradients);
            }
        });
        sum
    }
}

/// A rank's contribution to a sum of gradients, except the gradients.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(crate) struct Tally {
    seen: Vec<u32>,
    /// Count as bits, because JSON cannot represent NaN.
    count: u64,
}

/// Sum of gradients on the host.
pub(crate) struct PendingGradients {
    /// Gradients by parameter index, in ascending order.
    pub(crate) gradients: Vec<(usize, TensorData)>,
    pub(crate) seen: Vec<u32>,
    pub(crate) count: f64,
}

/// Trained parameter with a tensor of any rank.
trait Trained {
    fn id(&self) -> ParamId;
    fn num_elements(&self) -> usize;
    fn shape(&self) -> Vec<usize>;
    /// Returns whether the parameter, and so its gradient, is in double precision.
    fn is_double(&self) -> bool;
    /// Moves the gradient, times `scale`, into `sum`. Returns whether there was one.
    fn add(&mut self, from: &mut GradientsParams, sum: &mut GradientsParams, scale: f64) -> bool;
    /// Moves the gradient, or zeros if there is none, to the end of `flat`.
    fn take_single(&mut self, from: &mut GradientsParams, flat: &mut Vec<f32>) -> Result<()>;
    /// Same as [`take_single`](Self::take_single) in double precision.
    fn take_double(&mut self, from: &mut GradientsParams, flat: &mut Vec<f64>) -> Result<()>;
    /// Takes the gradient, or zeros if there is none, as a flat tensor of `dtype`.
    fn take_tensor(&mut self, from: &mut GradientsParams, dtype: DType) -> Tensor<1>;
    /// Sets the gradient from a flat tensor.
    fn put_tensor(&mut self, flat: Tensor<1>, sum: &mut GradientsParams);
    /// Sets the gradient from `data`.
    fn put(&mut self, data: TensorData, sum: &mut GradientsParams);
    /// Returns the gradient's values.
    fn data(&mut self, from: &GradientsParams) -> Result<Option<TensorData>>;
    /// Returns the sum of the gradient's squares.
    fn squares(&mut self, from: &GradientsParams) -> Result<f64>;
}

/// Moves a gradient, or zeros if there is none, to the end of `flat`.
fn take_flat<const D: usize, E: Element>(
    param: &Param<Tensor<D>>,
    from: &mut GradientsParams,
    flat: &mut Vec<E>,
) -> Result<()> {
    match from.remove::<D>(param.id) {
        Some(gradient) => on_host(gradient, |values| flat.extend_from_slice(values)),
        None => {
            let zero = E::from_elem(0.0_f32);
            flat.extend(std::iter::repeat_n(zero, param.lazy_shape().num_elements()));
            Ok(())
        }
    }
}

impl<const D: usize> Trained for &Param<Tensor<D>> {
    fn id(&self) -> ParamId {
        self.id
    }

    fn num_elements(&self) -> usize {
        self.lazy_shape().num_elements()
    }

    fn shape(&self) -> Vec<usize> {
        self.lazy_shape().to_vec()
    }

    fn is_double(&self) -> bool {
        self.val().dtype() == DType::F64
    }

    fn add(&mut self, from: &mut GradientsParams, sum: &mut GradientsParams, scale: f64) -> bool {
        let Some(gradient) = from.remove::<D>(self.id) else { return false };
        let gradient = if scale == 1.0 { gradient } else { gradient * scale };
        let gradient = match sum.remove::<D>(self.id) {
            Some(sum) => sum + gradient,
            None => gradient,
        };
        sum.register::<D>(self.id, gradient);
        true
    }

    fn take_single(&mut self, from: &mut GradientsParams, flat: &mut Vec<f32>) -> Result<()> {
        take_flat(self, from, flat)
    }

    fn take_double(&mut self, from: &mut GradientsParams, flat: &mut Vec<f64>) -> Result<()> {
        take_flat(self, from, flat)
    }

    fn take_tensor(&mut self, from: &mut GradientsParams, dtype: DType) -> Tensor<1> {
        let num = self.num_elements();
        match from.remove::<D>(self.id) {
            Some(gradient) => gradient.reshape([num]).cast(dtype),
            None => Tensor::zeros([num], (&self.lazy_device().without_autodiff(), dtype)),
        }
    }

    fn put_tensor(&mut self, flat: Tensor<1>, sum: &mut GradientsParams) {
        sum.register::<D>(self.id, flat.reshape(self.lazy_shape()).cast(self.val().dtype()));
    }

    fn put(&mut self, data: TensorData, sum: &mut GradientsParams) {
        // Gradients are on the device without autodiff.
        let device = self.lazy_device().without_autodiff();
        let dtype = self.val().dtype();
        sum.register::<D>(self.id, Tensor::from_data(data, (&device, dtype)));
    }

    fn data(&mut self, from: &GradientsParams) -> Result<Option<TensorData>> {
        let gradient = from.get::<D>(self.id);
        gradient.map(|gradient| gradient.try_into_data().map_err(unreadable)).transpose()
    }

    fn squares(&mut self, from: &GradientsParams) -> Result<f64> {
        let square = |gradient: Tensor<D>| sum_in_order(gradient.clone() * gradient);
        from.get::<D>(self.id).map_or(Ok(0.0), square)
    }
}

/// Returns the mean over all ranks of a flat tensor, which stays on its device.
fn mean_on_device(
    ranks: &dyn Collective,
    flat: Tensor<1>,
    compression: GradientCompression,
    factor: f64,
) -> Result<Tensor<1>> {
    let half = match (compression, flat.dtype()) {
        (GradientCompression::None, DType::F64) => return Ok(ranks.sum_tensor(flat)? * factor),
        (GradientCompression::None, _) => return Ok(ranks.sum_tensor(flat)? * factor as f32),
        (GradientCompression::F16, _) => DType::F16,
        (GradientCompression::Bf16, _) => DType::BF16,
    };
    Ok(ranks.sum_tensor((flat * factor as f32).cast(half))?.cast(DType::F32))
}

/// Returns the sum of all elements, bit-identical in every run. Sums in chunks, because burn's CPU
/// backend sums tensors of 4 Mi elements or more in an order that depends on its threads.
fn sum_in_order<const D: usize>(tensor: Tensor<D>) -> Result<f64> {
    let num_elements = tensor.shape().num_elements();
    let flat: Tensor<1> = tensor.reshape([num_elements]);
    let chunk = |start| {
        let end = num_elements.min(start + SUM_ELEMENTS);
        flat.clone().slice(start..end).sum()
    };
    let sums = (0..num_elements).step_by(SUM_ELEMENTS).map(chunk).collect();
    // Copy all partial sums to the host at once.
    on_host(Tensor::cat(sums, 0), |sums: &[f64]| sums.iter().sum())
}

/// Visitor of trained parameters, called with each parameter's index.
type TryEachTrained<'a> = dyn FnMut(usize, &mut dyn Trained) -> Result<()> + 'a;

/// Visits the trained parameters, not the buffers, in the order of the model's fields.
fn each_trained<M: Module>(model: &M, each: &mut dyn FnMut(usize, &mut dyn Trained)) {
    let mut visit = |index: usize, param: &mut dyn Trained| {
        each(index, param);
        Ok(())
    };
    let done = try_each_trained(model, &mut visit);
    debug_assert!(done.is_ok(), "a visit without errors: {done:?}");
}

/// Same as [`each_trained`], but stops at the first error.
fn try_each_trained<M: Module>(model: &M, each: &mut TryEachTrained) -> Result<()> {
    struct Visit<'a, 'b> {
        each: &'a mut TryEachTrained<'b>,
        next: usize,
        done: Result<()>,
    }
    impl ModuleVisitor for Visit<'_, '_> {
        fn visit_float<const D: usize>(&mut self, mut param: &Param<Tensor<D>>) {
            if param.is_require_grad() {
                if self.done.is_ok() {
                    self.done = (self.each)(self.next, &mut param);
                }
                self.next += 1;
            }
        }
    }
    let mut visit = Visit { each, next: 0, done: Ok(()) };
    model.visit(&mut visit);
    visit.done
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;

    /// Summed at once, in any order, the total would be rounded: single precision has no odd
    /// numbers beyond 2^24.
    #[test]
    fn a_large_sum_is_added_up_in_pieces() {
        let mut values = vec![0.0_f32; 8 * SUM_ELEMENTS_IN_TEST];
        values[0] = 16_777_216.0;
        (1..8).for_each(|piece| values[piece * SUM_ELEMENTS_IN_TEST] = 1.0);
        let data = TensorData::new(values, [8, SUM_ELEMENTS_IN_TEST]);
        let tensor = Tensor::<2>::from_data(data, &Device::default());
        assert_eq!(sum_in_order(tensor).unwrap(), 16_777_223.0);
    }

    const SUM_ELEMENTS_IN_TEST: usize = 1 << 20;
}

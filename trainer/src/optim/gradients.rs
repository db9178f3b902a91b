//! Sums of gradients over batches and ranks.

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Tensor, TensorData, bf16, f16};
use half::slice::HalfFloatSliceExt as _;
use serde::{Deserialize, Serialize};
use stoker_api::experiment::GradientCompression;

use super::Selection;
use crate::Result;
use crate::collective::Collective;
use crate::step::{Backward, Metrics, StepOutput};

/// Elements that are added up at once.
const SUM_ELEMENTS: usize = 1 << 20;

/// Gradients added up over samples.
#[derive(Default)]
pub(crate) struct GradientSum {
    gradients: GradientsParams,
    /// For each trained parameter, in the order in which the model is visited, how often it had a
    /// gradient: one that never had is left alone, not decayed.
    seen: Vec<u32>,
    /// Samples, or their weights.
    count: f64,
}

impl GradientSum {
    /// Runs the backward pass of a batch, or of none where this rank had no sample, and adds it. A
    /// step learns from a `whole` batch alone: see [`StepOutput::backward`].
    pub(crate) fn add<M: Module>(
        &mut self,
        model: &M,
        output: Option<StepOutput>,
        whole: bool,
    ) -> Metrics {
        self.add_of(model, &Selection::default(), output, whole)
    }

    /// As [`add`](Self::add), of these parameters alone.
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

    /// Whether nothing was added.
    pub(crate) fn is_empty(&self) -> bool {
        self.seen.is_empty()
    }

    /// What this rank adds to the sum over all ranks, but for the gradients.
    pub(crate) fn tally(&self) -> Tally {
        Tally { seen: self.seen.clone(), count: self.count.to_bits() }
    }

    /// The mean over all ranks, of which each gave `tallies`. One rank has its sum already. `flat` is
    /// kept from step to step: the system gives no new memory.
    pub(crate) fn all_reduce<M: Module>(
        mut self,
        model: &M,
        ranks: &dyn Collective,
        tallies: &[Tally],
        compression: GradientCompression,
        flat: &mut Vec<f32>,
    ) -> Result<Self> {
        if ranks.size() == 1 {
            return Ok(self);
        }
        let (mut sum, factor) = Self::of_all(tallies);
        if ranks.sums_on_device() {
            let mut parts = vec![];
            each_trained(model, &mut |_, param| parts.push(param.take_tensor(&mut self.gradients)));
            if parts.is_empty() {
                return Ok(sum);
            }
            let mean = mean_on_device(ranks, Tensor::cat(parts, 0), compression, factor)?;
            let mut at = 0;
            each_trained(model, &mut |index, param| {
                let mine = mean.clone().slice(at..at + param.num_elements());
                at += param.num_elements();
                if sum.is_seen(index) {
                    param.put_tensor(mine, &mut sum.gradients);
                }
            });
            return Ok(sum);
        }
        flat.clear();
        each_trained(model, &mut |_, param| param.take_flat(&mut self.gradients, flat));
        let factor = match compression {
            GradientCompression::None => {
                ranks.sum_f32(flat)?;
                factor
            }
            // Means, which half precision has room for.
            GradientCompression::F16 => {
                let mut half: Vec<f16> = vec![f16::ZERO; flat.len()];
                flat.iter_mut().for_each(|it| *it *= factor);
                half.convert_from_f32_slice(flat);
                ranks.sum_f16(&mut half)?;
                half.convert_to_f32_slice(flat);
                1.0
            }
            GradientCompression::Bf16 => {
                let mut half: Vec<bf16> = vec![bf16::ZERO; flat.len()];
                flat.iter_mut().for_each(|it| *it *= factor);
                half.convert_from_f32_slice(flat);
                ranks.sum_bf16(&mut half)?;
                half.convert_to_f32_slice(flat);
                1.0
            }
        };
        // Divided on the way out, where every number passes anyway.
        let mut rest = flat.as_slice();
        each_trained(model, &mut |index, param| {
            let (mine, others) = rest.split_at(param.num_elements());
            rest = others;
            if sum.is_seen(index) {
                let mean: Vec<f32> = mine.iter().map(|it| it * factor).collect();
                param.put(TensorData::new(mean, param.shape()), &mut sum.gradients);
            }
        });
        Ok(sum)
    }

    /// What all ranks have seen, without gradients yet, and what their sum is to be multiplied by.
    fn of_all(tallies: &[Tally]) -> (Self, f32) {
        let mut sum = Self::default();
        for tally in tallies {
            sum.count += f64::from_bits(tally.count);
            sum.seen.resize(sum.seen.len().max(tally.seen.len()), 0);
            sum.seen.iter_mut().zip(&tally.seen).for_each(|(sum, seen)| *sum += seen);
        }
        let mut factor = 1.0;
        if sum.count > 0.0 {
            factor = (1.0 / sum.count) as f32;
            sum.count = 1.0;
        }
        (sum, factor)
    }

    /// Whether there are gradients, and all are 0.
    fn is_zero<M: Module>(&self, model: &M) -> bool {
        let mut squares = 0.0;
        each_trained(model, &mut |_, param| squares += param.squares(&self.gradients));
        !self.is_empty() && squares == 0.0
    }

    /// Whether any rank had a gradient of the parameter at this place.
    fn is_seen(&self, index: usize) -> bool {
        self.seen.get(index).is_some_and(|it| *it > 0)
    }

    /// Makes this the mean of all samples times the number of batches: the sum of the batches' means, where these are of
    /// equal size.
    pub(crate) fn sum_of(&mut self, batches: u64) {
        self.count /= batches as f64;
    }

    /// Gradients of the mean, scaled so that their norm over all parameters is at most `norm_max`: on
    /// all `ranks` by as much.
    pub(super) fn normalise<M: Module>(
        mut self,
        model: &M,
        norm_max: Option<f64>,
        ranks: &dyn Collective,
    ) -> Result<GradientsParams> {
        let mut factor = 1.0 / self.count;
        if self.count == 0.0 && self.is_zero(model) {
            // Samples of no weight, as Keras has it: a step without gradients.
            factor = 0.0;
        } else if self.count.is_nan() || self.count <= 0.0 {
            return Err(format!(
                "a step over a count of {}: what `StepOutput::sum` is given as the number of samples, or the sum \
                 of their weights, must be positive over a batch and all its ranks",
                self.count
            )
            .into());
        }
        if let Some(norm_max) = norm_max {
            let mut squares = 0.0;
            each_trained(model, &mut |_, param| squares += param.squares(&self.gradients));
            if ranks.sums_on_device() {
                // Each process tunes its kernels for itself, and may round otherwise.
                let mine = squares.to_le_bytes().to_vec();
                let of_first = ranks.broadcast(mine.into())?;
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

    /// What a checkpoint keeps of a sum that no step has used yet.
    pub(crate) fn pending<M: Module>(&self, model: &M) -> PendingGradients {
        let mut gradients = vec![];
        each_trained(model, &mut |index, param| {
            gradients.extend(param.data(&self.gradients).map(|data| (index, data)));
        });
        PendingGradients { gradients, seen: self.seen.clone(), count: self.count }
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

    /// Takes on what [`GradientSum::pending`] gave.
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

/// What a rank adds to a sum of gradients, but for these.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(crate) struct Tally {
    seen: Vec<u32>,
    /// The bits of a count: JSON knows no NaN.
    count: u64,
}

/// A sum of gradients on the host.
pub(crate) struct PendingGradients {
    /// By the parameter's place in the order of visit, which is ascending.
    pub(crate) gradients: Vec<(usize, TensorData)>,
    pub(crate) seen: Vec<u32>,
    pub(crate) count: f64,
}

/// One trained parameter, whatever its rank.
trait Trained {
    fn num_elements(&self) -> usize;
    fn shape(&self) -> Vec<usize>;
    /// Moves the gradient, times `scale`, into `sum`; says whether there was one.
    fn add(&mut self, from: &mut GradientsParams, sum: &mut GradientsParams, scale: f64) -> bool;
    /// Moves the gradient, or as many zeros, to the end of `flat`.
    fn take_flat(&mut self, from: &mut GradientsParams, flat: &mut Vec<f32>);
    /// Takes the gradient, or as many zeros, as a flat tensor in single precision.
    fn take_tensor(&mut self, from: &mut GradientsParams) -> Tensor<1>;
    /// Makes a flat tensor the gradient.
    fn put_tensor(&mut self, flat: Tensor<1>, sum: &mut GradientsParams);
    /// Makes `data` the gradient.
    fn put(&mut self, data: TensorData, sum: &mut GradientsParams);
    /// The gradient's values.
    fn data(&mut self, from: &GradientsParams) -> Option<TensorData>;
    /// The sum of the gradient's squares.
    fn squares(&mut self, from: &GradientsParams) -> f64;
}

impl<const D: usize> Trained for &Param<Tensor<D>> {
    fn num_elements(&self) -> usize {
        self.lazy_shape().num_elements()
    }

    fn shape(&self) -> Vec<usize> {
        self.lazy_shape().to_vec()
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

    fn take_flat(&mut self, from: &mut GradientsParams, flat: &mut Vec<f32>) {
        let data = from.remove::<D>(self.id).map(|it| it.into_data().convert_dtype(DType::F32));
        match data.as_ref().and_then(|data| data.as_slice::<f32>().ok()) {
            Some(values) => flat.extend_from_slice(values),
            None => flat.extend(std::iter::repeat_n(0.0, self.num_elements())),
        }
    }

    fn take_tensor(&mut self, from: &mut GradientsParams) -> Tensor<1> {
        let num = self.num_elements();
        match from.remove::<D>(self.id) {
            Some(gradient) => gradient.reshape([num]).cast(DType::F32),
            None => Tensor::zeros([num], (&self.lazy_device().without_autodiff(), DType::F32)),
        }
    }

    fn put_tensor(&mut self, flat: Tensor<1>, sum: &mut GradientsParams) {
        sum.register::<D>(self.id, flat.reshape(self.lazy_shape()).cast(self.val().dtype()));
    }

    fn put(&mut self, data: TensorData, sum: &mut GradientsParams) {
        // Gradients live on the device without autodiff.
        let device = self.lazy_device().without_autodiff();
        let dtype = self.val().dtype();
        sum.register::<D>(self.id, Tensor::from_data(data, (&device, dtype)));
    }

    fn data(&mut self, from: &GradientsParams) -> Option<TensorData> {
        from.get::<D>(self.id).map(Tensor::into_data)
    }

    fn squares(&mut self, from: &GradientsParams) -> f64 {
        let square = |gradient: Tensor<D>| sum_in_order(gradient.clone() * gradient);
        from.get::<D>(self.id).map_or(0.0, square)
    }
}

/// The mean over all ranks of a flat tensor, which stays on its device.
fn mean_on_device(
    ranks: &dyn Collective,
    flat: Tensor<1>,
    compression: GradientCompression,
    factor: f32,
) -> Result<Tensor<1>> {
    let half = match compression {
        GradientCompression::None => return Ok(ranks.sum_tensor(flat)? * factor),
        GradientCompression::F16 => DType::F16,
        GradientCompression::Bf16 => DType::BF16,
    };
    Ok(ranks.sum_tensor((flat * factor).cast(half))?.cast(DType::F32))
}

/// The sum of all elements, the same in every run: burn's CPU backend adds up whole tensors of 4 Mi
/// elements or more in an order that threads decide.
fn sum_in_order<const D: usize>(tensor: Tensor<D>) -> f64 {
    let num_elements = tensor.shape().num_elements();
    let flat: Tensor<1> = tensor.reshape([num_elements]);
    let chunk = |start| {
        let end = num_elements.min(start + SUM_ELEMENTS);
        flat.clone().slice(start..end).sum()
    };
    let sums = (0..num_elements).step_by(SUM_ELEMENTS).map(chunk).collect();
    // One transfer, however many there are.
    let sums = Tensor::cat(sums, 0).into_data().convert_dtype(DType::F64);
    sums.as_slice::<f64>().unwrap_or_default().iter().sum()
}

/// What is done with each trained parameter, by its place in the order of visit.
type EachTrained<'a> = dyn FnMut(usize, &mut dyn Trained) + 'a;

/// Visits the trained parameters, not the buffers, in the order of the model's fields.
fn each_trained<M: Module>(model: &M, each: &mut EachTrained) {
    struct Visit<'a, 'b>(&'a mut EachTrained<'b>, usize);
    impl ModuleVisitor for Visit<'_, '_> {
        fn visit_float<const D: usize>(&mut self, mut param: &Param<Tensor<D>>) {
            if param.is_require_grad() {
                (self.0)(self.1, &mut param);
                self.1 += 1;
            }
        }
    }
    model.visit(&mut Visit(each, 0));
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;

    /// Added up at once, in whatever order, the sum would be rounded to a neighbour: single precision
    /// has no odd numbers beyond 2^24.
    #[test]
    fn a_large_sum_is_added_up_in_pieces() {
        let mut values = vec![0.0_f32; 8 * SUM_ELEMENTS_IN_TEST];
        values[0] = 16_777_216.0;
        (1..8).for_each(|piece| values[piece * SUM_ELEMENTS_IN_TEST] = 1.0);
        let data = TensorData::new(values, [8, SUM_ELEMENTS_IN_TEST]);
        let tensor = Tensor::<2>::from_data(data, &Device::default());
        assert_eq!(sum_in_order(tensor), 16_777_223.0);
    }

    const SUM_ELEMENTS_IN_TEST: usize = 1 << 20;
}

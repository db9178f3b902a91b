//! All-reduces gradient sums over the ranks, on the host or on the devices.

use burn::module::Module;
use burn::tensor::{DType, Tensor, TensorData, bf16, f16};
use half::slice::HalfFloatSliceExt as _;
use stoker_api::experiment::GradientCompression;

use super::parameters::{for_each_parameter, try_for_each_parameter};
use super::{GradientCounts, GradientSum};
use crate::Result;
use crate::collective::Collective;

/// Buffers for summing gradients over ranks, reused because allocating memory is slow.
#[derive(Default)]
pub(crate) struct FlatGradients {
    single: Vec<f32>,
    /// Gradients of double-precision parameters, unless gradients are compressed.
    double: Vec<f64>,
}

impl GradientSum {
    /// All-reduces the sum to the mean over all ranks, given the counts of each rank. With one
    /// rank, returns the sum unchanged. Sums gradients of double-precision parameters in double
    /// precision, all others in single.
    pub(crate) fn all_reduce<M: Module>(
        self,
        model: &M,
        ranks: &dyn Collective,
        rank_counts: &[GradientCounts],
        compression: GradientCompression,
        flat: &mut FlatGradients,
    ) -> Result<Self> {
        if ranks.size() == 1 {
            return Ok(self);
        }
        let (total, factor) = Self::total_counts(rank_counts);
        match ranks.sums_on_device() {
            true => self.reduce_on_device(model, ranks, total, compression, factor),
            false => self.reduce_on_host(model, ranks, total, compression, factor, flat),
        }
    }

    /// All-reduces tensors that stay on their device, and moves the means into `sum`.
    fn reduce_on_device<M: Module>(
        mut self,
        model: &M,
        ranks: &dyn Collective,
        mut sum: Self,
        compression: GradientCompression,
        factor: f64,
    ) -> Result<Self> {
        let is_plain = compression == GradientCompression::None;
        let (mut single, mut double) = (vec![], vec![]);
        for_each_parameter(model, &mut |_, param| match is_plain && param.is_double() {
            true => double.push(param.take_tensor(&mut self.gradients, DType::F64)),
            false => single.push(param.take_tensor(&mut self.gradients, DType::F32)),
        });
        let mean = |parts: Vec<_>| match parts.is_empty() {
            true => Ok(None),
            false => mean_on_device(ranks, Tensor::cat(parts, 0), compression, factor).map(Some),
        };
        let (single, double) = (mean(single)?, mean(double)?);
        let (mut at_single, mut at_double) = (0, 0);
        for_each_parameter(model, &mut |index, param| {
            let (mean, at) = match is_plain && param.is_double() {
                true => (&double, &mut at_double),
                false => (&single, &mut at_single),
            };
            let start = std::mem::replace(at, *at + param.num_elements());
            if let (Some(mean), true) = (mean, sum.has_gradient(index)) {
                let local = mean.clone().slice(start..*at);
                param.put_tensor(local, &mut sum.gradients);
            }
        });
        Ok(sum)
    }

    /// All-reduces copies on the host, and moves the means into `sum`.
    fn reduce_on_host<M: Module>(
        mut self,
        model: &M,
        ranks: &dyn Collective,
        mut sum: Self,
        compression: GradientCompression,
        factor: f64,
        flat: &mut FlatGradients,
    ) -> Result<Self> {
        let is_plain = compression == GradientCompression::None;
        let FlatGradients { single, double } = flat;
        single.clear();
        double.clear();
        try_for_each_parameter(model, &mut |_, param| match is_plain && param.is_double() {
            true => param.take_double(&mut self.gradients, double),
            false => param.take_single(&mut self.gradients, single),
        })?;
        let single_factor = reduce_single(ranks, single, compression, factor)?;
        // All ranks have the same parameters, so either all of them make this call or none does.
        if !double.is_empty() {
            ranks.sum_f64(double)?;
        }
        // Divide while copying, which touches every value anyway.
        let (mut single, mut double) = (single.as_slice(), double.as_slice());
        for_each_parameter(model, &mut |index, param| {
            let has_gradient = sum.has_gradient(index);
            let mean = match is_plain && param.is_double() {
                true => {
                    let local = double.split_off(..param.num_elements()).unwrap_or_default();
                    let mean = || local.iter().map(|number| number * factor).collect::<Vec<_>>();
                    has_gradient.then(|| TensorData::new(mean(), param.shape()))
                }
                false => {
                    let local = single.split_off(..param.num_elements()).unwrap_or_default();
                    let mean =
                        || local.iter().map(|number| number * single_factor).collect::<Vec<_>>();
                    has_gradient.then(|| TensorData::new(mean(), param.shape()))
                }
            };
            if let Some(mean) = mean {
                param.put(mean, &mut sum.gradients);
            }
        });
        Ok(sum)
    }

    /// Returns the total of the counts, without gradients, and the factor for their sum.
    fn total_counts(rank_counts: &[GradientCounts]) -> (Self, f64) {
        let mut sum = Self::default();
        for counts in rank_counts {
            sum.count += f64::from_bits(counts.count);
            sum.num_gradients.resize(sum.num_gradients.len().max(counts.num_gradients.len()), 0);
            sum.num_gradients
                .iter_mut()
                .zip(&counts.num_gradients)
                .for_each(|(sum, num_gradients)| *sum += num_gradients);
        }
        let mut factor = 1.0;
        if sum.count > 0.0 {
            factor = 1.0 / sum.count;
            sum.count = 1.0;
        }
        (sum, factor)
    }
}

/// All-reduces values in single precision in place, in half precision if they are compressed.
/// Returns the factor that turns the result into means.
fn reduce_single(
    ranks: &dyn Collective,
    single: &mut [f32],
    compression: GradientCompression,
    factor: f64,
) -> Result<f32> {
    match compression {
        GradientCompression::None => {
            ranks.sum_f32(single)?;
            Ok(factor as f32)
        }
        // Send means, because sums may exceed the range of half precision.
        GradientCompression::F16 => {
            let mut half: Vec<f16> = vec![f16::ZERO; single.len()];
            single.iter_mut().for_each(|value| *value *= factor as f32);
            half.convert_from_f32_slice(single);
            ranks.sum_f16(&mut half)?;
            half.convert_to_f32_slice(single);
            Ok(1.0)
        }
        GradientCompression::Bf16 => {
            let mut half: Vec<bf16> = vec![bf16::ZERO; single.len()];
            single.iter_mut().for_each(|value| *value *= factor as f32);
            half.convert_from_f32_slice(single);
            ranks.sum_bf16(&mut half)?;
            half.convert_to_f32_slice(single);
            Ok(1.0)
        }
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

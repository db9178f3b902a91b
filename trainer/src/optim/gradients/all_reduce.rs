//! All-reduces gradient sums over the ranks, on the host or on the devices.

use burn::module::Module;
use burn::tensor::{DType, TensorData, bf16, f16};
use bytemuck::Pod;
use half::slice::HalfFloatSliceExt;
use stoker_api::experiment::GradientCompression;
use stoker_kernels::scale_each;

use super::GradientSum;
use super::flat_buffer::FlatBuffers;
use super::parameters::{for_each_parameter, try_for_each_parameter};
use crate::Result;
use crate::collective::{Collective, all_gather_cbor};
use crate::record::tensor_read_error;

/// State that all-reduces of gradients keep for the next one.
#[derive(Default)]
pub(crate) struct AllReduceState {
    /// Compressed gradients, reused because allocating memory is slow.
    half: Vec<u16>,
    /// Numbers of values in single and in double precision, if all ranks have the same.
    lengths: Option<(usize, usize)>,
    /// Gradients on the device.
    buffers: FlatBuffers,
}

impl AllReduceState {
    /// Fails if ranks have gradients of different sizes. Ranks compare them before the first sum,
    /// and again if the model changes.
    fn compare_lengths<M: Module>(
        &mut self,
        model: &M,
        ranks: &dyn Collective,
        compression: GradientCompression,
    ) -> Result<()> {
        let (mut single, mut double) = (0, 0);
        for_each_parameter(model, &mut |_, param| match sum_dtype(param.dtype(), compression) {
            DType::F64 => double += param.num_elements(),
            _ => single += param.num_elements(),
        });
        let lengths = (single, double);
        if self.lengths == Some(lengths) {
            return Ok(());
        }
        let all = all_gather_cbor(ranks, "gradients", lengths)?;
        if let Some(rank) = all.iter().position(|lengths| *lengths != all[0]) {
            let (other, first) = (all[rank], all[0]);
            let text = format!(
                "rank {rank} has gradients of {} values in single and {} in double precision, but \
                 rank 0 of {} and {}; train the same parameters of the same model on all ranks",
                other.0, other.1, first.0, first.1
            );
            return Err(text.into());
        }
        self.lengths = Some(lengths);
        Ok(())
    }
}

impl GradientSum {
    /// All-reduces the sum to the mean over all ranks. With one rank, returns the sum unchanged.
    /// Sums gradients of double-precision parameters in double precision, all others in single.
    ///
    /// Also replaces `head` by its sums. On CPUs, gradients that are not compressed travel with it
    /// in one exchange.
    pub(crate) fn all_reduce<M: Module>(
        self,
        model: &M,
        ranks: &dyn Collective,
        head: &mut Vec<f64>,
        compression: GradientCompression,
        state: &mut AllReduceState,
    ) -> Result<Self> {
        if ranks.size() == 1 {
            return Ok(self);
        }
        state.compare_lengths(model, ranks, compression)?;
        let start = head.len();
        head.extend(self.counts(model));
        let sum = match ranks.sums_on_device() {
            true => {
                ranks.sum_segments(head, &mut [])?;
                let counts = Self::total_counts(&head[start..]);
                self.reduce_on_device(model, ranks, counts, compression, &mut state.buffers)
            }
            false => {
                self.reduce_on_host(model, ranks, (head.as_mut_slice(), start), compression, state)
            }
        };
        head.truncate(start);
        sum
    }

    /// Returns this rank's counts: of samples, of ranks with an output, and of gradients of each
    /// parameter.
    fn counts<M: Module>(&self, model: &M) -> Vec<f64> {
        let mut counts = vec![self.count, f64::from(!self.is_empty())];
        for_each_parameter(model, &mut |index, _| {
            counts.push(f64::from(self.num_gradients.get(index).copied().unwrap_or_default()));
        });
        counts
    }

    /// Returns the total over all ranks, without gradients, and the factor for their sum.
    fn total_counts(counts: &[f64]) -> (Self, f64) {
        let mut sum = Self { count: counts[0], ..Self::default() };
        if counts[1] > 0.0 {
            sum.num_gradients = counts[2..].iter().map(|count| *count as u32).collect();
        }
        let mut factor = 1.0;
        if sum.count > 0.0 {
            factor = 1.0 / sum.count;
            sum.count = 1.0;
        }
        (sum, factor)
    }

    /// All-reduces tensors that stay on their device, and moves the means into `sum`.
    fn reduce_on_device<M: Module>(
        mut self,
        model: &M,
        ranks: &dyn Collective,
        (mut sum, factor): (Self, f64),
        compression: GradientCompression,
        buffers: &mut FlatBuffers,
    ) -> Result<Self> {
        let mut sizes = vec![];
        for_each_parameter(model, &mut |_, param| {
            sizes.push((param.num_elements(), sum_dtype(param.dtype(), compression)));
        });
        buffers.start(sizes.into_iter());
        let half = match compression {
            GradientCompression::None => None,
            GradientCompression::F16 => Some(DType::F16),
            GradientCompression::Bf16 => Some(DType::BF16),
        };
        for_each_parameter(model, &mut |_, param| {
            let dtype = sum_dtype(param.dtype(), compression);
            let gradient = param.take_tensor(&mut self.gradients, dtype);
            // Ranks send compressed means, because sums may exceed the range of half precision.
            buffers.of(dtype).write(match half {
                Some(half) => (gradient * factor as f32).cast(half),
                None => gradient,
            });
        });
        buffers.sum(ranks, if half.is_some() { 1.0 } else { factor })?;
        for_each_parameter(model, &mut |index, param| {
            let dtype = sum_dtype(param.dtype(), compression);
            let mean = buffers.of(dtype).read(param.num_elements());
            if let (Some(mean), true) = (mean, sum.has_gradient(index)) {
                param.put_tensor(mean.cast(dtype), &mut sum.gradients);
            }
        });
        Ok(sum)
    }

    /// All-reduces the gradients' own memory on the host. `head` has the counts from `start` on.
    fn reduce_on_host<M: Module>(
        mut self,
        model: &M,
        ranks: &dyn Collective,
        (head, start): (&mut [f64], usize),
        compression: GradientCompression,
        state: &mut AllReduceState,
    ) -> Result<Self> {
        let mut gradients: Vec<TensorData> = vec![];
        try_for_each_parameter(model, &mut |_, param| {
            let dtype = sum_dtype(param.dtype(), compression);
            gradients.push(param.take_data(&mut self.gradients, dtype)?);
            Ok(())
        })?;
        let (mut single, mut double) = (vec![], vec![]);
        for gradient in &mut gradients {
            match gradient.dtype() {
                DType::F64 => double.push(gradient.as_mut_slice().map_err(tensor_read_error)?),
                _ => single.push(gradient.as_mut_slice().map_err(tensor_read_error)?),
            }
        }
        match compression {
            GradientCompression::None => ranks.sum_segments(head, &mut single)?,
            // The factor must be known before: see `sum_compressed`.
            _ => ranks.sum_segments(head, &mut [])?,
        }
        let (mut sum, factor) = Self::total_counts(&head[start..]);
        let (single_factor, half) = (factor as f32, &mut state.half);
        match compression {
            GradientCompression::None => {
                single.into_iter().for_each(|values| scale_each(values, single_factor));
            }
            GradientCompression::F16 => {
                let sum = |values: &mut [f16]| ranks.sum_f16(values);
                sum_compressed(&mut single, single_factor, half, sum)?;
            }
            GradientCompression::Bf16 => {
                let sum = |values: &mut [bf16]| ranks.sum_bf16(values);
                sum_compressed(&mut single, single_factor, half, sum)?;
            }
        }
        // All ranks have the same parameters, so either all of them make this call or none does.
        if !double.is_empty() {
            let mut flat: Vec<f64> = double.concat();
            ranks.sum_f64(&mut flat)?;
            let values = double.into_iter().flatten();
            values.zip(flat).for_each(|(value, sum): (&mut f64, f64)| *value = sum * factor);
        }
        let mut gradients = gradients.into_iter();
        for_each_parameter(model, &mut |index, param| {
            if let (Some(mean), true) = (gradients.next(), sum.has_gradient(index)) {
                param.put(mean, &mut sum.gradients);
            }
        });
        Ok(sum)
    }
}

/// Returns the type in which a gradient is summed.
fn sum_dtype(of_gradient: DType, compression: GradientCompression) -> DType {
    match of_gradient == DType::F64 && compression == GradientCompression::None {
        true => DType::F64,
        false => DType::F32,
    }
}

/// Replaces values by their means over all ranks, given the factor that turns sums into means.
/// `half` is memory for the compressed values. Ranks send means, because sums may exceed the range
/// of half precision.
fn sum_compressed<T: Pod>(
    values: &mut [&mut [f32]],
    factor: f32,
    half: &mut Vec<u16>,
    sum: impl FnOnce(&mut [T]) -> Result<()>,
) -> Result<()>
where
    [T]: HalfFloatSliceExt,
{
    half.resize(values.iter().map(|values| values.len()).sum(), 0);
    let flat: &mut [T] = bytemuck::cast_slice_mut(half);
    let mut rest = &mut *flat;
    for values in &mut *values {
        scale_each(values, factor);
        let compressed = rest.split_off_mut(..values.len()).unwrap_or_default();
        compressed.convert_from_f32_slice(values);
    }
    sum(flat)?;
    let mut rest = &*flat;
    for values in values {
        let means = rest.split_off(..values.len()).unwrap_or_default();
        means.convert_to_f32_slice(values);
    }
    Ok(())
}

//! Flat tensors that hold the gradients of all parameters for an all-reduce on the device.

use std::ops::Range;

use burn::tensor::{DType, Tensor};

use crate::Result;
use crate::collective::Collective;

/// Gradients start at multiples of this number of elements. burn then uses a part of the buffer
/// whose size is also a multiple without a copy: it aligns tensors on NVIDIA GPUs to 512 bytes,
/// and the smallest elements have two.
const ALIGNMENT: usize = 256;

/// Buffers of the gradients in double precision, and of all others.
#[derive(Debug, Default)]
pub(super) struct FlatBuffers {
    single: FlatBuffer,
    double: FlatBuffer,
}

impl FlatBuffers {
    /// Starts to write the gradients of a step, given the sizes and types of all parameters.
    pub(super) fn start(&mut self, parameters: impl Iterator<Item = (usize, DType)>) {
        self.single.start();
        self.double.start();
        for (len, dtype) in parameters {
            self.of(dtype).total += num_elements(len);
        }
    }

    /// Returns the buffer of the gradients that are summed in this type.
    pub(super) fn of(&mut self, dtype: DType) -> &mut FlatBuffer {
        if dtype == DType::F64 { &mut self.double } else { &mut self.single }
    }

    /// Replaces all gradients by their sums over all ranks, times `factor`.
    ///
    /// # Errors
    ///
    /// Fails if another rank exited.
    pub(super) fn sum(&mut self, ranks: &dyn Collective, factor: f64) -> Result<()> {
        self.single.sum(ranks, factor)?;
        self.double.sum(ranks, factor)
    }
}

/// Flat tensor of one element type. It is kept from step to step, and burn writes into it in place
/// if no other value shares its memory.
#[derive(Debug, Default)]
pub(super) struct FlatBuffer {
    values: Option<Tensor<1>>,
    /// Number of elements of all gradients, with the gaps between them.
    total: usize,
    /// Position after the gradient that was written or read last.
    position: usize,
}

impl FlatBuffer {
    fn start(&mut self) {
        (self.total, self.position) = (0, 0);
    }

    /// Writes the next gradient.
    ///
    /// # Shapes
    ///
    /// - gradient: `[elements]`
    pub(super) fn write(&mut self, gradient: Tensor<1>) {
        let (total, dtype) = (self.total, gradient.dtype());
        let is_of = |values: &Tensor<1>| values.dims() == [total] && values.dtype() == dtype;
        // Zeros, because the gaps are summed too.
        let new = || Tensor::zeros([total], (&gradient.device(), dtype));
        let values = self.values.take().filter(is_of).unwrap_or_else(new);
        let range = self.next_range(gradient.dims()[0]);
        self.values = Some(values.slice_assign([range], gradient));
    }

    /// Returns the next gradient of `len` elements after a sum.
    pub(super) fn read(&mut self, len: usize) -> Option<Tensor<1>> {
        let range = self.next_range(len);
        self.values.as_ref().map(|values| values.clone().slice([range]))
    }

    fn next_range(&mut self, len: usize) -> Range<usize> {
        let start = self.position;
        self.position += num_elements(len);
        start..start + len
    }

    fn sum(&mut self, ranks: &dyn Collective, factor: f64) -> Result<()> {
        let Some(values) = self.values.take().filter(|_| self.total > 0) else { return Ok(()) };
        let sums = ranks.sum_tensor(values)?;
        self.values = Some(match (factor, sums.dtype()) {
            (1.0, _) => sums,
            (_, DType::F64) => sums * factor,
            _ => sums * factor as f32,
        });
        self.position = 0;
        Ok(())
    }
}

/// Returns the number of elements that a gradient takes in the buffer.
fn num_elements(of_gradient: usize) -> usize {
    of_gradient.next_multiple_of(ALIGNMENT)
}

#[cfg(test)]
#[cfg(feature = "cubecl-cpu")]
mod cubecl_tests;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::SingleRank;
    use crate::device::host;

    #[test]
    fn gradients_of_each_step_keep_their_positions() {
        let mut buffers = FlatBuffers::default();
        // The model and the type of the gradients change.
        let steps = [
            (vec![ALIGNMENT, 3, 0, 2 * ALIGNMENT + 1], DType::F32),
            (vec![ALIGNMENT, 3, 0, 2 * ALIGNMENT + 1], DType::F32),
            (vec![5, 2 * ALIGNMENT], DType::F32),
            (vec![5, 2 * ALIGNMENT], DType::F64),
            (vec![], DType::F32),
        ];
        for (step, (lengths, dtype)) in (1_u8..).zip(&steps) {
            let value = |of: u8| f32::from(step * 10 + of);
            buffers.start(lengths.iter().map(|len| (*len, *dtype)));
            for (of, len) in (1..).zip(lengths) {
                let gradient = Tensor::<1>::full([*len], value(of), (&host(), *dtype));
                let buffer = buffers.of(*dtype);
                assert!(buffer.position.is_multiple_of(ALIGNMENT));
                buffer.write(gradient);
            }
            buffers.sum(&SingleRank, 0.5).unwrap();
            for (of, len) in (1..).zip(lengths) {
                let mean = buffers.of(*dtype).read(*len).unwrap();
                assert_eq!(mean.dtype(), *dtype);
                let mean = mean.into_data().try_to_vec_as::<f32>().unwrap();
                assert_eq!(mean, vec![0.5 * value(of); *len], "step {step}");
            }
            let total: f32 =
                (1..).zip(lengths).map(|(of, len)| 0.5 * value(of) * *len as f32).sum();
            let values = buffers.of(*dtype).values.as_ref();
            let sum = values.map(|values| values.clone().sum().into_scalar::<f32>());
            assert_eq!(sum, (!lengths.is_empty()).then_some(total), "gaps are zeros");
        }
    }
}

//! The order of elements in memory.

use std::sync::Arc;

use burn::tensor::{DType, Tensor};

use super::operation::contiguous;
use super::tape::{Gradient, Operand, Plain, plain, record, tensor};

/// Returns `x` with swapped first dimensions, in row-major order. Returns `None` if it is not on a
/// GPU. Without the copy, sums with `x` would have its order in memory.
pub(crate) fn swap_first(x: &Tensor<3>) -> Option<Tensor<3>> {
    let operand = Operand::new(x)?;
    let swapped = plain(operand.tensor::<3>().swap_dims(0, 1));
    let gradient = || -> Arc<dyn Gradient> { Arc::new(Swapped) };
    Some(record([operand], contiguous(swapped), gradient))
}

/// See [`row_major`](crate::row_major).
pub(crate) fn row_major<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    if matches!(x.dtype(), DType::QFloat(_)) {
        return x;
    }
    let Some(operand) = Operand::of_any_type(&x) else { return x };
    let values = tensor(contiguous(operand.plain()));
    match operand.is_tracked() {
        false => values,
        true => Tensor::from_inner(values).set_require_grad(x.is_require_grad()),
    }
}

struct Swapped;

impl Gradient for Swapped {
    fn backward(&self, output: Plain, _: &[bool]) -> Vec<Option<Plain>> {
        vec![Some(plain(tensor::<3>(output).swap_dims(0, 1)))]
    }
}

#[cfg(test)]
#[cfg(any(feature = "cuda", feature = "cubecl-cpu"))]
mod tests {
    use std::sync::mpsc::channel;

    use super::super::operation::queue;
    use super::super::tests::gpu;
    use super::*;
    use crate::testing::random;

    /// Returns how far apart two rows and two columns are in memory.
    fn strides(x: &Tensor<2>) -> Vec<usize> {
        let (sender, strides) = channel();
        let x = Operand::new(x).expect("the tensor is on a GPU").plain();
        let output = (x.shape.to_vec(), DType::F32);
        let [output] = queue("strides", vec![x], [output], move |inputs| {
            let [x] = inputs.try_into().unwrap_or_else(|_| unreachable!("there is one input"));
            sender.send(x.meta.strides().to_vec()).unwrap();
            [x]
        });
        // Waits for the queue.
        let _ = tensor::<2>(output).into_data();
        strides.recv().unwrap()
    }

    #[test]
    fn row_major_tensors_have_no_gaps() {
        let Some(gpu) = gpu() else { return };
        for device in [gpu.clone(), gpu.autodiff()] {
            // On GPUs, the rows of both are padded.
            let x: Tensor<2> = random([3, 5], 1).into_tensor(&device);
            let transposed = x.clone().transpose();
            assert_ne!(strides(&transposed), [3, 1]);
            for (x, expected_strides) in [(x, [5, 1]), (transposed, [3, 1])] {
                let expected = x.to_data();
                let is_tracked = device.is_autodiff();
                let x = if is_tracked { x.detach().require_grad() } else { x };
                let ours = row_major(x);
                assert_eq!(strides(&ours), expected_strides);
                assert_eq!(ours.is_require_grad(), is_tracked);
                assert_eq!(ours.to_data(), expected);
            }
        }
    }
}

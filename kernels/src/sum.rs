//! Sums in a fixed order.

use burn::tensor::Tensor;

/// Number of elements from which Flex sums in an order that depends on its threads.
const UNORDERED_ELEMENTS_MIN: usize = 4 << 20;
/// Number of elements of such a tensor that are summed at once.
const ROW_ELEMENTS: usize = 4096;

/// Returns the sum of all elements. Unlike burn, adds large tensors in a fixed order too, so
/// repeated and resumed trainings are bit-identical.
///
/// # Shapes
///
/// `values` any, result `[1]`.
pub fn sum_in_order<const D: usize>(values: Tensor<D>) -> Tensor<1> {
    let num_elements = values.shape().num_elements();
    if num_elements < UNORDERED_ELEMENTS_MIN {
        return values.sum();
    }
    // Sums of rows have one order. Each slice costs the backward pass a tensor of zeros.
    let flat: Tensor<1> = values.reshape([num_elements]);
    let num_rows = num_elements / ROW_ELEMENTS;
    let rows: Tensor<2> =
        flat.clone().slice(0..num_rows * ROW_ELEMENTS).reshape([num_rows, ROW_ELEMENTS]);
    let sum = rows.sum_dim(1).sum();
    match num_elements % ROW_ELEMENTS {
        0 => sum,
        _ => sum + flat.slice(num_rows * ROW_ELEMENTS..num_elements).sum(),
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, TensorData};

    use super::*;

    #[test]
    fn sums_of_many_elements_do_not_depend_on_threads() {
        // The last elements do not fill a row.
        const NUM: usize = UNORDERED_ELEMENTS_MIN + 5;
        // Single precision has no odd numbers beyond 2^24, so the order of these sums matters.
        let mut values = vec![0.0_f32; NUM];
        values.iter_mut().step_by(64 << 10).for_each(|value| *value = 1.0);
        (values[0], values[NUM - 1]) = (16_777_216.0, 2.0);
        let values = Tensor::<1>::from_data(TensorData::new(values, [NUM]), &Device::flex());
        let sum_on = |num_threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(num_threads).build().unwrap();
            pool.install(|| sum_in_order(values.clone()).into_scalar::<f32>().to_bits())
        };
        let expected = sum_on(1);
        for num_threads in [2, 4, 8] {
            assert_eq!(sum_on(num_threads), expected, "{num_threads} threads");
        }
    }

    #[test]
    fn sums_contain_all_elements() {
        for num in [0, 3, UNORDERED_ELEMENTS_MIN, UNORDERED_ELEMENTS_MIN + 3] {
            let ones = Tensor::<1>::ones([num], &Device::flex());
            assert_eq!(sum_in_order(ones).into_scalar::<f32>(), num as f32);
        }
    }
}

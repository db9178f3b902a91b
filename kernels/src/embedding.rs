//! Rows of a matrix by index.

use std::sync::Arc;

use burn::tensor::{Int, Tensor, module};

use crate::array::Array;
use crate::chunks::{add_to, chunk_rows, map_chunks};
use crate::machine::vectorize;
use crate::new_values::{Blank, NewValues};
use crate::tape::{ArrayGradient, Gradient, Operand, integers, record};

/// Returns the row of `weight` of each index.
///
/// The gradient of a row is the sum over its positions, in their order. An empty input, and
/// indices that are not a row, are left to burn.
///
/// # Shapes
///
/// `weight` `[num_rows, d_model]`, `indices` `[batch, len]`, result `[batch, len, d_model]`.
pub fn embedding(weight: Tensor<2>, indices: Tensor<2, Int>) -> Tensor<3> {
    #[cfg(feature = "cubecl")]
    if let Some(y) = crate::gpu::embedding(&weight, &indices) {
        return y;
    }
    fused(&weight, &indices).unwrap_or_else(|| module::embedding(weight, indices))
}

fn fused(weight: &Tensor<2>, indices: &Tensor<2, Int>) -> Option<Tensor<3>> {
    let [num_rows, d_model] = weight.dims();
    let [batch, len] = indices.dims();
    if batch * len == 0 || d_model == 0 {
        return None;
    }
    let indices = integers(indices)?.into_iter().map(usize::try_from);
    let indices: Vec<usize> = indices.collect::<Result<_, _>>().ok()?;
    if indices.iter().any(|index| *index >= num_rows) {
        return None;
    }
    let weight = Operand::new(weight)?;
    let output = forward(weight.array().values(), &indices, d_model);
    let output = Array::from_vec(output, &[batch, len, d_model]);
    let gradient =
        || -> Arc<dyn Gradient> { Arc::new(EmbeddingGradient { indices, num_rows, d_model }) };
    Some(record([weight], output, gradient))
}

fn forward(weight: &[f32], indices: &[usize], d_model: usize) -> Vec<f32> {
    let mut output = NewValues::new(indices.len() * d_model);
    let size = chunk_rows(indices.len());
    let parts = output.chunks(size * d_model).zip(indices.chunks(size)).collect();
    map_chunks(indices.len() * d_model, parts, |(output, indices): (Blank<'_, f32>, &[usize])| {
        for (output, index) in output.filled(d_model, 0.0).zip(indices) {
            output.copy_from_slice(&weight[index * d_model..][..d_model]);
        }
    });
    output.into_vec()
}

struct EmbeddingGradient {
    indices: Vec<usize>,
    num_rows: usize,
    d_model: usize,
}

impl EmbeddingGradient {
    /// Returns all positions ordered by their index, and where those of each index start. The
    /// last element is the number of positions.
    fn sorted_positions(&self) -> (Vec<usize>, Vec<usize>) {
        let mut starts = vec![0; self.num_rows + 1];
        for index in &self.indices {
            starts[index + 1] += 1;
        }
        for row in 0..self.num_rows {
            starts[row + 1] += starts[row];
        }
        let (mut positions, mut next) = (vec![0; self.indices.len()], starts.clone());
        for (position, index) in self.indices.iter().enumerate() {
            positions[next[*index]] = position;
            next[*index] += 1;
        }
        (positions, starts)
    }
}

impl ArrayGradient for EmbeddingGradient {
    /// Each row is summed by one thread, so the order of additions does not depend on threads.
    fn gradients(&self, output: &Array, _: &[bool]) -> Vec<Option<Array>> {
        let (dy, d_model) = (output.values(), self.d_model);
        let (positions, starts) = self.sorted_positions();
        let mut gradient = NewValues::new(self.num_rows * d_model);
        let size = chunk_rows(self.num_rows);
        let parts = gradient.chunks(size * d_model).enumerate().collect();
        map_chunks(dy.len(), parts, |(chunk, rows): (usize, Blank<'_, f32>)| {
            vectorize(
                #[inline(always)]
                || {
                    for (row, sums) in rows.filled(d_model, 0.0).enumerate() {
                        let row = chunk * size + row;
                        for position in &positions[starts[row]..starts[row + 1]] {
                            add_to(sums, &dy[position * d_model..][..d_model]);
                        }
                    }
                },
            );
        });
        vec![Some(Array::from_vec(gradient.into_vec(), &[self.num_rows, d_model]))]
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::TensorData;

    use super::*;
    use crate::testing::{
        Case, assert_gradients, assert_matches_burn, assert_same_on_threads, device, run,
    };

    /// Rows, size of a row, batch and length.
    type Sizes = [usize; 4];

    fn case([num_rows, d_model, ..]: Sizes) -> Case {
        Case::new(&[num_rows * d_model])
    }

    /// Repeats some rows, and leaves out others.
    fn indices([num_rows, _, batch, len]: Sizes) -> Tensor<2, Int> {
        let index = |position: usize| (position * position % num_rows) as i64;
        // A view with swapped dimensions.
        let values: Vec<i64> = (0..batch * len).map(index).collect();
        let data = TensorData::new(values, [len, batch]);
        Tensor::<2, Int>::from_data(data, &device()).swap_dims(0, 1)
    }

    fn ours(sizes: Sizes) -> impl Fn(&[Tensor<1>]) -> Tensor<1> {
        move |inputs: &[Tensor<1>]| {
            let [num_rows, d_model, batch, len] = sizes;
            let weight = inputs[0].clone().reshape([num_rows, d_model]);
            let y = fused(&weight, &indices(sizes)).unwrap();
            y.reshape([batch * len * d_model])
        }
    }

    #[test]
    fn matches_burn_for_shapes() {
        for sizes in [[1, 1, 1, 1], [7, 3, 2, 5], [5, 33, 4, 1], [100, 2, 1, 9]] {
            let burns = |inputs: &[Tensor<1>]| {
                let [num_rows, d_model, batch, len] = sizes;
                let weight = inputs[0].clone().reshape([num_rows, d_model]);
                module::embedding(weight, indices(sizes)).reshape([batch * len * d_model])
            };
            assert_matches_burn(&format!("{sizes:?}"), &case(sizes), &ours(sizes), &burns);
        }
    }

    #[test]
    fn gradients_match_finite_differences() {
        let sizes = [4, 3, 2, 5];
        let reference = |inputs: &[Vec<f64>]| {
            let indices: Vec<i64> = indices(sizes).into_data().iter::<i64>().collect();
            let row = |index: &i64| inputs[0][*index as usize * 3..][..3].to_vec();
            indices.iter().flat_map(row).collect()
        };
        assert_gradients("embedding", &case(sizes), &ours(sizes), &reference);
    }

    #[test]
    fn threads_do_not_change_bits() {
        for sizes in [[65, 64, 16, 64], [3, 64, 16, 64]] {
            assert_same_on_threads(&case(sizes), &ours(sizes));
        }
    }

    #[test]
    fn nan_stays_in_its_row() {
        let sizes = [3, 2, 1, 3];
        let mut case = case(sizes);
        case.inputs[0][2] = f32::NAN;
        let outcome = run(&case, &ours(sizes));
        // The rows are 0, 1 and 1.
        let is_nan: Vec<bool> = outcome.output.iter().map(|y| y.is_nan()).collect();
        assert_eq!(is_nan, [false, false, true, false, true, false]);
        assert!(outcome.gradients[0].iter().all(|value| value.is_finite()));
    }

    #[test]
    fn unknown_rows_and_empty_input_are_left_to_burn() {
        let weight = Tensor::<2>::ones([3, 2], &device());
        let is_fused = |index: i64| {
            fused(&weight, &Tensor::<2, Int>::from_data([[0, index]], &device())).is_some()
        };
        assert!(is_fused(2));
        assert!(!is_fused(3));
        assert!(!is_fused(-1));
        assert!(fused(&weight, &Tensor::<2, Int>::zeros([2, 0], &device())).is_none());
    }
}

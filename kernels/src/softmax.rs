//! Softmax and its logarithm over the last dimension.

use std::sync::Arc;

use burn::tensor::{Tensor, activation};

use crate::array::Array;
use crate::chunks::{chunk_rows, map_chunks};
use crate::machine::vectorize;
use crate::tape::{ArrayGradient, Gradient, Operand, record};
use crate::vector::{dot, exp_nonpositive, max, sum_of};

/// Returns `exp(x) / sum(exp(x))` over dimension `dim`.
///
/// Only the last dimension is fused. Exponentials below the smallest normal number give 0.
pub fn softmax<const D: usize>(x: Tensor<D>, dim: usize) -> Tensor<D> {
    fused(&x, dim, Kind::Softmax).unwrap_or_else(|| activation::softmax(x, dim))
}

/// Returns `x - ln(sum(exp(x)))` over dimension `dim`. Only the last dimension is fused.
pub fn log_softmax<const D: usize>(x: Tensor<D>, dim: usize) -> Tensor<D> {
    fused(&x, dim, Kind::LogSoftmax).unwrap_or_else(|| activation::log_softmax(x, dim))
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Softmax,
    LogSoftmax,
}

fn fused<const D: usize>(x: &Tensor<D>, dim: usize, kind: Kind) -> Option<Tensor<D>> {
    let shape = x.dims();
    if dim + 1 != D || shape[dim] == 0 {
        return None;
    }
    let columns = shape[dim];
    let x = Operand::new(x)?;
    let output = Array::from_vec(forward(x.array().values(), columns, kind), &shape);
    let kept = output.clone();
    let gradient =
        || -> Arc<dyn Gradient> { Arc::new(SoftmaxGradient { output: kept, columns, kind }) };
    Some(record([x], output, gradient))
}

fn forward(x: &[f32], columns: usize, kind: Kind) -> Vec<f32> {
    let mut output = x.to_vec();
    let parts = output.chunks_mut(chunk_rows(x.len() / columns) * columns).collect();
    map_chunks(x.len(), parts, |chunk: &mut [f32]| {
        vectorize(
            #[inline(always)]
            || {
                for row in chunk.chunks_exact_mut(columns) {
                    match kind {
                        Kind::Softmax => softmax_row(row, max(row)),
                        Kind::LogSoftmax => log_softmax_row(row),
                    }
                }
            },
        );
    });
    output
}

/// Replaces a row by its softmax. `maximum` keeps the exponentials from overflowing.
#[inline(always)]
pub(crate) fn softmax_row(row: &mut [f32], maximum: f32) {
    for value in row.iter_mut() {
        *value = exp_nonpositive(*value - maximum);
    }
    let reciprocal = 1.0 / sum_of(row, |value| value);
    for value in row.iter_mut() {
        *value *= reciprocal;
    }
}

/// Replaces a row by the logarithm of its softmax.
#[inline(always)]
fn log_softmax_row(row: &mut [f32]) {
    let maximum = max(row);
    let sum = sum_of(row, |value| exp_nonpositive(value - maximum));
    let logarithm = libm::logf(sum);
    for value in row.iter_mut() {
        *value = *value - maximum - logarithm;
    }
}

struct SoftmaxGradient {
    output: Array,
    columns: usize,
    kind: Kind,
}

impl ArrayGradient for SoftmaxGradient {
    /// With `p` the softmax: `dx = p * (dy - sum(dy * p))` of the softmax, and
    /// `dx = dy - p * sum(dy)` of its logarithm.
    fn gradients(&self, output: &Array, _: &[bool]) -> Vec<Option<Array>> {
        let mut dx = output.values().to_vec();
        let (num, columns) = (dx.len(), self.columns);
        let size = chunk_rows(num / columns) * columns;
        let parts = dx.chunks_mut(size).zip(self.output.values().chunks(size)).collect();
        map_chunks(num, parts, |(dx, y): (&mut [f32], &[f32])| {
            vectorize(
                #[inline(always)]
                || {
                    for (dx, y) in dx.chunks_exact_mut(columns).zip(y.chunks_exact(columns)) {
                        match self.kind {
                            Kind::Softmax => softmax_row_gradient(dx, y),
                            Kind::LogSoftmax => {
                                let sum = sum_of(dx, |value| value);
                                for (dx, y) in dx.iter_mut().zip(y) {
                                    *dx -= exp_nonpositive(*y) * sum;
                                }
                            }
                        }
                    }
                },
            );
        });
        vec![Some(Array::from_vec(dx, &self.output.shape()))]
    }
}

/// Replaces the gradient of a row's softmax `p` by the gradient of the row.
#[inline(always)]
pub(crate) fn softmax_row_gradient(gradient: &mut [f32], p: &[f32]) {
    let sum = dot(gradient, p);
    for (gradient, p) in gradient.iter_mut().zip(p) {
        *gradient = p * (*gradient - sum);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{
        Case, assert_gradients, assert_matches_burn, assert_same_on_threads, run,
    };

    const KINDS: [Kind; 2] = [Kind::Softmax, Kind::LogSoftmax];

    fn operator(rows: usize, columns: usize, kind: Kind) -> impl Fn(&[Tensor<1>]) -> Tensor<1> {
        move |inputs: &[Tensor<1>]| {
            let x = inputs[0].clone().reshape([rows, columns]);
            fused(&x, 1, kind).unwrap().reshape([rows * columns])
        }
    }

    #[test]
    fn matches_burn_for_shapes() {
        for [rows, columns] in [[1, 1], [3, 7], [17, 32], [5, 100], [0, 4]] {
            for kind in KINDS {
                let burns = |inputs: &[Tensor<1>]| {
                    let x = inputs[0].clone().reshape([rows, columns]);
                    let y = match kind {
                        Kind::Softmax => activation::softmax(x, 1),
                        Kind::LogSoftmax => activation::log_softmax(x, 1),
                    };
                    y.reshape([rows * columns])
                };
                let name = format!("{kind:?} of {rows} x {columns}");
                let ours = operator(rows, columns, kind);
                assert_matches_burn(&name, &Case::new(&[rows * columns]), &ours, &burns);
            }
        }
    }

    #[test]
    fn other_dimensions_use_operator_of_burn() {
        let x = Tensor::<2>::ones([2, 3], &crate::testing::device());
        assert!(fused(&x, 0, Kind::Softmax).is_none());
        assert_eq!(softmax(x, 0).into_data().try_to_vec::<f32>().unwrap(), [0.5; 6]);
    }

    #[test]
    fn gradients_match_finite_differences() {
        for kind in KINDS {
            let reference = |inputs: &[Vec<f64>]| {
                let row = |x: &[f64]| {
                    let sum: f64 = x.iter().map(|x| x.exp()).sum();
                    let value = |x: &f64| match kind {
                        Kind::Softmax => x.exp() / sum,
                        Kind::LogSoftmax => x - sum.ln(),
                    };
                    x.iter().map(value).collect::<Vec<f64>>()
                };
                inputs[0].chunks(5).flat_map(row).collect()
            };
            let ours = operator(3, 5, kind);
            assert_gradients(&format!("{kind:?}"), &Case::new(&[15]), &ours, &reference);
        }
    }

    #[test]
    fn threads_do_not_change_bits() {
        for kind in KINDS {
            assert_same_on_threads(&Case::new(&[1001 * 65]), &operator(1001, 65, kind));
        }
    }

    #[test]
    fn nan_and_infinity_as_in_pytorch() {
        let (nan, infinity) = (f32::NAN, f32::INFINITY);
        let check = |x: [f32; 2], expected: [f32; 2], expected_log: [f32; 2]| {
            let case = Case::from_values(vec![x.to_vec()]);
            for (kind, expected) in KINDS.into_iter().zip([expected, expected_log]) {
                let output = run(&case, &operator(1, 2, kind)).output;
                let is_same = |(a, b): (&f32, &f32)| a == b || (a.is_nan() && b.is_nan());
                assert!(output.iter().zip(&expected).all(is_same), "{kind:?} {x:?}: {output:?}");
            }
        };
        check([0.0, -infinity], [1.0, 0.0], [0.0, -infinity]);
        check([-infinity, -infinity], [nan, nan], [nan, nan]);
        check([infinity, 0.0], [nan, nan], [nan, nan]);
        check([nan, 0.0], [nan, nan], [nan, nan]);
    }
}

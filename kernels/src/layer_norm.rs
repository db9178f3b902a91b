//! Layer normalization over the last dimension.

use std::sync::Arc;

use burn::tensor::{Tensor, module};

use crate::array::Array;
use crate::chunks::{add_partial_sums, chunk_rows, map_chunks};
use crate::machine::vectorize;
use crate::new_values::{Blank, NewValues};
use crate::tape::{ArrayGradient, Gradient, Operand, record, share_tape};
use crate::vector::{dot, sum_of};

/// Returns `(x - mean) / sqrt(variance + epsilon) * gamma + beta` over the last dimension.
///
/// The variance is the biased one. Ba, Kiros and Hinton, Layer Normalization, 2016.
///
/// # Shapes
///
/// `x` `[.., d_model]`, `gamma` and `beta` `[d_model]`, result as `x`.
pub fn layer_norm<const D: usize>(
    x: Tensor<D>,
    gamma: Tensor<1>,
    beta: Option<Tensor<1>>,
    epsilon: f64,
) -> Tensor<D> {
    #[cfg(feature = "cubecl")]
    if let Some(y) = crate::gpu::layer_norm(&x, &gamma, beta.as_ref(), epsilon) {
        return y;
    }
    fused(&x, &gamma, beta.as_ref(), epsilon)
        .unwrap_or_else(|| module::layer_norm(x, gamma, beta, epsilon))
}

fn fused<const D: usize>(
    x: &Tensor<D>,
    gamma: &Tensor<1>,
    beta: Option<&Tensor<1>>,
    epsilon: f64,
) -> Option<Tensor<D>> {
    let [columns] = gamma.dims();
    let shape = x.dims();
    let has_other_beta = beta.is_some_and(|beta| beta.dims() != [columns]);
    if columns == 0 || shape[D - 1] != columns || has_other_beta {
        return None;
    }
    let (x, gamma) = (Operand::new(x)?, Operand::new(gamma)?);
    let beta = match beta {
        Some(beta) => Some(Operand::new(beta)?),
        None => None,
    };
    if !share_tape(&[&x, &gamma]) || beta.iter().any(|beta| !share_tape(&[&x, beta])) {
        return None;
    }
    let (x_array, gamma_array) = (x.array(), gamma.array());
    let beta_array = beta.as_ref().map(Operand::array);
    let beta_values = beta_array.as_ref().map(Array::values);
    let (output, moments) =
        forward(x_array.values(), gamma_array.values(), beta_values, epsilon as f32);
    let output = Array::from_vec(output, &shape);
    let gradient = || -> Arc<dyn Gradient> {
        Arc::new(LayerNormGradient { x: x_array, gamma: gamma_array, moments })
    };
    Some(match beta {
        Some(beta) => record([x, gamma, beta], output, gradient),
        None => record([x, gamma], output, gradient),
    })
}

/// Mean, and reciprocal standard deviation, of a row.
type Moments = [f32; 2];

fn forward(
    x: &[f32],
    gamma: &[f32],
    beta: Option<&[f32]>,
    epsilon: f32,
) -> (Vec<f32>, Vec<Moments>) {
    let columns = gamma.len();
    let rows = x.len() / columns;
    let mut output = NewValues::new(x.len());
    let mut moments = vec![[0.0; 2]; rows];
    let size = chunk_rows(rows);
    let outputs = output.chunks(size * columns).zip(moments.chunks_mut(size));
    let parts = outputs.zip(x.chunks(size * columns)).collect();
    map_chunks(x.len(), parts, |((output, moments), x): ((Blank<'_, f32>, &mut [Moments]), _)| {
        let x: &[f32] = x;
        vectorize(
            #[inline(always)]
            || {
                let rows = output.filled(columns, 0.0).zip(x.chunks_exact(columns));
                for ((output, x), moments) in rows.zip(moments) {
                    *moments = normalize(output, x, epsilon);
                    scale(output, gamma, beta);
                }
            },
        );
    });
    (output.into_vec(), moments)
}

#[inline(always)]
fn normalize(output: &mut [f32], x: &[f32], epsilon: f32) -> Moments {
    let num = x.len() as f32;
    let mean = sum_of(x, |x| x) / num;
    let variance = sum_of(x, |x| (x - mean) * (x - mean)) / num;
    let reciprocal = 1.0 / (variance + epsilon).sqrt();
    for (output, x) in output.iter_mut().zip(x) {
        *output = (x - mean) * reciprocal;
    }
    [mean, reciprocal]
}

#[inline(always)]
fn scale(output: &mut [f32], gamma: &[f32], beta: Option<&[f32]>) {
    for (output, gamma) in output.iter_mut().zip(gamma) {
        *output *= gamma;
    }
    for (output, beta) in output.iter_mut().zip(beta.unwrap_or_default()) {
        *output += beta;
    }
}

struct LayerNormGradient {
    x: Array,
    gamma: Array,
    moments: Vec<Moments>,
}

impl ArrayGradient for LayerNormGradient {
    /// With `h = (x - mean) * r`, `r` the reciprocal standard deviation and `t = dy * gamma`:
    /// `dx = r * (t - mean(t) - h * mean(t * h))`, `dgamma = sum(dy * h)`, `dbeta = sum(dy)`.
    fn gradients(&self, output: &Array, _: &[bool]) -> Vec<Option<Array>> {
        let (x, gamma, dy) = (self.x.values(), self.gamma.values(), output.values());
        let columns = gamma.len();
        let mut dx = NewValues::new(x.len());
        let size = chunk_rows(self.moments.len());
        let values = dx.chunks(size * columns).zip(x.chunks(size * columns));
        let parts = values.zip(dy.chunks(size * columns)).zip(self.moments.chunks(size));
        let sums = map_chunks(x.len(), parts.collect(), |(((dx, x), dy), moments)| {
            let (dx, x, dy, moments): (Blank<'_, f32>, &[f32], &[f32], &[Moments]) =
                (dx, x, dy, moments);
            // Sums of dgamma, then of dbeta.
            let mut sums = vec![0.0; 2 * columns];
            let mut scaled = vec![0.0; columns];
            vectorize(
                #[inline(always)]
                || {
                    let rows = x.chunks_exact(columns).zip(dy.chunks_exact(columns));
                    let rows = dx.filled(columns, 0.0).zip(rows).zip(moments);
                    for ((dx, (x, dy)), moments) in rows {
                        let (dgamma, dbeta) = sums.split_at_mut(columns);
                        row_gradient([dx, &mut scaled, dgamma, dbeta], x, dy, gamma, *moments);
                    }
                },
            );
            sums
        });
        let mut dgamma = add_partial_sums(sums, 2 * columns);
        let dbeta = dgamma.split_off(columns);
        vec![
            Some(Array::from_vec(dx.into_vec(), &self.x.shape())),
            Some(Array::from_vec(dgamma, &[columns])),
            Some(Array::from_vec(dbeta, &[columns])),
        ]
    }
}

/// Writes `dx` of a row, and adds to the sums of `dgamma` and `dbeta`. `scaled` is scratch space.
#[inline(always)]
fn row_gradient(
    [dx, scaled, dgamma, dbeta]: [&mut [f32]; 4],
    x: &[f32],
    dy: &[f32],
    gamma: &[f32],
    [mean, reciprocal]: Moments,
) {
    let num = x.len() as f32;
    // Equal lengths let the compiler drop the bounds checks below.
    let len = x.len();
    let (dx, scaled) = (&mut dx[..len], &mut scaled[..len]);
    let (dgamma, dbeta) = (&mut dgamma[..len], &mut dbeta[..len]);
    let (dy, gamma) = (&dy[..len], &gamma[..len]);
    for index in 0..len {
        let normalized = (x[index] - mean) * reciprocal;
        dx[index] = normalized;
        dgamma[index] += dy[index] * normalized;
        dbeta[index] += dy[index];
        scaled[index] = dy[index] * gamma[index];
    }
    let mean_scaled = sum_of(scaled, |value| value) / num;
    let mean_product = dot(scaled, dx) / num;
    for (dx, scaled) in dx.iter_mut().zip(scaled) {
        *dx = reciprocal * (*scaled - mean_scaled - *dx * mean_product);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{
        Case, assert_gradients, assert_matches_burn, assert_same_on_threads, run,
    };

    const EPSILON: f64 = 1e-5;

    fn case(rows: usize, columns: usize) -> Case {
        Case::new(&[rows * columns, columns, columns])
    }

    fn operator(rows: usize, columns: usize) -> impl Fn(&[Tensor<1>]) -> Tensor<1> {
        move |inputs: &[Tensor<1>]| {
            let x = inputs[0].clone().reshape([rows, columns]);
            let y = fused(&x, &inputs[1], Some(&inputs[2]), EPSILON).unwrap();
            y.reshape([rows * columns])
        }
    }

    #[test]
    fn matches_burn_for_shapes() {
        for [rows, columns] in [[1, 2], [3, 7], [17, 32], [5, 100], [0, 4]] {
            let burns = |inputs: &[Tensor<1>]| {
                let x = inputs[0].clone().reshape([rows, columns]);
                let beta = Some(inputs[2].clone());
                let y = module::layer_norm(x, inputs[1].clone(), beta, EPSILON);
                y.reshape([rows * columns])
            };
            let name = format!("{rows} x {columns}");
            assert_matches_burn(&name, &case(rows, columns), &operator(rows, columns), &burns);
        }
    }

    #[test]
    fn no_bias_and_transposed_input_match_burn() {
        let case = Case::new(&[2 * 5 * 6, 5]);
        let x = |inputs: &[Tensor<1>]| inputs[0].clone().reshape([2, 5, 6]).swap_dims(1, 2);
        let ours = |inputs: &[Tensor<1>]| {
            fused(&x(inputs), &inputs[1], None, EPSILON).unwrap().reshape([60])
        };
        let burns = |inputs: &[Tensor<1>]| {
            module::layer_norm(x(inputs), inputs[1].clone(), None, EPSILON).reshape([60])
        };
        assert_matches_burn("views", &case, &ours, &burns);
    }

    #[test]
    fn gradients_match_finite_differences() {
        let reference = |inputs: &[Vec<f64>]| {
            let normalize = |x: &[f64]| {
                let mean = x.iter().sum::<f64>() / 5.0;
                let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / 5.0;
                let deviation = (variance + EPSILON).sqrt();
                let value = |k: usize| (x[k] - mean) / deviation * inputs[1][k] + inputs[2][k];
                (0..5).map(value).collect::<Vec<f64>>()
            };
            inputs[0].chunks(5).flat_map(normalize).collect()
        };
        assert_gradients("layer norm", &case(3, 5), &operator(3, 5), &reference);
    }

    #[test]
    fn threads_do_not_change_bits() {
        assert_same_on_threads(&case(1001, 65), &operator(1001, 65));
    }

    #[test]
    fn nan_and_infinity_stay_in_their_rows() {
        let x = vec![1.0, f32::NAN, 2.0, f32::INFINITY, 1.0, 3.0];
        let inputs = Case::from_values(vec![x, vec![1.0; 2], vec![0.0; 2]]);
        let output = run(&inputs, &operator(3, 2)).output;
        assert!(output[..4].iter().all(|value| value.is_nan()), "{output:?}");
        assert!(output[4..].iter().all(|value| value.is_finite()), "{output:?}");
    }
}

//! Batch normalization over all dimensions but the second.

use std::sync::Arc;

use burn::tensor::module::{self, BatchNormTrainOutput};
use burn::tensor::{Device, Tensor, TensorData};

use crate::array::Array;
use crate::chunks::{chunk_rows, map_chunks};
use crate::machine::vectorize;
use crate::new_values::{Blank, NewValues};
use crate::statistics::{is_half, to_single};
use crate::tape::{ArrayGradient, Gradient, Operand, record, share_tape};

/// Returns `(x - mean) / sqrt(variance + epsilon) * gamma + beta` with the given statistics.
///
/// Statistics with a gradient are not fused. An input in half precision is normalized in `f32`, and
/// the result has its type.
///
/// # Shapes
///
/// `x` `[batch, channels, ..]`, all others `[channels]`, result as `x`.
pub fn batch_norm<const D: usize>(
    x: Tensor<D>,
    gamma: Tensor<1>,
    beta: Tensor<1>,
    mean: Tensor<1>,
    variance: Tensor<1>,
    epsilon: f64,
) -> Tensor<D> {
    let dtype = x.dtype();
    if is_half(dtype) {
        let [gamma, beta, mean, variance] = [gamma, beta, mean, variance].map(to_single);
        return batch_norm(to_single(x), gamma, beta, mean, variance, epsilon).cast(dtype);
    }
    let fused = || {
        let (mean, variance) = (constant(&mean)?, constant(&variance)?);
        let statistics = Statistics::Given([mean.values(), variance.values()]);
        Some(fused(&x, &gamma, &beta, &statistics, epsilon)?.0)
    };
    fused().unwrap_or_else(|| module::batch_norm(x, gamma, beta, mean, variance, epsilon))
}

/// Returns the batch normalization with the statistics of the batch itself, and these statistics.
///
/// Ioffe and Szegedy, Batch Normalization, 2015. The variance is the biased one, and the
/// statistics have no gradient, as in burn. An empty batch is not fused. An input in half precision
/// is normalized in `f32`: the result has its type, and the statistics are in `f32`.
///
/// # Shapes
///
/// `x` `[batch, channels, ..]`, `gamma`, `beta` and the statistics `[channels]`, result as `x`.
pub fn batch_norm_train<const D: usize>(
    x: Tensor<D>,
    gamma: Tensor<1>,
    beta: Tensor<1>,
    epsilon: f64,
) -> BatchNormTrainOutput<D> {
    let (device, dtype) = (x.device(), x.dtype());
    if is_half(dtype) {
        let [gamma, beta] = [gamma, beta].map(to_single);
        let result = batch_norm_train(to_single(x), gamma, beta, epsilon);
        return BatchNormTrainOutput { output: result.output.cast(dtype), ..result };
    }
    match fused(&x, &gamma, &beta, &Statistics::Batch, epsilon) {
        Some((output, [mean, variance])) => BatchNormTrainOutput {
            output,
            mean: of_channels(mean, &device),
            variance: of_channels(variance, &device),
        },
        None => module::batch_norm_train(x, gamma, beta, epsilon),
    }
}

fn of_channels(values: Vec<f32>, device: &Device) -> Tensor<1> {
    let shape = [values.len()];
    Tensor::from_data(TensorData::new(values, shape), device)
}

/// Returns the values of a tensor without gradient.
fn constant(tensor: &Tensor<1>) -> Option<Array> {
    let operand = Operand::new(tensor)?;
    (!operand.is_tracked()).then(|| operand.array())
}

/// Source of the mean and the variance of each channel.
enum Statistics<'a> {
    Batch,
    Given([&'a [f32]; 2]),
}

/// Returns the output, and the mean and variance of each channel.
fn fused<const D: usize>(
    x: &Tensor<D>,
    gamma: &Tensor<1>,
    beta: &Tensor<1>,
    statistics: &Statistics<'_>,
    epsilon: f64,
) -> Option<(Tensor<D>, [Vec<f32>; 2])> {
    let shape = x.dims();
    let layout = Layout::new(&shape)?;
    let [x, gamma, beta] = [Operand::new(x)?, Operand::new(gamma)?, Operand::new(beta)?];
    if !share_tape(&[&x, &gamma, &beta]) {
        return None;
    }
    let [x_array, gamma_array, beta_array] = [&x, &gamma, &beta].map(Operand::array);
    let [mean, variance] = match statistics {
        Statistics::Batch => layout.moments(x_array.values()),
        Statistics::Given(given) => given.map(<[f32]>::to_vec),
    };
    let channels: [&[f32]; 4] = [&mean, &variance, gamma_array.values(), beta_array.values()];
    if channels.iter().any(|values| values.len() != layout.channels) {
        return None;
    }
    let reciprocal = |variance: &f32| 1.0 / (variance + epsilon as f32).sqrt();
    let reciprocals: Vec<f32> = variance.iter().map(reciprocal).collect();
    let parameters: Vec<[f32; 3]> = (0..layout.channels)
        .map(|c| [mean[c], reciprocals[c] * gamma_array.values()[c], beta_array.values()[c]])
        .collect();
    let output = layout.map(
        [x_array.values(); 2],
        &parameters,
        #[inline(always)]
        |x, _, [mean, scale, beta]| (x - mean) * scale + beta,
    );
    let output = Array::from_vec(output, &shape);
    let is_batch = matches!(statistics, Statistics::Batch);
    let kept = mean.iter().zip(reciprocals).map(|(mean, reciprocal)| [*mean, reciprocal]).collect();
    let gradient = || -> Arc<dyn Gradient> {
        Arc::new(BatchNormGradient {
            layout,
            x: x_array,
            gamma: gamma_array,
            moments: kept,
            is_batch,
        })
    };
    Some((record([x, gamma, beta], output, gradient), [mean, variance]))
}

/// Independent partial sums, which fill vector registers.
const LANES: usize = 16;

/// Sizes of a tensor `[batch, channels, ..]`. The values of a channel of a sample are a plane.
#[derive(Clone, Copy, Debug)]
struct Layout {
    batch: usize,
    channels: usize,
    plane: usize,
}

impl Layout {
    /// Returns `None` for a tensor without values or without channels.
    fn new(shape: &[usize]) -> Option<Self> {
        let [batch, channels, rest @ ..] = shape else { return None };
        let layout = Self { batch: *batch, channels: *channels, plane: rest.iter().product() };
        (layout.num_elements() > 0).then_some(layout)
    }

    fn num_elements(&self) -> usize {
        self.batch * self.channels * self.plane
    }

    /// Number of values of each channel.
    fn num_per_channel(&self) -> f64 {
        (self.batch * self.plane) as f64
    }

    /// Rows that are divided among threads, and the length of each: samples if planes have one
    /// value, and planes otherwise.
    fn rows(&self) -> (usize, usize) {
        match self.plane {
            1 => (self.batch, self.channels),
            plane => (self.batch * self.channels, plane),
        }
    }

    /// Returns the mean and the biased variance of each channel.
    fn moments(&self, x: &[f32]) -> [Vec<f32>; 2] {
        let mean = |sums: Vec<[f64; 1]>| -> Vec<f32> {
            sums.iter().map(|[sum]| (sum / self.num_per_channel()) as f32).collect()
        };
        let zeros = vec![[0.0]; self.channels];
        let means = mean(self.sums(
            [x; 2],
            &zeros,
            #[inline(always)]
            |x, _, _| [x],
        ));
        let centers: Vec<[f32; 1]> = means.iter().map(|mean| [*mean]).collect();
        let variances = mean(self.sums(
            [x; 2],
            &centers,
            #[inline(always)]
            |x, _, [mean]| [(x - mean) * (x - mean)],
        ));
        [means, variances]
    }

    /// Returns `function(left, right, parameters)` of each pair of values.
    fn map<const P: usize>(
        &self,
        [left, right]: [&[f32]; 2],
        parameters: &[[f32; P]],
        function: impl Fn(f32, f32, [f32; P]) -> f32 + Sync,
    ) -> Vec<f32> {
        let mut output = NewValues::new(left.len());
        let (num_rows, len) = self.rows();
        let size = chunk_rows(num_rows);
        let inputs = left.chunks(size * len).zip(right.chunks(size * len));
        let parts = output.chunks(size * len).zip(inputs).enumerate().collect();
        let apply = |(chunk, (output, (left, right)))| {
            let (output, left, right): (Blank<'_, f32>, &[f32], &[f32]) = (output, left, right);
            let inputs = left.chunks_exact(len).zip(right.chunks_exact(len));
            let rows = output.filled(len, 0.0).zip(inputs).enumerate();
            vectorize(
                #[inline(always)]
                || {
                    for (row, (output, (left, right))) in rows {
                        let values = output.iter_mut().zip(left.iter().zip(right));
                        if self.plane == 1 {
                            for ((output, (left, right)), parameters) in values.zip(parameters) {
                                *output = function(*left, *right, *parameters);
                            }
                        } else {
                            let channel = parameters[(chunk * size + row) % self.channels];
                            for (output, (left, right)) in values {
                                *output = function(*left, *right, channel);
                            }
                        }
                    }
                },
            );
        };
        map_chunks(left.len(), parts, apply);
        output.into_vec()
    }

    /// Returns the sums of `term(left, right, parameters)` over each channel.
    fn sums<const N: usize, const P: usize>(
        &self,
        [left, right]: [&[f32]; 2],
        parameters: &[[f32; P]],
        term: impl Fn(f32, f32, [f32; P]) -> [f32; N] + Sync,
    ) -> Vec<[f64; N]> {
        let (num_rows, len) = self.rows();
        let size = chunk_rows(num_rows);
        let inputs = left.chunks(size * len).zip(right.chunks(size * len));
        let partial = map_chunks(left.len(), inputs.enumerate().collect(), |(chunk, inputs)| {
            let (left, right): (&[f32], &[f32]) = inputs;
            let rows = left.chunks_exact(len).zip(right.chunks_exact(len));
            vectorize(
                #[inline(always)]
                || match self.plane {
                    1 => column_sums(rows, parameters, &term),
                    _ => rows
                        .enumerate()
                        .map(|(row, inputs)| {
                            let channel = parameters[(chunk * size + row) % self.channels];
                            row_sums(inputs, |left, right| term(left, right, channel))
                        })
                        .collect(),
                },
            )
        });
        // A partial result has a sum for each column, or for each plane. Both repeat the channels.
        let mut sums = vec![[0.0; N]; self.channels];
        let partial = partial.into_iter().flatten().enumerate();
        for (index, partial) in partial {
            for (sum, partial) in sums[index % self.channels].iter_mut().zip(partial) {
                *sum += partial;
            }
        }
        sums
    }
}

/// Returns the sums of each column.
#[inline(always)]
fn column_sums<'a, const N: usize, const P: usize>(
    rows: impl Iterator<Item = (&'a [f32], &'a [f32])>,
    parameters: &[[f32; P]],
    term: impl Fn(f32, f32, [f32; P]) -> [f32; N],
) -> Vec<[f64; N]> {
    let mut sums = vec![[0.0; N]; parameters.len()];
    for (left, right) in rows {
        let columns = left.iter().zip(right).zip(parameters);
        for (sums, ((left, right), parameters)) in sums.iter_mut().zip(columns) {
            for (sum, term) in sums.iter_mut().zip(term(*left, *right, *parameters)) {
                *sum += f64::from(term);
            }
        }
    }
    sums
}

/// Returns the sums of a row, with a fixed order of additions. Like PyTorch, adds in double
/// precision: a mean of many large values would lose digits of their differences.
#[inline(always)]
fn row_sums<const N: usize>(
    (left, right): (&[f32], &[f32]),
    term: impl Fn(f32, f32) -> [f32; N],
) -> [f64; N] {
    let mut lanes = [[0.0_f64; LANES]; N];
    let (left_blocks, right_blocks) = (left.chunks_exact(LANES), right.chunks_exact(LANES));
    let mut sums = [0.0_f64; N];
    for (left, right) in left_blocks.remainder().iter().zip(right_blocks.remainder()) {
        let terms = term(*left, *right);
        (0..N).for_each(|sum| sums[sum] += f64::from(terms[sum]));
    }
    for (left, right) in left_blocks.zip(right_blocks) {
        for lane in 0..LANES {
            let terms = term(left[lane], right[lane]);
            (0..N).for_each(|sum| lanes[sum][lane] += f64::from(terms[sum]));
        }
    }
    std::array::from_fn(|sum| lanes[sum].iter().sum::<f64>() + sums[sum])
}

struct BatchNormGradient {
    layout: Layout,
    x: Array,
    gamma: Array,
    /// Mean, and reciprocal standard deviation, of each channel.
    moments: Vec<[f32; 2]>,
    /// Whether the moments are those of `x`.
    is_batch: bool,
}

impl ArrayGradient for BatchNormGradient {
    /// With `h = (x - mean) * r` and `r` the reciprocal standard deviation: `dbeta = sum(dy)`,
    /// `dgamma = sum(dy * h)`, and `dx = gamma * r * (dy - mean(dy) - h * mean(dy * h))` with the
    /// moments of the batch, `dx = gamma * r * dy` with others.
    fn gradients(&self, output: &Array, is_wanted: &[bool]) -> Vec<Option<Array>> {
        let inputs = [self.x.values(), output.values()];
        let sums = self.layout.sums(
            inputs,
            &self.moments,
            #[inline(always)]
            |x, dy, [mean, reciprocal]| [dy, dy * ((x - mean) * reciprocal)],
        );
        let dx = is_wanted[0].then(|| {
            let num = self.layout.num_per_channel();
            let channel = |((sums, [mean, reciprocal]), gamma): ((&[f64; 2], &[f32; 2]), &f32)| {
                let [mean_dy, mean_product] = match self.is_batch {
                    true => sums.map(|sum| (sum / num) as f32),
                    false => [0.0; 2],
                };
                [*mean, *reciprocal, gamma * reciprocal, mean_dy, mean_product]
            };
            let channels = sums.iter().zip(&self.moments).zip(self.gamma.values());
            let channels: Vec<[f32; 5]> = channels.map(channel).collect();
            let dx = match self.is_batch {
                true => self.layout.map(
                    inputs,
                    &channels,
                    #[inline(always)]
                    |x, dy, [mean, reciprocal, scale, mean_dy, mean_product]| {
                        scale * (dy - mean_dy - (x - mean) * reciprocal * mean_product)
                    },
                ),
                false => self.layout.map(
                    inputs,
                    &channels,
                    #[inline(always)]
                    |_, dy, [_, _, scale, ..]| scale * dy,
                ),
            };
            Array::from_vec(dx, &self.x.shape())
        });
        let of_channels = |index: usize| {
            let values = sums.iter().map(|sums| sums[index] as f32).collect();
            Some(Array::from_vec(values, &[self.layout.channels]))
        };
        vec![dx, of_channels(1), of_channels(0)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::{Instructions, vectorize_for};
    use crate::testing::{
        Case, assert_gradients, assert_matches_burn, assert_same_on_threads, device, run,
    };

    const EPSILON: f64 = 1e-3;

    /// Batch, channels, and two dimensions of a plane.
    type Sizes = [usize; 4];

    const SIZES: [Sizes; 6] =
        [[3, 2, 1, 1], [17, 5, 1, 1], [1, 3, 2, 3], [2, 1, 1, 7], [4, 3, 5, 7], [2, 9, 4, 4]];

    /// Which statistics an operator uses. Given ones are constants.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Mode {
        Train,
        Evaluate,
    }

    fn num([batch, channels, height, width]: Sizes) -> usize {
        batch * channels * height * width
    }

    fn case(sizes: Sizes) -> Case {
        Case::new(&[num(sizes), sizes[1], sizes[1]])
    }

    fn given(channels: usize) -> [Vec<f32>; 2] {
        let value = |start: f32, c: usize| start + 0.3 * c as f32;
        [-0.2, 0.4].map(|start| (0..channels).map(|c| value(start, c)).collect())
    }

    fn flat<const D: usize>(y: Tensor<D>) -> Tensor<1> {
        let num = y.dims().iter().product::<usize>();
        y.reshape([num])
    }

    /// The input is a view with swapped dimensions.
    fn image(sizes: Sizes, inputs: &[Tensor<1>]) -> Tensor<4> {
        let [batch, channels, height, width] = sizes;
        inputs[0].clone().reshape([channels, batch, height, width]).swap_dims(0, 1)
    }

    fn ours(sizes: Sizes, mode: Mode) -> impl Fn(&[Tensor<1>]) -> Tensor<1> {
        move |inputs: &[Tensor<1>]| {
            let given = given(sizes[1]);
            let statistics = match mode {
                Mode::Train => Statistics::Batch,
                Mode::Evaluate => Statistics::Given(given.each_ref().map(Vec::as_slice)),
            };
            let x = image(sizes, inputs);
            flat(fused(&x, &inputs[1], &inputs[2], &statistics, EPSILON).unwrap().0)
        }
    }

    fn burns(sizes: Sizes, mode: Mode) -> impl Fn(&[Tensor<1>]) -> Tensor<1> {
        move |inputs: &[Tensor<1>]| {
            let (x, gamma, beta) = (image(sizes, inputs), inputs[1].clone(), inputs[2].clone());
            flat(match mode {
                Mode::Train => module::batch_norm_train(x, gamma, beta, EPSILON).output,
                Mode::Evaluate => {
                    let [mean, variance] =
                        given(sizes[1]).map(|values| of_channels(values, &x.device()));
                    module::batch_norm(x, gamma, beta, mean, variance, EPSILON)
                }
            })
        }
    }

    #[test]
    fn matches_burn_for_shapes() {
        for sizes in SIZES {
            for mode in [Mode::Train, Mode::Evaluate] {
                let name = format!("{mode:?}, {sizes:?}");
                assert_matches_burn(&name, &case(sizes), &ours(sizes, mode), &burns(sizes, mode));
            }
        }
    }

    #[test]
    fn gradients_match_finite_differences() {
        for sizes in [[4, 2, 1, 1], [2, 3, 2, 2], [1, 2, 17, 2]] {
            for mode in [Mode::Train, Mode::Evaluate] {
                let reference = |inputs: &[Vec<f64>]| reference(sizes, mode, inputs);
                let name = format!("{mode:?}, {sizes:?}");
                assert_gradients(&name, &case(sizes), &ours(sizes, mode), &reference);
            }
        }
    }

    /// Batch normalization by its definition. The input is stored by channels.
    fn reference(sizes: Sizes, mode: Mode, inputs: &[Vec<f64>]) -> Vec<f64> {
        let [batch, channels, height, width] = sizes;
        let (plane, given) = (height * width, given(channels));
        let mut out = vec![0.0; inputs[0].len()];
        for (channel, values) in inputs[0].chunks(batch * plane).enumerate() {
            let num = values.len() as f64;
            let mean = values.iter().sum::<f64>() / num;
            let variance = values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / num;
            let [mean, variance] = match mode {
                Mode::Train => [mean, variance],
                Mode::Evaluate => given.each_ref().map(|values| f64::from(values[channel])),
            };
            for (index, x) in values.iter().enumerate() {
                let y = (x - mean) / (variance + EPSILON).sqrt() * inputs[1][channel];
                let (sample, position) = (index / plane, index % plane);
                out[(sample * channels + channel) * plane + position] = y + inputs[2][channel];
            }
        }
        out
    }

    #[test]
    fn threads_do_not_change_bits() {
        for sizes in [[1001, 65, 1, 1], [33, 13, 11, 17]] {
            for mode in [Mode::Train, Mode::Evaluate] {
                assert_same_on_threads(&case(sizes), &ours(sizes, mode));
            }
        }
    }

    #[test]
    fn statistics_match_burn_without_gradient() {
        let device = device().autodiff();
        let case = case([4, 3, 5, 7]);
        let [x, gamma, beta] = case.tensors(&device).try_into().unwrap();
        let x = x.require_grad().reshape([4, 3, 5, 7]);
        let ours = batch_norm_train(x.clone(), gamma.clone(), beta.clone(), EPSILON);
        let burns = module::batch_norm_train(x, gamma, beta, EPSILON);
        for (ours, burns) in [(ours.mean, burns.mean), (ours.variance, burns.variance)] {
            assert_eq!(ours.device(), burns.device());
            assert!(Operand::new(&ours).is_some_and(|operand| !operand.is_tracked()));
            let difference: f32 = (ours - burns).abs().max().into_scalar();
            assert!(difference < 1e-6, "{difference}");
        }
    }

    #[test]
    fn vectors_do_not_change_bits() {
        #[inline(always)]
        fn compute(values: &[f32]) -> Vec<u64> {
            let term = |x: f32, y: f32| [x * 1.1 + 0.3, y * (x - 0.7)];
            let rows = row_sums((values, &values[1..]), term);
            let pairs = values.chunks_exact(2).map(|row| (row, row));
            let columns = column_sums(pairs, &[[0.1], [0.2]], |x, y, [z]| [x * y + z]);
            rows.into_iter().chain(columns.concat()).map(f64::to_bits).collect()
        }
        let values: Vec<f32> = (0..1001).map(|index| (index as f32 - 500.0) / 61.0).collect();
        for instructions in Instructions::supported() {
            let vectorized = vectorize_for(
                instructions,
                #[inline(always)]
                || compute(&values),
            );
            assert_eq!(vectorized, compute(&values), "{instructions:?}");
        }
    }

    /// The mean of large values is exact enough for their small differences.
    #[test]
    fn large_means_do_not_cancel() {
        let x: Vec<f32> = (0..2000).map(|index| 1e6 + (index % 2) as f32).collect();
        let case = Case::from_values(vec![x, vec![1.0], vec![0.0]]);
        let output = run(&case, &ours([2, 1, 10, 100], Mode::Train)).output;
        let expected = 0.5 / (0.25 + EPSILON as f32).sqrt();
        assert!(output.iter().all(|y| (y.abs() - expected).abs() < 1e-5), "{:?}", &output[..4]);
    }

    #[test]
    fn nan_and_infinity_stay_in_their_channels() {
        for plane in [1, 2] {
            for value in [f32::NAN, f32::INFINITY] {
                let sizes = [3, 2, 1, plane];
                let mut case = case(sizes);
                case.inputs[0][0] = value;
                let output = run(&case, &ours(sizes, Mode::Train)).output;
                for (index, y) in output.iter().enumerate() {
                    assert_eq!(y.is_nan(), index / plane % 2 == 0, "{value}: {output:?}");
                }
            }
        }
    }

    #[test]
    fn empty_input_and_other_shapes_are_left_to_burn() {
        let is_fused = |shape: [usize; 3], channels: usize| {
            let x = Tensor::<3>::ones(shape, &device());
            let gamma = Tensor::<1>::ones([channels], &device());
            fused(&x, &gamma, &gamma, &Statistics::Batch, EPSILON).is_some()
        };
        assert!(is_fused([2, 3, 4], 3));
        assert!(!is_fused([2, 3, 4], 4));
        assert!(!is_fused([0, 3, 4], 3));
        assert!(!is_fused([2, 3, 0], 3));
        let device = device().autodiff();
        let mean = Tensor::<1>::ones([3], &device).require_grad();
        assert!(constant(&mean).is_none());
    }
}

//! Batch normalization over all dimensions but the second.

mod layout;

use std::sync::Arc;

use burn::tensor::module::{self, BatchNormTrainOutput};
use burn::tensor::{Device, Tensor, TensorData};

use self::layout::Layout;
use crate::activation::{Activation, relu};
use crate::array::Array;
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
    normalize(x, [gamma, beta], [mean, variance], epsilon, Activation::Identity)
}

/// Returns `activation` of [`batch_norm`].
pub(crate) fn normalize<const D: usize>(
    x: Tensor<D>,
    [gamma, beta]: [Tensor<1>; 2],
    [mean, variance]: [Tensor<1>; 2],
    epsilon: f64,
    activation: Activation,
) -> Tensor<D> {
    let dtype = x.dtype();
    if is_half(dtype) {
        let [gamma, beta, mean, variance] = [gamma, beta, mean, variance].map(to_single);
        let output = batch_norm(to_single(x), gamma, beta, mean, variance, epsilon);
        return activation.apply_burn(output.cast(dtype));
    }
    let fused = || {
        let (mean, variance) = (constant(&mean)?, constant(&variance)?);
        let statistics = Statistics::Given([mean.values(), variance.values()]);
        Some(fused(&x, &gamma, &beta, &statistics, epsilon, activation)?.0)
    };
    fused().unwrap_or_else(|| {
        activation.apply_burn(module::batch_norm(x, gamma, beta, mean, variance, epsilon))
    })
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
    normalize_train(x, [gamma, beta], epsilon, Activation::Identity)
}

/// Same as [`batch_norm_train`], with `activation` of the output.
pub(crate) fn normalize_train<const D: usize>(
    x: Tensor<D>,
    [gamma, beta]: [Tensor<1>; 2],
    epsilon: f64,
    activation: Activation,
) -> BatchNormTrainOutput<D> {
    let (device, dtype) = (x.device(), x.dtype());
    if is_half(dtype) {
        let [gamma, beta] = [gamma, beta].map(to_single);
        let result = batch_norm_train(to_single(x), gamma, beta, epsilon);
        let output = activation.apply_burn(result.output.cast(dtype));
        return BatchNormTrainOutput { output, ..result };
    }
    match fused(&x, &gamma, &beta, &Statistics::Batch, epsilon, activation) {
        Some((output, [mean, variance])) => BatchNormTrainOutput {
            output,
            mean: of_channels(mean, &device),
            variance: of_channels(variance, &device),
        },
        None => {
            let result = module::batch_norm_train(x, gamma, beta, epsilon);
            BatchNormTrainOutput { output: activation.apply_burn(result.output), ..result }
        }
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
    activation: Activation,
) -> Option<(Tensor<D>, [Vec<f32>; 2])> {
    let is_relu = match activation {
        Activation::Identity => false,
        Activation::Relu => true,
        Activation::Gelu => {
            let plain = fused(x, gamma, beta, statistics, epsilon, Activation::Identity);
            return plain.map(|(output, moments)| (activation.apply_burn(output), moments));
        }
    };
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
    let parameters: [&[f32]; 4] = [&mean, &variance, gamma_array.values(), beta_array.values()];
    if parameters.iter().any(|values| values.len() != layout.channels) {
        return None;
    }
    let reciprocal = |variance: &f32| 1.0 / (variance + epsilon as f32).sqrt();
    let reciprocals: Vec<f32> = variance.iter().map(reciprocal).collect();
    let channels = channels_of([&mean, &reciprocals, gamma_array.values(), beta_array.values()]);
    let output = if is_relu {
        outputs::<true>(layout, x_array.values(), &channels)
    } else {
        outputs::<false>(layout, x_array.values(), &channels)
    };
    let output = Array::from_vec(output, &shape);
    let is_batch = matches!(statistics, Statistics::Batch);
    let gradient = || -> Arc<dyn Gradient> {
        Arc::new(BatchNormGradient { layout, x: x_array, channels, is_batch, is_relu })
    };
    Some((record([x, gamma, beta], output, gradient), [mean, variance]))
}

/// Numbers that transform the values of a channel.
#[derive(Clone, Copy)]
struct Channel {
    mean: f32,
    /// Reciprocal standard deviation.
    reciprocal: f32,
    /// `gamma * reciprocal`.
    scale: f32,
    beta: f32,
}

fn channels_of([mean, reciprocal, gamma, beta]: [&[f32]; 4]) -> Vec<Channel> {
    let moments = mean.iter().zip(reciprocal);
    let channel = |((mean, reciprocal), (gamma, beta)): ((&f32, &f32), (&f32, &f32))| Channel {
        mean: *mean,
        reciprocal: *reciprocal,
        scale: gamma * reciprocal,
        beta: *beta,
    };
    moments.zip(gamma.iter().zip(beta)).map(channel).collect()
}

impl Channel {
    /// Returns the output before the activation.
    #[inline(always)]
    fn output(self, x: f32) -> f32 {
        (x - self.mean) * self.scale + self.beta
    }

    /// Returns the gradient before the activation. Computes the output again, bit-identical,
    /// instead of keeping it.
    #[inline(always)]
    fn before<const RELU: bool>(self, x: f32, dy: f32) -> f32 {
        if RELU && self.output(x) <= 0.0 { 0.0 } else { dy }
    }
}

/// Returns the normalized values, after a ReLU if there is one.
fn outputs<const RELU: bool>(layout: Layout, x: &[f32], channels: &[Channel]) -> Vec<f32> {
    layout.map(
        [x; 2],
        channels,
        #[inline(always)]
        |x, _, channel| {
            let output = channel.output(x);
            if RELU { relu(output) } else { output }
        },
    )
}

struct BatchNormGradient {
    layout: Layout,
    x: Array,
    channels: Vec<Channel>,
    /// Whether the moments are those of `x`.
    is_batch: bool,
    is_relu: bool,
}

impl ArrayGradient for BatchNormGradient {
    fn gradients(&self, output: &Array, is_wanted: &[bool]) -> Vec<Option<Array>> {
        if self.is_relu {
            self.gradients_of::<true>(output, is_wanted[0])
        } else {
            self.gradients_of::<false>(output, is_wanted[0])
        }
    }
}

impl BatchNormGradient {
    /// With `h = (x - mean) * r` and `r` the reciprocal standard deviation: `dbeta = sum(dy)`,
    /// `dgamma = sum(dy * h)`, and `dx = gamma * r * (dy - mean(dy) - h * mean(dy * h))` with the
    /// moments of the batch, `dx = gamma * r * dy` with others. `dy` is the gradient before the
    /// activation.
    fn gradients_of<const RELU: bool>(
        &self,
        output: &Array,
        is_dx_wanted: bool,
    ) -> Vec<Option<Array>> {
        let inputs = [self.x.values(), output.values()];
        let sums = self.layout.sums(
            inputs,
            &self.channels,
            #[inline(always)]
            |x, dy, channel| {
                let dy = channel.before::<RELU>(x, dy);
                [dy, dy * ((x - channel.mean) * channel.reciprocal)]
            },
        );
        let dx = is_dx_wanted.then(|| {
            let num = self.layout.num_per_channel();
            let means = |(sums, channel): (&[f64; 2], &Channel)| {
                (*channel, sums.map(|sum| (sum / num) as f32))
            };
            let means: Vec<(Channel, [f32; 2])> =
                sums.iter().zip(&self.channels).map(means).collect();
            let dx = match self.is_batch {
                true => self.layout.map(
                    inputs,
                    &means,
                    #[inline(always)]
                    |x, dy, (channel, [mean_dy, mean_product])| {
                        let Channel { mean, reciprocal, scale, .. } = channel;
                        let dy = channel.before::<RELU>(x, dy);
                        scale * (dy - mean_dy - (x - mean) * reciprocal * mean_product)
                    },
                ),
                false => self.layout.map(
                    inputs,
                    &self.channels,
                    #[inline(always)]
                    |x, dy, channel| channel.scale * channel.before::<RELU>(x, dy),
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
        activated(sizes, mode, Activation::Identity)
    }

    fn activated(
        sizes: Sizes,
        mode: Mode,
        activation: Activation,
    ) -> impl Fn(&[Tensor<1>]) -> Tensor<1> {
        move |inputs: &[Tensor<1>]| {
            let given = given(sizes[1]);
            let statistics = match mode {
                Mode::Train => Statistics::Batch,
                Mode::Evaluate => Statistics::Given(given.each_ref().map(Vec::as_slice)),
            };
            let x = image(sizes, inputs);
            flat(fused(&x, &inputs[1], &inputs[2], &statistics, EPSILON, activation).unwrap().0)
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
    fn fused_relu_is_bit_identical_to_another_operator() {
        let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        for sizes in SIZES {
            for mode in [Mode::Train, Mode::Evaluate] {
                let mut case = case(sizes);
                // The output of channel 0 is exactly 0 or -0.
                (case.inputs[1][0], case.inputs[2][0]) = (0.0, -0.0);
                let ours = run(&case, &activated(sizes, mode, Activation::Relu));
                let plain = activated(sizes, mode, Activation::Identity);
                let expected =
                    run(&case, &|inputs: &[Tensor<1>]| Activation::Relu.apply_burn(plain(inputs)));
                let name = format!("{sizes:?}, {mode:?}");
                assert_eq!(bits(&ours.output), bits(&expected.output), "{name}");
                for (ours, expected) in ours.gradients.iter().zip(&expected.gradients) {
                    assert_eq!(bits(ours), bits(expected), "{name}");
                }
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
            fused(&x, &gamma, &gamma, &Statistics::Batch, EPSILON, Activation::Identity).is_some()
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

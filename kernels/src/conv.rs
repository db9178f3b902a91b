//! Two-dimensional convolutions by matrix products.

mod copied;
mod direct;
mod geometry;
mod pooled;

use std::borrow::Cow;
use std::sync::Arc;

use burn::tensor::Tensor;
use burn::tensor::module;
use burn::tensor::ops::{ConvOptions, MaxPoolOptions};

use self::copied::Copied;
use self::direct::Direct;
use self::geometry::Geometry;
pub use self::pooled::conv2d_max_pool2d;
use self::pooled::{Positions, forward_pooled};
use crate::activation::{Activation, Kept};
use crate::array::Array;
use crate::chunks::{add_partial_sums, chunk_rows, map_chunks};
use crate::machine::{Matrix, vectorize};
use crate::new_values::{Blank, NewValues};
use crate::pool::Pairs;
use crate::tape::{ArrayGradient, Gradient, Operand, record, share_tape};
use crate::vector::sum_of;

/// Returns `activation` of the convolution (cross-correlation) of `x` with `weight`, plus `bias`.
///
/// Each image becomes a matrix of its windows, as in Chellapilla, Puri and Simard, High
/// Performance Convolutional Neural Networks for Document Processing, 2006. If possible, products
/// read the windows from a padded image instead, similar to Dukhan, The Indirect Convolution
/// Algorithm, 2019. Both multiply the weights by the zeros of the padding.
///
/// # Shapes
///
/// `x` `[batch, channels_in, height, width]`,
/// `weight` `[channels_out, channels_in / groups, kernel_height, kernel_width]`,
/// `bias` `[channels_out]`, result `[batch, channels_out, height_out, width_out]`.
///
/// # Panics
///
/// The shapes do not fit.
pub fn conv2d(
    x: Tensor<4>,
    weight: Tensor<4>,
    bias: Option<Tensor<1>>,
    options: impl Into<ConvOptions<2>>,
    activation: Activation,
) -> Tensor<4> {
    let options = options.into();
    fused(&x, &weight, bias.as_ref(), &options, activation, None)
        .unwrap_or_else(|| activation.apply_burn(module::conv2d(x, weight, bias, options)))
}

fn fused(
    x: &Tensor<4>,
    weight: &Tensor<4>,
    bias: Option<&Tensor<1>>,
    options: &ConvOptions<2>,
    activation: Activation,
    pool: Option<&MaxPoolOptions<2>>,
) -> Option<Tensor<4>> {
    let geometry = Geometry::new(x.dims(), weight.dims(), options)?;
    let pairs = match pool {
        Some(_) if activation == Activation::Gelu => return None,
        Some(options) => Some(Pairs::new(geometry.shape_out(), options)?),
        None => None,
    };
    if bias.is_some_and(|bias| bias.dims() != [geometry.channels_out]) {
        return None;
    }
    let (x, weight) = (Operand::new(x)?, Operand::new(weight)?);
    let bias = match bias {
        Some(bias) => Some(Operand::new(bias)?),
        None => None,
    };
    if !share_tape(&[&x, &weight]) || bias.iter().any(|bias| !share_tape(&[&x, bias])) {
        return None;
    }
    let operands = (x, weight, bias);
    Some(match Direct::new(geometry) {
        Some(method) => fused_by(method, operands, activation, pairs),
        None => fused_by(Copied(geometry), operands, activation, pairs),
    })
}

fn fused_by(
    method: impl Method + Send + 'static,
    (x, weight, bias): (Operand, Operand, Option<Operand>),
    activation: Activation,
    pairs: Option<Pairs>,
) -> Tensor<4> {
    let (x_array, weight_array) = (x.array(), weight.array());
    let bias_array = bias.as_ref().map(Operand::array);
    let bias_values = bias_array.as_ref().map(Array::values);
    let inputs = Inputs {
        x: x_array.values(),
        weight: weight_array.values(),
        bias: bias_values,
        activation,
    };
    let is_tracked = [&x, &weight].into_iter().chain(&bias).any(Operand::is_tracked);
    let (output, kept, positions) = match pairs {
        Some(pairs) => {
            let (output, kept, positions) = forward_pooled(&method, &inputs, pairs);
            (output, kept, Some(positions))
        }
        None => {
            let (output, kept) = forward(&method, &inputs, is_tracked);
            (output, kept, None)
        }
    };
    let gradient = || -> Arc<dyn Gradient> {
        Arc::new(ConvGradient { method, x: x_array, weight: weight_array, kept, positions })
    };
    match bias {
        Some(bias) => record([x, weight, bias], output, gradient),
        None => record([x, weight], output, gradient),
    }
}

/// Weights `[channels_out, window]` and biases of one group, and the activation of its output.
#[derive(Clone, Copy)]
struct Filters<'a> {
    weight: Matrix<'a>,
    bias: Option<&'a [f32]>,
    activation: Activation,
}

impl Filters<'_> {
    /// Fills `out` `[channels_out, columns]` with the biases.
    fn fill(&self, out: &mut [f32], columns: usize) {
        for (channel, out) in out.chunks_exact_mut(columns).enumerate() {
            out.fill(self.bias_of(channel));
        }
    }

    fn bias_of(&self, channel: usize) -> f32 {
        self.bias.map_or(0.0, |bias| bias[channel])
    }
}

/// Algorithm for a convolution of one group of one image.
trait Method: Sync {
    /// Memory for one image.
    type Scratch;

    fn geometry(&self) -> &Geometry;

    fn scratch(&self) -> Self::Scratch;

    /// Convolves an image. Applies the activation if it is a ReLU, while the image is still in a
    /// cache.
    fn convolve(
        &self,
        image: &[f32],
        filters: &Filters<'_>,
        out: Blank<'_, f32>,
        scratch: &mut Self::Scratch,
    );

    /// Convolves an image, and writes the maximum of each window of a pool and its position.
    /// Applies no activation.
    fn convolve_pooled(
        &self,
        image: &[f32],
        filters: &Filters<'_>,
        pairs: &Pairs,
        output: (&mut [f32], &mut [u32]),
        scratch: &mut Self::Scratch,
    );

    /// Adds the gradient of the weights as matrix `[window, channels_out]`. `dy` has the shape
    /// `[channels_out, num_windows]`.
    fn add_weight_gradient(
        &self,
        image: &[f32],
        dy: Matrix<'_>,
        dweight: &mut [f32],
        scratch: &mut Self::Scratch,
    );

    /// Returns the weights in the order in which `input_gradient` reads those of each group.
    fn weights_of_gradient<'a>(&self, weight: &'a [f32]) -> Cow<'a, [f32]>;

    /// Writes the gradient of an image to `dx`.
    fn input_gradient(
        &self,
        dy: &[f32],
        weight: &[f32],
        dx: Blank<'_, f32>,
        scratch: &mut Self::Scratch,
    );
}

/// Values of the inputs of a convolution.
struct Inputs<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    bias: Option<&'a [f32]>,
    activation: Activation,
}

fn forward(method: &impl Method, inputs: &Inputs<'_>, is_tracked: bool) -> (Array, Kept) {
    let geometry = method.geometry();
    let mut output = NewValues::new(geometry.batch * geometry.image_out());
    let size = chunk_rows(geometry.batch);
    let images = output.chunks(size * geometry.image_out());
    let parts = images.zip(inputs.x.chunks(size * geometry.image_in())).collect();
    map_chunks(geometry.num_products(), parts, |(output, x): (Blank<'_, f32>, &[f32])| {
        let mut scratch = method.scratch();
        let outputs = output.chunks(geometry.image_out());
        for (output, x) in outputs.zip(x.chunks_exact(geometry.image_in())) {
            let outputs = output.chunks(geometry.image_out() / geometry.groups);
            for (output, (image, filters)) in outputs.zip(groups(geometry, inputs, x)) {
                method.convolve(image, &filters, output, &mut scratch);
            }
        }
    });
    let output = output.into_vec();
    match inputs.activation {
        Activation::Relu => Kept::relu(output, &geometry.shape_out()),
        activation @ (Activation::Identity | Activation::Gelu) => {
            activation.apply(output, &geometry.shape_out(), is_tracked)
        }
    }
}

/// Returns the channels and the filters of each group of an image.
fn groups<'a>(
    geometry: &'a Geometry,
    inputs: &'a Inputs<'_>,
    image: &'a [f32],
) -> impl Iterator<Item = (&'a [f32], Filters<'a>)> {
    let (group_out, window) = (geometry.group_out(), geometry.window());
    let images = image.chunks_exact(geometry.image_in() / geometry.groups);
    let weights = inputs.weight.chunks_exact(group_out * window).enumerate();
    images.zip(weights).map(move |(image, (group, weight))| {
        let weight = Matrix::row_major(weight, group_out, window);
        let bias = inputs.bias.map(|bias| &bias[group * group_out..][..group_out]);
        (image, Filters { weight, bias, activation: inputs.activation })
    })
}

struct ConvGradient<M> {
    method: M,
    x: Array,
    weight: Array,
    kept: Kept,
    /// Of a pool after the activation.
    positions: Option<Positions>,
}

impl<M: Method> ConvGradient<M> {
    /// Number of values of an image of the result.
    fn image_result(&self) -> usize {
        let geometry = self.method.geometry();
        let pooled = self.positions.as_ref().map(|positions| positions.pairs.plane_out());
        geometry.channels_out * pooled.unwrap_or_else(|| geometry.num_windows())
    }
}

impl<M: Method + Send> ArrayGradient for ConvGradient<M> {
    fn gradients(&self, output: &Array, is_wanted: &[bool]) -> Vec<Option<Array>> {
        let (method, geometry) = (&self.method, self.method.geometry());
        let (num_weights, channels) = (self.weight.values().len(), geometry.channels_out);
        let (image_in, image_result) = (geometry.image_in(), self.image_result());
        let weight = match is_wanted[0] {
            true => method.weights_of_gradient(self.weight.values()),
            false => Cow::default(),
        };
        let mut dx = NewValues::new(if is_wanted[0] { self.x.values().len() } else { 0 });
        let size = chunk_rows(geometry.batch);
        let mut images = dx.chunks(size * image_in);
        let outputs = output.values().chunks(size * image_result).enumerate();
        let parts = self.x.values().chunks(size * image_in).zip(outputs);
        let parts = parts.map(move |(x, dy)| (x, dy, images.next().unwrap_or_default())).collect();
        let sums = map_chunks(geometry.num_products(), parts, |(x, dy, dx)| {
            let (x, (chunk, dy), dx): (&[f32], (usize, &[f32]), Blank<'_, f32>) = (x, dy, dx);
            // Gradients of the weights, then of the bias.
            let mut sums = vec![0.0; num_weights + channels];
            let (dweight, dbias) = sums.split_at_mut(num_weights);
            let (mut scratch, mut before_activation, mut before_pool) =
                (method.scratch(), vec![], vec![]);
            let mut images = dx.chunks(image_in);
            let outputs = (chunk * size..).zip(dy.chunks_exact(image_result));
            for (x, (index, dy)) in x.chunks_exact(image_in).zip(outputs) {
                let start = index * image_result;
                let dy = self.kept.gradient_of_part(start, dy, &mut before_activation);
                let dy = match &self.positions {
                    Some(positions) => positions.gradient_of_part(start, dy, &mut before_pool),
                    None => dy,
                };
                add_channel_sums(dy, dbias);
                add_weight_gradients(method, x, dy, dweight, &mut scratch);
                if let Some(dx) = images.next() {
                    input_gradients(method, dy, &weight, dx, &mut scratch);
                }
            }
            sums
        });
        let mut dweight = add_partial_sums(sums, num_weights + channels);
        let dbias = dweight.split_off(num_weights);
        vec![
            is_wanted[0].then(|| Array::from_vec(dx.into_vec(), &self.x.shape())),
            Some(Array::from_vec(by_channels(geometry, &dweight), &self.weight.shape())),
            Some(Array::from_vec(dbias, &[channels])),
        ]
    }
}

fn add_channel_sums(dy: &[f32], dbias: &mut [f32]) {
    let num_windows = dy.len() / dbias.len();
    vectorize(
        #[inline(always)]
        || {
            for (sum, dy) in dbias.iter_mut().zip(dy.chunks_exact(num_windows)) {
                *sum += sum_of(dy, |value| value);
            }
        },
    );
}

/// Adds the gradients of the weights of all groups, each as matrix `[window, channels_out]`.
fn add_weight_gradients<M: Method>(
    method: &M,
    x: &[f32],
    dy: &[f32],
    dweight: &mut [f32],
    scratch: &mut M::Scratch,
) {
    let geometry = method.geometry();
    let (group_out, num_windows) = (geometry.group_out(), geometry.num_windows());
    let groups = dweight.chunks_exact_mut(group_out * geometry.window());
    let images = x.chunks_exact(geometry.image_in() / geometry.groups);
    let outputs = dy.chunks_exact(group_out * num_windows);
    for ((dweight, image), dy) in groups.zip(images).zip(outputs) {
        let dy = Matrix::row_major(dy, group_out, num_windows);
        method.add_weight_gradient(image, dy, dweight, scratch);
    }
}

fn input_gradients<M: Method>(
    method: &M,
    dy: &[f32],
    weight: &[f32],
    dx: Blank<'_, f32>,
    scratch: &mut M::Scratch,
) {
    let geometry = method.geometry();
    let groups = dx.chunks(geometry.image_in() / geometry.groups);
    let weights = weight.chunks_exact(geometry.group_out() * geometry.window());
    let outputs = dy.chunks_exact(geometry.image_out() / geometry.groups);
    for ((dx, weight), dy) in groups.zip(weights).zip(outputs) {
        method.input_gradient(dy, weight, dx, scratch);
    }
}

/// Transposes the matrix `[window, channels_out]` of each group.
fn by_channels(geometry: &Geometry, dweight: &[f32]) -> Vec<f32> {
    let (window, group_out) = (geometry.window(), geometry.group_out());
    let groups = dweight.chunks_exact(window * group_out);
    let rows = groups.flat_map(|group| (0..group_out).map(move |channel| &group[channel..]));
    rows.flat_map(|row| row.iter().step_by(group_out).copied()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{
        Case, assert_gradients, assert_matches_burn, assert_same_on_threads, run,
    };
    use crate::window::Axis;

    /// Input shape, output channels, kernel and options.
    type Row = ([usize; 4], usize, [usize; 2], ConvOptions<2>);

    fn rows() -> Vec<Row> {
        let symmetric = ConvOptions::new;
        vec![
            ([2, 3, 7, 5], 4, [3, 3], symmetric([1, 1], [1, 1], [1, 1], 1)),
            ([1, 2, 6, 9], 3, [2, 3], symmetric([2, 1], [0, 2], [1, 2], 1)),
            ([9, 4, 5, 5], 6, [3, 2], symmetric([2, 3], [1, 1], [1, 1], 2)),
            ([2, 4, 8, 8], 4, [3, 3], symmetric([1, 2], [2, 2], [2, 2], 4)),
            ([3, 5, 4, 6], 2, [1, 1], symmetric([1, 1], [0, 0], [1, 1], 1)),
            ([2, 2, 4, 4], 2, [1, 1], symmetric([3, 3], [0, 0], [1, 1], 1)),
            ([1, 2, 5, 5], 2, [3, 3], symmetric([2, 2], [1, 1], [1, 1], 2)),
            ([1, 1, 3, 3], 1, [3, 3], symmetric([1, 1], [0, 0], [1, 1], 1)),
            ([2, 4, 6, 9], 6, [2, 3], symmetric([1, 1], [1, 2], [1, 2], 2)),
            ([1, 2, 6, 6], 2, [3, 3], symmetric([1, 1], [3, 3], [1, 1], 1)),
            (
                [2, 2, 4, 5],
                3,
                [2, 2],
                ConvOptions::new_with_padding([1, 1], [(0, 1), (1, 0)], [1, 1], 1),
            ),
        ]
    }

    fn weight_shape((shape, channels_out, kernel, options): &Row) -> [usize; 4] {
        [*channels_out, shape[1] / options.groups, kernel[0], kernel[1]]
    }

    fn case(row: &Row) -> Case {
        let num = |shape: [usize; 4]| shape.iter().product::<usize>();
        Case::new(&[num(row.0), num(weight_shape(row)), row.1])
    }

    fn ours(row: &Row, activation: Activation) -> impl Fn(&[Tensor<1>]) -> Tensor<1> {
        move |inputs: &[Tensor<1>]| {
            let x = inputs[0].clone().reshape(row.0);
            let weight = inputs[1].clone().reshape(weight_shape(row));
            let y = fused(&x, &weight, inputs.get(2), &row.3, activation, None).unwrap();
            let num = y.dims().iter().product::<usize>();
            y.reshape([num])
        }
    }

    fn burns(row: &Row, activation: Activation) -> impl Fn(&[Tensor<1>]) -> Tensor<1> {
        move |inputs: &[Tensor<1>]| {
            let x = inputs[0].clone().reshape(row.0);
            let weight = inputs[1].clone().reshape(weight_shape(row));
            let y = module::conv2d(x, weight, inputs.get(2).cloned(), row.3.clone());
            let y = activation.apply_burn(y);
            let num = y.dims().iter().product::<usize>();
            y.reshape([num])
        }
    }

    #[test]
    fn matches_burn_for_options_and_activations() {
        for row in rows() {
            for activation in [Activation::Identity, Activation::Relu, Activation::Gelu] {
                let name = format!("{row:?}, {activation:?}");
                let (ours, burns) = (ours(&row, activation), burns(&row, activation));
                assert_matches_burn(&name, &case(&row), &ours, &burns);
                let no_bias = Case::from_values(case(&row).inputs[..2].to_vec());
                assert_matches_burn(&name, &no_bias, &ours, &burns);
            }
        }
    }

    /// Output, and gradients of input, weight and bias. The latter also without a bias.
    fn outcome(
        method: impl Method + Send,
        inputs: &Inputs<'_>,
        row: &Row,
        is_wanted: bool,
    ) -> [Vec<f32>; 4] {
        let (output, kept) = forward(&method, inputs, true);
        let x = Array::from_vec(inputs.x.to_vec(), &row.0);
        let weight = Array::from_vec(inputs.weight.to_vec(), &weight_shape(row));
        let gradient = ConvGradient { method, x, weight, kept, positions: None };
        let gradients = gradient.gradients(&output, &[is_wanted, true, true]);
        let values = |index: usize| gradients[index].as_ref().map(|array| array.values().to_vec());
        let [x, weight, bias] = [0, 1, 2].map(|index| values(index).unwrap_or_default());
        [output.values().to_vec(), x, weight, bias]
    }

    /// Both methods have the same sums, except in the gradient of the input.
    #[test]
    fn methods_agree() {
        let plain = |groups| ConvOptions::new([1, 1], [1, 1], [1, 1], groups);
        let large = [
            ([17, 32, 24, 24], 20, [3, 3], plain(1)),
            ([1, 32, 24, 24], 20, [3, 3], plain(1)),
            ([9, 6, 9, 40], 3, [3, 1], ConvOptions::new([1, 1], [1, 0], [1, 1], 3)),
            ([2, 2, 1, 9], 3, [3, 3], plain(1)),
        ];
        let mut num = 0;
        for row in rows().into_iter().chain(large) {
            let geometry = Geometry::new(row.0, weight_shape(&row), &row.3).unwrap();
            if Direct::new(geometry).is_none() {
                continue;
            }
            num += 1;
            let case = case(&row);
            // Products of two tiny numbers round to 0 or -0.
            for scale in [1.0, 1e-30] {
                let scaled = |values: &Vec<f32>| values.iter().map(|v| v * scale).collect();
                let values: Vec<Vec<f32>> = case.inputs.iter().map(scaled).collect();
                for bias in [Some(&values[2][..]), None] {
                    for activation in [Activation::Identity, Activation::Relu] {
                        let inputs = Inputs { x: &values[0], weight: &values[1], bias, activation };
                        assert_methods_agree(geometry, &inputs, &row);
                    }
                }
            }
        }
        assert_eq!(num, 7, "convolutions without copies of windows");
    }

    fn assert_methods_agree(geometry: Geometry, inputs: &Inputs<'_>, row: &Row) {
        let name = format!("{row:?}, {:?}, bias {}", inputs.activation, inputs.bias.is_some());
        let direct = || Direct::new(geometry).unwrap();
        let (direct, unwanted) =
            (outcome(direct(), inputs, row, true), outcome(direct(), inputs, row, false));
        let copied = outcome(Copied(geometry), inputs, row, true);
        let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        for index in [0, 2, 3] {
            assert_eq!(bits(&direct[index]), bits(&copied[index]), "{name}, {index}");
            assert_eq!(bits(&direct[index]), bits(&unwanted[index]), "{name}, {index}");
        }
        assert!(unwanted[1].is_empty());
        let scale = copied[1].iter().fold(1.0, |largest: f32, value| largest.max(value.abs()));
        for (direct, copied) in direct[1].iter().zip(&copied[1]) {
            assert!((direct - copied).abs() <= 1e-5 * scale, "{name}: {direct}, {copied}");
        }
    }

    #[test]
    fn windows_are_copied_if_offsets_do_not_fit() {
        let direct = |shape, kernel: [usize; 2], stride, padding| {
            let options = ConvOptions::new(stride, padding, [1, 1], 1);
            let weight = [3, 2, kernel[0], kernel[1]];
            Direct::new(Geometry::new(shape, weight, &options).unwrap()).is_some()
        };
        assert!(direct([1, 2, 9, 9], [3, 3], [1, 1], [2, 2]));
        assert!(!direct([1, 2, 9, 9], [3, 3], [1, 1], [3, 2]), "windows within the padding");
        assert!(!direct([1, 2, 9, 9], [3, 3], [1, 1], [2, 3]), "windows within the padding");
        assert!(!direct([1, 2, 9, 9], [1, 1], [1, 1], [1, 1]), "windows within the padding");
        assert!(!direct([1, 2, 9, 9], [1, 1], [1, 1], [0, 0]), "the image is the matrix");
        assert!(!direct([1, 2, 9, 9], [3, 3], [2, 1], [1, 1]), "stride");
        assert!(!direct([1, 2, 9, 9], [3, 3], [1, 2], [1, 1]), "stride");
        assert!(direct([1, 2, 9, 4], [3, 3], [1, 1], [1, 1]));
        assert!(!direct([1, 2, 9, 3], [3, 3], [1, 1], [1, 1]), "5 columns for 3 windows");
    }

    #[test]
    fn gradients_match_finite_differences() {
        for row in rows() {
            if row.0.iter().product::<usize>() > 150 {
                continue;
            }
            let reference = |inputs: &[Vec<f64>]| reference(&row, inputs);
            assert_gradients(
                &format!("{row:?}"),
                &case(&row),
                &ours(&row, Activation::Identity),
                &reference,
            );
        }
    }

    /// Convolution by its definition, without the padding.
    fn reference(row: &Row, inputs: &[Vec<f64>]) -> Vec<f64> {
        let ([batch, channels_in, height, width], channels_out, [kh, kw], options) = row;
        let axes = [
            Axis::new(*height, *kh, options.stride[0], options.dilation[0], options.padding[0]),
            Axis::new(*width, *kw, options.stride[1], options.dilation[1], options.padding[1]),
        ]
        .map(Option::unwrap);
        let channels = channels_in / options.groups;
        let mut out = vec![];
        for image in 0..*batch {
            for c_out in 0..*channels_out {
                let group = c_out / (channels_out / options.groups);
                for window in 0..axes[0].num_windows * axes[1].num_windows {
                    let [wy, wx] = [window / axes[1].num_windows, window % axes[1].num_windows];
                    let mut sum = inputs[2][c_out];
                    for k in 0..channels * kh * kw {
                        let [c, ky, kx] = [k / (kh * kw), k / kw % kh, k % kw];
                        let position = axes[0].index(wy, ky).zip(axes[1].index(wx, kx));
                        let Some((y, x)) = position else { continue };
                        let plane = image * channels_in + group * channels + c;
                        sum += inputs[0][(plane * height + y) * width + x]
                            * inputs[1][c_out * channels * kh * kw + k];
                    }
                    out.push(sum);
                }
            }
        }
        out
    }

    #[test]
    fn threads_do_not_change_bits() {
        for batch in [1, 13] {
            let options = ConvOptions::new([1, 1], [1, 1], [1, 1], 1);
            let row = ([batch, 16, 28, 28], 24, [3, 3], options);
            assert_same_on_threads(&case(&row), &ours(&row, Activation::Identity));
        }
    }

    #[test]
    fn empty_batch_has_zero_gradients() {
        let row = ([0, 2, 4, 4], 3, [3, 3], ConvOptions::new([1, 1], [1, 1], [1, 1], 1));
        let outcome = run(&case(&row), &ours(&row, Activation::Identity));
        assert!(outcome.output.is_empty());
        assert_eq!(outcome.gradients[1], vec![0.0; 54]);
        assert_eq!(outcome.gradients[2], vec![0.0; 3]);
    }

    #[test]
    fn nan_reaches_windows_that_contain_it() {
        let row = ([1, 1, 3, 3], 1, [2, 2], ConvOptions::new([1, 1], [0, 0], [1, 1], 1));
        let mut case = case(&row);
        case.inputs[0][0] = f32::NAN;
        let output = run(&case, &ours(&row, Activation::Identity)).output;
        let is_nan: Vec<bool> = output.iter().map(|value| value.is_nan()).collect();
        assert_eq!(is_nan, [true, false, false, false]);
    }

    #[test]
    fn options_that_do_not_fit_are_left_to_burn() {
        let geometry = |x, weight, groups| {
            Geometry::new(x, weight, &ConvOptions::new([1, 1], [0, 0], [1, 1], groups))
        };
        assert!(geometry([1, 4, 5, 5], [4, 2, 3, 3], 2).is_some());
        assert!(geometry([1, 4, 5, 5], [4, 4, 3, 3], 2).is_none(), "weight of one group");
        assert!(geometry([1, 4, 5, 5], [3, 2, 3, 3], 2).is_none(), "3 channels in 2 groups");
        assert!(geometry([1, 4, 2, 5], [4, 2, 3, 3], 2).is_none(), "kernel above input");
    }
}

//! Two-dimensional convolutions by matrix products.

use std::sync::Arc;

use burn::tensor::Tensor;
use burn::tensor::module;
use burn::tensor::ops::ConvOptions;

use crate::array::Array;
use crate::chunks::{add_partial_sums, chunk_rows, map_chunks};
use crate::machine::{Matrix, Output, Threads, multiply, vectorize};
use crate::tape::{Gradient, Operand, record, share_tape};
use crate::vector::sum_of;
use crate::window::Axis;

/// Returns the convolution (cross-correlation) of `x` with `weight`, plus `bias`.
///
/// Each image becomes a matrix of its windows, as in Chellapilla, Puri and Simard, High
/// Performance Convolutional Neural Networks for Document Processing, 2006.
///
/// # Shapes
///
/// `x` `[batch, channels_in, height, width]`,
/// `weight` `[channels_out, channels_in / groups, kernel_height, kernel_width]`,
/// `bias` `[channels_out]`, result `[batch, channels_out, height_out, width_out]`.
pub fn conv2d(
    x: Tensor<4>,
    weight: Tensor<4>,
    bias: Option<Tensor<1>>,
    options: impl Into<ConvOptions<2>>,
) -> Tensor<4> {
    let options = options.into();
    fused(&x, &weight, bias.as_ref(), &options)
        .unwrap_or_else(|| module::conv2d(x, weight, bias, options))
}

fn fused(
    x: &Tensor<4>,
    weight: &Tensor<4>,
    bias: Option<&Tensor<1>>,
    options: &ConvOptions<2>,
) -> Option<Tensor<4>> {
    let geometry = Geometry::new(x.dims(), weight.dims(), options)?;
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
    let (x_array, weight_array) = (x.array(), weight.array());
    let bias_array = bias.as_ref().map(Operand::array);
    let bias_values = bias_array.as_ref().map(Array::values);
    let output = geometry.forward(x_array.values(), weight_array.values(), bias_values);
    let output = Array::from_vec(output, &geometry.shape_out());
    let gradient = || -> Arc<dyn Gradient> {
        Arc::new(ConvGradient { x: x_array, weight: weight_array, geometry })
    };
    Some(match bias {
        Some(bias) => record([x, weight, bias], output, gradient),
        None => record([x, weight], output, gradient),
    })
}

/// Sizes of a convolution.
#[derive(Clone, Copy, Debug)]
struct Geometry {
    batch: usize,
    groups: usize,
    channels_in: usize,
    channels_out: usize,
    height: Axis,
    width: Axis,
}

impl Geometry {
    /// Returns `None` if the shapes do not fit, or a size other than the batch is 0.
    fn new(
        [batch, channels_in, height, width]: [usize; 4],
        [channels_out, channels_group, kernel_height, kernel_width]: [usize; 4],
        options: &ConvOptions<2>,
    ) -> Option<Self> {
        let ConvOptions { stride, padding, dilation, groups } = options;
        let axis = |index: usize, len, kernel| {
            Axis::new(len, kernel, stride[index], dilation[index], padding[index])
        };
        let height = axis(0, height, kernel_height)?;
        let width = axis(1, width, kernel_width)?;
        let fits = *groups > 0
            && channels_group * groups == channels_in
            && channels_out % groups == 0
            && channels_in > 0
            && channels_out > 0;
        let groups = *groups;
        fits.then_some(Self { batch, groups, channels_in, channels_out, height, width })
    }

    fn shape_out(&self) -> [usize; 4] {
        [self.batch, self.channels_out, self.height.num_windows, self.width.num_windows]
    }

    /// Number of values of an image of the input.
    fn image_in(&self) -> usize {
        self.channels_in * self.height.len * self.width.len
    }

    /// Number of windows of an image.
    fn num_windows(&self) -> usize {
        self.height.num_windows * self.width.num_windows
    }

    /// Number of values of an image of the output.
    fn image_out(&self) -> usize {
        self.channels_out * self.num_windows()
    }

    /// Number of weights of an output channel, and of values of a window.
    fn window(&self) -> usize {
        self.channels_in / self.groups * self.height.kernel * self.width.kernel
    }

    /// Multiplications of the forward pass.
    fn num_products(&self) -> usize {
        self.batch * self.image_out() * self.window()
    }

    /// Threads of each product: all of them if a single image leaves no other parallelism.
    fn threads(&self) -> Threads {
        if self.batch == 1 { Threads::All } else { Threads::One }
    }

    /// Returns the matrix of windows `[window, num_windows]` of one group of an image.
    /// `scratch` holds it, unless the image itself is the matrix.
    fn windows<'a>(&self, image: &'a [f32], group: usize, scratch: &'a mut [f32]) -> Matrix<'a> {
        let plane = self.height.len * self.width.len;
        let channels = self.channels_in / self.groups;
        let image = &image[group * channels * plane..][..channels * plane];
        if self.height.is_identity() && self.width.is_identity() {
            return Matrix::row_major(image, channels, plane);
        }
        let rows = self.positions(channels).zip(scratch.chunks_exact_mut(self.num_windows()));
        for ((channel, ky, kx), row) in rows {
            let plane = &image[channel * plane..][..plane];
            copy_windows(plane, row, &self.height, &self.width, [ky, kx]);
        }
        Matrix::row_major(scratch, self.window(), self.num_windows())
    }

    /// Channel, row and column of each value of a window.
    fn positions(&self, channels: usize) -> impl Iterator<Item = (usize, usize, usize)> {
        let (height, width) = (self.height.kernel, self.width.kernel);
        (0..channels)
            .flat_map(move |c| (0..height).flat_map(move |y| (0..width).map(move |x| (c, y, x))))
    }

    fn forward(&self, x: &[f32], weight: &[f32], bias: Option<&[f32]>) -> Vec<f32> {
        let (num_windows, window) = (self.num_windows(), self.window());
        let group_out = self.channels_out / self.groups;
        let mut output = vec![0.0; self.batch * self.image_out()];
        let size = chunk_rows(self.batch);
        let images = output.chunks_mut(size * self.image_out());
        let parts = images.zip(x.chunks(size * self.image_in())).collect();
        map_chunks(self.num_products(), parts, |(output, x): (&mut [f32], &[f32])| {
            let mut scratch = vec![0.0; window * num_windows];
            let images = output.chunks_exact_mut(self.image_out());
            for (output, x) in images.zip(x.chunks_exact(self.image_in())) {
                for (channel, bias) in output.chunks_exact_mut(num_windows).zip(bias.unwrap_or(&[]))
                {
                    channel.fill(*bias);
                }
                for (group, output) in output.chunks_exact_mut(group_out * num_windows).enumerate()
                {
                    let weight = &weight[group * group_out * window..][..group_out * window];
                    let weight = Matrix::row_major(weight, group_out, window);
                    let windows = self.windows(x, group, &mut scratch);
                    multiply(output, Output::Add, 1.0, weight, windows, self.threads());
                }
            }
        });
        output
    }
}

/// Copies position `[ky, kx]` of each window of a plane, and 0 from the padding.
fn copy_windows(plane: &[f32], out: &mut [f32], height: &Axis, width: &Axis, k: [usize; 2]) {
    let (columns, start) = width.inside(k[1]);
    for (window, row) in out.chunks_exact_mut(width.num_windows).enumerate() {
        let Some(y) = height.index(window, k[0]) else {
            row.fill(0.0);
            continue;
        };
        row[..columns.start].fill(0.0);
        row[columns.end..].fill(0.0);
        let source = &plane[y * width.len..][..width.len];
        let row = &mut row[columns.clone()];
        if width.stride == 1 {
            row.copy_from_slice(&source[start..start + row.len()]);
        } else {
            let values = source[start.min(width.len)..].iter().step_by(width.stride);
            row.iter_mut().zip(values).for_each(|(out, value)| *out = *value);
        }
    }
}

/// Adds position `[ky, kx]` of each window to the plane. Reverse of [`copy_windows`].
fn add_windows(plane: &mut [f32], windows: &[f32], height: &Axis, width: &Axis, k: [usize; 2]) {
    let (columns, start) = width.inside(k[1]);
    for (window, row) in windows.chunks_exact(width.num_windows).enumerate() {
        let Some(y) = height.index(window, k[0]) else { continue };
        let target = &mut plane[y * width.len..][..width.len];
        let row = &row[columns.clone()];
        if width.stride == 1 {
            target[start..start + row.len()].iter_mut().zip(row).for_each(|(sum, v)| *sum += v);
        } else {
            let sums = target[start.min(width.len)..].iter_mut().step_by(width.stride);
            sums.zip(row).for_each(|(sum, value)| *sum += value);
        }
    }
}

struct ConvGradient {
    x: Array,
    weight: Array,
    geometry: Geometry,
}

impl Gradient for ConvGradient {
    /// With the matrix of windows `c` of an image and the weights as matrix `w`:
    /// `dw = sum(dy * c^T)`, `dc = w^T * dy`, and `dx` adds each value of `dc` to its position.
    fn gradients(&self, output: &Array, is_wanted: &[bool]) -> Vec<Option<Array>> {
        let geometry = &self.geometry;
        let (num_weights, channels) = (self.weight.values().len(), geometry.channels_out);
        let (image_in, image_out) = (geometry.image_in(), geometry.image_out());
        let mut dx = vec![0.0; if is_wanted[0] { self.x.values().len() } else { 0 }];
        let size = chunk_rows(geometry.batch);
        let mut images = dx.chunks_mut(size * image_in);
        let outputs = output.values().chunks(size * image_out);
        let parts = self.x.values().chunks(size * image_in).zip(outputs);
        let parts = parts.map(|(x, dy)| (x, dy, images.next().unwrap_or_default())).collect();
        let sums = map_chunks(geometry.num_products(), parts, |(x, dy, dx)| {
            let (x, dy, dx): (&[f32], &[f32], &mut [f32]) = (x, dy, dx);
            // Gradients of the weights, then of the bias.
            let mut sums = vec![0.0; num_weights + channels];
            let mut scratch = vec![0.0; geometry.window() * geometry.num_windows()];
            let mut images = dx.chunks_exact_mut(image_in);
            for (x, dy) in x.chunks_exact(image_in).zip(dy.chunks_exact(image_out)) {
                self.add_weight_gradients(x, dy, &mut sums, &mut scratch);
                if let Some(dx) = images.next() {
                    self.input_gradient(dy, dx, &mut scratch);
                }
            }
            sums
        });
        let mut dweight = add_partial_sums(sums, num_weights + channels);
        let dbias = dweight.split_off(num_weights);
        vec![
            is_wanted[0].then(|| Array::from_vec(dx, &self.x.shape())),
            Some(Array::from_vec(dweight, &self.weight.shape())),
            Some(Array::from_vec(dbias, &[channels])),
        ]
    }
}

impl ConvGradient {
    /// Adds the gradients of an image to the sums of weights and bias.
    fn add_weight_gradients(&self, x: &[f32], dy: &[f32], sums: &mut [f32], scratch: &mut [f32]) {
        let geometry = &self.geometry;
        let (dweight, dbias) = sums.split_at_mut(self.weight.values().len());
        let num_windows = geometry.num_windows();
        vectorize(
            #[inline(always)]
            || {
                for (sum, dy) in dbias.iter_mut().zip(dy.chunks_exact(num_windows)) {
                    *sum += sum_of(dy, |value| value);
                }
            },
        );
        let group_out = geometry.channels_out / geometry.groups;
        let groups = dweight.chunks_exact_mut(group_out * geometry.window());
        for (group, (dweight, dy)) in
            groups.zip(dy.chunks_exact(group_out * num_windows)).enumerate()
        {
            let windows = geometry.windows(x, group, scratch).transposed();
            let dy = Matrix::row_major(dy, group_out, num_windows);
            multiply(dweight, Output::Add, 1.0, dy, windows, geometry.threads());
        }
    }

    /// Adds the gradient of an image to `dx`, which is 0 before.
    fn input_gradient(&self, dy: &[f32], dx: &mut [f32], scratch: &mut [f32]) {
        let geometry = &self.geometry;
        let (height, width) = (&geometry.height, &geometry.width);
        let (window, num_windows) = (geometry.window(), geometry.num_windows());
        let group_out = geometry.channels_out / geometry.groups;
        let plane = height.len * width.len;
        let channels = geometry.channels_in / geometry.groups;
        let weights = self.weight.values().chunks_exact(group_out * window);
        let groups = dx.chunks_exact_mut(channels * plane).zip(weights);
        for ((dx, weight), dy) in groups.zip(dy.chunks_exact(group_out * num_windows)) {
            let weight = Matrix::row_major(weight, group_out, window).transposed();
            let dy = Matrix::row_major(dy, group_out, num_windows);
            if height.is_identity() && width.is_identity() {
                multiply(dx, Output::Replace, 1.0, weight, dy, geometry.threads());
                continue;
            }
            multiply(scratch, Output::Replace, 1.0, weight, dy, geometry.threads());
            let positions = geometry.positions(channels).zip(scratch.chunks_exact(num_windows));
            for ((channel, ky, kx), windows) in positions {
                let plane = &mut dx[channel * plane..][..plane];
                add_windows(plane, windows, height, width, [ky, kx]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{
        Case, assert_gradients, assert_matches_burn, assert_same_on_threads, run,
    };

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

    fn ours(row: &Row) -> impl Fn(&[Tensor<1>]) -> Tensor<1> {
        move |inputs: &[Tensor<1>]| {
            let x = inputs[0].clone().reshape(row.0);
            let weight = inputs[1].clone().reshape(weight_shape(row));
            let y = fused(&x, &weight, inputs.get(2), &row.3).unwrap();
            let num = y.dims().iter().product::<usize>();
            y.reshape([num])
        }
    }

    fn burns(row: &Row) -> impl Fn(&[Tensor<1>]) -> Tensor<1> {
        move |inputs: &[Tensor<1>]| {
            let x = inputs[0].clone().reshape(row.0);
            let weight = inputs[1].clone().reshape(weight_shape(row));
            let y = module::conv2d(x, weight, inputs.get(2).cloned(), row.3.clone());
            let num = y.dims().iter().product::<usize>();
            y.reshape([num])
        }
    }

    #[test]
    fn matches_burn_for_options() {
        for row in rows() {
            let name = format!("{row:?}");
            assert_matches_burn(&name, &case(&row), &ours(&row), &burns(&row));
            let no_bias = Case::from_values(case(&row).inputs[..2].to_vec());
            assert_matches_burn(&name, &no_bias, &ours(&row), &burns(&row));
        }
    }

    #[test]
    fn gradients_match_finite_differences() {
        for row in rows() {
            if row.0.iter().product::<usize>() > 150 {
                continue;
            }
            let reference = |inputs: &[Vec<f64>]| reference(&row, inputs);
            assert_gradients(&format!("{row:?}"), &case(&row), &ours(&row), &reference);
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
            assert_same_on_threads(&case(&row), &ours(&row));
        }
    }

    #[test]
    fn empty_batch_has_zero_gradients() {
        let row = ([0, 2, 4, 4], 3, [3, 3], ConvOptions::new([1, 1], [1, 1], [1, 1], 1));
        let outcome = run(&case(&row), &ours(&row));
        assert!(outcome.output.is_empty());
        assert_eq!(outcome.gradients[1], vec![0.0; 54]);
        assert_eq!(outcome.gradients[2], vec![0.0; 3]);
    }

    #[test]
    fn nan_reaches_windows_that_contain_it() {
        let row = ([1, 1, 3, 3], 1, [2, 2], ConvOptions::new([1, 1], [0, 0], [1, 1], 1));
        let mut case = case(&row);
        case.inputs[0][0] = f32::NAN;
        let output = run(&case, &ours(&row)).output;
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

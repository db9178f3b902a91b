//! Convolutions of stride 1 that read windows from padded images.
//!
//! Each image is copied once, with its padding. The inputs of one tap `[channel, ky, kx]` of the
//! kernel, in all windows, are then adjacent in memory except at the ends of rows. They start at an
//! offset that depends on the tap alone, and products read them through a table of these offsets.
//!
//! A row of a padded image is longer than a row of windows. The products at the ends of rows are
//! computed, too, and discarded.
//!
//! The gradient of an image is the convolution of the padded gradient of the output with the
//! reversed weights. That of the weights is `dw^T = sum(c * dy^T)` with the windows `c`.

use std::borrow::Cow;

use super::{Filters, Geometry, Method};
use crate::activation::{Activation, relu};
use crate::machine::{DEPTH, LANES_MAX, Matrix, Output, ShiftedRows, Windows, multiply, vectorize};
use crate::new_values::Blank;
use crate::pool::Pairs;
use crate::vector::{NO_BIAS, copy};
use crate::window::Axis;

/// Method that reads the windows from padded images.
pub(super) struct Direct {
    geometry: Geometry,
    inputs: PaddedLayout,
    /// Offset of each window of an input.
    window_offsets: Vec<u32>,
    gradients: PaddedLayout,
}

/// Memory for one image. Each part is empty before its first use.
#[derive(Default)]
pub(super) struct Scratch {
    input: Vec<f32>,
    gradient: Vec<f32>,
    sums: Vec<f32>,
}

impl Direct {
    /// Returns `None` if windows must be copied: the stride is not 1, the padding exceeds the
    /// distance from the first to the last tap, offsets exceed `u32`, or the kernel is so wide that
    /// too much would be discarded. Also if the image is the matrix of windows.
    pub(super) fn new(geometry: Geometry) -> Option<Self> {
        let axes = [geometry.height, geometry.width];
        let is_identity = axes.iter().all(Axis::is_identity);
        if is_identity || axes.iter().any(|axis| axis.stride != 1) {
            return None;
        }
        let (height, width) = (axes[0].paddings()?, axes[1].paddings()?);
        let channels = geometry.channels_in / geometry.groups;
        let sizes = axes.map(|axis| [axis.len, axis.num_windows]);
        let inputs = PaddedLayout::new(&geometry, channels, sizes, [height.0, width.0])?;
        let sizes = axes.map(|axis| [axis.num_windows, axis.len]);
        let begin = [axes[0].reach() - height.0, axes[1].reach() - width.0];
        let gradients = PaddedLayout::new(&geometry, geometry.group_out(), sizes, begin)?;
        let window_offsets = inputs.window_offsets();
        Some(Self { geometry, inputs, window_offsets, gradients })
    }

    /// Returns the sums of each output channel, in rows of a padded image, and a number to add to
    /// each of them.
    fn sums<'a>(
        &self,
        image: &[f32],
        filters: &Filters<'a>,
        scratch: &'a mut Scratch,
    ) -> impl Iterator<Item = (&'a [f32], f32)> {
        let columns = self.inputs.columns();
        scratch.sums.resize(self.geometry.group_out() * columns, 0.0);
        let sums = &mut scratch.sums[..];
        self.inputs.pad(image, &mut scratch.input);
        let windows = self.inputs.rows(&scratch.input);
        let threads = self.geometry.threads();
        // A bias, or 0, is added to the first block of a sum. If that is the whole sum, it may be
        // added later without a change of bits.
        let is_added_later = self.geometry.window() <= DEPTH;
        if is_added_later {
            multiply(sums, Output::Replace, 1.0, filters.weight, windows, threads);
        } else {
            filters.fill(sums, columns);
            multiply(sums, Output::Add, 1.0, filters.weight, windows, threads);
        }
        let filters = *filters;
        let bias = move |channel| if is_added_later { filters.bias_of(channel) } else { NO_BIAS };
        let planes = sums.chunks_exact(columns).enumerate();
        planes.map(move |(channel, sums)| (sums, bias(channel)))
    }
}

impl Method for Direct {
    type Scratch = Scratch;

    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn scratch(&self) -> Scratch {
        Scratch::default()
    }

    fn convolve(
        &self,
        image: &[f32],
        filters: &Filters<'_>,
        out: Blank<'_, f32>,
        scratch: &mut Scratch,
    ) {
        let planes = self.sums(image, filters, scratch);
        self.inputs.select(planes, filters.activation, out);
    }

    fn convolve_pooled(
        &self,
        image: &[f32],
        filters: &Filters<'_>,
        pairs: &Pairs,
        (output, positions): (&mut [f32], &mut [u32]),
        scratch: &mut Scratch,
    ) {
        let (pitch, plane_out) = (self.inputs.size[1], pairs.plane_out());
        let outputs = output.chunks_exact_mut(plane_out).zip(positions.chunks_exact_mut(plane_out));
        let planes = self.sums(image, filters, scratch).zip(outputs);
        vectorize(
            #[inline(always)]
            || {
                for ((sums, bias), (output, positions)) in planes {
                    pairs.write_maxima(sums, pitch, bias, output, positions);
                }
            },
        );
    }

    fn add_weight_gradient(
        &self,
        image: &[f32],
        dy: Matrix<'_>,
        dweight: &mut [f32],
        scratch: &mut Scratch,
    ) {
        self.inputs.pad(image, &mut scratch.input);
        let windows = Windows {
            values: &scratch.input,
            tap_offsets: &self.inputs.tap_offsets,
            window_offsets: &self.window_offsets,
        };
        multiply(dweight, Output::Add, 1.0, windows, dy.transposed(), self.geometry.threads());
    }

    /// Exchanges input and output channels of each group, and reverses the kernels.
    fn weights_of_gradient<'a>(&self, weight: &'a [f32]) -> Cow<'a, [f32]> {
        let (group_out, window) = (self.geometry.group_out(), self.geometry.window());
        let plane = window / self.inputs.channels;
        let mut reversed = Vec::with_capacity(weight.len());
        for group in weight.chunks_exact(group_out * window) {
            for channel_in in 0..self.inputs.channels {
                for weight in group.chunks_exact(window) {
                    reversed.extend(weight[channel_in * plane..][..plane].iter().rev());
                }
            }
        }
        reversed.into()
    }

    fn input_gradient(
        &self,
        dy: &[f32],
        weight: &[f32],
        dx: Blank<'_, f32>,
        scratch: &mut Scratch,
    ) {
        let channels = self.inputs.channels;
        let weight = Matrix::row_major(weight, channels, weight.len() / channels);
        scratch.sums.resize(channels * self.gradients.columns(), 0.0);
        let sums = &mut scratch.sums[..];
        self.gradients.pad(dy, &mut scratch.gradient);
        let windows = self.gradients.rows(&scratch.gradient);
        multiply(sums, Output::Replace, 1.0, weight, windows, self.geometry.threads());
        let planes = sums.chunks_exact(self.gradients.columns()).map(|sums| (sums, NO_BIAS));
        self.gradients.select(planes, Activation::Identity, dx);
    }
}

/// Sizes of padded images, and offsets in them.
#[derive(Debug)]
struct PaddedLayout {
    channels: usize,
    /// Size of an image without padding.
    content: [usize; 2],
    /// Padding above and left of the content.
    begin: [usize; 2],
    /// Size of an image with padding.
    size: [usize; 2],
    /// Number of windows in each direction.
    num_windows: [usize; 2],
    /// Offset of each tap of the kernel in the first window.
    tap_offsets: Vec<u32>,
}

impl PaddedLayout {
    /// Returns `None` if an offset exceeds `u32`, or if more than a third of each row of products
    /// would be discarded. `sizes` are the length of the content and the number of windows of both
    /// axes.
    fn new(
        geometry: &Geometry,
        channels: usize,
        sizes: [[usize; 2]; 2],
        begin: [usize; 2],
    ) -> Option<Self> {
        let Geometry { height, width, .. } = geometry;
        let [content, num_windows] = [0, 1].map(|index| sizes.map(|size| size[index]));
        let size = [num_windows[0] + height.reach(), num_windows[1] + width.reach()];
        let num = channels.checked_mul(size[0])?.checked_mul(size[1])?;
        if 2 * size[1] > 3 * num_windows[1] || u32::try_from(num).is_err() {
            return None;
        }
        let offset = |(channel, ky, kx)| {
            let (y, x) = (ky * height.dilation, kx * width.dilation);
            ((channel * size[0] + y) * size[1] + x) as u32
        };
        let tap_offsets = geometry.taps(channels).map(offset).collect();
        Some(Self { channels, content, begin, size, num_windows, tap_offsets })
    }

    fn window_offsets(&self) -> Vec<u32> {
        let rows = (0..self.num_windows[0]).map(|y| y * self.size[1]);
        rows.flat_map(|row| (0..self.num_windows[1]).map(move |x| (row + x) as u32)).collect()
    }

    /// Number of windows including the ends of rows, in whole vectors.
    fn columns(&self) -> usize {
        let last = (self.num_windows[0] - 1) * self.size[1];
        (last + self.num_windows[1]).next_multiple_of(LANES_MAX)
    }

    /// Copies the channels of an image between the padding, which stays 0. `padded` is empty or has
    /// another image.
    fn pad(&self, image: &[f32], padded: &mut Vec<f32>) {
        padded.resize(self.channels * self.size[0] * self.size[1] + ShiftedRows::SLACK, 0.0);
        let ([height, width], pitch) = (self.content, self.size[1]);
        let start = self.begin[0] * pitch + self.begin[1];
        let planes = padded.chunks_exact_mut(self.size[0] * pitch);
        vectorize(
            #[inline(always)]
            || {
                for (padded, plane) in planes.zip(image.chunks_exact(height * width)) {
                    let rows = padded[start..].chunks_mut(pitch);
                    for (padded, row) in rows.zip(plane.chunks_exact(width)) {
                        copy(&mut padded[..width], row);
                    }
                }
            },
        );
    }

    /// Returns the matrix `[window, columns]` of padded images.
    fn rows<'a>(&'a self, padded: &'a [f32]) -> ShiftedRows<'a> {
        let row_offsets = &self.tap_offsets;
        ShiftedRows { values: padded, row_offsets, columns: self.columns() }
    }

    /// Copies the sums of all windows without the ends of rows. `planes` has the sums of each
    /// channel, and a number to add. Applies `activation` if it is a ReLU.
    fn select<'a>(
        &self,
        planes: impl Iterator<Item = (&'a [f32], f32)>,
        activation: Activation,
        out: Blank<'_, f32>,
    ) {
        let (size, pitch) = (self.num_windows, self.size[1]);
        vectorize(
            #[inline(always)]
            || match activation {
                Activation::Relu => {
                    out.map_planes(size, pitch, planes, |sum, bias| relu(sum + bias));
                }
                Activation::Identity | Activation::Gelu => {
                    out.map_planes(size, pitch, planes, |sum, bias| sum + bias);
                }
            },
        );
    }
}

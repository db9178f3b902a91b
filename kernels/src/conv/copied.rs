//! Convolutions that copy each window, for any options.
//!
//! With the matrix of windows `c` of an image and the weights as matrix `w`, the gradients are
//! `dw^T = sum(c * dy^T)` and `dc = w^T * dy`. `dx` adds each value of `dc` to its position.

use std::borrow::Cow;

use super::{Filters, Geometry, Method};
use crate::activation::{Activation, apply_relu};
use crate::machine::{Matrix, Output, multiply, vectorize};
use crate::new_values::Blank;
use crate::pool::Pairs;
use crate::vector::{NO_BIAS, copy};
use crate::window::Axis;

/// Method that copies the windows of an image into a matrix.
pub(super) struct Copied(pub(super) Geometry);

impl Copied {
    /// Returns the matrix of windows `[window, num_windows]` of one group of an image.
    /// `scratch` holds it, unless the image itself is the matrix.
    fn windows<'a>(&self, image: &'a [f32], scratch: &'a mut [f32]) -> Matrix<'a> {
        let Geometry { height, width, .. } = &self.0;
        let (window, num_windows) = (self.0.window(), self.0.num_windows());
        if self.is_identity() {
            return Matrix::row_major(image, window, num_windows);
        }
        let rows = self.taps().zip(scratch.chunks_exact_mut(num_windows));
        for ((channel, ky, kx), row) in rows {
            let plane = &image[channel * self.plane()..][..self.plane()];
            copy_windows(plane, row, height, width, [ky, kx]);
        }
        Matrix::row_major(scratch, window, num_windows)
    }

    /// Sets the sums `[channels_out, num_windows]` of one group of an image, with the biases.
    fn write_sums(
        &self,
        image: &[f32],
        filters: &Filters<'_>,
        sums: &mut [f32],
        scratch: &mut [f32],
    ) {
        let windows = self.windows(image, scratch);
        filters.fill(sums, self.0.num_windows());
        multiply(sums, Output::Add, 1.0, filters.weight, windows, self.0.threads());
    }

    /// Returns `true` if each window is one position of the image.
    fn is_identity(&self) -> bool {
        self.0.height.is_identity() && self.0.width.is_identity()
    }

    fn taps(&self) -> impl Iterator<Item = (usize, usize, usize)> {
        self.0.taps(self.0.channels_in / self.0.groups)
    }

    /// Number of values of a channel of the input.
    fn plane(&self) -> usize {
        self.0.height.len * self.0.width.len
    }
}

impl Method for Copied {
    type Scratch = Vec<f32>;

    fn geometry(&self) -> &Geometry {
        &self.0
    }

    fn scratch(&self) -> Vec<f32> {
        vec![0.0; self.0.window() * self.0.num_windows()]
    }

    fn convolve(
        &self,
        image: &[f32],
        filters: &Filters<'_>,
        out: Blank<'_, f32>,
        scratch: &mut Vec<f32>,
    ) {
        let out = out.fill(0.0);
        self.write_sums(image, filters, out, scratch);
        if filters.activation == Activation::Relu {
            apply_relu(out);
        }
    }

    fn convolve_pooled(
        &self,
        image: &[f32],
        filters: &Filters<'_>,
        pairs: &Pairs,
        (output, positions): (&mut [f32], &mut [u32]),
        scratch: &mut Vec<f32>,
    ) {
        let (num_windows, plane_out) = (self.0.num_windows(), pairs.plane_out());
        let mut sums = vec![0.0; self.0.group_out() * num_windows];
        self.write_sums(image, filters, &mut sums, scratch);
        let planes = sums.chunks_exact(num_windows);
        let outputs = output.chunks_exact_mut(plane_out).zip(positions.chunks_exact_mut(plane_out));
        vectorize(
            #[inline(always)]
            || {
                for (plane, (output, positions)) in planes.zip(outputs) {
                    pairs.write_maxima(plane, self.0.width.num_windows, NO_BIAS, output, positions);
                }
            },
        );
    }

    fn add_weight_gradient(
        &self,
        image: &[f32],
        dy: Matrix<'_>,
        dweight: &mut [f32],
        scratch: &mut Vec<f32>,
    ) {
        let windows = self.windows(image, scratch);
        multiply(dweight, Output::Add, 1.0, windows, dy.transposed(), self.0.threads());
    }

    fn weights_of_gradient<'a>(&self, weight: &'a [f32]) -> Cow<'a, [f32]> {
        Cow::Borrowed(weight)
    }

    fn input_gradient(
        &self,
        dy: &[f32],
        weight: &[f32],
        dx: Blank<'_, f32>,
        scratch: &mut Vec<f32>,
    ) {
        let dx = dx.fill(0.0);
        let (group_out, num_windows) = (self.0.group_out(), self.0.num_windows());
        let weight = Matrix::row_major(weight, group_out, self.0.window()).transposed();
        let dy = Matrix::row_major(dy, group_out, num_windows);
        if self.is_identity() {
            return multiply(dx, Output::Replace, 1.0, weight, dy, self.0.threads());
        }
        multiply(scratch, Output::Replace, 1.0, weight, dy, self.0.threads());
        for ((channel, ky, kx), windows) in self.taps().zip(scratch.chunks_exact(num_windows)) {
            let plane = &mut dx[channel * self.plane()..][..self.plane()];
            add_windows(plane, windows, &self.0.height, &self.0.width, [ky, kx]);
        }
    }
}

/// Copies the input of tap `[ky, kx]` in each window of a plane, and 0 from the padding.
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
            copy(row, &source[start..start + row.len()]);
        } else {
            let values = source[start.min(width.len)..].iter().step_by(width.stride);
            row.iter_mut().zip(values).for_each(|(out, value)| *out = *value);
        }
    }
}

/// Adds the gradient at tap `[ky, kx]` of each window to the plane. Reverse of [`copy_windows`].
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

//! Maximum and average pools over two dimensions.

mod pairs;

use std::sync::Arc;

use burn::tensor::Tensor;
use burn::tensor::module;
use burn::tensor::ops::{AvgPoolOptions, MaxPoolOptions};

pub(crate) use self::pairs::Pairs;
use crate::array::Array;
use crate::chunks::{chunk_rows, map_chunks};
use crate::machine::vectorize;
use crate::new_values::{Blank, NewValues};
use crate::tape::{ArrayGradient, Gradient, Operand, record};
use crate::vector::NO_BIAS;
use crate::window::Axis;

/// Returns the maximum of each window.
///
/// As in PyTorch, NaN is larger than all numbers, and the gradient goes to the first of equal
/// maxima. `ceil_mode` and different padding at both ends are not fused.
///
/// # Shapes
///
/// `x` `[batch, channels, height, width]`, result `[batch, channels, height_out, width_out]`.
pub fn max_pool2d(x: Tensor<4>, options: MaxPoolOptions<2>) -> Tensor<4> {
    fused_max(&x, &options).unwrap_or_else(|| module::max_pool2d(x, options))
}

/// Returns the mean of each window.
///
/// `count_include_pad` decides whether the padding counts as zeros. `ceil_mode` and different
/// padding at both ends are not fused.
///
/// # Shapes
///
/// `x` `[batch, channels, height, width]`, result `[batch, channels, height_out, width_out]`.
pub fn avg_pool2d(x: Tensor<4>, options: AvgPoolOptions<2>) -> Tensor<4> {
    fused_average(&x, &options).unwrap_or_else(|| module::avg_pool2d(x, options))
}

/// Sizes of a pool. All images and channels are planes.
#[derive(Clone, Copy, Debug)]
struct Geometry {
    num_planes: usize,
    height: Axis,
    width: Axis,
}

impl Geometry {
    /// Returns `None` if the shapes do not fit, or if the padding exceeds half of the kernel.
    fn new(
        shape: [usize; 4],
        kernel: [usize; 2],
        stride: [usize; 2],
        dilation: [usize; 2],
        padding: [(usize, usize); 2],
    ) -> Option<Self> {
        let axis = |index: usize| {
            let (begin, end) = padding[index];
            let is_supported = begin == end && 2 * begin <= kernel[index];
            let (kernel, stride) = (kernel[index], stride[index]);
            let axis = Axis::new(shape[2 + index], kernel, stride, dilation[index], (begin, end));
            axis.filter(|_| is_supported)
        };
        let (height, width) = (axis(0)?, axis(1)?);
        // Positions within a plane are stored as u32.
        u32::try_from(height.len * width.len).ok()?;
        Some(Self { num_planes: shape[0] * shape[1], height, width })
    }

    /// Returns `None` also for options of a max pool that are not fused.
    fn of_max(shape: [usize; 4], options: &MaxPoolOptions<2>) -> Option<Self> {
        let MaxPoolOptions { kernel_size, stride, padding, dilation, ceil_mode } = options;
        let geometry = Self::new(shape, *kernel_size, *stride, *dilation, *padding)?;
        (!ceil_mode).then_some(geometry)
    }

    /// Returns `None` unless windows have 2 by 2 values, and neither overlap nor reach the padding.
    fn pairs(&self) -> Option<Pairs> {
        let is_pairs = self.height.is_pairs() && self.width.is_pairs();
        is_pairs.then_some(Pairs { size: [self.height.len, self.width.len] })
    }

    fn plane_in(&self) -> usize {
        self.height.len * self.width.len
    }

    fn plane_out(&self) -> usize {
        self.height.num_windows * self.width.num_windows
    }

    fn shape_out(&self, [batch, channels, ..]: [usize; 4]) -> [usize; 4] {
        [batch, channels, self.height.num_windows, self.width.num_windows]
    }

    /// Calls `visit` with each row of windows and each position in these windows: the windows
    /// that are inside the input, as indices into a plane of the output, and the index into a
    /// plane of the input that belongs to the first of them.
    #[inline(always)]
    fn visit_rows(&self, mut visit: impl FnMut(std::ops::Range<usize>, usize)) {
        for row in 0..self.height.num_windows {
            for ky in 0..self.height.kernel {
                let Some(y) = self.height.index(row, ky) else { continue };
                for kx in 0..self.width.kernel {
                    let (columns, start) = self.width.inside(kx);
                    let first = row * self.width.num_windows;
                    let windows = first + columns.start..first + columns.end;
                    if !windows.is_empty() {
                        visit(windows, y * self.width.len + start);
                    }
                }
            }
        }
    }
}

fn fused_max(x: &Tensor<4>, options: &MaxPoolOptions<2>) -> Option<Tensor<4>> {
    let shape = x.dims();
    let geometry = Geometry::of_max(shape, options)?;
    let x = Operand::new(x)?;
    let (output, maxima) = max_forward(&geometry, x.array().values());
    let output = Array::from_vec(output, &geometry.shape_out(shape));
    let gradient = || -> Arc<dyn Gradient> { Arc::new(MaxGradient { geometry, maxima, shape }) };
    Some(record([x], output, gradient))
}

/// Which value of each window is the maximum.
enum Maxima {
    /// Its position in the window. See [`Pairs::write_maxima`].
    Positions(Pairs, Vec<u32>),
    /// Its index in the plane.
    Indices(Vec<u32>),
}

/// Index of the maximum of a window that is entirely in the padding.
const NO_INDEX: u32 = u32::MAX;

/// Returns the maximum of each window.
fn max_forward(geometry: &Geometry, x: &[f32]) -> (Vec<f32>, Maxima) {
    if let Some(pairs) = geometry.pairs() {
        let (output, positions) = max_of_planes(
            geometry,
            x,
            0,
            #[inline(always)]
            |x, output, positions| {
                pairs.write_maxima(x, geometry.width.len, NO_BIAS, output, positions)
            },
        );
        return (output, Maxima::Positions(pairs, positions));
    }
    let (output, indices) = max_of_planes(
        geometry,
        x,
        NO_INDEX,
        #[inline(always)]
        |x, output, indices| max_plane(geometry, x, output, indices),
    );
    (output, Maxima::Indices(indices))
}

/// Calls `work` with each plane, its output and the maxima of its windows, which are `none` before.
fn max_of_planes<M: Copy + Send + Sync>(
    geometry: &Geometry,
    x: &[f32],
    none: M,
    work: impl Fn(&[f32], &mut [f32], &mut [M]) + Sync,
) -> (Vec<f32>, Vec<M>) {
    let (plane_in, plane_out) = (geometry.plane_in(), geometry.plane_out());
    let num = geometry.num_planes * plane_out;
    let (mut output, mut maxima) = (NewValues::new(num), NewValues::new(num));
    let size = chunk_rows(geometry.num_planes);
    let outputs = output.chunks(size * plane_out).zip(maxima.chunks(size * plane_out));
    let parts = outputs.zip(x.chunks(size * plane_in)).collect();
    map_chunks(x.len(), parts, |((output, maxima), x): ((Blank<'_, f32>, Blank<'_, M>), _)| {
        let x: &[f32] = x;
        let maxima = maxima.filled(plane_out, none);
        let outputs = output.filled(plane_out, f32::NEG_INFINITY).zip(maxima);
        vectorize(
            #[inline(always)]
            || {
                for ((output, maxima), x) in outputs.zip(x.chunks_exact(plane_in)) {
                    work(x, output, maxima);
                }
            },
        );
    });
    (output.into_vec(), maxima.into_vec())
}

#[inline(always)]
fn max_plane(geometry: &Geometry, x: &[f32], output: &mut [f32], indices: &mut [u32]) {
    geometry.visit_rows(|windows, start| {
        let (best, best_index) = (&mut output[windows.clone()], &mut indices[windows]);
        // Constant strides give vector instructions.
        match geometry.width.stride {
            1 => max_row(&x[start..], start, 1, best, best_index),
            2 => max_row(&x[start..], start, 2, best, best_index),
            stride => max_row(&x[start..], start, stride, best, best_index),
        }
    });
}

#[inline(always)]
fn max_row(x: &[f32], start: usize, stride: usize, best: &mut [f32], best_index: &mut [u32]) {
    let x = &x[..(best.len() - 1) * stride + 1];
    let best_index = &mut best_index[..best.len()];
    for index in 0..best.len() {
        let value = x[index * stride];
        let is_first = best_index[index] == NO_INDEX;
        // Without `||`, which branches: which value is larger cannot be predicted.
        let is_better = (value > best[index]) | value.is_nan() | is_first;
        best[index] = if is_better { value } else { best[index] };
        let position = (start + index * stride) as u32;
        best_index[index] = if is_better { position } else { best_index[index] };
    }
}

struct MaxGradient {
    geometry: Geometry,
    maxima: Maxima,
    shape: [usize; 4],
}

impl ArrayGradient for MaxGradient {
    /// The gradient of a window goes to its maximum.
    fn gradients(&self, output: &Array, _: &[bool]) -> Vec<Option<Array>> {
        let (geometry, dy) = (&self.geometry, output.values());
        let dx = match &self.maxima {
            Maxima::Positions(pairs, positions) => gradient_of_planes(
                geometry,
                dy,
                positions,
                #[inline(always)]
                |dy, positions, dx| pairs.write_gradient(dy, positions, dx),
            ),
            Maxima::Indices(indices) => gradient_of_planes(geometry, dy, indices, add_at),
        };
        vec![Some(Array::from_vec(dx, &self.shape))]
    }
}

/// Calls `work` with the gradients and the maxima of the windows of each plane, and the gradient of
/// the plane, which is 0 before.
fn gradient_of_planes<M: Sync>(
    geometry: &Geometry,
    dy: &[f32],
    maxima: &[M],
    work: impl Fn(&[f32], &[M], &mut [f32]) + Sync,
) -> Vec<f32> {
    let (plane_in, plane_out) = (geometry.plane_in(), geometry.plane_out());
    let num = geometry.num_planes * plane_in;
    let mut dx = NewValues::new(num);
    let size = chunk_rows(geometry.num_planes);
    let outputs = dy.chunks(size * plane_out).zip(maxima.chunks(size * plane_out));
    let parts = dx.chunks(size * plane_in).zip(outputs).collect();
    map_chunks(num, parts, |(dx, (dy, maxima)): (Blank<'_, f32>, (&[f32], &[M]))| {
        let outputs = dy.chunks_exact(plane_out).zip(maxima.chunks_exact(plane_out));
        let planes = dx.filled(plane_in, 0.0).zip(outputs);
        vectorize(
            #[inline(always)]
            || {
                for (dx, (dy, maxima)) in planes {
                    work(dy, maxima, dx);
                }
            },
        );
    });
    dx.into_vec()
}

/// Adds the gradient of each window to the value of its maximum.
#[inline(always)]
fn add_at(dy: &[f32], indices: &[u32], dx: &mut [f32]) {
    for (dy, index) in dy.iter().zip(indices) {
        if *index != NO_INDEX {
            dx[*index as usize] += dy;
        }
    }
}

fn fused_average(x: &Tensor<4>, options: &AvgPoolOptions<2>) -> Option<Tensor<4>> {
    let AvgPoolOptions { kernel_size, stride, padding, count_include_pad, ceil_mode } = options;
    let shape = x.dims();
    let geometry = Geometry::new(shape, *kernel_size, *stride, [1, 1], *padding)?;
    if *ceil_mode {
        return None;
    }
    let x = Operand::new(x)?;
    let factors = factors(&geometry, *count_include_pad);
    let output = average_forward(&geometry, &factors, x.array().values());
    let output = Array::from_vec(output, &geometry.shape_out(shape));
    let gradient =
        || -> Arc<dyn Gradient> { Arc::new(AverageGradient { geometry, factors, shape }) };
    Some(record([x], output, gradient))
}

/// Returns the reciprocal of the number of values of each window of a plane.
fn factors(geometry: &Geometry, count_include_pad: bool) -> Vec<f32> {
    if count_include_pad {
        let area = geometry.height.kernel * geometry.width.kernel;
        return vec![1.0 / area as f32; geometry.plane_out()];
    }
    let mut counts = vec![0.0; geometry.plane_out()];
    geometry.visit_rows(|windows, _| counts[windows].iter_mut().for_each(|count| *count += 1.0));
    counts.into_iter().map(|count: f32| 1.0 / count).collect()
}

fn average_forward(geometry: &Geometry, factors: &[f32], x: &[f32]) -> Vec<f32> {
    let (plane_in, plane_out) = (geometry.plane_in(), geometry.plane_out());
    let stride = geometry.width.stride;
    let mut output = NewValues::new(geometry.num_planes * plane_out);
    let size = chunk_rows(geometry.num_planes);
    let parts = output.chunks(size * plane_out).zip(x.chunks(size * plane_in)).collect();
    map_chunks(x.len(), parts, |(output, x): (Blank<'_, f32>, &[f32])| {
        let planes = output.filled(plane_out, 0.0).zip(x.chunks_exact(plane_in));
        vectorize(
            #[inline(always)]
            || {
                for (output, x) in planes {
                    geometry.visit_rows(|windows, start| match stride {
                        // Constant strides give vector instructions.
                        1 => gather(&x[start..], 1, &mut output[windows]),
                        2 => gather(&x[start..], 2, &mut output[windows]),
                        stride => gather(&x[start..], stride, &mut output[windows]),
                    });
                    output.iter_mut().zip(factors).for_each(|(sum, factor)| *sum *= factor);
                }
            },
        );
    });
    output.into_vec()
}

/// Adds every `stride`-th value to the sums.
#[inline(always)]
fn gather(values: &[f32], stride: usize, sums: &mut [f32]) {
    let values = &values[..(sums.len() - 1) * stride + 1];
    for (index, sum) in sums.iter_mut().enumerate() {
        *sum += values[index * stride];
    }
}

/// Adds the gradients, times their factors, to every `stride`-th sum.
#[inline(always)]
fn scatter(sums: &mut [f32], stride: usize, dy: &[f32], factors: &[f32]) {
    let sums = &mut sums[..(dy.len() - 1) * stride + 1];
    for (index, (dy, factor)) in dy.iter().zip(factors).enumerate() {
        sums[index * stride] += dy * factor;
    }
}

struct AverageGradient {
    geometry: Geometry,
    factors: Vec<f32>,
    shape: [usize; 4],
}

impl ArrayGradient for AverageGradient {
    /// The gradient of a window is spread evenly over the values that it counts.
    fn gradients(&self, output: &Array, _: &[bool]) -> Vec<Option<Array>> {
        let (plane_in, plane_out) = (self.geometry.plane_in(), self.geometry.plane_out());
        let stride = self.geometry.width.stride;
        let num = self.geometry.num_planes * plane_in;
        let mut dx = NewValues::new(num);
        let size = chunk_rows(self.geometry.num_planes);
        let outputs = output.values().chunks(size * plane_out);
        let parts = dx.chunks(size * plane_in).zip(outputs).collect();
        map_chunks(num, parts, |(dx, dy): (Blank<'_, f32>, &[f32])| {
            let planes = dx.filled(plane_in, 0.0).zip(dy.chunks_exact(plane_out));
            vectorize(
                #[inline(always)]
                || {
                    for (dx, dy) in planes {
                        self.geometry.visit_rows(|windows, start| {
                            let (dx, dy) = (&mut dx[start..], &dy[windows.clone()]);
                            let factors = &self.factors[windows];
                            match stride {
                                1 => scatter(dx, 1, dy, factors),
                                2 => scatter(dx, 2, dy, factors),
                                stride => scatter(dx, stride, dy, factors),
                            }
                        });
                    }
                },
            );
        });
        vec![Some(Array::from_vec(dx.into_vec(), &self.shape))]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{
        Case, assert_gradients, assert_matches_burn, assert_same_on_threads, run,
    };

    /// Input shape, kernel, stride, padding and dilation.
    type Row = ([usize; 4], [usize; 2], [usize; 2], [usize; 2], [usize; 2]);

    const ROWS: [Row; 8] = [
        ([2, 3, 6, 8], [2, 2], [2, 2], [0, 0], [1, 1]),
        ([2, 3, 7, 5], [2, 2], [2, 2], [0, 0], [1, 1]),
        ([1, 2, 4, 14], [2, 2], [2, 2], [0, 0], [1, 1]),
        ([1, 2, 5, 9], [3, 3], [1, 1], [1, 1], [1, 1]),
        ([1, 1, 6, 7], [3, 2], [2, 3], [1, 0], [1, 1]),
        ([11, 1, 4, 4], [1, 1], [1, 1], [0, 0], [1, 1]),
        ([1, 2, 7, 9], [2, 3], [1, 2], [1, 1], [2, 2]),
        ([1, 1, 3, 3], [3, 3], [3, 3], [0, 0], [1, 1]),
    ];

    #[derive(Clone, Copy, Debug)]
    enum Pool {
        Max,
        Average { count_include_pad: bool },
    }

    const POOLS: [Pool; 3] = [
        Pool::Max,
        Pool::Average { count_include_pad: true },
        Pool::Average { count_include_pad: false },
    ];

    #[test]
    fn pairs_agree_with_other_windows() {
        // Ties, NaN and infinities, in rows with and without a rest of windows.
        const NUMBERS: [f32; 8] =
            [0.0, -0.0, 1.0, 1.0, -1.0, -2.0, f32::INFINITY, f32::NEG_INFINITY];
        // A quiet NaN and a signaling one.
        const WITH_NAN: [f32; 8] =
            [0.0, -0.0, 1.0, 1.0, f32::NAN, f32::from_bits(0x7FA0_0001), 2.0, f32::NEG_INFINITY];
        let sizes = (2..24).zip([40, 41].into_iter().cycle());
        for ((width, height), values) in sizes.flat_map(|size| [(size, NUMBERS), (size, WITH_NAN)])
        {
            let geometry =
                Geometry::new([1, 1, height, width], [2, 2], [2, 2], [1, 1], [(0, 0); 2]).unwrap();
            let (pairs, num) = (geometry.pairs().unwrap(), geometry.plane_out());
            let value = |index: usize| values[index.wrapping_mul(2_654_435_761) >> 9 & 7];
            let x: Vec<f32> = (0..height * width).map(value).collect();
            let (mut output, mut indices) = (vec![f32::NEG_INFINITY; num], vec![NO_INDEX; num]);
            max_plane(&geometry, &x, &mut output, &mut indices);
            let (mut of_pairs, mut positions) = (vec![0.0; num], vec![0; num]);
            pairs.write_maxima(&x, width, NO_BIAS, &mut of_pairs, &mut positions);
            let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&of_pairs), bits(&output), "{height} x {width}");
            let dy: Vec<f32> = (0..num).map(value).collect();
            let (mut dx, mut dx_of_pairs) = (vec![0.0; x.len()], vec![1.0; x.len()]);
            add_at(&dy, &indices, &mut dx);
            pairs.write_gradient(&dy, &positions, &mut dx_of_pairs);
            assert_eq!(bits(&dx_of_pairs), bits(&dx), "{height} x {width}");
        }
    }

    fn max_options((_, kernel, stride, padding, dilation): &Row) -> MaxPoolOptions<2> {
        let options = MaxPoolOptions::new(*kernel).with_stride(*stride).with_padding(*padding);
        options.with_dilation(*dilation)
    }

    fn average_options((_, kernel, stride, padding, _): &Row, count: bool) -> AvgPoolOptions<2> {
        let options = AvgPoolOptions::new(*kernel).with_stride(*stride).with_padding(*padding);
        options.with_count_include_pad(count)
    }

    fn flat(y: Tensor<4>) -> Tensor<1> {
        let num = y.dims().iter().product::<usize>();
        y.reshape([num])
    }

    fn ours(row: Row, pool: Pool) -> impl Fn(&[Tensor<1>]) -> Tensor<1> {
        move |inputs: &[Tensor<1>]| {
            let x = inputs[0].clone().reshape(row.0);
            let y = match pool {
                Pool::Max => fused_max(&x, &max_options(&row)),
                Pool::Average { count_include_pad } => {
                    fused_average(&x, &average_options(&row, count_include_pad))
                }
            };
            flat(y.unwrap())
        }
    }

    fn burns(row: Row, pool: Pool) -> impl Fn(&[Tensor<1>]) -> Tensor<1> {
        move |inputs: &[Tensor<1>]| {
            let x = inputs[0].clone().reshape(row.0);
            flat(match pool {
                Pool::Max => module::max_pool2d(x, max_options(&row)),
                Pool::Average { count_include_pad } => {
                    module::avg_pool2d(x, average_options(&row, count_include_pad))
                }
            })
        }
    }

    fn case(row: &Row) -> Case {
        Case::new(&[row.0.iter().product()])
    }

    /// Average pools have no dilation.
    fn rows_of(pool: Pool) -> impl Iterator<Item = Row> {
        ROWS.into_iter().filter(move |row| matches!(pool, Pool::Max) || row.4 == [1, 1])
    }

    #[test]
    fn matches_burn_for_options() {
        for pool in POOLS {
            for row in rows_of(pool) {
                let name = format!("{pool:?}, {row:?}");
                assert_matches_burn(&name, &case(&row), &ours(row, pool), &burns(row, pool));
            }
        }
    }

    #[test]
    fn gradients_match_finite_differences() {
        for pool in POOLS {
            for row in rows_of(pool) {
                let reference = |inputs: &[Vec<f64>]| reference(&row, pool, &inputs[0]);
                let name = format!("{pool:?}, {row:?}");
                assert_gradients(&name, &case(&row), &ours(row, pool), &reference);
            }
        }
    }

    /// Pool by its definition.
    fn reference(row: &Row, pool: Pool, x: &[f64]) -> Vec<f64> {
        let ([batch, channels, height, width], kernel, stride, padding, dilation) = *row;
        let axis = |index: usize, len: usize| {
            let padding = (padding[index], padding[index]);
            Axis::new(len, kernel[index], stride[index], dilation[index], padding).unwrap()
        };
        let (rows, columns) = (axis(0, height), axis(1, width));
        let mut out = vec![];
        for plane in x.chunks(height * width).take(batch * channels) {
            for window in 0..rows.num_windows * columns.num_windows {
                let (wy, wx) = (window / columns.num_windows, window % columns.num_windows);
                let position = |k: usize| {
                    let y = rows.index(wy, k / kernel[1])?;
                    Some(plane[y * width + columns.index(wx, k % kernel[1])?])
                };
                let values: Vec<f64> = (0..kernel[0] * kernel[1]).filter_map(position).collect();
                let num = |count_include_pad| {
                    if count_include_pad { kernel[0] * kernel[1] } else { values.len() }
                };
                out.push(match pool {
                    Pool::Max => values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
                    Pool::Average { count_include_pad } => {
                        values.iter().sum::<f64>() / num(count_include_pad) as f64
                    }
                });
            }
        }
        out
    }

    #[test]
    fn threads_do_not_change_bits() {
        for pool in POOLS {
            let row = ([7, 5, 40, 38], [3, 3], [2, 2], [1, 1], [1, 1]);
            assert_same_on_threads(&case(&row), &ours(row, pool));
        }
    }

    #[test]
    fn nan_and_ties_as_in_pytorch() {
        let row = ([1, 1, 2, 4], [2, 2], [2, 2], [0, 0], [1, 1]);
        let values = vec![3.0, 3.0, 1.0, f32::NAN, 3.0, 0.0, 2.0, f32::NEG_INFINITY];
        let outcome = run(&Case::from_values(vec![values]), &ours(row, Pool::Max));
        assert_eq!(outcome.output[0], 3.0);
        assert!(outcome.output[1].is_nan());
        let targets: Vec<bool> = outcome.gradients[0].iter().map(|value| *value != 0.0).collect();
        assert_eq!(targets, [true, false, false, true, false, false, false, false]);
        let values = vec![f32::NEG_INFINITY; 8];
        let outcome = run(&Case::from_values(vec![values]), &ours(row, Pool::Max));
        assert_eq!(outcome.output, [f32::NEG_INFINITY; 2]);
    }

    #[test]
    fn empty_batch_and_unsupported_options() {
        let row = ([0, 2, 4, 4], [2, 2], [2, 2], [0, 0], [1, 1]);
        assert!(run(&case(&row), &ours(row, Pool::Max)).output.is_empty());
        let x = Tensor::<4>::ones([1, 1, 4, 4], &crate::testing::device());
        let options = max_options(&row);
        assert!(fused_max(&x, &options).is_some());
        assert!(fused_max(&x, &options.clone().with_ceil_mode(true)).is_none());
        let pairs = options.with_padding_pairs([(0, 1), (0, 0)]);
        assert!(fused_max(&x, &pairs).is_none());
    }
}

//! Maxima of windows of 2 by 2 values that neither overlap nor reach the padding.

use burn::tensor::ops::MaxPoolOptions;

use super::Geometry;
use crate::vector::NO_BIAS;

/// Sizes of a plane that is divided into such windows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pairs {
    /// Height and width of the input. If one of them is odd, the last row or column belongs to no
    /// window.
    pub(super) size: [usize; 2],
}

impl Pairs {
    /// Returns `None` for other windows, and for shapes that do not fit.
    pub(crate) fn new(shape: [usize; 4], options: &MaxPoolOptions<2>) -> Option<Self> {
        Geometry::of_max(shape, options)?.pairs()
    }

    /// Number of values of a plane.
    pub(crate) fn plane_in(&self) -> usize {
        self.size[0] * self.size[1]
    }

    /// Number of windows of a plane.
    pub(crate) fn plane_out(&self) -> usize {
        let [rows, columns] = self.shape_out();
        rows * columns
    }

    /// Number of windows in each direction.
    pub(crate) fn shape_out(&self) -> [usize; 2] {
        self.size.map(|size| size / 2)
    }

    /// Writes the maximum of each window of a plane and its position in the window. The positions
    /// are 0 and 1 in the upper row, and 2 and 3 in the lower one. NaN is larger than all numbers.
    /// Of equal maxima, the first one counts, and of several NaN the last one.
    ///
    /// The rows of `x` start `pitch` values apart. Adds `bias` to each value first.
    #[inline(always)]
    pub(crate) fn write_maxima(
        &self,
        x: &[f32],
        pitch: usize,
        bias: f32,
        output: &mut [f32],
        positions: &mut [u32],
    ) {
        let (width, columns) = (self.size[1], self.size[1] / 2);
        let has_nan = x.iter().fold(false, |has_nan, value| has_nan | (value + bias).is_nan());
        let outputs = output.chunks_exact_mut(columns).zip(positions.chunks_exact_mut(columns));
        for ((best, positions), rows) in outputs.zip(x.chunks(2 * pitch)) {
            let rows = Rows { top: &rows[..width], bottom: &rows[pitch..][..width], bias };
            match columns {
                _ if has_nan => rows.write_maxima_with_nan(best, positions),
                8.. => rows.write_maxima::<8>(best, positions),
                4.. => rows.write_maxima::<4>(best, positions),
                _ => rows.write_maxima::<1>(best, positions),
            }
        }
    }

    /// Sets the maximum of each window of a plane to the gradient of the window, and all other
    /// values to 0.
    #[inline(always)]
    pub(crate) fn write_gradient(&self, dy: &[f32], positions: &[u32], dx: &mut [f32]) {
        let (width, columns) = (self.size[1], self.size[1] / 2);
        let (windows, rest) = dx.split_at_mut(self.size[0] / 2 * 2 * width);
        let gradients = dy.chunks_exact(columns).zip(positions.chunks_exact(columns));
        for ((dy, positions), rows) in gradients.zip(windows.chunks_exact_mut(2 * width)) {
            let (top, bottom) = rows.split_at_mut(width);
            for (row, first) in [(top, 0), (bottom, 2)] {
                match columns {
                    8.. => gradient_of_row::<8>(row, first, dy, positions),
                    4.. => gradient_of_row::<4>(row, first, dy, positions),
                    _ => gradient_of_row::<1>(row, first, dy, positions),
                }
                row[2 * columns..].fill(0.0);
            }
        }
        rest.fill(0.0);
    }
}

/// First windows of blocks of `NUM`, at least as many as a row has. The last block overlaps the one
/// before.
#[inline(always)]
fn blocks<const NUM: usize>(columns: usize) -> impl Iterator<Item = usize> {
    (0..columns).step_by(NUM).map(move |first| first.min(columns - NUM))
}

/// Two rows of windows, and the number that is added to each value.
struct Rows<'a> {
    top: &'a [f32],
    bottom: &'a [f32],
    bias: f32,
}

impl Rows<'_> {
    /// Writes maxima and positions of numbers, `NUM` windows at a time.
    #[inline(always)]
    fn write_maxima<const NUM: usize>(&self, output: &mut [f32], positions: &mut [u32]) {
        for first in blocks::<NUM>(output.len()) {
            let (values, windows) = (2 * first..2 * (first + NUM), first..first + NUM);
            let (top, bottom) = (&self.top[values.clone()], &self.bottom[values]);
            let rows = Rows { top, bottom, bias: self.bias };
            let (best, best_positions) = rows.maxima::<NUM>();
            output[windows.clone()].copy_from_slice(&best);
            positions[windows].copy_from_slice(&best_positions);
        }
    }

    /// Returns the maximum of each window and its position. No value is NaN.
    ///
    /// Which value is larger cannot be predicted, so branches would be slow. The compiler selects
    /// without a branch if each step is for all windows, and compares once.
    #[inline(always)]
    fn maxima<const NUM: usize>(&self) -> ([f32; NUM], [u32; NUM]) {
        let (top, bottom) = (&self.top[..2 * NUM], &self.bottom[..2 * NUM]);
        let column = |row: &[f32], column: usize| -> [f32; NUM] {
            std::array::from_fn(|window| row[2 * window + column] + self.bias)
        };
        let values = [column(top, 0), column(top, 1), column(bottom, 0), column(bottom, 1)];
        let mut best = values[0];
        for values in &values[1..] {
            let larger = |window: usize| {
                if values[window] > best[window] { values[window] } else { best[window] }
            };
            best = std::array::from_fn(larger);
        }
        let is_other = |values: &[f32; NUM]| -> [u32; NUM] {
            std::array::from_fn(|window| u32::from(values[window] != best[window]))
        };
        let (first, second, third) =
            (is_other(&values[0]), is_other(&values[1]), is_other(&values[2]));
        let positions = std::array::from_fn(|window| {
            let after_second = first[window] & second[window];
            first[window] + after_second + (after_second & third[window])
        });
        (best, positions)
    }

    /// Writes maxima and positions of values, some of which are NaN.
    #[cold]
    fn write_maxima_with_nan(&self, output: &mut [f32], positions: &mut [u32]) {
        let has_bias = self.bias.to_bits() != NO_BIAS.to_bits();
        // An addition makes a signaling NaN quiet.
        let add_bias = |value: f32| if has_bias { value + self.bias } else { value };
        let windows = self.top.as_chunks().0.iter().zip(self.bottom.as_chunks().0);
        for ((best, best_position), (top, bottom)) in output.iter_mut().zip(positions).zip(windows)
        {
            let ([first, second], [third, fourth]): ([f32; 2], [f32; 2]) = (*top, *bottom);
            (*best, *best_position) = (add_bias(first), 0);
            for (value, position) in [(second, 1), (third, 2), (fourth, 3)] {
                let value = add_bias(value);
                if value > *best || value.is_nan() {
                    (*best, *best_position) = (value, position);
                }
            }
        }
    }
}

/// Writes the gradients of one of the rows of windows, `NUM` windows at a time. `first` is the
/// position of its first values.
#[inline(always)]
fn gradient_of_row<const NUM: usize>(row: &mut [f32], first: u32, dy: &[f32], positions: &[u32]) {
    let (windows, _) = row.as_chunks_mut();
    for start in blocks::<NUM>(dy.len()) {
        let (dy, positions) = (&dy[start..start + NUM], &positions[start..start + NUM]);
        windows[start..start + NUM].copy_from_slice(&gradients::<NUM>(dy, positions, first));
    }
}

/// Returns the gradients of two adjacent values in each window, of which the first has the position
/// `first`. Selects by masks: the position of a maximum cannot be predicted, and the compiler would
/// branch on it.
#[inline(always)]
fn gradients<const NUM: usize>(dy: &[f32], positions: &[u32], first: u32) -> [[f32; 2]; NUM] {
    std::array::from_fn(|lane| {
        // A sum that begins with 0 is never -0.
        let gradient = (0.0 + dy[lane]).to_bits();
        [first, first + 1].map(|position| {
            let mask = u32::from(positions[lane] == position).wrapping_neg();
            f32::from_bits(gradient & mask)
        })
    })
}

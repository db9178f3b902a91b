//! Passes over the values of each channel of a tensor.

use crate::chunks::{chunk_rows, map_chunks};
use crate::machine::vectorize;
use crate::new_values::{Blank, NewValues};

/// Independent partial sums, which fill vector registers.
const LANES: usize = 16;

/// Sizes of a tensor `[batch, channels, ..]`. The values of a channel of a sample are a plane.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    batch: usize,
    pub(super) channels: usize,
    plane: usize,
}

impl Layout {
    /// Returns `None` for a tensor without values or without channels.
    pub(super) fn new(shape: &[usize]) -> Option<Self> {
        let [batch, channels, rest @ ..] = shape else { return None };
        let layout = Self { batch: *batch, channels: *channels, plane: rest.iter().product() };
        (layout.num_elements() > 0).then_some(layout)
    }

    fn num_elements(&self) -> usize {
        self.batch * self.channels * self.plane
    }

    /// Number of values of each channel.
    pub(super) fn num_per_channel(&self) -> f64 {
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
    pub(super) fn moments(&self, x: &[f32]) -> [Vec<f32>; 2] {
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
    pub(super) fn map<T: Copy + Sync>(
        &self,
        [left, right]: [&[f32]; 2],
        parameters: &[T],
        function: impl Fn(f32, f32, T) -> f32 + Sync,
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
    pub(super) fn sums<const N: usize, T: Copy + Sync>(
        &self,
        [left, right]: [&[f32]; 2],
        parameters: &[T],
        term: impl Fn(f32, f32, T) -> [f32; N] + Sync,
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
fn column_sums<'a, const N: usize, T: Copy>(
    rows: impl Iterator<Item = (&'a [f32], &'a [f32])>,
    parameters: &[T],
    term: impl Fn(f32, f32, T) -> [f32; N],
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::{Instructions, vectorize_for};

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
}

//! Work in a fixed number of chunks, so that the order of sums does not depend on the threads.

use crate::machine::vectorize;
use crate::new_values::{Blank, NewValues};
use crate::threads;

/// Maximum number of chunks of one operation. Also the maximum number of threads that it uses.
const CHUNKS_MAX: usize = 8;

/// Elements of an operation from which several threads are faster than one.
const PARALLEL_MIN: usize = 32 * 1024;

/// Returns the number of rows of each chunk but the last. At least 1.
pub(crate) fn chunk_rows(rows: usize) -> usize {
    rows.div_ceil(CHUNKS_MAX).max(1)
}

/// Runs `work` on each chunk, and returns the results in the order of the chunks.
///
/// `num_elements` estimates the total work. The threads of rayon's pool share large work.
pub(crate) fn map_chunks<C: Send, R: Send>(
    num_elements: usize,
    chunks: Vec<C>,
    work: impl Fn(C) -> R + Sync,
) -> Vec<R> {
    let is_parallel =
        chunks.len() > 1 && num_elements >= PARALLEL_MIN && rayon::current_num_threads() > 1;
    if is_parallel { threads::map(chunks, work) } else { chunks.into_iter().map(work).collect() }
}

/// Replaces each value by `function(value)`.
pub(crate) fn map_in_place(values: &mut [f32], function: impl Fn(f32) -> f32 + Sync) {
    let num = values.len();
    let chunks = values.chunks_mut(chunk_rows(num)).collect();
    map_chunks(num, chunks, |chunk: &mut [f32]| {
        vectorize(
            #[inline(always)]
            || chunk.iter_mut().for_each(|value| *value = function(*value)),
        );
    });
}

/// Replaces each value by the first result of `function(value)`, and returns the second results.
pub(crate) fn map_to_two(
    values: &mut [f32],
    function: impl Fn(f32) -> (f32, f32) + Sync,
) -> Vec<f32> {
    let num = values.len();
    let mut others = NewValues::new(num);
    let size = chunk_rows(num);
    let parts = values.chunks_mut(size).zip(others.chunks(size)).collect();
    map_chunks(num, parts, |(values, others): (&mut [f32], Blank<'_, f32>)| {
        vectorize(
            #[inline(always)]
            || {
                others.map(
                    values,
                    #[inline(always)]
                    |value| {
                        let other;
                        (*value, other) = function(*value);
                        other
                    },
                );
            },
        );
    });
    others.into_vec()
}

/// Returns `function(left, right)` of each pair of values.
pub(crate) fn zip_map(
    left: &[f32],
    right: &[f32],
    function: impl Fn(f32, f32) -> f32 + Sync,
) -> Vec<f32> {
    assert_eq!(left.len(), right.len(), "the arrays have different sizes");
    let mut out = NewValues::new(left.len());
    let size = chunk_rows(left.len());
    let parts = out.chunks(size).zip(left.chunks(size).zip(right.chunks(size)));
    map_chunks(left.len(), parts.collect(), |(out, (left, right))| {
        let (out, left, right): (Blank<'_, f32>, &[f32], &[f32]) = (out, left, right);
        vectorize(
            #[inline(always)]
            || out.zip(left, right, &function),
        );
    });
    out.into_vec()
}

/// Returns the sum of each column of a row-major matrix.
pub(crate) fn column_sums(values: &[f32], columns: usize) -> Vec<f32> {
    if values.is_empty() {
        return vec![0.0; columns];
    }
    let rows = values.len() / columns;
    let parts = values.chunks(chunk_rows(rows) * columns).collect();
    let sums = map_chunks(values.len(), parts, |chunk: &[f32]| {
        let mut sums = vec![0.0; columns];
        vectorize(
            #[inline(always)]
            || chunk.chunks_exact(columns).for_each(|row| add_to(&mut sums, row)),
        );
        sums
    });
    add_partial_sums(sums, columns)
}

/// Adds `values` to `sums`, element by element.
#[inline(always)]
pub(crate) fn add_to(sums: &mut [f32], values: &[f32]) {
    for (sum, value) in sums.iter_mut().zip(values) {
        *sum += value;
    }
}

/// Adds the sums of all chunks, in their order. Zeros without chunks.
pub(crate) fn add_partial_sums(sums: impl IntoIterator<Item = Vec<f32>>, num: usize) -> Vec<f32> {
    let add = |mut total: Vec<f32>, sums: Vec<f32>| {
        add_to(&mut total, &sums);
        total
    };
    sums.into_iter().reduce(add).unwrap_or_else(|| vec![0.0; num])
}

//! Matrix products, whose bits depend neither on the instruction set nor on the threads.
//!
//! The depth is divided into blocks of [`DEPTH`] values. Each value of the output is a sum over the
//! first block, then over the next one, and so on, each in the order of the depth. Only the size of
//! the tiles and the copies of operands differ between processors, and a tile never divides a sum.

use std::cell::RefCell;

use super::operands::{Left, Right};
use super::panels::{Panels, WIDTH_MAX};
use super::{Instructions, Update};
use crate::new_values::{NewValues, fill_rows};
use crate::threads;

/// Effect of a product on the earlier values of its output.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Output {
    Replace,
    Add,
}

/// Threads that compute one product.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Threads {
    /// The calling thread. For products within a parallel loop.
    One,
    /// All threads of the pool if the product is large.
    All,
}

/// Multiplications of a product from which several threads are faster than one.
const PARALLEL_MIN: usize = 128 * 128 * 64;

/// Products that are added before the output changes. A part of the result: another value changes
/// bits.
pub(crate) const DEPTH: usize = 256;

/// Columns of the right matrix that are multiplied at a time. They fit in a second-level cache.
const COLUMNS: usize = 512;

/// Computes `scale * left * right` into the row-major matrix `out`.
///
/// # Shapes
///
/// `left` `[m, k]`, `right` `[k, n]`, `out` `[m, n]`.
///
/// # Panics
///
/// The shapes do not match.
pub(crate) fn multiply<'a>(
    out: &mut [f32],
    output: Output,
    scale: f32,
    left: impl Into<Left<'a>>,
    right: impl Into<Right<'a>>,
    threads: Threads,
) {
    let (left, right) = (left.into(), right.into());
    let product = Product { instructions: Instructions::current(), output, scale, left, right };
    product.write(out, threads);
}

/// Returns `left * right` in row-major order, and adds `bias` to each row if given.
///
/// # Shapes
///
/// `left` `[m, k]`, `right` `[k, n]`, `bias` `[n]`, result `[m, n]`.
///
/// # Panics
///
/// The shapes do not match.
pub(crate) fn product<'a>(
    left: impl Into<Left<'a>>,
    right: impl Into<Right<'a>>,
    bias: Option<&[f32]>,
    threads: Threads,
) -> Vec<f32> {
    let (left, right) = (left.into(), right.into());
    let output = if bias.is_some() { Output::Add } else { Output::Replace };
    let product =
        Product { instructions: Instructions::current(), output, scale: 1.0, left, right };
    product.write_new(bias, threads)
}

/// Same as [`multiply`] on the calling thread. The rows of the output need not be adjacent.
///
/// # Shapes
///
/// `left` `[m, k]`, `right` `[k, n]`, `rows` `[m][n]`.
///
/// # Panics
///
/// The shapes do not match.
pub(crate) fn multiply_rows<'a>(
    rows: Vec<&mut [f32]>,
    output: Output,
    scale: f32,
    left: impl Into<Left<'a>>,
    right: impl Into<Right<'a>>,
) {
    let (left, right) = (left.into(), right.into());
    let product = Product { instructions: Instructions::current(), output, scale, left, right };
    product.write_rows(rows);
}

/// Product of two matrices.
#[derive(Clone, Copy, Debug)]
struct Product<'a> {
    instructions: Instructions,
    output: Output,
    scale: f32,
    left: Left<'a>,
    right: Right<'a>,
}

impl Product<'_> {
    fn write(&self, out: &mut [f32], threads: Threads) {
        let [m, k, n] = self.size();
        assert_eq!(Some(out.len()), m.checked_mul(n), "the output has another size");
        if out.is_empty() {
            return;
        }
        if k == 0 {
            return self.write_without_terms(out);
        }
        let size = self.block_size(threads);
        let rows = out.chunks_exact_mut(n);
        map(blocks(rows, n, size, |row| row.chunks_mut(size[1])), |block| self.write_block(block));
    }

    /// Returns the product plus `bias` in each row.
    fn write_new(&self, bias: Option<&[f32]>, threads: Threads) -> Vec<f32> {
        let [m, _, n] = self.size();
        assert!(bias.is_none_or(|bias| bias.len() == n), "the bias has another size");
        let num = m.checked_mul(n).expect("a matrix that fits in memory");
        let mut new = NewValues::new(num);
        if num > 0 {
            let size = self.block_size(threads);
            let rows = new.chunks(n);
            map(blocks(rows, n, size, |row| row.chunks(size[1])), |Block { first, rows }| {
                let columns = first[1]..n.min(first[1] + size[1]);
                let rows = fill_rows(rows, bias.map(|bias| &bias[columns]));
                self.write_block(Block { first, rows });
            });
        }
        new.into_vec()
    }

    fn block_size(&self, threads: Threads) -> [usize; 2] {
        let [m, k, n] = self.size();
        let is_large = m.saturating_mul(n).saturating_mul(k) > PARALLEL_MIN;
        let num_threads = match threads {
            Threads::All if is_large => rayon::current_num_threads(),
            _ => 1,
        };
        block_size(num_threads, [m, n])
    }

    /// Same as [`write`](Self::write) on one thread.
    fn write_rows(&self, rows: Vec<&mut [f32]>) {
        let [m, k, n] = self.size();
        let fits = rows.len() == m && rows.iter().all(|row| row.len() == n);
        assert!(fits, "the output has another size");
        if m == 0 || n == 0 {
            return;
        }
        if k == 0 {
            return rows.into_iter().for_each(|row| self.write_without_terms(row));
        }
        self.write_block(Block { first: [0, 0], rows });
    }

    /// Returns the numbers of rows, of terms of each sum, and of columns.
    fn size(&self) -> [usize; 3] {
        let ([m, k], [rows, n]) = (self.left.size(), self.right.size());
        assert_eq!(k, rows, "the inner dimensions of a product differ");
        [m, k, n]
    }

    /// Computes values whose sums have no terms.
    fn write_without_terms(&self, out: &mut [f32]) {
        if self.output == Output::Replace {
            out.fill(0.0);
        }
    }

    /// Computes a block of the output.
    fn write_block(&self, Block { first, mut rows }: Block<&mut [f32]>) {
        let [m, k, n] = [rows.len(), self.left.size()[1], rows[0].len()];
        BUFFERS.with_borrow_mut(|buffers| {
            for start in (0..k).step_by(DEPTH) {
                let depth = DEPTH.min(k - start);
                let adds = self.output == Output::Add || start > 0;
                let update = Update { scale: self.scale, adds };
                let left = self.left.part([first[0], start], [m, depth]);
                for column in (0..n).step_by(COLUMNS) {
                    let size = [depth, COLUMNS.min(n - column)];
                    let right = self.right.part([start, first[1] + column], size);
                    let panels = Panels::new(self.instructions, right, m, &mut buffers.right);
                    panels.multiply(left, update, &mut rows, column, &mut buffers.left);
                }
            }
        });
    }
}

/// Part of an output that one thread computes.
struct Block<R> {
    /// First row and column in the output.
    first: [usize; 2],
    rows: Vec<R>,
}

/// Threads compute multiples of this number of rows, so that few tiles are small.
const ROWS_MULTIPLE: usize = 8;

/// Returns the numbers of rows and columns of a block, for about as many blocks as threads. Blocks
/// are nearly square, so that little of the inputs is copied more than once.
fn block_size(num_threads: usize, [m, n]: [usize; 2]) -> [usize; 2] {
    let divisors = (1..=num_threads).filter(|rows| num_threads.is_multiple_of(*rows));
    let sizes = divisors.map(|rows| [m.div_ceil(rows), n.div_ceil(num_threads / rows)]);
    let [rows, columns] = sizes.min_by_key(|size| size[0] + size[1]).unwrap_or([m, n]);
    [rows.next_multiple_of(ROWS_MULTIPLE), columns.next_multiple_of(WIDTH_MAX)]
}

/// Divides an output into blocks. `divide` divides one of its rows.
fn blocks<R, I: Iterator<Item = R>>(
    rows: impl Iterator<Item = R>,
    n: usize,
    size: [usize; 2],
    divide: impl Fn(R) -> I,
) -> Vec<Block<R>> {
    let mut blocks = vec![];
    let mut start = 0;
    for (index, row) in rows.enumerate() {
        if index.is_multiple_of(size[0]) {
            start = blocks.len();
            let block = |column| Block { first: [index, column], rows: vec![] };
            blocks.extend((0..n).step_by(size[1]).map(block));
        }
        let blocks = blocks[start..].iter_mut().zip(divide(row));
        blocks.for_each(|(block, part)| block.rows.push(part));
    }
    blocks
}

/// Runs `work` on each block, on several threads if there are several blocks.
fn map<R: Send>(blocks: Vec<Block<R>>, work: impl Fn(Block<R>) + Sync) {
    if blocks.len() > 1 {
        threads::map(blocks, work);
    } else {
        blocks.into_iter().for_each(work);
    }
}

/// Copies of parts of both matrices, in the order in which tiles read them.
#[derive(Default)]
struct Buffers {
    left: Vec<f32>,
    right: Vec<f32>,
}

thread_local! {
    static BUFFERS: RefCell<Buffers> = RefCell::default();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::{Matrix, ShiftedRows, Windows};

    fn left_at(left: &Left<'_>, row: usize, depth: usize) -> f32 {
        match left {
            Left::Matrix(matrix) => matrix.at(row, depth),
            Left::Windows(Windows { values, tap_offsets, window_offsets }) => {
                values[tap_offsets[row] as usize + window_offsets[depth] as usize]
            }
        }
    }

    fn right_at(right: &Right<'_>, depth: usize, column: usize) -> f32 {
        match right {
            Right::Matrix(matrix) => matrix.at(depth, column),
            Right::Shifted(rows) => rows.values[rows.row_offsets[depth] as usize + column],
        }
    }

    /// Sum of products as documented, without tiles.
    fn expected(product: &Product<'_>, out: &[f32]) -> Vec<f32> {
        let ([_, num], [_, columns]) = (product.left.size(), product.right.size());
        let mut expected = out.to_vec();
        for (index, value) in expected.iter_mut().enumerate() {
            let (row, column) = (index / columns, index % columns);
            for start in (0..num).step_by(DEPTH) {
                let mut sum = 0.0_f32;
                for depth in start..num.min(start + DEPTH) {
                    let left = left_at(&product.left, row, depth);
                    sum = left.mul_add(right_at(&product.right, depth, column), sum);
                }
                let adds = product.output == Output::Add || start > 0;
                *value =
                    if adds { sum.mul_add(product.scale, *value) } else { sum * product.scale };
            }
            if num == 0 && product.output == Output::Replace {
                *value = 0.0;
            }
        }
        expected
    }

    /// Compares all instruction sets and numbers of threads with `expected`, bit by bit.
    fn check<'a>(left: impl Into<Left<'a>>, right: impl Into<Right<'a>>) {
        let (left, right) = (left.into(), right.into());
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        for output in [Output::Replace, Output::Add] {
            let product =
                Product { instructions: Instructions::Baseline, output, scale: 0.7, left, right };
            let before: Vec<f32> = vec![3.0; left.size()[0] * right.size()[1]];
            let expected = bits(&expected(&product, &before));
            for instructions in Instructions::supported() {
                // Rows with gaps between them.
                let (num, width) = (left.size()[0], right.size()[1]);
                let mut wide = vec![3.0; num * (width + 1)];
                let rows = wide.chunks_exact_mut(width + 1).map(|row| &mut row[..width]);
                Product { instructions, ..product }.write_rows(rows.collect());
                let rows = wide.chunks_exact(width + 1);
                assert!(rows.clone().all(|row| row[width] == 3.0), "a gap is written");
                let out: Vec<f32> = rows.flat_map(|row| &row[..width]).copied().collect();
                assert!(bits(&out) == expected, "rows, {instructions:?}, {output:?}");
                for num_threads in [1, 2, 3, 4, 8] {
                    let pool = rayon::ThreadPoolBuilder::new().num_threads(num_threads);
                    let mut out = before.clone();
                    let product = Product { instructions, ..product };
                    let pool = pool.build().unwrap();
                    pool.install(|| product.write(&mut out, Threads::All));
                    let shape = [left.size(), right.size()];
                    let name = format!("{shape:?}, {instructions:?}, {num_threads} threads");
                    assert!(bits(&out) == expected, "{name}, {output:?}");
                    let bias = vec![3.0; right.size()[1]];
                    let bias = (output == Output::Add).then_some(&bias[..]);
                    let out = pool.install(|| product.write_new(bias, Threads::All));
                    assert!(bits(&out) == expected, "new, {name}, {output:?}");
                }
            }
        }
    }

    fn values(num: usize) -> Vec<f32> {
        (0..num).map(|value| ((value * 7919) % 1013) as f32 / 1013.0 - 0.4).collect()
    }

    #[test]
    fn product_supports_strides_and_empty_shapes() {
        let values = values(200);
        let row_major = |rows, columns| Matrix::row_major(&values, rows, columns);
        check(row_major(3, 5), row_major(5, 7));
        check(row_major(5, 3).transposed(), row_major(7, 5).transposed());
        check(Matrix::with_strides(&values, [4, 3], [20, 2]), row_major(3, 2));
        check(row_major(3, 4), Matrix::with_strides(&values, [4, 40], [30, 2]));
        // Neither rows nor columns of the left matrix are contiguous, and several panels read it.
        check(Matrix::with_strides(&values, [9, 3], [20, 2]), row_major(3, 66));
        check(Matrix::with_strides(&values, [4, 3], [0, 1]), row_major(3, 2));
        for [m, k, n] in [[0, 3, 2], [3, 0, 2], [3, 2, 0], [1, 1, 1]] {
            check(row_major(m, k), row_major(k, n));
        }
    }

    /// Rows, depths and columns around the sizes of tiles, depth blocks and column blocks.
    #[test]
    fn bits_depend_on_neither_instructions_nor_threads() {
        let shapes = [
            [1, 600, 100],
            [7, 255, 33],
            [13, 256, 31],
            [16, 257, 9],
            [17, 513, 48],
            [33, 40, 600],
            [70, 300, 65],
            [130, 130, 70],
            // More rows than are read in place, and rows that are a multiple of 4 KiB apart.
            [300, 70, 100],
            [33, 1024, 100],
            [1024, 40, 100],
            [40, 100, 1024],
            [9, 40, 1024],
        ];
        for [m, k, n] in shapes {
            let (left, right) = (values(m * k), values(k * n));
            for is_transposed in [[false, false], [true, false], [false, true], [true, true]] {
                let matrix =
                    |values, [rows, columns]: [usize; 2], is_transposed| match is_transposed {
                        true => Matrix::row_major(values, columns, rows).transposed(),
                        false => Matrix::row_major(values, rows, columns),
                    };
                let left = matrix(&left[..], [m, k], is_transposed[0]);
                check(left, matrix(&right[..], [k, n], is_transposed[1]));
            }
        }
    }

    /// Left operands that are copied for tiles of all sizes.
    #[test]
    fn copies_of_left_operands_do_not_change_bits() {
        let (all_left, right) = (values(300 * 128), values(300 * 70));
        for m in [1, 2, 3, 5, 8, 9, 14, 15, 26, 71] {
            let right = Matrix::row_major(&right, 300, 70);
            // Columns a multiple of 256 bytes apart, then neither rows nor columns contiguous.
            check(Matrix::with_strides(&all_left, [m, 300], [1, 128]), right);
            check(Matrix::with_strides(&all_left, [m, 300], [2, 127]), right);
        }
    }

    /// Shapes as above, with tables of distances that repeat and go back.
    #[test]
    fn windows_are_multiplied_without_a_copy() {
        let table = |num: usize, step: u32| -> Vec<u32> {
            (0..num as u32).map(|index| index / 3 * step + (index * 7) % 5).collect()
        };
        for [m, k, n] in [[1, 1, 1], [9, 300, 40], [17, 257, 9], [33, 90, 700]] {
            let (tap_offsets, window_offsets) = (table(m, 11), table(k, 2));
            let values_of_images = values(2000);
            let windows = Windows {
                values: &values_of_images,
                tap_offsets: &tap_offsets,
                window_offsets: &window_offsets,
            };
            let right = values(k * n);
            check(windows, Matrix::row_major(&right, k, n));
            check(windows, Matrix::row_major(&right, n, k).transposed());

            let row_offsets = table(k, 3);
            let num = *row_offsets.iter().max().unwrap() as usize + n + ShiftedRows::SLACK;
            let values_of_rows = values(num);
            let rows =
                ShiftedRows { values: &values_of_rows, row_offsets: &row_offsets, columns: n };
            check(Matrix::row_major(&values(m * k), m, k), rows);
            check(windows, rows);
        }
    }

    fn multiply_windows(num: usize) {
        let values = vec![1.0; num];
        let windows = Windows { values: &values, tap_offsets: &[0, 5], window_offsets: &[0, 4] };
        let right = Matrix::row_major(&[1.0; 2], 2, 1);
        multiply(&mut [0.0; 2], Output::Replace, 1.0, windows, right, Threads::One);
    }

    #[test]
    fn last_window_may_end_with_the_image() {
        multiply_windows(10);
    }

    #[test]
    #[should_panic(expected = "a tile exceeds its left matrix")]
    fn windows_outside_of_an_image_are_refused() {
        multiply_windows(9);
    }

    fn multiply_shifted(num: usize) {
        let values = vec![1.0; num];
        let rows = ShiftedRows { values: &values, row_offsets: &[0, 3], columns: 8 };
        let left = Matrix::row_major(&[1.0; 2], 1, 2);
        let product = Product {
            instructions: Instructions::Baseline,
            output: Output::Replace,
            scale: 1.0,
            left: left.into(),
            right: rows.into(),
        };
        product.write(&mut [0.0; 8], Threads::One);
    }

    #[test]
    fn last_row_may_end_with_the_values() {
        multiply_shifted(11);
    }

    #[test]
    #[should_panic(expected = "a tile exceeds its right matrix")]
    fn rows_outside_of_the_values_are_refused() {
        multiply_shifted(10);
    }

    #[test]
    #[should_panic(expected = "the output has another size")]
    fn rows_of_another_size_are_refused() {
        let matrix = Matrix::row_major(&[1.0; 4], 2, 2);
        let mut out = [0.0; 3];
        let (first, second) = out.split_at_mut(2);
        multiply_rows(vec![first, second], Output::Replace, 1.0, matrix, matrix);
    }

    #[test]
    fn blocks_cover_the_output_once() {
        for (num_threads, shape) in [(1, [5, 7]), (2, [130, 7]), (8, [128, 512]), (6, [9, 900])] {
            let mut out = vec![0.0; shape[0] * shape[1]];
            let size = block_size(num_threads, shape);
            let rows = out.chunks_exact_mut(shape[1]);
            let blocks = blocks(rows, shape[1], size, |row| row.chunks_mut(size[1]));
            for Block { rows, .. } in blocks {
                rows.into_iter().flatten().for_each(|value| *value += 1.0);
            }
            assert!(out.iter().all(|value| *value == 1.0), "{num_threads} threads, {shape:?}");
        }
    }
}

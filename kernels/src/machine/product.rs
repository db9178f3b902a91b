//! Matrix products, whose bits depend neither on the instruction set nor on the threads.
//!
//! The depth is divided into blocks of [`DEPTH`] values. Each value of the output is a sum over the
//! first block, then over the next one, and so on, each in the order of the depth. Only the size of
//! the tiles differs between processors, and a tile never divides a sum.

use std::cell::RefCell;

use rayon::prelude::*;

use super::matrix::Matrix;
use super::{Instructions, SQUARE, TileInput, Update, transpose, update_tile};

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
const DEPTH: usize = 256;

/// Columns of the right matrix that are copied at a time. The copy fits in a second-level cache.
const COLUMNS: usize = 512;

/// Maximum of [`Instructions::tile_rows`].
const ROWS_MAX: usize = 8;

/// Maximum number of columns of a tile: two vectors.
const WIDTH_MAX: usize = 32;

/// Computes `scale * left * right` into the row-major matrix `out`.
///
/// # Shapes
///
/// `left` `[m, k]`, `right` `[k, n]`, `out` `[m, n]`.
///
/// # Panics
///
/// The shapes do not match.
pub(crate) fn multiply(
    out: &mut [f32],
    output: Output,
    scale: f32,
    left: Matrix<'_>,
    right: Matrix<'_>,
    threads: Threads,
) {
    let product = Product { instructions: Instructions::current(), output, scale, left, right };
    product.write(out, threads);
}

/// Product of two matrices.
#[derive(Clone, Copy, Debug)]
struct Product<'a> {
    instructions: Instructions,
    output: Output,
    scale: f32,
    left: Matrix<'a>,
    right: Matrix<'a>,
}

impl Product<'_> {
    fn write(&self, out: &mut [f32], threads: Threads) {
        let [m, k, n] = [self.left.rows, self.left.columns, self.right.columns];
        assert_eq!(k, self.right.rows, "the inner dimensions of a product differ");
        assert_eq!(Some(out.len()), m.checked_mul(n), "the output has another size");
        if out.is_empty() {
            return;
        }
        if k == 0 {
            if self.output == Output::Replace {
                out.fill(0.0);
            }
            return;
        }
        let is_large = m.saturating_mul(n).saturating_mul(k) > PARALLEL_MIN;
        let num_threads = match threads {
            Threads::All if is_large => rayon::current_num_threads(),
            _ => 1,
        };
        let mut blocks = blocks(out, n, block_size(num_threads, [m, n]));
        if blocks.len() > 1 {
            blocks.par_iter_mut().for_each(|block| self.write_block(block));
        } else {
            blocks.iter_mut().for_each(|block| self.write_block(block));
        }
    }

    /// Computes a block of the output.
    fn write_block(&self, Block { first, rows }: &mut Block<'_>) {
        let [m, k, n] = [rows.len(), self.left.columns, rows[0].len()];
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
                    panels.multiply(left, update, rows, column, &mut buffers.left);
                }
            }
        });
    }
}

/// Part of an output that one thread computes.
struct Block<'a> {
    /// First row and column in the output.
    first: [usize; 2],
    rows: Vec<&'a mut [f32]>,
}

/// Returns the numbers of rows and columns of a block, for about as many blocks as threads. Blocks
/// are nearly square, so that little of the inputs is copied more than once.
fn block_size(num_threads: usize, [m, n]: [usize; 2]) -> [usize; 2] {
    let divisors = (1..=num_threads).filter(|rows| num_threads.is_multiple_of(*rows));
    let sizes = divisors.map(|rows| [m.div_ceil(rows), n.div_ceil(num_threads / rows)]);
    let [rows, columns] = sizes.min_by_key(|size| size[0] + size[1]).unwrap_or([m, n]);
    [rows.next_multiple_of(ROWS_MAX), columns.next_multiple_of(WIDTH_MAX)]
}

fn blocks(out: &mut [f32], n: usize, [rows, columns]: [usize; 2]) -> Vec<Block<'_>> {
    let mut blocks = vec![];
    for (index, out) in out.chunks_mut(rows.saturating_mul(n)).enumerate() {
        let start = blocks.len();
        let block = |column| Block { first: [index * rows, column], rows: vec![] };
        blocks.extend((0..n).step_by(columns).map(block));
        for row in out.chunks_exact_mut(n) {
            let parts = row.chunks_mut(columns);
            blocks[start..].iter_mut().zip(parts).for_each(|(block, part)| block.rows.push(part));
        }
    }
    blocks
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

/// Columns of the right matrix, divided into panels as wide as a tile.
struct Panels<'a> {
    instructions: Instructions,
    right: Matrix<'a>,
    /// Panels one after the other, each row by row and filled up with zeros. Empty if tiles read
    /// all panels but a narrower last one from the matrix.
    copied: &'a [f32],
    reads_matrix: bool,
}

impl<'a> Panels<'a> {
    /// Copies the panels unless few rows would use the copy. `m` is the number of rows.
    fn new(
        instructions: Instructions,
        right: Matrix<'a>,
        m: usize,
        buffer: &'a mut Vec<f32>,
    ) -> Self {
        let width = 2 * instructions.lanes();
        let reads_matrix = right.column_stride == 1 && m <= 2 * instructions.tile_rows()[0];
        let first = if reads_matrix { right.columns / width } else { 0 };
        let num = (first * width..right.columns).step_by(width);
        let num = num.map(|column| right.rows * padded(instructions, right.columns - column));
        let num: usize = num.sum();
        // Whole cache lines: a vector of AVX-512 has 64 bytes.
        let slack = 64 / size_of::<f32>();
        if buffer.len() < num + slack {
            buffer.resize(num + slack, 0.0);
        }
        let start = buffer.as_ptr().align_offset(64).min(slack);
        let copied = &mut buffer[start..start + num];
        let mut rest = &mut *copied;
        for column in (first * width..right.columns).step_by(width) {
            let columns = width.min(right.columns - column);
            let width = padded(instructions, columns);
            let (panel, next) = rest.split_at_mut(right.rows * width);
            copy_panel(right.part([0, column], [right.rows, columns]), width, panel);
            rest = next;
        }
        Self { instructions, right, copied, reads_matrix }
    }

    /// Adds or writes the product with `left` into the columns of `rows` from `first` on.
    fn multiply(
        &self,
        left: Matrix<'_>,
        update: Update,
        rows: &mut [&mut [f32]],
        first: usize,
        buffer: &mut Vec<f32>,
    ) {
        let lanes = self.instructions.lanes();
        let num_panels = self.right.columns.div_ceil(2 * lanes);
        let mut start = 0;
        while start < rows.len() {
            let fits = |num: &&usize| **num <= rows.len() - start;
            let num = *self.instructions.tile_rows().iter().find(fits).expect("a tile of one row");
            let tile_rows = &mut rows[start..start + num];
            let left = left.part([start, 0], [num, left.columns]);
            let (left, left_strides) = left_tile(left, num_panels, buffer);
            start += num;
            for panel in 0..num_panels {
                let column = panel * 2 * lanes;
                let columns = (2 * lanes).min(self.right.columns - column);
                let (right, right_stride) = self.panel(panel);
                let depth = self.right.rows;
                let input = TileInput { left, left_strides, right, right_stride, depth };
                let vectors = columns.div_ceil(lanes);
                if columns == vectors * lanes {
                    let column = first + column;
                    update_tile(self.instructions, vectors, &input, update, tile_rows, column);
                } else {
                    let columns = first + column..first + column + columns;
                    self.update_edge(vectors, &input, update, tile_rows, columns);
                }
            }
        }
    }

    /// Returns the values of a panel, and the distance of its rows.
    fn panel(&self, index: usize) -> (&[f32], usize) {
        let width = 2 * self.instructions.lanes();
        let (column, rest) = (index * width, self.right.columns - index * width);
        if !self.reads_matrix {
            return (&self.copied[column * self.right.rows..], padded(self.instructions, rest));
        }
        if rest >= width {
            return (&self.right.values[column..], self.right.row_stride);
        }
        (self.copied, padded(self.instructions, rest))
    }

    /// Updates the columns of a tile that has fewer columns than its vectors.
    fn update_edge(
        &self,
        vectors: usize,
        input: &TileInput<'_>,
        update: Update,
        rows: &mut [&mut [f32]],
        columns: std::ops::Range<usize>,
    ) {
        let num = columns.len();
        let mut edge = [[0.0; WIDTH_MAX]; ROWS_MAX];
        for (edge, row) in edge.iter_mut().zip(rows.iter()) {
            edge[..num].copy_from_slice(&row[columns.clone()]);
        }
        let mut edges = edge.each_mut().map(|row| &mut row[..]);
        update_tile(self.instructions, vectors, input, update, &mut edges[..rows.len()], 0);
        for (edge, row) in edge.iter().zip(rows) {
            row[columns.clone()].copy_from_slice(&edge[..num]);
        }
    }
}

/// Returns the width of a panel with this many columns or more.
fn padded(instructions: Instructions, columns: usize) -> usize {
    let lanes = instructions.lanes();
    if columns > lanes { 2 * lanes } else { lanes }
}

/// Copies a panel row by row, each filled up to `width` values with zeros.
fn copy_panel(right: Matrix<'_>, width: usize, panel: &mut [f32]) {
    if right.row_stride == 1 && right.column_stride != 1 {
        return copy_columns(right, width, panel);
    }
    for (index, row) in panel.chunks_exact_mut(width).enumerate() {
        let (row, rest) = row.split_at_mut(right.columns);
        rest.fill(0.0);
        if right.column_stride == 1 {
            copy_row(row, &right.values[index * right.row_stride..][..right.columns]);
        } else {
            row.iter_mut().enumerate().for_each(|(column, out)| *out = right.at(index, column));
        }
    }
}

/// Copies short rows, without a call of the C library for those of several vectors.
#[inline(always)]
fn copy_row(out: &mut [f32], values: &[f32]) {
    let ((out, out_rest), (values, rest)) =
        (out.as_chunks_mut::<SQUARE>(), values.as_chunks::<SQUARE>());
    out.iter_mut().zip(values).for_each(|(out, values)| *out = *values);
    out_rest.iter_mut().zip(rest).for_each(|(out, value)| *out = *value);
}

/// Columns from which a transposed square is faster than single values.
const COLUMNS_OF_SQUARE_MIN: usize = 3;

/// Same as [`copy_panel`], for a matrix with contiguous columns.
fn copy_columns(right: Matrix<'_>, width: usize, panel: &mut [f32]) {
    for start in (0..right.rows).step_by(SQUARE) {
        let rows = SQUARE.min(right.rows - start);
        for column in (0..width).step_by(SQUARE) {
            let mut square = [[0.0; SQUARE]; SQUARE];
            let columns = column..right.columns.min(column + SQUARE);
            if columns.len() < COLUMNS_OF_SQUARE_MIN {
                for (row, index) in panel[start * width..].chunks_exact_mut(width).zip(0..rows) {
                    row[column..column + SQUARE].fill(0.0);
                    columns
                        .clone()
                        .for_each(|column| row[column] = right.at(start + index, column));
                }
                continue;
            }
            for (values, column) in square.iter_mut().zip(columns) {
                let source = &right.values[column * right.column_stride + start..];
                match source.first_chunk() {
                    Some(source) if rows == SQUARE => *values = *source,
                    _ => values[..rows].copy_from_slice(&source[..rows]),
                }
            }
            for (index, values) in transpose(&square).iter().enumerate().take(rows) {
                copy_row(&mut panel[(start + index) * width + column..][..SQUARE], values);
            }
        }
    }
}

/// Panels from which a copy of a tile's left matrix is faster.
const LEFT_COPY_MIN: usize = 3;

/// Returns values and strides of the left matrix of a tile. If many panels read it, it is copied
/// first, so that it stays in the first-level cache.
fn left_tile<'a>(
    left: Matrix<'a>,
    num_panels: usize,
    buffer: &'a mut Vec<f32>,
) -> (&'a [f32], [usize; 2]) {
    if num_panels < LEFT_COPY_MIN {
        return (left.values, [left.row_stride, left.column_stride]);
    }
    let num = left.rows * left.columns;
    if buffer.len() < num {
        buffer.resize(num, 0.0);
    }
    let copied = &mut buffer[..num];
    if left.column_stride == 1 {
        for (index, row) in copied.chunks_exact_mut(left.columns).enumerate() {
            row.copy_from_slice(&left.values[index * left.row_stride..][..left.columns]);
        }
        return (copied, [left.columns, 1]);
    }
    for (depth, values) in copied.chunks_exact_mut(left.rows).enumerate() {
        if left.row_stride == 1 {
            copy_row(values, &left.values[depth * left.column_stride..][..left.rows]);
        } else {
            values.iter_mut().enumerate().for_each(|(row, out)| *out = left.at(row, depth));
        }
    }
    (copied, [1, left.rows])
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Instructions; 3] =
        [Instructions::Baseline, Instructions::Avx2, Instructions::Avx512];

    /// Sum of products as documented, without tiles.
    fn expected(product: &Product<'_>, out: &[f32]) -> Vec<f32> {
        let (left, right) = (product.left, product.right);
        let mut expected = out.to_vec();
        for (index, value) in expected.iter_mut().enumerate() {
            let (row, column) = (index / right.columns, index % right.columns);
            for start in (0..left.columns).step_by(DEPTH) {
                let mut sum = 0.0_f32;
                for depth in start..left.columns.min(start + DEPTH) {
                    sum = left.at(row, depth).mul_add(right.at(depth, column), sum);
                }
                let adds = product.output == Output::Add || start > 0;
                *value =
                    if adds { sum.mul_add(product.scale, *value) } else { sum * product.scale };
            }
            if left.columns == 0 && product.output == Output::Replace {
                *value = 0.0;
            }
        }
        expected
    }

    /// Compares all instruction sets and numbers of threads with `expected`, bit by bit.
    fn check(left: Matrix<'_>, right: Matrix<'_>) {
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        for output in [Output::Replace, Output::Add] {
            let product =
                Product { instructions: Instructions::Baseline, output, scale: 0.7, left, right };
            let before: Vec<f32> = vec![3.0; left.rows * right.columns];
            let expected = bits(&expected(&product, &before));
            for instructions in ALL.into_iter().filter(|set| set.is_supported()) {
                for num_threads in [1, 2, 3, 4, 8] {
                    let pool = rayon::ThreadPoolBuilder::new().num_threads(num_threads);
                    let mut out = before.clone();
                    let product = Product { instructions, ..product };
                    let pool = pool.build().unwrap();
                    pool.install(|| product.write(&mut out, Threads::All));
                    let shape = [left.rows, left.columns, right.columns];
                    let name = format!("{shape:?}, {instructions:?}, {num_threads} threads");
                    assert!(bits(&out) == expected, "{name}, {output:?}");
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

    #[test]
    fn blocks_cover_the_output_once() {
        for (num_threads, shape) in [(1, [5, 7]), (2, [130, 7]), (8, [128, 512]), (6, [9, 900])] {
            let mut out = vec![0.0; shape[0] * shape[1]];
            for Block { rows, .. } in blocks(&mut out, shape[1], block_size(num_threads, shape)) {
                rows.into_iter().flatten().for_each(|value| *value += 1.0);
            }
            assert!(out.iter().all(|value| *value == 1.0), "{num_threads} threads, {shape:?}");
        }
    }
}

//! Panels of the columns of a product's right operand.

use std::ops::Range;

use super::left::{LeftTile, Order, left_tile};
use super::matrix::{Matrix, PAGE_BYTES, is_multiple_of_bytes};
use super::operands::{Left, Right, Windows};
use super::{
    Instructions, LANES_MAX, Offsets, SQUARE, Stride, Table, TileInput, Update, transpose,
    update_tile, vectorize,
};
use crate::vector::copy;

/// Maximum of [`Instructions::tile_rows`].
pub(super) const ROWS_MAX: usize = 12;

/// Maximum number of columns of a tile: two vectors.
pub(super) const WIDTH_MAX: usize = 2 * LANES_MAX;

/// Returns the rows that a thread computes, up to which tiles read a right operand with contiguous
/// rows in place. With more rows, a copy is as fast or faster. Decision record 0039 has the
/// measurements.
fn rows_read_max(instructions: Instructions, row_stride: usize) -> usize {
    match instructions {
        Instructions::Avx512 if is_multiple_of_bytes(row_stride, PAGE_BYTES) => 32,
        Instructions::Avx512 => 256,
        // One tile, for which a copy is read only once.
        Instructions::Avx512Intel => 12,
        // Three tiles of AVX2. Not measured on other processors.
        Instructions::Avx2 | Instructions::Baseline => 18,
    }
}

/// Columns of the right operand, divided into panels as wide as a tile.
pub(super) struct Panels<'a> {
    instructions: Instructions,
    right: Right<'a>,
    /// Panels one after the other, each row by row and filled up with zeros. If tiles read a
    /// matrix itself, only the last panel, and only if it is narrower than a tile. Empty for other
    /// operands.
    copied: &'a [f32],
    reads_operand: bool,
}

impl<'a> Panels<'a> {
    /// Copies the panels unless tiles read the operand in place. `m` is the number of rows of the
    /// output.
    pub(super) fn new(
        instructions: Instructions,
        right: Right<'a>,
        m: usize,
        buffer: &'a mut Vec<f32>,
    ) -> Self {
        let Right::Matrix(matrix) = right else {
            return Self { instructions, right, copied: &[], reads_operand: true };
        };
        let width = 2 * instructions.lanes();
        let rows_max = rows_read_max(instructions, matrix.row_stride);
        let has_contiguous_rows = matrix.column_stride == 1;
        let reads_operand = has_contiguous_rows && m <= rows_max;
        let num_full = if has_contiguous_rows { matrix.columns / width } else { 0 };
        let first = if reads_operand { num_full } else { 0 };
        let num = (first * width..matrix.columns).step_by(width);
        let num = num.map(|column| matrix.rows * padded(instructions, matrix.columns - column));
        let num: usize = num.sum();
        // Whole cache lines: a vector of AVX-512 has 64 bytes.
        let slack = 64 / size_of::<f32>();
        if buffer.len() < num + slack {
            buffer.resize(num + slack, 0.0);
        }
        let start = buffer.as_ptr().align_offset(64).min(slack);
        let copied = &mut buffer[start..start + num];
        let (full, mut rest) = copied.split_at_mut((num_full - first) * matrix.rows * width);
        if !full.is_empty() {
            copy_full_panels(instructions, matrix, full);
        }
        for column in (num_full * width..matrix.columns).step_by(width) {
            let columns = width.min(matrix.columns - column);
            let width = padded(instructions, columns);
            let (panel, next) = rest.split_at_mut(matrix.rows * width);
            copy_panel(matrix.part([0, column], [matrix.rows, columns]), width, panel);
            rest = next;
        }
        Self { instructions, right, copied, reads_operand }
    }

    /// Adds or writes the product with `left` into the columns of `rows` from `first` on.
    pub(super) fn multiply(
        &self,
        left: Left<'_>,
        update: Update,
        rows: &mut [&mut [f32]],
        first: usize,
        buffer: &mut Vec<f32>,
    ) {
        let num_panels = self.right.size()[1].div_ceil(2 * self.instructions.lanes());
        let depth = left.size()[1];
        let mut start = 0;
        while start < rows.len() {
            let num = next_tile(self.instructions, left, rows.len() - start);
            let tile_rows = &mut rows[start..start + num];
            match left.part([start, 0], [num, depth]) {
                Left::Matrix(left) => {
                    match left_tile(self.instructions, left, num_panels, buffer) {
                        Order::Any(left) => self.update_rows(&left, update, tile_rows, first),
                        Order::Depths(left) => self.update_rows(&left, update, tile_rows, first),
                    }
                }
                Left::Windows(Windows { values, tap_offsets, window_offsets }) => {
                    let (rows, depths) = (Table(tap_offsets), Table(window_offsets));
                    let left = LeftTile { values, rows, depths };
                    self.update_rows(&left, update, tile_rows, first);
                }
            }
            start += num;
        }
    }

    /// Updates the rows of one tile in the columns of all panels.
    fn update_rows<R: Offsets, D: Offsets>(
        &self,
        left: &LeftTile<'_, R, D>,
        update: Update,
        rows: &mut [&mut [f32]],
        first: usize,
    ) {
        let lanes = self.instructions.lanes();
        let [depth, num_columns] = self.right.size();
        for column in (0..num_columns).step_by(2 * lanes) {
            let columns = (2 * lanes).min(num_columns - column);
            let columns = first + column..first + column + columns;
            match self.right {
                Right::Shifted(right) => {
                    let (right, depths) = (&right.values[column..], Table(right.row_offsets));
                    let input = left.with_right(right, depths, depth);
                    self.update_columns(&input, update, rows, columns);
                }
                Right::Matrix(right) => {
                    let (right, stride) = self.panel(&right, column);
                    let input = left.with_right(right, Stride(stride), depth);
                    self.update_columns(&input, update, rows, columns);
                }
            }
        }
    }

    /// Returns the values of the panel that starts at a column, and the distance of its rows.
    fn panel(&self, right: &Matrix<'a>, column: usize) -> (&[f32], usize) {
        let (width, rest) = (2 * self.instructions.lanes(), right.columns - column);
        if !self.reads_operand {
            return (&self.copied[column * right.rows..], padded(self.instructions, rest));
        }
        if rest >= width {
            return (&right.values[column..], right.row_stride);
        }
        (self.copied, padded(self.instructions, rest))
    }

    /// Updates the columns of one tile.
    fn update_columns<R: Offsets, D: Offsets, P: Offsets>(
        &self,
        input: &TileInput<'_, R, D, P>,
        update: Update,
        rows: &mut [&mut [f32]],
        columns: Range<usize>,
    ) {
        let lanes = self.instructions.lanes();
        let vectors = columns.len().div_ceil(lanes);
        if columns.len() == vectors * lanes {
            update_tile(self.instructions, vectors, input, update, rows, columns.start);
        } else {
            self.update_edge(vectors, input, update, rows, columns);
        }
    }

    /// Updates the columns of a tile that has fewer columns than its vectors.
    fn update_edge<R: Offsets, D: Offsets, P: Offsets>(
        &self,
        vectors: usize,
        input: &TileInput<'_, R, D, P>,
        update: Update,
        rows: &mut [&mut [f32]],
        columns: Range<usize>,
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

/// Returns the number of rows of the next tile, if `num_rows` remain.
fn next_tile(instructions: Instructions, left: Left<'_>, num_rows: usize) -> usize {
    let instructions = match (left, instructions) {
        // Windows of 3 by 3 have as many taps as a tile of 9 rows, or a multiple.
        (Left::Windows(_), Instructions::Avx512 | Instructions::Avx512Intel)
            if num_rows.is_multiple_of(9) =>
        {
            return 9;
        }
        // The offsets of 12 taps exceed the registers for addresses.
        (Left::Windows(_), Instructions::Avx512Intel) => Instructions::Avx512,
        (_, instructions) => instructions,
    };
    let fits = |rows: &&usize| **rows <= num_rows;
    let rows = *instructions.tile_rows().iter().find(fits).expect("a tile of one row");
    // Small tiles have too few sums to hide the latency of a multiplication. In these cases, two
    // equal tiles replace a large one and a small one.
    match (rows, num_rows) {
        (6, 8 | 9) => 4,
        (12, 16) => 8,
        _ => rows,
    }
}

/// Returns the width of a panel with this many columns or more.
fn padded(instructions: Instructions, columns: usize) -> usize {
    let lanes = instructions.lanes();
    if columns > lanes { 2 * lanes } else { lanes }
}

/// Copies panels of a matrix with contiguous rows, all as wide as a tile, from the first column on.
fn copy_full_panels(instructions: Instructions, right: Matrix<'_>, panels: &mut [f32]) {
    let num = instructions.panels_side_by_side();
    match 2 * instructions.lanes() {
        16 => copy_panels_of_width::<16>(num, right, panels),
        WIDTH_MAX => copy_panels_of_width::<WIDTH_MAX>(num, right, panels),
        width => unreachable!("no tile has {width} columns"),
    }
}

fn copy_panels_of_width<const WIDTH: usize>(
    num_side_by_side: usize,
    right: Matrix<'_>,
    panels: &mut [f32],
) {
    let num_rows = right.rows;
    let group_len = num_side_by_side * num_rows * WIDTH;
    vectorize(
        #[inline(always)]
        || {
            let first = (0..).step_by(num_side_by_side * WIDTH);
            for (first, panels) in first.zip(panels.chunks_mut(group_len)) {
                let (copied_rows, _) = panels.as_chunks_mut::<WIDTH>();
                let columns = copied_rows.len() / num_rows * WIDTH;
                for row in 0..num_rows {
                    let values = &right.values[row * right.row_stride + first..][..columns];
                    for (panel, values) in values.as_chunks::<WIDTH>().0.iter().enumerate() {
                        copied_rows[panel * num_rows + row] = *values;
                    }
                }
            }
        },
    );
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
            copy(row, &right.values[index * right.row_stride..][..right.columns]);
        } else {
            row.iter_mut().enumerate().for_each(|(column, out)| *out = right.at(index, column));
        }
    }
}

/// Columns from which a transposed square is faster than single values.
const COLUMNS_OF_SQUARE_MIN: usize = 3;

/// Same as [`copy_panel`], for a matrix with contiguous columns.
fn copy_columns(right: Matrix<'_>, width: usize, panel: &mut [f32]) {
    vectorize(
        #[inline(always)]
        || {
            for (start, rows) in (0..).step_by(SQUARE).zip(panel.chunks_mut(SQUARE * width)) {
                for column in (0..width).step_by(SQUARE) {
                    copy_square(right, [start, column], width, rows);
                }
            }
        },
    );
}

/// Copies the part of a matrix from `[start, column]` on into up to eight rows of a panel.
#[inline(always)]
fn copy_square(right: Matrix<'_>, [start, first]: [usize; 2], width: usize, rows: &mut [f32]) {
    let num = rows.len() / width;
    let columns = first..right.columns.min(first + SQUARE);
    if [num, columns.len()] == [SQUARE, SQUARE] {
        let square = &right.values[first * right.column_stride + start..];
        return transpose(square, right.column_stride, &mut rows[first..], width);
    }
    let rows = rows.chunks_exact_mut(width).map(|row| &mut row[first..first + SQUARE]);
    if columns.len() < COLUMNS_OF_SQUARE_MIN {
        for (index, row) in rows.enumerate() {
            row.fill(0.0);
            columns.clone().zip(row).for_each(|(column, out)| {
                *out = right.at(start + index, column);
            });
        }
        return;
    }
    let mut square = [[0.0; SQUARE]; SQUARE];
    for (values, column) in square.iter_mut().zip(columns) {
        let source = &right.values[column * right.column_stride + start..];
        match source.first_chunk() {
            Some(source) if num == SQUARE => *values = *source,
            _ => values[..num].copy_from_slice(&source[..num]),
        }
    }
    let mut transposed = [[0.0; SQUARE]; SQUARE];
    transpose(square.as_flattened(), SQUARE, transposed.as_flattened_mut(), SQUARE);
    for (row, values) in rows.zip(&transposed) {
        copy(row, values);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiles(instructions: Instructions, left: Left<'_>, mut num_rows: usize) -> Vec<usize> {
        let mut all = vec![];
        while num_rows > 0 {
            all.push(next_tile(instructions, left, num_rows));
            num_rows -= all.last().unwrap();
        }
        all
    }

    #[test]
    fn equal_tiles_replace_a_large_and_a_small_one() {
        let matrix = Left::Matrix(Matrix::row_major(&[], 0, 0));
        let tiles = |instructions, num_rows| tiles(instructions, matrix, num_rows);
        assert_eq!(tiles(Instructions::Avx2, 2), [2]);
        assert_eq!(tiles(Instructions::Avx2, 8), [4, 4]);
        assert_eq!(tiles(Instructions::Avx2, 9), [4, 4, 1]);
        assert_eq!(tiles(Instructions::Avx2, 12), [6, 6]);
        assert_eq!(tiles(Instructions::Avx2, 14), [6, 4, 4]);
        assert_eq!(tiles(Instructions::Avx2, 16), [6, 6, 4]);
        assert_eq!(tiles(Instructions::Avx512, 9), [8, 1]);
        assert_eq!(tiles(Instructions::Avx512Intel, 16), [8, 8]);
        assert_eq!(tiles(Instructions::Avx512Intel, 28), [12, 8, 8]);
        assert_eq!(tiles(Instructions::Avx512Intel, 32), [12, 12, 8]);
    }

    #[test]
    fn tiles_of_windows_have_up_to_nine_rows() {
        let windows = Windows { values: &[], tap_offsets: &[], window_offsets: &[] };
        for instructions in [Instructions::Avx512, Instructions::Avx512Intel] {
            let tiles = |num_rows| tiles(instructions, Left::Windows(windows), num_rows);
            assert_eq!(tiles(9), [9]);
            assert_eq!(tiles(25), [8, 8, 9]);
            assert_eq!(tiles(27), [9, 9, 9]);
            assert_eq!(tiles(32), [8, 8, 8, 8]);
        }
        assert_eq!(tiles(Instructions::Avx2, Left::Windows(windows), 9), [4, 4, 1]);
    }
}

//! Left operands of tiles, copied if a first-level cache would not hold them otherwise.

use super::matrix::{Matrix, PAGE_BYTES, is_multiple_of_bytes};
use super::{Adjacent, Instructions, Offsets, Stride, TileInput, vectorize};

/// Panels from which a copy of a tile's left matrix is faster.
const LEFT_COPY_MIN: usize = 3;

/// A first-level cache of 32 KiB, in which 8 addresses may share a set, holds at most 128 values
/// that are a multiple of this distance apart. A left operand has up to 256 depths.
const FEW_SETS_BYTES: usize = 256;

/// Left operand of a tile.
#[derive(Clone, Copy)]
pub(super) struct LeftTile<'a, R, D> {
    pub(super) values: &'a [f32],
    pub(super) rows: R,
    pub(super) depths: D,
}

impl<'a, R: Offsets, D: Offsets> LeftTile<'a, R, D> {
    pub(super) fn with_right<P: Offsets>(
        &self,
        right: &'a [f32],
        right_depths: P,
        depth: usize,
    ) -> TileInput<'a, R, D, P> {
        let (left, left_rows, left_depths) = (self.values, self.rows, self.depths);
        TileInput { left, left_rows, left_depths, right, right_depths, depth }
    }
}

/// Left operand of a tile, by its order in memory.
pub(super) enum Order<'a> {
    /// In place, or copied row by row.
    Any(LeftTile<'a, Stride, Stride>),
    /// Copied, with the rows of a depth next to each other.
    Depths(LeftTile<'a, Adjacent, Stride>),
}

/// Returns the left operand of a tile. If many panels read it, it is copied into `buffer` first, so
/// that it stays in the first-level cache. With contiguous rows or columns, it stays there without
/// a copy, unless their distance puts them into few sets of the cache. On processors of Intel, a
/// copy of contiguous columns is faster at any distance.
pub(super) fn left_tile<'a>(
    instructions: Instructions,
    left: Matrix<'a>,
    num_panels: usize,
    buffer: &'a mut Vec<f32>,
) -> Order<'a> {
    let Matrix { values, row_stride, column_stride, .. } = left;
    let needs_copy = match ([row_stride, column_stride], instructions) {
        ([1, _], Instructions::Avx512Intel) => true,
        ([1, stride], Instructions::Avx2 | Instructions::Baseline) => {
            is_multiple_of_bytes(stride, FEW_SETS_BYTES)
        }
        ([1, stride] | [stride, 1], _) => is_multiple_of_bytes(stride, PAGE_BYTES),
        _ => true,
    };
    if num_panels < LEFT_COPY_MIN || !needs_copy {
        let (rows, depths) = (Stride(row_stride), Stride(column_stride));
        return Order::Any(LeftTile { values, rows, depths });
    }
    let num = left.rows * left.columns;
    if buffer.len() < num {
        buffer.resize(num, 0.0);
    }
    let copied = &mut buffer[..num];
    if column_stride == 1 {
        for (index, row) in copied.chunks_exact_mut(left.columns).enumerate() {
            row.copy_from_slice(&values[index * row_stride..][..left.columns]);
        }
        let (rows, depths) = (Stride(left.columns), Stride(1));
        return Order::Any(LeftTile { values: copied, rows, depths });
    }
    match (row_stride, left.rows) {
        (1, 12) => copy_depths::<12>(left, copied),
        (1, 8) => copy_depths::<8>(left, copied),
        (1, 6) => copy_depths::<6>(left, copied),
        (1, 4) => copy_depths::<4>(left, copied),
        (_, num_rows) => {
            for (depth, values) in copied.chunks_exact_mut(num_rows).enumerate() {
                values.iter_mut().enumerate().for_each(|(row, out)| *out = left.at(row, depth));
            }
        }
    }
    Order::Depths(LeftTile { values: copied, rows: Adjacent, depths: Stride(left.rows) })
}

/// Copies the rows of each depth from a matrix with contiguous columns.
fn copy_depths<const ROWS: usize>(left: Matrix<'_>, copied: &mut [f32]) {
    vectorize(
        #[inline(always)]
        || {
            for (depth, out) in copied.as_chunks_mut::<ROWS>().0.iter_mut().enumerate() {
                out.copy_from_slice(&left.values[depth * left.column_stride..][..ROWS]);
            }
        },
    );
}

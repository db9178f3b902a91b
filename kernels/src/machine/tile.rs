//! Inputs of tiles, and a tile for all processors.

use super::Offsets;

/// Inputs of a tile, the part of a product that stays in registers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TileInput<'a, R, D, P> {
    /// Value of row `r` and depth `p` at index `left_rows.at(r) + left_depths.at(p)`.
    pub(crate) left: &'a [f32],
    pub(crate) left_rows: R,
    pub(crate) left_depths: D,
    /// Value of depth `p` and column `c` at index `right_depths.at(p) + c`.
    pub(crate) right: &'a [f32],
    pub(crate) right_depths: P,
    /// Number of products in each sum. At least 1.
    pub(crate) depth: usize,
}

impl<R: Offsets, D: Offsets, P: Offsets> TileInput<'_, R, D, P> {
    /// Checks that a tile of this size reads only inside of the slices.
    ///
    /// # Panics
    ///
    /// It would read outside of a slice, or the depth is 0.
    #[inline(always)]
    pub(super) fn check(&self, rows: usize, columns: usize) {
        assert!(self.depth > 0, "a tile has at least one product");
        let end = self.left_rows.largest(rows).zip(self.left_depths.largest(self.depth));
        let end = end.and_then(|(row, depth)| row.checked_add(depth));
        assert!(end.is_some_and(|end| end < self.left.len()), "a tile exceeds its left matrix");
        let end = self.right_depths.largest(self.depth);
        let end = end.and_then(|end| end.checked_add(columns));
        assert!(end.is_some_and(|end| end <= self.right.len()), "a tile exceeds its right matrix");
    }
}

/// Change of an output by a sum of products.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Update {
    /// Factor of the sum.
    pub(crate) scale: f32,
    /// Adds to the earlier value instead of replacing it.
    pub(crate) adds: bool,
}

/// Same as the tiles of vectors, for all processors.
pub(super) fn tile_baseline<const N: usize, const V: usize, R: Offsets, D: Offsets, P: Offsets>(
    input: &TileInput<'_, R, D, P>,
    update: Update,
    rows: &mut [&mut [f32]],
    column: usize,
) {
    const LANES: usize = 8;
    input.check(N, V * LANES);
    let mut sums = [[[0.0_f32; LANES]; V]; N];
    for depth in 0..input.depth {
        let vectors = &input.right[input.right_depths.at(depth)..][..V * LANES];
        let vectors = vectors.as_chunks::<LANES>().0;
        for (row, sums) in sums.iter_mut().enumerate() {
            let value = input.left[input.left_rows.at(row) + input.left_depths.at(depth)];
            for (sums, vector) in sums.iter_mut().zip(vectors) {
                for (sum, right) in sums.iter_mut().zip(vector) {
                    *sum = value.mul_add(*right, *sum);
                }
            }
        }
    }
    for (sums, row) in sums.iter().zip(rows) {
        for (sum, value) in sums.as_flattened().iter().zip(&mut row[column..column + V * LANES]) {
            *value =
                if update.adds { sum.mul_add(update.scale, *value) } else { sum * update.scale };
        }
    }
}

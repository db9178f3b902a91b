//! Code for the instruction sets of a processor. All unsafe code for them is in this file; decision
//! records 0037, 0039 and 0045 explain why it is sound.

#![expect(unsafe_code, reason = "vector instructions need a check at run time, and pointers")]

mod left;
mod matrix;
mod operands;
mod panels;
mod product;

use std::sync::OnceLock;

pub(crate) use matrix::Matrix;
pub(crate) use operands::{ShiftedRows, Windows};
pub(crate) use product::{Output, Threads, multiply, multiply_rows, product};

use crate::switch::{Switch, switch};

/// Instruction set of a matrix product. All of them give equal bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Instructions {
    /// All processors that the crate is compiled for.
    Baseline,
    /// AVX2 and FMA: vectors of 8 values.
    Avx2,
    /// AVX-512: vectors of 16 values.
    Avx512,
}

impl Instructions {
    /// Returns the fastest supported set that `STOKER_KERNELS` permits.
    pub(crate) fn current() -> Self {
        static CURRENT: OnceLock<Instructions> = OnceLock::new();
        *CURRENT.get_or_init(|| match switch() {
            Switch::On if Self::Avx512.is_supported() => Self::Avx512,
            _ if Self::Avx2.is_supported() => Self::Avx2,
            _ => Self::Baseline,
        })
    }

    /// Returns `true` if the processor has the instructions.
    pub(crate) fn is_supported(self) -> bool {
        match self {
            Self::Baseline => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => is_x86_feature_detected!("avx512f"),
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 => false,
        }
    }

    /// Returns the number of values in a vector.
    pub(crate) fn lanes(self) -> usize {
        match self {
            Self::Baseline | Self::Avx2 => 8,
            Self::Avx512 => 16,
        }
    }

    /// Returns the numbers of rows that a tile may have, from the largest. The last is 1.
    pub(crate) fn tile_rows(self) -> &'static [usize] {
        match self {
            Self::Baseline => &[4, 2, 1],
            Self::Avx2 => &[6, 4, 2, 1],
            Self::Avx512 => &[8, 4, 2, 1],
        }
    }
}

/// Maximum of [`Instructions::lanes`].
pub(crate) const LANES_MAX: usize = 16;

/// Returns `true` if the processor computes `a * b + c` in one instruction, as all products do.
/// Otherwise burn's operators are faster.
pub(crate) fn has_fma() -> bool {
    !cfg!(target_arch = "x86_64") || Instructions::Avx2.is_supported()
}

/// Offsets of the rows or depths of an operand from its first value.
///
/// # Safety
///
/// `at(index)` is at most `largest(num)` for each index below `num`, whenever they are called.
pub(crate) unsafe trait Offsets: Copy {
    fn at(self, index: usize) -> usize;

    /// Returns the largest of the first `num` offsets. `None` if it exceeds `usize`, or if there
    /// are fewer or none.
    fn largest(self, num: usize) -> Option<usize>;
}

/// Equal distances from each row or depth to the next.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stride(pub(crate) usize);

// SAFETY: multiples of a stride increase, and that of the last index does not overflow.
unsafe impl Offsets for Stride {
    #[inline(always)]
    fn at(self, index: usize) -> usize {
        index * self.0
    }

    #[inline(always)]
    fn largest(self, num: usize) -> Option<usize> {
        num.checked_sub(1)?.checked_mul(self.0)
    }
}

/// Any offsets.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Table<'a>(pub(crate) &'a [u32]);

// SAFETY: the slice does not change while it is borrowed, and `largest` is its maximum.
unsafe impl Offsets for Table<'_> {
    #[inline(always)]
    fn at(self, index: usize) -> usize {
        self.0[index] as usize
    }

    #[inline(always)]
    fn largest(self, num: usize) -> Option<usize> {
        // Copied values, because the compiler uses no vectors for references.
        self.0.get(..num)?.iter().copied().max().map(|largest| largest as usize)
    }
}

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
    fn check(&self, rows: usize, columns: usize) {
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

/// Updates `rows[..][column..]` by a tile with `vectors` vectors per row, 1 or 2.
///
/// Each sum starts at 0 and adds its products in the order of the depth, rounding once per
/// product. So its bits depend neither on the instructions nor on the size of the tile.
///
/// # Panics
///
/// The number of rows or vectors is not supported, a slice is too short, or the processor lacks the
/// instructions.
#[allow(unused_unsafe, reason = "the baseline needs no special instructions")]
pub(crate) fn update_tile<R: Offsets, D: Offsets, P: Offsets>(
    instructions: Instructions,
    vectors: usize,
    input: &TileInput<'_, R, D, P>,
    update: Update,
    rows: &mut [&mut [f32]],
    column: usize,
) {
    assert!(instructions.is_supported(), "the processor lacks {instructions:?}");
    macro_rules! call {
        ($tile:ident, $($num:literal)*) => {
            match (rows.len(), vectors) {
                $(
                    // SAFETY: the processor has the instructions, by the assertion above.
                    ($num, 1) => unsafe { $tile::<$num, 1, _, _, _>(input, update, rows, column) },
                    // SAFETY: see above.
                    ($num, 2) => unsafe { $tile::<$num, 2, _, _, _>(input, update, rows, column) },
                )*
                (rows, _) => panic!("no tile of {rows} rows and {vectors} vectors"),
            }
        };
    }
    match instructions {
        #[cfg(target_arch = "x86_64")]
        Instructions::Avx512 => call!(tile_avx512, 8 4 2 1),
        #[cfg(target_arch = "x86_64")]
        Instructions::Avx2 => call!(tile_avx2, 6 4 2 1),
        _ => call!(tile_baseline, 4 2 1),
    }
}

/// Defines a tile of `N` rows and `V` vectors per row.
#[cfg(target_arch = "x86_64")]
macro_rules! tile {
    (
        $name:ident, $features:literal, $lanes:literal,
        $splat:ident, $load:ident, $store:ident, $multiply:ident, $multiply_add:ident
    ) => {
        #[target_feature(enable = $features)]
        fn $name<const N: usize, const V: usize, R: Offsets, D: Offsets, P: Offsets>(
            input: &TileInput<'_, R, D, P>,
            update: Update,
            rows: &mut [&mut [f32]],
            column: usize,
        ) {
            use std::arch::x86_64::{$load, $multiply, $multiply_add, $splat, $store};

            input.check(N, V * $lanes);
            let (left, right) = (input.left.as_ptr(), input.right.as_ptr());
            let starts: [usize; N] = std::array::from_fn(|row| input.left_rows.at(row));
            let mut sums = [[$splat(0.0); V]; N];
            for depth in 0..input.depth {
                let start = input.right_depths.at(depth);
                let mut vectors = [$splat(0.0); V];
                for (vector, value) in vectors.iter_mut().enumerate() {
                    // SAFETY: `check` has asserted that V vectors at each depth are inside.
                    *value = unsafe { $load(right.add(start + vector * $lanes)) };
                }
                let depth = input.left_depths.at(depth);
                for (sums, start) in sums.iter_mut().zip(&starts) {
                    // SAFETY: `check` has asserted that N rows at each depth are inside.
                    let value = $splat(unsafe { *left.add(start + depth) });
                    for (sum, vector) in sums.iter_mut().zip(&vectors) {
                        *sum = $multiply_add(value, *vector, *sum);
                    }
                }
            }
            let scale = $splat(update.scale);
            for (sums, row) in sums.iter().zip(rows) {
                let values = row[column..column + V * $lanes].chunks_exact_mut($lanes);
                for (sum, values) in sums.iter().zip(values) {
                    let value = if update.adds {
                        // SAFETY: a chunk has as many values as a vector.
                        $multiply_add(*sum, scale, unsafe { $load(values.as_ptr()) })
                    } else {
                        $multiply(*sum, scale)
                    };
                    // SAFETY: as above, and the chunk is borrowed mutably.
                    unsafe { $store(values.as_mut_ptr(), value) };
                }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
tile!(
    tile_avx2,
    "avx2,fma",
    8,
    _mm256_set1_ps,
    _mm256_loadu_ps,
    _mm256_storeu_ps,
    _mm256_mul_ps,
    _mm256_fmadd_ps
);

#[cfg(target_arch = "x86_64")]
tile!(
    tile_avx512,
    "avx512f",
    16,
    _mm512_set1_ps,
    _mm512_loadu_ps,
    _mm512_storeu_ps,
    _mm512_mul_ps,
    _mm512_fmadd_ps
);

/// Same as the tiles above, for all processors.
fn tile_baseline<const N: usize, const V: usize, R: Offsets, D: Offsets, P: Offsets>(
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

/// Number of rows and columns that [`transpose`] swaps.
pub(crate) const SQUARE: usize = 8;

/// Returns the columns of a square as rows.
#[inline]
pub(crate) fn transpose(square: &[[f32; SQUARE]; SQUARE]) -> [[f32; SQUARE]; SQUARE] {
    #[cfg(target_arch = "x86_64")]
    if Instructions::Avx2.is_supported() {
        // SAFETY: the processor has the feature that the function is compiled for.
        return unsafe { transpose_avx2(square) };
    }
    std::array::from_fn(|row| std::array::from_fn(|column| square[column][row]))
}

/// Swaps single values, then pairs, then halves of the rows.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
#[inline]
fn transpose_avx2(square: &[[f32; SQUARE]; SQUARE]) -> [[f32; SQUARE]; SQUARE] {
    use std::arch::x86_64::{
        _mm256_loadu_ps, _mm256_permute2f128_ps, _mm256_setzero_ps, _mm256_shuffle_ps,
        _mm256_storeu_ps, _mm256_unpackhi_ps, _mm256_unpacklo_ps,
    };

    let mut rows = [_mm256_setzero_ps(); SQUARE];
    for (row, values) in rows.iter_mut().zip(square) {
        // SAFETY: an array of 8 values is as long as a vector.
        *row = unsafe { _mm256_loadu_ps(values.as_ptr()) };
    }
    let mut pairs = rows;
    for row in [0, 2, 4, 6] {
        pairs[row] = _mm256_unpacklo_ps(rows[row], rows[row + 1]);
        pairs[row + 1] = _mm256_unpackhi_ps(rows[row], rows[row + 1]);
    }
    let mut halves = pairs;
    for row in [0, 4] {
        halves[row] = _mm256_shuffle_ps::<0b01_00_01_00>(pairs[row], pairs[row + 2]);
        halves[row + 1] = _mm256_shuffle_ps::<0b11_10_11_10>(pairs[row], pairs[row + 2]);
        halves[row + 2] = _mm256_shuffle_ps::<0b01_00_01_00>(pairs[row + 1], pairs[row + 3]);
        halves[row + 3] = _mm256_shuffle_ps::<0b11_10_11_10>(pairs[row + 1], pairs[row + 3]);
    }
    let mut out = [[0.0; SQUARE]; SQUARE];
    for row in 0..SQUARE / 2 {
        let low = _mm256_permute2f128_ps::<0x20>(halves[row], halves[row + 4]);
        let high = _mm256_permute2f128_ps::<0x31>(halves[row], halves[row + 4]);
        // SAFETY: as above, and both arrays are borrowed mutably.
        unsafe {
            _mm256_storeu_ps(out[row].as_mut_ptr(), low);
            _mm256_storeu_ps(out[row + 4].as_mut_ptr(), high);
        }
    }
    out
}

/// Runs `work`, compiled for AVX2 and FMA if the processor has both.
///
/// The compiler neither reorders nor contracts floating-point operations, so the results have the
/// same bits as without AVX2. Functions that `work` calls must be `#[inline(always)]` to profit.
#[inline]
pub(crate) fn vectorize<R>(work: impl FnOnce() -> R) -> R {
    #[cfg(target_arch = "x86_64")]
    if Instructions::Avx2.is_supported() {
        // SAFETY: the processor has the two features that the function is compiled for.
        return unsafe { with_avx2(work) };
    }
    work()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn with_avx2<R>(work: impl FnOnce() -> R) -> R {
    work()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn largest_distance_covers_all_rows() {
        assert_eq!(Stride(3).largest(4), Some(9));
        assert_eq!(Stride(usize::MAX).largest(3), None);
        assert_eq!(Stride(3).largest(0), None);
        assert_eq!(Table(&[4, 9, 2]).largest(3), Some(9));
        assert_eq!(Table(&[4, 9, 2]).largest(1), Some(4));
        assert_eq!(Table(&[4]).largest(2), None, "row 1 has no distance");
        assert_eq!(Table(&[]).largest(0), None);
    }
}

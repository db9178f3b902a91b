//! Code for the instruction sets of a processor. All unsafe code for them is in this file; decision
//! records 0037, 0039 and 0045 explain why it is sound.

#![expect(unsafe_code, reason = "vector instructions need a check at run time, and pointers")]

mod instructions;
mod left;
mod matrix;
mod operands;
mod panels;
mod product;
mod tile;

pub(crate) use instructions::{Instructions, LANES_MAX, has_fma};
pub(crate) use matrix::Matrix;
pub(crate) use operands::{ShiftedRows, Windows};
pub(crate) use product::{DEPTH, Output, Threads, multiply, multiply_rows, product};
use tile::{TileInput, Update, tile_baseline};

/// Offsets of the rows or depths of an operand from its first value.
///
/// # Safety
///
/// `at(index)` is at most `largest(num)` for each index below `num`, whenever they are called.
pub(crate) unsafe trait Offsets: Copy {
    /// `true` if all offsets are multiples of a distance that is known only at run time. Affects
    /// only speed.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "for tiles of vectors"))]
    const IS_STRIDE: bool = false;

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
    const IS_STRIDE: bool = true;

    #[inline(always)]
    fn at(self, index: usize) -> usize {
        index * self.0
    }

    #[inline(always)]
    fn largest(self, num: usize) -> Option<usize> {
        num.checked_sub(1)?.checked_mul(self.0)
    }
}

/// Rows or depths that are next to each other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Adjacent;

// SAFETY: indices increase.
unsafe impl Offsets for Adjacent {
    #[inline(always)]
    fn at(self, index: usize) -> usize {
        index
    }

    #[inline(always)]
    fn largest(self, num: usize) -> Option<usize> {
        num.checked_sub(1)
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
        Instructions::Avx512 | Instructions::Avx512Intel => call!(tile_avx512, 12 9 8 4 2 1),
        #[cfg(target_arch = "x86_64")]
        Instructions::Avx2 => call!(tile_avx2, 6 4 2 1),
        _ => call!(tile_baseline, 4 2 1),
    }
}

/// Number of rows whose addresses are computed from one pointer.
#[cfg(target_arch = "x86_64")]
const QUAD: usize = 4;

/// Returns the same pointer, and hides from the compiler how it was computed.
///
/// Otherwise, the compiler adds up the addresses row by row. On processors of Intel, these
/// additions use the units that multiply vectors.
#[cfg(target_arch = "x86_64")]
#[expect(clippy::pointers_in_nomem_asm_block, reason = "the code uses no memory")]
#[inline(always)]
fn opaque(mut pointer: *const f32) -> *const f32 {
    // SAFETY: the assembler code is only a comment, and the pointer stays the same.
    unsafe {
        std::arch::asm!(
            "/* {0} */", inout(reg) pointer, options(pure, nomem, nostack, preserves_flags)
        );
    }
    pointer
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
                for (sums, starts) in sums.chunks_mut(QUAD).zip(starts.chunks(QUAD)) {
                    // SAFETY: `check` has asserted that N rows at each depth are inside.
                    let mut row = unsafe { left.add(starts[0] + depth) };
                    if R::IS_STRIDE {
                        row = opaque(row);
                    }
                    for (sums, start) in sums.iter_mut().zip(starts) {
                        let distance = *start as isize - starts[0] as isize;
                        // SAFETY: as above. A distance in a slice fits in `isize`, and is negative
                        // if a table goes back.
                        let value = $splat(unsafe { *row.offset(distance) });
                        for (sum, vector) in sums.iter_mut().zip(&vectors) {
                            *sum = $multiply_add(value, *vector, *sum);
                        }
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

/// Number of rows and columns that [`transpose`] swaps.
pub(crate) const SQUARE: usize = 8;

/// Copies the columns of a square as rows. Rows start `stride` values apart in `square`, and
/// `out_stride` values apart in `out`.
///
/// # Panics
///
/// A slice is too short, or rows in `out` overlap.
#[inline]
pub(crate) fn transpose(square: &[f32], stride: usize, out: &mut [f32], out_stride: usize) {
    let fits = |num: usize, stride: usize| {
        let end = stride.checked_mul(SQUARE - 1).and_then(|start| start.checked_add(SQUARE));
        end.is_some_and(|end| end <= num)
    };
    assert!(fits(square.len(), stride), "a square exceeds its source");
    assert!(out_stride >= SQUARE && fits(out.len(), out_stride), "a square exceeds its output");
    #[cfg(target_arch = "x86_64")]
    if Instructions::Avx2.is_supported() {
        // SAFETY: the processor has the feature that the function is compiled for, and the slices
        // have eight values from the start of each of eight rows on, by the assertions above.
        return unsafe { transpose_avx2(square.as_ptr(), stride, out.as_mut_ptr(), out_stride) };
    }
    for row in 0..SQUARE {
        for column in 0..SQUARE {
            out[column * out_stride + row] = square[row * stride + column];
        }
    }
}

/// Same as [`transpose`]. Loads the halves of rows, so only single values and pairs are swapped.
///
/// # Safety
///
/// `square` can be read, and `out` written, for eight values from `row` times its stride on, for
/// each row below eight.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn transpose_avx2(square: *const f32, stride: usize, out: *mut f32, out_stride: usize) {
    use std::arch::x86_64::{
        _mm_loadu_ps, _mm256_castps128_ps256, _mm256_insertf128_ps, _mm256_shuffle_ps,
        _mm256_storeu_ps, _mm256_unpackhi_ps, _mm256_unpacklo_ps,
    };

    const HALF: usize = SQUARE / 2;
    for column in [0, HALF] {
        let halves: [_; HALF] = std::array::from_fn(|row| {
            // SAFETY: half of a row, which the caller guarantees.
            let half = |row| unsafe { _mm_loadu_ps(square.add(row * stride + column)) };
            _mm256_insertf128_ps::<1>(_mm256_castps128_ps256(half(row)), half(row + HALF))
        });
        let [low, low_next] = [0, 2].map(|row| _mm256_unpacklo_ps(halves[row], halves[row + 1]));
        let [high, high_next] = [0, 2].map(|row| _mm256_unpackhi_ps(halves[row], halves[row + 1]));
        let columns = [
            _mm256_shuffle_ps::<0b01_00_01_00>(low, low_next),
            _mm256_shuffle_ps::<0b11_10_11_10>(low, low_next),
            _mm256_shuffle_ps::<0b01_00_01_00>(high, high_next),
            _mm256_shuffle_ps::<0b11_10_11_10>(high, high_next),
        ];
        for (index, values) in columns.into_iter().enumerate() {
            // SAFETY: a row, which the caller guarantees.
            unsafe { _mm256_storeu_ps(out.add((column + index) * out_stride), values) };
        }
    }
}

/// Runs `work`, compiled for AVX-512, or for AVX2 and FMA, if the processor has them.
///
/// The compiler neither reorders nor contracts floating-point operations, so the results have the
/// same bits with all instructions. Functions that `work` calls must be `#[inline(always)]` to
/// profit.
///
/// # Panics
///
/// `STOKER_KERNELS` is invalid.
#[inline]
pub(crate) fn vectorize<R>(work: impl FnOnce() -> R) -> R {
    vectorize_for(Instructions::current(), work)
}

/// Same as [`vectorize`], for a supported set of instructions.
#[inline]
pub(crate) fn vectorize_for<R>(instructions: Instructions, work: impl FnOnce() -> R) -> R {
    assert!(instructions.is_supported(), "the processor lacks {instructions:?}");
    #[cfg(target_arch = "x86_64")]
    match instructions {
        // SAFETY: the processor has all features that the function is compiled for, by the
        // assertion above.
        Instructions::Avx512 | Instructions::Avx512Intel => return unsafe { with_avx512(work) },
        // SAFETY: see above.
        Instructions::Avx2 => return unsafe { with_avx2(work) },
        Instructions::Baseline => {}
    }
    work()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn with_avx512<R>(work: impl FnOnce() -> R) -> R {
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

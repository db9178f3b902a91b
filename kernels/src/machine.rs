//! Calls that Rust cannot check: matrix products of the crate `gemm`, and loops compiled for AVX2.
//! Decision record 0037 explains why they are sound.

#![expect(unsafe_code, reason = "gemm takes pointers, and AVX2 needs a check at run time")]

/// Matrix that is read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix<'a> {
    values: &'a [f32],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a> Matrix<'a> {
    /// Takes the first `rows * columns` values, row by row.
    pub(crate) fn row_major(values: &'a [f32], rows: usize, columns: usize) -> Self {
        Self::with_strides(values, [rows, columns], [columns, 1])
    }

    /// Takes `values[row * strides[0] + column * strides[1]]` as elements.
    ///
    /// # Panics
    ///
    /// An element is outside of `values`.
    pub(crate) fn with_strides(
        values: &'a [f32],
        [rows, columns]: [usize; 2],
        [row_stride, column_stride]: [usize; 2],
    ) -> Self {
        let num = num_spanned([rows, columns], [row_stride, column_stride]);
        assert!(num <= values.len(), "a matrix spans {num} of {} values", values.len());
        Self { values, rows, columns, row_stride, column_stride }
    }

    pub(crate) fn transposed(self) -> Self {
        Self {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }
}

/// Returns the number of values from the first to the last element.
fn num_spanned(shape: [usize; 2], strides: [usize; 2]) -> usize {
    if shape.contains(&0) {
        return 0;
    }
    let last = |axis: usize| (shape[axis] - 1).checked_mul(strides[axis]);
    let span =
        last(0).zip(last(1)).and_then(|(row, column)| row.checked_add(column)?.checked_add(1));
    span.expect("the last index of a matrix fits in usize")
}

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
    let (m, k, n) = (left.rows, left.columns, right.columns);
    assert_eq!(k, right.rows, "the inner dimensions of a product differ");
    assert_eq!(Some(out.len()), m.checked_mul(n), "the output has another size");
    if out.is_empty() {
        return;
    }
    if k == 0 {
        if output == Output::Replace {
            out.fill(0.0);
        }
        return;
    }
    let is_parallel = threads == Threads::All
        && m.saturating_mul(n).saturating_mul(k) > PARALLEL_MIN
        && rayon::current_num_threads() > 1;
    let parallelism =
        if is_parallel { gemm::Parallelism::Rayon(0) } else { gemm::Parallelism::None };
    // Strides fit: slices have at most isize::MAX bytes. A stride that no element uses (of an
    // axis of size 1) may be larger, and its wrapped value is not used either.
    let stride = |stride: usize| stride as isize;
    // SAFETY: gemm reads left[i, p] and right[p, j] and writes out[i, j] for i < m, p < k, j < n.
    // All elements of `left` and `right` are within their slices, which `with_strides` has
    // asserted, and `transposed` keeps the set of elements. The m * n elements of `out` with
    // strides n and 1 are exactly its slice, by the assertion above. The borrows last for the
    // call, and `out` is borrowed mutably, so it overlaps neither input.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.as_mut_ptr(),
            1,
            stride(n),
            output == Output::Add,
            left.values.as_ptr(),
            stride(left.column_stride),
            stride(left.row_stride),
            right.values.as_ptr(),
            stride(right.column_stride),
            stride(right.row_stride),
            1.0,
            scale,
            false,
            false,
            false,
            parallelism,
        );
    }
}

/// Runs `work`, compiled for AVX2 and FMA if the processor has both.
///
/// The compiler neither reorders nor contracts floating-point operations, so the results have the
/// same bits as without AVX2. Functions that `work` calls must be `#[inline(always)]` to profit.
#[inline]
pub(crate) fn vectorize<R>(work: impl FnOnce() -> R) -> R {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
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

    /// Sum of products in f64, element by element.
    fn expected(left: Matrix<'_>, right: Matrix<'_>) -> Vec<f64> {
        let at = |matrix: Matrix<'_>, row: usize, column: usize| {
            f64::from(matrix.values[row * matrix.row_stride + column * matrix.column_stride])
        };
        let mut out = vec![];
        for row in 0..left.rows {
            for column in 0..right.columns {
                let terms = (0..left.columns).map(|k| at(left, row, k) * at(right, k, column));
                out.push(terms.sum());
            }
        }
        out
    }

    fn check(left: Matrix<'_>, right: Matrix<'_>) {
        let expected = expected(left, right);
        for (output, start) in [(Output::Replace, 0.0), (Output::Add, 3.0)] {
            let mut out = vec![3.0; expected.len()];
            multiply(&mut out, output, 0.5, left, right, Threads::All);
            for (value, expected) in out.iter().zip(&expected) {
                let error = (f64::from(*value) - (start + 0.5 * expected)).abs();
                assert!(error < 1e-4, "{value} instead of {start} + half of {expected}");
            }
        }
    }

    #[test]
    fn product_supports_strides_and_empty_shapes() {
        let values: Vec<f32> = (0..200).map(|value| (value * 37 % 23) as f32 / 23.0).collect();
        let row_major = |rows, columns| Matrix::row_major(&values, rows, columns);
        check(row_major(3, 5), row_major(5, 7));
        check(row_major(5, 3).transposed(), row_major(7, 5).transposed());
        check(Matrix::with_strides(&values, [4, 3], [20, 2]), row_major(3, 2));
        check(Matrix::with_strides(&values, [4, 3], [0, 1]), row_major(3, 2));
        for [m, k, n] in [[0, 3, 2], [3, 0, 2], [3, 2, 0], [1, 1, 1]] {
            check(row_major(m, k), row_major(k, n));
        }
    }

    #[test]
    #[should_panic(expected = "a matrix spans 7 of 6 values")]
    fn elements_outside_of_values_are_refused() {
        let _ = Matrix::with_strides(&[0.0; 6], [2, 3], [4, 1]);
    }
}

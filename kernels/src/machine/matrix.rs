//! Matrices with strides.

/// Matrix that is read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix<'a> {
    pub(super) values: &'a [f32],
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) row_stride: usize,
    pub(super) column_stride: usize,
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

    /// Returns the part of this size, at least one value, whose first element is at `first`.
    pub(super) fn part(self, first: [usize; 2], size: [usize; 2]) -> Self {
        let start = first[0] * self.row_stride + first[1] * self.column_stride;
        Self::with_strides(&self.values[start..], size, [self.row_stride, self.column_stride])
    }

    /// Returns the value at an index inside of the matrix.
    #[inline(always)]
    pub(super) fn at(&self, row: usize, column: usize) -> f32 {
        self.values[row * self.row_stride + column * self.column_stride]
    }
}

/// In most processors, addresses with this distance share a set of the first-level cache.
pub(super) const PAGE_BYTES: usize = 4096;

pub(super) fn is_multiple_of_bytes(stride: usize, bytes: usize) -> bool {
    (stride * size_of::<f32>()).is_multiple_of(bytes)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "a matrix spans 7 of 6 values")]
    fn elements_outside_of_values_are_refused() {
        let _ = Matrix::with_strides(&[0.0; 6], [2, 3], [4, 1]);
    }
}

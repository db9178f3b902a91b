//! Operands of products: matrices, and windows of padded images without a copy of each window.

use super::LANES_MAX;
use super::matrix::Matrix;

/// Left operand of a product.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Left<'a> {
    Matrix(Matrix<'a>),
    Windows(Windows<'a>),
}

impl<'a> From<Matrix<'a>> for Left<'a> {
    fn from(matrix: Matrix<'a>) -> Self {
        Self::Matrix(matrix)
    }
}

impl<'a> From<Windows<'a>> for Left<'a> {
    fn from(windows: Windows<'a>) -> Self {
        Self::Windows(windows)
    }
}

impl Left<'_> {
    /// Returns the numbers of rows and columns.
    pub(super) fn size(&self) -> [usize; 2] {
        match self {
            Self::Matrix(matrix) => [matrix.rows, matrix.columns],
            Self::Windows(windows) => [windows.tap_offsets.len(), windows.window_offsets.len()],
        }
    }

    pub(super) fn part(self, first: [usize; 2], size: [usize; 2]) -> Self {
        match self {
            Self::Matrix(matrix) => Self::Matrix(matrix.part(first, size)),
            Self::Windows(windows) => Self::Windows(windows.part(first, size)),
        }
    }
}

/// Right operand of a product.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Right<'a> {
    Matrix(Matrix<'a>),
    Shifted(ShiftedRows<'a>),
}

impl<'a> From<Matrix<'a>> for Right<'a> {
    fn from(matrix: Matrix<'a>) -> Self {
        Self::Matrix(matrix)
    }
}

impl<'a> From<ShiftedRows<'a>> for Right<'a> {
    fn from(rows: ShiftedRows<'a>) -> Self {
        Self::Shifted(rows)
    }
}

impl Right<'_> {
    /// Returns the numbers of rows and columns.
    pub(super) fn size(&self) -> [usize; 2] {
        match self {
            Self::Matrix(matrix) => [matrix.rows, matrix.columns],
            Self::Shifted(rows) => [rows.row_offsets.len(), rows.columns],
        }
    }

    pub(super) fn part(self, first: [usize; 2], size: [usize; 2]) -> Self {
        match self {
            Self::Matrix(matrix) => Self::Matrix(matrix.part(first, size)),
            Self::Shifted(rows) => Self::Shifted(rows.part(first, size)),
        }
    }
}

/// Windows `[tap, window]` of padded images. Their element is
/// `values[tap_offsets[tap] + window_offsets[window]]`.
///
/// A product panics if that is outside of `values`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Windows<'a> {
    pub(crate) values: &'a [f32],
    pub(crate) tap_offsets: &'a [u32],
    pub(crate) window_offsets: &'a [u32],
}

impl<'a> Windows<'a> {
    /// Returns the part of this size whose first element is at `first`.
    pub(super) fn part(self, first: [usize; 2], size: [usize; 2]) -> Self {
        let tap_offsets = &self.tap_offsets[first[0]..][..size[0]];
        let window_offsets = &self.window_offsets[first[1]..][..size[1]];
        Self { tap_offsets, window_offsets, ..self }
    }
}

/// Rows `values[row_offsets[row]..][..columns]`, which may overlap.
///
/// A product may read up to [`SLACK`](Self::SLACK) values after a row, without using them. It
/// panics if they are outside of `values`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ShiftedRows<'a> {
    pub(crate) values: &'a [f32],
    pub(crate) row_offsets: &'a [u32],
    pub(crate) columns: usize,
}

impl<'a> ShiftedRows<'a> {
    pub(crate) const SLACK: usize = LANES_MAX - 1;

    /// Returns the part of this size whose first element is at `first`.
    pub(super) fn part(self, first: [usize; 2], size: [usize; 2]) -> Self {
        let row_offsets = &self.row_offsets[first[0]..][..size[0]];
        Self { values: &self.values[first[1]..], row_offsets, columns: size[1] }
    }
}

//! Operands of products: matrices, and windows of padded images without a copy of each window.

use super::matrix::Matrix;
use super::panels::WIDTH_MAX;

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
            Self::Windows(windows) => [windows.positions.len(), windows.windows.len()],
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
            Self::Shifted(rows) => [rows.starts.len(), rows.columns],
        }
    }

    pub(super) fn part(self, first: [usize; 2], size: [usize; 2]) -> Self {
        match self {
            Self::Matrix(matrix) => Self::Matrix(matrix.part(first, size)),
            Self::Shifted(rows) => Self::Shifted(rows.part(first, size)),
        }
    }
}

/// Matrix `[position, window]` with element `values[positions[position] + windows[window]]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Windows<'a> {
    pub(crate) values: &'a [f32],
    pub(crate) positions: &'a [u32],
    pub(crate) windows: &'a [u32],
}

impl<'a> Windows<'a> {
    /// Returns the part of this size whose first element is at `first`.
    pub(super) fn part(self, first: [usize; 2], size: [usize; 2]) -> Self {
        let positions = &self.positions[first[0]..][..size[0]];
        Self { positions, windows: &self.windows[first[1]..][..size[1]], ..self }
    }
}

/// Matrix whose row `r` is `values[starts[r]..]`. Rows may overlap.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ShiftedRows<'a> {
    pub(crate) values: &'a [f32],
    pub(crate) starts: &'a [u32],
    pub(crate) columns: usize,
}

impl<'a> ShiftedRows<'a> {
    /// Values after the last row that a product may read, though it does not use them.
    pub(crate) const SLACK: usize = WIDTH_MAX;

    /// Returns the part of this size whose first element is at `first`.
    pub(super) fn part(self, first: [usize; 2], size: [usize; 2]) -> Self {
        let starts = &self.starts[first[0]..][..size[0]];
        Self { values: &self.values[first[1]..], starts, columns: size[1] }
    }
}

//! Positions of the values that a tile reads.

/// Distances of the rows or depths of a matrix from its first value.
///
/// Tiles read through pointers at these distances, so `largest` must be right.
pub(crate) trait Offsets: Copy {
    /// Returns the distance of a row or depth that `largest` includes.
    fn at(self, index: usize) -> usize;

    /// Returns the largest of the first `num` distances. `None` without any, or if it exceeds
    /// `usize`.
    fn largest(self, num: usize) -> Option<usize>;
}

/// Equal distances from each row or depth to the next.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stride(pub(crate) usize);

impl Offsets for Stride {
    #[inline(always)]
    fn at(self, index: usize) -> usize {
        index * self.0
    }

    #[inline(always)]
    fn largest(self, num: usize) -> Option<usize> {
        num.checked_sub(1)?.checked_mul(self.0)
    }
}

/// Any distances.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Table<'a>(pub(crate) &'a [u32]);

impl Offsets for Table<'_> {
    #[inline(always)]
    fn at(self, index: usize) -> usize {
        self.0[index] as usize
    }

    #[inline(always)]
    fn largest(self, num: usize) -> Option<usize> {
        self.0.get(..num)?.iter().max().map(|largest| *largest as usize)
    }
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

//! Positions of sliding windows along one axis of an image.

use std::ops::Range;

/// One axis of a convolution or a pool.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Axis {
    /// Size of the input without padding.
    pub(crate) len: usize,
    /// Number of windows.
    pub(crate) num_windows: usize,
    /// Positions of a window that have a weight.
    pub(crate) kernel: usize,
    pub(crate) stride: usize,
    pub(crate) dilation: usize,
    padding_begin: usize,
    padding_end: usize,
}

impl Axis {
    /// Returns `None` if the padded input is smaller than a window, or a size is 0.
    pub(crate) fn new(
        len: usize,
        kernel: usize,
        stride: usize,
        dilation: usize,
        padding: (usize, usize),
    ) -> Option<Self> {
        if len == 0 || kernel == 0 || stride == 0 || dilation == 0 {
            return None;
        }
        let window = dilation * (kernel - 1) + 1;
        let rest = (len + padding.0 + padding.1).checked_sub(window)?;
        let num_windows = rest / stride + 1;
        let (padding_begin, padding_end) = padding;
        Some(Self { len, num_windows, kernel, stride, dilation, padding_begin, padding_end })
    }

    /// Returns the windows whose position `k` is inside the input, and the input index of the
    /// first of them. Each further window is `stride` further in the input.
    pub(crate) fn inside(&self, k: usize) -> (Range<usize>, usize) {
        let offset = k * self.dilation;
        // Window w reads index w * stride + offset - padding_begin.
        let first = self.padding_begin.saturating_sub(offset).div_ceil(self.stride);
        let end = (self.len + self.padding_begin).saturating_sub(offset).div_ceil(self.stride);
        let end = end.min(self.num_windows);
        if first >= end {
            return (0..0, 0);
        }
        (first..end, first * self.stride + offset - self.padding_begin)
    }

    /// Returns the input index at position `k` of a window, or `None` in the padding.
    pub(crate) fn index(&self, window: usize, k: usize) -> Option<usize> {
        let index = (window * self.stride + k * self.dilation).checked_sub(self.padding_begin)?;
        (index < self.len).then_some(index)
    }

    /// Returns the distance from the first to the last position of a window.
    pub(crate) fn reach(&self) -> usize {
        self.dilation * (self.kernel - 1)
    }

    /// Returns the padding at both ends. `None` if a window could contain only padding.
    pub(crate) fn paddings(&self) -> Option<(usize, usize)> {
        let reach = self.reach();
        let fits = self.padding_begin <= reach && self.padding_end <= reach;
        fits.then_some((self.padding_begin, self.padding_end))
    }

    /// Returns `true` if windows have two values, do not overlap, and do not reach the padding.
    pub(crate) fn is_pairs(&self) -> bool {
        self.kernel == 2
            && self.stride == 2
            && self.dilation == 1
            && self.padding_begin == 0
            && 2 * self.num_windows <= self.len
    }

    /// Returns `true` if each window is one position, and the windows are the input.
    pub(crate) fn is_identity(&self) -> bool {
        self.kernel == 1
            && self.stride == 1
            && self.num_windows == self.len
            && self.padding_begin == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_agree_with_single_indices() {
        for len in 1..7 {
            for [kernel, stride, dilation, begin, end] in [
                [1, 1, 1, 0, 0],
                [3, 1, 1, 1, 1],
                [2, 2, 1, 0, 1],
                [3, 2, 2, 2, 1],
                [2, 3, 3, 1, 1],
            ] {
                let Some(axis) = Axis::new(len, kernel, stride, dilation, (begin, end)) else {
                    continue;
                };
                for k in 0..kernel {
                    let (range, start) = axis.inside(k);
                    for window in 0..axis.num_windows {
                        let expected = range
                            .contains(&window)
                            .then(|| start + (window - range.start) * stride);
                        assert_eq!(axis.index(window, k), expected, "{axis:?}, {window}, {k}");
                    }
                }
            }
        }
    }

    #[test]
    fn window_larger_than_input_is_refused() {
        assert!(Axis::new(3, 4, 1, 1, (0, 0)).is_none());
        assert_eq!(Axis::new(3, 4, 1, 1, (0, 1)).unwrap().num_windows, 1);
        assert!(Axis::new(0, 1, 1, 1, (1, 1)).is_none());
    }
}

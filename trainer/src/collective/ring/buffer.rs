//! Values of one all-reduce as one sequence of bytes: a head in double precision, then slices that
//! need not be adjacent in memory, such as the gradients of single parameters.

use std::io::{IoSlice, IoSliceMut};
use std::ops::Range;

use super::Summable;

/// Maximum number of slices per system call, below the limit of all systems.
const SLICES_MAX: usize = 64;

/// Values to all-reduce in place.
pub(in crate::collective) struct Buffer<'a, T> {
    head: &'a mut [f64],
    /// None of these is empty.
    segments: Vec<&'a mut [T]>,
    /// First byte of the head and of each segment, then the end of the last.
    bounds: Vec<usize>,
}

impl<'a, T: Summable> Buffer<'a, T> {
    pub(in crate::collective) fn new(
        head: &'a mut [f64],
        segments: impl Iterator<Item = &'a mut [T]>,
    ) -> Self {
        let segments: Vec<_> = segments.filter(|segment| !segment.is_empty()).collect();
        let mut bounds = vec![0, size_of_val(head)];
        let mut end = size_of_val(head);
        for segment in &segments {
            end += size_of_val(&**segment);
            bounds.push(end);
        }
        Self { head, segments, bounds }
    }

    pub(super) fn num_bytes(&self) -> usize {
        self.bounds.last().copied().unwrap_or_default()
    }

    pub(super) fn head_bytes(&self) -> usize {
        size_of_val(self.head)
    }

    /// Returns the size without the head.
    pub(in crate::collective) fn segment_bytes(&self) -> usize {
        self.num_bytes() - self.head_bytes()
    }

    /// Returns the pieces of a range: the index of the part, 0 for the head, and the bytes in it.
    fn pieces(&self, range: Range<usize>) -> Vec<(usize, Range<usize>)> {
        let first = self.bounds.partition_point(|bound| *bound <= range.start).saturating_sub(1);
        let parts = self.bounds[first..].windows(2).zip(first..);
        let piece = |(bounds, part): (&[usize], usize)| {
            let (start, end) = (range.start.max(bounds[0]), range.end.min(bounds[1]));
            (part, start - bounds[0]..end - bounds[0])
        };
        parts.take_while(|(bounds, _)| bounds[0] < range.end).map(piece).collect()
    }

    /// Returns the pieces of a range, at most [`SLICES_MAX`].
    pub(super) fn slices(&self, range: Range<usize>) -> Vec<IoSlice<'_>> {
        let slice = |(part, bytes): (usize, Range<usize>)| match part.checked_sub(1) {
            None => IoSlice::new(&bytemuck::cast_slice::<f64, u8>(self.head)[bytes]),
            Some(segment) => {
                IoSlice::new(&bytemuck::cast_slice::<T, u8>(self.segments[segment])[bytes])
            }
        };
        self.pieces(range).into_iter().take(SLICES_MAX).map(slice).collect()
    }

    /// Same as [`slices`](Self::slices), for reads.
    pub(super) fn slices_mut(&mut self, range: Range<usize>) -> Vec<IoSliceMut<'_>> {
        let mut pieces = self.pieces(range).into_iter().take(SLICES_MAX).peekable();
        let mut slices = vec![];
        if let Some((_, bytes)) = pieces.next_if(|(part, _)| *part == 0) {
            let head = bytemuck::cast_slice_mut::<f64, u8>(self.head);
            slices.push(IoSliceMut::new(&mut head[bytes]));
        }
        let first = pieces.peek().map_or(0, |(part, _)| part - 1);
        for ((_, bytes), segment) in pieces.zip(&mut self.segments[first..]) {
            let segment = bytemuck::cast_slice_mut::<T, u8>(segment);
            slices.push(IoSliceMut::new(&mut segment[bytes]));
        }
        slices
    }

    /// Returns the end of the elements in `range` that have the size of its first, and this size.
    pub(super) fn same_elements(&self, range: &Range<usize>) -> (usize, usize) {
        match range.start < self.head_bytes() {
            true => (range.end.min(self.head_bytes()), size_of::<f64>()),
            false => (range.end, size_of::<T>()),
        }
    }

    /// Adds elements to those from byte `start` on.
    pub(super) fn add(&mut self, start: usize, mut remote: &[u8]) {
        for (part, bytes) in self.pieces(start..start + remote.len()) {
            let (piece, rest) = remote.split_at(bytes.len());
            remote = rest;
            match part.checked_sub(1) {
                None => {
                    let at = bytes.start / size_of::<f64>()..bytes.end / size_of::<f64>();
                    f64::add_each(&mut self.head[at], bytemuck::cast_slice(piece));
                }
                Some(segment) => {
                    let at = bytes.start / size_of::<T>()..bytes.end / size_of::<T>();
                    T::add_each(&mut self.segments[segment][at], bytemuck::cast_slice(piece));
                }
            }
        }
    }

    /// Copies all bytes.
    pub(in crate::collective) fn to_bytes(&self) -> Vec<u8> {
        let mut all = Vec::with_capacity(self.num_bytes());
        all.extend_from_slice(bytemuck::cast_slice(self.head));
        for segment in &self.segments {
            all.extend_from_slice(bytemuck::cast_slice::<T, u8>(segment));
        }
        all
    }

    /// Replaces all values by those in `bytes`, or adds them. Returns `false` if the length
    /// differs.
    pub(in crate::collective) fn take_in(&mut self, bytes: &[u8], adds: bool) -> bool {
        if bytes.len() != self.num_bytes() {
            return false;
        }
        let (head, mut rest) = bytes.split_at(self.head_bytes());
        take_in(self.head, head, adds);
        for segment in &mut self.segments {
            let (piece, others) = rest.split_at(size_of_val(&**segment));
            take_in::<T>(segment, piece, adds);
            rest = others;
        }
        true
    }
}

/// Replaces values by those in `bytes`, which may be unaligned, or adds them.
fn take_in<T: Summable>(values: &mut [T], bytes: &[u8], adds: bool) {
    let numbers = bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned::<T>);
    for (value, number) in values.iter_mut().zip(numbers) {
        if adds { *value += number } else { *value = number }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_cover_each_byte_once() {
        let (mut head, mut one, mut two) = ([0.5, 1.5], [1.0_f32, 2.0, 3.0], [4.0_f32]);
        let (mut none, mut three) = ([], [5.0_f32, 6.0]);
        let segments = [&mut one[..], &mut none, &mut two, &mut three];
        let mut buffer = Buffer::new(&mut head, segments.into_iter());
        let all = buffer.to_bytes();
        assert_eq!((all.len(), buffer.num_bytes()), (40, 40));
        for start in 0..40 {
            for end in start + 1..=40 {
                let sent: Vec<u8> =
                    buffer.slices(start..end).iter().flat_map(|slice| slice.to_vec()).collect();
                assert_eq!(sent, all[start..end], "{start}..{end}");
                let received: Vec<u8> =
                    buffer.slices_mut(start..end).iter().flat_map(|slice| slice.to_vec()).collect();
                assert_eq!(received, all[start..end], "{start}..{end}");
            }
        }
    }
}

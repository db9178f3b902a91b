//! Memory of new tensors, which the threads that compute the values initialize.
//!
//! `vec![0.0; num]` writes all zeros on one thread, while the others wait, and the values have left
//! the caches before they are computed. Decision record 0061 has figures.

#![expect(unsafe_code, reason = "a vector takes values that threads initialized in parts")]

use std::mem::MaybeUninit;
use std::slice::ChunksMut;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Values that become a vector as soon as all of them are initialized.
pub(crate) struct NewValues<T> {
    /// Empty, with room for `num` values.
    values: Vec<T>,
    num: usize,
    /// Number of values that are initialized.
    num_ready: AtomicUsize,
}

impl<T: Copy> NewValues<T> {
    pub(crate) fn new(num: usize) -> Self {
        Self { values: Vec::with_capacity(num), num, num_ready: AtomicUsize::new(0) }
    }

    /// Returns all values as not initialized, also those that were.
    pub(crate) fn blank(&mut self) -> Blank<'_, T> {
        *self.num_ready.get_mut() = 0;
        let values = &mut self.values.spare_capacity_mut()[..self.num];
        Blank { values, num_ready: &self.num_ready }
    }

    /// Same as [`blank`](Self::blank), in chunks of `size` values. The last one may be shorter.
    pub(crate) fn chunks(&mut self, size: usize) -> impl Iterator<Item = Blank<'_, T>> {
        self.blank().chunks(size)
    }

    /// # Panics
    ///
    /// A value is not initialized.
    pub(crate) fn into_vec(mut self) -> Vec<T> {
        let num_ready = *self.num_ready.get_mut();
        assert_eq!(num_ready, self.num, "only some of the new values were initialized");
        // SAFETY: `new` allocated room for `num` values. `blank` sets the counter to 0 and borrows
        // this, so all parts of `num` values come from its latest call and no thread uses one any
        // longer. Each part is disjoint from the others, and adds its length to the counter at most
        // once, after it is initialized. So all values are.
        unsafe { self.values.set_len(self.num) };
        self.values
    }
}

/// Part of new values, not initialized.
pub(crate) struct Blank<'a, T> {
    values: &'a mut [MaybeUninit<T>],
    num_ready: &'a AtomicUsize,
}

/// An empty part of no values.
impl<T> Default for Blank<'_, T> {
    fn default() -> Self {
        static NUM_READY: AtomicUsize = AtomicUsize::new(0);
        Self { values: &mut [], num_ready: &NUM_READY }
    }
}

impl<'a, T: Copy> Blank<'a, T> {
    /// Divides the part into chunks of `size` values. The last one may be shorter.
    pub(crate) fn chunks(self, size: usize) -> impl Iterator<Item = Self> {
        let Self { values, num_ready } = self;
        values.chunks_mut(size).map(move |values| Self { values, num_ready })
    }

    /// Divides the part into chunks of `size` values, and sets those of each chunk to `value` right
    /// before it is returned. The last one may be shorter.
    pub(crate) fn filled(self, size: usize, value: T) -> Filled<'a, T> {
        let Self { values, num_ready } = self;
        Filled { chunks: values.chunks_mut(size), value, num: 0, num_ready }
    }

    /// Sets all values to `value`, and returns them.
    pub(crate) fn fill(self, value: T) -> &'a mut [T] {
        let values = fill(self.values, value);
        self.num_ready.fetch_add(values.len(), Ordering::Relaxed);
        values
    }

    /// Divides the part into planes of `[height, width]` values, and sets each value to
    /// `function(value, other)`. `planes` has the values and the other value of each plane. The
    /// rows of its values start `pitch` values apart.
    ///
    /// Values after the last whole plane remain without a value.
    ///
    /// # Panics
    ///
    /// There are fewer planes than in this part, one of them is too short, or a size is 0.
    #[inline(always)]
    pub(crate) fn map_planes<'b, S: Copy>(
        self,
        [height, width]: [usize; 2],
        pitch: usize,
        mut planes: impl Iterator<Item = (&'b [T], S)>,
        function: impl Fn(T, S) -> T,
    ) where
        T: 'b,
    {
        let mut num = 0;
        for out in self.values.chunks_exact_mut(height * width) {
            let (plane, other) = planes.next().expect("a plane for each plane of new values");
            for (row, out) in out.chunks_exact_mut(width).enumerate() {
                let values = &plane[row * pitch..][..width];
                map_row(out, values, |value| function(value, other));
                num += out.len();
            }
        }
        self.num_ready.fetch_add(num, Ordering::Relaxed);
    }

    /// Sets each value to `function(left, right)`.
    ///
    /// # Panics
    ///
    /// A slice is shorter than the part.
    #[inline(always)]
    pub(crate) fn zip<L: Copy, R: Copy>(
        self,
        left: &[L],
        right: &[R],
        function: impl Fn(L, R) -> T,
    ) {
        let num = self.values.len();
        let inputs = left[..num].iter().zip(&right[..num]);
        for (slot, (left, right)) in self.values.iter_mut().zip(inputs) {
            slot.write(function(*left, *right));
        }
        self.num_ready.fetch_add(num, Ordering::Relaxed);
    }

    /// Sets each value to `function(other)`, which may change the other value.
    ///
    /// # Panics
    ///
    /// `others` is shorter than the part.
    #[inline(always)]
    pub(crate) fn map<S>(self, others: &mut [S], function: impl Fn(&mut S) -> T) {
        let num = self.values.len();
        for (slot, other) in self.values.iter_mut().zip(&mut others[..num]) {
            slot.write(function(other));
        }
        self.num_ready.fetch_add(num, Ordering::Relaxed);
    }
}

/// Iterator over chunks of a part.
pub(crate) struct Filled<'a, T> {
    chunks: ChunksMut<'a, MaybeUninit<T>>,
    value: T,
    /// Number of values of the chunks that were returned.
    num: usize,
    num_ready: &'a AtomicUsize,
}

impl<'a, T: Copy> Iterator for Filled<'a, T> {
    type Item = &'a mut [T];

    #[inline(always)]
    fn next(&mut self) -> Option<Self::Item> {
        let chunk = fill(self.chunks.next()?, self.value);
        self.num += chunk.len();
        Some(chunk)
    }
}

/// Counts the values once for all chunks: other threads change the same counter.
impl<T> Drop for Filled<'_, T> {
    fn drop(&mut self) {
        self.num_ready.fetch_add(self.num, Ordering::Relaxed);
    }
}

/// Sets the values of rows of one tensor to `first`, and to 0 without it.
///
/// Other threads may initialize other rows at the same time. All share a counter, which this
/// function changes only once.
///
/// # Panics
///
/// The rows belong to different tensors, or `first` has another length.
pub(crate) fn fill_rows<'a>(
    rows: Vec<Blank<'a, f32>>,
    first: Option<&[f32]>,
) -> Vec<&'a mut [f32]> {
    let Some(num_ready) = rows.first().map(|row| row.num_ready) else { return vec![] };
    let fill = |row: Blank<'a, f32>| {
        assert!(std::ptr::eq(row.num_ready, num_ready), "rows of different tensors");
        match first {
            Some(first) => row.values.write_copy_of_slice(first),
            None => fill(row.values, 0.0),
        }
    };
    let rows: Vec<&mut [f32]> = rows.into_iter().map(fill).collect();
    num_ready.fetch_add(rows.iter().map(|row| row.len()).sum(), Ordering::Relaxed);
    rows
}

/// Sets the values of a short row to `function(value)`, in blocks of a vector.
#[inline(always)]
fn map_row<T: Copy>(out: &mut [MaybeUninit<T>], values: &[T], function: impl Fn(T) -> T) {
    const WIDTH: usize = 8;
    let map = |out: &mut [MaybeUninit<T>; WIDTH], values: &[T; WIDTH]| {
        *out = values.map(|value| MaybeUninit::new(function(value)));
    };
    let (blocks, rest) = out.as_chunks_mut();
    blocks.iter_mut().zip(values.as_chunks().0).for_each(|(out, values)| map(out, values));
    if rest.is_empty() {
        return;
    }
    // A last block that overlaps the one before.
    match (out.last_chunk_mut(), values.last_chunk()) {
        (Some(out), Some(values)) => map(out, values),
        _ => out.iter_mut().zip(values).for_each(|(out, value)| _ = out.write(function(*value))),
    }
}

#[inline(always)]
fn fill<T: Copy>(values: &mut [MaybeUninit<T>], value: T) -> &mut [T] {
    for slot in values.iter_mut() {
        slot.write(value);
    }
    // SAFETY: the loop initialized each value.
    unsafe { values.assume_init_mut() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_become_one_vector() {
        let mut new = NewValues::new(10);
        for (index, chunk) in new.chunks(4).enumerate() {
            chunk.filled(4, index).flatten().for_each(|value| *value += 10);
        }
        assert_eq!(new.into_vec(), [10, 10, 10, 10, 11, 11, 11, 11, 12, 12]);
        let mut new = NewValues::new(3);
        new.blank().zip(&[1, 2, 3], &[10, 20, 30, 40], |left, right| left + right);
        assert_eq!(new.into_vec(), [11, 22, 33]);
        let (mut new, mut others) = (NewValues::new(2), [5, 6]);
        new.blank().map(&mut others, |other| std::mem::replace(other, 0));
        assert_eq!((new.into_vec(), others), (vec![5, 6], [0, 0]));
        let mut new = NewValues::new(2);
        new.blank().fill(4)[1] += 1;
        assert_eq!(new.into_vec(), [4, 5]);
        assert!(NewValues::<f32>::new(0).into_vec().is_empty());
    }

    #[test]
    fn rows_begin_with_zeros_or_given_values() {
        for (first, expected) in [(None, [0.0; 4]), (Some(&[1.0, 2.0][..]), [1.0, 2.0, 1.0, 2.0])] {
            let mut new = NewValues::new(4);
            assert_eq!(fill_rows(new.chunks(2).collect(), first).len(), 2);
            assert_eq!(new.into_vec(), expected);
        }
        assert!(fill_rows(vec![Blank::default(), Blank::default()], None).concat().is_empty());
    }

    /// Rows shorter than a block, of whole blocks, and with a last block that overlaps another.
    #[test]
    fn planes_are_mapped_without_the_ends_of_rows() {
        for width in [1, 7, 8, 13, 16, 19] {
            let (num, height, pitch) = (3, 2, width + 2);
            let values: Vec<usize> = (0..num * height * pitch).collect();
            let planes = values.chunks(height * pitch).zip([100, 200, 300]);
            let rows = planes.clone().flat_map(|(plane, other)| {
                plane.chunks(pitch).map(move |row| row[..width].iter().map(move |v| v + other))
            });
            let mut new = NewValues::new(num * height * width);
            new.blank().map_planes([height, width], pitch, planes, |value, other| value + other);
            assert_eq!(new.into_vec(), rows.flatten().collect::<Vec<_>>(), "{width}");
        }
    }

    #[test]
    #[should_panic(expected = "a plane for each plane of new values")]
    fn missing_planes_are_refused() {
        let mut new = NewValues::new(4);
        let planes = [(&[1, 2][..], ())].into_iter();
        new.blank().map_planes([1, 2], 2, planes, |value, ()| value);
    }

    #[test]
    #[should_panic(expected = "only some of the new values were initialized")]
    fn values_after_the_last_plane_are_missing() {
        let mut new = NewValues::new(3);
        let planes = [(&[1, 2][..], ()), (&[3, 4], ())].into_iter();
        new.blank().map_planes([1, 2], 2, planes, |value, ()| value);
        new.into_vec();
    }

    #[test]
    #[should_panic(expected = "out of range")]
    fn short_planes_are_refused() {
        let mut new = NewValues::new(4);
        let planes = [(&[1, 2, 3, 4][..], ())].into_iter();
        new.blank().map_planes([2, 2], 3, planes, |value, ()| value);
    }

    #[test]
    fn chunks_are_filled_as_they_are_taken() {
        let mut new = NewValues::new(5);
        for (index, chunk) in new.blank().filled(2, 7).enumerate() {
            chunk[0] = index;
        }
        assert_eq!(new.into_vec(), [0, 7, 1, 7, 2]);
    }

    #[test]
    #[should_panic(expected = "only some of the new values were initialized")]
    fn chunks_that_are_not_taken_are_missing() {
        let mut new = NewValues::new(5);
        let _ = new.blank().filled(2, 7).take(2).count();
        new.into_vec();
    }

    #[test]
    #[should_panic(expected = "only some of the new values were initialized")]
    fn vectors_with_a_gap_are_refused() {
        let mut new = NewValues::new(4);
        assert_eq!(new.chunks(2).next().unwrap().filled(2, 1).count(), 1);
        new.into_vec();
    }

    /// The first half twice.
    #[test]
    #[should_panic(expected = "only some of the new values were initialized")]
    fn parts_of_two_calls_do_not_count_together() {
        let mut new = NewValues::new(4);
        assert_eq!(new.chunks(2).next().unwrap().filled(2, 1).count(), 1);
        assert_eq!(new.chunks(2).next().unwrap().filled(2, 1).count(), 1);
        new.into_vec();
    }

    #[test]
    #[should_panic(expected = "rows of different tensors")]
    fn rows_of_different_tensors_are_refused() {
        let (mut left, mut right) = (NewValues::new(1), NewValues::new(1));
        fill_rows(vec![left.blank(), right.blank()], None);
    }
}

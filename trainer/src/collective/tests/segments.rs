//! All-reduces of segments with a head.

use super::super::*;
use super::conformance::{ALL, on_ranks, value};

/// The operations that an implementation must have, and defaults.
#[derive(Debug)]
struct Minimal<'a>(&'a dyn Collective);

impl Collective for Minimal<'_> {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn size(&self) -> usize {
        self.0.size()
    }

    fn sum_f32(&self, values: &mut [f32]) -> Result<()> {
        self.0.sum_f32(values)
    }

    fn sum_f64(&self, values: &mut [f64]) -> Result<()> {
        self.0.sum_f64(values)
    }

    fn all_gather(&self, local: Bytes) -> Result<Vec<Bytes>> {
        self.0.all_gather(local)
    }
}

/// All-reduces copies of these values as segments.
fn sum_segments(
    ranks: &dyn Collective,
    head: &[f64],
    segments: &[Vec<f32>],
) -> (Vec<u64>, Vec<Vec<f32>>) {
    let (mut head, mut segments) = (head.to_vec(), segments.to_vec());
    let mut slices: Vec<&mut [f32]> = segments.iter_mut().map(Vec::as_mut_slice).collect();
    ranks.sum_segments(&mut head, &mut slices).unwrap();
    (head.into_iter().map(f64::to_bits).collect(), segments)
}

#[test]
fn heads_are_added_in_rank_order() {
    // Integers beyond single precision, and values whose rounding makes the order visible.
    let number = |rank: usize, i: usize| match i {
        0 => 16_777_217.0 + rank as f64,
        1 => -0.0,
        _ => f64::from(value(rank, i)).sqrt(),
    };
    for (name, run) in ALL {
        for (size, num_head, lengths) in [
            (1, 3, vec![4, 2]),
            (2, 3, vec![1, 0, 20]),
            (2, 9, vec![70_001, 0, 3]),
            (3, 9, vec![2, 20]),
            (3, 1, vec![3, 1, 70_001, 0, 7, 30_000]),
            (4, 3_001, vec![]),
            (4, 3_001, vec![5_000]),
            (5, 40, vec![1; 20_000]),
        ] {
            let what = format!("{name}, {size} ranks, {num_head} and {} segments", lengths.len());
            let results = on_ranks(run, size, |ranks| {
                let head: Vec<f64> = (0..num_head).map(|i| number(ranks.rank(), i)).collect();
                let segment = |(part, len): (usize, &usize)| {
                    (0..*len).map(|i| value(ranks.rank(), part * 11 + i)).collect()
                };
                let segments: Vec<Vec<f32>> = lengths.iter().enumerate().map(segment).collect();
                let sums = sum_segments(ranks, &head, &segments);
                let of_defaults = sum_segments(&Minimal(ranks), &head, &segments);
                assert!(sums.1 == of_defaults.1, "{what}: defaults differ");
                // The same values in the same order as in one slice.
                let mut flat = segments.concat();
                ranks.sum_f32(&mut flat).unwrap();
                assert!(sums.1.concat() == flat, "{what}: segments differ from a slice");
                sums
            });
            let expected = |i| {
                let rest = (1..size).map(|rank| number(rank, i));
                rest.fold(number(0, i), |sum, number| sum + number).to_bits()
            };
            let expected: Vec<u64> = (0..num_head).map(expected).collect();
            for (head, _) in &results {
                let differs =
                    head.iter().zip(&expected).position(|(sum, expected)| sum != expected);
                assert_eq!((head.len(), differs), (num_head, None), "{what}");
            }
            assert!(results.iter().all(|(_, sums)| *sums == results[0].1), "{what}: ranks differ");
        }
    }
}

/// A head grows after the first step of a process. With the segments, these heads have less and
/// more than 16 KiB.
#[test]
fn sums_of_segments_do_not_depend_on_heads() {
    for (name, run) in ALL {
        let sums = on_ranks(run, 3, |ranks| {
            let segments: [Vec<f32>; 1] = [(0..4_070).map(|i| value(ranks.rank(), i)).collect()];
            [11, 17].map(|num_head| sum_segments(ranks, &vec![0.5; num_head], &segments).1)
        });
        assert!(sums.iter().all(|[short, long]| short == long), "{name}");
    }
}

#[test]
fn mismatched_segments_are_reported() {
    for (name, run) in ALL {
        for len in [3, 30_000] {
            let errors = on_ranks(run, 3, |ranks| {
                let mut values = vec![0.0; len + ranks.rank()];
                ranks.sum_segments(&mut [0.0], &mut [&mut values]).unwrap_err().to_string()
            });
            let is_reported = |error: &String| error.contains("made a different collective call");
            assert!(errors.iter().any(is_reported), "{name}: {errors:?}");
        }
    }
}

/// Small sums and large ones take different connections.
#[test]
fn sums_of_different_sizes_are_reported() {
    for (name, run) in ALL {
        for size in [3, 4] {
            for large in 1..(1_usize << size) - 1 {
                let errors = on_ranks(run, size, |ranks| {
                    ranks.sum_f32(&mut [1.0]).unwrap();
                    let len = if large >> ranks.rank() & 1 == 1 { 30_000 } else { 3 };
                    ranks.sum_f32(&mut vec![0.0; len]).unwrap_err().to_string()
                });
                let is_reported =
                    |error: &String| error.contains("made a different collective call");
                assert!(errors.iter().any(is_reported), "{name}, {large:b}: {errors:?}");
            }
        }
    }
}

//! Conformance suite for each implementation of [`Collective`].

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use burn::tensor::Device;
use proptest::prelude::*;
use stoker_api::contract::ExitCode;

use super::super::group::DeviceAllReduce;
use super::super::*;
use super::rendezvous::{connect_all, gang_of, joined};
use crate::error::exit_code;

/// Runs a closure on each of several connected ranks, and returns when all have finished.
pub(super) type OnRanks = fn(usize, &(dyn Fn(&dyn Collective) + Sync));

pub(super) const ALL: [(&str, OnRanks); 4] = [
    ("threads", on_threads),
    ("pods", on_pods),
    ("ranks of a pod", |size, act| connect_all(size, size, act)),
    // With an even number of ranks, each has one neighbor in its pod and one in another.
    ("pods of two ranks", |size, act| connect_all(size, 2 - size % 2, act)),
];

fn on_threads(size: usize, act: &(dyn Fn(&dyn Collective) + Sync)) {
    std::thread::scope(|scope| {
        for rank in ThreadRank::group(size) {
            scope.spawn(move || act(&rank));
        }
    });
}

fn on_pods(size: usize, act: &(dyn Fn(&dyn Collective) + Sync)) {
    connect_all(size, 1, act);
}

/// Runs `act` on each rank and returns the results in rank order.
pub(super) fn on_ranks<T: Send>(
    run: OnRanks,
    size: usize,
    act: impl Fn(&dyn Collective) -> T + Sync,
) -> Vec<T> {
    let all = std::sync::Mutex::new((0..size).map(|_| None).collect::<Vec<_>>());
    run(size, &|ranks| {
        assert_eq!(ranks.size(), size);
        let result = act(ranks);
        all.lock().unwrap()[ranks.rank()] = Some(result);
    });
    all.into_inner().unwrap().into_iter().map(Option::unwrap).collect()
}

/// A value whose rounding makes the summation order visible in the sum.
pub(super) fn value(rank: usize, i: usize) -> f32 {
    1.0 / (1.0 + (rank * 31 + i) as f32)
}

#[test]
fn sums_are_exact_and_reproducible() {
    for (name, run) in ALL {
        for (size, len) in
            [(1, 5), (2, 1), (2, 700_001), (3, 2), (3, 4_097), (4, 70_001), (5, 50_000)]
        {
            let sum = || {
                on_ranks(run, size, |ranks| {
                    let mut single: Vec<f32> = (0..len).map(|i| value(ranks.rank(), i)).collect();
                    let mut double: Vec<f64> =
                        single.iter().map(|value| f64::from(*value).sqrt()).collect();
                    ranks.sum_f32(&mut single).unwrap();
                    ranks.sum_f64(&mut double).unwrap();
                    ranks.sum_f32(&mut []).unwrap();
                    (single, double)
                })
            };
            let results = sum();
            for (i, single) in results[0].0.iter().enumerate() {
                let expected: f64 = (0..size).map(|rank| f64::from(value(rank, i))).sum();
                let error = (f64::from(*single) - expected).abs() / expected;
                assert!(error < 1e-6, "{name}, {size} ranks, {i} of {len}: {single} {expected}");
            }
            for (i, double) in results[0].1.iter().enumerate() {
                let expected: f64 = (0..size).map(|rank| f64::from(value(rank, i)).sqrt()).sum();
                assert!((double - expected).abs() < 1e-12, "{name}, {size} ranks, {i} of {len}");
            }
            let is_same = |result: &(Vec<f32>, Vec<f64>)| *result == results[0];
            assert!(results.iter().all(is_same), "{name}, {size} ranks, {len}: ranks differ");
            assert!(sum() == results, "{name}, {size} ranks, {len}: runs differ");
        }
    }
}

#[test]
fn ring_sums_every_element_once() {
    // Sums of integers are exact, so an element that is torn, lost or added twice is visible.
    for len in [4_096 + 1, 16_384 + 3, 1_000_003] {
        let results = on_ranks(on_pods, 4, |ranks| {
            let mut values: Vec<f32> =
                (0..len).map(|i| (ranks.rank() * 7 + i % 1000) as f32).collect();
            ranks.sum_f32(&mut values).unwrap();
            values
        });
        for (i, sum) in results[0].iter().enumerate() {
            assert_eq!(*sum, (7 * 6 + 4 * (i % 1000)) as f32, "{i} of {len}");
        }
    }
}

/// A stand-in for NCCL, which connects the ranks separately.
#[derive(Debug)]
struct ThreadDevice(ThreadRank);

impl DeviceAllReduce for ThreadDevice {
    fn sum(
        &mut self,
        values: Tensor<1>,
        check_running: &dyn Fn() -> Result<()>,
    ) -> Result<Tensor<1>> {
        check_running()?;
        self.0.sum_tensor(values)
    }

    fn supports(&self, values: &Tensor<1>) -> bool {
        !values.device().is_autodiff()
    }

    fn mark_failed(&mut self) {}
}

fn on_devices(size: usize, act: &(dyn Fn(&dyn Collective) + Sync)) {
    let gang = gang_of(size as u32);
    std::thread::scope(|scope| {
        for (rank, device) in ThreadRank::group(size).into_iter().enumerate() {
            let gang = &gang;
            scope.spawn(move || {
                let mut ranks = joined(gang, 0, rank, 1, 20_000).unwrap().0;
                ranks.attach_device(Box::new(ThreadDevice(device)));
                assert!(ranks.sums_on_device());
                act(&ranks);
            });
        }
    });
}

#[test]
fn tensors_keep_their_type() {
    for (name, run) in ALL.into_iter().chain([("devices", on_devices as OnRanks)]) {
        for (size, len) in [(2, 5), (3, 20_001)] {
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                let results = on_ranks(run, size, |ranks| {
                    // Small integers, so that half precision represents all sums exactly.
                    let values: Vec<f32> =
                        (0..len).map(|i| (ranks.rank() * 5 + i % 31) as f32).collect();
                    let data = TensorData::new(values, [len]);
                    let device = Device::flex();
                    let sum = ranks.sum_tensor(Tensor::from_data(data, (&device, dtype))).unwrap();
                    assert_eq!(sum.dtype(), dtype);
                    sum.cast(DType::F32).into_data().try_to_vec::<f32>().unwrap()
                });
                let ranks: usize = (0..size).sum();
                let expected: Vec<f32> =
                    (0..len).map(|i| (5 * ranks + size * (i % 31)) as f32).collect();
                let is_expected = |values: &Vec<f32>| *values == expected;
                assert!(results.iter().all(is_expected), "{name}, {size} ranks, {dtype:?}");
            }
        }
    }
}

#[test]
fn half_precision_sums_are_accurate() {
    for (name, run) in ALL {
        for len in [100, 30_000] {
            let results = on_ranks(run, 3, |ranks| {
                let value = |i| value(ranks.rank(), i);
                let mut f16s: Vec<f16> = (0..len).map(|i| f16::from_f32(value(i))).collect();
                let mut bf16s: Vec<bf16> = (0..len).map(|i| bf16::from_f32(value(i))).collect();
                ranks.sum_f16(&mut f16s).unwrap();
                ranks.sum_bf16(&mut bf16s).unwrap();
                (f16s, bf16s)
            });
            assert!(results.iter().all(|result| *result == results[0]), "{name}: ranks differ");
            for i in 0..len {
                let expected: f32 = (0..3).map(|rank| value(rank, i)).sum();
                let error = |sum: f32| (sum - expected).abs() / expected;
                let errors = (error(results[0].0[i].to_f32()), error(results[0].1[i].to_f32()));
                assert!(errors.0 < 0.002 && errors.1 < 0.015, "{name}, {i}: {errors:?}");
            }
        }
    }
}

#[test]
fn device_failure_ends_the_gang() {
    let gang = gang_of(2);
    #[derive(Debug)]
    struct FailingDevice;
    impl DeviceAllReduce for FailingDevice {
        fn sum(&mut self, _: Tensor<1>, _: &dyn Fn() -> Result<()>) -> Result<Tensor<1>> {
            Err("out of order".into())
        }
        fn supports(&self, _: &Tensor<1>) -> bool {
            true
        }
        fn mark_failed(&mut self) {}
    }
    /// Waits, and reports whether it was abandoned before it was dropped.
    #[derive(Debug)]
    struct BlockingDevice(std::sync::mpsc::Sender<()>);
    impl DeviceAllReduce for BlockingDevice {
        fn sum(
            &mut self,
            _: Tensor<1>,
            check_running: &dyn Fn() -> Result<()>,
        ) -> Result<Tensor<1>> {
            loop {
                check_running()?;
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        fn supports(&self, _: &Tensor<1>) -> bool {
            true
        }
        fn mark_failed(&mut self) {
            self.0.send(()).unwrap();
        }
    }
    let (abandons, is_abandoned) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let (gang, abandons) = (&gang, abandons.clone());
            scope.spawn(move || {
                let mut ranks = joined(gang, 0, rank, 1, 20_000).unwrap().0;
                let device: Box<dyn DeviceAllReduce> = if rank == 0 {
                    Box::new(FailingDevice)
                } else {
                    Box::new(BlockingDevice(abandons))
                };
                ranks.attach_device(device);
                let values = || Tensor::zeros([3], &Device::flex());
                let error = ranks.sum_tensor(values()).unwrap_err();
                match rank {
                    0 => assert_eq!(error.to_string(), "out of order"),
                    _ => assert_eq!(exit_code(&*error), ExitCode::PeerFailed, "{error}"),
                }
                let again = ranks.sum_f32(&mut [1.0]).unwrap_err();
                assert_eq!(exit_code(&*again), ExitCode::PeerFailed);
            });
        }
    });
    is_abandoned.try_recv().unwrap();
}

#[test]
fn gathered_values_come_in_rank_order() {
    for (name, run) in ALL {
        for size in [1, 2, 3, 4] {
            let results = on_ranks(run, size, |ranks| {
                let values =
                    all_gather_cbor(ranks, "step", format!("rank {}", ranks.rank())).unwrap();
                let local = Bytes::from(vec![ranks.rank() as u8 + 5; 300_000 * (ranks.rank() + 1)]);
                (values, ranks.all_gather(local.clone()).unwrap(), ranks.broadcast(local).unwrap())
            });
            for (values, gathered, model) in results {
                let expected: Vec<String> = (0..size).map(|rank| format!("rank {rank}")).collect();
                assert_eq!(values, expected, "{name}");
                for (rank, bytes) in gathered.iter().enumerate() {
                    assert!(*bytes == vec![rank as u8 + 5; 300_000 * (rank + 1)], "{name}");
                }
                assert!(model == vec![5; 300_000], "{name}");
            }
        }
    }
}

#[test]
fn overlapping_calls_do_not_mix() {
    for (name, run) in ALL {
        let late = AtomicUsize::new(0);
        let results = on_ranks(run, 3, |ranks| {
            let mut sums = vec![];
            for round in 0..50 {
                if late.fetch_add(1, Ordering::Relaxed).is_multiple_of(7) {
                    std::thread::sleep(Duration::from_millis(1));
                }
                let mut values = vec![(round * 3 + ranks.rank()) as f32; 1 + round * 400];
                ranks.sum_f32(&mut values).unwrap();
                assert!(values.iter().all(|value| *value == values[0]));
                sums.push(values[0]);
            }
            sums
        });
        let expected: Vec<f32> = (0..50).map(|round| (round * 9 + 3) as f32).collect();
        assert!(results.iter().all(|sums| *sums == expected), "{name}");
    }
}

#[test]
fn mismatched_calls_are_reported() {
    for (name, run) in ALL {
        let errors = on_ranks(run, 2, |ranks| {
            let position = ["step", "validation"][ranks.rank()];
            all_gather_cbor(ranks, position, 1).unwrap_err().to_string()
        });
        let expected = "rank 1 is at `validation`, but this rank is at `step`";
        assert!(errors[0].contains(expected), "{name}: {errors:?}");
        for len in [3, 30_000] {
            let lengths = on_ranks(run, 3, |ranks| {
                let error = ranks.sum_f32(&mut vec![0.0; len + ranks.rank()]).unwrap_err();
                (exit_code(&*error), error.to_string())
            });
            let is_reported =
                |(_, text): &(ExitCode, String)| text.contains("made a different collective call");
            assert!(lengths.iter().any(is_reported), "{name}: {lengths:?}");
        }
    }
}

#[test]
fn rank_exit_ends_the_gang() {
    for (name, run) in ALL {
        for exiting in 0..3 {
            let codes = on_ranks(run, 3, |ranks| {
                ranks.sum_f32(&mut [1.0]).unwrap();
                if ranks.rank() == exiting {
                    return ExitCode::PeerFailed;
                }
                let error = ranks.sum_f32(&mut vec![1.0; 1_000_000]).unwrap_err();
                // The failure is final.
                let again = ranks.sum_f32(&mut [1.0]).unwrap_err();
                assert_eq!(exit_code(&*again), ExitCode::PeerFailed, "{name}");
                exit_code(&*error)
            });
            assert_eq!(codes, [ExitCode::PeerFailed; 3], "{name}, rank {exiting}");
        }
    }
}

#[test]
fn local_groups_are_independent() {
    let gang = Arc::new(gang_of(5));
    let threads: Vec<_> = (0..5)
        .map(|rank| {
            let gang = gang.clone();
            std::thread::spawn(move || {
                let (all, local) = joined(&gang, 0, rank, 2, 20_000).unwrap();
                // The last pod has only one rank.
                let local: &dyn Collective = match &local {
                    Some(local) => local,
                    None => &SingleRank,
                };
                // The pods make their local calls at different times, and some never do.
                let mut values = vec![rank];
                if rank < 2 {
                    values = all_gather_cbor(local, "local", rank).unwrap();
                }
                let all = all_gather_cbor(&all, "all", rank).unwrap();
                let first = local.broadcast(Bytes::from(vec![rank as u8])).unwrap()[0];
                (values, all, first)
            })
        })
        .collect();
    let results: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    let local: Vec<_> = results.iter().map(|(values, ..)| values.clone()).collect();
    assert_eq!(local, [vec![0, 1], vec![0, 1], vec![2], vec![3], vec![4]]);
    assert!(results.iter().all(|(_, all, _)| *all == [0, 1, 2, 3, 4]));
    let firsts: Vec<_> = results.iter().map(|(.., first)| *first).collect();
    assert_eq!(firsts, [0, 0, 2, 2, 4]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn sums_are_exact_for_any_size(size in 2..6usize, len in 0..20_000usize, big in any::<bool>()) {
        let len = if big { len * 16 + 5 } else { len };
        let results = on_ranks(on_pods, size, |ranks| {
            let value = |i: usize| ((ranks.rank() + 1) * (i % 97)) as f64;
            let mut values: Vec<f64> = (0..len).map(value).collect();
            ranks.sum_f64(&mut values).unwrap();
            values
        });
        let times = size * (size + 1) / 2;
        for values in &results {
            for (i, value) in values.iter().enumerate() {
                prop_assert_eq!(*value, (times * (i % 97)) as f64);
            }
        }
    }
}

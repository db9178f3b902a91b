//! One suite for each way in which ranks speak.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use burn::tensor::Device;
use proptest::prelude::*;
use stoker_api::contract::ExitCode;

use super::super::group::OnDevice;
use super::super::*;
use super::meeting::{gang_of, joined};
use crate::error::exit_code;

/// A way to bring ranks together: it runs `act` on each and ends when all have.
type OnRanks = fn(usize, &(dyn Fn(&dyn Collective) + Sync));

const ALL: [(&str, OnRanks); 2] = [("threads", on_threads), ("connections", on_connections)];

fn on_threads(size: usize, act: &(dyn Fn(&dyn Collective) + Sync)) {
    std::thread::scope(|scope| {
        for rank in ThreadRank::group(size) {
            scope.spawn(move || act(&rank));
        }
    });
}

fn on_connections(size: usize, act: &(dyn Fn(&dyn Collective) + Sync)) {
    if size == 1 {
        // A gang of one has nobody to meet.
        return act(&Alone);
    }
    let gang = gang_of(size as u32);
    std::thread::scope(|scope| {
        for rank in 0..size {
            let gang = &gang;
            scope.spawn(move || act(&joined(gang, 0, rank, 1, 20_000).unwrap().0));
        }
    });
}

/// Runs `act` on each rank; gives what it gives, in order.
fn on_ranks<T: Send>(
    run: OnRanks,
    size: usize,
    act: impl Fn(&dyn Collective) -> T + Sync,
) -> Vec<T> {
    let all = std::sync::Mutex::new((0..size).map(|_| None).collect::<Vec<_>>());
    run(size, &|ranks| {
        assert_eq!(ranks.size(), size);
        let given = act(ranks);
        all.lock().unwrap()[ranks.rank()] = Some(given);
    });
    all.into_inner().unwrap().into_iter().map(Option::unwrap).collect()
}

/// A value whose sums show by rounding in what order they were made.
fn value(rank: usize, i: usize) -> f32 {
    1.0 / (1.0 + (rank * 31 + i) as f32)
}

#[test]
fn sums_are_right_and_the_same_bits_everywhere_and_again() {
    for (name, run) in ALL {
        for (size, len) in
            [(1, 5), (2, 1), (2, 70_001), (3, 2), (3, 4_097), (3, 70_001), (5, 50_000)]
        {
            let sum = || {
                on_ranks(run, size, |ranks| {
                    let mut single: Vec<f32> = (0..len).map(|i| value(ranks.rank(), i)).collect();
                    let mut double: Vec<f64> =
                        single.iter().map(|it| f64::from(*it).sqrt()).collect();
                    ranks.sum_f32(&mut single).unwrap();
                    ranks.sum_f64(&mut double).unwrap();
                    ranks.sum_f32(&mut []).unwrap();
                    (single, double)
                })
            };
            let found = sum();
            for (i, single) in found[0].0.iter().enumerate() {
                let expected: f64 = (0..size).map(|rank| f64::from(value(rank, i))).sum();
                let error = (f64::from(*single) - expected).abs() / expected;
                assert!(error < 1e-6, "{name}, {size} ranks, {i} of {len}: {single} {expected}");
            }
            for (i, double) in found[0].1.iter().enumerate() {
                let expected: f64 = (0..size).map(|rank| f64::from(value(rank, i)).sqrt()).sum();
                assert!((double - expected).abs() < 1e-12, "{name}, {size} ranks, {i} of {len}");
            }
            let is_same = |it: &(Vec<f32>, Vec<f64>)| *it == found[0];
            assert!(found.iter().all(is_same), "{name}, {size} ranks, {len}: other bits");
            assert!(sum() == found, "{name}, {size} ranks, {len}: other bits in another run");
        }
    }
}

#[test]
fn a_sum_over_a_ring_is_of_whole_numbers_wherever_it_is_cut() {
    // Integers add up exactly: an element that was cut, lost or added twice shows.
    for len in [4_096 + 1, 16_384 + 3, 1_000_003] {
        let found = on_ranks(on_connections, 4, |ranks| {
            let mut values: Vec<f32> =
                (0..len).map(|i| (ranks.rank() * 7 + i % 1000) as f32).collect();
            ranks.sum_f32(&mut values).unwrap();
            values
        });
        for (i, sum) in found[0].iter().enumerate() {
            assert_eq!(*sum, (7 * 6 + 4 * (i % 1000)) as f32, "{i} of {len}");
        }
    }
}

/// What NCCL is to a group: other ways to other ranks.
#[derive(Debug)]
struct Threads(ThreadRank);

impl OnDevice for Threads {
    fn sum(&mut self, values: Tensor<1>, goes_on: &dyn Fn() -> Result<()>) -> Result<Tensor<1>> {
        goes_on()?;
        self.0.sum_tensor(values)
    }

    fn takes(&self, values: &Tensor<1>) -> bool {
        !values.device().is_autodiff()
    }

    fn abandon(&mut self) {}
}

fn on_devices(size: usize, act: &(dyn Fn(&dyn Collective) + Sync)) {
    let gang = gang_of(size as u32);
    std::thread::scope(|scope| {
        for (rank, device) in ThreadRank::group(size).into_iter().enumerate() {
            let gang = &gang;
            scope.spawn(move || {
                let mut ranks = joined(gang, 0, rank, 1, 20_000).unwrap().0;
                ranks.attach(Box::new(Threads(device)));
                assert!(ranks.sums_on_device());
                act(&ranks);
            });
        }
    });
}

#[test]
fn tensors_are_summed_in_their_own_type() {
    for (name, run) in ALL.into_iter().chain([("devices", on_devices as OnRanks)]) {
        for (size, len) in [(2, 5), (3, 20_001)] {
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                let found = on_ranks(run, size, |ranks| {
                    // Few bits: half precision has all sums.
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
                assert!(found.iter().all(|it| *it == expected), "{name}, {size} ranks, {dtype:?}");
            }
        }
    }
}

#[test]
fn half_the_bytes_are_summed_to_nearly_the_same() {
    for (name, run) in ALL {
        for len in [100, 30_000] {
            let found = on_ranks(run, 3, |ranks| {
                let value = |i| value(ranks.rank(), i);
                let mut f16s: Vec<f16> = (0..len).map(|i| f16::from_f32(value(i))).collect();
                let mut bf16s: Vec<bf16> = (0..len).map(|i| bf16::from_f32(value(i))).collect();
                ranks.sum_f16(&mut f16s).unwrap();
                ranks.sum_bf16(&mut bf16s).unwrap();
                (f16s, bf16s)
            });
            assert!(found.iter().all(|it| *it == found[0]), "{name}: other bits");
            for i in 0..len {
                let expected: f32 = (0..3).map(|rank| value(rank, i)).sum();
                let error = |found: f32| (found - expected).abs() / expected;
                let errors = (error(found[0].0[i].to_f32()), error(found[0].1[i].to_f32()));
                assert!(errors.0 < 0.002 && errors.1 < 0.015, "{name}, {i}: {errors:?}");
            }
        }
    }
}

#[test]
fn a_device_that_fails_is_the_end_for_all() {
    let gang = gang_of(2);
    #[derive(Debug)]
    struct Broken;
    impl OnDevice for Broken {
        fn sum(&mut self, _: Tensor<1>, _: &dyn Fn() -> Result<()>) -> Result<Tensor<1>> {
            Err("out of order".into())
        }
        fn takes(&self, _: &Tensor<1>) -> bool {
            true
        }
        fn abandon(&mut self) {}
    }
    /// Says whether it was abandoned before its end.
    #[derive(Debug)]
    struct Waits(std::sync::mpsc::Sender<()>);
    impl OnDevice for Waits {
        fn sum(&mut self, _: Tensor<1>, goes_on: &dyn Fn() -> Result<()>) -> Result<Tensor<1>> {
            loop {
                goes_on()?;
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        fn takes(&self, _: &Tensor<1>) -> bool {
            true
        }
        fn abandon(&mut self) {
            self.0.send(()).unwrap();
        }
    }
    let (abandons, is_abandoned) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let (gang, abandons) = (&gang, abandons.clone());
            scope.spawn(move || {
                let mut ranks = joined(gang, 0, rank, 1, 20_000).unwrap().0;
                let device: Box<dyn OnDevice> =
                    if rank == 0 { Box::new(Broken) } else { Box::new(Waits(abandons)) };
                ranks.attach(device);
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
fn what_ranks_say_comes_in_their_order() {
    for (name, run) in ALL {
        for size in [1, 2, 3, 4] {
            let found = on_ranks(run, size, |ranks| {
                let said = exchange(ranks, "step", format!("rank {}", ranks.rank())).unwrap();
                let mine = Bytes::from(vec![ranks.rank() as u8 + 5; 300_000 * (ranks.rank() + 1)]);
                (said, ranks.gather(mine.clone()).unwrap(), ranks.broadcast(mine).unwrap())
            });
            for (said, gathered, model) in found {
                let expected: Vec<String> = (0..size).map(|it| format!("rank {it}")).collect();
                assert_eq!(said, expected, "{name}");
                for (rank, it) in gathered.iter().enumerate() {
                    assert!(*it == vec![rank as u8 + 5; 300_000 * (rank + 1)], "{name}");
                }
                assert!(model == vec![5; 300_000], "{name}");
            }
        }
    }
}

#[test]
fn calls_that_overlap_do_not_mix() {
    for (name, run) in ALL {
        let late = AtomicUsize::new(0);
        let found = on_ranks(run, 3, |ranks| {
            let mut sums = vec![];
            for turn in 0..50 {
                if late.fetch_add(1, Ordering::Relaxed).is_multiple_of(7) {
                    std::thread::sleep(Duration::from_millis(1));
                }
                let mut values = vec![(turn * 3 + ranks.rank()) as f32; 1 + turn * 400];
                ranks.sum_f32(&mut values).unwrap();
                assert!(values.iter().all(|it| *it == values[0]));
                sums.push(values[0]);
            }
            sums
        });
        let expected: Vec<f32> = (0..50).map(|turn| (turn * 9 + 3) as f32).collect();
        assert!(found.iter().all(|it| *it == expected), "{name}");
    }
}

#[test]
fn ranks_that_do_different_things_are_told_so() {
    for (name, run) in ALL {
        let places = on_ranks(run, 2, |ranks| {
            let place = ["step", "validation"][ranks.rank()];
            exchange(ranks, place, 1).unwrap_err().to_string()
        });
        let expected = "rank 1 is at its validation, this rank at its step";
        assert!(places[0].contains(expected), "{name}: {places:?}");
        for len in [3, 30_000] {
            let lengths = on_ranks(run, 3, |ranks| {
                let error = ranks.sum_f32(&mut vec![0.0; len + ranks.rank()]).unwrap_err();
                (exit_code(&*error), error.to_string())
            });
            let tells = |it: &(ExitCode, String)| it.1.contains("does something else");
            assert!(lengths.iter().any(tells), "{name}: {lengths:?}");
        }
    }
}

#[test]
fn a_rank_that_goes_is_the_end_for_the_others() {
    for (name, run) in ALL {
        for goes in 0..3 {
            let codes = on_ranks(run, 3, |ranks| {
                ranks.sum_f32(&mut [1.0]).unwrap();
                if ranks.rank() == goes {
                    return ExitCode::PeerFailed;
                }
                let error = ranks.sum_f32(&mut vec![1.0; 1_000_000]).unwrap_err();
                // It is final.
                let again = ranks.sum_f32(&mut [1.0]).unwrap_err();
                assert_eq!(exit_code(&*again), ExitCode::PeerFailed, "{name}");
                exit_code(&*error)
            });
            assert_eq!(codes, [ExitCode::PeerFailed; 3], "{name}, rank {goes}");
        }
    }
}

#[test]
fn ranks_of_a_pod_speak_among_themselves() {
    let gang = Arc::new(gang_of(5));
    let threads: Vec<_> = (0..5)
        .map(|rank| {
            let gang = gang.clone();
            std::thread::spawn(move || {
                let (all, local) = joined(&gang, 0, rank, 2, 20_000).unwrap();
                // The last pod has one rank: it is a group of its own.
                let local: &dyn Collective = match &local {
                    Some(local) => local,
                    None => &Alone,
                };
                // Pods speak at different times, and some never.
                let mut said = vec![rank];
                if rank < 2 {
                    said = exchange(local, "local", rank).unwrap();
                }
                let all = exchange(&all, "all", rank).unwrap();
                let first = local.broadcast(Bytes::from(vec![rank as u8])).unwrap()[0];
                (said, all, first)
            })
        })
        .collect();
    let found: Vec<_> = threads.into_iter().map(|it| it.join().unwrap()).collect();
    let said: Vec<_> = found.iter().map(|it| it.0.clone()).collect();
    assert_eq!(said, [vec![0, 1], vec![0, 1], vec![2], vec![3], vec![4]]);
    assert!(found.iter().all(|it| it.1 == [0, 1, 2, 3, 4]));
    assert_eq!(found.iter().map(|it| it.2).collect::<Vec<_>>(), [0, 0, 2, 2, 4]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn any_number_of_ranks_and_values_add_up(size in 2..6usize, len in 0..20_000usize, big in any::<bool>()) {
        let len = if big { len * 16 + 5 } else { len };
        let found = on_ranks(on_connections, size, |ranks| {
            let mut values: Vec<f64> = (0..len).map(|i| ((ranks.rank() + 1) * (i % 97)) as f64).collect();
            ranks.sum_f64(&mut values).unwrap();
            values
        });
        let times = size * (size + 1) / 2;
        for values in &found {
            for (i, value) in values.iter().enumerate() {
                prop_assert_eq!(*value, (times * (i % 97)) as f64);
            }
        }
    }
}

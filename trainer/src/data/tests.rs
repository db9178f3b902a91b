//! Tests of batch contents and order.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use burn::tensor::{DType, Device, Int, Tensor};

use super::*;

/// Samples `0..n`; a batch contains their indices.
struct Numbers(usize);

impl Source<Vec<usize>> for Numbers {
    fn samples(&self) -> usize {
        self.0
    }

    fn batch(&self, samples: &[usize], _: &BatchContext) -> Result<Vec<usize>> {
        Ok(samples.to_vec())
    }
}

fn plan(global_batch: usize, rank: usize, world_size: usize) -> LoaderPlan {
    let device = Device::flex();
    LoaderPlan { global_batch, rank, world_size, seed: 1, shuffle: true, device, dtype: DType::F32 }
}

fn batches(data: &Data<Vec<usize>>, plan: LoaderPlan, batches: Range<u64>) -> Vec<Vec<usize>> {
    data.loader(plan, batches).map(|batch| batch.unwrap().unwrap_or_default()).collect()
}

#[test]
fn global_batches_do_not_depend_on_ranks() {
    let data = Data::new(Numbers(23));
    let steps = data.steps(&plan(6, 0, 1));
    assert_eq!(steps, 4);
    let expected = batches(&data, plan(6, 0, 1), 0..3 * steps);
    for world_size in 1..5 {
        let ranks: Vec<_> = (0..world_size)
            .map(|rank| batches(&data, plan(6, rank, world_size), 0..3 * steps))
            .collect();
        for (index, batch) in expected.iter().enumerate() {
            let mut shares: Vec<_> = ranks.iter().flat_map(|rank| rank[index].clone()).collect();
            let mut batch = batch.clone();
            shares.sort_unstable();
            batch.sort_unstable();
            assert_eq!(shares, batch, "batch {index} over {world_size} ranks");
        }
    }
    for epoch in expected.chunks(steps as usize) {
        let mut all = epoch.concat();
        all.sort_unstable();
        assert_eq!(all, (0..23).collect::<Vec<_>>());
    }
    assert_ne!(expected[0], expected[4], "epochs have different orders");
}

#[test]
fn seeks_and_workers_do_not_change_batches() {
    let of = |workers, range| {
        batches(&Data::new(Numbers(23)).workers(workers).queue(2), plan(6, 0, 1), range)
    };
    let all = of(0, 0..12);
    for workers in [0, 1, 3] {
        assert_eq!(of(workers, 0..12), all);
        assert_eq!(of(workers, 5..12), all[5..]);
    }
}

#[test]
fn drop_last_and_unshuffled_order() {
    let data = Data::new(Numbers(5)).shuffle(false);
    assert_eq!(batches(&data, plan(2, 0, 1), 0..3), [vec![0, 1], vec![2, 3], vec![4]]);
    let data = data.drop_last();
    assert_eq!(data.steps(&plan(2, 0, 1)), 2);
    assert_eq!(batches(&data, plan(2, 0, 1), 1..3), [vec![2, 3], vec![0, 1]]);
}

#[test]
fn first_epochs_order_can_be_kept() {
    let of = |data: Data<Vec<usize>>| batches(&data, plan(6, 0, 1), 0..12);
    let (kept, new) =
        (of(Data::new(Numbers(23)).skip_shuffle_at_epoch_end()), of(Data::new(Numbers(23))));
    assert_eq!(kept[..4], new[..4]);
    assert_eq!(kept[..4], kept[4..8]);
    assert_eq!(kept[..4], kept[8..]);
    assert_ne!(kept[..4], new[4..8]);
    assert_ne!(kept[0], (0..6).collect::<Vec<_>>());
}

/// Batches of 4 that can only be read sequentially.
#[cfg(feature = "learner")]
struct Reel(usize);

#[cfg(feature = "learner")]
impl SequentialSource<Vec<usize>> for Reel {
    fn samples(&self) -> usize {
        self.0
    }

    fn steps(&self) -> u64 {
        self.0.div_ceil(4) as u64
    }

    fn open<'a>(&'a self, plan: &LoaderPlan, batches: Range<u64>) -> Batches<'a, Vec<usize>> {
        assert_eq!((plan.rank, plan.world_size), (0, 1));
        let all: Vec<usize> = (0..self.0).collect();
        let epoch: Vec<_> = all.chunks(4).map(<[usize]>::to_vec).collect();
        let source = epoch.into_iter().cycle().skip(batches.start as usize);
        Box::new(
            source.map(|batch| if batch[0] == 8 { Err("torn".into()) } else { Ok(Some(batch)) }),
        )
    }
}

#[test]
#[cfg(feature = "learner")]
fn tape_can_start_at_any_batch() {
    let data = Data::sequential(Reel(6)).queue(1);
    assert_eq!((data.samples(), data.steps(&plan(4, 0, 1))), (6, 2));
    let all = batches(&data, plan(4, 0, 1), 0..5);
    assert_eq!(all[..3], [vec![0, 1, 2, 3], vec![4, 5], vec![0, 1, 2, 3]]);
    assert_eq!(batches(&data, plan(4, 0, 1), 3..5), all[3..]);
    // Dropping a loader early ends its thread.
    drop(data.loader(plan(4, 0, 1), 0..u64::MAX));
    let mut torn = Data::sequential(Reel(9)).loader(plan(4, 0, 1), 2..3);
    assert_eq!(torn.next().unwrap().unwrap_err().to_string(), "torn");
    assert!(torn.next().is_none());
}

#[test]
fn worker_panic_is_an_error_of_its_batch() {
    let item = |index: usize| if index == 3 { panic!("item 3 is broken") } else { Some(index) };
    for workers in [0, 2] {
        let data = Data::items(5, item, |items, _| items).shuffle(false).workers(workers);
        let mut loader = data.loader(plan(2, 0, 1), 0..3);
        assert_eq!(loader.next().unwrap().unwrap(), Some(vec![0, 1]));
        let error = loader.next().unwrap().unwrap_err().to_string();
        assert_eq!(error, "cannot make batch 1: item 3 is broken");
    }
}

#[test]
fn item_error_is_an_error_of_its_batch() {
    let item = |sample: usize| match sample {
        3 => Err("torn"),
        sample => Ok(sample),
    };
    let data = Data::items(5, item, |items, _| items).shuffle(false);
    let results: Vec<_> = data
        .loader(plan(2, 0, 1), 0..3)
        .map(|batch| batch.map_err(|error| error.to_string()))
        .collect();
    assert_eq!(results, [Ok(Some(vec![0, 1])), Err("torn".into()), Ok(Some(vec![4]))]);
}

#[test]
fn queue_bounds_the_batches_made_ahead() {
    let num_made = Arc::new(AtomicUsize::new(0));
    for (queue, workers) in [(1, 4), (3, 2), (10, 3)] {
        num_made.store(0, Ordering::Relaxed);
        let made = num_made.clone();
        let count = move |batch| {
            made.fetch_add(1, Ordering::Relaxed);
            Ok(batch)
        };
        let data = Data::new(Numbers(100)).map(count).workers(workers).queue(queue);
        let mut loader = data.loader(plan(4, 0, 1), 0..25);
        for num_taken in 0..5 {
            let end = Instant::now() + Duration::from_secs(60);
            while num_made.load(Ordering::Relaxed) < num_taken + queue {
                assert!(Instant::now() < end, "{queue} {workers}: too few");
                std::thread::yield_now();
            }
            std::thread::sleep(Duration::from_millis(5));
            assert_eq!(num_made.load(Ordering::Relaxed), num_taken + queue, "{queue} {workers}");
            loader.next().unwrap().unwrap();
        }
    }
}

#[test]
fn dropped_loaders_stop_seeking() {
    const MANY: usize = 1 << 50;
    let (begun, begins) = mpsc::channel();
    let stream = Stream::new(move |_| {
        begun.send(())?;
        Ok((0..MANY as u64).map(Ok))
    });
    let data = of_stream(stream.samples(MANY), 1);
    let (drop_ended, drop_ends) = mpsc::channel();
    std::thread::spawn(move || {
        let loader = data.loader(plan(1, 0, 1), MANY as u64 - 1..MANY as u64);
        begins.recv().unwrap();
        drop(loader);
        drop_ended.send(()).unwrap();
    });
    drop_ends.recv_timeout(Duration::from_secs(60)).expect("the loader seeks to the end");
}

#[test]
fn arrays_of_different_length_are_refused() {
    let device = Device::flex();
    let x = || Tensor::<2>::from_data([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], &device);
    let named = BTreeMap::from([("left".to_string(), x()), ("right".to_string(), x())]);
    let data = Data::arrays((named, x())).unwrap().shuffle(false);
    let (named, batch) = data.loader(plan(2, 0, 1), 1..2).next().unwrap().unwrap().unwrap();
    assert_eq!(batch.into_data().try_to_vec::<f32>().unwrap(), [5.0, 6.0]);
    assert_eq!(named["right"].clone().into_data().try_to_vec::<f32>().unwrap(), [5.0, 6.0]);
    let check = |error: Result<Data<(Tensor<2>, Tensor<1>)>>, expected: &str| {
        assert_eq!(error.unwrap_err().to_string(), expected);
    };
    let y = |n: usize| Tensor::<1>::zeros([n], &device);
    check(Data::arrays((x(), y(2))), "data.1 has 2 samples, but data.0 has 3");
    let none = 0..0;
    check(Data::arrays((x().slice([none]), y(2))), "data.0 has no samples");
}

/// Even numbers of three interleaved files, shuffled.
fn stream() -> Stream<u64> {
    let records = |file: u64| Ok((0..10).map(move |index| Ok(file * 100 + index)));
    Stream::list(vec![1, 2, 3])
        .interleave(2, 2, records)
        .filter(|number| number % 2 == 0)
        .shuffle(4)
}

fn of_stream(stream: Stream<u64>, workers: usize) -> Data<Vec<u64>> {
    Data::stream(stream, |items, _| items).unwrap().workers(workers).queue(2)
}

fn streamed(data: &Data<Vec<u64>>, plan: LoaderPlan, batches: Range<u64>) -> Vec<Vec<u64>> {
    data.loader(plan, batches).map(|batch| batch.unwrap().unwrap_or_default()).collect()
}

#[test]
fn stream_batches_do_not_depend_on_ranks() {
    let data = of_stream(stream(), 0);
    assert_eq!(data.samples(), 15);
    let expected = streamed(&data, plan(4, 0, 1), 0..8);
    for epoch in expected.chunks(4) {
        let mut all = epoch.concat();
        all.sort_unstable();
        let files = [1, 2, 3].map(|file| [0, 2, 4, 6, 8].map(|index| file * 100 + index));
        assert_eq!(all, files.concat());
    }
    assert_ne!(expected[..4], expected[4..]);
    for world_size in [2, 3, 5] {
        let ranks: Vec<_> =
            (0..world_size).map(|rank| streamed(&data, plan(4, rank, world_size), 0..8)).collect();
        for (index, batch) in expected.iter().enumerate() {
            let mut shares: Vec<_> = ranks.iter().flat_map(|rank| rank[index].clone()).collect();
            let mut batch = batch.clone();
            shares.sort_unstable();
            batch.sort_unstable();
            assert_eq!(shares, batch, "batch {index} over {world_size} ranks");
        }
    }
}

#[test]
fn stream_resumes_from_any_batch() {
    let seeded = || stream().map_seeded(|item, seed| Ok(item + seed % 1000 * 1000));
    let all = streamed(&of_stream(seeded(), 0), plan(4, 1, 2), 0..9);
    assert!(all.iter().flatten().any(|number| *number >= 1000));
    for workers in [0, 1, 3] {
        for first in 0..9 {
            let rest = streamed(&of_stream(seeded(), workers), plan(4, 1, 2), first..9);
            assert_eq!(rest, all[first as usize..], "from {first} with {workers} workers");
        }
    }
}

#[test]
fn streams_are_interleaved_cut_and_counted() {
    let all = |stream: Stream<u64>| {
        let data = of_stream(stream, 0);
        let samples = data.samples();
        streamed(&data, plan(samples, 0, 1), 0..1).remove(0)
    };
    let records = |file: u64| Ok((0..file).map(move |index| Ok(file * 10 + index)));
    let files = || Stream::list(vec![3, 1, 2, 4]);
    assert_eq!(all(files().interleave(1, 1, records))[..4], [30, 31, 32, 10]);
    let two = all(files().interleave(2, 1, records));
    assert_eq!(two, [30, 10, 31, 32, 20, 21, 40, 41, 42, 43]);
    let by_two = all(files().interleave(2, 2, records));
    assert_eq!(by_two, [30, 31, 10, 32, 20, 21, 40, 41, 42, 43]);
    assert_eq!(all(files().skip(1).take(2)), [1, 2]);
    assert_eq!(all(files().samples(3)), [3, 1, 2]);
    assert_eq!(all(files().shuffle(1)), [3, 1, 2, 4]);
    let mut mixed = all(files().shuffle(100));
    mixed.sort_unstable();
    assert_eq!(mixed, [1, 2, 3, 4]);
}

#[test]
fn map_runs_only_for_own_items() {
    use std::sync::atomic::{AtomicUsize, Ordering};
    let made = Arc::new(AtomicUsize::new(0));
    let count = made.clone();
    let stream = Stream::list((0..12).collect()).map(move |item: u64| {
        count.fetch_add(1, Ordering::Relaxed);
        Ok(item)
    });
    let data = of_stream(stream, 0);
    assert_eq!(streamed(&data, plan(4, 1, 2), 1..3), [vec![5, 7], vec![9, 11]]);
    assert_eq!(made.load(Ordering::Relaxed), 4);
}

#[test]
fn stream_error_is_an_error_of_its_batch() {
    let check = |stream: Stream<u64>, expected: &str| {
        for workers in [0, 2] {
            let data = of_stream(stream.clone(), workers);
            let mut loader = data.loader(plan(2, 0, 1), 0..3);
            assert_eq!(loader.next().unwrap().unwrap(), Some(vec![0, 1]));
            assert_eq!(loader.next().unwrap().unwrap_err().to_string(), expected);
        }
    };
    let numbers = |up_to: u64| Stream::new(move |_| Ok((0..up_to).map(Ok)));
    let short = "the stream returned 3 items in epoch 0, but an epoch has 6; set the number of \
                 items in an epoch with `Stream::samples`";
    check(numbers(3).samples(6), short);
    let broken = |item: u64| if item == 2 { Err("item 2 is broken".into()) } else { Ok(item) };
    check(numbers(6).map(broken), "item 2 is broken");
    let panics = |item: u64| if item == 2 { panic!("item 2 is broken") } else { Ok(item) };
    check(numbers(6).map(panics), "cannot make batch 1: item 2 is broken");
    let reads = |_| Ok((0..6).map(|item| if item == 2 { panic!("no more") } else { Ok(item) }));
    check(Stream::new(reads).samples(6), "cannot read the data: no more");
}

#[test]
fn ranks_take_one_sequence_batch_per_step() {
    struct Tens;
    impl Sequence<Vec<usize>> for Tens {
        fn batches(&self) -> usize {
            7
        }
        fn batch(&self, index: usize, context: &BatchContext) -> Result<Vec<usize>> {
            Ok(vec![index * 10 + context.epoch as usize])
        }
    }
    let data = Data::sequence(Tens);
    // The batch size is fixed per rank, independent of the global batch size.
    assert_eq!(data.steps(&plan(64, 0, 2)), 4);
    let ranks = [0, 1].map(|rank| batches(&data, plan(64, rank, 2), 0..8).concat());
    for epoch in 0..2 {
        let mut all: Vec<_> =
            ranks.concat().into_iter().filter(|number| number % 10 == epoch).collect();
        all.sort_unstable();
        assert_eq!(all, (0..7).map(|index| index * 10 + epoch).collect::<Vec<_>>());
    }
    let error = data.check(&plan(64, 0, 8)).unwrap_err().to_string();
    assert!(error.starts_with("the training data has 7 batches for 8 ranks"), "{error}");
}

#[test]
fn last_samples_are_split_off_for_validation() {
    let split = |fraction| Data::new(Numbers(10)).shuffle(false).validation_split(fraction);
    let (training, validation) = split(0.25).unwrap();
    assert_eq!(batches(&training, plan(8, 0, 1), 0..1), [(0..7).collect::<Vec<_>>()]);
    assert_eq!(batches(&validation, plan(8, 0, 1), 0..1), [vec![7, 8, 9]]);
    for fraction in [0.0, 0.95, 1.0, -1.0, f64::NAN] {
        let error = split(fraction).unwrap_err().to_string();
        assert!(error.starts_with("validation_split is "), "{error}");
    }
    let error = of_stream(stream(), 0).validation_split(0.5).unwrap_err().to_string();
    assert!(error.contains("`Stream::take`"), "{error}");
}

#[test]
fn class_weights_apply_per_sample() {
    let device = Device::flex();
    let rows = || {
        let y = Tensor::<1, Int>::from_data([0, 2, 1, 0], &device);
        (Tensor::<2>::zeros([4, 1], &device), y)
    };
    let data = Data::arrays(rows()).unwrap().shuffle(false).class_weights(&[1.0, 5.0, 0.5]);
    let (_, _, weights) = data.loader(plan(4, 0, 1), 0..1).next().unwrap().unwrap().unwrap();
    assert_eq!(weights.into_data().try_to_vec::<f32>().unwrap(), [1.0, 0.5, 5.0, 1.0]);
    let data = Data::arrays(rows()).unwrap().class_weights(&[1.0, 5.0]);
    let error = data.loader(plan(4, 0, 1), 0..1).next().unwrap().unwrap_err().to_string();
    assert_eq!(error, "class_weights has 2 weights, but a label is 2");
}

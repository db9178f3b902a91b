//! Which samples batches hold, and in which order they come.

use std::collections::BTreeMap;

use burn::tensor::{DType, Device, Tensor};

use super::*;

/// Samples `0..n`, as a batch of their numbers.
struct Numbers(usize);

impl Source<Vec<usize>> for Numbers {
    fn samples(&self) -> usize {
        self.0
    }

    fn batch(&self, samples: &[usize], _: &At) -> Result<Vec<usize>> {
        Ok(samples.to_vec())
    }
}

fn plan(global_batch: usize, rank: usize, world: usize) -> Plan {
    let device = Device::flex();
    Plan { global_batch, rank, world, seed: 1, shuffle: true, device, dtype: DType::F32 }
}

fn batches(data: &Data<Vec<usize>>, plan: Plan, batches: Range<u64>) -> Vec<Vec<usize>> {
    data.loader(plan, batches).map(|batch| batch.unwrap().unwrap_or_default()).collect()
}

#[test]
fn ranks_share_each_global_batch_and_every_epoch_has_every_sample() {
    let data = Data::new(Numbers(23));
    let steps = data.steps(6);
    assert_eq!(steps, 4);
    let whole = batches(&data, plan(6, 0, 1), 0..3 * steps);
    for world in 1..5 {
        let ranks: Vec<_> =
            (0..world).map(|rank| batches(&data, plan(6, rank, world), 0..3 * steps)).collect();
        for (index, batch) in whole.iter().enumerate() {
            let mut shares: Vec<_> = ranks.iter().flat_map(|rank| rank[index].clone()).collect();
            let mut batch = batch.clone();
            shares.sort_unstable();
            batch.sort_unstable();
            assert_eq!(shares, batch, "batch {index} over {world} ranks");
        }
    }
    for epoch in whole.chunks(steps as usize) {
        let mut all = epoch.concat();
        all.sort_unstable();
        assert_eq!(all, (0..23).collect::<Vec<_>>());
    }
    assert_ne!(whole[0], whole[4], "epochs have orders of their own");
}

#[test]
fn a_seek_and_workers_give_the_same_batches() {
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
fn the_last_batch_is_short_or_left_out_and_order_can_be_kept() {
    let data = Data::new(Numbers(5)).shuffle(false);
    assert_eq!(batches(&data, plan(2, 0, 1), 0..3), [vec![0, 1], vec![2, 3], vec![4]]);
    let data = data.drop_last();
    assert_eq!(data.steps(2), 2);
    assert_eq!(batches(&data, plan(2, 0, 1), 1..3), [vec![2, 3], vec![0, 1]]);
}

#[test]
fn what_a_worker_panics_with_is_the_batchs_error() {
    let item = |index: usize| if index == 3 { panic!("item 3 is broken") } else { Some(index) };
    for workers in [0, 2] {
        let data = Data::items(5, item, |items, _| items).shuffle(false).workers(workers);
        let mut loader = data.loader(plan(2, 0, 1), 0..3);
        assert_eq!(loader.next().unwrap().unwrap(), Some(vec![0, 1]));
        let error = loader.next().unwrap().unwrap_err().to_string();
        assert_eq!(error, "batch 1 could not be made: item 3 is broken");
    }
}

#[test]
fn arrays_give_rows_and_refuse_fields_of_different_length() {
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

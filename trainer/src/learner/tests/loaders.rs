//! Data of this crate as loaders of burn.

use super::*;
use crate::{BatchContext, Sequence};

#[test]
fn our_loader_works_as_a_burn_loader() {
    let _guard = lock_random_stream();
    let context = standalone(None).context().unwrap();
    let data = Data::dataset(InMemDataset::new(items()), Pairs).shuffle(false);
    let loader = context.dataloader(data, 16);
    let labels = |loader: &Arc<dyn DataLoader<Pair>>| -> Vec<i64> {
        let of = |pair: Pair| pair.1.into_data().convert::<i64>().try_to_vec::<i64>().unwrap();
        loader.iter().flat_map(|pair| of(pair.unwrap())).collect()
    };
    let expected: Vec<i64> = (0..100).map(|i| i % 5).collect();
    assert_eq!(labels(&loader), expected);
    let part = loader.slice(30, 70).to_device(&Device::flex());
    assert_eq!((part.num_items(), labels(&part)), (40, expected[30..70].to_vec()));
}

/// Batch `i` has one sample, of class `i`.
#[test]
fn slice_of_a_sequence_has_its_batches() {
    struct Batches;
    impl Sequence<Pair> for Batches {
        fn batches(&self) -> usize {
            5
        }

        fn batch(&self, index: usize, context: &BatchContext) -> Result<Pair> {
            let class = TensorData::new(vec![index as i64], [1]);
            Ok((Tensor::zeros([1, 20], context.device), Tensor::from_data(class, context.device)))
        }
    }
    let _guard = lock_random_stream();
    let context = standalone(None).context().unwrap();
    let loader = context.dataloader(Data::sequence(Batches).shuffle(false), 16);
    let class = |pair: Pair| pair.1.into_data().convert::<i64>().try_to_vec::<i64>().unwrap();
    let classes =
        loader.slice(1, 4).iter().flat_map(|pair| class(pair.unwrap())).collect::<Vec<_>>();
    assert_eq!(classes, [1, 2, 3]);
}

//! Data of this crate as loaders of burn.

use burn::data::dataloader::{DataLoaderIterator, Progress};

use super::*;
use crate::learner::loaders::data_of_loader;
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

/// A loader whose batches are numbers of items. The first is larger than the others.
struct FirstIsLargest;

impl DataLoader<usize> for FirstIsLargest {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<usize> + 'a> {
        Box::new(SizedBatches { left: vec![1, 1, 3], num_items: 0 })
    }

    fn num_items(&self) -> usize {
        5
    }

    fn to_device(&self, _: &Device) -> Arc<dyn DataLoader<usize>> {
        Arc::new(Self)
    }

    fn slice(&self, _: usize, _: usize) -> Arc<dyn DataLoader<usize>> {
        Arc::new(Self)
    }
}

struct SizedBatches {
    /// Sizes of the batches to return, from last to first.
    left: Vec<usize>,
    num_items: usize,
}

impl Iterator for SizedBatches {
    type Item = Result<usize, DatasetError>;

    fn next(&mut self) -> Option<Self::Item> {
        let size = self.left.pop()?;
        self.num_items += size;
        Some(Ok(size))
    }
}

impl DataLoaderIterator<usize> for SizedBatches {
    fn progress(&self) -> Progress {
        Progress::new(self.num_items, 5, None)
    }
}

/// A validation reads exactly the computed number of batches.
#[test]
fn extra_batches_are_an_error_of_the_last() {
    let _guard = lock_random_stream();
    let context = standalone(None).context().unwrap();
    let loader: Arc<dyn DataLoader<usize>> = Arc::new(FirstIsLargest);
    let plan = context.loader_plan(1, false);
    let (data, batch_size) =
        data_of_loader(&loader, &context.learner_state, &plan, |size, _| size).unwrap();
    assert_eq!((batch_size, data.steps(&plan)), (3, 2));
    let mut batches = data.loader(plan, 0..2);
    assert_eq!(batches.next().unwrap().unwrap(), Some(3));
    let error = batches.next().unwrap().unwrap_err().to_string();
    assert!(error.starts_with("the data loader has more than 2 batches per epoch"), "{error}");
}

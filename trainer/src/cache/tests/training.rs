//! Tests of training on a cached set.

use burn::nn::{Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::tensor::{Device, Int, Tensor, TensorData};

use super::*;
use crate::callback::{Callback, Control, Logs};
use crate::{Fit, Fitted, LoaderPlan, Optimizers, StepOutput};

/// Checks order and values from several batches of two epochs, with and without workers.
#[test]
fn set_data_can_start_at_any_batch() {
    let root = tempfile::tempdir().unwrap();
    let set = open(&DataCache::new(root.path()), "a", 50, &AtomicUsize::new(0)).unwrap();
    let data = |workers| {
        let batcher = |samples: Vec<Sample>, device: &Device| {
            let labels: Vec<i64> = samples.iter().map(|(index, _)| *index as i64).collect();
            let num = labels.len();
            Tensor::<1, Int>::from_data(TensorData::new(labels, [num]), device)
        };
        set.data(batcher).workers(workers)
    };
    let plan = || LoaderPlan {
        global_batch: 8,
        rank: 0,
        world_size: 1,
        seed: 1,
        shuffle: true,
        device: Device::flex(),
        dtype: burn::tensor::DType::F32,
    };
    let read = |workers: usize, first: u64| -> Vec<Vec<i64>> {
        let batches = data(workers).loader(plan(), first..14);
        let of = |batch: Tensor<1, Int>| batch.into_data().convert::<i64>().try_to_vec().unwrap();
        batches.map(|batch| of(batch.unwrap().unwrap())).collect()
    };
    let all = read(0, 0);
    let mut epoch = all[..7].concat();
    epoch.sort_unstable();
    assert_eq!(epoch, (0..50).collect::<Vec<_>>());
    for (workers, first) in [(0, 3), (2, 0), (2, 9)] {
        assert_eq!(read(workers, first), all[first as usize..]);
    }
}

/// Requests a stop, as a signal would.
struct StopAt(u64, crate::stop::StopSignal);

impl Callback for StopAt {
    fn on_batch_end(&mut self, _: &Logs, control: &mut Control) -> Result<()> {
        if control.batches() == self.0 {
            self.1.set();
        }
        Ok(())
    }
}

#[test]
fn training_on_a_set_resumes_bit_identical() {
    let _guard = crate::train::tests::lock_random_stream();
    let root = tempfile::tempdir().unwrap();
    let set = open(&DataCache::new(root.path()), "a", 50, &AtomicUsize::new(0)).unwrap();
    let train = |folder: Option<&Path>, stop_at: u64| -> Result<Fitted<Linear>> {
        let context = standalone(folder);
        let data = set.data(|samples: Vec<Sample>, device: &Device| {
            let pixels: Vec<f32> = samples
                .iter()
                .flat_map(|(_, bytes)| &bytes[..8])
                .map(|byte| f32::from(*byte) / 255.0)
                .collect();
            Tensor::<2>::from_data(TensorData::new(pixels, [samples.len(), 8]), device)
        });
        let model = LinearConfig::new(8, 8).init(context.device());
        let stop = StopAt(stop_at, context.stop.clone()).boxed();
        let fit = Fit::new(data.skip_shuffle_at_epoch_end().workers(2));
        let fit = fit.batch_size(8).epochs(3).callbacks(vec![stop]);
        let step =
            |model: &Linear, x: Tensor<2>| StepOutput::regression(model.forward(x.clone()), x);
        context.fit(model, Optimizers::one(SgdConfig::new().build(), 0.1), step, fit)
    };
    let weights = |fitted: Fitted<Linear>| -> Vec<u32> {
        let values: Vec<f32> = fitted.model.weight.val().into_data().try_to_vec().unwrap();
        values.iter().map(|value| value.to_bits()).collect()
    };
    let straight = weights(train(None, u64::MAX).unwrap());
    for stop_at in [3, 10] {
        let folder = tempfile::tempdir().unwrap();
        train(Some(folder.path()), stop_at).unwrap_err();
        assert!(weights(train(Some(folder.path()), u64::MAX).unwrap()) == straight, "{stop_at}");
    }
}

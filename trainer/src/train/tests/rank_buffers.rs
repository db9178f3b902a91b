//! Buffers that steps read, and that differ between ranks.

use burn::module::{Param, RunningState};

use super::data_kinds::{Batch, data, of_ranks};
use super::*;

/// A weight, and a running mean of this rank's inputs.
#[derive(Module, Debug)]
struct Centered {
    weight: Param<Tensor<1>>,
    mean: RunningState<Tensor<1>>,
}

impl Centered {
    fn new(device: &Device) -> Self {
        let mean = Tensor::zeros([1], &device.clone().without_autodiff());
        let weight = Param::from_tensor(Tensor::zeros([1], device));
        Self { weight, mean: RunningState::new(mean) }
    }

    fn step(&self, (x, _, _): Batch) -> StepOutput {
        let samples = x.dims()[0];
        let old = Tensor::from_inner(self.mean.value_sync());
        self.mean.update((old.clone() * 0.5 + x.clone().mean() * 0.5).inner());
        let x: Tensor<1> = x.sum_dim(1).squeeze_dim(1);
        let error = self.weight.val() * x - old;
        StepOutput::sum((error.clone() * error).sum(), samples)
    }
}

fn train(folder: &Path, size: usize, stop_at: u64) -> Vec<Result<[u32; 2]>> {
    of_ranks(folder, size, 7, |context| {
        let stop = StopAt(stop_at, context.stop.clone()).boxed();
        let fit = Fit::new(data("items")?)
            .batch_size(context.distributed().shard_batch_size(18)?)
            .callbacks(vec![stop]);
        let sgd = Optimizers::one(SgdConfig::new().build(), 1e-3);
        let model = Centered::new(context.device());
        let Centered { weight, mean } = context.fit(model, sgd, Centered::step, fit)?.model;
        let bits = |tensor: Tensor<1>| tensor.into_data().try_to_vec::<f32>().unwrap()[0].to_bits();
        Ok([bits(weight.val()), bits(mean.value_sync())])
    })
}

#[test]
fn ranks_resume_with_their_own_buffers() {
    let _stream = lock_random_stream();
    for size in [1, 2, 3] {
        let folder = brief_folder();
        let straight = train(folder.path(), size, u64::MAX);
        let straight: Vec<_> = straight.into_iter().map(Result::unwrap).collect();
        for stop_at in [1, 3, 5] {
            let folder = brief_folder();
            train(folder.path(), size, stop_at)
                .into_iter()
                .for_each(|rank| drop(rank.unwrap_err()));
            let resumed = train(folder.path(), size, u64::MAX);
            let resumed: Vec<_> = resumed.into_iter().map(Result::unwrap).collect();
            assert_eq!(resumed, straight, "{size} ranks, stopped at {stop_at}");
        }
    }
}

#[test]
fn other_world_sizes_resume_with_buffers_of_rank_0() {
    let _stream = lock_random_stream();
    let folder = brief_folder();
    train(folder.path(), 3, 3).into_iter().for_each(|rank| drop(rank.unwrap_err()));
    assert!(train(folder.path(), 2, u64::MAX).iter().all(Result::is_ok));
}

//! A custom loop with several steps per batch, like a GAN, on one, two and three ranks. One rank
//! dies and is later preempted. Results and rows are bit-identical to an uninterrupted run.

use burn::module::Param;
use burn::nn::Sigmoid;
use burn::tensor::activation::log_sigmoid;

use super::rank_failures::{FailurePoint, RankFailure, check_failure_points};
use super::*;
use crate::train::custom_loop::NextAction;

/// Two networks with opposing losses.
#[derive(Module, Debug)]
struct Gan {
    generator: Linear,
    discriminator: Linear,
}

impl Gan {
    /// Creates weights without random numbers, because ranks in threads share the random stream.
    fn new(device: &Device) -> Self {
        let linear = |inputs: usize, outputs: usize| {
            let weight = Tensor::<1, Int>::arange(0..(inputs * outputs) as i64, device);
            let weight = weight.float().sin().reshape([inputs, outputs]);
            Linear { weight: Param::from_tensor(weight), bias: None }
        };
        Self { generator: linear(3, 20), discriminator: linear(20, 1) }
    }

    fn fake(&self, noise: Tensor<2>) -> Tensor<2> {
        Sigmoid.forward(self.generator.forward(noise))
    }

    fn discriminator_loss(&self, real: Tensor<2>, noise: Tensor<2>) -> StepOutput {
        let samples = real.dims()[0];
        let fake = self.fake(noise).detach();
        let right = log_sigmoid(self.discriminator.forward(real))
            + log_sigmoid(self.discriminator.forward(fake).neg());
        StepOutput::sum(right.sum().neg(), samples).loss_as("discriminator_loss")
    }

    fn generator_loss(&self, noise: Tensor<2>) -> StepOutput {
        let samples = noise.dims()[0];
        let taken = log_sigmoid(self.discriminator.forward(self.fake(noise)));
        StepOutput::sum(taken.sum().neg(), samples).loss_as("generator_loss")
    }
}

/// Returns noise for a step of a batch, different for each rank.
fn noise(context: &Context, real: &Tensor<2>, batches: u64, step: u64) -> Tensor<2> {
    let (samples, rank) = (real.dims()[0], context.distributed().rank() as u64);
    let of =
        |index| (mix_seed(&[batches, step, rank, index]) >> 40) as f32 / (1 << 23) as f32 - 1.0;
    let noise: Vec<f32> = (0..3 * samples as u64).map(of).collect();
    Tensor::from_data(TensorData::new(noise, [samples, 3]), &real.device())
}

/// Each batch has two steps of the discriminator, then one of the generator with the updated
/// discriminator.
fn train(context: &Context, callback: Box<dyn Callback>) -> Result<Vec<u32>> {
    let discriminator = |step: u64| 0.1 / (step + 1) as f64;
    let optimizers = Optimizers::one(AdamConfig::new().init(), 0.01).group(
        "^discriminator",
        SgdConfig::new().build(),
        discriminator,
    )?;
    let batch_size = context.distributed().shard_batch_size(18)?;
    let (x, _) = samples();
    let validation = Data::arrays(x.clone())?;
    let fit = Fit::new(Data::arrays(x)?).batch_size(batch_size).callbacks(vec![callback]);
    let mut training = context.training(Gan::new(context.device()), optimizers, fit)?;
    while let Some(action) = training.next()? {
        match action {
            NextAction::Train(batch) => {
                let batches = training.batches();
                let sampled = |real: &Tensor<2>, step| noise(context, real, batches, step);
                for step in 0..2 {
                    let output = batch.clone().map(|real: Tensor<2>| {
                        let noise = sampled(&real, step);
                        training.model().discriminator_loss(real, noise)
                    });
                    training.step("^discriminator", output)?;
                }
                let output = batch.map(|real| training.model().generator_loss(sampled(&real, 2)));
                training.step("^generator", output)?;
                training.end_batch()?;
            }
            NextAction::Validate => {
                let score = |model: &Gan, real: Tensor<2>| {
                    let noise = noise(context, &real, u64::MAX, 0);
                    model.discriminator_loss(real, noise)
                };
                let model = training.model();
                let metrics = context.evaluate(&*model, score, &validation, batch_size)?;
                drop(model);
                training.validated(&metrics)?;
            }
        }
    }
    let model = training.finish()?.model;
    let data = [model.generator.weight.val(), model.discriminator.weight.val()];
    let bits = |weights: Tensor<2>| -> Vec<_> {
        weights.into_data().iter::<f32>().map(f32::to_bits).collect()
    };
    Ok(data.into_iter().flat_map(bits).collect())
}

#[test]
fn gan_recovery_is_bit_identical() {
    let _stream = lock_random_stream();
    for size in [1, 2, 3] {
        let (_, num_twice) =
            check_failure_points("a GAN", size, 1..=7, |context, ends: FailurePoint, of| {
                train(context, RankFailure::of(context, ends, of))
            });
        assert!(num_twice >= 2, "{num_twice} rows were written twice");
    }
}

//! A GAN that generates handwritten digits, in a custom training loop with two losses.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig, Relu, Sigmoid};
use burn::optim::AdamConfig;
use burn::tensor::activation::{leaky_relu, log_sigmoid};
use burn::tensor::{Device, Distribution, Int, Tensor, TensorData};
use serde::Deserialize;
use stoker_trainer::{
    Context, Data, Fit, Image, InvalidHyperparameters, Metrics, NextAction, Optimizers, Result,
    StepOutput, mix_seed,
};

use crate::data_config::DataConfig;
use crate::mnist::images;

const PIXELS: usize = 28 * 28;
/// Size of the generator's input.
const LATENT: usize = 64;
/// Number of generated images in a validation.
const VALIDATION_IMAGES: usize = 256;
/// Number of them that TensorBoard shows, in rows of eight.
const SHOWN_IMAGES: usize = 64;

/// Hyperparameters. The library reads `global_batch_size`.
#[derive(Clone, Debug, Deserialize)]
struct Hparams {
    generator_rate: f64,
    discriminator_rate: f64,
    hidden: usize,
}

/// Both networks in one model, so that one checkpoint contains them.
#[derive(Debug, Module)]
struct Gan {
    generator: Pair,
    discriminator: Pair,
}

/// Two layers.
#[derive(Debug, Module)]
struct Pair {
    hidden: Linear,
    output: Linear,
}

impl Pair {
    fn new(sizes: [usize; 3], device: &Device) -> Self {
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(device);
        Self { hidden: linear(sizes[0], sizes[1]), output: linear(sizes[1], sizes[2]) }
    }
}

impl Gan {
    fn new(hidden: usize, device: &Device) -> Self {
        Self {
            generator: Pair::new([LATENT, hidden, PIXELS], device),
            discriminator: Pair::new([PIXELS, hidden, 1], device),
        }
    }

    /// Generates images from noise.
    ///
    /// # Shapes
    ///
    /// - noise: `[samples, LATENT]`
    /// - result: `[samples, PIXELS]`, from 0 to 1
    fn generate(&self, noise: Tensor<2>) -> Tensor<2> {
        let hidden = Relu.forward(self.generator.hidden.forward(noise));
        Sigmoid.forward(self.generator.output.forward(hidden))
    }

    /// Returns logits `[samples, 1]`: how real the images look.
    fn judge(&self, pictures: Tensor<2>) -> Tensor<2> {
        let hidden = leaky_relu(self.discriminator.hidden.forward(pictures), 0.2);
        self.discriminator.output.forward(hidden)
    }

    /// Returns the discriminator's loss: it must tell real images from generated ones.
    fn discriminator_loss(&self, real: Tensor<2>) -> StepOutput {
        let [samples, _] = real.dims();
        let generated = self.generate(noise(samples, &real.device())).detach();
        let right = log_sigmoid(self.judge(real)) + log_sigmoid(self.judge(generated).neg());
        StepOutput::sum(right.sum().neg(), samples).loss_as("discriminator_loss")
    }

    /// Returns the generator's loss: its images must pass for real ones.
    fn generator_loss(&self, samples: usize, device: &Device) -> StepOutput {
        let passed = log_sigmoid(self.judge(self.generate(noise(samples, device))));
        StepOutput::sum(passed.sum().neg(), samples).loss_as("generator_loss")
    }
}

/// Samples noise for this batch. The library seeds each batch, so a resumed run samples the same.
fn noise(samples: usize, device: &Device) -> Tensor<2> {
    Tensor::random([samples, LATENT], Distribution::Normal(0.0, 1.0), device)
}

/// Returns the same noise in every validation and on every rank: sums of 12 uniform numbers, which
/// are nearly normal.
fn fixed_noise(device: &Device) -> Tensor<2> {
    let uniform = |i: u64| (mix_seed(&[i]) >> 40) as f32 / (1 << 24) as f32;
    let normal = |i: u64| (0..12).map(|k| uniform(i * 12 + k)).sum::<f32>() - 6.0;
    let values: Vec<f32> = (0..(VALIDATION_IMAGES * LATENT) as u64).map(normal).collect();
    Tensor::from_data(TensorData::new(values, [VALIDATION_IMAGES, LATENT]), device)
}

/// Returns the mean image, `[1, PIXELS]`.
fn mean_picture(pictures: Tensor<2>) -> Tensor<2> {
    pictures.mean_dim(0)
}

/// Trains the GAN.
pub(crate) fn train(context: &Context) -> Result<()> {
    let hparams: Hparams = context.hparams()?;
    if hparams.hidden == 0 {
        return Err(InvalidHyperparameters("hidden is 0, but must be at least 1".into()).into());
    }
    let data_config = DataConfig::new(context, "mnist")?;
    let data: Data<(Tensor<4>, Tensor<1, Int>)> = Data::new(images(&data_config, "train")?);
    let test = Data::new(images(&data_config, "t10k")?);

    // The mean of the first real images.
    let device = context.device().clone().without_autodiff();
    let of_test = context.loader_plan(VALIDATION_IMAGES, false);
    let first = test.loader(of_test, 0..1).next().transpose()?.flatten();
    let (first, _): (Tensor<4>, Tensor<1, Int>) = first.ok_or("the test set is empty")?;
    let real_mean = context.distributed().broadcast(values(mean_picture(first.flatten(1, 3))))?;

    let adam = AdamConfig::new().with_beta_1(0.5);
    let optimizers = Optimizers::one(adam.init(), hparams.generator_rate).group(
        "^discriminator",
        adam.build(),
        hparams.discriminator_rate,
    )?;
    let fit = Fit::new(data.workers(1)).batch_size(context.batch_size()?);
    let model = Gan::new(hparams.hidden, context.device());
    let mut training = context.training(model, optimizers, fit)?;
    context.session().set_status("learns to draw");
    training.text("model", format!("Two networks with **{}** hidden units each.", hparams.hidden));
    while let Some(action) = training.next()? {
        match action {
            NextAction::Train(batch) => {
                let real = batch.map(|(pictures, _)| pictures.flatten(1, 3));
                let samples = real.as_ref().map(|images: &Tensor<2>| images.dims()[0]);
                let loss = real.map(|real| training.model().discriminator_loss(real));
                training.step("^discriminator", loss)?;
                let loss = samples
                    .map(|samples| training.model().generator_loss(samples, context.device()));
                training.step("^generator", loss)?;
                training.end_batch()?;
            }
            NextAction::Validate => {
                let generated = training.model().valid().generate(fixed_noise(&device));
                let shown = values(generated.clone().narrow(0, 0, SHOWN_IMAGES));
                let mean = values(mean_picture(generated));
                let square = |(a, b): (&f32, &f32)| f64::from(a - b).powi(2);
                let distance: f64 = mean.iter().zip(&real_mean).map(square).sum();
                let mut metrics = Metrics::default();
                metrics.add_one("mean_distance", distance.sqrt(), 1.0);
                training.image("generated", Image::grid([SHOWN_IMAGES, 1, 28, 28], &shown, 8)?);
                training.validated(&metrics)?;
            }
        }
    }
    training.finish()?;
    Ok(())
}

fn values(picture: Tensor<2>) -> Vec<f32> {
    picture.into_data().iter::<f32>().collect()
}

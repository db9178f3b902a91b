//! CIFAR-10: 32 x 32 color images of ten classes, with five training files and one validation file.

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::pool::{MaxPool2d, MaxPool2dConfig};
use burn::nn::{
    BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Linear, LinearConfig, PaddingConfig2d,
};
use burn::optim::AdamConfig;
use burn::tensor::{Device, Int, Tensor};
use serde::Deserialize;
use stoker_trainer::datasets::{Augment, Images, cifar};
use stoker_trainer::kernels::{
    Activation, BatchNormExt, Conv2dExt, LinearExt, MaxPool2dExt, OptimizerConfigExt,
};
use stoker_trainer::{
    Context, Data, InvalidHyperparameters, Optimizers, Result, StepOutput, Trial,
};

use crate::data_config::DataConfig;

/// Images `[samples, 3, 32, 32]` and their classes `[samples]`.
type Batch = (Tensor<4>, Tensor<1, Int>);

/// Hyperparameters. The library reads `global_batch_size`.
#[derive(Debug, Deserialize)]
struct Hparams {
    learning_rate: f64,
    dropout: f64,
    /// Number of filters in the first layer. The second and third have two and four times as many.
    filters: usize,
    /// Maximum shift of training images in pixels; half of the images are also flipped. 0 disables
    /// the augmentation.
    shift: usize,
}

/// The trial.
#[derive(Debug)]
pub(crate) struct Cifar10 {
    hparams: Hparams,
    data: DataConfig,
}

impl Trial for Cifar10 {
    type Model = Cnn;
    type Batch = Batch;

    fn new(context: &Context) -> Result<Self> {
        let hparams: Hparams = context.hparams()?;
        let invalid = |text: String| Err(InvalidHyperparameters(text).into());
        if !(0.0..1.0).contains(&hparams.dropout) {
            return invalid(format!("dropout is {}, but must be in [0, 1)", hparams.dropout));
        }
        if hparams.filters == 0 || hparams.shift > 16 {
            return invalid(format!(
                "filters is {} and shift is {}, but must be at least 1 and at most 16",
                hparams.filters, hparams.shift
            ));
        }
        Ok(Self { hparams, data: DataConfig::new(context, "cifar10")? })
    }

    fn build_model(&self, device: &Device) -> Result<Cnn> {
        Ok(Cnn::new(self.hparams.filters, self.hparams.dropout, device))
    }

    fn build_optimizers(&self) -> Result<Optimizers> {
        Ok(Optimizers::one(AdamConfig::new().init_fused(), self.hparams.learning_rate))
    }

    fn build_training_data(&self) -> Result<Data<Batch>> {
        let names = (1..=5).map(|index| format!("data_batch_{index}.bin"));
        let images = self.images(names)?;
        let shift = self.hparams.shift;
        let augment = Augment { flip: true, shift };
        let images = if shift > 0 { images.augmented(augment) } else { images };
        Ok(Data::new(images).workers(1))
    }

    fn build_validation_data(&self) -> Result<Data<Batch>> {
        Ok(Data::new(self.images(["test_batch.bin".into()])?))
    }

    fn step(&self, model: &Cnn, (images, classes): Batch) -> StepOutput {
        StepOutput::classification(model.forward(images), classes)
    }
}

impl Cifar10 {
    fn images(&self, names: impl IntoIterator<Item = String>) -> Result<Images> {
        let paths = names.into_iter().map(|name| self.data.file(&[&name]));
        let images = cifar::read(&paths.collect::<Result<Vec<_>>>()?)?;
        Ok(images.normalized(&[0.4914, 0.4822, 0.4465], &[0.247, 0.2435, 0.2616])?)
    }
}

/// Three layers of convolution, batch normalization and max pooling, with dropout before the output
/// layer.
#[derive(Debug, Module)]
pub(crate) struct Cnn {
    first: Layer,
    second: Layer,
    third: Layer,
    pool: MaxPool2d,
    dropout: Dropout,
    output: Linear,
}

#[derive(Debug, Module)]
struct Layer {
    conv: Conv2d,
    norm: BatchNorm,
}

impl Layer {
    fn new(channels: [usize; 2], device: &Device) -> Self {
        let conv = Conv2dConfig::new(channels, [3, 3]).with_padding(PaddingConfig2d::Same);
        let norm = BatchNormConfig::new(channels[1]);
        Self { conv: conv.with_bias(false).init(device), norm: norm.init(device) }
    }

    fn forward(&self, images: Tensor<4>) -> Tensor<4> {
        let convolved = self.conv.forward_fused(images, Activation::Identity);
        self.norm.forward_activated(convolved, Activation::Relu)
    }
}

impl Cnn {
    fn new(filters: usize, dropout: f64, device: &Device) -> Self {
        Self {
            first: Layer::new([3, filters], device),
            second: Layer::new([filters, 2 * filters], device),
            third: Layer::new([2 * filters, 4 * filters], device),
            pool: MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
            dropout: DropoutConfig::new(dropout).init(),
            output: LinearConfig::new(4 * filters * 4 * 4, 10).init(device),
        }
    }

    /// # Shapes
    ///
    /// - images: `[samples, 3, 32, 32]`
    /// - result: `[samples, 10]`, logits
    fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let first = self.pool.forward_fused(self.first.forward(images));
        let second = self.pool.forward_fused(self.second.forward(first));
        let third = self.pool.forward_fused(self.third.forward(second));
        let dropped = self.dropout.forward(third.flatten(1, 3));
        self.output.forward_fused(dropped, Activation::Identity)
    }
}

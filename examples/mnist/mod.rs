//! MNIST: 60,000 images of handwritten digits (28 x 28) for training and 10,000 for validation.

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::pool::{MaxPool2d, MaxPool2dConfig};
use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig, PaddingConfig2d};
use burn::optim::AdamConfig;
use burn::tensor::{Device, Int, Tensor};
use serde::Deserialize;
use stoker_trainer::datasets::Images;
use stoker_trainer::kernels::{Activation, Conv2dExt, LinearExt, OptimizerConfigExt};
use stoker_trainer::{
    Context, Data, InvalidHyperparameters, Optimizers, Result, StepOutput, Trial,
};

use crate::data_config::DataConfig;

/// Images `[samples, 1, 28, 28]` and their digits `[samples]`.
pub(crate) type Batch = (Tensor<4>, Tensor<1, Int>);

/// Hyperparameters. The library reads `global_batch_size`.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Hparams {
    model: Kind,
    learning_rate: f64,
    dropout: f64,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Kind {
    Mlp,
    Cnn,
}

/// The trial.
#[derive(Debug)]
pub(crate) struct Mnist {
    hparams: Hparams,
    data: DataConfig,
}

impl Trial for Mnist {
    type Model = Network;
    type Batch = Batch;

    fn new(context: &Context) -> Result<Self> {
        Ok(Self { hparams: Hparams::new(context)?, data: DataConfig::new(context, "mnist")? })
    }

    fn build_model(&self, device: &Device) -> Result<Network> {
        Ok(self.hparams.network(device))
    }

    fn build_optimizers(&self) -> Result<Optimizers> {
        Ok(self.hparams.optimizers())
    }

    fn build_training_data(&self) -> Result<Data<Batch>> {
        Ok(Data::new(images(&self.data, "train")?.normalized(&[0.1307], &[0.3081])?).workers(1))
    }

    fn build_validation_data(&self) -> Result<Data<Batch>> {
        Ok(Data::new(images(&self.data, "t10k")?.normalized(&[0.1307], &[0.3081])?))
    }

    fn step(&self, model: &Network, (images, digits): Batch) -> StepOutput {
        StepOutput::classification(model.forward(images), digits)
    }
}

/// Reads one part of the data set, `train` or `t10k`, from plain or gzip files.
pub(crate) fn images(data: &DataConfig, part: &str) -> Result<Images> {
    let file = |name: &str| data.file(&[&format!("{part}-{name}"), &format!("{part}-{name}.gz")]);
    Ok(Images::idx(file("images-idx3-ubyte")?, file("labels-idx1-ubyte")?)?)
}

impl Hparams {
    pub(crate) fn new(context: &Context) -> Result<Self> {
        let hparams: Self = context.hparams()?;
        if !(0.0..1.0).contains(&hparams.dropout) {
            let text = format!("dropout is {}, but must be in [0, 1)", hparams.dropout);
            return Err(InvalidHyperparameters(text).into());
        }
        Ok(hparams)
    }

    pub(crate) fn network(&self, device: &Device) -> Network {
        match self.model {
            Kind::Mlp => Network::Mlp(Mlp::new(self.dropout, device)),
            Kind::Cnn => Network::Cnn(Cnn::new(self.dropout, device)),
        }
    }

    pub(crate) fn optimizers(&self) -> Optimizers {
        Optimizers::one(AdamConfig::new().init_fused(), self.learning_rate)
    }
}

/// One of two models for grayscale images of 28 x 28.
#[derive(Debug, Module)]
#[expect(clippy::large_enum_variant, reason = "only one instance exists")]
pub(crate) enum Network {
    Mlp(Mlp),
    Cnn(Cnn),
}

impl Network {
    /// # Shapes
    ///
    /// - images: `[samples, 1, 28, 28]`
    /// - result: `[samples, 10]`, logits
    pub(crate) fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        match self {
            Self::Mlp(mlp) => mlp.forward(images),
            Self::Cnn(cnn) => cnn.forward(images),
        }
    }
}

/// 784-128-10, with dropout before the output layer.
#[derive(Debug, Module)]
pub(crate) struct Mlp {
    hidden: Linear,
    dropout: Dropout,
    output: Linear,
}

impl Mlp {
    fn new(dropout: f64, device: &Device) -> Self {
        Self {
            hidden: LinearConfig::new(28 * 28, 128).init(device),
            dropout: DropoutConfig::new(dropout).init(),
            output: LinearConfig::new(128, 10).init(device),
        }
    }

    fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let hidden = self.hidden.forward_fused(images.flatten(1, 3), Activation::Relu);
        self.output.forward_fused(self.dropout.forward(hidden), Activation::Identity)
    }
}

/// Two 3 x 3 convolutions with 32 and 64 filters, each followed by max pooling, with dropout before
/// the output layer.
#[derive(Debug, Module)]
pub(crate) struct Cnn {
    first: Conv2d,
    second: Conv2d,
    pool: MaxPool2d,
    dropout: Dropout,
    output: Linear,
}

impl Cnn {
    fn new(dropout: f64, device: &Device) -> Self {
        let conv = |channels| {
            Conv2dConfig::new(channels, [3, 3]).with_padding(PaddingConfig2d::Same).init(device)
        };
        Self {
            first: conv([1, 32]),
            second: conv([32, 64]),
            pool: MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
            dropout: DropoutConfig::new(dropout).init(),
            output: LinearConfig::new(64 * 7 * 7, 10).init(device),
        }
    }

    fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let layer =
            |conv: &Conv2d, images| conv.forward_pooled(images, Activation::Relu, &self.pool);
        let second = layer(&self.second, layer(&self.first, images));
        let dropped = self.dropout.forward(second.flatten(1, 3));
        self.output.forward_fused(dropped, Activation::Identity)
    }
}

#[cfg(test)]
mod tests {
    use super::Mnist;
    use crate::data_config::test_of;

    #[test]
    fn each_experiment_trains_and_restores_its_checkpoint() {
        for experiment in
            [include_str!("const.yaml"), include_str!("grid.yaml"), include_str!("random.yaml")]
        {
            let tested = test_of(experiment).batches(20).run::<Mnist>().unwrap();
            assert!(tested.validation["val_accuracy"] > 0.3, "{:?}", tested.validation);
        }
    }
}

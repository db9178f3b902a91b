//! Handwritten digits: the program of docs/tutorial.md.

use std::path::PathBuf;
use std::process::ExitCode;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig, Relu};
use burn::optim::AdamConfig;
use burn::tensor::{Device, Int, Tensor};
use serde::Deserialize;
use stoker_trainer::burn;
use stoker_trainer::datasets::Images;
use stoker_trainer::{
    Callback, Context, Data, EarlyStopping, Optimizers, Result, StepOutput, Trial,
};

/// 784-128-10.
#[derive(Debug, Module)]
struct Network {
    hidden: Linear,
    output: Linear,
}

impl Network {
    fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let hidden = self.hidden.forward(images.flatten(1, 3));
        self.output.forward(Relu.forward(hidden))
    }
}

#[derive(Deserialize)]
struct Hyperparameters {
    learning_rate: f64,
}

/// The experiment's `data`.
#[derive(Deserialize)]
struct Files {
    folder: PathBuf,
}

struct Digits {
    hyperparameters: Hyperparameters,
    files: Files,
}

impl Digits {
    fn images(&self, part: &str) -> Result<Images> {
        let file = |name: &str| self.files.folder.join(format!("{part}-{name}-ubyte"));
        Ok(Images::idx(file("images-idx3"), file("labels-idx1"))?)
    }
}

impl Trial for Digits {
    type Model = Network;
    type Batch = (Tensor<4>, Tensor<1, Int>);

    fn new(context: &Context) -> Result<Self> {
        Ok(Self { hyperparameters: context.hparams()?, files: context.data()? })
    }

    fn build_model(&self, device: &Device) -> Result<Network> {
        let hidden = LinearConfig::new(28 * 28, 128).init(device);
        Ok(Network { hidden, output: LinearConfig::new(128, 10).init(device) })
    }

    fn build_optimizers(&self) -> Result<Optimizers> {
        Ok(Optimizers::one(AdamConfig::new().init(), self.hyperparameters.learning_rate))
    }

    fn build_training_data(&self) -> Result<Data<Self::Batch>> {
        Ok(Data::new(self.images("train")?).workers(1))
    }

    fn build_validation_data(&self) -> Result<Data<Self::Batch>> {
        Ok(Data::new(self.images("t10k")?))
    }

    fn step(&self, model: &Network, (images, digits): Self::Batch) -> StepOutput {
        StepOutput::classification(model.forward(images), digits)
    }

    fn callbacks(&self) -> Vec<Box<dyn Callback>> {
        vec![EarlyStopping::new("val_loss").patience(3).boxed()]
    }
}

fn main() -> ExitCode {
    stoker_trainer::main::<Digits>()
}

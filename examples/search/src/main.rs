//! A search: trials with different hyperparameters fit the same curve, and the best one wins.

use std::process::ExitCode;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig, Tanh};
use burn::optim::AdamConfig;
use burn::tensor::{Device, Tensor};
use serde::Deserialize;
use stoker_trainer::{Context, Data, Optimizers, Result, StepOutput, Trial, burn};

#[derive(Debug, Module)]
struct Network {
    hidden: Linear,
    output: Linear,
}

impl Network {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.output.forward(Tanh.forward(self.hidden.forward(x)))
    }
}

// 1. The hyperparameters have the names and types that the search of experiment.yaml samples.
#[derive(Deserialize)]
struct Hyperparameters {
    hidden: usize,
    learning_rate: f64,
}

struct Curve(Hyperparameters);

impl Trial for Curve {
    type Model = Network;
    type Batch = (Tensor<2>, Tensor<2>);

    // 2. Deserialize them. If a value does not fit, the search samples other hyperparameters.
    fn new(context: &Context) -> Result<Self> {
        Ok(Self(context.hparams()?))
    }

    // 3. Hyperparameters determine the model ...
    fn build_model(&self, device: &Device) -> Result<Network> {
        let hidden = LinearConfig::new(1, self.0.hidden).init(device);
        Ok(Network { hidden, output: LinearConfig::new(self.0.hidden, 1).init(device) })
    }

    // ... and its optimizer. All trials use the same data.
    fn build_optimizers(&self) -> Result<Optimizers> {
        Ok(Optimizers::one(AdamConfig::new().init(), self.0.learning_rate))
    }

    fn build_training_data(&self) -> Result<Data<Self::Batch>> {
        Data::arrays(curve(1000, 0.0))
    }

    fn build_validation_data(&self) -> Result<Data<Self::Batch>> {
        Data::arrays(curve(200, 0.5))
    }

    // 4. The step names its metrics: `loss` and `mean_absolute_error`. A validation reports them
    //    as `validation_loss` and `validation_mean_absolute_error`. The search compares one of
    //    them.
    fn step(&self, model: &Network, (x, y): Self::Batch) -> StepOutput {
        StepOutput::regression(model.forward(x), y)
    }
}

/// Returns points of the curve `y = sin(5 x)`, as columns: `x` from -1 to 1, and `y`. An `offset`
/// shifts all points by a part of their distance.
fn curve(size: u32, offset: f32) -> (Tensor<2>, Tensor<2>) {
    let x: Vec<f32> =
        (0..size).map(|index| (index as f32 + offset) / size as f32 * 2.0 - 1.0).collect();
    let x = Tensor::<1>::from_data(x.as_slice(), &stoker_trainer::host()).unsqueeze_dim(1);
    (x.clone(), (x * 5.0).sin())
}

fn main() -> ExitCode {
    stoker_trainer::main::<Curve>()
}

//! A first trial: a network learns which points of a square are inside a circle.

use std::ops::Range;
use std::process::ExitCode;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig, Tanh};
use burn::optim::AdamConfig;
use burn::tensor::{Device, Int, Tensor, TensorData};
use serde::Deserialize;
use stoker_trainer::{Context, Data, Optimizers, Result, StepOutput, Trial, burn};

// 1. The model: any burn module. Two coordinates go in, and one logit per class comes out.
#[derive(Debug, Module)]
struct Network {
    hidden: Linear,
    output: Linear,
}

impl Network {
    fn forward(&self, points: Tensor<2>) -> Tensor<2> {
        self.output.forward(Tanh.forward(self.hidden.forward(points)))
    }
}

// 2. The data: coordinates `[points, 2]` and classes `[points]`. Multiples of two irrational
//    numbers, without their integer parts, cover the square evenly, so no file is needed.
fn points(indices: Range<u32>) -> (Tensor<2>, Tensor<1, Int>) {
    let spread = |index: u32, step: f64| (f64::from(index) * step).fract() as f32 * 2.0 - 1.0;
    let points: Vec<[f32; 2]> =
        indices.map(|index| [spread(index, 0.754_877_67), spread(index, 0.569_840_29)]).collect();
    let inside: Vec<i64> = points.iter().map(|[x, y]| i64::from(x * x + y * y < 0.6)).collect();
    let (device, size) = (stoker_trainer::host(), points.len());
    let points = TensorData::new(points.concat(), [size, 2]);
    (Tensor::from_data(points, &device), Tensor::from_data(inside.as_slice(), &device))
}

// 3. The hyperparameters of experiment.yaml. Stoker itself reads `global_batch_size`.
#[derive(Deserialize)]
struct Hyperparameters {
    hidden: usize,
    learning_rate: f64,
}

// 4. The trial: what to train. The experiment defines how long, and when to validate and save.
struct Circle(Hyperparameters);

impl Trial for Circle {
    type Model = Network;
    type Batch = (Tensor<2>, Tensor<1, Int>);

    fn new(context: &Context) -> Result<Self> {
        Ok(Self(context.hparams()?))
    }

    fn build_model(&self, device: &Device) -> Result<Network> {
        let hidden = LinearConfig::new(2, self.0.hidden).init(device);
        Ok(Network { hidden, output: LinearConfig::new(self.0.hidden, 2).init(device) })
    }

    fn build_optimizers(&self) -> Result<Optimizers> {
        Ok(Optimizers::one(AdamConfig::new().init(), self.0.learning_rate))
    }

    fn build_training_data(&self) -> Result<Data<Self::Batch>> {
        Data::arrays(points(0..2000))
    }

    fn build_validation_data(&self) -> Result<Data<Self::Batch>> {
        Data::arrays(points(2000..2500))
    }

    // 5. One step returns the loss and the metrics of a batch. Stoker computes the gradients.
    fn step(&self, model: &Network, (points, inside): Self::Batch) -> StepOutput {
        StepOutput::classification(model.forward(points), inside)
    }
}

// 6. The program. `stoker run` starts it with the hyperparameters of a trial.
fn main() -> ExitCode {
    stoker_trainer::main::<Circle>()
}

//! Batch inference: `train` trains a model, and `predict` applies it to the rows of a file.

use std::ops::Range;
use std::process::ExitCode;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig, Tanh};
use burn::optim::AdamConfig;
use burn::tensor::activation::softmax;
use burn::tensor::{Device, Int, Tensor, TensorData};
use serde::{Deserialize, Serialize};
use stoker_trainer::{Context, Data, Inference, Optimizers, Result, StepOutput, Trial, burn};

// 1. The model is the same for training and inference.
#[derive(Debug, Module)]
struct Network {
    hidden: Linear,
    output: Linear,
}

impl Network {
    fn new(hidden: usize, device: &Device) -> Self {
        Self {
            hidden: LinearConfig::new(2, hidden).init(device),
            output: LinearConfig::new(hidden, 2).init(device),
        }
    }

    fn forward(&self, points: Tensor<2>) -> Tensor<2> {
        self.output.forward(Tanh.forward(self.hidden.forward(points)))
    }
}

#[derive(Deserialize)]
struct Hyperparameters {
    hidden: usize,
}

// 2. Training: a trial that learns which points of a square are inside a circle.
struct Circle(Hyperparameters);

impl Trial for Circle {
    type Model = Network;
    type Batch = (Tensor<2>, Tensor<1, Int>);

    fn new(context: &Context) -> Result<Self> {
        Ok(Self(context.hparams()?))
    }

    fn build_model(&self, device: &Device) -> Result<Network> {
        Ok(Network::new(self.0.hidden, device))
    }

    fn build_optimizers(&self) -> Result<Optimizers> {
        Ok(Optimizers::one(AdamConfig::new().init(), 0.01))
    }

    fn build_training_data(&self) -> Result<Data<Self::Batch>> {
        Data::arrays(points(0..2000))
    }

    fn build_validation_data(&self) -> Result<Data<Self::Batch>> {
        Data::arrays(points(2000..2500))
    }

    fn step(&self, model: &Network, (points, inside): Self::Batch) -> StepOutput {
        StepOutput::classification(model.forward(points), inside)
    }
}

/// Returns points that cover the square from -1 to 1, and whether each is inside the circle.
fn points(indices: Range<u32>) -> (Tensor<2>, Tensor<1, Int>) {
    let spread = |index: u32, step: f64| (f64::from(index) * step).fract() as f32 * 2.0 - 1.0;
    let points: Vec<[f32; 2]> =
        indices.map(|index| [spread(index, 0.754_877_67), spread(index, 0.569_840_29)]).collect();
    let inside: Vec<i64> = points.iter().map(|[x, y]| i64::from(x * x + y * y < 0.6)).collect();
    let (device, size) = (stoker_trainer::host(), points.len());
    let points = TensorData::new(points.concat(), [size, 2]);
    (Tensor::from_data(points, &device), Tensor::from_data(inside.as_slice(), &device))
}

// 3. A row of the input, and a row of the output. The column `name` identifies the row in both.
#[derive(Deserialize)]
struct Point {
    name: String,
    x: f32,
    y: f32,
}

#[derive(Serialize)]
struct Prediction {
    name: String,
    inside: bool,
    probability: f32,
}

// 4. Inference: load the weights of the job's checkpoint into a fresh model. The hyperparameters
//    are those of the trial that saved it.
struct Predict {
    model: Network,
    device: Device,
}

impl Inference for Predict {
    type Input = Point;
    type Output = Prediction;

    fn new(context: &Context) -> Result<Self> {
        let hyperparameters: Hyperparameters = context.hparams()?;
        let device = context.device().clone().without_autodiff();
        let fresh = Network::new(hyperparameters.hidden, &device);
        let model = context.load_checkpoint_model(fresh, context.checkpoint()?)?;
        Ok(Self { model, device })
    }

    // 5. A batch of rows gives one prediction per row, in the same order.
    fn batch(&mut self, points: Vec<Point>) -> Result<Vec<Prediction>> {
        let values: Vec<f32> = points.iter().flat_map(|point| [point.x, point.y]).collect();
        let values = TensorData::new(values, [points.len(), 2]);
        let logits = self.model.forward(Tensor::from_data(values, &self.device));
        let probabilities: Vec<f32> = softmax(logits, 1).into_data().try_to_vec()?;
        let predict = |(point, row): (Point, &[f32])| Prediction {
            name: point.name,
            inside: row[1] > row[0],
            probability: row[0].max(row[1]),
        };
        Ok(points.into_iter().zip(probabilities.chunks(2)).map(predict).collect())
    }
}

// 6. One program for both; experiment.yaml and job.yaml pass the first argument.
fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    match arguments.next().as_deref() {
        Some("train") => stoker_trainer::main_with::<Circle>(arguments),
        Some("predict") => stoker_trainer::infer_with::<Predict>(arguments),
        _ => {
            eprintln!("usage: example-inference train|predict [ARGUMENTS]");
            ExitCode::from(2)
        }
    }
}

//! A custom training loop: a GAN learns to generate points around eight centers on a circle.

use std::f32::consts::TAU;
use std::process::ExitCode;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig, Relu};
use burn::optim::AdamConfig;
use burn::tensor::activation::log_sigmoid;
use burn::tensor::{Device, Distribution, Tensor, TensorData};
use stoker_trainer::{
    Context, Data, Fit, Metrics, NextAction, Optimizers, Result, StepOutput, burn,
};

/// Number of centers.
const CENTERS: usize = 8;
/// Number of units of each hidden layer.
const HIDDEN: usize = 64;

// 1. Both networks are parts of one model, so one checkpoint contains them.
#[derive(Debug, Module)]
struct Gan {
    generator: Network,
    discriminator: Network,
}

/// Two hidden layers.
#[derive(Debug, Module)]
struct Network {
    first: Linear,
    second: Linear,
    output: Linear,
}

impl Network {
    fn new(outputs: usize, device: &Device) -> Self {
        Self {
            first: LinearConfig::new(2, HIDDEN).init(device),
            second: LinearConfig::new(HIDDEN, HIDDEN).init(device),
            output: LinearConfig::new(HIDDEN, outputs).init(device),
        }
    }

    fn forward(&self, inputs: Tensor<2>) -> Tensor<2> {
        let hidden = Relu.forward(self.first.forward(inputs));
        self.output.forward(Relu.forward(self.second.forward(hidden)))
    }
}

// 2. Two losses. Each is a sum over samples and has a name, under which it is reported.
impl Gan {
    /// Returns the discriminator's loss: it must separate real points from generated ones.
    fn discriminator_loss(&self, real: Tensor<2>) -> StepOutput {
        let samples = real.dims()[0];
        let generated = self.generator.forward(noise(samples, &real.device())).detach();
        let correct = log_sigmoid(self.discriminator.forward(real))
            + log_sigmoid(self.discriminator.forward(generated).neg());
        StepOutput::sum(correct.sum().neg(), samples).loss_as("discriminator_loss")
    }

    /// Returns the generator's loss: the discriminator must accept its points.
    fn generator_loss(&self, samples: usize, device: &Device) -> StepOutput {
        let generated = self.generator.forward(noise(samples, device));
        let accepted = log_sigmoid(self.discriminator.forward(generated));
        StepOutput::sum(accepted.sum().neg(), samples).loss_as("generator_loss")
    }
}

/// Samples the generator's input. Stoker seeds each batch, so a resumed run samples the same.
fn noise(samples: usize, device: &Device) -> Tensor<2> {
    Tensor::random([samples, 2], Distribution::Uniform(-1.0, 1.0), device)
}

/// Returns the coordinates of a center.
fn center(index: usize) -> [f32; 2] {
    let angle = TAU * index as f32 / CENTERS as f32;
    [angle.cos(), angle.sin()]
}

/// Returns real points: a grid of 11 by 11 points around each center.
fn real_points() -> Tensor<2> {
    let offsets = || (-5..=5).map(|step| step as f32 * 0.01);
    let mut values = vec![];
    for [x, y] in (0..CENTERS).map(center) {
        for (right, up) in offsets().flat_map(|right| offsets().map(move |up| (right, up))) {
            values.extend([x + right, y + up]);
        }
    }
    let size = values.len() / 2;
    Tensor::from_data(TensorData::new(values, [size, 2]), &stoker_trainer::host())
}

fn train(context: &Context) -> Result<()> {
    // 3. The library needs the model, its optimizers and the data. The second optimizer is for
    //    the parameters whose path starts with `discriminator`.
    let adam = AdamConfig::new().with_beta_1(0.5);
    let optimizers =
        Optimizers::one(adam.init(), 0.001).group("^discriminator", adam.build(), 0.001)?;
    let device = context.device();
    let model = Gan { generator: Network::new(2, device), discriminator: Network::new(1, device) };
    let fit = Fit::new(Data::arrays(real_points())?).batch_size(context.batch_size()?);
    let mut training = context.training(model, optimizers, fit)?;

    // 4. The loop requests the next action and carries it out. Between two actions, the library
    //    saves checkpoints, reports metrics and responds to stop requests.
    while let Some(turn) = training.next()? {
        match turn {
            // 5. A batch has one step for each network. `None`: this rank has no samples of it.
            NextAction::Train(real) => {
                let samples = real.as_ref().map(|real: &Tensor<2>| real.dims()[0]);
                let loss = real.map(|real| training.model().discriminator_loss(real));
                training.step("^discriminator", loss)?;
                let loss = samples.map(|samples| training.model().generator_loss(samples, device));
                training.step("^generator", loss)?;
                training.end_batch()?;
            }
            // 6. A validation computes any metrics.
            NextAction::Validate => {
                let metrics = validate(&training.model().valid().generator, device)?;
                training.validated(&metrics)?;
            }
        }
    }
    training.finish()?;
    Ok(())
}

/// Generates points from a grid of inputs, and assigns each to the nearest center. `distance` is
/// the mean distance to it, and `centers` is the number of centers with at least 2% of the points.
fn validate(generator: &Network, device: &Device) -> Result<Metrics> {
    const SIDE: usize = 32;
    let inputs = (0..SIDE * SIDE).flat_map(|index| [index % SIDE, index / SIDE]);
    let inputs = inputs.map(|step| (step as f32 + 0.5) / SIDE as f32 * 2.0 - 1.0).collect();
    let inputs = TensorData::new(inputs, [SIDE * SIDE, 2]);
    let inputs = Tensor::from_data(inputs, &device.clone().without_autodiff());
    let points: Vec<f32> = generator.forward(inputs).into_data().try_to_vec()?;

    let mut counts = [0; CENTERS];
    let mut metrics = Metrics::default();
    for point in points.chunks(2) {
        let distance = |index: usize| {
            let [x, y] = center(index);
            (point[0] - x).hypot(point[1] - y)
        };
        let nearest = |a: &usize, b: &usize| distance(*a).total_cmp(&distance(*b));
        let index = (0..CENTERS).min_by(nearest).unwrap_or(0);
        counts[index] += 1;
        metrics.add_one("distance", f64::from(distance(index)), 1.0);
    }
    let reached = counts.iter().filter(|count| **count * 50 >= SIDE * SIDE).count();
    metrics.add_one("centers", reached as f64, 1.0);
    Ok(metrics)
}

fn main() -> ExitCode {
    stoker_trainer::run_with(std::env::args().skip(1), train)
}

//! A gang: two ranks train one model. They share each batch and average their gradients.

use std::process::ExitCode;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig, Tanh};
use burn::optim::AdamConfig;
use burn::tensor::{Device, Tensor};
use stoker_trainer::{Context, Data, Optimizers, Result, StepOutput, Trial, burn, run_trial};

// 1. The trial contains nothing about ranks: the same program trains on any number of them.
struct Curve;

impl Trial for Curve {
    type Model = Network;
    type Batch = (Tensor<2>, Tensor<2>);

    fn new(_: &Context) -> Result<Self> {
        Ok(Self)
    }

    fn build_model(&self, device: &Device) -> Result<Network> {
        let hidden = LinearConfig::new(1, 32).init(device);
        Ok(Network { hidden, output: LinearConfig::new(32, 1).init(device) })
    }

    fn build_optimizers(&self) -> Result<Optimizers> {
        Ok(Optimizers::one(AdamConfig::new().init(), 0.01))
    }

    // 2. Each rank reads its share of each global batch, so all ranks together see the samples in
    //    the same order as one rank alone.
    fn build_training_data(&self) -> Result<Data<Self::Batch>> {
        Data::arrays(curve(1000, 0.0))
    }

    fn build_validation_data(&self) -> Result<Data<Self::Batch>> {
        Data::arrays(curve(200, 0.5))
    }

    // 3. A loss is a sum and a count. Stoker adds up both over the ranks and divides once.
    fn step(&self, model: &Network, (x, y): Self::Batch) -> StepOutput {
        StepOutput::regression(model.forward(x), y)
    }
}

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

/// Returns points of the curve `y = sin(5 x)`, as columns: `x` from -1 to 1, and `y`. An `offset`
/// shifts all points by a part of their distance.
fn curve(size: u32, offset: f32) -> (Tensor<2>, Tensor<2>) {
    let x: Vec<f32> =
        (0..size).map(|index| (index as f32 + offset) / size as f32 * 2.0 - 1.0).collect();
    let x = Tensor::<1>::from_data(x.as_slice(), &stoker_trainer::host()).unsqueeze_dim(1);
    (x.clone(), (x * 5.0).sin())
}

// 4. Every rank is a process that runs this function. `context.distributed()` is its gang.
fn train(context: &Context) -> Result<()> {
    let gang = context.distributed();
    let share = context.batch_size()?;
    println!("rank {} of {} trains {share} samples of each batch", gang.rank(), gang.size());

    let fitted = run_trial::<Curve>(context)?;

    // 5. Collective calls exchange values. All ranks must make them, in the same order. `gather`
    //    returns the values to rank 0.
    let loss = fitted.history.last().and_then(|epoch| epoch.get("val_loss"));
    let loss = *loss.ok_or("the last epoch has no validation")?;
    if let Some(losses) = gang.gather(loss)? {
        println!("final loss of each rank: {losses:?}");
    }
    Ok(())
}

fn main() -> ExitCode {
    stoker_trainer::run_with(std::env::args().skip(1), train)
}

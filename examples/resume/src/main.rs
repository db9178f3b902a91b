//! Resume: a trial that is killed at any time ends with the same loss as an uninterrupted one.

use std::process::ExitCode;

use burn::module::Module;
use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig, Tanh};
use burn::optim::AdamConfig;
use burn::tensor::{Device, Tensor};
use stoker_trainer::{Context, Data, Optimizers, Result, StepOutput, Trial, burn, run_trial};

// 1. Dropout makes the training random: each batch samples the units to drop.
#[derive(Debug, Module)]
struct Network {
    hidden: Linear,
    dropout: Dropout,
    output: Linear,
}

impl Network {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let hidden = self.dropout.forward(Tanh.forward(self.hidden.forward(x)));
        self.output.forward(hidden)
    }
}

struct Curve;

impl Trial for Curve {
    type Model = Network;
    type Batch = (Tensor<2>, Tensor<2>);

    fn new(_: &Context) -> Result<Self> {
        Ok(Self)
    }

    fn build_model(&self, device: &Device) -> Result<Network> {
        Ok(Network {
            hidden: LinearConfig::new(1, 256).init(device),
            dropout: DropoutConfig::new(0.1).init(),
            output: LinearConfig::new(256, 1).init(device),
        })
    }

    // 2. Adam has a state: two moments for each weight. A checkpoint contains it, the weights, the
    //    position in the data and the state of the random numbers. The program itself saves
    //    nothing.
    fn build_optimizers(&self) -> Result<Optimizers> {
        Ok(Optimizers::one(AdamConfig::new().init(), 0.003))
    }

    // 3. The data is shuffled: each epoch reads it in another order, also after a restart.
    fn build_training_data(&self) -> Result<Data<Self::Batch>> {
        Data::arrays(curve(2000, 0.0))
    }

    fn build_validation_data(&self) -> Result<Data<Self::Batch>> {
        Data::arrays(curve(200, 0.5))
    }

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

// 4. `run_trial` resumes from the latest checkpoint of the trial, if there is one.
fn train(context: &Context) -> Result<()> {
    let fitted = run_trial::<Curve>(context)?;

    // 5. `{:?}` prints all digits, so equal lines mean equal bits.
    let loss = fitted.history.last().and_then(|epoch| epoch.get("val_loss"));
    println!("final loss {:?}", loss.ok_or("the last epoch has no validation")?);
    Ok(())
}

fn main() -> ExitCode {
    stoker_trainer::run_with(std::env::args().skip(1), train)
}

//! A plain burn program that trains MNIST with `SupervisedTraining`. `after.rs` is its Stoker port.

mod mnist;

use burn::data::dataloader::DataLoaderBuilder;
use burn::lr_scheduler::constant::ConstantLr;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::optim::AdamConfig;
use burn::tensor::Device;
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::{Learner, SupervisedTraining};

fn main() -> mnist::Result<()> {
    let device = Device::flex().autodiff();
    device.seed(42);
    let loader = || DataLoaderBuilder::new(mnist::DigitBatcher).batch_size(64);
    let train = loader().shuffle(42).build(mnist::digits("train")?);
    let valid = loader().build(mnist::digits("t10k")?);
    let training = SupervisedTraining::new("target/learner-mnist", train, valid)
        .metrics((AccuracyMetric::new(), LossMetric::new()))
        .with_default_checkpointers()
        .num_epochs(2);
    let schedule = ModuleLrScheduler::new(ConstantLr::new(1e-3));
    let model = mnist::Mlp::new(&device);
    training.launch(Learner::new(model, AdamConfig::new().init(), schedule));
    Ok(())
}

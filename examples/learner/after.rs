//! `before.rs` under Stoker: standalone, under `stoker run` or on a cluster, with any world size.

mod mnist;

use burn::data::dataloader::DataLoaderBuilder;
use burn::lr_scheduler::constant::ConstantLr;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::optim::AdamConfig;
use burn::tensor::Device;
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::{Learner, SupervisedTraining};

fn main() -> std::process::ExitCode {
    stoker_trainer::run_in("target/learner-mnist", train)
}

fn train(context: &stoker_trainer::Context) -> mnist::Result<()> {
    let device = Device::flex().autodiff();
    device.seed(42);
    let loader = || DataLoaderBuilder::new(mnist::DigitBatcher).batch_size(64);
    let train = loader().shuffle(42).build(mnist::digits("train")?);
    let valid = loader().build(mnist::digits("t10k")?);
    let training = SupervisedTraining::new("target/learner-mnist", train, valid)
        .metrics((AccuracyMetric::new(), LossMetric::new()))
        .with_default_checkpointers()
        .num_epochs(2);
    let training = context.supervise(training);
    let schedule = ModuleLrScheduler::new(ConstantLr::new(1e-3));
    let model = mnist::Mlp::new(&device);
    training.launch(Learner::new(model, AdamConfig::new().init(), schedule));
    Ok(())
}

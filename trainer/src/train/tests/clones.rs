//! Modules that are clones of each other are refused, and deep copies train independently.

use burn::module::Param;

use super::*;
use crate::train::custom_loop::NextAction;
use crate::{Metrics, blend, deep_copy};

/// A layer with running statistics.
#[derive(Module, Debug)]
struct Block {
    linear: Linear,
    norm: BatchNorm,
}

impl Block {
    fn new(device: &Device) -> Self {
        let weight = Tensor::<1, Int>::arange(0..16, device).float().sin().reshape([4, 4]);
        let linear = Linear { weight: Param::from_tensor(weight), bias: None };
        Self { linear, norm: BatchNormConfig::new(4).init(device) }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.norm.forward(self.linear.forward(x).unsqueeze_dim::<3>(2)).squeeze_dim(2)
    }
}

#[derive(Module, Debug)]
struct Stack {
    blocks: Vec<Block>,
}

impl Stack {
    fn new(device: &Device, copy: impl Fn(&Block) -> Block) -> Self {
        let first = Block::new(device);
        Self { blocks: vec![copy(&first), copy(&first), first] }
    }
}

fn bits<M: Module>(model: &M) -> Vec<u8> {
    crate::record::snapshot(model).into_bytes().unwrap().to_vec()
}

/// Returns the values of all parameters by path, without IDs.
fn values<M: Module>(model: &M) -> Vec<(String, Vec<f32>)> {
    crate::record::weights(model).unwrap().tensors
}

fn fit_stack(folder: Option<&Path>, stop_at: u64, copy: impl Fn(&Block) -> Block) -> Result<Stack> {
    let context = alone(folder, 6).context()?;
    let model = Stack::new(context.device(), copy);
    let (x, _) = samples();
    let stop = StopAt(stop_at, context.stop.clone()).boxed();
    let fit = Fit::new(Data::arrays(x.narrow(1, 0, 4))?).batch_size(16).callbacks(vec![stop]);
    let step = |model: &Stack, x: Tensor<2>| {
        let y = model.blocks.iter().fold(x.clone(), |x, block| block.forward(x));
        StepOutput::regression(y, x.sin())
    };
    Ok(context.fit(model, Optimizers::one(AdamConfig::new().init(), 0.01), step, fit)?.model)
}

#[test]
fn cloned_layers_are_refused() {
    let _stream = lock_random_stream();
    let error = fit_stack(None, u64::MAX, Block::clone).unwrap_err().to_string();
    let expected = "blocks.1.linear.weight is a clone of blocks.0.linear.weight, so only one of \
                    them would be trained; build each layer with its own `init`, or copy it with \
                    `stoker_trainer::deep_copy`;";
    assert!(error.starts_with(expected), "{error}");
}

/// A copy trains like a layer that was built separately, and resumes exactly.
#[test]
fn deep_copies_train_independently() {
    let _stream = lock_random_stream();
    let device = Device::flex().autodiff();
    let built = fit_stack(None, u64::MAX, |_| Block::new(&device)).unwrap();
    let copied = fit_stack(None, u64::MAX, deep_copy).unwrap();
    assert_eq!(values(&copied), values(&built));
    let of = |index: usize| values(&copied.blocks[index]);
    assert!(of(0) != of(1) && of(1) != of(2));
    for stop_at in [1, 3] {
        let folder = tempfile::tempdir().unwrap();
        fit_stack(Some(folder.path()), stop_at, deep_copy).unwrap_err();
        let resumed = fit_stack(Some(folder.path()), u64::MAX, deep_copy).unwrap();
        assert!(bits(&resumed) == bits(&copied), "stopped at {stop_at}");
    }
}

/// Two layers of which only one is trained.
#[derive(Module, Debug)]
struct Dqn {
    target: Linear,
    online: Linear,
}

fn fit_dqn(build: impl Fn(&Context) -> Dqn) -> Result<Dqn> {
    let context = alone(None, 3).context()?;
    let fit = Fit::new(Data::arrays(samples())?).batch_size(16);
    let step = |model: &Dqn, (x, y): Pair| {
        let target = model.target.forward(x.clone());
        StepOutput::classification(model.online.forward(x) - target * 0.5, y)
    };
    let sgd = Optimizers::one(SgdConfig::new().build(), 0.1);
    Ok(context.fit(build(&context), sgd, step, fit)?.model)
}

fn linear(context: &Context) -> Linear {
    LinearConfig::new(20, 5).init(context.device())
}

#[test]
fn frozen_clones_are_refused_and_copies_train() {
    let _stream = lock_random_stream();
    let cloned = fit_dqn(|context| {
        let online = linear(context);
        Dqn { target: online.clone().freeze(), online }
    });
    let error = cloned.unwrap_err().to_string();
    assert!(error.starts_with("online.weight is a clone of target.weight, "), "{error}");
    // A copy of a frozen layer is frozen.
    for of_frozen in [false, true] {
        let dqn = fit_dqn(|context| {
            let online = linear(context);
            let target = deep_copy(&online).freeze();
            Dqn { target: if of_frozen { deep_copy(&target) } else { target }, online }
        });
        let dqn = dqn.unwrap();
        assert!(!dqn.target.weight.is_require_grad() && dqn.online.weight.is_require_grad());
        assert_ne!(values(&dqn.target), values(&dqn.online));
    }
}

/// Parameters of a checkpoint have the IDs of their file.
#[test]
fn modules_loaded_from_one_checkpoint_are_trained() {
    let _stream = lock_random_stream();
    let folder = tempfile::tempdir().unwrap();
    let context = alone(Some(folder.path()), 1).context().unwrap();
    let fit = Fit::new(Data::arrays(samples()).unwrap()).batch_size(16);
    let step = |model: &Linear, (x, y): Pair| StepOutput::classification(model.forward(x), y);
    let sgd = Optimizers::one(SgdConfig::new().build(), 0.1);
    let saved = context.fit(linear(&context), sgd, step, fit).unwrap().model;
    let checkpoints = std::fs::read_dir(folder.path().join("trial/checkpoints")).unwrap();
    let path = checkpoints.map(|entry| entry.unwrap().path()).max().unwrap();
    let dqn = fit_dqn(|context| {
        let load = || context.load_checkpoint_model(linear(context), &path).unwrap();
        Dqn { target: load(), online: load() }
    });
    let dqn = dqn.unwrap();
    assert!(values(&dqn.target) != values(&saved) && values(&dqn.online) != values(&saved));
    assert_ne!(values(&dqn.target), values(&dqn.online));
}

/// Trains the online layer, and moves the target towards it after each step.
fn follow(folder: Option<&Path>, stop_at: u64, share: f64) -> Result<Dqn> {
    let context = alone(folder, 5).context()?;
    let online = linear(&context);
    let model = Dqn { target: deep_copy(&online).freeze(), online };
    let stop = StopAt(stop_at, context.stop.clone()).boxed();
    let fit = Fit::new(Data::arrays(samples())?).batch_size(16).callbacks(vec![stop]);
    let adam = Optimizers::one(AdamConfig::new().init(), 0.1);
    let mut training = context.training(model, adam, fit)?;
    while let Some(action) = training.next()? {
        let NextAction::Train(batch) = action else {
            training.validated(&Metrics::default())?;
            continue;
        };
        let output = batch.map(|(x, y): Pair| {
            let model = training.model();
            let logits = model.online.forward(x.clone()) - model.target.forward(x) * 0.5;
            StepOutput::classification(logits, y)
        });
        training.step("^online", output)?;
        training.update_model(|model| {
            Ok(Dqn { target: blend(model.target, &model.online, share)?, ..model })
        })?;
        training.end_batch()?;
    }
    Ok(training.finish()?.model)
}

#[test]
fn target_networks_follow_and_resume_exactly() {
    let _stream = lock_random_stream();
    let copied = follow(None, u64::MAX, 1.0).unwrap();
    assert_eq!(values(&copied.target), values(&copied.online));
    let straight = follow(None, u64::MAX, 0.25).unwrap();
    assert_ne!(values(&straight.target), values(&straight.online));
    assert!(!straight.target.weight.is_require_grad());
    for stop_at in [1, 4] {
        let folder = tempfile::tempdir().unwrap();
        follow(Some(folder.path()), stop_at, 0.25).unwrap_err();
        let resumed = follow(Some(folder.path()), u64::MAX, 0.25).unwrap();
        assert!(bits(&resumed) == bits(&straight), "stopped at {stop_at}");
    }
}

#[test]
fn blend_mixes_weights_and_statistics() {
    let device = Device::flex().autodiff();
    let with = |value: f32| {
        let mut block = Block::new(&device);
        block.linear.weight = Param::from_tensor(Tensor::full([4, 4], value, &device));
        block.norm.running_mean.update(Tensor::full(
            [4],
            value,
            &device.clone().without_autodiff(),
        ));
        block
    };
    let blended = blend(with(1.0), &with(3.0), 0.25).unwrap();
    let values = values(&blended);
    let of = |path: &str| values.iter().find(|(name, _)| name == path).unwrap().1.clone();
    assert_eq!(of("linear.weight"), [1.5; 16]);
    assert_eq!(of("norm.running_mean"), [1.5; 4]);
    assert!(blended.linear.weight.is_require_grad());
    // A share of 1 also replaces values that are not finite.
    let copied = blend(with(f32::NAN), &with(3.0), 1.0).unwrap();
    assert_eq!(self::values(&copied)[0].1, [3.0; 16]);
}

#[test]
fn updates_keep_the_parameters() {
    let _stream = lock_random_stream();
    let context = alone(None, 1).context().unwrap();
    let fit = Fit::new(Data::arrays(samples()).unwrap()).batch_size(16);
    let sgd = Optimizers::one(SgdConfig::new().build(), 0.1);
    let mut training = context.training(linear(&context), sgd, fit).unwrap();
    let error = training.update_model(Ok).unwrap_err().to_string();
    assert!(error.starts_with("cannot call `update_model`: `next` was not called; "), "{error}");
    training.next().unwrap();
    training.update_model(Ok).unwrap();
    let error = training.update_model(|model| Ok(deep_copy(&model))).unwrap_err().to_string();
    assert!(error.starts_with("update_model has replaced parameters by others, "), "{error}");
}

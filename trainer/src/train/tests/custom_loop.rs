//! Tests of custom loops: equality with `fit`, and steps that train a part of a model.

mod skipped_batches;

use burn::nn::Sigmoid;
use burn::tensor::Distribution;
use burn::tensor::activation::log_sigmoid;

use super::*;
use crate::train::custom_loop::{NextAction, Training};
use crate::{Distributed, Metrics, ThreadRank};

fn step(model: &Net, (x, y): Pair) -> StepOutput {
    StepOutput::classification(model.forward(x), y)
}

/// Same as [`train`], with a custom loop.
fn train_manually(context: &Context, workers: usize, stop_at: u64) -> Result<Fitted<Net>> {
    let stop = StopAt(stop_at, context.stop.clone()).boxed();
    let callbacks = vec![EarlyStopping::new("val_loss").patience(9).boxed(), stop];
    let data = Data::arrays(samples())?;
    let fit = Fit::new(Data::arrays(samples())?.workers(workers).queue(3))
        .batch_size(16 / context.distributed().size())
        .callbacks(callbacks);
    let mut training = context.training(Net::new(context.device()), optimizers(), fit)?;
    while let Some(action) = training.next()? {
        match action {
            NextAction::Train(batch) => {
                let output = batch.map(|batch| step(&training.model(), batch));
                training.learn(output)?;
            }
            NextAction::Validate => {
                let metrics = context.evaluate(&*training.model(), step, &data, 16)?;
                training.validated(&metrics)?;
            }
        }
    }
    training.finish()
}

#[test]
fn custom_loop_is_bit_identical_to_fit() {
    let _stream = lock_random_stream();
    let straight = tempfile::tempdir().unwrap();
    let fitted = train(Some(straight.path()), 0, u64::MAX).unwrap();
    let (files, rows_straight) = (last_checkpoint(straight.path()), rows(straight.path()));
    for stop_at in 1..=20 {
        let folder = tempfile::tempdir().unwrap();
        let custom_loop = |stop_at| {
            let context = alone(Some(folder.path()), 20).context().unwrap();
            train_manually(&context, 1, stop_at)
        };
        if stop_at < 20 {
            let error = custom_loop(stop_at).unwrap_err();
            assert_eq!(exit_code(&*error), ExitCode::Preempted, "{error}");
        }
        let resumed = match stop_at % 2 {
            0 => custom_loop(u64::MAX).unwrap(),
            // `fit` resumes a checkpoint of the custom loop.
            _ => train(Some(folder.path()), 0, u64::MAX).unwrap(),
        };
        assert_eq!(resumed.history, fitted.history, "stopped at {stop_at}");
        for (name, bytes) in &last_checkpoint(folder.path()) {
            assert!(bytes == &files[name], "stopped at {stop_at}: {name} differs");
        }
        assert_eq!(rows(folder.path()), rows_straight, "stopped at {stop_at}");
    }
}

#[test]
fn skipped_and_misordered_turns_fail() {
    let _stream = lock_random_stream();
    let context = alone(None, 1).context().unwrap();
    let fit = || Fit::new(Data::arrays(samples()).unwrap()).batch_size(16);
    let with_validation = fit().validation(Data::arrays(samples()).unwrap());
    let model = || Net::new(context.device());
    let one = || Optimizers::one(AdamConfig::new().init(), 0.1);
    let refused = context.training(model(), one(), with_validation).unwrap_err().to_string();
    assert!(refused.contains("pass the data to `Training::evaluate`"), "{refused}");
    let mut training = context.training(model(), one(), fit()).unwrap();
    let check = |done: Result<()>, expected: &str| {
        let error = done.unwrap_err().to_string();
        assert!(error.contains(expected), "{error}, not {expected}");
    };
    let expected =
        "cannot call `learn`: `next` was not called; call it once after `NextAction::Train`";
    check(training.learn(None), expected);
    let Some(NextAction::Train(Some(batch))) = training.next().unwrap() else { panic!("no batch") };
    check(training.next().map(drop), "a batch was skipped; call `learn` before `next`");
    check(training.validated(&Metrics::default()), "a batch is waiting for `learn`");
    check(training.step("nowhere", None).map(drop), "no match among the parameters hidden.weight");
    check(training.step("(", None).map(drop), "invalid regular expression");
    let output = step(&training.model(), batch);
    let metrics = training.step("^output", Some(output.loss_as("first"))).unwrap();
    assert!(metrics.mean("first").is_some() && metrics.mean("loss").is_none());
    check(training.learn(None), "a batch has steps and needs `end_batch`");
    training.end_batch().unwrap();
    let Some(NextAction::Validate) = training.next().unwrap() else { panic!("no validation") };
    check(training.next().map(drop), "a validation was skipped");
    check(training.end_batch(), "a validation is due");
    training.validated(&Metrics::default()).unwrap();
    assert!(training.next().unwrap().is_none() && training.next().unwrap().is_none());
    assert_eq!((training.batches(), training.finish().unwrap().history.len()), (1, 0));
    let mut training = context.training(model(), one().aggregate(2), fit()).unwrap();
    training.next().unwrap();
    check(training.step("^output", None).map(drop), "aggregated over 2 batches");
    check(training.finish().map(drop), "training is not over");
}

/// Two networks with opposing losses.
#[derive(Module, Debug)]
struct Gan {
    generator: Linear,
    discriminator: Linear,
}

impl Gan {
    /// Returns the losses of the discriminator and the generator, for real samples and new noise.
    fn losses(&self, real: Tensor<2>) -> (StepOutput, StepOutput) {
        let (samples, device) = (real.dims()[0], real.device());
        let noise = Tensor::random([samples, 3], Distribution::Normal(0.0, 1.0), &device);
        let fake = Sigmoid.forward(self.generator.forward(noise));
        let true_real = log_sigmoid(self.discriminator.forward(real));
        let true_fake = log_sigmoid(self.discriminator.forward(fake.clone().detach()).neg());
        let discriminator = StepOutput::sum((true_real + true_fake).sum().neg(), samples);
        let fooled = log_sigmoid(self.discriminator.forward(fake));
        let generator = StepOutput::sum(fooled.sum().neg(), samples);
        (discriminator.loss_as("discriminator_loss"), generator.loss_as("generator_loss"))
    }
}

fn train_gan(context: &Context, stop_at: u64) -> Result<Vec<u32>> {
    let device = context.device();
    let linear = |inputs, outputs| {
        let mut linear = LinearConfig::new(inputs, outputs).init(device);
        let weight = Tensor::<1, Int>::arange(0..(inputs * outputs) as i64, device).float().sin();
        linear.weight = burn::module::Param::from_tensor(weight.reshape([inputs, outputs]));
        linear
    };
    let model = Gan { generator: linear(3, 20), discriminator: linear(20, 1) };
    let model = Gan { generator: Linear { bias: None, ..model.generator }, ..model };
    let model = Gan { discriminator: Linear { bias: None, ..model.discriminator }, ..model };
    let optimizers =
        Optimizers::one(AdamConfig::new().init(), |step: u64| 0.01 / (step + 1) as f64).group(
            "^discriminator",
            SgdConfig::new().build(),
            |step: u64| 0.1 / (step + 1) as f64,
        )?;
    let (x, _) = samples();
    let stop = StopAt(stop_at, context.stop.clone()).boxed();
    let fit = Fit::new(Data::arrays(x)?).batch_size(16 / context.distributed().size());
    let mut training = context.training(model, optimizers, fit.callbacks(vec![stop]))?;
    while let Some(action) = training.next()? {
        match action {
            NextAction::Train(batch) => {
                let losses = batch.map(|x: Tensor<2>| training.model().losses(x));
                let (discriminator, generator) = losses.unzip();
                training.step("^discriminator", discriminator)?;
                training.step("^generator", generator)?;
                training.end_batch()?;
            }
            NextAction::Validate => training.validated(&Metrics::default())?,
        }
    }
    let model = training.finish()?.model;
    let data = [model.generator.weight.val(), model.discriminator.weight.val()];
    let bits = |weights: Tensor<2>| -> Vec<_> {
        weights.into_data().iter::<f32>().map(f32::to_bits).collect()
    };
    Ok(data.into_iter().flat_map(bits).collect())
}

#[test]
fn gan_resume_is_bit_identical() {
    let _stream = lock_random_stream();
    let straight = tempfile::tempdir().unwrap();
    let context = |folder: &Path| alone(Some(folder), 9).context().unwrap();
    let bits = train_gan(&context(straight.path()), u64::MAX).unwrap();
    let rows_straight = rows(straight.path());
    let names: Vec<_> = rows_straight[0].2.as_object().unwrap().keys().cloned().collect();
    assert_eq!(names, ["discriminator_loss", "generator_loss"]);
    for stop_at in 1..9 {
        let folder = tempfile::tempdir().unwrap();
        train_gan(&context(folder.path()), stop_at).unwrap_err();
        assert!(train_gan(&context(folder.path()), u64::MAX).unwrap() == bits, "at {stop_at}");
        assert_eq!(rows(folder.path()), rows_straight, "stopped at {stop_at}");
    }
}

/// The loss has gradients for all layers, but the step changes only the weights of one layer.
#[test]
fn step_changes_only_selected_parameters() {
    let _stream = lock_random_stream();
    let context = alone(None, 1).context().unwrap();
    let fit = Fit::new(Data::arrays(samples()).unwrap()).batch_size(16);
    let one = Optimizers::one(SgdConfig::new().build(), 0.1);
    let mut training = context.training(Net::new(context.device()), one, fit).unwrap();
    let Some(NextAction::Train(Some(batch))) = training.next().unwrap() else { panic!("no batch") };
    let weights = |net: &Net| {
        let of = |linear: &Linear| linear.weight.val().into_data();
        (of(&net.hidden), of(&net.output))
    };
    let before = weights(&training.model());
    let output = step(&training.model(), batch);
    training.step("^hidden", Some(output)).unwrap();
    let after = weights(&training.model());
    assert_ne!(before.0, after.0);
    assert_eq!(before.1, after.1);
}

/// Two ranks train the same weights as one, up to rounding.
#[test]
fn steps_are_all_reduced_over_ranks() {
    let _stream = lock_random_stream();
    let weights = |size: usize| {
        let contexts: Vec<Context> = ThreadRank::group(size)
            .into_iter()
            .map(|rank| {
                let Context { config, io, stop, .. } = alone(None, 7).context().unwrap();
                let io = Arc::into_inner(io).unwrap().into_inner().unwrap();
                let ranks = Distributed::from_collective(Box::new(rank));
                Context::new(config, io, stop, Device::flex().autodiff(), ranks)
            })
            .collect();
        std::thread::scope(|scope| {
            let run = |context| scope.spawn(move || train_parts(&context).unwrap());
            let ranks: Vec<_> = contexts.into_iter().map(run).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
        })
    };
    let alone = weights(1).remove(0);
    for of_rank in weights(2) {
        let close = |(a, b): (&f32, &f32)| (a - b).abs() < 1e-5;
        assert!(alone.iter().zip(&of_rank).all(close), "{alone:?} {of_rank:?}");
    }
}

/// Trains a model with two steps per batch, one per layer, without random numbers.
fn train_parts(context: &Context) -> Result<Vec<f32>> {
    let device = context.device();
    let zero = |inputs, outputs| Linear {
        weight: burn::module::Param::from_tensor(Tensor::zeros([inputs, outputs], device)),
        bias: None,
    };
    let model = Gan { generator: zero(20, 5), discriminator: zero(20, 5) };
    let one = Optimizers::one(AdamConfig::new().init(), 0.01);
    let fit = Fit::new(Data::arrays(samples())?).batch_size(16 / context.distributed().size());
    let mut training = context.training(model, one, fit)?;
    while let Some(action) = training.next()? {
        match action {
            NextAction::Train(batch) => {
                for part in ["generator", "discriminator"] {
                    let output = batch.clone().map(|(x, y): Pair| {
                        let model = training.model();
                        let logits =
                            model.generator.forward(x.clone()) + model.discriminator.forward(x);
                        StepOutput::classification(logits, y).loss_as(part)
                    });
                    training.step(part, output)?;
                }
                training.end_batch()?;
            }
            NextAction::Validate => training.validated(&Metrics::default())?,
        }
    }
    let model = training.finish()?.model;
    let data = [model.generator.weight.val(), model.discriminator.weight.val()];
    let values = |weights: Tensor<2>| weights.into_data().iter::<f32>().collect::<Vec<_>>();
    Ok(data.into_iter().flat_map(values).collect())
}

#[test]
fn rejected_step_leaves_the_model_usable() {
    let _stream = lock_random_stream();
    let fit = || Fit::new(Data::arrays(samples()).unwrap()).batch_size(16);
    let sgd = || Optimizers::one(SgdConfig::new().build(), 0.1);
    let context = alone(None, 3).context().unwrap();
    let refuse = |training: &mut Training<'_, Net, Pair>, of: Option<&str>| {
        let NextAction::Train(Some((x, _))) = training.next().unwrap().unwrap() else {
            panic!("a batch is due");
        };
        // Steps reject a negative sample count.
        let output = StepOutput::sum(training.model().forward(x).sum(), -1.0);
        let error = match of {
            Some(of) => training.step(of, Some(output)).map(drop).unwrap_err(),
            None => training.learn(Some(output)).unwrap_err(),
        };
        assert!(error.to_string().starts_with("cannot step: the sample count is -1;"), "{error}");
        crate::record::snapshot(&*training.model()).into_bytes().unwrap();
        training.end_batch().unwrap();
    };
    let mut training = context.training(Net::new(context.device()), sgd(), fit()).unwrap();
    refuse(&mut training, None);
    refuse(&mut training, Some("hidden"));
    let NextAction::Train(batch) = training.next().unwrap().unwrap() else {
        panic!("a batch is due")
    };
    let output = batch.map(|batch| step(&training.model(), batch));
    training.learn(output).unwrap();
}

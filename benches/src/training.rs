//! The sides that train: one step, our whole loop, and a custom loop.

use std::path::Path;
use std::time::Instant;

use burn::nn::loss::CrossEntropyLoss;
use burn::tensor::{DType, Int, Tensor};
use clap::ValueEnum;
use stoker_api::experiment::{Length, MixedPrecision, Unit};
use stoker_kernels::cross_entropy;
use stoker_trainer::{
    BatchContext, Callback, Context, Control, Data, Fit, Logs, Optimizers, Permutation, Result,
    Rows, Source, Standalone, StepOutput, host,
};

use crate::models::{Batch, Cnn, Gpt, Gpt768, LEARNING_RATE, Mlp, Subject, optimizer};
use crate::protocol::{self, Ready, Steps};

/// A model to benchmark.
#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
pub(crate) enum Model {
    /// A multilayer perceptron 784-512-256-10, batch 128
    Mlp,
    /// A convolutional network 16-32-fc128 on 28 x 28, batch 64
    Cnn,
    /// A causal transformer, 2 layers, d 128, 4 heads, sequence 64, batch 16
    Gpt,
    /// A causal transformer for GPUs, 12 layers, d 768, 12 heads, sequence 256, batch 16
    Gpt768,
}

/// The precision of a step's products.
#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
pub(crate) enum Precision {
    /// Single precision; in PyTorch without TF32
    F32,
    /// Single precision; in PyTorch with products rounded to TF32
    Tf32,
    /// bf16, with weights in single precision
    Bf16,
}

impl Precision {
    pub(crate) fn mixed(self) -> MixedPrecision {
        match self {
            Self::F32 | Self::Tf32 => MixedPrecision::None,
            Self::Bf16 => MixedPrecision::Bf16,
        }
    }
}

/// The loop that trains the model.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum LoopKind {
    /// `Context::fit` on one batch in memory, without storage
    Step,
    /// `Context::fit` with shuffled arrays, metrics, and a checkpoint every few seconds
    Fit,
    /// A custom loop over the same arrays, without storage
    Bare,
}

/// Number of batches in an epoch.
const EPOCH_BATCHES: usize = 100;

impl Model {
    /// Returns the number of batches between checkpoints and in a turn: five to ten seconds.
    pub(crate) fn checkpoint_batches(self) -> usize {
        match self {
            Self::Mlp => 1000,
            Self::Cnn => 200,
            Self::Gpt | Self::Gpt768 => 100,
        }
    }

    /// Returns [`Subject::flops`] of the model.
    pub(crate) fn flops(self) -> f64 {
        match self {
            Self::Mlp => Mlp::flops(),
            Self::Cnn => Cnn::flops(),
            Self::Gpt => Gpt::flops(),
            Self::Gpt768 => Gpt768::flops(),
        }
    }
}

/// Serves commands from stdin until its end.
///
/// # Errors
///
/// The training failed.
pub(crate) fn run(way: LoopKind, model: Model, folder: &Path, precision: Precision) -> Result<()> {
    match model {
        Model::Mlp => run_model::<Mlp>(way, model, folder, precision),
        Model::Cnn => run_model::<Cnn>(way, model, folder, precision),
        Model::Gpt => run_model::<Gpt>(way, model, folder, precision),
        Model::Gpt768 => run_model::<Gpt768>(way, model, folder, precision),
    }
}

fn run_model<S: Subject>(
    way: LoopKind,
    model: Model,
    folder: &Path,
    precision: Precision,
) -> Result<()> {
    match way {
        LoopKind::Step => {
            let mixed_precision = precision.mixed();
            let length = endless();
            let standalone =
                Standalone { quiet: true, length, mixed_precision, ..Standalone::default() };
            let context = standalone.context()?;
            let (inputs, labels) = S::data(S::BATCH, context.device());
            let batch = (S::cast(inputs, context.dtype()), labels);
            fit::<S>(&context, Data::new(OneBatch(batch)), loss::<S>)
        }
        LoopKind::Fit => {
            let standalone = Standalone {
                quiet: true,
                length: endless(),
                folder: Some(folder.to_owned()),
                checkpoint_period: Some(Length::new(
                    Unit::Batches,
                    model.checkpoint_batches() as u64,
                )),
                ..Standalone::default()
            };
            let arrays = S::data(S::BATCH * EPOCH_BATCHES, &host());
            fit::<S>(&standalone.context()?, Data::arrays(arrays)?, loss_and_accuracy::<S>)
        }
        LoopKind::Bare => bare::<S>(),
    }
}

/// Returns a length that is never reached: the end of the commands ends the training.
pub(crate) fn endless() -> Option<Length> {
    Some(Length::new(Unit::Batches, 1 << 40))
}

/// Trains with our loop, which handles commands between two batches.
fn fit<S: Subject>(
    context: &Context,
    data: Data<Batch<S>>,
    step: fn(&S, Batch<S>) -> StepOutput,
) -> Result<()> {
    let model = S::new(context.device());
    let optimizers = Optimizers::one(optimizer(), LEARNING_RATE);
    let follows = context.distributed().rank() > 0;
    let callback =
        CommandCallback { parameters: model.num_params(), follows, ..CommandCallback::default() };
    let fit = Fit::new(data).batch_size(S::BATCH).callbacks(vec![callback.boxed()]);
    context.fit(model, optimizers, step, fit).map(drop)
}

fn loss<S: Subject>(model: &S, (inputs, labels): Batch<S>) -> StepOutput {
    let labels: Tensor<1, Int> = labels.flatten(0, 1);
    let samples = labels.dims()[0];
    let logits = model.logits(inputs);
    let logits = match logits.dtype() {
        DType::BF16 => logits.cast(DType::F32),
        _ => logits,
    };
    StepOutput::mean(cross_entropy(&plain_loss(), logits, labels), samples)
}

/// Cross-entropy without options.
fn plain_loss() -> CrossEntropyLoss {
    CrossEntropyLoss { pad_tokens: None, weights: None, smoothing: None, logits: true }
}

fn loss_and_accuracy<S: Subject>(model: &S, (inputs, labels): Batch<S>) -> StepOutput {
    StepOutput::classification(model.logits(inputs), labels.flatten(0, 1))
}

/// A source that always returns the same batch.
struct OneBatch<I>((I, Tensor<2, Int>));

impl<I: Clone + Send + Sync> Source<(I, Tensor<2, Int>)> for OneBatch<I> {
    fn samples(&self) -> usize {
        self.0.1.dims()[0] * EPOCH_BATCHES
    }

    fn batch(&self, _: &[usize], _: &BatchContext) -> Result<(I, Tensor<2, Int>)> {
        Ok(self.0.clone())
    }
}

/// Callback that handles commands between two batches, and times the batches.
#[derive(Debug, Default)]
pub(crate) struct CommandCallback {
    parameters: usize,
    /// Whether this rank only follows rank 0, which handles the commands.
    follows: bool,
    num_steps: usize,
    timed: StepTimer,
}

impl CommandCallback {
    /// Creates the callback of a single rank.
    pub(crate) fn of(parameters: usize) -> Self {
        Self { parameters, ..Self::default() }
    }

    fn take_command(&mut self, control: &mut Control) -> Result<()> {
        if self.follows {
            self.num_steps = usize::MAX;
            return Ok(());
        }
        match protocol::next_command()? {
            Some(command) => self.num_steps = command.parse()?,
            None => control.stop_training("no more commands"),
        }
        self.timed = StepTimer::start();
        Ok(())
    }
}

impl Callback for CommandCallback {
    fn on_train_begin(&mut self, control: &mut Control) -> Result<()> {
        if !self.follows {
            protocol::respond(&Ready { parameters: self.parameters })?;
        }
        self.take_command(control)
    }

    fn on_batch_end(&mut self, logs: &Logs, control: &mut Control) -> Result<()> {
        self.timed.step(logs["loss"]);
        if self.timed.0.nanoseconds.len() == self.num_steps {
            protocol::respond(&self.timed.0)?;
            self.take_command(control)?;
        }
        Ok(())
    }
}

/// Times of the steps of one command.
#[derive(Debug, Default)]
struct StepTimer(Steps, Option<Instant>);

impl StepTimer {
    fn start() -> Self {
        Self(Steps::default(), Some(Instant::now()))
    }

    fn step(&mut self, loss: f64) {
        let now = Instant::now();
        let since = self.1.replace(now).map_or(0, |last| (now - last).as_nanos() as u64);
        if self.0.nanoseconds.is_empty() {
            self.0.losses.0 = loss;
        }
        self.0.losses.1 = loss;
        self.0.nanoseconds.push(since);
    }
}

/// Trains with a custom loop that uses burn and the same fused operators. It shuffles, gathers
/// batches, steps, and reads the loss and accuracy of each batch, as our loop does for callbacks.
fn bare<S: Subject>() -> Result<()> {
    let device = host().autodiff();
    let arrays = S::data(S::BATCH * EPOCH_BATCHES, &host());
    let (mut model, mut optimizer) = (S::new(&device), optimizer());
    protocol::respond(&Ready { parameters: model.num_params() })?;
    let (mut order, mut batch) = (vec![], 0);
    while let Some(num_steps) = protocol::next_command()? {
        let mut timed = StepTimer::start();
        for _ in 0..num_steps.parse()? {
            if batch % EPOCH_BATCHES == 0 {
                order = shuffled(S::BATCH * EPOCH_BATCHES, batch as u64);
            }
            let first = batch % EPOCH_BATCHES * S::BATCH;
            let (inputs, labels) = arrays.rows(&order[first..first + S::BATCH], &device, None);
            batch += 1;
            let labels: Tensor<1, Int> = labels.flatten(0, 1);
            let samples = labels.dims()[0];
            let logits = model.logits(inputs);
            let loss = cross_entropy(&plain_loss(), logits.clone(), labels.clone());
            let best: Tensor<1, Int> = logits.argmax(1).squeeze_dim(1);
            let num_correct = best.equal(labels).float().sum().into_scalar::<f64>();
            let gradients = burn::optim::GradientsParams::from_grads(loss.backward(), &model);
            model = optimizer.step(LEARNING_RATE, model, gradients);
            std::hint::black_box(num_correct / samples as f64);
            timed.step(loss.into_scalar());
        }
        protocol::respond(&timed.0)?;
    }
    Ok(())
}

fn shuffled(samples: usize, seed: u64) -> Vec<usize> {
    let order = Permutation::new(samples as u64, seed);
    (0..samples as u64).map(|position| order.at(position) as usize).collect()
}

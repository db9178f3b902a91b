//! Trials: trainings that are driven from outside.

use burn::module::Module;
use burn::tensor::Device;

use super::Part;
use super::fit::{Fit, Fitted, Step};
use crate::callback::Callback;
use crate::context::Context;
use crate::data::Data;
use crate::optim::Optimizers;
use crate::step::StepOutput;
use crate::{Error, Result, record};

/// A training that is driven from outside: says what to train, and leaves when and how long to
/// others. Run it by [`main`](crate::main).
pub trait Trial: Sized {
    /// Any module of burn.
    type Model: Module + 'static;
    /// What a step takes: a tensor, a tuple, a struct of them.
    type Batch: Send + 'static;

    /// Reads hyperparameters, opens data.
    ///
    /// # Errors
    ///
    /// [`InvalidHyperparameters`](crate::InvalidHyperparameters) where the search should draw others; any other ends the attempt.
    fn new(context: &Context) -> Result<Self>;

    /// The model on `device`, its weights drawn from the trial's seed.
    ///
    /// # Errors
    ///
    /// As [`Trial::new`].
    fn build_model(&self, device: &Device) -> Result<Self::Model>;

    /// The optimizers.
    ///
    /// # Errors
    ///
    /// As [`Trial::new`].
    fn build_optimizers(&self) -> Result<Optimizers>;

    /// What to train on, in batches of the hyperparameter `global_batch_size`.
    ///
    /// # Errors
    ///
    /// As [`Trial::new`].
    fn build_training_data(&self) -> Result<Data<Self::Batch>>;

    /// What to validate on.
    ///
    /// # Errors
    ///
    /// As [`Trial::new`].
    fn build_validation_data(&self) -> Result<Data<Self::Batch>>;

    /// Loss and metrics of a batch.
    fn step(&self, model: &Self::Model, batch: Self::Batch) -> StepOutput;

    /// Metrics of a validation batch, where they differ.
    fn validation_step(&self, model: &Self::Model, batch: Self::Batch) -> StepOutput {
        self.step(model, batch)
    }

    /// What runs between steps.
    fn callbacks(&self) -> Vec<Box<dyn Callback>> {
        vec![]
    }

    /// Which training of the trial this is: see [`Fit::continue_id`].
    fn continue_id(&self) -> String {
        String::new()
    }
}

/// A trial's steps as `fit` takes them.
struct Steps<T>(T);

impl<T: Trial> Step<T::Model, T::Batch> for Steps<T> {
    fn train(&self, model: &T::Model, batch: T::Batch) -> StepOutput {
        self.0.step(model, batch)
    }

    fn validate(&self, model: &T::Model, batch: T::Batch) -> StepOutput {
        self.0.validation_step(model, batch)
    }
}

/// Runs a trial to its end.
///
/// # Errors
///
/// What the trial's methods return;
/// [`InvalidHyperparameters`](crate::InvalidHyperparameters) where `global_batch_size` is missing
/// or cannot be; [`Interrupted`](crate::Interrupted) where training was asked to leave.
pub fn run_trial<T: Trial>(context: &Context) -> Result<Fitted<T::Model>> {
    run_watched::<T>(context, vec![])
}

/// As [`run_trial`], with callbacks after the trial's own.
pub(crate) fn run_watched<T: Trial>(
    context: &Context,
    watching: Vec<Box<dyn Callback>>,
) -> Result<Fitted<T::Model>> {
    let trial = context.tried(Part::New, || T::new(context))?;
    let batch_size = context.batch_size()?;
    context.warn_of_batch_size()?;
    // burn draws weights when they are first used: draw them here, before another thread seeds the stream.
    let model = context.draw_weights(|| {
        let model = context.tried(Part::BuildModel, || trial.build_model(context.device()))?;
        Ok::<_, Error>(record::initialise(model))
    })?;
    let optimizers = context.tried(Part::BuildOptimizers, || trial.build_optimizers())?;
    let train = context.tried(Part::BuildTrainingData, || trial.build_training_data())?;
    let validation = context.tried(Part::BuildValidationData, || trial.build_validation_data())?;
    let callbacks = trial.callbacks().into_iter().chain(watching).collect();
    let fit = Fit::new(train)
        .validation(validation)
        .batch_size(batch_size)
        .callbacks(callbacks)
        .continue_id(trial.continue_id());
    context.fit_with(model, optimizers, Steps(trial), fit)
}

//! Trials: trainings that an experiment controls.

use burn::module::Module;
use burn::tensor::Device;

use super::TestStage;
use super::fit::{Fit, Fitted, Step};
use crate::callback::Callback;
use crate::context::Context;
use crate::data::Data;
use crate::optim::Optimizers;
use crate::step::StepOutput;
use crate::{Error, Result, record};

/// A training that an experiment controls. The trial defines what to train; the experiment decides
/// how long and with which hyperparameters. Run it with [`main`](crate::main).
pub trait Trial: Sized {
    /// Model: any burn module.
    type Model: Module + 'static;
    /// Input of a step: a tensor, a tuple, or a struct of them.
    type Batch: Send + 'static;

    /// Creates the trial: reads hyperparameters and opens data.
    ///
    /// # Errors
    ///
    /// After [`InvalidHyperparameters`](crate::InvalidHyperparameters), the search samples other
    /// hyperparameters. Any other error ends the attempt.
    fn new(context: &Context) -> Result<Self>;

    /// Returns the model on `device`. Its weights are sampled from the trial's seed.
    ///
    /// # Errors
    ///
    /// Same as [`Trial::new`].
    fn build_model(&self, device: &Device) -> Result<Self::Model>;

    /// Returns the optimizers.
    ///
    /// # Errors
    ///
    /// Same as [`Trial::new`].
    fn build_optimizers(&self) -> Result<Optimizers>;

    /// Returns the training data. The hyperparameter `global_batch_size` sets the batch size.
    ///
    /// # Errors
    ///
    /// Same as [`Trial::new`].
    fn build_training_data(&self) -> Result<Data<Self::Batch>>;

    /// Returns the validation data.
    ///
    /// # Errors
    ///
    /// Same as [`Trial::new`].
    fn build_validation_data(&self) -> Result<Data<Self::Batch>>;

    /// Returns loss and metrics of a training batch.
    fn step(&self, model: &Self::Model, batch: Self::Batch) -> StepOutput;

    /// Returns metrics of a validation batch (default: same as [`step`](Self::step)).
    fn validation_step(&self, model: &Self::Model, batch: Self::Batch) -> StepOutput {
        self.step(model, batch)
    }

    /// Returns callbacks, which run between steps (default: none).
    fn callbacks(&self) -> Vec<Box<dyn Callback>> {
        vec![]
    }

    /// Returns the ID of this training (default: empty); see [`Fit::continue_id`].
    fn continue_id(&self) -> String {
        String::new()
    }
}

/// Adapter from a trial to the steps of `fit`.
struct TrialStep<T>(T);

impl<T: Trial> Step<T::Model, T::Batch> for TrialStep<T> {
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
/// Returns errors of the trial's methods and of [`Context::fit_with`]. Returns
/// [`InvalidHyperparameters`](crate::InvalidHyperparameters) if `global_batch_size` is missing or
/// invalid, and [`Interrupted`](crate::Interrupted) if the program should stop.
pub fn run_trial<T: Trial>(context: &Context) -> Result<Fitted<T::Model>> {
    run_trial_with::<T>(context, vec![])
}

/// Same as [`run_trial`], with additional callbacks after the trial's.
pub(crate) fn run_trial_with<T: Trial>(
    context: &Context,
    more_callbacks: Vec<Box<dyn Callback>>,
) -> Result<Fitted<T::Model>> {
    let trial = context.run_stage(TestStage::New, || T::new(context))?;
    let batch_size = context.batch_size()?;
    context.warn_of_batch_size()?;
    // burn samples weights on first use: sample them here, before another thread seeds the stream.
    let model = context.with_weight_seed(|| {
        let model =
            context.run_stage(TestStage::BuildModel, || trial.build_model(context.device()))?;
        Ok::<_, Error>(record::initialize(model))
    })?;
    let optimizers = context.run_stage(TestStage::BuildOptimizers, || trial.build_optimizers())?;
    let train = context.run_stage(TestStage::BuildTrainingData, || trial.build_training_data())?;
    let validation =
        context.run_stage(TestStage::BuildValidationData, || trial.build_validation_data())?;
    let callbacks = trial.callbacks().into_iter().chain(more_callbacks).collect();
    let fit = Fit::new(train)
        .validation(validation)
        .batch_size(batch_size)
        .callbacks(callbacks)
        .continue_id(trial.continue_id());
    context.fit_with(model, optimizers, TrialStep(trial), fit)
}

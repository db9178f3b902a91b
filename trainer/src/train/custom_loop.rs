//! Custom training loops with the same results as `fit`, bit for bit.

mod steps;
mod validation;

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt;

use burn::module::Module;

use super::TestStage;
use super::fit::{Fit, Fitted, Step};
use super::run::Run;
use super::timetable::Due;
use crate::context::Context;
use crate::data::Loader;
use crate::optim::{Optimizers, Selection};
use crate::step::{Metrics, StepOutput};
use crate::tensorboard::{Display, Image};
use crate::{Result, precision};

/// A training with a custom loop: the program decides what happens between two calls of
/// [`next`](Self::next).
///
/// All else is as in [`fit`](Context::fit): length, validations, checkpoints, reports and
/// callbacks. Results are bit-identical to `fit`, whether or not the training was interrupted.
///
/// ```no_run
/// # use stoker_trainer::burn::tensor::{Int, Tensor};
/// # use stoker_trainer::burn::{module::Module, nn::Linear, optim::AdamConfig};
/// # use stoker_trainer::{Context, Data, Fit, Optimizers, Result, StepOutput, NextAction};
/// # type Batch = (Tensor<2>, Tensor<1, Int>);
/// fn train(
///     context: &Context,
///     model: Linear,
///     data: Data<Batch>,
///     test: Data<Batch>,
/// ) -> Result<Linear> {
///     let step = |model: &Linear, (x, y): Batch| StepOutput::classification(model.forward(x), y);
///     let optimizers = Optimizers::one(AdamConfig::new().init(), 1e-3);
///     let mut training = context.training(model, optimizers, Fit::new(data).batch_size(32))?;
///     while let Some(action) = training.next()? {
///         match action {
///             NextAction::Train(batch) => {
///                 let output = batch.map(|batch| step(&training.model(), batch));
///                 training.learn(output)?;
///             }
///             NextAction::Validate => {
///                 let metrics = training.evaluate(step, &test, 32)?;
///                 training.validated(&metrics)?;
///             }
///         }
///     }
///     Ok(training.finish()?.model)
/// }
/// ```
///
/// All ranks get the same actions and must make the same calls. A rank without samples of a batch
/// calls `learn` or `step` with `None`. The hooks `on_validation_batch_begin` and
/// `on_validation_batch_end` are not called, because the program iterates over the validation
/// batches.
pub struct Training<'a, M, B> {
    run: Run<'a, M, B>,
    batches: Loader<B>,
    stage: Stage,
    /// Metrics of the steps in the current batch.
    metrics: Metrics,
    /// Whether the validation at the end of the length was just reported.
    is_at_end: bool,
    /// Number of calls of [`check_stop`](Self::check_stop) in the current validation.
    num_checks: u64,
    /// Indices of the parameters that steps of the current batch have updated.
    updated: BTreeSet<usize>,
    /// Whether a warning about gradients of such parameters was printed.
    has_warned: bool,
}

impl<M, B> fmt::Debug for Training<'_, M, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Training")
            .field("batches", &self.run.state.batches)
            .field("stage", &self.stage)
            .finish_non_exhaustive()
    }
}

/// Next action of a custom loop.
#[derive(Debug)]
pub enum NextAction<B> {
    /// Learn from this batch with [`Training::learn`], or with [`Training::step`] and
    /// [`Training::end_batch`]. `None` if this rank has no sample of it.
    Train(Option<B>),
    /// Validate the model and call [`Training::validated`].
    Validate,
}

/// State of the loop: what the program must do before the next action.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Stage {
    Start,
    Idle,
    Train,
    /// Same as [`Stage::Train`], after at least one step.
    Stepped,
    /// Request a validation next. All this is due after the batch.
    Due(Due),
    /// Validation after a batch. All this is due after the batch.
    Validate(Due),
    /// Validation before the first batch.
    ValidateFirst,
    /// Validation at the end of the length.
    ValidateLast,
    Over,
}

impl Stage {
    fn is_validation(self) -> bool {
        matches!(self, Self::Validate(_) | Self::ValidateFirst | Self::ValidateLast)
    }
}

/// Placeholder step: the program takes its own steps.
struct CustomLoop;

impl<M, B> Step<M, B> for CustomLoop {
    fn train(&self, _: &M, _: B) -> StepOutput {
        unreachable!("the program takes its own steps")
    }
}

impl Context {
    /// Starts a training with a custom loop. If this program has a checkpoint, training resumes
    /// from the latest one, whether a custom loop or [`fit`](Self::fit) saved it.
    ///
    /// # Errors
    ///
    /// Same as [`fit`](Self::fit). Also fails if `fit` has validation data, because the program
    /// validates itself.
    pub fn training<M: Module + 'static, B: Send + 'static>(
        &self,
        model: M,
        optimizers: Optimizers,
        fit: Fit<B>,
    ) -> Result<Training<'_, M, B>> {
        if fit.validation.is_some() {
            let text = "a custom loop cannot have validation data in `Fit`; pass the data to \
                        `Training::evaluate` at `NextAction::Validate`";
            return Err(text.into());
        }
        let mut run = Run::start(self, model, optimizers, &CustomLoop, fit)?;
        run.has_custom_loop = true;
        let batches = run.loader();
        Ok(Training {
            run,
            batches,
            stage: Stage::Start,
            metrics: Metrics::default(),
            is_at_end: false,
            num_checks: 0,
            updated: BTreeSet::new(),
            has_warned: false,
        })
    }
}

impl<M: Module + 'static, B: Send + 'static> Training<'_, M, B> {
    /// Returns the next action, or `None` when training is over.
    ///
    /// # Errors
    ///
    /// Fails if the data, a callback, the storage or the runner fails, or if the previous action
    /// was not completed. Returns [`Interrupted`](crate::Interrupted) if the program should stop; a
    /// checkpoint is then already stored.
    #[expect(clippy::should_implement_trait, reason = "an iterator could not lend the model")]
    pub fn next(&mut self) -> Result<Option<NextAction<B>>> {
        match self.stage {
            Stage::Start => {
                self.stage = Stage::Idle;
                if let Some(due) = self.run.begin_interrupted_validation() {
                    // The checkpoint at this batch lacks the result.
                    self.run.saved = None;
                    return self.validate(Stage::Validate(due));
                }
                if self.run.validates_first() {
                    return self.validate(Stage::ValidateFirst);
                }
            }
            Stage::Idle => {}
            Stage::Due(due) => return self.validate(Stage::Validate(due)),
            Stage::Over => return Ok(None),
            Stage::Train => return Err(skipped_error("a batch", "`learn`")),
            Stage::Stepped => return Err(skipped_error("a batch with steps", "`end_batch`")),
            _ => return Err(skipped_error("a validation", "`validated`")),
        }
        loop {
            if !self.run.is_at_length() {
                self.run.apply_directive()?;
                if self.run.is_at_length() {
                    continue;
                }
                self.run.begin_batch()?;
                self.stage = Stage::Train;
                return Ok(Some(NextAction::Train(self.run.next_batch(&mut self.batches)?)));
            }
            let is_validated =
                std::mem::take(&mut self.is_at_end) || self.run.prepare_final_validation()?;
            if !is_validated {
                return self.validate(Stage::ValidateLast);
            }
            if self.run.complete_length()? {
                self.stage = Stage::Over;
                return Ok(None);
            }
        }
    }

    fn validate(&mut self, stage: Stage) -> Result<Option<NextAction<B>>> {
        self.run.begin_validation()?;
        (self.stage, self.num_checks) = (stage, 0);
        Ok(Some(NextAction::Validate))
    }

    /// Returns the model for computation, in half precision if the experiment sets it. Drop it
    /// before the step: the optimizer updates weights in place only if they are not shared, and a
    /// clone costs memory.
    pub fn model(&self) -> Cow<'_, M> {
        precision::to_compute_precision(&*self.run.model, self.run.context.config.mixed_precision)
    }

    /// Returns the number of global batches trained.
    pub fn batches(&self) -> u64 {
        self.run.state.batches
    }

    /// Returns the number of finished epochs.
    pub fn epoch(&self) -> u64 {
        self.run.timetable.epochs_finished(self.run.state.batches)
    }

    /// Learns from a batch with all parameters, as [`fit`](Context::fit) does. Pass `None` if this
    /// rank has no sample of the batch.
    ///
    /// # Errors
    ///
    /// Fails if the current action is not `NextAction::Train`, or if another rank or a callback
    /// fails.
    pub fn learn(&mut self, output: Option<StepOutput>) -> Result<()> {
        if self.stage != Stage::Train {
            return Err(out_of_order("learn", "once after `NextAction::Train`", self.stage));
        }
        self.run.learn(output)?;
        self.after_batch()
    }

    /// Takes a step with only the parameters whose path matches the regular expression `of`, at any
    /// position in the path. Each uses the optimizer and learning rate of its group; other
    /// gradients are discarded. Returns the metrics over all ranks.
    ///
    /// A batch may have several such steps, for example the two losses of a GAN. Their metrics
    /// share one row, so name the losses differently with [`StepOutput::loss_as`].
    /// [`end_batch`](Self::end_batch) ends the batch. Learning rate schedules advance at the first
    /// step of a batch. A batch without a step does not advance them.
    ///
    /// # Errors
    ///
    /// Fails in these cases:
    ///
    /// - The current action is not `NextAction::Train`.
    /// - `of` is not a valid regular expression, or matches no parameter.
    /// - Gradients are aggregated over batches.
    /// - No rank passed an output.
    /// - The loss has no gradient for any of these parameters. A step replaces the parameters that
    ///   it updates, so compute the loss of the next step over them from [`model`](Self::model)
    ///   after that step.
    pub fn step(&mut self, of: &str, output: Option<StepOutput>) -> Result<Metrics> {
        if !matches!(self.stage, Stage::Train | Stage::Stepped) {
            return Err(out_of_order("step", "after `NextAction::Train`", self.stage));
        }
        let selection = Selection::new(of, &*self.run.model)?;
        let metrics = self.step_selected(of, &selection, output)?;
        self.metrics.add(&metrics);
        self.stage = Stage::Stepped;
        Ok(metrics)
    }

    /// Ends a batch of several steps, or of none if there was nothing to learn. If gradients are
    /// aggregated over n batches and this is an n-th one, takes the step with the gradients of the
    /// batches before it, if any.
    ///
    /// # Errors
    ///
    /// Fails if the current action is not `NextAction::Train`, or if another rank or a callback
    /// fails.
    pub fn end_batch(&mut self) -> Result<()> {
        if !matches!(self.stage, Stage::Train | Stage::Stepped) {
            return Err(out_of_order("end_batch", "after `NextAction::Train`", self.stage));
        }
        let metrics = std::mem::take(&mut self.metrics);
        self.end_steps();
        self.run.step_without_output()?;
        self.run.read_late_metrics()?;
        self.run.end_batch(&metrics)?;
        self.after_batch()
    }

    fn after_batch(&mut self) -> Result<()> {
        let due = self.run.after_batch()?;
        self.stage = Stage::Idle;
        if due.validation {
            self.stage = Stage::Due(due);
            return Ok(());
        }
        self.run.after_validation(due, false)
    }

    /// Reports the metrics of a validation. They must be the same on all ranks, as returned by
    /// [`evaluate`](Self::evaluate). The metric `loss` is reported as `validation_loss`.
    ///
    /// # Errors
    ///
    /// Fails if the current action is not `NextAction::Validate`, if the searched metric is
    /// missing, or if a callback fails.
    pub fn validated(&mut self, metrics: &Metrics) -> Result<()> {
        let run = &mut self.run;
        let context = run.context;
        let stage = std::mem::replace(&mut self.stage, Stage::Idle);
        if !stage.is_validation() {
            self.stage = stage;
            return Err(out_of_order("validated", "once after `NextAction::Validate`", stage));
        }
        let is_best = context.run_stage(TestStage::Validation, || match metrics.is_empty() {
            true => run.record_no_validation(),
            false => run.record_validation(metrics),
        })?;
        match stage {
            Stage::Validate(due) => run.after_validation(due, is_best)?,
            Stage::ValidateFirst => run.report_validation(None),
            Stage::ValidateLast => self.is_at_end = true,
            _ => {}
        }
        Ok(())
    }

    /// Writes an image at this batch to TensorBoard. Only rank 0 writes it.
    pub fn image(&self, name: &str, image: Image) {
        self.run.io().display(name, self.batches(), &Display::Image(image));
    }

    /// Writes a text in Markdown at this batch to TensorBoard. Only rank 0 writes it.
    pub fn text(&self, name: &str, text: impl Into<String>) {
        self.run.io().display(name, self.batches(), &Display::Text(text.into()));
    }

    /// Waits until everything is stored and returns the trained model.
    ///
    /// # Errors
    ///
    /// Fails if the storage or a callback fails, or if training is not over.
    pub fn finish(self) -> Result<Fitted<M>> {
        match self.stage {
            Stage::Over => self.run.finish(),
            _ => Err("training is not over; call `next` until it returns `None`".into()),
        }
    }
}

fn skipped_error(what: &str, call: &str) -> crate::Error {
    format!("{what} was skipped; call {call} before `next`").into()
}

fn out_of_order(call: &str, when: &str, stage: Stage) -> crate::Error {
    let now = match stage {
        Stage::Start | Stage::Idle | Stage::Due(_) => "`next` was not called",
        Stage::Train => "a batch is waiting for `learn`",
        Stage::Stepped => "a batch has steps and needs `end_batch`",
        Stage::Over => "training is over",
        _ => "a validation is due",
    };
    format!("cannot call `{call}`: {now}; call it {when}").into()
}

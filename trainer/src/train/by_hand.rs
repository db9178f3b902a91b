//! Trainings whose loop is the program's own, with the bits of `fit`.

use std::borrow::Cow;
use std::fmt;

use burn::module::Module;

use super::Part;
use super::fit::{Fit, Fitted, Step};
use super::run::Run;
use super::timetable::Due;
use crate::context::Context;
use crate::data::Loader;
use crate::optim::{GradientSum, Optimizers, Selection};
use crate::step::{Metrics, StepOutput};
use crate::{Result, precision};

/// A training whose loop is the program's own: what is between two calls of [`next`](Self::next) is up to
/// it. All else is as in [`fit`](Context::fit): when to validate, to save and to report, how long to
/// train, callbacks, and the bits, whether it was stopped in between or not.
///
/// ```no_run
/// # use stoker_trainer::burn::{module::Module, nn::Linear, optim::AdamConfig, tensor::{Int, Tensor}};
/// # use stoker_trainer::{Context, Data, Fit, Optimizers, Result, StepOutput, Turn};
/// # type Batch = (Tensor<2>, Tensor<1, Int>);
/// fn train(context: &Context, model: Linear, data: Data<Batch>, test: Data<Batch>) -> Result<Linear> {
///     let step = |model: &Linear, (x, y): Batch| StepOutput::classification(model.forward(x), y);
///     let optimizers = Optimizers::one(AdamConfig::new().init(), 1e-3);
///     let mut training = context.training(model, optimizers, Fit::new(data).batch_size(32))?;
///     while let Some(turn) = training.next()? {
///         match turn {
///             Turn::Train(batch) => {
///                 let output = batch.map(|batch| step(&training.model(), batch));
///                 training.learn(output)?;
///             }
///             Turn::Validate => {
///                 let metrics = context.evaluate(&*training.model(), step, &test, 32)?;
///                 training.validated(&metrics)?;
///             }
///         }
///     }
///     Ok(training.finish()?.model)
/// }
/// ```
///
/// All ranks take the same turns and make the same calls; whoever has no sample of a batch calls `learn` or
/// `step` with `None`. Of callbacks, `on_validation_batch_begin` and `on_validation_batch_end` are not called:
/// the batches of a validation are the program's.
pub struct Training<'a, M, B> {
    run: Run<'a, M, B>,
    batches: Loader<B>,
    stage: Stage,
    /// Of the steps of the batch under way.
    metrics: Metrics,
    /// Whether the validation where the length ends was just said.
    is_at_end: bool,
}

impl<M, B> fmt::Debug for Training<'_, M, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Training")
            .field("batches", &self.run.state.batches)
            .field("stage", &self.stage)
            .finish_non_exhaustive()
    }
}

/// What the program is to do next.
#[derive(Debug)]
pub enum Turn<B> {
    /// To learn from this batch: [`Training::learn`], or [`Training::step`] and
    /// [`Training::end_batch`]. `None` where this rank has no sample of it.
    Train(Option<B>),
    /// To say how good the model is: [`Training::validated`].
    Validate,
}

/// What the program was last asked for.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Stage {
    Start,
    Idle,
    Train,
    /// As [`Stage::Train`], after a step.
    Stepped,
    /// A validation is to be asked for, after a batch of which all this is due.
    Due(Due),
    /// After a batch, of which all this is due.
    Validate(Due),
    /// Before the first batch.
    ValidateFirst,
    /// Where the length ends.
    ValidateLast,
    Over,
}

/// There is no step: the program takes it.
struct ByHand;

impl<M, B> Step<M, B> for ByHand {
    fn train(&self, _: &M, _: B) -> StepOutput {
        unreachable!("the program takes its steps itself")
    }
}

impl Context {
    /// A training whose loop is the program's own. Goes on from this program's latest checkpoint where
    /// there is one, be it of such a loop or of [`fit`](Self::fit).
    ///
    /// # Errors
    ///
    /// As [`fit`](Self::fit); validation data in `fit`: the program validates itself.
    pub fn training<M: Module + 'static, B: Send + 'static>(
        &self,
        model: M,
        optimizers: Optimizers,
        fit: Fit<B>,
    ) -> Result<Training<'_, M, B>> {
        if fit.validation.is_some() {
            let text = "a training by hand has validation data: give it to `Context::evaluate` at \
                        `Turn::Validate` instead";
            return Err(text.into());
        }
        let mut run = Run::start(self, model, optimizers, &ByHand, fit)?;
        run.by_hand = true;
        let batches = run.loader();
        let metrics = Metrics::default();
        Ok(Training { run, batches, stage: Stage::Start, metrics, is_at_end: false })
    }
}

impl<M: Module + 'static, B: Send + 'static> Training<'_, M, B> {
    /// What to do next; `None` where training is over.
    ///
    /// # Errors
    ///
    /// What the data, a callback, the storage or the runner failed with;
    /// [`Interrupted`](crate::Interrupted) where training was asked to leave, after a checkpoint; the last
    /// turn was not taken.
    #[expect(clippy::should_implement_trait, reason = "an iterator could not lend the model")]
    pub fn next(&mut self) -> Result<Option<Turn<B>>> {
        match self.stage {
            Stage::Start => {
                self.stage = Stage::Idle;
                if self.run.validates_first() {
                    return self.validate(Stage::ValidateFirst);
                }
            }
            Stage::Idle => {}
            Stage::Due(due) => return self.validate(Stage::Validate(due)),
            Stage::Over => return Ok(None),
            Stage::Train => return Err(missed("a batch", "`learn`")),
            Stage::Stepped => return Err(missed("a batch with steps", "`end_batch`")),
            _ => return Err(missed("a validation", "`validated`")),
        }
        loop {
            if !self.run.is_at_length() {
                self.run.obey()?;
                if self.run.is_at_length() {
                    continue;
                }
                self.run.begin_batch()?;
                self.stage = Stage::Train;
                return Ok(Some(Turn::Train(self.run.next_batch(&mut self.batches)?)));
            }
            let is_validated = std::mem::take(&mut self.is_at_end) || self.run.arrive()?;
            if !is_validated {
                return self.validate(Stage::ValidateLast);
            }
            if self.run.reach_length()? {
                self.stage = Stage::Over;
                return Ok(None);
            }
        }
    }

    fn validate(&mut self, stage: Stage) -> Result<Option<Turn<B>>> {
        self.run.begin_validation()?;
        self.stage = stage;
        Ok(Some(Turn::Validate))
    }

    /// The model as steps compute with it, in half precision if the experiment says so. A clone of it
    /// that outlives the step costs memory: weights that nobody else holds are changed in place.
    pub fn model(&self) -> Cow<'_, M> {
        precision::lowered(&*self.run.model, self.run.context.config.mixed_precision)
    }

    /// Global batches trained.
    pub fn batches(&self) -> u64 {
        self.run.state.batches
    }

    /// Epochs finished.
    pub fn epoch(&self) -> u64 {
        self.run.timetable.epochs_finished(self.run.state.batches)
    }

    /// Learns from a batch with all parameters, as [`fit`](Context::fit) does; `None` where this rank had
    /// no sample.
    ///
    /// # Errors
    ///
    /// It is not the turn for it; what another rank or a callback failed with.
    pub fn learn(&mut self, output: Option<StepOutput>) -> Result<()> {
        if self.stage != Stage::Train {
            return Err(out_of_turn("learn", "once after `Turn::Train`", self.stage));
        }
        self.run.learn(output)?;
        self.after_batch()
    }

    /// Takes a step with the parameters alone in whose path this regular expression is found, each by
    /// the optimizer and the learning rate of its group; gradients of others are forgotten. A batch may
    /// have several such steps, as for a GAN, whose two losses differ: their metrics are of one row, so
    /// name the losses apart ([`StepOutput::loss_as`]). [`end_batch`](Self::end_batch) ends it.
    ///
    /// Learning rates and their schedules go by batches, not by steps. Gives the metrics of all ranks.
    ///
    /// # Errors
    ///
    /// It is not the turn for it; `of` is no expression, or finds no parameter; gradients are aggregated
    /// over batches; no rank gave an output.
    pub fn step(&mut self, of: &str, output: Option<StepOutput>) -> Result<Metrics> {
        if !matches!(self.stage, Stage::Train | Stage::Stepped) {
            return Err(out_of_turn("step", "after `Turn::Train`", self.stage));
        }
        let selection = Selection::new(of, &*self.run.model)?;
        let metrics = self.run.step_of(&selection, output)?;
        self.metrics.add(&metrics);
        self.stage = Stage::Stepped;
        Ok(metrics)
    }

    /// Ends a batch of several steps, or of none where there was nothing to learn.
    ///
    /// # Errors
    ///
    /// It is not the turn for it; what a callback failed with.
    pub fn end_batch(&mut self) -> Result<()> {
        if !matches!(self.stage, Stage::Train | Stage::Stepped) {
            return Err(out_of_turn("end_batch", "after `Turn::Train`", self.stage));
        }
        let metrics = std::mem::take(&mut self.metrics);
        self.run.end_steps();
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

    /// Reports what a validation says, the same on all ranks, as [`Context::evaluate`] gives it. The names
    /// are `loss` for the metric `validation_loss`.
    ///
    /// # Errors
    ///
    /// It is not the turn for it; the searched metric is missing; what a callback failed with.
    pub fn validated(&mut self, metrics: &Metrics) -> Result<()> {
        let run = &mut self.run;
        let context = run.context;
        let stage = std::mem::replace(&mut self.stage, Stage::Idle);
        if !matches!(stage, Stage::Validate(_) | Stage::ValidateFirst | Stage::ValidateLast) {
            self.stage = stage;
            return Err(out_of_turn("validated", "once after `Turn::Validate`", stage));
        }
        let is_best = context.tried(Part::Validation, || match metrics.is_empty() {
            true => run.no_validation(),
            false => run.take_validation(metrics),
        })?;
        match stage {
            Stage::Validate(due) => run.after_validation(due, is_best)?,
            Stage::ValidateFirst => run.report_validation(None),
            Stage::ValidateLast => self.is_at_end = true,
            _ => {}
        }
        Ok(())
    }

    /// Waits until all is stored; gives the trained model.
    ///
    /// # Errors
    ///
    /// The storage or a callback failed; training is not over.
    pub fn finish(self) -> Result<Fitted<M>> {
        match self.stage {
            Stage::Over => self.run.finish(),
            _ => Err("training is not over: go on until `next` gives `None`".into()),
        }
    }
}

impl<M: Module + 'static, B: Send + 'static> Run<'_, M, B> {
    /// A step of a batch that may have several, with these parameters alone.
    fn step_of(&mut self, selection: &Selection, output: Option<StepOutput>) -> Result<Metrics> {
        if self.aggregation > 1 {
            let text = format!(
                "gradients are aggregated over {} batches, but a step of some parameters is of one: \
                 set optimizations.aggregationFrequency to 1, or `learn`",
                self.aggregation
            );
            return Err(text.into());
        }
        let (context, ranks) = (self.context, self.context.distributed());
        let mut sum = GradientSum::default();
        let metrics = sum.add_of(&*self.model, selection, output, ranks.size() == 1);
        // Ranks that count otherwise would add up other things.
        let place = format!("step of {selection} of batch {}", self.state.batches);
        let of_ranks = self.agree(&place, (metrics, sum.tally()))?;
        let (metrics, tallies): (Vec<_>, Vec<_>) = of_ranks.into_iter().unzip();
        let compression = context.config.gradient_compression;
        let (all, flat) = (ranks.collective(), &mut self.flat);
        let sum = sum.all_reduce(&*self.model, all, &tallies, compression, flat)?;
        let gradients = self.optimizers.normalise(&*self.model, sum, all)?;
        let (optimizers, rates) = (&mut self.optimizers, &mut self.rates);
        let rates = rates.get_or_insert_with(|| optimizers.next_rates());
        self.model.replace(|model| optimizers.step_at(rates, model, gradients))?;
        Ok(Metrics::total(metrics))
    }

    /// No more steps of this batch.
    fn end_steps(&mut self) {
        self.rates = None;
    }
}

fn missed(what: &str, call: &str) -> crate::Error {
    format!("{what} was left out: call {call} before `next`").into()
}

fn out_of_turn(call: &str, when: &str, stage: Stage) -> crate::Error {
    let now = match stage {
        Stage::Start | Stage::Idle | Stage::Due(_) => "`next` was not called",
        Stage::Train => "a batch is to be learned from",
        Stage::Stepped => "a batch has steps already, which `end_batch` ends",
        Stage::Over => "training is over",
        _ => "a validation is due",
    };
    format!("`{call}` is called {when}; now {now}").into()
}

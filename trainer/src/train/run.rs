//! Training loop.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::MutexGuard;
use std::time::Instant;

use burn::module::Module;
use bytes::Bytes;

use super::Part;
use super::fit::{Fit, Fitted, Step};
use super::held::Held;
use super::hook;
use super::hooks::Workload;
use super::length::Wish;
use super::program::panicked;
use super::state::{RunState, from_bits};
use super::timetable::{Due, Timetable};
use crate::callback::{Callback, Control};
use crate::collective::{Distributed, exchange};
use crate::context::Context;
use crate::data::{Data, Loader};
use crate::error::caught;
use crate::optim::{FlatGradients, GradientSum, Optimizers, Tally};
use crate::step::{Metrics, StepOutput};
use crate::trial_io::TrialIo;
use crate::{InvalidInput, Result, precision, record, rng};

/// This process's part of a training.
pub(super) struct Run<'a, M, B> {
    pub(super) context: &'a Context,
    pub(super) model: Held<M>,
    pub(super) optimizers: Optimizers,
    pub(super) step: &'a dyn Step<M, B>,
    pub(super) train: Data<B>,
    pub(super) validation: Option<Data<B>>,
    pub(super) batch_size: usize,
    pub(super) callbacks: Vec<Box<dyn Callback>>,
    pub(super) control: Control,
    pub(super) timetable: Timetable,
    pub(super) state: RunState,
    pub(super) gradients: GradientSum,
    /// Buffers for summing gradients over ranks.
    pub(super) flat: FlatGradients,
    /// Granted length, in units and in batches.
    pub(super) granted_units: u64,
    pub(super) granted: u64,
    /// Batch of the last checkpoint.
    pub(super) saved: Option<u64>,
    /// Model that a callback keeps; see `train/kept.rs`.
    pub(super) kept: Option<Bytes>,
    /// Requests that all ranks last agreed on; unused with one rank.
    pub(super) wish: Wish,
    pub(super) aggregation: u64,
    /// Whether this process has not trained a batch yet.
    is_first: bool,
    /// Learning rates of the current batch, if it has several steps.
    pub(super) rates: Option<Vec<f64>>,
    /// Whether the program has a custom loop; see `train/custom_loop.rs`.
    pub(super) has_custom_loop: bool,
    /// Current batches up to the next scheduling boundary.
    pub(super) workload: Option<Workload>,
}

impl<'a, M: Module + 'static, B: Send + 'static> Run<'a, M, B> {
    /// Checks what can be checked before the first batch, and restores the checkpoint.
    pub(super) fn start(
        context: &'a Context,
        model: M,
        optimizers: Optimizers,
        step: &'a dyn Step<M, B>,
        fit: Fit<B>,
    ) -> Result<Self> {
        let config = &context.config;
        if config.inference.is_some() {
            let text = "this process belongs to an inference job, but its program trains; \
                        implement `Inference` and call `infer`";
            return Err(InvalidInput(text.into()).into());
        }
        {
            let mut io = context.io();
            if io.has_loop && (io.last_saved().is_some() || io.restored.is_some()) {
                let text = "this process has already trained and saved checkpoints: a second \
                            training could not be resumed; use a separate trial or program, or \
                            save no checkpoints";
                return Err(text.into());
            }
            io.has_loop = true;
        }
        let Fit { train, validation, batch_size, epochs, initial_epoch, callbacks, continue_id } =
            fit;
        let global_batch = batch_size * context.distributed().size();
        let plan = context.loader_plan(batch_size, true);
        train.check(&plan)?;
        validation.as_ref().map_or(Ok(()), |data| data.check_validation(&plan))?;
        let model = optimizers.draw_weights(context, model);
        optimizers.check(&record::paths(&model))?;
        let timetable = Timetable::new(config, train.steps(&plan), global_batch as u64);
        let own_epochs = epochs.filter(|_| !context.io().has_runner() && config.units == 0);
        let granted_units = own_epochs.unwrap_or(config.units.max(1));
        let granted = timetable.batches(config.unit, granted_units);
        let aggregation = match config.aggregation_frequency {
            0 | 1 => optimizers.aggregation(),
            of_experiment => of_experiment,
        };
        let (samples, global) = (train.samples(), train.global_batch(&plan));
        let validated = validation.as_ref().map(Data::samples);
        same_data(context.distributed(), (samples, global, validated))?;
        let has_runner = context.io().has_runner();
        let batches = if has_runner { 0 } else { timetable.epoch_start(initial_epoch) };
        let order = Some(train.read_order(config.seed));
        let state = RunState {
            batches,
            global_batch: global,
            samples,
            order,
            continue_id,
            ..RunState::default()
        };
        let mut run = Self {
            context,
            model: Held::new(model),
            optimizers,
            step,
            train,
            validation,
            batch_size,
            callbacks,
            control: Control::default(),
            timetable,
            state,
            gradients: GradientSum::default(),
            flat: FlatGradients::default(),
            granted_units,
            granted,
            saved: None,
            kept: None,
            wish: Wish::default(),
            aggregation: u64::from(aggregation),
            is_first: true,
            rates: None,
            has_custom_loop: false,
            workload: None,
        };
        run.tell_control();
        let ranks = context.distributed();
        hook(&mut run.callbacks, &mut run.control, ranks, |callback, control| {
            callback.on_train_begin(control)
        })?;
        run.restore()?;
        #[cfg(feature = "learner")]
        run.optimizers.adopt(&*run.model);
        if run.saved.is_some() {
            // The checkpoint already contains learning rates and kept weights.
            (run.control.scale, run.control.keeps_weights) = (None, false);
        }
        run.heed()?;
        Ok(run)
    }

    /// Trains to the granted length, and continues if the length grows.
    pub(super) fn train(mut self) -> Result<Fitted<M>> {
        if self.validates_first() {
            self.validate()?;
            self.report_validation(None);
        } else if self.state.batches == 0 {
            self.context.tried(Part::Validation, || self.check_searched_metric())?;
        }
        let context = self.context;
        let mut batches = self.loader();
        loop {
            if self.is_at_length() {
                if !self.arrive()? {
                    context.tried(Part::Validation, || self.validate())?;
                }
                if self.reach_length()? {
                    break;
                }
                continue;
            }
            self.obey()?;
            if self.is_at_length() {
                continue;
            }
            self.begin_batch()?;
            match self.is_first {
                true => context.tried(Part::FirstBatch, || self.train_batch(&mut batches))?,
                false => self.train_batch(&mut batches)?,
            }
            let due = self.after_batch()?;
            let is_best = match due.validation {
                true => context.tried(Part::Validation, || self.validate())?,
                false => false,
            };
            self.after_validation(due, is_best)?;
        }
        self.finish()
    }

    /// Locks the trial I/O. Must not be called twice in one expression, which would deadlock.
    pub(super) fn io(&self) -> MutexGuard<'a, TrialIo> {
        self.context.io()
    }

    /// Returns whether to validate before the first batch.
    pub(super) fn validates_first(&self) -> bool {
        self.timetable.validates_first(self.state.batches, self.state.validated.is_some())
    }

    /// Returns whether training has reached its length, as far as is known.
    pub(super) fn is_at_length(&self) -> bool {
        self.state.stopped.is_some() || self.state.batches >= self.granted
    }

    /// Called at the end of training. If a callback stopped training, restores kept weights and
    /// writes the last row of metrics. Returns whether there was a validation at this batch.
    pub(super) fn arrive(&mut self) -> Result<bool> {
        if self.state.stopped.is_some() {
            self.take_kept()?;
            if !self.state.since_row.is_empty() {
                self.report_row()?;
            }
        }
        Ok(self.is_validated())
    }

    fn is_validated(&self) -> bool {
        self.state.validated.as_ref().is_some_and(|last| last.batches == self.state.batches)
    }

    /// Ends training and returns its result.
    pub(super) fn finish(mut self) -> Result<Fitted<M>> {
        self.leave_training()?;
        let history = self.state.history.iter().map(from_bits).collect();
        let model =
            precision::raised(self.model.into_inner()?, self.context.config.mixed_precision);
        Ok(Fitted { model, history, stopped: self.state.stopped })
    }

    /// Returns batches from the current position on, without end: the granted length may grow.
    pub(super) fn loader(&self) -> Loader<B> {
        let plan = self.context.loader_plan(self.batch_size, true);
        self.train.loader(plan, self.state.batches..u64::MAX)
    }

    /// Trains the next batch.
    fn train_batch(&mut self, batches: &mut Loader<B>) -> Result<()> {
        let batch = self.next_batch(batches)?;
        let output = {
            // Drop this copy before the step: the optimizer updates weights in place only if they
            // are not shared.
            let model = precision::lowered(&*self.model, self.context.config.mixed_precision);
            match batch {
                Some(batch) if self.is_first => {
                    let fields = self.train.fields();
                    let step = || self.step.train(&model, batch);
                    Some(self.first_step("the first batch", &fields, step)?)
                }
                batch => batch.map(|batch| self.step.train(&model, batch)),
            }
        };
        self.is_first = false;
        self.learn(output)
    }

    /// Returns this rank's part of the next batch. Seeds the random stream for the step, and
    /// without workers also for making the batch, so that a resumed training samples the same
    /// numbers.
    pub(super) fn next_batch(&mut self, batches: &mut Loader<B>) -> Result<Option<B>> {
        let (context, ranks) = (self.context, self.context.distributed());
        ranks.pulse.step(self.state.batches);
        let (device, seed, number) = (context.device(), context.trial_seed(), self.state.batches);
        let seed = || rng::seed_step(device, seed, number, ranks.rank());
        let is_made_here = batches.makes_batches_here();
        if is_made_here {
            seed();
        }
        let start = Instant::now();
        let batch = batches.next().ok_or("the data ended unexpectedly")??;
        ranks.pulse.waited_for_data(start.elapsed());
        if !is_made_here {
            seed();
        }
        Ok(batch)
    }

    /// Accumulates the gradients of one batch. When enough batches are accumulated, all-reduces the
    /// gradients, divides by the global count, and steps.
    pub(super) fn learn(&mut self, output: Option<StepOutput>) -> Result<()> {
        let (context, ranks) = (self.context, self.context.distributed());
        let whole = self.aggregation == 1 && ranks.size() == 1;
        let metrics = self.gradients.add(&*self.model, output, whole);
        let is_step = (self.state.batches + 1).is_multiple_of(self.aggregation);
        let is_shared = is_step && ranks.size() > 1;
        let tally = if is_shared { self.gradients.tally() } else { Tally::default() };
        let of_ranks = self.agree("step", (metrics, tally))?;
        let (metrics, tallies): (Vec<_>, Vec<_>) = of_ranks.into_iter().unzip();
        if is_step {
            let sum = std::mem::take(&mut self.gradients);
            let compression = context.config.gradient_compression;
            let (all, flat) = (ranks.collective(), &mut self.flat);
            let mut sum = sum.all_reduce(&*self.model, all, &tallies, compression, flat)?;
            let averages = context.config.average_aggregated_gradients;
            #[cfg(feature = "learner")]
            let averages = averages && !self.optimizers.sums_batches();
            if !averages {
                sum.sum_of(self.aggregation);
            }
            // Before the model is lent to the step: if the sum is unusable, the model stays valid.
            let gradients = self.optimizers.normalize(&*self.model, sum, all)?;
            self.model.replace(|model| self.optimizers.step(model, gradients))?;
        }
        self.end_batch(&Metrics::total(metrics))
    }

    /// Counts a trained batch. `metrics` are over all ranks.
    pub(super) fn end_batch(&mut self, metrics: &Metrics) -> Result<()> {
        self.state.batches += 1;
        self.state.since_row.add(metrics);
        self.state.since_epoch.add(metrics);
        let logs = metrics.means("");
        self.hook(|callback, control| callback.on_batch_end(&logs, control))?;
        let Some(workload) = &mut self.workload else { return Ok(()) };
        workload.metrics.add(metrics);
        let is_over = self.state.batches >= workload.end || self.state.stopped.is_some();
        if is_over { self.end_workload() } else { Ok(()) }
    }

    /// Runs a step for the first time. Shape errors appear here, as burn panics without names, so
    /// add the names of the data's fields to the error.
    pub(super) fn first_step(
        &self,
        which: &str,
        fields: &[String],
        step: impl FnOnce() -> StepOutput,
    ) -> Result<StepOutput> {
        let describe = |why: &str| {
            let why = panicked(self.context, why);
            let data = match fields {
                [] => String::new(),
                fields => format!("; the data is {}", fields.join(", ")),
            };
            format!("the step failed on {which}: {why}{data}")
        };
        catch_unwind(AssertUnwindSafe(step)).map_err(|panic| caught(panic, describe))
    }

    /// Writes the row of metrics if one is due, and returns all that is due after this batch.
    pub(super) fn after_batch(&mut self) -> Result<Due> {
        let batches = self.state.batches;
        let due = self.timetable.due(batches, self.granted);
        if due.row {
            self.report_row()?;
        }
        Ok(due)
    }

    /// Writes a row with the metrics since the last row.
    fn report_row(&mut self) -> Result<()> {
        let (batches, epoch) = (self.state.batches, self.epoch());
        let metrics = std::mem::take(&mut self.state.since_row).means("");
        let mut io = self.io();
        io.row("training", batches, epoch, &metrics)?;
        io.progress(batches, self.granted);
        Ok(())
    }

    /// Does everything else that is due after a batch: hooks, reports and checkpoints.
    pub(super) fn after_validation(&mut self, due: Due, is_best: bool) -> Result<()> {
        let batches = self.state.batches;
        if due.epoch_end {
            self.end_epoch()?;
        }
        let goes_on = !self.is_at_length();
        if due.validation && goes_on {
            self.report_validation(None);
        }
        let by_policy = due.validation && self.timetable.saves_after_validation(is_best);
        if (due.checkpoint || by_policy) && goes_on {
            self.save()?;
        }
        let mut io = self.io();
        io.terminal.advance(batches, self.granted);
        io.report_saved(false)
    }

    /// Returns how many epochs finished before the current batch.
    pub(super) fn epoch(&self) -> u64 {
        self.timetable.epoch(self.state.batches)
    }

    fn leave_training(&mut self) -> Result<()> {
        self.wait_for(Self::store)?;
        self.io().end_training();
        self.io().terminal.end();
        self.take_kept()?;
        self.end_hooks()?;
        self.context.distributed().pulse.rest();
        Ok(())
    }
}

/// Fails if ranks read data of different sizes. Compares only the number of samples and the batch
/// size.
pub(super) fn same_data(ranks: &Distributed, local: (usize, usize, Option<usize>)) -> Result<()> {
    if ranks.size() == 1 {
        return Ok(());
    }
    let all = exchange(ranks.collective(), "data", local)?;
    let Some(rank) = all.iter().position(|sizes| *sizes != all[0]) else { return Ok(()) };
    let describe = |(samples, global, validated): (usize, usize, Option<usize>)| {
        let validated = validated.map_or("no".to_owned(), |samples| samples.to_string());
        format!(
            "{samples} training samples in global batches of {global} and {validated} validation \
             samples"
        )
    };
    let (other, lead) = (describe(all[rank]), describe(all[0]));
    Err(format!(
        "rank {rank} has {other}, but rank 0 has {lead}; read the same data in the same order on \
         every rank, for example by sorting file names"
    )
    .into())
}

//! Training loop.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::MutexGuard;
use std::time::Instant;

use burn::module::Module;
use bytes::Bytes;

use super::TestStage;
use super::directives::StopState;
use super::exchange::MetricNames;
use super::fit::{Fitted, Step};
use super::gradient_check::GradientCheck;
use super::hooks::Workload;
use super::late_metrics::LateMetrics;
use super::model_slot::ModelSlot;
use super::program::panic_text;
use super::state::{RunState, from_bits};
use super::timetable::{Due, Timetable};
use crate::callback::{Callback, Control};
use crate::context::Context;
use crate::data::{Data, Loader};
use crate::error::error_from_unwind;
use crate::optim::{AllReduceState, GradientSum, Optimizers};
use crate::step::{Metrics, StepOutput, UnreadMetrics};
use crate::trial_io::TrialIo;
use crate::{Result, precision, record, rng};

/// This process's part of a training.
pub(super) struct Run<'a, M, B> {
    pub(super) context: &'a Context,
    pub(super) model: ModelSlot<M>,
    pub(super) optimizers: Optimizers,
    pub(super) step: &'a dyn Step<M, B>,
    pub(super) train: Data<B>,
    /// Loader of the first batches, whose workers have started already.
    pub(super) early_loader: Option<Loader<B>>,
    pub(super) validation: Option<Data<B>>,
    pub(super) batch_size: usize,
    pub(super) callbacks: Vec<Box<dyn Callback>>,
    pub(super) control: Control,
    pub(super) timetable: Timetable,
    pub(super) state: RunState,
    pub(super) gradients: GradientSum,
    pub(super) gradient_check: GradientCheck,
    pub(super) all_reduce: AllReduceState,
    /// Names of the metrics of steps that all ranks know; unused with one rank.
    pub(super) metric_names: MetricNames,
    pub(super) late_metrics: LateMetrics,
    /// Granted length, in units and in batches.
    pub(super) granted_units: u64,
    pub(super) granted: u64,
    /// Batch of the last checkpoint.
    pub(super) saved: Option<u64>,
    /// Model that a callback keeps; see `train/best_weights.rs`.
    pub(super) best_weights: Option<Bytes>,
    /// Requests that all ranks last agreed on; unused with one rank.
    pub(super) stop_state: StopState,
    pub(super) aggregation: u64,
    /// Whether this process has not trained a batch yet.
    pub(super) is_first: bool,
    /// Learning rates of the current batch, if it has several steps.
    pub(super) rates: Option<Vec<f64>>,
    /// Whether the program has a custom loop; see `train/custom_loop.rs`.
    pub(super) has_custom_loop: bool,
    /// Current batches up to the next scheduling boundary.
    pub(super) workload: Option<Workload>,
}

impl<'a, M: Module + 'static, B: Send + 'static> Run<'a, M, B> {
    /// Trains to the granted length, and continues if the length grows.
    pub(super) fn train(mut self) -> Result<Fitted<M>> {
        if self.validates_first() {
            self.validate()?;
            self.report_validation(None);
        } else if self.state.batches == 0 {
            self.context.run_stage(TestStage::Validation, || self.check_searched_metric())?;
        }
        if let Some(due) = self.begin_interrupted_validation() {
            let is_best = self.validate_after_batch()?;
            self.saved = None;
            self.after_validation(due, is_best)?;
        }
        let context = self.context;
        let mut batches = self.loader();
        loop {
            if self.is_at_length() {
                if !self.prepare_final_validation()? {
                    context.run_stage(TestStage::Validation, || self.validate())?;
                }
                if self.complete_length()? {
                    break;
                }
                continue;
            }
            self.apply_directive()?;
            if self.is_at_length() {
                continue;
            }
            self.begin_batch()?;
            match self.is_first {
                true => {
                    context.run_stage(TestStage::FirstBatch, || self.train_batch(&mut batches))?
                }
                false => self.train_batch(&mut batches)?,
            }
            let due = self.after_batch()?;
            let is_best = match due.validation {
                true => context.run_stage(TestStage::Validation, || self.validate_after_batch())?,
                false => false,
            };
            self.after_validation(due, is_best)?;
        }
        self.finish()
    }

    /// Returns what is due after the validation at this batch if a signal has interrupted it. The
    /// row of metrics was written before.
    pub(super) fn begin_interrupted_validation(&mut self) -> Option<Due> {
        if !std::mem::take(&mut self.state.is_validation_due) {
            return None;
        }
        self.update_control();
        let due = self.timetable.due(self.state.batches, self.granted);
        Some(Due { row: false, validation: true, ..due })
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
    pub(super) fn prepare_final_validation(&mut self) -> Result<bool> {
        if self.state.stopped.is_some() {
            self.read_late_metrics()?;
            self.restore_best_weights()?;
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
        self.close_training()?;
        let history = self.state.history.iter().map(from_bits).collect();
        let model = precision::to_single_statistics(
            self.model.into_inner()?,
            self.context.config.mixed_precision,
        );
        Ok(Fitted { model, history, stopped: self.state.stopped })
    }

    /// Trains the next batch.
    fn train_batch(&mut self, batches: &mut Loader<B>) -> Result<()> {
        let batch = self.next_batch(batches)?;
        let output = {
            // Drop this copy before the step: the optimizer updates weights in place only if they
            // are not shared.
            let model =
                precision::to_compute_precision(&*self.model, self.context.config.mixed_precision);
            match batch {
                Some(batch) if self.is_first => {
                    let fields = self.train.fields();
                    let step = || self.step.train(&model, batch);
                    Some(self.first_step("the first batch", &fields, step)?)
                }
                batch => batch.map(|batch| self.step.train(&model, batch)),
            }
        };
        self.learn(output)
    }

    /// Returns this rank's part of the next batch. Seeds the random stream for the step, and
    /// without workers also for making the batch, so that a resumed training samples the same
    /// numbers.
    pub(super) fn next_batch(&mut self, batches: &mut Loader<B>) -> Result<Option<B>> {
        let (context, ranks) = (self.context, self.context.distributed());
        ranks.progress.begin_step(self.state.batches);
        let (device, seed, number) = (context.device(), context.trial_seed(), self.state.batches);
        let seed = || rng::seed_step(device, seed, number, ranks.rank());
        let is_made_on_this_thread = batches.makes_batches_itself();
        if is_made_on_this_thread {
            seed();
        }
        let start = Instant::now();
        let batch = batches.next().ok_or("the data ended unexpectedly")??;
        ranks.progress.add_data_wait(start.elapsed());
        if !is_made_on_this_thread {
            seed();
        }
        Ok(batch)
    }

    /// Accumulates the gradients of one batch. When enough batches are accumulated, all-reduces the
    /// gradients, divides by the global count, and steps.
    pub(super) fn learn(&mut self, output: Option<StepOutput>) -> Result<()> {
        if !self.optimizers.has_stepped() && record::trained_paths(&*self.model).is_empty() {
            return Err("all parameters of the model are frozen, so nothing would be trained; \
                        unfreeze some, or use a custom loop with only `Training::end_batch`"
                .into());
        }
        let whole = self.aggregation == 1 && self.context.distributed().size() == 1;
        let metrics = self.gradients.add(&*self.model, output, whole);
        let sum = self.is_step_due().then(|| std::mem::take(&mut self.gradients));
        let ends_workload =
            self.workload.as_ref().is_some_and(|workload| self.state.batches + 1 >= workload.end);
        let metrics = self.late_metrics.swap(metrics, ends_workload);
        let (metrics, sum) = self.exchange_step("step", metrics, sum)?;
        sum.map_or(Ok(()), |sum| self.step_with(sum))?;
        #[cfg(any(feature = "cuda", feature = "cubecl-cpu"))]
        self.late_metrics.queue_copy();
        // Read last: a GPU would otherwise be idle until the step is queued.
        self.end_batch(&metrics.read())
    }

    /// Returns whether the current batch is the last one before a step.
    fn is_step_due(&self) -> bool {
        (self.state.batches + 1).is_multiple_of(self.aggregation)
    }

    /// Takes the step that is due after a batch without an output on any rank, if gradients of
    /// earlier batches are accumulated on any rank.
    pub(super) fn step_without_output(&mut self) -> Result<()> {
        if self.aggregation == 1 || !self.is_step_due() {
            return Ok(());
        }
        let sum = std::mem::take(&mut self.gradients);
        let (_, sum) = self.exchange_step("step", UnreadMetrics::default(), Some(sum))?;
        sum.filter(|sum| !sum.is_empty()).map_or(Ok(()), |sum| self.step_with(sum))
    }

    /// Takes a step with the sum of the gradients of all ranks.
    fn step_with(&mut self, mut sum: GradientSum) -> Result<()> {
        let is_lead = self.context.distributed().rank() == 0;
        self.gradient_check.check(sum.lacks_gradients(), is_lead)?;
        let averages = self.context.config.average_aggregated_gradients;
        #[cfg(feature = "learner")]
        let averages = averages && !self.optimizers.sums_batches();
        if !averages {
            sum.mean_to_sum(self.aggregation);
        }
        let ranks = self.context.distributed().collective();
        // Before the model is lent to the step: if the sum is unusable, the model stays valid.
        let gradients = self.optimizers.normalize(&*self.model, sum, ranks)?;
        self.model.replace(|model| self.optimizers.step(model, gradients))
    }

    /// Counts a trained batch. `metrics` are over all ranks, of this batch, or of the one before if
    /// they are read late.
    pub(super) fn end_batch(&mut self, metrics: &Metrics) -> Result<()> {
        if std::mem::take(&mut self.is_first)
            && self.state.batches == 0
            && self.context.distributed().rank() == 0
        {
            self.context.warn_of_unread_hparams();
        }
        self.add_metrics(metrics);
        self.state.batches += 1;
        let logs = self.late_metrics.batch_logs(metrics);
        self.hook(|callback, control| callback.on_batch_end(&logs, control))?;
        let Some(workload) = &self.workload else { return Ok(()) };
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
            let why = panic_text(self.context, why);
            let data = match fields {
                [] => String::new(),
                fields => format!("; the data is {}", fields.join(", ")),
            };
            format!("the step failed on {which}: {why}{data}")
        };
        catch_unwind(AssertUnwindSafe(step)).map_err(|panic| error_from_unwind(panic, describe))
    }

    /// Writes the row of metrics if one is due, and returns all that is due after this batch.
    /// Reports progress if there has been no report for a while.
    pub(super) fn after_batch(&mut self) -> Result<Due> {
        let batches = self.state.batches;
        let due = self.timetable.due(batches, self.granted);
        match due.row {
            true => self.report_row()?,
            false => self.io().progress_if_due(batches, self.granted),
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
        let by_policy = due.validation && self.timetable.saves_after_validation(is_best);
        let saves = due.checkpoint || by_policy;
        if saves {
            self.agree_on_end()?;
        }
        let will_continue = !self.is_at_length();
        if due.validation && will_continue {
            self.report_validation(None);
        }
        if saves && will_continue {
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

    fn close_training(&mut self) -> Result<()> {
        self.wait_for(Self::wait_until_stored)?;
        self.io().end_training();
        self.io().terminal.end();
        self.restore_best_weights()?;
        self.end_hooks()?;
        self.context.distributed().progress.training_finished();
        Ok(())
    }
}

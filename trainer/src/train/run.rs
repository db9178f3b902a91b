//! The loop.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::module::Module;
use stoker_api::contract::ReportEvent;

use super::Part;
use super::fit::{Fit, Fitted, Step};
use super::held::Held;
use super::hook;
use super::hooks::Workload;
use super::length::Wish;
use super::program::panicked;
use super::state::{RunState, Validated, from_bits};
use super::timetable::{Due, Timetable};
use crate::callback::{Callback, Control, Logs};
use crate::collective::{Distributed, exchange};
use crate::context::Context;
use crate::data::{Data, Loader, panic_message};
use crate::optim::{GradientSum, Optimizers, Tally};
use crate::session::Session;
use crate::step::{Metrics, StepOutput};
use crate::{Result, precision, record, rng};

/// One process's part of a training.
pub(super) struct Run<'a, M, B> {
    pub(super) context: &'a Context,
    pub(super) session: &'a mut Session,
    pub(super) model: Held<M>,
    pub(super) optimizers: Optimizers,
    step: &'a dyn Step<M, B>,
    pub(super) train: Data<B>,
    validation: Option<Data<B>>,
    batch_size: usize,
    pub(super) callbacks: Vec<Box<dyn Callback>>,
    pub(super) control: Control,
    pub(super) timetable: Timetable,
    pub(super) state: RunState,
    pub(super) gradients: GradientSum,
    /// Where gradients are summed over ranks.
    flat: Vec<f32>,
    /// The length granted, in units and in batches.
    pub(super) granted_units: u64,
    pub(super) granted: u64,
    /// The batch of the last checkpoint.
    pub(super) saved: Option<u64>,
    /// What ranks last agreed on, where there are several.
    pub(super) wish: Wish,
    aggregation: u64,
    /// Whether this process has trained no batch yet.
    is_first: bool,
    /// The batches between two looks around that are under way.
    pub(super) workload: Option<Workload>,
}

impl<'a, M: Module + 'static, B: Send + 'static> Run<'a, M, B> {
    /// Checks what can be checked before the first batch, and takes on the checkpoint.
    pub(super) fn start(
        context: &'a Context,
        session: &'a mut Session,
        model: M,
        optimizers: Optimizers,
        step: &'a dyn Step<M, B>,
        fit: Fit<B>,
    ) -> Result<Self> {
        let config = &context.config;
        let Fit { train, validation, batch_size, epochs, callbacks } = fit;
        let global_batch = batch_size * context.distributed().size();
        let plan = context.plan(batch_size, true);
        train.check(&plan)?;
        validation.as_ref().map_or(Ok(()), |it| it.check_validation(&plan))?;
        let model = record::initialise(model);
        optimizers.check(&record::paths(&model))?;
        let timetable = Timetable::new(config, train.steps(&plan), global_batch as u64);
        let own_epochs = epochs.filter(|_| !session.has_runner() && config.units == 0);
        let granted_units = own_epochs.unwrap_or(config.units.max(1));
        let granted = timetable.batches(config.unit, granted_units);
        let aggregation = match config.aggregation_frequency {
            0 | 1 => optimizers.aggregation(),
            of_experiment => of_experiment,
        };
        let (samples, global) = (train.samples(), train.global_batch(&plan));
        let validated = validation.as_ref().map(Data::samples);
        same_data(context.distributed(), (samples, global, validated))?;
        let state = RunState { global_batch: global, samples, ..RunState::default() };
        let mut run = Self {
            context,
            session,
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
            flat: vec![],
            granted_units,
            granted,
            saved: None,
            wish: Wish::default(),
            aggregation: u64::from(aggregation),
            is_first: true,
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
        Ok(run)
    }

    /// Trains to the length granted, and on as it grows.
    pub(super) fn train(mut self) -> Result<Fitted<M>> {
        if self.timetable.validates_first(self.state.batches, self.state.validated.is_some()) {
            self.validate()?;
            self.report_validation(None);
        } else if self.session.has_runner() && self.state.batches == 0 {
            self.context.tried(Part::Validation, || self.check_searched_metric())?;
        }
        let context = self.context;
        let mut batches = self.loader();
        loop {
            if self.state.stopped.is_some() || self.state.batches >= self.granted {
                if self.reach_length()? {
                    break;
                }
                continue;
            }
            self.obey()?;
            self.begin_batch()?;
            match self.is_first {
                true => context.tried(Part::FirstBatch, || self.train_batch(&mut batches))?,
                false => self.train_batch(&mut batches)?,
            }
            let due = self.timetable.due(self.state.batches, self.granted);
            self.after_batch(due)?;
        }
        self.leave_training()?;
        let history = self.state.history.iter().map(from_bits).collect();
        let model =
            precision::raised(self.model.into_inner()?, self.context.config.mixed_precision);
        Ok(Fitted { model, history, stopped: self.state.stopped })
    }

    /// Batches from here on, without an end: how long to train may change.
    fn loader(&self) -> Loader<B> {
        let plan = self.context.plan(self.batch_size, true);
        self.train.loader(plan, self.state.batches..u64::MAX)
    }

    /// Accumulates one batch's gradients, and where enough are together: sums over ranks,
    /// normalises by the global count, steps. Metrics are those of all ranks from here on.
    fn train_batch(&mut self, batches: &mut Loader<B>) -> Result<()> {
        let (context, ranks) = (self.context, self.context.distributed());
        ranks.pulse.step(self.state.batches);
        let batch = batches.next().ok_or("the data has ended")??;
        rng::seed_step(context.device(), context.trial_seed(), self.state.batches, ranks.rank());
        let output = {
            // It is gone before the step, which changes weights in place if nobody shares them.
            let model = precision::lowered(&*self.model, context.config.mixed_precision);
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
        let whole = self.aggregation == 1 && ranks.size() == 1;
        let metrics = self.gradients.add(&*self.model, output, whole);
        let is_step = (self.state.batches + 1).is_multiple_of(self.aggregation);
        let is_shared = is_step && ranks.size() > 1;
        let tally = if is_shared { self.gradients.tally() } else { Tally::default() };
        let of_ranks = self.agree("step", (metrics, tally))?;
        let (metrics, tallies): (Vec<_>, Vec<_>) = of_ranks.into_iter().unzip();
        let metrics = Metrics::total(metrics);
        self.state.batches += 1;
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
            self.model.replace(|model| self.optimizers.step(model, sum, all))?;
        }
        self.state.since_row.add(&metrics);
        self.state.since_epoch.add(&metrics);
        let logs = metrics.means("");
        self.hook(|callback, control| callback.on_batch_end(&logs, control))?;
        let Some(workload) = &mut self.workload else { return Ok(()) };
        workload.metrics.add(&metrics);
        let is_over = self.state.batches >= workload.end || self.state.stopped.is_some();
        if is_over { self.end_workload() } else { Ok(()) }
    }

    /// What does not fit shows at the first batch, by a panic of burn's that knows no names.
    fn first_step(
        &self,
        which: &str,
        fields: &[String],
        step: impl FnOnce() -> StepOutput,
    ) -> Result<StepOutput> {
        catch_unwind(AssertUnwindSafe(step)).map_err(|panic| {
            let why = panicked(self.context, &panic_message(&*panic));
            let data = match fields {
                [] => String::new(),
                fields => format!("; the data is {}", fields.join(", ")),
            };
            format!("the step fails on {which}: {why}{data}").into()
        })
    }

    /// Does what is due.
    fn after_batch(&mut self, due: Due) -> Result<()> {
        let batches = self.state.batches;
        if due.row {
            let metrics = std::mem::take(&mut self.state.since_row);
            let metrics = metrics.means("");
            self.session.row("training", batches, self.epoch(), &metrics)?;
            self.session.progress(batches, self.granted);
        }
        let mut is_best = false;
        if due.validation {
            let context = self.context;
            is_best = context.tried(Part::Validation, || self.validate())?;
        }
        if due.epoch_end {
            self.end_epoch()?;
        }
        let goes_on = batches < self.granted && self.state.stopped.is_none();
        if due.validation && goes_on {
            self.report_validation(None);
        }
        let by_policy = due.validation && self.timetable.saves_after_validation(is_best);
        if (due.checkpoint || by_policy) && goes_on {
            self.save()?;
        }
        self.session.terminal.advance(batches, self.granted);
        self.session.report_saved(false)
    }

    /// Epochs finished before the current batch.
    pub(super) fn epoch(&self) -> u64 {
        self.timetable.epoch(self.state.batches)
    }

    /// The means of a validation at this batch, as callbacks see them.
    pub(super) fn validation_logs(&self) -> Logs {
        let here = self.state.validated.as_ref().filter(|it| it.batches == self.state.batches);
        let metrics = here.map(Validated::metrics).unwrap_or_default();
        metrics
            .into_iter()
            .map(|(name, value)| (name.replacen("validation_", "val_", 1), value))
            .collect()
    }

    /// Validates; says whether the searched metric is the best yet.
    pub(super) fn validate(&mut self) -> Result<bool> {
        let batches = self.state.batches;
        self.share_buffers()?;
        let Some(data) = &self.validation else {
            self.state.validated = Some(Validated::new(batches, &Logs::new()));
            return self.searched_metric().map(|_| false);
        };
        let mut all = Metrics::default();
        let (step, ranks) = (self.step, self.context.distributed());
        let (callbacks, control) = (&mut self.callbacks, &mut self.control);
        hook(callbacks, control, ranks, |callback, control| callback.on_validation_begin(control))?;
        self.context.each_batch(&*self.model, data, self.batch_size, |index, model, batch| {
            hook(callbacks, control, ranks, |callback, control| {
                callback.on_validation_batch_begin(index, control)
            })?;
            if let Some(batch) = batch {
                all.add(&step.validate(model, batch).into_metrics());
            }
            hook(callbacks, control, ranks, |callback, control| {
                callback.on_validation_batch_end(index, control)
            })
        })?;
        let all = step.validated(all)?;
        let metrics = all.all_reduce(self.context.distributed().collective())?.means("validation_");
        self.session.row("validation", batches, self.epoch(), &metrics)?;
        self.state.validated = Some(Validated::new(batches, &metrics));
        let mut is_best = false;
        if let Some(metric) = self.searched_metric()? {
            let best = self.state.best.map(f64::from_bits);
            is_best = self.timetable.is_best(metric, best);
            if is_best {
                self.state.best = Some(metric.to_bits());
            }
        }
        let logs = self.validation_logs();
        self.hook(|callback, control| callback.on_validation_end(&logs, control))?;
        Ok(is_best)
    }

    /// Refuses a search by a metric that no validation will give before anything is trained for it:
    /// looks at the names of one batch's metrics. Changes no random stream that is read again.
    fn check_searched_metric(&self) -> Result<()> {
        let mut metrics = Logs::new();
        if let Some(data) = &self.validation {
            let plan = self.context.plan(self.batch_size, false);
            let steps = data.steps(&plan).min(1);
            let first = data.loader(plan, 0..steps).next().transpose()?;
            let Some(batch) = first.flatten() else { return Ok(()) };
            let model = self.model.valid();
            let model = precision::lowered(&model, self.context.config.mixed_precision);
            let step = || self.step.validate(&model, batch);
            let output = self.first_step("the first validation batch", &data.fields(), step)?;
            metrics = output.into_metrics().means("validation_");
        }
        self.searched_among(&metrics).map(drop)
    }

    /// The searched metric of the validation at this batch.
    pub(super) fn searched_metric(&self) -> Result<Option<f64>> {
        let here = self.state.validated.as_ref().filter(|it| it.batches == self.state.batches);
        here.map_or(Ok(None), |validated| self.searched_among(&validated.metrics()))
    }

    /// The searched metric among these. A search by a metric that there is not is an error; a program
    /// alone need not have it.
    fn searched_among(&self, metrics: &Logs) -> Result<Option<f64>> {
        let searched = &self.context.config.metric;
        let name = match searched.strip_prefix("val_") {
            Some(name) => format!("validation_{name}"),
            None => searched.clone(),
        };
        match metrics.get(&name) {
            Some(value) => Ok(Some(*value)),
            None if !self.session.has_runner() => Ok(None),
            None => {
                let names = metrics.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
                let names = if names.is_empty() { "none" } else { &names };
                Err(format!(
                    "there is no searched metric {searched}; of validation there are {names}"
                )
                .into())
            }
        }
    }

    /// Reports the last validation; `granted_units` makes it the result at that length.
    pub(super) fn report_validation(&mut self, granted_units: Option<u64>) {
        let event = self.validation_event(granted_units);
        self.session.post(self.state.batches, event);
    }

    pub(super) fn validation_event(&self, granted_units: Option<u64>) -> ReportEvent {
        let metrics = self.state.validated.as_ref().map(Validated::metrics).unwrap_or_default();
        let format = |(name, value)| (name, stoker_api::number::format(value));
        ReportEvent::Validated { metrics: metrics.into_iter().map(format).collect(), granted_units }
    }

    fn leave_training(&mut self) -> Result<()> {
        self.wait_for(|run| run.session.report_saved(true).and_then(|()| run.session.flush()))?;
        self.session.terminal.end();
        self.end_hooks()?;
        self.context.distributed().pulse.rest();
        Ok(())
    }
}

/// Refuses ranks that read other data than rank 0, as far as numbers tell.
pub(super) fn same_data(ranks: &Distributed, mine: (usize, usize, Option<usize>)) -> Result<()> {
    if ranks.size() == 1 {
        return Ok(());
    }
    let all = exchange(ranks.collective(), "data", mine)?;
    let Some(rank) = all.iter().position(|it| *it != all[0]) else { return Ok(()) };
    let told = |(samples, global, validated): (usize, usize, Option<usize>)| {
        let validated = validated.map_or("no".to_owned(), |it| it.to_string());
        format!(
            "{samples} training samples in global batches of {global} and {validated} validation samples"
        )
    };
    let (other, lead) = (told(all[rank]), told(all[0]));
    Err(format!(
        "rank {rank} has {other}, but rank 0 has {lead}: every rank must read the same data in the same \
         order, such as a folder's files sorted by name"
    )
    .into())
}

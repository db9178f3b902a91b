//! Validations and the searched metric.

use burn::module::Module;
use stoker_api::contract::{ReportEvent, reported_metrics};

use super::directives::StopState;
use super::run::Run;
use super::state::Validated;
use super::{CallbackError, call_hook, unique_names};
use crate::callback::{Logs, missing_metric};
use crate::collective::all_gather_cbor;
use crate::context::Context;
use crate::session::find_searched_metric;
use crate::step::Metrics;
use crate::{Error, Result, precision, rng};

/// Number of validation batches between two agreements of the ranks on whether to stop.
const BATCHES_TO_STOP: u64 = 16;

/// A stop request has interrupted a validation.
#[derive(Debug, thiserror::Error)]
#[error("a stop was requested")]
struct ValidationStopped(StopState);

/// Fails with [`ValidationStopped`] if requests, on which all ranks agree, stop the validation
/// before this batch.
pub(super) fn check_stop(context: &Context, index: u64) -> Result<()> {
    let (ranks, local) = (context.distributed(), StopState::local(context));
    let agreed = match ranks.size() {
        1 => local,
        _ if !index.is_multiple_of(BATCHES_TO_STOP) => return Ok(()),
        _ => StopState::agreed(&all_gather_cbor(ranks.collective(), "validation", local)?),
    };
    if agreed.must_exit() { Err(ValidationStopped(agreed).into()) } else { Ok(()) }
}

impl<M: Module + 'static, B: Send + 'static> Run<'_, M, B> {
    /// Returns the means of a validation at this batch, under the names that callbacks use.
    pub(super) fn validation_logs(&self) -> Logs {
        let here = self.state.validated.as_ref().filter(|last| last.batches == self.state.batches);
        let metrics = here.map(Validated::metrics).unwrap_or_default();
        metrics
            .into_iter()
            .map(|(name, value)| (name.replacen("validation_", "val_", 1), value))
            .collect()
    }

    /// Validates after a batch. Same as [`validate`](Self::validate), but a training that resumes
    /// after an interruption also does what follows the validation.
    pub(super) fn validate_after_batch(&mut self) -> Result<bool> {
        self.state.is_validation_due = true;
        let is_best = self.validate()?;
        self.state.is_validation_due = false;
        Ok(is_best)
    }

    /// Validates. Returns whether the searched metric is the best so far.
    ///
    /// # Errors
    ///
    /// A signal or the runner prevents or interrupts the validation. A checkpoint is then saved,
    /// from which training resumes with the whole validation.
    pub(super) fn validate(&mut self) -> Result<bool> {
        let (context, ranks) = (self.context, self.context.distributed());
        let checked = self.validation.as_ref().map_or(Ok(()), |_| check_stop(context, 0));
        checked.map_err(|error| self.stop_validation(error))?;
        self.begin_validation()?;
        let Some(data) = &self.validation else { return self.record_no_validation() };
        let mut all = Metrics::default();
        let (step, batches, granted) = (self.step, self.state.batches, self.granted);
        let (callbacks, control) = (&mut self.callbacks, &mut self.control);
        let read =
            context.for_each_batch(&*self.model, data, self.batch_size, |index, model, batch| {
                context.io().progress_if_due(batches, granted);
                if index > 0 {
                    check_stop(context, index)?;
                }
                call_hook(callbacks, control, ranks, |callback, control| {
                    callback.on_validation_batch_begin(index, control)
                })?;
                if let Some(batch) = batch {
                    all.add(&step.validate(model, batch).into_metrics());
                }
                call_hook(callbacks, control, ranks, |callback, control| {
                    callback.on_validation_batch_end(index, control)
                })
            });
        read.map_err(|error| self.stop_validation(error))?;
        let all = step.validated(all)?;
        let all = all.all_reduce(ranks.collective())?;
        self.record_validation(&all)
    }

    /// If requests have stopped the validation, saves a checkpoint and returns the error to exit
    /// with. Returns other errors unchanged.
    pub(super) fn stop_validation(&mut self, error: Error) -> Error {
        match error.downcast::<ValidationStopped>() {
            Ok(stopped) => {
                self.stop_state = stopped.0;
                self.apply_directive().err().unwrap_or_else(|| self.stop_by_signal())
            }
            Err(error) => error,
        }
    }

    /// Shares buffers of the model among ranks, seeds the random stream, and calls the hooks before
    /// a validation.
    pub(super) fn begin_validation(&mut self) -> Result<()> {
        self.broadcast_buffers()?;
        if self.validation.is_none() && !self.has_custom_loop {
            return Ok(());
        }
        let (context, ranks) = (self.context, self.context.distributed());
        let (seed, batches) = (context.trial_seed(), self.state.batches);
        rng::seed_validation(context.device(), seed, batches, ranks.rank());
        let (callbacks, control) = (&mut self.callbacks, &mut self.control);
        call_hook(callbacks, control, ranks, |callback, control| {
            callback.on_validation_begin(control)
        })
    }

    /// Records an empty validation if there is no validation data.
    pub(super) fn record_no_validation(&mut self) -> Result<bool> {
        self.state.validated = Some(Validated::new(self.state.batches, &Logs::new()));
        self.searched_metric().map(|_| false)
    }

    /// Records the metrics of a validation over all ranks. Returns whether the searched metric is
    /// the best so far.
    pub(super) fn record_validation(&mut self, all: &Metrics) -> Result<bool> {
        let batches = self.state.batches;
        let metrics = all.means("validation_");
        self.io().row("validation", batches, self.epoch(), &metrics)?;
        self.state.validated = Some(Validated::new(batches, &metrics));
        if self.is_first {
            // A checkpoint at this batch is of an earlier process and lacks this validation.
            self.saved = None;
        }
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

    /// Fails before training if validation does not return the searched metric, or a metric that a
    /// callback watches. Validates one batch to get the metric names. Does not affect random
    /// streams that are used later.
    pub(super) fn check_searched_metric(&self) -> Result<()> {
        let Some(data) = &self.validation else {
            if !self.io().has_runner() {
                return Ok(());
            }
            let metric = &self.context.config.metric;
            let text = format!(
                "no validation data for searcher.metric {metric}; add it with `Fit::validation`"
            );
            return Err(text.into());
        };
        let plan = self.context.loader_plan(self.batch_size, false);
        let steps = data.steps(&plan).min(1);
        let first = data.loader(plan, 0..steps).next().transpose()?;
        let Some(batch) = first.flatten() else { return Ok(()) };
        let precision = self.context.config.mixed_precision;
        let model = precision::to_evaluation_precision(self.model.valid(), precision);
        let step = || self.step.validate(&model, batch);
        let output = self.first_step("the first validation batch", &data.fields(), step)?;
        let sums = self.step.validated(output.into_metrics())?;
        self.find_searched_metric(&sums.means("validation_"))?;
        self.check_watched_metrics(&sums.means("val_"))
    }

    /// Fails if validation does not return a metric that a callback watches.
    fn check_watched_metrics(&self, logs: &Logs) -> Result<()> {
        for (index, callback) in self.callbacks.iter().enumerate() {
            let missing = callback.watched_metric().filter(|metric| !logs.contains_key(*metric));
            if let Some(metric) = missing {
                let name = unique_names(&self.callbacks).swap_remove(index);
                return Err(CallbackError { name, source: missing_metric(metric, logs) }.into());
            }
        }
        Ok(())
    }

    /// Returns the searched metric of the validation at this batch.
    pub(super) fn searched_metric(&self) -> Result<Option<f64>> {
        let here = self.state.validated.as_ref().filter(|last| last.batches == self.state.batches);
        here.map_or(Ok(None), |validated| self.find_searched_metric(&validated.metrics()))
    }

    /// Returns the searched metric from `metrics`. Under a runner, a missing metric is an error.
    fn find_searched_metric(&self, metrics: &Logs) -> Result<Option<f64>> {
        match find_searched_metric(&self.context.config, metrics) {
            Ok(value) => Ok(Some(value)),
            Err(_) if !self.io().has_runner() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Reports the last validation. With `granted_units`, it is the result at that length.
    pub(super) fn report_validation(&mut self, granted_units: Option<u64>) {
        let event = self.validation_event(granted_units);
        self.io().post(self.state.batches, event);
    }

    pub(super) fn validation_event(&self, granted_units: Option<u64>) -> ReportEvent {
        let metrics = self.state.validated.as_ref().map(Validated::metrics).unwrap_or_default();
        let metrics = reported_metrics(&metrics, &self.context.config.decisive_metrics());
        ReportEvent::Validated { metrics, granted_units }
    }
}

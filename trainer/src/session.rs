//! Sessions: metrics, progress, checkpoints and stop requests for custom training loops and any
//! model.

use std::time::Instant;

use serde::{Deserialize, Serialize};
use stoker_api::contract::{Directive, ExitCode, ReportEvent, TrialConfig, find_metric};
use stoker_api::experiment::Unit;

use crate::callback::Logs;
use crate::collective::{RankActivity, all_gather_cbor};
use crate::context::Context;
use crate::error::{Interrupted, Unrecoverable};
use crate::tensorboard::{Display, Image};
use crate::train::{SEARCH_POLL_INTERVAL, Timetable, silent_runner_error};
use crate::{Error, Result};

mod download;
mod info;
mod options;
mod profiler;
mod progress;
mod reported;
mod shards;
pub(crate) mod thread_dump;
mod transfer;
mod upload;

pub use info::ClusterInfo;
pub use options::{CheckpointMetadata, Download, Upload};
pub use profiler::Profiler;
pub(crate) use progress::{Activity, GrantedLength};
pub(crate) use reported::{ReportedMetrics, VALIDATION};

/// Metrics, progress, checkpoints, preemption and cluster information for programs with a custom
/// training loop.
///
/// Programs that train a burn model get the same from [`fit`](Context::fit) and
/// [`training`](Context::training), and may use a session in addition. They cannot save checkpoints
/// through the session: callbacks add files to the loop's checkpoints instead.
///
/// Without a runner, metrics and checkpoints go to the program's directory if it has one, and only
/// a signal requests a stop.
///
/// Every rank makes the same calls, but only rank 0 writes and reports. Methods documented as
/// collective wait for all ranks.
///
/// ```no_run
/// # use stoker_trainer::{Context, Result, Upload};
/// # struct Model { batches: u64 }
/// # impl Model {
/// #     fn new() -> Self { Self { batches: 0 } }
/// #     fn read(_: &std::path::Path, batches: u64) -> Result<Self> { Ok(Self { batches }) }
/// #     fn write(&self, _: &std::path::Path) -> Result<()> { Ok(()) }
/// #     fn step(&mut self) -> f64 { self.batches += 1; 0.0 }
/// #     fn validate(&self) -> f64 { 0.0 }
/// # }
/// fn train(context: &Context) -> Result<()> {
///     let session = context.session();
///     let restored = session.restore_path(|folder, saved| Model::read(folder, saved.batches))?;
///     let mut model = restored.unwrap_or_else(Model::new);
///     loop {
///         // An epoch has 500 batches of 32 samples.
///         while model.batches < session.length(500, 32) {
///             let loss = model.step();
///             session.report_metrics("training", model.batches, [("loss", loss)])?;
///             if let Some(why) = session.should_preempt()? {
///                 session.store_path(Upload::at(model.batches), |folder| model.write(folder))?;
///                 return Err(why.into());
///             }
///         }
///         session.report_metrics("validation", model.batches, [("loss", model.validate())])?;
///         session.store_path(Upload::at(model.batches), |folder| model.write(folder))?;
///         if session.complete_length(model.batches)?.is_none() {
///             return Ok(());
///         }
///     }
/// }
/// ```
#[derive(Debug)]
pub struct Session<'a> {
    context: &'a Context,
    preempt_mode: PreemptMode,
}

/// Which ranks receive a stop request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PreemptMode {
    /// All ranks, at the same call: [`Session::should_preempt`] is collective.
    #[default]
    WorkersAskChief,
    /// Rank 0 only. It must notify the others itself, and for them [`Session::should_preempt`] is
    /// an error.
    ChiefOnly,
    /// Each rank separately, some a second or two later than others. A rank that is notified by
    /// another rank does not learn the reason: it exits as preempted, even after a stop directive.
    WorkersAskThemselves,
}

/// Why the program must stop.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
enum StopReason {
    Signal,
    Preempt,
    Stop,
    Fenced,
}

impl From<StopReason> for Interrupted {
    fn from(reason: StopReason) -> Self {
        let (code, why) = match reason {
            StopReason::Signal => (ExitCode::Preempted, "stopped by a signal"),
            StopReason::Preempt => (ExitCode::Preempted, "preempted by the runner"),
            StopReason::Stop => (ExitCode::Completed, "no more training is needed"),
            StopReason::Fenced => {
                (ExitCode::Infrastructure, "the runner has given up this attempt")
            }
        };
        Self { code, fenced: reason == StopReason::Fenced, why: why.into() }
    }
}

impl Context {
    /// Returns the session of this process, for programs with a custom training loop.
    pub fn session(&self) -> Session<'_> {
        Session { context: self, preempt_mode: PreemptMode::default() }
    }
}

impl Session<'_> {
    /// Sets which ranks receive a stop request (default: all).
    #[must_use]
    pub fn preempt_mode(self, preempt_mode: PreemptMode) -> Self {
        Self { preempt_mode, ..self }
    }

    /// Writes metrics of a group after `batches` global batches. The group is `training`,
    /// `validation` or a custom name. Each call writes a row; several rows of a group at the same
    /// batch contain different metrics of one point. An attempt that resumes from a checkpoint
    /// reports later batches again; its reports replace those of the previous attempt.
    ///
    /// Validation metrics are named `loss` or, in full, `validation_loss`. Report means over all
    /// ranks, as computed with [`Context::evaluate`] or
    /// [`Distributed::collective`](crate::Distributed::collective): only the values of rank 0 are
    /// written.
    ///
    /// # Errors
    ///
    /// Fails in these cases:
    ///
    /// - The group name is invalid.
    /// - The group already has this metric at this batch.
    /// - `batches` is less than in the group's last report.
    /// - The buffer for rows is full, because the storage has been unavailable for too long.
    pub fn report_metrics<N: Into<String>>(
        &self,
        group: &str,
        batches: u64,
        metrics: impl IntoIterator<Item = (N, f64)>,
    ) -> Result<()> {
        self.record_batches(batches);
        let metrics = metrics.into_iter().map(|(name, value)| (name.into(), value));
        self.context.io().report_metrics(group, batches, metrics)
    }

    /// Writes an image after `batches` global batches to TensorBoard. Only rank 0 writes it.
    pub fn report_image(&self, name: &str, batches: u64, image: Image) {
        self.context.io().display(name, batches, &Display::Image(image));
    }

    /// Writes a text in Markdown after `batches` global batches to TensorBoard. Only rank 0 writes
    /// it.
    pub fn report_text(&self, name: &str, batches: u64, text: impl Into<String>) {
        self.context.io().display(name, batches, &Display::Text(text.into()));
    }

    /// Reports how many global batches are trained, out of those that [`length`](Self::length)
    /// returned.
    pub fn report_progress(&self, batches: u64) {
        self.record_batches(batches);
        self.context.io().report_progress(batches);
    }

    fn record_batches(&self, batches: u64) {
        let ranks = self.context.distributed();
        // A resumed program may report its position before it reads its hyperparameters.
        let has_progressed = ranks.progress.record_batches(batches);
        if has_progressed && ranks.rank() == 0 {
            self.context.warn_of_unread_hparams();
        }
    }

    /// Sets a short human-readable status. Without a runner, prints it as a line. In a cluster,
    /// sets `status.activity` of the trial, at most every ten seconds. Truncated to 200 characters.
    pub fn set_status(&self, text: &str) {
        self.context.io().set_status(text);
    }

    /// Returns the length granted so far in the program's own count, for experiments with
    /// `searcher.maxLength.units`. The length may grow during training and never shrinks.
    ///
    /// The program passes this count as `batches` to all methods of the session. With
    /// `searcher.timeMetric`, it may pass batches instead: the count is the value of that
    /// validation metric. If the experiment has another unit, returns the length in that unit.
    pub fn units(&self) -> u64 {
        let config = &self.context.config;
        self.context.io().set_length(config, 0, Timetable::new(config, 1, 1), Unit::Units)
    }

    /// Returns the length granted so far, in global batches, for epochs of `epoch_batches` batches
    /// of `global_batch` samples. The length may grow during training and never shrinks. In an
    /// experiment with `searcher.maxLength.units`, it is the same as [`units`](Self::units).
    pub fn length(&self, epoch_batches: u64, global_batch: usize) -> u64 {
        let config = &self.context.config;
        let timetable = Timetable::new(config, epoch_batches.max(1), global_batch.max(1) as u64);
        let mut io = self.context.io();
        io.set_length(config, epoch_batches, timetable, config.unit)
    }

    /// Returns `Some` if the program should stop: on a signal, a preemption or a stop directive.
    /// Save a checkpoint, then return the error; it determines the exit code. Also serves as a
    /// heartbeat, so call it after every batch, and regularly in a long validation.
    ///
    /// # Errors
    ///
    /// Fails if another rank has failed or makes a different call, or on ranks other than 0 with
    /// [`PreemptMode::ChiefOnly`]. Returns [`Interrupted`] if the runner has given up this attempt;
    /// the program must then save nothing.
    pub fn should_preempt(&self) -> Result<Option<Interrupted>> {
        let ranks = self.context.distributed();
        // Also a heartbeat to the other ranks.
        ranks.record_activity(RankActivity::Train);
        let reason = match self.preempt_mode {
            PreemptMode::WorkersAskChief => {
                let local = (self.stop_reason(), self.context.io().granted_units_from_directive());
                let all = all_gather_cbor(ranks.collective(), "should_preempt", local)?;
                // All ranks adopt the length granted to rank 0 at the same call.
                self.context.io().grant(all[0].1);
                all.into_iter().find_map(|(reason, _)| reason)
            }
            PreemptMode::ChiefOnly if ranks.rank() > 0 => {
                let text = format!(
                    "rank {} cannot call should_preempt: PreemptMode::ChiefOnly allows only rank 0",
                    ranks.rank()
                );
                return Err(text.into());
            }
            PreemptMode::ChiefOnly => self.stop_reason(),
            PreemptMode::WorkersAskThemselves => {
                let local = self.stop_reason();
                if local.is_some() {
                    ranks.progress.request_stop();
                }
                local.or_else(|| ranks.progress.is_stop_requested().then_some(StopReason::Preempt))
            }
        };
        match reason {
            // Not `Some`: the program must not save anything.
            Some(StopReason::Fenced) => Err(Interrupted::from(StopReason::Fenced).into()),
            reason => Ok(reason.map(Interrupted::from)),
        }
    }

    fn stop_reason(&self) -> Option<StopReason> {
        if self.context.stop.is_set() {
            return Some(StopReason::Signal);
        }
        let mut io = self.context.io();
        io.heartbeat();
        match io.directive()? {
            Directive::Preempt => Some(StopReason::Preempt),
            Directive::Stop => Some(StopReason::Stop),
            Directive::Fenced => Some(StopReason::Fenced),
            Directive::Continue { .. } | Directive::Wait => None,
        }
    }

    /// Reports that training has reached the granted length at this batch, and waits for the
    /// search. Returns a longer length in the experiment's unit, or `None` if training is over.
    /// Collective.
    ///
    /// Report the validation of this batch first: its searched metric is the trial's result at this
    /// length. Also save a checkpoint first, because the trial may be extended later.
    ///
    /// # Errors
    ///
    /// Fails if the searched metric was not reported at this batch, if the storage fails, or if the
    /// runner rejects the result or does not respond for ten minutes. Returns [`Interrupted`] if
    /// the program should stop.
    pub fn complete_length(&self, batches: u64) -> Result<Option<u64>> {
        let progress = &self.context.distributed().progress;
        let longer = progress.while_waiting(|| self.request_longer_length(batches))?;
        if longer.is_none() && self.context.distributed().size() == 1 {
            // An export after training may take any time.
            progress.training_finished();
        }
        Ok(longer)
    }

    fn request_longer_length(&self, batches: u64) -> Result<Option<u64>> {
        let context = self.context;
        let (mut event, units) = {
            let mut io = context.io();
            let metrics = io.validation_at(batches).unwrap_or_default();
            io.check_completed(&context.config, batches, &metrics)?;
            if io.has_runner() {
                let what = format!("cannot complete the length at batch {batches}: ");
                check_searched_metric(&context.config, &metrics, &what)?;
            }
            io.check_is_copied().and_then(|()| io.report_saved(true))?;
            io.flush()?;
            if !io.has_runner() {
                io.report_last_validation();
                return Ok(None);
            }
            let units = io.granted_units();
            (io.result_event(&metrics, units), units)
        };
        let mut units = units;
        let start = Instant::now();
        loop {
            let stop = context.stop.is_set();
            let local = context.io().request_directive(batches, event)?;
            let is_silent = context.io().is_runner_silent(start);
            let all = all_gather_cbor(
                context.distributed().collective(),
                "complete_length",
                (stop, local, is_silent),
            )?;
            match all[0].1 {
                Some(Directive::Stop) => return Ok(None),
                Some(Directive::Continue { units: more }) if more > units => {
                    let mut io = context.io();
                    io.grant(more);
                    if !io.length_ends_by(&context.config, batches) {
                        return Ok(Some(more));
                    }
                    // The longer length ends at the same batch, whose validation is known.
                    units = more;
                    let metrics = io.validation_at(batches).unwrap_or_default();
                    event = io.result_event(&metrics, more);
                    continue;
                }
                Some(Directive::Preempt) => {
                    return Err(Interrupted::from(StopReason::Preempt).into());
                }
                Some(Directive::Fenced) => return Err(Interrupted::from(StopReason::Fenced).into()),
                Some(Directive::Continue { .. } | Directive::Wait) | None => {}
            }
            if all.iter().any(|(stop, ..)| *stop) {
                return Err(Interrupted::from(StopReason::Signal).into());
            }
            if all[0].2 {
                return Err(silent_runner_error());
            }
            std::thread::sleep(SEARCH_POLL_INTERVAL);
            event = ReportEvent::Progress { batches_total: batches, activity: None };
        }
    }
}

/// Returns the searched metric from `metrics`, which are named as in reports.
///
/// # Errors
///
/// Fails if the metric is missing. The error is [`Unrecoverable`]: a restart validates by the same
/// program and reports the same names.
pub(crate) fn find_searched_metric(config: &TrialConfig, metrics: &Logs) -> Result<f64, Error> {
    check_searched_metric(config, metrics, "")
}

/// As [`find_searched_metric`]. The text of an error begins with `what`.
fn check_searched_metric(config: &TrialConfig, metrics: &Logs, what: &str) -> Result<f64, Error> {
    find_metric(metrics, &config.metric).copied().ok_or_else(|| {
        let names = metrics.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
        let names = if names.is_empty() { "none" } else { &names };
        let searched = &config.metric;
        let text = format!(
            "{what}searched metric {searched} not found: validation reported {names}; report it \
             or change searcher.metric"
        );
        // Without any name, validation did not run at this batch, so the program did not decide.
        match metrics.is_empty() {
            true => text.into(),
            false => Unrecoverable(text).into(),
        }
    })
}

#[cfg(test)]
mod tests;

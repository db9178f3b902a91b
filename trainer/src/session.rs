//! What a program tells and asks whose loop is its own, and whose model may be anybody's.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use stoker_api::contract::{ACTIVITY_CHARS_MAX, Directive, ExitCode, ReportEvent, TrialConfig};

use crate::callback::Logs;
use crate::collective::{Doing, exchange};
use crate::context::Context;
use crate::error::{Infrastructure, Interrupted};
use crate::outlet::Outlet;
use crate::train::{Timetable, UNANSWERED_MAX, UNDECIDED_PAUSE};
use crate::{Error, Result};

mod files;
mod info;
mod profiler;
mod reported;
mod shards;
pub(crate) mod threads;

pub use files::{Download, Saved, Upload};
pub use info::ClusterInfo;
pub use profiler::Profiler;
pub(crate) use reported::{Reported, VALIDATION, full_name};

/// Time between two signs of life of a program that asks all the time.
const SIGN_OF_LIFE: Duration = Duration::from_secs(1);

/// What a program tells and asks whose loop is its own: metrics, how far it is, checkpoints of any files,
/// whether to leave, where it runs. A program that trains a model of burn has the same from
/// [`fit`](Context::fit) and [`training`](Context::training), and may use this beside them.
///
/// Alone it does what makes sense on one machine: metrics and checkpoints go to the program's folder, if
/// it has one, and nobody but a signal asks it to leave.
///
/// Every rank makes the same calls; rank 0 alone writes and reports. What is said to be collective waits
/// for all ranks.
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
///         // 500 batches of 32 samples are an epoch.
///         while model.batches < session.length(500, 32) {
///             let loss = model.step();
///             session.report_metrics("training", model.batches, [("loss", loss)])?;
///             if let Some(why) = session.asked_to_leave()? {
///                 session.store_path(Upload::at(model.batches), |folder| model.write(folder))?;
///                 return Err(why.into());
///             }
///         }
///         session.report_metrics("validation", model.batches, [("loss", model.validate())])?;
///         session.store_path(Upload::at(model.batches), |folder| model.write(folder))?;
///         if session.reach(model.batches)?.is_none() {
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

/// Who learns that the program is asked to leave.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PreemptMode {
    /// All ranks together, at the same call: [`Session::asked_to_leave`] is collective.
    #[default]
    WorkersAskChief,
    /// Rank 0 alone, which tells the others itself; of others it is an error to ask.
    ChiefOnly,
    /// Each rank for itself, some a second or two later than others.
    WorkersAskThemselves,
}

/// What was asked for.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
enum Wish {
    Signal,
    Preempt,
    Stop,
    Fenced,
}

impl From<Wish> for Interrupted {
    fn from(wish: Wish) -> Self {
        let (code, why) = match wish {
            Wish::Signal => (ExitCode::Preempted, "asked to stop by a signal"),
            Wish::Preempt => (ExitCode::Preempted, "asked to stop by the runner"),
            Wish::Stop => (ExitCode::Completed, "nothing more is wanted"),
            Wish::Fenced => (ExitCode::Infrastructure, "the runner has given this attempt up"),
        };
        Self { code, fenced: wish == Wish::Fenced, why: why.into() }
    }
}

impl Context {
    /// What a program tells and asks whose loop is its own.
    pub fn session(&self) -> Session<'_> {
        Session { context: self, preempt_mode: PreemptMode::default() }
    }
}

impl Session<'_> {
    /// Who learns that the program is asked to leave.
    #[must_use]
    pub fn preempt_mode(self, preempt_mode: PreemptMode) -> Self {
        Self { preempt_mode, ..self }
    }

    /// Writes metrics of a group after so many global batches: `training`, `validation`, or one of the
    /// program's own. Several reports of a group at the same batches are one. An attempt that starts from
    /// a checkpoint reports again what came after it, in place of what the attempt before it reported.
    ///
    /// Names of a validation are `loss`, or in full `validation_loss`. Give means over all ranks, such as
    /// [`Context::evaluate`] and [`Distributed::collective`](crate::Distributed::collective) make: those of
    /// rank 0 are written.
    ///
    /// # Errors
    ///
    /// The group's name; a metric that this group has at these batches; batches before the last of the
    /// group; no room for more rows, as the storage has been away for too long.
    pub fn report_metrics<N: Into<String>>(
        &self,
        group: &str,
        batches: u64,
        metrics: impl IntoIterator<Item = (N, f64)>,
    ) -> Result<()> {
        self.context.distributed().pulse.reported(batches);
        let metrics = metrics.into_iter().map(|(name, value)| (name.into(), value));
        self.context.outlet().report(group, batches, metrics)
    }

    /// Says how many global batches are trained, of those that [`length`](Self::length) gave.
    pub fn report_progress(&self, batches: u64) {
        self.context.distributed().pulse.reported(batches);
        self.context.outlet().report_progress(batches);
    }

    /// Says in a few words what the program is doing, for people: a line alone, `status.activity` of the
    /// trial in a cluster. Cut after 200 characters.
    pub fn set_status(&self, text: &str) {
        self.context.outlet().set_status(text);
    }

    /// The length granted so far, in global batches, where `epoch_batches` batches of `global_batch`
    /// samples pass over the training data once. It may grow while the program trains, and never shrinks.
    pub fn length(&self, epoch_batches: u64, global_batch: usize) -> u64 {
        let config = &self.context.config;
        let timetable = Timetable::new(config, epoch_batches.max(1), global_batch.max(1) as u64);
        let mut outlet = self.context.outlet();
        outlet.set_length(epoch_batches, |units| timetable.batches(config.unit, units))
    }

    /// Whether the program is asked to leave: it then saves a checkpoint and returns this error, which says
    /// how the process ends. Also a sign of life; ask often.
    ///
    /// # Errors
    ///
    /// Another rank is gone or is somewhere else; a rank other than 0 asks in
    /// [`PreemptMode::ChiefOnly`].
    pub fn asked_to_leave(&self) -> Result<Option<Interrupted>> {
        let ranks = self.context.distributed();
        let wish = match self.preempt_mode {
            PreemptMode::WorkersAskChief => {
                let mine = (self.wish(), self.context.outlet().told_units());
                let said = exchange(ranks.collective(), "asked_to_leave", mine)?;
                // What rank 0 was granted, all are, at the same call.
                self.context.outlet().grant(said[0].1);
                said.into_iter().find_map(|it| it.0)
            }
            PreemptMode::ChiefOnly if ranks.rank() > 0 => {
                let text = format!(
                    "rank {} asks whether to leave, but by PreemptMode::ChiefOnly rank 0 alone may",
                    ranks.rank()
                );
                return Err(text.into());
            }
            PreemptMode::ChiefOnly => self.wish(),
            PreemptMode::WorkersAskThemselves => {
                let mine = self.wish();
                if mine.is_some() {
                    ranks.pulse.ask();
                }
                mine.or_else(|| ranks.pulse.is_asked().then_some(Wish::Preempt))
            }
        };
        Ok(wish.map(Interrupted::from))
    }

    fn wish(&self) -> Option<Wish> {
        if self.context.stop.is_set() {
            return Some(Wish::Signal);
        }
        let mut outlet = self.context.outlet();
        outlet.sign_of_life();
        match outlet.directive()? {
            Directive::Preempt => Some(Wish::Preempt),
            Directive::Stop => Some(Wish::Stop),
            Directive::Fenced => Some(Wish::Fenced),
            Directive::Continue { .. } | Directive::Wait => None,
        }
    }

    /// Says that the granted length is reached at this batch, whose validation was reported before: what
    /// it says of the searched metric is the trial's result at that length. Save a checkpoint first: a trial
    /// whose result is known may be gone on with. Waits for the search, and gives a longer length, in the
    /// experiment's unit, or `None` where training is over. Collective.
    ///
    /// # Errors
    ///
    /// The searched metric was not reported at this batch; the storage failed; the runner has not
    /// answered for ten minutes; [`Interrupted`] where the program is asked to leave.
    pub fn reach(&self, batches: u64) -> Result<Option<u64>> {
        let context = self.context;
        let ranks = context.distributed();
        ranks.tick(Doing::Wait);
        let outcome = self.ask_for_more(batches);
        ranks.tick(Doing::Train);
        outcome
    }

    fn ask_for_more(&self, batches: u64) -> Result<Option<u64>> {
        let context = self.context;
        let (mut event, units) = {
            let mut outlet = context.outlet();
            let metrics = outlet.validation_at(batches).unwrap_or_default();
            if outlet.has_runner() {
                searched_among(&context.config, &metrics)
                    .map_err(|why| format!("the length is reached at batch {batches}: {why}"))?;
            }
            outlet.report_saved(true)?;
            outlet.flush()?;
            if !outlet.has_runner() {
                outlet.tell_validation();
                return Ok(None);
            }
            let units = outlet.granted_units();
            (outlet.result(&metrics, units), units)
        };
        let mut num_unanswered = 0;
        loop {
            let (stop, mine) = (context.stop.is_set(), context.outlet().ask(batches, event));
            let said = exchange(context.distributed().collective(), "reach", (stop, mine))?;
            match said[0].1 {
                Some(Directive::Stop) => return Ok(None),
                Some(Directive::Continue { units: more }) if more > units => {
                    context.outlet().grant(more);
                    return Ok(Some(more));
                }
                Some(Directive::Preempt) => return Err(Interrupted::from(Wish::Preempt).into()),
                Some(Directive::Fenced) => return Err(Interrupted::from(Wish::Fenced).into()),
                Some(Directive::Continue { .. } | Directive::Wait) | None => {}
            }
            if said.iter().any(|it| it.0) {
                return Err(Interrupted::from(Wish::Signal).into());
            }
            num_unanswered = if said[0].1.is_some() { 0 } else { num_unanswered + 1 };
            if num_unanswered == UNANSWERED_MAX {
                let text = "the runner has not answered for ten minutes";
                return Err(Infrastructure(text.into()).into());
            }
            std::thread::sleep(UNDECIDED_PAUSE);
            event = ReportEvent::Progress { batches_total: batches, activity: None };
        }
    }
}

/// The searched metric among these, by the names that reports use.
///
/// # Errors
///
/// It is not there.
pub(crate) fn searched_among(config: &TrialConfig, metrics: &Logs) -> Result<f64, Error> {
    let name = full_name(VALIDATION, &config.metric);
    // A search may go by a metric whose name is no validation's.
    let found = metrics.get(&config.metric).or_else(|| metrics.get(&name));
    found.copied().ok_or_else(|| {
        let names = metrics.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
        let names = if names.is_empty() { "none" } else { &names };
        let searched = &config.metric;
        format!("there is no searched metric {searched}; of validation there are {names}").into()
    })
}

impl Outlet {
    /// See [`Session::report_metrics`].
    fn report(
        &mut self,
        group: &str,
        batches: u64,
        metrics: impl IntoIterator<Item = (String, f64)>,
    ) -> Result<()> {
        let (named, whole) = self.reported.add(group, batches, metrics)?;
        self.start();
        if let Some((batches, metrics)) = whole {
            self.tell(batches, &metrics);
        }
        self.batches = self.batches.max(self.base + batches);
        let epoch = self.length.epoch(batches);
        self.write_row(group, batches, epoch, &named)
    }

    fn report_progress(&mut self, batches: u64) {
        self.batches = self.batches.max(self.base + batches);
        self.terminal.advance(batches, self.length.batches);
        self.say_progress(None);
    }

    fn say_progress(&mut self, activity: Option<String>) {
        self.start();
        self.tell_validation();
        let batches_total = self.base + self.length.batches;
        self.post_at(self.batches, ReportEvent::Progress { batches_total, activity });
        self.length.said_at = Some(Instant::now());
    }

    fn set_status(&mut self, text: &str) {
        let text: String = text.chars().take(ACTIVITY_CHARS_MAX).collect();
        self.terminal.say(&format!("status: {text}"));
        self.say_progress(Some(text));
    }

    /// Tells the runner that this attempt trains, if it does not know.
    fn start(&mut self) {
        if !self.is_started {
            let batches_total = self.length.batches;
            let (resumed_from, refused) = Default::default();
            self.post(0, ReportEvent::Started { resumed_from, batches_total, refused });
        }
    }

    fn sign_of_life(&mut self) {
        if self.length.said_at.is_none_or(|it| it.elapsed() >= SIGN_OF_LIFE) {
            self.say_progress(None);
        }
    }

    fn set_length(&mut self, epoch_batches: u64, batches: impl FnOnce(u64) -> u64) -> u64 {
        self.length.epoch_batches = epoch_batches;
        self.length.batches = batches(self.length.units.max(1));
        self.length.batches
    }

    /// The length that the runner last told of, in the experiment's unit; 0: none.
    fn told_units(&self) -> u64 {
        match self.directive() {
            Some(Directive::Continue { units }) => units,
            _ => 0,
        }
    }

    fn grant(&mut self, units: u64) {
        self.length.units = self.length.units.max(units);
    }

    fn granted_units(&self) -> u64 {
        self.length.units
    }

    fn validation_at(&self, batches: u64) -> Option<Logs> {
        self.reported.validation_at(batches).cloned()
    }

    /// The searched metric that was reported at this batch.
    fn metric_at(&self, config: &TrialConfig, batches: u64) -> Option<f64> {
        searched_among(config, self.reported.validation_at(batches)?).ok()
    }

    /// Tells the runner of the last validation: nothing more comes to it.
    pub(crate) fn tell_validation(&mut self) {
        if let Some((batches, metrics)) = self.reported.whole() {
            self.tell(batches, &metrics);
        }
    }

    fn tell(&mut self, batches: u64, metrics: &Logs) {
        let event = ReportEvent::Validated { metrics: formatted(metrics), granted_units: None };
        self.post(batches, event);
    }

    /// What the runner is told of the validation where a length ends.
    fn result(&mut self, metrics: &Logs, units: u64) -> ReportEvent {
        let _ = self.reported.whole();
        ReportEvent::Validated { metrics: formatted(metrics), granted_units: Some(units) }
    }
}

fn formatted(metrics: &Logs) -> std::collections::BTreeMap<String, String> {
    let format =
        |(name, value): (&String, &f64)| (name.clone(), stoker_api::number::format(*value));
    metrics.iter().map(format).collect()
}

/// How long to train, as far as the program has asked.
#[derive(Debug, Default)]
pub(crate) struct GrantedLength {
    units: u64,
    batches: u64,
    epoch_batches: u64,
    /// When the runner was last told how far the program is.
    said_at: Option<Instant>,
}

impl GrantedLength {
    pub(crate) fn new(units: u64) -> Self {
        Self { units, ..Self::default() }
    }

    /// Epochs finished before the batch of this number, which counts from 1.
    fn epoch(&self, batches: u64) -> u64 {
        batches.saturating_sub(1).checked_div(self.epoch_batches).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests;

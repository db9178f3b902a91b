//! What a program tells and asks whose loop is its own, and whose model may be anybody's.

use serde::{Deserialize, Serialize};
use stoker_api::contract::{Directive, ExitCode, ReportEvent, TrialConfig};

use crate::callback::Logs;
use crate::collective::{Doing, exchange};
use crate::context::Context;
use crate::error::{Infrastructure, Interrupted};
use crate::train::{Timetable, UNANSWERED_MAX, UNDECIDED_PAUSE};
use crate::{Error, Result};

mod files;
mod info;
mod options;
mod profiler;
mod reported;
mod shards;
pub(crate) mod threads;
mod told;
mod transfer;

pub use info::ClusterInfo;
pub use options::{Download, Saved, Upload};
pub use profiler::Profiler;
pub(crate) use reported::Reported;
pub(crate) use told::{Activity, GrantedLength};

/// What a program tells and asks whose loop is its own: metrics, how far it is, checkpoints of any files,
/// whether to leave, where it runs. A program that trains a model of burn has the same from
/// [`fit`](Context::fit) and [`training`](Context::training), and may use this beside them, but for
/// checkpoints: to theirs, callbacks add files.
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
    /// Each rank for itself, some a second or two later than others. Those hear that they are to leave, and not
    /// why: they end as preempted even where nothing more is wanted.
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
    /// trial in a cluster, at most every ten seconds. Cut after 200 characters.
    pub fn set_status(&self, text: &str) {
        self.context.outlet().set_status(text);
    }

    /// The length granted so far, in global batches, where `epoch_batches` batches of `global_batch`
    /// samples pass over the training data once. It may grow while the program trains, and never shrinks.
    pub fn length(&self, epoch_batches: u64, global_batch: usize) -> u64 {
        let config = &self.context.config;
        let timetable = Timetable::new(config, epoch_batches.max(1), global_batch.max(1) as u64);
        let mut outlet = self.context.outlet();
        outlet.set_length(epoch_batches, timetable, config.unit)
    }

    /// Whether the program is asked to leave: it then saves a checkpoint and returns this error, which says
    /// how the process ends. Also a sign of life; ask often.
    ///
    /// # Errors
    ///
    /// Another rank is gone or is somewhere else; a rank other than 0 asks in
    /// [`PreemptMode::ChiefOnly`]; [`Interrupted`] where the runner has given this attempt up, and nothing
    /// may be saved any more.
    pub fn asked_to_leave(&self) -> Result<Option<Interrupted>> {
        let ranks = self.context.distributed();
        // A sign of life to the other ranks, too.
        ranks.tick(Doing::Train);
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
        match wish {
            // Nothing is to be saved any more.
            Some(Wish::Fenced) => Err(Interrupted::from(Wish::Fenced).into()),
            wish => Ok(wish.map(Interrupted::from)),
        }
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
            if outlet.length.batches > batches {
                let text = format!(
                    "batch {batches} is not the granted length, which ends at batch {}: ask `length` anew \
                     after `asked_to_leave`, and train to it before `reach`",
                    outlet.length.batches
                );
                return Err(text.into());
            }
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
        let mut units = units;
        let mut num_unanswered = 0;
        loop {
            let (stop, mine) = (context.stop.is_set(), context.outlet().ask(batches, event));
            let said = exchange(context.distributed().collective(), "reach", (stop, mine))?;
            match said[0].1 {
                Some(Directive::Stop) => return Ok(None),
                Some(Directive::Continue { units: more }) if more > units => {
                    let mut outlet = context.outlet();
                    outlet.grant(more);
                    if !outlet.is_same_length(batches) {
                        return Ok(Some(more));
                    }
                    // It ends at the same batch, whose validation is known.
                    units = more;
                    let metrics = outlet.validation_at(batches).unwrap_or_default();
                    event = outlet.result(&metrics, more);
                    continue;
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
    // As the runner finds it.
    let short = config.metric.strip_prefix("val_");
    let long = || metrics.get(&format!("validation_{}", short?));
    metrics.get(&config.metric).or_else(long).copied().ok_or_else(|| {
        let names = metrics.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
        let names = if names.is_empty() { "none" } else { &names };
        let searched = &config.metric;
        format!("there is no searched metric {searched}; of validation there are {names}").into()
    })
}

#[cfg(test)]
mod tests;

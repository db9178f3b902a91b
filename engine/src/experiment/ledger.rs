//! The search of an experiment, in step with its record.
//!
//! ```text
//!   rebuild(record) -> missing effects
//!   begin, advance, delete -> home of the turn, then its effects
//! ```
//!
//! A turn is recorded in its *home*: in the grant of the trial whose fact is the event, otherwise
//! in the experiment's log. The home is durable before any effect of the turn and before the next
//! turn. So after a crash, the record has all decisions from which anything can have followed.

mod answers;
mod deletions;
mod edits;
mod explained;
mod full_log;
mod history;
mod limits;
mod rebuild;
mod rejections;
mod reopened;
mod sources;

use std::collections::BTreeMap;
use std::fmt;

pub use answers::{Asked, append};
pub use edits::{EDIT_REFUSED, is_edited, is_requested, recorded_settings, refused_edit};
pub use full_log::{LOG_FULL, full_log, refused_deletions};

use stoker_api::decisions::{
    BeganEvent, LimitReachedEvent, LogEntry, LogEvent, PriorTrial, StepRecord,
};
use stoker_api::number;
use stoker_api::time::Timestamp;
use stoker_api::trial::{Fact, Grant, ResultCheckpoint, TrialSpec};

use self::reopened::Reopening;
use self::sources::Sources;
use super::recorded;
use crate::search::SearchConfig;
use crate::search::book::{Book, TrialState};
use crate::search::rung::Loss;
use crate::search::state::{Change, SearchState, Turn};
use crate::search::turn::{Event, Step};
use crate::trial::TrialRecord;

/// The recorded objects of an experiment.
#[derive(Clone, Copy, Debug)]
pub struct Record<'a> {
    /// Log of the experiment.
    pub log: &'a [LogEntry],
    /// Trials by index.
    pub trials: &'a BTreeMap<u32, &'a TrialRecord>,
    /// Number of trials created, as recorded.
    pub trials_created: u32,
}

/// A write that follows from a turn.
#[derive(Clone, Debug, PartialEq)]
pub enum Write {
    /// Keep checkpoints of a trial from which copies will start. Comes before the home of the turn
    /// that creates the copies: without that turn, the pins mean nothing.
    Pin {
        /// Index of the trial.
        trial: u32,
        /// Names of the checkpoints, to be added to those that are pinned.
        checkpoints: Vec<String>,
    },
    /// Append to the experiment's log, by [`append`].
    Log(LogEntry),
    /// Append to the grants of a trial.
    Grant {
        /// Index of the trial.
        trial: u32,
        /// The grant.
        grant: Grant,
    },
}

/// A fact that the search has not taken in.
#[derive(Clone, Debug, PartialEq)]
pub struct PendingFact {
    at: Timestamp,
    trial: u32,
    fact: u32,
    /// Unset if nothing follows from the fact.
    event: Option<Event>,
    /// Checkpoint of a result.
    checkpoint: Option<ResultCheckpoint>,
    /// Message of a trial that rejected its hyperparameters.
    rejection: Option<String>,
}

/// A record that no search can have written, or that this version cannot read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unreadable {
    /// `the experiment`, or the trial.
    pub object: String,
    /// Field of the object.
    pub field: String,
    /// Reason why it cannot be read.
    pub reason: String,
}

impl fmt::Display for Unreadable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}: {}", self.object, self.field, self.reason)
    }
}

impl std::error::Error for Unreadable {}

/// Search of an experiment. Equal to the search that is rebuilt from the recorded turns.
#[derive(Clone, Debug, PartialEq)]
pub struct Ledger {
    config: SearchConfig,
    search: SearchState,
    /// Number of facts of each trial that have a place, or that no turn follows from.
    num_placed: Vec<u32>,
    /// Position of the turn that created or last continued each trial.
    granted_in: Vec<u64>,
    /// Number of 32-bit words taken from the random stream up to and with each trial.
    random_words: Vec<u64>,
    /// Trials that were decided but not created yet, by index.
    missing: BTreeMap<u32, TrialSpec>,
    sources: Sources,
    has_begun: bool,
    /// Time of the first entry of the log.
    began_at: Option<Timestamp>,
    limit_reached: Option<LimitReachedEvent>,
    /// Full length since the last beginning or edit that no limit kept from continuing trials.
    continued_length: u64,
    /// Whether the log has the settings of the search.
    has_settings: bool,
    /// Number of the last request to reopen trials.
    last_request: u32,
    /// Reopened trials.
    reopenings: BTreeMap<u32, Reopening>,
}

impl Ledger {
    fn admit(&mut self, order: u64, random_words: u64) {
        self.random_words.push(random_words);
        self.num_placed.push(0);
        self.granted_in.push(order);
    }

    fn note(&mut self, order: u64, changes: &[Change]) {
        for change in changes {
            if let Some(granted_in) = self.granted_in.get_mut(change.trial as usize) {
                *granted_in = order;
            }
        }
    }

    /// Adds the trials that a turn creates, from index `next` on, and that have no record.
    fn add_missing(&mut self, turn: &Turn, next: u32, groups: &BTreeMap<u32, u32>) {
        for draw in &turn.created {
            let (index, order) = (draw.index, Some(turn.order));
            let spec = draw.clone().into_spec(&self.config.experiment, self.config.unit);
            let group = groups.get(&index).copied().unwrap_or(0);
            let random_words = turn.random_words.get((index - next) as usize).copied();
            let source = self.sources.of(index).cloned();
            self.missing.insert(index, TrialSpec { order, group, random_words, source, ..spec });
        }
    }

    /// Returns `true` once the search has begun.
    pub fn has_begun(&self) -> bool {
        self.has_begun
    }

    /// Begins the search, with trials of earlier experiments. Returns nothing if it has begun.
    pub fn begin(&mut self, version: &str, prior: Vec<PriorTrial>, now: Timestamp) -> Vec<Write> {
        if self.has_begun {
            return vec![];
        }
        self.has_begun = true;
        self.search = search_of(&self.config, &prior);
        let settings = Some(self.config.settings());
        let version = version.to_owned();
        let event = LogEvent::Began(BeganEvent { version, settings, prior_trials: prior });
        let turn = self.search.advance(Event::Began);
        turn.map(|turn| self.log(turn, event, now)).unwrap_or_default()
    }

    /// Returns the facts of these trials that the search has not taken in, in the order in which it
    /// takes them.
    pub fn pending<'a>(
        &self,
        trials: impl IntoIterator<Item = &'a TrialRecord>,
    ) -> Vec<PendingFact> {
        let (mut pending, has_ranks) = (vec![], self.has_ranks());
        for record in trials {
            let trial = record.spec.index;
            let Some(&num_placed) = self.num_placed.get(trial as usize) else { continue };
            let mut at = Timestamp::default();
            for (fact, recorded) in (0..).zip(&record.status.facts) {
                let time = match recorded {
                    Fact::Result(result) => result.at,
                    Fact::Closed(closed) => closed.at,
                    Fact::Reopened(reopened) => reopened.at,
                };
                // The facts of a trial keep their order, even if a clock was set back.
                at = at.max(time.unwrap_or_default());
                if fact >= num_placed {
                    let event = self.event(trial, fact, recorded);
                    let checkpoint = recorded::checkpoint(recorded).cloned();
                    let rejection = rejections::message(recorded, record, has_ranks);
                    let rejection = rejection.map(str::to_owned);
                    pending.push(PendingFact { at, trial, fact, event, checkpoint, rejection });
                }
            }
        }
        pending.sort_by_key(|pending| (pending.at, pending.trial, pending.fact));
        pending
    }

    /// Takes in a fact. Returns nothing if nothing follows from it, such as from an end that the
    /// search asked for.
    pub fn advance(&mut self, pending: &PendingFact) -> Vec<Write> {
        let trial = pending.trial;
        self.num_placed[trial as usize] = pending.fact + 1;
        let next = self.book().next_index();
        let event = pending.event.clone();
        if let (Some(event), Some(message)) = (&event, &pending.rejection) {
            self.search.note_rejection(event, message);
        }
        let Some(turn) = event.and_then(|event| self.search.advance(event)) else {
            return vec![];
        };
        if let (Some(Event::Result { units, .. }), Some(at)) = (&pending.event, &pending.checkpoint)
        {
            self.sources.note_result(trial, *units, at.clone());
        }
        self.take_in(&turn, next);
        let grant = Grant {
            order: turn.order,
            fact: Some(pending.fact),
            units: self.book().trial(trial).units,
            steps: Some(self.record(&turn, next)),
        };
        let home = std::iter::once(Write::Grant { trial, grant });
        self.pins(next).chain(home).chain(effects(&turn, Some(trial))).collect()
    }

    fn log(&mut self, turn: Turn, event: LogEvent, at: Timestamp) -> Vec<Write> {
        let next = self.book().next_index() - turn.created.len() as u32;
        self.take_in(&turn, next);
        self.tag_missing(&event, next);
        self.note_entry(&event, at);
        let steps = self.record(&turn, next);
        let home = std::iter::once(Write::Log(LogEntry { order: turn.order, at, event, steps }));
        self.pins(next).chain(home).chain(effects(&turn, None)).collect()
    }

    /// Returns the record of the steps of a turn that creates trials from index `next` on.
    fn record(&self, turn: &Turn, next: u32) -> Vec<StepRecord> {
        recorded::record_all(&turn.steps, next, |copy| self.sources.of(copy).cloned())
    }

    fn note_entry(&mut self, event: &LogEvent, at: Timestamp) {
        self.began_at.get_or_insert(at);
        match event {
            LogEvent::LimitReached(event) => self.limit_reached = Some(*event),
            LogEvent::Edited(event) => {
                self.has_settings = true;
                self.config = self.config.with(&event.settings);
                if !event.is_limited {
                    self.limit_reached = None;
                    self.continued_length = event.settings.max_length;
                }
            }
            LogEvent::Began(event) => self.has_settings = event.settings.is_some(),
            LogEvent::Reopened(request) => self.last_request = request.number,
            LogEvent::Deleted(_) | LogEvent::Answered(_) => {}
        }
    }

    fn take_in(&mut self, turn: &Turn, next: u32) {
        self.note_copies(turn, next);
        turn.random_words.iter().for_each(|words| self.admit(turn.order, *words));
        self.note(turn.order, &turn.changes);
        self.add_missing(turn, next, &groups(&turn.steps, next));
        self.note_missing_effects(turn);
    }

    /// Adds the effects of a turn to trials that are not created yet. A limit stops them, and an
    /// edit may continue the search later.
    fn note_missing_effects(&mut self, turn: &Turn) {
        if self.missing.is_empty() {
            return;
        }
        for write in effects(turn, None) {
            if let Write::Grant { trial, grant } = write
                && let Some(spec) = self.missing.get_mut(&trial)
            {
                spec.grants.push(grant);
            }
        }
    }

    /// Records that a missing trial was created.
    pub fn created(&mut self, index: u32) {
        self.missing.remove(&index);
    }

    /// Returns the trials that were decided but not created yet, by index. They are created in this
    /// order: a gap counts as deleted. After the end of the search, none is created any more.
    pub fn missing(&self) -> impl ExactSizeIterator<Item = &TrialSpec> {
        let num = if self.book().is_finished() { 0 } else { self.missing.len() };
        self.missing.values().take(num)
    }

    /// Returns the number of trials that were decided but not created.
    pub fn num_uncreated(&self) -> u32 {
        self.missing.len() as u32
    }

    /// Returns the trials as the search sees them.
    pub fn book(&self) -> &Book {
        self.search.book()
    }

    /// Returns the state of a trial; `None` if the search does not know it.
    pub fn state(&self, trial: u32) -> Option<TrialState> {
        self.book().trials().get(trial as usize).map(|entry| entry.state)
    }

    /// Returns the position of the turn that created or last continued a trial. Trials that wait
    /// for room start in this order.
    pub fn granted_in(&self, trial: u32) -> u64 {
        self.granted_in.get(trial as usize).copied().unwrap_or(u64::MAX)
    }

    /// Returns the position of the next turn.
    pub fn next_order(&self) -> u64 {
        self.search.next_order()
    }

    /// Returns the maximum number of active trials; `None` means no limit.
    pub fn places(&self) -> Option<u32> {
        self.search.places()
    }

    /// Returns `true` if the search creates no trial because all fail or are rejected.
    pub fn has_given_up(&self) -> bool {
        self.search.has_given_up()
    }

    /// Returns the number of trials that the search expects to create.
    pub fn num_expected(&self) -> u64 {
        self.search.forecast().values().sum()
    }

    /// Returns the configuration of the search.
    pub fn config(&self) -> &SearchConfig {
        &self.config
    }
}

/// Returns the search before its first turn.
fn search_of(config: &SearchConfig, prior: &[PriorTrial]) -> SearchState {
    let known = |trial: &PriorTrial| {
        let metric = number::parse(&trial.metric).unwrap_or(f64::NAN);
        let loss = Loss::of_metric(metric, config.smaller_is_better);
        (trial.hyperparameters.clone(), loss)
    };
    SearchState::of(config).with_prior(&prior.iter().map(known).collect::<Vec<_>>())
}

/// Returns the brackets of the trials that the steps create, from index `next` on.
fn groups(steps: &[Step], next: u32) -> BTreeMap<u32, u32> {
    let group = |step: &Step| match step {
        Step::Create { group, .. } => Some(*group),
        _ => None,
    };
    (next..).zip(steps.iter().filter_map(group)).collect()
}

/// Returns the writes to trials other than the turn's home: one for each trial.
fn effects(turn: &Turn, home: Option<u32>) -> impl Iterator<Item = Write> {
    let mut by_trial: BTreeMap<u32, Grant> = BTreeMap::new();
    for change in turn.changes.iter().filter(|change| Some(change.trial) != home) {
        let order = turn.order;
        let new = || Grant { order, fact: None, units: 0, steps: Some(vec![]) };
        let grant = by_trial.entry(change.trial).or_insert_with(new);
        grant.units = change.units;
        let steps = recorded::record_all(std::slice::from_ref(&change.step), 0, |_| None);
        grant.steps.get_or_insert_default().extend(steps);
    }
    by_trial.into_iter().map(|(trial, grant)| Write::Grant { trial, grant })
}

#[cfg(test)]
mod tests;

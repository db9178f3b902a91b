//! State that all search methods share: the trials, with their lengths, results and states.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use stoker_api::trial::CloseCause;

use super::rung::Loss;
use super::turn::{Event, Step};

/// Number of failed trials from which on a search without any result creates no more.
const FAILURES_MAX: u32 = 10;

/// Number of equal rejections from which on a search without any result creates no more trials. A
/// program whose check accepts a fifth of the samples rejects as many in a row in one of 7,500
/// searches.
const EQUAL_REJECTIONS_MAX: u32 = 40;

/// State of a failed trial.
const FAILED: TrialState = TrialState::Closed(CloseCause::Failed);

/// State of a trial, as the search sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TrialState {
    /// Trains to its granted length. Takes a place of the search's concurrency.
    Active,
    /// Has the result at its granted length, and no step has followed yet.
    Waiting,
    /// Has a result and holds no GPUs. It may continue.
    Paused,
    /// Ended by the search.
    Stopped,
    /// Ended by itself or by the user.
    Closed(CloseCause),
    /// Deleted by the user.
    Deleted,
}

impl TrialState {
    /// Returns `true` if the trial can still train.
    pub fn is_open(self) -> bool {
        matches!(self, Self::Active | Self::Waiting | Self::Paused)
    }
}

/// One trial of a search.
#[derive(Clone, Debug, PartialEq)]
pub struct TrialEntry {
    /// Bracket or generation.
    pub group: u32,
    /// Granted length.
    pub units: u64,
    /// Current state.
    pub state: TrialState,
    /// Results as length and loss, in the order of their events.
    pub results: Vec<(u64, Loss)>,
    /// Other objectives of the results; empty if there are none.
    pub others: Vec<Vec<Loss>>,
    /// Whether a limit has stopped the trial.
    pub is_cut: bool,
}

impl TrialEntry {
    /// Returns the length of the latest result, 0 without one.
    pub fn trained(&self) -> u64 {
        self.results.last().map_or(0, |(units, _)| *units)
    }

    /// Returns `true` if the trial has a result at its granted length.
    pub fn has_result(&self) -> bool {
        self.results.last().is_some_and(|(units, _)| *units == self.units)
    }
}

/// A trial before an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Before {
    /// State of the trial.
    pub state: TrialState,
    /// Granted length.
    pub units: u64,
}

impl Before {
    /// Returns `true` if the trial was training.
    pub fn was_active(self) -> bool {
        self.state == TrialState::Active
    }

    /// Returns `true` if the trial had rejected its hyperparameters.
    pub fn was_invalid(self) -> bool {
        self.state == TrialState::Closed(CloseCause::InvalidHyperparameters)
    }
}

/// Trials of a search, and counts of them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Book {
    trials: Vec<TrialEntry>,
    order: u64,
    num_open: u32,
    num_invalid: u32,
    num_failed: u32,
    num_with_result: u32,
    /// Hashes of the messages with which trials rejected their hyperparameters, by trial.
    rejections: BTreeMap<u32, u64>,
    ignores_failures: bool,
    is_limited: bool,
    is_finished: bool,
}

impl Book {
    /// Returns a trial.
    ///
    /// # Panics
    ///
    /// If no trial has this index. [`SearchState`](super::state::SearchState) ignores events of
    /// unknown trials.
    pub fn trial(&self, trial: u32) -> &TrialEntry {
        &self.trials[trial as usize]
    }

    /// Returns all trials by index.
    pub fn trials(&self) -> &[TrialEntry] {
        &self.trials
    }

    /// Returns the index of the next trial, which is also the number of trials created.
    pub fn next_index(&self) -> u32 {
        self.trials.len() as u32
    }

    /// Returns the order of the current turn.
    pub fn order(&self) -> u64 {
        self.order
    }

    /// Returns the number of trials that can still train.
    pub fn num_open(&self) -> u32 {
        self.num_open
    }

    /// Returns the number of trials with invalid hyperparameters.
    pub fn num_invalid(&self) -> u32 {
        self.num_invalid
    }

    /// Returns the number of trials with at least one result.
    pub fn num_with_result(&self) -> u32 {
        self.num_with_result
    }

    /// Returns `true` while trials with invalid hyperparameters are replaced: at most 100 of them,
    /// and 100 more for each trial with a result. So a program that rejects everything ends the
    /// search.
    pub fn may_replace(&self) -> bool {
        self.num_invalid <= 100 + 100 * self.num_with_result
    }

    /// Returns `true` if the program seems unable to work: no trial has a result, and the trials
    /// have failed or [are rejected for the same reason](Self::has_equal_rejections).
    ///
    /// At least ten trials have failed, no fewer than are open, and no trial has ended otherwise.
    /// Rejected hyperparameters count as neither. While more trials are open, failed ones are
    /// followed by others, so that no GPUs are idle.
    ///
    /// Returns `false` once the user has edited the search, or has reopened, ended or deleted a
    /// trial.
    pub fn is_hopeless(&self) -> bool {
        let have_failed = self.num_failed >= FAILURES_MAX.max(self.num_open)
            && self.num_failed + self.num_invalid + self.num_open == self.next_index();
        !self.ignores_failures
            && self.num_with_result == 0
            && (have_failed || self.has_equal_rejections())
    }

    /// Returns `true` if the program seems to reject a hyperparameter that does not vary: all
    /// trials that have ended were rejected with one and the same message, among them the first
    /// 40. An open trial may have passed the checks that rejected later ones.
    pub fn has_equal_rejections(&self) -> bool {
        if self.num_invalid < EQUAL_REJECTIONS_MAX
            || self.num_invalid + self.num_open != self.next_index()
            || self.rejections.len() != self.num_invalid as usize
        {
            return false;
        }
        let has_ended = |entry: &&TrialEntry| !entry.state.is_open();
        let num_first = self.trials.iter().take_while(has_ended).count();
        let first = self.rejections.values().next();
        num_first >= EQUAL_REJECTIONS_MAX as usize
            && self.rejections.values().all(|message| Some(message) == first)
    }

    /// Notes the message with which a trial rejects its hyperparameters. Its end follows.
    pub(super) fn note_rejection(&mut self, trial: u32, message: &str) {
        let mut hasher = DefaultHasher::new();
        message.hash(&mut hasher);
        self.rejections.insert(trial, hasher.finish());
    }

    /// Disables [`is_hopeless`](Self::is_hopeless).
    pub(super) fn ignore_failures(&mut self) {
        self.ignores_failures = true;
    }

    /// Returns `true` after [`Event::LimitReached`].
    pub fn is_limited(&self) -> bool {
        self.is_limited
    }

    /// Returns the open trials by index.
    pub(super) fn open(&self) -> Vec<u32> {
        let trials = (0..).zip(&self.trials);
        trials.filter(|(_, entry)| entry.state.is_open()).map(|(trial, _)| trial).collect()
    }

    /// Returns `true` after [`Step::Finish`].
    pub fn is_finished(&self) -> bool {
        self.is_finished
    }

    /// Returns the paused trials of a bracket with this length, except some.
    pub(super) fn paused_at(&self, group: u32, units: u64, except: &[u32]) -> Vec<u32> {
        let except: BTreeSet<u32> = except.iter().copied().collect();
        let is_meant = |(trial, entry): &(u32, &TrialEntry)| {
            entry.group == group
                && entry.state == TrialState::Paused
                && entry.units == units
                && !except.contains(trial)
        };
        (0..).zip(&self.trials).filter(is_meant).map(|(trial, _)| trial).collect()
    }

    /// Returns `true` if an event changes this state. Repeated, late and foreign events do not.
    pub(super) fn accepts(&self, event: &Event) -> bool {
        let entry = event.trial().map(|trial| self.trials.get(trial as usize));
        match (event, entry) {
            (Event::Began, _) => self.trials.is_empty(),
            (Event::Edited(_) | Event::Answered(_) | Event::Reopened, _) => true,
            (Event::LimitReached, _) => !self.is_limited,
            (_, None | Some(None)) => false,
            (Event::Result { units, .. }, Some(Some(entry))) => {
                entry.state == TrialState::Active && *units == entry.units
            }
            (Event::Closed { .. }, Some(Some(entry))) => entry.state.is_open(),
            (Event::Deleted { .. }, Some(Some(entry))) => entry.state != TrialState::Deleted,
        }
    }

    /// Begins a turn without an event.
    pub(super) fn set_order(&mut self, order: u64) {
        self.order = order;
    }

    /// Begins the turn of an accepted event, and takes the event in. Returns its trial as it was
    /// before.
    pub(super) fn observe(&mut self, order: u64, event: &Event) -> Option<Before> {
        self.order = order;
        let before = event.trial().map(|trial| {
            let TrialEntry { state, units, .. } = *self.trial(trial);
            Before { state, units }
        });
        match event {
            Event::Began | Event::Answered(_) => {}
            Event::Edited(edit) => {
                self.is_finished = false;
                self.ignores_failures = true;
                self.is_limited &= edit.is_limited;
            }
            Event::LimitReached => self.is_limited = true,
            Event::Reopened => {
                self.is_finished = false;
                self.ignores_failures = true;
            }
            Event::Result { trial, units, loss, others } => {
                let entry = &mut self.trials[*trial as usize];
                self.num_with_result += u32::from(entry.results.is_empty());
                entry.results.push((*units, *loss));
                if !others.is_empty() {
                    entry.others.push(others.clone());
                }
                entry.state = TrialState::Waiting;
            }
            Event::Closed { trial, cause } => {
                self.num_invalid += u32::from(*cause == CloseCause::InvalidHyperparameters);
                self.end(*trial, TrialState::Closed(*cause));
            }
            Event::Deleted { trial } => {
                let entry = &mut self.trials[*trial as usize];
                self.num_with_result -= u32::from(!entry.results.is_empty());
                entry.results.clear();
                entry.others.clear();
                entry.units = 0;
                entry.is_cut = false;
                let closed = TrialState::Closed(CloseCause::InvalidHyperparameters);
                self.num_invalid -= u32::from(entry.state == closed);
                self.rejections.remove(trial);
                self.end(*trial, TrialState::Deleted);
            }
        }
        before
    }

    /// Takes in a step.
    pub(super) fn commit(&mut self, step: &Step) {
        match step {
            Step::Create { group, units, .. } => {
                self.num_open += 1;
                let state = TrialState::Active;
                let (group, units) = (*group, *units);
                self.trials.push(TrialEntry {
                    group,
                    units,
                    state,
                    results: vec![],
                    others: vec![],
                    is_cut: false,
                });
            }
            Step::Continue { trial, units } => {
                let entry = &mut self.trials[*trial as usize];
                (entry.units, entry.state) = (*units, TrialState::Active);
            }
            Step::PromoteClosed { trial, units } => {
                // The trial is open only if the end of a deleted trial is missing in the record.
                if self.trial(*trial).state.is_open() {
                    self.end(*trial, FAILED);
                }
                self.trials[*trial as usize].units = *units;
            }
            Step::Pause { trial } => self.trials[*trial as usize].state = TrialState::Paused,
            Step::Stop { trial } => self.end(*trial, TrialState::Stopped),
            Step::StopPaused { group, units, except } => {
                for trial in self.paused_at(*group, *units, except) {
                    self.end(trial, TrialState::Stopped);
                }
            }
            Step::StopAll => self.open().into_iter().for_each(|trial| self.cut(trial)),
            Step::Reopen { trials } => trials.iter().for_each(|trial| self.reopen(*trial)),
            Step::Finish => self.is_finished = true,
        }
    }

    /// Takes in that a limit stops a trial.
    pub(super) fn cut(&mut self, trial: u32) {
        self.end(trial, TrialState::Stopped);
        self.trials[trial as usize].is_cut = true;
    }

    fn reopen(&mut self, trial: u32) {
        let entry = &mut self.trials[trial as usize];
        // The trial is open only if the end of a deleted trial is missing in the record.
        self.num_open += u32::from(!entry.state.is_open());
        self.num_failed -= u32::from(entry.state == FAILED);
        entry.state = if entry.has_result() { TrialState::Paused } else { TrialState::Active };
        entry.is_cut = false;
    }

    fn end(&mut self, trial: u32, state: TrialState) {
        let entry = &mut self.trials[trial as usize];
        self.num_open -= u32::from(entry.state.is_open());
        self.num_failed -= u32::from(entry.state == FAILED);
        self.num_failed += u32::from(state == FAILED);
        entry.state = state;
    }
}

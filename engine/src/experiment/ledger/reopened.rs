//! Trials that continue after their end: by a request of the user, or by an edit.
//!
//! | trial | continues by |
//! |---|---|
//! | failed | a request for failed trials |
//! | ended by itself before its granted length | a request for stopped trials |
//! | stopped by a limit | the same; an edit after which the limit is not reached |
//! | completed the full length | an edit that raises it, if a checkpoint is kept |
//!
//! A trial without a checkpoint starts from scratch. An edit continues such a trial only if it has
//! no result, since nothing is trained twice then. No killed trial continues.

use stoker_api::decisions::{LogEntry, LogEvent};
use stoker_api::experiment::{ReopenRequest, ReopenedTrials};
use stoker_api::time::Timestamp;
use stoker_api::trial::{CloseCause, DesiredTrialState, Fact, REOPENINGS_MAX};

use super::{Ledger, Record, Write};
use crate::experiment::{Summary, recorded};
use crate::search::book::{TrialEntry, TrialState};
use crate::search::turn::{Event, Step};
use crate::trial::{TrialRecord, closed, is_fresh_copy, num_reopenings};

/// Latest reopening of a trial.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Reopening {
    /// Number of times that the trial was reopened.
    number: u32,
    /// Number of its facts before. Nothing follows from the ends among them.
    pub(super) num_facts: u32,
}

/// Trials that an edit continues.
#[derive(Debug, Default)]
pub(super) struct Continued {
    pub(super) trials: Vec<u32>,
    /// Whether others of them have not ended yet.
    pub(super) waits: bool,
}

impl Ledger {
    /// Returns the trials that a request reopens, by index. `record_of` returns the record of a
    /// trial. None is reopened while a limit ends the search.
    pub fn reopenable<'a>(
        &self,
        trials: ReopenedTrials,
        record_of: impl Fn(u32) -> Option<&'a TrialRecord>,
    ) -> Vec<u32> {
        let is_meant = |entry: &TrialEntry| match trials {
            ReopenedTrials::Failed => entry.state == TrialState::Closed(CloseCause::Failed),
            ReopenedTrials::Stopped => {
                let is_cut = entry.state == TrialState::Stopped && entry.is_cut;
                is_cut || entry.state == TrialState::Closed(CloseCause::StoppedEarly)
            }
        };
        let may_reopen = |index: u32| {
            record_of(index)
                .is_some_and(|record| closed(record).is_some() && self.may_reopen(index, record))
        };
        let entries = (0..).zip(self.book().trials()).filter(|_| !self.book().is_limited());
        let meant = entries.filter(|(index, entry)| is_meant(entry) && may_reopen(*index));
        meant.map(|(index, _)| index).collect()
    }

    /// Takes in a request of the user. It continues no trial if a limit is reached. Returns nothing
    /// if it was taken in before.
    pub fn reopen<'a>(
        &mut self,
        request: Option<ReopenRequest>,
        summary: &Summary,
        record_of: impl Fn(u32) -> Option<&'a TrialRecord> + Copy,
        now: Timestamp,
    ) -> Vec<Write> {
        let new = request.filter(|request| self.has_begun && request.number > self.last_request);
        let Some(request) = new else { return vec![] };
        let trials = match self.crossed(summary, now) {
            Some(_) => vec![],
            None => self.reopenable(request.trials, record_of),
        };
        self.place_facts(&trials, record_of);
        let turn = self.search.reopen(Event::Reopened, trials);
        turn.map(|turn| self.log(turn, LogEvent::Reopened(request), now)).unwrap_or_default()
    }

    /// Returns the trials that continue after the search was limited and is not any more
    /// (`is_freed`), and after the full length was raised from `before`, if it was.
    pub(super) fn continued_by_edit<'a>(
        &self,
        is_freed: bool,
        before: Option<u64>,
        record_of: impl Fn(u32) -> Option<&'a TrialRecord>,
    ) -> Continued {
        let mut continued = Continued::default();
        for (index, entry) in (0..).zip(self.book().trials()) {
            let is_cut = is_freed && entry.is_cut;
            let is_complete = before == Some(entry.units) && entry.has_result() && !entry.is_cut;
            if entry.state != TrialState::Stopped || !(is_cut || is_complete) {
                continue;
            }
            let Some(record) = record_of(index) else {
                if self.missing.get(&index).is_some_and(|spec| spec.source.is_none()) {
                    continued.trials.push(index);
                }
                continue;
            };
            let is_kept = !record.status.checkpoints.is_empty() || entry.results.is_empty();
            if !is_kept || !self.may_reopen(index, record) {
                continue;
            }
            match closed(record) {
                Some(_) => continued.trials.push(index),
                None => continued.waits = true,
            }
        }
        continued
    }

    fn may_reopen(&self, index: u32, record: &TrialRecord) -> bool {
        // The checkpoint that a copy starts from is kept only until the copy has ended. The search
        // does not know that the user has killed a trial that it had stopped before.
        !is_fresh_copy(record)
            && record.spec.desired_state != DesiredTrialState::Kill
            && num_reopenings(record) < REOPENINGS_MAX
            && self.search.may_reopen(index)
    }

    /// Returns the event of a trial's fact; `None` if nothing follows from it.
    pub(super) fn event(&self, trial: u32, index: u32, fact: &Fact) -> Option<Event> {
        let reopening = self.reopenings.get(&trial).copied().unwrap_or_default();
        let is_over = matches!(fact, Fact::Closed(_)) && index < reopening.num_facts;
        if is_over { None } else { recorded::event(trial, fact, &self.config) }
    }

    /// Records that trials continue after the facts that they have now.
    pub(super) fn place_facts<'a>(
        &mut self,
        trials: &[u32],
        record_of: impl Fn(u32) -> Option<&'a TrialRecord>,
    ) {
        for trial in trials {
            let facts = record_of(*trial).map_or(&[][..], |record| &record.status.facts);
            self.continue_after(*trial, facts);
        }
    }

    /// Same as [`place_facts`](Self::place_facts), for a turn that is replayed. The trials may have
    /// more facts now.
    pub(super) fn place_facts_again(&mut self, steps: &[Step], record: Record<'_>) {
        let reopened = steps.iter().flat_map(|step| match step {
            Step::Reopen { trials } => &trials[..],
            _ => &[],
        });
        for trial in reopened {
            let facts = record.trials.get(trial).map_or(&[][..], |of| &of.status.facts);
            let number = self.reopenings.get(trial).map_or(0, |reopening| reopening.number);
            // No fact comes between the step and its own one.
            let is_later =
                |fact: &Fact| matches!(fact, Fact::Reopened(reopened) if reopened.number > number);
            let end = facts.iter().position(is_later).unwrap_or(facts.len());
            self.continue_after(*trial, &facts[..end]);
        }
    }

    /// Records that a trial continues after these facts. All of them have their place, except a
    /// result that the search has not taken in because a limit had ended it.
    fn continue_after(&mut self, trial: u32, facts: &[Fact]) {
        let reopening = self.reopenings.entry(trial).or_default();
        reopening.number += 1;
        reopening.num_facts = facts.len() as u32;
        let entry = self.search.book().trial(trial);
        let is_lost = |fact: &Fact| match fact {
            Fact::Result(result) => result.units == entry.units && !entry.has_result(),
            Fact::Closed(_) | Fact::Reopened(_) => false,
        };
        let num_placed = facts.iter().position(is_lost).unwrap_or(facts.len());
        self.num_placed[trial as usize] = num_placed as u32;
    }
}

/// Returns the number of the last request in the log, 0 without one.
pub(super) fn last_request(log: &[LogEntry]) -> u32 {
    let number = |entry: &LogEntry| match &entry.event {
        LogEvent::Reopened(request) => Some(request.number),
        LogEvent::Began(_)
        | LogEvent::Edited(_)
        | LogEvent::Deleted(_)
        | LogEvent::LimitReached(_)
        | LogEvent::Answered(_) => None,
    };
    log.iter().filter_map(number).max().unwrap_or(0)
}

#[cfg(test)]
mod tests;

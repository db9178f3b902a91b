//! Begin and end of attempts.

use std::time::{Duration, Instant};

use stoker_api::contract::Directive;
use stoker_api::exit::ExitClass;
use stoker_api::experiment::{DesiredState, Phase};
use stoker_api::time::Timestamp;
use stoker_api::trial::{AttemptEnd, CloseCause};
use stoker_engine::search::book::TrialState;
use stoker_engine::trial::{self, BackOff, NextStep, RestartLimits, TargetState, TrialRecord};

use super::{Happening, State, UnrecordedEnd};
use crate::cluster::text::now;
use crate::failure::Failure;

/// Interval at which the record notes that the runner is alive.
const ALIVE_INTERVAL: Duration = Duration::from_secs(5);

impl State {
    /// Records that an attempt begins, with its token.
    pub(crate) fn begin(&mut self, index: u32, attempt: u32, token: &str) -> Result<(), Failure> {
        if let Some(mut record) = self.trials.get(&index).cloned() {
            trial::begin_attempt(&mut record, attempt);
            if let Some(attempt) = record.status.attempts.last_mut() {
                attempt.started_at = Some(now());
            }
            self.save(record)?;
            self.enqueue(index);
            // The attempt is recorded, so its process starts even if the status cannot be written.
            let _ = self.save_status().map_err(|error| self.fail(error));
        }
        self.tokens.entry(index).or_default().insert(token.to_owned(), attempt);
        Ok(())
    }

    /// Ends the attempts of a runner that died, at the time when it was last alive.
    pub(super) fn end_orphans(&mut self) -> Result<(), Failure> {
        let is_orphan = |record: &&TrialRecord| trial::live_attempt(record).is_some();
        let orphans: Vec<u32> =
            self.trials.values().filter(is_orphan).map(|record| record.spec.index).collect();
        for index in orphans {
            let message = "the runner ended without warning, and this attempt with it";
            // Such an end never fails a trial, however often it occurs.
            let ended_at = self.folder.last_alive(index).unwrap_or_else(now);
            let message = Some(message.to_owned());
            self.record_end(self.unrecorded_end(index, AttemptEnd::RunnerLost, message), ended_at)?;
        }
        // These attempts ended before this runner began.
        self.happenings.clear();
        Ok(())
    }

    /// Ends the recorded attempts that have no process: the write of their begin failed after the
    /// file was replaced. All other attempts of this runner have a token.
    pub(super) fn end_unstarted(&mut self) -> Result<(), Failure> {
        let is_unstarted = |record: &&TrialRecord| {
            let tokens = self.tokens.get(&record.spec.index);
            trial::live_attempt(record).is_some_and(|attempt| {
                tokens.is_none_or(|tokens| !tokens.values().any(|of| *of == attempt))
            })
        };
        let unstarted = self.trials.values().filter(is_unstarted);
        for index in unstarted.map(|record| record.spec.index).collect::<Vec<u32>>() {
            let message = Some("the start of the attempt could not be recorded".to_owned());
            self.record_end(self.unrecorded_end(index, AttemptEnd::NotStarted, message), now())?;
        }
        Ok(())
    }

    /// Notes in the record that the runner is alive, so that the next runner knows until when
    /// attempts ran if this one dies.
    pub(super) fn note_alive(&mut self) {
        if self.noted_alive_at.is_none_or(|at| at.elapsed() >= ALIVE_INTERVAL)
            && self.trials.values().any(|record| trial::live_attempt(record).is_some())
        {
            // Without the note, attempts seem to end with the last write of their trials.
            let _ = self.folder.note_alive();
            self.noted_alive_at = Some(Instant::now());
        }
    }

    /// Records how the live attempt ended, as soon as the record can be written.
    pub(crate) fn end(&mut self, index: u32, end: AttemptEnd, message: Option<String>) {
        self.unrecorded.push(self.unrecorded_end(index, end, message));
        let _ = self.settle();
    }

    /// Records that the program of the live attempt failed with an error that a restart would
    /// repeat.
    pub(crate) fn end_unrecoverable(&mut self, index: u32, message: Option<String>) {
        let class = ExitClass::Unrecoverable;
        let end = self.unrecorded_end(index, class.attempt_end(), message);
        let limits = end.limits.after(class);
        self.unrecorded.push(UnrecordedEnd { limits, ..end });
        let _ = self.settle();
    }

    fn unrecorded_end(
        &self,
        trial: u32,
        end: AttemptEnd,
        message: Option<String>,
    ) -> UnrecordedEnd {
        UnrecordedEnd { trial, end, message, limits: self.limits }
    }

    /// Records how the live attempt ended, and when; not before its start.
    pub(super) fn record_end(
        &mut self,
        unrecorded: UnrecordedEnd,
        ended_at: Timestamp,
    ) -> Result<(), Failure> {
        let UnrecordedEnd { trial: index, end, message, limits } = unrecorded;
        let Some(mut record) = self.trials.get(&index).cloned() else { return Ok(()) };
        let Some(attempt) = trial::live_attempt(&record) else { return Ok(()) };
        // The program's own message is better than the last lines of its log.
        let reported = record.status.attempts.last().and_then(|attempt| attempt.message.clone());
        let message = match end {
            AttemptEnd::Completed => reported,
            // The program knows only that it received a signal.
            AttemptEnd::Preempted if message.is_none() => {
                self.stop_cause().map(str::to_owned).or(reported)
            }
            // Only rank 0 reports, and another rank may have rejected them.
            AttemptEnd::InvalidHyperparameters if self.config.slots > 1 => message.or(reported),
            _ => reported.or(message),
        };
        let num_facts = record.status.facts.len();
        let has_trained = self.trials.values().any(trial::has_trained);
        let limits = RestartLimits { has_trained, ..limits };
        trial::end_attempt(&mut record, end, message.clone(), &limits);
        trial::stamp_facts(&mut record, num_facts, now());
        if let Some(attempt) = record.status.attempts.last_mut() {
            attempt.ended_at = Some(attempt.started_at.map_or(ended_at, |at| at.max(ended_at)));
        }
        // If the search knows everything about the trial, one write ends and closes it.
        if self.ledger.pending([&record]).is_empty()
            && let NextStep::Close { cause } = trial::next(&record, self.target(index))
        {
            trial::close(&mut record, cause, None);
            trial::stamp_facts(&mut record, num_facts, now());
        }
        if trial::closed(&record).is_none() {
            let is_idle = self.ledger.state(index) != Some(TrialState::Active);
            let is_paused = is_idle || self.is_paused();
            record.status.phase = if is_paused { Phase::Paused } else { Phase::Pending };
        }
        let is_failure =
            end == AttemptEnd::Completed && trial::closed(&record) == Some(CloseCause::Failed);
        // The program does not know that it has failed.
        let message = if is_failure { record.status.message.clone() } else { message };
        self.save(record)?;
        self.happenings.push((index, Happening::Ended { attempt, end, is_failure, message }));
        Ok(())
    }

    /// Returns why all trials were asked to exit, if they were.
    fn stop_cause(&self) -> Option<&'static str> {
        match self.desired_state() {
            DesiredState::Paused => Some("the experiment was paused"),
            DesiredState::Cancelled | DesiredState::Killed => Some("the experiment was cancelled"),
            DesiredState::Active if self.is_pausing => Some("stopped with the runner"),
            DesiredState::Active => None,
        }
    }

    /// Returns the wait before the trial's next attempt, if there is one.
    pub(crate) fn back_off(&self, index: u32) -> Option<BackOff> {
        let record = self.trials.get(&index).filter(|record| trial::closed(record).is_none())?;
        trial::back_off(record, now(), &self.limits.back_off)
    }

    /// Returns the attempt of this trial that has this token.
    pub(crate) fn attempt_of(&self, index: u32, token: &str) -> Option<u32> {
        self.tokens.get(&index)?.get(token).copied()
    }

    /// Returns whether an attempt was replaced or has ended, or its trial has.
    pub(crate) fn is_over(&self, index: u32, attempt: u32) -> bool {
        let is_over =
            |record| trial::directive(record, attempt, TargetState::Run) == Directive::Fenced;
        self.trials.get(&index).is_none_or(is_over)
    }
}

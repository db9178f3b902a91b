//! Directives of the runner and stop requests: how long to train, and when to exit.

use std::time::{Duration, Instant};

use burn::module::Module;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use stoker_api::contract::{Directive, ExitCode, ReportEvent};

use super::TestStage;
use super::run::Run;
use crate::collective::{RankActivity, all_gather_cbor};
use crate::context::Context;
use crate::error::{Infrastructure, Interrupted};
use crate::{Error, Result};

/// Pause before the runner is asked again while the search is undecided.
pub(crate) const SEARCH_POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Length of a [`StopState`] as numbers.
pub(super) const STOP_NUMBERS: usize = 5;

/// Stop requests and directive.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
pub(super) struct StopState {
    /// Whether a signal requests a stop.
    signal: bool,
    /// Whether the program itself ends training.
    ended: bool,
    /// Latest directive of the runner, which only rank 0 receives.
    directive: Option<Directive>,
}

impl StopState {
    /// Returns the state of this process.
    pub(super) fn local(context: &Context) -> Self {
        let (signal, ended) = (context.stop.is_set(), context.ended.is_set());
        Self { signal, ended, directive: context.io().directive() }
    }

    /// Returns the state that all ranks agree on.
    pub(super) fn agreed(of_ranks: &[Self]) -> Self {
        Self {
            signal: of_ranks.iter().any(|stop_state| stop_state.signal),
            ended: of_ranks.iter().any(|stop_state| stop_state.ended),
            directive: of_ranks.first().and_then(|stop_state| stop_state.directive),
        }
    }

    /// Returns whether the process must exit.
    pub(super) fn must_exit(self) -> bool {
        let exits = |directive| {
            matches!(directive, Directive::Preempt | Directive::Stop | Directive::Fenced)
        };
        self.signal || self.directive.is_some_and(exits)
    }

    /// Returns the state as numbers. Their sums over all ranks contain the state that all agree on.
    pub(super) fn to_numbers(self, rank: usize) -> [f64; STOP_NUMBERS] {
        let (kind, units) = match self.directive.filter(|_| rank == 0) {
            None => (0, 0),
            Some(Directive::Continue { units }) => (1, units),
            Some(Directive::Wait) => (2, 0),
            Some(Directive::Preempt) => (3, 0),
            Some(Directive::Stop) => (4, 0),
            Some(Directive::Fenced) => (5, 0),
        };
        // In two numbers, because `f64` has no odd integers beyond 2^53.
        let (high, low) = ((units >> 32) as u32, units as u32);
        let [high, low] = [high, low].map(f64::from);
        [self.signal.into(), self.ended.into(), f64::from(kind), high, low]
    }

    /// Returns the agreed state from the sums of [`to_numbers`](Self::to_numbers).
    pub(super) fn from_sums(sums: [f64; STOP_NUMBERS]) -> Self {
        let [signal, ended, kind, high, low] = sums;
        let directive = match kind as u32 {
            1 => Some(Directive::Continue { units: (high as u64) << 32 | low as u64 }),
            2 => Some(Directive::Wait),
            3 => Some(Directive::Preempt),
            4 => Some(Directive::Stop),
            5 => Some(Directive::Fenced),
            _ => None,
        };
        Self { signal: signal > 0.0, ended: ended > 0.0, directive }
    }
}

impl<M: Module + 'static, B: Send + 'static> Run<'_, M, B> {
    /// All-gathers a value, in rank order. Stop requests travel with it, so that all ranks see them
    /// at the same point of the program.
    pub(super) fn all_gather_with_stop<T: DeserializeOwned + Serialize>(
        &mut self,
        position: &str,
        local: T,
    ) -> Result<Vec<T>> {
        let ranks = self.context.distributed();
        if ranks.size() == 1 {
            return Ok(vec![local]);
        }
        let local = (self.local_stop_state(), local);
        let all = all_gather_cbor(ranks.collective(), position, local)?;
        let (stop_states, values): (Vec<StopState>, Vec<T>) = all.into_iter().unzip();
        self.stop_state = StopState::agreed(&stop_states);
        Ok(values)
    }

    /// Runs `act`, which has its own deadline. Meanwhile, the watchdog does not report this rank as
    /// stuck.
    pub(super) fn wait_for<T>(&mut self, act: impl FnOnce(&mut Self) -> T) -> T {
        let context = self.context;
        context.distributed().progress.while_waiting(|| act(self))
    }

    pub(super) fn local_stop_state(&self) -> StopState {
        StopState::local(self.context)
    }

    /// Returns the requests that all ranks have agreed on.
    fn agreed_stop_state(&self) -> StopState {
        match self.context.distributed().size() {
            1 => self.local_stop_state(),
            _ => self.stop_state,
        }
    }

    /// Applies requests between two batches. Returns an error if the process must exit.
    pub(super) fn apply_directive(&mut self) -> Result<()> {
        self.record_end();
        let stop_state = self.agreed_stop_state();
        if stop_state.signal {
            return Err(self.stop_by_signal());
        }
        match stop_state.directive {
            Some(Directive::Continue { units }) => self.extend_length(units),
            Some(Directive::Preempt) => {
                return Err(
                    self.checkpoint_and_exit(ExitCode::Preempted, "preempted by the runner")
                );
            }
            Some(Directive::Stop) => {
                return Err(
                    self.checkpoint_and_exit(ExitCode::Completed, "no more training is needed")
                );
            }
            Some(Directive::Fenced) => return Err(fenced_error()),
            Some(Directive::Wait) | None => {}
        }
        Ok(())
    }

    /// Agrees on whether the program has ended training at this batch. Called before a checkpoint:
    /// it must contain the end, because it cannot be replaced.
    pub(super) fn agree_on_end(&mut self) -> Result<()> {
        self.all_gather_with_stop("checkpoint", ())?;
        self.record_end();
        Ok(())
    }

    fn record_end(&mut self) {
        if self.agreed_stop_state().ended {
            self.state.stopped.get_or_insert_with(|| "the program ended training".into());
        }
    }

    /// Called at the end of the granted length, or when a callback stops training, after a
    /// validation. Saves a checkpoint, reports the result and waits for the next directive. Returns
    /// whether training is over.
    ///
    /// The checkpoint is complete before the result is reported, so a trial with a known result can
    /// be resumed.
    pub(super) fn complete_length(&mut self) -> Result<bool> {
        let (batches, context) = (self.state.batches, self.context);
        context.run_stage(TestStage::Checkpoint, || {
            self.save()?;
            self.wait_for(Self::wait_until_stored)
        })?;
        self.test_restore()?;
        if !self.io().has_runner() {
            return Ok(true);
        }
        let mut reported = self.completed_units();
        let mut event = self.validation_event(reported);
        let start = Instant::now();
        loop {
            let answer = self.wait_for(|run| run.io().request_directive(batches, event))?;
            let is_silent = self.io().is_runner_silent(start);
            let (answer, is_silent) = self.all_gather_with_stop("end", (answer, is_silent))?[0];
            match answer {
                Some(Directive::Stop) => return Ok(true),
                Some(Directive::Continue { units }) if self.state.stopped.is_none() => {
                    self.extend_length(units);
                    if self.granted > batches {
                        return Ok(false);
                    }
                }
                // A training that a callback stopped is over, even if a longer length was granted.
                Some(Directive::Continue { .. }) => return Ok(true),
                Some(Directive::Preempt | Directive::Fenced) | None => self.apply_directive()?,
                Some(Directive::Wait) => {}
            }
            self.check_signal()?;
            if is_silent {
                return Err(silent_runner_error());
            }
            std::thread::sleep(SEARCH_POLL_INTERVAL);
            // A longer length may end at the same batch.
            event = match self.completed_units() {
                reached if reached == reported => {
                    let batches_total = self.state.base + self.granted;
                    ReportEvent::Progress { batches_total, activity: None }
                }
                reached => {
                    reported = reached;
                    self.validation_event(reached)
                }
            };
        }
    }

    /// Returns the granted length if training has reached it. If a callback stopped training
    /// before, the validation is not a result of that length.
    fn completed_units(&self) -> Option<u64> {
        (self.state.batches >= self.granted).then_some(self.granted_units)
    }

    fn check_signal(&mut self) -> Result<()> {
        match self.agreed_stop_state().signal {
            true => Err(self.stop_by_signal()),
            false => Ok(()),
        }
    }

    /// Saves a checkpoint after a signal on which all ranks have agreed, and returns the error to
    /// exit with.
    pub(super) fn stop_by_signal(&mut self) -> Error {
        self.stop_state.signal = true;
        self.checkpoint_and_exit(ExitCode::Preempted, "stopped by a signal")
    }

    /// Adopts a longer length. A granted length never shrinks.
    fn extend_length(&mut self, units: u64) {
        if units > self.granted_units {
            self.granted_units = units;
            self.granted = self.timetable.batches(self.context.config.unit, units);
        }
    }

    /// Waits until all checkpoints and reports are stored.
    pub(super) fn wait_until_stored(&mut self) -> Result<()> {
        let mut io = self.io();
        io.report_saved(true)?;
        io.flush()
    }

    /// Saves a checkpoint, waits until everything is stored, and returns the error to exit with.
    fn checkpoint_and_exit(&mut self, code: ExitCode, why: &str) -> Error {
        self.context.distributed().record_activity(RankActivity::Train);
        // A rank whose save fails exits without the exchange, which ends the others' wait for it.
        let stored = self
            .finish_earlier_save()
            .and_then(|()| self.save())
            .and_then(|()| self.wait_for(Self::wait_until_all_stored));
        match stored.and_then(|()| self.end_hooks()) {
            Ok(()) => Interrupted { code, fenced: false, why: why.into() }.into(),
            Err(error) => error,
        }
    }

    /// Waits for a save in progress: the process may be killed during the next one. If it was of
    /// this batch and failed, the next call of [`save`](Self::save) repeats it, except in a gang
    /// after a signal: [`wait_until_all_stored`](Self::wait_until_all_stored) has the reason.
    fn finish_earlier_save(&mut self) -> Result<()> {
        let is_latest = self.saved == Some(self.state.batches);
        let is_alone = self.context.distributed().size() == 1;
        if is_latest && !is_alone && self.agreed_stop_state().signal {
            return Ok(());
        }
        let has_failed = self.wait_for(|run| run.io().finish_earlier_save());
        if is_latest && self.all_gather_with_stop("earlier save", has_failed)?[0] {
            self.saved = None;
        }
        Ok(())
    }

    /// Same as [`wait_until_stored`](Self::wait_until_stored). The other ranks wait for rank 0 and
    /// fail if it does, unless the stop is by a signal: then the grace period of their pod may be
    /// shorter than what rank 0 needs.
    fn wait_until_all_stored(&mut self) -> Result<()> {
        let stored = self.wait_until_stored();
        if self.agreed_stop_state().signal {
            return stored;
        }
        self.context.distributed().gather_results("stored", stored).map(drop)
    }
}

/// The runner has not responded for too long.
pub(crate) fn silent_runner_error() -> Error {
    Infrastructure("the runner has not responded for ten minutes".into()).into()
}

/// The runner has given up this attempt.
fn fenced_error() -> Error {
    let why = "the runner has given up this attempt".into();
    Interrupted { code: ExitCode::Infrastructure, fenced: true, why }.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sums over the other ranks, which have no directive, change nothing.
    #[test]
    fn sums_contain_requests_of_all_ranks() {
        let directives = [
            None,
            Some(Directive::Continue { units: u64::MAX - 1 }),
            Some(Directive::Wait),
            Some(Directive::Preempt),
            Some(Directive::Stop),
            Some(Directive::Fenced),
        ];
        for directive in directives {
            for (signal, ended) in [(false, false), (true, false), (false, true)] {
                let of_ranks = [
                    StopState { directive, ..StopState::default() },
                    StopState { signal, ended, directive: Some(Directive::Stop) },
                    StopState { signal, ended: false, directive: None },
                ];
                let mut sums = [0.0; STOP_NUMBERS];
                for (rank, state) in of_ranks.into_iter().enumerate() {
                    let numbers = state.to_numbers(rank);
                    sums.iter_mut().zip(numbers).for_each(|(sum, number)| *sum += number);
                }
                let expected = StopState { signal, ended, directive };
                assert_eq!(StopState::from_sums(sums), expected);
            }
        }
    }
}

//! Directives of the runner and stop requests: how long to train, and when to exit.

use std::time::Duration;

use burn::module::Module;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use stoker_api::contract::{Directive, ExitCode, ReportEvent};

use super::Part;
use super::run::Run;
use crate::collective::{Doing, exchange};
use crate::error::{Infrastructure, Interrupted};
use crate::{Error, Result};

/// Pause before the runner is asked again while the search is undecided.
pub(crate) const SEARCH_POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Maximum number of unanswered requests at the end of the granted length, after which the process
/// exits. Each takes [`RESPONSE_TIMEOUT`] and a pause, so this is about ten minutes.
///
/// [`RESPONSE_TIMEOUT`]: super::RESPONSE_TIMEOUT
pub(crate) const UNANSWERED_REQUESTS_MAX: u32 = 500;

/// Stop requests and directive.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize)]
pub(super) struct Wish {
    /// Whether a signal requests a stop.
    signal: bool,
    /// Whether the program itself ends training.
    ended: bool,
    /// Latest directive of the runner, which only rank 0 receives.
    directive: Option<Directive>,
}

impl<M: Module + 'static, B: Send + 'static> Run<'_, M, B> {
    /// All-gathers a value, in rank order. Stop requests travel with it, so that all ranks see them
    /// at the same point of the program.
    pub(super) fn agree<T: DeserializeOwned + Serialize>(
        &mut self,
        place: &str,
        local: T,
    ) -> Result<Vec<T>> {
        let ranks = self.context.distributed();
        if ranks.size() == 1 {
            return Ok(vec![local]);
        }
        let local = (self.local_wish(), local);
        let all = exchange(ranks.collective(), place, local)?;
        let (wishes, values): (Vec<Wish>, Vec<T>) = all.into_iter().unzip();
        self.wish = Wish {
            signal: wishes.iter().any(|wish| wish.signal),
            ended: wishes.iter().any(|wish| wish.ended),
            directive: wishes.first().and_then(|wish| wish.directive),
        };
        Ok(values)
    }

    /// Runs `act`, which has its own deadline. Meanwhile, the watchdog does not report this rank as
    /// stuck.
    pub(super) fn wait_for<T>(&mut self, act: impl FnOnce(&mut Self) -> T) -> T {
        self.context.distributed().tick(Doing::Wait);
        let done = act(self);
        self.context.distributed().tick(Doing::Train);
        done
    }

    fn local_wish(&self) -> Wish {
        let (signal, ended) = (self.context.stop.is_set(), self.context.ended.is_set());
        Wish { signal, ended, directive: self.io().directive() }
    }

    /// Returns the requests that all ranks have agreed on.
    fn agreed_wish(&self) -> Wish {
        match self.context.distributed().size() {
            1 => self.local_wish(),
            _ => self.wish,
        }
    }

    /// Applies requests between two batches. Returns an error if the process must exit.
    pub(super) fn obey(&mut self) -> Result<()> {
        let wish = self.agreed_wish();
        if wish.ended {
            self.state.stopped.get_or_insert_with(|| "the program ended training".into());
        }
        if wish.signal {
            return Err(self.leave(ExitCode::Preempted, "stopped by a signal"));
        }
        match wish.directive {
            Some(Directive::Continue { units }) => self.extend(units),
            Some(Directive::Preempt) => {
                return Err(self.leave(ExitCode::Preempted, "preempted by the runner"));
            }
            Some(Directive::Stop) => {
                return Err(self.leave(ExitCode::Completed, "no more training is needed"));
            }
            Some(Directive::Fenced) => return Err(fenced()),
            Some(Directive::Wait) | None => {}
        }
        Ok(())
    }

    /// Called at the end of the granted length, or when a callback stops training, after a
    /// validation. Saves a checkpoint, reports the result and waits for the next directive. Returns
    /// whether training is over.
    ///
    /// The checkpoint is complete before the result is reported, so a trial with a known result can
    /// be resumed.
    pub(super) fn reach_length(&mut self) -> Result<bool> {
        let (batches, context) = (self.state.batches, self.context);
        context.tried(Part::Checkpoint, || {
            self.save()?;
            self.wait_for(Self::store)
        })?;
        self.try_restore()?;
        if !self.io().has_runner() {
            return Ok(true);
        }
        let mut reported = self.reached_units();
        let mut event = self.validation_event(reported);
        let mut num_unanswered = 0;
        loop {
            let answer = self.wait_for(|run| run.io().request_directive(batches, event));
            let answer = self.agree("end", answer)?[0];
            match answer {
                Some(Directive::Stop) => return Ok(true),
                Some(Directive::Continue { units }) if self.state.stopped.is_none() => {
                    self.extend(units);
                    if self.granted > batches {
                        return Ok(false);
                    }
                }
                // A training that a callback stopped is over, even if a longer length was granted.
                Some(Directive::Continue { .. }) => return Ok(true),
                Some(Directive::Preempt | Directive::Fenced) | None => self.obey()?,
                Some(Directive::Wait) => {}
            }
            self.obey_signal()?;
            num_unanswered = if answer.is_some() { 0 } else { num_unanswered + 1 };
            if num_unanswered == UNANSWERED_REQUESTS_MAX {
                let text = "the runner has not responded for ten minutes";
                return Err(Infrastructure(text.into()).into());
            }
            std::thread::sleep(SEARCH_POLL_INTERVAL);
            // A longer length may end at the same batch.
            event = match self.reached_units() {
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
    fn reached_units(&self) -> Option<u64> {
        (self.state.batches >= self.granted).then_some(self.granted_units)
    }

    fn obey_signal(&mut self) -> Result<()> {
        match self.agreed_wish().signal {
            true => Err(self.leave(ExitCode::Preempted, "stopped by a signal")),
            false => Ok(()),
        }
    }

    /// Adopts a longer length. A granted length never shrinks.
    fn extend(&mut self, units: u64) {
        if units > self.granted_units {
            self.granted_units = units;
            self.granted = self.timetable.batches(self.context.config.unit, units);
        }
    }

    /// Waits until all checkpoints and reports are stored.
    pub(super) fn store(&mut self) -> Result<()> {
        let mut io = self.io();
        io.report_saved(true)?;
        io.flush()
    }

    /// Saves a checkpoint, waits until everything is stored, and returns the error to exit with.
    fn leave(&mut self, code: ExitCode, why: &str) -> Error {
        let saved = self.save();
        let stored = self.wait_for(|run| saved.and_then(|()| run.store()));
        match stored.and_then(|()| self.end_hooks()) {
            Ok(()) => Interrupted { code, fenced: false, why: why.into() }.into(),
            Err(error) => error,
        }
    }
}

/// The runner has given up this attempt.
fn fenced() -> Error {
    let why = "the runner has given up this attempt".into();
    Interrupted { code: ExitCode::Infrastructure, fenced: true, why }.into()
}

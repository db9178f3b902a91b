//! What the runner wants: how long to train, and when to leave.

use std::time::Duration;

use burn::module::Module;
use stoker_api::contract::{Directive, ExitCode, ReportEvent};

use super::run::Run;
use crate::error::{Infrastructure, Interrupted};
use crate::{Error, Result};

/// Pause before an undecided runner is asked again.
const UNDECIDED_PAUSE: Duration = Duration::from_millis(200);
/// Questions without an answer at the end of the granted length, each [`ANSWER_WAIT`] and a pause
/// long, before the process gives its place up: about ten minutes.
///
/// [`ANSWER_WAIT`]: super::ANSWER_WAIT
const UNANSWERED_MAX: u32 = 500;

impl<M: Module + 'static, B: Send + 'static> Run<'_, M, B> {
    /// Does what was asked for between two batches. A wish to leave is an error.
    pub(super) fn obey(&mut self) -> Result<()> {
        if self.context.stop.is_set() {
            return Err(self.leave(ExitCode::Preempted, "asked to stop by a signal"));
        }
        match self.session.directive() {
            Some(Directive::Continue { units }) => self.extend(units),
            Some(Directive::Preempt) => {
                return Err(self.leave(ExitCode::Preempted, "asked to stop by the runner"));
            }
            Some(Directive::Stop) => {
                return Err(self.leave(ExitCode::Completed, "nothing more is wanted"));
            }
            Some(Directive::Fenced) => return Err(fenced()),
            Some(Directive::Wait) | None => {}
        }
        Ok(())
    }

    /// At the end of the granted length, or where a callback has stopped: validates, saves, reports
    /// the result and asks. Says whether training is over.
    ///
    /// The checkpoint is whole before the result is reported, so that a trial whose result is known
    /// can be gone on with.
    pub(super) fn reach_length(&mut self) -> Result<bool> {
        let batches = self.state.batches;
        if self.state.validated.as_ref().is_none_or(|it| it.batches != batches) {
            self.validate()?;
        }
        self.save()?;
        self.session.report_saved(true)?;
        self.session.flush()?;
        if !self.session.has_runner() {
            return Ok(true);
        }
        let mut told = self.reached_units();
        let mut event = self.validation_event(told);
        let mut num_unanswered = 0;
        loop {
            let answer = self.session.ask(batches, event);
            match answer {
                Some(Directive::Stop) => return Ok(true),
                Some(Directive::Continue { units }) if self.state.stopped.is_none() => {
                    self.extend(units);
                    if self.granted > batches {
                        return Ok(false);
                    }
                }
                // What a callback stopped is over, whatever more was granted.
                Some(Directive::Continue { .. }) => return Ok(true),
                Some(Directive::Preempt | Directive::Fenced) | None => self.obey()?,
                Some(Directive::Wait) => {}
            }
            self.obey_signal()?;
            num_unanswered = if answer.is_some() { 0 } else { num_unanswered + 1 };
            if num_unanswered == UNANSWERED_MAX {
                let text = "the runner has not answered for ten minutes";
                return Err(Infrastructure(text.into()).into());
            }
            std::thread::sleep(UNDECIDED_PAUSE);
            // A longer length may end at the same batch.
            event = match self.reached_units() {
                reached if reached == told => ReportEvent::Progress { batches_total: self.granted },
                reached => {
                    told = reached;
                    self.validation_event(reached)
                }
            };
        }
    }

    /// The granted length, if training is there: where a callback has stopped it before, what a
    /// validation gives is no result of that length.
    fn reached_units(&self) -> Option<u64> {
        (self.state.batches >= self.granted).then_some(self.granted_units)
    }

    fn obey_signal(&mut self) -> Result<()> {
        match self.context.stop.is_set() {
            true => Err(self.leave(ExitCode::Preempted, "asked to stop by a signal")),
            false => Ok(()),
        }
    }

    /// Takes on a longer length; a granted length never shrinks.
    fn extend(&mut self, units: u64) {
        if units > self.granted_units {
            self.granted_units = units;
            self.granted = self.timetable.batches(self.context.config.unit, units);
        }
    }

    /// Saves what is not saved, waits until it is stored and told; gives the error to leave with.
    fn leave(&mut self, code: ExitCode, why: &str) -> Error {
        let saved = self.save().and_then(|()| self.session.report_saved(true));
        match saved.and_then(|()| self.session.flush()) {
            Ok(()) => Interrupted { code, fenced: false, why: why.into() }.into(),
            Err(error) => error,
        }
    }
}

/// This attempt is over for the runner.
fn fenced() -> Error {
    let why = "the runner has given this attempt up".into();
    Interrupted { code: ExitCode::Infrastructure, fenced: true, why }.into()
}

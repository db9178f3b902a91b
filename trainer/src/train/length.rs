//! What the runner wants: how long to train, and when to leave.

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

/// Pause before an undecided runner is asked again.
pub(crate) const UNDECIDED_PAUSE: Duration = Duration::from_millis(200);
/// Questions without an answer at the end of the granted length, each [`ANSWER_WAIT`] and a pause
/// long, before the process gives its place up: about ten minutes.
///
/// [`ANSWER_WAIT`]: super::ANSWER_WAIT
pub(crate) const UNANSWERED_MAX: u32 = 500;

/// What was asked of the ranks.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize)]
pub(super) struct Wish {
    /// Whether a signal asks to leave.
    signal: bool,
    /// Whether the program wants no more training.
    ended: bool,
    /// The runner's latest answer, which rank 0 has.
    directive: Option<Directive>,
}

impl<M: Module + 'static, B: Send + 'static> Run<'_, M, B> {
    /// What each rank says here, in their order. What was asked of any of them rides along, so that
    /// all know it at the same place of the program.
    pub(super) fn agree<T: DeserializeOwned + Serialize>(
        &mut self,
        place: &str,
        mine: T,
    ) -> Result<Vec<T>> {
        let ranks = self.context.distributed();
        if ranks.size() == 1 {
            return Ok(vec![mine]);
        }
        let (wishes, said): (Vec<Wish>, Vec<T>) =
            exchange(ranks.collective(), place, (self.asked_here(), mine))?.into_iter().unzip();
        self.wish = Wish {
            signal: wishes.iter().any(|it| it.signal),
            ended: wishes.iter().any(|it| it.ended),
            directive: wishes.first().and_then(|it| it.directive),
        };
        Ok(said)
    }

    /// Does what has a deadline of its own: nobody takes this rank for stuck meanwhile.
    pub(super) fn wait_for<T>(&mut self, act: impl FnOnce(&mut Self) -> T) -> T {
        self.context.distributed().tick(Doing::Wait);
        let done = act(self);
        self.context.distributed().tick(Doing::Train);
        done
    }

    fn asked_here(&self) -> Wish {
        let (signal, ended) = (self.context.stop.is_set(), self.context.ended.is_set());
        Wish { signal, ended, directive: self.outlet().directive() }
    }

    /// What all ranks know was asked of them.
    fn asked(&self) -> Wish {
        match self.context.distributed().size() {
            1 => self.asked_here(),
            _ => self.wish,
        }
    }

    /// Does what was asked for between two batches, which may be to end. A wish to leave is an error.
    pub(super) fn obey(&mut self) -> Result<()> {
        let asked = self.asked();
        if asked.ended {
            self.state.stopped.get_or_insert_with(|| "the program wants no more".into());
        }
        if asked.signal {
            return Err(self.leave(ExitCode::Preempted, "asked to stop by a signal"));
        }
        match asked.directive {
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

    /// At the end of the granted length, or where a callback has stopped, after a validation: saves,
    /// reports the result and asks. Says whether training is over.
    ///
    /// The checkpoint is whole before the result is reported, so that a trial whose result is known
    /// can be gone on with.
    pub(super) fn reach_length(&mut self) -> Result<bool> {
        let (batches, context) = (self.state.batches, self.context);
        context.tried(Part::Checkpoint, || {
            self.save()?;
            self.wait_for(Self::store)
        })?;
        self.try_restore()?;
        if !self.outlet().has_runner() {
            return Ok(true);
        }
        let mut told = self.reached_units();
        let mut event = self.validation_event(told);
        let mut num_unanswered = 0;
        loop {
            let answer = self.wait_for(|run| run.outlet().ask(batches, event));
            let answer = self.agree("end", answer)?[0];
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
                reached if reached == told => {
                    let batches_total = self.state.base + self.granted;
                    ReportEvent::Progress { batches_total, activity: None }
                }
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
        match self.asked().signal {
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

    /// Waits until all that was saved and reported is stored.
    pub(super) fn store(&mut self) -> Result<()> {
        let mut outlet = self.outlet();
        outlet.report_saved(true)?;
        outlet.flush()
    }

    /// Saves what is not saved, waits until it is stored and told; gives the error to leave with.
    fn leave(&mut self, code: ExitCode, why: &str) -> Error {
        let saved = self.save();
        let stored = self.wait_for(|run| saved.and_then(|()| run.store()));
        match stored.and_then(|()| self.end_hooks()) {
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

//! Changes by the user: edits, requests to reopen trials, and requests of commands.

use stoker_api::experiment::DesiredState;
use stoker_api::trial::DesiredTrialState;
use stoker_engine::trial;

use super::State;
use crate::cluster::text::now;
use crate::failure::Failure;
use crate::run::request::{Request, may_follow};

impl State {
    /// Takes in an edit. Returns whether it must wait until trials have ended.
    pub(super) fn edit(&mut self) -> Result<bool, Failure> {
        let trials = &self.trials;
        let edited =
            self.ledger.edit(&self.config, &self.summary, |index| trials.get(&index), now());
        let waits = edited.is_none();
        self.execute(edited.unwrap_or_default())?;
        Ok(waits)
    }

    /// Takes in a request to reopen trials. Returns whether there was one.
    pub(super) fn reopen(&mut self) -> Result<bool, Failure> {
        let (trials, request) = (&self.trials, self.experiment.spec.reopen);
        let writes = self.ledger.reopen(request, &self.summary, |index| trials.get(&index), now());
        let is_new = !writes.is_empty();
        self.execute(writes)?;
        Ok(is_new)
    }

    /// Takes in the requests of commands. A failed write is repeated.
    pub(crate) fn set_request(&mut self, request: Request) {
        if self.request != request {
            self.request = request;
            let _ = self.settle();
        }
    }

    /// Returns the desired state of the experiment, as recorded.
    pub(crate) fn desired_state(&self) -> DesiredState {
        self.experiment.spec.state
    }

    /// Returns whether no trial may start for now, because of a signal or of the desired state.
    pub(super) fn is_paused(&self) -> bool {
        self.is_pausing || self.desired_state() != DesiredState::Active
    }

    /// Returns whether the user wants the trial, or the experiment, to end at once.
    pub(crate) fn is_killed(&self, index: u32) -> bool {
        let is_kill = |state| state == DesiredTrialState::Kill;
        self.desired_state() == DesiredState::Killed
            || self.trials.get(&index).is_some_and(|record| is_kill(record.spec.desired_state))
    }

    /// Records the requests in the experiment and its trials, from when on they are in effect.
    pub(super) fn record_request(&mut self) -> Result<(), Failure> {
        let before = self.desired_state();
        if let Some(state) = self.request.state
            && state != before
            && may_follow(before, state)
        {
            let mut experiment = self.experiment.clone();
            experiment.spec.state = state;
            self.save_experiment(experiment)?;
            self.queue.touch_all(self.trials.keys());
        }
        for index in self.request.killed_trials.clone() {
            let record = self.trials.get(&index).filter(|record| trial::is_open(record));
            let Some(record) = record.filter(|_| !self.is_killed(index)) else { continue };
            let mut record = record.clone();
            record.spec.desired_state = DesiredTrialState::Kill;
            record.spec.desired_since = Some(now());
            self.save(record)?;
        }
        Ok(())
    }

    /// Takes in all facts without recording decisions about them, and closes all trials without an
    /// attempt: the experiment was cancelled. Its outcome depends on whether the search has ended.
    pub(super) fn end_search(&mut self) -> Result<(), Failure> {
        while let Some(touched) = self.queue.take_touched() {
            let records = touched.iter().filter_map(|index| self.trials.get(index));
            for fact in self.ledger.pending(records) {
                self.ledger.advance(&fact);
            }
            for index in touched {
                self.follow(index)?;
                self.enqueue(index);
            }
        }
        self.save_status()
    }
}

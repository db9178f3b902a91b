//! Changes by the user: edits, and requests to reopen trials.

use super::State;
use crate::cluster::text::now;
use crate::failure::Failure;

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
}

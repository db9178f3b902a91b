//! Recovery after a failed write of the record.

use std::time::{Duration, Instant};

use stoker_engine::experiment::Summary;

use super::writes::Waiting;
use super::{State, rebuild};
use crate::failure::Failure;
use crate::run::record::wait_to_write;

/// A failed write. The memory may differ from the record until it is read again.
#[derive(Debug)]
pub(super) struct Trouble {
    message: String,
    wait: Duration,
    pub(super) retry_at: Instant,
}

impl State {
    /// Notes that the record could not be written. Nothing is decided until it can.
    pub(crate) fn fail(&mut self, error: Failure) -> Failure {
        let before = self.trouble.as_ref().map(|trouble| trouble.wait);
        let wait = wait_to_write(before);
        let message = error.to_string();
        self.note(format!("{message}; running trials continue, trying again"));
        self.trouble = Some(Trouble { message, wait, retry_at: Instant::now() + wait });
        error
    }

    /// Repeats a failed write if it is due.
    pub(super) fn retry(&mut self) {
        if self.trouble.as_ref().is_some_and(|trouble| trouble.retry_at <= Instant::now()) {
            let _ = self.settle();
        }
    }

    /// Reads the record again after a failed write.
    ///
    /// # Errors
    ///
    /// The write failed a moment ago, or the record cannot be read.
    pub(super) fn recover(&mut self) -> Result<(), Failure> {
        let Some(trouble) = &self.trouble else { return Ok(()) };
        if trouble.retry_at > Instant::now() {
            return Err(Failure::System(trouble.message.clone()));
        }
        let read = self.read_again();
        read.map_err(|error| self.fail(error))
    }

    fn read_again(&mut self) -> Result<(), Failure> {
        let trials = self.folder.trials()?;
        let experiment = self.folder.experiment()?.unwrap_or_else(|| self.experiment.clone());
        let config = self.config.clone();
        let (ledger, missing) = rebuild(&config, &experiment, &trials, &self.folder)?;
        self.summary = Summary::new(&config, trials.values());
        (self.experiment, self.trials, self.ledger) = (experiment, trials, ledger);
        self.waiting = Waiting::default();
        self.uncopied.extend(self.trials.keys());
        self.queue.touch_all(self.trials.keys());
        self.end_unstarted()?;
        self.execute(missing)?;
        self.trouble = None;
        Ok(())
    }
}

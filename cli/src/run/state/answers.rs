//! Questions to an external searcher, and its answers.

use stoker_api::external::{Answer, Question};
use stoker_api::validate::ValidExperiment;
use stoker_engine::experiment::{Asked, Ledger, Refusal};
use stoker_searcher::AskError;

use super::{State, read_record};
use crate::cluster::text::now;
use crate::failure::Failure;
use crate::run::request::is_final;

impl State {
    /// Returns the question that the external searcher must answer now, if any. `is_first`: the
    /// searcher is a program that was just started, so it also needs all that came before.
    pub(crate) fn question(
        &self,
        valid: &ValidExperiment,
        uid: &str,
        is_first: bool,
    ) -> Option<(Asked, Question)> {
        let is_waiting = self.trouble.is_some() || self.is_paused();
        let asked = self.ledger.asks().filter(|_| !is_waiting)?;
        let tag_of = |trial| self.trials.get(&trial).and_then(|record| record.spec.tag.clone());
        let mut question = self.ledger.question(asked, valid, uid, tag_of);
        if is_first {
            let read = |record: stoker_engine::experiment::Record<'_>| {
                Ledger::history(&self.config, record)
            };
            let history = read_record(&self.experiment, &self.trials, &self.folder, read);
            question.history = Some(history.unwrap_or_default());
        }
        Some((asked, question))
    }

    /// Records an answer, and all that follows from it.
    ///
    /// # Errors
    ///
    /// Why the answer is refused.
    pub(crate) fn take_answer(&mut self, asked: Asked, answer: Answer) -> Result<(), AskError> {
        // The question is asked again once the record can be written, and never after the end.
        if self.recover().is_err() || is_final(self.desired_state()) {
            return Ok(());
        }
        let writes = self.ledger.answer(asked, answer, now());
        let writes = writes.map_err(|why| stoker_searcher::refused(&why))?;
        self.refusal = None;
        let settled: Result<(), Failure> = match self.execute(writes) {
            Ok(()) => {
                self.create_missing();
                self.settle()
            }
            Err(error) => Err(self.fail(error)),
        };
        // A failed write is repeated.
        let _ = settled;
        Ok(())
    }

    /// Shows why the external searcher has not answered, until it does.
    pub(crate) fn refuse(&mut self, error: &AskError) {
        let reason = error.reason().to_owned();
        self.refusal = Some(Refusal { reason, message: error.to_string() });
        self.note(format!("{error}; running trials continue, trying again"));
        // A failed write is repeated.
        let _ = self.settle();
    }
}

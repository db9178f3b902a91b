//! Asks the external searcher of a run, one question at a time.

use std::time::Duration;

use stoker_api::experiment::Searcher as SearcherSpec;
use stoker_api::external::Answer;
use stoker_engine::experiment::Asked;
use stoker_searcher::AskError;
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::{Runner, View};
use crate::failure::Failure;
use crate::searcher::{Searcher, Target};

/// End of a question.
pub(super) struct Outcome {
    asked: Asked,
    answer: Result<Answer, AskError>,
    /// The searcher, for the next question.
    searcher: Searcher,
}

/// External searcher of a run. Dropping it ends its program.
pub(super) struct Asker {
    /// Unset while a question is on its way.
    searcher: Option<Searcher>,
    questions: JoinSet<()>,
    outcomes: UnboundedReceiver<Outcome>,
    sender: UnboundedSender<Outcome>,
    num_failures: u32,
    /// Earliest time of the next question.
    ask_at: Instant,
}

impl std::fmt::Debug for Asker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Asker").field("searcher", &self.searcher).finish_non_exhaustive()
    }
}

impl Asker {
    /// Returns the asker of a search, if it has an external searcher.
    ///
    /// # Errors
    ///
    /// See [`Target::new`].
    pub(super) fn new(spec: &SearcherSpec) -> Result<Option<Self>, Failure> {
        let Some(search) = &spec.external else { return Ok(None) };
        let searcher = Some(Searcher::new(Target::new(search)?));
        let (sender, outcomes) = mpsc::unbounded_channel();
        let (questions, ask_at) = (JoinSet::new(), Instant::now());
        Ok(Some(Self { searcher, questions, outcomes, sender, num_failures: 0, ask_at }))
    }

    /// Returns the next outcome. Waits for ever without a searcher.
    pub(super) async fn outcome(asker: &mut Option<Self>) -> Outcome {
        let outcome = match asker {
            Some(asker) => asker.outcomes.recv().await,
            None => None,
        };
        match outcome {
            Some(outcome) => outcome,
            None => std::future::pending().await,
        }
    }
}

impl Runner<'_> {
    /// Asks the external searcher if a question is due, and none is on its way.
    pub(super) fn ask(&mut self) {
        let Some(asker) = &mut self.asker else { return };
        let Some(is_first) = asker.searcher.as_ref().map(Searcher::is_starting) else { return };
        if asker.ask_at > Instant::now() {
            return;
        }
        let question = self.shared.state().question(self.valid, &self.paths.uid, is_first);
        let Some((asked, question)) = question else { return };
        let Some(mut searcher) = asker.searcher.take() else { return };
        let sender = asker.sender.clone();
        asker.questions.spawn(async move {
            let answer = searcher.ask(&question).await;
            let _ = sender.send(Outcome { asked, answer, searcher });
        });
    }

    /// Records an answer, or tells the user why there is none.
    pub(super) fn take_answer(&mut self, outcome: Outcome, view: &View) {
        let Outcome { asked, answer, mut searcher } = outcome;
        let Some(asker) = &mut self.asker else { return };
        while asker.questions.try_join_next().is_some() {}
        let taken = answer.and_then(|answer| self.shared.state().take_answer(asked, answer));
        match taken {
            Ok(()) => asker.num_failures = 0,
            Err(error) => {
                // A program that was repaired meanwhile must be started again.
                searcher.restart();
                asker.num_failures += 1;
                let wait: Duration = stoker_searcher::back_off(asker.num_failures);
                asker.ask_at = Instant::now() + wait;
                self.shared.state().refuse(&error);
                if asker.num_failures == 1 {
                    view.print_message("the external searcher is asked again until it answers");
                }
            }
        }
        asker.searcher = Some(searcher);
    }

    /// Lets the program of the searcher end.
    pub(super) async fn finish_asking(&mut self) {
        if let Some(asker) = self.asker.take()
            && let Some(mut searcher) = asker.searcher
        {
            searcher.finish().await;
        }
    }
}

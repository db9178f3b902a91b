//! Answers of an external searcher, which arrive in no time.

use stoker_api::decisions::AnsweredEvent;
use stoker_api::external::{Action, Answer};

use super::{Run, SimulateError};
use crate::search::methods::DueQuestion;
use crate::search::state::{SearchState, Turn};
use crate::search::turn::Event;

/// Asks an external searcher. Gets the search, its question, and the tags of the trials.
pub type Ask<'a> =
    &'a mut dyn FnMut(&SearchState, DueQuestion, &[Option<String>]) -> Result<Answer, String>;

/// Answers for a search that asks no external searcher.
///
/// # Errors
///
/// Always.
pub fn no_searcher(
    _: &SearchState,
    _: DueQuestion,
    _: &[Option<String>],
) -> Result<Answer, String> {
    Err("this simulation has no external searcher".to_owned())
}

impl Run<'_> {
    /// Returns the turn of the events, and the turns of the answers to all questions that follow.
    pub(super) fn turns(&mut self, events: Vec<Event>) -> Result<Vec<Turn>, SimulateError> {
        let mut turns: Vec<Turn> = self.search.advance_all(events).into_iter().collect();
        while let Some(question) = self.search.question() {
            let DueQuestion { call, through } = question;
            let answer = (self.ask)(&self.search, question, &self.tags);
            let turn = answer.and_then(|Answer { call, actions }| {
                let tags = actions.iter().filter_map(|action| match action {
                    Action::Create(create) => Some(create.tag.clone()),
                    _ => None,
                });
                let tags: Vec<Option<String>> = tags.collect();
                let answered = AnsweredEvent { call, through, actions };
                let turn = self.search.answer(answered)?;
                self.tags.extend(tags);
                Ok(turn)
            });
            turns.extend(turn.map_err(|why| SimulateError::NoAnswer { call, why })?);
        }
        Ok(turns)
    }
}

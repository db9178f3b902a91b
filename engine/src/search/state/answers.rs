//! Questions to an external searcher, and its answers.

use stoker_api::decisions::AnsweredEvent;
use stoker_api::external::{
    ACTIONS_BYTES_MAX, Action, ClosedEvent, EditEvent, NoFields, OrderedEvent, ResultEvent,
    SearchEvent, TrialEvent,
};

use super::{AnyMethod, SearchState, Turn};
use crate::search::methods::DueQuestion;
use crate::search::rung::Loss;
use crate::search::turn::{Event, Step};

impl SearchState {
    /// Returns the question that the external searcher must answer now, if any.
    pub fn question(&self) -> Option<DueQuestion> {
        let is_over = self.book.is_finished() || self.book.is_limited();
        self.method.as_dyn().question().filter(|_| !is_over)
    }

    /// Returns the events that no answered question contained, with their positions, in order.
    pub fn unsent(&self) -> &[(u64, Event)] {
        match &self.method {
            AnyMethod::External(method) => method.unsent(),
            _ => &[],
        }
    }

    /// Returns the events of a question up to the position `through`. `directions` says for each
    /// objective whether smaller values are better, and `tag_of` returns the tag of a trial.
    pub fn events_through(
        &self,
        through: u64,
        directions: &[bool],
        tag_of: &dyn Fn(u32) -> Option<String>,
    ) -> Vec<OrderedEvent> {
        let asked = self.unsent().iter().take_while(|(order, _)| *order <= through);
        let ordered = |(order, event): &(u64, Event)| {
            let event = search_event(event, directions, tag_of)?;
            Some(OrderedEvent { order: *order, event })
        };
        asked.filter_map(ordered).collect()
    }

    /// Returns the number of answers so far.
    pub fn num_answers(&self) -> u64 {
        match &self.method {
            AnyMethod::External(method) => method.num_answers(),
            _ => 0,
        }
    }

    /// Takes in an answer. Returns `None` if the search has ended.
    ///
    /// # Errors
    ///
    /// Why the answer is refused. It changes nothing.
    pub fn answer(&mut self, answered: AnsweredEvent) -> Result<Option<Turn>, String> {
        let Some(question) = self.question() else { return Ok(None) };
        let steps = self.steps(question, &answered)?;
        Ok(self.advance_with(vec![Event::Answered(answered)], steps))
    }

    /// Checks that the records of trials on a cluster have space for what follows from an answer.
    ///
    /// # Errors
    ///
    /// Why the answer is refused.
    pub fn check_grants(&self, actions: &[Action]) -> Result<(), String> {
        match &self.method {
            AnyMethod::External(method) => method.check_grants(actions, &self.book),
            _ => Ok(()),
        }
    }

    fn steps(&self, question: DueQuestion, answered: &AnsweredEvent) -> Result<Vec<Step>, String> {
        let AnsweredEvent { call, through, actions } = answered;
        if *call != question.call {
            let expected = question.call;
            return Err(format!("call: {call}: the question had the call {expected}"));
        }
        let bytes = serde_json::to_vec(actions).map_or(usize::MAX, |json| json.len());
        if bytes > ACTIONS_BYTES_MAX {
            return Err(format!(
                "actions: {bytes} bytes: must take at most {ACTIONS_BYTES_MAX} bytes as JSON; \
                 create fewer trials in one answer"
            ));
        }
        match &self.method {
            AnyMethod::External(method) => method.steps(actions, *through, &self.book),
            _ => Ok(vec![]),
        }
    }

    /// Returns whether the search is not over because a question is due.
    pub(super) fn is_asking(&self) -> bool {
        self.method.as_dyn().question().is_some()
    }
}

/// Returns an event in the form in which an external searcher gets it. `None` for events that it
/// does not get.
pub fn search_event(
    event: &Event,
    directions: &[bool],
    tag_of: &dyn Fn(u32) -> Option<String>,
) -> Option<SearchEvent> {
    let metric = |(loss, smaller_is_better): (&Loss, &bool)| {
        loss.to_metric(*smaller_is_better).filter(|metric| metric.is_finite())
    };
    Some(match event {
        Event::Began => SearchEvent::Began(NoFields {}),
        Event::Result { trial, units, loss, others } => SearchEvent::Result(ResultEvent {
            trial: *trial,
            tag: tag_of(*trial),
            units: *units,
            metric: directions.first().and_then(|direction| metric((loss, direction))),
            values: others.iter().zip(directions.iter().skip(1)).map(metric).collect(),
        }),
        Event::Closed { trial, cause } => {
            SearchEvent::Closed(ClosedEvent { trial: *trial, tag: tag_of(*trial), cause: *cause })
        }
        Event::Deleted { trial } => SearchEvent::Deleted(TrialEvent { trial: *trial }),
        Event::Edited(edit) => SearchEvent::Edited(EditEvent {
            max_trials: edit.max_trials.unwrap_or_default(),
            max_concurrent_trials: edit.max_concurrent.unwrap_or_default(),
            max_length: edit.units_max,
        }),
        Event::LimitReached => SearchEvent::LimitReached(NoFields {}),
        Event::Answered(_) | Event::Reopened => return None,
    })
}

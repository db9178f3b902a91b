//! Questions to an external searcher, and its answers.
//!
//! An answer is a turn: its entry in the log is durable before any of its effects. An entry is
//! dropped once the next answer is recorded, because all its effects are in trials by then.

use serde_json::json;
use stoker_api::decisions::{AnsweredEvent, LogEntry, LogEvent, StepRecord};
use stoker_api::external::{
    Action, Answer, CreateAction, OrderedEvent, PROTOCOL_VERSION, Question, QuestionSpec,
};
use stoker_api::time::Timestamp;
use stoker_api::validate::ValidExperiment;

use super::{Ledger, Write};
use crate::search::SearchConfig;
use crate::search::turn::Step;

/// A question that was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked {
    /// Number of the question.
    pub call: u64,
    /// Position of its last event.
    pub through: u64,
}

impl Ledger {
    /// Returns the question that the external searcher must answer now, if any. All trials of the
    /// answers before it exist.
    pub fn asks(&self) -> Option<Asked> {
        let is_complete = self.has_begun && self.missing.is_empty();
        let question = self.search.question().filter(|_| is_complete)?;
        Some(Asked { call: question.call, through: question.through })
    }

    /// Returns the content of a question. `tag_of` returns the tag of a trial.
    pub fn question(
        &self,
        asked: Asked,
        valid: &ValidExperiment,
        uid: &str,
        tag_of: impl Fn(u32) -> Option<String>,
    ) -> Question {
        Question {
            version: PROTOCOL_VERSION,
            experiment: format!("{}-{}", self.config.experiment, uid.get(..8).unwrap_or(uid)),
            call: asked.call,
            spec: QuestionSpec {
                searcher: json!(valid.spec.searcher),
                hyperparameters: valid.spec.hyperparameters.clone(),
            },
            events: self.events(asked, &tag_of),
            history: None,
        }
    }

    /// Returns the number of answers so far.
    pub fn num_answers(&self) -> u64 {
        self.search.num_answers()
    }

    /// Returns the events of a question.
    pub fn events(
        &self,
        asked: Asked,
        tag_of: &dyn Fn(u32) -> Option<String>,
    ) -> Vec<OrderedEvent> {
        self.search.events_through(asked.through, &directions(&self.config), tag_of)
    }

    /// Takes in the answer to a question. Returns nothing if the question is not due any more.
    ///
    /// # Errors
    ///
    /// Why the answer is refused. It changes nothing, and the question stays due.
    pub fn answer(
        &mut self,
        asked: Asked,
        answer: Answer,
        now: Timestamp,
    ) -> Result<Vec<Write>, String> {
        if self.asks().is_none_or(|due| due.call != asked.call) {
            return Ok(vec![]);
        }
        let (call, actions) = (answer.call, answer.actions);
        let answered = AnsweredEvent { call, through: asked.through, actions };
        let turn = self.search.answer(answered.clone())?;
        let event = LogEvent::Answered(answered);
        Ok(turn.map(|turn| self.log(turn, event, now)).unwrap_or_default())
    }

    /// Same as [`answer`](Self::answer), on a cluster, where the record of a trial is bounded.
    ///
    /// # Errors
    ///
    /// See [`answer`](Self::answer).
    pub fn answer_on_cluster(
        &mut self,
        asked: Asked,
        answer: Answer,
        now: Timestamp,
    ) -> Result<Vec<Write>, String> {
        if self.asks().is_some_and(|due| due.call == asked.call) {
            self.search.check_grants(&answer.actions)?;
        }
        self.answer(asked, answer, now)
    }

    /// Adds the tags of trials that an answer creates, from index `next` on.
    pub(super) fn tag_missing(&mut self, event: &LogEvent, next: u32) {
        for (index, create) in (next..).zip(creates(event)) {
            if let Some(spec) = self.missing.get_mut(&index) {
                spec.tag.clone_from(&create.tag);
            }
        }
    }
}

/// Returns whether smaller values are better, for each objective.
pub(super) fn directions(config: &SearchConfig) -> Vec<bool> {
    let others = config.other_objectives.iter().map(|objective| objective.smaller_is_better);
    std::iter::once(config.smaller_is_better).chain(others).collect()
}

/// Appends an entry to a log. Drops the entry of the answer before, whose effects are durable,
/// unless it ended the search.
pub fn append(log: &mut Vec<LogEntry>, entry: LogEntry) {
    if matches!(entry.event, LogEvent::Answered(_)) {
        let is_end = |step: &StepRecord| matches!(step, StepRecord::Finish(_));
        log.retain(|earlier| {
            !matches!(earlier.event, LogEvent::Answered(_)) || earlier.steps.iter().any(is_end)
        });
    }
    log.push(entry);
}

fn creates(event: &LogEvent) -> impl Iterator<Item = &CreateAction> {
    let actions = match event {
        LogEvent::Answered(answered) => &answered.actions[..],
        _ => &[],
    };
    actions.iter().filter_map(|action| match action {
        Action::Create(create) => Some(create),
        _ => None,
    })
}

/// Adds the hyperparameters that an answer gives to the recorded steps of its turn.
pub(super) fn with_given(event: &LogEvent, mut steps: Vec<Step>) -> Vec<Step> {
    let created = steps.iter_mut().filter_map(|step| match step {
        Step::Create { hyperparameters, .. } => Some(hyperparameters),
        _ => None,
    });
    for (hyperparameters, create) in created.zip(creates(event)) {
        hyperparameters.clone_from(&create.hyperparameters);
    }
    steps
}

#[cfg(test)]
mod tests;

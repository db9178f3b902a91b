//! All that an external searcher was told and has answered, for a program that was restarted.

use stoker_api::external::{
    Action, ContinueAction, CreateAction, HistoryEntry, NoFields, OrderedEvent, TrialAction,
};
use stoker_api::time::Timestamp;

use super::answers::directions;
use super::{Ledger, Record, Unreadable};
use crate::search::SearchConfig;
use crate::search::state::{SearchState, Turn, search_event};
use crate::search::turn::{Event, Step};

impl Ledger {
    /// Returns the events of all answered questions, and the answers, in order. Of deleted trials,
    /// only their deletion is left.
    ///
    /// # Errors
    ///
    /// [`Unreadable`].
    pub fn history(
        config: &SearchConfig,
        record: Record<'_>,
    ) -> Result<Vec<HistoryEntry>, Unreadable> {
        let directions = directions(config);
        let tag_of = |trial: u32| record.trials.get(&trial).and_then(|of| of.spec.tag.clone());
        let mut entries = vec![];
        let mut watch = |search: &SearchState, turn: &Turn, _: Option<Timestamp>| {
            let events = turn.events.iter();
            let events = events.filter_map(|event| search_event(event, &directions, &tag_of));
            let order = turn.order;
            entries.extend(events.map(|event| HistoryEntry::Event(OrderedEvent { order, event })));
            // The events of an answer's turn are lost once its entry is dropped.
            let is_answer = matches!(turn.events[..], [] | [Event::Answered(_)]);
            let actions = if is_answer { actions(search, turn, record) } else { vec![] };
            if !actions.is_empty() {
                entries.push(HistoryEntry::Answer { order, actions });
            }
        };
        let (ledger, _) = Self::rebuild_with(config, record, &mut watch)?;
        let first_unsent = ledger.search.unsent().first().map_or(u64::MAX, |(order, _)| *order);
        entries.retain(|entry| match entry {
            HistoryEntry::Answer { .. } => true,
            HistoryEntry::Event(event) => event.order < first_unsent,
        });
        Ok(entries)
    }
}

/// Returns the actions of an answer that had effects. `search` is the search after its turn.
fn actions(search: &SearchState, turn: &Turn, record: Record<'_>) -> Vec<Action> {
    let is_end = turn.steps.contains(&Step::Finish);
    let changes = turn.changes.iter().filter_map(|change| match change.step {
        Step::Continue { trial, units } => Some(Action::Continue(ContinueAction { trial, units })),
        Step::Pause { trial } => Some(Action::Pause(TrialAction { trial })),
        Step::Stop { trial } if !is_end => Some(Action::Stop(TrialAction { trial })),
        _ => None,
    });
    let is_create = |step: &&Step| matches!(step, Step::Create { .. });
    let num_created = turn.steps.iter().filter(is_create).count() as u32;
    let next = search.book().next_index();
    let created = (next - num_created..next).filter_map(|trial| {
        let spec = &record.trials.get(&trial)?.spec;
        Some(Action::Create(CreateAction {
            trial: Some(trial),
            hyperparameters: Some(spec.hyperparameters.clone()),
            units: Some(spec.units),
            tag: spec.tag.clone(),
        }))
    });
    let end = is_end.then_some(Action::Finish(NoFields {}));
    changes.chain(created).chain(end).collect()
}

//! Explains the decisions of a search, from its record or while it runs.

use stoker_api::decisions::{LogEvent, StepRecord};
use stoker_api::time::Timestamp;

use super::{Ledger, PendingFact, Record, Unreadable, Write};
use crate::experiment::explain::{Context, Decision, Explainer, Explanation, decisions};
use crate::experiment::recorded;
use crate::search::SearchConfig;
use crate::search::book::TrialState;
use crate::search::state::{Change, SearchState, Turn};
use crate::search::turn::{Event, Step};

impl Ledger {
    /// Explains all decisions of a search from its record.
    ///
    /// # Errors
    ///
    /// [`Unreadable`].
    pub fn explain(config: &SearchConfig, record: Record<'_>) -> Result<Explanation, Unreadable> {
        let mut explainer = Explainer::new(config);
        let mut watch = |search: &SearchState, turn: &Turn, at: Option<Timestamp>| {
            explainer.take_in(search, turn, at);
        };
        let (ledger, _) = Self::rebuild_with(config, record, &mut watch)?;
        let ends = record.trials.iter().filter_map(|(index, trial)| {
            let is_open = ledger.state(*index)?.is_open();
            let num_placed = *ledger.num_placed.get(*index as usize)? as usize;
            let mut facts = (0..).zip(&trial.status.facts).skip(num_placed);
            let end =
                facts.find_map(|(fact, recorded)| match ledger.event(*index, fact, recorded) {
                    Some(Event::Closed { cause, .. }) => Some(cause),
                    _ => None,
                });
            end.filter(|_| is_open).map(|cause| (*index, cause))
        });
        Ok(explainer.finish(&ledger.search, &ends.collect()))
    }

    /// Returns the decisions of the turn that these writes record. It must be the latest one.
    /// `fact` is the fact of the turn, if it has one.
    pub fn decisions(&self, fact: Option<&PendingFact>, writes: &[Write]) -> Vec<Decision> {
        let is_home = |write: &&Write| !matches!(write, Write::Pin { .. });
        let (order, home, steps, at) = match writes.iter().find(is_home) {
            None | Some(Write::Pin { .. }) => return vec![],
            Some(Write::Log(entry)) => (entry.order, None, entry.steps.as_slice(), Some(entry.at)),
            Some(Write::Grant { trial, grant }) => {
                let at = fact.map(|fact| fact.at).filter(|at| *at != Timestamp::default());
                (grant.order, Some(*trial), grant.steps.as_deref().unwrap_or_default(), at)
            }
        };
        let event = fact.and_then(|fact| fact.event.as_ref());
        let own = home.map_or(vec![], |trial| self.own_changes(trial, event, steps));
        let effects = writes.iter().filter(is_home).skip(1).flat_map(|write| match write {
            Write::Grant { trial, grant } => changes(*trial, grant.units, grant.steps.as_deref()),
            Write::Log(_) | Write::Pin { .. } => vec![],
        });
        let turn = Turn {
            order,
            events: fact.map_or_else(|| logged(writes), |_| event.cloned().into_iter().collect()),
            steps: steps.iter().map(recorded::step).collect(),
            changes: own.into_iter().chain(effects).collect(),
            created: vec![],
            random_words: vec![],
        };
        decisions(Context::new(&self.config), &self.search, &turn, at)
    }

    /// Returns the change of the event's own trial by the steps of a turn.
    fn own_changes(&self, trial: u32, event: Option<&Event>, steps: &[StepRecord]) -> Vec<Change> {
        let entry = self.book().trial(trial);
        let before = match event {
            Some(Event::Result { units, .. }) => *units,
            _ => entry.units,
        };
        let mut own = changes(trial, before, Some(steps));
        // A step that stops all paused trials does not name them.
        let is_paused = own.last().is_some_and(|last| last.step == Step::Pause { trial });
        if is_paused && entry.state == TrialState::Stopped {
            own.push(Change { trial, units: entry.units, step: Step::Stop { trial } });
        }
        own
    }
}

/// Returns the events of a turn that the log records.
fn logged(writes: &[Write]) -> Vec<Event> {
    let logged = writes.iter().find_map(|write| match write {
        Write::Log(entry) => Some(entry),
        Write::Pin { .. } | Write::Grant { .. } => None,
    });
    let Some(entry) = logged else { return vec![] };
    match &entry.event {
        LogEvent::Began(_) => vec![Event::Began],
        LogEvent::LimitReached(_) => vec![Event::LimitReached],
        LogEvent::Reopened(_) => vec![Event::Reopened],
        LogEvent::Answered(event) => vec![Event::Answered(event.clone())],
        LogEvent::Edited(event) => vec![Event::Edited(event.into())],
        LogEvent::Deleted(deleted) => {
            deleted.trials.iter().map(|trial| Event::Deleted { trial: trial.index }).collect()
        }
    }
}

/// Returns the changes of a trial by recorded steps. The other steps leave its length at `units`.
fn changes(trial: u32, units: u64, steps: Option<&[StepRecord]>) -> Vec<Change> {
    let steps = steps.unwrap_or_default().iter().map(recorded::step);
    let is_own = |step: &Step| match step {
        Step::Continue { trial: of, .. }
        | Step::PromoteClosed { trial: of, .. }
        | Step::Pause { trial: of }
        | Step::Stop { trial: of } => *of == trial,
        Step::Reopen { trials } => trials[..] == [trial],
        Step::Create { .. } | Step::StopPaused { .. } | Step::StopAll | Step::Finish => false,
    };
    let change = |step: Step| match step {
        Step::Continue { units, .. } | Step::PromoteClosed { units, .. } => {
            Change { trial, units, step }
        }
        step => Change { trial, units, step },
    };
    steps.filter(is_own).map(change).collect()
}

//! Derives decisions from turns, and the explanation from all decisions.

use std::collections::BTreeMap;

use stoker_api::experiment::Unit;
use stoker_api::time::Timestamp;
use stoker_api::trial::CloseCause;

use super::{
    Cause, Comparison, Decision, Explanation, Kind, MedianComparison, Peer, State,
    TrialExplanation, brackets,
};
use crate::search::SearchConfig;
use crate::search::book::TrialState;
use crate::search::rung::Loss;
use crate::search::state::{Change, SearchState, Turn};
use crate::search::turn::{Event, Step};
use crate::search::view::{MedianStanding, Rule, Standing};

/// Properties of an experiment that its decisions depend on.
#[derive(Clone, Copy, Debug)]
pub(in crate::experiment) struct Context {
    pub(super) unit: Unit,
    pub(super) smaller_is_better: bool,
}

impl Context {
    /// Returns the context of a search.
    pub(in crate::experiment) fn new(config: &SearchConfig) -> Self {
        let SearchConfig { unit, smaller_is_better, .. } = *config;
        Self { unit, smaller_is_better }
    }

    pub(super) fn metric(self, loss: Loss) -> Option<f64> {
        loss.to_metric(self.smaller_is_better)
    }

    fn comparison(self, standing: &Standing) -> Comparison {
        let peer = |(trial, loss): &(u32, Loss)| Peer { trial: *trial, metric: self.metric(*loss) };
        Comparison {
            rung: standing.rung as u32 + 1,
            rungs: standing.num_rungs as u32,
            units: standing.units,
            metric: self.metric(standing.loss),
            rank: standing.rank as u32,
            results: standing.num_results as u32,
            continuing: standing.num_continuing as u32,
            continues: standing.continues,
            cut_metric: standing.cut.and_then(|loss| self.metric(loss)),
            required: standing.num_required as u32,
            missing: standing.num_missing as u32,
            compared_with: standing.peers.iter().map(peer).collect(),
        }
    }

    fn median(self, standing: &MedianStanding) -> MedianComparison {
        MedianComparison {
            best_metric: self.metric(standing.best),
            median: self.metric(standing.median),
            others: standing.num_others as u32,
        }
    }

    fn cause(self, events: &[Event]) -> Cause {
        let deleted = events.iter().filter_map(|event| match event {
            Event::Deleted { trial } => Some(*trial),
            _ => None,
        });
        match events.first() {
            Some(Event::Began) => Cause::Began,
            Some(Event::Result { trial, units, loss, .. }) => {
                Cause::Result { trial: *trial, units: *units, metric: self.metric(*loss) }
            }
            Some(Event::Closed { trial, .. }) => Cause::Ended { trial: *trial },
            Some(Event::LimitReached) => Cause::LimitReached,
            Some(Event::Edited(_)) => Cause::Edited,
            Some(Event::Answered(answered)) => Cause::Answered { call: answered.call },
            Some(Event::Reopened) => Cause::Reopened,
            Some(Event::Deleted { .. }) => Cause::Deleted { trials: deleted.collect() },
            None => Cause::Other,
        }
    }
}

/// Collects the decisions of one turn.
struct Collector<'a> {
    context: Context,
    search: &'a SearchState,
    order: u64,
    at: Option<Timestamp>,
    cause: Cause,
    has_brackets: bool,
    decisions: Vec<Decision>,
}

impl Collector<'_> {
    fn add(&mut self, trial: u32, decision: Kind, units: u64, standing: Option<Standing>) {
        let group = self.search.book().trial(trial).group;
        self.decisions.push(Decision {
            order: self.order,
            position: self.decisions.len() as u32,
            at: self.at,
            trial,
            bracket: self.has_brackets.then_some(group),
            decision,
            units,
            unit: self.context.unit,
            cause: self.cause.clone(),
            source: None,
            rule: self.search.rule(),
            comparison: standing.map(|standing| self.context.comparison(&standing)),
            median: None,
        });
    }

    /// Returns the rank of a trial that trained towards a rung and was granted `units`.
    fn standing_at_goal(&self, trial: u32, units: u64) -> Option<Standing> {
        let group = self.search.book().trial(trial).group;
        self.search.standing(trial, self.search.goal(group, units))
    }

    /// Adds the end of a trial by the search.
    fn add_stop(&mut self, trial: u32, units: u64) {
        let entry = self.search.book().trial(trial);
        let (group, trained) = (entry.group, entry.trained());
        let greatest = self.search.greatest_units(group);
        if self.cause == Cause::LimitReached && trained < greatest {
            return self.add(trial, Kind::Stopped, units, None);
        }
        if let Some(standing) = self.search.median_of(trial) {
            self.add(trial, Kind::Stopped, units, None);
            if let Some(decision) = self.decisions.last_mut() {
                decision.median = Some(self.context.median(&standing));
            }
            return;
        }
        let standing = self.search.standing(trial, units);
        let is_top = |standing: &Standing| standing.rung + 1 == standing.num_rungs;
        // Only an external searcher stops trials that still train.
        let reached = if self.search.rule() == Rule::External { trained } else { units };
        let has_full_length = standing.as_ref().map_or(reached >= greatest, is_top);
        let units = if has_full_length { units } else { reached };
        let kind = if has_full_length { Kind::Completed } else { Kind::Stopped };
        self.add(trial, kind, units, standing);
    }

    /// Adds the effect of the event on its own trial.
    fn add_event(&mut self, event: &Event, changes: &[Change]) {
        match *event {
            Event::Closed { trial, cause } => {
                // A promotion of an ended trial in the same turn changes its length.
                let is_own = |change: &&Change| change.trial == trial;
                let length = match changes.iter().find(is_own) {
                    Some(promoted) => promoted.units.saturating_sub(1),
                    None => self.search.book().trial(trial).units,
                };
                let standing = self.standing_at_goal(trial, length);
                let units = standing.as_ref().map_or(length, |standing| standing.units);
                self.add(trial, ended(cause), units, standing);
            }
            Event::Deleted { trial } => {
                let units = self.search.book().trial(trial).trained();
                self.add(trial, Kind::Deleted, units, None);
            }
            Event::Result { trial, units, .. }
                if changes.iter().all(|change| change.trial != trial) =>
            {
                let standing = self.search.standing(trial, units);
                self.add(trial, Kind::Waits, units, standing);
            }
            _ => {}
        }
    }

    fn add_change(&mut self, Change { trial, units, step }: &Change) {
        let (trial, units) = (*trial, *units);
        let below = units.saturating_sub(1);
        match step {
            Step::Continue { .. } => {
                let entry = self.search.book().trial(trial);
                let trained = entry.trained();
                if self.search.goal(entry.group, trained) > trained {
                    // A step on the way to the next rung, without a comparison.
                    return;
                }
                let standing = self.search.standing(trial, below);
                self.add(trial, Kind::Promoted, units, standing);
            }
            Step::PromoteClosed { .. } => {
                let standing = self.search.standing(trial, below);
                self.add(trial, Kind::CountedAsPromoted, units, standing);
            }
            Step::Pause { .. } => {
                let standing = self.search.standing(trial, units);
                self.add(trial, Kind::Paused, units, standing);
            }
            Step::Stop { .. } => self.add_stop(trial, units),
            Step::Reopen { .. } => {
                let entry = self.search.book().trial(trial);
                let (granted, state) = (entry.units, entry.state);
                self.add(trial, Kind::Reopened, granted, None);
                if state == TrialState::Paused {
                    let standing = self.search.standing(trial, granted);
                    self.add(trial, Kind::Paused, granted, standing);
                }
            }
            Step::Create { .. } | Step::StopPaused { .. } | Step::StopAll | Step::Finish => {}
        }
    }
}

fn ended(cause: CloseCause) -> Kind {
    match cause {
        CloseCause::Completed => Kind::Completed,
        CloseCause::StoppedEarly => Kind::EndedEarly,
        CloseCause::InvalidHyperparameters => Kind::Invalid,
        CloseCause::Failed => Kind::Failed,
        CloseCause::Cancelled => Kind::Cancelled,
        CloseCause::Deleted => Kind::Deleted,
    }
}

/// Returns the decisions of a turn: first the ends and waits of the events' own trials, then
/// the decisions about trials, then new trials. `search` is the search after the turn.
pub(in crate::experiment) fn decisions(
    context: Context,
    search: &SearchState,
    turn: &Turn,
    at: Option<Timestamp>,
) -> Vec<Decision> {
    let mut collector = Collector {
        context,
        search,
        order: turn.order,
        at,
        cause: context.cause(&turn.events),
        has_brackets: search.num_groups() > 1,
        decisions: vec![],
    };
    turn.events.iter().for_each(|event| collector.add_event(event, &turn.changes));
    for (number, change) in (1..).zip(&turn.changes) {
        // The last result of a bracket pauses its trial, and stops it with the other paused ones.
        let changes_again = |later: &Change| later.trial == change.trial;
        let is_final = !turn.changes[number..].iter().any(changes_again);
        if change.step != (Step::Pause { trial: change.trial }) || is_final {
            collector.add_change(change);
        }
    }
    let creates = turn.steps.iter().filter_map(|step| match step {
        Step::Create { units, source, .. } => Some((*units, *source)),
        _ => None,
    });
    let creates: Vec<_> = creates.collect();
    let next = search.book().next_index().saturating_sub(creates.len() as u32);
    for (trial, (units, source)) in (next..).zip(creates) {
        collector.add(trial, Kind::Created, units, None);
        if let Some(decision) = collector.decisions.last_mut() {
            decision.source = source.map(|source| source.trial);
        }
    }
    collector.decisions
}

/// Explains a search while its turns are taken in.
#[derive(Clone, Debug)]
pub(in crate::experiment) struct Explainer {
    context: Context,
    trials: Vec<Vec<Decision>>,
}

impl Explainer {
    /// Returns an explanation without decisions.
    pub(in crate::experiment) fn new(config: &SearchConfig) -> Self {
        Self { context: Context::new(config), trials: vec![] }
    }

    /// Takes in a turn. `search` is the search after the turn.
    pub(in crate::experiment) fn take_in(
        &mut self,
        search: &SearchState,
        turn: &Turn,
        at: Option<Timestamp>,
    ) {
        self.trials.resize(search.book().trials().len(), vec![]);
        for decision in decisions(self.context, search, turn, at) {
            self.trials[decision.trial as usize].push(decision);
        }
    }

    /// Returns the explanation. `search` is the search after the last turn, and `ends` are the
    /// recorded ends of trials that it has not taken in.
    pub(in crate::experiment) fn finish(
        mut self,
        search: &SearchState,
        ends: &BTreeMap<u32, CloseCause>,
    ) -> Explanation {
        // Trials without a decision are known only from their own records.
        self.trials.resize(search.book().trials().len(), vec![]);
        let context = self.context;
        let trials: Vec<TrialExplanation> = (0..)
            .zip(self.trials)
            .map(|(trial, decisions)| {
                let end = ends.get(&trial).and_then(|cause| state(ended(*cause)));
                TrialExplanation { end, ..explain(context, search, trial, decisions) }
            })
            .collect();
        let brackets = brackets::brackets(context, search, &trials);
        Explanation { trials, brackets }
    }
}

fn explain(
    context: Context,
    search: &SearchState,
    trial: u32,
    decisions: Vec<Decision>,
) -> TrialExplanation {
    let entry = search.book().trial(trial);
    let mut current = State::Training;
    let mut why = None;
    for decision in &decisions {
        // A trial that is open here has ended too, but the record of its end was deleted.
        let is_lost = decision.decision == Kind::CountedAsPromoted && current < State::Stopped;
        let next = if is_lost { Some(State::Failed) } else { state(decision.decision) };
        if let Some(next) = next {
            current = next;
            why = Some(decision.clone());
        }
    }
    let state = current;
    if let Some(why) = why.as_mut().filter(|_| matches!(state, State::Paused | State::Waiting)) {
        let standing = search.standing(trial, entry.units);
        why.comparison = standing.map(|standing| context.comparison(&standing));
    }
    let (bracket, units) = (entry.group, entry.units);
    TrialExplanation { trial, bracket, state, end: None, units, why, decisions }
}

/// Returns the state after a decision; `None` if it stays.
fn state(decision: Kind) -> Option<State> {
    match decision {
        Kind::Created | Kind::Promoted | Kind::Reopened => Some(State::Training),
        Kind::CountedAsPromoted => None,
        Kind::Paused => Some(State::Paused),
        Kind::Waits => Some(State::Waiting),
        Kind::Stopped => Some(State::Stopped),
        Kind::Completed => Some(State::Completed),
        Kind::EndedEarly => Some(State::EndedEarly),
        Kind::Failed => Some(State::Failed),
        Kind::Invalid => Some(State::Invalid),
        Kind::Cancelled => Some(State::Cancelled),
        Kind::Deleted => Some(State::Deleted),
    }
}

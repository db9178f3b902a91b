//! Rebuilds the search of an experiment from its record.

mod homes;
mod indices;

use std::collections::BTreeMap;

use stoker_api::decisions::{
    DeletedEvent, DeletedTrial, LogEntry, LogEvent, PriorTrial, StepRecord,
};
use stoker_api::time::Timestamp;
use stoker_api::trial::{Grant, TrialSource, TrialSpec};

use self::homes::{Home, homes, unreadable};
use self::indices::check_indices;
use super::answers;
use super::edits::settings;
use super::sources::Sources;
use super::{Ledger, Record, Unreadable, Write, effects, groups, search_of};
use crate::experiment::recorded;
use crate::search::SearchConfig;
use crate::search::state::{self as search, RecordedDraw, SearchState};
use crate::search::turn::{Event, Step};

/// Observer of replayed turns: gets the search after the turn, the turn and its time.
pub(super) type Watch<'a> = &'a mut dyn FnMut(&SearchState, &search::Turn, Option<Timestamp>);

/// Returns the trials of earlier experiments that the beginning of a search recorded.
fn prior(entry: &LogEntry) -> Option<&[PriorTrial]> {
    match &entry.event {
        LogEvent::Began(event) => Some(&event.prior_trials),
        LogEvent::Edited(_)
        | LogEvent::Deleted(_)
        | LogEvent::LimitReached(_)
        | LogEvent::Answered(_)
        | LogEvent::Reopened(_) => None,
    }
}

/// Content of a recorded turn.
struct Turn {
    events: Vec<Event>,
    /// Unset in records of earlier versions.
    steps: Option<Vec<Step>>,
    /// Greatest index of a trial that existed before the steps.
    last_mentioned: Option<u32>,
    /// Sources of the copies that the steps create, by copy.
    sources: Vec<(u32, TrialSource)>,
}

impl Ledger {
    /// Rebuilds the search from its record. Also returns the effects that are missing in it.
    ///
    /// # Errors
    ///
    /// [`Unreadable`].
    pub fn rebuild(
        config: &SearchConfig,
        record: Record<'_>,
    ) -> Result<(Self, Vec<Write>), Unreadable> {
        Self::rebuild_with(config, record, &mut |_, _, _| {})
    }

    /// Rebuilds the search. `watch` gets each turn with the search after it and its time.
    pub(super) fn rebuild_with(
        config: &SearchConfig,
        record: Record<'_>,
        watch: Watch<'_>,
    ) -> Result<(Self, Vec<Write>), Unreadable> {
        check_indices(record)?;
        let initial = record.log.iter().find_map(settings);
        let config = initial.map_or_else(|| config.clone(), |initial| config.with(initial));
        let mut ledger = Self {
            search: search_of(&config, record.log.iter().find_map(prior).unwrap_or_default()),
            continued_length: config.settings().max_length,
            config,
            num_placed: vec![],
            granted_in: vec![],
            random_words: vec![],
            missing: BTreeMap::new(),
            sources: Sources::default(),
            has_begun: false,
            began_at: None,
            limit_reached: None,
            has_settings: false,
            last_request: 0,
            reopenings: BTreeMap::new(),
        };
        let mut writes = vec![];
        if record.log.is_empty() && (record.trials_created > 0 || !record.trials.is_empty()) {
            ledger.begin_old_record(record, watch)?;
        }
        for (order, home) in homes(record)? {
            ledger.replay(order, &home, record, &mut writes, watch)?;
        }
        ledger.adopt(first_unused(record), record);
        ledger.skip_facts(record);
        Ok((ledger, writes))
    }

    /// Derives the first turn of a record by a version that did not record steps.
    fn begin_old_record(&mut self, record: Record<'_>, watch: Watch<'_>) -> Result<(), Unreadable> {
        // Only the first turn of a newer version has this position, and it is in the log.
        if let Some(trial) = record.trials.values().find(|trial| trial.spec.order == Some(0)) {
            return Err(Unreadable {
                object: "the experiment".to_owned(),
                field: "status.log".to_owned(),
                reason: format!(
                    "is empty, but trial {} refers to it; install the custom resource definitions \
                     of this version, or restore the field",
                    trial.spec.index
                ),
            });
        }
        self.derive(0, Event::Began, record, (None, watch));
        Ok(())
    }

    /// Decides the event of a turn whose steps were not recorded.
    fn derive(
        &mut self,
        order: u64,
        event: Event,
        record: Record<'_>,
        (at, watch): (Option<Timestamp>, Watch<'_>),
    ) {
        self.has_begun = true;
        self.search.ignore_failures();
        let end = first_unused(record);
        if let Some(turn) = self.search.advance(event) {
            self.note(order, &turn.changes);
            watch(&self.search, &turn, at);
            for (draw, random_words) in turn.created.into_iter().zip(turn.random_words) {
                let index = draw.index;
                self.admit(order, random_words);
                if index >= end {
                    let spec = draw.into_spec(&self.config.experiment, self.config.unit);
                    let random_words = Some(random_words);
                    self.missing.insert(index, TrialSpec { random_words, ..spec });
                }
            }
        }
    }

    fn replay(
        &mut self,
        order: u64,
        home: &Home<'_>,
        record: Record<'_>,
        writes: &mut Vec<Write>,
        watch: Watch<'_>,
    ) -> Result<(), Unreadable> {
        let at = home.time(record);
        let Turn { events, steps, last_mentioned, sources } = self.content(order, home, record)?;
        let Some(steps) = steps else {
            events.into_iter().for_each(|event| self.derive(order, event, record, (at, watch)));
            self.search.skip_to_order(order + 1);
            return self.place(home, order);
        };
        self.has_begun = true;
        if let Home::Log(entry) = home {
            self.note_entry(&entry.event, entry.at);
        }
        let deleted = match home {
            Home::Log(LogEntry { event: LogEvent::Deleted(deleted), .. }) => &deleted.trials[..],
            _ => &[],
        };
        // Trials that are known only from this turn were created before it.
        let last = deleted.iter().map(|trial| trial.index).chain(last_mentioned).max();
        self.adopt(last.map_or(0, |last| last.saturating_add(1)), record);
        let end = first_unused(record);
        let next = self.search.book().next_index();
        let drawn = (next..).map(|index| match record.trials.get(&index) {
            Some(trial) => RecordedDraw::Present {
                hyperparameters: trial.spec.hyperparameters.clone(),
                random_words: trial.spec.random_words.unwrap_or(0),
            },
            None if index < end => RecordedDraw::Deleted {
                random_words: deleted_trial(index, record).map(|trial| trial.random_words),
            },
            None => RecordedDraw::Missing,
        });
        if let Home::Grant(trial, grant) = home {
            self.note_rejection(*trial, grant, &events, record);
        }
        let replayed = self.search.replay(order, &events, &steps, drawn);
        let turn = replayed.map_err(|error| unreadable(home, order, error.reason))?;
        turn.random_words.iter().for_each(|words| self.admit(order, *words));
        // The turn that deletes a copy records and forgets its source.
        self.sources.note_copies(sources);
        self.forget(&deleted.iter().map(|trial| trial.index).collect::<Vec<_>>());
        self.place_facts_again(&steps, record);
        self.note(order, &turn.changes);
        let groups = groups(&steps, next);
        self.add_missing(&turn, next, &groups);
        if let Home::Log(entry) = home {
            self.tag_missing(&entry.event, next);
        }
        self.note_missing_effects(&turn);
        watch(&self.search, &turn, at);
        if let Home::Grant(trial, grant) = home {
            self.note_result(*trial, grant, record);
        }
        self.place(home, order)?;
        writes.extend(missing_effects(&turn, home, record));
        Ok(())
    }

    /// Records that the fact of a turn has its place.
    fn place(&mut self, home: &Home<'_>, order: u64) -> Result<(), Unreadable> {
        let Home::Grant(trial, grant) = home else { return Ok(()) };
        let Some(num_placed) = self.num_placed.get_mut(*trial as usize) else {
            return Err(unreadable(home, order, "belongs to a trial that no turn created"));
        };
        *num_placed = grant.fact.map_or(0, |fact| fact + 1);
        Ok(())
    }

    /// Returns the events and steps of a recorded turn. Without steps, an earlier version recorded
    /// it.
    fn content(&self, order: u64, home: &Home<'_>, record: Record<'_>) -> Result<Turn, Unreadable> {
        let steps = |steps: &[StepRecord]| steps.iter().map(recorded::step).collect::<Vec<_>>();
        Ok(match home {
            Home::Log(entry) => {
                let events = match &entry.event {
                    LogEvent::Began(_) => vec![Event::Began],
                    LogEvent::Edited(event) => vec![Event::Edited(event.into())],
                    LogEvent::LimitReached(_) => vec![Event::LimitReached],
                    LogEvent::Answered(event) => vec![Event::Answered(event.clone())],
                    LogEvent::Reopened(_) => vec![Event::Reopened],
                    LogEvent::Deleted(DeletedEvent { trials }) => {
                        trials.iter().map(|trial| Event::Deleted { trial: trial.index }).collect()
                    }
                };
                let last_mentioned = recorded::last_mentioned(&entry.steps);
                let sources = recorded::sources(&entry.steps).collect();
                let steps = answers::with_given(&entry.event, steps(&entry.steps));
                Turn { events, steps: Some(steps), last_mentioned, sources }
            }
            Home::Grant(trial, grant) => {
                let facts = record.trials.get(trial).map(|trial| &trial.status.facts);
                let index = grant.fact.unwrap_or(0) as usize;
                let Some(fact) = facts.and_then(|facts| facts.get(index)) else {
                    return Err(unreadable(home, order, "refers to a fact that does not exist"));
                };
                let event = recorded::event(*trial, fact, &self.config);
                let recorded = grant.steps.as_deref();
                let last_mentioned = recorded.and_then(recorded::last_mentioned);
                let sources = recorded::sources(recorded.unwrap_or_default()).collect();
                Turn {
                    events: event.into_iter().collect(),
                    steps: recorded.map(steps),
                    last_mentioned,
                    sources,
                }
            }
            Home::Deleted => {
                let (mut left, mut sources) = (vec![], vec![]);
                let mut created = BTreeMap::new();
                for (trial, record) in record.trials {
                    let is_effect = |grant: &&Grant| grant.order == order && grant.fact.is_none();
                    let effect = record.spec.grants.iter().find(is_effect);
                    left.extend(steps(
                        effect.and_then(|grant| grant.steps.as_deref()).unwrap_or(&[]),
                    ));
                    if record.spec.order == Some(order) {
                        created.insert(*trial, create(&record.spec));
                        sources.extend(record.spec.source.clone().map(|source| (*trial, source)));
                    }
                }
                let first = created.first_key_value().map(|(trial, _)| *trial);
                if let (Some(first), Some((last, _))) = (first, created.last_key_value()) {
                    // Trials between those that are left were deleted too.
                    for trial in first..=*last {
                        let lost = || self.lost_creation(deleted_trial(trial, record));
                        left.push(created.get(&trial).cloned().unwrap_or_else(lost));
                    }
                }
                let last_mentioned = first.and_then(|first| first.checked_sub(1));
                Turn { events: vec![], steps: Some(left), last_mentioned, sources }
            }
        })
    }

    /// Skips facts that no turn follows from, such as the ends that the search asked for.
    fn skip_facts(&mut self, record: Record<'_>) {
        for (trial, of_trial) in record.trials {
            let Some(&num_placed) = self.num_placed.get(*trial as usize) else { continue };
            let facts = (0..).zip(&of_trial.status.facts).skip(num_placed as usize);
            let events = facts.map(|(index, fact)| self.event(*trial, index, fact));
            let is_skipped = |event: &Option<Event>| {
                event.as_ref().is_none_or(|event| !self.search.accepts(event))
            };
            let num_skipped = events.take_while(is_skipped).count();
            self.num_placed[*trial as usize] += num_skipped as u32;
        }
    }

    /// Takes in the trials up to `first`. Of most of them, the turn that created them was deleted,
    /// and so were they.
    fn adopt(&mut self, first: u32, record: Record<'_>) {
        while self.search.book().next_index() < first {
            let index = self.search.book().next_index();
            let spec = record.trials.get(&index).map(|trial| &trial.spec);
            let deleted = deleted_trial(index, record);
            let random_words = deleted.map(|trial| trial.random_words);
            let step = spec.map_or_else(|| self.lost_creation(deleted), create);
            if let Some(source) = spec.and_then(|spec| spec.source.clone()) {
                self.sources.note_copy(index, source);
            }
            let drawn =
                spec.map_or(RecordedDraw::Deleted { random_words }, |spec| RecordedDraw::Present {
                    hyperparameters: spec.hyperparameters.clone(),
                    random_words: spec.random_words.unwrap_or(0),
                });
            let order = spec.and_then(|spec| spec.order).unwrap_or(0);
            if !self.search.adopt(&step, drawn) {
                return;
            }
            self.admit(order, self.search.random_words());
        }
    }
}

/// Returns the effects of a turn that the record lacks. Those of a deleted home are complete.
fn missing_effects(turn: &search::Turn, home: &Home<'_>, record: Record<'_>) -> Vec<Write> {
    let home_trial = match home {
        Home::Grant(trial, _) => Some(*trial),
        Home::Log(_) => None,
        Home::Deleted => return vec![],
    };
    let has_effect = |write: &Write| match write {
        Write::Log(_) => true,
        Write::Grant { trial, grant } => record.trials.get(trial).is_none_or(|trial| {
            trial.spec.grants.iter().any(|recorded| recorded.order == grant.order)
        }),
        // Pins are durable before the home.
        Write::Pin { .. } => true,
    };
    effects(turn, home_trial).filter(|write| !has_effect(write)).collect()
}

/// Returns the step that created a trial.
fn create(spec: &TrialSpec) -> Step {
    recorded::create(spec.group, spec.units, spec.source.as_ref())
}

/// Returns a trial from the log of deletions.
fn deleted_trial<'a>(index: u32, record: Record<'a>) -> Option<&'a DeletedTrial> {
    let deleted = record.log.iter().filter_map(|entry| match &entry.event {
        LogEvent::Deleted(deleted) => Some(&deleted.trials),
        LogEvent::Began(_)
        | LogEvent::Edited(_)
        | LogEvent::LimitReached(_)
        | LogEvent::Answered(_)
        | LogEvent::Reopened(_) => None,
    });
    deleted.flatten().find(|trial| trial.index == index)
}

/// Returns the first index that no trial has had.
fn first_unused(record: Record<'_>) -> u32 {
    let last = record.trials.keys().next_back().map_or(0, |index| index.saturating_add(1));
    last.max(record.trials_created)
}

//! Properties of every search method, under random events.

mod population;
mod records;

use std::collections::BTreeSet;

use proptest::prelude::*;
use stoker_api::experiment::{MedianStopping, SearchMode};
use stoker_api::hyperparameters::Space;
use stoker_api::trial::CloseCause;

use super::*;
use crate::search::book::{TrialEntry, TrialState};
use crate::search::layout::{self, AdaptiveAsha};
use crate::search::methods::{
    AsyncHalving, FixedLength, Median, Pbt, PbtConfig, SyncHalving, Tournament,
};
use crate::search::rung::Loss;
use crate::search::samplers::Explore;
use crate::search::turn::Edit;

fn space() -> Space {
    let parameters = serde_json::json!({
        "net": { "oneOf": [
            { "kind": "deep", "depth": { "int": { "min": 2, "max": 9 } } },
            { "kind": "flat" },
        ] },
        "x": { "double": { "min": 0.0, "max": 1.0 } },
    });
    let spec = serde_json::from_value(serde_json::json!({
        "entrypoint": { "command": ["true"] },
        "hyperparameters": parameters,
        "searcher": { "metric": "loss", "maxLength": { "batches": 1 }, "single": {} },
    }));
    stoker_api::validate::validate("space", &spec.unwrap()).unwrap().space
}

/// Returns one search of each kind, by name.
fn methods() -> Vec<(&'static str, AnyMethod)> {
    let async_halving = |concurrency, stop_once| {
        let config = layout::async_halving(9, 3, 3, 14, concurrency, stop_once);
        AnyMethod::AsyncHalving(AsyncHalving::new(config))
    };
    let adaptive = AdaptiveAsha {
        units: 16,
        max_trials: 20,
        mode: SearchMode::Conservative,
        divisor: 2,
        max_rungs: 3,
        bracket_rungs: vec![],
        concurrency: 5,
        stop_once: false,
    };
    let pbt = PbtConfig { population_size: 5, units_per_round: 3, num_rounds: 4, num_truncated: 2 };
    let sync =
        |brackets, concurrency| AnyMethod::SyncHalving(SyncHalving::new(brackets, concurrency));
    let median = |inner| {
        let rule = MedianStopping { start_units: 2, every_units: 2, min_trials: 2 };
        AnyMethod::Median(Median::new(inner, rule))
    };
    let random = || AnyMethod::FixedLength(FixedLength::new(9, 8, 3, true));
    vec![
        ("random", random()),
        ("promotion", async_halving(3, false)),
        ("promotion without limit", async_halving(0, false)),
        ("stopping", async_halving(4, true)),
        ("adaptive ASHA", AnyMethod::Tournament(Tournament::new(adaptive.brackets()))),
        ("hyperband", sync(layout::hyperband(9, 3, 0), 4)),
        ("synchronous halving", sync(vec![layout::sync_halving(9, 3, 3, 60)], 0)),
        ("pbt", AnyMethod::Pbt(Pbt::new(pbt))),
        ("random with median stopping", median(random())),
        ("promotion with median stopping", median(async_halving(3, false))),
        ("stopping with median stopping", median(async_halving(4, true))),
        ("hyperband with median stopping", median(sync(layout::hyperband(9, 3, 0), 4))),
        ("pbt with median stopping", median(AnyMethod::Pbt(Pbt::new(pbt)))),
    ]
}

/// Random event of a trial or of the user.
#[derive(Clone, Copy, Debug)]
enum Happening {
    Result(f64),
    Closed(CloseCause),
    Deleted,
    /// The user continues all trials that ended by themselves.
    Reopened,
    /// A limit ends the search, and the user removes it.
    Limited,
}

fn happening() -> impl Strategy<Value = Happening> {
    // Few different losses, so that many are equal.
    let loss = prop_oneof![
        8 => (0..6_u8).prop_map(f64::from),
        1 => Just(f64::NAN),
    ];
    prop_oneof![
        20 => loss.prop_map(Happening::Result),
        1 => Just(Happening::Closed(CloseCause::Failed)),
        1 => Just(Happening::Closed(CloseCause::InvalidHyperparameters)),
        1 => Just(Happening::Closed(CloseCause::StoppedEarly)),
        1 => Just(Happening::Deleted),
        1 => Just(Happening::Reopened),
        1 => Just(Happening::Limited),
    ]
}

/// A search with its log.
struct Recorded {
    search: SearchState,
    log: Vec<Turn>,
    fresh: SearchState,
}

impl Recorded {
    fn new(name: &str, method: AnyMethod) -> Self {
        let sampler = match &method {
            _ if name.starts_with("pbt") => Sampler::explore(Explore {
                space: space(),
                resample_probability: 0.3,
                perturb_factor: 0.2,
            }),
            AnyMethod::FixedLength(_) | AnyMethod::AsyncHalving(_) => Sampler::tpe(space(), false),
            AnyMethod::Tournament(_) => Sampler::sobol(space(), 7),
            _ => Sampler::Random(space()),
        };
        let fresh = SearchState::new(method, sampler, 7);
        let mut recorded = Self { search: fresh.clone(), log: vec![], fresh };
        recorded.advance(Event::Began);
        recorded
    }

    fn advance(&mut self, event: Event) {
        if let Some(turn) = self.search.advance(event) {
            self.log.push(turn);
        }
    }

    /// Reopens the trials in these states for which the method has use.
    fn reopen(&mut self, event: Event, is_meant: impl Fn(&TrialEntry) -> bool) {
        let trials = (0..).zip(self.search.book().trials());
        let is_meant =
            |(trial, entry): &(u32, &TrialEntry)| is_meant(entry) && self.search.may_reopen(*trial);
        let trials = trials.filter(is_meant).map(|(trial, _)| trial).collect();
        self.log.extend(self.search.reopen(event, trials));
    }

    fn trials_in(&self, is_meant: impl Fn(TrialState) -> bool) -> Vec<u32> {
        let trials = (0..).zip(self.search.book().trials());
        trials.filter(|(_, entry)| is_meant(entry.state)).map(|(trial, _)| trial).collect()
    }

    fn happen(&mut self, happening: Happening, choice: usize) {
        let pick = |trials: &[u32]| (!trials.is_empty()).then(|| trials[choice % trials.len()]);
        match happening {
            Happening::Result(loss) => {
                if let Some(trial) = pick(&self.trials_in(|state| state == TrialState::Active)) {
                    let units = self.search.book().trial(trial).units;
                    let loss = Loss::new(loss);
                    // A second objective, opposite to the first one.
                    let others = vec![Loss::new(-loss.value())];
                    self.advance(Event::Result { trial, units, loss, others });
                }
            }
            Happening::Closed(cause) => {
                if let Some(trial) = pick(&self.trials_in(TrialState::is_open)) {
                    self.advance(Event::Closed { trial, cause });
                }
            }
            Happening::Deleted => {
                if let Some(trial) = pick(&self.trials_in(|state| state != TrialState::Deleted)) {
                    self.advance(Event::Deleted { trial });
                }
            }
            Happening::Reopened => {
                let causes = [CloseCause::Failed, CloseCause::StoppedEarly].map(TrialState::Closed);
                self.reopen(Event::Reopened, |entry| causes.contains(&entry.state));
            }
            Happening::Limited => {
                self.advance(Event::LimitReached);
                let edit = Edit {
                    max_trials: None,
                    max_concurrent: None,
                    units_max: 0,
                    is_limited: false,
                    bracket_trials: vec![],
                };
                self.reopen(Event::Edited(edit), |entry| entry.is_cut);
            }
        }
    }

    /// Rebuilds the search from its log, without the turns that were recorded in deleted trials. Of
    /// those, only the effects on other trials are left.
    fn rebuilt(&self) -> SearchState {
        let deleted: BTreeSet<u32> =
            self.trials_in(|state| state == TrialState::Deleted).into_iter().collect();
        let mut rebuilt = self.fresh.clone();
        for turn in &self.log {
            let home = match &turn.events[0] {
                Event::Result { trial, .. } | Event::Closed { trial, .. } => Some(*trial),
                Event::Began
                | Event::Deleted { .. }
                | Event::LimitReached
                | Event::Edited(_)
                | Event::Answered(_)
                | Event::Reopened => None,
            };
            let is_lost = home.is_some_and(|home| deleted.contains(&home));
            let effects: Vec<Step> = turn
                .steps
                .iter()
                .filter(|step| {
                    !is_lost || step_trial(step).is_none_or(|trial| !deleted.contains(&trial))
                })
                .cloned()
                .collect();
            let events = if is_lost { &[] } else { &turn.events[..] };
            let created = turn.created.iter().zip(&turn.random_words).map(
                |(draw, random_words)| match deleted.contains(&draw.index) {
                    true => RecordedDraw::Deleted { random_words: Some(*random_words) },
                    false => RecordedDraw::Present {
                        hyperparameters: draw.hyperparameters.clone(),
                        random_words: *random_words,
                    },
                },
            );
            rebuilt.replay(turn.order, events, &effects, created).unwrap();
        }
        rebuilt
    }
}

fn step_trial(step: &Step) -> Option<u32> {
    match step {
        Step::Continue { trial, .. }
        | Step::PromoteClosed { trial, .. }
        | Step::Pause { trial }
        | Step::Stop { trial } => Some(*trial),
        Step::Create { .. }
        | Step::StopPaused { .. }
        | Step::StopAll
        | Step::Reopen { .. }
        | Step::Finish => None,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn rebuilt_search_equals_the_live_one(
        happenings in prop::collection::vec((happening(), any::<usize>()), 0..120),
    ) {
        for (name, method) in methods() {
            let mut recorded = Recorded::new(name, method);
            for (happening, choice) in &happenings {
                recorded.happen(*happening, *choice);
                prop_assert_eq!(&recorded.rebuilt(), &recorded.search, "{}", name);
            }
        }
    }

    #[test]
    fn every_search_ends(
        happenings in prop::collection::vec((happening(), any::<usize>()), 0..60),
    ) {
        for (name, method) in methods() {
            let mut recorded = Recorded::new(name, method);
            for (happening, choice) in &happenings {
                recorded.happen(*happening, *choice);
            }
            for choice in 0..1000 {
                recorded.happen(Happening::Result((choice % 5) as f64), choice);
            }
            let book = recorded.search.book();
            prop_assert!(book.is_finished(), "{}: {:?}", name, book);
            prop_assert_eq!(book.num_open(), 0, "{}", name);
            let finishes = recorded.log.iter().flat_map(|turn| &turn.steps);
            let num = finishes.filter(|step| **step == Step::Finish).count();
            let continues = |event: &&Event| matches!(event, Event::Edited(_) | Event::Reopened);
            let events = recorded.log.iter().flat_map(|turn| &turn.events);
            let num_continued = events.filter(continues).count();
            prop_assert!((1..=1 + 2 * num_continued).contains(&num), "{}: {}", name, num);
        }
    }

    /// Repeated, late and foreign events change nothing.
    #[test]
    fn unexpected_events_change_nothing(
        happenings in prop::collection::vec((happening(), any::<usize>()), 0..60),
    ) {
        for (name, method) in methods() {
            let mut recorded = Recorded::new(name, method);
            for (happening, choice) in &happenings {
                recorded.happen(*happening, *choice);
            }
            let before = recorded.search.clone();
            let turns = recorded.log.iter();
            // An end or a limit may occur again after the trial or the search was continued.
            let is_once = |event: &Event| {
                matches!(event, Event::Began | Event::Result { .. } | Event::Deleted { .. })
            };
            let events = turns.flat_map(|turn| turn.events.clone());
            let events: Vec<Event> = events.filter(is_once).collect();
            for event in events {
                prop_assert_eq!(recorded.search.advance(event), None, "{}", name);
            }
            let foreign = Event::Result {
                trial: 9999,
                units: 1,
                loss: Loss::INFINITE,
                others: vec![],
            };
            prop_assert_eq!(recorded.search.advance(foreign), None, "{}", name);
            prop_assert_eq!(&recorded.search, &before, "{}", name);
        }
    }
}

fn random() -> SearchState {
    let method = AnyMethod::FixedLength(FixedLength::new(9, 2, 2, true));
    SearchState::new(method, Sampler::sobol(space(), 7), 7)
}

fn result(trial: u32) -> Event {
    Event::Result { trial, units: 9, loss: Loss::new(0.5), others: vec![] }
}

#[test]
fn reserved_positions_are_skipped() {
    let mut search = random();
    assert_eq!(search.advance(Event::Began).unwrap().order, 0);
    assert_eq!(search.next_order(), 1);
    search.skip_to_order(5);
    assert_eq!(search.advance(result(0)).unwrap().order, 5);
    search.skip_to_order(3);
    assert_eq!(search.next_order(), 6);
}

/// An identity takes four words, and a seed one.
#[test]
fn position_of_the_random_stream_is_recorded() {
    let mut search = random();
    assert_eq!(search.random_words(), 0);
    assert_eq!(search.advance(Event::Began).unwrap().random_words, [5, 10]);
    assert_eq!(search.random_words(), 10);
}

#[test]
fn finished_search_ignores_all_but_edits_and_requests() {
    let mut search = random();
    search.advance(Event::Began);
    for trial in [0, 1] {
        search.advance(result(trial)).unwrap();
    }
    assert!(search.book().is_finished());
    let before = search.clone();
    for event in [Event::Began, Event::LimitReached, Event::Deleted { trial: 0 }, result(0)] {
        assert!(!search.accepts(&event), "{event:?}");
        assert_eq!(search.advance(event), None);
    }
    assert_eq!(search, before);
    assert!(search.accepts(&Event::Reopened));
}

/// The result that led to the step was deleted from the record.
#[test]
fn recorded_steps_free_the_places_of_active_trials() {
    let rungs = |max_trials| layout::async_halving(9, 3, 2, max_trials, 1, false);
    let bracket = layout::sync_halving(9, 3, 1, 18);
    for method in [
        AnyMethod::FixedLength(FixedLength::new(9, 2, 1, true)),
        AnyMethod::AsyncHalving(AsyncHalving::new(rungs(2))),
        AnyMethod::SyncHalving(SyncHalving::new(vec![bracket], 1)),
    ] {
        let mut search = SearchState::new(method, Sampler::Random(space()), 7);
        search.advance(Event::Began);
        assert_eq!(search.book().next_index(), 1);
        search.replay(1, &[], &[Step::Stop { trial: 0 }], std::iter::empty()).unwrap();
        let turn = search.advance(Event::Reopened).unwrap();
        assert!(matches!(turn.steps[..], [Step::Create { .. }]), "{turn:?}");
    }
}

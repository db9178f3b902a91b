//! Sentences of small searches, worked out step by step.

use std::collections::BTreeMap;

use serde_json::json;
use stoker_api::experiment::{
    AdaptiveAshaSearch, AsyncHalvingSearch, Length, MedianStopping, SearchMode, SyncHalvingSearch,
    Unit,
};
use stoker_api::trial::CloseCause;
use stoker_api::validate::Method;

use super::*;
use crate::fixture::config;
use crate::search::SearchConfig;
use crate::search::methods::{Pbt, PbtConfig};
use crate::search::rung::Loss;
use crate::search::samplers::{Explore, Sampler};
use crate::search::state::{AnyMethod, Change, SearchState};
use crate::search::turn::{Edit, Event, Step};

/// Runs a search on events such as `0=0.5` (a result), `0!` (failed), `0?` (invalid), `0~` (ended
/// early), `0x` (cancelled), `0-` (deleted), `0^` (reopened), `limit` (reached) and `places=1`
/// (edited).
fn run(config: &SearchConfig, mut search: SearchState, events: &str) -> Explanation {
    let mut explainer = Explainer::new(config);
    let began = search.advance(Event::Began).unwrap();
    explainer.take_in(&search, &began, None);
    for word in events.split_whitespace() {
        let edited = |places: &str| {
            let edit = Edit {
                max_trials: None,
                max_concurrent: Some(places.parse().unwrap()),
                units_max: config.units_max,
                is_limited: false,
                bracket_trials: vec![],
            };
            Event::Edited(edit)
        };
        let of_all = match word.split_once("places=") {
            Some((_, places)) => Some(edited(places)),
            None => (word == "limit").then_some(Event::LimitReached),
        };
        if let Some(event) = of_all {
            let turn = search.advance(event).unwrap();
            explainer.take_in(&search, &turn, None);
            continue;
        }
        let end = word.find(|char: char| !char.is_ascii_digit()).unwrap();
        let trial: u32 = word[..end].parse().unwrap();
        let closed = |cause| Event::Closed { trial, cause };
        let event = match &word[end..] {
            "!" => closed(CloseCause::Failed),
            "?" => closed(CloseCause::InvalidHyperparameters),
            "~" => closed(CloseCause::StoppedEarly),
            "x" => closed(CloseCause::Cancelled),
            "-" => Event::Deleted { trial },
            "^" => Event::Reopened,
            result => {
                let metric: f64 = result[1..].parse().unwrap();
                let loss = Loss::of_metric(metric, config.smaller_is_better);
                Event::Result {
                    trial,
                    units: search.book().trial(trial).units,
                    loss,
                    others: vec![],
                }
            }
        };
        let turn = match event {
            Event::Reopened => search.reopen(event, vec![trial]),
            event => search.advance(event),
        };
        let turn = turn.unwrap_or_else(|| panic!("{word} changes nothing"));
        explainer.take_in(&search, &turn, None);
    }
    explainer.finish(&search, &BTreeMap::new())
}

fn text(explanation: &Explanation) -> String {
    let decisions = explanation.decisions();
    let decisions = decisions.iter().map(|decision| decision.sentence());
    let next = explanation.brackets.iter().flat_map(|bracket| {
        let rungs = bracket.rungs.iter().map(|rung| {
            let RungExplanation { training, results, promoted, paused, ended, .. } = rung;
            format!(
                "  at {}: {training} training, {results} results, {promoted} promoted, \
                 {paused} paused, {ended} ended; {}",
                rung.units, rung.next
            )
        });
        let BracketExplanation { training, waiting, paused, stopped, completed, .. } = bracket;
        let all = training + waiting + paused + stopped + completed + bracket.ended;
        assert_eq!(all, bracket.created, "each trial is in one state");
        let bracket = format!("Bracket {}: {}", bracket.bracket, bracket.next);
        std::iter::once(bracket).chain(rungs)
    });
    decisions.chain(next).collect::<Vec<_>>().join("\n")
}

fn halving(max_trials: u32, places: u32, stop_once: bool) -> Method {
    Method::AsyncHalving(AsyncHalvingSearch {
        max_trials,
        num_rungs: 2,
        divisor: 3,
        max_concurrent_trials: places,
        stop_once,
    })
}

fn sync_halving() -> Method {
    Method::SyncHalving {
        search: SyncHalvingSearch {
            num_rungs: 2,
            budget: Length::new(Unit::Epochs, 30),
            divisor: 3,
            max_concurrent_trials: 2,
        },
        budget: 30,
    }
}

fn adaptive() -> Method {
    Method::AdaptiveAsha(AdaptiveAshaSearch {
        max_trials: 6,
        mode: SearchMode::Conservative,
        max_rungs: 2,
        bracket_rungs: vec![],
        divisor: 2,
        max_concurrent_trials: 3,
        stop_once: false,
    })
}

fn population(config: &SearchConfig) -> SearchState {
    let size =
        PbtConfig { population_size: 4, units_per_round: 3, num_rounds: 3, num_truncated: 1 };
    let space = config.space.clone();
    let explore = Explore { space, resample_probability: 0.25, perturb_factor: 1.2 };
    SearchState::new(AnyMethod::Pbt(Pbt::new(size)), Sampler::explore(explore), 7)
}

/// Compares the sentences of worked searches with `sentences.txt`, which people have read.
#[test]
fn sentences_of_all_methods_match_the_file() {
    let random = Method::Random { max_trials: 4, max_concurrent: 3 };
    let methods = [
        ("promotion", halving(5, 1, false)),
        ("stopping", halving(4, 2, true)),
        ("synchronous", sync_halving()),
        ("adaptive", adaptive()),
        ("random", random),
        ("population", Method::Single),
        ("two trials", halving(2, 1, false)),
        ("three places", halving(3, 3, false)),
        ("edited", halving(5, 4, false)),
        ("median", Method::Random { max_trials: 3, max_concurrent: 3 }),
    ];
    let expected = include_str!("sentences.txt");
    let mut found = String::new();
    for heading in expected.lines().filter_map(|line| line.strip_prefix("== ")) {
        let (name, events) = heading.split_once(':').unwrap();
        let (_, method) = methods.iter().find(|(of, _)| *of == name).unwrap();
        let rule = MedianStopping { start_units: 3, every_units: 3, min_trials: 1 };
        let median_stopping = (name == "median").then_some(rule);
        let config = SearchConfig { median_stopping, ..config(method.clone()) };
        let search = match name {
            "population" => population(&config),
            _ => SearchState::of(&config),
        };
        found += &format!("== {heading}\n{}\n\n", text(&run(&config, search, events)));
    }
    assert_eq!(found.trim_end(), expected.trim_end(), "\n{found}\n");
}

#[test]
fn current_reason_compares_with_all_results() {
    let config = config(halving(9, 1, false));
    let search = SearchState::of(&config);
    let explanation = run(&config, search, "0=0.5 1=0.3 2=0.4 1=0.1 3=0.6 4=0.2 4=0.1 5=0.7");
    let trial = &explanation.trials[2];
    let paused = trial.decisions.last().unwrap().comparison.clone().unwrap();
    assert_eq!((paused.rank, paused.results, paused.continuing), (2, 3, 1));
    let expected = "paused at 3 epochs: 0.4 ranks 3rd of 6 results, and the best 2 continue (the \
                    2nd has 0.3)";
    assert_eq!(trial.why.as_ref().unwrap().to_string(), expected);
}

#[test]
fn end_that_the_search_ignores_is_the_state() {
    let config = config(halving(9, 1, false));
    let mut search = SearchState::of(&config);
    let mut explainer = Explainer::new(&config);
    let began = search.advance(Event::Began).unwrap();
    explainer.take_in(&search, &began, None);
    let ends = BTreeMap::from([(0, CloseCause::Cancelled)]);
    let mut explanation = explainer.finish(&search, &ends);
    explanation.close();
    let trial = &explanation.trials[0];
    assert_eq!((trial.state, trial.state()), (State::Training, State::Cancelled));
    let why = "cancelled; the last decision was: created when the search began; trains to 3 epochs";
    assert_eq!(trial.reason(), why);
    let bracket = &explanation.brackets[0];
    assert_eq!((bracket.training, bracket.ended), (0, 1));
    assert_eq!(bracket.next.to_string(), "finished, its trial has ended");
    assert_eq!(bracket.rungs[0].next.to_string(), "closed, every result is in");
}

#[test]
fn larger_metrics_rank_first_if_they_are_better() {
    let config = SearchConfig { smaller_is_better: false, ..config(halving(9, 1, false)) };
    let explanation = run(&config, SearchState::of(&config), "0=0 1=0.3 2=NaN");
    let why: Vec<String> =
        explanation.trials.iter().map(|trial| trial.why.as_ref().unwrap().to_string()).collect();
    let second = "2nd of 3 results, and the best one continues (it has 0.3)";
    assert_eq!(why[0], format!("paused at 3 epochs: 0 ranks {second}"));
    let third = "3rd of 3 results, and the best one continues (it has 0.3)";
    assert_eq!(why[2], format!("paused at 3 epochs: NaN ranks {third}"));
    let next = explanation.brackets[0].rungs[0].next;
    assert_eq!(next.to_string(), "promotes the next result above 0.3");
}

#[test]
fn rare_decisions_have_sentences() {
    let config = config(halving(9, 1, false));
    let mut explanation = run(&config, SearchState::of(&config), "0=0.5 1=0.3 2=0.4");
    let mut decision = explanation.trials[2].decisions.pop().unwrap();
    decision.comparison.as_mut().unwrap().continues = true;
    let expected = "paused at 3 epochs: 0.4 ranks 2nd of 3 results, the best one continues, and it \
                    waits for a free place";
    assert_eq!(decision.to_string(), expected);
    (decision.decision, decision.comparison) = (Kind::Waits, None);
    assert_eq!(decision.to_string(), "waits at 3 epochs for a decision");
    decision.decision = Kind::Completed;
    assert_eq!(decision.to_string(), "completed all 3 epochs with 0.4");
    decision.trial = 0;
    assert_eq!(decision.to_string(), "completed all 3 epochs", "another trial has 0.4");
    decision.decision = Kind::Failed;
    let mut comparison = explanation.trials[0].decisions[1].comparison.clone();
    comparison.as_mut().unwrap().metric = None;
    decision.comparison = comparison;
    let expected = "failed before 3 epochs, and counts as the worst result there";
    assert_eq!(decision.to_string(), expected);
    decision.rule = Rule::Population;
    assert_eq!(decision.to_string(), "failed before 3 epochs");
    (decision.decision, decision.cause) = (Kind::Reopened, Cause::Edited);
    let expected = "reopened after an edit of the search; it may train to 3 epochs";
    assert_eq!(decision.to_string(), expected);
}

#[test]
fn json_has_stable_names_and_sentences() {
    let config = config(halving(9, 1, false));
    let explanation = run(&config, SearchState::of(&config), "0=0.5 1=0.3 2=0.4");
    let expected = json!({
        "order": 3, "trial": 2, "decision": "paused", "units": 3, "unit": "epochs",
        "cause": { "event": "result", "trial": 2, "units": 3, "metric": 0.4 },
        "rule": "promotion",
        "comparison": {
            "rung": 1, "rungs": 2, "units": 3, "metric": 0.4, "rank": 2, "results": 3,
            "continuing": 1, "continues": false, "cutMetric": 0.3, "required": 3, "missing": 0,
            "comparedWith": [{ "trial": 1, "metric": 0.3 }, { "trial": 0, "metric": 0.5 }],
        },
        "text": "paused at 3 epochs: 0.4 ranks 2nd of 3 results, and the best one continues (it \
                 has 0.3)",
    });
    let trial = explanation.trials[2].to_json();
    assert_eq!((&trial["state"], &trial["why"]), (&json!("paused"), &expected));
    assert_eq!(trial["decisions"][1], expected);
    let experiment = explanation.to_json();
    assert_eq!(experiment["trials"][1]["state"], "training");
    assert_eq!(experiment["decisions"].as_array().unwrap().len(), 7);
    let bracket = json!({
        "bracket": 0, "created": 3, "remaining": 6, "training": 1, "waiting": 0, "paused": 2,
        "promotions": 1, "stopped": 0, "completed": 0, "ended": 0, "places": 1,
        "next": { "action": "creates", "remaining": 6,
            "text": "creates a trial when a place is free, 6 are left" },
        "rungs": [
            { "rung": 1, "units": 3, "training": 0, "results": 3, "promoted": 1, "paused": 2,
                "ended": 0, "cutMetric": 0.3, "bestMetric": 0.3,
                "next": { "action": "promotesBetter", "metric": 0.3,
                    "text": "promotes the next result below 0.3" } },
            { "rung": 2, "units": 9, "training": 1, "results": 0, "promoted": 0, "paused": 0,
                "ended": 0, "cutMetric": null, "bestMetric": null,
                "next": { "action": "none", "text": "last rung" } },
        ],
    });
    assert_eq!(experiment["brackets"], json!([bracket]));
}

#[test]
fn search_that_gave_up_creates_nothing_before_a_result() {
    let config = config(Method::Random { max_trials: 40, max_concurrent: 11 });
    let failures: Vec<String> = (1..=10).map(|trial| format!("{trial}!")).collect();
    let next = |events: &str| {
        let explanation = run(&config, SearchState::of(&config), events);
        explanation.to_json()["brackets"][0]["next"].clone()
    };
    let expected = json!({
        "action": "createsAfterResult", "remaining": 20,
        "text": "creates 20 trials only after a result, because no ended trial has one",
    });
    assert_eq!(next(&failures.join(" ")), expected);
    let resumed = format!("{} 0=0.5", failures.join(" "));
    assert_eq!(next(&resumed)["action"], "creates");
}

#[test]
fn numbers_are_short_and_readable() {
    let numbers = [1, 2, 3, 4, 11, 12, 13, 21, 101, 111].map(sentences::ordinal);
    let expected = ["1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "101st", "111th"];
    assert_eq!(numbers, expected);
    let metrics = [Some(0.0), Some(0.9299), Some(-12.5), Some(1.0 / 3.0), Some(1e-7), None];
    assert_eq!(metrics.map(metric), ["0", "0.9299", "-12.5", "0.3333", "1.000e-7", "NaN"]);
    let bounds = [0.001, -0.00099, 999_999.0, 1e6].map(Some);
    assert_eq!(bounds.map(metric), ["0.001", "-9.900e-4", "999999", "1.000e6"]);
    let lengths = [(1, Unit::Epochs), (2, Unit::Batches), (3, Unit::Records), (4, Unit::Units)];
    let lengths = lengths.map(|(units, unit)| length(units, unit));
    assert_eq!(lengths, ["1 epoch", "2 batches", "3 records", "4 units"]);
}

#[test]
fn deletion_names_the_deleted_trials() {
    let config = config(Method::Random { max_trials: 4, max_concurrent: 3 });
    let explanation = run(&config, SearchState::of(&config), "0=0.25 0-");
    let last = explanation.trials[0].decisions.last().unwrap();
    assert_eq!((last.decision, &last.cause), (Kind::Deleted, &Cause::Deleted { trials: vec![0] }));
}

/// Median stopping stops trials 1, 2 and 3, which count as the worst results of the rung. The best
/// one of three is promoted, and has no result.
#[test]
fn stopped_trial_that_is_promoted_stays_stopped() {
    let rule = MedianStopping { start_units: 1, every_units: 1, min_trials: 1 };
    let config = SearchConfig { median_stopping: Some(rule), ..config(halving(3, 3, false)) };
    let explanation = run(&config, SearchState::of(&config), "0=0.1 1=0.5 2=0.6 0? 3=0.9");
    let trial = &explanation.trials[1];
    assert_eq!(trial.decisions.last().unwrap().decision, Kind::CountedAsPromoted);
    assert_eq!(trial.state, State::Stopped);
    assert!(
        trial.reason().starts_with("stopped at 1 epoch: its best metric 0.5 is worse than 0.1")
    );
}

/// Only a trial that has ended counts as promoted.
#[test]
fn promotion_of_an_open_trial_shows_its_lost_end() {
    let config = config(halving(9, 1, false));
    let mut search = SearchState::of(&config);
    let mut explainer = Explainer::new(&config);
    let mut turn = search.advance(Event::Began).unwrap();
    explainer.take_in(&search, &turn, None);
    turn.events.clear();
    turn.steps.clear();
    turn.changes =
        vec![Change { trial: 0, units: 9, step: Step::PromoteClosed { trial: 0, units: 9 } }];
    explainer.take_in(&search, &turn, None);
    let explanation = explainer.finish(&search, &BTreeMap::new());
    assert_eq!(explanation.trials[0].state, State::Failed);
}

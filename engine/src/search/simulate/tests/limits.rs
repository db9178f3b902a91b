//! Simulations that a limit ends.

use super::*;

/// Checks the limit with its time, the lengths of the trials, and the total length.
#[track_caller]
fn check(
    simulation: &Simulation,
    limit: Option<(SearchLimit, f64)>,
    lengths: &[u64],
    units_total: u64,
) {
    let found: Vec<u64> = simulation.trials.iter().map(|trial| trial.units).collect();
    assert_eq!(simulation.limit_reached, limit, "{simulation:?}");
    assert_eq!((found.as_slice(), simulation.units_total), (lengths, units_total));
    if let Some((_, time)) = limit {
        assert_eq!(simulation.time_total, time);
    }
}

fn lines() -> Vec<Value> {
    (0..4).map(|trial| json!({ "trial": trial, "units": 1, "metric": trial })).collect()
}

/// Simulates four trials over three batches, two at a time: from 0 s to 3 s, and to 6 s.
fn four(limits: Value, machine: Machine) -> Simulation {
    let searcher =
        json!({ "limits": limits, "random": { "maxTrials": 4, "maxConcurrentTrials": 2 } });
    simulate_three_on(searcher, &lines(), machine, &mut no_searcher).unwrap()
}

#[test]
fn seconds_end_a_search_between_results() {
    let run = |seconds: u64| four(json!({ "seconds": seconds }), Machine::default());
    let simulation = run(4);
    check(&simulation, Some((SearchLimit::Seconds, 4.0)), &[3, 3, 1, 1], 8);
    let outcomes = simulation.trials.iter().map(|trial| trial.outcome);
    let (completed, stopped) = (Outcome::Completed, Outcome::Stopped);
    assert_eq!(outcomes.collect::<Vec<_>>(), [completed, completed, stopped, stopped]);
    assert_eq!((simulation.events.len(), simulation.best), (2, Some((0, 3, 0.0))));
    // Legs that end at this time count, and legs that begin then do not train.
    let simulation = run(3);
    check(&simulation, Some((SearchLimit::Seconds, 3.0)), &[3, 3, 0, 0], 6);
    assert_eq!(simulation.events.len(), 2);
    check(&run(6), None, &[3, 3, 3, 3], 12);
    check(&run(7), None, &[3, 3, 3, 3], 12);
}

/// Trials have two slots.
#[test]
fn slot_seconds_count_the_time_of_workers() {
    let run = |seconds: u64, machine| four(json!({ "slotSeconds": seconds }), machine);
    let at = |time: f64| Some((SearchLimit::SlotSeconds, time));
    check(&run(16, Machine::default()), at(4.0), &[3, 3, 1, 1], 8);
    check(&run(18, Machine::default()), at(4.5), &[3, 3, 1, 1], 8);
    check(&run(24, Machine::default()), None, &[3, 3, 3, 3], 12);
    let one = Machine { workers: 1, ..Machine::default() };
    check(&run(16, one), at(8.0), &[3, 3, 2, 0], 8);
    // Trials hold workers while they start.
    let slow = Machine { start_seconds: 1.0, ..Machine::default() };
    check(&run(18, slow), at(4.5), &[3, 3, 0, 0], 6);
}

#[test]
fn limit_may_be_reached_before_training() {
    let slow = Machine { start_seconds: 5.0, ..Machine::default() };
    for (limits, limit) in [
        (json!({ "seconds": 1 }), SearchLimit::Seconds),
        (json!({ "slotSeconds": 4 }), SearchLimit::SlotSeconds),
    ] {
        let simulation = four(limits, slow);
        check(&simulation, Some((limit, 1.0)), &[0, 0], 0);
        assert_eq!((simulation.events.len(), simulation.best), (0, None));
    }
}

/// Both first trials end at 3 s. A result that reaches the limit creates no trial.
#[test]
fn units_end_a_search_at_a_result() {
    let run = |limits: Value| four(limits, Machine::default());
    let at = |time: f64| Some((SearchLimit::Units, time));
    let simulation = run(json!({ "units": 3 }));
    check(&simulation, at(3.0), &[3, 3], 6);
    let outcomes = simulation.trials.iter().map(|trial| trial.outcome);
    assert_eq!(outcomes.collect::<Vec<_>>(), [Outcome::Completed, Outcome::Stopped]);
    let decisions = simulation.events.iter().map(|event| event.decision);
    assert_eq!(decisions.collect::<Vec<_>>(), [Decision::Complete]);
    check(&run(json!({ "units": 4 })), at(3.0), &[3, 3, 0], 6);
    check(&run(json!({ "units": 12 })), at(6.0), &[3, 3, 3, 3], 12);
    check(&run(json!({ "units": 13 })), None, &[3, 3, 3, 3], 12);
    // Of several limits, the first one counts.
    let both = run(json!({ "seconds": 3, "units": 6 }));
    check(&both, Some((SearchLimit::Seconds, 3.0)), &[3, 3, 0], 6);
    let both = run(json!({ "seconds": 4, "units": 6 }));
    check(&both, at(3.0), &[3, 3, 0], 6);
}

/// The first trial is the best of three after one unit. It continues at 3 s, for two units from its
/// checkpoint or three from scratch.
#[test]
fn repeated_training_counts_as_time_only() {
    let run = |limits: Value, is_from_scratch: bool| {
        let halving = json!({
            "maxTrials": 3, "numRungs": 2, "divisor": 3, "maxConcurrentTrials": 1,
        });
        let searcher = json!({ "limits": limits, "asyncHalving": halving });
        let machine = Machine { is_from_scratch, ..Machine::default() };
        simulate_three_on(searcher, &lines(), machine, &mut no_searcher).unwrap()
    };
    let units = json!({ "units": 5 });
    check(&run(units.clone(), false), Some((SearchLimit::Units, 5.0)), &[3, 1, 1], 5);
    check(&run(units, true), Some((SearchLimit::Units, 6.0)), &[3, 1, 1], 6);
    let slots = json!({ "slotSeconds": 10 });
    check(&run(slots.clone(), false), None, &[3, 1, 1], 5);
    check(&run(slots, true), Some((SearchLimit::SlotSeconds, 5.0)), &[2, 1, 1], 5);
}

/// The copy trains from 2 units to 4, as the better one of both trials does.
#[test]
fn units_of_copies_count_from_their_source() {
    let run_with = |units: u64| {
        let searcher = json!({
            "metric": "loss",
            "limits": { "units": units },
            "pbt": {
                "populationSize": 2, "numRounds": 2, "lengthPerRound": { "batches": 2 },
                "truncateFraction": 0.5,
            },
        });
        let experiment = json!({ "spec": {
            "entrypoint": { "command": ["true"] },
            "hyperparameters": { "x": { "double": { "min": 0, "max": 1 } } },
            "searcher": searcher,
        } });
        run(&experiment, &lines(), &json!([]))
    };
    check(&run_with(8), Some((SearchLimit::Units, 4.0)), &[4, 2, 4], 8);
    check(&run_with(9), None, &[4, 2, 4], 8);
}

#[test]
fn external_searcher_is_not_asked_after_a_limit() {
    let check = |limits: Value, limit: (SearchLimit, f64)| {
        let mut calls = vec![];
        let mut ask = |_: &SearchState, question: DueQuestion, _: &[Option<String>]| {
            calls.push(question.call);
            let actions = json!([{ "create": {} }, { "create": {} }]);
            Ok(Answer { call: question.call, actions: serde_json::from_value(actions).unwrap() })
        };
        let external = json!({ "command": ["searcher"], "maxTrials": 2 });
        let searcher = json!({ "limits": limits, "external": external });
        let simulation = simulate_three(searcher, &lines(), &mut ask).unwrap();
        assert_eq!((calls, simulation.limit_reached), (vec![0], Some(limit)));
    };
    check(json!({ "units": 3 }), (SearchLimit::Units, 3.0));
    check(json!({ "seconds": 2 }), (SearchLimit::Seconds, 2.0));
}

#[test]
fn limit_cuts_very_large_lengths() {
    let experiment = json!({ "spec": {
        "entrypoint": { "command": ["true"] },
        "hyperparameters": { "x": { "double": { "min": 0, "max": 1 } } },
        "searcher": {
            "metric": "loss",
            "maxLength": { "batches": 9_000_000_000_000_000_000_u64 },
            "limits": { "seconds": 1 },
            "random": { "maxTrials": 3, "maxConcurrentTrials": 3 },
        },
    } });
    let simulation = run(&experiment, &lines(), &json!([]));
    check(&simulation, Some((SearchLimit::Seconds, 1.0)), &[1, 1, 1], 3);
}

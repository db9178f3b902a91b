//! Simulations with several objectives.

use super::*;

/// Simulates a search for a small loss and a large speed, over three batches.
fn run_both(mut searcher: Value, lines: &[Value], ask: Ask<'_>) -> Simulation {
    searcher["objectives"] =
        json!([{ "metric": "loss" }, { "metric": "speed", "smallerIsBetter": false }]);
    simulate_three(searcher, lines, ask).unwrap()
}

/// Returns the Pareto front as trial, length and values.
fn front(simulation: &Simulation) -> Value {
    let points = simulation.pareto.iter().flatten();
    points.map(|point| json!([point.trial, point.units, point.values])).collect()
}

#[test]
fn front_has_the_trials_that_none_surpasses() {
    let random = json!({ "random": { "maxTrials": 4, "maxConcurrentTrials": 4 } });
    let lines = [
        json!({ "trial": 0, "units": 1, "metric": 0.5, "metrics": { "speed": 1.0 } }),
        json!({ "trial": 1, "units": 1, "metric": 0.4, "metrics": { "speed": 2.0, "other": 9 } }),
        json!({ "trial": 2, "units": 1, "metric": 0.3 }),
        json!({ "trial": 3, "units": 1, "metric": 0.9, "metrics": { "speed": 5.0 } }),
    ];
    let simulation = run_both(random.clone(), &lines, &mut no_searcher);
    let expected = json!([[1, 3, [0.4, 2.0]], [2, 3, [0.3, null]], [3, 3, [0.9, 5.0]]]);
    assert_eq!(front(&simulation), expected);
    assert_eq!(simulation.best, Some((2, 3, 0.3)));
    let simulation = simulate_three(random, &lines, &mut no_searcher).unwrap();
    assert_eq!(simulation.pareto, None);
}

/// The first trial is promoted to 3 units.
#[test]
fn front_compares_latest_results() {
    let check = |last: Value, expected: Value| {
        let halving = json!({
            "maxTrials": 3, "numRungs": 2, "divisor": 3, "maxConcurrentTrials": 1,
        });
        let mut line = json!({ "trial": 0, "units": 3, "metric": 0.05 });
        line["metrics"] = last;
        let lines = [
            json!({ "trial": 0, "units": 1, "metric": 0.1, "metrics": { "speed": 9.0 } }),
            line,
            json!({ "trial": 1, "units": 1, "metric": 0.2, "metrics": { "speed": 5.0 } }),
            json!({ "trial": 2, "units": 1, "metric": 0.3, "metrics": { "speed": 4.0 } }),
        ];
        let simulation = run_both(json!({ "asyncHalving": halving }), &lines, &mut no_searcher);
        assert_eq!(front(&simulation), expected);
    };
    let other = json!([1, 1, [0.2, 5.0]]);
    check(json!({ "speed": 1.0 }), json!([[0, 3, [0.05, 1.0]], other]));
    check(json!({ "speed": null }), json!([[0, 3, [0.05, null]], other]));
    // A value holds until the next one.
    check(json!({}), json!([[0, 3, [0.05, 9.0]]]));
}

#[test]
fn results_have_the_losses_of_all_objectives() {
    let mut seen = vec![];
    let mut ask = |search: &SearchState, question: DueQuestion, _: &[Option<String>]| {
        for (_, event) in search.unsent() {
            if let Event::Result { others, .. } = event {
                seen.extend(others.clone());
            }
        }
        let actions = match question.call {
            0 => json!([{ "create": {} }, { "create": {} }]),
            _ => json!([]),
        };
        Ok(Answer { call: question.call, actions: serde_json::from_value(actions).unwrap() })
    };
    let external = json!({ "external": { "command": ["searcher"], "maxTrials": 2 } });
    let lines = [
        json!({ "trial": 0, "units": 1, "metric": 0.5, "metrics": { "speed": 2.0 } }),
        json!({ "trial": 1, "units": 1, "metric": 0.5 }),
    ];
    run_both(external, &lines, &mut ask);
    assert_eq!(seen, [Loss::new(-2.0), Loss::INFINITE]);
}

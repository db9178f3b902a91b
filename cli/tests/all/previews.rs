//! Tests of `stoker preview` and `stoker simulate`.

use serde_json::{Value, json};

use crate::fixture::{RunFixture, check, last_line, output_text, random, stoker};

#[test]
fn preview_shows_lengths_and_samples() {
    let fixture = RunFixture::new(random(4), "");
    fixture.command(&[]);
    let file = fixture.folder.path().join("experiment.yaml");
    let preview = |more: &[&str]| {
        let mut command = stoker();
        command.args(["preview", "--samples", "2", "--output", "json"]).args(more).arg(&file);
        let output = command.output().unwrap();
        check(&output, 0, "");
        last_line(&output)
    };
    let line = preview(&[]);
    assert_eq!(line["lengths"], json!([{"units": 10, "trials": 4}]));
    assert_eq!(line["samples"].as_array().unwrap().len(), 2);
    assert!(
        line["samples"][0]["seed"].is_u64() && line["samples"][0]["hyperparameters"]["x"].is_f64()
    );
    // 4 trials of 10 batches with one slot.
    assert_eq!(preview(&["--seconds-per-unit", "0.5"])["slotSeconds"], 20.0);
}

#[test]
fn simulations_use_the_curves_of_their_seed() {
    let fixture = RunFixture::new(random(1), "");
    fixture.command(&[]);
    let file = fixture.folder.path().join("experiment.yaml");
    let curves = fixture.folder.path().join("curves.jsonl");
    let curve = |seed: u32, metric: f64| {
        json!({"seed": seed, "trial": 0, "units": 10, "metric": metric}).to_string()
    };
    std::fs::write(&curves, [curve(0, 0.5), curve(1, 1.5)].join("\n")).unwrap();
    let mut command = stoker();
    command.args(["simulate", "--seeds", "2", "--output", "json", "--curves"]);
    let output = command.arg(curves).arg(file).output().unwrap();
    check(&output, 0, "");
    let text = String::from_utf8(output.stdout).unwrap();
    let found = text.lines().map(|line| {
        let simulation: Value = serde_json::from_str(line).unwrap();
        (simulation["seed"].clone(), simulation["best"]["metric"].clone())
    });
    let expected = [(json!(0), json!(0.5)), (json!(1), json!(1.5))];
    assert_eq!(found.collect::<Vec<_>>(), expected);
}

/// One worker trains two of four trials.
#[test]
fn simulations_follow_limits_and_objectives() {
    let mut fixture = RunFixture::new(random(4), "");
    let searcher = &mut fixture.spec["searcher"];
    searcher["limits"] = json!({"units": 20});
    searcher["objectives"] = json!([{"metric": "loss"}, {"metric": "latency"}]);
    fixture.command(&[]);
    let file = fixture.folder.path().join("experiment.yaml");
    let curves = fixture.folder.path().join("curves.jsonl");
    let simulate = |lines: Vec<Value>, format: &str| {
        let lines: Vec<String> = lines.iter().map(Value::to_string).collect();
        std::fs::write(&curves, lines.join("\n")).unwrap();
        let mut command = stoker();
        command.args(["simulate", "--workers", "1", "--output", format, "--curves"]);
        command.arg(&curves).arg(&file).output().unwrap()
    };
    let lines = |name: &str| -> Vec<Value> {
        let line = |trial: u32| {
            let metrics = json!({name: trial});
            json!({"trial": trial, "units": 10, "metric": 4 - trial, "metrics": metrics})
        };
        (0..4).map(line).collect()
    };
    let output = simulate(lines("latency"), "json");
    check(&output, 0, "");
    let simulation = last_line(&output);
    assert_eq!(simulation["limit_reached"], json!({"limit": "units", "time": 20.0}));
    let front = json!([
        {"trial": 0, "units": 10, "values": [4.0, 0.0]},
        {"trial": 1, "units": 10, "values": [3.0, 1.0]},
    ]);
    assert_eq!(simulation["pareto"], front);
    let output = simulate(lines("latency"), "text");
    check(
        &output,
        0,
        "total: 20 units in 20 s\nlimit: units reached at 20 s\nbest: trial 1 with 3",
    );
    check(&output, 0, "Pareto front: trials 0, 1\n");
    assert!(!output_text(&output).contains("note"), "{}", output_text(&output));
    check(&simulate(lines("size"), "text"), 0, "has the objective latency, so it ranks last");
}

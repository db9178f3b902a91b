//! Tests of `stoker preview` and `stoker simulate`.

use serde_json::{Value, json};

use crate::fixture::{RunFixture, check, last_line, random, stoker};

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
fn simulations_end_at_a_limit() {
    let mut fixture = RunFixture::new(random(4), "");
    fixture.spec["searcher"]["limits"] = json!({"units": 20});
    fixture.command(&[]);
    let file = fixture.folder.path().join("experiment.yaml");
    let curves = fixture.folder.path().join("curves.jsonl");
    let line = |trial: u32| json!({"trial": trial, "units": 10, "metric": 4 - trial}).to_string();
    std::fs::write(&curves, (0..4).map(line).collect::<Vec<_>>().join("\n")).unwrap();
    let simulate = |format: &str| {
        let mut command = stoker();
        command.args(["simulate", "--workers", "1", "--output", format, "--curves"]);
        command.arg(&curves).arg(&file).output().unwrap()
    };
    let output = simulate("json");
    check(&output, 0, "");
    let expected = json!({"limit": "units", "time": 20.0});
    assert_eq!(last_line(&output)["limit_reached"], expected);
    let text = "total: 20 units in 20 s\nlimit: units reached at 20 s\nbest: trial 1 with 3";
    check(&simulate("text"), 0, text);
}

//! Tests of `stoker run` whose search ends by a limit, or whose file is edited.

use serde_json::{Value, json};

use crate::fixture::{RunFixture, check, last_line, random};

#[test]
fn limit_stops_trials_with_a_checkpoint() {
    let mut fixture = RunFixture::new(json!({"single": {}}), "").pause_at(7);
    fixture.spec["searcher"]["limits"] = json!({"seconds": 2});
    let output = fixture.run(&[]);
    check(&output, 0, "the search reached spec.searcher.limits.seconds, 2, with ");
    assert_eq!(last_line(&output)["phase"], "Completed");
    let trial = &fixture.trials()[0];
    assert_eq!(trial["status"]["attempts"][0]["end"], "Preempted", "{trial}");
    assert_eq!(trial["status"]["facts"][0]["closed"]["cause"], "Cancelled");
    // Nothing follows when the same command runs again.
    let again = fixture.run(&[]);
    check(&again, 0, "has completed already");
    assert_eq!(fixture.trials()[0], *trial);
}

#[test]
fn edited_file_continues_an_ended_run() {
    let mut fixture = RunFixture::new(random(2), "");
    check(&fixture.run(&[]), 0, "");
    let before = fixture.trials();
    fixture.spec["searcher"]["random"]["maxTrials"] = json!(4);
    fixture.spec["searcher"]["maxLength"] = json!({"batches": 12});
    check(&fixture.run(&[]), 0, "with changed numbers");
    let after = fixture.trials();
    assert_eq!((after.len(), &after[..2]), (4, &before[..]));
    let units = |trial: &Value| trial["status"]["facts"][0]["result"]["units"].clone();
    assert_eq!(after.iter().map(units).collect::<Vec<_>>(), [10, 10, 12, 12]);
    fixture.spec["searcher"]["random"]["maxTrials"] = json!(3);
    check(&fixture.run(&[]), 2, "spec.searcher.random.maxTrials: 3: must be at least 4");
    fixture.spec["searcher"]["random"]["maxTrials"] = json!(4);
    fixture.spec["searcher"]["metric"] = json!("accuracy");
    check(&fixture.run(&[]), 2, r#"spec.searcher.metric: was "loss", now "accuracy""#);
    assert_eq!(fixture.trials(), after);
}

#[test]
fn search_begins_with_trials_of_an_earlier_run() {
    let mut fixture = RunFixture::new(random(3), "");
    fixture.name = "second";
    fixture.spec["searcher"]["priorTrials"] = json!({"experiments": ["first"], "trials": 2});
    check(&fixture.run(&[]), 2, "priorTrials.experiments[0] is `first`: no such run in ");
    assert!(fixture.trials().is_empty());

    let prior = fixture.spec["searcher"].as_object_mut().unwrap().remove("priorTrials").unwrap();
    fixture.name = "first";
    check(&fixture.run(&[]), 0, "");
    let first = fixture.trials();
    let best = last_line(&fixture.run(&[]))["best"].clone();

    fixture.name = "second";
    fixture.spec["searcher"]["priorTrials"] = prior;
    fixture.spec["reproducibility"]["experimentSeed"] = json!(8);
    let output = fixture.run(&[]);
    check(&output, 0, "prior trials: 2 of first are in the space of this experiment; the best is ");
    check(&output, 0, &format!("first-{} ({})", best["trial"], best["metric"].as_str().unwrap()));
    let second = |fixture: &RunFixture| {
        let all = fixture.trials().into_iter().filter(|trial| !first.contains(trial));
        all.map(|trial| trial["spec"]["hyperparameters"].clone()).collect::<Vec<_>>()
    };
    let is_of_first = |hyperparameters: &Value| {
        first.iter().any(|trial| trial["spec"]["hyperparameters"] == *hyperparameters)
    };
    let before = second(&fixture);
    assert_eq!(before[0], best["hyperparameters"]);
    assert_eq!(before.iter().map(is_of_first).collect::<Vec<_>>(), [true, true, false]);
    // The record has these trials, so the earlier run is not read again.
    let records = fixture.root().join("local");
    std::fs::remove_file(records.join("default.first.current")).unwrap();
    fixture.spec["searcher"]["random"]["maxTrials"] = json!(4);
    check(&fixture.run(&[]), 0, "with changed numbers");
    assert_eq!(second(&fixture)[..3], before);
}

//! Tests of `stoker run` whose search ends by a limit, or whose file is edited.

use serde_json::json;

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
    let units = |trial: &serde_json::Value| trial["status"]["facts"][0]["result"]["units"].clone();
    assert_eq!(after.iter().map(units).collect::<Vec<_>>(), [10, 10, 12, 12]);
    fixture.spec["searcher"]["random"]["maxTrials"] = json!(3);
    check(&fixture.run(&[]), 2, "spec.searcher.random.maxTrials: 3: must be at least 4");
    fixture.spec["searcher"]["random"]["maxTrials"] = json!(4);
    fixture.spec["searcher"]["metric"] = json!("accuracy");
    check(&fixture.run(&[]), 2, r#"spec.searcher.metric: was "loss", now "accuracy""#);
    assert_eq!(fixture.trials(), after);
}

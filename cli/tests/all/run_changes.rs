//! Tests of `stoker run` whose search ends by a limit.

use serde_json::json;

use crate::fixture::{RunFixture, check, last_line};

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

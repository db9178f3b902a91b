//! Checkpoints that earlier attempts have stored, but may not have reported.

use std::ops::Range;

use stoker_api::contract::ReportEvent;

use super::*;

impl Fixture {
    fn save_as(&mut self, attempt: u32, batches: u64) -> CheckpointRef {
        self.config.attempt = attempt;
        self.save(batches)
    }

    fn unreported(&self, attempts: Range<u32>, newest: Option<&str>) -> Vec<UnreportedCheckpoint> {
        let checkpoints = self.checkpoints();
        self.rt.block_on(checkpoints.store().unreported(attempts, newest)).unwrap()
    }
}

#[test]
fn unreported_checkpoints_are_newer_than_known_ones() {
    let mut fixture = Fixture::new();
    for (attempt, batches) in [(0, 10), (0, 20), (1, 15), (2, 30)] {
        fixture.save_as(attempt, batches);
    }
    let check = |attempts: Range<u32>, newest: Option<&str>, expected: &[&str]| {
        let found = fixture.unreported(attempts.clone(), newest);
        let names = found.iter().map(|unreported| unreported.checkpoint.name.as_str());
        assert_eq!(names.collect::<Vec<_>>(), expected, "{attempts:?} {newest:?}");
    };
    // Attempt 1 has trained again from an earlier batch.
    check(0..2, None, &["000000000015-1", "000000000020-0", "000000000010-0"]);
    check(0..2, Some("000000000010-0"), &["000000000015-1", "000000000020-0"]);
    check(0..2, Some("000000000020-0"), &["000000000015-1"]);
    check(0..2, Some("000000000015-1"), &[]);
    check(1..2, None, &["000000000015-1"]);
    check(1..3, None, &["000000000030-2", "000000000015-1"]);
}

#[test]
fn incomplete_and_foreign_checkpoints_are_not_reported() {
    let mut fixture = Fixture::new();
    assert_eq!(fixture.unreported(0..1, None), []);
    let checkpoint = fixture.save_as(0, 10);
    for batches in [20, 30, 40] {
        fixture.save_as(0, batches);
    }
    std::fs::remove_file(fixture.path("000000000020-0/manifest.json")).unwrap();
    std::fs::rename(fixture.path("000000000030-0"), fixture.path("000000000035-0")).unwrap();
    std::fs::write(fixture.path("000000000040-0/manifest.json"), "{").unwrap();
    fixture.config.trial += 1;
    fixture.save_as(0, 50);
    fixture.config.trial -= 1;
    let found = fixture.unreported(0..1, None);
    let [unreadable, complete] = &found[..] else { panic!("{found:?}") };
    assert_eq!(unreadable.checkpoint.name, "000000000040-0");
    assert_eq!(unreadable.report, None);
    let CheckpointRef { name, manifest_sha256, .. } = checkpoint.clone();
    let event = ReportEvent::Checkpointed { name, manifest_sha256, bytes: 14, metric: None };
    let expected = UnreportedCheckpoint { checkpoint, report: Some((10, event)) };
    assert_eq!(*complete, expected);
}

#[test]
fn checkpoint_with_an_unreadable_manifest_is_left_out() {
    let mut fixture = Fixture::new();
    let names = [10, 20, 30].map(|batches| fixture.save_as(0, batches).name);
    let read = |num: usize, newest: Option<&str>| {
        let (checkpoints, names) = (fixture.checkpoints(), names.iter().rev().take(num));
        let found = fixture
            .rt
            .block_on(checkpoints.store().read_candidates(names.cloned().collect(), newest));
        found.map(|found| found.into_iter().map(|one| one.checkpoint.name).collect::<Vec<_>>())
    };
    make_unreadable(&fixture, "000000000030-0/manifest.json");
    assert_eq!(read(2, None).unwrap(), names[1..2]);
    assert_eq!(read(1, Some(&names[0])).unwrap(), [""; 0]);
    assert!(read(1, None).unwrap_err().to_string().contains(&names[2]));
    make_unreadable(&fixture, "000000000010-0/manifest.json");
    assert!(read(1, Some(&names[0])).unwrap_err().to_string().contains(&names[2]));
}

/// The record of the runner was restored from a backup, and the index is used again.
#[test]
fn checkpoint_with_another_sample_is_left_out() {
    let mut fixture = Fixture::new();
    fixture.save_as(0, 10);
    let found = |fixture: &Fixture| {
        let found = fixture.unreported(0..1, None).into_iter();
        found.map(|unreported| unreported.checkpoint.name).collect::<Vec<_>>()
    };
    fixture.config.attempt = 1;
    assert_eq!(found(&fixture), ["000000000010-0"]);
    fixture.config.hyperparameters = serde_json::json!({"lr": 0.5});
    assert_eq!(found(&fixture), [""; 0]);
    fixture.config.hyperparameters = serde_json::json!({});
    fixture.config.seed += 1;
    assert_eq!(found(&fixture), [""; 0]);
    // A manifest of an earlier version.
    let path = fixture.path("000000000010-0/manifest.json");
    let mut manifest: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    manifest.as_object_mut().unwrap().remove("sampleSha256").unwrap();
    std::fs::write(&path, manifest.to_string()).unwrap();
    assert_eq!(found(&fixture), ["000000000010-0"]);
}

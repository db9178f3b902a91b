//! Tables of what is due after which batch.

use super::*;

fn timetable() -> Timetable {
    Timetable {
        records_per_epoch: 0,
        epoch_batches: 10,
        global_batch: 32,
        scheduling_unit: 4,
        validate_every: Some(6),
        checkpoint_every: Some(9),
        checkpoint_policy: CheckpointPolicy::Best,
        initial_validation: true,
        smaller_is_better: true,
    }
}

/// Returns the initials of what is due: Row, Epoch end, Validation, Checkpoint.
fn due(batches: u64, granted: u64) -> String {
    let due = timetable().due(batches, granted);
    let flags =
        [(due.row, 'R'), (due.epoch_end, 'E'), (due.validation, 'V'), (due.checkpoint, 'C')];
    flags.into_iter().filter_map(|(is_due, letter)| is_due.then_some(letter)).collect()
}

#[test]
fn actions_are_due_periodically_and_at_the_end() {
    let check = |batches, granted, expected: &str| {
        assert_eq!(due(batches, granted), expected, "batch {batches} of {granted}");
    };
    check(1, 100, "");
    check(4, 100, "R");
    check(6, 100, "V");
    check(9, 100, "C");
    check(10, 100, "E");
    check(12, 100, "RV");
    check(18, 100, "VC");
    check(20, 100, "RE");
    check(36, 100, "RVC");
    check(90, 100, "EVC");
    check(5, 5, "RVC");
    check(10, 10, "REVC");
    check(7, 5, "RVC");
}

#[test]
fn rows_have_the_epoch_of_their_last_batch() {
    let epochs = [0, 1, 10, 11, 20, 21].map(|batches| timetable().epoch(batches));
    assert_eq!(epochs, [0, 0, 0, 1, 1, 2]);
}

#[test]
fn lengths_convert_to_batches() {
    let check = |unit, units, expected| {
        assert_eq!(timetable().batches(unit, units), expected, "{units} {unit:?}");
    };
    check(Unit::Batches, 7, 7);
    check(Unit::Units, 7, 7);
    check(Unit::Records, 31, 1);
    check(Unit::Records, 32, 1);
    check(Unit::Records, 95, 2);
    check(Unit::Epochs, 3, 30);
    check(Unit::Epochs, 0, 1);
    check(Unit::Epochs, u64::MAX, u64::MAX);
}

/// Returns the timetable for 10 batches of data, in an experiment with this many records per epoch
/// and a validation after each epoch.
fn with_records(records_per_epoch: u64) -> Timetable {
    let config = serde_json::json!({
        "version": 1, "experiment": "x", "experimentId": "x", "trial": 0, "attempt": 0, "seed": 0,
        "experimentSeed": 0, "hyperparameters": {}, "unit": "epochs", "units": 1, "metric": "loss",
        "smallerIsBetter": true, "schedulingUnit": 1, "aggregationFrequency": 1,
        "recordsPerEpoch": records_per_epoch, "validationPeriod": {"epochs": 1},
        "storage": {"url": "", "trialPath": ""}, "door": {"url": "", "tokenFile": ""},
    });
    Timetable::new(&serde_json::from_value(config).unwrap(), 10, 32)
}

#[test]
fn records_per_epoch_sets_the_epoch() {
    let check = |records, epochs, expected: (u64, u64)| {
        let timetable = with_records(records);
        let actual = (timetable.batches(Unit::Epochs, epochs), timetable.epoch(21));
        assert_eq!(actual, expected, "{epochs} epochs of {records} records");
    };
    // Without records per epoch, an epoch is one pass over the data.
    check(0, 3, (30, 2));
    // 3.4 batches per epoch: the fractions of three epochs add up to one more batch.
    check(110, 1, (3, 6));
    check(110, 3, (10, 6));
    // Whole batches: callbacks count the epochs of the length.
    check(96, 3, (9, 6));
    // Less than one batch per epoch.
    check(20, 1, (1, 20));
    check(20, 3, (1, 20));
    check(u64::MAX, u64::MAX, (u64::MAX, 0));
}

#[test]
fn epochs_with_records_end_with_validations() {
    let timetable = with_records(110);
    let ends = |due: fn(&Due) -> bool| -> Vec<u64> {
        (1..=10).filter(|batches| due(&timetable.due(*batches, 10))).collect()
    };
    assert_eq!(ends(|due| due.epoch_end), [3, 6, 9]);
    assert_eq!(ends(|due| due.validation), [3, 6, 9, 10]);
}

#[test]
fn initial_validation_runs_once_at_the_start() {
    assert!(timetable().validates_first(0, false));
    assert!(!timetable().validates_first(0, true));
    assert!(!timetable().validates_first(1, false));
    let never = Timetable { initial_validation: false, ..timetable() };
    assert!(!never.validates_first(0, false));
}

#[test]
fn better_is_strict_and_nan_is_never_best() {
    let check = |smaller_is_better, metric, best, expected| {
        let timetable = Timetable { smaller_is_better, ..timetable() };
        assert_eq!(timetable.is_best(metric, best), expected, "{metric} after {best:?}");
    };
    check(true, 1.0, None, true);
    check(true, f64::NAN, None, false);
    check(true, f64::NAN, Some(1.0), false);
    check(true, 1.0, Some(1.0), false);
    check(true, 0.5, Some(1.0), true);
    check(false, 0.5, Some(1.0), false);
    check(false, 1.5, Some(1.0), true);
}

#[test]
fn policy_decides_which_validations_save() {
    let check = |checkpoint_policy, is_best, expected| {
        let timetable = Timetable { checkpoint_policy, ..timetable() };
        assert_eq!(timetable.saves_after_validation(is_best), expected);
    };
    check(CheckpointPolicy::Best, true, true);
    check(CheckpointPolicy::Best, false, false);
    check(CheckpointPolicy::All, false, true);
    check(CheckpointPolicy::None, true, false);
}

#[test]
fn workload_ends_at_the_next_scheduling_boundary() {
    let check = |batches, granted, expected| {
        assert_eq!(timetable().workload_end(batches, granted), expected, "{batches} of {granted}");
    };
    // Rows every 4, validations every 6, checkpoints every 9.
    check(0, 100, 4);
    check(4, 100, 6);
    check(6, 100, 8);
    check(8, 100, 9);
    check(35, 100, 36);
    check(36, 100, 40);
    check(8, 8, 8);
    check(5, 6, 6);
    assert_eq!(
        [0, 1, 10, 19, 20].map(|batches| timetable().epoch_that_begins(batches)),
        [Some(0), None, Some(1), None, Some(2)]
    );
}

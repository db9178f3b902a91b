//! Tests of the order of writes.

use std::fs::File;
use std::time::{Duration, Instant, SystemTime};

use serde_json::json;
use stoker_api::contract::{CONTRACT_VERSION, Directive, Report, ReportEvent};
use stoker_api::experiment::{DesiredState, ExperimentSpec, ExperimentStatus, Phase};
use stoker_api::time::Timestamp;
use stoker_api::validate::validate;

use super::*;

/// Record of a random search, without a runner.
struct Case {
    _root: tempfile::TempDir,
    folder: RecordDir,
    valid: ValidExperiment,
}

impl Case {
    fn new(max_concurrent: u32) -> Self {
        let spec = json!({
            "entrypoint": {"command": ["train"]},
            "hyperparameters": {"x": {"double": {"min": 0.0, "max": 1.0}}},
            "searcher": {
                "metric": "loss", "maxLength": {"batches": 4},
                "random": {"maxTrials": 5, "maxConcurrentTrials": max_concurrent},
            },
        });
        let spec: ExperimentSpec = serde_json::from_value(spec).unwrap();
        let valid = validate("a", &spec).unwrap();
        let mut experiment = Experiment::new("a", valid.spec.clone());
        experiment.status = Some(ExperimentStatus::default());
        let root = tempfile::tempdir().unwrap();
        let folder = RecordDir::new(root.path().to_owned());
        folder.create().unwrap();
        folder.save_experiment(&experiment).unwrap();
        Self { _root: root, folder, valid }
    }

    /// Returns the state of a new runner, which has taken in the record. Counts in the status are
    /// written only with something else.
    fn start(&self) -> State {
        let experiment = self.folder.experiment().unwrap().unwrap();
        let trials = self.folder.trials().unwrap();
        let folder = self.folder.clone();
        let mut state = State::new(experiment, trials, vec![], &self.valid, 7, folder).unwrap();
        state.status_file.interval = Duration::MAX;
        state.settle().unwrap();
        state
    }

    /// Returns the indexes of the trials on disk.
    fn written(&self) -> Vec<u32> {
        self.folder.trials().unwrap().into_keys().collect()
    }
}

/// Returns the report of a result at the end of the first attempt.
fn result() -> Report {
    let metrics = [("loss".to_owned(), "0.5".to_owned())].into();
    let event = ReportEvent::Validated { metrics, granted_units: Some(4) };
    Report { version: CONTRACT_VERSION, attempt: 0, batches: 4, event }
}

#[test]
fn new_trials_are_written_with_their_first_attempt() {
    let case = Case::new(3);
    let mut state = case.start();
    assert_eq!(state.trials.len(), 3);
    assert!(case.written().is_empty());
    // A gap would count as a deleted trial.
    state.begin(1, 0, "token").unwrap();
    assert_eq!(case.written(), [0, 1]);
    state.begin(0, 0, "token").unwrap();
    assert_eq!(case.written(), [0, 1]);
    state.finish_status();
    assert_eq!(case.written(), [0, 1, 2]);
}

#[test]
fn crash_before_the_write_of_new_trials_changes_nothing() {
    let case = Case::new(1);
    let first = case.start().trials;
    assert!(case.written().is_empty());
    let mut state = case.start();
    assert_eq!(state.trials, first);
    state.begin(0, 0, "token").unwrap();
    state.settle().unwrap();
    assert_eq!(state.report(0, &result()).unwrap(), Directive::Stop);
    assert_eq!((state.trials.len(), case.written()), (2, vec![0]));
    let second = state.trials.remove(&1).unwrap();
    drop(state);
    // The attempt has ended with its runner. The result and the turn that follows from it remain.
    let mut state = case.start();
    assert_eq!(state.trials[&0].status.phase, Phase::Completed);
    assert_eq!(state.trials[&1], second);
    state.begin(1, 0, "token").unwrap();
    assert_eq!(case.written(), [0, 1]);
}

/// Writes a record of a live attempt that started 10 hours ago, and of a runner that was last alive
/// after `alive_after` seconds. Returns when the attempt ended according to the next runner, in
/// seconds after its start.
fn end_of_orphan(alive_after: Option<i64>) -> i64 {
    let case = Case::new(1);
    let mut state = case.start();
    state.begin(0, 0, "token").unwrap();
    state.tick();
    let started_at = now().0 - 36_000;
    let mut record = state.trials[&0].clone();
    record.status.attempts[0].started_at = Some(Timestamp(started_at));
    case.folder.save_trial(&record).unwrap();
    drop(state);
    let set_time = |name: &str, after: i64| {
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs((started_at + after) as u64);
        let file = File::options().write(true).open(case.folder.path().join(name)).unwrap();
        file.set_modified(time).unwrap();
    };
    set_time("trials/0.json", 60);
    match alive_after {
        Some(after) => set_time("alive", after),
        None => std::fs::remove_file(case.folder.path().join("alive")).unwrap(),
    }
    let attempt = case.start().trials[&0].status.attempts[0].clone();
    assert_eq!(attempt.end, Some(AttemptEnd::RunnerLost));
    attempt.ended_at.unwrap().0 - started_at
}

#[test]
fn attempts_end_when_their_runner_was_last_alive() {
    assert_eq!(end_of_orphan(Some(3600)), 3600);
    assert_eq!(end_of_orphan(Some(30)), 60, "the trial was written later");
    assert_eq!(end_of_orphan(None), 60, "the runner was of an earlier version");
    assert_eq!(end_of_orphan(Some(-100)), 60);
}

#[test]
fn preempted_attempts_name_the_request_that_stopped_them() {
    let check = |change: fn(&mut State), expected: Option<&str>| {
        let case = Case::new(1);
        let mut state = case.start();
        state.begin(0, 0, "token").unwrap();
        change(&mut state);
        state.end(0, AttemptEnd::Preempted, None);
        let attempt = &state.trials[&0].status.attempts[0];
        assert_eq!(attempt.end, Some(AttemptEnd::Preempted));
        assert_eq!(attempt.message.as_deref(), expected);
    };
    check(|_| {}, None);
    check(|state| state.is_pausing = true, Some("stopped with the runner"));
    let pause: fn(&mut State) = |state| state.experiment.spec.state = DesiredState::Paused;
    check(pause, Some("the experiment was paused"));
}

#[test]
fn result_is_written_with_its_turn_before_the_answer() {
    let case = Case::new(1);
    let mut state = case.start();
    state.begin(0, 0, "token").unwrap();
    let on_disk = || case.folder.trials().unwrap().remove(&0).unwrap();
    let num_of = |record: TrialRecord| (record.status.facts.len(), record.spec.grants.len());
    let mut record = on_disk();
    let searched = trial::SearchedMetric {
        name: "loss",
        smaller_is_better: true,
        others: &[],
        is_copied: false,
    };
    trial::record_report(&mut record, &result(), &searched);
    state.save_with_turn(record).unwrap();
    assert_eq!(num_of(on_disk()), (0, 0));
    state.settle().unwrap();
    assert_eq!(num_of(on_disk()), (1, 1));
    // A write of another trial does not overtake a fact.
    state.begin(1, 0, "token").unwrap();
    let mut record = state.trials[&1].clone();
    trial::record_report(&mut record, &result(), &searched);
    state.save_with_turn(record).unwrap();
    state.save(state.trials[&0].clone()).unwrap();
    assert_eq!(num_of(case.folder.trials().unwrap().remove(&1).unwrap()), (1, 0));
}

#[test]
fn failed_write_answers_no_report() {
    let case = Case::new(1);
    let mut state = case.start();
    state.begin(0, 0, "token").unwrap();
    let (trials, moved) = (case.folder.path().join("trials"), case.folder.path().join("moved"));
    std::fs::rename(&trials, &moved).unwrap();
    state.report(0, &result()).unwrap_err();
    assert!(state.happenings.is_empty(), "the result is not recorded: {:?}", state.happenings);
    std::fs::rename(&moved, &trials).unwrap();
    state.trouble.as_mut().unwrap().retry_at = Instant::now();
    assert_eq!(state.report(0, &result()).unwrap(), Directive::Stop);
    assert_eq!(state.happenings.len(), 1);
    assert_eq!(case.folder.trials().unwrap()[&0].status.facts.len(), 1);
}

/// Rank 0 reports that it was ended, because another rank had failed.
#[test]
fn rejecting_rank_of_a_gang_gives_the_reason() {
    let mut case = Case::new(1);
    case.valid.spec.resources.slots_per_trial = 2;
    let mut state = case.start();
    state.begin(0, 0, "token").unwrap();
    let message = Some("preempted by a signal".to_owned());
    let event = ReportEvent::Exiting { code: 79, message };
    state.report(0, &Report { version: CONTRACT_VERSION, attempt: 0, batches: 0, event }).unwrap();
    state.end(0, AttemptEnd::InvalidHyperparameters, Some("rank 1: no batch size".to_owned()));
    assert_eq!(state.trials[&0].status.message.as_deref(), Some("rank 1: no batch size"));
}

#[test]
fn unrecoverable_error_closes_the_trial_at_once() {
    let mut case = Case::new(1);
    case.valid.spec.max_restarts = 5;
    let mut state = case.start();
    state.begin(0, 0, "token").unwrap();
    state.end_unrecoverable(0, Some("searched metric loss not found".to_owned()));
    let message = "failed once; last failure: searched metric loss not found";
    assert_eq!(state.trials[&0].status.message.as_deref(), Some(message));
    assert!(state.back_off(0).is_none());
}

#[test]
fn failure_that_lasts_is_noted_once() {
    let case = Case::new(1);
    let mut state = case.start();
    let (sender, notes) = tokio::sync::mpsc::unbounded_channel();
    state.notes = Some(sender);
    for trial in [0, 1, 0, 1, 1] {
        state.fail(Failure::System(format!("cannot write trials/{trial}.json")));
        state.trouble.as_mut().unwrap().retry_at = Instant::now();
        state.settle().unwrap();
    }
    // One for each message.
    assert_eq!(notes.len(), 2);
}

#[test]
fn attempt_without_a_process_ends_after_a_failed_write() {
    let case = Case::new(1);
    let mut state = case.start();
    let recover = |state: &mut State| {
        state.fail(Failure::System("cannot write".to_owned()));
        state.trouble.as_mut().unwrap().retry_at = Instant::now();
        state.settle().unwrap();
    };
    // The file is replaced, then the write fails.
    let mut record = state.trials[&0].clone();
    trial::begin_attempt(&mut record, 0);
    case.folder.save_trial(&record).unwrap();
    recover(&mut state);
    let ended = case.folder.trials().unwrap()[&0].status.attempts[0].end;
    assert_eq!(ended, Some(AttemptEnd::NotStarted));
    assert!(matches!(state.next(0), NextStep::Start { attempt: 1, .. }));
    state.begin(0, 1, "token").unwrap();
    recover(&mut state);
    assert_eq!(trial::live_attempt(&state.trials[&0]), Some(1), "this one has a process");
}

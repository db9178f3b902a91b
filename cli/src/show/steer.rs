//! Changes of the desired state of local runs and jobs, and of single trials.

use std::marker::PhantomData;
use std::path::PathBuf;

use serde_json::json;
use stoker_api::experiment::{DesiredState, Experiment, Phase};
use stoker_api::trial::DesiredTrialState;
use stoker_api::validate::{ValidExperiment, validate_started};

use super::{RecordedRun, Runner};
use crate::cluster::resource::ClusterResource;
use crate::commands::names::TrialRef;
use crate::describe::desired;
use crate::failure::Failure;
use crate::print::{self, Output};
use crate::run::record::{self, Lock, RecordDir, is_locked};
use crate::run::request::{LockedRequest, is_final, may_follow};
use crate::run::{end_without_runner, setup};
use crate::run_root::RunRoot;
use crate::stored::is_interrupted;

/// Files of a local run or job.
#[derive(Debug)]
pub(crate) struct RunFiles {
    pub(crate) record: RecordDir,
    uid: String,
    /// Locked by the runner.
    pub(crate) lock: PathBuf,
    /// Locked by trainers.
    pub(crate) trainers: PathBuf,
    /// UID of the latest run with the name.
    pub(crate) current: PathBuf,
}

impl RunFiles {
    /// Returns the files of the run or job with this name and UID. `key` names its lock.
    pub(crate) fn new(run_root: &RunRoot, key: &str, name: &str, uid: &str) -> Self {
        let file = |suffix: &str| run_root.records_dir().join(format!("{key}.{suffix}"));
        Self {
            record: RecordDir::new(run_root.record_dir(name, uid)),
            uid: uid.to_owned(),
            lock: file("lock"),
            trainers: file("trainers"),
            current: file("current"),
        }
    }

    /// Returns the files of a run.
    ///
    /// # Errors
    ///
    /// The record is only in the storage, or cannot be read on this machine. `verb` is what the
    /// command cannot do.
    pub(crate) fn of(root: Option<&str>, run: &RecordedRun, verb: &str) -> Result<Self, Failure> {
        let (paths, id) = (&run.paths, run.id());
        let run_root = RunRoot::resolve(root, None)?;
        if run.runner == Runner::Elsewhere {
            let record = RecordDir::new(run_root.record_dir(&paths.name, &paths.uid));
            return Err(match unreadable(&record) {
                Some(error) => Failure::System(format!(
                    "cannot {verb} {id}: its record on this machine cannot be read: {error}; run \
                     the command as the owner of the file, or restore the file if it is damaged"
                )),
                None if is_interrupted(&run.experiment) => Failure::Input(format!(
                    "cannot {verb} {id}: its record is only in the storage; use the same command \
                     on the machine that ran it"
                )),
                None => Failure::Input(format!(
                    "cannot {verb} {id}: its record is only in the storage, so a cluster or \
                     another machine runs it; use the same command there"
                )),
            });
        }
        let key = format!("{}.{}", paths.namespace, paths.name);
        Ok(Self::new(&run_root, &key, &paths.name, &paths.uid))
    }

    /// Returns whether this is the latest run with its name.
    pub(crate) fn is_current(&self) -> Result<bool, Failure> {
        Ok(setup::current_uid(&self.current)?.as_deref() == Some(&self.uid))
    }

    /// Returns whether a runner is alive.
    pub(crate) fn has_runner(&self) -> Result<bool, Failure> {
        // The lock is that of the latest run.
        Ok(is_locked(&self.lock) && self.is_current()?)
    }

    /// Takes the lock of the record; `None` if a runner holds it.
    pub(crate) fn lock_if_free(&self) -> Result<Option<Lock>, Failure> {
        match is_locked(&self.lock) {
            true => Ok(None),
            false => match Lock::take(&self.lock) {
                Ok(lock) => Ok(Some(lock)),
                // A runner has started since.
                Err(_) if is_locked(&self.lock) => Ok(None),
                Err(error) => Err(error),
            },
        }
    }
}

/// Returns why a record on this machine cannot be read; `None` if it can, or does not exist.
fn unreadable(record: &RecordDir) -> Option<Failure> {
    match record.experiment() {
        Ok(Some(_)) => record.trials().err(),
        Ok(None) => None,
        Err(error) => Some(error),
    }
}

/// A desired state that was written. No other command changes the requests until this is dropped.
#[derive(Debug)]
pub(crate) struct RequestedState<K> {
    kind: PhantomData<K>,
    state: DesiredState,
    is_changed: bool,
    /// The request before the change.
    before: Option<DesiredState>,
    locked: LockedRequest,
}

impl<K: ClusterResource> RequestedState<K> {
    /// Writes the desired state of a run or job. `read` reads its record.
    pub(crate) fn write(
        files: &RunFiles,
        name: &str,
        state: DesiredState,
        read: impl FnOnce() -> Result<K, Failure>,
    ) -> Result<Self, Failure> {
        let (word, run) = (K::KIND_NAME, K::RUN_COMMAND);
        let remedy = after_end::<K>(state);
        let cannot = |why: String| cannot_change::<K>(name, &why);
        if !files.is_current()? {
            return Err(cannot("a later run with --fresh has replaced it".to_owned()));
        }
        // Read after the lock: other commands may have changed the state before.
        let mut locked = LockedRequest::open(files.record.path())?;
        let mut object = read()?;
        let phase = object.phase();
        if phase.is_terminal() {
            return Err(cannot(format!("it has ended ({phase:?}){remedy}")));
        }
        let before = locked.get().state.unwrap_or(*object.state());
        if !may_follow(before, state) {
            return Err(cannot(format!(
                "a cancelled {word} stays cancelled and can only be killed; use `{run} --fresh` to \
                 start over"
            )));
        }
        let request = locked.get().clone();
        locked.set(Some(state), request.killed_trials)?;
        let is_changed = before != state;
        Ok(Self { kind: PhantomData, state, is_changed, before: request.state, locked })
    }

    /// Restores the request of a run or job that has ended in this phase since its record was read.
    /// Another runner would follow the request otherwise. Returns the error for the user.
    pub(crate) fn withdraw(mut self, name: &str, phase: Phase) -> Failure {
        let killed = self.locked.get().killed_trials.clone();
        if let Err(error) = self.locked.set(self.before, killed) {
            return error;
        }
        let why = format!("it has ended ({phase:?}) meanwhile{}", after_end::<K>(self.state));
        cannot_change::<K>(name, &why)
    }

    /// Prints the effect: that of the runner, or of this command without a runner.
    pub(crate) fn print(&self, name: &str, root: Option<&str>, has_runner: bool, output: Output) {
        match output {
            Output::Json => {
                let (word, state) = (K::KIND_NAME, self.state);
                print::out(json!({word: name, "state": state, "changed": self.is_changed}));
            }
            Output::Text => print::out(self.sentence(name, root, has_runner)),
        }
    }

    /// Returns the effect: that of the runner, or of this command without a runner.
    fn sentence(&self, name: &str, root: Option<&str>, has_runner: bool) -> String {
        let effect = match has_runner {
            true => self.effect(),
            false => without_runner::<K>(name, root, self.state),
        };
        format!("{} {name}{effect}", K::KIND_NAME)
    }

    fn effect(&self) -> String {
        match (self.is_changed, self.state) {
            (false, state) => format!(": the desired state is already {}", desired(state)),
            (_, DesiredState::Active) => " resumes".to_owned(),
            (_, DesiredState::Paused) => format!(" is being paused: {}", K::STOP_EFFECT),
            (_, DesiredState::Cancelled) => format!(" is being cancelled: {}", K::STOP_EFFECT),
            (_, DesiredState::Killed) => " is being killed".to_owned(),
        }
    }
}

fn cannot_change<K: ClusterResource>(name: &str, why: &str) -> Failure {
    Failure::Input(format!("cannot change the state of {} `{name}`: {why}", K::KIND_NAME))
}

/// Returns the remedy for a user who wants this state of a run or job that has ended.
fn after_end<K: ClusterResource>(state: DesiredState) -> String {
    match state {
        DesiredState::Active => format!("; use `{} --fresh` to start over", K::RUN_COMMAND),
        DesiredState::Paused | DesiredState::Cancelled | DesiredState::Killed => String::new(),
    }
}

/// Returns the effect of a state without a runner.
fn without_runner<K: ClusterResource>(
    name: &str,
    root: Option<&str>,
    state: DesiredState,
) -> String {
    let (word, run) = (K::KIND_NAME, K::RUN_COMMAND);
    let root = root.map_or_else(String::new, |root| format!(" --root {root}"));
    match state {
        DesiredState::Active => format!(" is active; no runner is alive: `{run}` runs it"),
        DesiredState::Paused => format!(
            " is paused; no runner is alive: the next `{run}` waits for `stoker {word} activate \
             {name}{root}`"
        ),
        DesiredState::Cancelled => " is cancelled; no runner was alive".to_owned(),
        DesiredState::Killed => " is killed; no runner was alive".to_owned(),
    }
}

/// Sets the desired state of a run. A runner follows within a second. Without one, a cancelled or
/// killed run ends at once, and the next runner follows the other states.
pub(crate) async fn set_state(
    root: Option<&str>,
    name: &str,
    state: DesiredState,
    output: Output,
) -> Result<(), Failure> {
    let run = RecordedRun::open(root, name).await?;
    let (requested, has_runner, warning) = request_state(root, &run, name, state).await?;
    if let Some(warning) = warning {
        print::err(format!("stoker: {warning}"));
    }
    requested.print(name, root, has_runner, output);
    Ok(())
}

/// Same as [`set_state`]. Returns the effect as a sentence.
pub(crate) async fn set_state_of(
    root: Option<&str>,
    run: &RecordedRun,
    state: DesiredState,
) -> Result<String, Failure> {
    let name = run.name();
    let (requested, has_runner, warning) = request_state(root, run, &name, state).await?;
    let effect = requested.sentence(&name, root, has_runner);
    Ok([Some(effect), warning].into_iter().flatten().collect::<Vec<_>>().join("\n"))
}

/// Writes the desired state of a run, and applies it without a runner. Returns whether there is
/// one, and a warning.
async fn request_state(
    root: Option<&str>,
    run: &RecordedRun,
    name: &str,
    state: DesiredState,
) -> Result<(RequestedState<Experiment>, bool, Option<String>), Failure> {
    let files = RunFiles::of(root, run, "change the state of")?;
    let requested = RequestedState::write(&files, name, state, || recorded(run, &files))?;
    follow(requested, run, &files, name).await
}

/// Reads the record of a run again.
fn recorded(run: &RecordedRun, files: &RunFiles) -> Result<Experiment, Failure> {
    Ok(files.record.experiment()?.unwrap_or_else(|| run.experiment.clone()))
}

/// Records the requested state, unless there is a runner. Returns whether there is one, and a
/// warning if files remain.
async fn follow(
    requested: RequestedState<Experiment>,
    run: &RecordedRun,
    files: &RunFiles,
    name: &str,
) -> Result<(RequestedState<Experiment>, bool, Option<String>), Failure> {
    let lock = files.lock_if_free()?;
    // Read after the lock: a runner may have recorded the end since the command read the record. It
    // may still be alive, but reads no more requests.
    let mut experiment = recorded(run, files)?;
    let phase = experiment.phase();
    let is_obeyed = is_final(requested.state) && experiment.spec.state == requested.state;
    if phase.is_terminal() && !is_obeyed {
        return Err(requested.withdraw(name, phase));
    }
    let Some(_lock) = lock else { return Ok((requested, true, None)) };
    if !is_final(requested.state) {
        experiment.spec.state = requested.state;
        files.record.save_experiment(&experiment)?;
        return Ok((requested, false, None));
    }
    record::wait_for_trainers(&files.trainers)?;
    let valid = valid(run)?;
    let ended = end_without_runner(&files.record, &valid, run.storage(), &run.paths).await?;
    let warning = ended.map(|error| {
        format!(
            "{error}; the experiment has ended, and the next `stoker run FILE` cleans up its files"
        )
    });
    Ok((requested, false, warning))
}

fn valid(run: &RecordedRun) -> Result<ValidExperiment, Failure> {
    validate_started(&run.paths.name, &run.experiment.spec).map_err(|errors| {
        let errors: Vec<String> = errors.iter().map(ToString::to_string).collect();
        Failure::Input(format!("the spec of {} is invalid: {}", run.id(), errors.join("; ")))
    })
}

/// Kills a trial of a run. Without a runner, the trial ends when the next one starts.
pub(crate) async fn kill_trial(
    root: Option<&str>,
    trial: &TrialRef,
    output: Output,
) -> Result<(), Failure> {
    let run = RecordedRun::open(root, &trial.experiment).await?;
    let files = RunFiles::of(root, &run, "kill a trial of")?;
    let cannot = |why: String| Failure::Input(format!("cannot kill trial `{trial}`: {why}"));
    if !files.is_current()? {
        return Err(cannot("a later run with --fresh has replaced its run".to_owned()));
    }
    let phase = run.trial(trial.index)?.status.phase;
    if phase.is_terminal() {
        return Err(cannot(format!("it has ended ({phase:?})")));
    }
    let mut locked = LockedRequest::open(files.record.path())?;
    let mut killed = locked.get().killed_trials.clone();
    killed.insert(trial.index);
    locked.set(locked.get().state, killed)?;
    let next = match is_locked(&files.lock) {
        true => "is being killed",
        false => "ends when `stoker run FILE` runs again; no runner is alive",
    };
    match output {
        Output::Json => {
            let name = trial.to_string();
            print::out(json!({"trial": name, "wanted": DesiredTrialState::Kill}));
        }
        Output::Text => print::out(format!("trial {trial} {next}")),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::request::Request;

    #[tokio::test]
    async fn request_that_meets_the_end_is_withdrawn() {
        let root = tempfile::tempdir().unwrap();
        let run_root = RunRoot::resolve(root.path().to_str(), None).unwrap();
        let record = RecordDir::new(run_root.record_dir("a", "0123456789"));
        record.create().unwrap();
        std::fs::write(run_root.records_dir().join("default.a.current"), "0123456789\n").unwrap();
        let running: Experiment = serde_json::from_value(json!({
            "apiVersion": "stoker.dev/v1alpha1", "kind": "Experiment",
            "metadata": {"name": "a", "namespace": "default", "uid": "0123456789"},
            "spec": {
                "entrypoint": {"command": ["true"]},
                "searcher": {"metric": "loss", "maxLength": {"batches": 4}, "single": {}},
            },
        }))
        .unwrap();
        let mut ended = running.clone();
        ended.status.get_or_insert_default().phase = Phase::Completed;
        let states = [DesiredState::Paused, DesiredState::Cancelled, DesiredState::Killed];
        for (state, has_runner) in states.into_iter().flat_map(|of| [(of, false), (of, true)]) {
            record.save_experiment(&running).unwrap();
            let run = RecordedRun::open_local(&run_root, ["a", "0123456789"], true).unwrap();
            let files = RunFiles::of(root.path().to_str(), &run, "stop").unwrap();
            let read = || recorded(&run, &files);
            let requested = RequestedState::write(&files, "a", state, read).unwrap();
            // The runner records the end, and exits or copies its record to the storage.
            let _lock = has_runner.then(|| Lock::take(&files.lock).unwrap());
            record.save_experiment(&ended).unwrap();
            let error = follow(requested, &run, &files, "a").await.unwrap_err().to_string();
            assert!(error.ends_with("it has ended (Completed) meanwhile"), "{error}");
            assert_eq!(Request::read(record.path()).unwrap().state, None);
            let recorded = record.experiment().unwrap().unwrap();
            assert_eq!(
                (recorded.spec.state, recorded.phase()),
                (ended.spec.state, Phase::Completed)
            );
        }
    }

    /// The storage has a copy of each record.
    #[tokio::test]
    async fn unreadable_local_records_are_not_of_another_machine() {
        let root = tempfile::tempdir().unwrap();
        let run_root = RunRoot::resolve(root.path().to_str(), None).unwrap();
        let check = async |expected: &[&str]| {
            let run = RecordedRun::open(root.path().to_str(), "mnist").await.unwrap();
            let error = RunFiles::of(root.path().to_str(), &run, "wait for").unwrap_err();
            let error = error.to_string();
            assert!(error.starts_with("cannot wait for mnist-0b3f9c1e: its record "), "{error}");
            assert!(expected.iter().all(|part| error.contains(part)), "{error}");
        };
        let (mut experiment, _) = crate::explain::tests::record();
        let folder = root.path().join("ml/mnist-0b3f9c1e");
        std::fs::create_dir_all(folder.join("trials")).unwrap();
        record::write_json(&folder.join("record.json"), &experiment).unwrap();
        check(&["a cluster or another machine runs it"]).await;
        experiment.metadata.annotations = Some([("stoker.dev/root".into(), "/".into())].into());
        experiment.status.get_or_insert_default().phase = Phase::Paused;
        record::write_json(&folder.join("record.json"), &experiment).unwrap();
        check(&["use the same command on the machine that ran it"]).await;

        let local = RecordDir::new(run_root.record_dir("mnist", "0b3f9c1e-77aa"));
        local.create().unwrap();
        local.save_experiment(&experiment).unwrap();
        let trial = local.path().join("trials/0.json");
        std::fs::write(&trial, "{").unwrap();
        let unreadable = "on this machine cannot be read: cannot read ";
        check(&[unreadable, "trials/0.json: EOF", "restore the file"]).await;
        std::fs::remove_file(trial).unwrap();
        // A directory cannot be read as a file, not even by root.
        let file = local.path().join("experiment.json");
        std::fs::remove_file(&file).unwrap();
        std::fs::create_dir(&file).unwrap();
        let reason = "experiment.json: Is a directory (os error 21); run the command as the owner";
        check(&[unreadable, reason]).await;
    }
}

//! Runs and trials as commands show them. Without a runner, no program of a local run is alive, but
//! the record still has the state in which a runner was killed.

use stoker_api::experiment::{DesiredState, Experiment, Phase};
use stoker_api::trial::Trial;
use stoker_engine::experiment::explain::DisplayState;
use stoker_engine::trial::TrialRecord;

use super::{RecordedRun, Runner};
use crate::explain::Explained;
use crate::stored::is_interrupted;

impl RecordedRun {
    /// Returns the phase. If no runner trains a local experiment, this is `Paused` if the user has
    /// paused it, else `Stopped`.
    pub(crate) fn phase(&self) -> String {
        let phase = self.experiment.status.as_ref().map(|status| status.phase).unwrap_or_default();
        match phase.is_terminal() || !self.lacks_runner() {
            true => format!("{phase:?}"),
            false if self.is_paused() => "Paused".to_owned(),
            false => "Stopped".to_owned(),
        }
    }

    /// Returns the experiment. Without a runner, no trial runs.
    pub(super) fn into_shown(self) -> Experiment {
        let lacks_runner = self.lacks_runner();
        let mut experiment = self.experiment;
        if let Some(status) = experiment.status.as_mut().filter(|_| lacks_runner) {
            status.trials_running = 0;
        }
        experiment
    }

    /// Returns a trial as the object that a cluster would hold. Without a runner, it does not run.
    pub(super) fn shown(&self, trial: &TrialRecord, explained: &Explained) -> Trial {
        let mut object = self.object(trial);
        let state = explained.state(trial);
        // The process of a trial that waits for others, or that the search has paused, may have run
        // when the runner was killed.
        let runs = object.status.as_ref().is_some_and(|status| status.phase == Phase::Running);
        let is_open = runs || state == DisplayState::Queued;
        if let Some(status) = object.status.as_mut().filter(|_| self.lacks_runner())
            && is_open
        {
            let is_paused = self.is_paused() || state == DisplayState::Paused;
            status.phase = if is_paused { Phase::Paused } else { Phase::Pending };
        }
        object
    }

    /// Returns whether no runner works on a local run, as far as this machine knows.
    pub(super) fn lacks_runner(&self) -> bool {
        match self.runner {
            Runner::Running => false,
            Runner::Stopped => true,
            Runner::Elsewhere => is_interrupted(&self.experiment),
        }
    }

    fn is_paused(&self) -> bool {
        self.experiment.spec.state == DesiredState::Paused
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use stoker_api::trial::Attempt;

    use super::*;

    /// The runner was killed while a trial ran.
    #[tokio::test]
    async fn nothing_runs_without_a_runner() {
        for (state, phase, of_trial) in
            [("paused", "Paused", Phase::Paused), ("active", "Stopped", Phase::Pending)]
        {
            let root = tempfile::tempdir().unwrap();
            let folder = root.path().join("default/search-00000001");
            std::fs::create_dir_all(folder.join("trials")).unwrap();
            let record = json!({
                "apiVersion": "stoker.dev/v1alpha1", "kind": "Experiment",
                "metadata": {"name": "search", "namespace": "default", "uid": "00000001-1"},
                "spec": {
                    "entrypoint": {"command": ["true"]}, "state": state,
                    "searcher": {"metric": "loss", "maxLength": {"batches": 4}, "single": {}},
                },
                "status": {"phase": "Running", "trialsRunning": 1},
            });
            std::fs::write(folder.join("record.json"), record.to_string()).unwrap();
            let mut run = RecordedRun::open(root.path().to_str(), "search").await.unwrap();
            run.runner = Runner::Stopped;
            let mut trial = crate::explain::tests::record().1[0].clone();
            trial.status.phase = Phase::Running;
            trial.status.attempts = vec![Attempt::default()];
            let explained = Explained::unavailable(String::new()).with_runner(false);
            assert_eq!(run.phase(), phase);
            assert_eq!(run.shown(&trial, &explained).status.unwrap().phase, of_trial);
            // Between two parts of its training.
            trial.status.attempts.clear();
            assert_eq!(explained.state(&trial), DisplayState::Waiting);
            assert_eq!(run.shown(&trial, &explained).status.unwrap().phase, of_trial);
            assert_eq!(run.into_shown().status.unwrap().trials_running, 0);
        }
    }

    /// A runner that stops pauses all trials. Only the storage has the record.
    #[tokio::test]
    async fn interrupted_runs_in_the_storage_are_stopped() {
        let check = async |state: &str, annotations: Value, phase: &str, trial: DisplayState| {
            let root = tempfile::tempdir().unwrap();
            let folder = root.path().join("ml/mnist-0b3f9c1e");
            std::fs::create_dir_all(folder.join("trials")).unwrap();
            let (mut experiment, trials) = crate::explain::tests::record();
            experiment.metadata.annotations = serde_json::from_value(annotations).unwrap();
            experiment.spec.state = serde_json::from_value(json!(state)).unwrap();
            experiment.status.get_or_insert_default().phase = Phase::Paused;
            let record = serde_json::to_vec(&experiment).unwrap();
            std::fs::write(folder.join("record.json"), record).unwrap();
            let mut run = RecordedRun::open(root.path().to_str(), "mnist").await.unwrap();
            let mut record = trials[1].clone();
            record.status.phase = Phase::Running;
            record.status.attempts = vec![Attempt::default()];
            run.trials = trials.into_iter().map(|trial| (trial.spec.index, trial)).collect();
            run.trials.insert(1, record.clone());
            assert_eq!((run.runner, run.phase()), (Runner::Elsewhere, phase.to_owned()));
            assert_eq!(run.explained().state(&record), trial);
        };
        let local = json!({ "stoker.dev/root": "/data" });
        check("active", local.clone(), "Stopped", DisplayState::Queued).await;
        check("paused", local, "Paused", DisplayState::Running).await;
        check("active", json!({}), "Paused", DisplayState::Running).await;
    }
}

//! The experiment's status, which summarizes its trials.

use std::time::{Duration, Instant};

use stoker_api::experiment::{DesiredState, Experiment, ExperimentStatus, Phase};
use stoker_engine::experiment::{set_phase, set_refusal};
use stoker_engine::trial::TrialRecord;
use stoker_ui::quoted;

use super::State;
use crate::cluster::text::now;
use crate::failure::Failure;
use crate::run::request::is_final;
use crate::run::setup::ANNOTATION_ROOT;
use crate::run_root;

/// Minimum interval between two writes of a status that differs only in counts and results.
///
/// They follow from the trials, so a crash loses nothing: the next runner derives them again.
const WRITE_INTERVAL: Duration = Duration::from_millis(200);

/// State of the status in the record.
#[derive(Debug)]
pub(super) struct StatusFile {
    written_at: Option<Instant>,
    /// Whether the status in memory is newer.
    is_behind: bool,
    /// Minimum interval between two writes.
    pub(super) interval: Duration,
}

impl Default for StatusFile {
    fn default() -> Self {
        Self { written_at: None, is_behind: false, interval: WRITE_INTERVAL }
    }
}

impl StatusFile {
    fn is_due(&self) -> bool {
        self.written_at.is_none_or(|at| at.elapsed() >= self.interval)
    }

    fn note_write(&mut self) {
        (self.written_at, self.is_behind) = (Some(Instant::now()), false);
    }
}

impl State {
    /// Returns the experiment's status.
    pub(crate) fn status(&self) -> ExperimentStatus {
        self.experiment.status.clone().unwrap_or_default()
    }

    /// Returns the experiment's phase.
    pub(crate) fn phase(&self) -> Phase {
        self.experiment.status.as_ref().map(|status| status.phase).unwrap_or_default()
    }

    /// Returns the part of the search that is done, from 0 to 1.
    pub(crate) fn progress(&self) -> f64 {
        self.summary.progress(&self.ledger, self.phase())
    }

    /// Brings the status up to date. A new phase or condition is written at once. Counts, results
    /// and changes between Pending and Running are written after [`WRITE_INTERVAL`] at the latest,
    /// with [`flush_status`](Self::flush_status).
    pub(super) fn save_status(&mut self) -> Result<(), Failure> {
        let is_cancelled = is_final(self.desired_state());
        let is_paused = self.is_paused() && !is_cancelled;
        let record_of = |index| self.trials.get(&index);
        let name = name_in_commands(&self.experiment);
        let status = self.summary.status(&self.ledger, is_cancelled, &name, record_of);
        let before = self.experiment.status.get_or_insert_default();
        let mut conditions = before.conditions.clone();
        if self.refusal.is_none() {
            // Only a refusal sets this condition in a local record.
            conditions.retain(|condition| condition.type_ != "Running");
        }
        let mut status = ExperimentStatus { conditions, ..status };
        if is_paused {
            let trials: Vec<&TrialRecord> = self.trials.values().collect();
            set_phase(&mut status, &trials, DesiredState::Paused);
        }
        set_refusal(&mut status, self.refusal.as_ref(), 0, now());
        // The log may be long. It is moved from one status to the other and not compared.
        let log = std::mem::take(&mut before.log);
        if *before == status {
            before.log = log;
            return Ok(());
        }
        let is_new_phase = status.phase != before.phase
            && ![status.phase, before.phase].iter().all(|phase| is_fleeting(*phase));
        let is_urgent = is_new_phase || status.conditions != before.conditions;
        status.log = log;
        let mut before = std::mem::replace(before, status);
        if !is_urgent && !self.status_file.is_due() {
            self.status_file.is_behind = true;
            return Ok(());
        }
        self.write_experiment().inspect_err(|_| {
            let status = self.experiment.status.get_or_insert_default();
            before.log = std::mem::take(&mut status.log);
            *status = before;
        })
    }

    /// Writes the status and new trials if the record is behind them and the last write is long
    /// enough ago.
    pub(super) fn flush_status(&mut self) {
        if self.status_file.is_due() {
            self.finish_status();
        }
    }

    /// Writes the status and new trials if the record is behind them.
    pub(crate) fn finish_status(&mut self) {
        let is_behind = self.status_file.is_behind || !self.waiting.is_empty();
        if is_behind && self.trouble.is_none() {
            // A failed write is repeated.
            let _ = self.write_experiment().map_err(|error| self.fail(error));
        }
    }

    /// Writes the experiment after all trials that wait.
    fn write_experiment(&mut self) -> Result<(), Failure> {
        self.write_waiting()?;
        self.folder.save_experiment(&self.experiment)?;
        self.status_file.note_write();
        Ok(())
    }

    /// Writes a changed experiment, then replaces it in memory.
    pub(super) fn save_experiment(&mut self, experiment: Experiment) -> Result<(), Failure> {
        self.write_waiting()?;
        self.folder.save_experiment(&experiment)?;
        self.experiment = experiment;
        self.status_file.note_write();
        Ok(())
    }
}

/// Returns the run ID of a local run with the argument by which commands find it anywhere. Runs in
/// several namespaces may have the same name.
fn name_in_commands(experiment: &Experiment) -> String {
    let metadata = &experiment.metadata;
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    let id = run_root::run_id(&text(&metadata.name), &text(&metadata.uid));
    match metadata.annotations.as_ref().and_then(|all| all.get(ANNOTATION_ROOT)) {
        Some(root) => format!("{id} --root {}", quoted(root)),
        None => id,
    }
}

/// Returns whether an experiment may enter and leave this phase with each trial.
fn is_fleeting(phase: Phase) -> bool {
    matches!(phase, Phase::Pending | Phase::Running)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn commands_on_local_runs_name_id_and_root() {
        let mut experiment: Experiment = serde_json::from_value(json!({
            "apiVersion": "stoker.dev/v1alpha1", "kind": "Experiment",
            "metadata": {"name": "a", "uid": "0123456789"},
            "spec": {
                "entrypoint": {"command": ["true"]},
                "searcher": {"metric": "loss", "maxLength": {"batches": 4}, "single": {}},
            },
        }))
        .unwrap();
        assert_eq!(name_in_commands(&experiment), "a-01234567");
        let root = (ANNOTATION_ROOT.to_owned(), "/data/my runs".to_owned());
        experiment.metadata.annotations = Some([root].into());
        assert_eq!(name_in_commands(&experiment), "a-01234567 --root '/data/my runs'");
    }
}

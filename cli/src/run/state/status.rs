//! The experiment's status, which summarizes its trials.

use std::time::{Duration, Instant};

use stoker_api::experiment::{DesiredState, Experiment, ExperimentStatus};
use stoker_engine::experiment::{set_phase, set_refusal};
use stoker_engine::trial::TrialRecord;

use super::State;
use crate::cluster::text::now;
use crate::failure::Failure;
use crate::run::request::is_final;

/// Minimum interval between two writes of a status that differs only in counts and results.
///
/// They follow from the trials, so a crash loses nothing: the next runner derives them again.
const WRITE_INTERVAL: Duration = Duration::from_millis(200);

/// State of the status in the record.
#[derive(Debug, Default)]
pub(super) struct StatusFile {
    written_at: Option<Instant>,
    /// Whether the status in memory is newer.
    is_behind: bool,
}

impl StatusFile {
    fn is_due(&self) -> bool {
        self.written_at.is_none_or(|at| at.elapsed() >= WRITE_INTERVAL)
    }
}

impl State {
    /// Returns the experiment's status.
    pub(crate) fn status(&self) -> ExperimentStatus {
        self.experiment.status.clone().unwrap_or_default()
    }

    /// Returns the part of the search that is done, from 0 to 1.
    pub(crate) fn progress(&self) -> f64 {
        self.summary.progress(&self.ledger, self.status().phase)
    }

    /// Brings the status up to date. A new phase or condition is written at once, counts and
    /// results after [`WRITE_INTERVAL`] at the latest, with [`flush_status`](Self::flush_status).
    pub(super) fn save_status(&mut self) -> Result<(), Failure> {
        let ExperimentStatus { log, conditions, phase, .. } = self.status();
        let is_cancelled = is_final(self.desired_state());
        let record_of = |index| self.trials.get(&index);
        let status = self.summary.status(&self.ledger, is_cancelled, record_of);
        let mut status = ExperimentStatus { log, conditions: conditions.clone(), ..status };
        if self.is_paused() && !is_cancelled {
            let trials: Vec<&TrialRecord> = self.trials.values().collect();
            set_phase(&mut status, &trials, DesiredState::Paused);
        }
        set_refusal(&mut status, self.refusal.as_ref(), 0, now());
        if self.experiment.status.as_ref() == Some(&status) {
            return Ok(());
        }
        if (status.phase, &status.conditions) == (phase, &conditions) && !self.status_file.is_due()
        {
            self.experiment.status = Some(status);
            self.status_file.is_behind = true;
            return Ok(());
        }
        let mut experiment = self.experiment.clone();
        experiment.status = Some(status);
        self.save_experiment(experiment)
    }

    /// Writes the status if the record is behind it and the last write is long enough ago.
    pub(super) fn flush_status(&mut self) {
        if self.status_file.is_due() {
            self.finish_status();
        }
    }

    /// Writes the status if the record is behind it.
    pub(crate) fn finish_status(&mut self) {
        if self.status_file.is_behind && self.trouble.is_none() {
            let experiment = self.experiment.clone();
            // A failed write is repeated.
            let _ = self.save_experiment(experiment).map_err(|error| self.fail(error));
        }
    }

    /// Writes the experiment, then replaces it in memory.
    pub(super) fn save_experiment(&mut self, experiment: Experiment) -> Result<(), Failure> {
        self.folder.save_experiment(&experiment)?;
        self.experiment = experiment;
        self.status_file = StatusFile { written_at: Some(Instant::now()), is_behind: false };
        Ok(())
    }
}

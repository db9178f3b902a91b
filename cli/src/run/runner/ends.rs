//! Ends of attempts, and waits before restarts.

use stoker_api::experiment::DesiredState;
use stoker_api::trial::AttemptEnd;
use stoker_engine::trial::{BackOff, TrialRecord};
use tokio::time::Instant;

use super::{Runner, View};
use crate::run::process::{self, TrainerOutcome};

/// Name of the file with the termination message of a gang, in the directory of the attempt.
pub(super) const TERMINATION_FILE: &str = "termination.json";

impl Runner<'_> {
    /// Records the end of an attempt.
    pub(super) fn record_outcome(&mut self, outcome: TrainerOutcome, view: &View) {
        let TrainerOutcome { trial: index, attempt, end, is_unrecoverable, message, log_error } =
            outcome;
        if self.running.get(&index).is_none_or(|running| running.attempt != attempt) {
            return;
        }
        self.running.remove(&index);
        self.devices.release(index);
        self.stop_requested_at.remove(&index);
        if let Some(error) = log_error {
            view.print_message(&format!(
                "trial {index}: cannot store the last lines of the log: {error}"
            ));
        }
        let message = self.rejection(index, attempt, end).or(message);
        match is_unrecoverable {
            true => self.shared.state().end_unrecoverable(index, message),
            false => self.shared.state().end(index, end, message),
        }
        if (index, attempt) == (0, 0) {
            self.hint_at_test(end);
        }
        self.wait_before_restart(index);
        self.record_copier.request_copy(index);
    }

    /// Returns the message of the rank that rejected the hyperparameters. The log may end with the
    /// lines of other ranks, which lost their connections to it.
    fn rejection(&self, index: u32, attempt: u32, end: AttemptEnd) -> Option<String> {
        if end != AttemptEnd::InvalidHyperparameters || self.slots_per_trial() == 1 {
            return None;
        }
        let folder = self.folder.attempt(index, attempt).ok()?;
        process::termination(&folder.join(TERMINATION_FILE))?.message
    }

    /// Recommends a smoke test if the program failed in the first attempt of the first trial,
    /// before it trained a batch. The message follows the end of the attempt.
    fn hint_at_test(&self, end: AttemptEnd) {
        let trained = |trial: &TrialRecord| trial.status.batches > 0;
        let has_trained = self.shared.state().trials.get(&0).is_some_and(trained);
        let is_failure = matches!(end, AttemptEnd::InvalidHyperparameters | AttemptEnd::UserError);
        if let Some(hint) = self.test_hint.clone().filter(|_| is_failure && !has_trained) {
            self.send_note(hint);
        }
    }

    /// Delays the next attempt after a failure. The message follows the end of the attempt.
    pub(super) fn wait_before_restart(&mut self, index: u32) {
        self.back_off.remove(&index);
        let back_off = self.shared.state().back_off(index);
        let is_stopping = self.interrupts.any() || self.obeyed.state != DesiredState::Active;
        if let Some(BackOff { wait, .. }) = back_off.filter(|_| !is_stopping) {
            self.send_note(format!("trial {index}: the next attempt starts in {wait:?}"));
            self.back_off.insert(index, Instant::now() + wait);
        }
    }

    /// Sends a message that is printed after the events that are known now.
    fn send_note(&self, text: String) {
        if let Some(notes) = &self.shared.state().notes {
            // The runner holds the receiver.
            let _ = notes.send(text);
        }
    }
}

//! Stops trials: on signals, on requests of commands, and at their deadlines.

use std::time::Duration;

use stoker_api::experiment::DesiredState;
use tokio::time::Instant;

use super::{Runner, View};
use crate::run::process::TrainerProcess;
use crate::run::request::Request;
use crate::run::signals::StopRequest;

/// Interval between two reads of the requests.
const READ_INTERVAL: Duration = Duration::from_millis(500);

/// Requests of commands that the runner has carried out.
#[derive(Debug, Default)]
pub(super) struct Obeyed {
    read_at: Option<Instant>,
    /// Why the latest read failed.
    error: Option<String>,
    pub(super) state: DesiredState,
}

impl Runner<'_> {
    /// Reads the requests of commands if that is due, and carries out the recorded ones.
    pub(super) fn obey(&mut self, view: &View) {
        if self.obeyed.read_at.is_none_or(|at| at.elapsed() >= READ_INTERVAL) {
            self.obeyed.read_at = Some(Instant::now());
            self.read_request(view);
        }
        let state = self.shared.state().desired_state();
        if state != self.obeyed.state {
            self.obeyed.state = state;
            self.announce(state, view);
            if matches!(state, DesiredState::Paused | DesiredState::Cancelled) {
                self.running.values().for_each(TrainerProcess::request_stop);
            }
        }
        let state = self.shared.state();
        for (index, running) in &mut self.running {
            if state.is_killed(*index) {
                running.kill_for_user();
            }
        }
    }

    /// Reads the requests of commands. A file that cannot be read changes nothing.
    fn read_request(&mut self, view: &View) {
        match Request::read(self.folder.path()) {
            Ok(request) => {
                self.obeyed.error = None;
                self.shared.state().set_request(request);
            }
            Err(error) => {
                let error = error.to_string();
                if self.obeyed.error.as_ref() != Some(&error) {
                    view.print_message(&format!("{error}; the run continues unchanged"));
                    self.obeyed.error = Some(error);
                }
            }
        }
    }

    fn announce(&self, state: DesiredState, view: &View) {
        let waits = match self.running.len() {
            0 => String::new(),
            _ => format!(
                "; waiting for {} to checkpoint and exit (at most {} s)",
                self.running_trials(),
                self.valid.spec.preemption_timeout_seconds
            ),
        };
        view.print_message(&match state {
            DesiredState::Active => "activated: trials resume".to_owned(),
            DesiredState::Paused => format!(
                "paused{waits}; `{}` resumes the experiment, and a signal ends this runner",
                self.paths.activate_command()
            ),
            DesiredState::Cancelled => format!("cancelled{waits}"),
            DesiredState::Killed => format!("killed: ending {}", self.running_trials()),
        });
    }

    fn running_trials(&self) -> String {
        match self.running.len() {
            1 => "one running trial".to_owned(),
            num => format!("{num} running trials"),
        }
    }

    /// Kills trials that have not exited within the preemption timeout after a stop request.
    pub(super) fn kill_overdue_trials(&mut self) {
        let timeout = Duration::from_secs(self.valid.spec.preemption_timeout_seconds.into());
        let state = self.shared.state();
        for (index, running) in &mut self.running {
            if !state.is_to_end(*index) {
                // The user has activated the experiment before the trial exited.
                self.stop_requested_at.remove(index);
                continue;
            }
            let since = self.stop_requested_at.entry(*index).or_insert_with(Instant::now);
            if since.elapsed() > timeout && !state.is_killed(*index) {
                running.kill();
            }
        }
    }

    /// Handles a signal: the first one asks all trials to exit, and a later one kills them.
    pub(super) fn interrupt(&mut self, view: &View) {
        let request = self.interrupts.record(Instant::now());
        if request == StopRequest::SameStop {
            return;
        }
        self.shared.state().is_pausing = true;
        let what = self.running_trials();
        if self.running.is_empty() {
            view.print_message("stopping: no trial is running");
        } else if request == StopRequest::Stop {
            view.print_message(&format!(
                "stopping: waiting for {what} to checkpoint and exit (at most {} s); send the \
                 signal again to kill immediately",
                self.valid.spec.preemption_timeout_seconds
            ));
            self.running.values().for_each(TrainerProcess::request_stop);
        } else {
            view.print_message(&format!("killing {what}"));
            self.running.values_mut().for_each(TrainerProcess::kill);
        }
    }
}

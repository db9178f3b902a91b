//! Stops the processes of a job: on signals, on requests of commands, and at their deadline.

use std::time::Duration;

use stoker_api::experiment::DesiredState;
use stoker_engine::inference;
use stoker_ui::quoted;
use tokio::time::Instant;

use super::{Runner, View};
use crate::failure::Failure;
use crate::run::RESUME_REMEDY;
use crate::run::request::Request;
use crate::run::signals::StopRequest;

/// Interval between two reads of the requests.
const READ_INTERVAL: Duration = Duration::from_millis(500);

/// Latest read of the requests of commands.
#[derive(Debug, Default)]
pub(super) struct Requests {
    read_at: Option<Instant>,
    /// Why the latest read failed.
    error: Option<String>,
}

impl Runner<'_> {
    pub(super) fn state(&self) -> DesiredState {
        self.job.record.state()
    }

    /// Reads the requests of commands if that is due, and follows the desired state.
    pub(super) fn obey(&mut self, view: &View) {
        if self.requests.read_at.is_none_or(|at| at.elapsed() >= READ_INTERVAL) {
            self.requests.read_at = Some(Instant::now());
            let request = Request::read(self.job.record.path());
            match request.and_then(|request| self.job.record.follow(&request)) {
                Ok(is_new) => {
                    self.requests.error = None;
                    if is_new {
                        self.announce(view);
                    }
                }
                Err(error) => self.report_once(&error, view),
            }
        }
        let (state, slots) = (self.state(), self.job.slots);
        let status = self.job.record.status();
        let before = status.clone();
        inference::apply_desired_state(status, state, slots);
        if *status != before {
            self.save(view);
        }
        if state == DesiredState::Killed {
            self.running.values_mut().for_each(|worker| worker.process.kill_for_user());
        }
    }

    fn report_once(&mut self, error: &Failure, view: &View) {
        let error = error.to_string();
        if self.requests.error.as_ref() != Some(&error) {
            view.print_message(&format!("{error}; the job continues unchanged"));
            self.requests.error = Some(error);
        }
    }

    /// Reports the desired state.
    pub(super) fn announce(&self, view: &View) {
        let (num, timeout) = (self.running.len(), self.spec().preemption_timeout_seconds);
        let waits = match num {
            0 => String::new(),
            _ => format!("; {num} processes exit after their current batch (at most {timeout} s)"),
        };
        view.print_message(&match self.state() {
            DesiredState::Active => "activated: the job resumes".to_owned(),
            DesiredState::Paused => format!(
                "paused{waits}; `{}` resumes the job, and a signal ends this runner",
                self.activate_command()
            ),
            DesiredState::Cancelled => format!("cancelled{waits}"),
            DesiredState::Killed => format!("killed: ending {num} processes"),
        });
    }

    /// Returns how to resume a job that was stopped. A paused job also needs to be activated.
    pub(super) fn resume_remedy(&self) -> String {
        match self.state() {
            DesiredState::Paused => {
                format!("{RESUME_REMEDY}; the job stays paused until `{}`", self.activate_command())
            }
            _ => RESUME_REMEDY.to_owned(),
        }
    }

    /// Returns the command that ends a pause.
    fn activate_command(&self) -> String {
        let root = quoted(&self.job.run_root.root);
        format!("stoker job activate {} --root {root}", self.job.record.id())
    }

    /// Handles a signal: the first one asks all processes to exit, and a later one kills them.
    pub(super) fn interrupt(&mut self, view: &mut View) {
        let num = self.running.len();
        match self.interrupts.record(Instant::now()) {
            StopRequest::SameStop => {}
            StopRequest::Stop => view.print_message(&format!(
                "stopping: {num} processes exit after their current batch (at most {} s); send the \
                 signal again to kill them immediately",
                self.spec().preemption_timeout_seconds
            )),
            StopRequest::Kill => {
                view.print_message(&format!("killing {num} processes"));
                self.running.values_mut().for_each(|worker| worker.process.kill());
            }
        }
    }

    /// Sends a stop request to all processes, and kills them after the preemption timeout.
    pub(super) fn stop_workers(&mut self) {
        let timeout = Duration::from_secs(self.spec().preemption_timeout_seconds.into());
        match self.stop_requested_at {
            None => {
                self.stop_requested_at = Some(Instant::now());
                self.running.values().for_each(|worker| worker.process.request_stop());
            }
            Some(since) if since.elapsed() > timeout && self.state() != DesiredState::Killed => {
                self.running.values_mut().for_each(|worker| worker.process.kill());
            }
            Some(_) => {}
        }
    }
}

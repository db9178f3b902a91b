//! The runner's part of the configuration of an attempt: storage, report server and gang.

use std::path::Path;

use stoker_api::contract::{CheckpointRef, Gang, ReportEndpoint, TrialConfig};
use stoker_api::trial::TrialSpec;
use stoker_engine::trial::config::{AttemptContext, trial_config};

use super::Runner;
use crate::failure::Failure;
use crate::run::{record, report_server};

/// Attempt to start.
#[derive(Debug)]
pub(super) struct AttemptStart<'a> {
    pub(super) trial: &'a TrialSpec,
    pub(super) attempt: u32,
    pub(super) resume_from: Vec<CheckpointRef>,
    pub(super) unreported_since: Option<u32>,
    /// Length granted so far.
    pub(super) units: u64,
    /// File with the token of the attempt.
    pub(super) token_file: &'a Path,
    pub(super) gang: Option<Gang>,
}

impl Runner<'_> {
    /// Returns the rendezvous address and the secret for the ranks of an attempt; `None` for one
    /// rank.
    pub(super) fn gang(&self) -> Result<Option<Gang>, Failure> {
        let world_size = self.slots_per_trial();
        if world_size == 1 {
            return Ok(None);
        }
        // Another process could bind the port before rank 0 does. Then the attempt fails, and the
        // next attempt uses another port.
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0));
        let address = listener.and_then(|listener| listener.local_addr()).map_err(|error| {
            Failure::System(format!("cannot find a free port for the ranks of a trial: {error}"))
        })?;
        let port = address.port();
        let secret = record::random_hex(32)?;
        let rendezvous = format!("127.0.0.1:{port}");
        Ok(Some(Gang { world_size, ranks_per_pod: world_size, rendezvous, secret }))
    }

    /// Returns the configuration of an attempt.
    pub(super) fn trial_config(&self, start: AttemptStart<'_>) -> TrialConfig {
        let AttemptStart { trial, attempt, resume_from, units, token_file, gang, .. } = start;
        trial_config(AttemptContext {
            valid: self.valid,
            namespace: &self.paths.namespace,
            experiment_id: &self.paths.uid,
            trial,
            attempt,
            units,
            resume_from,
            unreported_since: start.unreported_since,
            root: self.paths.root.clone(),
            endpoint: self.valid.spec.checkpoint_storage.endpoint.clone(),
            report_endpoint: ReportEndpoint {
                url: report_server::reports_url(&self.server_url, trial.index),
                token_file: token_file.display().to_string(),
                ca: None,
            },
            gang,
            context: None,
        })
    }
}

//! Configuration of a trainer: its part of the experiment, its storage and its gang.

use std::path::{Path, PathBuf};

use stoker_api::contract::{
    CONTRACT_VERSION, CheckpointRef, Gang, ReportEndpoint, StorageConfig, TrialConfig,
};
use stoker_engine::trial::TrialRecord;

use super::Runner;
use crate::failure::Failure;
use crate::run::{record, report_server};

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

    /// Returns the configuration of an attempt, without its gang.
    pub(super) fn trial_config(
        &self,
        trial: &TrialRecord,
        attempt: u32,
        resume_from: Vec<CheckpointRef>,
        units: u64,
        token_file: &Path,
    ) -> TrialConfig {
        let spec = &self.valid.spec;
        TrialConfig {
            version: CONTRACT_VERSION,
            experiment: self.paths.name.clone(),
            experiment_id: self.paths.uid.clone(),
            trial: trial.spec.index,
            attempt,
            seed: trial.spec.seed,
            experiment_seed: self.seed,
            hyperparameters: trial.spec.hyperparameters.clone(),
            data: spec.data.clone(),
            spec: spec.for_programs(),
            unit: trial.spec.unit,
            units,
            metric: spec.searcher.metric.clone(),
            smaller_is_better: spec.searcher.smaller_is_better,
            scheduling_unit: spec.scheduling_unit,
            records_per_epoch: spec.records_per_epoch,
            validation_period: spec.min_validation_period,
            checkpoint_period: spec.min_checkpoint_period,
            checkpoint_policy: spec.checkpoint_policy,
            perform_initial_validation: spec.perform_initial_validation,
            aggregation_frequency: spec.optimizations.aggregation_frequency,
            average_aggregated_gradients: spec.optimizations.average_aggregated_gradients,
            gradient_compression: spec.optimizations.gradient_compression,
            mixed_precision: spec.optimizations.mixed_precision,
            storage: StorageConfig {
                url: self.paths.root.clone(),
                endpoint: spec.checkpoint_storage.endpoint.clone(),
                trial_path: self.paths.trial(trial.spec.index),
            },
            resume_from,
            report_endpoint: ReportEndpoint {
                url: report_server::reports_url(&self.server_url, trial.spec.index),
                token_file: PathBuf::from(token_file).display().to_string(),
                ca: None,
            },
            gang: None,
            context: None,
            inference: None,
        }
    }
}

//! Configuration of a job's processes.

use serde_json::json;
use stoker_api::contract::{
    CONTRACT_VERSION, ContextRef, ReportEndpoint, StorageConfig, TrialConfig,
};
use stoker_api::experiment::{CheckpointPolicy, GradientCompression, MixedPrecision, Unit};
use stoker_api::inference::{InferenceJobSpec, InferenceTask};
use stoker_api::names::worker_path;
use stoker_api::validate::derive_seed;

use super::ProcessStart;

/// A job with its storage and its report endpoint.
#[derive(Clone, Debug)]
pub struct JobContext<'a> {
    /// Name of the job.
    pub name: &'a str,
    /// Unique ID of the job.
    pub uid: &'a str,
    /// Spec of the job.
    pub spec: &'a InferenceJobSpec,
    /// Number of slots.
    pub slots: u32,
    /// URL of the storage root.
    pub root: String,
    /// Address of an S3 server other than Amazon's.
    pub endpoint: Option<String>,
    /// Directory of the job below the root.
    pub path: String,
    /// URL of the output directory.
    pub output_url: String,
    /// ID of the job whose output may be replaced, if any.
    pub replaced_job: Option<&'a str>,
    /// Report endpoint of the processes; its address is empty without a report server.
    pub report_endpoint: ReportEndpoint,
    /// Files of the job's program.
    pub context: Option<ContextRef>,
}

/// Returns the configuration of a process of a job.
pub fn trial_config(job: &JobContext<'_>, start: ProcessStart) -> TrialConfig {
    let spec = job.spec;
    let mut output = spec.output.clone();
    if output.url.is_none() {
        output.endpoint.clone_from(&job.endpoint);
    }
    output.url = Some(job.output_url.clone());
    let task = InferenceTask {
        role: start.role,
        slot: start.slot,
        slots: job.slots,
        input: spec.input.clone(),
        output,
        checkpoint: spec.checkpoint.clone(),
        has_hyperparameters: spec.hyperparameters.is_some(),
        replace: job.replaced_job.is_some(),
        replaced_job: job.replaced_job.map(str::to_owned),
        shard_rows: spec.shard_rows,
        batch_rows: spec.batch_rows,
        on_error: spec.on_error,
    };
    let seed = derive_seed(job.uid);
    TrialConfig {
        version: CONTRACT_VERSION,
        experiment: job.name.to_owned(),
        experiment_id: job.uid.to_owned(),
        trial: start.slot,
        attempt: start.attempt,
        seed,
        experiment_seed: seed,
        hyperparameters: spec.hyperparameters.clone().unwrap_or_else(|| json!({})),
        search_space: serde_json::Value::Null,
        data: spec.data.clone(),
        spec: spec.for_programs(),
        unit: Unit::Records,
        units: 0,
        metric: String::new(),
        time_metric: None,
        smaller_is_better: true,
        scheduling_unit: 1,
        records_per_epoch: 0,
        validation_period: None,
        checkpoint_period: None,
        checkpoint_policy: CheckpointPolicy::None,
        perform_initial_validation: false,
        aggregation_frequency: 1,
        average_aggregated_gradients: true,
        gradient_compression: GradientCompression::None,
        mixed_precision: MixedPrecision::None,
        storage: StorageConfig {
            url: job.root.clone(),
            endpoint: job.endpoint.clone(),
            trial_path: worker_path(&job.path, start.slot),
        },
        resume_from: vec![],
        unreported_since: None,
        report_endpoint: job.report_endpoint.clone(),
        gang: None,
        context: job.context.clone(),
        inference: Some(task),
        records: None,
    }
}

//! What a process of a job is told.

use serde_json::json;
use stoker_api::contract::{CONTRACT_VERSION, ContextRef, Door, StorageConfig, TrialConfig};
use stoker_api::experiment::{CheckpointPolicy, GradientCompression, MixedPrecision, Unit};
use stoker_api::inference::{InferenceJobSpec, InferenceTask};
use stoker_api::validate::derive_seed;

use super::Start;

/// A job, and where its files go.
#[derive(Clone, Debug)]
pub struct JobPlace<'a> {
    /// The job's name.
    pub name: &'a str,
    /// Its unique id.
    pub uid: &'a str,
    /// All that was written of it.
    pub spec: &'a InferenceJobSpec,
    /// Slots in all.
    pub slots: u32,
    /// The root of its storage.
    pub root: String,
    /// The address of an S3 server other than Amazon's.
    pub endpoint: Option<String>,
    /// Its own folder below the root.
    pub path: String,
    /// The folder of its output.
    pub output_url: String,
    /// Whether another job's output may be replaced.
    pub replace: bool,
    /// Where its processes report; an empty address where nobody listens.
    pub door: Door,
    /// Its program's files.
    pub context: Option<ContextRef>,
}

/// What a process of a job is told.
pub fn trial_config(job: &JobPlace<'_>, start: Start) -> TrialConfig {
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
        replace: job.replace,
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
        data: spec.data.clone(),
        spec: spec.for_programs(),
        unit: Unit::Records,
        units: 0,
        metric: String::new(),
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
            trial_path: format!("{}/workers/{}", job.path, start.slot),
        },
        resume_from: vec![],
        door: job.door.clone(),
        gang: None,
        context: job.context.clone(),
        inference: Some(task),
    }
}

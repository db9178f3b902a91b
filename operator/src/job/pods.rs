//! Builds the pods of a job, one per process. Pure, like the builder of trial pods.

use serde_json::{Value, json};
use stoker_api::contract::{ContextRef, ReportEndpoint, TrialConfig};
use stoker_api::experiment::StorageRecord;
use stoker_api::inference::Role;
use stoker_api::names::{
    ANNOTATION_TRIAL_CONFIG, API_VERSION, COMPONENT_JOB, LABEL_ATTEMPT, LABEL_COMPONENT, LABEL_JOB,
    LABEL_POD_INDEX, context_path, experiment_path, pod_paths,
};
use stoker_api::validate::ValidInferenceJob;
use stoker_engine::inference::ProcessStart;
use stoker_engine::inference::config::JobContext;

use crate::pod::{PodSettings, program_spec};
use crate::trial::config::OperatorConfig;

/// Name of a process's pod.
pub fn pod_name(job: &str, start: ProcessStart) -> String {
    let ProcessStart { role, slot, attempt } = start;
    match role {
        Role::Plan => format!("{job}-a{attempt}-plan"),
        Role::Work => format!("{job}-a{attempt}-w{slot}"),
        Role::Finish => format!("{job}-a{attempt}-finish"),
    }
}

/// Storage and endpoint of a job. The root is empty if neither the job nor the operator specifies a
/// storage.
pub fn job_context<'a>(
    operator_config: &OperatorConfig,
    valid: &'a ValidInferenceJob,
    namespace: &str,
    uid: &'a str,
) -> JobContext<'a> {
    let (name, spec) = (valid.name.as_str(), &valid.spec);
    let storage = &spec.storage;
    let (root, endpoint) =
        operator_config.storage_location(storage.url.as_ref(), storage.endpoint.as_ref());
    let path = experiment_path(namespace, name, uid);
    let default_output = || format!("{}/{path}/output", root.strip_suffix('/').unwrap_or(&root));
    JobContext {
        name,
        uid,
        spec,
        slots: spec.resources.slots,
        output_url: spec.output.url.clone().unwrap_or_else(default_output),
        root,
        endpoint,
        path,
        replaced_job: None,
        report_endpoint: ReportEndpoint {
            url: format!(
                "{}/v1/jobs/{namespace}/{name}/reports",
                operator_config.report_server_url
            ),
            token_file: pod_paths::TOKEN.to_owned(),
            ca: std::fs::read_to_string(&operator_config.report_server_ca).ok(),
        },
        context: spec.context.as_ref().map(|context| ContextRef {
            path: context_path(namespace, &context.sha256),
            sha256: context.sha256.clone(),
        }),
    }
}

/// Returns the storage record of a job, with the Secret from the current settings.
pub fn used_storage(
    operator_config: &OperatorConfig,
    valid: &ValidInferenceJob,
    job_context: &JobContext<'_>,
) -> StorageRecord {
    let (url, endpoint) = (job_context.root.clone(), job_context.endpoint.clone());
    let spec = &valid.spec.storage;
    let secret_name = operator_config.secret_name(spec.url.as_ref(), spec.secret_name.as_ref());
    StorageRecord { url, endpoint, path: job_context.path.clone(), secret_name, fixed_at: None }
}

/// Builds the pod of a process as JSON. `podOverrides` are merged last.
///
/// # Panics
///
/// Never: a configuration serializes to plain JSON.
pub fn pod(
    operator_config: &OperatorConfig,
    valid: &ValidInferenceJob,
    storage: &StorageRecord,
    namespace: &str,
    config: &TrialConfig,
    start: ProcessStart,
) -> Value {
    let text = serde_json::to_string(config).expect("a configuration is plain JSON");
    let metadata = json!({
        "name": pod_name(&valid.name, start),
        "namespace": namespace,
        "labels": {
            "app.kubernetes.io/managed-by": "stoker",
            LABEL_JOB: valid.name,
            LABEL_ATTEMPT: start.attempt.to_string(),
            LABEL_POD_INDEX: start.slot.to_string(),
            LABEL_COMPONENT: COMPONENT_JOB,
        },
        "annotations": { ANNOTATION_TRIAL_CONFIG: text },
        "ownerReferences": [{
            "apiVersion": API_VERSION, "kind": "InferenceJob", "name": valid.name,
            "uid": config.experiment_id, "controller": true, "blockOwnerDeletion": false,
        }],
    });
    let settings = PodSettings::of_job(valid, storage);
    // The processes of a job are independent: each is a gang of one pod.
    let spec = program_spec(operator_config, &settings, 0, vec![]);
    crate::pod::pod(metadata, spec, &settings)
}

#[cfg(test)]
mod tests;

//! Applies the plan of a trial. Every write fails if another client has changed the object.

use std::collections::BTreeSet;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Node, Pod, Service};
use kube::api::{DeleteParams, PostParams, Preconditions};
use kube::{Api, ResourceExt as _};
use stoker_api::contract::TrialConfig;
use stoker_api::experiment::StorageRecord;
use stoker_api::trial::{AttemptEnd, TrialStatus};
use stoker_engine::experiment::POD_INVALID;
use stoker_engine::gang::{PodDeletion, refuse};
use stoker_engine::trial::{RestartLimits, budget, live_attempt};

use super::config::{TrialNames, trial_config};
use super::observe::ObservedTrial;
use super::pods;
use crate::cache::{Cached as _, Key};
use crate::context::{Context, now};
use crate::error::{Error, pod_refusal, request};
use crate::experiment::apply::trials_of;
use crate::node::CachedNode;
use crate::objects::{CachedPod, CachedTrial};
use crate::patch::{self, ObjectPart};
use crate::records;

/// Writes the changed fields of a trial's status. Fails with a conflict if the trial changed since
/// it was read.
pub(crate) async fn write_status(
    context: &Context,
    trial: &CachedTrial,
    mut status: TrialStatus,
) -> Result<Arc<CachedTrial>, Error> {
    // A record of an older version may exceed the limits of the schema.
    budget::bound(&mut status);
    let key = trial.key();
    let api = context.trial_api(&key.namespace);
    let operation = format!("write the status of trial {key}");
    context.metrics.writes.get_or_create(&crate::metrics::Kind::TRIAL_STATUS).inc();
    let change = (&trial.trial.status, &Some(status));
    match patch::write(&api, operation, &trial.trial, ObjectPart::Status, change).await {
        Ok(written) => Ok(cache_trial(context, written)),
        Err(error) => Err(forget_if_gone(context, &key, error)),
    }
}

pub(crate) fn cache_trial(
    context: &Context,
    written: stoker_api::trial::Trial,
) -> Arc<CachedTrial> {
    context.trials.put(CachedTrial::new(written.clone()));
    Arc::new(CachedTrial::new(written))
}

fn forget_if_gone(context: &Context, key: &Key, error: Error) -> Error {
    if matches!(error, Error::Gone { .. }) {
        context.trials.forget(key);
    }
    error
}

/// Looks up nodes that the cache lacks. Stores them in the cache and returns whether any exists.
pub(crate) async fn find_nodes(
    context: &Context,
    names: &BTreeSet<Arc<str>>,
) -> Result<bool, Error> {
    let api: Api<Node> = Api::all(context.client.clone());
    let mut exists = false;
    for name in names {
        let node = request(format!("read node {name}"), api.get_opt(name)).await?;
        exists |= node.is_some();
        node.map(CachedNode::new).into_iter().for_each(|node| context.nodes.put(node));
    }
    Ok(exists)
}

/// Deletes the pod with this UID, but not another pod with the same name.
pub(crate) async fn delete_pod(
    context: &Context,
    namespace: &str,
    pod: &PodDeletion,
) -> Result<(), Error> {
    let api: Api<Pod> = Api::namespaced(context.client.clone(), namespace);
    let uid = Some(pod.uid.clone());
    let preconditions = Some(Preconditions { resource_version: None, uid });
    let parameters = DeleteParams {
        grace_period_seconds: Some(pod.grace_seconds),
        preconditions,
        ..DeleteParams::default()
    };
    context.metrics.writes.get_or_create(&crate::metrics::Kind::POD_DELETE).inc();
    let operation = format!("delete pod {namespace}/{}", pod.name);
    match request(operation, api.delete(&pod.name, &parameters)).await {
        // The pod no longer exists, even if another pod has its name now.
        Err(Error::Gone { .. } | Error::Conflict { .. }) => {
            let key = Key::new(namespace, &pod.name);
            if context.pods.get(&key).is_some_and(|cached| cached.observed.uid == pod.uid) {
                context.pods.forget(&key);
            }
            Ok(())
        }
        other => other.map(drop),
    }
}

/// Creates pods of the live attempt. If the API server refuses one, ends the attempt.
pub(super) async fn create_pods(
    context: &Context,
    observed: &ObservedTrial,
    trial: &CachedTrial,
    indexes: &[u32],
) -> Result<(), Error> {
    let Some(attempt) = live_attempt(&trial.record) else { return Ok(()) };
    let names = TrialNames {
        namespace: &observed.key.namespace,
        trial: &observed.key.name,
        uid: trial.uid(),
        experiment_uid: &observed.experiment_uid,
    };
    let Some(storage) = &observed.storage else {
        let spec = &observed.valid.spec.checkpoint_storage;
        if !context.operator_config.storage(spec, String::new()).url.is_empty() {
            // The experiment's next reconcile records the storage, and that change queues this
            // trial.
            return Ok(());
        }
        let text = "spec.checkpointStorage.url is not set, and the operator has no default: set \
                    it, or install the chart with storage.url";
        let (end, reason) = (AttemptEnd::NotStarted, "NoStorage");
        return end_refused_attempt(context, observed, trial, end, reason, text.to_owned()).await;
    };
    let valid = &observed.valid;
    let mut config =
        trial_config(&context.operator_config, valid, storage, &trial.record, names, attempt);
    config.records = start_records(context, trial, &config);
    let made = create_objects(context, observed, storage, names, &config, indexes).await;
    let Err(error) = made else { return Ok(()) };
    let trials = trials_of(context, &trial.experiment_key(), &observed.experiment_uid);
    let records = trials.iter().map(|trial| &trial.record);
    let (end, reason, text) = pod_refusal(error, records)?;
    end_refused_attempt(context, observed, trial, end, reason, text).await
}

/// Returns the records that the attempt stores before its program starts.
fn start_records(context: &Context, trial: &CachedTrial, config: &TrialConfig) -> Option<String> {
    let now = now();
    let cached = context.experiments.get(&trial.experiment_key());
    let experiment = cached.as_ref().and_then(|cached| cached.experiment());
    let experiment = experiment.map(|experiment| {
        let status = experiment.status.clone().unwrap_or_default();
        records::of_experiment(experiment, &status, now)
    });
    let record = records::of_trial(&trial.trial, &trial.record.status, now);
    let config_bytes = serde_json::to_string(config).map_or(0, |text| text.len());
    records::for_start(experiment, record, config_bytes)
}

async fn create_objects(
    context: &Context,
    observed: &ObservedTrial,
    storage: &StorageRecord,
    names: TrialNames<'_>,
    config: &TrialConfig,
    indexes: &[u32],
) -> Result<(), Error> {
    let namespace = names.namespace;
    if observed.valid.spec.resources.num_pods() > 1 {
        create_service(context, observed, names).await?;
    }
    for &index in indexes {
        let pod =
            pods::pod(&context.operator_config, &observed.valid, storage, names, config, index);
        let key = Key::new(namespace, &pods::pod_name(names.trial, config.attempt, index));
        create_pod(context, &key, names.uid, pod).await?;
    }
    Ok(())
}

/// Creates a pod. Adopts an existing pod of this name if it has the same owner.
pub(crate) async fn create_pod(
    context: &Context,
    key: &Key,
    owner: &str,
    pod: serde_json::Value,
) -> Result<(), Error> {
    let api: Api<Pod> = Api::namespaced(context.client.clone(), &key.namespace);
    let operation = format!("create pod {key}");
    let pod = crate::pod::parse_pod(pod).map_err(|message| Error::Refused {
        operation: operation.clone(),
        code: 422,
        message,
    })?;
    context.metrics.writes.get_or_create(&crate::metrics::Kind::POD_CREATE).inc();
    match request(operation.clone(), api.create(&PostParams::default(), &pod)).await {
        Ok(made) => context.pods.put(CachedPod::new(made)),
        Err(Error::Exists { operation }) => {
            let existing = request(format!("read pod {key}"), api.get(&key.name)).await?;
            let existing = CachedPod::new(existing);
            if existing.owner != owner {
                return Err(Error::Exists { operation });
            }
            context.pods.put(existing);
        }
        Err(other) => return Err(other),
    }
    Ok(())
}

async fn create_service(
    context: &Context,
    observed: &ObservedTrial,
    names: TrialNames<'_>,
) -> Result<(), Error> {
    let api: Api<Service> = Api::namespaced(context.client.clone(), names.namespace);
    let service = pods::service(&observed.valid, names);
    let operation = format!("create service {}/{}", names.namespace, names.trial);
    context.metrics.writes.get_or_create(&crate::metrics::Kind::SERVICE_CREATE).inc();
    match request(operation, api.create(&PostParams::default(), &service)).await {
        Err(Error::Exists { operation }) => {
            let read = format!("read service {}/{}", names.namespace, names.trial);
            let existing = request(read, api.get(names.trial)).await?;
            match is_owned(&existing, names.uid) {
                // It is the Service of the attempt before, and disappears.
                true if existing.metadata.deletion_timestamp.is_some() => {
                    Err(Error::Conflict { operation })
                }
                true => Ok(()),
                false => Err(Error::Exists { operation }),
            }
        }
        other => other.map(drop),
    }
}

/// Deletes the Service of a gang, so that it does not count against a quota. An error is only
/// logged: the Service is unused, and Kubernetes deletes it with the trial.
pub(super) async fn delete_service(context: &Context, trial: &CachedTrial) {
    if let Err(error) = try_delete_service(context, trial).await {
        tracing::warn!(%error, "an unused service is kept until its trial is deleted");
    }
}

async fn try_delete_service(context: &Context, trial: &CachedTrial) -> Result<(), Error> {
    let key = trial.key();
    let api: Api<Service> = Api::namespaced(context.client.clone(), &key.namespace);
    let service = request(format!("read service {key}"), api.get_opt(&key.name)).await?;
    let Some(service) = service.filter(|service| is_owned(service, trial.uid())) else {
        return Ok(());
    };
    let preconditions =
        Some(Preconditions { resource_version: service.resource_version(), uid: service.uid() });
    let parameters = DeleteParams { preconditions, ..DeleteParams::default() };
    context.metrics.writes.get_or_create(&crate::metrics::Kind::SERVICE_DELETE).inc();
    match request(format!("delete service {key}"), api.delete(&key.name, &parameters)).await {
        Err(Error::Gone { .. } | Error::Conflict { .. }) => Ok(()),
        other => other.map(drop),
    }
}

fn is_owned(service: &Service, trial_uid: &str) -> bool {
    service.owner_references().iter().any(|owner| owner.uid == trial_uid)
}

async fn end_refused_attempt(
    context: &Context,
    observed: &ObservedTrial,
    trial: &CachedTrial,
    end: AttemptEnd,
    reason: &str,
    message: String,
) -> Result<(), Error> {
    let mut record = trial.record.clone();
    // The spec of a malformed pod cannot change, so a retry would fail too.
    let limits = match observed.limits() {
        limits if reason == POD_INVALID => RestartLimits { max_restarts: 0, ..limits },
        limits => limits,
    };
    refuse(&mut record, end, reason, message, &limits, now());
    let written = write_status(context, trial, record.status).await?;
    super::emit_events(context, observed, &written);
    if written.record.status.phase.is_terminal() && observed.valid.spec.resources.num_pods() > 1 {
        delete_service(context, &written).await;
    }
    Ok(())
}

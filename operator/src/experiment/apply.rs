//! Writes what was planned for an experiment. Every write collides with whoever was faster.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures::StreamExt as _;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{Patch, PatchParams, PostParams};
use kube::core::{ApiResource, DeserializeGuard, DynamicObject};
use kube::{Api, Resource as _, ResourceExt as _};
use serde_json::json;
use stoker_api::condition::Condition;
use stoker_api::experiment::{Experiment, ExperimentStatus};
use stoker_api::names::{LABEL_EXPERIMENT, LABEL_TRIAL};
use stoker_api::trial::{DesiredTrialState, Grant, Trial, TrialSpec};

use super::is_owned;
use crate::cache::{Cached as _, Key};
use crate::context::{Context, now};
use crate::error::{Error, request};
use crate::metrics::Kind;
use crate::objects::CachedTrial;
use crate::patch::{self, ObjectPart};
use crate::trial::apply::cache_trial;
use crate::user_resources::CachedExperiment;

/// Trials whose specs are written at the same time.
const WRITES_WIDTH: usize = 16;

/// The trials of an experiment, by index.
pub(super) fn trials_of(context: &Context, key: &Key, uid: &str) -> Vec<Arc<CachedTrial>> {
    let mut trials = context.trials.group(key);
    // One that is being deleted is as good as gone: its index is not used again either way.
    let stays = |it: &CachedTrial| it.trial.metadata.deletion_timestamp.is_none();
    trials.retain(|it| is_owned(it, uid) && stays(it));
    trials.sort_by_key(|it| it.record.spec.index);
    trials
}

/// Writes the trials of an experiment in one pass. An error stops what depends on the write and nothing else.
pub(super) struct Writer<'a> {
    context: &'a Context,
    /// Trials as this pass read or wrote them, by index. A newer version may have another spec, which a write would
    /// undo.
    trials: BTreeMap<u32, Arc<CachedTrial>>,
    pub(super) errors: Vec<Error>,
}

impl<'a> Writer<'a> {
    pub(super) fn new(context: &'a Context, trials: &[Arc<CachedTrial>]) -> Self {
        let trials = trials.iter().map(|trial| (trial.record.spec.index, trial.clone())).collect();
        Self { context, trials, errors: vec![] }
    }

    /// Writes what is wanted of trials, several at a time.
    pub(super) async fn want(&mut self, wanted: &[(u32, DesiredTrialState)]) {
        let context = self.context;
        let writes = wanted.iter().filter_map(|(index, state)| {
            let trial = self.trials.get(index)?.clone();
            let desired_since = Some(now());
            let spec =
                TrialSpec { desired_state: *state, desired_since, ..trial.record.spec.clone() };
            Some(async move { (trial.record.spec.index, write_spec(context, &trial, spec).await) })
        });
        let writes: Vec<_> = writes.collect();
        let mut written = futures::stream::iter(writes).buffer_unordered(WRITES_WIDTH);
        while let Some((index, result)) = written.next().await {
            match result {
                Ok(trial) => drop(self.trials.insert(index, trial)),
                Err(error) => self.errors.push(error),
            }
        }
    }

    /// Adds grants in their order. Each depends on the ones before it, so the first error ends the list. Returns
    /// whether all of them are recorded.
    pub(super) async fn grant(&mut self, grants: &[(u32, Grant)]) -> bool {
        for of_trial in grants.chunk_by(|a, b| a.0 == b.0) {
            let index = of_trial[0].0;
            let Some(trial) = self.trials.get(&index) else { continue };
            let mut spec = trial.record.spec.clone();
            spec.grants.extend(of_trial.iter().map(|(_, grant)| *grant));
            match write_spec(self.context, trial, spec).await {
                Ok(trial) => drop(self.trials.insert(index, trial)),
                Err(error) => {
                    self.errors.push(error);
                    return false;
                }
            }
        }
        true
    }

    /// Creates trials in their order. A missing index below a created one counts as deleted, so the first error ends
    /// the list. Returns how many trials were created, and that error.
    pub(super) async fn create(
        &self,
        experiment: &Experiment,
        specs: impl Iterator<Item = TrialSpec>,
    ) -> (u32, Option<Error>) {
        let mut created = 0;
        for spec in specs {
            if let Err(error) = create_trial(self.context, experiment, spec).await {
                return (created, Some(error));
            }
            created += 1;
        }
        (created, None)
    }
}

async fn write_spec(
    context: &Context,
    trial: &CachedTrial,
    spec: TrialSpec,
) -> Result<Arc<CachedTrial>, Error> {
    let key = trial.key();
    let api = context.trial_api(&key.namespace);
    context.metrics.writes.get_or_create(&Kind::TRIAL_SPEC).inc();
    let operation = format!("write the grants of trial {key}");
    let change = (&trial.trial.spec, &spec);
    match patch::write(&api, operation, &trial.trial, ObjectPart::Spec, change).await {
        Ok(written) => Ok(cache_trial(context, written)),
        Err(error) => {
            if matches!(error, Error::Gone { .. }) {
                context.trials.forget(&key);
            }
            Err(error)
        }
    }
}

/// Creates a trial. One that exists already is taken in, unless it is another's.
async fn create_trial(
    context: &Context,
    experiment: &Experiment,
    spec: TrialSpec,
) -> Result<(), Error> {
    let namespace = experiment.namespace().unwrap_or_default();
    let name = format!("{}-{}", experiment.name_any(), spec.index);
    let mut trial = Trial::new(&name, spec);
    trial.metadata.namespace = Some(namespace.clone());
    trial.metadata.owner_references = Some(vec![owner(experiment)]);
    let labels = [(LABEL_EXPERIMENT, experiment.name_any()), (LABEL_TRIAL, name.clone())];
    trial.metadata.labels = Some(labels.map(|(name, value)| (name.to_owned(), value)).into());
    let api = context.trial_api(&namespace);
    context.metrics.writes.get_or_create(&Kind::TRIAL_CREATE).inc();
    let operation = format!("create trial {namespace}/{name}");
    match request(operation, api.create(&PostParams::default(), &trial)).await {
        Ok(made) => {
            cache_trial(context, made);
            Ok(())
        }
        Err(Error::Exists { operation }) => {
            let found = request(format!("read trial {namespace}/{name}"), api.get(&name)).await?;
            let found = CachedTrial::new(found);
            let uid = experiment.metadata.uid.as_deref().unwrap_or_default();
            if !is_owned(&found, uid) {
                return Err(Error::Exists { operation });
            }
            context.trials.put(found);
            Ok(())
        }
        Err(other) => Err(other),
    }
}

fn owner(experiment: &Experiment) -> OwnerReference {
    OwnerReference {
        api_version: Experiment::api_version(&()).into_owned(),
        kind: Experiment::kind(&()).into_owned(),
        name: experiment.name_any(),
        uid: experiment.metadata.uid.clone().unwrap_or_default(),
        controller: Some(true),
        block_owner_deletion: Some(false),
    }
}

/// Writes the changed fields of an experiment's status. Fails with a conflict if the experiment
/// changed since it was read.
pub(super) async fn write_status(
    context: &Context,
    experiment: &Experiment,
    status: ExperimentStatus,
) -> Result<Experiment, Error> {
    let key = Key::of(experiment);
    let api = context.experiment_api(&key.namespace);
    context.metrics.writes.get_or_create(&Kind::EXPERIMENT_STATUS).inc();
    let operation = format!("write the status of experiment {key}");
    let change = (&experiment.status, &Some(status));
    match patch::write(&api, operation, experiment, ObjectPart::Status, change).await {
        Ok(written) => {
            context.experiments.put(CachedExperiment::new(DeserializeGuard(Ok(written.clone()))));
            Ok(written)
        }
        Err(error) => {
            if matches!(error, Error::Gone { .. }) {
                context.experiments.forget(&key);
            }
            Err(error)
        }
    }
}

/// Sets one condition of an object whose other fields cannot be read.
pub(crate) async fn mark_unreadable<K: kube::Resource<DynamicType = ()>>(
    context: &Context,
    key: &Key,
    version: Option<String>,
    valid: &Condition,
) -> Result<(), Error> {
    let resource = ApiResource::erase::<K>(&());
    let kind = K::kind(&()).to_lowercase();
    let raw: Api<DynamicObject> =
        Api::namespaced_with(context.client.clone(), &key.namespace, &resource);
    // A merge replaces the list: what is there of it is read as it is, and stays.
    let operation = format!("read {kind} {key}");
    let found: DynamicObject = request(operation, raw.get(&key.name)).await?;
    let mut conditions = found.data["status"]["conditions"].as_array().cloned().unwrap_or_default();
    conditions.retain(|it| it["type"] != valid.type_.as_str());
    conditions.push(json!(valid));
    let patch = json!({
        "metadata": { "resourceVersion": version },
        "status": { "conditions": conditions },
    });
    let operation = format!("write the status of {kind} {key}");
    let (parameters, patch) = (PatchParams::default(), Patch::Merge(&patch));
    request(operation, raw.patch_status(&key.name, &parameters, &patch)).await.map(drop)
}

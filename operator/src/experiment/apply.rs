//! Writes what was planned for an experiment. Every write collides with whoever was faster.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{Patch, PatchParams, PostParams};
use kube::core::{ApiResource, DeserializeGuard, DynamicObject};
use kube::{Api, Resource as _, ResourceExt as _};
use serde_json::json;
use stoker_api::condition::Condition;
use stoker_api::experiment::{Experiment, ExperimentStatus};
use stoker_api::names::{LABEL_EXPERIMENT, LABEL_TRIAL};
use stoker_api::trial::{Grant, Trial, TrialSpec, WantedState};

use super::is_owned;
use crate::cache::{Cached as _, Key};
use crate::declared::CachedExperiment;
use crate::error::{Error, request};
use crate::metrics::Kind;
use crate::objects::CachedTrial;
use crate::trial::apply::keep;
use crate::world::{World, now};

/// The trials of an experiment, by index.
pub(super) fn trials_of(world: &World, key: &Key, uid: &str) -> Vec<Arc<CachedTrial>> {
    let mut trials = world.trials.group(key);
    // One that is being deleted is as good as gone: its index is not used again either way.
    let stays = |it: &CachedTrial| it.trial.metadata.deletion_timestamp.is_none();
    trials.retain(|it| is_owned(it, uid) && stays(it));
    trials.sort_by_key(|it| it.record.spec.index);
    trials
}

/// Adds grants, in order, and says what is wanted: one write for each trial that either concerns.
pub(super) async fn write_specs(
    world: &World,
    trials: &[Arc<CachedTrial>],
    grants: &[(u32, Grant)],
    wanted: &[(u32, WantedState)],
) -> Result<(), Error> {
    let mut changes: BTreeMap<u32, TrialSpec> = BTreeMap::new();
    let mut order = Vec::new();
    let spec = |index: u32| trials.iter().find(|it| it.record.spec.index == index);
    let mut change = |index: u32, with: &dyn Fn(&mut TrialSpec)| {
        if let Some(trial) = spec(index) {
            let new = !changes.contains_key(&index);
            with(changes.entry(index).or_insert_with(|| trial.record.spec.clone()));
            order.extend(new.then_some(index));
        }
    };
    for (index, grant) in grants {
        change(*index, &|it| it.grants.push(*grant));
    }
    for (index, state) in wanted {
        change(*index, &|it| (it.wanted, it.wanted_since) = (*state, Some(now())));
    }
    for index in order {
        if let (Some(trial), Some(spec)) = (spec(index), changes.remove(&index)) {
            write_spec(world, trial, spec).await?;
        }
    }
    Ok(())
}

async fn write_spec(world: &World, trial: &CachedTrial, spec: TrialSpec) -> Result<(), Error> {
    let key = trial.key();
    let mut object = trial.trial.clone();
    object.spec = spec;
    let api = world.trial_api(&key.namespace);
    world.metrics.writes.get_or_create(&Kind::TRIAL_SPEC).inc();
    let doing = format!("write the grants of trial {key}");
    match request(doing, api.replace(&key.name, &PostParams::default(), &object)).await {
        Ok(written) => {
            keep(world, written);
            Ok(())
        }
        Err(error) => {
            if matches!(error, Error::Gone { .. }) {
                world.trials.forget(&key);
            }
            Err(error)
        }
    }
}

/// Creates a trial. One that exists already is taken in, unless it is another's.
pub(super) async fn create_trial(
    world: &World,
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
    let api = world.trial_api(&namespace);
    world.metrics.writes.get_or_create(&Kind::TRIAL_CREATE).inc();
    let doing = format!("create trial {namespace}/{name}");
    match request(doing, api.create(&PostParams::default(), &trial)).await {
        Ok(made) => {
            keep(world, made);
            Ok(())
        }
        Err(Error::Exists { doing }) => {
            let found = request(format!("read trial {namespace}/{name}"), api.get(&name)).await?;
            let found = CachedTrial::new(found);
            let uid = experiment.metadata.uid.as_deref().unwrap_or_default();
            if !is_owned(&found, uid) {
                return Err(Error::Exists { doing });
            }
            world.trials.put(found);
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

/// Replaces an experiment's status, if nobody else has written the experiment since.
pub(super) async fn write_status(
    world: &World,
    experiment: &Experiment,
    status: ExperimentStatus,
) -> Result<Experiment, Error> {
    let key = Key::of(experiment);
    let mut object = experiment.clone();
    object.status = Some(status);
    let api = world.experiment_api(&key.namespace);
    world.metrics.writes.get_or_create(&Kind::EXPERIMENT_STATUS).inc();
    let doing = format!("write the status of experiment {key}");
    match request(doing, api.replace_status(&key.name, &PostParams::default(), &object)).await {
        Ok(written) => {
            world.experiments.put(CachedExperiment::new(DeserializeGuard(Ok(written.clone()))));
            Ok(written)
        }
        Err(error) => {
            if matches!(error, Error::Gone { .. }) {
                world.experiments.forget(&key);
            }
            Err(error)
        }
    }
}

/// Sets one condition of an object whose other fields cannot be read.
pub(crate) async fn mark_unreadable<K: kube::Resource<DynamicType = ()>>(
    world: &World,
    key: &Key,
    version: Option<String>,
    valid: &Condition,
) -> Result<(), Error> {
    let resource = ApiResource::erase::<K>(&());
    let kind = K::kind(&()).to_lowercase();
    let raw: Api<DynamicObject> =
        Api::namespaced_with(world.client.clone(), &key.namespace, &resource);
    // A merge replaces the list: what is there of it is read as it is, and stays.
    let doing = format!("read {kind} {key}");
    let found: DynamicObject = request(doing, raw.get(&key.name)).await?;
    let mut conditions = found.data["status"]["conditions"].as_array().cloned().unwrap_or_default();
    conditions.retain(|it| it["type"] != valid.type_.as_str());
    conditions.push(json!(valid));
    let patch = json!({
        "metadata": { "resourceVersion": version },
        "status": { "conditions": conditions },
    });
    let doing = format!("write the status of {kind} {key}");
    let (parameters, patch) = (PatchParams::default(), Patch::Merge(&patch));
    request(doing, raw.patch_status(&key.name, &parameters, &patch)).await.map(drop)
}

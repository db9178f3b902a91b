//! Fences the previous leader: gives objects a new version, so that its in-flight writes fail.

use std::collections::HashSet;
use std::fmt::Debug;
use std::time::Duration;

use futures::StreamExt as _;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::core::{DeserializeGuard, NamespaceResourceScope};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use stoker_api::trial::{CloseCause, DesiredTrialState, Fact};
use stoker_engine::trial::TrialRecord;

use crate::cache::{Cache, Cached, Key};
use crate::context::Context;
use crate::error::{Error, request};
use crate::metrics::Kind;
use crate::objects::CachedTrial;
use crate::options::Options;
use crate::user_resources::CachedExperiment;

/// Annotation of trials and experiments: the sweep that last gave them a new version.
pub(super) const ANNOTATION_LEADER: &str = "stoker.dev/leader";
/// Concurrent writes of a sweep.
const WIDTH: usize = 16;
/// Delays between the tries to write one object.
const WAITS: [Duration; 4] = [
    Duration::from_millis(200),
    Duration::from_secs(1),
    Duration::from_secs(2),
    Duration::from_secs(5),
];

/// Gives a new version to every open experiment, and to every trial in which a turn may be
/// recorded.
pub(super) async fn sweep(context: &Context) {
    let mut experiments = context.experiments.all();
    experiments.retain(|cached| {
        let status = cached.experiment().and_then(|experiment| experiment.status.as_ref());
        status.is_none_or(|status| !status.phase.is_terminal())
    });
    let experiments: HashSet<Key> = experiments.iter().map(|cached| cached.key()).collect();
    let mut trials = context.trials.all();
    trials.retain(|trial| {
        let is_searched = experiments.contains(&trial.experiment_key());
        may_be_written(&trial.record, is_searched)
    });
    let trials: Vec<Key> = trials.iter().map(|trial| trial.key()).collect();
    let experiments: Vec<Key> = experiments.into_iter().collect();
    let patch = leader_patch(&context.options, Timestamp::now());
    let count = |kind, num: usize| {
        context.metrics.writes.get_or_create(&Kind { kind }).inc_by(num as u64);
    };
    count("trial_touch", trials.len());
    count("experiment_touch", experiments.len());
    let client = &context.client;
    let trials = touch_all(client, &context.trials, CachedTrial::read, trials, &patch).await;
    let read = CachedExperiment::new;
    let experiments = touch_all(client, &context.experiments, read, experiments, &patch).await;
    tracing::info!(trials, experiments, "fenced open trials and experiments against other leaders");
}

/// Returns the patch that gives an object a new version. A patch with the value of an earlier sweep
/// would change nothing, also if this replica was the previous leader.
fn leader_patch(options: &Options, now: Timestamp) -> Value {
    let value = format!("{}/{}/{now}", options.namespace, options.identity);
    json!({ "metadata": { "annotations": { ANNOTATION_LEADER: value } } })
}

/// Returns whether the previous leader may have a write to this trial in flight. `is_searched` is
/// whether the experiment has not ended.
fn may_be_written(record: &TrialRecord, is_searched: bool) -> bool {
    let is_placed = |fact: usize| {
        record.spec.grants.iter().any(|grant| grant.fact.map(|fact| fact as usize) == Some(fact))
    };
    let is_stopped = record.spec.desired_state == DesiredTrialState::Stop;
    let mut facts = record.status.facts.iter().enumerate();
    let has_turn = facts.any(|(index, fact)| {
        let may_have_turn = match fact {
            Fact::Result(_) => true,
            // The search has asked for this end of most trials, so no turn follows from it.
            Fact::Closed(closed) if is_stopped && closed.cause == CloseCause::Completed => false,
            Fact::Closed(_) => is_searched,
            Fact::Reopened(_) => false,
        };
        may_have_turn && !is_placed(index)
    });
    has_turn || !record.status.phase.is_terminal()
}

/// Gives these objects a new version. Returns the number of objects that have one.
async fn touch_all<K, T: Cached>(
    client: &Client,
    cache: &Cache<T>,
    read: fn(DeserializeGuard<K>) -> T,
    keys: Vec<Key>,
    patch: &Value,
) -> usize
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + Debug
        + DeserializeOwned
        + Send,
{
    let touches: Vec<_> =
        keys.iter().map(|key| touch(client.clone(), cache, read, key, patch)).collect();
    let touched = futures::stream::iter(touches).buffer_unordered(WIDTH);
    touched.filter(|is_touched| std::future::ready(*is_touched)).count().await
}

/// Gives an object a new version, and returns whether it has one. Objects that this version cannot
/// parse have been written too, so only their metadata is required.
async fn touch<K, T: Cached>(
    client: Client,
    cache: &Cache<T>,
    read: fn(DeserializeGuard<K>) -> T,
    key: &Key,
    patch: &Value,
) -> bool
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + Debug
        + DeserializeOwned,
{
    let kind = K::kind(&()).to_lowercase();
    let mut waits = WAITS.iter();
    loop {
        let error = match try_touch(&client, cache, read, key, patch).await {
            Ok(()) => return true,
            Err(Error::Gone { .. }) => return false,
            Err(error) => error,
        };
        let is_final = matches!(error, Error::Refused { .. });
        let Some(wait) = waits.next().filter(|_| !is_final) else {
            tracing::warn!(%error, "skipped; the next write gives the {kind} a new version");
            return false;
        };
        tracing::warn!(%error, "retrying");
        tokio::time::sleep(*wait).await;
    }
}

/// Same as [`touch`], once.
async fn try_touch<K, T: Cached>(
    client: &Client,
    cache: &Cache<T>,
    read: fn(DeserializeGuard<K>) -> T,
    key: &Key,
    patch: &Value,
) -> Result<(), Error>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + Debug
        + DeserializeOwned,
{
    let api: Api<DeserializeGuard<K>> = Api::namespaced(client.clone(), &key.namespace);
    let (parameters, patch) = (PatchParams::default(), Patch::Merge(patch));
    let operation = format!("touch {} {key}", K::kind(&()).to_lowercase());
    match request(operation, api.patch(&key.name, &parameters, &patch)).await {
        Ok(touched) => {
            cache.put(read(touched));
            Ok(())
        }
        Err(error) => {
            if matches!(error, Error::Gone { .. }) {
                cache.forget(key);
            }
            Err(error)
        }
    }
}

/// Gives a new version to an experiment, so that pending writes fail. Earlier writes that succeeded
/// are in the cache then.
///
/// # Errors
///
/// The API server does not answer or refuses the write, or the experiment has changed meanwhile.
pub(crate) async fn fence_experiment(context: &Context, key: &Key) -> Result<(), Error> {
    context.metrics.writes.get_or_create(&Kind { kind: "experiment_touch" }).inc();
    fence(context, &context.experiments, CachedExperiment::new, key).await
}

/// Same as [`fence_experiment`], for a trial.
///
/// # Errors
///
/// See [`fence_experiment`].
pub(crate) async fn fence_trial(context: &Context, key: &Key) -> Result<(), Error> {
    context.metrics.writes.get_or_create(&Kind { kind: "trial_touch" }).inc();
    fence(context, &context.trials, CachedTrial::read, key).await
}

async fn fence<K, T: Cached>(
    context: &Context,
    cache: &Cache<T>,
    read: fn(DeserializeGuard<K>) -> T,
    key: &Key,
) -> Result<(), Error>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + Debug
        + DeserializeOwned,
{
    let patch = leader_patch(&context.options, Timestamp::now());
    match try_touch(&context.client, cache, read, key, &patch).await {
        Err(Error::Gone { .. }) => Ok(()),
        result => result,
    }
}

/// Reads an experiment from the API server into the cache.
///
/// # Errors
///
/// The API server does not answer, or refuses the request.
pub(crate) async fn read_experiment(context: &Context, key: &Key) -> Result<(), Error> {
    read_again(&context.client, &context.experiments, CachedExperiment::new, key).await
}

/// Same as [`read_experiment`], for a trial.
///
/// # Errors
///
/// See [`read_experiment`].
pub(crate) async fn read_trial(context: &Context, key: &Key) -> Result<(), Error> {
    read_again(&context.client, &context.trials, CachedTrial::read, key).await
}

async fn read_again<K, T: Cached>(
    client: &Client,
    cache: &Cache<T>,
    read: fn(DeserializeGuard<K>) -> T,
    key: &Key,
) -> Result<(), Error>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + Debug
        + DeserializeOwned,
{
    let api: Api<DeserializeGuard<K>> = Api::namespaced(client.clone(), &key.namespace);
    let operation = format!("read {} {key}", K::kind(&()).to_lowercase());
    match request(operation, api.get(&key.name)).await {
        Ok(object) => {
            cache.put(read(object));
            Ok(())
        }
        Err(Error::Gone { .. }) => {
            cache.forget(key);
            Ok(())
        }
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests;

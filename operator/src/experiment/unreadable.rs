//! Objects that this version cannot parse, and records from which it cannot rebuild the search.

use std::sync::Arc;
use std::time::Duration;

use kube::runtime::events::EventType;
use stoker_api::condition::ConditionStatus;
use stoker_api::experiment::{DesiredState, Experiment, ExperimentSpec, ExperimentStatus};
use stoker_api::text;
use stoker_engine::experiment::{Request, Unreadable, set_unreadable};
use stoker_engine::gang::{POD_GRACE_SECONDS_MAX, pods_to_stop};

use super::apply::{self, Writer};
use super::decide::want_without_search;
use super::{most_severe, new_condition};
use crate::cache::{Cached as _, Key};
use crate::context::{Context, now};
use crate::error::Error;
use crate::objects::CachedTrial;
use crate::trial::apply::delete_pod;
use crate::user_resources::CachedExperiment;

/// Maximum size in bytes of a parse error in a message, so that the message also has the remedy.
const ERROR_BYTES_MAX: usize = 500;
/// How to repair an object.
const REMEDY: &str = "nothing is decided until this is repaired: upgrade the operator if a newer \
                      version wrote it, restore the object from a backup, or cancel or delete the \
                      experiment";

/// Writes the parse error of an experiment to its status. Its trials stay as they are, unless they
/// were paused, stopped or killed.
pub(super) async fn report_experiment(
    context: &Context,
    key: &Key,
    cached: &CachedExperiment,
) -> Result<Option<Duration>, Error> {
    let Err(error) = &cached.object else { return Ok(None) };
    let generation = error.metadata.generation.unwrap_or_default();
    let mut errors = vec![];
    if !context.reported.contains(key, cached.uid(), generation) {
        tracing::warn!(experiment = %key, error = error.error, "cannot parse an experiment");
        let version = error.metadata.resource_version.clone();
        let valid =
            new_condition("Valid", ConditionStatus::False, generation, "Unreadable", &error.error);
        // A stop must not wait for this write.
        match apply::mark_unreadable::<Experiment>(context, key, version, &valid).await {
            Ok(()) => context.reported.add(key, cached.uid(), generation),
            Err(error) => errors.push(error),
        }
    }
    // The desired state of the experiment and its preemption timeout are unknown.
    let stop = Stop { state: DesiredState::Active, timeout_seconds: POD_GRACE_SECONDS_MAX };
    let trials = apply::trials_of(context, key, cached.uid());
    errors.extend(stop_pods(context, &trials, stop).await);
    most_severe(errors).map_or(Ok(Some(context.resync_interval(key))), Err)
}

/// Reports a record from which the search cannot be rebuilt. Its trials train to what they were
/// granted and then release their GPUs, and the user can pause, cancel or kill them.
pub(super) async fn report_search(
    context: &Context,
    key: &Key,
    experiment: &Experiment,
    unreadable: &Unreadable,
) -> Result<(), Error> {
    let after = experiment.status.clone().unwrap_or_default();
    report(context, key, experiment, after, &format!("{unreadable}; {REMEDY}")).await
}

/// Waits for trials that cannot be parsed: a decision without them could differ from one with them.
/// Reports the first one, and writes `after` as the other fields of the status. The other trials
/// continue as in [`report_search`]. A pause, a cancel or a kill also deletes the pods of these
/// trials.
pub(super) async fn wait_for_trials(
    key: &Key,
    mut writer: Writer<'_>,
    request: Request,
    unreadable: &[Arc<CachedTrial>],
    after: ExperimentStatus,
) -> Result<Option<Duration>, Error> {
    let wait = want_without_search(&mut writer, request).await;
    let stop = Stop::of(&writer.experiment.spec);
    writer.errors.extend(stop_pods(writer.context, unreadable, stop).await);
    let first = unreadable.first().and_then(|trial| Some((trial, trial.unreadable.as_ref()?)));
    if let Some((trial, error)) = first {
        let mut error = error.clone();
        text::bound(&mut error, ERROR_BYTES_MAX);
        let message = format!("trial {} cannot be parsed: {error}; {REMEDY}", trial.key().name);
        let reported = report(writer.context, key, &writer.experiment, after, &message).await;
        writer.errors.extend(reported.err());
    }
    most_severe(writer.errors).map_or(Ok(Some(wait)), Err)
}

/// Stops the trials of an experiment without a valid spec that the user has paused, cancelled or
/// killed, by their own states or by that of the experiment. Records the state of the experiment in
/// each trial that can be parsed, and deletes the pods. Returns the errors.
pub(super) async fn stop_trials(
    context: &Context,
    experiment: &Experiment,
    trials: Vec<Arc<CachedTrial>>,
) -> Vec<Error> {
    let stop = Stop::of(&experiment.spec);
    let readable = trials.iter().filter(|trial| trial.unreadable.is_none());
    let readable: Vec<_> = readable.cloned().collect();
    let mut writer = Writer::new(context, experiment, &readable);
    if stop.state != DesiredState::Active {
        let request = Request { state: stop.state, release_seconds: 0, now: now() };
        want_without_search(&mut writer, request).await;
    }
    writer.errors.extend(stop_pods(context, &trials, stop).await);
    writer.errors
}

/// How the trials of an experiment stop.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stop {
    /// Desired state of the experiment.
    pub(super) state: DesiredState,
    /// Seconds that a program has to store a checkpoint.
    pub(super) timeout_seconds: u32,
}

impl Stop {
    fn of(spec: &ExperimentSpec) -> Self {
        Self { state: spec.state, timeout_seconds: spec.preemption_timeout_seconds }
    }
}

/// Deletes the pods of trials without a plan, if the user has paused or ended the experiment, or if
/// the trial was paused, stopped or killed. Returns the errors.
pub(super) async fn stop_pods(
    context: &Context,
    trials: &[Arc<CachedTrial>],
    stop: Stop,
) -> Vec<Error> {
    let mut errors = vec![];
    for trial in trials {
        let key = trial.key();
        let pods = context.pods.group(&key);
        let owned = pods.iter().filter(|pod| pod.owner == trial.uid()).map(|pod| &pod.observed);
        let states = (stop.state, trial.record.spec.desired_state);
        for pod in pods_to_stop(owned, states, stop.timeout_seconds, now()) {
            errors.extend(delete_pod(context, &key.namespace, &pod).await.err());
        }
    }
    errors
}

/// Reports by a condition that nothing is decided, and by an event if the message is new.
async fn report(
    context: &Context,
    key: &Key,
    experiment: &Experiment,
    mut after: ExperimentStatus,
    message: &str,
) -> Result<(), Error> {
    let generation = experiment.metadata.generation.unwrap_or_default();
    let is_new = set_unreadable(&mut after, message, generation, now());
    if experiment.status.as_ref() == Some(&after) {
        return Ok(());
    }
    let written = apply::write_status(context, experiment, after).await?;
    if is_new {
        tracing::error!(experiment = %key, message, "the search of an experiment waits");
        context.event(&written, EventType::Warning, "Unreadable", message.to_owned());
    }
    Ok(())
}

#[cfg(test)]
mod tests;

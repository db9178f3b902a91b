//! Queues the objects that each change in the caches affects.

use std::sync::Arc;
use std::time::Duration;

use crate::cache::{Cached as _, Change};
use crate::context::{Changes, Context};
use crate::leader::other;
use crate::node::{CachedNode, observe_outage};
use crate::objects::{CachedPod, CachedTrial};
use crate::user_resources::CachedExperiment;

/// Delay of an experiment's reconcile after a change of a trial, to batch such changes.
const BATCH_DELAY: Duration = Duration::from_millis(100);
/// The same delay for changes that only the status shows: trials validate often.
const STATUS_ONLY_DELAY: Duration = Duration::from_secs(2);

/// Queues the objects that each change affects, for as long as this is polled.
pub async fn dispatch(context: Arc<Context>, mut changes: Changes) {
    loop {
        tokio::select! {
            Some(change) = changes.experiments.recv() => on_experiment(&context, &change),
            Some(change) = changes.trials.recv() => on_trial(&context, &change),
            Some(change) = changes.jobs.recv() => {
                let job = change.new.as_ref().or(change.old.as_ref());
                job.into_iter().for_each(|job| context.job_queue.add(job.key()));
            }
            Some(change) = changes.pods.recv() => {
                let pods = [&change.old, &change.new].into_iter().flatten();
                pods.for_each(|pod| on_pod(&context, pod));
            }
            Some(change) = changes.nodes.recv() => on_node(&context, &change),
            else => return,
        }
    }
}

fn on_experiment(context: &Context, change: &Change<CachedExperiment>) {
    let Some(any) = change.new.as_ref().or(change.old.as_ref()) else { return };
    context.experiment_queue.add(any.key());
    other::report(context, change);
    // Trials wait until their experiment is cached, as after a restart, and until its storage is
    // recorded.
    let awaited_state = |object: &Option<Arc<CachedExperiment>>| {
        let experiment = object.as_ref()?.experiment()?;
        let storage = experiment.status.as_ref().and_then(|status| status.storage.clone());
        Some((experiment.metadata.generation, storage))
    };
    if awaited_state(&change.old) != awaited_state(&change.new) {
        context
            .trials
            .group(&any.key())
            .iter()
            .for_each(|trial| context.trial_queue.add(trial.key()));
    }
}

fn on_trial(context: &Context, change: &Change<CachedTrial>) {
    let Some(any) = change.new.as_ref().or(change.old.as_ref()) else { return };
    let _ = context.trial_changes.send(any.key());
    context.trial_queue.add(any.key());
    let wait = match (&change.old, &change.new) {
        (Some(old), Some(new)) => reconcile_delay(old, new),
        _ => Some(BATCH_DELAY),
    };
    if let Some(wait) = wait {
        context.experiment_queue.add_after(any.experiment_key(), wait);
    }
}

/// Delay until an experiment must be reconciled after a change of its trial; `None` if the change
/// affects neither its plan nor its status.
fn reconcile_delay(old: &CachedTrial, new: &CachedTrial) -> Option<Duration> {
    let (before, after) = (&old.record.status, &new.record.status);
    let is_alive =
        |trial: &CachedTrial| stoker_engine::trial::live_attempt(&trial.record).is_some();
    let plans = before.facts != after.facts
        || before.phase != after.phase
        || is_alive(old) != is_alive(new)
        || old.unreadable != new.unreadable
        || old.record.spec != new.record.spec;
    let shows = before.best_metric != after.best_metric
        || before.reason != after.reason
        || before.message != after.message;
    match shows {
        _ if plans => Some(BATCH_DELAY),
        true => Some(STATUS_ONLY_DELAY),
        false => None,
    }
}

/// Queues the job or trial of a pod, or the experiment that it cleans up.
fn on_pod(context: &Context, pod: &CachedPod) {
    let cleaned = pod.cleaned_experiment.clone().into_iter();
    cleaned.for_each(|experiment| context.experiment_queue.add(experiment));
    match &pod.job {
        Some(job) => context.job_queue.add(job.clone()),
        None => pod.group().into_iter().for_each(|trial| context.trial_queue.add(trial)),
    }
}

fn on_node(context: &Context, change: &Change<CachedNode>) {
    let Some(any) = change.new.as_ref().or(change.old.as_ref()) else { return };
    observe_outage(context);
    let name = any.key().name;
    let pods = context.pods.all();
    let affected = pods.iter().filter(|pod| pod.node.as_ref() == Some(&name));
    affected.for_each(|pod| on_pod(context, pod));
}

//! Observes a job: reads its pods from the cache.

use stoker_api::experiment::DesiredState;
use stoker_api::inference::{InferenceJob, InferenceStatus};
use stoker_api::validate::ValidInferenceJob;
use stoker_engine::gang::ObservedPod;
use stoker_engine::inference::pods::JobView;

use crate::cache::Key;
use crate::context::{Context, now};
use crate::objects::group_of_job;
use crate::trial::observe::with_node_state;

/// Pods of the job with this UID. Pods of an earlier job with the same name are excluded.
pub(super) fn pods(context: &Context, key: &Key, uid: &str) -> Vec<ObservedPod> {
    let pods = context.pods.group(&group_of_job(key));
    pods.iter().filter(|pod| pod.owner == uid).map(|pod| with_node_state(context, pod)).collect()
}

/// Input of the engine's plan, with the state that the job is to reach.
pub(super) fn view<'a>(
    context: &Context,
    (job, valid): (&InferenceJob, &ValidInferenceJob),
    desired_state: DesiredState,
    status: &'a InferenceStatus,
    pods: &'a [ObservedPod],
) -> JobView<'a> {
    let spec = &valid.spec;
    JobView {
        status,
        desired_state,
        generation: job.metadata.generation.unwrap_or_default(),
        slots: spec.resources.slots,
        max_restarts: spec.max_restarts,
        pods,
        starting_max: context.options.starting_pods_max,
        timeouts: context.options.timeouts(spec.preemption_timeout_seconds),
        now: now(),
    }
}

//! What is known of a job.

use stoker_api::inference::{InferenceJob, InferenceStatus};
use stoker_api::validate::ValidInferenceJob;
use stoker_engine::gang::PodSeen;
use stoker_engine::inference::pods::JobView;

use crate::cache::Key;
use crate::objects::group_of_job;
use crate::trial::observe::seen;
use crate::world::{World, now};

/// The pods of a job, and not those of an earlier one of its name.
pub(super) fn pods(world: &World, key: &Key, uid: &str) -> Vec<PodSeen> {
    let pods = world.pods.group(&group_of_job(key));
    pods.iter().filter(|it| it.owner == uid).map(|it| seen(world, it)).collect()
}

/// What the engine plans by.
pub(super) fn view<'a>(
    world: &World,
    job: &InferenceJob,
    valid: &ValidInferenceJob,
    status: &'a InferenceStatus,
    pods: &'a [PodSeen],
) -> JobView<'a> {
    let spec = &valid.spec;
    JobView {
        status,
        wanted: spec.state,
        generation: job.metadata.generation.unwrap_or_default(),
        slots: spec.resources.slots,
        max_restarts: spec.max_restarts,
        pods,
        starting_max: world.options.starting_pods_max,
        patience: world.options.patience(spec.preemption_timeout_seconds),
        now: now(),
    }
}

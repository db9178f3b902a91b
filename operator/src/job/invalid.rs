//! Jobs with an invalid spec, and jobs that this version cannot parse.

use std::time::Duration;

use kube::api::DynamicObject;
use kube::core::ApiResource;
use kube::runtime::events::EventType;
use kube::{Api, Resource as _};
use stoker_api::condition::{self, ConditionStatus};
use stoker_api::experiment::{DesiredState, Phase};
use stoker_api::inference::InferenceJob;
use stoker_api::trial::DesiredTrialState;
use stoker_api::validate::FieldError;
use stoker_engine::gang::{ObservedPod, POD_GRACE_SECONDS_MAX, PodDeletion, pods_to_stop};

use super::{apply, desired_state, observe, state_key};
use crate::cache::Key;
use crate::context::{Context, now};
use crate::error::{Error, request};
use crate::experiment::{most_severe, new_condition, set_invalid};
use crate::trial::apply::delete_pod;
use crate::user_resources::CachedJob;

/// Remedies for a job that newer rules reject.
const NO_LONGER_VALID_REMEDY: &str = "its processes run without restarts: use the earlier version \
                                      of the operator, or pause, cancel, kill or delete the job";

/// Fails a job with an invalid spec, which cannot change. `state` is the state that it is to reach.
pub(super) async fn fail(
    context: &Context,
    key: &Key,
    job: &InferenceJob,
    state: DesiredState,
    errors: &[FieldError],
) -> Result<Option<Duration>, Error> {
    let message = errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
    let mut after = job.status.clone().unwrap_or_default();
    if after.attempts > 0 {
        return report_no_longer_valid(context, key, job, state, &message).await;
    }
    let generation = job.metadata.generation.unwrap_or_default();
    after.phase = Phase::Failed;
    after.message = Some(format!("invalid: {message}"));
    after.observed_generation = generation;
    after.ended_at = Some(now());
    set_invalid(&mut after.conditions, generation, &message);
    tracing::info!(job = %key, message, "job is invalid");
    apply::write_status(context, key, job, after).await?;
    context.metrics.job_ended(Phase::Failed);
    context.event(job, EventType::Warning, "Invalid", message);
    Ok(None)
}

/// Reports a job that has started and that newer validation rules reject, and stops its pods if the
/// user has paused, cancelled, killed or deleted it. Otherwise its pods stay as they are, and the
/// job continues once an operator accepts it.
async fn report_no_longer_valid(
    context: &Context,
    key: &Key,
    job: &InferenceJob,
    state: DesiredState,
    message: &str,
) -> Result<Option<Duration>, Error> {
    let generation = job.metadata.generation.unwrap_or_default();
    let uid = job.metadata.uid.as_deref().unwrap_or_default();
    let mut errors = vec![];
    if !context.reported.contains(&state_key(key), uid, generation) {
        let text = format!("{message}; {NO_LONGER_VALID_REMEDY}");
        let valid =
            new_condition("Valid", ConditionStatus::False, generation, "NoLongerValid", &text);
        let mut after = job.status.clone().unwrap_or_default();
        condition::set(&mut after.conditions, valid);
        tracing::error!(job = %key, message, "running job is invalid under newer validation rules");
        // A stop must not wait for this write.
        match apply::write_status(context, key, job, after).await {
            Ok(_) => context.reported.add(&state_key(key), uid, generation),
            Err(error) => errors.push(error),
        }
    }
    let stop = Stop { state, timeout_seconds: job.spec.preemption_timeout_seconds };
    let pods = observe::pods(context, key, uid);
    errors.extend(delete_pods(context, key, stop.deletions(&pods)).await);
    most_severe(errors).map_or(Ok(Some(context.resync_interval(key))), Err)
}

/// Writes the parse error of a job to its status. Its pods stay as they are, unless the user has
/// paused, cancelled, killed or deleted it.
pub(super) async fn report_unparsable(
    context: &Context,
    key: &Key,
    cached: &CachedJob,
) -> Result<Option<Duration>, Error> {
    let Err(error) = &cached.object else { return Ok(None) };
    let generation = error.metadata.generation.unwrap_or_default();
    let mut errors = vec![];
    if !context.reported.contains(&state_key(key), cached.uid(), generation) {
        tracing::warn!(job = %key, error = error.error, "cannot parse a job");
        let version = error.metadata.resource_version.clone();
        let valid =
            new_condition("Valid", ConditionStatus::False, generation, "Unreadable", &error.error);
        let marked = crate::experiment::apply::mark_unreadable::<InferenceJob>(
            context, key, version, &valid,
        );
        // A stop must not wait for this write.
        match marked.await {
            Ok(()) => context.reported.add(&state_key(key), cached.uid(), generation),
            Err(error) => errors.push(error),
        }
    }
    let pods = observe::pods(context, key, cached.uid());
    if pods.iter().any(|pod| !pod.is_terminal()) {
        match read_object(context, key).await {
            Ok(object) => {
                let deletions = deletions_of_unparsable(&object, cached.uid(), &pods);
                errors.extend(delete_pods(context, key, deletions).await);
            }
            Err(error) => errors.push(error),
        }
    }
    most_severe(errors).map_or(Ok(Some(context.resync_interval(key))), Err)
}

/// Reads a job without parsing its spec. The cache has only the metadata of such a job.
async fn read_object(context: &Context, key: &Key) -> Result<DynamicObject, Error> {
    let resource = ApiResource::erase::<InferenceJob>(&());
    let raw: Api<DynamicObject> =
        Api::namespaced_with(context.client.clone(), &key.namespace, &resource);
    request(format!("read {} {key}", InferenceJob::kind(&())), raw.get(&key.name)).await
}

/// Returns which pods of the job with this UID to delete, if `object` is still that job. A state
/// that this version does not know stops nothing.
fn deletions_of_unparsable(
    object: &DynamicObject,
    uid: &str,
    pods: &[ObservedPod],
) -> Vec<PodDeletion> {
    let spec = &object.data["spec"];
    let state: Option<DesiredState> = serde_json::from_value(spec["state"].clone()).ok();
    let state = desired_state(&object.metadata, state.unwrap_or(DesiredState::Active));
    let seconds = spec["preemptionTimeoutSeconds"].as_u64();
    let seconds = seconds.and_then(|seconds| u32::try_from(seconds).ok());
    let timeout_seconds = seconds.unwrap_or(POD_GRACE_SECONDS_MAX);
    let state = state.filter(|_| object.metadata.uid.as_deref() == Some(uid));
    let stop = state.map(|state| Stop { state, timeout_seconds });
    stop.map(|stop| stop.deletions(pods)).unwrap_or_default()
}

/// How the pods of a job without a plan stop.
#[derive(Clone, Copy, Debug)]
struct Stop {
    /// State that the job is to reach.
    state: DesiredState,
    /// Seconds that a program has to end.
    timeout_seconds: u32,
}

impl Stop {
    fn deletions(self, pods: &[ObservedPod]) -> Vec<PodDeletion> {
        let states = (self.state, DesiredTrialState::Run);
        pods_to_stop(pods.iter(), states, self.timeout_seconds, now())
    }
}

/// Deletes pods and returns the errors.
async fn delete_pods(context: &Context, key: &Key, deletions: Vec<PodDeletion>) -> Vec<Error> {
    let mut errors = vec![];
    for pod in deletions {
        errors.extend(delete_pod(context, &key.namespace, &pod).await.err());
    }
    errors
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Pod;
    use kube::core::DeserializeGuard;
    use serde_json::{Value, json};
    use stoker_engine::gang::PodPhase;

    use super::*;
    use crate::fixture::{self, RefusingServer};
    use crate::objects::CachedPod;

    /// Returns the sorted requests for a started job in this state that newer rules reject.
    async fn requests(state: DesiredState, change: Value) -> Vec<String> {
        let server = RefusingServer::default();
        let context = fixture::context(server.client());
        let pod = json!({
            "metadata": {
                "name": "j-a0-w0", "namespace": "ns", "uid": "pod-uid", "resourceVersion": "7",
                "labels": { "stoker.dev/job": "j", "stoker.dev/component": "job" },
                "ownerReferences": [{
                    "apiVersion": "v1", "kind": "Owner", "name": "j", "uid": "u",
                    "controller": true,
                }],
            },
            "spec": { "containers": [] },
            "status": { "phase": "Running" },
        });
        context.pods.put(CachedPod::new(serde_json::from_value::<Pod>(pod).unwrap()));
        let mut job = json!({
            "apiVersion": "stoker.dev/v1alpha1",
            "kind": "InferenceJob",
            "metadata": { "name": "j", "namespace": "ns", "uid": "u", "resourceVersion": "3" },
            "spec": {
                "entrypoint": { "command": [] }, "checkpoint": { "trial": "iris-0" },
                "input": { "url": "s3://data/*.csv" }, "state": state,
            },
            "status": { "attempts": 1, "phase": "Running" },
        });
        crate::pod::merge(&mut job, &change);
        let job: InferenceJob = serde_json::from_value(job).unwrap();
        let job = CachedJob::new(DeserializeGuard(Ok(job)));
        assert!(matches!(job.validation, Some(Err(_))));
        context.jobs.put(job);
        // The refused write of the status is an error.
        super::super::reconcile(&context, &Key::new("ns", "j")).await.unwrap_err();
        let mut requests = server.requests();
        requests.sort();
        requests
    }

    #[tokio::test]
    async fn invalid_started_jobs_can_be_stopped() {
        assert_eq!(requests(DesiredState::Active, json!({})).await, ["PATCH status"]);
        let stopped = ["DELETE j-a0-w0", "PATCH status"];
        for state in [DesiredState::Paused, DesiredState::Cancelled, DesiredState::Killed] {
            assert_eq!(requests(state, json!({})).await, stopped, "{state:?}");
        }
        let deleted = json!({ "metadata": {
            "deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["example.com/backup"],
        } });
        assert_eq!(requests(DesiredState::Active, deleted).await, stopped);
    }

    #[test]
    fn unparsable_jobs_can_be_stopped() {
        let pods = [
            ObservedPod { uid: "a".into(), phase: PodPhase::Running, ..ObservedPod::default() },
            ObservedPod { uid: "b".into(), phase: PodPhase::Succeeded, ..ObservedPod::default() },
        ];
        let check = |metadata: Value, spec: Value, expected: &[u32]| {
            let mut object = json!({ "metadata": { "name": "j", "uid": "u" }, "spec": spec });
            crate::pod::merge(&mut object["metadata"], &metadata);
            let object = serde_json::from_value(object).unwrap();
            let deletions = deletions_of_unparsable(&object, "u", &pods);
            assert!(deletions.iter().all(|deletion| deletion.uid == "a"));
            let graces: Vec<_> = deletions.iter().map(|deletion| deletion.grace_seconds).collect();
            assert_eq!(graces, expected, "{object:?}");
        };
        let state = |state: &str| json!({ "state": state, "preemptionTimeoutSeconds": 90 });
        check(json!({}), state("active"), &[]);
        check(json!({}), state("paused"), &[90]);
        check(json!({}), state("cancelled"), &[90]);
        check(json!({}), state("killed"), &[1]);
        check(json!({}), state("later"), &[]);
        check(json!({}), json!(null), &[]);
        check(json!({}), json!({ "state": "paused" }), &[POD_GRACE_SECONDS_MAX]);
        check(json!({ "uid": "another" }), state("killed"), &[]);
        let deleted = |finalizer: &str| {
            let finalizers = [finalizer];
            json!({ "deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": finalizers })
        };
        check(deleted("example.com/backup"), state("active"), &[90]);
        check(deleted("example.com/backup"), state("later"), &[90]);
        check(deleted("foregroundDeletion"), state("active"), &[]);
    }
}

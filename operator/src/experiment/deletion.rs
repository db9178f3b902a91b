//! Stops the trials of an experiment while a finalizer holds back its deletion.

use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use stoker_api::experiment::{DesiredState, Experiment};
use stoker_engine::experiment::stops;

use super::apply::{self, Writer};
use super::most_severe;
use super::unreadable::{self, Stop};
use crate::cache::Key;
use crate::context::Context;
use crate::error::Error;

/// Finalizers of Kubernetes itself, while it deletes the trials or pods or releases them from
/// their owner, as the user has asked.
const FINALIZERS_OF_KUBERNETES: [&str; 2] = ["foregroundDeletion", "orphan"];

/// Asks the open trials of an experiment that is being deleted to stop, as after a cancel, or kills
/// them if the user has killed the experiment. `is_valid` is whether its trials have plans.
///
/// Stoker sets no finalizer, so Kubernetes normally deletes the experiment at once, and then its
/// trials. A finalizer of another program postpones both, possibly for hours. The trials would keep
/// their GPUs and begin new attempts, although their search decides nothing any more.
pub(super) async fn stop_trials(
    context: &Context,
    key: &Key,
    experiment: &Experiment,
    is_valid: bool,
) -> Result<Option<Duration>, Error> {
    context.searchers.forget(key);
    let Some(state) = state_in_deletion(&experiment.metadata, experiment.spec.state) else {
        return Ok(None);
    };
    let uid = experiment.metadata.uid.as_deref().unwrap_or_default();
    let trials = apply::trials_of(context, key, uid);
    let (readable, unreadable): (Vec<_>, Vec<_>) =
        trials.iter().cloned().partition(|trial| trial.unreadable.is_none());
    let mut writer = Writer::new(context, experiment, &readable);
    writer.want(&stops(&writer.records(), state)).await;
    // Trials of an invalid experiment have no plan.
    let without_plan = if is_valid { unreadable } else { trials };
    let timeout_seconds = experiment.spec.preemption_timeout_seconds;
    let stop = Stop { state, timeout_seconds };
    writer.errors.extend(unreadable::stop_pods(context, &without_plan, stop).await);
    most_severe(writer.errors).map_or(Ok(Some(context.resync_interval(key))), Err)
}

/// Returns the state that an experiment or job has while a finalizer of another program holds back
/// its deletion: killed if the user has killed it, or else cancelled. `None` if Kubernetes deletes
/// or releases its trials or pods.
pub(crate) fn state_in_deletion(
    metadata: &ObjectMeta,
    state: DesiredState,
) -> Option<DesiredState> {
    if does_kubernetes_decide(metadata) {
        return None;
    }
    Some(match state {
        DesiredState::Killed => DesiredState::Killed,
        DesiredState::Active | DesiredState::Paused | DesiredState::Cancelled => {
            DesiredState::Cancelled
        }
    })
}

/// Returns whether Kubernetes deletes or releases trials or pods although their owner still exists.
fn does_kubernetes_decide(metadata: &ObjectMeta) -> bool {
    let mut finalizers = metadata.finalizers.iter().flatten();
    finalizers.any(|finalizer| FINALIZERS_OF_KUBERNETES.contains(&&**finalizer))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trials_stop_under_finalizers_of_other_programs() {
        let check = |finalizers: &[&str], expected: bool| {
            let finalizers = finalizers.iter().map(|name| (*name).to_owned()).collect();
            let metadata = ObjectMeta { finalizers: Some(finalizers), ..ObjectMeta::default() };
            assert_eq!(does_kubernetes_decide(&metadata), expected, "{:?}", metadata.finalizers);
        };
        check(&["example.com/backup"], false);
        check(&["foregroundDeletion"], true);
        check(&["example.com/backup", "orphan"], true);
        assert!(!does_kubernetes_decide(&ObjectMeta::default()));
    }
}

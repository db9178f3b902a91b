//! Notices an operator in another namespace that manages the same experiments.
//!
//! Each installation has a separate lease, so both lead. A new leader gives every open experiment
//! an annotation that contains its namespace. If such an annotation changes to another namespace
//! while this replica leads, another operator has started, and this one reports it. Nothing else
//! depends on this.
//!
//! In its first minutes, a replica reports nothing: after a reinstallation in another namespace,
//! the last writes of the removed operator may follow those of the new one. If such writes remain,
//! the replica writes its annotation again after that time. An operator that still runs sees this,
//! and reports it, or answers in the same way if it is also in its first minutes. So two operators
//! that start at about the same time notice each other.

use std::time::Duration;

use kube::runtime::events::EventType;
use stoker_api::experiment::Experiment;

use super::sweep::{ANNOTATION_LEADER, fence_experiment};
use crate::cache::{Change, Key};
use crate::context::Context;
use crate::user_resources::CachedExperiment;

/// Time for which a replica must have led.
const LEADS_MIN: Duration = Duration::from_mins(5);
/// Number of experiments of another operator that are written again. One would be enough, if it did
/// not end at that time.
const ANSWERS_MAX: usize = 8;

/// Reports the change of an experiment by the leader of another namespace, in the log and as an
/// event of the experiment.
pub(crate) fn report(context: &Context, change: &Change<CachedExperiment>) {
    if context.leads_for().is_none_or(|time| time < LEADS_MIN) {
        return;
    }
    let before = change.old.as_ref().and_then(|cached| cached.experiment());
    let after = change.new.as_ref().and_then(|cached| cached.experiment());
    let (Some(before), Some(after)) = (before, after) else { return };
    let own = &context.options.namespace;
    let Some(other) = other_operator(leader_of(before), leader_of(after), own) else { return };
    let text = format!(
        "another operator (namespace {other}) manages this experiment, as does the operator in \
         namespace {own}; uninstall one of them, or give them different watchNamespaces"
    );
    tracing::error!(experiment = %Key::of(after), other, "{text}");
    context.event(after, EventType::Warning, "AnotherOperator", text);
}

/// Waits until this replica has led for the time after which it reports other operators. Then
/// writes the annotation of some experiments again that other operators have annotated meanwhile.
pub(super) async fn answer(context: &Context) {
    tokio::time::sleep(LEADS_MIN).await;
    let own = &context.options.namespace;
    let mut keys: Vec<Key> = context
        .experiments
        .all()
        .iter()
        .filter_map(|cached| cached.experiment().filter(|experiment| is_others(experiment, own)))
        .map(Key::of)
        .collect();
    keys.sort();
    for key in keys.iter().take(ANSWERS_MAX) {
        if let Err(error) = fence_experiment(context, key).await {
            tracing::warn!(%error, "cannot notify another operator of this one");
        }
    }
}

/// Returns whether the leader that last annotated an open experiment is another operator.
fn is_others(experiment: &Experiment, own: &str) -> bool {
    let phase = experiment.status.as_ref().map(|status| status.phase);
    let is_open = phase.is_none_or(|phase| !phase.is_terminal());
    is_open && other_operator(None, leader_of(experiment), own).is_some()
}

fn leader_of(experiment: &Experiment) -> Option<&str> {
    let annotations = experiment.metadata.annotations.as_ref()?;
    annotations.get(ANNOTATION_LEADER).map(String::as_str)
}

/// Returns the namespace of another operator that has changed the annotation of a leader from
/// `before` to `after`. Earlier versions wrote no namespace.
fn other_operator<'a>(before: Option<&str>, after: Option<&'a str>, own: &str) -> Option<&'a str> {
    let after = after.filter(|_| before != after)?;
    let mut parts = after.split('/');
    let (namespace, _identity, _time) = (parts.next()?, parts.next()?, parts.next()?);
    (namespace != own).then_some(namespace)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::fixture::{self, RefusingServer};

    /// Returns the requests of an operator that has led for five minutes, with experiments of these
    /// names, namespaces of the last leader and phases.
    async fn answers(experiments: &[(&str, &str, &str)]) -> Vec<String> {
        let server = RefusingServer::default();
        let context = fixture::context(server.client());
        for (name, namespace, phase) in experiments {
            let leader = format!("{namespace}/a/2026-11-29T20:00:00Z");
            let experiment = json!({
                "apiVersion": "stoker.dev/v1alpha1", "kind": "Experiment",
                "metadata": {
                    "name": name, "namespace": "ns", "annotations": { ANNOTATION_LEADER: leader },
                },
                "spec": {
                    "entrypoint": { "command": ["program"] }, "hyperparameters": {},
                    "searcher": {
                        "single": {}, "metric": "loss", "smallerIsBetter": true,
                        "maxLength": { "batches": 8 },
                    },
                },
                "status": { "phase": phase },
            });
            let experiment = serde_json::from_value(experiment).unwrap();
            context.experiments.put(CachedExperiment::new(experiment));
        }
        answer(&context).await;
        server.requests()
    }

    #[tokio::test(start_paused = true)]
    async fn annotations_of_another_operator_are_answered() {
        let own = fixture::options("key").namespace;
        let experiments = [
            ("b", "team", "Running"),
            ("own", &own, "Running"),
            ("ended", "team", "Completed"),
            ("a", "team", "Pending"),
        ];
        assert_eq!(answers(&experiments).await, ["PATCH a", "PATCH b"]);
        let names: Vec<String> = (0..20).map(|number| format!("e{number}")).collect();
        let many: Vec<_> = names.iter().map(|name| (&**name, "team", "Running")).collect();
        assert_eq!(answers(&many).await.len(), ANSWERS_MAX);
    }

    #[test]
    fn leaders_of_other_namespaces_are_noticed() {
        let check = |before: Option<&str>, after: Option<&str>, expected: Option<&str>| {
            assert_eq!(other_operator(before, after, "own"), expected, "{before:?} {after:?}");
        };
        let time = "2026-11-29T20:00:00Z";
        let [own, next, other] = ["own/a", "own/b", "team/a"].map(|who| format!("{who}/{time}"));
        check(Some(&own), Some(&other), Some("team"));
        check(None, Some(&other), Some("team"));
        // Another change of the experiment, and a change of the leader.
        check(Some(&other), Some(&other), None);
        check(Some(&own), Some(&next), None);
        check(Some(&other), Some(&own), None);
        check(Some(&own), None, None);
        // Earlier versions, as during an upgrade.
        check(Some(&own), Some(&format!("pod-1/{time}")), None);
    }
}

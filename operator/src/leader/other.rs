//! Notices an operator in another namespace that manages the same experiments.
//!
//! Each installation has a separate lease, so both lead. A new leader gives every open experiment
//! an annotation that contains its namespace. If such an annotation changes to another namespace
//! while this replica leads, another operator has started. The operator that started first reports
//! it. Nothing else depends on this.

use std::time::Duration;

use kube::runtime::events::EventType;
use stoker_api::experiment::Experiment;

use super::sweep::ANNOTATION_LEADER;
use crate::cache::{Change, Key};
use crate::context::Context;
use crate::user_resources::CachedExperiment;

/// Time for which a replica must have led. After a reinstallation in another namespace, the last
/// writes of the removed operator may follow those of the new one.
const LEADS_MIN: Duration = Duration::from_mins(5);

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
    use super::*;

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

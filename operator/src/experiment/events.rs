//! Events about decisions of a search, on the trials that they are about, and about the storage.

use kube::runtime::events::EventType;
use stoker_api::experiment::{Experiment, ExperimentStatus, StorageRecord};
use stoker_engine::experiment::explain::{Decision, Kind};

use super::apply::Writer;
use crate::cache::Key;
use crate::context::Context;

/// Number of trials that get an event in one pass. The end of a rung can stop thousands of trials
/// at once, and an event is a write.
const EVENTS_MAX: usize = 32;

/// Returns the reason of an event; `None` if the decision is visible otherwise.
fn reason(decision: &Decision) -> Option<&'static str> {
    match decision.decision {
        Kind::Promoted => Some("Promoted"),
        Kind::Paused => Some("PausedBySearch"),
        Kind::Stopped => Some("StoppedBySearch"),
        Kind::Reopened => Some("Reopened"),
        Kind::Created
        | Kind::CountedAsPromoted
        | Kind::Waits
        | Kind::Completed
        | Kind::EndedEarly
        | Kind::Failed
        | Kind::Invalid
        | Kind::Cancelled
        | Kind::Deleted => None,
    }
}

/// Emits one event for each recorded decision that promotes, pauses or stops a trial. If there are
/// too many, the experiment gets one event for the rest.
pub(super) fn emit_decisions(context: &Context, writer: &Writer<'_>, decisions: &[Decision]) {
    let decisions: Vec<(&Decision, &str)> =
        decisions.iter().filter_map(|decision| Some((decision, reason(decision)?))).collect();
    for (decision, reason) in decisions.iter().take(EVENTS_MAX) {
        let Some(trial) = writer.trial(decision.trial) else { continue };
        // Events with the same action are merged, and only the first note is kept.
        let action = format!("Turn{}", decision.order);
        let note = decision.to_string();
        context.event_with_action(trial, EventType::Normal, reason, &action, note);
    }
    if let Some(rest) = rest(&decisions) {
        let order = decisions.last().map_or(0, |(decision, _)| decision.order);
        let (type_, action) = (EventType::Normal, format!("Turn{order}"));
        let experiment: &Experiment = &writer.experiment;
        context.event_with_action(experiment, type_, "Decided", &action, rest);
    }
}

/// Returns the note about the decisions without an event of their own.
fn rest(decisions: &[(&Decision, &str)]) -> Option<String> {
    let rest = decisions.get(EVENTS_MAX..).filter(|rest| !rest.is_empty())?;
    let num = |kind: Kind| rest.iter().filter(|(decision, _)| decision.decision == kind).count();
    Some(format!(
        "{} more trials promoted, {} paused and {} stopped; `stoker experiment describe` explains \
         decisions",
        num(Kind::Promoted),
        num(Kind::Paused),
        num(Kind::Stopped)
    ))
}

/// Emits an event if the API server dropped the storage record. No pod is created without it.
pub(super) fn emit_unrecorded_storage(
    context: &Context,
    written: &Experiment,
    after: &ExperimentStatus,
) {
    let is_fixed =
        |status: &ExperimentStatus| status.storage.as_ref().is_some_and(StorageRecord::is_fixed);
    if is_fixed(after) && !written.status.as_ref().is_some_and(is_fixed) {
        let note = "cannot record status.storage: the custom resource definitions are older than \
                    the operator; apply crds/ of its version";
        tracing::error!(experiment = %Key::of(written), note);
        context.event(written, EventType::Warning, "OldDefinitions", note.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use stoker_api::experiment::Unit;
    use stoker_engine::experiment::explain::Cause;
    use stoker_engine::search::view::Rule;

    use super::*;

    fn decision(trial: u32, kind: Kind) -> Decision {
        Decision {
            order: 7,
            position: trial,
            at: None,
            trial,
            bracket: None,
            decision: kind,
            units: 3,
            unit: Unit::Epochs,
            cause: Cause::Other,
            source: None,
            rule: Rule::Promotion,
            comparison: None,
            median: None,
        }
    }

    #[test]
    fn decisions_beyond_the_limit_are_counted() {
        let kinds = [Kind::Promoted, Kind::Paused, Kind::Stopped, Kind::Created];
        let decisions: Vec<Decision> = (0..)
            .zip(kinds.into_iter().cycle())
            .take(4 * EVENTS_MAX)
            .map(|(trial, kind)| decision(trial, kind))
            .collect();
        let with_reason = |decision| Some((decision, reason(decision)?));
        let with_reasons: Vec<_> = decisions.iter().filter_map(with_reason).collect();
        assert_eq!(with_reasons.len(), 3 * EVENTS_MAX);
        let expected = "21 more trials promoted, 21 paused and 22 stopped; `stoker experiment \
                        describe` explains decisions";
        assert_eq!(rest(&with_reasons).as_deref(), Some(expected));
        assert_eq!(rest(&with_reasons[..EVENTS_MAX]), None);
    }
}

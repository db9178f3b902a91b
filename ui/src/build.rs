//! Builds the data of pages from records.

pub(crate) mod actions;
pub(crate) mod bulk;
pub(crate) mod cluster;
pub(crate) mod compare;
pub(crate) mod errors;
pub(crate) mod experiment;
pub(crate) mod experiments;
pub(crate) mod head;
pub(crate) mod job;
pub(crate) mod jobs;
pub(crate) mod order;
pub(crate) mod rungs;
pub(crate) mod table;
pub(crate) mod trial;

use stoker_api::condition::Condition;
use stoker_engine::experiment::explain::Decision;

use crate::live::Version;
use crate::site::Site;
use crate::state;
use crate::store::Run;
use crate::text;
use crate::views::{ConditionRow, Crumb, DecisionRow, Frame, Notice, SelectOption};

/// Returns the frame of a page about a run.
pub(crate) fn frame(site: &Site, run: &Run, view: &'static str, title: &str) -> Frame {
    let crumb = |text: &str, href: String| Crumb { text: text::name(text), href };
    Frame {
        title: title.to_owned(),
        section: "experiments",
        view,
        base: run.base(),
        metric: run.experiment.spec.searcher.metric.clone(),
        live: (run.may_change() || actions::awaits_record(site, run)).then(|| live(run)),
        place: site.place.clone(),
        crumbs: vec![
            crumb("Experiments", "/experiments".to_owned()),
            crumb(
                &run.namespace,
                format!("/experiments?namespace={}", text::query(&run.namespace)),
            ),
        ],
        has_plots: true,
        version: env!("CARGO_PKG_VERSION"),
        viewer: site.viewer.clone(),
        is_signed_out: false,
    }
}

/// Returns the address of a run's live updates.
fn live(run: &Run) -> String {
    let version = Version::of_run(run);
    format!("/live?e={}/{}&v={version}", text::query(&run.namespace), run.id())
}

/// Returns the frame of a page about several experiments, or about none.
pub(crate) fn plain_frame(site: &Site, section: &'static str, title: &str) -> Frame {
    Frame {
        title: title.to_owned(),
        section,
        view: section,
        base: String::new(),
        metric: String::new(),
        live: None,
        place: site.place.clone(),
        crumbs: Vec::new(),
        has_plots: false,
        version: env!("CARGO_PKG_VERSION"),
        viewer: site.viewer.clone(),
        is_signed_out: false,
    }
}

/// Returns the reason why the page of a run may be out of date.
fn stale(run: &Run) -> Option<Notice> {
    let why = run.watch_error.as_deref()?;
    Some(Notice {
        at: None,
        class: "invalid",
        title: "This page may be out of date".to_owned(),
        text: text::escape(why),
        links: Vec::new(),
    })
}

/// Returns the options of a control. Each links to the current page with `name=value`.
pub(crate) fn options(
    path: &str,
    name: &str,
    current: &str,
    values: &[(&str, &str)],
) -> Vec<SelectOption> {
    let option = |(value, text): &(&str, &str)| SelectOption {
        value: (*value).to_owned(),
        text: (*text).to_owned(),
        href: format!("{path}?{name}={}", text::query(value)),
        is_current: *value == current,
    };
    values.iter().map(option).collect()
}

/// Returns a decision as a row: what was decided, and why.
pub(crate) fn decision(run: &Run, decision: &Decision) -> DecisionRow {
    let sentence = decision.to_string();
    let (what, why) = match sentence.split_once(": ") {
        Some((what, why)) => (what.to_owned(), why.to_owned()),
        None => (sentence, String::new()),
    };
    let metric = decision.comparison.as_ref().and_then(|comparison| comparison.metric);
    DecisionRow {
        order: decision.order,
        time: decision.at.map(|at| at.to_string()).unwrap_or_default(),
        clock: decision.at.map(text::clock).unwrap_or_default(),
        trial: decision.trial,
        trial_href: run.trial_base(decision.trial),
        badge: state::of_decision(decision.decision),
        what,
        why,
        value: metric.map(text::result).unwrap_or_default(),
    }
}

/// Returns the latest decisions, newest first, and the number of all.
pub(crate) fn decisions(run: &Run, bracket: Option<u32>, max: usize) -> (Vec<DecisionRow>, usize) {
    let Ok(explanation) = &run.search().explanation else { return (Vec::new(), 0) };
    let is_single = explanation.brackets.len() <= 1;
    let mut all = explanation.decisions();
    all.retain(|decision| is_single || bracket.is_none() || decision.bracket == bracket);
    let total = all.len();
    let latest = all.into_iter().rev().take(max);
    (latest.map(|one| self::decision(run, one)).collect(), total)
}

/// Returns a condition as a row.
pub(crate) fn condition(condition: &Condition) -> ConditionRow {
    ConditionRow {
        name: condition.type_.clone(),
        status: format!("{:?}", condition.status),
        reason: condition.reason.clone(),
        since: condition.last_transition_time.to_string(),
        message: text::escape(&condition.message),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::fixture;
    use crate::store::Standing;

    #[test]
    fn pages_are_live_while_the_run_may_change() {
        let check = |spec: Value, status: Value, change: fn(Run) -> Run, expected: bool| {
            let run = change(fixture::run(spec, status, &[]));
            let frame = frame(&Site::default(), &run, "trial", "Trial 0");
            assert_eq!(frame.live.is_some(), expected, "{run:?}");
        };
        let phase = |phase: &str| json!({ "phase": phase });
        let running = |run: Run| run;
        let stopped = |mut run: Run| {
            run.is_running = false;
            run
        };
        let none = || json!({});
        check(none(), phase("Running"), running, true);
        check(none(), phase("Completed"), running, false);
        // `stoker run FILE` may continue a run at any time, but not one that another has replaced.
        check(none(), phase("Paused"), stopped, true);
        let replaced = |run: Run| run.with_standing(Standing::Replaced);
        check(none(), phase("Paused"), replaced, false);
        // A request to continue takes effect when the runner or the operator records it.
        let request = || json!({ "number": 2, "trials": "failed" });
        let reopened = |number: u32| {
            let event = json!({ "reopened": { "number": number, "trials": "failed" } });
            let entry = json!({ "order": 1, "at": "2026-11-24T10:00:00Z", "event": event });
            json!({ "phase": "Failed", "log": [entry] })
        };
        check(none(), phase("Failed"), stopped, false);
        check(json!({ "reopen": request() }), phase("Failed"), stopped, true);
        check(json!({ "reopen": request() }), reopened(1), stopped, true);
        check(json!({ "reopen": request() }), reopened(2), stopped, false);
        check(json!({ "reopen": request(), "state": "cancelled" }), reopened(1), stopped, false);
    }
}

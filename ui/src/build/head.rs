//! Head of an experiment's pages: facts, bar of trials, tabs.

use std::collections::BTreeMap;
use std::sync::Arc;

use stoker_api::condition::{self, ConditionStatus};
use stoker_api::decisions::{LogEntry, LogEvent};
use stoker_api::experiment::{BestTrial, DesiredState, Experiment, Phase};
use stoker_api::number;
use stoker_api::time::Timestamp;
use stoker_engine::experiment::EDIT_REFUSED;
use stoker_engine::experiment::explain::length;
use stoker_engine::trial::TrialRecord;

use super::errors::first_error;
use super::{frame, stale};
use crate::data::{attempt_seconds, state};
use crate::site::Site;
use crate::store::{Run, Standing, created};
use crate::text;
use crate::views::{Badge, Bar, ExperimentHead, Fact, Notice, Pair, ShownTime, Tab};

/// Tab of an experiment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExperimentTab {
    Overview,
    Trials,
    Rungs,
    Hyperparameters,
    Checkpoints,
    Configuration,
    Events,
    Logs,
}

/// Returns the state of each trial.
pub(crate) fn badges(run: &Run) -> BTreeMap<u32, Badge> {
    let of = |(index, trial): (&u32, &Arc<TrialRecord>)| {
        (*index, crate::state::of_trial(trial, state(run, *index), run.is_running))
    };
    run.trials.iter().map(of).collect()
}

/// Returns the bar of a run's trials.
pub(crate) fn bar(run: &Run) -> Bar {
    let total = crate::state::trials_max(&run.experiment);
    let total = total.filter(|_| !run.phase().is_terminal());
    crate::state::bar(badges(run).into_values(), total)
}

/// Returns the seconds of all attempts of all trials, and the same times the slots of a trial.
pub(crate) fn seconds(run: &Run) -> (u64, u64) {
    let all: u64 = run.trials.values().map(|trial| attempt_seconds(trial, run.is_live())).sum();
    (all, all * u64::from(run.experiment.spec.resources.slots_per_trial.max(1)))
}

/// Returns the method with its sampler, such as `asyncHalving + tpe`.
pub(crate) fn method(experiment: &Experiment) -> String {
    let searcher = &experiment.spec.searcher;
    let method = searcher.methods_set().first().copied().unwrap_or_default();
    let sampler = serde_json::to_value(searcher).unwrap_or_default();
    let sampler = sampler["sampler"].as_object().and_then(|sampler| sampler.keys().next().cloned());
    match sampler {
        Some(sampler) if sampler != "random" => format!("{method} + {sampler}"),
        _ => method.to_owned(),
    }
}

/// Returns the head of an experiment's pages.
pub(crate) fn head(site: &Site, run: &Run, tab: ExperimentTab) -> ExperimentHead {
    let spec = &run.experiment.spec;
    let name = text::name(&run.name);
    let controls = super::actions::controls(site, run);
    ExperimentHead {
        frame: frame(site, run, "experiment", &format!("{name} · Stoker")),
        namespace: run.namespace.clone(),
        name,
        id: run.id(),
        base: run.base(),
        phase: crate::state::of_run(run),
        labels: spec.labels.iter().map(|label| text::name(label)).collect(),
        description: spec.description.as_deref().filter(|text| !text.is_empty()).map(text::escape),
        facts: facts(run),
        bar: bar(run),
        stale: stale(run),
        notice: notice(run),
        tabs: tabs(run, tab),
        commands: commands(site, run),
        controls,
    }
}

fn facts(run: &Run) -> Vec<Fact> {
    let spec = &run.experiment.spec;
    let status = run.experiment.status.clone().unwrap_or_default();
    let fact = |label: &str, value: String, note: String| Fact {
        label: label.to_owned(),
        value,
        note,
        ..Fact::default()
    };
    let mut facts = Vec::new();
    let best_label = format!("Best {}", text::name(&spec.searcher.metric));
    facts.push(match &status.best {
        Some(best) => Fact {
            link: Some(Pair {
                name: format!("trial {}", best.index),
                value: run.trial_base(best.index),
            }),
            is_best: true,
            title: format!(
                "{}, the best of the results that the search compares, and of the validations of \
                 trials that stopped early",
                best.metric
            ),
            ..fact(&best_label, text::result_text(Some(&best.metric)), best_at(run, best))
        },
        None => fact(&best_label, "none".to_owned(), String::new()),
    });
    let total = crate::state::trials_max(&run.experiment);
    let of = total.map(|total| format!("of {}", text::count(total.into()))).unwrap_or_default();
    facts.push(fact("Trials", text::count(run.trials.len() as u64), of));
    let slots = spec.resources.slots_per_trial;
    let gang = if slots > 1 { format!("gangs of {slots}") } else { String::new() };
    if run.is_live() {
        let running = crate::state::num_training(run) * u64::from(slots);
        facts.push(fact("Slots in use", text::count(running), gang));
    }
    let (_, slot_seconds) = seconds(run);
    let limit = spec.searcher.limits.as_ref().and_then(|limits| limits.slot_seconds);
    let limit = limit.map(|limit| format!("of {} h limit", text::hours(limit))).unwrap_or_default();
    facts.push(fact("Slot time", format!("{} h", text::hours(slot_seconds)), limit));
    let begin = created(run);
    if begin > 0 {
        let ended = ended(run);
        let (label, note) = match (run.is_live(), ended) {
            (false, Some(_)) => ("Ran for", "ended".to_owned()),
            (false, None) => ("Ran for", String::new()),
            (true, _) => ("Running for", format!("{} % done", status.progress_percent)),
        };
        let at = ended.map(ShownTime::new);
        facts.push(Fact { at, ..fact(label, text::duration(ran(run)), note) });
    }
    facts.push(fact("Search", method(&run.experiment), search_note(run)));
    facts
}

/// Returns the end of a run that is not live. A local record contains only the ends of attempts,
/// and the times at which an external searcher or a limit ended the search, possibly much later.
fn ended(run: &Run) -> Option<Timestamp> {
    if run.is_live() {
        return None;
    }
    let attempts = run.trials.values().filter_map(|trial| trial.status.attempts.last());
    let status = run.experiment.status.as_ref();
    let recorded = status.and_then(|status| status.ended_at);
    let ends = |entry: &&LogEntry| {
        matches!(entry.event, LogEvent::Answered(_) | LogEvent::LimitReached(_))
    };
    let decided = status.iter().flat_map(|status| &status.log).filter(ends).map(|entry| entry.at);
    recorded.or_else(|| attempts.filter_map(|attempt| attempt.ended_at).chain(decided).max())
}

/// Returns the seconds from the start of a run to its end, or to now.
pub(crate) fn ran(run: &Run) -> u64 {
    let end = ended(run).unwrap_or_else(text::now);
    u64::try_from(end.0 - created(run)).unwrap_or(0)
}

/// Returns the length at which the best trial had its result; empty for the best validation of a
/// trial that stopped early. Validations at other lengths may be better.
fn best_at(run: &Run, best: &BestTrial) -> String {
    let Some(trial) = run.trials.get(&best.index) else { return String::new() };
    let metric = number::parse(&best.metric);
    let at = crate::search::results(trial).find(|(_, value)| value.is_some() && *value == metric);
    at.map(|(units, _)| format!("at {}", length(units, run.search().unit))).unwrap_or_default()
}

fn search_note(run: &Run) -> String {
    let searcher = &run.experiment.spec.searcher;
    let length = searcher.length().map(|(unit, units)| length(units, unit));
    let settings = serde_json::to_value(searcher).unwrap_or_default();
    let method = searcher.methods_set().first().copied().unwrap_or_default();
    let divisor = settings[method]["divisor"].as_u64().map(|divisor| format!("divisor {divisor}"));
    let brackets = run.search().explanation.as_ref().map_or(0, |of| of.brackets.len());
    let brackets = (brackets > 1).then(|| format!("{brackets} brackets"));
    [length, divisor, brackets].into_iter().flatten().collect::<Vec<_>>().join(", ")
}

fn notice(run: &Run) -> Option<Notice> {
    let status = run.experiment.status.clone().unwrap_or_default();
    let phase = status.phase;
    if let Err(reason) = &run.search().explanation {
        return Some(Notice {
            class: "fail",
            title: "The decisions of the search cannot be read".to_owned(),
            at: None,
            text: reason.clone(),
            links: Vec::new(),
        });
    }
    let refused = (!phase.is_terminal() && run.is_running).then(|| refused(run)).flatten();
    if refused.is_some() {
        return refused;
    }
    let message = status.message.filter(|message| !message.is_empty());
    let (class, title) = match phase {
        Phase::Failed => ("fail", "The experiment failed"),
        Phase::Cancelled => ("info", "The experiment was cancelled"),
        _ if !phase.is_terminal() && !run.is_running => {
            let text = match run.experiment.spec.state {
                _ if run.standing == Standing::Replaced => {
                    "A later run has this name, or this one was deleted in part; it can only be \
                     deleted"
                }
                _ if run.standing == Standing::Stored => {
                    "Its record is only in the storage. To continue it, run the same command again \
                     on the machine that ran it"
                }
                DesiredState::Paused => {
                    "It is paused. Activate it, then run the same command again"
                }
                _ => {
                    "Run the same command again to continue; nothing that was trained before the \
                     last checkpoint is trained again"
                }
            };
            let title = "No runner trains this experiment now".to_owned();
            let text = text.to_owned();
            return Some(Notice { class: "info", title, at: None, text, links: vec![] });
        }
        Phase::Pending => ("info", "The experiment waits"),
        _ => return None,
    };
    let has_error = phase == Phase::Failed && first_error(run).is_some();
    let links = has_error.then(|| Pair {
        name: "First error in the logs".to_owned(),
        value: format!("{}#first-error", run.base()),
    });
    let links = links.into_iter().collect();
    let text = message.map(|message| text::escape(&message));
    text.map(|text| Notice { class, title: title.to_owned(), at: None, text, links })
}

/// Returns what an open experiment cannot do, such as to ask its external searcher. Running trials
/// continue meanwhile, possibly for days.
fn refused(run: &Run) -> Option<Notice> {
    let status = run.experiment.status.as_ref()?;
    let refused = condition::find(&status.conditions, "Refused")?;
    let title = match refused.reason.as_str() {
        "SearcherUnavailable" => "The external searcher does not answer, since",
        "AnswerRefused" => "The answer of the external searcher is refused, since",
        EDIT_REFUSED => "The edit is refused, since",
        _ => "What the experiment needs is refused or missing, since",
    };
    (refused.status == ConditionStatus::True).then(|| Notice {
        class: "fail",
        title: title.to_owned(),
        at: Some(ShownTime::new(refused.last_transition_time)),
        text: text::escape(&refused.message),
        links: Vec::new(),
    })
}

fn tabs(run: &Run, current: ExperimentTab) -> Vec<Tab> {
    use ExperimentTab as T;
    let base = run.base();
    let num_checkpoints: usize =
        run.trials.values().map(|trial| trial.status.checkpoints.len()).sum();
    let num_decisions = run.search().explanation.as_ref().map_or(0, |of| of.decisions().len());
    let count = |number: usize| text::count(number as u64);
    let all = [
        (T::Overview, "Overview", "", String::new()),
        (T::Trials, "Trials", "/trials", count(run.trials.len())),
        (T::Rungs, "Rungs", "/rungs", String::new()),
        (T::Hyperparameters, "Hyperparameters", "/hyperparameters", String::new()),
        (T::Checkpoints, "Checkpoints", "/checkpoints", count(num_checkpoints)),
        (T::Configuration, "Configuration", "/configuration", String::new()),
        (T::Events, "Events", "/events", count(num_decisions)),
        (T::Logs, "Logs", "/logs", String::new()),
    ];
    let is_shown = |tab: &T| *tab != T::Rungs || run.search().has_rungs();
    all.into_iter()
        .filter(|(tab, ..)| is_shown(tab))
        .map(|(tab, name, path, count)| Tab {
            name,
            href: format!("{base}{path}"),
            count,
            is_current: tab == current,
        })
        .collect()
}

fn commands(site: &Site, run: &Run) -> Vec<Pair> {
    let id = match site.is_cluster {
        true => format!("{} -n {}", run.name, run.namespace),
        false => run.id(),
    };
    let command = |purpose: &str, verb: &str| Pair {
        name: purpose.to_owned(),
        value: site.command(&format!("stoker experiment {verb} {id}")),
    };
    let mut commands = vec![
        command("Describe on a terminal", "describe"),
        command("Metrics as CSV", "metrics --output csv"),
    ];
    // The runner of a local run holds its record.
    let is_free = site.is_cluster || !run.is_running;
    if run.standing == Standing::Current {
        if is_free {
            commands.push(command("Continue trials that have stopped", "continue"));
        }
        if !run.phase().is_terminal() {
            commands.extend([
                command("Pause: trials checkpoint and exit", "pause"),
                command("End a pause", "activate"),
                command("Cancel: trials checkpoint and exit", "cancel"),
                command("Kill: trials end without a checkpoint", "kill"),
            ]);
        }
    }
    if is_free && run.standing != Standing::Stored {
        commands.push(command("Delete the experiment and its trials", "delete"));
    }
    commands
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::fixture;

    #[test]
    fn best_result_names_its_length() {
        // A validation between the rungs was better.
        let result =
            |units: u64, metric: &str| json!({ "result": {"units": units, "metric": metric} });
        let trial = json!({"phase": "Completed", "bestMetric": "0.1",
            "facts": [result(1, "0.5"), result(4, "0.25")]});
        let status = json!({"phase": "Completed", "best": {"index": 0, "metric": "0.25"}});
        let facts = facts(&fixture::run(json!({}), status, &[trial]));
        assert_eq!((facts[0].value.as_str(), facts[0].note.as_str()), ("0.2500", "at 4 batches"));
    }

    #[test]
    fn notice_names_the_place_of_the_runner() {
        let check = |standing: Standing, expected: &str| {
            let run = fixture::run(json!({}), json!({ "phase": "Paused" }), &[]);
            let mut run = run.with_standing(standing);
            run.is_running = false;
            let text = notice(&run).unwrap().text;
            assert!(text.contains(expected), "{text}");
        };
        check(Standing::Current, "Run the same command again to continue");
        check(Standing::Stored, "again on the machine that ran it");
    }

    #[test]
    fn failed_searcher_is_noticed_in_open_phases() {
        let condition = |holds: &str| {
            json!({"type": "Refused", "status": holds, "reason": "SearcherUnavailable",
                "lastTransitionTime": "2026-11-24T12:03:00Z", "message": "not\u{202e} json"})
        };
        let check = |phase: &str, holds: &str, expected: bool| {
            let status = json!({ "phase": phase, "conditions": [condition(holds)] });
            let notice = notice(&fixture::run(json!({}), status, &[]));
            let notice = notice.filter(|notice| notice.title.contains("does not answer"));
            let shown = notice.map(|notice| (notice.text, notice.at.unwrap().utc));
            let text = (r"not\u{202e} json".to_owned(), "2026-11-24T12:03:00Z".to_owned());
            assert_eq!(shown, expected.then_some(text), "{phase} {holds}");
        };
        check("Pending", "True", true);
        check("Running", "True", true);
        check("Paused", "True", true);
        check("Running", "False", false);
        check("Completed", "True", false);
    }

    #[test]
    fn ended_runs_do_not_grow_older() {
        let attempt =
            |from: &str, to: &str| json!({ "number": 0, "startedAt": from, "endedAt": to });
        let trials: Vec<Value> = [
            attempt("2026-11-24T10:00:00Z", "2026-11-24T10:01:00Z"),
            attempt("2026-11-24T10:00:30Z", "2026-11-24T10:02:10Z"),
        ]
        .map(|attempt| json!({ "phase": "Completed", "attempts": [attempt] }))
        .to_vec();
        let check = |status: Value, expected: u64| {
            assert_eq!(
                ran(&fixture::run(json!({}), status.clone(), &trials)),
                expected,
                "{status}"
            );
        };
        let ended = facts(&fixture::run(json!({}), json!({ "phase": "Completed" }), &trials));
        let times = ended.iter().filter_map(|fact| fact.at.as_ref()).map(|at| at.utc.as_str());
        assert_eq!(times.collect::<Vec<_>>(), ["2026-11-24T10:02:10Z"]);
        // A local record contains the ends of attempts only.
        check(json!({ "phase": "Completed" }), 130);
        check(json!({ "phase": "Completed", "endedAt": "2026-11-24T10:03:00Z" }), 180);
        // The searcher answered late.
        let answered = json!({"order": 1, "at": "2026-11-24T10:08:20Z",
            "event": {"answered": {"call": 1, "through": 0}}});
        check(json!({ "phase": "Completed", "log": [answered] }), 500);
        let running = fixture::run(json!({}), json!({ "phase": "Running" }), &trials);
        assert!(ran(&running) > 130);
    }
}

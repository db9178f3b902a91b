//! Pages of one trial.

use std::collections::BTreeMap;

use serde_json::Value;
use stoker_api::trial::Attempt;
use stoker_engine::trial::TrialRecord;

use super::experiment::{checkpoint_rows, yaml};
use super::order::{neighbors, place};
use super::table::{TableQuery, length};
use super::{decision, frame, options, stale};
use crate::curves::axis;
use crate::data::{attempt_seconds, reported_best, state};
use crate::logs::LogsQuery;
use crate::search::{category, flat};
use crate::site::{Site, quoted};
use crate::store::Run;
use crate::text;
use crate::views::{
    AttemptRow, Crumb, Fact, LogsCard, Notice, Pair, SelectOption, Tab, TrialHead, TrialPage,
    TrialTab,
};

/// Returns a page of a trial; `None` if the run has no such trial.
pub(crate) fn page(
    site: &Site,
    run: &Run,
    index: u32,
    tab: TrialTab,
    query: &TableQuery,
    logs: &LogsQuery,
) -> Option<TrialPage> {
    let trial = run.trials.get(&index)?;
    let base = run.trial_base(index);
    let axes = [("batches", "batches"), ("epochs", "epochs"), ("time", "time")];
    let scale = query.scale.as_deref().unwrap_or("linear");
    let explained = run.search().trial(index);
    let decisions = explained.map_or(&[][..], |explained| &explained.decisions);
    Some(TrialPage {
        head: head(site, run, trial, tab, query),
        tab,
        curves: format!("{base}/curves.json"),
        axes: options(&base, "x", axis(run, query.x.as_deref()), &axes),
        scales: options(&base, "scale", scale, &[("linear", "linear"), ("log", "log x")]),
        attempts: attempts(run, trial),
        metric: text::name(&run.experiment.spec.searcher.metric),
        checkpoints: checkpoint_rows(run, trial),
        checkpoints_href: format!("{base}/checkpoints"),
        logs: logs_card(run, index, logs),
        profiler: format!("{base}/profiler.json"),
        decisions: decisions.iter().rev().map(|one| decision(run, one)).collect(),
        command: command(site, run, trial),
        command_note: "trains these hyperparameters to the full length, with another seed; FILE \
                       is the file of the experiment, which with its seed trains this trial \
                       bit-identically"
            .to_owned(),
        record: yaml(&serde_json::json!({ "spec": trial.spec, "status": trial.status })),
    })
}

/// Returns the head of a trial's pages.
pub(crate) fn head(
    site: &Site,
    run: &Run,
    trial: &TrialRecord,
    tab: TrialTab,
    query: &TableQuery,
) -> TrialHead {
    let index = trial.spec.index;
    let explained = run.search().trial(index);
    let mut frame =
        frame(site, run, "trial", &format!("Trial {index} · {}", text::name(&run.name)));
    frame.crumbs.push(Crumb { text: text::name(&run.name), href: run.base() });
    let (previous, next) = neighbors(run, index, query.sort.as_deref());
    let link = |index: u32| {
        let sort = query.sort.as_deref().map(|sort| format!("?sort={}", text::query(sort)));
        Pair {
            name: format!("Trial {index}"),
            value: format!("{}{}", run.trial_base(index), sort.unwrap_or_default()),
        }
    };
    let why = explained.map(|explained| explained.reason());
    TrialHead {
        frame,
        index,
        base: run.trial_base(index),
        badge: crate::state::of_trial(trial, state(run, index), run.is_running),
        chips: chips(run, trial),
        why: why.or_else(|| trial.status.message.clone()).unwrap_or_default(),
        facts: facts(run, trial),
        hyperparameters: hyperparameters(trial),
        tabs: tabs(run, trial, tab),
        previous: previous.map(link),
        next: next.map(link),
        stale: stale(run),
        notice: notice(run, trial),
    }
}

fn chips(run: &Run, trial: &TrialRecord) -> Vec<String> {
    let mut chips = Vec::new();
    let brackets = run.search().explanation.as_ref().map_or(0, |of| of.brackets.len());
    if let Some(explained) = run.search().trial(trial.spec.index)
        && brackets > 1
    {
        chips.push(format!("bracket {}", explained.bracket));
    }
    let slots = run.experiment.spec.resources.slots_per_trial;
    if slots > 1 {
        chips.push(format!("gang of {slots}"));
    }
    if let Some(source) = &trial.spec.source {
        chips.push(format!("copy of trial {}", source.trial));
    }
    chips
}

fn facts(run: &Run, trial: &TrialRecord) -> Vec<Fact> {
    let fact = |label: &str, value: String, note: String| Fact {
        label: label.to_owned(),
        value,
        note,
        ..Fact::default()
    };
    let metric = &run.experiment.spec.searcher.metric;
    let place = place(run, trial.spec.index);
    let place = place.map(|(place, of)| format!("place {place} of {of}")).unwrap_or_default();
    let slots = run.experiment.spec.resources.slots_per_trial.max(1);
    let seconds = attempt_seconds(trial, run.is_live()) * u64::from(slots);
    let status = run.experiment.status.as_ref();
    let best = status.and_then(|status| status.best.as_ref());
    let mut facts = vec![
        Fact {
            is_best: best.is_some_and(|best| best.index == trial.spec.index),
            title: trial.status.best_metric.clone().unwrap_or_default(),
            ..fact(&text::name(metric), text::optional(reported_best(trial)), place)
        },
        fact("Progress", length(run, trial), run.search().unit.plural().to_owned()),
        fact("Attempts", trial.status.attempts.len().to_string(), String::new()),
        fact("Slot time", format!("{} h", text::hours(seconds)), String::new()),
    ];
    if let Some(activity) = trial.status.activity.as_ref().filter(|text| !text.is_empty()) {
        facts.push(fact("Activity", text::escape(activity), String::new()));
    }
    facts
}

fn hyperparameters(trial: &TrialRecord) -> Vec<Fact> {
    let fact = |(name, value): (String, Value)| Fact {
        label: text::name(&name),
        value: text::hyperparameter(&value),
        title: text::escape(&category(&value)),
        ..Fact::default()
    };
    let mut facts: Vec<Fact> = flat(&trial.spec.hyperparameters).into_iter().map(fact).collect();
    facts.push(Fact {
        label: "seed".to_owned(),
        value: trial.spec.seed.to_string(),
        ..Fact::default()
    });
    facts
}

fn tabs(run: &Run, trial: &TrialRecord, current: TrialTab) -> Vec<Tab> {
    use TrialTab as T;
    let base = run.trial_base(trial.spec.index);
    let all = [
        (T::Overview, "Overview", "", String::new()),
        (T::Metrics, "Metrics", "/metrics", String::new()),
        (T::Attempts, "Attempts", "/attempts", trial.status.attempts.len().to_string()),
        (T::Logs, "Logs", "/logs", String::new()),
        (T::Checkpoints, "Checkpoints", "/checkpoints", trial.status.checkpoints.len().to_string()),
        (T::Profiler, "Profiler", "/profiler", String::new()),
        (T::Configuration, "Configuration", "/configuration", String::new()),
    ];
    let tab = |(tab, name, path, count): (T, &'static str, &str, String)| Tab {
        name,
        href: format!("{base}{path}"),
        count,
        is_current: tab == current,
    };
    all.into_iter().map(tab).collect()
}

fn notice(run: &Run, trial: &TrialRecord) -> Option<Notice> {
    let badge = crate::state::of_trial(trial, state(run, trial.spec.index), run.is_running);
    let class = match badge.class {
        "failed" => "fail",
        "invalid" => "invalid",
        _ => return None,
    };
    let text = trial.status.message.clone().unwrap_or_else(|| "The program gave no message".into());
    let logs = format!("{}/logs", run.trial_base(trial.spec.index));
    Some(Notice {
        class,
        title: match class {
            "fail" => "The trial failed".to_owned(),
            _ => "The program rejected the hyperparameters".to_owned(),
        },
        at: None,
        text: text::escape(&text),
        links: vec![Pair { name: "Logs".to_owned(), value: logs }],
    })
}

fn attempts(run: &Run, trial: &TrialRecord) -> Vec<AttemptRow> {
    let now = text::now();
    let row = |attempt: &Attempt| {
        let (badge, end) = crate::state::of_attempt(attempt.end);
        let is_over = attempt.end.is_some() || !run.is_live();
        let (badge, end) = match attempt.end {
            None if is_over => (crate::state::CANCELLED, "Runner ended"),
            _ => (badge, end),
        };
        let until = attempt.ended_at.or((!is_over).then_some(now));
        let ran = match (attempt.started_at, until) {
            (Some(start), Some(end)) => text::duration(end.seconds_since(start)),
            _ => text::NONE.to_owned(),
        };
        let reason = [attempt.reason.clone(), attempt.message.clone()];
        let reason = reason.into_iter().flatten().collect::<Vec<_>>().join(": ");
        AttemptRow {
            number: attempt.number,
            started: attempt.started_at.map(|at| at.to_string()).unwrap_or_default(),
            clock: attempt.started_at.map(text::clock).unwrap_or_default(),
            ran,
            from: attempt.resumed_from.clone().unwrap_or_else(|| "scratch".to_owned()),
            badge,
            end,
            reason: text::escape(&reason),
            logs_href: format!(
                "{}/logs?attempt={}",
                run.trial_base(trial.spec.index),
                attempt.number
            ),
        }
    };
    trial.status.attempts.iter().rev().map(row).collect()
}

impl LogsCard {
    /// Returns a card without logs.
    pub(crate) fn none(reason: &str) -> Self {
        Self {
            source: String::new(),
            download: String::new(),
            attempts: Vec::new(),
            ranks: Vec::new(),
            levels: Vec::new(),
            search: String::new(),
            is_live: false,
            empty: Some(reason.to_owned()),
        }
    }
}

/// Returns the card with the logs of a trial.
pub(crate) fn logs_card(run: &Run, index: u32, query: &LogsQuery) -> LogsCard {
    let base = format!("{}/logs", run.trial_base(index));
    let Some(trial) = run.trials.get(&index) else { return LogsCard::none("No such trial") };
    let Some(latest) = trial.status.attempts.last() else {
        return LogsCard::none("The trial has not started");
    };
    let attempt = crate::logs::attempt(run, index, query).unwrap_or(latest.number);
    let option = |number: u32| SelectOption {
        value: number.to_string(),
        text: number.to_string(),
        href: format!("{base}?attempt={number}"),
        is_current: number == attempt,
    };
    let numbers = trial.status.attempts.iter().map(|attempt| attempt.number);
    let slots = run.experiment.spec.resources.slots_per_trial;
    let mut ranks: Vec<(String, String)> = vec![("all".to_owned(), "all ranks".to_owned())];
    ranks.extend((0..slots).map(|rank| (rank.to_string(), rank.to_string())));
    let ranks: Vec<(&str, &str)> =
        ranks.iter().map(|(value, text)| (value.as_str(), text.as_str())).collect();
    let levels = [("all", "all"), ("info", "info"), ("warn", "warn"), ("error", "error")];
    let rank = query.rank.as_deref().unwrap_or("all");
    let level = query.level.as_deref().unwrap_or("all");
    LogsCard {
        source: format!("{base}.json?attempt={attempt}"),
        download: format!("{base}.txt?attempt={attempt}"),
        attempts: numbers.map(option).collect(),
        ranks: if slots > 1 { options(&base, "rank", rank, &ranks) } else { Vec::new() },
        levels: options(&base, "level", level, &levels),
        search: query.q.clone().unwrap_or_default(),
        is_live: run.is_live() && latest.end.is_none() && latest.number == attempt,
        empty: None,
    }
}

/// Returns the command that trains the hyperparameters of a trial alone.
fn command(site: &Site, run: &Run, trial: &TrialRecord) -> String {
    let searcher = &run.experiment.spec.searcher;
    let length = searcher.length().map(|(unit, units)| (unit.plural(), units));
    let single = serde_json::json!({
        "metric": searcher.metric, "smallerIsBetter": searcher.smaller_is_better,
        "maxLength": length.into_iter().collect::<BTreeMap<_, _>>(), "single": {},
    });
    // Arguments of a cluster do not apply: it trains on this machine.
    let begin = match site.is_cluster {
        true => "stoker run FILE".to_owned(),
        false => site.command("stoker run FILE"),
    };
    let hyperparameters = trial.spec.hyperparameters.to_string();
    format!(
        "{begin} --set metadata.name={name}-{index} \\\n  --set {} \\\n  --set {}",
        quoted(&format!("searcher={}", text::escape_json(&single.to_string()))),
        quoted(&format!("hyperparameters={}", text::escape_json(&hyperparameters))),
        name = run.name,
        index = trial.spec.index,
    )
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::json;

    use super::*;
    use crate::fixture;

    /// The file of an experiment need not have its name.
    #[test]
    fn command_names_the_root_but_not_the_file() {
        let run = fixture::run(json!({}), json!({}), &[json!({})]);
        let check = |is_cluster: bool, expected: &str| {
            let arguments = "--root /runs".to_owned();
            let site = Site { is_cluster, arguments, ..Site::default() };
            let text = command(&site, &run, &run.trials[&0]);
            let begin = format!("stoker run FILE {expected}--set metadata.name={}-0 ", run.name);
            assert!(text.starts_with(&begin), "{text}");
        };
        check(false, "--root /runs ");
        check(true, "");
    }

    #[test]
    fn copied_commands_have_no_hidden_characters() {
        let mut run = fixture::run(json!({}), json!({}), &[json!({})]);
        let values = json!({"a\u{202e}b": "c\u{200b}\u{1b}é"});
        let trial = Arc::make_mut(Arc::make_mut(&mut run.trials).get_mut(&0).unwrap());
        trial.spec.hyperparameters = values.clone();
        let text = command(&Site::default(), &run, &run.trials[&0]);
        let json = text.split_once("hyperparameters=").unwrap().1.trim_end_matches('\'');
        assert_eq!(json, r#"{"a\u202eb":"c\u200b\u001bé"}"#);
        assert_eq!(serde_json::from_str::<serde_json::Value>(json).unwrap(), values);
    }
}

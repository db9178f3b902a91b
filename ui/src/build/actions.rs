//! Actions: which buttons a page has, and what the page says before an action.

use std::sync::Arc;

use stoker_api::experiment::{DesiredState, Phase, ReopenedTrials};
use stoker_engine::trial::TrialRecord;

use super::frame;
use super::head::badges;
use crate::actions::{Action, ActionAccess, Asked};
use crate::site::Site;
use crate::state::{
    CANCELLED, COMPLETED, DELETED, FAILED, INVALID, PAUSED, PENDING, QUEUED, RUNNING, STOPPED,
    STOPPED_EARLY, WAITING,
};
use crate::store::{Run, Standing};
use crate::text;
use crate::views::{
    ActionButton, Badge, ConfirmPage, Controls, Crumb, Notice, SelectOption, ShownTime,
};

const NOT_ALLOWED: &str = "This page is read-only: start it with --allow-actions for buttons, or \
                           run these commands in a terminal.";
const STORED: &str = "This experiment is read-only: its record is only in the storage. Use the \
                      commands where it runs.";
const IN_TERMINAL: &str = "Commands for a terminal.";

/// Seconds for which a page shows an effect that the record does not confirm.
const SHOWN_SECONDS: u64 = 30;

/// Returns the buttons of an experiment.
pub(crate) fn controls(site: &Site, run: &Run) -> Controls {
    let Some(access) = site.actions.as_ref().filter(|access| access.allows_actions()) else {
        let note = if run.standing == Standing::Stored { STORED } else { NOT_ALLOWED };
        return Controls { commands_note: note.to_owned(), ..Controls::default() };
    };
    let (actions, note) = allowed(site, access, run);
    let button = |action: Action| ActionButton {
        title: action.title(),
        href: href(run, action),
        acts_at_once: matches!(action, Action::Pause | Action::Activate),
    };
    Controls {
        buttons: actions.into_iter().map(button).collect(),
        note,
        commands_note: IN_TERMINAL.to_owned(),
        asked: asked(site, access, run),
        token: access.token().to_owned(),
        uid: run.uid.clone(),
    }
}

/// Returns the path of an action.
pub(crate) fn href(run: &Run, action: Action) -> String {
    format!("{}/actions/{}", run.base(), action.word())
}

/// Returns the actions that make sense now and that the viewer may carry out, and why others are
/// absent.
pub(crate) fn allowed(site: &Site, access: &ActionAccess, run: &Run) -> (Vec<Action>, String) {
    match run.standing {
        Standing::Current => {}
        Standing::Replaced => {
            let note = "a later run has this name, or this one was deleted in part";
            return (vec![Action::Delete], note.to_owned());
        }
        Standing::Stored => return (Vec::new(), STORED.to_owned()),
    }
    let namespace = &run.namespace;
    let may = match access.permissions(namespace) {
        Ok(may) => may,
        Err(error) => {
            let note = format!("read-only: cannot read your permissions in {namespace}: {error}");
            return (Vec::new(), note);
        }
    };
    let is_possible = |action: &Action| match action {
        Action::Delete => may.may_delete,
        _ => may.may_patch,
    };
    let actions = possible(site, run).into_iter().filter(is_possible).collect();
    let verbs = match (may.may_patch, may.may_delete) {
        (true, true) => return (actions, String::new()),
        (false, true) => "patch",
        (true, false) => "delete",
        (false, false) => "patch or delete",
    };
    let begin = if may.may_patch { "" } else { "read-only: " };
    (actions, format!("{begin}you may not {verbs} experiments in namespace {namespace}"))
}

/// Returns the actions that have an effect in this state.
fn possible(site: &Site, run: &Run) -> Vec<Action> {
    // The runner of a local run holds its record.
    let is_held = !site.is_cluster && run.is_running;
    let state = run.experiment.spec.state;
    let is_over = matches!(state, DesiredState::Cancelled | DesiredState::Killed);
    let mut actions = Vec::new();
    if !run.phase().is_terminal() {
        match state {
            DesiredState::Active => actions.extend([Action::Pause, Action::Cancel, Action::Kill]),
            DesiredState::Paused => {
                actions.extend([Action::Activate, Action::Cancel, Action::Kill]);
            }
            DesiredState::Cancelled => actions.push(Action::Kill),
            DesiredState::Killed => {}
        }
    }
    if !is_over && !is_held && may_continue(run) {
        actions.push(Action::Continue(ReopenedTrials::Stopped));
    }
    if !is_held {
        actions.push(Action::Delete);
    }
    actions
}

/// Returns whether trials may continue. Trials of an external searcher stay ended, as do completed
/// and deleted trials, and trials that the search has stopped or the user has killed. With a limit,
/// the limit may have ended them.
fn may_continue(run: &Run) -> bool {
    let searcher = &run.experiment.spec.searcher;
    let badges = badges(run);
    let may_reopen = |(index, trial): (&u32, &Arc<TrialRecord>)| {
        let stays = match badges.get(index) {
            Some(&COMPLETED | &INVALID | &DELETED) => true,
            Some(&STOPPED | &CANCELLED) => searcher.limits.is_none(),
            _ => false,
        };
        trial.status.phase.is_terminal() && !stays
    };
    searcher.external.is_none() && run.trials.iter().any(may_reopen)
}

/// Returns whether the page of an experiment that has ended waits for an action that the record
/// does not contain yet.
pub(crate) fn awaits_record(site: &Site, run: &Run) -> bool {
    let asked = site.actions.as_ref().and_then(|access| access.asked(&run.uid));
    asked.is_some_and(|asked| {
        matches!(asked.action, Action::Continue(_) | Action::Delete)
            && !is_confirmed(site, run, &asked)
    })
}

fn is_recent(asked: &Asked) -> bool {
    text::now().seconds_since(asked.at) <= SHOWN_SECONDS
}

/// Returns whether the record contains an action, or the page has shown the effect long enough.
fn is_confirmed(site: &Site, run: &Run, asked: &Asked) -> bool {
    let phase = run.phase();
    let was_shown = !is_recent(asked);
    match asked.action {
        // Without a runner, the record has changed already, and the effect says what comes next.
        _ if !asked.is_followed => was_shown,
        // The runner has exited.
        _ if !site.is_cluster && !run.is_running => true,
        Action::Pause => phase == Phase::Paused || phase.is_terminal(),
        Action::Activate => phase != Phase::Paused,
        Action::Cancel | Action::Kill => phase.is_terminal(),
        // The record does not mention the request: show which trials continue for a while.
        Action::Continue(_) => !phase.is_terminal() && was_shown,
        Action::Delete => false,
    }
}

/// Returns the action that the record does not confirm yet.
fn asked(site: &Site, access: &ActionAccess, run: &Run) -> Option<Notice> {
    let asked = access.asked(&run.uid)?;
    let state = match asked.is_followed {
        true => "was requested and waits for the record since",
        false => "was requested at",
    };
    (!is_confirmed(site, run, &asked)).then(|| Notice {
        class: "info",
        title: format!("{} {state}", asked.action.title()),
        at: Some(ShownTime::new(asked.at)),
        text: text::escape(&asked.effect),
        links: Vec::new(),
    })
}

/// Returns the page that asks before an action.
pub(crate) fn confirm(
    site: &Site,
    run: &Run,
    action: Action,
    error: Option<String>,
) -> ConfirmPage {
    let name = text::name(&run.name);
    let title = format!("{} experiment {name}?", action.title());
    let mut frame = frame(site, run, "confirm", &format!("{title} · Stoker"));
    // A question must not change while the user reads it.
    frame.live = None;
    frame.has_plots = false;
    frame.crumbs.push(Crumb { text: name.clone(), href: run.base() });
    let token = site.actions.as_ref().map(|access| access.token().to_owned());
    ConfirmPage {
        frame,
        title,
        effects: effects(site, run, action),
        choices: choices(run, action),
        typed: (action == Action::Delete).then(|| run.name.clone()),
        error: error.map(|error| text::escape(&error)),
        button: format!("{} {name}", action.title()),
        action_href: href(run, action),
        back_href: run.base(),
        token: token.unwrap_or_default(),
        uid: run.uid.clone(),
    }
}

/// Number of trials in some states.
fn num(run: &Run, states: &[Badge]) -> usize {
    badges(run).values().filter(|badge| states.contains(badge)).count()
}

/// Returns what an action does and what is lost.
pub(super) fn effects(site: &Site, run: &Run, action: Action) -> Vec<String> {
    let running = num(run, &[RUNNING]);
    let queued = num(run, &[QUEUED, PENDING, WAITING]);
    let paused = num(run, &[PAUSED]);
    let clause = |count: usize, noun: &str, one: &str, many: &str| {
        let verb = if count == 1 { one } else { many };
        (count > 0).then(|| format!("{} {verb}.", text::num(count, noun)))
    };
    let checkpoint = clause(running, "running trial", "checkpoints and ends", "checkpoint and end");
    let lost = lost(run);
    match action {
        Action::Pause => {
            let end = "Nothing runs until you activate the experiment.".to_owned();
            [checkpoint, Some(end)].into_iter().flatten().collect()
        }
        Action::Activate => vec!["Trials continue from their checkpoints.".to_owned()],
        Action::Cancel => {
            let others = clause(paused, "paused trial", "closes", "close");
            let waiting = clause(queued, "waiting trial", "closes", "close");
            let end = "A cancelled experiment cannot continue.".to_owned();
            [checkpoint, others, waiting, Some(end)].into_iter().flatten().collect()
        }
        Action::Kill => {
            let end = clause(running, "running trial", "ends at once", "end at once");
            let close = clause(paused + queued, "other trial", "closes", "close");
            let last = "A killed experiment cannot continue.".to_owned();
            [end, lost, close, Some(last)].into_iter().flatten().collect()
        }
        Action::Delete => {
            let num_trials = text::num(run.trials.len(), "trial");
            let gone = format!("The experiment and its record of {num_trials} are deleted.");
            let end = clause(running, "running trial", "ends", "end");
            [Some(gone), end, lost, Some(files(site, run))].into_iter().flatten().collect()
        }
        Action::Continue(_) => {
            let begin = "Trials that have ended continue from their last checkpoint, or from \
                         scratch without one";
            match site.is_cluster {
                true => vec![format!("{begin}.")],
                false => vec![format!("{begin}, when `stoker run FILE` runs again.")],
            }
        }
    }
}

/// Returns the work that running trials lose if they end without a checkpoint.
fn lost(run: &Run) -> Option<String> {
    let badges = badges(run);
    let is_running = |index: &u32| badges.get(index) == Some(&RUNNING);
    let running: Vec<u64> = run
        .trials
        .iter()
        .filter(|(index, _)| is_running(index))
        .map(|(_, trial)| {
            let saved = trial.status.checkpoints.iter().map(|one| one.batches).max();
            trial.status.batches.saturating_sub(saved.unwrap_or(0))
        })
        .collect();
    let most = running.iter().copied().max()?;
    let upto = match most {
        0 => String::new(),
        most => format!("up to {} batches ", text::count(most)),
    };
    let trials = text::num(running.len(), "trial");
    Some(format!("Work since the last checkpoint is lost: {upto}on {trials}."))
}

/// Returns which files remain after a deletion, or are deleted.
fn files(site: &Site, run: &Run) -> String {
    let checkpoints = || run.trials.values().flat_map(|trial| &trial.status.checkpoints);
    let size = text::bytes(checkpoints().map(|one| one.bytes).sum());
    let place = match &run.storage {
        Ok(storage) => storage.url().to_owned(),
        Err(_) => "the storage".to_owned(),
    };
    let effect = if site.is_cluster { "remain in" } else { "are deleted from" };
    let checkpoints = text::num(checkpoints().count(), "checkpoint");
    format!("Files {effect} {place}: {checkpoints} ({size}), metrics and logs.")
}

/// Returns the trials that can be chosen to continue.
fn choices(run: &Run, action: Action) -> Vec<SelectOption> {
    let Action::Continue(chosen) = action else { return Vec::new() };
    let option = |of: ReopenedTrials, value: &str, text: String| SelectOption {
        value: value.to_owned(),
        text,
        href: String::new(),
        is_current: of == chosen,
    };
    let stopped = num(run, &[STOPPED_EARLY]);
    let failed = num(run, &[FAILED]);
    vec![
        option(
            ReopenedTrials::Stopped,
            "stopped",
            format!(
                "trials that ended early ({}), or that a limit has stopped",
                text::num(stopped, "trial")
            ),
        ),
        option(
            ReopenedTrials::Failed,
            "failed",
            format!("trials that failed ({})", text::num(failed, "trial")),
        ),
    ]
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use stoker_api::time::Timestamp;

    use super::*;
    use crate::fixture;

    #[test]
    fn buttons_depend_on_the_runner_and_the_record() {
        let check = |is_cluster: bool, change: fn(Run) -> Run, phase: &str, expected: &[&str]| {
            let site = Site { is_cluster, ..Site::default() };
            let trials = [json!({"phase": "Failed"})];
            let run = change(fixture::run(json!({}), json!({"phase": phase}), &trials));
            let access = ActionAccess::new(Arc::new(fixture::FakeApi), true, String::new());
            block_on(access.ask("ml"));
            let (actions, _) = allowed(&site, &access, &run);
            let titles: Vec<&str> = actions.iter().map(|action| action.title()).collect();
            assert_eq!(titles, expected, "{is_cluster} {run:?}");
        };
        let same = |run: Run| run;
        let stopped = |mut run: Run| {
            run.is_running = false;
            run
        };
        let all = ["Pause", "Cancel", "Kill", "Continue", "Delete"];
        check(true, same, "Running", &all);
        check(true, same, "Failed", &["Continue", "Delete"]);
        // The runner holds the record.
        check(false, same, "Running", &all[..3]);
        check(false, stopped, "Running", &all);
        check(false, stopped, "Failed", &["Continue", "Delete"]);
        let replaced = |run: Run| run.with_standing(Standing::Replaced);
        check(false, replaced, "Running", &["Delete"]);
        check(false, |run| run.with_standing(Standing::Stored), "Running", &[]);
    }

    #[test]
    fn trials_of_an_external_searcher_stay_ended() {
        let check = |method: &str, settings: serde_json::Value, expected: bool| {
            let searcher = json!({"metric": "loss", "maxLength": {"batches": 4}, method: settings});
            let spec = json!({ "searcher": searcher });
            let run = fixture::run(spec, json!({}), &[json!({"phase": "Failed"})]);
            assert_eq!(may_continue(&run), expected, "{method}");
        };
        let external = json!({"command": ["search"], "maxTrials": 8, "maxConcurrentTrials": 1});
        check("external", external, false);
        check("random", json!({"maxTrials": 8}), true);
    }

    #[test]
    fn completed_and_killed_trials_stay_ended() {
        let result = json!({"result": {"units": 4, "metric": "0.5"}});
        let closed = |cause: &str| json!({"closed": {"cause": cause}});
        let trials = [
            json!({"phase": "Completed", "batches": 4, "facts": [result, closed("Completed")]}),
            json!({"phase": "Cancelled", "facts": [closed("Cancelled")]}),
        ];
        let run = fixture::run(json!({}), json!({}), &trials);
        let found = badges(&run);
        assert_eq!(found[&0], COMPLETED, "{:?}", run.search().explanation);
        assert_eq!(found[&1], CANCELLED, "{:?}", run.search().explanation);
        assert!(!may_continue(&run));
    }

    #[test]
    fn pages_are_live_as_long_as_they_wait() {
        let now = text::now();
        let check =
            |is_followed: bool, action: Action, phase: &str, seconds: u64, expected: bool| {
                let site = Site { is_cluster: true, ..Site::default() };
                let run = fixture::run(json!({}), json!({ "phase": phase }), &[]);
                let at = Timestamp(now.0 - seconds.cast_signed());
                let asked = Asked { action, at, effect: String::new(), is_followed };
                let what = format!("{is_followed} {action:?} {phase} {seconds}");
                assert_eq!(is_confirmed(&site, &run, &asked), expected, "{what}");
            };
        // The operator may take long.
        check(true, Action::Delete, "Completed", 300, false);
        check(true, Action::Continue(ReopenedTrials::Failed), "Failed", 300, false);
        check(true, Action::Continue(ReopenedTrials::Failed), "Running", 0, false);
        check(true, Action::Continue(ReopenedTrials::Failed), "Running", 300, true);
        check(true, Action::Kill, "Running", 300, false);
        check(true, Action::Kill, "Cancelled", 0, true);
        // The record has changed already.
        check(false, Action::Delete, "Completed", 0, false);
        check(false, Action::Delete, "Completed", 300, true);
    }

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
    }

    #[test]
    fn questions_say_what_is_lost() {
        let attempt = json!([{"number": 0}]);
        let checkpoint = json!([{"name": "a", "batches": 40, "bytes": 2_000,
            "manifestSha256": ""}]);
        let trials = [
            json!({"phase": "Running", "attempts": attempt, "batches": 160,
                "checkpoints": checkpoint}),
            json!({"phase": "Running", "attempts": attempt, "batches": 20}),
            json!({"phase": "Pending"}),
        ];
        let run = fixture::run(json!({}), json!({"phase": "Running"}), &trials);
        let site = Site { is_cluster: true, ..Site::default() };
        let check = |action: Action, expected: &[&str]| {
            assert_eq!(effects(&site, &run, action), expected, "{action:?}");
        };
        let running = "2 running trials checkpoint and end.";
        check(Action::Pause, &[running, "Nothing runs until you activate the experiment."]);
        let cancel =
            [running, "1 waiting trial closes.", "A cancelled experiment cannot continue."];
        check(Action::Cancel, &cancel);
        let lost = "Work since the last checkpoint is lost: up to 120 batches on 2 trials.";
        let kill = [
            "2 running trials end at once.",
            lost,
            "1 other trial closes.",
            "A killed experiment cannot continue.",
        ];
        check(Action::Kill, &kill);
        let delete = [
            "The experiment and its record of 3 trials are deleted.",
            "2 running trials end.",
            lost,
            "Files remain in the storage: 1 checkpoint (2 kB), metrics and logs.",
        ];
        check(Action::Delete, &delete);
        let effects = effects(&Site::default(), &run, Action::Delete);
        assert!(effects[3].starts_with("Files are deleted from "), "{effects:?}");
    }
}

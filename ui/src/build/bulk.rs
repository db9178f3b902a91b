//! Pages before and after one action on several experiments.

use std::sync::Arc;

use super::actions::effects;
use super::plain_frame;
use crate::actions::Action;
use crate::site::Site;
use crate::store::Run;
use crate::text;
use crate::views::{ActionButton, BulkItem, BulkPage, Crumb};

/// Actions on several experiments. Trials to continue are chosen for one experiment at a time.
pub(crate) const ACTIONS: [Action; 5] =
    [Action::Pause, Action::Activate, Action::Cancel, Action::Kill, Action::Delete];

/// An experiment that was chosen.
#[derive(Debug)]
pub(crate) struct Choice {
    /// `NS/ID`, or `NS/ID/UID`.
    pub(crate) text: String,
    /// The experiment, or why the action is refused.
    pub(crate) run: Result<Arc<Run>, String>,
}

/// Returns the buttons for what is selected in the list.
pub(crate) fn buttons(site: &Site) -> Vec<ActionButton> {
    if !site.actions.as_ref().is_some_and(|access| access.allows_actions()) {
        return Vec::new();
    }
    let button = |action: Action| ActionButton {
        title: action.title(),
        href: href(action),
        acts_at_once: false,
    };
    ACTIONS.map(button).into()
}

fn href(action: Action) -> String {
    format!("/actions/{}", action.word())
}

/// Returns what the user must type before several experiments are deleted.
pub(crate) fn confirmation(number: usize) -> String {
    format!("delete {number}")
}

/// Returns the page that asks before an action. `is_again` means that the confirmation was wrong.
pub(crate) fn question(
    site: &Site,
    action: Action,
    choices: &[Choice],
    is_again: bool,
) -> BulkPage {
    let runs: Vec<&Run> = choices.iter().filter_map(|one| one.run.as_deref().ok()).collect();
    let number = text::num(runs.len(), "experiment");
    let title = match runs.is_empty() {
        true => format!("{} is not possible", action.title()),
        false => format!("{} {number}?", action.title()),
    };
    let item = |run: &Run| BulkItem {
        name: text::name(&run.name),
        href: run.base(),
        texts: effects(site, run, action),
        choice: format!("{}/{}/{}", run.namespace, run.id(), run.uid),
    };
    BulkPage {
        items: runs.iter().map(|run| item(run)).collect(),
        typed: (action == Action::Delete).then(|| confirmation(runs.len())),
        error: (is_again && !runs.is_empty())
            .then(|| format!("type {} to confirm", confirmation(runs.len()))),
        button: format!("{} {number}", action.title()),
        token: site.actions.as_ref().map(|one| one.token().to_owned()).unwrap_or_default(),
        ..page(site, action, title, "Not possible", choices)
    }
}

/// Returns the page that says which of `num` experiments refused an action.
pub(crate) fn outcome(site: &Site, action: Action, failed: &[Choice], num: usize) -> BulkPage {
    let done = num - failed.len();
    let title = format!("{}: {done} of {}", action.title(), text::num(num, "experiment"));
    page(site, action, title, "Not carried out", failed)
}

/// Returns a page with the refused experiments only, below a title for them.
fn page(
    site: &Site,
    action: Action,
    title: String,
    refused_title: &'static str,
    choices: &[Choice],
) -> BulkPage {
    let mut frame = plain_frame(site, "experiments", &format!("{title} · Stoker"));
    frame.crumbs.push(Crumb { text: "Experiments".to_owned(), href: "/experiments".to_owned() });
    let refused = |one: &Choice| {
        let reason = one.run.as_ref().err()?;
        // Without the UID, which no user reads.
        let mut parts = one.text.split('/');
        let (namespace, name) = (parts.next(), parts.next());
        let name = match (namespace, name) {
            (Some(namespace), Some(name)) => format!("{name} of namespace {namespace}"),
            _ => one.text.clone(),
        };
        Some(BulkItem {
            name: text::escape(&name),
            href: String::new(),
            texts: vec![text::escape(reason)],
            choice: String::new(),
        })
    };
    BulkPage {
        frame,
        title,
        items: Vec::new(),
        refused_title,
        refused: choices.iter().filter_map(refused).collect(),
        typed: None,
        error: None,
        button: String::new(),
        action_href: href(action),
        token: String::new(),
    }
}

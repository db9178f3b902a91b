//! Buttons of actions, and the page that asks before one.

use askama::Template;

use super::parts::{Frame, Notice, SelectOption};

/// Actions on an experiment of a cluster.
#[derive(Debug, Default)]
pub(crate) struct Controls {
    pub(crate) buttons: Vec<ActionButton>,
    /// Why buttons are absent; empty if none is.
    pub(crate) note: String,
    /// Note above the commands for a terminal.
    pub(crate) commands_note: String,
    /// Action that the record does not confirm yet.
    pub(crate) asked: Option<Notice>,
    /// Token that forms contain.
    pub(crate) token: String,
    pub(crate) uid: String,
}

/// Button of an action.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ActionButton {
    pub(crate) title: &'static str,
    /// Page that asks before the action, and target of the form.
    pub(crate) href: String,
    /// Whether the action needs no question.
    pub(crate) acts_at_once: bool,
}

/// Question before an action on several experiments, or its outcome.
#[derive(Debug, Template)]
#[template(path = "bulk.html")]
pub(crate) struct BulkPage {
    pub(crate) frame: Frame,
    pub(crate) title: String,
    /// Experiments of the action; empty after it.
    pub(crate) items: Vec<BulkItem>,
    /// Title of the experiments that refuse it.
    pub(crate) refused_title: &'static str,
    pub(crate) refused: Vec<BulkItem>,
    /// Text that the user must type; `None` if the action does not need it.
    pub(crate) typed: Option<String>,
    /// Why the form was refused.
    pub(crate) error: Option<String>,
    pub(crate) button: String,
    pub(crate) action_href: String,
    pub(crate) token: String,
}

/// Experiment of an action.
#[derive(Debug)]
pub(crate) struct BulkItem {
    pub(crate) name: String,
    /// Path of the experiment's page; empty if it refuses the action.
    pub(crate) href: String,
    /// Effects of the action and the lost work, or why it is refused, a sentence each.
    pub(crate) texts: Vec<String>,
    /// Value of the form's field.
    pub(crate) choice: String,
}

/// Question before an action.
#[derive(Debug, Template)]
#[template(path = "confirm.html")]
pub(crate) struct ConfirmPage {
    pub(crate) frame: Frame,
    pub(crate) title: String,
    /// Effect of the action and the lost work, a sentence each.
    pub(crate) effects: Vec<String>,
    /// Alternatives, such as which trials continue; `value` is that of the field `trials`.
    pub(crate) choices: Vec<SelectOption>,
    /// Name that the user must type; `None` if the action does not need it.
    pub(crate) typed: Option<String>,
    /// Why the action was refused.
    pub(crate) error: Option<String>,
    pub(crate) button: String,
    pub(crate) action_href: String,
    pub(crate) back_href: String,
    pub(crate) token: String,
    pub(crate) uid: String,
}

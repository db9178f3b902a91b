//! Pages of several experiments, and messages.

use askama::Template;

use super::actions::ActionButton;
use super::parts::{Badge, Bar, Frame, Notice, Pair, SelectOption};

/// List of experiments.
#[derive(Debug, Template)]
#[template(path = "experiments.html")]
pub(crate) struct ExperimentsPage {
    pub(crate) frame: Frame,
    pub(crate) rows: Vec<ExperimentRow>,
    /// Number of experiments that match the filter.
    pub(crate) matches: usize,
    pub(crate) total: usize,
    pub(crate) filter: String,
    pub(crate) filter_error: Option<String>,
    /// Values of each filter with a link: phase, namespace, label, search.
    pub(crate) phases: Vec<SelectOption>,
    pub(crate) namespaces: Vec<SelectOption>,
    pub(crate) labels: Vec<SelectOption>,
    pub(crate) searches: Vec<SelectOption>,
    /// Orders of the rows with a link.
    pub(crate) sorts: Vec<SelectOption>,
    /// Names of the columns that are left out, separated by commas.
    pub(crate) hidden: String,
    /// Menu of the columns that can be left out; current ones are shown.
    pub(crate) columns: Vec<SelectOption>,
    pub(crate) is_column_menu_open: bool,
    /// Whether each of these columns is shown, in their order.
    pub(crate) shows: [bool; 8],
    pub(crate) more_href: Option<String>,
    pub(crate) csv_href: String,
    pub(crate) json_href: String,
    /// Why experiments may be missing or out of date.
    pub(crate) watch_error: Option<String>,
    /// Records that cannot be read, with the reason.
    pub(crate) unreadable: Vec<Pair>,
    /// Command that starts a first experiment, for an empty list.
    pub(crate) first_command: String,
    /// Actions on what is selected; empty if the page is read-only.
    pub(crate) actions: Vec<ActionButton>,
}

/// Row of an experiment.
#[derive(Debug)]
pub(crate) struct ExperimentRow {
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) id: String,
    pub(crate) href: String,
    pub(crate) phase: Badge,
    /// Reason of the phase; empty without one.
    pub(crate) reason: String,
    pub(crate) bar: Bar,
    /// Such as `56 / 64`.
    pub(crate) trials: String,
    pub(crate) best: String,
    pub(crate) best_title: String,
    pub(crate) metric: String,
    pub(crate) smaller_is_better: bool,
    pub(crate) search: String,
    pub(crate) slots: String,
    pub(crate) hours: String,
    pub(crate) labels: Vec<String>,
    pub(crate) age: String,
    /// Time of creation in UTC.
    pub(crate) created: String,
}

/// Several experiments, or several trials of one, side by side.
#[derive(Debug, Template)]
#[template(path = "compare.html")]
pub(crate) struct ComparePage {
    pub(crate) frame: Frame,
    pub(crate) title: String,
    /// Reason why the compared things do not compare.
    pub(crate) notice: Option<Notice>,
    pub(crate) chips: Vec<CompareChip>,
    /// URL of the JSON of the plots.
    pub(crate) source: String,
    /// Whether trials are compared: then the page shows their curves.
    pub(crate) is_trials: bool,
    /// URL of the JSON of the curves of trials.
    pub(crate) curves: String,
    /// Horizontal axis of the curves: unit of the experiment.
    pub(crate) x: &'static str,
    pub(crate) sections: Vec<CompareSection>,
    /// Link that shows all fields or only the different ones: text and link.
    pub(crate) toggle: Option<Pair>,
    /// Lengths at which results can be compared.
    pub(crate) lengths: Vec<SelectOption>,
    pub(crate) csv_href: String,
}

/// One of the compared things.
#[derive(Debug)]
pub(crate) struct CompareChip {
    pub(crate) name: String,
    pub(crate) href: String,
    pub(crate) badge: Badge,
    /// Link to the page without it.
    pub(crate) without_href: String,
    /// Number of the series color, from 1 to 6.
    pub(crate) series: usize,
}

/// Rows under one title.
#[derive(Debug)]
pub(crate) struct CompareSection {
    pub(crate) title: String,
    pub(crate) note: String,
    pub(crate) is_code: bool,
    pub(crate) rows: Vec<CompareRow>,
}

/// A row with a cell per compared thing.
#[derive(Debug)]
pub(crate) struct CompareRow {
    pub(crate) name: String,
    /// Text, and whether it differs from the first one.
    pub(crate) cells: Vec<(String, bool)>,
}

/// A message instead of a page, such as for an unknown experiment.
#[derive(Debug, Template)]
#[template(path = "message.html")]
pub(crate) struct MessagePage {
    pub(crate) frame: Frame,
    pub(crate) title: String,
    pub(crate) text: String,
    /// Remedy: text and link or command.
    pub(crate) remedy: Option<Pair>,
}

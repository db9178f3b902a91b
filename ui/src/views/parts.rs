//! Parts that several pages share.

use stoker_api::time::Timestamp;

use crate::site::SiteViewer;
use crate::text;

/// Frame of every page: title, navigation, state of live updates.
#[derive(Debug, Clone)]
pub(crate) struct Frame {
    pub(crate) title: String,
    /// Current entry of the navigation: `experiments`, `jobs` or `cluster`.
    pub(crate) section: &'static str,
    /// Kind of the page for scripts, such as `experiment` or `trial`.
    pub(crate) view: &'static str,
    /// Path that scripts add to, such as `/experiments/local/iris-1a2b3c4d`; empty without one.
    pub(crate) base: String,
    /// Name of the searched metric; empty without one.
    pub(crate) metric: String,
    /// URL of the live updates, if what is shown may change.
    pub(crate) live: Option<String>,
    /// Where the data comes from, such as `local runs in /home/ada/.stoker`.
    pub(crate) place: String,
    /// Parts of the path above the title.
    pub(crate) crumbs: Vec<Crumb>,
    /// Whether the page has plots, and loads their libraries.
    pub(crate) has_plots: bool,
    /// Version of Stoker.
    pub(crate) version: &'static str,
    /// Viewer who has signed in, on a page that many share.
    pub(crate) viewer: Option<SiteViewer>,
    /// Whether the page asks to sign in, and so has no navigation.
    pub(crate) is_signed_out: bool,
}

/// A link above the title.
#[derive(Debug, Clone)]
pub(crate) struct Crumb {
    pub(crate) text: String,
    pub(crate) href: String,
}

/// State as an icon, a color and a word.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Badge {
    /// Word, such as `Stopped early`.
    pub(crate) word: &'static str,
    /// Name of icon and color: `completed running waiting queued paused stopped stopped-early
    /// failed invalid cancelled deleted pending`.
    pub(crate) class: &'static str,
}

/// A labeled value in the head of a page.
#[derive(Debug, Clone, Default)]
pub(crate) struct Fact {
    pub(crate) label: String,
    pub(crate) value: String,
    /// Smaller text after the value.
    pub(crate) note: String,
    /// Time at the end of the note.
    pub(crate) at: Option<ShownTime>,
    /// Link between value and note: text and target.
    pub(crate) link: Option<Pair>,
    /// Whether the value is the best one (in ember).
    pub(crate) is_best: bool,
    /// Full value, for the title.
    pub(crate) title: String,
}

/// Two texts: a name and a value, or a text and a link.
#[derive(Debug, Clone)]
pub(crate) struct Pair {
    pub(crate) name: String,
    pub(crate) value: String,
}

/// Number of trials by state.
#[derive(Debug, Clone, Default)]
pub(crate) struct Bar {
    pub(crate) segments: Vec<Segment>,
    /// Sentence for screen readers.
    pub(crate) label: String,
}

/// Part of a bar. A bar is 1,000 wide.
#[derive(Debug, Clone)]
pub(crate) struct Segment {
    /// Class of the state, or `not-created`.
    pub(crate) class: &'static str,
    /// Word in lower case.
    pub(crate) word: String,
    pub(crate) count: u32,
    pub(crate) x: String,
    pub(crate) width: String,
}

/// A box with a message above a page.
#[derive(Debug, Clone)]
pub(crate) struct Notice {
    /// `fail`, `invalid` or `info`.
    pub(crate) class: &'static str,
    pub(crate) title: String,
    /// Time after the title.
    pub(crate) at: Option<ShownTime>,
    pub(crate) text: String,
    pub(crate) links: Vec<Pair>,
}

/// A time. Scripts show it in the time zone of the viewer.
#[derive(Debug, Clone)]
pub(crate) struct ShownTime {
    /// RFC 3339 in UTC.
    pub(crate) utc: String,
    /// Text without scripts.
    pub(crate) text: String,
}

impl ShownTime {
    pub(crate) fn new(at: Timestamp) -> Self {
        Self { utc: at.to_string(), text: text::clock(at) }
    }
}

/// A tab.
#[derive(Debug, Clone)]
pub(crate) struct Tab {
    pub(crate) name: &'static str,
    pub(crate) href: String,
    /// Number after the name; empty without one.
    pub(crate) count: String,
    pub(crate) is_current: bool,
}

/// An option of a control: a link that works without scripts.
#[derive(Debug, Clone)]
pub(crate) struct SelectOption {
    /// Value in the query.
    pub(crate) value: String,
    pub(crate) text: String,
    pub(crate) href: String,
    pub(crate) is_current: bool,
}

/// Table of trials.
#[derive(Debug)]
pub(crate) struct TrialTable {
    /// Columns after the checkbox, in order: trial, state, rungs, curve, metric, length,
    /// hyperparameters, bracket, attempts, slot hours. Some may be left out.
    pub(crate) columns: Vec<Column>,
    pub(crate) rows: Vec<TrialRow>,
    /// Number of trials that match the filter.
    pub(crate) matches: usize,
    /// Number of trials of the experiment.
    pub(crate) total: usize,
    /// Sentence below the table, such as `9 best and 3 that ended with an error`.
    pub(crate) note: String,
    /// Text of the filter.
    pub(crate) filter: String,
    /// Error of the filter.
    pub(crate) filter_error: Option<String>,
    /// Link to all trials, if some are left out.
    pub(crate) all_href: Option<String>,
    /// Link to the next rows, if there are more.
    pub(crate) more_href: Option<String>,
    pub(crate) csv_href: String,
    pub(crate) json_href: String,
    /// Action of the filter's form.
    pub(crate) action: String,
    /// Names and values of the query to keep in the filter's form.
    pub(crate) kept: Vec<(&'static str, String)>,
    /// Menu of states.
    pub(crate) states: Vec<SelectOption>,
    /// Menu of columns that can be left out; current ones are shown.
    pub(crate) optional_columns: Vec<SelectOption>,
    pub(crate) is_column_menu_open: bool,
    /// Whether the columns rungs, curve, bracket, attempts and slot hours are shown.
    pub(crate) shows: [bool; 5],
}

/// Head of a column.
#[derive(Debug, Clone)]
pub(crate) struct Column {
    pub(crate) name: String,
    /// Link that sorts by this column; empty if it cannot be sorted.
    pub(crate) href: String,
    /// `ascending`, `descending` or `none`.
    pub(crate) sort: &'static str,
    /// Whether values are right-aligned.
    pub(crate) is_number: bool,
}

/// Row of a trial.
#[derive(Debug)]
pub(crate) struct TrialRow {
    pub(crate) index: u32,
    pub(crate) href: String,
    pub(crate) badge: Badge,
    /// Reason of the state, as a sentence.
    pub(crate) why: String,
    /// Rungs of the trial's bracket: `done`, `current` or `open`.
    pub(crate) rungs: Vec<&'static str>,
    /// Points of the result curve in a box of 64 x 18, for an SVG polyline; empty without results.
    pub(crate) spark: String,
    pub(crate) is_best: bool,
    /// Best searched metric with four decimals, or `–`.
    pub(crate) value: String,
    /// The metric with all digits.
    pub(crate) value_title: String,
    /// Such as `16 / 64`.
    pub(crate) length: String,
    /// Hyperparameters in the order of the columns.
    pub(crate) hyperparameters: Vec<Cell>,
    pub(crate) bracket: String,
    pub(crate) attempts: usize,
    pub(crate) hours: String,
}

/// A hyperparameter in a row.
#[derive(Debug)]
pub(crate) struct Cell {
    pub(crate) text: String,
    /// The value with all digits.
    pub(crate) full: String,
    /// Whether the text is right-aligned.
    pub(crate) is_number: bool,
}

/// A decision of the search.
#[derive(Debug)]
pub(crate) struct DecisionRow {
    pub(crate) order: u64,
    /// Time in UTC, for the title and scripts; empty if unknown.
    pub(crate) time: String,
    /// Time without scripts.
    pub(crate) clock: String,
    pub(crate) trial: u32,
    pub(crate) trial_href: String,
    /// Icon: class of the state that follows.
    pub(crate) badge: Badge,
    /// Beginning of the sentence, such as `paused at 4 epochs`.
    pub(crate) what: String,
    /// Rest of the sentence: the reason.
    pub(crate) why: String,
    /// Result that led to it; empty without one.
    pub(crate) value: String,
}

/// Importance of hyperparameters.
#[derive(Debug)]
pub(crate) struct ImportanceCard {
    /// Such as `at 4 epochs, from 36 results`.
    pub(crate) title: String,
    /// Lengths to choose from. Empty if there is at most one.
    pub(crate) lengths: Vec<SelectOption>,
    pub(crate) rows: Vec<ImportanceRow>,
    /// Reason why there is none.
    pub(crate) empty: Option<String>,
}

/// Importance of one hyperparameter. Bars are 1,000 wide.
#[derive(Debug)]
pub(crate) struct ImportanceRow {
    pub(crate) name: String,
    pub(crate) share: String,
    /// Such as `0.06`; empty without one.
    pub(crate) deviation: String,
    pub(crate) width: String,
    /// Ends of the line for the deviation.
    pub(crate) low: String,
    pub(crate) high: String,
}

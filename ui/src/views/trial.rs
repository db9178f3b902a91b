//! Pages of one trial.

use askama::Template;

use super::CheckpointRow;
use super::parts::{Badge, DecisionRow, Fact, Frame, Notice, Pair, SelectOption, Tab};

/// Head of all pages of a trial.
#[derive(Debug)]
pub(crate) struct TrialHead {
    pub(crate) frame: Frame,
    pub(crate) index: u32,
    /// Path of the page: `/experiments/NS/ID/trials/INDEX`.
    pub(crate) base: String,
    pub(crate) badge: Badge,
    /// Short texts beside the badge, such as `bracket 1`, `gang of 4`.
    pub(crate) chips: Vec<String>,
    /// Reason of the state, as a sentence.
    pub(crate) why: String,
    pub(crate) facts: Vec<Fact>,
    /// Hyperparameters and the seed.
    pub(crate) hyperparameters: Vec<Fact>,
    pub(crate) tabs: Vec<Tab>,
    /// Neighbors in the order of the table: text and link.
    pub(crate) previous: Option<Pair>,
    pub(crate) next: Option<Pair>,
    /// Reason why the page may be out of date.
    pub(crate) stale: Option<Notice>,
    pub(crate) notice: Option<Notice>,
}

/// Tab of a trial, which selects the parts of [`TrialPage`] to show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TrialTab {
    Overview,
    Metrics,
    Attempts,
    Logs,
    Checkpoints,
    Profiler,
    Configuration,
}

/// Page of a trial.
#[derive(Debug, Template)]
#[template(path = "trial.html")]
pub(crate) struct TrialPage {
    pub(crate) head: TrialHead,
    pub(crate) tab: TrialTab,
    /// URL of the JSON of the metric plots.
    pub(crate) curves: String,
    /// `batches`, `epochs` (if known) and `time`.
    pub(crate) axes: Vec<SelectOption>,
    pub(crate) scales: Vec<SelectOption>,
    /// Newest first.
    pub(crate) attempts: Vec<AttemptRow>,
    /// Name of the searched metric.
    pub(crate) metric: String,
    pub(crate) checkpoints: Vec<CheckpointRow>,
    pub(crate) checkpoints_href: String,
    pub(crate) logs: LogsCard,
    /// URL of the JSON of the profiler's plots.
    pub(crate) profiler: String,
    pub(crate) decisions: Vec<DecisionRow>,
    /// Command that trains this trial again.
    pub(crate) command: String,
    pub(crate) command_note: String,
    /// The trial as YAML.
    pub(crate) record: String,
}

impl TrialPage {
    /// Returns whether `tab` or the overview is shown.
    pub(crate) fn shows(&self, tab: TrialTab) -> bool {
        self.tab == tab || self.tab == TrialTab::Overview
    }
}

/// An attempt.
#[derive(Debug)]
pub(crate) struct AttemptRow {
    pub(crate) number: u32,
    /// Start in UTC; empty if unknown.
    pub(crate) started: String,
    /// Start without scripts.
    pub(crate) clock: String,
    pub(crate) ran: String,
    /// Checkpoint that it resumed from, or `scratch`.
    pub(crate) from: String,
    pub(crate) badge: Badge,
    /// End in a word or two, such as `Program error`.
    pub(crate) end: &'static str,
    pub(crate) reason: String,
    pub(crate) logs_href: String,
}

/// Logs of a trial or an experiment.
#[derive(Debug)]
pub(crate) struct LogsCard {
    /// URL of the JSON.
    pub(crate) source: String,
    /// URL of the whole text.
    pub(crate) download: String,
    pub(crate) attempts: Vec<SelectOption>,
    /// Ranks that have lines; empty if they are not told apart.
    pub(crate) ranks: Vec<SelectOption>,
    pub(crate) levels: Vec<SelectOption>,
    pub(crate) search: String,
    /// Whether new lines may arrive.
    pub(crate) is_live: bool,
    /// Reason why there are no logs.
    pub(crate) empty: Option<String>,
}

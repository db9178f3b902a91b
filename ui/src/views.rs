//! Data of the pages, as the templates show it. All texts are formatted; templates escape them.
//!
//! ```text
//!   snapshot -> views (crate::build) -> HTML (templates/)
//! ```

mod actions;
mod cluster;
mod jobs;
mod lists;
mod parts;
mod sign_in;
mod trial;

pub(crate) use self::actions::{ActionButton, BulkItem, BulkPage, ConfirmPage, Controls};
pub(crate) use self::cluster::{ClusterPage, NodeRow, RunningRow, WaitingRow};
pub(crate) use self::jobs::{EndRow, JobPage, JobRow, JobsPage, RejectedRow, StageRow, WorkerRow};
pub(crate) use self::lists::{
    CompareChip, ComparePage, CompareRow, CompareSection, ExperimentRow, ExperimentsPage,
    MessagePage,
};
pub(crate) use self::parts::{
    Badge, Bar, Cell, Column, Crumb, DecisionRow, Fact, Frame, ImportanceCard, ImportanceRow,
    Notice, Pair, Segment, SelectOption, ShownTime, Tab, TrialRow, TrialTable,
};
pub(crate) use self::sign_in::{NamespaceRow, NamespacesPage, SignInPage};
pub(crate) use self::trial::{AttemptRow, LogsCard, TrialHead, TrialPage, TrialTab};

use askama::Template;

/// Head of all pages of an experiment.
#[derive(Debug)]
pub(crate) struct ExperimentHead {
    pub(crate) frame: Frame,
    pub(crate) namespace: String,
    pub(crate) name: String,
    /// Name and the start of the UID: the permanent name of the experiment.
    pub(crate) id: String,
    /// Path of the page, without a query: `/experiments/NS/ID`.
    pub(crate) base: String,
    pub(crate) phase: Badge,
    pub(crate) labels: Vec<String>,
    pub(crate) description: Option<String>,
    pub(crate) facts: Vec<Fact>,
    pub(crate) bar: Bar,
    /// Reason why the page may be out of date.
    pub(crate) stale: Option<Notice>,
    /// Message of the experiment's phase, such as the cause of a failure.
    pub(crate) notice: Option<Notice>,
    pub(crate) tabs: Vec<Tab>,
    /// Commands for a terminal, such as continue, with their purpose.
    pub(crate) commands: Vec<Pair>,
    /// Actions on the cluster.
    pub(crate) controls: Controls,
}

/// Overview of an experiment.
#[derive(Debug, Template)]
#[template(path = "overview.html")]
pub(crate) struct OverviewPage {
    pub(crate) head: ExperimentHead,
    pub(crate) curves: CurvesCard,
    /// Brackets with rungs, in order; empty if the method has none.
    pub(crate) brackets: Vec<u32>,
    /// Sentence that describes the ladder of rungs, for screen readers.
    pub(crate) ladder_label: String,
    pub(crate) parallel_label: String,
    /// Whether at least one hyperparameter varies.
    pub(crate) has_hyperparameters: bool,
    pub(crate) importance: ImportanceCard,
    /// Next action of each bracket.
    pub(crate) next: Vec<NextRow>,
    pub(crate) trials: TrialTable,
    /// The latest decisions, newest first.
    pub(crate) decisions: Vec<DecisionRow>,
    pub(crate) decisions_total: usize,
    /// Failed and invalid trials, grouped by message: the largest groups.
    pub(crate) errors: Vec<ErrorGroup>,
    /// Number of all groups.
    pub(crate) errors_total: usize,
    pub(crate) first_error: Option<FirstError>,
}

/// Learning curves with their controls.
#[derive(Debug)]
pub(crate) struct CurvesCard {
    /// URL of the JSON.
    pub(crate) source: String,
    /// Sentence for screen readers.
    pub(crate) label: String,
    pub(crate) metrics: Vec<SelectOption>,
    /// `batches`, `epochs` (if known) and `time`.
    pub(crate) axes: Vec<SelectOption>,
    pub(crate) scales: Vec<SelectOption>,
    /// Reason why there are no curves, and what is needed.
    pub(crate) empty: Option<String>,
}

/// Next action of a bracket.
#[derive(Debug)]
pub(crate) struct NextRow {
    pub(crate) bracket: u32,
    /// Such as `4 rungs`; empty without rungs.
    pub(crate) rungs: String,
    /// Such as `3 / 3`, or `–` without a limit.
    pub(crate) places: String,
    pub(crate) next: String,
}

/// Trials that ended with the same error.
#[derive(Debug)]
pub(crate) struct ErrorGroup {
    pub(crate) badge: Badge,
    pub(crate) count: usize,
    pub(crate) message: String,
    /// Such as `0–3, 5–15`.
    pub(crate) which: String,
    /// Page of the first trial.
    pub(crate) href: String,
    /// Logs of the first trial.
    pub(crate) logs_href: String,
}

/// Where the logs have the first error of an experiment.
#[derive(Debug)]
pub(crate) struct FirstError {
    pub(crate) trial: u32,
    pub(crate) attempt: u32,
    /// URL of the JSON with the lines around it.
    pub(crate) source: String,
    /// Logs of the attempt.
    pub(crate) logs_href: String,
}

/// All trials of an experiment.
#[derive(Debug, Template)]
#[template(path = "trials.html")]
pub(crate) struct TrialsPage {
    pub(crate) head: ExperimentHead,
    pub(crate) trials: TrialTable,
}

/// Ladder of rungs, decisions and the table of rungs.
#[derive(Debug, Template)]
#[template(path = "rungs.html")]
pub(crate) struct RungsPage {
    pub(crate) head: ExperimentHead,
    pub(crate) brackets: Vec<u32>,
    /// Bracket shown at first.
    pub(crate) bracket: u32,
    pub(crate) ladder_label: String,
    pub(crate) metric: String,
    /// Unit of lengths, such as `Epochs`.
    pub(crate) unit: String,
    pub(crate) rungs: Vec<RungRow>,
    /// Decisions, newest first.
    pub(crate) decisions: Vec<DecisionRow>,
    pub(crate) decisions_total: usize,
}

/// A rung in the table of rungs.
#[derive(Debug)]
pub(crate) struct RungRow {
    /// Bracket in the first row of each bracket, else empty.
    pub(crate) bracket: String,
    /// Link to the trials of the rung.
    pub(crate) href: String,
    pub(crate) units: String,
    pub(crate) training: u32,
    pub(crate) results: u32,
    pub(crate) promoted: String,
    pub(crate) paused: u32,
    pub(crate) ended: u32,
    pub(crate) cut: String,
    pub(crate) best: String,
    pub(crate) next: String,
}

/// Large plots of hyperparameters and results.
#[derive(Debug, Template)]
#[template(path = "hyperparameters.html")]
pub(crate) struct HyperparametersPage {
    pub(crate) head: ExperimentHead,
    /// Hyperparameters that vary.
    pub(crate) names: Vec<String>,
    pub(crate) parallel_label: String,
    pub(crate) importance: ImportanceCard,
    /// Names of all objectives if there are several, for the Pareto front.
    pub(crate) objectives: Vec<String>,
}

/// Checkpoints of all trials of an experiment.
#[derive(Debug, Template)]
#[template(path = "checkpoints.html")]
pub(crate) struct CheckpointsPage {
    pub(crate) head: ExperimentHead,
    pub(crate) metric: String,
    pub(crate) rows: Vec<CheckpointRow>,
    /// Number of all checkpoints, such as `9,340`.
    pub(crate) num: String,
    /// Total size, such as `1.2 GB`.
    pub(crate) total: String,
    /// Shown rows, such as `101–200`.
    pub(crate) shown: String,
    /// Page before this one; `None` on the first.
    pub(crate) previous_href: Option<String>,
    /// Page after this one; `None` on the last.
    pub(crate) next_href: Option<String>,
}

/// A checkpoint.
#[derive(Debug)]
pub(crate) struct CheckpointRow {
    pub(crate) trial: u32,
    pub(crate) trial_href: String,
    pub(crate) name: String,
    /// Page with the manifest.
    pub(crate) href: String,
    pub(crate) batches: String,
    pub(crate) metric: String,
    pub(crate) size: String,
    /// Such as `latest`, `best`.
    pub(crate) kept: Vec<&'static str>,
    /// URL in the storage.
    pub(crate) address: String,
}

/// Manifest of a checkpoint, with links to its files.
#[derive(Debug, Template)]
#[template(path = "checkpoint.html")]
pub(crate) struct CheckpointPage {
    pub(crate) trial: TrialHead,
    pub(crate) name: String,
    pub(crate) address: String,
    pub(crate) facts: Vec<Fact>,
    /// Files with size and hash.
    pub(crate) files: Vec<FileRow>,
    /// The manifest as JSON, or the reason why it cannot be read.
    pub(crate) manifest: Result<String, String>,
    /// Command that downloads and verifies the checkpoint.
    pub(crate) command: String,
}

/// A file of a checkpoint.
#[derive(Debug)]
pub(crate) struct FileRow {
    pub(crate) name: String,
    pub(crate) href: String,
    pub(crate) size: String,
    /// Algorithm and hash, such as `SHA-256 1a2b…`.
    pub(crate) hash: String,
}

/// Configuration of an experiment: as given, and with all defaults.
#[derive(Debug, Template)]
#[template(path = "configuration.html")]
pub(crate) struct ConfigurationPage {
    pub(crate) head: ExperimentHead,
    /// The spec as YAML.
    pub(crate) given: String,
    /// The spec with defaults, as YAML.
    pub(crate) valid: String,
    /// Errors of an invalid spec.
    pub(crate) errors: Vec<String>,
}

/// Decisions of the search, conditions and events.
#[derive(Debug, Template)]
#[template(path = "events.html")]
pub(crate) struct EventsPage {
    pub(crate) head: ExperimentHead,
    /// All decisions, newest first.
    pub(crate) decisions: Vec<DecisionRow>,
    /// Number of decisions that are left out.
    pub(crate) left_out: usize,
    pub(crate) conditions: Vec<ConditionRow>,
}

/// A condition.
#[derive(Debug)]
pub(crate) struct ConditionRow {
    pub(crate) name: String,
    pub(crate) status: String,
    pub(crate) reason: String,
    pub(crate) since: String,
    pub(crate) message: String,
}

/// Logs of an experiment.
#[derive(Debug, Template)]
#[template(path = "logs.html")]
pub(crate) struct LogsPage {
    pub(crate) head: ExperimentHead,
    pub(crate) logs: LogsCard,
}

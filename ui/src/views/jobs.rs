//! Pages of batch inference jobs.

use askama::Template;

use super::ConditionRow;
use super::parts::{Badge, Fact, Frame, Notice, Pair};

/// Batch inference jobs.
#[derive(Debug, Template)]
#[template(path = "jobs.html")]
pub(crate) struct JobsPage {
    pub(crate) frame: Frame,
    pub(crate) rows: Vec<JobRow>,
    /// Why jobs cannot be read.
    pub(crate) error: Option<String>,
    /// Command that starts a first job, for an empty list.
    pub(crate) first_command: String,
}

/// Row of a batch inference job.
#[derive(Debug)]
pub(crate) struct JobRow {
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) href: String,
    pub(crate) phase: Badge,
    pub(crate) stage: String,
    /// Such as `25 %`.
    pub(crate) progress: String,
    /// Such as `20 / 80`.
    pub(crate) rows: String,
    /// Number of rejected rows; a dash before the end.
    pub(crate) rejected: String,
    /// Attempts that failed, of all.
    pub(crate) attempts: String,
    pub(crate) message: String,
    pub(crate) age: String,
    /// Time of creation in UTC; empty if unknown.
    pub(crate) created: String,
}

/// One batch inference job.
#[derive(Debug, Template)]
#[template(path = "job.html")]
pub(crate) struct JobPage {
    pub(crate) frame: Frame,
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) id: String,
    pub(crate) base: String,
    pub(crate) phase: Badge,
    pub(crate) notice: Option<Notice>,
    pub(crate) facts: Vec<Fact>,
    pub(crate) stages: Vec<StageRow>,
    pub(crate) workers: Vec<WorkerRow>,
    /// The latest processes that did not complete, newest first.
    pub(crate) ends: Vec<EndRow>,
    pub(crate) conditions: Vec<ConditionRow>,
    /// Path or URL of the output directory; empty if it is not known yet.
    pub(crate) output: String,
    pub(crate) rejected: Vec<RejectedRow>,
    /// Sentence below the rejected rows; empty without one.
    pub(crate) rejected_note: String,
    /// The manifest as JSON, or the reason why there is none.
    pub(crate) manifest: Result<String, String>,
    /// Parts that the manifest on the page leaves out; empty without any.
    pub(crate) manifest_note: String,
    /// The job as YAML.
    pub(crate) record: String,
    pub(crate) commands: Vec<Pair>,
}

/// A stage of a job: plan, work or finish.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct StageRow {
    pub(crate) name: &'static str,
    pub(crate) badge: Badge,
    pub(crate) text: String,
}

/// A slot of a job.
#[derive(Debug)]
pub(crate) struct WorkerRow {
    pub(crate) slot: usize,
    pub(crate) badge: Badge,
    /// Number of the running attempt; a dash if none runs.
    pub(crate) attempt: String,
    /// Committed rows; a dash if they are not recorded.
    pub(crate) rows: String,
    pub(crate) restarts: String,
}

/// A process that did not complete.
#[derive(Debug)]
pub(crate) struct EndRow {
    pub(crate) attempt: u32,
    pub(crate) stage: String,
    pub(crate) slot: u32,
    pub(crate) badge: Badge,
    pub(crate) end: &'static str,
    pub(crate) reason: String,
    pub(crate) message: String,
    pub(crate) at: String,
}

/// A row that the program rejected.
#[derive(Debug)]
pub(crate) struct RejectedRow {
    pub(crate) file: String,
    pub(crate) row: String,
    pub(crate) reason: String,
}

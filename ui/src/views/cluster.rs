//! Page of the cluster, or of this machine.

use askama::Template;

use super::parts::{Bar, Fact, Frame};

/// Slots of the cluster or of this machine, and what waits for them.
#[derive(Debug, Template)]
#[template(path = "cluster.html")]
pub(crate) struct ClusterPage {
    pub(crate) frame: Frame,
    pub(crate) title: &'static str,
    /// Explanations, such as which verb the viewer lacks.
    pub(crate) notes: Vec<String>,
    pub(crate) facts: Vec<Fact>,
    /// Whether the page has nodes. Local runs have none.
    pub(crate) has_nodes: bool,
    pub(crate) nodes: Vec<NodeRow>,
    pub(crate) running: Vec<RunningRow>,
    pub(crate) waiting: Vec<WaitingRow>,
}

/// A resource of a node.
#[derive(Debug)]
pub(crate) struct NodeRow {
    pub(crate) name: String,
    pub(crate) resource: String,
    pub(crate) used: String,
    pub(crate) free: String,
    pub(crate) bar: Bar,
    pub(crate) note: String,
}

/// A running experiment.
#[derive(Debug)]
pub(crate) struct RunningRow {
    pub(crate) experiment: String,
    pub(crate) namespace: String,
    pub(crate) href: String,
    pub(crate) trials: String,
    pub(crate) slots_per_trial: String,
    pub(crate) slots: String,
    pub(crate) resource: String,
}

/// A trial or a job that waits for slots.
#[derive(Debug)]
pub(crate) struct WaitingRow {
    pub(crate) what: String,
    pub(crate) href: String,
    /// Name of the experiment; empty for a job.
    pub(crate) experiment: String,
    pub(crate) slots: String,
    /// Time in UTC; empty if unknown.
    pub(crate) since: String,
    pub(crate) age: String,
    pub(crate) reason: String,
    pub(crate) message: String,
}

//! The best of the queued reports.

use stoker_api::contract::ReportEvent;
use stoker_api::number;

use super::QueuedReport;

/// The metric that the search optimizes.
#[derive(Debug)]
pub(super) struct SearchMetric {
    pub(super) metric: String,
    pub(super) smaller_is_better: bool,
}

impl SearchMetric {
    /// Returns the ID of the item with the best metric, the first among equals; `None` if no item
    /// has a numeric metric.
    pub(super) fn best<'a>(&self, reports: impl Iterator<Item = &'a QueuedReport>) -> Option<u64> {
        let loss = |queued: &QueuedReport| {
            let metric = match &queued.report.event {
                ReportEvent::Validated { metrics, .. } => metrics.get(&self.metric),
                ReportEvent::Checkpointed { metric, .. } => metric.as_ref(),
                _ => None,
            };
            let metric = number::parse(metric?).filter(|metric| !metric.is_nan())?;
            Some((if self.smaller_is_better { metric } else { -metric }, queued.id))
        };
        let best = reports.filter_map(loss).min_by(|a, b| a.0.total_cmp(&b.0));
        best.map(|(_, id)| id)
    }
}

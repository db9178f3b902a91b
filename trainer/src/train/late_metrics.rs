//! Metrics that the loop reads one batch late.
//!
//! A GPU computes a batch after the loop has queued it, and a read of metrics waits for the GPU. If
//! the loop queues the next batch before it reads, the GPU has work meanwhile. With several ranks,
//! the metrics of a batch therefore travel with the gradients of the next one. They are added to
//! all sums in the order of the batches, as if they were read at once.

use burn::module::Module;

use super::run::Run;
use crate::Result;
use crate::callback::{Callback, Logs};
use crate::collective::{Collective, all_gather_cbor};
use crate::step::{Metrics, UnreadMetrics};

/// This rank's metrics of the last batch, until they are read.
#[derive(Debug, Default)]
pub(super) struct LateMetrics {
    /// Whether a callback of any rank uses the logs of single batches.
    wants_logs: bool,
    /// Whether this process has trained a batch. The first one is not read late, so that an
    /// invalid metric fails in its own batch.
    has_trained: bool,
    unread: Option<UnreadMetrics>,
}

impl LateMetrics {
    /// Agrees with the other ranks on whether metrics are read late.
    pub(super) fn agree(callbacks: &[Box<dyn Callback>], ranks: &dyn Collective) -> Result<Self> {
        let mut wants_logs = callbacks.iter().any(|callback| callback.wants_batch_logs());
        if ranks.size() > 1 {
            wants_logs = all_gather_cbor(ranks, "batch logs", wants_logs)?.contains(&true);
        }
        Ok(Self { wants_logs, ..Self::default() })
    }

    /// Returns the logs of the current batch for callbacks.
    pub(super) fn batch_logs(&self, metrics: &Metrics) -> Logs {
        if self.wants_logs { metrics.means("") } else { Logs::new() }
    }

    /// Keeps the metrics of a batch and returns those of the batch before, or nothing if they are
    /// already read. Returns the given metrics if they are needed at once.
    pub(super) fn swap(&mut self, metrics: UnreadMetrics, ends_workload: bool) -> UnreadMetrics {
        let is_first = !std::mem::replace(&mut self.has_trained, true);
        // Metrics of earlier batches are added first.
        let is_needed = ends_workload && self.unread.is_none();
        if self.wants_logs || is_first || is_needed {
            return metrics;
        }
        self.unread.replace(metrics).unwrap_or_default()
    }

    /// Called after a step is queued. If its metrics are read late, queues their copy to the host.
    #[cfg(any(feature = "cuda", feature = "cubecl-cpu"))]
    pub(super) fn queue_copy(&mut self) {
        if let Some(metrics) = &mut self.unread {
            metrics.queue_copy();
        }
    }
}

impl<M: Module + 'static, B: Send + 'static> Run<'_, M, B> {
    /// Reads the metrics of the last batch if they are not read yet. Must be called before any sum
    /// of metrics is used, by all ranks at the same batch.
    pub(super) fn read_late_metrics(&mut self) -> Result<()> {
        let Some(local) = self.late_metrics.unread.take() else { return Ok(()) };
        // Whether this exchange is needed depends on callbacks and restarts. When training ends
        // must not, so apply only stop requests that came with a step.
        let stop_state = self.stop_state;
        let (metrics, _) = self.exchange_step("metrics", local, None)?;
        self.stop_state = stop_state;
        self.add_metrics(&metrics.read());
        Ok(())
    }

    /// Adds the metrics of a batch, over all ranks, to all sums.
    pub(super) fn add_metrics(&mut self, metrics: &Metrics) {
        self.state.since_row.add(metrics);
        self.state.since_epoch.add(metrics);
        if let Some(workload) = &mut self.workload {
            workload.metrics.add(metrics);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metrics(loss: f64) -> UnreadMetrics {
        let mut metrics = Metrics::default();
        metrics.insert("loss", loss, 1.0);
        metrics.into()
    }

    #[test]
    fn metrics_are_returned_one_batch_late() {
        let mut late = LateMetrics::default();
        // The loss of each batch, whether it ends a workload, and the loss that is returned.
        let batches = [
            (1.0, false, Some(1.0)),
            (2.0, false, None),
            (3.0, false, Some(2.0)),
            (4.0, true, Some(3.0)),
            (5.0, true, Some(5.0)),
            (6.0, false, None),
        ];
        for (loss, ends_workload, expected) in batches {
            let returned = late.swap(metrics(loss), ends_workload).read();
            assert_eq!(returned.mean("loss"), expected, "batch {loss}");
            if ends_workload {
                let left = late.unread.take().map(|metrics| metrics.read().mean("loss"));
                assert_eq!(left, (loss == 4.0).then_some(Some(4.0)));
            }
        }
    }

    #[test]
    fn wanted_logs_are_returned_at_once() {
        let mut late = LateMetrics { wants_logs: true, ..LateMetrics::default() };
        for loss in [1.0, 2.0, 3.0] {
            assert_eq!(late.swap(metrics(loss), false).read().mean("loss"), Some(loss));
        }
    }
}

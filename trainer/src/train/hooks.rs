//! Calls callbacks and applies their requests.

use burn::module::Module;

use super::call_hook;
use super::run::Run;
use super::state::to_bits;
use crate::callback::{Callback, Control};
use crate::step::Metrics;
use crate::{Result, precision, record};

/// Batches up to the next scheduling boundary.
pub(super) struct Workload {
    /// Batch at which the workload ends.
    pub(super) end: u64,
    pub(super) metrics: Metrics,
}

impl<M: Module + 'static, B: Send + 'static> Run<'_, M, B> {
    /// Calls the hooks of everything that begins with this batch.
    pub(super) fn begin_batch(&mut self) -> Result<()> {
        let batches = self.state.batches;
        if !self.is_first {
            precision::warn_of_unfused_statistics(&*self.model, self.context);
        }
        if let Some(epoch) = self.timetable.epoch_that_begins(batches) {
            self.hook(|callback, control| callback.on_epoch_begin(epoch, control))?;
        }
        if self.workload.is_none() {
            let end = self.timetable.workload_end(batches, self.granted);
            self.workload = Some(Workload { end, metrics: Metrics::default() });
            self.hook(|callback, control| callback.on_workload_begin(end - batches, control))?;
        }
        self.hook(|callback, control| callback.on_batch_begin(control))
    }

    /// Ends the current workload, if there is one.
    pub(super) fn end_workload(&mut self) -> Result<()> {
        self.read_late_metrics()?;
        let Some(Workload { metrics, .. }) = self.workload.take() else { return Ok(()) };
        let logs = metrics.means("");
        self.hook(|callback, control| callback.on_workload_end(&logs, control))
    }

    pub(super) fn end_epoch(&mut self) -> Result<()> {
        self.read_late_metrics()?;
        let metrics = std::mem::take(&mut self.state.since_epoch);
        let mut logs = metrics.means("");
        logs.extend(self.validation_logs());
        self.state.history.push(to_bits(&logs));
        let epoch = self.epoch();
        self.hook(|callback, control| callback.on_epoch_end(epoch, &logs, control))?;
        let is_chief = self.context.distributed().rank() == 0;
        let wants = |callback: &dyn Callback| {
            (is_chief || !callback.chief_only()) && callback.wants_weights(epoch)
        };
        if !self.callbacks.iter().any(|callback| wants(&**callback)) {
            return Ok(());
        }
        let weights = record::weights(&*self.model)?;
        self.hook(|callback, control| match callback.wants_weights(epoch) {
            true => callback.on_weights(epoch, &weights, control),
            false => Ok(()),
        })
    }

    /// Calls a hook and applies its requests.
    pub(super) fn hook(
        &mut self,
        call: impl FnMut(&mut dyn Callback, &mut Control) -> Result<()>,
    ) -> Result<()> {
        self.update_control();
        call_hook(&mut self.callbacks, &mut self.control, self.context.distributed(), call)?;
        self.apply_control()
    }

    /// Applies the requests of callbacks.
    pub(super) fn apply_control(&mut self) -> Result<()> {
        let (batches, epoch) = (self.state.batches, self.epoch());
        for (group, metrics) in std::mem::take(&mut self.control.rows) {
            if ["training", "validation"].contains(&group.as_str()) {
                let text = format!(
                    "a callback cannot report to group {group}: the loop writes it; use another"
                );
                return Err(text.into());
            }
            self.io().row(&group, batches, epoch, &metrics)?;
        }
        for (name, display) in std::mem::take(&mut self.control.displays) {
            self.io().display(&name, batches, &display);
        }
        if let Some(scale) = self.control.scale.take() {
            if !scale.is_finite() || scale < 0.0 {
                let text = format!(
                    "a callback set the learning rate scale to {scale}; it must be at least 0"
                );
                return Err(text.into());
            }
            self.optimizers.set_scale(scale);
        }
        if let Some(why) = self.control.stop.take() {
            self.state.stopped.get_or_insert(why);
        }
        match std::mem::take(&mut self.control.keeps_weights) {
            true => self.keep_weights(),
            false => Ok(()),
        }
    }

    pub(super) fn update_control(&mut self) {
        self.control.batches = self.state.batches;
        self.control.learning_rate_scale = self.optimizers.scale();
    }

    /// Calls the hooks at the end of training in this process. Called after the last checkpoint, so
    /// that the checkpoint does not depend on where training stops.
    pub(super) fn end_hooks(&mut self) -> Result<()> {
        self.end_workload()?;
        self.hook(|callback, control| callback.on_train_end(control))
    }
}

//! When callbacks are called, and what comes of what they ask for.

use burn::module::Module;

use super::hook;
use super::run::Run;
use super::state::to_bits;
use crate::callback::{Callback, Control};
use crate::step::Metrics;
use crate::{Result, record};

/// Batches that are trained without a look around.
pub(super) struct Workload {
    /// The batch after which it ends.
    pub(super) end: u64,
    pub(super) metrics: Metrics,
}

impl<M: Module + 'static, B: Send + 'static> Run<'_, M, B> {
    /// Calls the hooks of what begins with this batch.
    pub(super) fn begin_batch(&mut self) -> Result<()> {
        let batches = self.state.batches;
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

    /// Ends the workload that is under way, if there is one.
    pub(super) fn end_workload(&mut self) -> Result<()> {
        let Some(Workload { metrics, .. }) = self.workload.take() else { return Ok(()) };
        let logs = metrics.means("");
        self.hook(|callback, control| callback.on_workload_end(&logs, control))
    }

    pub(super) fn end_epoch(&mut self) -> Result<()> {
        let metrics = std::mem::take(&mut self.state.since_epoch);
        let mut logs = metrics.means("");
        logs.extend(self.validation_logs());
        self.state.history.push(to_bits(&logs));
        let epoch = self.epoch();
        self.hook(|callback, control| callback.on_epoch_end(epoch, &logs, control))?;
        let is_chief = self.context.distributed().rank() == 0;
        let wants = |it: &dyn Callback| (is_chief || !it.chief_only()) && it.wants_weights(epoch);
        if !self.callbacks.iter().any(|it| wants(&**it)) {
            return Ok(());
        }
        let weights = record::weights(&*self.model)?;
        self.hook(|callback, control| match callback.wants_weights(epoch) {
            true => callback.on_weights(epoch, &weights, control),
            false => Ok(()),
        })
    }

    /// Calls a hook and does what it asked for.
    pub(super) fn hook(
        &mut self,
        call: impl FnMut(&mut dyn Callback, &mut Control) -> Result<()>,
    ) -> Result<()> {
        self.tell_control();
        hook(&mut self.callbacks, &mut self.control, self.context.distributed(), call)?;
        self.heed()
    }

    /// Does what callbacks have asked for.
    pub(super) fn heed(&mut self) -> Result<()> {
        let (batches, epoch) = (self.state.batches, self.epoch());
        for (group, metrics) in std::mem::take(&mut self.control.rows) {
            if ["training", "validation"].contains(&group.as_str()) {
                return Err(format!("a callback reports to {group}, which the loop does").into());
            }
            self.outlet().row(&group, batches, epoch, &metrics)?;
        }
        for (name, values) in std::mem::take(&mut self.control.histograms) {
            self.outlet().histogram(&name, batches, &values);
        }
        if let Some(scale) = self.control.scale.take() {
            if !scale.is_finite() || scale < 0.0 {
                let text = format!(
                    "a callback makes the learning rate's scale {scale}, but it must be a number of at least 0"
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

    pub(super) fn tell_control(&mut self) {
        self.control.batches = self.state.batches;
        self.control.learning_rate_scale = self.optimizers.scale();
    }

    /// The hooks of a process that leaves training: after its last checkpoint, which is the same
    /// wherever it leaves.
    pub(super) fn end_hooks(&mut self) -> Result<()> {
        self.end_workload()?;
        self.hook(|callback, control| callback.on_train_end(control))
    }
}

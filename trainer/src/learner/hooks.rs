//! Events for burn between the loop's steps.

use burn::train::{LearnerEvent, LearnerModel};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::components::{Components, SharedComponents};
use super::locked;
use super::metric_collector::History;
use crate::Result;
use crate::callback::{Callback, Control, Logs};
use crate::context::Context;
use crate::step::Metrics;

/// Callback that keeps burn's metrics, early stopping and checkpoints in sync with the loop.
pub(super) struct Hooks<M: LearnerModel> {
    components: SharedComponents<M>,
    context: Context,
    /// Batches per epoch.
    steps: u64,
    aggregation: u64,
    state: HooksState,
    /// Whether burn was notified of the current pass over the training data.
    is_open: bool,
}

/// State in checkpoints.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
struct HooksState {
    /// Number of completed epochs.
    epochs: usize,
    history: History,
}

impl<M: LearnerModel> Hooks<M> {
    pub(super) fn new(
        components: SharedComponents<M>,
        context: Context,
        steps: u64,
        aggregation: u64,
    ) -> Self {
        let state = HooksState::default();
        Self { components, context, steps, aggregation, state, is_open: false }
    }

    /// Ends the current pass over the training data, if any. Returns the metrics that burn computes
    /// only for the whole pass, as means over ranks, weighted by samples.
    fn close(&mut self, named: &Logs) -> Result<Logs> {
        if !std::mem::take(&mut self.is_open) {
            return Ok(Logs::new());
        }
        let mut components = locked(&self.components);
        let epoch = self.state.epochs + 1;
        let final_values = components
            .end(|components| components.process_train_event(LearnerEvent::EndSplit(epoch)));
        let samples = components.pass_samples as f64;
        drop(components);
        let ranks = self.context.distributed();
        // With one rank, use exactly burn's value.
        let count = if ranks.size() == 1 { 1.0 } else { samples };
        let mut of_epoch = Metrics::default();
        // A rank without samples contributes no names.
        let names = final_values.iter().filter(|_| count > 0.0);
        for (name, value) in names.filter(|(name, _)| !named.contains_key(*name)) {
            of_epoch.set(name, *value, count);
        }
        let all = of_epoch.all_reduce(ranks.collective())?;
        Ok(all.means(""))
    }

    fn begin_pass(&mut self, control: &Control) {
        let mut components = locked(&self.components);
        components.pass_samples = 0;
        components.iteration =
            usize::try_from(control.batches() % self.steps).unwrap_or(usize::MAX);
        let share = components.train.items_total as u64 * components.iteration as u64 / self.steps;
        components.train.items_processed = usize::try_from(share).unwrap_or(usize::MAX);
        let (epoch_number, total_items) = (self.state.epochs + 1, components.train.items_total);
        components.process_train_event(LearnerEvent::StartSplit { epoch_number, total_items });
        self.is_open = true;
    }
}

impl<M: LearnerModel> Components<M> {
    /// Ends a pass and returns burn's metrics of it.
    pub(super) fn end(&mut self, send: impl FnOnce(&mut Self)) -> Logs {
        self.collector.lock().is_end = true;
        send(self);
        self.flush_events();
        let mut collector = self.collector.lock();
        collector.is_end = false;
        std::mem::take(&mut collector.final_values)
    }
}

impl<M: LearnerModel> Callback for Hooks<M> {
    fn name(&self) -> String {
        "burn".into()
    }

    fn on_train_begin(&mut self, _: &mut Control) -> Result<()> {
        let mut components = locked(&self.components);
        components.flush_events();
        let duplicate_name = components.collector.lock().duplicate_name.take();
        duplicate_name.map_or(Ok(()), |name| {
            Err(format!("two of burn's metrics are named {name}; remove one").into())
        })
    }

    fn on_batch_begin(&mut self, control: &mut Control) -> Result<()> {
        if !self.is_open {
            self.begin_pass(control);
        }
        let mut components = locked(&self.components);
        if (control.batches() + 1).is_multiple_of(self.aggregation) {
            components.learner.lr_step();
        }
        Ok(())
    }

    fn wants_batch_logs(&self) -> bool {
        false
    }

    fn on_batch_end(&mut self, _: &Logs, _: &mut Control) -> Result<()> {
        let interrupter = locked(&self.components).interrupter.clone();
        match interrupter.error() {
            Some(error) => Err(error.to_string().into()),
            None if interrupter.should_stop() => {
                // All ranks are notified before the same batch.
                self.context.ended.set();
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn on_validation_begin(&mut self, _: &mut Control) -> Result<()> {
        let mut components = locked(&self.components);
        (components.valid_iteration, components.valid.items_processed) = (0, 0);
        let (epoch_number, total_items) = (self.state.epochs + 1, components.valid.items_total);
        components.process_valid_event(LearnerEvent::StartSplit { epoch_number, total_items });
        components.is_validating = Some(epoch_number);
        Ok(())
    }

    fn on_validation_end(&mut self, _: &Logs, _: &mut Control) -> Result<()> {
        locked(&self.components).is_validating = None;
        Ok(())
    }

    fn on_epoch_end(&mut self, _: u64, logs: &Logs, control: &mut Control) -> Result<()> {
        let (mut train, mut valid) = (Logs::new(), Logs::new());
        for (name, value) in logs {
            match name.strip_prefix("val_") {
                Some(name) => valid.insert(name.to_owned(), *value),
                None => train.insert(name.clone(), *value),
            };
        }
        train.extend(self.close(&train)?);
        self.state.epochs += 1;
        let epoch = self.state.epochs;
        self.state.history.record(epoch, &train, &valid);
        control.report("epoch", train);
        let is_lead = self.context.distributed().rank() == 0;
        let mut components = locked(&self.components);
        components.collector.lock().history = self.state.history.clone();
        components.process_train_event(LearnerEvent::EndEpoch(epoch));
        components.flush_events();
        let Components { learner, store, checkpointer, early_stopping, .. } = &mut *components;
        if let Some(checkpointer) = checkpointer.as_mut().filter(|_| is_lead) {
            checkpointer.checkpoint(learner, epoch, store);
        }
        if early_stopping.as_mut().is_some_and(|stopping| stopping.should_stop(epoch, store)) {
            control.stop_training(format!("burn's early stopping after epoch {epoch}"));
        }
        Ok(())
    }

    fn state(&self) -> Result<Value> {
        Ok(serde_json::to_value(&self.state)?)
    }

    fn load_state(&mut self, state: Value) -> Result<()> {
        self.state = serde_json::from_value(state)?;
        let mut components = locked(&self.components);
        components.collector.lock().history = self.state.history.clone();
        let Components { store, early_stopping, .. } = &mut *components;
        // burn's early stopping has no serializable state, but is a function of the metrics so far.
        if let Some(early_stopping) = early_stopping {
            for epoch in 1..=self.state.epochs {
                let _ = early_stopping.should_stop(epoch, store);
            }
        }
        Ok(())
    }
}

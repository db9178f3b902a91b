//! Events for burn between the loop's steps.

use burn::train::{LearnerEvent, LearnerModel};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::board::History;
use super::locked;
use super::parts::{Parts, Shared};
use crate::Result;
use crate::callback::{Callback, Control, Logs};
use crate::context::Context;
use crate::step::Metrics;

/// Callback that keeps burn's metrics, early stopping and checkpoints in sync with the loop.
pub(super) struct Hooks<M: LearnerModel> {
    parts: Shared<M>,
    context: Context,
    /// Batches per epoch.
    steps: u64,
    aggregation: u64,
    kept: Kept,
    /// Whether burn was notified of the current pass over the training data.
    is_open: bool,
}

/// State in checkpoints.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
struct Kept {
    /// Number of completed epochs.
    epochs: usize,
    history: History,
}

impl<M: LearnerModel> Hooks<M> {
    pub(super) fn new(parts: Shared<M>, context: Context, steps: u64, aggregation: u64) -> Self {
        let kept = Kept::default();
        Self { parts, context, steps, aggregation, kept, is_open: false }
    }

    /// Ends the current pass over the training data, if any. Returns the metrics that burn computes
    /// only for the whole pass, as means over ranks.
    fn close(&mut self, named: &Logs) -> Result<Logs> {
        if !std::mem::take(&mut self.is_open) {
            return Ok(Logs::new());
        }
        let mut parts = locked(&self.parts);
        let epoch = self.kept.epochs + 1;
        let finals = parts.end(|parts| parts.tell_train(LearnerEvent::EndSplit(epoch)));
        drop(parts);
        let mut of_epoch = Metrics::default();
        for (name, value) in finals.iter().filter(|(name, _)| !named.contains_key(*name)) {
            of_epoch.add_one(name, *value, 1.0);
        }
        let all = of_epoch.all_reduce(self.context.distributed().collective())?;
        Ok(all.means(""))
    }

    fn begin_pass(&mut self, control: &Control) {
        let mut parts = locked(&self.parts);
        parts.iteration = usize::try_from(control.batches() % self.steps).unwrap_or(usize::MAX);
        let share = parts.train.items_total as u64 * parts.iteration as u64 / self.steps;
        parts.train.items_processed = usize::try_from(share).unwrap_or(usize::MAX);
        let (epoch_number, total_items) = (self.kept.epochs + 1, parts.train.items_total);
        parts.tell_train(LearnerEvent::StartSplit { epoch_number, total_items });
        self.is_open = true;
    }
}

impl<M: LearnerModel> Parts<M> {
    /// Ends a pass and returns burn's metrics of it.
    pub(super) fn end(&mut self, tell: impl FnOnce(&mut Self)) -> Logs {
        self.board.lock().is_end = true;
        tell(self);
        self.settle();
        let mut board = self.board.lock();
        board.is_end = false;
        std::mem::take(&mut board.finals)
    }
}

impl<M: LearnerModel> Callback for Hooks<M> {
    fn name(&self) -> String {
        "burn".into()
    }

    fn on_train_begin(&mut self, _: &mut Control) -> Result<()> {
        let mut parts = locked(&self.parts);
        parts.settle();
        let doubled = parts.board.lock().doubled.take();
        doubled.map_or(Ok(()), |name| {
            Err(format!("two of burn's metrics are named {name}; remove one").into())
        })
    }

    fn on_batch_begin(&mut self, control: &mut Control) -> Result<()> {
        if !self.is_open {
            self.begin_pass(control);
        }
        let mut parts = locked(&self.parts);
        if (control.batches() + 1).is_multiple_of(self.aggregation) {
            parts.learner.lr_step();
        }
        Ok(())
    }

    fn on_batch_end(&mut self, _: &Logs, _: &mut Control) -> Result<()> {
        let interrupter = locked(&self.parts).interrupter.clone();
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
        let mut parts = locked(&self.parts);
        (parts.valid_iteration, parts.valid.items_processed) = (0, 0);
        let (epoch_number, total_items) = (self.kept.epochs + 1, parts.valid.items_total);
        parts.tell_valid(LearnerEvent::StartSplit { epoch_number, total_items });
        parts.is_validating = Some(epoch_number);
        Ok(())
    }

    fn on_validation_end(&mut self, _: &Logs, _: &mut Control) -> Result<()> {
        locked(&self.parts).is_validating = None;
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
        self.kept.epochs += 1;
        let epoch = self.kept.epochs;
        self.kept.history.keep(epoch, &train, &valid);
        control.report("epoch", train);
        let is_lead = self.context.distributed().rank() == 0;
        let mut parts = locked(&self.parts);
        parts.board.lock().history = self.kept.history.clone();
        parts.tell_train(LearnerEvent::EndEpoch(epoch));
        parts.settle();
        let Parts { learner, store, checkpointer, early_stopping, .. } = &mut *parts;
        if let Some(checkpointer) = checkpointer.as_mut().filter(|_| is_lead) {
            checkpointer.checkpoint(learner, epoch, store);
        }
        if early_stopping.as_mut().is_some_and(|stopping| stopping.should_stop(epoch, store)) {
            control.stop_training(format!("burn's early stopping after epoch {epoch}"));
        }
        Ok(())
    }

    fn state(&self) -> Result<Value> {
        Ok(serde_json::to_value(&self.kept)?)
    }

    fn load_state(&mut self, state: Value) -> Result<()> {
        self.kept = serde_json::from_value(state)?;
        let mut parts = locked(&self.parts);
        parts.board.lock().history = self.kept.history.clone();
        let Parts { store, early_stopping, .. } = &mut *parts;
        // burn's early stopping has no serializable state, but is a function of the metrics so far.
        if let Some(early_stopping) = early_stopping {
            for epoch in 1..=self.kept.epochs {
                let _ = early_stopping.should_stop(epoch, store);
            }
        }
        Ok(())
    }
}

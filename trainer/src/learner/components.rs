//! burn's components, shared by the loop's hooks, steps and optimizer.

use std::any::Any;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use burn::data::dataloader::Progress;
use burn::lr_scheduler::LrSchedulerRecord;
use burn::optim::{GradientsParams, OptimizerRecord};
use burn::store::ModuleRecord;
use burn::tensor::Bytes;
use burn::train::checkpoint::{
    AsyncCheckpointer, Checkpoint, Checkpointer, CheckpointerError, CheckpointingAction,
    CheckpointingStrategy,
};
use burn::train::metric::store::{Aggregate, EventStoreClient, Split};
use burn::train::{
    CloneEarlyStoppingStrategy, EventProcessorTraining as _, InferenceStep, Interrupter, Learner,
    LearnerEvent, LearnerModel, LearningCheckpointer, SupervisedTrainingEventProcessor, TrainStep,
    TrainingItem,
};

use super::locked;
use super::metric_collector::MetricCollector;
use crate::Result;
use crate::optim::{ExternalOptimizer, ExternalSnapshot};
use crate::step::Metrics;

/// All components of burn.
pub(super) struct Components<M: LearnerModel> {
    pub(super) learner: Learner<M>,
    pub(super) processor: SupervisedTrainingEventProcessor<M>,
    pub(super) store: Arc<EventStoreClient>,
    pub(super) collector: MetricCollector,
    pub(super) interrupter: Interrupter,
    pub(super) early_stopping: Option<Box<dyn CloneEarlyStoppingStrategy>>,
    /// Checkpointer of the program. burn restores these checkpoints; Stoker does not.
    pub(super) checkpointer: Option<LearningCheckpointer<M>>,
    pub(super) records: Mutex<RecordCapture<M>>,
    /// Batches whose gradients burn sums before a step, if the program sets it.
    pub(super) sums: Option<u32>,
    pub(super) train: Progress,
    pub(super) valid: Progress,
    /// Samples that this process has trained on in the pass.
    pub(super) pass_samples: usize,
    /// Batches since the start of the pass.
    pub(super) iteration: usize,
    pub(super) valid_iteration: usize,
    /// Epoch of the current validation, if any.
    pub(super) is_validating: Option<usize>,
}

/// Components shared by the parts of one loop, which take turns.
pub(super) type SharedComponents<M> = Arc<Mutex<Components<M>>>;

impl<M: LearnerModel> Components<M> {
    /// Updates burn's metrics with a training batch and returns them.
    pub(super) fn trained(&mut self, item: <M as TrainStep>::Output, samples: usize) -> Metrics {
        self.iteration += 1;
        self.train.items_processed += samples;
        self.pass_samples += samples;
        let (iteration, rate) = (Some(self.iteration), Some(self.learner.lr_current()));
        let item = TrainingItem::new(item, self.train.clone(), iteration, rate);
        self.process_train_event(LearnerEvent::ProcessedItem(item));
        self.flush_events();
        std::mem::take(&mut self.collector.lock().sums)
    }

    /// Same as [`trained`](Self::trained), for a validation batch.
    pub(super) fn validated(
        &mut self,
        item: <M as InferenceStep>::Output,
        samples: usize,
    ) -> Metrics {
        self.valid_iteration += 1;
        self.valid.items_processed += samples;
        let item = TrainingItem::new(item, self.valid.clone(), Some(self.valid_iteration), None);
        self.process_valid_event(LearnerEvent::ProcessedItem(item));
        self.flush_events();
        std::mem::take(&mut self.collector.lock().sums)
    }

    pub(super) fn process_train_event(&mut self, event: LearnerEvent<<M as TrainStep>::Output>) {
        let processed = self.processor.process_train(event);
        self.interrupter.fail_on_error(processed);
    }

    pub(super) fn process_valid_event(
        &mut self,
        event: LearnerEvent<<M as InferenceStep>::Output>,
    ) {
        let processed = self.processor.process_valid(event);
        self.interrupter.fail_on_error(processed);
    }

    /// Waits until the collector has received all events, which pass through two threads of burn.
    pub(super) fn flush_events(&mut self) {
        let flushed = self.processor.flush();
        self.interrupter.fail_on_error(flushed);
        // The response to a query arrives after everything sent before it.
        let _ = self.store.find_metric("", 0, Aggregate::Mean, &Split::Train);
    }
}

/// Optimizer of the loop: burn's learner.
pub(super) struct LearnerOptimizer<M: LearnerModel>(pub(super) SharedComponents<M>);

impl<M: LearnerModel> ExternalOptimizer for LearnerOptimizer<M> {
    fn step(&mut self, gradients: GradientsParams) -> Box<dyn Any> {
        let mut components = locked(&self.0);
        components.learner.optimizer_step(gradients);
        Box::new(components.learner.model())
    }

    fn set_model(&mut self, model: &dyn Any) {
        let Some(model) = model.downcast_ref::<M>() else { return };
        // Updates BatchNorm's running statistics in place.
        let _ = model.valid();
        locked(&self.0).learner.load_model(model.clone().into_record());
    }

    fn summed_batches(&self) -> Option<u32> {
        locked(&self.0).sums
    }

    fn snapshot(&self) -> Result<ExternalSnapshot> {
        let components = locked(&self.0);
        locked(&components.records).of(&components.learner, &components.store)
    }

    fn restore(&mut self, optimizer: Bytes, schedule: Bytes) -> Result<()> {
        let mut components = locked(&self.0);
        components.learner.load_optim(OptimizerRecord::from_bytes(optimizer)?);
        components.learner.load_scheduler(LrSchedulerRecord::from_bytes(schedule)?);
        Ok(())
    }
}

/// Access to a learner's records, which it exposes only to a checkpointer.
pub(super) struct RecordCapture<M: LearnerModel> {
    checkpointer: LearningCheckpointer<M>,
    optimizers: Receiver<OptimizerRecord>,
    schedules: Receiver<LrSchedulerRecord>,
}

impl<M: LearnerModel> RecordCapture<M> {
    pub(super) fn new() -> Self {
        let ((optimizer, optimizers), (schedule, schedules)) = (channel(), channel());
        let checkpointer = LearningCheckpointer::new(
            AsyncCheckpointer::new(DiscardModels),
            AsyncCheckpointer::new(ForwardRecords(optimizer)),
            AsyncCheckpointer::new(ForwardRecords(schedule)),
            Box::new(SaveAlways),
        );
        Self { checkpointer, optimizers, schedules }
    }

    fn of(&mut self, learner: &Learner<M>, store: &EventStoreClient) -> Result<ExternalSnapshot> {
        self.checkpointer.checkpoint(learner, 0, store);
        Ok((self.optimizers.recv()?, self.schedules.recv()?))
    }
}

/// Checkpointer that forwards records.
struct ForwardRecords<R>(Sender<R>);

impl<R: Checkpoint> Checkpointer<R> for ForwardRecords<R> {
    fn save(&self, _epoch: usize, record: R) -> Result<(), CheckpointerError> {
        // Ignore the error: without a receiver, the record is not needed.
        let _ = self.0.send(record);
        Ok(())
    }

    fn delete(&self, _epoch: usize) -> Result<(), CheckpointerError> {
        Ok(())
    }

    fn restore(&self, _epoch: usize) -> Result<R, CheckpointerError> {
        Err(CheckpointerError::Unknown("nothing is stored here".into()))
    }
}

/// Checkpointer that discards models, because the loop already has them.
struct DiscardModels;

impl Checkpointer<ModuleRecord> for DiscardModels {
    fn save(&self, _epoch: usize, _record: ModuleRecord) -> Result<(), CheckpointerError> {
        Ok(())
    }

    fn delete(&self, _epoch: usize) -> Result<(), CheckpointerError> {
        Ok(())
    }

    fn restore(&self, _epoch: usize) -> Result<ModuleRecord, CheckpointerError> {
        Err(CheckpointerError::Unknown("nothing is stored here".into()))
    }
}

struct SaveAlways;

impl CheckpointingStrategy for SaveAlways {
    fn checkpointing(&mut self, _: usize, _: &EventStoreClient) -> Vec<CheckpointingAction> {
        vec![CheckpointingAction::Save]
    }
}

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

use super::board::Board;
use super::locked;
use crate::Result;
use crate::optim::{ExternalOptimizer, ExternalSnapshot};
use crate::step::Metrics;

/// All components of burn.
pub(super) struct Parts<M: LearnerModel> {
    pub(super) learner: Learner<M>,
    pub(super) processor: SupervisedTrainingEventProcessor<M>,
    pub(super) store: Arc<EventStoreClient>,
    pub(super) board: Board,
    pub(super) interrupter: Interrupter,
    pub(super) early_stopping: Option<Box<dyn CloneEarlyStoppingStrategy>>,
    /// Checkpointer of the program. burn restores these checkpoints; Stoker does not.
    pub(super) checkpointer: Option<LearningCheckpointer<M>>,
    pub(super) records: Mutex<Records<M>>,
    /// Batches whose gradients burn sums before a step, if the program sets it.
    pub(super) sums: Option<u32>,
    pub(super) train: Progress,
    pub(super) valid: Progress,
    /// Batches since the start of the pass.
    pub(super) iteration: usize,
    pub(super) valid_iteration: usize,
    /// Epoch of the current validation, if any.
    pub(super) is_validating: Option<usize>,
}

/// Components shared by the parts of one loop, which take turns.
pub(super) type Shared<M> = Arc<Mutex<Parts<M>>>;

impl<M: LearnerModel> Parts<M> {
    /// Updates burn's metrics with a training batch and returns them.
    pub(super) fn trained(&mut self, item: <M as TrainStep>::Output, samples: usize) -> Metrics {
        self.iteration += 1;
        self.train.items_processed += samples;
        let (iteration, rate) = (Some(self.iteration), Some(self.learner.lr_current()));
        let item = TrainingItem::new(item, self.train.clone(), iteration, rate);
        self.tell_train(LearnerEvent::ProcessedItem(item));
        self.settle();
        std::mem::take(&mut self.board.lock().sums)
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
        self.tell_valid(LearnerEvent::ProcessedItem(item));
        self.settle();
        std::mem::take(&mut self.board.lock().sums)
    }

    pub(super) fn tell_train(&mut self, event: LearnerEvent<<M as TrainStep>::Output>) {
        let processed = self.processor.process_train(event);
        self.interrupter.fail_on_error(processed);
    }

    pub(super) fn tell_valid(&mut self, event: LearnerEvent<<M as InferenceStep>::Output>) {
        let processed = self.processor.process_valid(event);
        self.interrupter.fail_on_error(processed);
    }

    /// Waits until the board has received all events, which pass through two threads of burn.
    pub(super) fn settle(&mut self) {
        let flushed = self.processor.flush();
        self.interrupter.fail_on_error(flushed);
        // The response to a query arrives after everything sent before it.
        let _ = self.store.find_metric("", 0, Aggregate::Mean, &Split::Train);
    }
}

/// Optimizer of the loop: burn's learner.
pub(super) struct Stepper<M: LearnerModel>(pub(super) Shared<M>);

impl<M: LearnerModel> ExternalOptimizer for Stepper<M> {
    fn step(&mut self, gradients: GradientsParams) -> Box<dyn Any> {
        let mut parts = locked(&self.0);
        parts.learner.optimizer_step(gradients);
        Box::new(parts.learner.model())
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
        let parts = locked(&self.0);
        locked(&parts.records).of(&parts.learner, &parts.store)
    }

    fn restore(&mut self, optimizer: Bytes, schedule: Bytes) -> Result<()> {
        let mut parts = locked(&self.0);
        parts.learner.load_optim(OptimizerRecord::from_bytes(optimizer)?);
        parts.learner.load_scheduler(LrSchedulerRecord::from_bytes(schedule)?);
        Ok(())
    }
}

/// Access to a learner's records, which it exposes only to a checkpointer.
pub(super) struct Records<M: LearnerModel> {
    checkpointer: LearningCheckpointer<M>,
    optimizers: Receiver<OptimizerRecord>,
    schedules: Receiver<LrSchedulerRecord>,
}

impl<M: LearnerModel> Records<M> {
    pub(super) fn new() -> Self {
        let ((optimizer, optimizers), (schedule, schedules)) = (channel(), channel());
        let checkpointer = LearningCheckpointer::new(
            AsyncCheckpointer::new(Forget),
            AsyncCheckpointer::new(Catch(optimizer)),
            AsyncCheckpointer::new(Catch(schedule)),
            Box::new(Always),
        );
        Self { checkpointer, optimizers, schedules }
    }

    fn of(&mut self, learner: &Learner<M>, store: &EventStoreClient) -> Result<ExternalSnapshot> {
        self.checkpointer.checkpoint(learner, 0, store);
        Ok((self.optimizers.recv()?, self.schedules.recv()?))
    }
}

/// Checkpointer that forwards records.
struct Catch<R>(Sender<R>);

impl<R: Checkpoint> Checkpointer<R> for Catch<R> {
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
struct Forget;

impl Checkpointer<ModuleRecord> for Forget {
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

struct Always;

impl CheckpointingStrategy for Always {
    fn checkpointing(&mut self, _: usize, _: &EventStoreClient) -> Vec<CheckpointingAction> {
        vec![CheckpointingAction::Save]
    }
}

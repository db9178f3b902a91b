//! Support for burn's own training loop. A program that uses [`SupervisedTraining`] gets all
//! features of [`Context::fit`] with another `main` and one additional line; see `docs/learner.md`.
//!
//! The training runs in the loop of `fit`. burn provides what the program has configured: the step,
//! the optimizer with its schedule, the metrics, and early stopping. `docs/learner.md` describes
//! which results are exact.

use std::any::Any;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::data::dataloader::DataLoader;
use burn::train::{LearnerModel, SupervisedTraining, TrainingStrategy};

use crate::context::Context;
use crate::data::Data;
use crate::error::Interrupted;
use crate::{Error, Result};

mod components;
mod hooks;
mod loaders;
mod metric_collector;
mod silent_renderer;
mod strategy;

#[cfg(test)]
mod tests;

use loaders::ShardedLoader;
use metric_collector::MetricCollector;
use silent_renderer::SilentRenderer;
use strategy::Strategy;

/// State of a context for burn's trainings.
#[derive(Clone, Debug, Default)]
pub(crate) struct SharedLearnerState(Arc<Mutex<LearnerState>>);

#[derive(Default)]
struct LearnerState {
    /// Why a training ended before its length.
    end_reason: Option<Error>,
    /// Data loaders created by [`Context::dataloader`].
    loaders: Vec<Arc<dyn Any + Send + Sync>>,
}

impl std::fmt::Debug for LearnerState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LearnerState").field("end_reason", &self.end_reason).finish_non_exhaustive()
    }
}

impl SharedLearnerState {
    /// Returns the result of the program: the training's error if training ended early.
    pub(crate) fn outcome(&self, program: Result<()>) -> Result<()> {
        locked(&self.0).end_reason.take().map_or(program, Err)
    }

    /// Records why training ended, because burn's `launch` does not return it.
    fn record_end(&self, why: Error) {
        locked(&self.0).end_reason.get_or_insert(why);
    }

    /// Returns our data loader if `loader` was created by [`Context::dataloader`].
    fn find_own<B: Send + 'static>(
        &self,
        loader: &Arc<dyn DataLoader<B>>,
    ) -> Option<Arc<ShardedLoader<B>>> {
        let address = Arc::as_ptr(loader).cast::<()>();
        let state = locked(&self.0);
        let mut own = state.loaders.iter().filter_map(|loader| loader.clone().downcast().ok());
        own.find(|own: &Arc<ShardedLoader<B>>| Arc::as_ptr(own).cast::<()>() == address)
    }
}

impl Context {
    /// Configures one of burn's trainings so that `launch` trains as [`fit`](Self::fit) does. The
    /// experiment sets the length, and checkpoints, reports and all-reduced gradients are added.
    ///
    /// Call this last: later settings may override those made here.
    pub fn supervise<M: LearnerModel>(
        &self,
        training: SupervisedTraining<M>,
    ) -> SupervisedTraining<M> {
        let collector = MetricCollector::default();
        let strategy = Strategy::new(self.clone(), collector.clone());
        let training = if self.distributed().rank() == 0 {
            training
        } else {
            training.with_application_logger(None)
        };
        training
            .with_metric_logger(collector)
            .renderer(Box::new(SilentRenderer))
            .with_training_strategy(TrainingStrategy::Custom(Arc::new(strategy)))
    }

    /// Creates one of burn's data loaders from any data, with `batch_size` samples per rank and
    /// batch. Each rank reads its share of every batch, independent of the number of workers, and a
    /// resume does not replay earlier batches. [`supervise`](Self::supervise) recognizes these
    /// loaders.
    pub fn dataloader<B: Send + 'static>(
        &self,
        data: Data<B>,
        batch_size: usize,
    ) -> Arc<dyn DataLoader<B>> {
        let loader =
            Arc::new(ShardedLoader::new(data, self.loader_plan(batch_size, true), batch_size));
        locked(&self.learner_state.0).loaders.push(loader.clone());
        loader
    }
}

/// Returns whether an error is a stop request rather than a failure.
fn is_stop_request(error: &Error) -> bool {
    error.downcast_ref::<Interrupted>().is_some()
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

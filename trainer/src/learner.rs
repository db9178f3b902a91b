//! burn's own training loop under Stoker: a program that trains by [`SupervisedTraining`] gets all that
//! [`Context::fit`] has by another `main` and one line of its own, as docs/learner.md shows.
//!
//! The loop is `fit`'s. burn's part in it is what the program has set up: the step, the optimizer with
//! its schedule, the metrics, early stopping. `docs/learner.md` says what is exact and what is not.

use std::any::Any;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::data::dataloader::DataLoader;
use burn::train::{LearnerModel, SupervisedTraining, TrainingStrategy};

use crate::context::Context;
use crate::data::Data;
use crate::error::Interrupted;
use crate::{Error, Result};

mod batches;
mod board;
mod hooks;
mod parts;
mod renderer;
mod strategy;

#[cfg(test)]
mod tests;

use batches::Sharded;
use board::Board;
use renderer::Quiet;
use strategy::Strategy;

/// What a session knows of burn's trainings.
#[derive(Clone, Debug, Default)]
pub(crate) struct Learning(Arc<Mutex<Known>>);

#[derive(Default)]
struct Known {
    /// Why a training has ended before its length.
    left: Option<Error>,
    /// The data loaders that were made here.
    loaders: Vec<Arc<dyn Any + Send + Sync>>,
}

impl std::fmt::Debug for Known {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Known").field("left", &self.left).finish_non_exhaustive()
    }
}

impl Learning {
    /// How the program ends: as its training did, if that ended early.
    pub(crate) fn outcome(&self, program: Result<()>) -> Result<()> {
        locked(&self.0).left.take().map_or(program, Err)
    }

    /// Keeps why a training has ended, which burn's `launch` does not return.
    fn leave(&self, why: Error) {
        locked(&self.0).left.get_or_insert(why);
    }

    /// The loader of this type that lies where `loader` does, if it was made here.
    fn own<B: Send + 'static>(&self, loader: &Arc<dyn DataLoader<B>>) -> Option<Arc<Sharded<B>>> {
        let place = Arc::as_ptr(loader).cast::<()>();
        let known = locked(&self.0);
        let mut own = known.loaders.iter().filter_map(|it| it.clone().downcast().ok());
        own.find(|it: &Arc<Sharded<B>>| Arc::as_ptr(it).cast::<()>() == place)
    }
}

impl Context {
    /// Puts one of burn's trainings under Stoker: `launch` then trains as [`fit`](Self::fit) does, for
    /// as long as the experiment says, with checkpoints, reports and every rank's gradients.
    ///
    /// Call it last: what is set afterwards may take the place of what this sets.
    pub fn supervise<M: LearnerModel>(
        &self,
        training: SupervisedTraining<M>,
    ) -> SupervisedTraining<M> {
        let board = Board::default();
        let strategy = Strategy::new(self.clone(), board.clone());
        let training = if self.distributed().rank() == 0 {
            training
        } else {
            training.with_application_logger(None)
        };
        training
            .with_metric_logger(board)
            .renderer(Box::new(Quiet))
            .with_training_strategy(TrainingStrategy::Custom(Arc::new(strategy)))
    }

    /// One of burn's data loaders over any data: each rank reads its share of every batch of
    /// `batch_size` samples for each rank, whichever rank or worker makes it, and a resume costs
    /// nothing. [`supervise`](Self::supervise) knows those that were made here.
    pub fn dataloader<B: Send + 'static>(
        &self,
        data: Data<B>,
        batch_size: usize,
    ) -> Arc<dyn DataLoader<B>> {
        let loader = Arc::new(Sharded::new(data, self.plan(batch_size, true), batch_size));
        locked(&self.learning.0).loaders.push(loader.clone());
        loader
    }
}

/// Whether this asks the process to end, and is no failure.
fn is_wish(error: &Error) -> bool {
    error.downcast_ref::<Interrupted>().is_some()
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

//! Training strategy that burn calls.

use std::sync::{Arc, Mutex};

use burn::data::dataloader::Progress;
use burn::train::{
    InferenceStep, Learner, LearnerEvent, LearnerModel, SupervisedLearningStrategy,
    SupervisedTrainingEventProcessor, TrainLoader, TrainStep, TrainingComponents, ValidLoader,
};
use stoker_api::experiment::MixedPrecision;

use super::components::{Components, LearnerOptimizer, RecordCapture, SharedComponents};
use super::hooks::Hooks;
use super::loaders::{self, Input};
use super::metric_collector::MetricCollector;
use super::{is_stop_request, locked};
use crate::Result;
use crate::callback::Callback as _;
use crate::context::Context;
use crate::optim::Optimizers;
use crate::step::{Metrics, StepOutput};
use crate::train::{Fit, Step};

/// Strategy that trains with the loop of `fit`.
pub(super) struct Strategy {
    context: Context,
    collector: MetricCollector,
}

impl Strategy {
    pub(super) fn new(context: Context, collector: MetricCollector) -> Self {
        Self { context, collector }
    }

    /// Trains until the end, an error or a stop.
    fn train<M: LearnerModel>(
        &self,
        shared: &SharedComponents<M>,
        loaders: (TrainLoader<M>, ValidLoader<M>),
        num_epochs: usize,
    ) -> Result<()> {
        let context = &self.context;
        if context.config.mixed_precision != MixedPrecision::None {
            let text = "optimizations.mixedPrecision requires `fit`: burn's training loop runs the \
                        backward pass itself; remove the setting";
            return Err(text.into());
        }
        let (train_plan, valid_plan) =
            (context.loader_plan(1, true), context.loader_plan(1, false));
        let learner_state = &context.learner_state;
        let (train, batch_size) =
            loaders::data_of_loader(&loaders.0, learner_state, &train_plan, Input::Train)?;
        let (valid, _) =
            loaders::data_of_loader(&loaders.1, learner_state, &valid_plan, Input::Valid)?;
        let model = {
            let mut components = locked(shared);
            components.train.items_total = train.samples() / context.distributed().size();
            components.valid.items_total = valid.samples() / context.distributed().size();
            components.learner.fork(context.device());
            components.learner.model()
        };
        let optimizers = Optimizers::external(LearnerOptimizer(shared.clone()));
        let aggregation = match context.config.aggregation_frequency {
            0 | 1 => optimizers.aggregation(),
            of_experiment => of_experiment,
        };
        let steps = train.steps(&context.loader_plan(batch_size, true));
        let hooks =
            Hooks::new(shared.clone(), context.clone(), steps.max(1), u64::from(aggregation));
        let fit = Fit::new(train)
            .validation(valid)
            .batch_size(batch_size)
            .epochs(num_epochs as u64)
            .callbacks(vec![hooks.boxed()]);
        context
            .fit_with(
                model,
                optimizers,
                BurnStep(shared.clone(), context.distributed().size()),
                fit,
            )
            .map(drop)
    }
}

impl<M: LearnerModel> SupervisedLearningStrategy<M> for Strategy {
    fn fit(
        &self,
        components: TrainingComponents<M>,
        learner: Learner<M>,
        train: TrainLoader<M>,
        valid: ValidLoader<M>,
        _starting_epoch: usize,
    ) -> (M, SupervisedTrainingEventProcessor<M>) {
        let items = || Progress::new(0, 0, Some("items".into()));
        let interrupter = components.interrupter.clone();
        let sums = components.grad_accumulation;
        let shared = Arc::new(Mutex::new(Components {
            learner,
            processor: components.event_processor,
            store: components.event_store,
            collector: self.collector.clone(),
            interrupter: components.interrupter,
            early_stopping: components.early_stopping,
            checkpointer: components.checkpointer,
            records: Mutex::new(RecordCapture::new()),
            sums: sums.map(|batches| u32::try_from(batches).unwrap_or(u32::MAX)),
            train: items(),
            valid: items(),
            pass_samples: 0,
            iteration: 0,
            valid_iteration: 0,
            is_validating: None,
        }));
        if let Err(why) = self.train(&shared, (train, valid), components.num_epochs) {
            // burn returns this text to the program. The context determines the exit code.
            interrupter.stop(Some(&why.to_string()));
            if !is_stop_request(&why) {
                eprintln!("stoker: training failed: {why}");
            }
            self.context.learner_state.record_end(why);
        } else if let Some(why) = interrupter.error() {
            // The loop does not check the interrupter after the last batch.
            self.context.learner_state.record_end(why.to_string().into());
        }
        let components = Arc::into_inner(shared).expect("the loop has dropped its references");
        let components = components.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        (components.learner.model(), components.processor)
    }
}

/// Steps of burn, and the number of ranks.
struct BurnStep<M: LearnerModel>(SharedComponents<M>, usize);

type InputOf<M> = Input<<M as TrainStep>::Input, <M as InferenceStep>::Input>;

impl<M: LearnerModel> Step<M, InputOf<M>> for BurnStep<M> {
    fn train(&self, model: &M, batch: InputOf<M>) -> StepOutput {
        let Input::Train(batch, samples) = batch else {
            unreachable!("training reads training data");
        };
        let output = TrainStep::step(model, batch);
        let metrics = locked(&self.0).trained(output.item, samples);
        StepOutput::from_gradients(Some(output.grads), samples, &metrics)
    }

    fn validate(&self, model: &M, batch: InputOf<M>) -> StepOutput {
        let Input::Valid(batch, samples) = batch else {
            unreachable!("validation reads validation data");
        };
        let mut components = locked(&self.0);
        if components.is_validating.is_none() {
            // Called only for the names of metrics.
            let mut names = Metrics::default();
            components.collector.lock().names().for_each(|name| names.add_one(name, 0.0, 1.0));
            return StepOutput::from_gradients(None, samples, &names);
        }
        drop(components);
        let item = InferenceStep::step(model, batch);
        components = locked(&self.0);
        let metrics = components.validated(item, samples);
        StepOutput::from_gradients(None, samples, &metrics)
    }

    /// Returns burn's metrics of the whole pass, because some are not means over batches. With
    /// several ranks, each rank's value is weighted by what it has seen.
    fn validated(&self, mut sums: Metrics) -> Result<Metrics> {
        let mut components = locked(&self.0);
        let Some(epoch) = components.is_validating else { return Ok(sums) };
        let num_batches = components.valid_iteration as f64;
        let final_values = components
            .end(|components| components.process_valid_event(LearnerEvent::EndSplit(epoch)));
        if num_batches == 0.0 {
            return Ok(sums);
        }
        for (name, value) in final_values {
            let seen = sums.sum_and_count(&name).map_or(num_batches, |(_, count)| count);
            // With one rank, use exactly burn's value.
            let count = if self.1 == 1 { 1.0 } else { seen };
            sums.set(&name, value, count);
        }
        Ok(sums)
    }
}

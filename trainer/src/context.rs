//! Context of a process: configuration, device, ranks, and access to training.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::module::Module;
use burn::tensor::{DType, Device};
use serde_json::Value;
use stoker_api::contract::TrialConfig;
use stoker_api::inference::PinnedCheckpoint;
use stoker_api::names::{ENV_CACHE, ENV_TEST};

use crate::cache::OpenedSets;
use crate::callback::{Callback, Control};
use crate::checkpoint::CheckpointSource;
use crate::collective::{Distributed, RankActivity};
use crate::data::{Data, LoaderPlan};
use crate::error::catch_raised;
use crate::hparams::UnreadHparams;
use crate::step::{Metrics, StepOutput};
use crate::stop::StopSignal;
use crate::trial_io::TrialIo;
use crate::{InvalidHyperparameters, Result, precision, record, rng, train};

/// Hyperparameters, seeds, device, ranks and training of this process. Clones share the same state.
#[derive(Clone, Debug)]
pub struct Context {
    pub(crate) config: TrialConfig,
    pub(crate) io: Arc<Mutex<TrialIo>>,
    pub(crate) stop: StopSignal,
    /// Set when the program itself ends training early.
    pub(crate) ended: StopSignal,
    device: Device,
    ranks: Arc<Distributed>,
    /// Whether the program runs in test mode; see `train/test_mode.rs`.
    pub(crate) is_test: bool,
    /// In an inference job, the checkpoint selected at the start of the job.
    pub(crate) pinned: Option<PinnedCheckpoint>,
    pub(crate) opened_sets: OpenedSets,
    pub(crate) unread_hparams: UnreadHparams,
    #[cfg(feature = "learner")]
    pub(crate) learner_state: crate::learner::SharedLearnerState,
}

impl Context {
    pub(crate) fn new(
        config: TrialConfig,
        io: TrialIo,
        stop: StopSignal,
        device: Device,
        ranks: Distributed,
    ) -> Self {
        let unread_hparams = UnreadHparams::new(&config.hyperparameters);
        Self {
            config,
            io: Arc::new(Mutex::new(io)),
            stop,
            ended: StopSignal::default(),
            device,
            ranks: Arc::new(ranks),
            is_test: std::env::var_os(ENV_TEST).is_some_and(|test| test == "1"),
            pinned: None,
            opened_sets: OpenedSets::default(),
            unread_hparams,
            #[cfg(feature = "learner")]
            learner_state: Default::default(),
        }
    }

    /// Returns this context with another device.
    pub(crate) fn with_device(self, device: Device) -> Self {
        Self { device, ..self }
    }

    /// Locks the I/O with runner and storage; do not hold the lock for long. Ignores poisoning:
    /// after a panic elsewhere, rows and reports can still be sent.
    pub(crate) fn io(&self) -> MutexGuard<'_, TrialIo> {
        self.io.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of samples per batch on this rank: the hyperparameter `global_batch_size`
    /// divided by the world size, rounded down.
    ///
    /// # Errors
    ///
    /// Returns [`InvalidHyperparameters`] if `global_batch_size` is missing, is not an integer of
    /// at least 1, or is smaller than the world size.
    pub fn batch_size(&self) -> Result<usize> {
        self.distributed().shard_batch_size(self.requested_batch_size()?)
    }

    /// Returns the number of samples per batch over all ranks: [`batch_size`](Self::batch_size)
    /// times the world size. This may be less than the hyperparameter `global_batch_size`.
    ///
    /// # Errors
    ///
    /// Same as [`batch_size`](Self::batch_size).
    pub fn global_batch_size(&self) -> Result<usize> {
        Ok(self.batch_size()? * self.distributed().size())
    }

    /// Returns the hyperparameter `global_batch_size`, which every trial needs.
    fn requested_batch_size(&self) -> Result<usize> {
        let Some(value) = self.hparam("global_batch_size") else {
            let text = "global_batch_size is missing: set this hyperparameter to the number of \
                        samples of one batch over all ranks";
            return Err(InvalidHyperparameters(text.into()).into());
        };
        let size = value.as_u64().and_then(|size| usize::try_from(size).ok());
        let size = size.filter(|size| *size > 0);
        Ok(size.ok_or_else(|| {
            InvalidHyperparameters(format!(
                "global_batch_size is {value}, but must be an integer of at least 1"
            ))
        })?)
    }

    /// Prints a warning if `global_batch_size` is not a multiple of the world size.
    pub(crate) fn warn_of_batch_size(&self) -> Result<()> {
        let (requested, trained) = (self.requested_batch_size()?, self.global_batch_size()?);
        let (rank, size) = (self.ranks.rank(), self.ranks.size());
        if requested != trained && rank == 0 {
            eprintln!(
                "stoker: global_batch_size is {requested}, of which {size} ranks train {trained} \
                 at a time: {} each",
                trained / size
            );
        }
        Ok(())
    }

    /// Returns the experiment's `spec`, with defaults filled in; null without a runner.
    pub fn experiment_config(&self) -> &Value {
        &self.config.spec
    }

    /// Returns the device to train on, with autodiff: this rank's GPU, or the CPU.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the data type that models compute in: `f32`, or half precision if
    /// `optimizations.mixedPrecision` is set. With half precision, weights are cast for each step.
    ///
    /// [`Data::arrays`] and the data sets of this crate return inputs of this type. Create other
    /// tensors with this type too: `Tensor::from_data(data, (device, context.dtype()))`.
    pub fn dtype(&self) -> DType {
        precision::dtype(self.config.mixed_precision)
    }

    /// Returns the trial's seed.
    pub fn trial_seed(&self) -> u32 {
        self.config.seed
    }

    /// Returns the experiment's seed, the same for all of its trials.
    pub fn experiment_seed(&self) -> u32 {
        self.config.experiment_seed
    }

    /// Returns the trial's index in its experiment.
    pub fn trial(&self) -> u32 {
        self.config.trial
    }

    /// Returns the ranks of this trial.
    pub fn distributed(&self) -> &Distributed {
        &self.ranks
    }

    /// Returns a cache directory that outlives the process but not the machine, for example for
    /// downloaded data sets: `STOKER_CACHE`, or else the user's cache directory. It may not exist
    /// yet.
    pub fn cache_folder(&self) -> PathBuf {
        let of = |name| std::env::var_os(name).filter(|path| !path.is_empty()).map(PathBuf::from);
        of(ENV_CACHE)
            .or_else(|| of("XDG_CACHE_HOME").map(|path| path.join("stoker")))
            .or_else(|| of("HOME").map(|path| path.join(".cache/stoker")))
            .unwrap_or_else(|| std::env::temp_dir().join("stoker"))
    }

    /// Returns the checkpoint of an inference job, as selected at the start of the job. Pass it to
    /// [`load_checkpoint_model`](Self::load_checkpoint_model).
    ///
    /// # Errors
    ///
    /// Fails if the job names no checkpoint, or if this process does not belong to an inference
    /// job.
    pub fn checkpoint(&self) -> Result<CheckpointSource> {
        let none = "the job has no checkpoint; set spec.checkpoint, for example { trial: mnist-3 }";
        Ok(self.pinned.as_ref().map(CheckpointSource::pinned).ok_or(none)?)
    }

    /// Returns `fresh` with the weights of a checkpoint. `fresh` must have the same structure,
    /// because burn cannot build a model from its type alone. A path is interpreted as a checkpoint
    /// directory on this machine.
    ///
    /// # Errors
    ///
    /// Fails if there is no complete checkpoint, or if it belongs to another model.
    pub fn load_checkpoint_model<M: Module>(
        &self,
        fresh: M,
        from: impl Into<CheckpointSource>,
    ) -> Result<M> {
        let from = from.into();
        let load = || from.load(&self.config.storage, &self.ranks.progress);
        let (_, contents) = from.while_reading(&self.ranks.progress, load)?;
        record::load_model(fresh, &contents).map(record::with_new_ids)
    }

    /// Evaluates a model on all of `data`, in batches of `batch_size` on each rank, and returns the
    /// metrics over all ranks. Collective.
    ///
    /// # Errors
    ///
    /// Fails if the data or another rank fails.
    pub fn evaluate<M: Module, B: Send + 'static>(
        &self,
        model: &M,
        step: impl Fn(&M, B) -> StepOutput,
        data: &Data<B>,
        batch_size: usize,
    ) -> Result<Metrics> {
        self.evaluate_with(model, step, data, batch_size, &mut [])
    }

    /// Same as [`evaluate`](Self::evaluate), with callbacks. Calls their `on_validation_` hooks,
    /// with metrics named like `val_loss`. Requests in [`Control`] are ignored, because nothing is
    /// trained.
    ///
    /// # Errors
    ///
    /// Fails if the data, a callback or another rank fails.
    pub fn evaluate_with<M: Module, B: Send + 'static>(
        &self,
        model: &M,
        step: impl Fn(&M, B) -> StepOutput,
        data: &Data<B>,
        batch_size: usize,
        callbacks: &mut [Box<dyn Callback>],
    ) -> Result<Metrics> {
        let (mut all, mut control) = (Metrics::default(), Control::default());
        let mut hook = |call: &mut dyn FnMut(&mut dyn Callback, &mut Control) -> Result<()>| {
            train::call_hook(callbacks, &mut control, &self.ranks, call)
        };
        hook(&mut |callback, control| callback.on_validation_begin(control))?;
        self.for_each_batch(model, data, batch_size, |index, model, batch| {
            hook(&mut |callback, control| callback.on_validation_batch_begin(index, control))?;
            if let Some(batch) = batch {
                all.add(&step(model, batch).into_metrics());
            }
            hook(&mut |callback, control| callback.on_validation_batch_end(index, control))
        })?;
        let all = all.all_reduce(self.distributed().collective())?;
        let logs = all.means("val_");
        hook(&mut |callback, control| callback.on_validation_end(&logs, control))?;
        Ok(all)
    }

    /// Returns the results of `forward` for each batch of this rank, in order. Each rank reads
    /// batches of `batch_size`.
    ///
    /// # Errors
    ///
    /// Fails if the data fails.
    pub fn predict<M: Module, B: Send + 'static, T>(
        &self,
        model: &M,
        data: &Data<B>,
        batch_size: usize,
        forward: impl Fn(&M, B) -> T,
    ) -> Result<Vec<T>> {
        self.predict_with(model, data, batch_size, forward, &mut [])
    }

    /// Same as [`predict`](Self::predict), with callbacks. Calls their `on_predict_` hooks.
    ///
    /// # Errors
    ///
    /// Fails if the data or a callback fails.
    pub fn predict_with<M: Module, B: Send + 'static, T>(
        &self,
        model: &M,
        data: &Data<B>,
        batch_size: usize,
        forward: impl Fn(&M, B) -> T,
        callbacks: &mut [Box<dyn Callback>],
    ) -> Result<Vec<T>> {
        let (mut all, mut none) = (vec![], Control::default());
        let mut hook = |call: &mut dyn FnMut(&mut dyn Callback) -> Result<()>| {
            train::call_hook(callbacks, &mut none, &self.ranks, |callback, _| call(callback))
        };
        hook(&mut |callback| callback.on_predict_begin())?;
        self.for_each_batch(model, data, batch_size, |index, model, batch| {
            hook(&mut |callback| callback.on_predict_batch_begin(index))?;
            all.extend(batch.map(|batch| forward(model, batch)));
            hook(&mut |callback| callback.on_predict_batch_end(index))
        })?;
        hook(&mut |callback| callback.on_predict_end())?;
        Ok(all)
    }

    /// Calls `each` for every global batch, in order, with its number, the model without autodiff,
    /// and this rank's part of the batch.
    pub(crate) fn for_each_batch<M: Module, B: Send + 'static>(
        &self,
        model: &M,
        data: &Data<B>,
        batch_size: usize,
        mut each: impl FnMut(u64, &M, Option<B>) -> Result<()>,
    ) -> Result<()> {
        if batch_size == 0 {
            return Err("batch_size is 0; it must be at least 1".into());
        }
        let model = precision::to_evaluation_precision(model.valid(), self.config.mixed_precision);
        let plan = self.loader_plan(batch_size, false);
        let steps = data.steps(&plan);
        catch_raised(|| {
            for (index, batch) in (0..).zip(data.loader(plan, 0..steps)) {
                self.ranks.record_activity(RankActivity::Evaluate);
                each(index, &model, batch?)?;
                precision::warn_of_unfused_statistics(&model, self);
            }
            self.ranks.record_activity(RankActivity::Train);
            Ok(())
        })
    }

    /// Returns how this rank reads data in batches of `batch_size`, for [`Data::loader`].
    pub fn loader_plan(&self, batch_size: usize, training: bool) -> LoaderPlan {
        let (rank, world_size) = (self.ranks.rank(), self.ranks.size());
        let device = self.device.clone();
        LoaderPlan {
            global_batch: batch_size * world_size,
            rank,
            world_size,
            seed: u64::from(self.config.seed),
            shuffle: training,
            device: if training { device } else { device.without_autodiff() },
            dtype: self.dtype(),
        }
    }

    /// Seeds burn's random stream before the program starts, because it may sample numbers itself.
    pub(crate) fn seed_program(&self) {
        self.with_weight_seed(|| ());
    }

    /// Calls `sample` with burn's random stream seeded for this trial's weights.
    pub(crate) fn with_weight_seed<T>(&self, sample: impl FnOnce() -> T) -> T {
        rng::with_weight_seed(&self.device, self.config.seed, sample)
    }
}

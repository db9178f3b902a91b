//! A session: what this process was told, and what it may ask for.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::module::Module;
use burn::tensor::{DType, Device};
use serde::de::DeserializeOwned;
use serde_json::Value;
use stoker_api::contract::TrialConfig;
use stoker_api::inference::PinnedCheckpoint;
use stoker_api::names::{ENV_CACHE, ENV_TEST};

use crate::callback::{Callback, Control};
use crate::checkpoint::CheckpointSource;
use crate::collective::{Distributed, Doing};
use crate::data::{Data, Plan};
use crate::error::unraised;
use crate::outlet::Outlet;
use crate::step::{Metrics, StepOutput};
use crate::stop::StopSignal;
use crate::{InvalidHyperparameters, Result, precision, record, rng, train};

/// A session: seeds, hyperparameters, the device, and training itself. A clone is the same session.
#[derive(Clone, Debug)]
pub struct Context {
    pub(crate) config: TrialConfig,
    pub(crate) outlet: Arc<Mutex<Outlet>>,
    pub(crate) stop: StopSignal,
    /// Set where the program itself wants no more training.
    pub(crate) ended: StopSignal,
    device: Device,
    ranks: Arc<Distributed>,
    /// Whether the program is only tried: see `train/trying.rs`.
    pub(crate) is_test: bool,
    /// Of an inference job: the checkpoint that was chosen.
    pub(crate) pinned: Option<PinnedCheckpoint>,
    #[cfg(feature = "learner")]
    pub(crate) learning: crate::learner::Learning,
}

impl Context {
    pub(crate) fn new(
        config: TrialConfig,
        outlet: Outlet,
        stop: StopSignal,
        device: Device,
        ranks: Distributed,
    ) -> Self {
        Self {
            config,
            outlet: Arc::new(Mutex::new(outlet)),
            stop,
            ended: StopSignal::default(),
            device,
            ranks: Arc::new(ranks),
            is_test: std::env::var_os(ENV_TEST).is_some_and(|it| it == "1"),
            pinned: None,
            #[cfg(feature = "learner")]
            learning: Default::default(),
        }
    }

    /// The same session on another device.
    pub(crate) fn on(self, device: Device) -> Self {
        Self { device, ..self }
    }

    /// The way out to runner and storage, for a moment. After a panic elsewhere rows and reports can still
    /// be sent.
    pub(crate) fn outlet(&self) -> MutexGuard<'_, Outlet> {
        self.outlet.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The hyperparameters, as the user's own type.
    ///
    /// # Errors
    ///
    /// [`InvalidHyperparameters`], which names the field.
    pub fn hparams<T: DeserializeOwned>(&self) -> Result<T> {
        let read = serde_path_to_error::deserialize(&self.config.hyperparameters);
        Ok(read.map_err(|error| InvalidHyperparameters(named(&error)))?)
    }

    /// A hyperparameter by its name; of nested ones, the names joined by dots.
    pub fn hparam(&self, name: &str) -> Option<&Value> {
        name.split('.').try_fold(&self.config.hyperparameters, |value, name| value.get(name))
    }

    /// A hyperparameter by its name, as the user's own type; of nested ones, the names joined by dots.
    ///
    /// # Errors
    ///
    /// [`InvalidHyperparameters`], which names it: there is none, or it is of another type.
    pub fn hparam_as<T: DeserializeOwned>(&self, name: &str) -> Result<T> {
        let Some(value) = self.hparam(name) else {
            return Err(InvalidHyperparameters(format!("{name} is missing")).into());
        };
        let read = serde_path_to_error::deserialize(value);
        Ok(read.map_err(|error| InvalidHyperparameters(format!("{name}: {}", named(&error))))?)
    }

    /// Samples of one batch on this rank: the hyperparameter `global_batch_size` by the number of
    /// ranks, rounded down.
    ///
    /// # Errors
    ///
    /// [`InvalidHyperparameters`]: it is missing, no integer of at least 1, or smaller than the number
    /// of ranks.
    pub fn batch_size(&self) -> Result<usize> {
        self.distributed().shard_batch_size(self.asked_batch_size()?)
    }

    /// Samples of one batch over all ranks: as many times [`batch_size`](Self::batch_size) as there are
    /// ranks, which may be less than the hyperparameter `global_batch_size`.
    ///
    /// # Errors
    ///
    /// As [`batch_size`](Self::batch_size).
    pub fn global_batch_size(&self) -> Result<usize> {
        Ok(self.batch_size()? * self.distributed().size())
    }

    /// The hyperparameter that every trial needs.
    fn asked_batch_size(&self) -> Result<usize> {
        let Some(value) = self.hparam("global_batch_size") else {
            let text = "global_batch_size is missing: a trial needs this hyperparameter, the samples of \
                        one batch over all ranks";
            return Err(InvalidHyperparameters(text.into()).into());
        };
        let size = value.as_u64().and_then(|it| usize::try_from(it).ok()).filter(|it| *it > 0);
        Ok(size.ok_or_else(|| {
            InvalidHyperparameters(format!(
                "global_batch_size is {value}, but must be an integer of at least 1"
            ))
        })?)
    }

    /// Says where ranks cannot share the batch that was asked for.
    pub(crate) fn warn_of_batch_size(&self) -> Result<()> {
        let (asked, trained) = (self.asked_batch_size()?, self.global_batch_size()?);
        let (rank, size) = (self.ranks.rank(), self.ranks.size());
        if asked != trained && rank == 0 {
            eprintln!(
                "stoker: global_batch_size is {asked}, of which {size} ranks train {trained} at a \
                 time: {} each",
                trained / size
            );
        }
        Ok(())
    }

    /// The experiment's `spec` as it was written, with defaults; null for a program that trains alone.
    pub fn experiment_config(&self) -> &Value {
        &self.config.spec
    }

    /// The experiment's `data`, as the user's own type.
    ///
    /// # Errors
    ///
    /// The field that does not fit.
    pub fn data<T: DeserializeOwned>(&self) -> Result<T> {
        let read = serde_path_to_error::deserialize(&self.config.data);
        Ok(read.map_err(|error| format!("data: {}", named(&error)))?)
    }

    /// Where to train, with autodiff: a GPU of this rank's own, or the CPU.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// What models compute in: `f32`, or by `optimizations.mixedPrecision` half precision, to which weights are cast for
    /// each step. [`Data::arrays`] and the data sets of this crate give inputs of this type; tensors that a program makes
    /// itself are to be of it too: `Tensor::from_data(data, (device, context.dtype()))`.
    pub fn dtype(&self) -> DType {
        precision::dtype(self.config.mixed_precision)
    }

    /// The trial's seed.
    pub fn trial_seed(&self) -> u32 {
        self.config.seed
    }

    /// The experiment's seed, the same for all of its trials.
    pub fn experiment_seed(&self) -> u32 {
        self.config.experiment_seed
    }

    /// The trial's index in its experiment.
    pub fn trial(&self) -> u32 {
        self.config.trial
    }

    /// The gang.
    pub fn distributed(&self) -> &Distributed {
        &self.ranks
    }

    /// A folder that outlives the process but not the machine, such as for downloaded data sets:
    /// `STOKER_CACHE`, or else the user's cache folder. It may not exist yet.
    pub fn cache_folder(&self) -> PathBuf {
        let of = |name| std::env::var_os(name).filter(|path| !path.is_empty()).map(PathBuf::from);
        of(ENV_CACHE)
            .or_else(|| of("XDG_CACHE_HOME").map(|path| path.join("stoker")))
            .or_else(|| of("HOME").map(|path| path.join(".cache/stoker")))
            .unwrap_or_else(|| std::env::temp_dir().join("stoker"))
    }

    /// The checkpoint that an inference job names, as it was chosen when the job began: for
    /// [`load_checkpoint_model`](Self::load_checkpoint_model).
    ///
    /// # Errors
    ///
    /// It names none, or this program is of no such job.
    pub fn checkpoint(&self) -> Result<CheckpointSource> {
        let none = "the job names no checkpoint: set spec.checkpoint, such as { trial: mnist-3 }";
        Ok(self.pinned.as_ref().map(CheckpointSource::pinned).ok_or(none)?)
    }

    /// A checkpoint's weights in `fresh`, a model of the same structure: burn cannot build one from
    /// its type alone. A path is a checkpoint's folder on this machine.
    ///
    /// # Errors
    ///
    /// There is no whole checkpoint, or it is of another model.
    pub fn load_checkpoint_model<M: Module>(
        &self,
        fresh: M,
        from: impl Into<CheckpointSource>,
    ) -> Result<M> {
        let (_, parts) = from.into().load(&self.config.storage)?;
        record::load_model(fresh, &parts)
    }

    /// Metrics of a model over all of `data` and all ranks, in batches of `batch_size` on each rank.
    ///
    /// # Errors
    ///
    /// What the data or another rank failed with.
    pub fn evaluate<M: Module, B: Send + 'static>(
        &self,
        model: &M,
        step: impl Fn(&M, B) -> StepOutput,
        data: &Data<B>,
        batch_size: usize,
    ) -> Result<Metrics> {
        self.evaluate_with(model, step, data, batch_size, &mut [])
    }

    /// As [`evaluate`](Self::evaluate), with callbacks, of which the `on_validation_` hooks are called;
    /// their metrics are `val_loss` and the like. There is no training that they could ask something of.
    ///
    /// # Errors
    ///
    /// What the data, a callback or another rank failed with.
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
            train::hook(callbacks, &mut control, &self.ranks, call)
        };
        hook(&mut |it, control| it.on_validation_begin(control))?;
        self.each_batch(model, data, batch_size, |index, model, batch| {
            hook(&mut |it, control| it.on_validation_batch_begin(index, control))?;
            if let Some(batch) = batch {
                all.add(&step(model, batch).into_metrics());
            }
            hook(&mut |it, control| it.on_validation_batch_end(index, control))
        })?;
        let all = all.all_reduce(self.distributed().collective())?;
        let logs = all.means("val_");
        hook(&mut |it, control| it.on_validation_end(&logs, control))?;
        Ok(all)
    }

    /// What `forward` gives for each batch of this rank, in order.
    ///
    /// # Errors
    ///
    /// What the data failed with.
    pub fn predict<M: Module, B: Send + 'static, T>(
        &self,
        model: &M,
        data: &Data<B>,
        batch_size: usize,
        forward: impl Fn(&M, B) -> T,
    ) -> Result<Vec<T>> {
        self.predict_with(model, data, batch_size, forward, &mut [])
    }

    /// As [`predict`](Self::predict), with callbacks, of which the `on_predict_` hooks are called.
    ///
    /// # Errors
    ///
    /// What the data or a callback failed with.
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
            train::hook(callbacks, &mut none, &self.ranks, |callback, _| call(callback))
        };
        hook(&mut |it| it.on_predict_begin())?;
        self.each_batch(model, data, batch_size, |index, model, batch| {
            hook(&mut |it| it.on_predict_batch_begin(index))?;
            all.extend(batch.map(|batch| forward(model, batch)));
            hook(&mut |it| it.on_predict_batch_end(index))
        })?;
        hook(&mut |it| it.on_predict_end())?;
        Ok(all)
    }

    /// Calls `each` with the number of every batch, in order, the model without autodiff, and what this
    /// rank has of the batch.
    pub(crate) fn each_batch<M: Module, B: Send + 'static>(
        &self,
        model: &M,
        data: &Data<B>,
        batch_size: usize,
        mut each: impl FnMut(u64, &M, Option<B>) -> Result<()>,
    ) -> Result<()> {
        if batch_size == 0 {
            return Err("the batch size is 0, but must be at least 1".into());
        }
        let model = model.valid();
        let model = precision::lowered(&model, self.config.mixed_precision);
        let plan = self.plan(batch_size, false);
        let steps = data.steps(&plan);
        unraised(|| {
            for (index, batch) in (0..).zip(data.loader(plan, 0..steps)) {
                self.ranks.tick(Doing::Evaluate);
                each(index, &model, batch?)?;
            }
            self.ranks.tick(Doing::Train);
            Ok(())
        })
    }

    /// How this rank reads data in batches of `batch_size`, for [`Data::loader`].
    pub fn plan(&self, batch_size: usize, training: bool) -> Plan {
        let (rank, world) = (self.ranks.rank(), self.ranks.size());
        let device = self.device.clone();
        Plan {
            global_batch: batch_size * world,
            rank,
            world,
            seed: u64::from(self.config.seed),
            shuffle: training,
            device: if training { device } else { device.without_autodiff() },
            dtype: self.dtype(),
        }
    }

    /// Seeds burn's random stream for a program that is about to start: it may draw numbers itself.
    pub(crate) fn seed_program(&self) {
        self.draw_weights(|| ());
    }

    /// Calls `draw` with burn's random stream seeded for this trial's weights.
    pub(crate) fn draw_weights<T>(&self, draw: impl FnOnce() -> T) -> T {
        rng::draw_weights(&self.device, self.config.seed, draw)
    }
}

/// `field: reason`.
fn named<E: std::fmt::Display>(error: &serde_path_to_error::Error<E>) -> String {
    match error.path().to_string().as_str() {
        "." => error.inner().to_string(),
        path => format!("{path}: {}", error.inner()),
    }
}

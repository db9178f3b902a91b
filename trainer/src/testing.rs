//! Runs trials in a program's own tests.
//!
//! A [`TrialTest`] creates a trial from hyperparameters or an experiment file, and trains a few
//! batches of it in the test process. It needs neither a runner nor a cluster, and stores
//! checkpoints in a temporary directory.
//!
//! ```
//! use serde_json::json;
//! use stoker_trainer::testing::TrialTest;
//! # use burn::module::Module;
//! # use burn::nn::{Linear, LinearConfig};
//! # use burn::optim::SgdConfig;
//! # use burn::tensor::{Device, Tensor};
//! # use stoker_trainer::{Context, Data, Optimizers, Result, StepOutput, Trial};
//! # struct Halves { learning_rate: f64 }
//! # impl Trial for Halves {
//! #     type Model = Linear;
//! #     type Batch = Tensor<2>;
//! #     fn new(context: &Context) -> Result<Self> {
//! #         Ok(Self { learning_rate: context.hparam_as("learning_rate")? })
//! #     }
//! #     fn build_model(&self, device: &Device) -> Result<Linear> {
//! #         Ok(LinearConfig::new(4, 4).init(device))
//! #     }
//! #     fn build_optimizers(&self) -> Result<Optimizers> {
//! #         Ok(Optimizers::one(SgdConfig::new().init(), self.learning_rate))
//! #     }
//! #     fn build_training_data(&self) -> Result<Data<Tensor<2>>> {
//! #         Data::arrays(Tensor::ones([64, 4], &stoker_trainer::host()))
//! #     }
//! #     fn build_validation_data(&self) -> Result<Data<Tensor<2>>> { self.build_training_data() }
//! #     fn step(&self, model: &Linear, x: Tensor<2>) -> StepOutput {
//! #         let [samples, _] = x.dims();
//! #         let error = model.forward(x.clone()) - x / 2.0;
//! #         StepOutput::sum((error.clone() * error).sum(), samples)
//! #     }
//! # }
//!
//! # fn main() -> stoker_trainer::Result<()> {
//! let test = TrialTest::new(json!({"global_batch_size": 16, "learning_rate": 0.05})).batches(4);
//! let tested = test.run::<Halves>()?;
//! assert!(tested.batches[3]["loss"] < tested.batches[0]["loss"]);
//! assert!(tested.validation["val_loss"] < tested.batches[0]["loss"]);
//! test.resumes::<Halves>()?;
//! # Ok(())
//! # }
//! ```
//!
//! An experiment file is YAML, which this crate does not parse. Use any crate that parses it into a
//! [`Value`]:
//!
//! ```ignore
//! let file = include_str!("../experiment.yaml");
//! let tested = TrialTest::from_experiment(&serde_saphyr::from_str(file)?)?.run::<MyTrial>()?;
//! ```
//!
//! `stoker run FILE --test` runs the same test with the actual program.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::{Map, Value, json};
use stoker_api::experiment::{ExperimentSpec, Length, Unit};
use stoker_api::hyperparameters::{Parameter, Space};
use stoker_api::validate::validate;
use tempfile::TempDir;

use crate::callback::{Callback, Control, Logs};
use crate::checkpoint::RetentionLimits;
use crate::stop::StopSignal;
use crate::train::program::context;
use crate::train::{Trial, run_trial_with};
use crate::{Context, Interrupted, Result, Standalone, record};

/// Lock on burn's random stream. burn's CPU backend has one per process, so concurrent trials would
/// disturb each other's random numbers.
static RANDOM_STREAM: Mutex<()> = Mutex::new(());

fn lock_random_stream() -> MutexGuard<'static, ()> {
    RANDOM_STREAM.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Configuration for a test of a trial.
#[derive(Clone, Debug)]
pub struct TrialTest {
    hyperparameters: Value,
    data: Value,
    seed: u32,
    batches: u64,
    spec: Option<Box<ExperimentSpec>>,
}

/// Result of a test of a trial.
#[derive(Debug)]
pub struct TestResult<M> {
    /// Trained model, as saved and restored.
    pub model: M,
    /// Metrics of each batch, for example `loss`.
    pub batches: Vec<Logs>,
    /// Metrics of the validation after the last batch, for example `val_loss`.
    pub validation: Logs,
}

impl TrialTest {
    /// Creates a test with these hyperparameters, an object that includes `global_batch_size`.
    pub fn new(hyperparameters: Value) -> Self {
        Self { hyperparameters, data: json!({}), seed: 0, batches: 1, spec: None }
    }

    /// Creates a test with the data, hyperparameters and gradient settings of an experiment. A
    /// searched hyperparameter gets the middle of its range, or the first value of a list; change
    /// it with [`hyperparameter`](Self::hyperparameter). The test sets lengths and periods.
    ///
    /// # Errors
    ///
    /// Fails if the experiment is invalid. The error lists all invalid fields.
    pub fn from_experiment(experiment: &Value) -> Result<Self> {
        let spec = experiment.get("spec").ok_or("the experiment has no `spec`")?;
        let spec: ExperimentSpec = serde_path_to_error::deserialize(spec)
            .map_err(|error| format!("spec.{}: {}", error.path(), error.inner()))?;
        let name = experiment.pointer("/metadata/name").and_then(Value::as_str);
        let valid = validate(name.unwrap_or("test"), &spec).map_err(|errors| {
            errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
        })?;
        let (hyperparameters, data) = (midpoint_of(&valid.space), spec.data.clone());
        let seed = spec.reproducibility.experiment_seed.unwrap_or_default();
        let spec = Some(Box::new(spec));
        Ok(Self { hyperparameters, data, seed, spec, ..Self::new(Value::Null) })
    }

    /// Sets one hyperparameter. For a nested one, join the names with dots.
    #[must_use]
    pub fn hyperparameter(mut self, name: &str, value: impl Into<Value>) -> Self {
        let mut target = &mut self.hyperparameters;
        for name in name.split('.') {
            if !target.is_object() {
                *target = Value::Object(Map::new());
            }
            target = &mut target[name];
        }
        *target = value.into();
        self
    }

    /// Sets the value of the experiment's `data`.
    #[must_use]
    pub fn data(self, data: Value) -> Self {
        Self { data, ..self }
    }

    /// Sets the trial's seed (default: 0, or the experiment's seed).
    #[must_use]
    pub fn seed(self, seed: u32) -> Self {
        Self { seed, ..self }
    }

    /// Sets the number of global batches to train (default: 1).
    #[must_use]
    pub fn batches(self, batches: u64) -> Self {
        Self { batches: batches.max(1), ..self }
    }

    /// Creates the trial and its context without training, to test the trial's methods.
    ///
    /// # Errors
    ///
    /// Same as [`Trial::new`].
    pub fn build<T: Trial>(&self) -> Result<(T, Context)> {
        let _stream = lock_random_stream();
        let context = self.context(None, false)?;
        context.seed_program();
        Ok((T::new(&context)?, context))
    }

    /// Builds the trial, trains, validates, saves a checkpoint and restores it. Concurrent tests
    /// wait for each other, so that random numbers depend only on the seed.
    ///
    /// # Errors
    ///
    /// Returns `test: STAGE failed: ...` if a stage fails or panics, for example `build_model`,
    /// `the first batch` or `the restore`. Also fails if validation does not return the
    /// experiment's searched metric.
    pub fn run<T: Trial>(&self) -> Result<TestResult<T::Model>> {
        let _stream = lock_random_stream();
        let folder = tempfile::tempdir()?;
        self.train::<T>(&folder, true, None)
    }

    /// Trains once without interruption, and once with a stop after each batch, as if the pod were
    /// rescheduled. The models and the metrics of the last validation must be bit-identical.
    ///
    /// # Errors
    ///
    /// Same as [`run`](Self::run). Also fails if a resumed training has different results. Store
    /// all state that a trial or callback keeps between batches in [`Callback::state`].
    pub fn resumes<T: Trial>(&self) -> Result<()> {
        let _stream = lock_random_stream();
        if self.batches < 2 {
            return Err("cannot stop within one batch; increase `batches`".into());
        }
        let uninterrupted = self.train::<T>(&tempfile::tempdir()?, false, None)?;
        let weights = |tested: &TestResult<T::Model>| record::snapshot(&tested.model).into_bytes();
        // A callback may have stopped training before its length.
        for stop_at in 1..uninterrupted.batches.len() as u64 {
            let folder = tempfile::tempdir()?;
            match self.train::<T>(&folder, false, Some(stop_at)) {
                Err(error) if error.is::<Interrupted>() => {}
                Err(error) => return Err(error),
                Ok(_) => return Err(format!("training ended before batch {stop_at}").into()),
            }
            let resumed = self.train::<T>(&folder, false, None)?;
            let differ = match () {
                () if weights(&resumed)? != weights(&uninterrupted)? => "the weights",
                () if bits(&resumed.validation) != bits(&uninterrupted.validation) => {
                    "the validation's metrics"
                }
                () => continue,
            };
            return Err(format!(
                "stopped after batch {stop_at} and resumed to batch {}, {differ} differ from an \
                 uninterrupted training; keep the state of a trial or callback in \
                 `Callback::state`",
                self.batches
            )
            .into());
        }
        Ok(())
    }

    /// Runs one attempt of the trial in a directory.
    fn train<T: Trial>(
        &self,
        folder: &TempDir,
        is_test: bool,
        stop_at: Option<u64>,
    ) -> Result<TestResult<T::Model>> {
        let context = self.context(Some(folder), is_test)?;
        let recorded = Arc::<Mutex<RecordedMetrics>>::default();
        let stop = stop_at.map(|batch| (batch, context.stop.clone()));
        context.seed_program();
        let recorder = MetricsRecorder { recorded: recorded.clone(), stop };
        let model = run_trial_with::<T>(&context, vec![Box::new(recorder)])?.model;
        let RecordedMetrics { batches, validation } =
            std::mem::take(&mut *recorded.lock().unwrap_or_else(PoisonError::into_inner));
        self.check_searched(&validation)?;
        Ok(TestResult { model, batches, validation })
    }

    fn context(&self, folder: Option<&TempDir>, is_test: bool) -> Result<Context> {
        let mut config = Standalone {
            hyperparameters: self.hyperparameters.clone(),
            data: self.data.clone(),
            seed: self.seed,
            length: Some(Length::new(Unit::Batches, self.batches)),
            folder: folder.map(|folder| folder.path().to_owned()),
            quiet: true,
            ..Standalone::default()
        }
        .config()?;
        (config.validation_period, config.checkpoint_period) = (None, None);
        if let Some(spec) = &self.spec {
            let optimizations = &spec.optimizations;
            config.spec = spec.for_programs();
            config.records_per_epoch = spec.records_per_epoch;
            config.scheduling_unit = spec.scheduling_unit;
            config.aggregation_frequency = optimizations.aggregation_frequency;
            config.average_aggregated_gradients = optimizations.average_aggregated_gradients;
            config.gradient_compression = optimizations.gradient_compression;
            config.mixed_precision = optimizations.mixed_precision;
        }
        let mut context = context(config, Some(RetentionLimits::default()))?;
        context.silence();
        context.is_test = is_test;
        Ok(context)
    }

    /// Fails if validation does not return the experiment's searched metric.
    fn check_searched(&self, validation: &Logs) -> Result<()> {
        let Some(spec) = &self.spec else { return Ok(()) };
        let searched = &spec.searcher.metric;
        let name = searched.strip_prefix("validation_").map(|name| format!("val_{name}"));
        if validation.contains_key(name.as_ref().unwrap_or(searched)) {
            return Ok(());
        }
        let names = validation.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
        Err(format!(
            "searched metric {searched} not found: validation reported {names}; report it or \
             change searcher.metric"
        )
        .into())
    }
}

fn bits(logs: &Logs) -> Vec<(&str, u64)> {
    logs.iter().map(|(name, value)| (name.as_str(), value.to_bits())).collect()
}

/// Returns the hyperparameters in the middle of a search space.
fn midpoint_of(space: &Space) -> Value {
    let parameter = match space {
        Space::Group(members) => {
            return members
                .iter()
                .map(|(name, space)| (name.clone(), midpoint_of(space)))
                .collect();
        }
        Space::OneOf(groups) => return groups.first().map(midpoint_of).unwrap_or_default(),
        Space::Parameter(parameter) => parameter,
    };
    match parameter {
        Parameter::Const(value) => value.clone(),
        Parameter::Int(range) => json!(range.min.midpoint(range.max)),
        Parameter::Double(range) => json!(range.min.midpoint(range.max)),
        Parameter::Log(range) => json!(range.base.powf(range.min.midpoint(range.max))),
        Parameter::Categorical(values) => values.first().cloned().unwrap_or_default(),
    }
}

/// Metrics of a training.
#[derive(Debug, Default)]
struct RecordedMetrics {
    batches: Vec<Logs>,
    validation: Logs,
}

/// Records metrics, and stops after a batch like a signal.
struct MetricsRecorder {
    recorded: Arc<Mutex<RecordedMetrics>>,
    stop: Option<(u64, StopSignal)>,
}

impl Callback for MetricsRecorder {
    fn on_batch_end(&mut self, logs: &Logs, control: &mut Control) -> Result<()> {
        self.recorded.lock().unwrap_or_else(PoisonError::into_inner).batches.push(logs.clone());
        let due = self.stop.as_ref().filter(|(batch, _)| *batch == control.batches());
        if let Some((_, stop)) = due {
            stop.set();
        }
        Ok(())
    }

    fn on_validation_end(&mut self, logs: &Logs, _: &mut Control) -> Result<()> {
        self.recorded.lock().unwrap_or_else(PoisonError::into_inner).validation = logs.clone();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use burn::nn::{Linear, LinearConfig};
    use burn::optim::SgdConfig;
    use burn::tensor::{Device, Tensor};

    use super::*;
    use crate::{Data, Optimizers, StepOutput, train};

    /// A trial that learns to halve four numbers.
    struct Halves {
        rate: f64,
        forgets: bool,
    }

    impl Trial for Halves {
        type Model = Linear;
        type Batch = Tensor<2>;

        fn new(context: &Context) -> Result<Self> {
            let forgets = context.hparam("forgets").is_some();
            Ok(Self { rate: context.hparam_as("rate")?, forgets })
        }

        fn build_model(&self, device: &Device) -> Result<Linear> {
            Ok(LinearConfig::new(4, 4).init(device))
        }

        fn build_optimizers(&self) -> Result<Optimizers> {
            Ok(Optimizers::one(SgdConfig::new().init(), self.rate))
        }

        fn build_training_data(&self) -> Result<Data<Tensor<2>>> {
            Data::arrays(Tensor::ones([64, 4], &crate::host()))
        }

        fn build_validation_data(&self) -> Result<Data<Tensor<2>>> {
            self.build_training_data()
        }

        fn step(&self, model: &Linear, x: Tensor<2>) -> StepOutput {
            let [samples, _] = x.dims();
            let error = model.forward(x.clone()) - x / 2.0;
            StepOutput::sum((error.clone() * error).sum(), samples)
        }

        fn callbacks(&self) -> Vec<Box<dyn Callback>> {
            self.forgets.then(|| Forgets(0).boxed()).into_iter().collect()
        }
    }

    /// Counts batches without keeping the count in its state.
    struct Forgets(u64);

    impl Callback for Forgets {
        fn on_batch_end(&mut self, _: &Logs, control: &mut Control) -> Result<()> {
            self.0 += 1;
            if self.0 == 3 {
                control.scale_learning_rate(0.5);
            }
            Ok(())
        }
    }

    fn experiment(metric: &str) -> Value {
        json!({"metadata": {"name": "halves"}, "spec": {
            "entrypoint": {"command": ["halves"]},
            "data": {"root": "here"},
            "hyperparameters": {
                "global_batch_size": {"int": {"min": 8, "max": 25}},
                "rate": {"log": {"min": -3, "max": -1}},
                "nested": {
                    "of": {"double": {"min": 0.0, "max": 1.0}},
                    "kind": {"categorical": ["a", "b"]},
                },
            },
            "searcher": {"metric": metric, "maxLength": {"batches": 9}, "random": {"maxTrials": 2}},
            "reproducibility": {"experimentSeed": 5},
        }})
    }

    fn error_of<T>(result: Result<T>) -> String {
        result.map(|_| ()).unwrap_err().to_string()
    }

    #[test]
    fn trial_trains_validates_and_restores() {
        let _stream = train::tests::lock_random_stream();
        let test = TrialTest::new(json!({"global_batch_size": 16, "rate": 0.05})).batches(5);
        let tested = test.run::<Halves>().unwrap();
        assert_eq!(tested.batches.len(), 5);
        assert!(tested.batches[4]["loss"] < tested.batches[0]["loss"], "{:?}", tested.batches);
        assert!(tested.validation["val_loss"] < tested.batches[4]["loss"]);
        test.resumes::<Halves>().unwrap();
        assert_eq!(test.clone().seed(1).build::<Halves>().unwrap().1.trial_seed(), 1);
        let error = error_of(test.hyperparameter("global_batch_size", 65).run::<Halves>());
        assert!(error.contains("global_batch_size is 65"), "{error}");
    }

    #[test]
    fn state_outside_the_checkpoint_is_detected() {
        let _stream = train::tests::lock_random_stream();
        let test = TrialTest::new(json!({"global_batch_size": 16, "rate": 0.05, "forgets": true}));
        let error = error_of(test.batches(5).resumes::<Halves>());
        assert!(error.starts_with("stopped after batch 1 "), "{error}");
        assert!(error.contains("the weights differ"), "{error}");
    }

    #[test]
    fn experiment_uses_the_middle_of_the_space() {
        let _stream = train::tests::lock_random_stream();
        let test = TrialTest::from_experiment(&experiment("validation_loss")).unwrap();
        let test = test.hyperparameter("nested.more", "x");
        let context = test.build::<Halves>().unwrap().1;
        let expected = json!({
            "global_batch_size": 16, "rate": 0.01, "nested": {"of": 0.5, "kind": "a", "more": "x"}
        });
        assert_eq!(context.config.hyperparameters, expected);
        assert_eq!((context.trial_seed(), &context.config.data), (5, &json!({"root": "here"})));
        assert_eq!(test.run::<Halves>().unwrap().batches.len(), 1);
    }

    #[test]
    fn experiment_errors_are_named() {
        let _stream = train::tests::lock_random_stream();
        let test = TrialTest::from_experiment(&experiment("validation_accuracy")).unwrap();
        assert_eq!(
            error_of(test.run::<Halves>()),
            "searched metric validation_accuracy not found: validation reported val_loss; report \
             it or change searcher.metric"
        );
        let of = |change: fn(&mut Value)| {
            let mut experiment = experiment("validation_loss");
            change(&mut experiment["spec"]);
            error_of(TrialTest::from_experiment(&experiment))
        };
        let error = of(|spec| spec["searcher"]["maxLength"] = json!({"batches": "x"}));
        assert!(error.starts_with("spec.searcher.maxLength"), "{error}");
        let error = of(|spec| spec["hyperparameters"]["rate"]["log"]["max"] = json!(-9));
        assert!(error.contains("spec.hyperparameters.rate"), "{error}");
        assert_eq!(
            error_of(TrialTest::from_experiment(&json!({}))),
            "the experiment has no `spec`"
        );
    }
}

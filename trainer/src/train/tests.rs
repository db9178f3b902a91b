//! Trainings of a small model: results are bit-identical across stops, workers and processes.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::module::Module;
use burn::nn::{BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Linear, LinearConfig, Relu};
use burn::optim::{AdamConfig, SgdConfig};
use burn::tensor::{Device, Int, Tensor, TensorData};
use serde_json::{Value, json};
use stoker_api::contract::ExitCode;
use stoker_api::experiment::{Length, Unit};

use super::*;
use crate::callback::Logs;
use crate::data::Data;
use crate::error::exit_code;
use crate::stop::StopSignal;
use crate::{CsvLog, EarlyStopping, ReduceOnPlateau, mix_seed};

mod best_weights;
mod callbacks;
mod clones;
mod copies;
#[cfg(any(feature = "cuda", feature = "cubecl-cpu"))]
mod cubecl_resume;
mod custom_loop;
mod data_kinds;
mod early_ends;
mod early_loader;
mod exchange;
mod gan;
mod gang_stops;
mod hook_order;
mod hooks;
mod keras;
mod late_metrics;
mod lost_checkpoints;
mod metric_names;
mod missing_gradients;
mod more_data_kinds;
mod rank_buffers;
mod rank_failures;
mod requests;
mod settings;
mod test_mode;
mod unreported;
mod validation_stops;
mod warm_starts;

pub(super) use early_ends::config_under_runner;

type Pair = (Tensor<2>, Tensor<1, Int>);

/// Lock on burn's random stream: its CPU backend has one per process. Tests hold it if they compare
/// trainings with dropout or sample random numbers. Tests that only create contexts do not need it.
static STREAM: Mutex<()> = Mutex::new(());

pub(crate) fn lock_random_stream() -> MutexGuard<'static, ()> {
    STREAM.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Panics if no test holds the lock on the random stream.
pub(crate) fn assert_stream_is_locked() {
    let is_locked = matches!(STREAM.try_lock(), Err(TryLockError::WouldBlock));
    assert!(is_locked, "a test that seeds the random stream must hold `lock_random_stream()`");
}

/// Returns a temporary directory, in memory if possible. Tests that run many short trainings would
/// otherwise spend most of their time waiting for the disk.
fn brief_folder() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

/// Samples per epoch: seven batches of 16, of which the last has 4.
const SAMPLES: u64 = 100;

#[derive(Module, Debug)]
struct Net {
    hidden: Linear,
    norm: BatchNorm,
    dropout: Dropout,
    output: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        Self {
            hidden: LinearConfig::new(20, 16).init(device),
            norm: BatchNormConfig::new(16).init(device),
            dropout: DropoutConfig::new(0.3).init(),
            output: LinearConfig::new(16, 5).init(device),
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let [samples, _] = x.dims();
        let x = self.hidden.forward(x).reshape([samples, 16, 1]);
        let x = Relu.forward(self.norm.forward(x).reshape([samples, 16]));
        self.output.forward(self.dropout.forward(x))
    }
}

/// Returns noise, with brighter pixels for the sample's class.
fn samples() -> Pair {
    let noise = |i: u64, k: u64| (mix_seed(&[i, k]) >> 40) as f32 / (1 << 24) as f32;
    let pixel = move |i: u64, k: u64| noise(i, k) + if k % 5 == i % 5 { 0.5 } else { 0.0 };
    let x: Vec<f32> = (0..SAMPLES).flat_map(|i| (0..20).map(move |k| pixel(i, k))).collect();
    let y: Vec<i64> = (0..SAMPLES).map(|i| (i % 5) as i64).collect();
    let (device, n) = (Device::flex(), SAMPLES as usize);
    let x = Tensor::from_data(TensorData::new(x, [n, 20]), &device);
    (x, Tensor::from_data(TensorData::new(y, [n]), &device))
}

/// Returns optimizers that make an exact resume hard: two optimizers, a scheduler of burn,
/// aggregation over three batches, and clipping.
fn optimizers() -> Optimizers {
    let cosine = CosineAnnealingLrSchedulerConfig::new(1e-2, 50).init().unwrap();
    Optimizers::one(AdamConfig::new().init(), cosine)
        .group(r"^output\.", SgdConfig::new().build(), |step: u64| 0.5 / (1.0 + step as f64))
        .unwrap()
        .clip_norm(1.0)
        .aggregate(3)
}

/// Requests a stop like a signal, and halves the learning rate once.
struct StopAt(u64, StopSignal);

impl Callback for StopAt {
    fn wants_batch_logs(&self) -> bool {
        false
    }

    fn on_batch_end(&mut self, _: &Logs, control: &mut Control) -> Result<()> {
        if control.batches() == self.0 {
            self.1.set();
        }
        Ok(())
    }

    fn on_epoch_end(&mut self, epoch: u64, _: &Logs, control: &mut Control) -> Result<()> {
        if epoch == 0 {
            control.scale_learning_rate(0.5);
        }
        Ok(())
    }
}

fn alone(folder: Option<&Path>, batches: u64) -> Standalone {
    Standalone {
        seed: 7,
        length: Some(Length::new(Unit::Batches, batches)),
        folder: folder.map(Path::to_path_buf),
        save_trial_latest: u32::MAX,
        scheduling_unit: 4,
        quiet: true,
        ..Standalone::default()
    }
}

/// Trains for 20 batches, or stops after batch `stop_at`.
fn train(folder: Option<&Path>, workers: usize, stop_at: u64) -> Result<Fitted<Net>> {
    train_epochs_of(0, folder, workers, stop_at)
}

/// Same as [`train`], with `records` records per epoch.
fn train_epochs_of(
    records: u64,
    folder: Option<&Path>,
    workers: usize,
    stop_at: u64,
) -> Result<Fitted<Net>> {
    let mut context = alone(folder, 20).context()?;
    context.config.records_per_epoch = records;
    let stop = StopAt(stop_at, context.stop.clone()).boxed();
    let callbacks = vec![EarlyStopping::new("val_loss").patience(9).boxed(), stop];
    let data = || Data::arrays(samples());
    let fit = Fit::new(data()?.workers(workers).queue(3))
        .validation(data()?)
        .batch_size(16)
        .callbacks(callbacks);
    let step = |model: &Net, (x, y): Pair| StepOutput::classification(model.forward(x), y);
    context.fit(Net::new(context.device()), optimizers(), step, fit)
}

/// Returns every file of the checkpoint at batch 20 by name, except the manifest, which contains
/// the attempt number.
fn last_checkpoint(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let checkpoints = std::fs::read_dir(folder.join("trial/checkpoints")).unwrap();
    let mut last: Vec<_> = checkpoints
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.file_name().unwrap().to_string_lossy().contains("20-"))
        .collect();
    assert_eq!(last.len(), 1, "{last:?}");
    let files = std::fs::read_dir(last.remove(0)).unwrap().map(|entry| entry.unwrap().path());
    let file = |path: std::path::PathBuf| {
        (path.file_name().unwrap().to_string_lossy().into_owned(), std::fs::read(path).unwrap())
    };
    files.map(file).filter(|(name, _)| name != "manifest.json").collect()
}

/// Returns the rows of all attempts, in order, without attempt numbers.
fn rows(folder: &Path) -> Vec<(u64, String, Value)> {
    let mut files: Vec<_> = std::fs::read_dir(folder.join("trial/metrics"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    let lines = files.iter().map(|file| std::fs::read_to_string(file).unwrap()).collect::<String>();
    let row = |line: &str| {
        let row: Value = serde_json::from_str(line).unwrap();
        let group = row["group"].as_str().unwrap().to_string();
        (row["batches"].as_u64().unwrap(), group, row["metrics"].clone())
    };
    let mut rows: Vec<_> = lines.lines().map(row).collect();
    rows.sort_by(|a, b| (a.0, &a.1).cmp(&(b.0, &b.1)));
    rows
}

#[test]
fn resume_after_any_batch_is_bit_identical() {
    let _stream = lock_random_stream();
    let straight = tempfile::tempdir().unwrap();
    let fitted = train(Some(straight.path()), 0, u64::MAX).unwrap();
    assert!(fitted.history[1]["loss"] < fitted.history[0]["loss"], "{:?}", fitted.history);
    let files = last_checkpoint(straight.path());
    let names: Vec<_> = files.keys().map(String::as_str).collect();
    let expected = ["gradients.bpk", "model.bpk", "optimizers.bpk", "schedule-0.bpk", "state.json"];
    assert_eq!(names, expected);
    let rows_straight = rows(straight.path());
    assert_eq!(rows_straight.len(), 8, "{rows_straight:?}");
    for stop_at in 1..20 {
        let folder = tempfile::tempdir().unwrap();
        let error = train(Some(folder.path()), 2, stop_at).unwrap_err();
        assert_eq!(exit_code(&*error), ExitCode::Preempted, "{error}");
        let resumed = train(Some(folder.path()), 1, u64::MAX).unwrap();
        assert_eq!(resumed.history, fitted.history, "stopped at {stop_at}");
        for (name, bytes) in &last_checkpoint(folder.path()) {
            assert!(bytes == &files[name], "stopped at {stop_at}: {name} differs");
        }
        assert_eq!(rows(folder.path()), rows_straight, "stopped at {stop_at}");
    }
}

#[test]
fn resume_with_records_per_epoch_is_bit_identical() {
    let _stream = lock_random_stream();
    let straight = tempfile::tempdir().unwrap();
    // 2.5 batches per epoch.
    let fitted = train_epochs_of(40, Some(straight.path()), 0, u64::MAX).unwrap();
    assert_eq!(fitted.history.len(), 10);
    assert!(fitted.history.iter().all(|logs| logs.contains_key("val_loss")));
    for stop_at in [2, 3] {
        let folder = tempfile::tempdir().unwrap();
        train_epochs_of(40, Some(folder.path()), 0, stop_at).unwrap_err();
        let resumed = train_epochs_of(40, Some(folder.path()), 0, u64::MAX).unwrap();
        assert_eq!(resumed.history, fitted.history, "stopped at {stop_at}");
        assert_eq!(last_checkpoint(folder.path()), last_checkpoint(straight.path()));
    }
}

#[test]
fn killed_attempt_without_checkpoint_keeps_its_number() {
    let _stream = lock_random_stream();
    let check = |left: &str, expected: u32| {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("trial").join(left);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(file, "").unwrap();
        let context = alone(Some(folder.path()), 1).context().unwrap();
        assert_eq!(context.config.attempt, expected, "{left}");
        assert_eq!(context.config.resume_from, []);
    };
    check("record.json", 0);
    check("metrics/0-00000000.jsonl", 1);
    check("logs/4/0-00000000.log", 5);
    check("checkpoints/000000000007-2/model.bpk", 3);
}

#[test]
fn completed_training_does_not_train_again() {
    let _stream = lock_random_stream();
    let folder = tempfile::tempdir().unwrap();
    train(Some(folder.path()), 0, u64::MAX).unwrap();
    let (files, written) = (last_checkpoint(folder.path()), rows(folder.path()));
    train(Some(folder.path()), 0, u64::MAX).unwrap();
    assert_eq!(last_checkpoint(folder.path()), files);
    assert_eq!(rows(folder.path()), written);
}

#[test]
fn workers_do_not_change_results() {
    let _stream = lock_random_stream();
    let bytes = |workers| {
        let fitted = train(None, workers, u64::MAX).unwrap();
        (crate::record::snapshot(&fitted.model).into_bytes().unwrap(), fitted.history)
    };
    let none = bytes(0);
    assert_eq!(bytes(1), none);
    assert_eq!(bytes(3), none);
}

#[test]
fn loaded_weights_predict_like_the_trained_model() {
    let _stream = lock_random_stream();
    let folder = tempfile::tempdir().unwrap();
    let fitted = train(Some(folder.path()), 0, u64::MAX).unwrap();
    let context = alone(None, 1).context().unwrap();
    let mut checkpoints = std::fs::read_dir(folder.path().join("trial/checkpoints")).unwrap();
    let is_last = |path: &std::path::PathBuf| path.to_string_lossy().contains("20-");
    let last = checkpoints.find(|entry| is_last(&entry.as_ref().unwrap().path()));
    let last = last.unwrap().unwrap().path();
    let loaded = context.load_checkpoint_model(Net::new(context.device()), &last).unwrap();
    let data = Data::arrays(samples()).unwrap();
    let of = |model: &Net| {
        let forward = |model: &Net, (x, _): Pair| model.forward(x).into_data();
        context.predict(model, &data, 30, forward).unwrap()
    };
    assert_eq!(of(&loaded), of(&fitted.model));
    let step = |model: &Net, (x, y): Pair| StepOutput::classification(model.forward(x), y);
    let metrics = context.evaluate(&loaded, step, &data, 30).unwrap();
    assert!(metrics.mean("accuracy").unwrap() > 0.5, "{metrics:?}");
}

/// A step with a metric over the whole validation, which is not a mean over batches.
struct Whole;

impl Step<Net, Pair> for Whole {
    fn train(&self, model: &Net, (x, y): Pair) -> StepOutput {
        StepOutput::classification(model.forward(x), y)
    }

    fn validated(&self, mut sums: crate::Metrics) -> Result<crate::Metrics> {
        let accuracy = sums.mean("accuracy").unwrap();
        sums.add_one("inaccuracy", 1.0 - accuracy, 1.0);
        Ok(sums)
    }
}

#[test]
fn step_adds_metrics_over_the_whole_validation() {
    let _stream = lock_random_stream();
    let context = alone(None, 7).context().unwrap();
    let data = || Data::arrays(samples()).unwrap();
    let fit = Fit::new(data()).validation(data()).batch_size(16);
    let model = Net::new(context.device());
    let fitted = context.fit_with(model, optimizers(), Whole, fit).unwrap();
    let logs = &fitted.history[0];
    assert_eq!(logs["val_inaccuracy"], 1.0 - logs["val_accuracy"]);
}

/// Returns the error of a training with this batch size, these optimizers and callbacks.
fn refused(batch_size: usize, optimizers: Optimizers, callbacks: Vec<Box<dyn Callback>>) -> String {
    let context = alone(None, 20).context().unwrap();
    let data = || Data::arrays(samples()).unwrap();
    let fit = Fit::new(data()).validation(data()).batch_size(batch_size).callbacks(callbacks);
    let step = |model: &Net, (x, y): Pair| StepOutput::classification(model.forward(x), y);
    context.fit(Net::new(context.device()), optimizers, step, fit).unwrap_err().to_string()
}

/// A minimal trial.
struct Tiny {
    id: String,
}

impl Trial for Tiny {
    type Model = Net;
    type Batch = Pair;

    fn new(context: &Context) -> Result<Self> {
        let id = context.hparam("id").and_then(Value::as_str).unwrap_or_default();
        Ok(Self { id: id.into() })
    }

    fn continue_id(&self) -> String {
        self.id.clone()
    }

    fn build_model(&self, device: &Device) -> Result<Net> {
        Ok(Net::new(device))
    }

    fn build_optimizers(&self) -> Result<Optimizers> {
        Ok(optimizers())
    }

    fn build_training_data(&self) -> Result<Data<Pair>> {
        Data::arrays(samples())
    }

    fn build_validation_data(&self) -> Result<Data<Pair>> {
        Data::arrays(samples())
    }

    fn step(&self, model: &Net, (x, y): Pair) -> StepOutput {
        StepOutput::classification(model.forward(x), y)
    }
}

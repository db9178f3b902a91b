//! Our side of `checkpoint`, which saves and restores parameters as a trial does.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::tensor::{Device, Tensor, TensorData};
use serde::{Deserialize, Serialize};
use stoker_api::experiment::{Length, Unit};
use stoker_api::names::MANIFEST;
use stoker_trainer::{
    BatchContext, Callback, Context, Control, Data, Fit, Logs, Optimizers, Result, Source,
    Standalone, StepOutput,
};

use crate::protocol;

/// Number of inputs and of outputs of a large layer. Its weights take 64 MiB as `f32`.
const WIDTH: usize = 4096;

/// Times of one operation, in seconds.
#[derive(Debug, Default, Deserialize, Serialize)]
pub(crate) struct OperationTimes {
    /// Time until the checkpoint exists, or until the model has the restored weights.
    pub(crate) seconds: f64,
    /// Part of a save that blocks the training loop. `None` if the complete operation blocks.
    pub(crate) blocked: Option<f64>,
}

/// Large layers that the loss does not use, so that a step is cheap, and one trained parameter.
#[derive(Debug, Module)]
struct Layers {
    large: Vec<Linear>,
    small: Param<Tensor<1>>,
}

impl Layers {
    /// Returns layers with different random weights.
    fn random(layers: usize, device: &Device) -> Self {
        let layers = Self::lazy(layers, device);
        // burn initializes weights lazily, so use them once.
        layers.weights().for_each(drop);
        layers
    }

    /// Returns layers of zeros. They share their memory, so that large models fit beside the other
    /// side.
    fn zeros(layers: usize, device: &Device) -> Self {
        let mut layers = Self::lazy(layers, device);
        let zeros: Tensor<2> = Tensor::zeros([WIDTH, WIDTH], device);
        for layer in &mut layers.large {
            layer.weight = Param::from_tensor(zeros.clone());
        }
        layers
    }

    fn lazy(layers: usize, device: &Device) -> Self {
        let layer = |_| LinearConfig::new(WIDTH, WIDTH).with_bias(false).init(device);
        let small = Param::from_tensor(Tensor::ones([1], device));
        Self { large: (0..layers).map(layer).collect(), small }
    }

    /// Returns the weights of the large layers. Each is a copy, so large models need them one by
    /// one.
    fn weights(&self) -> impl Iterator<Item = TensorData> {
        self.large.iter().map(|layer| layer.weight.val().into_data())
    }
}

/// Serves the commands `save`, `restore` and `load` until stdin ends, with a model of `layers`
/// large layers. `restore` and `load` read the checkpoint that `save` wrote.
///
/// # Errors
///
/// An operation failed, or the restored weights differ from the saved ones.
pub(crate) fn run(folder: &Path, layers: usize) -> Result<()> {
    let folder = folder.join("stoker");
    let device = Device::default().autodiff();
    // Each process has the same weights, so that one can restore what another one saved.
    device.seed(1);
    let (trained, fresh) = (Layers::random(layers, &device), Layers::zeros(layers, &device));
    while let Some(command) = protocol::next_command()? {
        let times = match command.as_str() {
            "save" => {
                if folder.exists() {
                    std::fs::remove_dir_all(&folder)?;
                }
                rustix::fs::sync();
                save(&trained, &folder)?
            }
            "restore" => restore(&fresh, &folder, &trained)?,
            "load" => load(&fresh, &folder, &trained)?,
            other => return Err(format!("unknown command {other:?}").into()),
        };
        protocol::respond(&times)?;
    }
    Ok(())
}

/// Trains one batch, after which the loop saves a checkpoint. Measures the time until the manifest
/// exists, and the time until the loop requests the next batch.
fn save(model: &Layers, folder: &Path) -> Result<OperationTimes> {
    let recorder = EventRecorder::default();
    let manifest = checkpoint_folder(folder).join(MANIFEST);
    let data = Data::new(Batches { recorder: recorder.clone(), manifest: Some(manifest) });
    let fit = Fit::new(data).batch_size(1).callbacks(vec![recorder.clone().boxed()]);
    let period = Some(Length::new(Unit::Batches, 1));
    // The second batch returns an error, which ends the training before another save.
    let ended = context(folder, period)?.fit(model.clone(), sgd(), step, fit);
    recorder.times().ok_or_else(|| format!("nothing was saved: {:?}", ended.map(|_| ())).into())
}

/// Measures the time from the start of another run in the directory until it requests a batch. By
/// then, it has found, verified and restored the checkpoint.
fn restore(fresh: &Layers, folder: &Path, expected: &Layers) -> Result<OperationTimes> {
    let recorder = EventRecorder::default();
    let data = Data::new(Batches { recorder: recorder.clone(), manifest: None });
    let is_same = Mutex::new(false);
    let start = Instant::now();
    let ended = context(folder, None)?.fit(
        fresh.clone(),
        sgd(),
        |model: &Layers, batch| {
            *is_same.lock().unwrap_or_else(PoisonError::into_inner) =
                model.weights().eq(expected.weights());
            step(model, batch)
        },
        Fit::new(data).batch_size(1),
    );
    let first = recorder.lock().first;
    let first = first.ok_or_else(|| format!("nothing was restored: {:?}", ended.map(|_| ())))?;
    check(is_same.into_inner().unwrap_or_default())?;
    Ok(OperationTimes { seconds: (first - start).as_secs_f64(), blocked: None })
}

/// Loads the checkpoint into a model for inference.
fn load(fresh: &Layers, folder: &Path, expected: &Layers) -> Result<OperationTimes> {
    let context = Standalone { quiet: true, ..Standalone::default() }.context()?;
    let (start, fresh) = (Instant::now(), fresh.clone());
    let model = context.load_checkpoint_model(fresh, checkpoint_folder(folder))?;
    let seconds = start.elapsed().as_secs_f64();
    check(model.weights().eq(expected.weights()))?;
    Ok(OperationTimes { seconds, blocked: None })
}

fn check(is_same: bool) -> Result<()> {
    match is_same {
        true => Ok(()),
        false => Err("the restored weights differ from the saved ones".into()),
    }
}

/// Returns the directory of the checkpoint that a run saves after its first batch.
fn checkpoint_folder(folder: &Path) -> PathBuf {
    folder.join("trial/checkpoints/000000000001-0")
}

fn context(folder: &Path, checkpoint_period: Option<Length>) -> Result<Context> {
    let (folder, length) = (Some(folder.to_owned()), Some(Length::new(Unit::Batches, 1 << 20)));
    let save_trial_latest = u32::MAX;
    let standalone = Standalone { quiet: true, save_trial_latest, ..Standalone::default() };
    Standalone { folder, length, checkpoint_period, ..standalone }.context()
}

/// Returns an optimizer without state, so that a checkpoint contains only the weights.
fn sgd() -> Optimizers {
    Optimizers::one(SgdConfig::new().init(), 0.0)
}

fn step(model: &Layers, (): ()) -> StepOutput {
    StepOutput::sum(model.small.val() * 2.0, 1)
}

/// Records when the training loop reaches each event.
#[derive(Clone, Debug, Default)]
struct EventRecorder(Arc<Mutex<Times>>);

#[derive(Debug, Default)]
struct Times {
    /// Time when the first batch was requested.
    first: Option<Instant>,
    /// Time when the first batch was trained, before the save.
    trained: Option<Instant>,
    /// Time when the second batch was requested.
    second: Option<Instant>,
    /// Time when the manifest existed.
    stored: Option<Instant>,
}

impl EventRecorder {
    fn lock(&self) -> std::sync::MutexGuard<'_, Times> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn times(&self) -> Option<OperationTimes> {
        let times = self.lock();
        let since = |end: Option<Instant>| Some((end? - times.trained?).as_secs_f64());
        Some(OperationTimes { seconds: since(times.stored)?, blocked: Some(since(times.second)?) })
    }
}

impl Callback for EventRecorder {
    fn on_batch_end(&mut self, _: &Logs, _: &mut Control) -> Result<()> {
        self.lock().trained.get_or_insert_with(Instant::now);
        Ok(())
    }
}

/// Source of empty batches. The second batch waits for `manifest`, if it is set, and returns an
/// error to end the training.
struct Batches {
    recorder: EventRecorder,
    manifest: Option<PathBuf>,
}

impl Source<()> for Batches {
    fn samples(&self) -> usize {
        1 << 20
    }

    fn batch(&self, _: &[usize], _: &BatchContext) -> Result<()> {
        let mut times = self.recorder.lock();
        if times.first.is_none() {
            times.first = Some(Instant::now());
            return Ok(());
        }
        times.second = Some(Instant::now());
        if let Some(manifest) = &self.manifest {
            let deadline = Instant::now() + Duration::from_secs(60);
            while !manifest.exists() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_micros(200));
            }
            times.stored = manifest.exists().then(Instant::now);
        }
        Err("measured".into())
    }
}

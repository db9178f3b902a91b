//! The training program of the gang tests.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::{BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Linear, LinearConfig, Relu};
use burn::optim::{AdamConfig, SgdConfig};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use rustix::process::Signal;
use serde_json::json;
use stoker_trainer::burn;
use stoker_trainer::kernels::BatchNormExt;
use stoker_trainer::{
    Callback, Context, Control, Data, Fit, Logs, Optimizers, Result, StepOutput, mix_seed,
};

/// Number of samples in an epoch. The last of its five batches has 4 samples, so with three ranks,
/// one rank gets two of them.
const SAMPLES: u64 = 100;

/// Number of samples in a batch over all ranks; divisible by 1, 2, 3 and 4.
const GLOBAL_BATCH: usize = 24;

/// Directory for the results of each rank.
pub(crate) const ENV_OUT: &str = "TEST_OUT";
/// If set, the model has layers whose behavior differs between ranks: dropout and BatchNorm.
pub(crate) const ENV_FULL: &str = "TEST_FULL";
/// `RANK BATCH SIGNAL`: the rank sends itself this signal after the batch. With `HANG`, it hangs
/// instead.
pub(crate) const ENV_SIGNAL: &str = "TEST_SIGNAL";
/// Duration of each batch after a signal. Otherwise, training could end before another thread
/// handles the signal.
pub(crate) const SIGNAL_PACE: Duration = Duration::from_millis(200);

/// `RANK MILLISECONDS`: the rank sleeps this long after each batch.
pub(crate) const ENV_PACE: &str = "TEST_PACE";
/// `RANK BATCH FILE`: the rank creates a file after that batch.
pub(crate) const ENV_MARK: &str = "TEST_MARK";

type Pair = (Tensor<2>, Tensor<1, Int>);

#[derive(Module, Debug)]
struct Net {
    hidden: Linear,
    norm: Option<BatchNorm>,
    dropout: Option<Dropout>,
    output: Linear,
}

impl Net {
    fn new(device: &Device, is_full: bool) -> Self {
        Self {
            hidden: LinearConfig::new(20, 16).init(device),
            norm: is_full.then(|| BatchNormConfig::new(16).init(device)),
            dropout: is_full.then(|| DropoutConfig::new(0.3).init()),
            output: LinearConfig::new(16, 5).init(device),
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let [samples, _] = x.dims();
        let mut x = self.hidden.forward(x);
        if let Some(norm) = &self.norm {
            x = norm.forward_fused(x.reshape([samples, 16, 1])).reshape([samples, 16]);
        }
        x = Relu.forward(x);
        if let Some(dropout) = &self.dropout {
            x = dropout.forward(x);
        }
        self.output.forward(x)
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

/// Returns two optimizers, with a schedule, gradient accumulation over three batches, and clipping.
fn optimizers() -> Optimizers {
    let cosine = CosineAnnealingLrSchedulerConfig::new(1e-2, 50).init().unwrap();
    Optimizers::one(AdamConfig::new().init(), cosine)
        .group(r"^output\.", SgdConfig::new().build(), 0.5)
        .unwrap()
        .clip_norm(1.0)
        .aggregate(3)
}

/// Sends a signal to this process after a batch.
struct SignalsItself(u64, Signal);

impl Callback for SignalsItself {
    fn wants_batch_logs(&self) -> bool {
        false
    }

    fn on_batch_end(&mut self, _: &Logs, control: &mut Control) -> Result<()> {
        if control.batches() == self.0 {
            rustix::process::kill_process(rustix::process::getpid(), self.1)?;
        }
        if control.batches() >= self.0 {
            std::thread::sleep(SIGNAL_PACE);
        }
        Ok(())
    }
}

/// Hangs after a batch.
struct Hangs(u64);

impl Callback for Hangs {
    fn wants_batch_logs(&self) -> bool {
        false
    }

    fn on_batch_end(&mut self, _: &Logs, control: &mut Control) -> Result<()> {
        if control.batches() == self.0 {
            std::thread::sleep(Duration::from_secs(1_000));
        }
        Ok(())
    }
}

/// Sleeps after each batch.
struct Paced(Duration);

impl Callback for Paced {
    fn wants_batch_logs(&self) -> bool {
        false
    }

    fn on_batch_end(&mut self, _: &Logs, _: &mut Control) -> Result<()> {
        std::thread::sleep(self.0);
        Ok(())
    }
}

/// Creates a file after a batch.
struct Marks(u64, PathBuf);

impl Callback for Marks {
    fn wants_batch_logs(&self) -> bool {
        false
    }

    fn on_batch_end(&mut self, _: &Logs, control: &mut Control) -> Result<()> {
        if control.batches() == self.0 {
            std::fs::write(&self.1, "")?;
        }
        Ok(())
    }
}

/// Returns the callbacks that the environment requests for this rank.
pub(crate) fn callbacks(rank: usize) -> Vec<Box<dyn Callback>> {
    let words_for = |name: &str| -> Option<Vec<String>> {
        let text = std::env::var(name).ok()?;
        let words: Vec<String> = text.split(' ').map(str::to_owned).collect();
        (words[0] == rank.to_string()).then_some(words)
    };
    let mut all = vec![];
    if let Some(words) = words_for(ENV_SIGNAL).filter(|words| words[2] == "HANG") {
        all.push(Hangs(words[1].parse().unwrap()).boxed());
    } else if let Some(words) = words_for(ENV_SIGNAL) {
        let signal = match &*words[2] {
            "KILL" => Signal::KILL,
            "STOP" => Signal::STOP,
            _ => Signal::TERM,
        };
        all.push(SignalsItself(words[1].parse().unwrap(), signal).boxed());
    }
    if let Some(words) = words_for(ENV_PACE) {
        all.push(Paced(Duration::from_millis(words[1].parse().unwrap())).boxed());
    }
    if let Some(words) = words_for(ENV_MARK) {
        all.push(Marks(words[1].parse().unwrap(), words[2].clone().into()).boxed());
    }
    all
}

/// The program of one rank.
pub(crate) fn train() -> ExitCode {
    stoker_trainer::run(|context: &Context| {
        let ranks = context.distributed();
        // Give the ranks different weights, so that missing synchronization is visible. burn
        // samples weights on first use. `fit` would seed all ranks alike, so use them here.
        context.device().seed(ranks.rank() as u64);
        let model = Net::new(context.device(), std::env::var_os(ENV_FULL).is_some());
        let _ = weights(&model);
        let data = || Data::arrays(samples());
        let fit = Fit::new(data()?)
            .validation(data()?)
            .batch_size(ranks.shard_batch_size(GLOBAL_BATCH)?)
            .callbacks(callbacks(ranks.rank()));
        let step = |model: &Net, (x, y): Pair| StepOutput::classification(model.forward(x), y);
        let fitted = context.fit(model, optimizers(), step, fit)?;
        let folder = PathBuf::from(std::env::var(ENV_OUT)?);
        let left = json!({"weights": weights(&fitted.model), "history": fitted.history});
        std::fs::write(folder.join(format!("{}.json", ranks.rank())), left.to_string())?;
        Ok(())
    })
}

/// Returns the bits of all weights of a model.
fn weights(model: &Net) -> Vec<u32> {
    #[derive(Default)]
    struct Read(Vec<u32>);
    impl ModuleVisitor for Read {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let values = param.val().into_data().convert_dtype(DType::F32);
            let values: Vec<f32> = values.try_to_vec().unwrap();
            self.0.extend(values.iter().map(|value| value.to_bits()));
        }
    }
    let mut read = Read::default();
    model.visit(&mut read);
    read.0
}

//! The sides of `data`: one only loads images, the other trains on them.

use std::path::Path;
use std::time::Instant;

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::pool::{AvgPool2d, AvgPool2dConfig};
use burn::nn::{Linear, LinearConfig, Relu};
use burn::tensor::{DType, Device};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use stoker_trainer::{Data, Fit, LoaderPlan, Optimizers, Result, Standalone, StepOutput};

use crate::models::{LEARNING_RATE, optimizer};
use crate::pictures::{self, Format, LoaderKind, Pictures};
use crate::protocol;
use crate::training::{CommandCallback, endless};

/// Number of images in a batch.
pub(crate) const BATCH: usize = 32;

/// First message of a loading side.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct FileCount {
    /// Number of files with this format.
    pub(crate) pictures: usize,
}

/// Time to load the requested batches, which includes the start of the workers.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct LoadTime {
    pub(crate) nanoseconds: u64,
}

/// Moments of decoded images, which show whether two sides decode alike.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct Moments {
    pub(crate) mean: f64,
    pub(crate) mean_square: f64,
}

/// Source of the training images.
#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
pub(crate) enum ImageSource {
    /// Files, decoded and augmented in every epoch
    Files,
    /// Memory, decoded once before training
    Memory,
}

/// Returns the loader plan of a single rank on the default device.
pub(crate) fn plan(global_batch: usize) -> LoaderPlan {
    let device = Device::default();
    LoaderPlan {
        global_batch,
        rank: 0,
        world_size: 1,
        seed: 7,
        shuffle: true,
        device,
        dtype: DType::F32,
    }
}

/// Serves the same commands as `torch_data.py serve`: a number of batches to load, or `check NUM`.
///
/// # Errors
///
/// A file cannot be read.
pub(crate) fn serve(folder: &Path, format: Format, way: LoaderKind, workers: usize) -> Result<()> {
    let files = pictures::list(folder, format)?;
    let data = pictures::data(files.clone(), format, way)?.workers(workers);
    protocol::respond(&FileCount { pictures: files.len() })?;
    let steps = data.steps(&plan(BATCH));
    let mut epoch = 0;
    while let Some(command) = protocol::next_command()? {
        if let Some(num) = command.strip_prefix("check ") {
            let (mean, mean_square) = pictures::moments(&files, format, num.parse()?)?;
            protocol::respond(&Moments { mean, mean_square })?;
            continue;
        }
        let batches: u64 = command.parse()?;
        let start = Instant::now();
        let first = epoch * steps;
        for batch in data.loader(plan(BATCH), first..first + batches) {
            let (_, labels) = batch?.ok_or("a batch without pictures")?;
            if labels.dims() != [BATCH] {
                return Err(format!("a batch of {} pictures", labels.dims()[0]).into());
            }
        }
        protocol::respond(&LoadTime { nanoseconds: start.elapsed().as_nanos() as u64 })?;
        epoch += 1;
    }
    Ok(())
}

/// Trains on images with `fit` and handles commands between two batches.
///
/// # Errors
///
/// The training failed.
pub(crate) fn train(
    folder: &Path,
    format: Format,
    feed: ImageSource,
    workers: usize,
) -> Result<()> {
    let mut files = pictures::list(folder, format)?;
    files.truncate(MEMORY_PICTURES);
    let data: Data<Pictures> = match feed {
        ImageSource::Files => pictures::data(files, format, LoaderKind::Stream)?.workers(workers),
        ImageSource::Memory => pictures::in_memory(files, format)?.workers(workers.min(1)),
    };
    let context =
        Standalone { quiet: true, length: endless(), ..Standalone::default() }.context()?;
    let model = Convolutions::new(context.device());
    let callback = CommandCallback::of(model.num_params());
    let fit = Fit::new(data).batch_size(BATCH).callbacks(vec![Box::new(callback)]);
    let optimizers = Optimizers::one(optimizer(), LEARNING_RATE);
    context.fit(model, optimizers, Convolutions::step, fit).map(drop)
}

/// Number of images in an epoch of the training run. In memory, they take 308 MB as `f32`.
const MEMORY_PICTURES: usize = 512;

/// A small network, so that loading limits the training speed.
#[derive(Debug, Module)]
struct Convolutions {
    pool: AvgPool2d,
    first: Conv2d,
    second: Conv2d,
    output: Linear,
    relu: Relu,
}

/// Number of classes. The labels are arbitrary.
const CLASSES: usize = 10;

impl Convolutions {
    fn new(device: &Device) -> Self {
        let layer = |channels: [usize; 2]| {
            Conv2dConfig::new(channels, [3, 3]).with_stride([2, 2]).init(device)
        };
        Self {
            pool: AvgPool2dConfig::new([4, 4]).with_strides([4, 4]).init(),
            first: layer([3, 16]),
            second: layer([16, 32]),
            output: LinearConfig::new(32, CLASSES).init(device),
            relu: Relu::new(),
        }
    }

    fn step(&self, (pictures, positions): Pictures) -> StepOutput {
        let x = self.relu.forward(self.first.forward(self.pool.forward(pictures)));
        let x = self.relu.forward(self.second.forward(x));
        let x = x.flatten::<3>(2, 3).mean_dim(2).squeeze_dim::<2>(2);
        StepOutput::classification(
            self.output.forward(x),
            positions.remainder_scalar(CLASSES as i64),
        )
    }
}

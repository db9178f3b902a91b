//! Benchmarks, run by `cargo xtask bench`.
//!
//! A benchmark compares processes, called sides, that take turns within one run. Our side runs
//! Stoker's trainer. The other sides usually run PyTorch or JAX.

mod bucket;
mod checkpoint;
mod collective;
mod data;
mod kernels;
mod limit;
mod loading;
mod models;
mod pictures;
mod protocol;
mod rounds;
mod saving;
mod trainer;
mod training;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Same allocator as in the stock trainer.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Benchmark training against other programs and print ratios of medians.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask bench", bin_name = "cargo xtask bench")]
struct Cli {
    #[command(subcommand)]
    bench: Bench,
}

#[derive(Debug, Subcommand)]
enum Bench {
    /// Benchmark a training step against PyTorch and JAX, and the loop against a custom one
    Trainer(trainer::Arguments),
    /// Benchmark saving and restoring a model against safetensors and torch.save
    Checkpoint(checkpoint::Arguments),
    /// Benchmark large objects on an S3 server against s5cmd
    Bucket(bucket::Arguments),
    /// Benchmark all-reduce against PyTorch's gloo, and training on two ranks against DDP
    Collective(collective::Arguments),
    /// Benchmark image loading against PyTorch's DataLoader, and training on loaded images
    Data(data::Arguments),
    /// Benchmark fused operators against burn's operators
    Kernels(kernels::Arguments),
    /// A training side of `trainer` or `collective`, which reads commands from stdin
    #[command(hide = true)]
    Side {
        way: training::LoopKind,
        model: training::Model,
        #[arg(long)]
        folder: PathBuf,
        #[arg(long, default_value = "f32")]
        precision: training::Precision,
    },
    /// Our side of `trainer` that times matrix products
    #[command(hide = true)]
    ProductSide {
        #[arg(long, default_value = "f32")]
        precision: training::Precision,
    },
    /// One rank of our side of `collective`, part `sum`
    #[command(hide = true)]
    SumSide,
    /// Our side of `checkpoint`
    #[command(hide = true)]
    SaveSide {
        #[arg(long)]
        folder: PathBuf,
        #[arg(long)]
        layers: usize,
    },
    /// Our side of `data`, part `load`
    #[command(hide = true)]
    LoadSide {
        format: pictures::Format,
        way: pictures::LoaderKind,
        workers: usize,
        #[arg(long)]
        folder: PathBuf,
    },
    /// A training side of `data`, part `feed`
    #[command(hide = true)]
    FeedSide {
        format: pictures::Format,
        feed: loading::ImageSource,
        workers: usize,
        #[arg(long)]
        folder: PathBuf,
    },
}

fn main() -> ExitCode {
    let done = match Cli::parse().bench {
        Bench::Trainer(arguments) => trainer::run(&arguments),
        Bench::Checkpoint(arguments) => checkpoint::run(&arguments),
        Bench::Bucket(arguments) => bucket::run(&arguments),
        Bench::Collective(arguments) => collective::run(&arguments),
        Bench::Data(arguments) => data::run(&arguments),
        Bench::Kernels(arguments) => kernels::run(&arguments),
        Bench::LoadSide { format, way, workers, folder } => {
            loading::serve(&folder, format, way, workers)
        }
        Bench::FeedSide { format, feed, workers, folder } => {
            loading::train(&folder, format, feed, workers)
        }
        Bench::ProductSide { precision } => limit::serve(precision),
        Bench::SumSide => collective::side(),
        Bench::SaveSide { folder, layers } => saving::run(&folder, layers),
        Bench::Side { way, model, folder, precision } => {
            training::run(way, model, &folder, precision)
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

//! The stock trainer: all examples in one program, and the launcher of a trial's pod.
//!
//! ```text
//! stoker-trainer mnist                        trains standalone, reports to the terminal
//! stoker run examples/mnist/const.yaml        starts it once for each trial
//! stoker job run examples/iris/job.yaml       starts it once for each slot, to predict
//! stoker-trainer launch -- PROGRAM ARGS...    in a pod: starts the program once for each rank
//! ```

#[path = "cifar10/mod.rs"]
mod cifar10;
#[path = "fashion-mnist/mod.rs"]
mod fashion_mnist;
#[path = "gan/mod.rs"]
mod gan;
#[path = "iris/mod.rs"]
mod iris;
#[path = "mnist/mod.rs"]
mod mnist;

mod data_config;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use stoker_trainer::{infer_with, launch, main_with, run_with};

/// Each training step allocates and frees large blocks, which is several times faster with mimalloc
/// than with the system allocator.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Train one of the examples, as a trial under `stoker run` or on a cluster, or standalone with
/// hyperparameters as arguments.
#[derive(Debug, Parser)]
#[command(version, after_help = AFTER_HELP)]
struct Cli {
    #[command(subcommand)]
    what: What,
}

const AFTER_HELP: &str = "\
`scripts/fetch-data` downloads the data sets. Train standalone, for example:

  stoker-trainer mnist --epochs 2 --hparam model=mlp --hparam dropout=0 \\
      --hparam learning_rate=0.001 --hparam global_batch_size=64

`stoker-trainer mnist --help` lists the arguments.";

#[derive(Debug, Subcommand)]
enum What {
    /// Classify handwritten digits with a multilayer perceptron or a convolutional network
    Mnist(Rest),
    /// Classify clothing items with the models of mnist
    FashionMnist(Rest),
    /// Classify small color images into ten classes with a convolutional network
    Cifar10(Rest),
    /// Classify three species of irises by the sizes of their sepals and petals
    Iris(Rest),
    /// Generate handwritten digits with a GAN in a custom training loop
    Gan(Rest),
    /// Run batch inference with a model trained by `iris`; started by `stoker job run`
    IrisPredict(Rest),
    /// In a pod: start a program once for each rank, and show and store its output
    Launch {
        /// Program and its arguments
        #[arg(last = true, required = true)]
        command: Vec<String>,
    },
    /// In a pod: install this program and unpack the files sent with the experiment
    Setup {
        /// Directory that the pod's containers share [default: /stoker]
        #[arg(long)]
        shared: Option<PathBuf>,
    },
    /// In a pod: delete checkpoints that an ended experiment does not retain
    Gc {
        /// JSON file that lists the checkpoints
        #[arg(default_value = "/etc/stoker/cleanup.json")]
        file: PathBuf,
    },
}

/// Arguments for the trainer library.
#[derive(Args, Debug)]
#[command(disable_help_flag = true)]
struct Rest {
    /// Options of standalone training; --help lists them
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

fn main() -> ExitCode {
    match Cli::parse().what {
        What::Mnist(rest) => main_with::<mnist::Mnist>(rest.arguments),
        What::FashionMnist(rest) => main_with::<fashion_mnist::FashionMnist>(rest.arguments),
        What::Cifar10(rest) => main_with::<cifar10::Cifar10>(rest.arguments),
        What::Iris(rest) => main_with::<iris::Iris>(rest.arguments),
        What::Gan(rest) => run_with(rest.arguments, gan::train),
        What::IrisPredict(rest) => infer_with::<iris::predict::Predict>(rest.arguments),
        What::Launch { command } => launch::main(&command),
        What::Setup { shared } => launch::setup(shared.as_deref()),
        What::Gc { file } => launch::clean_up(&file),
    }
}

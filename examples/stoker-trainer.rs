//! The stock trainer: all examples in one program, and what a trial's pod runs beside a program.
//!
//! ```text
//! stoker-trainer mnist                        trains alone, reports to the terminal
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

mod place;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use stoker_trainer::{infer_with, launch, main_with, run_with};

/// Training makes and drops large blocks in every step: several times faster here than with the
/// system's allocator.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Trains one of the examples: a trial of an experiment under `stoker run` or on a cluster, or
/// alone, with its hyperparameters as arguments.
#[derive(Debug, Parser)]
#[command(version, after_help = AFTER_HELP)]
struct Cli {
    #[command(subcommand)]
    what: What,
}

const AFTER_HELP: &str = "\
`scripts/fetch-data` fetches the data sets. Train alone, for example:

  stoker-trainer mnist --epochs 2 --hparam model=mlp --hparam dropout=0 \\
      --hparam learning_rate=0.001 --hparam global_batch_size=64

`stoker-trainer mnist --help` lists the arguments.";

#[derive(Debug, Subcommand)]
enum What {
    /// Handwritten digits, by a perceptron of one hidden layer or a convolutional network
    Mnist(Rest),
    /// Pieces of clothing, by the models of mnist
    FashionMnist(Rest),
    /// Small colour photographs of ten kinds, by a convolutional network
    Cifar10(Rest),
    /// Three kinds of irises by the sizes of their leaves
    Iris(Rest),
    /// Handwritten digits, drawn: two networks whose losses pull apart, by a loop of the program's own
    Gan(Rest),
    /// The kinds of irises that a model trained by `iris` takes flowers for: run by `stoker job run`
    IrisPredict(Rest),
    /// In a pod: starts a program once for each rank, shows and stores what it prints
    Launch {
        /// The program and its arguments
        #[arg(last = true, required = true)]
        command: Vec<String>,
    },
    /// In a pod: puts this program and the files sent with the experiment where they are wanted
    Setup {
        /// The folder that the pod's containers share [default: /stoker]
        #[arg(long)]
        shared: Option<PathBuf>,
    },
    /// In a pod: deletes checkpoints that an ended experiment does not keep
    Gc {
        /// The JSON file that lists them
        #[arg(default_value = "/etc/stoker/cleanup.json")]
        file: PathBuf,
    },
}

/// What the trainer's library reads.
#[derive(Args, Debug)]
#[command(disable_help_flag = true)]
struct Rest {
    /// How to train alone: --help lists them
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

//! Development tasks of this repository: `cargo xtask codegen [--check]`, `cargo xtask bench ...`,
//! `cargo xtask build-cuda` and `cargo xtask soak`.

mod bench;
mod build_cuda;
mod codegen;
mod instructions;
mod reference;
mod soak;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Development tasks of this repository.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Generate `crds/`, `charts/stoker/templates/crd-*` and `docs/reference-*.md`
    Codegen {
        /// Write nothing; fail if a generated file is out of date
        #[arg(long)]
        check: bool,
    },
    /// Run a benchmark: `trainer`, `checkpoint`, `collective` or `data` against PyTorch, `bucket`
    /// against s5cmd, `search` against Optuna, `operator`, or `instructions`. `bench --help` and
    /// `bench search --help` list the options
    #[command(disable_help_flag = true)]
    Bench {
        /// Name of the benchmark, and its options
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Build the stock trainer for NVIDIA GPUs and print its path. Needs no GPU. The first build
    /// takes 18 minutes on two cores
    BuildCuda {
        /// Options for cargo
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Test that random faults on a two-node cluster do not change results. Takes minutes and
    /// needs root
    Soak(soak::Options),
}

fn main() -> ExitCode {
    let result = match Arguments::parse().task {
        Task::Codegen { check } => codegen::run(check).map_err(|error| error.to_string()),
        Task::Bench { arguments } => bench::run(&arguments).map_err(|error| error.to_string()),
        Task::Soak(options) => soak::run(&options).map_err(|error| error.to_string()),
        Task::BuildCuda { arguments } => {
            build_cuda::run(&arguments).map_err(|error| error.to_string())
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("error: {message}");
            ExitCode::FAILURE
        }
    }
}

/// Returns the root of the clone that cargo runs in, which may differ from the clone that this
/// program was built in.
fn repository() -> PathBuf {
    let package = std::env::var_os("CARGO_MANIFEST_DIR");
    let package = package.unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    Path::new(&package).join("..")
}

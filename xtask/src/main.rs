//! Chores of this repository: `cargo xtask codegen [--check]`, `cargo xtask bench ...`, `cargo xtask build-cuda`,
//! `cargo xtask soak`.

mod bench;
mod build_cuda;
mod codegen;
mod reference;
mod soak;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Chores of this repository.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Debug, Subcommand)]
enum Chore {
    /// Writes the generated files: `crds/`, `charts/stoker/templates/crd-*` and `docs/reference-*.md`
    Codegen {
        /// Writes nothing; fails if a file differs from what would be written.
        #[arg(long)]
        check: bool,
    },
    /// Measures: `trainer`, `checkpoint` or `collective` in turns with others, or `operator`; `bench --help` lists
    /// the options.
    #[command(disable_help_flag = true)]
    Bench {
        /// What to measure, and its options
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Builds the stock trainer for NVIDIA GPUs and prints its path. Needs no GPU; 18 minutes on two cores at first.
    BuildCuda {
        /// Options for cargo
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Tests for minutes that random faults on a cluster with two nodes change no result. Needs root.
    Soak(soak::Options),
}

fn main() -> ExitCode {
    let result = match Arguments::parse().chore {
        Chore::Codegen { check } => codegen::run(check).map_err(|error| error.to_string()),
        Chore::Bench { arguments } => bench::run(&arguments).map_err(|error| error.to_string()),
        Chore::Soak(options) => soak::run(&options).map_err(|error| error.to_string()),
        Chore::BuildCuda { arguments } => build_cuda::run(&arguments).map_err(|it| it.to_string()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("error: {message}");
            ExitCode::FAILURE
        }
    }
}

/// The root of the clone that cargo runs for, which need not be the one that this was built in.
fn repository() -> PathBuf {
    let package = std::env::var_os("CARGO_MANIFEST_DIR");
    let package = package.unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    Path::new(&package).join("..")
}

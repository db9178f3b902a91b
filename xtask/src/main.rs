//! Chores of this repository: `cargo xtask codegen [--check]`.

mod codegen;

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
    /// Writes the files that are generated from Rust types: `crds/`.
    Codegen {
        /// Writes nothing; fails if a file differs from what would be written.
        #[arg(long)]
        check: bool,
    },
}

fn main() -> ExitCode {
    let result = match Arguments::parse().chore {
        Chore::Codegen { check } => codegen::run(check).map_err(|error| error.to_string()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("error: {message}");
            ExitCode::FAILURE
        }
    }
}

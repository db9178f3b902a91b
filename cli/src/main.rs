//! The program `stoker`: runs deep-learning experiments and shows what became of them.
//!
//! Exit codes: 0 completed, 1 failed, 2 the input is wrong, 3 stopped before the end.

mod failure;
mod file;
mod place;
mod preview;
mod print;
mod run;
mod show;
mod supervise;
mod validate;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::failure::Failure;
use crate::print::Output;

/// Run deep-learning experiments on this machine and see what became of them.
#[derive(Debug, Parser)]
#[command(
    name = "stoker",
    version,
    propagate_version = true,
    after_help = "Exit codes: 0 completed, 1 failed, 2 the input is wrong, 3 stopped before the \
                  end."
)]
struct Cli {
    /// How results are printed: for people, or as JSON for programs
    #[arg(long, short, global = true, value_enum, default_value_t)]
    output: Output,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a whole experiment here, without a cluster
    ///
    /// Trials run as processes, as many at a time as there are slots. Ctrl-C lets them take a
    /// checkpoint and stops; the same command again goes on from there. The last line of
    /// `--output json` is the outcome.
    Run(run::Args),
    /// Check an experiment's file and show every error at once
    Validate(validate::Args),
    /// Show how long trials would train and what the first would be given
    Preview(preview::Args),
    /// List and describe runs
    #[command(subcommand)]
    Experiment(show::ExperimentCommand),
    /// List and describe trials, and print their logs
    #[command(subcommand)]
    Trial(show::TrialCommand),
    /// List checkpoints
    #[command(subcommand)]
    Checkpoint(show::CheckpointCommand),
    /// Run a program that is ended when the runner ends
    #[command(hide = true)]
    Supervise(supervise::Args),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let output = cli.output;
    let result: Result<u8, Failure> = match &cli.command {
        Command::Run(args) => run::run(args, output),
        Command::Validate(args) => Ok(validate::validate(args, output)),
        Command::Preview(args) => preview::preview(args, output),
        Command::Experiment(command) => show::experiment(command, output),
        Command::Trial(command) => show::trial(command, output),
        Command::Checkpoint(command) => show::checkpoint(command, output),
        Command::Supervise(args) => Ok(supervise::supervise(args)),
    };
    ExitCode::from(result.unwrap_or_else(|failure| {
        print::err(format!("stoker: {failure}"));
        failure.code()
    }))
}

//! The program `stoker`: runs deep-learning experiments, here or on a cluster, and shows what
//! became of them.
//!
//! Exit codes: 0 completed, 1 failed, 2 the input is wrong, 3 stopped before the end.

mod cluster;
mod commands;
mod failure;
mod file;
mod job;
mod place;
mod preview;
mod print;
mod run;
mod show;
mod supervise;
mod trying;
mod validate;

use std::process::ExitCode;

use clap::{CommandFactory as _, Parser, Subcommand};
use clap_complete::Shell;

use crate::cluster::connect::Options;
use crate::cluster::version;
use crate::failure::Failure;
use crate::print::Output;

/// Run deep-learning experiments, on this machine or on a Kubernetes cluster, and see what becomes
/// of them.
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
    /// Check the file of an experiment or an inference job and show every error at once
    Validate(validate::Args),
    /// Show how long trials would train and what the first would be given
    Preview(preview::Args),
    /// Create, watch and end experiments
    #[command(subcommand, visible_alias = "exp")]
    Experiment(commands::ExperimentCommand),
    /// Watch trials, print their logs, end them
    #[command(subcommand)]
    Trial(commands::TrialCommand),
    /// List and download checkpoints
    #[command(subcommand)]
    Checkpoint(commands::CheckpointCommand),
    /// Put a data set through a trained model, every input exactly once
    #[command(subcommand)]
    Job(job::JobCommand),
    /// Show the version of this program and of the cluster's Stoker
    Version(Options),
    /// Print completions for a shell: `source <(stoker completions bash)`
    Completions {
        /// The shell
        shell: Shell,
    },
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
        Command::Experiment(command) => commands::experiment(command, output),
        Command::Trial(command) => commands::trial(command, output),
        Command::Checkpoint(command) => commands::checkpoint(command, output),
        Command::Job(command) => job::job(command, output),
        Command::Version(options) => commands::block_on(async {
            version::version(options, output).await;
            Ok(0)
        }),
        Command::Completions { shell } => {
            complete(*shell);
            Ok(0)
        }
        Command::Supervise(args) => Ok(supervise::supervise(args)),
    };
    ExitCode::from(result.unwrap_or_else(|failure| {
        print::err(format!("stoker: {failure}"));
        failure.code()
    }))
}

fn complete(shell: Shell) {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "stoker", &mut script);
    print::raw(&script);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_commands_are_consistent() {
        Cli::command().debug_assert();
    }
}

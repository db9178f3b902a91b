//! The program `stoker`: runs deep-learning experiments locally or on a cluster, and shows their
//! state and results.
//!
//! Exit codes: 0 completed, 1 failed, 2 invalid input, 3 cancelled, deleted, stopped or timed out.

mod cluster;
mod commands;
mod describe;
mod endpoint;
mod explain;
mod failure;
mod file;
mod job;
mod json;
mod list;
mod metrics;
mod mlflow;
mod preview;
mod print;
mod reopen;
mod run;
mod run_root;
mod searcher;
mod show;
mod simulate;
mod smoke_test;
mod stored;
mod supervise;
mod tensorboard;
mod ui;
mod validate;

use std::any::TypeId;
use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Duration;

use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use clap_complete::Shell;
use k8s_openapi::jiff::Timestamp;

use crate::cluster::connect::Options;
use crate::cluster::version;
use crate::failure::Failure;
use crate::print::{Format, Output};

/// Run and monitor deep-learning experiments, locally or on a Kubernetes cluster
#[derive(Debug, Parser)]
#[command(
    name = "stoker",
    version,
    propagate_version = true,
    after_help = "\
Exit codes: 0 completed, 1 failed, 2 invalid input, 3 cancelled, deleted, stopped or timed out.

Trials have one name in all commands: EXPERIMENT-INDEX, such as mnist-0. `mnist 0` and `mnist/0` \
mean the same. Commands that accept several names try all of them if all are well-formed. They \
print a line for each name, and return the exit code of the first that did not succeed.

With --output json, numbers are numbers, and null if not finite. The last line of standard error \
of a failed command is {\"error\": {\"kind\": .., \"message\": .., \"exitCode\": N}}; `stoker \
validate` prints the errors of the file to standard output instead. Kinds: usage (the command \
line), file (with all `errors` of a file), input, system (the cluster, a disk), storage, and for \
waits timeout, deleted and stopped. With several names, `name` is the failed object."
)]
struct Cli {
    /// Output format: human-readable text, or JSON for scripts
    #[arg(
        long, short, global = true, value_parser = Format::text_or_json(), default_value = "text"
    )]
    output: Format,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run an experiment locally, without a cluster
    ///
    /// Trials run as processes; --slots limits how many run at the same time. Ctrl-C checkpoints
    /// all running trials and stops. Run the same command again to resume. The last line of
    /// `--output json` is the outcome.
    ///
    /// `stoker experiment pause`, `cancel` and other commands change the run while it lasts. A
    /// paused run stays paused: this command then waits for `stoker experiment activate`.
    Run(run::Args),
    /// Check an experiment or inference job file and report all errors
    Validate(validate::Args),
    /// Show the training lengths and the first sampled hyperparameters of an experiment
    Preview(preview::Args),
    /// Simulate a search on recorded learning curves, without training
    ///
    /// Each line of the curves is a JSON object with `trial` (the index of the trial) or
    /// `hyperparameters`, and `units` with `metric` or `exit` (failed, invalid or early). Other
    /// fields: `metrics` (values of other objectives by metric), `seconds_per_unit` (default 1) and
    /// `seed` (default 0).
    Simulate(simulate::Args),
    /// Create, monitor and stop experiments
    #[command(subcommand, visible_alias = "exp")]
    Experiment(commands::experiment::ExperimentCommand),
    /// List and describe trials, print their logs and metrics, kill them
    #[command(subcommand)]
    Trial(commands::trial::TrialCommand),
    /// List and download checkpoints
    #[command(subcommand)]
    Checkpoint(commands::checkpoint::CheckpointCommand),
    /// Run batch inference with a trained model, exactly once per input row
    #[command(subcommand)]
    Job(job::JobCommand),
    /// Serve a web page with experiments, plots and logs
    ///
    /// The page is read-only without --allow-actions. Without --sign-in, it listens on the loopback
    /// interface of this machine, and the printed URL contains a token; the page refuses requests
    /// without it. With --sign-in, each viewer needs a token of the cluster.
    #[command(after_help = commands::SOURCE_HELP)]
    Ui(ui::UiArgs),
    /// Start TensorBoard for an experiment or a trial
    ///
    /// Starts the installed program `tensorboard` on the loopback interface and prints its URL. It
    /// shows scalars, histograms, images and texts, and all trials by hyperparameters and metrics
    /// in the tab HParams. Event files of a bucket are copied to a temporary directory every 15
    /// seconds.
    #[command(after_help = commands::SOURCE_HELP)]
    Tensorboard(tensorboard::TensorboardArgs),
    /// Copy hyperparameters and metrics of an experiment or a trial to an MLflow tracking server
    ///
    /// Each trial becomes a run. Run the command again to add later values: a trial that has ended
    /// and is completely copied is not copied again. Credentials come from MLFLOW_TRACKING_TOKEN,
    /// or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD.
    #[command(after_help = commands::SOURCE_HELP)]
    Mlflow(mlflow::MlflowArgs),
    /// Show the versions of this program and of Stoker in the cluster
    Version(Options),
    /// Print a shell completion script, for example `source <(stoker completions bash)`
    Completions {
        /// Shell to generate completions for
        shell: Shell,
    },
    /// Run a program and kill it when the runner exits
    #[command(hide = true)]
    Supervise(supervise::Args),
}

fn main() -> ExitCode {
    let cli = match parse(std::env::args_os()) {
        Ok(cli) => cli,
        Err(error) => {
            let output = requested_output(std::env::args_os().skip(1));
            return ExitCode::from(failure::print_usage(&error, output));
        }
    };
    let output = cli.output.into();
    let result: Result<u8, Failure> = match &cli.command {
        Command::Run(args) => run::run(args, output),
        Command::Validate(args) => Ok(validate::validate(args, output)),
        Command::Preview(args) => preview::preview(args, output),
        Command::Simulate(args) => simulate::run_simulations(args, output),
        Command::Experiment(command) => commands::experiment::experiment(command, output),
        Command::Trial(command) => commands::trial::trial(command, output),
        Command::Checkpoint(command) => commands::checkpoint::checkpoint(command, output),
        Command::Job(command) => job::job(command, output),
        Command::Ui(args) => ui::serve(args, output),
        Command::Tensorboard(args) => tensorboard::run(args, output),
        Command::Mlflow(args) => mlflow::run(args, output),
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
    let result = result.and_then(|code| match print::output_error() {
        Some(failure) if code == 0 => Err(failure),
        Some(_) | None => Ok(code),
    });
    let code = result.unwrap_or_else(|failure| {
        failure.print(None, output);
        failure.code()
    });
    print::background::drain();
    ExitCode::from(code)
}

fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Cli, clap::Error> {
    let matches = with_negative_numbers(Cli::command()).try_get_matches_from(arguments)?;
    Cli::from_arg_matches(&matches).map_err(|error| error.format(&mut Cli::command()))
}

/// Makes numeric arguments of a command and its subcommands refuse negative values themselves. By
/// default, clap takes `-1` for an unknown option, and recommends `-- -1`.
fn with_negative_numbers(command: clap::Command) -> clap::Command {
    let numeric = [
        TypeId::of::<u16>(),
        TypeId::of::<u32>(),
        TypeId::of::<u64>(),
        TypeId::of::<usize>(),
        TypeId::of::<f64>(),
        TypeId::of::<Duration>(),
        TypeId::of::<Timestamp>(),
    ];
    let allow = |arg: clap::Arg| {
        let parsed = arg.get_value_parser().type_id();
        let is_numeric = numeric.iter().any(|of| parsed == *of);
        arg.allow_negative_numbers(is_numeric)
    };
    command.mut_args(allow).mut_subcommands(with_negative_numbers)
}

/// Returns the output format of a command line that cannot be parsed.
fn requested_output(arguments: impl Iterator<Item = OsString>) -> Output {
    let mut output = Output::Text;
    let mut is_value = false;
    for argument in arguments {
        let argument = argument.to_string_lossy();
        let value = match is_value {
            true => Some(&*argument),
            false => argument
                .strip_prefix("--output=")
                .or_else(|| argument.strip_prefix("-o").map(|rest| rest.trim_start_matches('='))),
        };
        if let Some(value) = value.filter(|value| !value.is_empty()) {
            output = if value == "json" { Output::Json } else { Output::Text };
        }
        is_value = !is_value && matches!(&*argument, "--output" | "-o");
        if argument == "--" {
            break;
        }
    }
    output
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
    fn command_definitions_are_consistent() {
        with_negative_numbers(Cli::command()).debug_assert();
    }

    /// Checks all options below a command that do not accept a word, except choices and addresses.
    /// Returns their number.
    fn check_negative_numbers(command: &clap::Command, path: &[&str]) -> usize {
        let error = |words: &[&str]| {
            let words = path.iter().chain(words).map(OsString::from);
            parse(words).err().map(|error| error.to_string()).unwrap_or_default()
        };
        let mut count = 0;
        // The hidden command is not for users.
        let options = command.get_arguments().filter(|arg| arg.get_long().is_some());
        for arg in options.filter(|_| !command.is_hide_set()) {
            let long = format!("--{}", arg.get_long().unwrap_or_default());
            let word = error(&[&format!("{long}=x")]);
            let is_number = word.contains(&format!("invalid value 'x' for '{long}"))
                && !word.contains("[possible values")
                && !arg.is_require_equals_set()
                && long != "--listen";
            if !is_number {
                continue;
            }
            let number = error(&[&long, "-1"]);
            let expected = format!("error: invalid value '-1' for '{long}");
            assert!(number.starts_with(&expected), "{path:?} {long}: {number}");
            count += 1;
        }
        let below = command.get_subcommands().map(|sub| {
            let path: Vec<&str> = path.iter().copied().chain([sub.get_name()]).collect();
            check_negative_numbers(sub, &path)
        });
        count + below.sum::<usize>()
    }

    #[test]
    fn negative_numbers_are_invalid_values() {
        let count = check_negative_numbers(&Cli::command(), &["stoker"]);
        assert!(count >= 20, "only {count} options were checked");
        let words = ["stoker", "trial", "logs", "mnist", "-1"].map(OsString::from);
        let error = parse(words).unwrap_err().to_string();
        assert!(error.starts_with("error: invalid value '-1' for '[INDEX]'"), "{error}");
    }

    #[test]
    fn output_format_of_an_invalid_command_line_is_found() {
        let check = |line: &str, expected: Output| {
            let arguments = line.split_whitespace().map(OsString::from);
            assert_eq!(requested_output(arguments), expected, "{line}");
        };
        check("trial lst", Output::Text);
        check("trial lst --output json", Output::Json);
        check("--output=json trial lst", Output::Json);
        check("trial lst -o json", Output::Json);
        check("trial lst -ojson", Output::Json);
        check("trial lst -o=json x", Output::Json);
        check("trial lst -o yaml", Output::Text);
        check("trial lst -o json -o text", Output::Text);
        check("supervise -- x -o json", Output::Text);
    }
}

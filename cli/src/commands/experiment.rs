//! `stoker experiment`.

use std::time::Duration;

use clap::{Args, Subcommand};
use stoker_api::experiment::{DesiredState, Experiment, ReopenedTrials};

use super::arguments::{ShowArgs, SourceArgs};
use super::names::{ExperimentNames, for_all, for_each, parse_name, show_each};
use super::{ACTION_HELP, SOURCE_HELP, WAIT_HELP, block_on, done};
use crate::cluster::connect::Cluster;
use crate::cluster::logs::line::LogArgs;
use crate::cluster::{create, experiment, logs, metrics as cluster_metrics, storage, text, wait};
use crate::failure::Failure;
use crate::list::{self, ListArgs};
use crate::metrics::{self, MetricsArgs};
use crate::print::Output;
use crate::reopen;
use crate::show;

/// `stoker experiment ...`
#[derive(Debug, Subcommand)]
pub(crate) enum ExperimentCommand {
    /// Create an experiment on a cluster and upload the program's files, if given
    ///
    /// The file is validated like `stoker validate` does, then by the cluster. The program's files
    /// are stored as NAMESPACE/contexts/SHA256.tar.gz in the experiment's storage. The same content
    /// is uploaded only once. The upload uses credentials from the environment.
    Create(Box<create::Args>),
    /// List experiments
    ///
    /// Of several local runs with one name, the latest is listed by the name and the others by
    /// their run IDs. The phase `Stopped` means that a local run has not ended, but no `stoker run`
    /// trains it.
    #[command(after_help = SOURCE_HELP)]
    List {
        #[command(flatten)]
        list: ListArgs,
        #[command(flatten)]
        source: SourceArgs,
        /// List experiments of all namespaces
        #[arg(
            long, short = 'A', help_heading = "Cluster", conflicts_with_all = ["root", "namespace"]
        )]
        all_namespaces: bool,
    },
    /// Show experiments: progress, next steps, trials with reasons, importance
    ///
    /// Shows the phase and the best trial, what each bracket of the search does next, the trials
    /// with the reasons for their states, and the importance of each hyperparameter. On a cluster,
    /// also the events. `--output json` and `--output yaml` print the complete object with its
    /// record and these explanations.
    #[command(after_help = SOURCE_HELP)]
    Describe {
        #[command(flatten)]
        names: ExperimentNames,
        #[command(flatten)]
        show: ShowArgs,
        #[command(flatten)]
        source: SourceArgs,
    },
    /// Print the logs of all trials, each line prefixed with the trial index
    ///
    /// Prints the latest attempt of each trial.
    #[command(after_help = SOURCE_HELP)]
    Logs {
        /// Experiment name; for local runs also a run ID
        #[arg(value_parser = parse_name)]
        experiment: String,
        /// Stream new lines until the experiment ends. Stored lines of a local run follow with a
        /// delay of some seconds
        #[arg(long, short)]
        follow: bool,
        #[command(flatten)]
        lines: LogArgs,
        #[command(flatten)]
        source: SourceArgs,
        #[command(flatten)]
        storage: storage::Options,
    },
    /// Print one metric of all trials with curves, or all metrics as JSON, CSV or Parquet
    ///
    /// The table has a line for each trial, best first: number of values, batches trained, first,
    /// best and last value, and the curve. `--output json` prints the rows of all trials, one JSON
    /// object per line. `--output csv` prints one line per value, and `--output parquet` a binary
    /// file with one row per value.
    #[command(after_help = SOURCE_HELP)]
    Metrics {
        /// Experiment name; for local runs also a run ID
        #[arg(value_parser = parse_name)]
        experiment: String,
        #[command(flatten)]
        metrics: MetricsArgs,
        #[command(flatten)]
        source: SourceArgs,
        #[command(flatten)]
        storage: storage::Options,
    },
    /// Pause experiments: trials checkpoint and exit, and can resume later
    ///
    /// A local run stays paused until `activate`: `stoker run FILE` then waits.
    #[command(after_help = ACTION_HELP)]
    Pause(Target),
    /// Resume paused experiments
    ///
    /// For a local run without a runner, run `stoker run FILE` again afterwards.
    #[command(after_help = ACTION_HELP)]
    Activate(Target),
    /// Continue trials that have ended, from their checkpoints
    ///
    /// Without --failed, continues trials whose program ended cleanly before the granted length,
    /// and trials that a limit has stopped. Their restarts count from zero, and the search counts
    /// their new results. A trial without a checkpoint trains from scratch. For a local run, run
    /// `stoker run FILE` again afterwards.
    #[command(after_help = ACTION_HELP)]
    Continue {
        #[command(flatten)]
        names: ExperimentNames,
        /// Continue trials that failed instead
        #[arg(long)]
        failed: bool,
        #[command(flatten)]
        source: SourceArgs,
    },
    /// Cancel experiments permanently: trials checkpoint and exit
    #[command(after_help = ACTION_HELP)]
    Cancel(Target),
    /// Kill experiments permanently and immediately, without checkpoints
    #[command(after_help = ACTION_HELP)]
    Kill(Target),
    /// Wait until experiments end; the exit code reports the outcome
    ///
    /// For a local run, also waits until its runner has exited. Ends with code 3 if the runner
    /// exits before the experiment has ended.
    #[command(after_help = WAIT_HELP)]
    Wait {
        #[command(flatten)]
        on: Target,
        /// Maximum wait, such as 90s, 5m or 1h30m [default: no limit]
        #[arg(long, value_name = "DURATION", value_parser = text::parse_length)]
        timeout: Option<Duration>,
    },
    /// Delete experiments and their trials
    ///
    /// On a cluster, their files in the storage remain. Of a local run, the record, checkpoints,
    /// metrics and logs are deleted; a run with a runner is refused. Repeat the command if it was
    /// interrupted.
    #[command(after_help = ACTION_HELP)]
    Delete(Target),
}

/// Arguments of commands that change experiments or wait for them.
#[derive(Debug, Args)]
pub(crate) struct Target {
    #[command(flatten)]
    names: ExperimentNames,
    #[command(flatten)]
    source: SourceArgs,
}

/// Runs `stoker experiment ...` and returns the exit code.
pub(crate) fn experiment(command: &ExperimentCommand, output: Output) -> Result<u8, Failure> {
    use ExperimentCommand as C;
    let is_local = match command {
        C::List { source, all_namespaces, .. } => !source.is_cluster() && !all_namespaces,
        C::Describe { source, .. }
        | C::Logs { source, .. }
        | C::Metrics { source, .. }
        | C::Continue { source, .. } => !source.is_cluster(),
        C::Pause(on)
        | C::Activate(on)
        | C::Cancel(on)
        | C::Kill(on)
        | C::Wait { on, .. }
        | C::Delete(on) => !on.source.is_cluster(),
        C::Create(_) => false,
    };
    match is_local {
        true => block_on(locally(command, output)),
        false => block_on(on_cluster(command, output)),
    }
}

fn reopened(failed: bool) -> ReopenedTrials {
    if failed { ReopenedTrials::Failed } else { ReopenedTrials::Stopped }
}

async fn locally(command: &ExperimentCommand, output: Output) -> Result<u8, Failure> {
    use ExperimentCommand as C;
    match command {
        C::List { list: args, source, .. } => {
            let read = async || show::experiments(source.root()).await;
            done(list::list(args, read).await)
        }
        C::Describe { names, show: args, source } => {
            let show = async |name: &String| {
                show::describe_experiment(source.root(), name, args.output).await
            };
            show_each(&names.experiments, args.output, show).await
        }
        C::Continue { names, failed, source } => {
            let act = async |name: &String| {
                let trials = reopened(*failed);
                done(show::continue_experiment(source.root(), name, trials, output).await)
            };
            for_each(&names.experiments, output, act).await
        }
        C::Logs { experiment, follow, lines, source, .. } => {
            let lines = (*follow, *lines);
            done(show::experiment_logs(source.root(), experiment, lines, output).await)
        }
        C::Wait { on, timeout } => {
            let act =
                async |name: &String| show::wait(on.source.root(), name, *timeout, output).await;
            for_all(&on.names.experiments, output, act).await
        }
        C::Delete(on) => {
            let act =
                async |name: &String| done(show::delete(on.source.root(), name, output).await);
            for_each(&on.names.experiments, output, act).await
        }
        C::Metrics { experiment, metrics: args, source, .. } => {
            let files = show::metrics_files(source.root(), experiment, None).await?;
            done(metrics::print_experiment(&files, args).await)
        }
        _ => on_cluster(command, output).await,
    }
}

async fn on_cluster(command: &ExperimentCommand, output: Output) -> Result<u8, Failure> {
    use ExperimentCommand as C;
    match command {
        C::Create(args) => create::create(args, output).await,
        C::List { list: args, source, all_namespaces } => {
            let cluster = Cluster::connect(&source.cluster).await?;
            let read = async || experiment::list(&cluster, *all_namespaces, args.selector()).await;
            done(list::list(args, read).await)
        }
        C::Describe { names, show: args, source } => {
            let cluster = Cluster::connect(&source.cluster).await?;
            let show =
                async |name: &String| experiment::describe(&cluster, name, args.output).await;
            show_each(&names.experiments, args.output, show).await
        }
        C::Continue { names, failed, source } => {
            let cluster = Cluster::connect(&source.cluster).await?;
            let act = async |name: &String| {
                let trials = reopened(*failed);
                done(reopen::continue_on_cluster(&cluster, name, trials, output).await)
            };
            for_each(&names.experiments, output, act).await
        }
        C::Logs { experiment, follow, lines, source, storage } => {
            let cluster = Cluster::connect(&source.cluster).await?;
            let lines = (*follow, *lines);
            logs::experiment(&cluster, experiment, storage, lines, output).await
        }
        C::Metrics { experiment, metrics: args, source, storage } => {
            let cluster = Cluster::connect(&source.cluster).await?;
            done(cluster_metrics::experiment(&cluster, experiment, args, storage).await)
        }
        C::Wait { on, timeout } => {
            let cluster = Cluster::connect(&on.source.cluster).await?;
            let act = async |name: &String| {
                wait::wait::<Experiment>(&cluster, name, *timeout, output).await
            };
            for_all(&on.names.experiments, output, act).await
        }
        C::Delete(on) => {
            let cluster = Cluster::connect(&on.source.cluster).await?;
            let act = async |name: &String| done(experiment::delete(&cluster, name, output).await);
            for_each(&on.names.experiments, output, act).await
        }
        C::Pause(on) => set_state(on, DesiredState::Paused, output).await,
        C::Activate(on) => set_state(on, DesiredState::Active, output).await,
        C::Cancel(on) => set_state(on, DesiredState::Cancelled, output).await,
        C::Kill(on) => set_state(on, DesiredState::Killed, output).await,
    }
}

async fn set_state(on: &Target, state: DesiredState, output: Output) -> Result<u8, Failure> {
    if !on.source.is_cluster() {
        let act = async |name: &String| {
            done(show::set_state(on.source.root(), name, state, output).await)
        };
        return for_each(&on.names.experiments, output, act).await;
    }
    let cluster = Cluster::connect(&on.source.cluster).await?;
    let act = async |name: &String| {
        done(experiment::set_state::<Experiment>(&cluster, name, state, output).await)
    };
    for_each(&on.names.experiments, output, act).await
}

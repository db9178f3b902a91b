//! `stoker trial`.

use clap::Subcommand;

use super::arguments::{ShowArgs, SourceArgs};
use super::names::{TrialName, TrialNames, TrialRef, for_each, parse_name, show_each};
use super::{ACTION_HELP, SOURCE_HELP, block_on, done};
use crate::cluster::connect::Cluster;
use crate::cluster::logs::LogSelection;
use crate::cluster::logs::line::LogArgs;
use crate::cluster::{logs, metrics as cluster_metrics, storage, trial};
use crate::failure::Failure;
use crate::list::{self, ListArgs};
use crate::metrics::{self, MetricsArgs};
use crate::print::Output;
use crate::show;

/// `stoker trial ...`
#[derive(Debug, Subcommand)]
pub(crate) enum TrialCommand {
    /// List the trials of an experiment
    ///
    /// Hyperparameters have columns if they fit, and always with `--output wide`.
    #[command(after_help = SOURCE_HELP)]
    List {
        /// Experiment name; for local runs also a run ID
        #[arg(value_parser = parse_name)]
        experiment: String,
        #[command(flatten)]
        list: ListArgs,
        #[command(flatten)]
        source: SourceArgs,
    },
    /// Show trials: hyperparameters, results, attempts and checkpoints
    #[command(after_help = SOURCE_HELP)]
    Describe {
        #[command(flatten)]
        names: TrialNames,
        #[command(flatten)]
        show: ShowArgs,
        #[command(flatten)]
        source: SourceArgs,
    },
    /// Print the logs of a trial
    ///
    /// On a cluster, logs are read from the trial's pods while they exist, then from the
    /// experiment's storage. With several ranks, each line is prefixed with its rank.
    #[command(after_help = SOURCE_HELP)]
    Logs {
        #[command(flatten)]
        trial: TrialName,
        /// Attempt number [default: the latest]
        #[arg(long, value_name = "N")]
        attempt: Option<u32>,
        /// Print only the lines of this rank
        #[arg(long, value_name = "N")]
        rank: Option<u32>,
        /// Stream new lines, across attempts, until the trial ends. Stored lines of a local run
        /// follow with a delay of some seconds
        #[arg(long, short)]
        follow: bool,
        #[command(flatten)]
        lines: LogArgs,
        #[command(flatten)]
        source: SourceArgs,
        #[command(flatten)]
        storage: storage::Options,
    },
    /// Print the metrics of a trial with curves, or as JSON, CSV or Parquet
    ///
    /// The table has a line for each metric of each group: number of values, first, best and last
    /// value, and the curve. The best value of a metric that the search does not optimize is
    /// unknown: the table shows the smallest and the greatest one. `--output json` prints the rows,
    /// one JSON object per line. `--output csv` prints one line per value, and `--output parquet` a
    /// binary file with one row per value.
    #[command(after_help = SOURCE_HELP)]
    Metrics {
        #[command(flatten)]
        trial: TrialName,
        #[command(flatten)]
        metrics: MetricsArgs,
        #[command(flatten)]
        source: SourceArgs,
        #[command(flatten)]
        storage: storage::Options,
    },
    /// Kill trials permanently and immediately, without a checkpoint
    #[command(after_help = ACTION_HELP)]
    Kill {
        #[command(flatten)]
        names: TrialNames,
        #[command(flatten)]
        source: SourceArgs,
    },
}

/// Runs `stoker trial ...` and returns the exit code.
pub(crate) fn trial(command: &TrialCommand, output: Output) -> Result<u8, Failure> {
    use TrialCommand as C;
    let is_cluster = match command {
        C::List { source, .. }
        | C::Describe { source, .. }
        | C::Logs { source, .. }
        | C::Metrics { source, .. }
        | C::Kill { source, .. } => source.is_cluster(),
    };
    match is_cluster {
        true => block_on(on_cluster(command, output)),
        false => block_on(locally(command, output)),
    }
}

async fn locally(command: &TrialCommand, output: Output) -> Result<u8, Failure> {
    use TrialCommand as C;
    match command {
        C::List { experiment, list: args, source } => {
            let read = async || show::trials(source.root(), experiment).await;
            done(list::list(args, read).await)
        }
        C::Describe { names, show: args, source } => {
            let show = async |trial: &TrialRef| {
                show::describe_trial(source.root(), trial, args.output).await
            };
            show_each(&names.parse()?, args.output, show).await
        }
        C::Logs { trial, attempt, rank, follow, lines, source, .. } => {
            let selection =
                LogSelection { rank: *rank, attempt: *attempt, follow: *follow, args: *lines };
            done(show::trial_logs(source.root(), &trial.parse()?, selection, output).await)
        }
        C::Metrics { trial, metrics: args, source, .. } => {
            let trial = trial.parse()?;
            let files =
                show::metrics_files(source.root(), &trial.experiment, Some(trial.index)).await?;
            done(metrics::print_trial(&files, args).await)
        }
        C::Kill { names, source } => {
            let act =
                async |trial: &TrialRef| done(show::kill_trial(source.root(), trial, output).await);
            for_each(&names.parse()?, output, act).await
        }
    }
}

async fn on_cluster(command: &TrialCommand, output: Output) -> Result<u8, Failure> {
    use TrialCommand as C;
    match command {
        C::List { experiment, list: args, source } => {
            let cluster = Cluster::connect(&source.cluster).await?;
            let read = async || trial::list(&cluster, experiment, args.selector()).await;
            done(list::list(args, read).await)
        }
        C::Describe { names, show: args, source } => {
            let trials = names.parse()?;
            let cluster = Cluster::connect(&source.cluster).await?;
            let show = async |name: &TrialRef| {
                trial::describe(&cluster, &name.to_string(), args.output).await
            };
            show_each(&trials, args.output, show).await
        }
        C::Logs { trial, attempt, rank, follow, lines, source, storage } => {
            let trial = trial.parse()?;
            let cluster = Cluster::connect(&source.cluster).await?;
            let (rank, attempt) = (*rank, *attempt);
            let selection = LogSelection { rank, attempt, follow: *follow, args: *lines };
            done(logs::trial(&cluster, &trial.to_string(), selection, storage, output).await)
        }
        C::Metrics { trial, metrics: args, source, storage } => {
            let trial = trial.parse()?;
            let cluster = Cluster::connect(&source.cluster).await?;
            done(cluster_metrics::trial(&cluster, &trial.to_string(), args, storage).await)
        }
        C::Kill { names, source } => {
            let trials = names.parse()?;
            let cluster = Cluster::connect(&source.cluster).await?;
            let act = async |name: &TrialRef| {
                done(trial::kill(&cluster, &name.to_string(), output).await)
            };
            for_each(&trials, output, act).await
        }
    }
}

//! `stoker experiment|trial|checkpoint`: the same verbs for local runs and for a cluster.

mod arguments;
mod outcome;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use stoker_api::experiment::{DesiredState, Experiment, ReopenedTrials};

use crate::cluster::connect::{Cluster, Options};
use crate::cluster::logs::LogSelection;
use crate::cluster::{
    checkpoint, create, experiment, logs, metrics as cluster_metrics, storage, text, trial, wait,
};
use crate::failure::Failure;
use crate::metrics::{self, MetricsArgs};
use crate::print::Output;
use crate::reopen;
use crate::show;

pub(crate) use self::arguments::SourceArgs;
use self::arguments::TrialName;
pub(crate) use outcome::{block_on, done};

/// Shown below the help of all verbs that work both locally and on a cluster.
pub(crate) const SOURCE_HELP: &str = "\
Reads local runs under --root if given. Otherwise uses the cluster from --kubeconfig, KUBECONFIG, \
~/.kube/config or the pod's service account. Without any of these, reads ./.stoker.";

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
    #[command(after_help = SOURCE_HELP)]
    List {
        #[command(flatten)]
        source: SourceArgs,
        /// List experiments of all namespaces
        #[arg(
            long, short = 'A', help_heading = "Cluster", conflicts_with_all = ["root", "namespace"]
        )]
        all_namespaces: bool,
    },
    /// Show one experiment: progress, next steps, trials with reasons, importance
    ///
    /// Shows the phase and the best trial, what each bracket of the search does next, the trials
    /// with the reasons for their states, and the importance of each hyperparameter. On a cluster,
    /// also the events. `--output json` prints the complete object with its record.
    #[command(after_help = SOURCE_HELP)]
    Describe {
        /// Experiment name; for local runs also a run ID
        experiment: String,
        #[command(flatten)]
        source: SourceArgs,
    },
    /// Print the logs of all trials, each line prefixed with the trial index
    Logs {
        /// Experiment name
        experiment: String,
        /// Stream new lines until the experiment ends
        #[arg(long, short)]
        follow: bool,
        #[command(flatten)]
        cluster: Options,
        #[command(flatten)]
        storage: storage::Options,
    },
    /// Print one metric of all trials with curves, or all metrics as JSON or CSV
    ///
    /// The table has a line for each trial, best first: number of values, batches trained, first,
    /// best and last value, and the curve. `--output json` prints the rows of all trials, one JSON
    /// object per line. `--output csv` prints one line per value.
    #[command(after_help = SOURCE_HELP)]
    Metrics {
        /// Experiment name; for local runs also a run ID
        experiment: String,
        #[command(flatten)]
        metrics: MetricsArgs,
        #[command(flatten)]
        source: SourceArgs,
        #[command(flatten)]
        storage: storage::Options,
    },
    /// Pause an experiment: trials checkpoint and exit, and can resume later
    Pause(OnCluster),
    /// Resume a paused experiment
    Activate(OnCluster),
    /// Continue trials that have ended, from their checkpoints
    ///
    /// Without --failed, continues trials whose program ended cleanly before the granted length,
    /// and trials that a limit has stopped. Their restarts count from zero, and the search counts
    /// their new results. A trial without a checkpoint trains from scratch. For a local run, run
    /// `stoker run FILE` again afterwards.
    #[command(after_help = SOURCE_HELP)]
    Continue {
        /// Experiment name
        experiment: String,
        /// Continue trials that failed instead
        #[arg(long)]
        failed: bool,
        #[command(flatten)]
        source: SourceArgs,
    },
    /// Cancel an experiment permanently: trials checkpoint and exit
    Cancel(OnCluster),
    /// Kill an experiment permanently and immediately, without checkpoints
    Kill(OnCluster),
    /// Wait until an experiment ends; the exit code reports the outcome
    #[command(
        after_help = "Exit codes: 0 completed, 1 failed, 2 invalid input, 3 cancelled, deleted \
                            or timed out."
    )]
    Wait {
        #[command(flatten)]
        on: OnCluster,
        /// Maximum wait, such as 90s, 5m or 1h30m [default: no limit]
        #[arg(long, value_name = "DURATION", value_parser = text::parse_length)]
        timeout: Option<Duration>,
    },
    /// Delete an experiment and its trials; their files in the storage remain
    Delete(OnCluster),
}

/// Arguments of commands on one experiment of a cluster.
#[derive(Debug, Args)]
pub(crate) struct OnCluster {
    /// Experiment name
    experiment: String,
    #[command(flatten)]
    cluster: Options,
}

/// `stoker trial ...`
#[derive(Debug, Subcommand)]
pub(crate) enum TrialCommand {
    /// List the trials of an experiment
    #[command(after_help = SOURCE_HELP)]
    List {
        /// Experiment name; for local runs also a run ID
        experiment: String,
        #[command(flatten)]
        source: SourceArgs,
    },
    /// Show one trial: hyperparameters, results, attempts and checkpoints
    #[command(after_help = SOURCE_HELP)]
    Describe {
        #[command(flatten)]
        trial: TrialName,
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
        #[arg(long, value_name = "N", help_heading = "Cluster")]
        rank: Option<u32>,
        /// Stream new lines, across attempts, until the trial ends
        #[arg(long, short, help_heading = "Cluster")]
        follow: bool,
        #[command(flatten)]
        source: SourceArgs,
        #[command(flatten)]
        storage: storage::Options,
    },
    /// Print the metrics of a trial with curves, or as JSON or CSV
    ///
    /// The table has a line for each metric of each group: number of values, first, best and last
    /// value, and the curve. The best value of a metric that the search does not optimize is
    /// unknown: the table shows the smallest and the greatest one. `--output json` prints the rows,
    /// one JSON object per line. `--output csv` prints one line per value.
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
    /// Kill one trial permanently and immediately, without a checkpoint
    Kill {
        #[command(flatten)]
        trial: TrialName,
        #[command(flatten)]
        cluster: Options,
    },
}

/// `stoker checkpoint ...`
#[derive(Debug, Subcommand)]
pub(crate) enum CheckpointCommand {
    /// List the checkpoints of an experiment or of one trial
    #[command(after_help = SOURCE_HELP)]
    List {
        /// Experiment name; for local runs also a run ID, on a cluster also a trial name
        experiment: String,
        /// List only checkpoints of this trial
        #[arg(long, value_name = "INDEX")]
        trial: Option<u32>,
        #[command(flatten)]
        source: SourceArgs,
    },
    /// Download a checkpoint into a directory and verify its files
    ///
    /// The manifest is written last: a directory with a manifest is complete and verified.
    #[command(after_help = SOURCE_HELP)]
    Download {
        /// Trial name, EXPERIMENT-INDEX; on a cluster also an experiment name, for its best trial
        trial: String,
        /// Target directory; created if missing
        #[arg(value_name = "DIR")]
        folder: PathBuf,
        #[command(flatten)]
        choice: checkpoint::Choice,
        #[command(flatten)]
        source: SourceArgs,
        #[command(flatten)]
        storage: storage::Options,
    },
}

/// Runs `stoker experiment ...` and returns the exit code.
pub(crate) fn experiment(command: &ExperimentCommand, output: Output) -> Result<u8, Failure> {
    match command {
        ExperimentCommand::List { source, all_namespaces: false } if !source.is_cluster() => {
            return done(show::list_experiments(source.root(), output));
        }
        ExperimentCommand::Describe { experiment, source } if !source.is_cluster() => {
            return done(show::describe_experiment(source.root(), experiment, output));
        }
        ExperimentCommand::Continue { experiment, failed, source } if !source.is_cluster() => {
            let trials = reopened(*failed);
            return done(show::continue_experiment(source.root(), experiment, trials, output));
        }
        ExperimentCommand::Metrics { experiment, metrics: args, source, .. }
            if !source.is_cluster() =>
        {
            let files = show::metrics_files(source.root(), experiment, None)?;
            return done(block_on(metrics::print_experiment(&files, args)));
        }
        _ => {}
    }
    block_on(experiment_on_cluster(command, output))
}

fn reopened(failed: bool) -> ReopenedTrials {
    if failed { ReopenedTrials::Failed } else { ReopenedTrials::Stopped }
}

async fn experiment_on_cluster(command: &ExperimentCommand, output: Output) -> Result<u8, Failure> {
    use ExperimentCommand as C;
    let (on, state) = match command {
        C::Create(args) => return create::create(args, output).await,
        C::List { source, all_namespaces } => {
            let cluster = Cluster::connect(&source.cluster).await?;
            return done(experiment::list(&cluster, *all_namespaces, output).await);
        }
        C::Describe { experiment: name, source } => {
            let cluster = Cluster::connect(&source.cluster).await?;
            return done(experiment::describe(&cluster, name, output).await);
        }
        C::Continue { experiment: name, failed, source } => {
            let cluster = Cluster::connect(&source.cluster).await?;
            let trials = reopened(*failed);
            return done(reopen::continue_on_cluster(&cluster, name, trials, output).await);
        }
        C::Logs { experiment, follow, cluster, storage } => {
            let cluster = Cluster::connect(cluster).await?;
            let logs = logs::experiment(&cluster, experiment, storage, *follow, output);
            return done(logs.await);
        }
        C::Metrics { experiment, metrics: args, source, storage } => {
            let cluster = Cluster::connect(&source.cluster).await?;
            return done(cluster_metrics::experiment(&cluster, experiment, args, storage).await);
        }
        C::Wait { on, timeout } => {
            let cluster = Cluster::connect(&on.cluster).await?;
            return wait::wait::<Experiment>(&cluster, &on.experiment, *timeout, output).await;
        }
        C::Delete(on) => {
            let cluster = Cluster::connect(&on.cluster).await?;
            return done(experiment::delete(&cluster, &on.experiment, output).await);
        }
        C::Pause(on) => (on, DesiredState::Paused),
        C::Activate(on) => (on, DesiredState::Active),
        C::Cancel(on) => (on, DesiredState::Cancelled),
        C::Kill(on) => (on, DesiredState::Killed),
    };
    let cluster = Cluster::connect(&on.cluster).await?;
    done(experiment::set_state::<Experiment>(&cluster, &on.experiment, state, output).await)
}

/// Runs `stoker trial ...` and returns the exit code.
pub(crate) fn trial(command: &TrialCommand, output: Output) -> Result<u8, Failure> {
    match command {
        TrialCommand::List { experiment, source } if !source.is_cluster() => {
            return done(show::list_trials(source.root(), experiment, output));
        }
        TrialCommand::Describe { trial, source } if !source.is_cluster() => {
            let (experiment, index) = trial.split()?;
            return done(show::describe_trial(source.root(), experiment, index, output));
        }
        TrialCommand::Logs { trial, attempt, rank, follow, source, .. } if !source.is_cluster() => {
            if *follow || rank.is_some_and(|rank| rank > 0) {
                return Err(Failure::Input(
                    "--follow and --rank require a cluster: a local run stores one log per \
                     attempt for all ranks; `stoker run` shows live progress"
                        .to_owned(),
                ));
            }
            let (experiment, index) = trial.split()?;
            return done(show::logs(source.root(), experiment, index, *attempt, output));
        }
        TrialCommand::Metrics { trial, metrics: args, source, .. } if !source.is_cluster() => {
            let (experiment, index) = trial.split()?;
            let files = show::metrics_files(source.root(), experiment, Some(index))?;
            return done(block_on(metrics::print_trial(&files, args)));
        }
        _ => {}
    }
    block_on(trial_on_cluster(command, output))
}

async fn trial_on_cluster(command: &TrialCommand, output: Output) -> Result<u8, Failure> {
    done(match command {
        TrialCommand::List { experiment, source } => {
            let cluster = Cluster::connect(&source.cluster).await?;
            trial::list(&cluster, experiment, output).await
        }
        TrialCommand::Describe { trial, source } => {
            let cluster = Cluster::connect(&source.cluster).await?;
            trial::describe(&cluster, &trial.joined(), output).await
        }
        TrialCommand::Logs { trial, attempt, rank, follow, source, storage } => {
            let cluster = Cluster::connect(&source.cluster).await?;
            let selection = LogSelection { rank: *rank, attempt: *attempt, follow: *follow };
            logs::trial(&cluster, &trial.joined(), selection, storage, output).await
        }
        TrialCommand::Metrics { trial, metrics: args, source, storage } => {
            let cluster = Cluster::connect(&source.cluster).await?;
            cluster_metrics::trial(&cluster, &trial.joined(), args, storage).await
        }
        TrialCommand::Kill { trial, cluster } => {
            let cluster = Cluster::connect(cluster).await?;
            trial::kill(&cluster, &trial.joined(), output).await
        }
    })
}

/// Runs `stoker checkpoint ...` and returns the exit code.
pub(crate) fn checkpoint(command: &CheckpointCommand, output: Output) -> Result<u8, Failure> {
    match command {
        CheckpointCommand::List { experiment, trial, source } if !source.is_cluster() => {
            done(show::list_checkpoints(source.root(), experiment, *trial, output))
        }
        CheckpointCommand::List { experiment, trial, source } => block_on(async {
            let cluster = Cluster::connect(&source.cluster).await?;
            done(checkpoint::list(&cluster, experiment, *trial, output).await)
        }),
        CheckpointCommand::Download { trial, folder, choice, source, storage } => {
            if !source.is_cluster() {
                let name = TrialName { name: trial.clone(), index: None };
                let (experiment, index) = name.split()?;
                return done(block_on(show::download(
                    source.root(),
                    experiment,
                    index,
                    choice,
                    folder,
                    output,
                )));
            }
            block_on(async {
                let cluster = Cluster::connect(&source.cluster).await?;
                let download =
                    checkpoint::download(&cluster, trial, choice, storage, folder, output);
                done(download.await)
            })
        }
    }
}

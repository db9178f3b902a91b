//! `stoker experiment|trial|checkpoint`: one set of verbs, for runs on this machine and on a
//! cluster.

use std::future::Future;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use stoker_api::experiment::{DesiredState, Experiment};

use crate::cluster::connect::{Cluster, Options};
use crate::cluster::logs::Wanted;
use crate::cluster::{checkpoint, create, experiment, logs, storage, text, trial, wait};
use crate::failure::Failure;
use crate::print::Output;
use crate::show;

/// Said below the help of all verbs that know both places.
const WHERE: &str = "\
Where to look: with --root at what `stoker run` left there; else in the cluster that --kubeconfig, \
KUBECONFIG, ~/.kube/config or, in a pod, its service account name; else, where there is none of \
them, at ./.stoker.";

/// Where to look.
#[derive(Clone, Debug, Args)]
pub(crate) struct Where {
    /// What `stoker run` was given as --root, or the file's checkpointStorage.url: a folder or a
    /// bucket's URL
    #[arg(long, value_name = "URL", conflicts_with_all = ["kubeconfig", "context", "namespace"])]
    root: Option<String>,
    #[command(flatten)]
    cluster: Options,
}

impl Where {
    fn is_cluster(&self) -> bool {
        self.root.is_none() && self.cluster.is_any()
    }

    fn root(&self) -> Option<&str> {
        self.root.as_deref()
    }
}

/// A trial: `mnist-3`, or `mnist 3`.
#[derive(Clone, Debug, Args)]
pub(crate) struct TrialName {
    /// The trial's name, EXPERIMENT-INDEX, or the experiment's name followed by INDEX
    #[arg(value_name = "TRIAL")]
    name: String,
    /// The trial's index, where TRIAL is an experiment
    index: Option<u32>,
}

impl TrialName {
    /// On a cluster a trial has one name.
    fn joined(&self) -> String {
        match self.index {
            Some(index) => format!("{}-{index}", self.name),
            None => self.name.clone(),
        }
    }

    /// Experiment and index.
    fn split(&self) -> Result<(&str, u32), Failure> {
        let parsed = || {
            let (name, index) = self.name.rsplit_once('-')?;
            Some((name, index.parse().ok()?))
        };
        self.index.map(|index| (self.name.as_str(), index)).or_else(parsed).ok_or_else(|| {
            Failure::Input(format!(
                "`{}` names no trial: write EXPERIMENT-INDEX, such as {}-0",
                self.name, self.name
            ))
        })
    }
}

/// `stoker experiment ...`
#[derive(Debug, Subcommand)]
pub(crate) enum ExperimentCommand {
    /// Create an experiment on a cluster, with the program's files if need be
    ///
    /// The file is checked as `stoker validate` does, then by the cluster. Files go to the
    /// experiment's storage as NAMESPACE/contexts/SHA256.tar.gz, once for the same content, with
    /// the credentials of this environment.
    Create(Box<create::Args>),
    /// List all experiments
    #[command(after_help = WHERE)]
    List {
        #[command(flatten)]
        at: Where,
        /// Those of all namespaces
        #[arg(
            long, short = 'A', help_heading = "Cluster", conflicts_with_all = ["root", "namespace"]
        )]
        all_namespaces: bool,
    },
    /// Show one experiment: what it searches, how it is going, its trials
    #[command(after_help = WHERE)]
    Describe {
        /// The experiment's name; of runs on this machine also a run's id
        experiment: String,
        #[command(flatten)]
        at: Where,
    },
    /// Print what the programs of all trials printed, each line with its trial's index
    Logs {
        /// The experiment's name
        experiment: String,
        /// Go on until the experiment has ended
        #[arg(long, short)]
        follow: bool,
        #[command(flatten)]
        cluster: Options,
        #[command(flatten)]
        storage: storage::Options,
    },
    /// Pause: trials take a checkpoint and exit, and go on from it later
    Pause(OnCluster),
    /// Go on with a paused experiment
    Activate(OnCluster),
    /// End an experiment: trials take a checkpoint and exit. There is no way back
    Cancel(OnCluster),
    /// End an experiment at once, without checkpoints. There is no way back
    Kill(OnCluster),
    /// Wait until an experiment has ended; the exit code is that of its end
    #[command(
        after_help = "Exit codes: 0 completed, 1 failed, 2 the input is wrong, 3 cancelled, \
                            deleted or not ended in time."
    )]
    Wait {
        #[command(flatten)]
        on: OnCluster,
        /// How long at most, such as 90s, 5m or 1h30m [default: for ever]
        #[arg(long, value_name = "LENGTH", value_parser = text::parse_length)]
        timeout: Option<Duration>,
    },
    /// Delete an experiment and its trials; what they stored stays
    Delete(OnCluster),
}

/// An experiment on a cluster.
#[derive(Debug, Args)]
pub(crate) struct OnCluster {
    /// The experiment's name
    experiment: String,
    #[command(flatten)]
    cluster: Options,
}

/// `stoker trial ...`
#[derive(Debug, Subcommand)]
pub(crate) enum TrialCommand {
    /// List the trials of an experiment
    #[command(after_help = WHERE)]
    List {
        /// The experiment's name; of runs on this machine also a run's id
        experiment: String,
        #[command(flatten)]
        at: Where,
    },
    /// Show one trial: hyperparameters, results, attempts, checkpoints
    #[command(after_help = WHERE)]
    Describe {
        #[command(flatten)]
        trial: TrialName,
        #[command(flatten)]
        at: Where,
    },
    /// Print what a trial's program printed
    ///
    /// On a cluster the lines come from the trial's pods while those are there, later from the
    /// experiment's storage. Where there are several ranks, each line says its own.
    #[command(after_help = WHERE)]
    Logs {
        #[command(flatten)]
        trial: TrialName,
        /// The attempt's number [default: the latest]
        #[arg(long, value_name = "N")]
        attempt: Option<u32>,
        /// Only the lines of this rank
        #[arg(long, value_name = "N", help_heading = "Cluster")]
        rank: Option<u32>,
        /// Go on, over all attempts, until the trial has ended
        #[arg(long, short, help_heading = "Cluster")]
        follow: bool,
        #[command(flatten)]
        at: Where,
        #[command(flatten)]
        storage: storage::Options,
    },
    /// End one trial at once, without a checkpoint. There is no way back
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
    #[command(after_help = WHERE)]
    List {
        /// The experiment's name; of runs on this machine also a run's id, on a cluster also a
        /// trial's name
        experiment: String,
        /// Only those of this trial
        #[arg(long, value_name = "INDEX")]
        trial: Option<u32>,
        #[command(flatten)]
        at: Where,
    },
    /// Download a checkpoint's files, each checked, into a folder
    ///
    /// The manifest is written last: a folder that has one is whole.
    #[command(after_help = WHERE)]
    Download {
        /// The trial's name, EXPERIMENT-INDEX; on a cluster also an experiment's, for its best
        /// trial
        trial: String,
        /// The folder; made if it is missing
        #[arg(value_name = "DIR")]
        folder: PathBuf,
        #[command(flatten)]
        choice: checkpoint::Choice,
        #[command(flatten)]
        at: Where,
        #[command(flatten)]
        storage: storage::Options,
    },
}

/// Carries out `stoker experiment ...`; returns the exit code.
pub(crate) fn experiment(command: &ExperimentCommand, output: Output) -> Result<u8, Failure> {
    match command {
        ExperimentCommand::List { at, all_namespaces: false } if !at.is_cluster() => {
            return done(show::list_experiments(at.root(), output));
        }
        ExperimentCommand::Describe { experiment, at } if !at.is_cluster() => {
            return done(show::describe_experiment(at.root(), experiment, output));
        }
        _ => {}
    }
    block_on(experiment_on_cluster(command, output))
}

async fn experiment_on_cluster(command: &ExperimentCommand, output: Output) -> Result<u8, Failure> {
    use ExperimentCommand as C;
    let (on, state) = match command {
        C::Create(args) => return create::create(args, output).await,
        C::List { at, all_namespaces } => {
            let cluster = Cluster::connect(&at.cluster).await?;
            return done(experiment::list(&cluster, *all_namespaces, output).await);
        }
        C::Describe { experiment: name, at } => {
            let cluster = Cluster::connect(&at.cluster).await?;
            return done(experiment::describe(&cluster, name, output).await);
        }
        C::Logs { experiment, follow, cluster, storage } => {
            let cluster = Cluster::connect(cluster).await?;
            let logs = logs::experiment(&cluster, experiment, storage, *follow, output);
            return done(logs.await);
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

/// Carries out `stoker trial ...`; returns the exit code.
pub(crate) fn trial(command: &TrialCommand, output: Output) -> Result<u8, Failure> {
    match command {
        TrialCommand::List { experiment, at } if !at.is_cluster() => {
            return done(show::list_trials(at.root(), experiment, output));
        }
        TrialCommand::Describe { trial, at } if !at.is_cluster() => {
            let (experiment, index) = trial.split()?;
            return done(show::describe_trial(at.root(), experiment, index, output));
        }
        TrialCommand::Logs { trial, attempt, rank, follow, at, .. } if !at.is_cluster() => {
            if *follow || rank.is_some_and(|it| it > 0) {
                return Err(Failure::Input(
                    "--follow and --rank are for trials on a cluster: a run on this machine has \
                     rank 0 alone, and `stoker run` itself shows how it is going"
                        .to_owned(),
                ));
            }
            let (experiment, index) = trial.split()?;
            return done(show::logs(at.root(), experiment, index, *attempt, output));
        }
        _ => {}
    }
    block_on(trial_on_cluster(command, output))
}

async fn trial_on_cluster(command: &TrialCommand, output: Output) -> Result<u8, Failure> {
    done(match command {
        TrialCommand::List { experiment, at } => {
            let cluster = Cluster::connect(&at.cluster).await?;
            trial::list(&cluster, experiment, output).await
        }
        TrialCommand::Describe { trial, at } => {
            let cluster = Cluster::connect(&at.cluster).await?;
            trial::describe(&cluster, &trial.joined(), output).await
        }
        TrialCommand::Logs { trial, attempt, rank, follow, at, storage } => {
            let cluster = Cluster::connect(&at.cluster).await?;
            let wanted = Wanted { rank: *rank, attempt: *attempt, follow: *follow };
            logs::trial(&cluster, &trial.joined(), wanted, storage, output).await
        }
        TrialCommand::Kill { trial, cluster } => {
            let cluster = Cluster::connect(cluster).await?;
            trial::kill(&cluster, &trial.joined(), output).await
        }
    })
}

/// Carries out `stoker checkpoint ...`; returns the exit code.
pub(crate) fn checkpoint(command: &CheckpointCommand, output: Output) -> Result<u8, Failure> {
    match command {
        CheckpointCommand::List { experiment, trial, at } if !at.is_cluster() => {
            done(show::list_checkpoints(at.root(), experiment, *trial, output))
        }
        CheckpointCommand::List { experiment, trial, at } => block_on(async {
            let cluster = Cluster::connect(&at.cluster).await?;
            done(checkpoint::list(&cluster, experiment, *trial, output).await)
        }),
        CheckpointCommand::Download { trial, folder, choice, at, storage } => {
            if !at.is_cluster() {
                let name = TrialName { name: trial.clone(), index: None };
                let (experiment, index) = name.split()?;
                return done(block_on(show::download(
                    at.root(),
                    experiment,
                    index,
                    choice,
                    folder,
                    output,
                )));
            }
            block_on(async {
                let cluster = Cluster::connect(&at.cluster).await?;
                let download =
                    checkpoint::download(&cluster, trial, choice, storage, folder, output);
                done(download.await)
            })
        }
    }
}

/// The exit code of what has gone well.
pub(crate) fn done(result: Result<(), Failure>) -> Result<u8, Failure> {
    result.map(|()| 0)
}

/// Runs `future` to its end.
pub(crate) fn block_on<T>(future: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::System(format!("cannot start: {error}")))?
        .block_on(future)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(name: &str, index: Option<u32>, joined: &str, split: Option<(&str, u32)>) {
        let trial = TrialName { name: name.to_owned(), index };
        assert_eq!(trial.joined(), joined);
        assert_eq!(trial.split().ok(), split, "{name} {index:?}");
    }

    #[test]
    fn a_trial_is_named_in_one_word_or_two() {
        check("mnist-3", None, "mnist-3", Some(("mnist", 3)));
        check("mnist", Some(3), "mnist-3", Some(("mnist", 3)));
        check("a-b-12", None, "a-b-12", Some(("a-b", 12)));
        check("mnist-0b3f9c1e", Some(3), "mnist-0b3f9c1e-3", Some(("mnist-0b3f9c1e", 3)));
        check("mnist", None, "mnist", None);
    }
}

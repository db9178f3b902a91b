//! `stoker checkpoint`.

use std::path::PathBuf;

use clap::Subcommand;

use super::arguments::SourceArgs;
use super::names::parse_name;
use super::{SOURCE_HELP, block_on, done};
use crate::cluster::connect::Cluster;
use crate::cluster::{checkpoint, storage};
use crate::failure::Failure;
use crate::list::{self, OrderArgs};
use crate::print::Output;
use crate::show;

/// `stoker checkpoint ...`
#[derive(Debug, Subcommand)]
pub(crate) enum CheckpointCommand {
    /// List the checkpoints of an experiment or of one trial
    ///
    /// `--output name` prints the names that `stoker checkpoint download` accepts.
    #[command(after_help = SOURCE_HELP)]
    List {
        /// Name of an experiment or a trial; for local runs also a run ID
        #[arg(value_name = "NAME", value_parser = parse_name)]
        name: String,
        /// List only checkpoints of this trial
        #[arg(long, value_name = "INDEX")]
        trial: Option<u32>,
        #[command(flatten)]
        list: OrderArgs,
        #[command(flatten)]
        source: SourceArgs,
    },
    /// Download a checkpoint into a directory and verify its files
    ///
    /// The manifest is written last: a directory with a manifest is complete and verified.
    #[command(after_help = SOURCE_HELP)]
    Download {
        /// Name of a checkpoint, TRIAL/CHECKPOINT, as in `checkpoint list --output name`. A trial
        /// stands for its best checkpoint, and an experiment for its best trial
        #[arg(value_name = "NAME", value_parser = parse_name)]
        name: String,
        /// Target directory; created if missing. It must be empty, except for files of an
        /// interrupted download of this checkpoint
        #[arg(long, value_name = "DIR")]
        to: PathBuf,
        #[command(flatten)]
        choice: checkpoint::Choice,
        #[command(flatten)]
        source: SourceArgs,
        #[command(flatten)]
        storage: storage::Options,
    },
}

/// Runs `stoker checkpoint ...` and returns the exit code.
pub(crate) fn checkpoint(command: &CheckpointCommand, output: Output) -> Result<u8, Failure> {
    use CheckpointCommand as C;
    block_on(async {
        match command {
            C::List { name, trial, list: args, source } if !source.is_cluster() => {
                let read = async || show::checkpoints(source.root(), name, *trial).await;
                done(list::list_in_order(args, read).await)
            }
            C::List { name, trial, list: args, source } => {
                let cluster = Cluster::connect(&source.cluster).await?;
                let read = async || checkpoint::list(&cluster, name, *trial).await;
                done(list::list_in_order(args, read).await)
            }
            C::Download { name, to, choice, source, .. } if !source.is_cluster() => {
                done(show::download(source.root(), name, choice, to, output).await)
            }
            C::Download { name, to, choice, source, storage } => {
                let cluster = Cluster::connect(&source.cluster).await?;
                let download = checkpoint::download(&cluster, name, choice, storage, to, output);
                done(download.await)
            }
        }
    })
}

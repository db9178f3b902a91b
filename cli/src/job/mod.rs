//! `stoker job`: inference jobs, on this machine and on a cluster.
//!
//! `stoker job run` is a whole job on this machine:
//!
//! ```text
//!  file -> record -> next (engine) -> start a process -> its end -> record -> next ...
//! ```
//!
//! What is done lies in the output folder, put there by the processes; the record holds little more than the count of
//! processes started. A runner killed at any moment goes on from both.

mod record;
mod runner;
mod view;

use std::path::PathBuf;
use std::time::Duration;

use clap::Subcommand;
use stoker_api::experiment::{DesiredState, Phase};
use stoker_api::inference::InferenceJob;
use stoker_engine::inference;
use stoker_storage::Storage;

use self::record::Opened;
use self::runner::{Job, Runner};
use self::view::View;
use crate::cluster::connect::{Cluster, Options};
use crate::cluster::{create, experiment, job as jobs, logs, storage, text, wait};
use crate::commands::{block_on, done};
use crate::failure::Failure;
use crate::file::{self, LoadedJob};
use crate::place::Place;
use crate::print::Output;
use crate::run::gpus;
use crate::run::setup::find_program;
use crate::run::signals::Signals;

/// `stoker job ...`
#[derive(Debug, Subcommand)]
pub(crate) enum JobCommand {
    /// Run a whole job here, without a cluster
    ///
    /// Workers run as processes, one for each slot. Killed or stopped by Ctrl-C, the same command
    /// goes on with the shards that are not committed. The output's manifest.json names one part
    /// for each shard; the last line of `--output json` says where it is.
    Run(Args),
    /// Create a job on a cluster, with the program's files if need be
    ///
    /// The file is checked as `stoker validate` does, then by the cluster. Files go to the job's
    /// storage as NAMESPACE/contexts/SHA256.tar.gz, once for the same content, with the credentials
    /// of this environment.
    Create(Box<create::JobArgs>),
    /// List all jobs of a cluster
    List {
        #[command(flatten)]
        cluster: Options,
        /// Those of all namespaces
        #[arg(long, short = 'A', help_heading = "Cluster", conflicts_with = "namespace")]
        all_namespaces: bool,
    },
    /// Show one job: what it reads and writes, how it is going, what went wrong
    Describe(OnCluster),
    /// Print what the processes of a job printed, each line with its slot
    ///
    /// The lines come from the pods while those are there, later from the job's storage.
    Logs {
        #[command(flatten)]
        on: OnCluster,
        /// Only the lines of this slot
        #[arg(long, value_name = "N")]
        slot: Option<u32>,
        /// Go on until the job has ended
        #[arg(long, short)]
        follow: bool,
        #[command(flatten)]
        storage: storage::Options,
    },
    /// Pause: workers exit after the batch that they are at; what is committed stays
    Pause(OnCluster),
    /// Go on with a paused job
    Activate(OnCluster),
    /// End a job: workers exit after the batch that they are at. There is no way back
    Cancel(OnCluster),
    /// End a job at once. There is no way back
    Kill(OnCluster),
    /// Wait until a job has ended; the exit code is that of its end
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
    /// Delete a job and its pods; what they stored stays
    Delete(OnCluster),
}

/// A job on a cluster.
#[derive(Debug, clap::Args)]
pub(crate) struct OnCluster {
    /// The job's name
    job: String,
    #[command(flatten)]
    cluster: Options,
}

/// What `stoker job run` is asked to do.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The job's file (YAML)
    file: PathBuf,
    /// The program's working folder, from which relative paths in the file are taken [default: this one]
    #[arg(value_name = "DIR")]
    folder: Option<PathBuf>,
    /// Where trials are looked for, and logs and the output go unless the file says otherwise: a
    /// folder, or s3://, gs:// or az:// BUCKET/PREFIX. Default: the file's storage.url, or else
    /// ./.stoker
    #[arg(long, value_name = "URL")]
    root: Option<String>,
    /// Workers at a time [default: the file's resources.slots]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    slots: Option<u32>,
    /// Start over instead of going on with an earlier run, and replace the output of another job
    #[arg(long)]
    fresh: bool,
    /// Change a field of the file before it is read, such as resources.slots=4; may be given more
    /// than once
    #[arg(long, value_name = "PATH=VALUE")]
    set: Vec<String>,
}

/// Carries out `stoker job ...`; returns the exit code.
pub(crate) fn job(command: &JobCommand, output: Output) -> Result<u8, Failure> {
    let JobCommand::Run(args) = command else { return block_on(on_cluster(command, output)) };
    let loaded = match file::load_job(&args.file, &args.set) {
        Ok(loaded) => loaded,
        Err(error) => return Ok(crate::validate::print_error(&error, output)),
    };
    block_on(run(args, output, loaded))
}

async fn on_cluster(command: &JobCommand, output: Output) -> Result<u8, Failure> {
    use JobCommand as C;
    let (on, state) = match command {
        C::Run(_) => return Ok(0),
        C::Create(args) => return create::create_job(args, output).await,
        C::List { cluster, all_namespaces } => {
            let cluster = Cluster::connect(cluster).await?;
            return done(jobs::list(&cluster, *all_namespaces, output).await);
        }
        C::Describe(on) => {
            let cluster = Cluster::connect(&on.cluster).await?;
            return done(jobs::describe(&cluster, &on.job, output).await);
        }
        C::Logs { on, slot, follow, storage } => {
            let cluster = Cluster::connect(&on.cluster).await?;
            return done(logs::job(&cluster, &on.job, *slot, *follow, storage, output).await);
        }
        C::Wait { on, timeout } => {
            let cluster = Cluster::connect(&on.cluster).await?;
            return wait::wait::<InferenceJob>(&cluster, &on.job, *timeout, output).await;
        }
        C::Delete(on) => {
            let cluster = Cluster::connect(&on.cluster).await?;
            return done(jobs::delete(&cluster, &on.job, output).await);
        }
        C::Pause(on) => (on, DesiredState::Paused),
        C::Activate(on) => (on, DesiredState::Active),
        C::Cancel(on) => (on, DesiredState::Cancelled),
        C::Kill(on) => (on, DesiredState::Killed),
    };
    let cluster = Cluster::connect(&on.cluster).await?;
    done(experiment::set_state::<InferenceJob>(&cluster, &on.job, state, output).await)
}

async fn run(args: &Args, output: Output, loaded: LoadedJob) -> Result<u8, Failure> {
    let mut view = View::new(output);
    let spec = &loaded.valid.spec;
    let folder = folder(args)?;
    check_program(spec.entrypoint.command.first().map_or("", String::as_str), &folder)?;
    let place = Place::resolve(args.root.as_deref(), spec.storage.url.as_deref())?;
    let input = |error: stoker_storage::StorageError| Failure::Input(error.to_string());
    let storage = Storage::open(&place.root, spec.storage.endpoint.as_deref()).map_err(input)?;
    storage.probe().await?;
    let slots = args.slots.unwrap_or(spec.resources.slots);
    let opened = record::open(&place, &loaded, &folder, args.fresh)?;
    view.say(&greeting(&opened, &place));
    let Opened { mut record, _lock, trainers, .. } = opened;
    let url = record.output_url(&place, spec, &folder);
    let endpoint =
        spec.output.url.as_ref().map_or(&spec.storage.endpoint, |_| &spec.output.endpoint);
    let out = Storage::open(&url, endpoint.as_deref()).map_err(input)?;
    inference::resume(record.status(), slots);
    record.save()?;
    let mut signals = Signals::listen()?;
    let devices = gpus::detect(&spec.env).await;
    let lock = trainers;
    let job = Job { loaded: &loaded, folder, place, storage, output: out, lock, record, devices };
    Runner::new(job).run(&mut signals, &mut view).await
}

fn folder(args: &Args) -> Result<PathBuf, Failure> {
    let folder = args.folder.clone().unwrap_or_else(|| PathBuf::from("."));
    match folder.canonicalize() {
        Ok(folder) if folder.is_dir() => Ok(folder),
        Ok(_) => Err(Failure::Input(format!("{} is no folder", folder.display()))),
        Err(error) => Err(Failure::Input(format!("the folder {}: {error}", folder.display()))),
    }
}

fn check_program(program: &str, folder: &std::path::Path) -> Result<(), Failure> {
    let path = match program.contains('/') {
        true => folder.join(program).display().to_string(),
        false => program.to_owned(),
    };
    match find_program(&path) {
        Some(_) => Ok(()),
        None => Err(Failure::Input(format!(
            "spec.entrypoint.command[0] is `{program}`: no such program in {}, beside `stoker` or on \
             PATH; build it or write its path",
            folder.display()
        ))),
    }
}

fn greeting(opened: &Opened, place: &Place) -> String {
    let id = opened.record.id();
    let what = match opened.record.phase() {
        _ if !opened.is_continued => format!("new job {id}"),
        Phase::Completed => format!("{id} has completed already; --fresh starts over"),
        Phase::Failed => format!("{id} has failed; trying again with what is committed"),
        _ => format!("going on with {id}"),
    };
    format!("{what}; logs in {}, record in {}", place.root, opened.record.path().display())
}

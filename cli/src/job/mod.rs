//! `stoker job`: inference jobs, locally and on a cluster.
//!
//! `stoker job run` runs a job locally:
//!
//! ```text
//!  file -> record -> next (engine) -> start a process -> process exits -> record -> next ...
//! ```
//!
//! The processes write results and commits to the output directory. The record holds little more
//! than the number of processes started. A killed runner resumes from both.

mod completed;
mod local;
mod manifest;
pub(crate) mod record;
mod runner;
mod steer;
mod view;

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Subcommand;
use stoker_api::experiment::{DesiredState, Phase};
use stoker_api::inference::{InferenceJob, OutputManifest};
use stoker_storage::Storage;

use self::completed::CompletedJob;
use self::record::{OpenedRecord, Record};
use self::runner::{Runner, RunnerConfig};
use self::view::View;
use crate::cluster::connect::Cluster;
use crate::cluster::logs::line::LogArgs;
use crate::cluster::{create, experiment, job as jobs, logs, storage, text, wait};
use crate::commands::names::{JobNames, for_all, for_each, parse_name, show_each};
use crate::commands::{ACTION_HELP, SOURCE_HELP, ShowArgs, SourceArgs, WAIT_HELP, block_on, done};
use crate::endpoint;
use crate::failure::Failure;
use crate::file::{self, FileError, LoadedJob};
use crate::list::{self, ListArgs};
use crate::print::{Output, background};
use crate::run::gpus;
use crate::run::open_files;
use crate::run::programs::require_program;
use crate::run::signals::{self, Signals};
use crate::run_root::RunRoot;

/// `stoker job ...`
#[derive(Debug, Subcommand)]
pub(crate) enum JobCommand {
    /// Run a job locally, without a cluster
    ///
    /// Workers run as processes, one per slot. After a kill or Ctrl-C, run the same command again
    /// to resume with the uncommitted shards. The output's manifest.json lists one part per shard.
    /// The last line of `--output json` contains its path. A job that `stoker job pause` has paused
    /// waits for `stoker job activate`. A resumed job accepts changes of fields that do not affect
    /// committed shards, such as env, maxRestarts, resources, and onError from fail to skip.
    Run(Args),
    /// Create a job on a cluster and upload the program's files, if given
    ///
    /// The file is validated like `stoker validate` does, then by the cluster. The program's files
    /// are stored as NAMESPACE/contexts/SHA256.tar.gz in the job's storage. The same content is
    /// uploaded only once. The upload uses credentials from the environment.
    Create(Box<create::JobArgs>),
    /// List jobs
    ///
    /// Of several local runs with one name, the latest is listed by the name and the others by
    /// their run IDs. The phase `Stopped` means that a local run has not ended, but no
    /// `stoker job run` works on it.
    #[command(after_help = SOURCE_HELP)]
    List {
        #[command(flatten)]
        list: ListArgs,
        #[command(flatten)]
        source: SourceArgs,
        /// List jobs of all namespaces
        #[arg(
            long, short = 'A', help_heading = "Cluster", conflicts_with_all = ["root", "namespace"]
        )]
        all_namespaces: bool,
    },
    /// Show jobs: input, output, progress and failures
    #[command(after_help = SOURCE_HELP)]
    Describe {
        #[command(flatten)]
        names: JobNames,
        #[command(flatten)]
        show: ShowArgs,
        #[command(flatten)]
        source: SourceArgs,
    },
    /// Print the logs of a job, each line prefixed with its slot
    ///
    /// Logs are read from the pods while they exist, then from the job's storage.
    #[command(after_help = SOURCE_HELP)]
    Logs {
        /// Job name; for local runs also a run ID
        #[arg(value_parser = parse_name)]
        job: String,
        /// Print only the lines of this slot
        #[arg(long, value_name = "N")]
        slot: Option<u32>,
        /// Stream new lines until the job ends. Stored lines of a local job follow with a delay of
        /// some seconds
        #[arg(long, short)]
        follow: bool,
        #[command(flatten)]
        lines: LogArgs,
        #[command(flatten)]
        source: SourceArgs,
        #[command(flatten)]
        storage: storage::Options,
    },
    /// Pause jobs: workers exit after their current batch; committed shards are kept
    ///
    /// A local job stays paused until `activate`: `stoker job run FILE` then waits.
    #[command(after_help = ACTION_HELP)]
    Pause(Target),
    /// Resume paused jobs
    ///
    /// For a local job without a runner, run `stoker job run FILE` again afterwards.
    #[command(after_help = ACTION_HELP)]
    Activate(Target),
    /// Cancel jobs permanently: workers exit after their current batch
    #[command(after_help = ACTION_HELP)]
    Cancel(Target),
    /// Kill jobs permanently and immediately
    #[command(after_help = ACTION_HELP)]
    Kill(Target),
    /// Wait until jobs end; the exit code reports the outcome
    ///
    /// For a local job, also waits until its runner has exited. Ends with code 3 if the runner
    /// exits before the job has ended.
    #[command(after_help = WAIT_HELP)]
    Wait {
        #[command(flatten)]
        on: Target,
        /// Maximum wait, such as 90s, 5m or 1h30m [default: no limit]
        #[arg(long, value_name = "DURATION", value_parser = text::parse_length)]
        timeout: Option<Duration>,
    },
    /// Delete jobs and their pods; their output remains
    ///
    /// On a cluster, logs remain, too. Of a local job, the record and the logs are deleted; a job
    /// with a runner is refused. Repeat the command if it was interrupted.
    #[command(after_help = ACTION_HELP)]
    Delete(Target),
}

/// Arguments of commands that change jobs or wait for them.
#[derive(Debug, clap::Args)]
pub(crate) struct Target {
    #[command(flatten)]
    names: JobNames,
    #[command(flatten)]
    source: SourceArgs,
}

/// Arguments of `stoker job run`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Job file (YAML)
    file: PathBuf,
    /// Working directory of the program; relative paths in the file are resolved against it
    /// [default: the current directory]
    #[arg(value_name = "DIR")]
    folder: Option<PathBuf>,
    /// Storage root for trials, logs and, unless the file sets output.url, the output: a directory,
    /// or s3://, gs:// or az:// BUCKET/PREFIX. Default: storage.url of the file, else ./.stoker.
    /// STOKER_STORAGE_ENDPOINT is the endpoint of s3:// addresses that have none in the file; a job
    /// keeps the endpoints that it began with
    #[arg(long, value_name = "URL")]
    root: Option<String>,
    /// Number of concurrent workers [default: resources.slots of the file]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    slots: Option<u32>,
    /// Start over instead of resuming an earlier run, and replace the output of another job
    #[arg(long)]
    fresh: bool,
    /// Override a field of the file, such as resources.slots=4; repeatable
    #[arg(long, value_name = "PATH=VALUE")]
    set: Vec<String>,
}

/// Runs `stoker job ...` and returns the exit code.
pub(crate) fn job(command: &JobCommand, output: Output) -> Result<u8, Failure> {
    use JobCommand as C;
    match command {
        C::Run(args) => match load(args) {
            Ok(loaded) => block_on(run(args, output, loaded)),
            Err(error) => Ok(crate::validate::print_error(&error, output)),
        },
        C::List { source, all_namespaces: false, .. }
        | C::Describe { source, .. }
        | C::Logs { source, .. }
            if !source.is_cluster() =>
        {
            block_on(locally(command, source.root(), output))
        }
        C::Wait { on, .. } | C::Delete(on) if !on.source.is_cluster() => {
            block_on(locally(command, on.source.root(), output))
        }
        _ => block_on(on_cluster(command, output)),
    }
}

async fn locally(command: &JobCommand, root: Option<&str>, output: Output) -> Result<u8, Failure> {
    use JobCommand as C;
    match command {
        C::List { list: args, .. } => done(list::list(args, async || local::jobs(root)).await),
        C::Describe { names, show: args, .. } => {
            let show = async |name: &String| local::describe(root, name, args.output);
            show_each(&names.jobs, args.output, show).await
        }
        C::Logs { job, slot, follow: true, lines, .. } => {
            done(steer::follow_logs(root, job, *slot, *lines, output).await)
        }
        C::Logs { job, slot, lines, .. } => {
            done(local::print_logs(root, job, *slot, *lines, output).await)
        }
        C::Wait { on, timeout } => {
            let act = async |name: &String| steer::wait(root, name, *timeout, output).await;
            for_all(&on.names.jobs, output, act).await
        }
        C::Delete(on) => {
            let act = async |name: &String| done(steer::delete(root, name, output).await);
            for_each(&on.names.jobs, output, act).await
        }
        _ => on_cluster(command, output).await,
    }
}

async fn on_cluster(command: &JobCommand, output: Output) -> Result<u8, Failure> {
    use JobCommand as C;
    match command {
        C::Run(_) => Ok(0),
        C::Create(args) => create::create_job(args, output).await,
        C::List { list: args, source, all_namespaces } => {
            let cluster = Cluster::connect(&source.cluster).await?;
            let read = async || jobs::list(&cluster, *all_namespaces, args.selector()).await;
            done(list::list(args, read).await)
        }
        C::Describe { names, show: args, source } => {
            let cluster = Cluster::connect(&source.cluster).await?;
            let show = async |name: &String| jobs::describe(&cluster, name, args.output).await;
            show_each(&names.jobs, args.output, show).await
        }
        C::Logs { job, slot, follow, lines, source, storage } => {
            let cluster = Cluster::connect(&source.cluster).await?;
            let lines = (*follow, *lines);
            done(logs::job(&cluster, job, *slot, lines, storage, output).await)
        }
        C::Wait { on, timeout } => {
            let cluster = Cluster::connect(&on.source.cluster).await?;
            let act = async |name: &String| {
                wait::wait::<InferenceJob>(&cluster, name, *timeout, output).await
            };
            for_all(&on.names.jobs, output, act).await
        }
        C::Delete(on) => {
            let cluster = Cluster::connect(&on.source.cluster).await?;
            let act = async |name: &String| done(jobs::delete(&cluster, name, output).await);
            for_each(&on.names.jobs, output, act).await
        }
        C::Pause(on) => set_state(on, DesiredState::Paused, output).await,
        C::Activate(on) => set_state(on, DesiredState::Active, output).await,
        C::Cancel(on) => set_state(on, DesiredState::Cancelled, output).await,
        C::Kill(on) => set_state(on, DesiredState::Killed, output).await,
    }
}

async fn set_state(on: &Target, state: DesiredState, output: Output) -> Result<u8, Failure> {
    if !on.source.is_cluster() {
        let root = on.source.root();
        let act = async |name: &String| done(steer::set_state(root, name, state, output));
        return for_each(&on.names.jobs, output, act).await;
    }
    let cluster = Cluster::connect(&on.source.cluster).await?;
    let act = async |name: &String| {
        done(experiment::set_state::<InferenceJob>(&cluster, name, state, output).await)
    };
    for_each(&on.names.jobs, output, act).await
}

/// Reads the file. The rules of new jobs do not apply if the command resumes a job.
fn load(args: &Args) -> Result<LoadedJob, FileError> {
    let (file, set) = (&args.file, &args.set);
    file::load_job(file, set).or_else(|error| {
        let started = file::load_started_job(file, set).ok().filter(|_| !args.fresh);
        started.filter(|loaded| is_started(args, loaded)).ok_or(error)
    })
}

/// Returns whether the command resumes a job.
fn is_started(args: &Args, loaded: &LoadedJob) -> bool {
    let url = loaded.valid.spec.storage.url.as_deref();
    let run_root = RunRoot::resolve(args.root.as_deref(), url);
    run_root.is_ok_and(|run_root| record::has_run(&run_root, loaded))
}

async fn run(args: &Args, output: Output, mut loaded: LoadedJob) -> Result<u8, Failure> {
    background::start();
    signals::report_large_files();
    let mut view = View::new(output);
    loaded.notes.iter().for_each(|note| view.print_message(note));
    let spec = &loaded.valid.spec;
    let folder = folder(args)?;
    let program = spec.entrypoint.command.first().map_or("", String::as_str);
    require_program("spec.entrypoint.command[0]", program, &folder)?;
    let run_root = RunRoot::resolve(args.root.as_deref(), spec.storage.url.as_deref())?;
    let environment = endpoint::of_environment();
    let note = record::set_endpoints(&mut loaded, &run_root, args.fresh, environment.as_deref())?;
    note.iter().for_each(|note| view.print_message(note));
    let spec = &loaded.valid.spec;
    let input = |error: stoker_storage::StorageError| Failure::Input(error.to_string());
    let storage = Storage::open(&run_root.root, spec.storage.endpoint.as_deref()).map_err(input)?;
    storage.clone().with_few_retries().probe().await?;
    let slots = args.slots.unwrap_or(spec.resources.slots);
    let slots = open_files::limit_slots(slots, 1, |text| view.print_message(text));
    let opened = record::open(&run_root, &loaded, &folder, args.fresh).await?;
    let url = opened.record.output_url(&run_root, spec, &folder);
    let endpoint =
        spec.output.url.as_ref().map_or(&spec.storage.endpoint, |_| &spec.output.endpoint);
    let out = Storage::open(&url, endpoint.as_deref()).map_err(input)?;
    let manifest = match opened.record.phase() {
        Phase::Completed => Some(check_completed(&opened.record, &loaded, &folder, &out).await?),
        _ => None,
    };
    view.print_message(&start_message(&opened, &run_root));
    if !opened.edits.is_empty() {
        view.print_message(&format!("changed: {}", opened.edits.join("; ")));
    }
    let OpenedRecord { mut record, _lock, trainers, .. } = opened;
    let replaced_job = record.replaced_job(&out).await?;
    record.begin(slots)?;
    let mut signals = Signals::listen()?;
    let devices = gpus::detect(&spec.env).await;
    let lock = trainers;
    let config = RunnerConfig {
        loaded: &loaded,
        folder,
        run_root,
        storage,
        output: out,
        lock,
        record,
        replaced_job,
        manifest,
        devices,
        slots,
    };
    Runner::new(config).run(&mut signals, &mut view).await
}

/// Returns the manifest of a completed job. Fails if the job cannot report its output again.
async fn check_completed(
    record: &Record,
    loaded: &LoadedJob,
    folder: &Path,
    output: &Storage,
) -> Result<OutputManifest, Failure> {
    let id = record.id();
    let job = CompletedJob {
        id: &id,
        uid: record.uid(),
        folder,
        input: &loaded.valid.spec.input,
        output,
    };
    job.check().await
}

fn folder(args: &Args) -> Result<PathBuf, Failure> {
    let folder = args.folder.clone().unwrap_or_else(|| PathBuf::from("."));
    match folder.canonicalize() {
        Ok(folder) if folder.is_dir() => Ok(folder),
        Ok(_) => Err(Failure::Input(format!(
            "cannot use {} as DIR: it is not a directory",
            folder.display()
        ))),
        Err(error) => {
            Err(Failure::Input(format!("cannot use {} as DIR: {error}", folder.display())))
        }
    }
}

fn start_message(opened: &OpenedRecord, run_root: &RunRoot) -> String {
    let id = opened.record.id();
    let what = match opened.record.phase() {
        _ if !opened.is_resumed => format!("new job {id}"),
        Phase::Completed => format!("{id} has completed already; use --fresh to start over"),
        Phase::Cancelled => format!("{id} was cancelled already; use --fresh to start over"),
        Phase::Failed => format!("{id} has failed; retrying its uncommitted shards"),
        _ => format!("resuming {id}"),
    };
    format!("{what}; logs in {}, record in {}", run_root.root, opened.record.path().display())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An earlier version accepted data of any size.
    #[tokio::test]
    async fn rules_of_new_jobs_spare_resumed_jobs() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("job.yaml");
        let text = format!(
            "apiVersion: stoker.dev/v1alpha1\nkind: InferenceJob\nmetadata: {{name: a}}\nspec:\n  \
             entrypoint: {{command: [x]}}\n  input: {{url: in}}\n  output: {{url: out}}\n  \
             data: {{list: {}}}\n",
            "x".repeat(170_000)
        );
        std::fs::write(&file, &text).unwrap();
        let root = Some(folder.path().display().to_string());
        let (slots, set) = (None, vec![]);
        let args = Args { file, folder: None, root, slots, fresh: false, set };
        let error = load(&args).unwrap_err();
        assert_eq!(error.problems[0].field, "spec.data");
        let loaded = file::load_started_job(&args.file, &[]).unwrap();
        let run_root = RunRoot::resolve(args.root.as_deref(), None).unwrap();
        drop(record::open(&run_root, &loaded, folder.path(), false).await.unwrap());
        load(&args).unwrap();
        // Another job with this name.
        std::fs::write(&args.file, text.replace("url: in}", "url: rows}")).unwrap();
        assert_eq!(load(&args).unwrap_err().problems[0].field, "spec.data");
        std::fs::write(&args.file, text).unwrap();
        load(&Args { fresh: true, ..args }).unwrap_err();
    }
}

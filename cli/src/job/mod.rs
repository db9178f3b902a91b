//! `stoker job run`: a whole inference job on this machine.
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

use clap::Subcommand;
use stoker_api::experiment::Phase;
use stoker_engine::inference;
use stoker_storage::Storage;

use self::record::Opened;
use self::runner::{Job, Runner};
use self::view::View;
use crate::commands::block_on;
use crate::failure::Failure;
use crate::file::{self, LoadedJob};
use crate::place::Place;
use crate::print::Output;
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
    let JobCommand::Run(args) = command;
    let loaded = match file::load_job(&args.file, &args.set) {
        Ok(loaded) => loaded,
        Err(error) => return Ok(crate::validate::print_error(&error, output)),
    };
    block_on(run(args, output, loaded))
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
    let job = Job { loaded: &loaded, folder, place, storage, output: out, lock: trainers, record };
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

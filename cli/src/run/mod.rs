//! `stoker run`: a whole experiment on this machine.
//!
//! ```text
//!  file -> record -> plan (engine) -> start trainers -> reports at the door -> record -> plan ...
//! ```
//!
//! One thread does everything, so that trainers, which die with the thread that started them, die
//! with the runner. What is decided is recorded before it is done: a runner killed at any moment
//! goes on from its record.

mod display;
mod door;
mod outcome;
mod process;
pub(crate) mod record;
mod runner;
pub(crate) mod setup;
mod state;

use std::path::PathBuf;

use stoker_api::experiment::Phase;
use stoker_api::validate::{ValidExperiment, derive_seed};
use stoker_storage::Storage;

pub(crate) use self::display::Searched;
use self::display::View;
use self::door::Desk;
pub(crate) use self::outcome::{Paths, hyperparameters, row};
use self::runner::{Job, Runner};
use self::state::State;
use crate::failure::Failure;
use crate::file;
use crate::place::Place;
use crate::print::{self, Output};

/// What `stoker run` is asked to do.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The experiment's file (YAML)
    pub(crate) file: PathBuf,
    /// Where checkpoints, metrics and logs go: a folder, or s3://, gs:// or az:// BUCKET/PREFIX.
    /// Default: the file's checkpointStorage.url, or else ./.stoker. The record of the run lies
    /// there too, in local/; for a bucket it stays on this machine, in ~/.local/state/stoker
    #[arg(long, value_name = "URL")]
    pub(crate) root: Option<String>,
    /// Trials that train at the same time, at most [default: the machine's cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) slots: Option<u32>,
    /// Start over instead of going on with an earlier run; the earlier run's files stay
    #[arg(long)]
    pub(crate) fresh: bool,
    /// Change a field of the file before it is read, such as searcher.random.maxTrials=4; may be
    /// given more than once
    #[arg(long, value_name = "PATH=VALUE")]
    pub(crate) set: Vec<String>,
}

/// Runs the experiment to its end, or until it is stopped; returns the exit code.
pub(crate) fn run(args: &Args, output: Output) -> Result<u8, Failure> {
    let loaded = match file::load(&args.file, &args.set) {
        Ok(loaded) => loaded,
        Err(error) => return Ok(crate::validate::print_error(&error, output)),
    };
    // A trainer dies with the thread that started it: all on this one.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::System(format!("cannot start: {error}")))?;
    runtime.block_on(run_loaded(args, output, loaded))
}

async fn run_loaded(args: &Args, output: Output, loaded: file::Loaded) -> Result<u8, Failure> {
    let mut view = View::new(output);
    loaded.notes.iter().for_each(|note| view.say(note));
    let spec = &loaded.valid.spec;
    setup::check_runnable(spec)?;
    let place = Place::resolve(args.root.as_deref(), spec.checkpoint_storage.url.as_deref())?;
    let endpoint = spec.checkpoint_storage.endpoint.as_deref();
    let storage =
        Storage::open(&place.root, endpoint).map_err(|error| Failure::Input(error.to_string()))?;
    storage.probe().await?;
    let opened = setup::open(&place, &loaded, args.fresh)?;
    let seed = seed(&loaded.valid, &opened.uid);
    let paths = Paths {
        root: place.root.clone(),
        namespace: loaded.namespace.clone(),
        name: loaded.name.clone(),
        uid: opened.uid.clone(),
    };
    view.say(&greeting(&paths, &opened));
    let setup::Opened { folder, experiment, trials, _lock, .. } = opened;
    let state = State::new(experiment, trials, &loaded.valid, seed, folder.clone())?;
    let desk = Desk::new(state);
    let door = door::open(desk.clone()).await?;
    let job = Job {
        desk: desk.clone(),
        valid: &loaded.valid,
        storage: storage.clone(),
        paths: paths.clone(),
        seed,
        slots: args.slots.unwrap_or_else(cores),
        door,
        folder,
    };
    let result = Runner::new(job).run(&mut view).await;
    view.finish();
    result?;
    finish(&desk, &storage, &paths, &loaded.valid, output).await
}

async fn finish(
    desk: &Desk,
    storage: &Storage,
    paths: &Paths,
    valid: &ValidExperiment,
    output: Output,
) -> Result<u8, Failure> {
    let smaller_is_better = valid.spec.searcher.smaller_is_better;
    let is_over = desk.state().status().phase.is_terminal();
    if is_over {
        let policy = &valid.spec.checkpoint_storage;
        outcome::retain(desk, storage, paths, policy, smaller_is_better).await?;
    }
    let searched = Searched { metric: &valid.spec.searcher.metric, smaller_is_better };
    let state = desk.state();
    match output {
        Output::Json => print::out(outcome::json_line(&state, paths)),
        Output::Text => outcome::print_text(&state, paths, &searched),
    }
    if !is_over {
        print::err("stopped; run the same command again to go on from here");
    }
    Ok(match state.status().phase {
        Phase::Completed => 0,
        Phase::Failed | Phase::Cancelled => 1,
        Phase::Pending | Phase::Running => 3,
    })
}

fn greeting(paths: &Paths, opened: &setup::Opened) -> String {
    let id = crate::place::id(&paths.name, &paths.uid);
    let what = if opened.is_continued { "going on with" } else { "new run" };
    format!("{what} {id}; files in {}, record in {}", paths.root, opened.folder.path().display())
}

/// The experiment's seed: the file's, or one that follows from the run's id.
pub(crate) fn seed(valid: &ValidExperiment, uid: &str) -> u32 {
    valid.spec.reproducibility.experiment_seed.unwrap_or_else(|| derive_seed(uid))
}

fn cores() -> u32 {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    u32::try_from(cores).unwrap_or(u32::MAX)
}

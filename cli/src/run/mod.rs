//! `stoker run`: runs an experiment locally.
//!
//! ```text
//!  file -> record -> plan (engine) -> start trainers -> reports -> record -> plan ...
//! ```
//!
//! A single thread runs everything. Decisions are recorded before they are carried out, so a killed
//! runner can resume from its record.

mod copies;
mod display;
mod door;
pub(crate) mod gpus;
mod outcome;
pub(crate) mod process;
pub(crate) mod record;
mod runner;
pub(crate) mod setup;
pub(crate) mod signals;
mod state;

use std::path::PathBuf;

use serde_json::json;
use stoker_api::experiment::Phase;
use stoker_api::validate::{ValidExperiment, derive_seed};
use stoker_storage::Storage;

pub(crate) use self::display::Searched;
use self::display::View;
use self::door::Desk;
pub(crate) use self::outcome::{Paths, hyperparameters, row};
use self::runner::{Job, Runner};
use self::signals::Signals;
use self::state::State;
use crate::failure::Failure;
use crate::file;
use crate::place::Place;
use crate::print::{self, Output};

/// Remedy if checkpoints could not be deleted.
const CLEAN_AGAIN: &str = "run the same command again to delete them";

/// Stages of `--test`.
const PARTS: &str = "one batch, a validation, a checkpoint and its restore";

/// Arguments of `stoker run`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Experiment file (YAML)
    pub(crate) file: PathBuf,
    /// Storage root for checkpoints, metrics and logs: a directory, or s3://, gs:// or az://
    /// BUCKET/PREFIX. Default: checkpointStorage.url of the file, else ./.stoker. The run's record
    /// is stored in local/ under a directory; for a bucket, in ~/.local/state/stoker
    #[arg(long, value_name = "URL")]
    pub(crate) root: Option<String>,
    /// Number of slots; each trial uses one per rank (resources.slotsPerTrial) [default: number of
    /// GPUs, or of CPU cores without GPUs]. Set STOKER_DEVICE=cpu to ignore GPUs
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) slots: Option<u32>,
    /// Start over instead of resuming an earlier run; keeps the files of the earlier run
    #[arg(long)]
    pub(crate) fresh: bool,
    /// Smoke-test the program: train one batch, validate, then save and restore a checkpoint.
    /// Samples the hyperparameters once, reports the stage that fails, and keeps its files only on
    /// failure
    #[arg(long, conflicts_with = "fresh")]
    pub(crate) test: bool,
    /// Override a field of the file, such as searcher.random.maxTrials=4; repeatable
    #[arg(long, value_name = "PATH=VALUE")]
    pub(crate) set: Vec<String>,
}

/// Runs the experiment until it ends or is stopped. Returns the exit code.
pub(crate) fn run(args: &Args, output: Output) -> Result<u8, Failure> {
    let loaded = match file::load(&args.file, &args.set) {
        Ok(loaded) if args.test => crate::trying::cut_down(loaded)?,
        Ok(loaded) => loaded,
        Err(error) => return Ok(crate::validate::print_error(&error, output)),
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::System(format!("cannot start the async runtime: {error}")))?;
    runtime.block_on(run_loaded(args, output, loaded))
}

async fn run_loaded(args: &Args, output: Output, loaded: file::Loaded) -> Result<u8, Failure> {
    let mut view = View::new(output);
    loaded.notes.iter().for_each(|note| view.say(note));
    let spec = &loaded.valid.spec;
    let devices = gpus::detect(&spec.env).await;
    let slots = setup::slots(args.slots, spec.resources.slots_per_trial, &devices, &view);
    setup::check_runnable(spec, slots, &devices)?;
    let named = (args.root.as_deref(), spec.checkpoint_storage.url.as_deref());
    let test_folder = args.test.then(crate::trying::folder).transpose()?;
    let place = match &test_folder {
        Some(test_folder) => crate::trying::place(test_folder, named.0, named.1)?,
        None => Place::resolve(named.0, named.1)?,
    };
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
    let setup::Opened { folder, experiment, trials, _lock, trainers, .. } = opened;
    let mut signals = Signals::listen()?;
    let state = State::new(experiment, trials, &loaded.valid, seed, folder.clone())?;
    let desk = Desk::new(state);
    let door = door::open(desk.clone()).await?;
    let job = Job {
        desk: desk.clone(),
        valid: &loaded.valid,
        storage: storage.clone(),
        paths: paths.clone(),
        seed,
        slots,
        devices,
        door,
        folder,
        lock: trainers,
    };
    let result = Runner::new(job).run(&mut signals, &mut view).await;
    view.finish();
    result?;
    if desk.state().status().phase.is_terminal() {
        let policy = &loaded.valid.spec.checkpoint_storage;
        let smaller_is_better = loaded.valid.spec.searcher.smaller_is_better;
        tokio::select! {
            done = outcome::retain(&desk, &storage, &paths, policy, smaller_is_better) => {
                if let Err(error) = done {
                    print::err(format!("cannot delete old checkpoints: {error}; {CLEAN_AGAIN}"));
                }
            }
            () = signals.next() => {
                print::err(format!("stopped deleting old checkpoints; {CLEAN_AGAIN}"));
            }
        }
    }
    let phase = desk.state().status().phase;
    if let Some(test_folder) =
        test_folder.filter(|_| phase == Phase::Completed || !phase.is_terminal())
    {
        crate::trying::clean(&test_folder, &storage, &paths).await?;
        let is_tried = phase == Phase::Completed;
        match output {
            Output::Json => print::out(json!({"experiment": paths.name, "phase": phase})),
            Output::Text if is_tried => {
                print::out(format!("{} works: {PARTS}", args.file.display()));
            }
            Output::Text => print::err("the test was stopped; its files are deleted"),
        }
        return Ok(crate::cluster::wait::code(phase));
    }
    Ok(tell(&desk.state(), &paths, &loaded.valid, output))
}

/// Prints the outcome and returns the exit code.
fn tell(state: &State, paths: &Paths, valid: &ValidExperiment, output: Output) -> u8 {
    let searcher = &valid.spec.searcher;
    let searched =
        Searched { metric: &searcher.metric, smaller_is_better: searcher.smaller_is_better };
    match output {
        Output::Json => print::out(outcome::json_line(state, paths)),
        Output::Text => outcome::print_text(state, paths, &searched),
    }
    let phase = state.status().phase;
    if !phase.is_terminal() {
        print::err("stopped; run the same command again to resume");
    }
    crate::cluster::wait::code(phase)
}

fn greeting(paths: &Paths, opened: &setup::Opened) -> String {
    let id = crate::place::id(&paths.name, &paths.uid);
    let status = opened.experiment.status.as_ref();
    let phase = status.map(|status| status.phase).unwrap_or_default();
    let what = match phase {
        _ if !opened.is_continued => format!("new run {id}"),
        Phase::Pending | Phase::Running | Phase::Paused => format!("resuming {id}"),
        Phase::Completed => format!("{id} has completed already; use --fresh to start over"),
        Phase::Failed => format!("{id} has failed already; use --fresh to start over"),
        Phase::Cancelled => format!("{id} was cancelled already; use --fresh to start over"),
    };
    format!("{what}; files in {}, record in {}", paths.root, opened.folder.path().display())
}

/// Returns the experiment seed of the file, or a seed derived from the run's UID.
pub(crate) fn seed(valid: &ValidExperiment, uid: &str) -> u32 {
    valid.spec.reproducibility.experiment_seed.unwrap_or_else(|| derive_seed(uid))
}

pub(crate) fn cores() -> u32 {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    u32::try_from(cores).unwrap_or(u32::MAX)
}

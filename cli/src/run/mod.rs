//! `stoker run`: runs an experiment locally.
//!
//! ```text
//!  file -> record -> plan (engine) -> start trainers -> reports -> record -> plan ...
//! ```
//!
//! A single thread runs everything, and another one writes the output. Decisions are recorded
//! before they are carried out, so a killed runner can resume from its record.

mod display;
mod ended;
pub(crate) mod gpus;
pub(crate) mod open_files;
mod outcome;
pub(crate) mod process;
pub(crate) mod programs;
pub(crate) mod record;
mod record_copies;
mod report_server;
pub(crate) mod request;
mod runner;
pub(crate) mod setup;
pub(crate) mod signals;
pub(crate) mod spec_changes;
mod state;
mod table;
mod unfinished;

use std::path::PathBuf;

use serde_json::json;
use stoker_api::decisions::PriorTrial;
use stoker_api::experiment::{DesiredState, Phase, PriorTrials};
use stoker_api::validate::ValidExperiment;
use stoker_engine::trial::config::experiment_seed;
use stoker_storage::Storage;

use self::display::View;
pub(crate) use self::display::{MetricRanking, format_metric};
pub(crate) use self::ended::end_without_runner;
pub(crate) use self::outcome::{RunPaths, length_of_best, pareto};
use self::report_server::SharedState;
use self::runner::{Runner, RunnerConfig};
use self::signals::Signals;
use self::state::State;
pub(crate) use self::table::{flatten, hyperparameters, position_header, truncate};
use crate::cluster::wait;
use crate::endpoint;
use crate::failure::Failure;
use crate::file::{self, FileError, Loaded};
use crate::print::{self, Output};
use crate::run_root::{self, RunRoot};
use crate::smoke_test;
use crate::ui;

/// Remedy if checkpoints could not be deleted.
const DELETION_REMEDY: &str = "run the same command again, without --fresh, to delete them";

/// Remedy for a stopped run or job. With `--fresh`, the same command would start over.
pub(crate) const RESUME_REMEDY: &str = "run the same command again, without --fresh, to resume";

/// Stages of `--test`.
const TEST_STAGES: &str = "one batch, a validation, a checkpoint and its restore";

/// Arguments of `stoker run`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Experiment file (YAML)
    pub(crate) file: PathBuf,
    /// Storage root for checkpoints, metrics and logs: a directory, or s3://, gs:// or az://
    /// BUCKET/PREFIX. Default: checkpointStorage.url of the file, else ./.stoker. The run's record
    /// is stored in local/ under a directory; for a bucket, in ~/.local/state/stoker. For s3://,
    /// checkpointStorage.endpoint of the file, else STOKER_STORAGE_ENDPOINT, selects an
    /// S3-compatible server; a run keeps the endpoint that it began with
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
    /// Serve the web page of the run while it lasts, on this port of the loopback interface
    /// [default: 8265]
    #[arg(long, value_name = "PORT", num_args = 0..=1, require_equals = true,
        default_missing_value = "8265", conflicts_with = "test")]
    pub(crate) ui: Option<u16>,
    /// Show buttons on the page that pause, cancel, kill, delete and continue experiments
    #[arg(long, requires = "ui")]
    pub(crate) allow_actions: bool,
    /// Override a field of the file, such as searcher.random.maxTrials=4; repeatable
    #[arg(long, value_name = "PATH=VALUE")]
    pub(crate) set: Vec<String>,
}

/// Runs the experiment until it ends or is stopped. Returns the exit code.
pub(crate) fn run(args: &Args, output: Output) -> Result<u8, Failure> {
    let loaded = match load(args) {
        Ok(loaded) if args.test => smoke_test::to_smoke_test(loaded)?,
        Ok(loaded) => loaded,
        Err(error) => return Ok(crate::validate::print_error(&error, output)),
    };
    print::background::start();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::System(format!("cannot start the async runtime: {error}")))?;
    runtime.block_on(run_loaded(args, output, loaded))
}

/// Reads the file. The rules of new experiments do not apply if the command resumes a run.
fn load(args: &Args) -> Result<Loaded, FileError> {
    let (file, set) = (&args.file, &args.set);
    file::load(file, set).or_else(|error| {
        let started = file::load_started(file, set).ok().filter(|_| !args.fresh && !args.test);
        started.filter(|loaded| is_started(args, loaded)).ok_or(error)
    })
}

/// Returns whether the command resumes a run.
fn is_started(args: &Args, loaded: &Loaded) -> bool {
    let file_url = loaded.valid.spec.checkpoint_storage.url.as_deref();
    let run_root = RunRoot::resolve(args.root.as_deref(), file_url);
    run_root.is_ok_and(|run_root| setup::has_run(&run_root, loaded))
}

async fn run_loaded(args: &Args, output: Output, mut loaded: Loaded) -> Result<u8, Failure> {
    signals::report_large_files();
    let mut view = View::new(output);
    loaded.notes.iter().for_each(|note| view.print_message(note));
    let spec = &loaded.valid.spec;
    let devices = gpus::detect(&spec.env).await;
    let slots_per_trial = spec.resources.slots_per_trial;
    let slots = setup::slots(args.slots, slots_per_trial, &devices, &view);
    let slots = open_files::limit_slots(slots, slots_per_trial, |text| view.print_message(text));
    setup::check_runnable(spec, slots, &devices)?;
    let (root_flag, file_url) = (args.root.as_deref(), spec.checkpoint_storage.url.as_deref());
    let test_folder = args.test.then(smoke_test::new_test_folder).transpose()?;
    let run_root = match &test_folder {
        Some(test_folder) => smoke_test::test_run_root(test_folder, root_flag, file_url)?,
        None => RunRoot::resolve(root_flag, file_url)?,
    };
    let note = setup::set_endpoint(&mut loaded, &run_root, args.fresh, endpoint::of_environment())?;
    note.iter().for_each(|note| view.print_message(note));
    let endpoint = loaded.valid.spec.checkpoint_storage.endpoint.as_deref();
    let storage = Storage::open(&run_root.root, endpoint)
        .map_err(|error| Failure::Input(error.to_string()))?;
    storage.clone().with_few_retries().probe().await?;
    // Before a run is created: its port may be in use.
    if let Some(port) = args.ui {
        let url = ui::start_beside_run(&run_root, port, args.allow_actions)?;
        view.print_message(&format!("page: {url}"));
    }
    let opened = setup::open(&run_root, &loaded, args.fresh)?;
    let seed = experiment_seed(&loaded.valid, &opened.uid);
    let paths = RunPaths {
        root: run_root.root.clone(),
        namespace: loaded.namespace.clone(),
        name: loaded.name.clone(),
        uid: opened.uid.clone(),
    };
    view.print_message(&start_message(&paths, &opened));
    let notes = start_notes(args, &run_root, &paths, &loaded.valid, &opened);
    notes.iter().for_each(|note| view.print_message(note));
    let setup::OpenedRecord { folder, experiment, trials, prior, _lock, trainers, .. } = opened;
    let mut signals = Signals::listen()?;
    let state = State::new(experiment, trials, prior, &loaded.valid, seed, folder.clone())?;
    let shared = SharedState::new(state);
    let server_url = report_server::start(shared.clone()).await?;
    let config = RunnerConfig {
        shared: shared.clone(),
        valid: &loaded.valid,
        storage: storage.clone(),
        paths: paths.clone(),
        slots,
        devices,
        server_url,
        folder,
        lock: trainers,
        test_hint: (!args.test).then(|| test_hint(args)),
    };
    let result = Runner::new(config)?.run(&mut signals, &mut view).await;
    view.finish();
    result?;
    if shared.state().phase().is_terminal() {
        delete_old_checkpoints(&shared, &storage, &paths, &loaded.valid, &mut signals).await;
    }
    let phase = shared.state().phase();
    let is_kept = phase.is_terminal() && phase != Phase::Completed;
    if let Some(test_folder) = test_folder.filter(|_| !is_kept) {
        smoke_test::delete_files(&test_folder, &storage, &paths).await?;
        print_test_outcome(args, &paths, phase, output);
        return Ok(wait::exit_code(phase));
    }
    Ok(print_outcome(&shared.state(), &paths, &loaded.valid, output))
}

/// Deletes checkpoints that are not retained, until the next signal.
async fn delete_old_checkpoints(
    shared: &SharedState,
    storage: &Storage,
    paths: &RunPaths,
    valid: &ValidExperiment,
    signals: &mut Signals,
) {
    let policy = &valid.spec.checkpoint_storage;
    let smaller_is_better = valid.spec.searcher.smaller_is_better;
    tokio::select! {
        done = outcome::retain(shared, storage, paths, policy, smaller_is_better) => {
            if let Err(error) = done {
                print::err(format!("cannot delete old checkpoints: {error}; {DELETION_REMEDY}"));
            }
        }
        () = signals.next() => {
            print::err(format!("stopped deleting old checkpoints; {DELETION_REMEDY}"));
        }
    }
}

/// Prints the outcome of `--test`, unless the test has failed.
fn print_test_outcome(args: &Args, paths: &RunPaths, phase: Phase, output: Output) {
    match output {
        Output::Json => print::out(json!({"experiment": paths.name, "phase": phase})),
        Output::Text if phase == Phase::Completed => {
            print::out(format!("{} works: {TEST_STAGES}", args.file.display()));
        }
        Output::Text => print::err("the test was stopped; its files are deleted"),
    }
}

/// Prints the outcome and returns the exit code.
fn print_outcome(state: &State, paths: &RunPaths, valid: &ValidExperiment, output: Output) -> u8 {
    let searcher = &valid.spec.searcher;
    let ranking =
        MetricRanking { metric: &searcher.metric, smaller_is_better: searcher.smaller_is_better };
    match output {
        Output::Json => print::out(outcome::json_line(state, paths)),
        Output::Text => outcome::print_text(state, paths, searcher, &ranking),
    }
    let phase = state.phase();
    if !phase.is_terminal() {
        let paused = match state.desired_state() {
            DesiredState::Paused => {
                format!("; the experiment stays paused until `{}`", paths.activate_command())
            }
            _ => String::new(),
        };
        print::err(format!("stopped; {RESUME_REMEDY}{paused}"));
    }
    wait::exit_code(phase)
}

/// Returns the hint if the program fails before its first batch.
fn test_hint(args: &Args) -> String {
    // `--test` conflicts with these flags.
    let without = match (args.fresh, args.ui.is_some()) {
        (false, false) => "",
        (true, false) => " without --fresh",
        (false, true) => " without --ui",
        (true, true) => " without --fresh and --ui",
    };
    format!("hint: add `--test` to this command{without}; it finds such errors within seconds")
}

/// Returns the notes below the start message.
fn start_notes(
    args: &Args,
    run_root: &RunRoot,
    paths: &RunPaths,
    valid: &ValidExperiment,
    opened: &setup::OpenedRecord,
) -> Vec<String> {
    let is_expected = opened.is_resumed || args.fresh;
    let unfinished = (!is_expected).then(|| unfinished::note(run_root, paths)).flatten();
    let has_begun = opened.experiment.status.as_ref().is_some_and(|status| !status.log.is_empty());
    let prior = valid.spec.searcher.prior_trials.as_ref().filter(|_| !has_begun);
    unfinished.into_iter().chain(prior.map(|spec| prior_message(spec, &opened.prior))).collect()
}

fn prior_message(spec: &PriorTrials, prior: &[PriorTrial]) -> String {
    let best = prior.first().map(|best| format!("; the best is {} ({})", best.name, best.metric));
    format!(
        "prior trials: {} of {} are in the space of this experiment{}",
        prior.len(),
        spec.experiments.join(", "),
        best.unwrap_or_default()
    )
}

fn start_message(paths: &RunPaths, opened: &setup::OpenedRecord) -> String {
    let id = run_root::run_id(&paths.name, &paths.uid);
    let status = opened.experiment.status.as_ref();
    let phase = status.map(|status| status.phase).unwrap_or_default();
    let edits = (!opened.edits.is_empty())
        .then(|| format!("changed numbers ({})", opened.edits.join("; ")));
    let reopened = opened.is_reopened.then(|| "reopened trials".to_owned());
    let changes: Vec<String> = reopened.into_iter().chain(edits).collect();
    let what = match phase {
        _ if !opened.is_resumed => format!("new run {id}"),
        _ if !changes.is_empty() => format!("continuing {id} with {}", changes.join(" and ")),
        Phase::Pending | Phase::Running | Phase::Paused => format!("resuming {id}"),
        Phase::Completed => format!("{id} has completed already; use --fresh to start over"),
        Phase::Failed => format!("{id} has failed already; use --fresh to start over"),
        Phase::Cancelled => format!("{id} was cancelled already; use --fresh to start over"),
    };
    format!("{what}; files in {}, record in {}", paths.root, opened.folder.path().display())
}

pub(crate) fn cores() -> u32 {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    u32::try_from(cores).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An earlier version accepted the base.
    #[test]
    fn rules_of_new_experiments_spare_resumed_runs() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("experiment.yaml");
        let text = "apiVersion: stoker.dev/v1alpha1\nkind: Experiment\nmetadata: {name: a}\n\
                    spec:\n  entrypoint: {command: [x]}\n  \
                    hyperparameters: {x: {log: {min: 1, max: 2, base: 1.0}}}\n  \
                    searcher: {metric: loss, maxLength: {batches: 1}, single: {}}\n";
        std::fs::write(&file, text).unwrap();
        let root = Some(folder.path().display().to_string());
        let (slots, ui, set) = (None, None, vec![]);
        let (fresh, test, allow_actions) = (false, false, false);
        let args = Args { file, root, slots, fresh, test, ui, allow_actions, set };
        let error = load(&args).unwrap_err();
        assert_eq!(error.problems[0].field, "spec.hyperparameters.x.log.base");
        let loaded = file::load_started(&args.file, &[]).unwrap();
        let run_root = RunRoot::resolve(args.root.as_deref(), None).unwrap();
        drop(setup::open(&run_root, &loaded, false).unwrap());
        load(&args).unwrap();
        // Another experiment with this name.
        std::fs::write(&args.file, text.replace("metric: loss", "metric: error")).unwrap();
        let error = load(&args).unwrap_err();
        assert_eq!(error.problems[0].field, "spec.hyperparameters.x.log.base");
        std::fs::write(&args.file, text).unwrap();
        load(&Args { fresh: true, ..args }).unwrap_err();
    }
}

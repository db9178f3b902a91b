//! `stoker experiment|trial|checkpoint`: what `stoker run` left behind.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Value, json};
use stoker_api::experiment::Experiment;
use stoker_engine::trial::TrialRecord;
use stoker_storage::{Storage, layout};

use crate::failure::Failure;
use crate::place::{self, Place};
use crate::print::{self, Output};
use crate::run::record::{Folder, is_locked, trial_object};
use crate::run::{self, Paths, Searched, setup};

/// Where to look.
#[derive(Debug, clap::Args)]
pub(crate) struct At {
    /// What `stoker run` was given as --root, or the file's checkpointStorage.url: a folder or a
    /// bucket's URL [default: ./.stoker]
    #[arg(long, value_name = "URL")]
    root: Option<String>,
}

/// Which run.
#[derive(Debug, clap::Args)]
pub(crate) struct Which {
    /// The experiment's name, for its latest run, or the id of a run, as `experiment list` prints
    /// it
    experiment: String,
    #[command(flatten)]
    at: At,
}

/// `stoker experiment ...`
#[derive(Debug, clap::Subcommand)]
pub(crate) enum ExperimentCommand {
    /// List all runs
    List(At),
    /// Show one run: its status and its trials
    Describe(Which),
}

/// `stoker trial ...`
#[derive(Debug, clap::Subcommand)]
pub(crate) enum TrialCommand {
    /// List the trials of a run
    List(Which),
    /// Show one trial: hyperparameters, results, attempts, checkpoints
    Describe {
        #[command(flatten)]
        which: Which,
        /// The trial's index
        trial: u32,
    },
    /// Print what a trial's program printed
    Logs {
        #[command(flatten)]
        which: Which,
        /// The trial's index
        trial: u32,
        /// The attempt's number [default: the latest]
        #[arg(long, value_name = "N")]
        attempt: Option<u32>,
    },
}

/// `stoker checkpoint ...`
#[derive(Debug, clap::Subcommand)]
pub(crate) enum CheckpointCommand {
    /// List the checkpoints of a run
    List {
        #[command(flatten)]
        which: Which,
        /// Only those of this trial
        #[arg(long, value_name = "INDEX")]
        trial: Option<u32>,
    },
}

/// A run that was found.
#[derive(Debug)]
struct Found {
    experiment: Experiment,
    trials: BTreeMap<u32, TrialRecord>,
    paths: Paths,
    /// Whether a runner has the experiment in hand.
    is_running: bool,
}

impl Found {
    fn open(which: &Which) -> Result<Self, Failure> {
        let place = Place::resolve(which.at.root.as_deref(), None)?;
        let found = all(&place)?.into_iter().filter(|it| it.is_named(&which.experiment));
        let current = |it: &Self| {
            let key = format!("{}.{}.current", it.paths.namespace, it.paths.name);
            let uid = setup::current(&place.local().join(key)).ok().flatten();
            uid.is_some_and(|uid| uid == it.paths.uid)
        };
        // The latest run of a name goes before earlier ones; an id names one alone.
        found.max_by_key(current).ok_or_else(|| {
            Failure::Input(format!(
                "no run of `{}` in {}; `stoker experiment list --root URL` shows what is there",
                which.experiment, place.root
            ))
        })
    }

    fn is_named(&self, name: &str) -> bool {
        self.paths.name == name || self.id() == name
    }

    fn id(&self) -> String {
        place::id(&self.paths.name, &self.paths.uid)
    }

    fn searched(&self) -> Searched<'_> {
        let searcher = &self.experiment.spec.searcher;
        Searched { metric: &searcher.metric, smaller_is_better: searcher.smaller_is_better }
    }

    fn trial(&self, index: u32) -> Result<&TrialRecord, Failure> {
        self.trials.get(&index).ok_or_else(|| {
            let num = self.trials.len();
            Failure::Input(format!("{} has no trial {index}; it has {num}", self.id()))
        })
    }
}

fn all(place: &Place) -> Result<Vec<Found>, Failure> {
    let local = place.local();
    let mut found = Vec::new();
    let entries = match std::fs::read_dir(&local) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(found),
        Err(error) => return Err(Failure::file("read", &local, error)),
    };
    for entry in entries {
        let path = entry.map_err(|error| Failure::file("read", &local, error))?.path();
        match read(place, &path.join("record")) {
            Ok(run) => found.extend(run),
            // The others are none the worse.
            Err(error) => print::err(format!("stoker: left out: {error}")),
        }
    }
    found.sort_by_key(Found::id);
    Ok(found)
}

fn read(place: &Place, path: &Path) -> Result<Option<Found>, Failure> {
    let folder = Folder::new(path.to_owned());
    let Some(experiment) = folder.experiment()? else { return Ok(None) };
    let metadata = experiment.metadata.clone();
    let paths = Paths {
        root: place.root.clone(),
        namespace: metadata.namespace.unwrap_or_default(),
        name: metadata.name.unwrap_or_default(),
        uid: metadata.uid.unwrap_or_default(),
    };
    let lock = place.local().join(format!("{}.{}.lock", paths.namespace, paths.name));
    let is_running = is_locked(&lock);
    Ok(Some(Found { trials: folder.trials()?, experiment, paths, is_running }))
}

/// Carries out `stoker experiment ...`.
pub(crate) fn experiment(command: &ExperimentCommand, output: Output) -> Result<u8, Failure> {
    match command {
        ExperimentCommand::List(at) => {
            let found = all(&Place::resolve(at.root.as_deref(), None)?)?;
            let header = ["ID", "PHASE", "TRIALS", "ENDED", "BEST"];
            let rows: Vec<Vec<String>> = found.iter().map(experiment_row).collect();
            let values = found.iter().map(|it| json!(it.experiment)).collect();
            print_list(output, &header, &rows, values);
        }
        ExperimentCommand::Describe(which) => {
            let found = Found::open(which)?;
            if output == Output::Json {
                print::out(json!(found.experiment));
            } else {
                print_yaml(&json!(found.experiment))?;
                print::out("");
                print_trials(&found, output);
            }
        }
    }
    Ok(0)
}

fn experiment_row(found: &Found) -> Vec<String> {
    let status = found.experiment.status.clone().unwrap_or_default();
    let best = status.best.map(|it| format!("{} (trial {})", it.metric, it.index));
    let phase = match status.phase.is_terminal() || found.is_running {
        true => format!("{:?}", status.phase),
        false => "Stopped".to_owned(),
    };
    vec![
        found.id(),
        phase,
        status.trials_created.to_string(),
        status.trials_closed.to_string(),
        best.unwrap_or_else(|| "-".to_owned()),
    ]
}

/// Carries out `stoker trial ...`.
pub(crate) fn trial(command: &TrialCommand, output: Output) -> Result<u8, Failure> {
    match command {
        TrialCommand::List(which) => print_trials(&Found::open(which)?, output),
        TrialCommand::Describe { which, trial } => {
            let found = Found::open(which)?;
            let object = json!(trial_object(found.trial(*trial)?));
            match output {
                Output::Json => print::out(object),
                Output::Text => print_yaml(&object)?,
            }
        }
        TrialCommand::Logs { which, trial, attempt } => {
            let found = Found::open(which)?;
            let attempts = &found.trial(*trial)?.status.attempts;
            let latest = attempts.last().map(|it| it.number);
            if let Some(wanted) = attempt
                && attempts.iter().all(|it| it.number != *wanted)
            {
                return Err(Failure::Input(match latest {
                    None => format!("trial {trial} has not started yet"),
                    Some(_) => format!(
                        "trial {trial} has no attempt {wanted}; it has {} from 0",
                        attempts.len()
                    ),
                }));
            }
            let attempt = attempt.or(latest).unwrap_or_default();
            print_logs(&found, *trial, attempt, output)?;
        }
    }
    Ok(0)
}

fn print_trials(found: &Found, output: Output) {
    let searched = found.searched();
    let metric = searched.metric.to_uppercase();
    let header = ["TRIAL", "PHASE", &metric, "BATCHES", "HYPERPARAMETERS", "CHECKPOINT"];
    let rows: Vec<Vec<String>> = found.trials.values().map(|it| run::row(it, &searched)).collect();
    let values = found.trials.values().map(|it| json!(trial_object(it))).collect();
    print_list(output, &header, &rows, values);
}

fn print_logs(found: &Found, trial: u32, attempt: u32, output: Output) -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::System(format!("cannot start: {error}")))?;
    runtime.block_on(async {
        let endpoint = found.experiment.spec.checkpoint_storage.endpoint.as_deref();
        let storage = Storage::open(&found.paths.root, endpoint)?;
        let folder = format!("{}/", layout::logs_path(&found.paths.trial(trial), attempt));
        for path in storage.list(&folder).await? {
            let bytes = storage.get(&path).await?;
            if output == Output::Text {
                print::raw(&bytes);
                continue;
            }
            for line in String::from_utf8_lossy(&bytes).lines() {
                print::out(json!({"trial": trial, "attempt": attempt, "line": line}));
            }
        }
        Ok(())
    })
}

/// Carries out `stoker checkpoint ...`.
pub(crate) fn checkpoint(command: &CheckpointCommand, output: Output) -> Result<u8, Failure> {
    let CheckpointCommand::List { which, trial } = command;
    let found = Found::open(which)?;
    if let Some(index) = trial {
        found.trial(*index)?;
    }
    let mut rows = Vec::new();
    let mut values = Vec::new();
    for (index, record) in found.trials.iter().filter(|it| trial.is_none_or(|t| t == *it.0)) {
        for it in &record.status.checkpoints {
            let at = found.paths.checkpoint(*index, &it.name);
            rows.push(vec![
                index.to_string(),
                it.batches.to_string(),
                it.metric.clone().unwrap_or_else(|| "-".to_owned()),
                it.bytes.to_string(),
                at.clone(),
            ]);
            values.push(json!({
                "trial": index, "name": it.name, "batches": it.batches, "metric": it.metric,
                "bytes": it.bytes, "manifestSha256": it.manifest_sha256, "checkpoint": at,
            }));
        }
    }
    let metric = found.searched().metric.to_uppercase();
    print_list(output, &["TRIAL", "BATCHES", &metric, "BYTES", "CHECKPOINT"], &rows, values);
    Ok(0)
}

fn print_list(output: Output, header: &[&str], rows: &[Vec<String>], values: Vec<Value>) {
    match output {
        Output::Json => print::out(Value::Array(values)),
        Output::Text => print::out(print::table(header, rows)),
    }
}

fn print_yaml(value: &Value) -> Result<(), Failure> {
    let text = serde_saphyr::to_string(value).map_err(|e| Failure::System(e.to_string()))?;
    print::out(text.trim_end());
    Ok(())
}

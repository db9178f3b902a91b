//! `stoker experiment|trial|checkpoint` for local runs: reads the records of `stoker run`.

mod logs;

use std::collections::BTreeMap;
use std::path::Path;

use stoker_api::experiment::{Experiment, ReopenedTrials};
use stoker_api::names::{LABEL_EXPERIMENT, LABEL_TRIAL};
use stoker_api::trial::Trial;
use stoker_engine::trial::TrialRecord;
use stoker_storage::Storage;

pub(crate) use self::logs::{cannot_follow, experiment_logs, trial_logs};
use crate::cluster::checkpoint::{Choice, Download, best_trial, no_best_trial, split_name};
use crate::cluster::{text, trial};
use crate::commands::names::TrialRef;
use crate::describe::{self, Description};
use crate::explain::Explained;
use crate::failure::Failure;
use crate::json;
use crate::list::experiments::Listed;
use crate::list::{self, List};
use crate::metrics::{MetricsFiles, TrialFiles};
use crate::print::{self, Format, Output};
use crate::reopen;
use crate::run::record::{RecordDir, is_locked, trial_object};
use crate::run::{MetricRanking, RunPaths, setup};
use crate::run_root::{self, RunRoot};

/// A local run.
#[derive(Debug)]
struct LocalRun {
    experiment: Experiment,
    trials: BTreeMap<u32, TrialRecord>,
    paths: RunPaths,
    /// Whether a runner holds the experiment's lock.
    is_running: bool,
    /// Whether this is the latest run of its name.
    is_current: bool,
}

impl LocalRun {
    fn open(root: Option<&str>, name: &str) -> Result<Self, Failure> {
        let run_root = RunRoot::resolve(root, None)?;
        let matches = read_runs(&run_root)?.into_iter().filter(|run| run.is_named(name));
        // Of several runs with the same name, use the latest. A run ID is unique.
        matches.max_by_key(|run| run.is_current).ok_or_else(|| {
            Failure::Input(format!(
                "no run of `{name}` in {}; `stoker experiment list --root URL` lists the runs",
                run_root.root
            ))
        })
    }

    /// Opens the run of an experiment, or of one of its trials.
    fn open_with_trial(root: Option<&str>, name: &str) -> Result<(Self, Option<u32>), Failure> {
        let trial = TrialRef::split(name);
        match (Self::open(root, name), trial) {
            (Ok(run), _) => Ok((run, None)),
            (Err(_), Some(trial)) => {
                let run = Self::open(root, &trial.experiment)?;
                run.trial(trial.index)?;
                Ok((run, Some(trial.index)))
            }
            (Err(error), None) => Err(error),
        }
    }

    fn is_named(&self, name: &str) -> bool {
        self.paths.name == name || self.id() == name
    }

    fn id(&self) -> String {
        run_root::run_id(&self.paths.name, &self.paths.uid)
    }

    /// Returns the name in commands: the experiment's, or the run ID if a later run has the name.
    fn name(&self) -> String {
        if self.is_current { self.paths.name.clone() } else { self.id() }
    }

    /// Returns a trial as the object that a cluster would hold.
    fn object(&self, trial: &TrialRecord) -> Trial {
        let mut object = trial_object(trial);
        let name = object.metadata.name.clone().unwrap_or_default();
        object.metadata.namespace = Some(self.paths.namespace.clone());
        object.metadata.labels = Some(BTreeMap::from([
            (LABEL_EXPERIMENT.to_owned(), self.paths.name.clone()),
            (LABEL_TRIAL.to_owned(), name),
        ]));
        object
    }

    fn ranking(&self) -> MetricRanking<'_> {
        let searcher = &self.experiment.spec.searcher;
        MetricRanking { metric: &searcher.metric, smaller_is_better: searcher.smaller_is_better }
    }

    /// Returns the phase, or `Stopped` if no runner trains the experiment.
    fn phase(&self) -> String {
        let phase = self.experiment.status.as_ref().map(|status| status.phase).unwrap_or_default();
        match phase.is_terminal() || self.is_running {
            true => format!("{phase:?}"),
            false => "Stopped".to_owned(),
        }
    }

    fn explained(&self) -> Explained {
        Explained::new(&self.experiment, self.trials.values())
    }

    fn storage(&self) -> Result<Storage, Failure> {
        let endpoint = self.experiment.spec.checkpoint_storage.endpoint.as_deref();
        Ok(Storage::open(&self.paths.root, endpoint)?)
    }

    fn trial(&self, index: u32) -> Result<&TrialRecord, Failure> {
        self.trials.get(&index).ok_or_else(|| {
            let num = self.trials.len();
            Failure::Input(format!(
                "trial `{}-{index}` not found: the experiment has {num} trials",
                self.name()
            ))
        })
    }
}

fn read_runs(run_root: &RunRoot) -> Result<Vec<LocalRun>, Failure> {
    let local = run_root.records_dir();
    let mut runs = Vec::new();
    let entries = match std::fs::read_dir(&local) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(runs),
        Err(error) => return Err(Failure::file("read", &local, error)),
    };
    for entry in entries {
        let path = entry.map_err(|error| Failure::file("read", &local, error))?.path();
        match read(run_root, &path.join("record")) {
            Ok(run) => runs.extend(run),
            // One unreadable record does not hide the other runs.
            Err(error) => print::err(format!("stoker: skipped a run: {error}")),
        }
    }
    runs.sort_by_key(LocalRun::id);
    Ok(runs)
}

fn read(run_root: &RunRoot, path: &Path) -> Result<Option<LocalRun>, Failure> {
    let folder = RecordDir::new(path.to_owned());
    let Some(experiment) = folder.experiment()? else { return Ok(None) };
    let metadata = experiment.metadata.clone();
    let paths = RunPaths {
        root: run_root.root.clone(),
        namespace: metadata.namespace.unwrap_or_default(),
        name: metadata.name.unwrap_or_default(),
        uid: metadata.uid.unwrap_or_default(),
    };
    let lock = run_root.records_dir().join(format!("{}.{}.lock", paths.namespace, paths.name));
    let is_running = is_locked(&lock);
    let key = format!("{}.{}.current", paths.namespace, paths.name);
    let current = setup::current_uid(&run_root.records_dir().join(key)).ok().flatten();
    let is_current = current.is_some_and(|uid| uid == paths.uid);
    Ok(Some(LocalRun { trials: folder.trials()?, experiment, paths, is_running, is_current }))
}

/// Lists all runs.
pub(crate) fn experiments(root: Option<&str>) -> Result<List, Failure> {
    let run_root = RunRoot::resolve(root, None)?;
    let runs = read_runs(&run_root)?.into_iter();
    let experiments = runs.map(|run| {
        let (name, phase) = (run.name(), run.phase());
        Listed { experiment: run.experiment, name, phase }
    });
    let empty = format!("no experiments in {}", run_root.root);
    Ok(list::experiments::list(experiments.collect(), false, empty))
}

/// Prints one run and its trials.
pub(crate) fn describe_experiment(
    root: Option<&str>,
    name: &str,
    format: Format,
) -> Result<(), Failure> {
    let run = LocalRun::open(root, name)?;
    let explained = run.explained();
    let importance = describe::importance(&run.experiment, run.trials.values());
    if format != Format::Text {
        let object = explained.add_to_experiment(json::object(&run.experiment));
        return print::object(&importance.add_to(run.ranking().metric, object), format);
    }
    let (id, paths) = (run.id(), &run.paths);
    print::out(Description {
        experiment: &run.experiment,
        trials: &run.trials.values().collect::<Vec<_>>(),
        explained: &explained,
        importance: &importance,
        phase: run.phase(),
        storage: paths.experiment(),
        checkpoint: &|index, name| paths.checkpoint(index, name),
        id: &id,
        is_local: true,
        now: text::now(),
    });
    Ok(())
}

/// Continues trials of a run that have ended.
pub(crate) fn continue_experiment(
    root: Option<&str>,
    name: &str,
    trials: ReopenedTrials,
    output: Output,
) -> Result<(), Failure> {
    let run = LocalRun::open(root, name)?;
    reopen::continue_locally(root, &run.experiment, trials, output)
}

/// Lists the trials of a run.
pub(crate) fn trials(root: Option<&str>, name: &str) -> Result<List, Failure> {
    let run = LocalRun::open(root, name)?;
    let trials: Vec<Trial> = run.trials.values().map(|trial| run.object(trial)).collect();
    Ok(list::trials::list(&run.experiment.spec.searcher, &run.name(), &trials))
}

/// Prints one trial of a run.
pub(crate) fn describe_trial(
    root: Option<&str>,
    trial: &TrialRef,
    format: Format,
) -> Result<(), Failure> {
    let run = LocalRun::open(root, &trial.experiment)?;
    let object = run.object(run.trial(trial.index)?);
    let explained = run.explained();
    if format != Format::Text {
        let object = explained.add_to_trial(trial.index, json::object(&object));
        return print::object(&object, format);
    }
    print::out(trial::render(&object, Some(&run.experiment), &explained, text::now()));
    Ok(())
}

/// Returns the metrics files of a run's trials, or of one trial.
pub(crate) fn metrics_files(
    root: Option<&str>,
    name: &str,
    index: Option<u32>,
) -> Result<MetricsFiles, Failure> {
    let run = LocalRun::open(root, name)?;
    let name = match index {
        Some(index) => format!("trial {} of {}", run.trial(index)?.spec.index, run.id()),
        None => format!("experiment {}", run.id()),
    };
    let trials = run.trials.iter().filter(|(number, _)| index.is_none_or(|of| of == **number));
    let files = |(number, trial): (&u32, &TrialRecord)| {
        TrialFiles::new(*number, run.paths.trial(*number), &trial.status.attempts)
    };
    Ok(MetricsFiles {
        name,
        storage: run.storage()?,
        trials: trials.map(files).collect(),
        searcher: run.experiment.spec.searcher.clone(),
    })
}

/// Lists the checkpoints of a run or of one trial.
pub(crate) fn checkpoints(
    root: Option<&str>,
    name: &str,
    trial: Option<u32>,
) -> Result<List, Failure> {
    let (run, named) = LocalRun::open_with_trial(root, name)?;
    if let Some(index) = trial {
        run.trial(index)?;
    }
    let is_selected =
        |index: u32| [trial, named].into_iter().flatten().all(|selected| selected == index);
    let searcher = &run.experiment.spec.searcher;
    let (name, mut list) = (run.name(), list::checkpoints::list(&searcher.metric));
    for (index, record) in run.trials.iter().filter(|(index, _)| is_selected(**index)) {
        for checkpoint in &record.status.checkpoints {
            let address = run.paths.checkpoint(*index, &checkpoint.name);
            let (of, smaller_is_better) = ((name.as_str(), *index), searcher.smaller_is_better);
            list::checkpoints::add(&mut list, of, checkpoint, smaller_is_better, address);
        }
    }
    Ok(list)
}

/// Downloads a checkpoint of a run.
pub(crate) async fn download(
    root: Option<&str>,
    name: &str,
    choice: &Choice,
    folder: &Path,
    output: Output,
) -> Result<(), Failure> {
    let (name, checkpoint) = split_name(name);
    let choice = choice.with_name(checkpoint)?;
    let (run, index) = LocalRun::open_with_trial(root, name)?;
    let index = index.or_else(|| best_trial(&run.experiment));
    let index = index.ok_or_else(|| no_best_trial(name))?;
    let trial = TrialRef { experiment: run.name(), index }.to_string();
    let checkpoints = &run.trial(index)?.status.checkpoints;
    let record = choice.of(&trial, checkpoints, run.ranking().smaller_is_better)?;
    let (storage, path) = (run.storage()?, run.paths.trial(index));
    Download { storage: &storage, trial: &trial, path: &path, record }
        .write_into(folder, output)
        .await
}

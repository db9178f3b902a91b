//! `stoker experiment|trial|checkpoint` for local runs: reads the records of `stoker run`.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Value, json};
use stoker_api::experiment::{Experiment, ReopenedTrials};
use stoker_engine::trial::TrialRecord;
use stoker_storage::{Storage, layout};

use crate::cluster::checkpoint::{Choice, Download, Lines};
use crate::cluster::text;
use crate::commands::block_on;
use crate::describe::{self, Description};
use crate::explain::Explained;
use crate::failure::Failure;
use crate::metrics::{MetricsFiles, TrialFiles};
use crate::print::{self, Output};
use crate::reopen;
use crate::run::record::{RecordDir, is_locked, trial_object};
use crate::run::{self, MetricRanking, RunPaths, setup};
use crate::run_root::{self, RunRoot};

/// A local run.
#[derive(Debug)]
struct LocalRun {
    experiment: Experiment,
    trials: BTreeMap<u32, TrialRecord>,
    paths: RunPaths,
    /// Whether a runner holds the experiment's lock.
    is_running: bool,
}

impl LocalRun {
    fn open(root: Option<&str>, name: &str) -> Result<Self, Failure> {
        let run_root = RunRoot::resolve(root, None)?;
        let matches = read_runs(&run_root)?.into_iter().filter(|run| run.is_named(name));
        let is_current = |run: &Self| {
            let key = format!("{}.{}.current", run.paths.namespace, run.paths.name);
            let uid = setup::current_uid(&run_root.records_dir().join(key)).ok().flatten();
            uid.is_some_and(|uid| uid == run.paths.uid)
        };
        // Of several runs with the same name, use the latest. A run ID is unique.
        matches.max_by_key(is_current).ok_or_else(|| {
            Failure::Input(format!(
                "no run of `{name}` in {}; `stoker experiment list --root URL` lists the runs",
                run_root.root
            ))
        })
    }

    fn is_named(&self, name: &str) -> bool {
        self.paths.name == name || self.id() == name
    }

    fn id(&self) -> String {
        run_root::run_id(&self.paths.name, &self.paths.uid)
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
            Failure::Input(format!("trial {index} of {} not found: it has {num} trials", self.id()))
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
    Ok(Some(LocalRun { trials: folder.trials()?, experiment, paths, is_running }))
}

/// Prints all runs.
pub(crate) fn list_experiments(root: Option<&str>, output: Output) -> Result<(), Failure> {
    let runs = read_runs(&RunRoot::resolve(root, None)?)?;
    let header = ["ID", "PHASE", "TRIALS", "ENDED", "BEST"];
    let rows: Vec<Vec<String>> = runs.iter().map(experiment_row).collect();
    let values = runs.iter().map(|run| json!(run.experiment)).collect();
    print_list(output, &header, &rows, values);
    Ok(())
}

/// Prints one run and its trials.
pub(crate) fn describe_experiment(
    root: Option<&str>,
    name: &str,
    output: Output,
) -> Result<(), Failure> {
    let run = LocalRun::open(root, name)?;
    let explained = run.explained();
    let importance = describe::importance(&run.experiment, run.trials.values());
    if output == Output::Json {
        let object = explained.add_to_experiment(json!(run.experiment));
        print::out(importance.add_to(run.ranking().metric, object));
        return Ok(());
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

fn experiment_row(run: &LocalRun) -> Vec<String> {
    let status = run.experiment.status.clone().unwrap_or_default();
    let best = status.best.map(|best| format!("{} (trial {})", best.metric, best.index));
    vec![
        run.id(),
        run.phase(),
        status.trials_created.to_string(),
        status.trials_closed.to_string(),
        best.unwrap_or_else(|| "-".to_owned()),
    ]
}

/// Prints the trials of a run.
pub(crate) fn list_trials(root: Option<&str>, name: &str, output: Output) -> Result<(), Failure> {
    print_trials(&LocalRun::open(root, name)?, output);
    Ok(())
}

/// Prints one trial of a run.
pub(crate) fn describe_trial(
    root: Option<&str>,
    name: &str,
    index: u32,
    output: Output,
) -> Result<(), Failure> {
    let run = LocalRun::open(root, name)?;
    let object = json!(trial_object(run.trial(index)?));
    let explained = run.explained();
    match output {
        Output::Json => print::out(explained.add_to_trial(index, object)),
        Output::Text => {
            print_yaml(&object)?;
            if let Some(why) = explained.why(index) {
                print::out(format!("\nWhy: {why}"));
            }
            print_section(&explained.trial_section(index));
        }
    }
    Ok(())
}

/// Prints the logs of one attempt of a trial.
pub(crate) fn logs(
    root: Option<&str>,
    name: &str,
    index: u32,
    attempt: Option<u32>,
    output: Output,
) -> Result<(), Failure> {
    let run = LocalRun::open(root, name)?;
    let attempts = &run.trial(index)?.status.attempts;
    let latest = attempts.last().map(|attempt| attempt.number);
    if let Some(number) = attempt
        && attempts.iter().all(|attempt| attempt.number != number)
    {
        return Err(Failure::Input(match latest {
            None => format!("trial {index} has not started yet"),
            Some(latest) => {
                format!("attempt {number} of trial {index} not found; the latest is {latest}")
            }
        }));
    }
    let attempt = attempt.or(latest).unwrap_or_default();
    block_on(print_logs(&run, index, attempt, output))
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

fn print_trials(run: &LocalRun, output: Output) {
    let ranking = run.ranking();
    let metric = ranking.metric.to_uppercase();
    let count = run::position_header(&run.experiment.spec.searcher);
    let header = ["TRIAL", "PHASE", &metric, count, "HYPERPARAMETERS", "CHECKPOINT"];
    let rows: Vec<Vec<String>> =
        run.trials.values().map(|trial| run::row(trial, &ranking)).collect();
    let values = run.trials.values().map(|trial| json!(trial_object(trial))).collect();
    print_list(output, &header, &rows, values);
}

async fn print_logs(
    run: &LocalRun,
    trial: u32,
    attempt: u32,
    output: Output,
) -> Result<(), Failure> {
    let storage = run.storage()?;
    let folder = format!("{}/", layout::logs_path(&run.paths.trial(trial), attempt));
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
}

/// Prints the checkpoints of a run.
pub(crate) fn list_checkpoints(
    root: Option<&str>,
    name: &str,
    trial: Option<u32>,
    output: Output,
) -> Result<(), Failure> {
    let run = LocalRun::open(root, name)?;
    if let Some(index) = trial {
        run.trial(index)?;
    }
    let mut lines = Lines::default();
    for (index, record) in run.trials.iter().filter(|(index, _)| trial.is_none_or(|t| t == **index))
    {
        for checkpoint in &record.status.checkpoints {
            lines.add(*index, checkpoint, run.paths.checkpoint(*index, &checkpoint.name));
        }
    }
    lines.print(run.ranking().metric, output);
    Ok(())
}

/// Downloads a checkpoint of a run.
pub(crate) async fn download(
    root: Option<&str>,
    name: &str,
    index: u32,
    choice: &Choice,
    folder: &Path,
    output: Output,
) -> Result<(), Failure> {
    let run = LocalRun::open(root, name)?;
    let trial = format!("{name}-{index}");
    let checkpoints = &run.trial(index)?.status.checkpoints;
    let record = choice.of(&trial, checkpoints, run.ranking().smaller_is_better)?;
    let (storage, path) = (run.storage()?, run.paths.trial(index));
    Download { storage: &storage, trial: &trial, path: &path, record }
        .write_into(folder, output)
        .await
}

fn print_list(output: Output, header: &[&str], rows: &[Vec<String>], values: Vec<Value>) {
    match output {
        Output::Json => print::out(Value::Array(values)),
        Output::Text => print::out(print::table(header, rows)),
    }
}

/// Prints tables below other output. They begin with an empty line.
fn print_section(section: &str) {
    if !section.is_empty() {
        print::out(section.strip_prefix('\n').unwrap_or(section));
    }
}

fn print_yaml(value: &Value) -> Result<(), Failure> {
    let text = serde_saphyr::to_string(value)
        .map_err(|error| Failure::System(format!("cannot write YAML: {error}")))?;
    print::out(text.trim_end());
    Ok(())
}

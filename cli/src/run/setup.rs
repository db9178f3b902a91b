//! Setup of a run: opens or creates its record and checks that it can run on this machine.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff;
use kube::core::ObjectMeta;
use serde::Serialize;
use stoker_api::decisions::PriorTrial;
use stoker_api::experiment::{CheckpointStorage, Experiment, ExperimentSpec, ExperimentStatus};
use stoker_api::names::ENV_DEVICE;
use stoker_api::validate::{check_edit, with_edits};
use stoker_engine::devices::GpuPool;
use stoker_engine::experiment::{PriorExperiment, is_requested};
use stoker_engine::trial::{TrialRecord, is_open};

use super::cores;
use super::display::View;
use super::programs::{find_program, require_program};
use super::record::{self, Lock, RecordDir};
use super::request::{self, is_final};
use super::spec_changes::spec_changes;
use crate::cluster::text::{created, now};
use crate::endpoint;
use crate::failure::Failure;
use crate::file::{Loaded, Metadata};
use crate::run_root::RunRoot;
use crate::searcher::Target;

/// Annotation with the storage root of a run.
pub(crate) const ANNOTATION_ROOT: &str = "stoker.dev/root";

/// Remedy if the file differs from the record. An earlier command may have had other overrides.
const SET_REMEDY: &str = "to keep the run as it is, undo changes of the file and repeat the --set \
                          of the earlier command; --fresh starts over";

/// Record that only this process may write.
#[derive(Debug)]
pub(crate) struct OpenedRecord {
    pub(crate) folder: RecordDir,
    pub(crate) experiment: Experiment,
    pub(crate) trials: BTreeMap<u32, TrialRecord>,
    /// UID of the experiment.
    pub(crate) uid: String,
    /// Whether this resumes an earlier run.
    pub(crate) is_resumed: bool,
    /// Numbers of the search that the file changes since the earlier run, with both values.
    pub(crate) edits: Vec<String>,
    /// Whether `stoker experiment continue` has asked to reopen trials since then.
    pub(crate) is_reopened: bool,
    /// Trials of earlier experiments, if the search has not begun.
    pub(crate) prior: Vec<PriorTrial>,
    /// Lock of the record, held until the runner exits.
    pub(crate) _lock: Lock,
    /// File that trainers lock while they are alive.
    pub(crate) trainers: PathBuf,
}

/// Returns whether the experiment in `loaded` has a run with the same spec, except for edits. Its
/// record may be damaged.
pub(crate) fn has_run(run_root: &RunRoot, loaded: &Loaded) -> bool {
    let key = format!("{}.{}", loaded.namespace, loaded.name);
    let Ok(Some(folder)) = latest_record(run_root, &key, &loaded.name) else { return false };
    match folder.experiment() {
        Ok(None) => false,
        Ok(Some(run)) => edited_spec(&run.spec, &loaded.valid.spec, &folder).is_ok(),
        // `open` reports the damage.
        Err(_) => true,
    }
}

/// Sets the endpoint of an S3 root that the file does not contain: the recorded one if this resumes
/// a run, else the one in the environment. It is recorded with the run. Returns a note if the
/// environment has one.
///
/// # Errors
///
/// [`Failure::Input`] if the endpoint of the environment is used and is not a URL.
pub(crate) fn set_endpoint(
    loaded: &mut Loaded,
    run_root: &RunRoot,
    fresh: bool,
    environment: Option<String>,
) -> Result<Option<String>, Failure> {
    let environment = environment.as_deref();
    let key = format!("{}.{}", loaded.namespace, loaded.name);
    let earlier = latest_record(run_root, &key, &loaded.name).ok().flatten();
    // `open` reports a damaged record.
    let earlier = earlier.and_then(|folder| folder.experiment().ok().flatten());
    let storage = &mut loaded.valid.spec.checkpoint_storage;
    let url = &run_root.root;
    let Some(run) = earlier.filter(|_| !fresh) else {
        let is_used = endpoint::fill(&mut storage.endpoint, url, environment)?;
        let urls = if is_used { vec![url.clone()] } else { vec![] };
        return Ok(endpoint::note_of_use(&urls, environment));
    };
    // A run without a recorded endpoint continues without one.
    let is_in_file = storage.endpoint.is_some();
    *storage = with_recorded(storage, &run.spec.checkpoint_storage);
    let environment = environment.filter(|_| !is_in_file);
    Ok(endpoint::note_of_resume("run", url, storage.endpoint.as_deref(), environment))
}

/// Returns the storage with the recorded endpoint if it has none.
fn with_recorded(given: &CheckpointStorage, recorded: &CheckpointStorage) -> CheckpointStorage {
    let endpoint = given.endpoint.as_ref().or(recorded.endpoint.as_ref());
    CheckpointStorage { endpoint: endpoint.cloned(), ..given.clone() }
}

/// Opens the record of the experiment in `loaded`, or creates one. With `fresh`, always creates a
/// new record and keeps the earlier one.
pub(crate) fn open(
    run_root: &RunRoot,
    loaded: &Loaded,
    fresh: bool,
) -> Result<OpenedRecord, Failure> {
    let local = run_root.records_dir();
    std::fs::create_dir_all(&local).map_err(|error| Failure::file("create", &local, error))?;
    let key = format!("{}.{}", loaded.namespace, loaded.name);
    let lock = Lock::take_to_run(&local.join(format!("{key}.lock")), "experiment", &loaded.name)?;
    let trainers = local.join(format!("{key}.trainers"));
    record::wait_for_trainers(&trainers)?;
    let pointer = local.join(format!("{key}.current"));
    if !fresh && let Some(uid) = current_uid(&pointer)? {
        let folder = RecordDir::new(run_root.record_dir(&loaded.name, &uid));
        if let Some(mut experiment) = folder.experiment().map_err(with_remedy)? {
            let edits = edit(&mut experiment, &loaded.valid.spec, &folder)?;
            let trials = folder.trials().map_err(with_remedy)?;
            folder.check_complete(&trials).map_err(with_remedy)?;
            let status = experiment.status.as_ref();
            if status.is_some_and(|status| status.phase.is_terminal()) {
                request::withdraw_late(folder.path())?;
            }
            let has_ended = |index: u32| trials.get(&index).is_some_and(|record| !is_open(record));
            request::withdraw_late_kills(folder.path(), has_ended)?;
            let log = status.map_or(&[][..], |status| &status.log);
            let is_reopened = is_requested(experiment.spec.reopen, log);
            let has_begun = !log.is_empty();
            let prior = if has_begun { vec![] } else { prior_trials(run_root, loaded)? };
            folder.unmark_deleted()?;
            return Ok(OpenedRecord {
                prior,
                folder,
                experiment,
                trials,
                uid,
                is_resumed: true,
                edits,
                is_reopened,
                _lock: lock,
                trainers,
            });
        }
    }
    let prior = prior_trials(run_root, loaded)?;
    // With --fresh, the earlier record may be damaged.
    let earlier = latest_record(run_root, &key, &loaded.name).ok().flatten();
    let earlier = earlier.and_then(|folder| folder.experiment().ok().flatten());
    let uid = record::random_hex(16)?;
    let folder = RecordDir::new(run_root.record_dir(&loaded.name, &uid));
    folder.create()?;
    let mut experiment = new_experiment(run_root, loaded, &uid);
    if let Some(earlier) = &earlier {
        set_later_creation(&mut experiment.metadata, &earlier.metadata);
    }
    folder.save_experiment(&experiment)?;
    record::write(&pointer, format!("{uid}\n").as_bytes())?;
    let trials = BTreeMap::new();
    Ok(OpenedRecord {
        prior,
        folder,
        experiment,
        trials,
        uid,
        is_resumed: false,
        edits: vec![],
        is_reopened: false,
        _lock: lock,
        trainers,
    })
}

/// Adds the remedy to the error of a record that cannot be read.
pub(crate) fn with_remedy(error: Failure) -> Failure {
    Failure::System(format!("{error}; restore the file, or use --fresh to start over"))
}

/// Reads the trials of the runs that `spec.searcher.priorTrials` names.
fn prior_trials(run_root: &RunRoot, loaded: &Loaded) -> Result<Vec<PriorTrial>, Failure> {
    let Some(spec) = &loaded.valid.spec.searcher.prior_trials else { return Ok(vec![]) };
    let mut runs = vec![];
    for (i, name) in spec.experiments.iter().enumerate() {
        let folder = latest_record(run_root, &format!("{}.{name}", loaded.namespace), name)?;
        let experiment = folder.as_ref().map(RecordDir::experiment).transpose()?.flatten();
        let (Some(folder), Some(experiment)) = (folder, experiment) else {
            return Err(Failure::Input(format!(
                "spec.searcher.priorTrials.experiments[{i}] is `{name}`: no such run in {}; run it \
                 with the same --root first, or remove the name",
                run_root.root
            )));
        };
        runs.push((experiment.spec.searcher, folder.trials()?));
    }
    let experiments = spec.experiments.iter().zip(&runs).map(|(name, (searcher, trials))| {
        let trials = trials.values().collect();
        PriorExperiment { name, searcher, trials }
    });
    let experiments: Vec<_> = experiments.collect();
    stoker_engine::experiment::prior_trials(&loaded.valid, &experiments).map_err(Failure::Input)
}

/// Records the given spec if it differs from the recorded one in fields that may be edited. Returns
/// the differences.
fn edit(
    experiment: &mut Experiment,
    given: &ExperimentSpec,
    folder: &RecordDir,
) -> Result<Vec<String>, Failure> {
    let recorded = &experiment.spec;
    let edited = edited_spec(recorded, given, folder)?;
    let is_edited = edited.searcher != recorded.searcher;
    if is_edited && is_final(recorded.state) {
        return Err(Failure::Input(
            "cannot edit the experiment: it was cancelled; use --fresh to start over".to_owned(),
        ));
    }
    let created = experiment.status.as_ref().map_or(0, |status| status.trials_created);
    check_edit(&recorded.searcher, &given.searcher, created).map_err(|errors| {
        let errors: Vec<String> = errors.iter().map(ToString::to_string).collect();
        Failure::Input(format!(
            "cannot edit the experiment:\n  {}\n{SET_REMEDY}",
            errors.join("\n  ")
        ))
    })?;
    let edits = spec_changes("spec.searcher", &recorded.searcher, &edited.searcher)?;
    if is_edited {
        experiment.spec = edited;
        folder.save_experiment(experiment)?;
    }
    Ok(edits)
}

/// Returns the recorded spec with the given values of the fields that may be edited. Fails if
/// another field differs.
fn edited_spec(
    recorded: &ExperimentSpec,
    given: &ExperimentSpec,
    folder: &RecordDir,
) -> Result<ExperimentSpec, Failure> {
    let searcher = with_edits(&recorded.searcher, &given.searcher);
    let edited = ExperimentSpec { searcher, ..recorded.clone() };
    // Commands change the recorded state, and the file's is that of a new run.
    let (reopen, state) = (given.reopen, given.state);
    let compared = ExperimentSpec { reopen, state, ..edited.clone() };
    let checkpoint_storage = with_recorded(&given.checkpoint_storage, &recorded.checkpoint_storage);
    let given = ExperimentSpec { checkpoint_storage, ..given.clone() };
    refuse_changes("experiment", &compared, &given, folder.path())?;
    Ok(edited)
}

/// Returns the record of the latest run or job with this name, if any. `key` begins the names of
/// its lock and its pointer.
pub(crate) fn latest_record(
    run_root: &RunRoot,
    key: &str,
    name: &str,
) -> Result<Option<RecordDir>, Failure> {
    let uid = current_uid(&run_root.records_dir().join(format!("{key}.current")))?;
    Ok(uid.map(|uid| RecordDir::new(run_root.record_dir(name, &uid))))
}

/// Returns the UID of the latest run, if any.
pub(crate) fn current_uid(pointer: &Path) -> Result<Option<String>, Failure> {
    match std::fs::read_to_string(pointer) {
        Ok(text) => Ok(Some(text.trim().to_owned())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Failure::file("read", pointer, error)),
    }
}

fn new_experiment(run_root: &RunRoot, loaded: &Loaded, uid: &str) -> Experiment {
    let mut experiment = Experiment::new(&loaded.name, loaded.valid.spec.clone());
    experiment.spec.reopen = None;
    experiment.metadata.namespace = Some(loaded.namespace.clone());
    experiment.metadata.uid = Some(uid.to_owned());
    let annotations = [(ANNOTATION_ROOT.to_owned(), run_root.root.clone())];
    set_metadata(&mut experiment.metadata, &loaded.metadata, annotations);
    experiment.status = Some(ExperimentStatus::default());
    experiment
}

/// Sets labels, annotations and creation time of a new object, as a cluster would.
pub(crate) fn set_metadata(
    metadata: &mut ObjectMeta,
    file: &Metadata,
    annotations: impl IntoIterator<Item = (String, String)>,
) {
    metadata.labels = Some(file.labels.clone()).filter(|labels| !labels.is_empty());
    metadata.annotations = Some(file.annotations.clone().into_iter().chain(annotations).collect());
    metadata.creation_timestamp = jiff::Timestamp::from_second(now().0).ok().map(Time);
}

/// Makes the creation time at least a second later than the time of an earlier run. Of several runs
/// with a name, the latest is selected by this time, which has no fractions of a second.
fn set_later_creation(metadata: &mut ObjectMeta, earlier: &ObjectMeta) {
    let Some(earlier) = created(earlier) else { return };
    if created(metadata) <= Some(earlier) {
        let later = jiff::Timestamp::from_second(earlier.plus(1).0);
        metadata.creation_timestamp = later.ok().map(Time);
    }
}

/// Fails if the spec of `what` differs from the recorded one.
pub(crate) fn refuse_changes<S: Serialize>(
    what: &str,
    recorded: &S,
    given: &S,
    folder: &Path,
) -> Result<(), Failure> {
    let changes = spec_changes("spec", recorded, given)?;
    if changes.is_empty() {
        return Ok(());
    }
    Err(Failure::Input(format!(
        "cannot resume the {what}: its spec has changed:\n  {}\n{SET_REMEDY} (record in {})",
        changes.join("\n  "),
        folder.display()
    )))
}

/// Program that starts the ranks of a multi-rank trial.
pub(crate) const LAUNCHER: &str = "stoker-trainer";

/// Returns the number of slots.
///
/// With GPUs: `wanted`, at most and by default one per GPU. Without: `wanted`, by default one per
/// CPU core, but enough for one trial.
pub(crate) fn slots(
    wanted: Option<u32>,
    slots_per_trial: u32,
    devices: &GpuPool,
    view: &View,
) -> u32 {
    if devices.is_empty() {
        // A gang that shares few cores is slow, but with fewer slots it would never start.
        return wanted.unwrap_or_else(|| cores().max(slots_per_trial));
    }
    let gpus = u32::try_from(devices.len()).unwrap_or(u32::MAX);
    let slots = wanted.unwrap_or(gpus).min(gpus);
    view.print_message(&format!(
        "using {slots} of {gpus} GPUs, {slots_per_trial} for each trial; set {ENV_DEVICE}=cpu to \
         train on CPUs"
    ));
    slots
}

/// Fails if a trial needs more slots or GPUs than available, if a program is not found, or if the
/// external searcher is on another machine.
pub(crate) fn check_runnable(
    spec: &ExperimentSpec,
    slots: u32,
    devices: &GpuPool,
) -> Result<(), Failure> {
    let needed = spec.resources.slots_per_trial;
    let gpus = devices.len();
    if gpus > 0 && needed as usize > gpus {
        return Err(Failure::Input(format!(
            "spec.resources.slotsPerTrial is {needed}, but {gpus} GPUs are visible, so no trial \
             can start; reduce slotsPerTrial or set {ENV_DEVICE}=cpu to train on CPUs"
        )));
    }
    if needed > slots {
        return Err(Failure::Input(format!(
            "spec.resources.slotsPerTrial is {needed}, but --slots is {slots}, so no trial can \
             start; set --slots to at least {needed} or reduce slotsPerTrial"
        )));
    }
    if needed > 1 && find_program(LAUNCHER).is_none() {
        return Err(Failure::Input(format!(
            "cannot start trials with {needed} ranks: `{LAUNCHER}` is neither next to `stoker` nor \
             on PATH; install it or set spec.resources.slotsPerTrial to 1"
        )));
    }
    if let Some(search) = &spec.searcher.external {
        Target::new(search)?;
    }
    let program = spec.entrypoint.command.first().map_or("", String::as_str);
    require_program("spec.entrypoint.command[0]", program, Path::new("."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_runs_have_later_creation_times() {
        let metadata = |second: Option<i64>| ObjectMeta {
            creation_timestamp: second
                .map(|second| Time(jiff::Timestamp::from_second(second).unwrap())),
            ..ObjectMeta::default()
        };
        for (earlier, own, expected) in
            [(Some(5), 5, 6), (Some(9), 5, 10), (Some(4), 5, 5), (None, 5, 5)]
        {
            let mut own = metadata(Some(own));
            set_later_creation(&mut own, &metadata(earlier));
            assert_eq!(own, metadata(Some(expected)), "{earlier:?}");
        }
    }

    fn load(folder: &Path, storage: &str) -> Loaded {
        let file = folder.join("experiment.yaml");
        let text = format!(
            "apiVersion: stoker.dev/v1alpha1\nkind: Experiment\nmetadata: {{name: a}}\nspec:\n  \
             entrypoint: {{command: [x]}}\n  checkpointStorage: {{{storage}}}\n  \
             searcher: {{metric: loss, maxLength: {{batches: 1}}, single: {{}}}}\n"
        );
        std::fs::write(&file, text).unwrap();
        crate::file::load(&file, &[]).unwrap()
    }

    #[test]
    fn endpoint_of_environment_is_recorded_and_kept() {
        let folder = tempfile::tempdir().unwrap();
        let root = RunRoot { root: "s3://runs/a".to_owned(), state_dir: folder.path().to_owned() };
        let endpoint = |loaded: &Loaded| loaded.valid.spec.checkpoint_storage.endpoint.clone();
        let set = |storage: &str, fresh: bool, environment: Option<&str>| {
            let mut loaded = load(folder.path(), storage);
            set_endpoint(&mut loaded, &root, fresh, environment.map(str::to_owned)).unwrap();
            loaded
        };
        let (first, other) = (Some("http://127.0.0.1:1"), Some("http://127.0.0.1:2"));
        let loaded = set("", false, first);
        assert_eq!(endpoint(&loaded).as_deref(), first);
        let experiment = open(&root, &loaded, false).unwrap().experiment;
        assert_eq!(experiment.spec.checkpoint_storage.endpoint.as_deref(), first);
        // The run resumes in an environment without the variable, or with another value.
        for environment in [None, other] {
            let loaded = set("", false, environment);
            assert_eq!(endpoint(&loaded).as_deref(), first);
            assert!(open(&root, &loaded, false).unwrap().is_resumed);
        }
        // As in `load`, which compares before the endpoint is set.
        assert!(has_run(&root, &load(folder.path(), "")));
        let loaded = set("endpoint: 'http://127.0.0.1:2'", false, first);
        let error = open(&root, &loaded, false).unwrap_err().to_string();
        assert!(error.contains("spec.checkpointStorage.endpoint: was"), "{error}");
        assert_eq!(endpoint(&set("", true, other)).as_deref(), other);
        // A run in Amazon S3 stays there.
        drop(open(&root, &set("", true, None), true).unwrap());
        assert_eq!(endpoint(&set("", false, first)), None);
    }
}

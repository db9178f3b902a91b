//! From a file to a record that may be written: found and unchanged, or new.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::Value;
use stoker_api::experiment::{Experiment, ExperimentSpec, ExperimentStatus};
use stoker_api::names::ENV_DEVICE;
use stoker_engine::devices::Devices;
use stoker_engine::trial::TrialRecord;

use super::display::View;
use super::record::{self, Folder, Lock};
use super::{cores, process};
use crate::failure::Failure;
use crate::file::Loaded;
use crate::place::Place;

/// Annotation that holds the storage root of a run.
pub(crate) const ANNOTATION_ROOT: &str = "stoker.dev/root";

/// A record that this process alone may write.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) folder: Folder,
    pub(crate) experiment: Experiment,
    pub(crate) trials: BTreeMap<u32, TrialRecord>,
    /// The experiment's unique id.
    pub(crate) uid: String,
    /// Whether the run goes on from an earlier one.
    pub(crate) is_continued: bool,
    /// Held until the end.
    pub(crate) _lock: Lock,
    /// The file that trainers hold a lock on.
    pub(crate) trainers: PathBuf,
}

/// Opens the record of the experiment in `loaded`, or makes one. With `fresh` an earlier one stays
/// where it is and a new one is made.
pub(crate) fn open(place: &Place, loaded: &Loaded, fresh: bool) -> Result<Opened, Failure> {
    let local = place.local();
    std::fs::create_dir_all(&local).map_err(|error| Failure::file("create", &local, error))?;
    let key = format!("{}.{}", loaded.namespace, loaded.name);
    let lock = Lock::take(&local.join(format!("{key}.lock")))?;
    let trainers = local.join(format!("{key}.trainers"));
    record::wait_for_trainers(&trainers)?;
    let pointer = local.join(format!("{key}.current"));
    if !fresh && let Some(uid) = current(&pointer)? {
        let folder = Folder::new(place.record(&loaded.name, &uid));
        if let Some(experiment) = folder.experiment()? {
            refuse_changes("experiment", &experiment.spec, &loaded.valid.spec, folder.path())?;
            let trials = folder.trials()?;
            return Ok(Opened {
                folder,
                experiment,
                trials,
                uid,
                is_continued: true,
                _lock: lock,
                trainers,
            });
        }
    }
    let uid = record::random_hex(16)?;
    let folder = Folder::new(place.record(&loaded.name, &uid));
    folder.create()?;
    let experiment = object(place, loaded, &uid);
    folder.save_experiment(&experiment)?;
    record::write(&pointer, format!("{uid}\n").as_bytes())?;
    let trials = BTreeMap::new();
    Ok(Opened { folder, experiment, trials, uid, is_continued: false, _lock: lock, trainers })
}

/// The unique id of the latest run, if there was one.
pub(crate) fn current(pointer: &Path) -> Result<Option<String>, Failure> {
    match std::fs::read_to_string(pointer) {
        Ok(text) => Ok(Some(text.trim().to_owned())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Failure::file("read", pointer, error)),
    }
}

fn object(place: &Place, loaded: &Loaded, uid: &str) -> Experiment {
    let mut experiment = Experiment::new(&loaded.name, loaded.valid.spec.clone());
    experiment.metadata.namespace = Some(loaded.namespace.clone());
    experiment.metadata.uid = Some(uid.to_owned());
    let annotations = BTreeMap::from([(ANNOTATION_ROOT.to_owned(), place.root.clone())]);
    experiment.metadata.annotations = Some(annotations);
    experiment.status = Some(ExperimentStatus::default());
    experiment
}

/// Refuses a spec that is not the one that was recorded of `what`.
pub(crate) fn refuse_changes<S: Serialize>(
    what: &str,
    recorded: &S,
    given: &S,
    folder: &Path,
) -> Result<(), Failure> {
    let value = |spec| serde_json::to_value(spec).map_err(|e| Failure::System(e.to_string()));
    let mut changes = Vec::new();
    differences("spec", &value(recorded)?, &value(given)?, &mut changes);
    if changes.is_empty() {
        return Ok(());
    }
    Err(Failure::Input(format!(
        "the {what} was begun with another file:\n  {}\nundo the changes to go on with it, or \
         use --fresh to start over (its record is in {})",
        changes.join("\n  "),
        folder.display()
    )))
}

/// Names what differs, by path.
fn differences(path: &str, old: &Value, new: &Value, changes: &mut Vec<String>) {
    match (old, new) {
        (Value::Object(old), Value::Object(new)) => {
            let mut names: Vec<&String> = old.keys().chain(new.keys()).collect();
            names.sort();
            names.dedup();
            for name in names {
                let side = |of: &serde_json::Map<String, Value>| of.get(name).cloned();
                let (old, new) = (side(old), side(new));
                let path = format!("{path}.{name}");
                match (old, new) {
                    (Some(old), Some(new)) => differences(&path, &old, &new, changes),
                    (Some(old), None) => {
                        changes.push(format!("{path}: was {}, now unset", masked(&old)));
                    }
                    (None, Some(new)) => {
                        changes.push(format!("{path}: was unset, now {}", masked(&new)));
                    }
                    (None, None) => {}
                }
            }
        }
        (old, new) if old != new => {
            changes.push(format!("{path}: was {}, now {}", masked(old), masked(new)));
        }
        _ => {}
    }
}

/// Returns `value` with the values of environment variables replaced: they may be credentials.
fn masked(value: &Value) -> Value {
    match value {
        Value::Array(items) => items.iter().map(masked).collect(),
        Value::Object(fields) => {
            let is_variable = fields.contains_key("name") && fields.contains_key("value");
            let field = |(name, value): (&String, &Value)| match is_variable && name == "value" {
                true => (name.clone(), Value::from("***")),
                false => (name.clone(), masked(value)),
            };
            fields.iter().map(field).collect()
        }
        other => other.clone(),
    }
}

/// The program that starts several ranks.
pub(crate) const LAUNCHER: &str = "stoker-trainer";

/// Returns the slots of a run: one for each GPU, or as many as wanted if there are none.
pub(crate) fn slots(
    wanted: Option<u32>,
    slots_per_trial: u32,
    devices: &Devices,
    view: &View,
) -> u32 {
    if devices.is_empty() {
        // A gang that shares few cores is slow; a gang that never starts is worse.
        return wanted.unwrap_or_else(|| cores().max(slots_per_trial));
    }
    let gpus = u32::try_from(devices.len()).unwrap_or(u32::MAX);
    let slots = wanted.unwrap_or(gpus).min(gpus);
    view.say(&format!(
        "using {slots} of {gpus} GPUs, {slots_per_trial} for each trial; set {ENV_DEVICE}=cpu to \
         train on CPUs"
    ));
    slots
}

/// Refuses what this version cannot run here, and a program that is not there, before anything is
/// started.
pub(crate) fn check_runnable(
    spec: &ExperimentSpec,
    slots: u32,
    devices: &Devices,
) -> Result<(), Failure> {
    let needed = spec.resources.slots_per_trial;
    let gpus = devices.len();
    if gpus > 0 && needed as usize > gpus {
        return Err(Failure::Input(format!(
            "spec.resources.slotsPerTrial is {needed}, but {gpus} GPUs are visible: no trial could \
             ever start; give the trials fewer ranks, or set {ENV_DEVICE}=cpu to train on CPUs"
        )));
    }
    if needed > slots {
        return Err(Failure::Input(format!(
            "spec.resources.slotsPerTrial is {needed}, but --slots is {slots}: no trial could ever \
             start; give it {needed} slots or the trials fewer ranks"
        )));
    }
    if needed > 1 && find_program(LAUNCHER).is_none() {
        return Err(Failure::Input(format!(
            "spec.resources.slotsPerTrial is {needed}: `{LAUNCHER}`, which starts the ranks of a \
             trial, is neither beside `stoker` nor on PATH; install it or set slotsPerTrial to 1"
        )));
    }
    let program = spec.entrypoint.command.first().map_or("", String::as_str);
    if find_program(program).is_none() {
        return Err(Failure::Input(format!(
            "spec.entrypoint.command[0] is `{program}`: no such program beside `stoker` or on \
             PATH; install it or write its path"
        )));
    }
    Ok(())
}

/// The file of a program that is beside `stoker` or on `PATH`, or named by its path.
pub(crate) fn find_program(program: &str) -> Option<PathBuf> {
    use std::os::unix::fs::PermissionsExt as _;
    let is_program = |path: &PathBuf| {
        path.metadata().is_ok_and(|it| it.is_file() && it.permissions().mode() & 0o111 != 0)
    };
    if program.contains('/') {
        return Some(PathBuf::from(program)).filter(is_program);
    }
    let path = process::search_path(&std::env::current_exe().ok()?);
    std::env::split_paths(&path).map(|folder| folder.join(program)).find(is_program)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn check(old: Value, new: Value, expected: &[&str]) {
        let mut changes = Vec::new();
        differences("spec", &old, &new, &mut changes);
        assert_eq!(changes, expected, "{old} {new}");
    }

    #[test]
    fn differences_are_named_by_path_with_both_values() {
        check(json!({"a": 1}), json!({"a": 1}), &[]);
        check(json!({"a": {"b": 1}}), json!({"a": {"b": 2}}), &["spec.a.b: was 1, now 2"]);
        check(json!({"a": 1}), json!({}), &["spec.a: was 1, now unset"]);
        check(json!({}), json!({"a": [1]}), &["spec.a: was unset, now [1]"]);
    }

    #[test]
    fn values_of_environment_variables_are_masked() {
        let spec = |value: &str| json!({ "env": [{ "name": "TOKEN", "value": value }] });
        let shown = r#"[{"name":"TOKEN","value":"***"}]"#;
        let expected = format!("spec.env: was {shown}, now {shown}");
        check(spec("one"), spec("two"), &[&expected]);
        check(json!({}), spec("two"), &[&format!("spec.env: was unset, now {shown}")]);
        let pod = |value: &str| json!({ "pod": { "containers": [spec(value)] } });
        let shown = format!(r#"[{{"env":{shown}}}]"#);
        check(pod("one"), pod("two"), &[&format!("spec.pod.containers: was {shown}, now {shown}")]);
    }

    #[test]
    fn a_program_is_found_on_the_path_and_a_missing_one_is_not() {
        assert!(find_program("sh").is_some());
        assert!(find_program("/bin/sh").is_some());
        assert!(find_program("no-such-program-at-all").is_none());
        assert!(find_program("/tmp").is_none());
    }
}

//! Unfinished runs that a new run does not resume: the file that names the latest run was deleted
//! or is damaged.

use stoker_api::experiment::Experiment;
use stoker_ui::quoted;

use super::outcome::RunPaths;
use super::record::{DELETED, RecordDir};
use crate::cluster::text::created;
use crate::run_root::{RunRoot, run_id};

/// Returns a note with the unfinished runs that have the name of a new run, and the command by
/// which the latest of them is resumed; `None` if all runs have ended.
pub(super) fn note(run_root: &RunRoot, new: &RunPaths) -> Option<String> {
    let mut runs: Vec<Experiment> = unfinished(run_root, new);
    runs.sort_by_key(|run| created(&run.metadata));
    let uid = |run: &Experiment| run.metadata.uid.clone().unwrap_or_default();
    let ids: Vec<String> = runs.iter().map(|run| run_id(&new.name, &uid(run))).collect();
    let (latest, latest_id) = runs.last().zip(ids.last())?;
    let (have, them) = match ids.len() {
        1 => (format!("run {latest_id} has"), "it"),
        _ => (format!("runs {} have", ids.join(", ")), "them"),
    };
    let pointer = run_root.records_dir().join(format!("{}.{}.current", new.namespace, new.name));
    let pointer = quoted(&pointer.display().to_string());
    Some(format!(
        "note: the earlier {have} not ended, but {pointer} did not name {them}, so this is a new \
         run; to resume {latest_id} instead, stop this run, then use `echo {} >{pointer}` and run \
         the same command again",
        uid(latest)
    ))
}

/// Returns the other runs with the name of `new` that have not ended, except unreadable ones.
fn unfinished(run_root: &RunRoot, new: &RunPaths) -> Vec<Experiment> {
    let Ok(entries) = std::fs::read_dir(run_root.records_dir()) else { return vec![] };
    let read = |entry: std::io::Result<std::fs::DirEntry>| {
        let record = RecordDir::new(entry.ok()?.path().join("record"));
        let is_deleted = record.path().join(DELETED).exists();
        record.experiment().ok().flatten().filter(|_| !is_deleted)
    };
    let is_unfinished = |run: &Experiment| {
        let metadata = &run.metadata;
        let is_other = metadata.uid.as_ref().is_some_and(|uid| *uid != new.uid);
        let has_ended = run.status.as_ref().is_some_and(|status| status.phase.is_terminal());
        let name = (metadata.namespace.as_deref(), metadata.name.as_deref());
        is_other && !has_ended && name == (Some(&new.namespace), Some(&new.name))
    };
    entries.filter_map(read).filter(is_unfinished).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Writes the record of a run of `namespace/a`, created on this day.
    fn record(root: &RunRoot, namespace: &str, uid: &str, day: u32, phase: &str) -> RecordDir {
        let record = RecordDir::new(root.record_dir("a", uid));
        record.create().unwrap();
        let experiment = serde_json::from_value(json!({
            "apiVersion": "stoker.dev/v1alpha1", "kind": "Experiment",
            "metadata": {
                "name": "a", "namespace": namespace, "uid": uid,
                "creationTimestamp": format!("2026-01-0{day}T00:00:00Z"),
            },
            "spec": {
                "entrypoint": {"command": ["true"]},
                "searcher": {"metric": "loss", "maxLength": {"batches": 4}, "single": {}},
            },
            "status": {"phase": phase},
        }));
        record.save_experiment(&experiment.unwrap()).unwrap();
        record
    }

    #[test]
    fn note_names_unfinished_runs_of_the_name() {
        let folder = tempfile::tempdir().unwrap();
        let root = RunRoot::resolve(folder.path().to_str(), None).unwrap();
        let new = RunPaths {
            root: root.root.clone(),
            namespace: "default".to_owned(),
            name: "a".to_owned(),
            uid: "99999999-9".to_owned(),
        };
        assert_eq!(note(&root, &new), None);
        record(&root, "default", "99999999-9", 5, "Pending");
        record(&root, "other", "11111111-1", 1, "Running");
        record(&root, "default", "22222222-2", 2, "Completed");
        let deleted = record(&root, "default", "33333333-3", 3, "Paused");
        std::fs::write(deleted.path().join(DELETED), "").unwrap();
        assert_eq!(note(&root, &new), None);

        record(&root, "default", "44444444-4", 4, "Paused");
        let pointer = format!("{}/local/default.a.current", folder.path().display());
        assert_eq!(
            note(&root, &new).unwrap(),
            format!(
                "note: the earlier run a-44444444 has not ended, but {pointer} did not name it, so \
                 this is a new run; to resume a-44444444 instead, stop this run, then use `echo \
                 44444444-4 >{pointer}` and run the same command again"
            )
        );
        record(&root, "default", "55555555-5", 1, "Running");
        let text = note(&root, &new).unwrap();
        assert!(text.contains("earlier runs a-55555555, a-44444444 have not ended"), "{text}");
        assert!(text.contains("to resume a-44444444 instead"), "{text}");
    }
}

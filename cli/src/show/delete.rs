//! Deletes local runs.

use std::io::ErrorKind;
use std::path::Path;

use serde_json::json;
use stoker_api::experiment::Experiment;
use stoker_api::names::MANIFEST;
use stoker_storage::Storage;

use super::RecordedRun;
use super::steer::RunFiles;
use crate::cluster::resource::ClusterResource as _;
use crate::failure::Failure;
use crate::print::{self, Output};
use crate::run::record::{self, DELETED, Lock};

/// Deletes a run, and prints what was deleted.
pub(crate) async fn delete(root: Option<&str>, name: &str, output: Output) -> Result<(), Failure> {
    let run = RecordedRun::open_to_delete(root, name).await?;
    let location = delete_run(root, &run, name).await?;
    match output {
        Output::Json => {
            print::out(json!({"experiment": name, "deleted": true, "left": null}));
        }
        Output::Text => {
            print::out(format!("experiment {name} and its trials deleted"));
            print::out(format!("checkpoints, metrics and logs deleted from {location}"));
        }
    }
    Ok(())
}

/// Deletes a run: its files in the storage, then its record. Returns the location of the files.
///
/// The run stops being the latest of its name first, so no runner resumes a partly deleted run. If
/// this is interrupted, the same command deletes the rest.
pub(crate) async fn delete_run(
    root: Option<&str>,
    run: &RecordedRun,
    name: &str,
) -> Result<String, Failure> {
    let files = RunFiles::of(root, run, "delete")?;
    let storage = run.storage()?;
    let _lock = mark_deleted(&files, (Experiment::KIND_NAME, name, &run.id()))?;
    delete_files(&storage, &run.path()).await?;
    delete_record(&files, "experiment.json")?;
    Ok(run.paths.experiment())
}

/// Deletes the files of a run, manifests first, so that no partial checkpoint looks complete.
async fn delete_files(storage: &Storage, path: &str) -> Result<(), Failure> {
    let suffix = format!("/{MANIFEST}");
    for manifest in storage.list(path).await?.iter().filter(|path| path.ends_with(&suffix)) {
        storage.delete(manifest).await?;
    }
    Ok(storage.delete_folder(path).await?)
}

/// Marks the record of a run or job as deleted, so that no runner resumes it. Returns the lock of
/// the record. The object has a kind, a name in the command and a run ID.
///
/// # Errors
///
/// A runner is alive, the lock cannot be taken for another reason, or the name is of an earlier
/// run, which must be named by its ID.
pub(crate) fn mark_deleted(
    files: &RunFiles,
    (word, name, id): (&str, &str, &str),
) -> Result<Option<Lock>, Failure> {
    let marker = files.record.path().join(DELETED);
    if !files.is_current()? {
        return match marker.exists() || name == id {
            true => record::write(&marker, b"").map(|()| None),
            false => Err(Failure::Input(format!(
                "the latest run of `{name}` was deleted; name an earlier one by its run ID, such \
                 as {id}"
            ))),
        };
    }
    let lock = Lock::take(&files.lock).map_err(|error| match record::holder(&files.lock) {
        Some(holder) => Failure::Input(format!(
            "cannot delete {word} `{name}`: {holder} works on it; end it with `stoker {word} \
             cancel {name}`, or stop it with Ctrl-C"
        )),
        None => Failure::System(format!("cannot delete {word} `{name}`: {error}")),
    })?;
    record::wait_for_trainers(&files.trainers)?;
    record::write(&marker, b"")?;
    // A run with --fresh may have begun and ended before the lock was taken.
    if files.is_current()? {
        remove(&files.current)?;
    }
    Ok(Some(lock))
}

/// Deletes the record. `object` is the file by which commands find it.
pub(crate) fn delete_record(files: &RunFiles, object: &str) -> Result<(), Failure> {
    let record = files.record.path();
    remove_folder(&record.join("attempts"))?;
    remove_folder(&record.join("trials"))?;
    remove(&record.join(object))?;
    remove_folder(record)?;
    // In namespace `local`, the files of the run or job are beside its record.
    let folder = record.parent().unwrap_or(record);
    match std::fs::remove_dir(folder) {
        Err(error)
            if !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::DirectoryNotEmpty) =>
        {
            Err(Failure::file("delete", folder, error))
        }
        _ => Ok(()),
    }
}

fn remove_folder(path: &Path) -> Result<(), Failure> {
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(Failure::file("delete", path, error))
        }
        _ => Ok(()),
    }
}

fn remove(path: &Path) -> Result<(), Failure> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(Failure::file("delete", path, error))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{create_dir_all, read_to_string, write};
    use std::time::Duration;

    use super::*;
    use crate::run::record::is_locked;
    use crate::run_root::RunRoot;

    /// A run with --fresh may begin and end between the first check and the lock. Here it does so
    /// while the deletion waits for the last trainers, which is before the second check.
    #[test]
    fn deletion_keeps_the_pointer_of_a_later_run() {
        let root = tempfile::tempdir().unwrap();
        let run_root = RunRoot::resolve(root.path().to_str(), None).unwrap();
        let files = RunFiles::new(&run_root, "default.a", "a", "0123456789");
        create_dir_all(files.record.path()).unwrap();
        write(&files.current, "0123456789\n").unwrap();
        let trainer = Lock::take(&files.trainers).unwrap();
        std::thread::scope(|scope| {
            let deletion = scope.spawn(|| mark_deleted(&files, ("experiment", "a", "a-01234567")));
            while !is_locked(&files.lock) {
                assert!(!deletion.is_finished(), "the deletion did not wait");
                // The check takes the lock for a moment, for which the deletion waits 100 ms.
                std::thread::sleep(Duration::from_millis(5));
            }
            write(&files.current, "abcdef0123\n").unwrap();
            drop(trainer);
            assert!(deletion.join().unwrap().is_ok_and(|lock| lock.is_some()));
        });
        assert_eq!(read_to_string(&files.current).unwrap(), "abcdef0123\n");
        assert!(files.record.path().join(DELETED).exists());
    }

    #[test]
    fn deleting_a_record_keeps_files_beside_it() {
        let root = tempfile::tempdir().unwrap();
        let run_root = RunRoot::resolve(root.path().to_str(), None).unwrap();
        let files = RunFiles::new(&run_root, "local.a.job", "a", "0123456789");
        let folder = files.record.path().parent().unwrap();
        create_dir_all(files.record.path()).unwrap();
        write(files.record.path().join("job.json"), "{}").unwrap();
        // Namespace `local`: the output is in the directory that contains the record.
        let output = folder.join("output");
        create_dir_all(&output).unwrap();
        delete_record(&files, "job.json").unwrap();
        assert!(output.exists() && !files.record.path().exists());
        std::fs::remove_dir(&output).unwrap();
        delete_record(&files, "job.json").unwrap();
        assert!(!folder.exists());
    }

    #[test]
    fn only_a_locked_run_has_a_runner() {
        let root = tempfile::tempdir().unwrap();
        let run_root = RunRoot::resolve(root.path().to_str(), None).unwrap();
        let files = RunFiles::new(&run_root, "default.a", "a", "0123456789");
        create_dir_all(files.record.path()).unwrap();
        write(&files.current, "0123456789\n").unwrap();
        let check = |expected: &str| {
            let error = mark_deleted(&files, ("experiment", "a", "a-01234567")).unwrap_err();
            assert!(error.to_string().contains(expected), "{error}, not {expected}");
        };
        // A directory cannot be opened for writing, not even by root.
        create_dir_all(&files.lock).unwrap();
        check(&format!("cannot delete experiment `a`: cannot lock {}", files.lock.display()));
        std::fs::remove_dir(&files.lock).unwrap();
        let _lock = Lock::take(&files.lock).unwrap();
        let process = std::process::id();
        check(&format!("cannot delete experiment `a`: process {process} on "));
    }
}

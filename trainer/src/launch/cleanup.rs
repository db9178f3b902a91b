//! Deletes checkpoints that an ended experiment does not retain, and stores its final records.

use std::collections::BTreeSet;
use std::path::Path;
use std::process;

use futures::{StreamExt as _, TryStreamExt as _, stream};
use stoker_api::contract::{Cleanup, CleanupTrial, ExitCode, StoredRecord};
use stoker_api::names::RECORD;
use stoker_api::packed;
use stoker_storage::{Storage, layout};

use super::{read_json, report_error, runtime};
use crate::error::Infrastructure;
use crate::{Result, checkpoint};

/// Maximum number of records that are written concurrently.
const WRITES_MAX: usize = 16;

/// Deletes the checkpoints listed by the [`Cleanup`] in `file`, then stores its records. Ignores
/// missing checkpoints, so that the operation can be repeated after a failure.
pub fn clean_up(file: &Path) -> process::ExitCode {
    let run = || -> Result<()> {
        let cleanup: Cleanup = read_json(file)?;
        let storage = Storage::open(&cleanup.storage.url, cleanup.storage.endpoint.as_deref())?;
        runtime()?.block_on(async {
            let records = cleanup.records.as_deref().map_or(Ok(vec![]), parse_records)?;
            delete(&storage, &cleanup.delete).await?;
            store(&storage, records).await
        })
    };
    match run() {
        Ok(()) => process::ExitCode::from(ExitCode::Completed as u8),
        Err(error) => report_error(&*error),
    }
}

async fn delete(storage: &Storage, trials: &[CleanupTrial]) -> Result<()> {
    // Validate all entries before deleting anything.
    trials.iter().try_for_each(validate)?;
    for trial in trials {
        let kept: BTreeSet<&str> = trial.keep.iter().map(String::as_str).collect();
        let is_listed = |name: &&String| !kept.contains(name.as_str());
        let listed = trial.checkpoints.iter().filter(is_listed).cloned();
        let mut deleted: BTreeSet<String> = listed.collect();
        let existing = storage.folders(&layout::checkpoints_path(&trial.trial_path)).await?;
        let is_orphaned = |name: &String| {
            let parsed = layout::parse_checkpoint_name(name);
            let is_over = parsed.is_some_and(|(_, attempt)| attempt < trial.attempts_over);
            is_over && !kept.contains(name.as_str())
        };
        deleted.extend(existing.into_iter().filter(is_orphaned));
        for name in &deleted {
            checkpoint::delete(storage, &trial.trial_path, name).await?;
        }
    }
    Ok(())
}

/// Unpacks records, and refuses paths of other files.
fn parse_records(text: &str) -> Result<Vec<StoredRecord>> {
    let records = packed::unpack::<StoredRecord>(text).map_err(Infrastructure)?;
    let is_record = |record: &&StoredRecord| {
        record
            .path
            .rsplit_once('/')
            .is_some_and(|(folder, name)| name == RECORD && !folder.trim_matches('/').is_empty())
    };
    match records.iter().find(|record| !is_record(record)) {
        None => Ok(records),
        Some(record) => Err(Infrastructure(format!(
            "path of a record: {:?} does not end with /{RECORD}",
            record.path
        ))
        .into()),
    }
}

/// Stores records. The last one, which may be that of the experiment, is stored after the others.
async fn store(storage: &Storage, mut records: Vec<StoredRecord>) -> Result<()> {
    let last = records.pop();
    let put = |record: StoredRecord| async move {
        let bytes = serde_json::to_vec_pretty(&record.record)?;
        crate::Result::Ok(storage.put(&record.path, bytes.into()).await?)
    };
    let mut written = stream::iter(records).map(put).buffer_unordered(WRITES_MAX);
    while written.try_next().await?.is_some() {}
    match last {
        Some(last) => put(last).await,
        None => Ok(()),
    }
}

/// Refuses entries that would delete more than checkpoints.
fn validate(trial: &CleanupTrial) -> Result<()> {
    if trial.trial_path.trim_matches('/').is_empty() {
        return Err(Infrastructure("trialPath is empty, but must be a directory".into()).into());
    }
    match trial.checkpoints.iter().find(|name| layout::parse_checkpoint_name(name).is_none()) {
        None => Ok(()),
        Some(name) => Err(Infrastructure(format!(
            "checkpoints of {}: {name:?} is not a checkpoint name",
            trial.trial_path
        ))
        .into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRIAL: &str = "default/x-1/trials/0";

    fn trial(checkpoints: &[&str], keep: &[&str], attempts_over: u32) -> CleanupTrial {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let (checkpoints, keep) = (names(checkpoints), names(keep));
        CleanupTrial { trial_path: TRIAL.into(), checkpoints, keep, attempts_over }
    }

    const ALL: [&str; 4] = ["000000000010-0", "000000000020-0", "000000000030-1", "000000000040-2"];

    fn check(trial: CleanupTrial, expected: &[&str]) {
        let rt = runtime().unwrap();
        let storage = Storage::open("memory://", None).unwrap();
        rt.block_on(async {
            for name in ALL {
                for file in ["manifest.json", "model.bpk"] {
                    let path = layout::checkpoint_file(TRIAL, name, file);
                    storage.put(&path, "x".into()).await.unwrap();
                }
            }
            storage.put(&format!("{TRIAL}/checkpoints/notes/x"), "x".into()).await.unwrap();
            storage.put(&format!("{TRIAL}/record.json"), "x".into()).await.unwrap();
            for _ in 0..2 {
                delete(&storage, std::slice::from_ref(&trial)).await.unwrap();
            }
            let left = storage.folders(&layout::checkpoints_path(TRIAL)).await.unwrap();
            assert_eq!(left[..left.len() - 1], *expected, "{trial:?}");
            assert_eq!(left.last().unwrap(), "notes");
            assert!(storage.exists(&format!("{TRIAL}/record.json")).await.unwrap());
            let files = storage.list(TRIAL).await.unwrap().len();
            assert_eq!(files, expected.len() * 2 + 2, "a checkpoint is deleted partially");
        });
    }

    #[test]
    fn listed_and_orphaned_checkpoints_are_deleted() {
        check(trial(&[], &[], 0), &ALL);
        check(trial(&[ALL[0]], &[ALL[1]], 0), &ALL[1..]);
        check(trial(&["000000000099-0"], &[], 0), &ALL);
        check(trial(&[ALL[3]], &[ALL[1]], 1), &ALL[1..3]);
        check(trial(&[], &[ALL[1]], 2), &[ALL[1], ALL[3]]);
        check(trial(&[], &[], 3), &[]);
        // A checkpoint in both lists is kept.
        check(trial(&[ALL[0]], &[ALL[0]], 0), &ALL);
    }

    #[test]
    fn records_are_stored_and_other_paths_refused() {
        let rt = runtime().unwrap();
        let storage = Storage::open("memory://", None).unwrap();
        let pack = |paths: &[&str]| {
            let mut packer = packed::Packer::default();
            for (number, path) in paths.iter().enumerate() {
                let record = StoredRecord { path: (*path).to_owned(), record: number.into() };
                packer.push(&record).unwrap();
            }
            packer.finish().unwrap()
        };
        let trial = format!("{TRIAL}/record.json");
        let records = parse_records(&pack(&[&trial, "default/x-1/record.json"])).unwrap();
        rt.block_on(store(&storage, records)).unwrap();
        assert_eq!(rt.block_on(storage.get(&trial)).unwrap(), "0");
        assert_eq!(rt.block_on(storage.get("default/x-1/record.json")).unwrap(), "1");
        for path in ["record.json", "/record.json", "a/model.bpk", ""] {
            let error = parse_records(&pack(&[&trial, path])).unwrap_err().to_string();
            assert!(error.contains(&format!("{path:?}")), "{error}");
        }
    }

    #[test]
    fn invalid_names_are_refused_before_any_deletion() {
        let rt = runtime().unwrap();
        let storage = Storage::open("memory://", None).unwrap();
        let path = layout::manifest_path(TRIAL, ALL[0]);
        rt.block_on(storage.put(&path, "x".into())).unwrap();
        for name in ["", "..", "../../record.json", "000000000010-0/x"] {
            let trials = [trial(&[ALL[0]], &[], 3), trial(&[name], &[], 3)];
            let error = rt.block_on(delete(&storage, &trials)).unwrap_err().to_string();
            assert!(error.contains(&format!("{name:?}")), "{error}");
        }
        assert!(rt.block_on(storage.exists(&path)).unwrap());
    }
}

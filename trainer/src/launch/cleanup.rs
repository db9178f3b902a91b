//! Deletes checkpoints that an ended experiment does not keep.

use std::collections::BTreeSet;
use std::path::Path;
use std::process;

use stoker_api::contract::{Cleanup, CleanupTrial, ExitCode};
use stoker_storage::{Storage, layout};

use super::{failed, read_json, runtime};
use crate::error::Infrastructure;
use crate::{Result, checkpoint};

/// Deletes what the [`Cleanup`] in `file` lists. What is gone already is none the worse, so that it
/// may be done again after a failure.
pub fn clean_up(file: &Path) -> process::ExitCode {
    let done = || -> Result<()> {
        let cleanup: Cleanup = read_json(file)?;
        let storage = Storage::open(&cleanup.storage.url, cleanup.storage.endpoint.as_deref())?;
        runtime()?.block_on(delete(&storage, &cleanup.delete))
    };
    match done() {
        Ok(()) => process::ExitCode::from(ExitCode::Completed as u8),
        Err(error) => failed(&*error),
    }
}

async fn delete(storage: &Storage, trials: &[CleanupTrial]) -> Result<()> {
    // All of it is looked at before any of it is deleted.
    trials.iter().try_for_each(check)?;
    for trial in trials {
        let kept: BTreeSet<&str> = trial.keep.iter().map(String::as_str).collect();
        let listed = trial.checkpoints.iter().filter(|it| !kept.contains(it.as_str())).cloned();
        let mut gone: BTreeSet<String> = listed.collect();
        let found = storage.folders(&layout::checkpoints_path(&trial.trial_path)).await?;
        let is_left_over = |name: &String| {
            let place = layout::parse_checkpoint_name(name);
            let is_over = place.is_some_and(|(_, attempt)| attempt < trial.attempts_over);
            is_over && !kept.contains(name.as_str())
        };
        gone.extend(found.into_iter().filter(is_left_over));
        for name in &gone {
            checkpoint::delete(storage, &trial.trial_path, name).await?;
        }
    }
    Ok(())
}

/// Refuses what would delete more than checkpoints.
fn check(trial: &CleanupTrial) -> Result<()> {
    if trial.trial_path.trim_matches('/').is_empty() {
        return Err(Infrastructure("trialPath must name a folder, but is empty".into()).into());
    }
    match trial.checkpoints.iter().find(|it| layout::parse_checkpoint_name(it).is_none()) {
        None => Ok(()),
        Some(name) => Err(Infrastructure(format!(
            "checkpoints of {}: {name:?} is no checkpoint's name",
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
        let names = |names: &[&str]| names.iter().map(|it| (*it).to_owned()).collect();
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
            assert_eq!(files, expected.len() * 2 + 2, "a checkpoint is half there");
        });
    }

    #[test]
    fn listed_checkpoints_go_and_unknown_ones_of_attempts_that_are_over() {
        check(trial(&[], &[], 0), &ALL);
        check(trial(&[ALL[0]], &[ALL[1]], 0), &ALL[1..]);
        check(trial(&["000000000099-0"], &[], 0), &ALL);
        check(trial(&[ALL[3]], &[ALL[1]], 1), &ALL[1..3]);
        check(trial(&[], &[ALL[1]], 2), &[ALL[1], ALL[3]]);
        check(trial(&[], &[], 3), &[]);
        // Asked for both, it stays.
        check(trial(&[ALL[0]], &[ALL[0]], 0), &ALL);
    }

    #[test]
    fn what_is_no_checkpoint_is_refused_before_anything_is_deleted() {
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

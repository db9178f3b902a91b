//! Files that this or a later attempt of a trial has stored before the program starts.

use stoker_storage::{Storage, layout};

use crate::Result;
use crate::error::Infrastructure;

/// Checks that the trial's directory contains no checkpoints or metrics of `attempt` or a later
/// attempt. Otherwise, this attempt would replace files of another one, and mix its rows with
/// others. Call this before the attempt writes.
///
/// If the runner's record was restored from a backup, it counts attempts from an earlier number.
/// Each attempt then fails here until the number exceeds those in the storage. The next one finds
/// the checkpoints of all earlier attempts, as after reports that were lost.
///
/// # Errors
///
/// Fails if the directory contains such files, or if the storage fails.
pub(super) async fn check(storage: &Storage, trial_path: &str, attempt: u32) -> Result<()> {
    let mut stored = None;
    for name in storage.folders(&layout::checkpoints_path(trial_path)).await? {
        stored = stored.max(layout::parse_checkpoint_name(&name).map(|(_, attempt)| attempt));
    }
    let folder = format!("{trial_path}/");
    for path in storage.list(&layout::metrics_path(trial_path)).await? {
        stored = stored.max(path.strip_prefix(&folder).and_then(layout::attempt_of));
    }
    match stored.filter(|stored| *stored >= attempt) {
        Some(stored) => {
            let text = format!(
                "the storage contains files of attempt {stored} of this trial, but this is \
                 attempt {attempt}: the trial's record was restored from a backup, or a later \
                 attempt has started; this attempt ends without writing, and the first attempt \
                 after {stored} resumes from the stored checkpoints"
            );
            Err(Infrastructure(text).into())
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn attempt_ends_if_its_files_exist() {
        let root = tempfile::tempdir().unwrap();
        let storage = Storage::open(root.path().to_str().unwrap(), None).unwrap();
        let refusal = async |attempt: u32| {
            let checked = check(&storage, "ml/e/trials/0", attempt).await;
            checked.err().map(|error| error.to_string())
        };
        assert_eq!(refusal(0).await, None);
        let store = async |path: &str| {
            storage.put(&format!("ml/e/trials/0/{path}"), "x".into()).await.unwrap();
        };
        storage.put("ml/e/trials/1/metrics/7-00000000.jsonl", "x".into()).await.unwrap();
        store("record.json").await;
        store("logs/9/0-00000000.log").await;
        assert_eq!(refusal(0).await, None);
        store("metrics/2-00000000.jsonl").await;
        store("checkpoints/000000000100-1/model.bpk").await;
        assert_eq!(refusal(3).await, None);
        let text = refusal(2).await.unwrap();
        let expected = "the storage contains files of attempt 2 of this trial, but this is attempt";
        assert!(text.starts_with(expected), "{text}");
        // An interrupted save, too: its files would be mixed with those of this attempt.
        store("checkpoints/000000000100-12/model.bpk").await;
        assert!(refusal(3).await.unwrap().contains("the first attempt after 12 resumes"));
        assert_eq!(refusal(13).await, None);
    }
}

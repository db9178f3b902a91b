//! Deletes checkpoints, so that an interrupted deletion never leaves one that looks complete.

use std::collections::BTreeSet;

use stoker_storage::{Storage, StorageError, layout};
use tokio::sync::mpsc::UnboundedReceiver;

/// Deletes a checkpoint, manifest first. Succeeds if the checkpoint does not exist.
///
/// # Errors
///
/// Fails if the storage does. Some files may then remain, without a manifest.
pub(crate) async fn delete(
    storage: &Storage,
    trial_path: &str,
    name: &str,
) -> Result<(), StorageError> {
    storage.delete(&layout::manifest_path(trial_path, name)).await?;
    storage.delete_folder(&layout::checkpoint_path(trial_path, name)).await
}

/// Deletes the checkpoints received from `names`, one by one. The experiment's clean-up deletes
/// those that fail here.
pub(crate) async fn delete_each(
    storage: Storage,
    trial_path: String,
    mut names: UnboundedReceiver<String>,
) {
    while let Some(name) = names.recv().await {
        if let Err(error) = delete(&storage, &trial_path, &name).await {
            eprintln!(
                "stoker: cannot delete checkpoint {name} now: {error}; the experiment's clean-up \
                 will delete it"
            );
        }
    }
}

/// Deletes what interrupted saves of attempts before `attempt` left, which must be over. Otherwise,
/// a trial that is often killed would fill the storage before the experiment's clean-up.
/// Checkpoints in `known` stay, even if their manifest is missing.
pub(crate) async fn delete_interrupted(
    storage: Storage,
    trial_path: String,
    attempt: u32,
    known: BTreeSet<String>,
) {
    let delete_all = async {
        for name in storage.folders(&layout::checkpoints_path(&trial_path)).await? {
            let is_earlier =
                layout::parse_checkpoint_name(&name).is_some_and(|(_, of)| of < attempt);
            if !is_earlier || known.contains(&name) {
                continue;
            }
            if !storage.exists(&layout::manifest_path(&trial_path, &name)).await? {
                delete(&storage, &trial_path, &name).await?;
            }
        }
        Ok::<(), StorageError>(())
    };
    if let Err(error) = delete_all.await {
        eprintln!(
            "stoker: cannot delete the remains of interrupted saves now: {error}; the \
             experiment's clean-up will delete them"
        );
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future as _;
    use std::path::Path;
    use std::pin::pin;

    use stoker_api::names::MANIFEST;

    use super::*;

    /// Files of a checkpoint, some of which sort before the manifest.
    const FILES: [&str; 6] =
        ["a.bin", "b.bin", "callbacks/x", "gradients.bpk", "manifest.json", "model.bpk"];

    fn write(folder: &Path) {
        for file in FILES {
            let path = folder.join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, file).unwrap();
        }
    }

    #[tokio::test]
    async fn interrupted_deletion_leaves_no_manifest() {
        let root = tempfile::tempdir().unwrap();
        let checkpoints = root.path().join("t/checkpoints");
        let names = ["000000000100-0", "000000000200-0"];
        names.iter().for_each(|name| write(&checkpoints.join(name)));
        let storage = Storage::open(root.path().to_str().unwrap(), None).unwrap();
        let (sender, receiver) = tokio::sync::mpsc::unbounded_channel();
        names.iter().for_each(|name| sender.send((*name).to_owned()).unwrap());
        drop(sender);
        let mut deletion = pin!(delete_each(storage, "t".into(), receiver));
        // The process may die after any step.
        std::future::poll_fn(|cx| {
            let progress = deletion.as_mut().poll(cx);
            for name in names {
                let exists = |file: &str| checkpoints.join(name).join(file).exists();
                // The deletion runs concurrently, so check the manifest last.
                let others = FILES.iter().filter(|file| **file != MANIFEST);
                let is_complete = others.into_iter().all(|file| exists(file));
                assert!(is_complete || !exists(MANIFEST), "{name} looks complete");
            }
            progress
        })
        .await;
        assert_eq!(std::fs::read_dir(&checkpoints).unwrap().count(), 0);
    }
}

//! Deletes checkpoints so that an interrupted deletion leaves none that looks complete.

use stoker_storage::{Storage, StorageError, layout};
use tokio::sync::mpsc::UnboundedReceiver;

/// Deletes a checkpoint, its manifest first. A checkpoint that does not exist is no error.
///
/// # Errors
///
/// The storage failed. Some files may then be left, without a manifest.
pub(crate) async fn delete(
    storage: &Storage,
    trial_path: &str,
    name: &str,
) -> Result<(), StorageError> {
    storage.delete(&layout::manifest_path(trial_path, name)).await?;
    storage.delete_folder(&layout::checkpoint_path(trial_path, name)).await
}

/// Deletes the checkpoints that `names` brings, one by one. The experiment's clean-up deletes those that
/// cannot be deleted now.
pub(crate) async fn delete_each(
    storage: Storage,
    trial_path: String,
    mut names: UnboundedReceiver<String>,
) {
    while let Some(name) = names.recv().await {
        if let Err(error) = delete(&storage, &trial_path, &name).await {
            eprintln!(
                "stoker: cannot delete checkpoint {name} now: {error}; the experiment's clean-up deletes it"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future as _;
    use std::path::Path;
    use std::pin::pin;

    use stoker_api::names::MANIFEST;

    use super::*;

    /// Files of a checkpoint; some come before the manifest in the order of names.
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
    async fn an_interrupted_deletion_leaves_no_manifest() {
        let root = tempfile::tempdir().unwrap();
        let checkpoints = root.path().join("t/checkpoints");
        let names = ["000000000100-0", "000000000200-0"];
        names.iter().for_each(|name| write(&checkpoints.join(name)));
        let storage = Storage::open(root.path().to_str().unwrap(), None).unwrap();
        let (sender, receiver) = tokio::sync::mpsc::unbounded_channel();
        names.iter().for_each(|name| sender.send((*name).to_owned()).unwrap());
        drop(sender);
        let mut deletion = pin!(delete_each(storage, "t".into(), receiver));
        // A crash may come after any step.
        std::future::poll_fn(|cx| {
            let progress = deletion.as_mut().poll(cx);
            for name in names {
                let exists = |file: &str| checkpoints.join(name).join(file).exists();
                // The deletion runs beside this check: look at the manifest last.
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

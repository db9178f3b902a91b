//! Copies event files of a storage to a directory, and keeps them up to date.

use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use futures::{StreamExt as _, TryStreamExt as _, stream};
use stoker_storage::{Storage, layout};

use super::Source;
use crate::failure::Failure;

/// Maximum number of concurrent requests.
const REQUESTS_MAX: usize = 16;

/// Event files of an experiment or a trial, with their copies.
#[derive(Debug)]
pub(super) struct EventFiles {
    storage: Storage,
    path: String,
    trial: Option<u32>,
    /// Directory of the files below the root, without which a path is that of the copy.
    folder: String,
    copy: PathBuf,
}

impl EventFiles {
    pub(super) fn new(source: &Source, copy: &Path) -> Self {
        let Source { storage, path, trial } = source;
        Self {
            storage: storage.clone(),
            path: path.clone(),
            trial: *trial,
            folder: source.folder(),
            copy: copy.to_owned(),
        }
    }

    /// Copies new files, and appends to copies of files that have grown, because TensorBoard keeps
    /// files open.
    pub(super) async fn update(&mut self) -> Result<(), Failure> {
        let trials = format!("{}/trials", self.path);
        let indexes = match self.trial {
            Some(index) => vec![index.to_string()],
            None => self.storage.folders(&trials).await?,
        };
        let storage = &self.storage;
        let list = |index: String| {
            let folder = layout::tensorboard_path(&format!("{trials}/{index}"));
            async move { storage.list_sized(&folder).await }
        };
        let lists = stream::iter(indexes).map(list).buffered(REQUESTS_MAX);
        let lists: Vec<Vec<(String, u64)>> = lists.try_collect().await?;
        let changed: Vec<(String, PathBuf)> = lists
            .into_iter()
            .flatten()
            .filter_map(|(path, size)| {
                let copy = self.copy.join(path.strip_prefix(&format!("{}/", self.folder))?);
                let copied = fs::metadata(&copy).map_or(0, |metadata| metadata.len());
                (size != copied).then_some((path, copy))
            })
            .collect();
        let paths = changed.iter().map(|(path, _)| path.clone()).collect();
        let mut reads = std::pin::pin!(storage.get_each(paths));
        for (_, copy) in &changed {
            let Some(bytes) = reads.try_next().await? else { break };
            write(copy, &bytes).map_err(|error| Failure::file("write", copy, error))?;
        }
        Ok(())
    }
}

/// Writes a file, or appends to it if it contains the beginning of `bytes`.
fn write(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let before = fs::read(path).unwrap_or_default();
    match bytes.strip_prefix(before.as_slice()) {
        Some(new) if !before.is_empty() => {
            OpenOptions::new().append(true).open(path)?.write_all(new)
        }
        _ => {
            fs::create_dir_all(path.parent().unwrap_or(Path::new(".")))?;
            fs::write(path, bytes)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    #[tokio::test]
    async fn files_are_copied_and_grow_in_place() {
        let storage = Storage::open("memory://", None).unwrap();
        let put = async |path: &str, text: &str| {
            storage.put(&format!("ml/a-1/trials/{path}"), text.to_owned().into()).await.unwrap();
        };
        put("0/tensorboard/events.out.tfevents.000000-00000000.stoker", "one").await;
        put("0/metrics/0-00000000.jsonl", "x").await;
        put("1/tensorboard/profiler-rank-0/events.out.tfevents.x", "p").await;
        let copy = tempfile::tempdir().unwrap();
        let source = Source { storage: storage.clone(), path: "ml/a-1".into(), trial: None };
        let mut files = EventFiles::new(&source, copy.path());
        files.update().await.unwrap();
        let first = copy.path().join("0/tensorboard/events.out.tfevents.000000-00000000.stoker");
        let inode = fs::metadata(&first).unwrap().ino();
        assert!(copy.path().join("1/tensorboard/profiler-rank-0/events.out.tfevents.x").exists());
        assert!(!copy.path().join("0/metrics").exists());
        put("0/tensorboard/events.out.tfevents.000000-00000000.stoker", "one two").await;
        files.update().await.unwrap();
        assert_eq!(fs::read_to_string(&first).unwrap(), "one two");
        assert_eq!(fs::metadata(&first).unwrap().ino(), inode, "the file was replaced");
    }

    #[tokio::test]
    async fn one_trial_is_copied_alone() {
        let storage = Storage::open("memory://", None).unwrap();
        for index in 0..2 {
            let path = format!("ml/a-1/trials/{index}/tensorboard/events.out.tfevents.0");
            storage.put(&path, "x".into()).await.unwrap();
        }
        let copy = tempfile::tempdir().unwrap();
        let source = Source { storage, path: "ml/a-1".into(), trial: Some(1) };
        EventFiles::new(&source, copy.path()).update().await.unwrap();
        let names = fs::read_dir(copy.path()).unwrap().map(|entry| entry.unwrap().file_name());
        assert_eq!(names.collect::<Vec<_>>(), ["events.out.tfevents.0"]);
    }
}

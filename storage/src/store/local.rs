//! Files on local roots that are accessed without `object_store`.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::thread;

use bytes::Bytes;

use super::Storage;
use crate::StorageError;
use crate::error::{Subject, classify};

/// Number of bytes after which the disk writes what is in memory, while more bytes follow.
const SYNC_BYTES: usize = 16 << 20;

impl Storage {
    /// Returns the file of an object, `None` if the root is not a local directory.
    ///
    /// # Errors
    ///
    /// The path is invalid, or is reserved for files that are being written.
    pub(super) fn local_file(&self, path: &str) -> Result<Option<PathBuf>, StorageError> {
        let location = self.location(path)?;
        let file = self.files.as_ref().map(|files| files.path_to_filesystem(&location));
        let failed = |source| classify(Subject { url: &self.url, path }, 1, &source).0;
        file.transpose().map_err(failed)
    }
}

/// Writes a file that consists of the concatenated `parts`, and replaces an existing one.
///
/// The file has its name only after all bytes are on the disk. A killed writer leaves a file with
/// `#` and a number after its name, as `object_store` does.
///
/// # Errors
///
/// The file system failed, or `parts` did. The file is the earlier or the new one.
pub(super) fn write_file(
    path: &Path,
    parts: impl Iterator<Item = io::Result<Bytes>>,
) -> io::Result<()> {
    write_staged(path, parts).map_err(|error| match error.kind() {
        // The folder was deleted meanwhile. Another attempt creates it again.
        ErrorKind::NotFound => io::Error::other(error),
        _ => error,
    })
}

fn write_staged(path: &Path, parts: impl Iterator<Item = io::Result<Bytes>>) -> io::Result<()> {
    let folder = path.parent().ok_or(ErrorKind::InvalidInput)?;
    create_folders(folder)?;
    let (file, staged) = create_staged(path)?;
    let written = write_and_close(file, parts).and_then(|()| fs::rename(&staged, path));
    if let Err(error) = written {
        // The first error is the cause.
        let _ = fs::remove_file(&staged);
        return Err(error);
    }
    sync_folder(folder)
}

/// Writes and syncs at the same time, so that the disk does not wait for the last byte.
fn write_and_close(file: File, parts: impl Iterator<Item = io::Result<Bytes>>) -> io::Result<()> {
    let (sender, receiver) = channel();
    let mut writer = &file;
    thread::scope(|scope| {
        // Without a thread, the last sync does all the work.
        let syncs = thread::Builder::new().spawn_scoped(scope, move || {
            while receiver.recv().is_ok() {
                // One sync is enough for all requests until now.
                while receiver.try_recv().is_ok() {}
                writer.sync_data()?;
            }
            Ok(())
        });
        let mut unsynced = 0;
        for part in parts {
            for block in part?.chunks(SYNC_BYTES) {
                writer.write_all(block)?;
                unsynced += block.len();
                if unsynced >= SYNC_BYTES && sender.send(()).is_ok() {
                    unsynced = 0;
                }
            }
        }
        drop(sender);
        let panicked = |_| Err(io::Error::other("a sync panicked"));
        syncs.map_or(Ok(()), |syncs| syncs.join().unwrap_or_else(panicked))
    })?;
    file.sync_all()?;
    // Some network file systems report lost data only when a file is closed.
    Ok(nix::unistd::close(file)?)
}

/// Creates a file next to `path` that no other writer uses.
fn create_staged(path: &Path) -> io::Result<(File, PathBuf)> {
    let mut number: u64 = 1;
    loop {
        let mut staged = path.as_os_str().to_owned();
        staged.push(format!("#{number}"));
        match File::create_new(&staged) {
            Ok(file) => return Ok((file, staged.into())),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => number += 1,
            Err(error) => return Err(error),
        }
    }
}

/// Creates a folder and those above it, and syncs their names.
fn create_folders(folder: &Path) -> io::Result<()> {
    match fs::create_dir(folder) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => return Ok(()),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            create_folders(folder.parent().ok_or(error)?)?;
            match fs::create_dir(folder) {
                // Another writer creates the same folders.
                Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
                _ => {}
            }
        }
        created => created?,
    }
    folder.parent().map_or(Ok(()), sync_folder)
}

fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// Runs a function that accesses files or hashes on another thread.
pub(super) async fn run_blocking<T: Send + 'static>(
    act: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> object_store::Result<T> {
    let failed = |source| object_store::Error::Generic { store: "LocalFileSystem", source };
    match tokio::task::spawn_blocking(act).await {
        Ok(Ok(done)) => Ok(done),
        Ok(Err(source)) if source.kind() == ErrorKind::NotFound => {
            Err(object_store::Error::NotFound { path: String::new(), source: source.into() })
        }
        Ok(Err(source)) => Err(failed(source.into())),
        Err(source) => Err(object_store::Error::JoinError { source }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parts of more than the bytes between two syncs, and empty ones.
    fn parts() -> Vec<Bytes> {
        let part =
            |len: usize| Bytes::from((0..len).map(|at| (at % 251) as u8).collect::<Vec<_>>());
        vec![part(5), part(0), part(SYNC_BYTES + 7), part(2 * SYNC_BYTES), part(1)]
    }

    fn names(folder: &Path) -> Vec<String> {
        let names = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
        names.map(|name| name.into_string().unwrap()).collect()
    }

    #[test]
    fn parts_are_one_file_that_replaces_another() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("a/b/file");
        for parts in [vec![Bytes::from("before")], parts(), vec![]] {
            write_file(&path, parts.iter().cloned().map(Ok)).unwrap();
            assert!(fs::read(&path).unwrap() == parts.concat());
            assert_eq!(names(path.parent().unwrap()), ["file"]);
        }
    }

    #[test]
    fn files_of_other_writers_stay() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("file");
        fs::write(root.path().join("file#1"), "of another writer").unwrap();
        write_file(&path, std::iter::once(Ok(Bytes::from("new")))).unwrap();
        assert_eq!(fs::read(root.path().join("file#1")).unwrap(), b"of another writer");
        assert_eq!(fs::read(path).unwrap(), b"new");
    }

    #[test]
    fn failed_writers_leave_no_file() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("file");
        // A folder cannot be replaced by a file.
        fs::create_dir(&path).unwrap();
        write_file(&path, std::iter::once(Ok(Bytes::from("new")))).unwrap_err();
        assert_eq!(names(root.path()), ["file"]);
        fs::write(root.path().join("text"), "").unwrap();
        let error = write_file(&root.path().join("text/file"), std::iter::empty()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotADirectory);
    }

    #[test]
    fn writers_of_new_folders_do_not_disturb_each_other() {
        let root = tempfile::tempdir().unwrap();
        thread::scope(|scope| {
            for writer in 0..8 {
                let path = root.path().join(format!("a/b/c/{writer}"));
                scope.spawn(move || {
                    write_file(&path, std::iter::once(Ok(Bytes::from("text")))).unwrap()
                });
            }
        });
        assert_eq!(names(&root.path().join("a/b/c")).len(), 8);
    }
}

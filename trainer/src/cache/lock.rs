//! File locks of a data set, which are released when the holding process ends.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read as _, Seek as _, Write as _};
use std::path::Path;
use std::time::Duration;

use super::dataset_dir::{DatasetDir, io_error};
use crate::Result;

/// Pause between two attempts to acquire a lock that another process holds.
const WAIT_PAUSE: Duration = Duration::from_millis(50);

impl DatasetDir {
    /// Acquires the shared lock of readers, which protects the set from removal.
    pub(super) fn lock_for_reading(&self) -> Result<File> {
        let path = self.lock_file("use");
        let file = open(&path)?;
        file.lock_shared().map_err(|error| io_error("lock", &path, &error))?;
        Ok(file)
    }

    /// Tries to acquire the exclusive lock for removal; `None` if another process holds the lock.
    pub(super) fn try_lock_exclusive(path: &Path) -> Result<Option<File>> {
        let file = open(path)?;
        match file.try_lock() {
            Ok(()) => Ok(Some(file)),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(io_error("lock", path, &error)),
        }
    }

    /// Acquires the exclusive lock of the builder. While another process holds it, waits and logs
    /// the holder; fails if `check_interrupt` does.
    pub(super) fn lock_for_building(
        &self,
        check_interrupt: impl Fn() -> Result<()>,
    ) -> Result<File> {
        let path = self.lock_file("build");
        let mut file = open(&path)?;
        let mut is_logged = false;
        loop {
            match file.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) => {}
                Err(TryLockError::Error(error)) => return Err(io_error("lock", &path, &error)),
            }
            if !std::mem::replace(&mut is_logged, true) {
                let holder = lock_holder(&mut file).unwrap_or_else(|| "another process".into());
                eprintln!("stoker: waiting for {holder} to build {self}");
            }
            check_interrupt()?;
            std::thread::sleep(WAIT_PAUSE);
        }
        // Write this process's name for those that wait. Ignore errors: the name is optional.
        let _ = file.set_len(0).and_then(|()| file.rewind());
        let _ = write!(file, "process {}{}", std::process::id(), host());
        Ok(file)
    }
}

fn open(path: &Path) -> Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    options.open(path).map_err(|error| io_error("open", path, &error))
}

/// Reads the name of the lock's holder from the lock file.
fn lock_holder(file: &mut File) -> Option<String> {
    let mut name = String::new();
    file.rewind().ok()?;
    file.read_to_string(&mut name).ok()?;
    Some(name).filter(|name| !name.is_empty())
}

fn host() -> String {
    let name = rustix::system::uname();
    name.nodename().to_str().map(|name| format!(" on {name}")).unwrap_or_default()
}

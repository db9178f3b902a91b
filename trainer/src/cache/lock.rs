//! Locks of a data set, which end with the process that holds them.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read as _, Seek as _, Write as _};
use std::path::Path;
use std::time::Duration;

use super::place::{Place, failed};
use crate::Result;

/// Pause between two looks at a lock that another process holds.
const WAIT_PAUSE: Duration = Duration::from_millis(50);

impl Place {
    /// As one of those that read the set. Nobody removes it meanwhile.
    pub(super) fn lock_for_use(&self) -> Result<File> {
        let path = self.lock_file("use");
        let file = open(&path)?;
        file.lock_shared().map_err(|error| failed("lock", &path, &error))?;
        Ok(file)
    }

    /// For removing what this file locks; `None` where somebody else has it locked.
    pub(super) fn lock_alone(path: &Path) -> Result<Option<File>> {
        let file = open(path)?;
        match file.try_lock() {
            Ok(()) => Ok(Some(file)),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(failed("lock", path, &error)),
        }
    }

    /// As the one that makes the set. Waits for another that does, and says for whom; ends with what `leave` ends with.
    pub(super) fn lock_to_build(&self, leave: impl Fn() -> Result<()>) -> Result<File> {
        let path = self.lock_file("build");
        let mut file = open(&path)?;
        let mut has_said = false;
        loop {
            match file.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) => {}
                Err(TryLockError::Error(error)) => return Err(failed("lock", &path, &error)),
            }
            if !std::mem::replace(&mut has_said, true) {
                let who = whose(&mut file).unwrap_or_else(|| "another process".into());
                eprintln!("stoker: waits for {who}, which builds {self}");
            }
            leave()?;
            std::thread::sleep(WAIT_PAUSE);
        }
        // For those who wait; a name that cannot be written is a wait without one.
        let _ = file.set_len(0).and_then(|()| file.rewind());
        let _ = write!(file, "process {}{}", std::process::id(), host());
        Ok(file)
    }
}

fn open(path: &Path) -> Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    options.open(path).map_err(|error| failed("open", path, &error))
}

/// Who has written its name into the lock's file.
fn whose(file: &mut File) -> Option<String> {
    let mut name = String::new();
    file.rewind().ok()?;
    file.read_to_string(&mut name).ok()?;
    Some(name).filter(|name| !name.is_empty())
}

fn host() -> String {
    let name = rustix::system::uname();
    name.nodename().to_str().map(|name| format!(" on {name}")).unwrap_or_default()
}

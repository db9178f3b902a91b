//! Requests of commands to a run: its desired state, and trials to kill.
//!
//! ```text
//! record/request.json    {"version": 1, "state": "paused", "killedTrials": [3]}
//! record/request.lock    locked by the command that changes the file
//! ```
//!
//! Commands replace the file, and a runner only reads it. So a request needs no connection to the
//! runner, and outlives both.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use stoker_api::experiment::DesiredState;

use super::record;
use crate::failure::Failure;

/// Version of the file's format.
const VERSION: u64 = 1;

/// Requests to a run. Empty if no command has changed its state.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct Request {
    version: u64,
    /// Desired state; `None` for that of the record.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) state: Option<DesiredState>,
    /// Indexes of trials to kill.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub(crate) killed_trials: BTreeSet<u32>,
}

impl Request {
    /// Reads the requests to the run or job with the record directory `folder`.
    ///
    /// # Errors
    ///
    /// The file is damaged, or a later version of `stoker` wrote it.
    pub(crate) fn read(folder: &Path) -> Result<Self, Failure> {
        let path = path(folder);
        match std::fs::read(&path) {
            Ok(bytes) => Self::parse(&path, &bytes),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(Failure::file("read", &path, error)),
        }
    }

    fn parse(path: &Path, bytes: &[u8]) -> Result<Self, Failure> {
        let damaged = |error: serde_json::Error| {
            Failure::Input(format!(
                "cannot read {}: {error}; delete the file, then repeat the command that wrote it",
                path.display()
            ))
        };
        let value: Value = serde_json::from_slice(bytes).map_err(damaged)?;
        if let Some(version) = value.get("version").filter(|version| **version != VERSION) {
            return Err(Failure::Input(format!(
                "cannot read {}: its version is {version}, and this stoker supports {VERSION}; use \
                 the stoker that wrote it",
                path.display()
            )));
        }
        serde_json::from_value(value).map_err(damaged)
    }
}

/// Requests to a run, which no other command changes until this is dropped.
#[derive(Debug)]
pub(crate) struct LockedRequest {
    path: PathBuf,
    request: Request,
    _lock: File,
}

impl LockedRequest {
    /// Locks and reads the requests to the run or job with the record directory `folder`. Blocks
    /// while another command changes them.
    pub(crate) fn open(folder: &Path) -> Result<Self, Failure> {
        let path = folder.join("request.lock");
        let failed = |error: std::io::Error| Failure::file("lock", &path, error);
        let mut options = OpenOptions::new();
        let lock = options.write(true).create(true).truncate(false).open(&path).map_err(failed)?;
        rustix::fs::flock(&lock, FlockOperation::LockExclusive)
            .map_err(|error| failed(error.into()))?;
        Ok(Self { path: self::path(folder), request: Request::read(folder)?, _lock: lock })
    }

    /// Returns the requests.
    pub(crate) fn get(&self) -> &Request {
        &self.request
    }

    /// Replaces the requests; durable on return.
    pub(crate) fn set(
        &mut self,
        state: Option<DesiredState>,
        killed_trials: BTreeSet<u32>,
    ) -> Result<(), Failure> {
        self.request = Request { version: VERSION, state, killed_trials };
        record::write_json(&self.path, &self.request)
    }
}

/// Withdraws the requests to a run or job that has ended. They were written while it ended, and
/// would apply to its continuation. The caller holds the lock of the record. A damaged file stays;
/// the runner reports it.
pub(crate) fn withdraw_late(folder: &Path) -> Result<(), Failure> {
    change(folder, |_| (None, BTreeSet::new()))
}

/// Withdraws the kills of trials that have ended. They would apply to the continuation of a trial
/// that ended before its kill was recorded. The caller holds the lock of the record. A damaged file
/// stays; the runner reports it.
pub(crate) fn withdraw_late_kills(
    folder: &Path,
    has_ended: impl Fn(u32) -> bool,
) -> Result<(), Failure> {
    change(folder, |request| {
        let kills = request.killed_trials.iter().copied().filter(|index| !has_ended(*index));
        (request.state, kills.collect())
    })
}

/// Replaces the requests by the returned ones, unless they are equal or the file is damaged.
fn change(
    folder: &Path,
    changed: impl FnOnce(&Request) -> (Option<DesiredState>, BTreeSet<u32>),
) -> Result<(), Failure> {
    let mut locked = match LockedRequest::open(folder) {
        Ok(locked) => locked,
        Err(_) if Request::read(folder).is_err() => return Ok(()),
        Err(error) => return Err(error),
    };
    let request = locked.get();
    let (state, killed_trials) = changed(request);
    let is_changed = state != request.state || killed_trials != request.killed_trials;
    if is_changed { locked.set(state, killed_trials) } else { Ok(()) }
}

fn path(folder: &Path) -> PathBuf {
    folder.join("request.json")
}

/// Returns whether a desired state may follow another one, by the rule of the cluster's API: a
/// cancelled object can only be killed.
pub(crate) fn may_follow(from: DesiredState, to: DesiredState) -> bool {
    match from {
        DesiredState::Active | DesiredState::Paused => true,
        DesiredState::Cancelled | DesiredState::Killed => to == from || to == DesiredState::Killed,
    }
}

/// Returns whether nothing runs again after a desired state.
pub(crate) fn is_final(state: DesiredState) -> bool {
    matches!(state, DesiredState::Cancelled | DesiredState::Killed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_is_read_as_written() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(Request::read(folder.path()).unwrap(), Request::default());
        let mut locked = LockedRequest::open(folder.path()).unwrap();
        locked.set(Some(DesiredState::Paused), [3].into()).unwrap();
        drop(locked);
        let locked = LockedRequest::open(folder.path()).unwrap();
        let request = locked.get();
        assert_eq!(request.state, Some(DesiredState::Paused));
        assert_eq!(request.killed_trials, [3].into());
        assert_eq!(Request::read(folder.path()).unwrap(), *request);
    }

    #[test]
    fn late_requests_are_withdrawn() {
        let folder = tempfile::tempdir().unwrap();
        withdraw_late(folder.path()).unwrap();
        assert!(!path(folder.path()).exists());
        let mut locked = LockedRequest::open(folder.path()).unwrap();
        locked.set(Some(DesiredState::Cancelled), [3].into()).unwrap();
        drop(locked);
        withdraw_late(folder.path()).unwrap();
        let request = Request::read(folder.path()).unwrap();
        assert_eq!((request.state, request.killed_trials.len()), (None, 0));
        std::fs::write(path(folder.path()), "{").unwrap();
        withdraw_late(folder.path()).unwrap();
        assert!(Request::read(folder.path()).is_err());
    }

    #[test]
    fn kills_of_ended_trials_are_withdrawn() {
        let folder = tempfile::tempdir().unwrap();
        let mut locked = LockedRequest::open(folder.path()).unwrap();
        locked.set(Some(DesiredState::Paused), [2, 3].into()).unwrap();
        drop(locked);
        withdraw_late_kills(folder.path(), |index| index == 3).unwrap();
        let request = Request::read(folder.path()).unwrap();
        assert_eq!(request.state, Some(DesiredState::Paused));
        assert_eq!(request.killed_trials, [2].into());
    }

    #[test]
    fn damaged_and_later_files_are_named() {
        let check = |text: &str, expected: &str| {
            let folder = tempfile::tempdir().unwrap();
            std::fs::write(path(folder.path()), text).unwrap();
            let error = Request::read(folder.path()).unwrap_err().to_string();
            assert!(error.contains("request.json: "), "{text}: {error}");
            assert!(error.contains(expected), "{text}: {error}");
        };
        check("", "delete the file");
        check(r#"{"version": 1, "stat"#, "delete the file");
        check(r#"{"state": "paused"}"#, "missing field `version`");
        check(r#"{"version": 1, "state": "asleep"}"#, "unknown variant `asleep`");
        check(r#"{"version": 1, "speed": 2}"#, "unknown field `speed`");
        check(r#"{"version": 2, "speed": 2}"#, "its version is 2, and this stoker supports 1");
    }

    #[test]
    fn cancelled_objects_can_only_be_killed() {
        use DesiredState as D;
        let all = [D::Active, D::Paused, D::Cancelled, D::Killed];
        let allowed = |from| all.map(|to| may_follow(from, to));
        assert_eq!(allowed(D::Active), [true; 4]);
        assert_eq!(allowed(D::Paused), [true; 4]);
        assert_eq!(allowed(D::Cancelled), [false, false, true, true]);
        assert_eq!(allowed(D::Killed), [false, false, false, true]);
        assert_eq!(all.map(is_final), [false, false, true, true]);
    }
}

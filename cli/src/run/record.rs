//! Record of a run: the same objects as on a cluster, stored as files.
//!
//! ```text
//! record/experiment.json      Experiment: metadata, spec, status
//! record/trials/INDEX.json    Trial: metadata, spec, status
//! record/attempts/INDEX-ATTEMPT/{trial.json, token}
//! record/alive                  modified every few seconds while a runner has attempts
//! ```
//!
//! Files are replaced atomically, and are durable when a write returns, except for those of an
//! attempt. Only the process that holds the lock writes.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use rustix::fs::FlockOperation;
use serde::Serialize;
use serde::de::DeserializeOwned;
use stoker_api::experiment::Experiment;
use stoker_api::time::Timestamp;
use stoker_api::trial::Trial;
use stoker_engine::experiment::TrialRecord;
use stoker_storage::hash::hex;

use crate::failure::Failure;

/// Number of retries while another process checks the lock with [`is_locked`].
const LOCK_RETRIES_MAX: u32 = 10;
/// Maximum time in which trainers of a dead runner must exit.
const TRAINER_EXIT_TIMEOUT: Duration = Duration::from_secs(30);
/// Wait after the first failed write. It doubles with each further one.
const FIRST_WRITE_WAIT: Duration = Duration::from_secs(1);
/// Longest wait before a write is repeated.
const WRITE_WAIT_MAX: Duration = Duration::from_secs(30);

/// File in the record of a run or job whose deletion has begun.
pub(crate) const DELETED: &str = "deleted";
/// File whose modification time says when a runner was last alive.
const ALIVE: &str = "alive";

/// Directory `record/` of one experiment.
#[derive(Clone, Debug)]
pub(crate) struct RecordDir {
    path: PathBuf,
}

impl RecordDir {
    /// Returns the record in `path`, which need not exist yet.
    pub(crate) fn new(path: PathBuf) -> Self {
        Self { path }
    }

    /// Returns the path of the directory.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Creates the directories.
    pub(crate) fn create(&self) -> Result<(), Failure> {
        for folder in ["trials", "attempts"] {
            let path = self.path.join(folder);
            fs::create_dir_all(&path).map_err(|error| Failure::file("create", &path, error))?;
        }
        Ok(())
    }

    /// Writes the experiment.
    pub(crate) fn save_experiment(&self, experiment: &Experiment) -> Result<(), Failure> {
        write_json(&self.path.join("experiment.json"), experiment)
    }

    /// Writes one trial.
    pub(crate) fn save_trial(&self, trial: &TrialRecord) -> Result<(), Failure> {
        write_json(&self.trial_path(trial.spec.index), &trial_object(trial))
    }

    /// Reads the experiment; `None` if it was never written.
    pub(crate) fn experiment(&self) -> Result<Option<Experiment>, Failure> {
        let path = self.path.join("experiment.json");
        if path.exists() { read_json(&path).map(Some) } else { Ok(None) }
    }

    /// Reads all trials, by index.
    pub(crate) fn trials(&self) -> Result<BTreeMap<u32, TrialRecord>, Failure> {
        let folder = self.path.join("trials");
        let mut trials = BTreeMap::new();
        let entries =
            fs::read_dir(&folder).map_err(|error| Failure::file("read", &folder, error))?;
        for entry in entries {
            let path = entry.map_err(|error| Failure::file("read", &folder, error))?.path();
            if path.extension().is_some_and(|extension| extension == "json") {
                let trial = read_trial(&path)?;
                trials.insert(trial.spec.index, trial);
            }
        }
        Ok(trials)
    }

    /// Checks that no trial's record is missing. Trials are created in order, and never deleted
    /// alone. The search would wait forever for a result of a missing one.
    ///
    /// # Errors
    ///
    /// Returns the path of the first missing record.
    pub(crate) fn check_complete(
        &self,
        trials: &BTreeMap<u32, TrialRecord>,
    ) -> Result<(), Failure> {
        let missing = (0..).zip(trials.keys()).find(|(expected, index)| expected != *index);
        missing.map_or(Ok(()), |(index, _)| {
            let path = self.trial_path(index);
            let why = "the file is missing, although later trials have one";
            Err(Failure::System(format!("cannot read {}: {why}", path.display())))
        })
    }

    /// Notes that a runner is alive, by the modification time of a file.
    pub(crate) fn note_alive(&self) -> std::io::Result<()> {
        private_file(&self.path.join(ALIVE))?.set_modified(SystemTime::now())
    }

    /// Returns when a runner last noted that it was alive, or wrote this trial if that is later.
    pub(crate) fn last_alive(&self, trial: u32) -> Option<Timestamp> {
        let paths = [self.path.join(ALIVE), self.trial_path(trial)];
        let times = paths.iter().filter_map(|path| fs::metadata(path).ok()?.modified().ok());
        let since_epoch = times.max()?.duration_since(SystemTime::UNIX_EPOCH).ok()?;
        i64::try_from(since_epoch.as_secs()).ok().map(Timestamp)
    }

    /// Removes the mark of a deletion that was interrupted before it deleted anything.
    pub(crate) fn unmark_deleted(&self) -> Result<(), Failure> {
        let path = self.path.join(DELETED);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(not_writable("delete", &path, error))
            }
            _ => Ok(()),
        }
    }

    fn trial_path(&self, index: u32) -> PathBuf {
        self.path.join("trials").join(format!("{index}.json"))
    }

    /// Creates the directory of an attempt.
    pub(crate) fn attempt(&self, trial: u32, attempt: u32) -> Result<PathBuf, Failure> {
        let path = self.path.join("attempts").join(format!("{trial}-{attempt}"));
        fs::create_dir_all(&path).map_err(|error| Failure::file("create", &path, error))?;
        Ok(path)
    }
}

/// Reads the record of one trial.
pub(crate) fn read_trial(path: &Path) -> Result<TrialRecord, Failure> {
    let trial: Trial = read_json(path)?;
    Ok(TrialRecord { spec: trial.spec, status: trial.status.unwrap_or_default() })
}

/// Converts a trial record to the object that a cluster would hold.
pub(crate) fn trial_object(trial: &TrialRecord) -> Trial {
    let name = format!("{}-{}", trial.spec.experiment, trial.spec.index);
    let mut object = Trial::new(&name, trial.spec.clone());
    object.status = Some(trial.status.clone());
    object
}

/// Writes `value` as JSON, atomically and durably. Other users cannot read the file.
pub(crate) fn write_json(path: &Path, value: &impl Serialize) -> Result<(), Failure> {
    write(path, &to_json(path, value)?)
}

/// Returns `value` as JSON with a line end. The error names `path`, for which it is meant.
pub(crate) fn to_json(path: &Path, value: &impl Serialize) -> Result<Vec<u8>, Failure> {
    let mut bytes =
        serde_json::to_vec_pretty(value).map_err(|error| Failure::file("write", path, error))?;
    bytes.push(b'\n');
    Ok(bytes)
}

/// Replaces the file at `path` atomically; it is durable on return. Other users cannot read it.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    replace(path, bytes).map_err(|error| not_writable("write", path, error))
}

/// Returns `cannot {what} {path}: {error}`, with a remedy if the file is protected or
/// too large.
fn not_writable(what: &str, path: &Path, error: std::io::Error) -> Failure {
    let remedy = match error.kind() {
        ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => {
            "; make the file and its directory writable"
        }
        ErrorKind::FileTooLarge => "; raise the limit of file sizes with `ulimit -f`",
        _ => "",
    };
    Failure::file(what, path, format!("{error}{remedy}"))
}

/// Writes a file of an attempt that has not started, so that no other process reads it yet. The
/// file may be lost if the machine loses power, as the attempt ends then, too. Other users cannot
/// read it.
pub(crate) fn write_for_attempt(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    let file = private_file(path).and_then(|mut file| file.write_all(bytes));
    file.map_err(|error| not_writable("write", path, error))
}

fn replace(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    let temporary = folder.join(name);
    let mut file = private_file(&temporary)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    // Opened first: if that fails, the file has not been replaced.
    let folder = File::open(folder)?;
    fs::rename(&temporary, path)?;
    folder.sync_all()
}

/// Opens an empty file that other users cannot read.
fn private_file(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)
}

/// Reads a JSON file.
pub(crate) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T, Failure> {
    let bytes = fs::read(path).map_err(|error| Failure::file("read", path, error))?;
    serde_json::from_slice(&bytes).map_err(|error| Failure::file("read", path, error))
}

/// Exclusive lock of a record, released on drop or when the process exits for any reason.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: File,
}

impl Lock {
    /// Takes the lock at `path`. The error names the process that holds it.
    pub(crate) fn take(path: &Path) -> Result<Self, Failure> {
        let failed = |error| Failure::file("lock", path, error);
        let mut options = OpenOptions::new();
        let mut file = options
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .map_err(|error| not_writable("lock", path, error))?;
        match try_lock(&file) {
            Ok(()) => {}
            Err(error) if error == rustix::io::Errno::WOULDBLOCK => {
                let mut holder = String::new();
                let _ = file.read_to_string(&mut holder);
                return Err(Failure::System(format!(
                    "cannot lock {1}: in use by {0}; wait for that process to exit or stop it",
                    holder.trim(),
                    path.display()
                )));
            }
            Err(error) => return Err(Failure::file("lock", path, error)),
        }
        file.set_len(0).map_err(failed)?;
        let holder = format!("process {} on {}\n", std::process::id(), host());
        file.write_all(holder.as_bytes()).map_err(failed)?;
        Ok(Self { _file: file })
    }

    /// Same as [`Lock::take`], for the runner of an experiment or a job. `word` is `experiment` or
    /// `job`.
    pub(crate) fn take_to_run(path: &Path, word: &str, name: &str) -> Result<Self, Failure> {
        Self::take(path).map_err(|error| match holder(path) {
            Some(holder) => Failure::System(format!(
                "cannot run {word} `{name}`: {holder} already works on it; wait until it ends, \
                 or stop it with Ctrl-C"
            )),
            None => error,
        })
    }
}

/// Returns the process that holds the lock at `path`, such as `process 3672 on vm`; `None` if it is
/// free.
pub(crate) fn holder(path: &Path) -> Option<String> {
    if !is_locked(path) {
        return None;
    }
    let text = fs::read_to_string(path).unwrap_or_default();
    // A process writes its name just after it has locked the file.
    let is_named = !text.trim().is_empty();
    Some(if is_named { text.trim().to_owned() } else { "another process".to_owned() })
}

/// Takes an exclusive lock. Retries briefly, because [`is_locked`] holds a lock for a moment.
fn try_lock(file: &File) -> rustix::io::Result<()> {
    for _ in 0..LOCK_RETRIES_MAX {
        match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
            Err(rustix::io::Errno::WOULDBLOCK) => std::thread::sleep(Duration::from_millis(10)),
            other => return other,
        }
    }
    rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive)
}

/// Returns `true` if a process holds the lock at `path`.
pub(crate) fn is_locked(path: &Path) -> bool {
    let attempt = |file| rustix::fs::flock(file, FlockOperation::NonBlockingLockShared);
    File::open(path).is_ok_and(|file| attempt(file) == Err(rustix::io::Errno::WOULDBLOCK))
}

/// Waits until no trainer of an earlier runner is alive. Supervisors kill their trainers when the
/// runner dies, but that takes a moment.
pub(crate) fn wait_for_trainers(path: &Path) -> Result<(), Failure> {
    let failed = |error| Failure::file("lock", path, error);
    let file = OpenOptions::new().append(true).create(true).open(path).map_err(failed)?;
    let end = Instant::now() + TRAINER_EXIT_TIMEOUT;
    loop {
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(()),
            Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < end => {
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(rustix::io::Errno::WOULDBLOCK) => {
                return Err(Failure::System(format!(
                    "trainers of an earlier run are still alive after {} s; kill the processes \
                     that lock {}",
                    TRAINER_EXIT_TIMEOUT.as_secs(),
                    path.display()
                )));
            }
            Err(error) => return Err(Failure::file("lock", path, error)),
        }
    }
}

fn host() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    if name.trim().is_empty() { "this machine".to_owned() } else { name.trim().to_owned() }
}

/// Returns the time until a failed write is repeated, given the wait before the one that failed.
pub(crate) fn wait_to_write(before: Option<Duration>) -> Duration {
    before.map_or(FIRST_WRITE_WAIT, |wait| (wait * 2).min(WRITE_WAIT_MAX))
}

/// Returns `num_bytes` random bytes in hex, from the system's secure random source.
pub(crate) fn random_hex(num_bytes: usize) -> Result<String, Failure> {
    let path = Path::new("/dev/urandom");
    let mut bytes = vec![0; num_bytes];
    File::open(path)
        .and_then(|mut file| file.read_exact(&mut bytes))
        .map_err(|error| Failure::file("read", path, error))?;
    Ok(hex(&bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn second_lock_error_names_the_holder() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.lock");
        let first = Lock::take(&path).unwrap();
        let error = Lock::take(&path).unwrap_err().to_string();
        let process = format!("process {} on ", std::process::id());
        assert!(error.contains(&process), "{error}");
        let error = Lock::take_to_run(&path, "experiment", "a").unwrap_err().to_string();
        assert!(error.starts_with(&format!("cannot run experiment `a`: {process}")), "{error}");
        drop(first);
        assert_eq!(holder(&path), None);
        Lock::take(&path).unwrap();
    }

    #[test]
    fn errors_of_protected_files_have_a_remedy() {
        let check = |kind: ErrorKind, expected: &str| {
            let error = not_writable("lock", Path::new("/a.lock"), kind.into()).to_string();
            assert!(error.starts_with("cannot lock /a.lock: "), "{error}");
            assert!(error.ends_with(expected), "{error}");
        };
        check(ErrorKind::ReadOnlyFilesystem, "; make the file and its directory writable");
        check(ErrorKind::PermissionDenied, "; make the file and its directory writable");
        check(ErrorKind::FileTooLarge, "; raise the limit of file sizes with `ulimit -f`");
        check(ErrorKind::StorageFull, "no storage space");
    }

    #[test]
    fn write_replaces_the_file_and_leaves_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.json");
        write(&path, b"a longer text").unwrap();
        write(&path, b"new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}

//! Trainers as processes: start, log, end.
//!
//! A trainer is the leader of a process group of its own, so that a Ctrl-C in the terminal reaches
//! the runner alone, and so that what a trainer leaves behind can be ended with it.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::process::{Pid, Signal};
use stoker_api::contract::ExitCode;
use stoker_api::names::{ENV_CACHE, ENV_TRIAL_CONFIG};
use stoker_api::trial::AttemptEnd;
use stoker_storage::Storage;
use stoker_storage::layout;
use stoker_storage::segments::{SegmentWriter, Segments};
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::process::{Child, Command};
use tokio::sync::mpsc::UnboundedSender;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::failure::Failure;

/// Last lines of a trainer's log that are kept to say why it failed.
const TAIL_LINES: usize = 8;
/// Characters kept of each of them.
const TAIL_CHARS_MAX: usize = 400;
/// A line longer than this is cut in two in the log.
const LINE_BYTES_MAX: usize = 64 << 10;
/// How long to wait for the end of the log once the trainer and its group are dead.
const DRAIN: Duration = Duration::from_secs(5);
/// How long the storage may take for the rest of the log before it is given up.
const FLUSH: Duration = Duration::from_secs(60);

/// What to start.
#[derive(Debug)]
pub(crate) struct Start<'a> {
    pub(crate) trial: u32,
    pub(crate) attempt: u32,
    /// Program and arguments.
    pub(crate) command: Vec<String>,
    pub(crate) env: Vec<(String, String)>,
    /// The file that holds its `TrialConfig`.
    pub(crate) config: &'a Path,
    /// The trial's folder in the storage.
    pub(crate) trial_path: &'a str,
}

/// How a trainer ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) trial: u32,
    pub(crate) attempt: u32,
    pub(crate) end: AttemptEnd,
    pub(crate) message: Option<String>,
    /// Why the end of its log could not be stored.
    pub(crate) log_error: Option<String>,
}

/// A trainer that was started.
#[derive(Debug)]
pub(crate) struct Running {
    /// Its attempt.
    pub(crate) attempt: u32,
    group: Option<Pid>,
    asked: Arc<Mutex<Asked>>,
}

/// What the runner did to a trainer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Asked {
    #[default]
    Nothing,
    /// To checkpoint and exit, by SIGTERM.
    Exit,
    /// Killed, because it took too long or the user was impatient.
    Killed,
}

impl Running {
    /// Asks it to checkpoint and exit.
    pub(crate) fn ask_to_exit(&self) {
        self.set(Asked::Exit);
        if let Some(pid) = self.group {
            let _ = rustix::process::kill_process(pid, Signal::TERM);
        }
    }

    /// Kills it and all that it started.
    pub(crate) fn kill(&self) {
        self.set(Asked::Killed);
        kill_group(self.group);
    }

    /// Its process is gone and its group was ended with it: nothing is left to kill.
    pub(crate) fn release(mut self) {
        self.group = None;
    }

    fn set(&self, asked: Asked) {
        *self.asked.lock().unwrap_or_else(PoisonError::into_inner) = asked;
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        kill_group(self.group);
    }
}

fn kill_group(group: Option<Pid>) {
    if let Some(group) = group {
        let _ = rustix::process::kill_process_group(group, Signal::KILL);
    }
}

/// Starts a trainer; its end is sent to `ended`, after its log is stored. Must be called on the
/// process's main thread: the trainer dies with the thread that started it.
pub(crate) fn start(
    start: Start<'_>,
    storage: &Storage,
    ended: UnboundedSender<Ended>,
) -> Result<Running, Failure> {
    let stoker = std::env::current_exe()
        .map_err(|error| Failure::System(format!("cannot find the program stoker: {error}")))?;
    let mut command = Command::new(&stoker);
    command.args(["supervise", "--parent", &std::process::id().to_string(), "--"]);
    command.args(&start.command);
    command.env("PATH", search_path(&stoker));
    command.envs(start.env);
    if let Some(cache) = std::env::var_os(ENV_CACHE) {
        command.env(ENV_CACHE, cache);
    }
    command.env(ENV_TRIAL_CONFIG, start.config);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.process_group(0).kill_on_drop(true);
    let child = command
        .spawn()
        .map_err(|error| Failure::System(format!("cannot start a process: {error}")))?;
    let group = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
    let asked = Arc::new(Mutex::new(Asked::default()));
    let prefix = format!("{}/0-", layout::logs_path(start.trial_path, start.attempt));
    let segments = Segments::new(prefix, ".log");
    let log = Log {
        writer: SegmentWriter::new(&tokio::runtime::Handle::current(), storage.clone(), segments),
        num_missing: Arc::default(),
        tail: Arc::default(),
    };
    let (trial, attempt) = (start.trial, start.attempt);
    let seen = asked.clone();
    tokio::spawn(async move {
        let status = attend(child, group, &log).await;
        let asked = *seen.lock().unwrap_or_else(PoisonError::into_inner);
        let (end, message) = classify(status, asked, &log.last_lines());
        // The program is gone, whether the end of its log could be stored or not.
        let log_error = match timeout(FLUSH, log.writer.flush()).await {
            Ok(flushed) => flushed.err().map(|error| error.to_string()),
            Err(_) => Some(format!("not within {} s", FLUSH.as_secs())),
        };
        let _ = ended.send(Ended { trial, attempt, end, message, log_error });
    });
    Ok(Running { attempt, group, asked })
}

/// `PATH` with the folder of `stoker` first, so that the stock trainer beside it is found.
pub(crate) fn search_path(stoker: &Path) -> std::ffi::OsString {
    let mut folders: Vec<PathBuf> = stoker.parent().map(Path::to_owned).into_iter().collect();
    let path = std::env::var_os("PATH").unwrap_or_default();
    folders.extend(std::env::split_paths(&path));
    // A folder with a colon in its name cannot be written there.
    std::env::join_paths(folders).unwrap_or(path)
}

async fn attend(mut child: Child, group: Option<Pid>, log: &Log) -> std::io::Result<ExitStatus> {
    let readers =
        [child.stdout.take().map(|it| log.read(it)), child.stderr.take().map(|it| log.read(it))];
    let status = child.wait().await;
    kill_group(group);
    for reader in readers.into_iter().flatten() {
        let _ = timeout(DRAIN, reader).await;
    }
    status
}

fn classify(
    status: std::io::Result<ExitStatus>,
    asked: Asked,
    last_lines: &str,
) -> (AttemptEnd, Option<String>) {
    use std::os::unix::process::ExitStatusExt as _;
    let status = match status {
        Ok(status) => status,
        Err(error) => return (AttemptEnd::Infrastructure, Some(error.to_string())),
    };
    let with_log = |what: String| {
        Some(if last_lines.is_empty() {
            what
        } else {
            format!("{what}; its last lines: {last_lines}")
        })
    };
    let Some(code) = status.code() else {
        let signal = status.signal().unwrap_or_default();
        return match asked {
            Asked::Nothing => {
                (AttemptEnd::UserError, with_log(format!("ended by signal {signal}")))
            }
            Asked::Exit => {
                let what = "ended by SIGTERM before it could take a checkpoint";
                (AttemptEnd::Preempted, Some(what.to_owned()))
            }
            Asked::Killed => {
                let what = "killed: it did not exit in time after it was asked to";
                (AttemptEnd::Preempted, Some(what.to_owned()))
            }
        };
    };
    match ExitCode::from_code(code) {
        Some(ExitCode::Completed) => (AttemptEnd::Completed, None),
        Some(ExitCode::Preempted) => (AttemptEnd::Preempted, None),
        Some(ExitCode::InvalidHyperparameters) => (
            AttemptEnd::InvalidHyperparameters,
            with_log("its hyperparameters cannot be trained".to_owned()),
        ),
        Some(ExitCode::Infrastructure | ExitCode::PeerFailed) => {
            (AttemptEnd::Infrastructure, with_log(format!("exit code {code}")))
        }
        Some(ExitCode::UserError) | None => {
            (AttemptEnd::UserError, with_log(format!("exit code {code}")))
        }
    }
}

/// What a trainer prints: stored in segments, the last lines kept.
#[derive(Clone, Debug)]
struct Log {
    writer: SegmentWriter,
    /// Bytes that found no room, and that no line of the log tells of yet.
    num_missing: Arc<AtomicU64>,
    tail: Arc<Mutex<VecDeque<String>>>,
}

impl Log {
    fn read(&self, mut from: impl AsyncRead + Unpin + Send + 'static) -> JoinHandle<()> {
        let log = self.clone();
        tokio::spawn(async move {
            let mut pending = Vec::new();
            let mut buffer = vec![0; 8 << 10];
            while let Ok(num_read @ 1..) = from.read(&mut buffer).await {
                pending.extend_from_slice(&buffer[..num_read]);
                let whole = match pending.iter().rposition(|byte| *byte == b'\n') {
                    Some(last) => last + 1,
                    None if pending.len() > LINE_BYTES_MAX => pending.len(),
                    None => continue,
                };
                let rest = pending.split_off(whole);
                log.append(std::mem::replace(&mut pending, rest));
            }
            log.append(pending);
        })
    }

    /// Appends lines: whole ones, so that those of two streams never mix within one.
    fn append(&self, mut lines: Vec<u8>) {
        if lines.is_empty() {
            return;
        }
        if lines.last() != Some(&b'\n') {
            lines.push(b'\n');
        }
        let mut tail = self.tail.lock().unwrap_or_else(PoisonError::into_inner);
        for line in String::from_utf8_lossy(&lines).lines().filter(|it| !it.trim().is_empty()) {
            if tail.len() == TAIL_LINES {
                tail.pop_front();
            }
            tail.push_back(line.chars().take(TAIL_CHARS_MAX).collect());
        }
        drop(tail);
        let num_missing = self.num_missing.swap(0, Ordering::Relaxed);
        if num_missing > 0 {
            let note = format!("[here {num_missing} bytes are missing: the storage was away]\n");
            lines.splice(0..0, note.into_bytes());
        }
        let num_bytes = lines.len() as u64;
        if !self.writer.append(lines) {
            self.num_missing.fetch_add(num_missing + num_bytes, Ordering::Relaxed);
        }
    }

    fn last_lines(&self) -> String {
        let tail = self.tail.lock().unwrap_or_else(PoisonError::into_inner);
        tail.iter().map(String::as_str).collect::<Vec<_>>().join("\n")
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;

    use super::*;

    /// `wait` is the raw status: exit codes are in the second byte, signals in the first.
    fn check(wait: i32, asked: Asked, expected: AttemptEnd) {
        let status = Ok(ExitStatus::from_raw(wait));
        assert_eq!(classify(status, asked, "").0, expected, "{wait} {asked:?}");
    }

    #[test]
    fn exit_codes_and_signals_say_how_an_attempt_ended() {
        check(0, Asked::Nothing, AttemptEnd::Completed);
        check(1 << 8, Asked::Nothing, AttemptEnd::UserError);
        check(78 << 8, Asked::Nothing, AttemptEnd::InvalidHyperparameters);
        check(79 << 8, Asked::Nothing, AttemptEnd::Preempted);
        check(80 << 8, Asked::Nothing, AttemptEnd::Infrastructure);
        check(101 << 8, Asked::Nothing, AttemptEnd::UserError);
        check(9, Asked::Nothing, AttemptEnd::UserError);
        check(15, Asked::Exit, AttemptEnd::Preempted);
        check(9, Asked::Killed, AttemptEnd::Preempted);
        check(1 << 8, Asked::Exit, AttemptEnd::UserError);
    }
}

//! Trainer processes: start, logs and exit.
//!
//! Each trainer has a supervisor, which kills all processes that the trainer started; see
//! [`supervise`](crate::supervise).

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Pid, Signal};
use stoker_api::contract::Termination;
use stoker_api::exit::ExitClass;
use stoker_api::names::{ENV_LAUNCHED, ENV_TRIAL_CONFIG};
use stoker_api::trial::AttemptEnd;
use stoker_storage::Storage;
use stoker_storage::layout;
use stoker_storage::lines::{LineBuffer, SILENCE, Tail};
use stoker_storage::segments::SegmentWriter;
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::process::{Child, Command};
use tokio::sync::mpsc::UnboundedSender;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::open_files;

/// Maximum wait for the last log lines after the trainer's process group has exited.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum time for storing the rest of the log.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(60);

/// Parameters of a trainer process.
#[derive(Debug)]
pub(crate) struct TrainerStart<'a> {
    pub(crate) trial: u32,
    pub(crate) attempt: u32,
    /// Program and arguments.
    pub(crate) command: Vec<String>,
    pub(crate) env: Vec<(String, String)>,
    /// File with the trainer's `TrialConfig`.
    pub(crate) config: &'a Path,
    /// Path of the trial in the storage.
    pub(crate) trial_path: &'a str,
    /// File that is locked while any process of the trainer is alive.
    pub(crate) lock: &'a Path,
    /// Working directory; `None` for the runner's.
    pub(crate) folder: Option<&'a Path>,
}

/// Outcome of a trainer process.
#[derive(Debug)]
pub(crate) struct TrainerOutcome {
    pub(crate) trial: u32,
    pub(crate) attempt: u32,
    pub(crate) end: AttemptEnd,
    /// Whether the program exited with an error that a restart would repeat.
    pub(crate) is_unrecoverable: bool,
    pub(crate) message: Option<String>,
    /// Why the last log lines could not be stored.
    pub(crate) log_error: Option<String>,
}

/// A running trainer. Dropping it kills all processes of the trainer.
#[derive(Debug)]
pub(crate) struct TrainerProcess {
    /// Attempt number.
    pub(crate) attempt: u32,
    supervisor: Option<OwnedWriteHalf>,
    stop_request: Arc<Mutex<StopRequest>>,
}

/// Stop request sent to a trainer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum StopRequest {
    #[default]
    None,
    /// SIGTERM: checkpoint and exit.
    Exit,
    /// SIGKILL, after the preemption timeout or on a second signal from the user.
    Kill,
    /// SIGKILL, because the user has killed the trial or its experiment.
    UserKill,
}

impl TrainerProcess {
    /// Asks the trainer to checkpoint and exit.
    pub(crate) fn request_stop(&self) {
        self.set(StopRequest::Exit);
        if let Some(supervisor) = &self.supervisor {
            // Ignore the error: the buffer cannot be full, because nothing else is written.
            let _ = supervisor.try_write(b"x");
        }
    }

    /// Kills the trainer and all processes that it started.
    pub(crate) fn kill(&mut self) {
        self.set(StopRequest::Kill);
        self.supervisor = None;
    }

    /// Same as [`kill`](Self::kill), for a trial that the user has killed.
    pub(crate) fn kill_for_user(&mut self) {
        self.set(StopRequest::UserKill);
        self.supervisor = None;
    }

    fn set(&self, stop_request: StopRequest) {
        *self.stop_request.lock().unwrap_or_else(PoisonError::into_inner) = stop_request;
    }
}

/// Starts a trainer. Sends its outcome to `outcomes` after its log has been stored.
///
/// # Errors
///
/// The supervisor process could not be started: an infrastructure failure, not the trainer's.
pub(crate) fn start(
    start: TrainerStart<'_>,
    storage: &Storage,
    outcomes: UnboundedSender<TrainerOutcome>,
) -> std::io::Result<TrainerProcess> {
    let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
    ours.set_nonblocking(true)?;
    let (status_reader, supervisor) = UnixStream::from_std(ours)?.into_split();
    // Start this same binary, even if its file has been replaced.
    let mut command = Command::new("/proc/self/exe");
    command.arg("supervise").args(open_files::supervise_args());
    command.arg("--lock").arg(start.lock).arg("--").args(&start.command);
    command.env("PATH", trainer_path()?);
    if let Some(folder) = start.folder {
        command.current_dir(folder);
    }
    // A trial may run `stoker run`, whose trainers do not run below that trial's launcher.
    command.env_remove(ENV_LAUNCHED);
    command.envs(start.env);
    command.env(ENV_TRIAL_CONFIG, start.config);
    command.stdin(OwnedFd::from(theirs)).stdout(Stdio::piped()).stderr(Stdio::piped());
    // Ctrl-C in the terminal must reach only the runner.
    command.process_group(0);
    let child = command.spawn()?;
    let stop_request = Arc::new(Mutex::new(StopRequest::default()));
    let segments = layout::log_segments(start.trial_path, start.attempt, 0);
    let log = Log {
        writer: SegmentWriter::new(&tokio::runtime::Handle::current(), storage.clone(), segments),
        num_missing: Arc::default(),
        tail: Arc::default(),
    };
    let (trial, attempt) = (start.trial, start.attempt);
    let shared = stop_request.clone();
    tokio::spawn(async move {
        let status = wait_for_exit(child, status_reader, &log).await;
        let stop_request = *shared.lock().unwrap_or_else(PoisonError::into_inner);
        let (end, message) = classify(status, stop_request, &log.last_lines());
        let is_unrecoverable = status.is_unrecoverable();
        // Report the outcome even if the last log lines cannot be stored.
        let log_error = match timeout(FLUSH_TIMEOUT, log.writer.flush()).await {
            Ok(flushed) => flushed.err().map(|error| error.to_string()),
            Err(_) => Some(format!("timed out after {} s", FLUSH_TIMEOUT.as_secs())),
        };
        let outcome = TrainerOutcome { trial, attempt, end, is_unrecoverable, message, log_error };
        let _ = outcomes.send(outcome);
    });
    Ok(TrainerProcess { attempt, supervisor: Some(supervisor), stop_request })
}

/// Returns the termination message in a file; `None` if the program has written none.
pub(crate) fn termination(file: &Path) -> Option<Termination> {
    serde_json::from_slice(&std::fs::read(file).ok()?).ok()
}

/// Returns how an attempt ends whose supervisor could not be started. Such an end does not count if
/// too many files are open: the program has nothing to do with it.
pub(crate) fn end_of_failed_start(error: &std::io::Error) -> AttemptEnd {
    match Errno::from_io_error(error) {
        Some(Errno::MFILE | Errno::NFILE) => AttemptEnd::NotStarted,
        _ => AttemptEnd::Infrastructure,
    }
}

/// Returns the [`search_path`] of trainers, which is computed once.
fn trainer_path() -> std::io::Result<&'static OsString> {
    static SEARCH_PATH: OnceLock<OsString> = OnceLock::new();
    match SEARCH_PATH.get() {
        Some(path) => Ok(path),
        None => {
            std::env::current_exe().map(|stoker| SEARCH_PATH.get_or_init(|| search_path(&stoker)))
        }
    }
}

/// Returns `PATH` with the directory of `stoker` first, so that the stock trainer next to it is
/// found.
pub(crate) fn search_path(stoker: &Path) -> OsString {
    let mut folders: Vec<PathBuf> = stoker.parent().map(Path::to_owned).into_iter().collect();
    let path = std::env::var_os("PATH").unwrap_or_default();
    folders.extend(std::env::split_paths(&path));
    // `PATH` cannot contain a directory with a colon in its name.
    std::env::join_paths(folders).unwrap_or(path)
}

/// Exit status of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ProgramExit {
    Exit(i32),
    Signal(i32),
    /// The supervisor reported no status: it was killed, or could not start the program.
    Unknown,
}

impl ProgramExit {
    fn is_unrecoverable(self) -> bool {
        let Self::Exit(code) = self else { return false };
        ExitClass::of_code(code) == ExitClass::Unrecoverable
    }
}

/// Waits until all processes of the program are gone, and stores their output.
async fn wait_for_exit(
    mut child: Child,
    mut status_reader: OwnedReadHalf,
    log: &Log,
) -> ProgramExit {
    let readers = [
        child.stdout.take().map(|stdout| log.read(stdout)),
        child.stderr.take().map(|stderr| log.read(stderr)),
    ];
    let mut report = String::new();
    // Ignore the error: if the supervisor died, use the part of the report that arrived.
    let _ = status_reader.read_to_string(&mut report).await;
    let _ = child.wait().await;
    let end = parse_exit(&report);
    let group_of = |line: &str| line.strip_prefix("group ")?.parse().ok();
    if end == ProgramExit::Unknown
        && let Some(group) = report.lines().find_map(group_of)
        && let Some(group) = Pid::from_raw(group)
    {
        let _ = rustix::process::kill_process_group(group, Signal::KILL);
    }
    for reader in readers.into_iter().flatten() {
        let _ = timeout(DRAIN_TIMEOUT, reader).await;
    }
    end
}

fn parse_exit(report: &str) -> ProgramExit {
    let number = |line: &str, what| line.strip_prefix(what)?.parse().ok();
    report
        .lines()
        .find_map(|line| {
            let exit = number(line, "exit ").map(ProgramExit::Exit);
            exit.or_else(|| number(line, "signal ").map(ProgramExit::Signal))
        })
        .unwrap_or(ProgramExit::Unknown)
}

fn classify(
    program: ProgramExit,
    stop_request: StopRequest,
    last_lines: &str,
) -> (AttemptEnd, Option<String>) {
    let with_log = |what: String| {
        Some(if last_lines.is_empty() {
            what
        } else {
            format!("{what}; its last lines: {last_lines}")
        })
    };
    let code = match (program, stop_request) {
        (ProgramExit::Exit(code), _) => code,
        (_, StopRequest::Kill) => {
            let what = "killed: the program did not exit in time after a stop request";
            return (AttemptEnd::Preempted, Some(what.to_owned()));
        }
        (_, StopRequest::UserKill) => {
            return (AttemptEnd::RunnerLost, Some("killed by request".to_owned()));
        }
        (ProgramExit::Signal(signal), StopRequest::Exit) if signal == Signal::TERM.as_raw() => {
            let what = "ended by SIGTERM: the program does not handle the signal";
            return (AttemptEnd::Preempted, Some(what.to_owned()));
        }
        (ProgramExit::Signal(signal), _) => {
            return (AttemptEnd::UserError, with_log(format!("ended by signal {signal}")));
        }
        (ProgramExit::Unknown, _) => {
            let what = "the supervisor was killed or could not start the program";
            return (AttemptEnd::Infrastructure, with_log(what.to_owned()));
        }
    };
    let class = ExitClass::of_code(code);
    let message = match class {
        ExitClass::Completed | ExitClass::Preempted => None,
        ExitClass::InvalidHyperparameters => {
            with_log("the program rejected its hyperparameters".to_owned())
        }
        ExitClass::PeerFailed
        | ExitClass::Infrastructure
        | ExitClass::UserError
        | ExitClass::Unrecoverable => with_log(format!("exit code {code}")),
    };
    (class.attempt_end(), message)
}

/// Log of a trainer, stored in segments.
#[derive(Clone, Debug)]
struct Log {
    writer: SegmentWriter,
    /// Dropped bytes that the log does not mention yet.
    num_missing: Arc<AtomicU64>,
    /// Last lines, for the failure message.
    tail: Arc<Mutex<Tail>>,
}

impl Log {
    fn read(&self, mut from: impl AsyncRead + Unpin + Send + 'static) -> JoinHandle<()> {
        let log = self.clone();
        tokio::spawn(async move {
            let (mut pending, mut buffer) = (LineBuffer::default(), vec![0; 8 << 10]);
            loop {
                let lines = match timeout(SILENCE, from.read(&mut buffer)).await {
                    Ok(Ok(num_read @ 1..)) => pending.push(&buffer[..num_read]),
                    Ok(_) => break,
                    // A program that hangs has printed where it is.
                    Err(_) => pending.take_incomplete(),
                };
                if let Some(lines) = lines {
                    log.append(lines);
                }
            }
            if let Some(line) = pending.finish() {
                log.append(line);
            }
        })
    }

    /// Appends complete lines, so that lines of stdout and stderr never mix.
    fn append(&self, mut lines: Vec<u8>) {
        self.tail.lock().unwrap_or_else(PoisonError::into_inner).push(&lines);
        let num_missing = self.num_missing.swap(0, Ordering::Relaxed);
        if num_missing > 0 {
            let note = format!("[{num_missing} bytes are missing here: storage unavailable]\n");
            lines.splice(0..0, note.into_bytes());
        }
        let num_bytes = lines.len() as u64;
        if !self.writer.append(lines) {
            self.num_missing.fetch_add(num_missing + num_bytes, Ordering::Relaxed);
        }
    }

    fn last_lines(&self) -> String {
        self.tail.lock().unwrap_or_else(PoisonError::into_inner).text()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(report: &str, stop_request: StopRequest, expected: AttemptEnd) {
        assert_eq!(
            classify(parse_exit(report), stop_request, "").0,
            expected,
            "{report} {stop_request:?}"
        );
    }

    #[test]
    fn exit_statuses_map_to_attempt_ends() {
        check("exit 0", StopRequest::None, AttemptEnd::Completed);
        check("group 7\nexit 1\n", StopRequest::None, AttemptEnd::UserError);
        check("exit 78", StopRequest::None, AttemptEnd::InvalidHyperparameters);
        check("exit 79", StopRequest::Exit, AttemptEnd::Preempted);
        check("exit 79", StopRequest::None, AttemptEnd::Preempted);
        check("exit 80", StopRequest::None, AttemptEnd::Infrastructure);
        check("exit 81", StopRequest::Exit, AttemptEnd::Infrastructure);
        check("exit 82", StopRequest::None, AttemptEnd::UserError);
        check("exit 101", StopRequest::None, AttemptEnd::UserError);
        check("signal 9", StopRequest::None, AttemptEnd::UserError);
        check("signal 15", StopRequest::Exit, AttemptEnd::Preempted);
        check("signal 11", StopRequest::Exit, AttemptEnd::UserError);
        check("signal 9", StopRequest::Kill, AttemptEnd::Preempted);
        check("exit 1", StopRequest::Exit, AttemptEnd::UserError);
        check("group 7\n", StopRequest::None, AttemptEnd::Infrastructure);
        check("", StopRequest::Kill, AttemptEnd::Preempted);
    }

    #[test]
    fn one_exit_code_is_unrecoverable() {
        let check = |report, expected| {
            assert_eq!(parse_exit(report).is_unrecoverable(), expected, "{report}");
        };
        check("exit 82", true);
        check("exit 1", false);
        check("signal 82", false);
        check("", false);
    }

    #[test]
    fn starts_without_free_files_do_not_count() {
        let end = |error: Errno| end_of_failed_start(&error.into());
        assert_eq!(end(Errno::MFILE), AttemptEnd::NotStarted);
        assert_eq!(end(Errno::AGAIN), AttemptEnd::Infrastructure);
    }
}

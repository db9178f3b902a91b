//! Trainers as processes: start, log, end.
//!
//! Each trainer has a supervisor, which ends all that the trainer started: see
//! [`supervise`](crate::supervise).

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::process::{Pid, Signal};
use stoker_api::exit::ExitClass;
use stoker_api::names::ENV_TRIAL_CONFIG;
use stoker_api::trial::AttemptEnd;
use stoker_storage::Storage;
use stoker_storage::layout;
use stoker_storage::segments::{SegmentWriter, Segments};
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::process::{Child, Command};
use tokio::sync::mpsc::UnboundedSender;
use tokio::task::JoinHandle;
use tokio::time::timeout;

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
    /// Locked while any of its processes is alive.
    pub(crate) lock: &'a Path,
    /// Its working folder. Unset: the runner's.
    pub(crate) folder: Option<&'a Path>,
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

/// A trainer that was started. All of its processes are killed when this is dropped.
#[derive(Debug)]
pub(crate) struct Running {
    /// Its attempt.
    pub(crate) attempt: u32,
    supervisor: Option<OwnedWriteHalf>,
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
        if let Some(supervisor) = &self.supervisor {
            // Its buffer is never full: this is all that is ever written.
            let _ = supervisor.try_write(b"x");
        }
    }

    /// Kills it and all that it started.
    pub(crate) fn kill(&mut self) {
        self.set(Asked::Killed);
        self.supervisor = None;
    }

    fn set(&self, asked: Asked) {
        *self.asked.lock().unwrap_or_else(PoisonError::into_inner) = asked;
    }
}

/// Starts a trainer; its end is sent to `ended`, after its log is stored.
///
/// # Errors
///
/// No process could be started: a matter of this machine, not of the trainer.
pub(crate) fn start(
    start: Start<'_>,
    storage: &Storage,
    ended: UnboundedSender<Ended>,
) -> std::io::Result<Running> {
    let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
    ours.set_nonblocking(true)?;
    let (answers, supervisor) = UnixStream::from_std(ours)?.into_split();
    // This very program, even if its file has been replaced.
    let mut command = Command::new("/proc/self/exe");
    command.arg("supervise").arg("--lock").arg(start.lock).arg("--").args(&start.command);
    command.env("PATH", search_path(&std::env::current_exe()?));
    if let Some(folder) = start.folder {
        command.current_dir(folder);
    }
    command.envs(start.env);
    command.env(ENV_TRIAL_CONFIG, start.config);
    command.stdin(OwnedFd::from(theirs)).stdout(Stdio::piped()).stderr(Stdio::piped());
    // Ctrl-C in the terminal is for the runner alone.
    command.process_group(0);
    let child = command.spawn()?;
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
        let status = attend(child, answers, &log).await;
        let asked = *seen.lock().unwrap_or_else(PoisonError::into_inner);
        let (end, message) = classify(status, asked, &log.last_lines());
        // The program is gone, whether the end of its log could be stored or not.
        let log_error = match timeout(FLUSH, log.writer.flush()).await {
            Ok(flushed) => flushed.err().map(|error| error.to_string()),
            Err(_) => Some(format!("not within {} s", FLUSH.as_secs())),
        };
        let _ = ended.send(Ended { trial, attempt, end, message, log_error });
    });
    Ok(Running { attempt, supervisor: Some(supervisor), asked })
}

/// `PATH` with the folder of `stoker` first, so that the stock trainer beside it is found.
pub(crate) fn search_path(stoker: &Path) -> std::ffi::OsString {
    let mut folders: Vec<PathBuf> = stoker.parent().map(Path::to_owned).into_iter().collect();
    let path = std::env::var_os("PATH").unwrap_or_default();
    folders.extend(std::env::split_paths(&path));
    // A folder with a colon in its name cannot be written there.
    std::env::join_paths(folders).unwrap_or(path)
}

/// How a program ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ProgramEnd {
    Exit(i32),
    Signal(i32),
    /// Its supervisor said nothing: it was killed, or could not start it.
    Unknown,
}

/// Waits until nothing of the program is left; stores what it prints.
async fn attend(mut child: Child, mut answers: OwnedReadHalf, log: &Log) -> ProgramEnd {
    let readers =
        [child.stdout.take().map(|it| log.read(it)), child.stderr.take().map(|it| log.read(it))];
    let mut said = String::new();
    // What is cut short was said by a supervisor that died: nothing more will come.
    let _ = answers.read_to_string(&mut said).await;
    let _ = child.wait().await;
    let end = program_end(&said);
    if end == ProgramEnd::Unknown
        && let Some(group) = said.lines().find_map(|it| it.strip_prefix("group ")?.parse().ok())
        && let Some(group) = Pid::from_raw(group)
    {
        let _ = rustix::process::kill_process_group(group, Signal::KILL);
    }
    for reader in readers.into_iter().flatten() {
        let _ = timeout(DRAIN, reader).await;
    }
    end
}

fn program_end(said: &str) -> ProgramEnd {
    let number = |line: &str, what| line.strip_prefix(what)?.parse().ok();
    said.lines()
        .find_map(|line| {
            let exit = number(line, "exit ").map(ProgramEnd::Exit);
            exit.or_else(|| number(line, "signal ").map(ProgramEnd::Signal))
        })
        .unwrap_or(ProgramEnd::Unknown)
}

fn classify(program: ProgramEnd, asked: Asked, last_lines: &str) -> (AttemptEnd, Option<String>) {
    let with_log = |what: String| {
        Some(if last_lines.is_empty() {
            what
        } else {
            format!("{what}; its last lines: {last_lines}")
        })
    };
    let code = match (program, asked) {
        (ProgramEnd::Exit(code), _) => code,
        (_, Asked::Killed) => {
            let what = "killed: it did not exit in time after it was asked to";
            return (AttemptEnd::Preempted, Some(what.to_owned()));
        }
        (ProgramEnd::Signal(signal), Asked::Exit) if signal == Signal::TERM.as_raw() => {
            let what = "ended by SIGTERM, which it does not handle";
            return (AttemptEnd::Preempted, Some(what.to_owned()));
        }
        (ProgramEnd::Signal(signal), _) => {
            return (AttemptEnd::UserError, with_log(format!("ended by signal {signal}")));
        }
        (ProgramEnd::Unknown, _) => {
            let what = "its supervisor was killed or could not start it";
            return (AttemptEnd::Infrastructure, with_log(what.to_owned()));
        }
    };
    let class = ExitClass::of_code(code);
    let message = match class {
        ExitClass::Completed | ExitClass::Preempted => None,
        ExitClass::InvalidHyperparameters => {
            with_log("its hyperparameters cannot be trained".to_owned())
        }
        ExitClass::PeerFailed | ExitClass::Infrastructure | ExitClass::UserError => {
            with_log(format!("exit code {code}"))
        }
    };
    (class.attempt_end(), message)
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
            tail.push_back(plain(line).chars().take(TAIL_CHARS_MAX).collect());
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

/// A line that does nothing to a terminal.
fn plain(line: &str) -> String {
    let mut text = String::new();
    for it in line.chars() {
        match it {
            '\t' => text.push(' '),
            it if it.is_control() => text.extend(it.escape_default()),
            it => text.push(it),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(said: &str, asked: Asked, expected: AttemptEnd) {
        assert_eq!(classify(program_end(said), asked, "").0, expected, "{said} {asked:?}");
    }

    #[test]
    fn exit_codes_and_signals_say_how_an_attempt_ended() {
        check("exit 0", Asked::Nothing, AttemptEnd::Completed);
        check("group 7\nexit 1\n", Asked::Nothing, AttemptEnd::UserError);
        check("exit 78", Asked::Nothing, AttemptEnd::InvalidHyperparameters);
        check("exit 79", Asked::Exit, AttemptEnd::Preempted);
        check("exit 79", Asked::Nothing, AttemptEnd::Preempted);
        check("exit 80", Asked::Nothing, AttemptEnd::Infrastructure);
        check("exit 81", Asked::Exit, AttemptEnd::Infrastructure);
        check("exit 101", Asked::Nothing, AttemptEnd::UserError);
        check("signal 9", Asked::Nothing, AttemptEnd::UserError);
        check("signal 15", Asked::Exit, AttemptEnd::Preempted);
        check("signal 11", Asked::Exit, AttemptEnd::UserError);
        check("signal 9", Asked::Killed, AttemptEnd::Preempted);
        check("exit 1", Asked::Exit, AttemptEnd::UserError);
        check("group 7\n", Asked::Nothing, AttemptEnd::Infrastructure);
        check("", Asked::Killed, AttemptEnd::Preempted);
    }

    #[test]
    fn control_characters_of_a_program_are_shown_not_done() {
        assert_eq!(plain("a\tb \u{1b}[2J\u{7}\r"), "a b \\u{1b}[2J\\u{7}\\r");
    }
}

//! Starts, signals, reaps and terminates the processes of a pod's ranks.
//!
//! Each rank has a separate process group. The launcher adopts orphaned descendants, either as the
//! first process of a container or as a subreaper. All of them have ended before the launcher
//! exits.

use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, WaitOptions, WaitStatus};
use tokio::signal::unix::{self, SignalKind, signal};
use tokio::time::{Instant, sleep, sleep_until};

use super::outcome::{ProcessExit, RankOutcome};
use super::output::{Output, Stream};
use super::signals::Signals;
use crate::Result;
use crate::error::Infrastructure;

/// Time that ranks may take to exit after another rank has failed.
const GRACE: Duration = Duration::from_secs(30);
/// Interval between kills of remaining processes, which may have started others in between.
const KILL_INTERVAL: Duration = Duration::from_millis(20);
/// Maximum wait for killed processes. They exit at once, unless they wait for a device.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);

/// The ranks of this pod.
#[derive(Debug)]
pub(super) struct Children {
    ranks: Vec<Rank>,
    child_exits: unix::Signal,
    /// Whether the launcher received a request to stop.
    is_stop_requested: bool,
    /// Time at which remaining ranks are killed after another rank failed.
    kill_at: Option<Instant>,
    grace: Duration,
}

#[derive(Debug)]
struct Rank {
    /// Its first process, which is also the process group.
    group: Pid,
    exit: Option<ProcessExit>,
    was_terminated_by_launcher: bool,
}

impl Children {
    /// Creates an empty set of ranks. Must be called within a runtime.
    ///
    /// # Errors
    ///
    /// Fails if the process cannot become a subreaper, or cannot listen for signals.
    pub(super) fn new() -> Result<Self> {
        let failed = |error: std::io::Error| {
            Infrastructure(format!("cannot manage child processes: {error}"))
        };
        rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
            .map_err(|error| failed(error.into()))?;
        let child_exits = signal(SignalKind::child()).map_err(failed)?;
        Ok(Self {
            ranks: vec![],
            child_exits,
            is_stop_requested: false,
            kill_at: None,
            grace: GRACE,
        })
    }

    /// Starts one rank.
    ///
    /// # Errors
    ///
    /// Fails if the program cannot be started.
    pub(super) fn start(
        &mut self,
        command: &[String],
        environment: Vec<(&'static str, String)>,
        output: &Output,
    ) -> Result<()> {
        let program = &command[0];
        let child = Command::new(program)
            .args(&command[1..])
            .envs(environment)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn();
        let mut child = child.map_err(|error| cannot_start(program, &error))?;
        let group = Pid::from_child(&child);
        self.ranks.push(Rank { group, exit: None, was_terminated_by_launcher: false });
        let readers = [
            child.stdout.take().map(|stdout| output.read(stdout, Stream::Out)),
            child.stderr.take().map(|stderr| output.read(stderr, Stream::Error)),
        ];
        readers.into_iter().flatten().collect()
    }

    /// Returns `true` if the launcher received a request to stop.
    pub(super) fn is_stop_requested(&self) -> bool {
        self.is_stop_requested
    }

    /// Waits until each rank's first process has exited, and forwards signals meanwhile.
    pub(super) async fn wait_for_ranks(&mut self, signals: &mut Signals) -> Vec<RankOutcome> {
        loop {
            let has_no_children = self.reap();
            let outcome = |rank: &Rank| {
                rank.exit.map(|exit| RankOutcome {
                    exit,
                    was_terminated_by_launcher: rank.was_terminated_by_launcher,
                })
            };
            if let Some(outcomes) = self.ranks.iter().map(outcome).collect() {
                return outcomes;
            }
            if has_no_children {
                // No child remains, but some exit status was reaped elsewhere and is unknown.
                let unknown = |rank: &mut Rank| _ = rank.exit.get_or_insert(ProcessExit::Code(1));
                self.ranks.iter_mut().for_each(unknown);
                continue;
            }
            let kill_at = self.kill_at;
            tokio::select! {
                _ = self.child_exits.recv() => {}
                signal = signals.next() => self.forward_signal(signal),
                () = sleep_until(kill_at.unwrap_or_else(Instant::now)), if kill_at.is_some() => {
                    self.signal_ranks(Signal::KILL);
                    self.kill_at = Some(Instant::now() + KILL_INTERVAL);
                }
            }
        }
    }

    /// Waits without a timeout until no child remains. A stopped process may still save a
    /// checkpoint, and the sender of the stop request enforces a deadline.
    pub(super) async fn wait_for_descendants(&mut self, signals: &mut Signals) {
        while self.is_stop_requested && !self.reap() {
            tokio::select! {
                _ = self.child_exits.recv() => {}
                signal = signals.next() => self.forward_signal(signal),
            }
        }
    }

    /// Kills all remaining children.
    pub(super) async fn kill_all(&mut self) {
        let end = Instant::now() + KILL_TIMEOUT;
        while !self.reap() && Instant::now() < end {
            for rank in &self.ranks {
                let _ = rustix::process::kill_process_group(rank.group, Signal::KILL);
            }
            for pid in children_of(rustix::process::getpid()) {
                let _ = rustix::process::kill_process(pid, Signal::KILL);
            }
            sleep(KILL_INTERVAL).await;
        }
    }

    /// Reaps exited children; returns `true` if no child remains.
    fn reap(&mut self) -> bool {
        loop {
            match rustix::process::wait(WaitOptions::NOHANG) {
                Ok(Some((pid, status))) => self.record_exit(pid, status),
                Ok(None) => return false,
                Err(_) => return true,
            }
        }
    }

    fn record_exit(&mut self, pid: Pid, status: WaitStatus) {
        let Some(rank) = self.ranks.iter_mut().find(|rank| rank.group == pid) else { return };
        let exit = match status.exit_status() {
            Some(code) => ProcessExit::Code(code),
            None => ProcessExit::Signal(status.terminating_signal().unwrap_or_default()),
        };
        rank.exit = Some(exit);
        if self.is_stop_requested {
            return;
        }
        // Descendants of an exited rank are useless, and may occupy a port or a GPU.
        let _ = rustix::process::kill_process_group(pid, Signal::KILL);
        if exit.is_failure() && self.kill_at.is_none() {
            self.kill_at = Some(Instant::now() + self.grace);
            let remaining = self.ranks.iter_mut().filter(|rank| rank.exit.is_none());
            remaining.for_each(|rank| rank.was_terminated_by_launcher = true);
            self.signal_ranks(Signal::TERM);
        }
    }

    fn forward_signal(&mut self, signal: Signal) {
        if signal == Signal::USR1 {
            // Signal only the ranks: other processes may not handle SIGUSR1, and would die.
            let ranks = self.ranks.iter().filter(|rank| rank.exit.is_none());
            for rank in ranks.filter(|rank| handles_usr1(rank.group)) {
                let _ = rustix::process::kill_process(rank.group, signal);
            }
            return;
        }
        self.is_stop_requested = true;
        // A process group outlives its first process.
        for rank in &self.ranks {
            let _ = rustix::process::kill_process_group(rank.group, signal);
        }
    }

    /// Signals the process groups of all ranks that have not exited.
    fn signal_ranks(&self, signal: Signal) {
        for rank in self.ranks.iter().filter(|rank| rank.exit.is_none()) {
            let _ = rustix::process::kill_process_group(rank.group, signal);
        }
    }
}

/// Returns `true` if a process has a handler for SIGUSR1, which otherwise would kill it.
fn handles_usr1(pid: rustix::process::Pid) -> bool {
    let path = format!("/proc/{}/status", pid.as_raw_nonzero());
    let status = std::fs::read_to_string(path).unwrap_or_default();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    let caught = caught.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    caught.is_some_and(|mask| mask & (1 << (Signal::USR1.as_raw() - 1)) != 0)
}

fn cannot_start(program: &str, error: &std::io::Error) -> crate::Error {
    use std::io::ErrorKind;
    let text = format!("cannot start {program:?}: {error}");
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::OutOfMemory => Infrastructure(text).into(),
        ErrorKind::NotFound => {
            format!("{text}; check that it is in the image or among the files sent").into()
        }
        ErrorKind::PermissionDenied => format!("{text}; check that it is executable").into(),
        _ => text.into(),
    }
}

/// Returns the child processes of `parent`.
fn children_of(parent: Pid) -> Vec<Pid> {
    let mut children = vec![];
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let pid = entry.file_name().to_str().and_then(|name| name.parse().ok());
        let Some(pid) = pid.and_then(Pid::from_raw) else { continue };
        let stat = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        if parent_of(&stat) == Some(parent.as_raw_nonzero().get()) {
            children.push(pid);
        }
    }
    children
}

/// Returns the parent's ID from a process's `stat`: the second field after the name, which may
/// contain spaces and parentheses.
fn parent_of(stat: &str) -> Option<i32> {
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parent_is_parsed_despite_odd_names() {
        assert_eq!(parent_of("42 (sh) S 7 42 42 0 -1"), Some(7));
        assert_eq!(parent_of("42 (a ) b (c)) S 7 42 42 0 -1"), Some(7));
        assert_eq!(parent_of(""), None);
    }

    #[test]
    fn spawn_errors_map_to_exit_codes() {
        use std::io::{Error, ErrorKind};

        use stoker_api::contract::ExitCode;

        let check = |kind, expected| {
            let error = cannot_start("train.py", &Error::from(kind));
            assert_eq!(crate::error::exit_code(&*error), expected, "{error}");
            assert!(error.to_string().contains("\"train.py\""), "{error}");
        };
        check(ErrorKind::NotFound, ExitCode::UserError);
        check(ErrorKind::PermissionDenied, ExitCode::UserError);
        check(ErrorKind::WouldBlock, ExitCode::Infrastructure);
        check(ErrorKind::OutOfMemory, ExitCode::Infrastructure);
    }
}

//! The processes of a pod's ranks: started, told, reaped, ended.
//!
//! Each rank has a process group of its own. What a program leaves behind becomes the launcher's:
//! as the first process of a container, or as one that adopts orphans. All of it is gone before
//! the launcher ends.

use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, WaitOptions, WaitStatus};
use tokio::signal::unix::{self, SignalKind, signal};
use tokio::time::{Instant, sleep, sleep_until};

use super::output::{Output, Stream};
use super::signals::Signals;
use super::verdict::{End, Ended};
use crate::Result;
use crate::error::Infrastructure;

/// How long ranks may take to end after another has failed.
const GRACE: Duration = Duration::from_secs(30);
/// How often what does not die is killed again: it may have started others in the meantime.
const KILL_AGAIN: Duration = Duration::from_millis(20);
/// Killed processes die at once, but for those that wait for a device.
const KILL_MAX: Duration = Duration::from_secs(10);

/// The ranks of this pod.
#[derive(Debug)]
pub(super) struct Children {
    ranks: Vec<Rank>,
    some_ended: unix::Signal,
    /// Whether somebody outside asked for the end.
    is_asked: bool,
    /// When ranks are killed that have not ended after another failed.
    kill_at: Option<Instant>,
    grace: Duration,
}

#[derive(Debug)]
struct Rank {
    /// Its first process, and the group.
    group: Pid,
    end: Option<End>,
    is_ended_by_us: bool,
}

impl Children {
    /// None yet. Must be called within a runtime.
    ///
    /// # Errors
    ///
    /// The system lets it not adopt or not listen.
    pub(super) fn new() -> Result<Self> {
        let failed = |error: std::io::Error| Infrastructure(format!("no processes: {error}"));
        rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
            .map_err(|error| failed(error.into()))?;
        let some_ended = signal(SignalKind::child()).map_err(failed)?;
        Ok(Self { ranks: vec![], some_ended, is_asked: false, kill_at: None, grace: GRACE })
    }

    /// Starts one rank.
    ///
    /// # Errors
    ///
    /// It cannot be started.
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
        self.ranks.push(Rank { group, end: None, is_ended_by_us: false });
        let readers = [
            child.stdout.take().map(|it| output.read(it, Stream::Out)),
            child.stderr.take().map(|it| output.read(it, Stream::Error)),
        ];
        readers.into_iter().flatten().collect()
    }

    /// Whether somebody outside asked for the end.
    pub(super) fn is_asked(&self) -> bool {
        self.is_asked
    }

    /// Waits until each rank's first process has ended; passes signals on.
    pub(super) async fn ended(&mut self, signals: &mut Signals) -> Vec<Ended> {
        loop {
            let is_alone = self.reap();
            let ended =
                |it: &Rank| it.end.map(|end| Ended { end, is_ended_by_us: it.is_ended_by_us });
            if let Some(ended) = self.ranks.iter().map(ended).collect() {
                return ended;
            }
            if is_alone {
                // Somebody else has taken their ends: nothing is known of them.
                let unknown = |it: &mut Rank| _ = it.end.get_or_insert(End::Exit(1));
                self.ranks.iter_mut().for_each(unknown);
                continue;
            }
            let kill_at = self.kill_at;
            tokio::select! {
                _ = self.some_ended.recv() => {}
                signal = signals.next() => self.pass_on(signal),
                () = sleep_until(kill_at.unwrap_or_else(Instant::now)), if kill_at.is_some() => {
                    self.signal_ranks(Signal::KILL);
                    self.kill_at = Some(Instant::now() + KILL_AGAIN);
                }
            }
        }
    }

    /// Waits until nothing is left, however long it takes: what was asked to end may be at its
    /// checkpoint, and whoever asked knows how long that may take.
    pub(super) async fn gone(&mut self, signals: &mut Signals) {
        while self.is_asked && !self.reap() {
            tokio::select! {
                _ = self.some_ended.recv() => {}
                signal = signals.next() => self.pass_on(signal),
            }
        }
    }

    /// Kills all that is left.
    pub(super) async fn kill_all(&mut self) {
        let end = Instant::now() + KILL_MAX;
        while !self.reap() && Instant::now() < end {
            for rank in &self.ranks {
                let _ = rustix::process::kill_process_group(rank.group, Signal::KILL);
            }
            for pid in children_of(rustix::process::getpid()) {
                let _ = rustix::process::kill_process(pid, Signal::KILL);
            }
            sleep(KILL_AGAIN).await;
        }
    }

    /// Takes note of all that has ended; says whether no child is left.
    fn reap(&mut self) -> bool {
        loop {
            match rustix::process::wait(WaitOptions::NOHANG) {
                Ok(Some((pid, status))) => self.note(pid, status),
                Ok(None) => return false,
                Err(_) => return true,
            }
        }
    }

    fn note(&mut self, pid: Pid, status: WaitStatus) {
        let Some(rank) = self.ranks.iter_mut().find(|it| it.group == pid) else { return };
        let end = match status.exit_status() {
            Some(code) => End::Exit(code),
            None => End::Signal(status.terminating_signal().unwrap_or_default()),
        };
        rank.end = Some(end);
        if self.is_asked {
            return;
        }
        // What it has started is of no use any more, and may hold a port or a GPU.
        let _ = rustix::process::kill_process_group(pid, Signal::KILL);
        if end.is_failure() && self.kill_at.is_none() {
            self.kill_at = Some(Instant::now() + self.grace);
            self.ranks.iter_mut().filter(|it| it.end.is_none()).for_each(|it| {
                it.is_ended_by_us = true;
            });
            self.signal_ranks(Signal::TERM);
        }
    }

    fn pass_on(&mut self, signal: Signal) {
        if signal == Signal::USR1 {
            // To the ranks alone: what they have started may not know it, and would end.
            for rank in self.ranks.iter().filter(|it| it.end.is_none() && hears_usr1(it.group)) {
                let _ = rustix::process::kill_process(rank.group, signal);
            }
            return;
        }
        self.is_asked = true;
        // A group outlives its first process.
        for rank in &self.ranks {
            let _ = rustix::process::kill_process_group(rank.group, signal);
        }
    }

    /// To the groups of all ranks that have not ended.
    fn signal_ranks(&self, signal: Signal) {
        for rank in self.ranks.iter().filter(|it| it.end.is_none()) {
            let _ = rustix::process::kill_process_group(rank.group, signal);
        }
    }
}

/// Whether a process has a handler for SIGUSR1: it would end one that has none, or none yet.
fn hears_usr1(pid: rustix::process::Pid) -> bool {
    let path = format!("/proc/{}/status", pid.as_raw_nonzero());
    let status = std::fs::read_to_string(path).unwrap_or_default();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    let caught = caught.and_then(|it| u64::from_str_radix(it.trim(), 16).ok());
    caught.is_some_and(|it| it & (1 << (Signal::USR1.as_raw() - 1)) != 0)
}

fn cannot_start(program: &str, error: &std::io::Error) -> crate::Error {
    use std::io::ErrorKind;
    let text = format!("cannot start {program:?}: {error}");
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::OutOfMemory => Infrastructure(text).into(),
        ErrorKind::NotFound => {
            format!("{text}; is it in the image, or among the files sent?").into()
        }
        ErrorKind::PermissionDenied => format!("{text}; is it executable?").into(),
        _ => text.into(),
    }
}

/// The processes whose parent is `parent`.
fn children_of(parent: Pid) -> Vec<Pid> {
    let mut children = vec![];
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let pid = entry.file_name().to_str().and_then(|it| it.parse().ok());
        let Some(pid) = pid.and_then(Pid::from_raw) else { continue };
        let stat = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        if parent_of(&stat) == Some(parent.as_raw_nonzero().get()) {
            children.push(pid);
        }
    }
    children
}

/// The parent's id in a process's `stat`: the second field after the name, which may itself hold
/// blanks and parentheses.
fn parent_of(stat: &str) -> Option<i32> {
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parent_is_found_whatever_the_name() {
        assert_eq!(parent_of("42 (sh) S 7 42 42 0 -1"), Some(7));
        assert_eq!(parent_of("42 (a ) b (c)) S 7 42 42 0 -1"), Some(7));
        assert_eq!(parent_of(""), None);
    }

    #[test]
    fn a_program_that_cannot_be_started_is_the_users_error_and_want_of_memory_is_not() {
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

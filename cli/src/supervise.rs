//! Hidden command `stoker supervise`: no process of a program outlives the runner.
//!
//! `stoker run` starts `stoker supervise --lock FILE -- PROGRAM ARGS`. One end of a socket is the
//! supervisor's standard input; the runner keeps the other:
//!
//! | runner | supervisor |
//! |---|---|
//! | sends a byte | sends SIGTERM to the program's process group |
//! | closes the socket or dies | kills the program and all its descendants |
//!
//! The supervisor reports the process group ID once the program has started. It reports the exit
//! status once all processes of the program are gone. Until then it holds a shared lock on FILE, so
//! the next runner can wait for it. The supervisor is a subreaper: orphans of the program become
//! its children. If the supervisor is killed, the kernel kills the program, but not the processes
//! that the program has started. These inherit the lock.

use std::io::{ErrorKind, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::fs::FlockOperation;
use rustix::io::FdFlags;
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus};
use stoker_api::contract::ExitCode;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::print;
use crate::run::open_files;

/// Interval of repeated kills: processes may start others between two kills.
const KILL_INTERVAL: Duration = Duration::from_millis(20);

/// Arguments of `stoker supervise`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// File to lock while any process of the program is alive
    #[arg(long)]
    lock: Option<std::path::PathBuf>,
    /// Process ID of the supervisor; become the program and die with the supervisor
    #[arg(long, conflicts_with = "lock")]
    parent: Option<i32>,
    /// Soft limit of open files of the program
    #[arg(long)]
    open_files: Option<u64>,
    /// Program and its arguments
    #[arg(last = true, required = true)]
    command: Vec<String>,
}

/// Supervises the program, or with `--parent` becomes it. Returns the exit code on failure.
pub(crate) fn supervise(args: &Args) -> u8 {
    let failed = |error: std::io::Error| {
        print::err(format!("stoker: cannot supervise `{}`: {error}", args.command[0]));
        ExitCode::Infrastructure as u8
    };
    if let Some(limit) = args.open_files {
        open_files::restore(limit);
    }
    match (args.parent, &args.lock) {
        (Some(parent), _) => become_program(parent, &args.command),
        (None, lock) => {
            supervise_program(lock.as_deref(), &args.command).map_or_else(failed, |()| 0)
        }
    }
}

/// Sets SIGKILL as the parent-death signal, checks that the parent is alive and executes `command`.
/// Returns the exit code on failure.
fn become_program(parent: i32, command: &[String]) -> u8 {
    if let Err(error) = rustix::process::set_parent_process_death_signal(Some(Signal::KILL)) {
        print::err(format!("stoker: cannot set the parent-death signal: {error}"));
        return ExitCode::Infrastructure as u8;
    }
    // If the parent died before the call above, the kernel never sends the signal.
    if rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get()) != Some(parent) {
        return ExitCode::Infrastructure as u8;
    }
    let error = Command::new(&command[0]).args(&command[1..]).exec();
    print::err(format!("stoker: cannot start `{}`: {}", command[0], why(&command[0], &error)));
    ExitCode::UserError as u8
}

/// Returns why a program cannot be executed. The system reports a script whose interpreter is
/// missing like a missing program.
fn why(program: &str, error: &std::io::Error) -> String {
    match error.kind() == ErrorKind::NotFound && Path::new(program).exists() {
        true => "its interpreter does not exist; correct the path after `#!` in its first line, \
                 which must not end with a carriage return"
            .to_owned(),
        false => error.to_string(),
    }
}

/// Command from the runner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SupervisorCommand {
    /// Ask the program to checkpoint and exit.
    Exit,
    /// Kill all processes of the program.
    Kill,
}

fn supervise_program(lock: Option<&Path>, command: &[String]) -> std::io::Result<()> {
    let mut runner = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    let _held = lock.map(lock_shared).transpose()?;
    // If the runner died before the lock was held, its successor may already have started.
    runner.set_nonblocking(true)?;
    let is_runner_gone = matches!(runner.read(&mut [0]), Ok(0));
    runner.set_nonblocking(false)?;
    if is_runner_gone {
        return Ok(());
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let commands = read_commands(runner.try_clone()?);
    let end = runtime.block_on(wait_for_exit(command, commands, &mut runner))?;
    // Ignore the error: the runner may be dead.
    let _ = runner.write_all(end.as_bytes());
    std::process::exit(0)
}

/// Takes a shared lock, which processes of the program inherit. If runner and supervisor are killed
/// together, the next runner waits for those processes.
fn lock_shared(lock: &Path) -> std::io::Result<std::fs::File> {
    let file = std::fs::File::open(lock)?;
    rustix::fs::flock(&file, FlockOperation::LockShared)?;
    rustix::io::fcntl_setfd(&file, FdFlags::empty())?;
    Ok(file)
}

fn read_commands(mut runner: UnixStream) -> UnboundedReceiver<SupervisorCommand> {
    let (sender, commands) = unbounded_channel();
    std::thread::spawn(move || {
        while matches!(runner.read(&mut [0]), Ok(1..)) {
            let _ = sender.send(SupervisorCommand::Exit);
        }
        let _ = sender.send(SupervisorCommand::Kill);
    });
    commands
}

/// Starts the program and waits until all its processes are gone. Returns the message that reports
/// its exit status.
async fn wait_for_exit(
    command: &[String],
    mut commands: UnboundedReceiver<SupervisorCommand>,
    runner: &mut UnixStream,
) -> std::io::Result<String> {
    let mut child_exits = signal(SignalKind::child())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let this = rustix::process::getpid();
    rustix::process::set_child_subreaper(Some(this))?;
    let program = Command::new("/proc/self/exe")
        .args(["supervise", "--parent", &this.as_raw_nonzero().to_string(), "--"])
        .args(command)
        .stdin(Stdio::null())
        .process_group(0)
        .spawn()?;
    let group = Pid::from_child(&program);
    let _ = runner.write_all(format!("group {}\n", group.as_raw_nonzero()).as_bytes());
    let (mut end, mut is_stop_requested, mut is_killing) = (String::new(), false, false);
    loop {
        loop {
            match rustix::process::wait(WaitOptions::NOHANG) {
                Ok(Some((pid, status))) if pid == group => {
                    end = exit_message(status);
                    // After a stop request, its child processes may still write a checkpoint.
                    is_killing |= !is_stop_requested;
                }
                Ok(Some(_)) => {}
                Ok(None) => break,
                Err(rustix::io::Errno::CHILD) => return Ok(end),
                Err(error) => return Err(error.into()),
            }
        }
        if is_killing {
            kill_all(this, group);
        }
        tokio::select! {
            _ = child_exits.recv() => {}
            _ = terminate.recv() => is_stop_requested |= send_sigterm(group),
            Some(command) = commands.recv() => match command {
                SupervisorCommand::Exit => is_stop_requested |= send_sigterm(group),
                SupervisorCommand::Kill => is_killing = true,
            },
            () = tokio::time::sleep(KILL_INTERVAL), if is_killing => {}
        }
    }
}

fn send_sigterm(group: Pid) -> bool {
    let _ = rustix::process::kill_process_group(group, Signal::TERM);
    true
}

/// Kills the program's process group and all children of this process, which include orphans that
/// left the group.
fn kill_all(this: Pid, group: Pid) {
    let _ = rustix::process::kill_process_group(group, Signal::KILL);
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let pid = entry.file_name().to_str().and_then(|name| name.parse().ok());
        let Some(pid) = pid.and_then(Pid::from_raw) else { continue };
        let stat = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        if parent_of(&stat) == Some(this.as_raw_nonzero().get()) {
            let _ = rustix::process::kill_process(pid, Signal::KILL);
        }
    }
}

/// Returns the parent's process ID from `/proc/PID/stat`: the second field after the process name.
/// The name may contain spaces and parentheses.
fn parent_of(stat: &str) -> Option<i32> {
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

fn exit_message(status: WaitStatus) -> String {
    match status.exit_status() {
        Some(code) => format!("exit {code}\n"),
        None => format!("signal {}\n", status.terminating_signal().unwrap_or_default()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_inherit_the_lock() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let lock = lock_shared(file.path()).unwrap();
        let mut program = Command::new("sleep").arg("60").spawn().unwrap();
        drop(lock);
        let taken = rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive);
        program.kill().unwrap();
        program.wait().unwrap();
        assert_eq!(taken, Err(rustix::io::Errno::WOULDBLOCK));
    }

    #[test]
    fn missing_interpreters_are_named() {
        let script = tempfile::NamedTempFile::new().unwrap();
        let error = std::io::Error::from(ErrorKind::NotFound);
        let of = |program: &str| why(program, &error);
        assert!(of(script.path().to_str().unwrap()).starts_with("its interpreter does not exist"));
        assert_eq!(of("/no/such/program"), error.to_string());
    }

    #[test]
    fn parent_is_parsed_for_any_process_name() {
        assert_eq!(parent_of("42 (sh) S 7 42 42 0 -1"), Some(7));
        assert_eq!(parent_of("42 (a ) b (c)) S 7 42 42 0 -1"), Some(7));
        assert_eq!(parent_of(""), None);
    }
}

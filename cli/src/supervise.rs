//! Between the runner and a program: no process of the program outlives the runner.
//!
//! A hidden command. `stoker run` starts `stoker supervise --lock FILE -- PROGRAM ARGS` with one end
//! of a socket as its standard input and keeps the other:
//!
//! | runner | supervisor |
//! |---|---|
//! | sends a byte | asks the program and all of its group to exit, by SIGTERM |
//! | closes it, or dies | kills the program and all that came from it |
//!
//! The supervisor sends the program's group when it has started and its end when all of it is gone.
//! Until then it holds a shared lock on FILE, by which the next runner knows. What the program leaves
//! behind becomes the supervisor's: it adopts orphans. Should the supervisor be killed, the
//! kernel kills the program.

use std::io::{Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::fs::FlockOperation;
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus};
use stoker_api::contract::ExitCode;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::print;

/// How often what does not die is killed again: it may have started others in the meantime.
const KILL_AGAIN: Duration = Duration::from_millis(20);

/// What to do.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Locked while any process of the program is alive
    #[arg(long)]
    lock: Option<std::path::PathBuf>,
    /// The supervisor's process id, to become the program and die with it
    #[arg(long, conflicts_with = "lock")]
    parent: Option<i32>,
    /// The program and its arguments
    #[arg(last = true, required = true)]
    command: Vec<String>,
}

/// Supervises the program, or becomes it; returns the exit code if that fails.
pub(crate) fn supervise(args: &Args) -> u8 {
    let failed = |error: std::io::Error| {
        print::err(format!("stoker: cannot supervise `{}`: {error}", args.command[0]));
        ExitCode::Infrastructure as u8
    };
    match (args.parent, &args.lock) {
        (Some(parent), _) => become_program(parent, &args.command),
        (None, lock) => watch(lock.as_deref(), &args.command).map_or_else(failed, |()| 0),
    }
}

/// Asks for death with the parent, checks that it is still there, and becomes `command`. Returns
/// the exit code only if that fails.
fn become_program(parent: i32, command: &[String]) -> u8 {
    if let Err(error) = rustix::process::set_parent_process_death_signal(Some(Signal::KILL)) {
        print::err(format!("stoker: cannot tie the program to its supervisor: {error}"));
        return ExitCode::Infrastructure as u8;
    }
    // It may have died before the line above: then nobody is left to send the signal.
    if rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get()) != Some(parent) {
        return ExitCode::Infrastructure as u8;
    }
    let error = Command::new(&command[0]).args(&command[1..]).exec();
    print::err(format!("stoker: cannot start `{}`: {error}", command[0]));
    ExitCode::UserError as u8
}

/// What the runner wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// That the program checkpoints and exits.
    Exit,
    /// That all is over now.
    Kill,
}

fn watch(lock: Option<&Path>, command: &[String]) -> std::io::Result<()> {
    let mut runner = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    let _held = lock.map(hold).transpose()?;
    // The runner may have died before the lock was held: its successor did not see it.
    runner.set_nonblocking(true)?;
    let has_hung_up = matches!(runner.read(&mut [0]), Ok(0));
    runner.set_nonblocking(false)?;
    if has_hung_up {
        return Ok(());
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let orders = read_orders(runner.try_clone()?);
    let end = runtime.block_on(attend(command, orders, &mut runner))?;
    // A runner that is gone needs no answer.
    let _ = runner.write_all(end.as_bytes());
    std::process::exit(0)
}

fn hold(lock: &Path) -> std::io::Result<std::fs::File> {
    let file = std::fs::File::open(lock)?;
    rustix::fs::flock(&file, FlockOperation::LockShared)?;
    Ok(file)
}

fn read_orders(mut runner: UnixStream) -> UnboundedReceiver<Order> {
    let (sender, orders) = unbounded_channel();
    std::thread::spawn(move || {
        while matches!(runner.read(&mut [0]), Ok(1..)) {
            let _ = sender.send(Order::Exit);
        }
        let _ = sender.send(Order::Kill);
    });
    orders
}

/// Starts the program and waits until nothing of it is left; returns what to tell of its end.
async fn attend(
    command: &[String],
    mut orders: UnboundedReceiver<Order>,
    runner: &mut UnixStream,
) -> std::io::Result<String> {
    let mut some_ended = signal(SignalKind::child())?;
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
    let (mut end, mut is_asked, mut is_killing) = (String::new(), false, false);
    loop {
        loop {
            match rustix::process::wait(WaitOptions::NOHANG) {
                Ok(Some((pid, status))) if pid == group => {
                    end = describe(status);
                    // Asked to exit, what it started may be at its checkpoint still.
                    is_killing |= !is_asked;
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
            _ = some_ended.recv() => {}
            _ = terminate.recv() => is_asked |= ask(group),
            Some(order) = orders.recv() => match order {
                Order::Exit => is_asked |= ask(group),
                Order::Kill => is_killing = true,
            },
            () = tokio::time::sleep(KILL_AGAIN), if is_killing => {}
        }
    }
}

fn ask(group: Pid) -> bool {
    let _ = rustix::process::kill_process_group(group, Signal::TERM);
    true
}

/// Kills the program's group and all children of this process: those that left the group and were
/// orphaned are among them.
fn kill_all(this: Pid, group: Pid) {
    let _ = rustix::process::kill_process_group(group, Signal::KILL);
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let pid = entry.file_name().to_str().and_then(|it| it.parse().ok());
        let Some(pid) = pid.and_then(Pid::from_raw) else { continue };
        let stat = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        if parent_of(&stat) == Some(this.as_raw_nonzero().get()) {
            let _ = rustix::process::kill_process(pid, Signal::KILL);
        }
    }
}

/// The parent's id in a process's `stat`: the second field after the name, which may itself hold
/// blanks and parentheses.
fn parent_of(stat: &str) -> Option<i32> {
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

fn describe(status: WaitStatus) -> String {
    match status.exit_status() {
        Some(code) => format!("exit {code}\n"),
        None => format!("signal {}\n", status.terminating_signal().unwrap_or_default()),
    }
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
}

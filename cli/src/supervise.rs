//! Becomes a trainer that dies with its runner.
//!
//! A hidden command: `stoker run` starts `stoker supervise --parent PID -- PROGRAM ARGS`, which
//! asks the kernel for SIGKILL when its parent ends and then becomes PROGRAM. So a runner killed
//! without warning leaves no trainer behind.

use std::os::unix::process::CommandExt as _;
use std::process::Command;

use stoker_api::contract::ExitCode;

use crate::print;

/// Asks for death with the parent, checks that it is still there, and becomes `command`. Returns
/// the exit code only if that fails.
pub(crate) fn supervise(parent: i32, command: &[String]) -> u8 {
    let Some((program, args)) = command.split_first() else {
        return ExitCode::UserError as u8;
    };
    let signal = Some(rustix::process::Signal::KILL);
    if let Err(error) = rustix::process::set_parent_process_death_signal(signal) {
        print::err(format!("stoker: cannot tie the trainer to its runner: {error}"));
        return ExitCode::Infrastructure as u8;
    }
    // The runner may have died before the line above: then nobody is left to send the signal.
    if rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get()) != Some(parent) {
        return ExitCode::Infrastructure as u8;
    }
    let error = Command::new(program).args(args).exec();
    print::err(format!("stoker: cannot start `{program}`: {error}"));
    ExitCode::UserError as u8
}

//! Errors of test clusters.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// An error, with a remedy where there is one. Tests unwrap it, so `Debug` prints the same as
/// `Display`.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The machine lacks a program, a file or a right.
    #[error(
        "the test cluster needs {what}: {remedy}; set STOKER_TEST_CLUSTER=off to skip tests that \
         need a cluster"
    )]
    Missing {
        /// The missing program, file or right.
        what: String,
        /// Remedy.
        remedy: String,
    },

    /// A kept cluster exists, and only one can run.
    #[error("a kept cluster exists in {}; run tests/cluster/down to end it", .folder.display())]
    Kept {
        /// Directory of the cluster.
        folder: PathBuf,
    },

    /// Another process holds the only cluster of this machine for too long.
    #[error("another process has held {} for 30 minutes; find it with `fuser -v`", .lock.display())]
    Busy {
        /// Locked file.
        lock: PathBuf,
    },

    /// A command exited with an error.
    #[error("{command}: {status}\n{stdout}{stderr}")]
    Failed {
        /// Program and arguments.
        command: String,
        /// Exit status.
        status: std::process::ExitStatus,
        /// Standard output.
        stdout: String,
        /// Standard error.
        stderr: String,
    },

    /// A server exited unexpectedly.
    #[error("{name} exited unexpectedly ({status}); last lines of {}:\n{tail}", .log.display())]
    ServerExited {
        /// Name of the server.
        name: String,
        /// Exit status.
        status: std::process::ExitStatus,
        /// Path of its log.
        log: PathBuf,
        /// Last lines of the log.
        tail: String,
    },

    /// A condition was not met in time.
    #[error("timed out waiting until {what}; last observed: {seen}")]
    Timeout {
        /// Awaited condition.
        what: String,
        /// Result of the last poll.
        seen: String,
    },

    /// The operating system reported an error.
    #[error("{}: {source}", .path.display())]
    Io {
        /// File or program.
        path: PathBuf,
        /// Error of the operating system.
        source: std::io::Error,
    },
}

impl std::fmt::Debug for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

/// Adds the file or program to an I/O error.
pub(crate) trait WithPath<T> {
    /// Adds `path` to the error.
    fn with_path(self, path: impl AsRef<Path>) -> Result<T, Error>;
}

impl<T> WithPath<T> for std::io::Result<T> {
    fn with_path(self, path: impl AsRef<Path>) -> Result<T, Error> {
        self.map_err(|source| Error::Io { path: path.as_ref().to_path_buf(), source })
    }
}

/// Formats a command for messages, as a user would type it.
pub(crate) fn command_line(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

/// Runs a command and returns its standard output.
///
/// # Errors
///
/// [`Error::Failed`] if it exits with a nonzero code, [`Error::Io`] if it cannot be started.
pub(crate) fn run(command: &mut Command) -> Result<String, Error> {
    let output = command.output().with_path(command.get_program())?;
    stdout_of(command, output)
}

/// Returns the standard output of a finished command.
pub(crate) fn stdout_of(command: &Command, output: Output) -> Result<String, Error> {
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() {
        return Ok(stdout);
    }
    Err(Error::Failed {
        command: command_line(command),
        status: output.status,
        stdout,
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    })
}

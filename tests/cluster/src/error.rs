//! Why there is no cluster, or why it did not do what it was told.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// What went wrong, and for what a person can mend, how. Tests unwrap it, so `Debug` is as readable
/// as `Display`.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The machine lacks something.
    #[error(
        "the test cluster needs {what}: {remedy}; STOKER_TEST_CLUSTER=off leaves out the tests \
         that need a cluster"
    )]
    Missing {
        /// The program, file or right.
        what: String,
        /// What to do.
        remedy: String,
    },

    /// A cluster was kept, and there is room for one.
    #[error("a cluster is kept in {}; end it by tests/cluster/down", .folder.display())]
    Kept {
        /// Its folder.
        folder: PathBuf,
    },

    /// Another process has the only cluster of this machine and does not let go.
    #[error("another process has held {} for half an hour; see who by `fuser -v`", .lock.display())]
    Busy {
        /// The locked file.
        lock: PathBuf,
    },

    /// A command ended, but not well.
    #[error("{command}: {status}\n{stdout}{stderr}")]
    Failed {
        /// The program and its arguments.
        command: String,
        /// How it ended.
        status: std::process::ExitStatus,
        /// Its standard output.
        stdout: String,
        /// Its standard error.
        stderr: String,
    },

    /// A server ended by itself.
    #[error("{name} ended by itself ({status}); the end of {}:\n{tail}", .log.display())]
    Ended {
        /// The server.
        name: String,
        /// How it ended.
        status: std::process::ExitStatus,
        /// Where it wrote what it did.
        log: PathBuf,
        /// The last lines of that.
        tail: String,
    },

    /// Something did not come about in time.
    #[error("not within {seconds} s: {what}; last seen: {seen}")]
    Deadline {
        /// What was waited for.
        what: String,
        /// For how long.
        seconds: u64,
        /// What the last look showed.
        seen: String,
    },

    /// The operating system refused.
    #[error("{}: {source}", .path.display())]
    Io {
        /// The file or program.
        path: PathBuf,
        /// Its words.
        source: std::io::Error,
    },
}

impl std::fmt::Debug for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

/// Names the file or program of an operating system's error.
pub(crate) trait At<T> {
    /// The same, with `path` in its message.
    fn at(self, path: impl AsRef<Path>) -> Result<T, Error>;
}

impl<T> At<T> for std::io::Result<T> {
    fn at(self, path: impl AsRef<Path>) -> Result<T, Error> {
        self.map_err(|source| Error::Io { path: path.as_ref().to_path_buf(), source })
    }
}

/// A command as a person would type it, for messages.
pub(crate) fn spoken(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|it| it.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

/// Runs a command to its end and gives its standard output.
///
/// # Errors
///
/// [`Error::Failed`] if it does not end with 0, [`Error::Io`] if it cannot be started.
pub(crate) fn run(command: &mut Command) -> Result<String, Error> {
    let output = command.output().at(command.get_program())?;
    done(command, output)
}

/// The standard output of a command that ended well.
pub(crate) fn done(command: &Command, output: Output) -> Result<String, Error> {
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() {
        return Ok(stdout);
    }
    Err(Error::Failed {
        command: spoken(command),
        status: output.status,
        stdout,
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    })
}

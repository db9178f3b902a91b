//! What can be wrong with data, split by what to do next.

use std::io;

use stoker_storage::StorageError;

/// Data that cannot be had or cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// The address is none that can be opened.
    #[error(
        "cannot open {address}: {reason}; give a path, or a URL with file, http, https, s3, gs or az"
    )]
    Address {
        /// What was given, without secrets.
        address: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A file of the machine cannot be read or written.
    #[error("cannot {verb} {file}: {source}; {remedy}")]
    File {
        /// What was tried: `read`, `write`.
        verb: &'static str,
        /// The file.
        file: String,
        /// What the system said.
        source: io::Error,
        /// What to do.
        remedy: &'static str,
    },
    /// A file holds something else than its format allows.
    #[error("{file}{place}: expected {expected}, found {found}; {remedy}")]
    Malformed {
        /// The file.
        file: String,
        /// Where in it, such as `, line 3, column "age"`; may be empty.
        place: String,
        /// What should be there.
        expected: String,
        /// What is there.
        found: String,
        /// What to do.
        remedy: &'static str,
    },
    /// Values in memory do not go together.
    #[error("{subject}: expected {expected}, found {found}")]
    Mismatch {
        /// What is checked.
        subject: String,
        /// What should be.
        expected: String,
        /// What is.
        found: String,
    },
    /// A server answered, and the answer was no.
    #[error("{url}: the server refused with status {status}; {remedy}")]
    Refused {
        /// The address, without secrets.
        url: String,
        /// The HTTP status.
        status: u16,
        /// What to do.
        remedy: &'static str,
    },
    /// A server cannot be reached, or the connection broke.
    #[error("{url}: {reason}; check the address and the network, and run again")]
    Download {
        /// The address, without secrets.
        url: String,
        /// What happened.
        reason: String,
    },
    /// The content is not the one that was asked for.
    #[error(
        "{address}: expected SHA-256 {expected}, found {found} ({bytes} bytes); the content is \
         another or broken: correct the sum or the address"
    )]
    Hash {
        /// Where the content came from, without secrets.
        address: String,
        /// The sum asked for.
        expected: String,
        /// The sum of what came.
        found: String,
        /// The size of what came.
        bytes: u64,
    },
    /// An object store failed.
    #[error("{url}: {source}")]
    Storage {
        /// The address, without secrets.
        url: String,
        /// What the store said.
        source: StorageError,
    },
}

impl DataError {
    pub(crate) fn read(file: impl Into<String>, source: io::Error) -> Self {
        let remedy = match source.kind() {
            io::ErrorKind::NotFound => "check the path, or fetch the data first",
            io::ErrorKind::PermissionDenied => "give this user the right to read it",
            io::ErrorKind::UnexpectedEof | io::ErrorKind::InvalidData => {
                "the file is broken or cut short: fetch it again"
            }
            _ => "check the path and the disk",
        };
        Self::File { verb: "read", file: file.into(), source, remedy }
    }

    pub(crate) fn write(file: impl Into<String>, source: io::Error) -> Self {
        let remedy = "check the disk's space and the folder's rights, or set STOKER_CACHE to \
                      another folder";
        Self::File { verb: "write", file: file.into(), source, remedy }
    }
}

impl DataError {
    /// Whether there is nothing at the address: another may have it.
    pub fn is_missing(&self) -> bool {
        match self {
            Self::File { source, .. } => source.kind() == io::ErrorKind::NotFound,
            Self::Refused { status, .. } => matches!(status, 404 | 410),
            Self::Storage { source, .. } => matches!(source, StorageError::NotFound { .. }),
            _ => false,
        }
    }
}

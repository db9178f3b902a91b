//! Data errors, by the action they require.

use std::io;

use stoker_storage::StorageError;

/// Error while downloading or reading data.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// The address cannot be interpreted.
    #[error(
        "cannot open {address}: {reason}; use a path or a URL with file, http, https, s3, gs or az"
    )]
    Address {
        /// Address, without secrets.
        address: String,
        /// Reason why it was refused.
        reason: String,
    },
    /// A local file cannot be read or written.
    #[error("cannot {verb} {file}: {source}; {remedy}")]
    File {
        /// Operation: `read` or `write`.
        verb: &'static str,
        /// Path of the file.
        file: String,
        /// Error of the operating system.
        source: io::Error,
        /// Remedy.
        remedy: &'static str,
    },
    /// The contents of a file do not match its format.
    #[error("{file}{position}: expected {expected}, found {found}; {remedy}")]
    Malformed {
        /// Path of the file.
        file: String,
        /// Position in the file, for example `, line 3, column "age"`; may be empty.
        position: String,
        /// Expected contents.
        expected: String,
        /// Actual contents.
        found: String,
        /// Remedy.
        remedy: &'static str,
    },
    /// Values in memory are inconsistent.
    #[error("{subject}: expected {expected}, found {found}")]
    Mismatch {
        /// Checked property.
        subject: String,
        /// Expected value.
        expected: String,
        /// Actual value.
        found: String,
    },
    /// A server refused the request.
    #[error("{url}: the server refused with status {status}; {remedy}")]
    Refused {
        /// URL, without secrets.
        url: String,
        /// HTTP status code.
        status: u16,
        /// Remedy.
        remedy: &'static str,
    },
    /// A server could not be reached, or the connection failed.
    #[error("{url}: {reason}; check the address and the network; run again to retry")]
    Download {
        /// URL, without secrets.
        url: String,
        /// Cause of the failure.
        reason: String,
    },
    /// The content does not have the expected hash.
    #[error(
        "{address}: expected SHA-256 {expected}, found {found} ({bytes} bytes); the content has \
         changed or is corrupt: correct the hash or the address"
    )]
    Hash {
        /// Source of the content, without secrets.
        address: String,
        /// Expected SHA-256.
        expected: String,
        /// Actual SHA-256.
        found: String,
        /// Size of the content, in bytes.
        bytes: u64,
    },
    /// An object store failed.
    #[error("{url}: {source}")]
    Storage {
        /// URL, without secrets.
        url: String,
        /// Error of the store.
        source: StorageError,
    },
}

impl DataError {
    pub(crate) fn read(file: impl Into<String>, source: io::Error) -> Self {
        let remedy = match source.kind() {
            io::ErrorKind::NotFound => "check the path, or fetch the data first",
            io::ErrorKind::PermissionDenied => "grant this user read permission",
            io::ErrorKind::UnexpectedEof | io::ErrorKind::InvalidData => {
                "the file is corrupt or truncated: fetch it again"
            }
            _ => "check the path and the disk",
        };
        Self::File { verb: "read", file: file.into(), source, remedy }
    }

    pub(crate) fn write(file: impl Into<String>, source: io::Error) -> Self {
        let remedy = "check free disk space and write permission, or set STOKER_CACHE to another \
                      directory";
        Self::File { verb: "write", file: file.into(), source, remedy }
    }
}

impl DataError {
    /// Returns `true` if nothing exists at the address, so that another address may be tried.
    pub fn is_missing(&self) -> bool {
        match self {
            Self::File { source, .. } => source.kind() == io::ErrorKind::NotFound,
            Self::Refused { status, .. } => matches!(status, 404 | 410),
            Self::Storage { source, .. } => matches!(source, StorageError::NotFound { .. }),
            _ => false,
        }
    }
}

//! Why storage failed, split by what to do next.

use std::error::Error;
use std::io::ErrorKind;

/// Why an operation on a [`Storage`](crate::Storage) failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StorageError {
    /// There is nothing at the path: look elsewhere.
    #[error("storage {url} has no object {path:?} (or no such bucket): {reason}")]
    NotFound {
        /// The root.
        url: String,
        /// The path below it.
        path: String,
        /// What the store said.
        reason: String,
    },
    /// The store knows no such caller, or does not let it: give other credentials or rights.
    #[error("storage {url} refused access to {path:?}: {reason}; {remedy}")]
    Refused {
        /// The root.
        url: String,
        /// The path below it.
        path: String,
        /// What the store said.
        reason: String,
        /// What to do.
        remedy: &'static str,
    },
    /// No credentials could be made of what the environment holds: correct it.
    #[error("storage {url}: {reason}")]
    Credentials {
        /// The root.
        url: String,
        /// What is wrong, and what to do.
        reason: String,
    },
    /// No space is left: free some, or choose another root.
    #[error(
        "storage {url} is full, {path:?} was not written: {reason}; free some space or choose \
         another root"
    )]
    Full {
        /// The root.
        url: String,
        /// The path below it.
        path: String,
        /// What the store said.
        reason: String,
    },
    /// It failed each time within the patience for it: try later.
    #[error(
        "storage {url} failed on {path:?} {attempts} times, the last time with: {reason}; check \
         that its address is right and that it can be reached"
    )]
    Unavailable {
        /// The root.
        url: String,
        /// The path below it.
        path: String,
        /// How often it was tried.
        attempts: u32,
        /// What the store said last.
        reason: String,
    },
    /// It takes less than is written, or has been away for long: look after it.
    #[error(
        "storage {url} has been away or too slow for so long that {} MiB wait for it; check that \
         it can be reached",
        bytes >> 20
    )]
    Behind {
        /// The root.
        url: String,
        /// What waits, at most.
        bytes: usize,
    },
    /// The address or a path is none: correct it.
    #[error("storage {url:?}: {reason}")]
    BadUrl {
        /// The address.
        url: String,
        /// What is wrong with it, and what to write.
        reason: String,
    },
}

/// What an operation was about, to name it in an error.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Subject<'a> {
    pub(crate) url: &'a str,
    pub(crate) path: &'a str,
}

/// Says what `source` means, and whether it may pass.
pub(crate) fn classify(
    subject: Subject<'_>,
    attempts: u32,
    source: &object_store::Error,
) -> (StorageError, bool) {
    use object_store::Error as Source;
    let (url, path) = (subject.url.to_owned(), subject.path.to_owned());
    let reason = reason(source);
    match (source, io_kind(source)) {
        (_, Some(ErrorKind::StorageFull | ErrorKind::QuotaExceeded)) => {
            (StorageError::Full { url, path, reason }, false)
        }
        (_, Some(ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem)) => {
            let remedy = "give this user the right to write there, or choose another root";
            (StorageError::Refused { url, path, reason, remedy }, false)
        }
        (Source::NotFound { .. }, _) => (StorageError::NotFound { url, path, reason }, false),
        (Source::PermissionDenied { .. } | Source::Unauthenticated { .. }, _) => {
            let remedy = "check the credentials in the environment and the rights they have";
            (StorageError::Refused { url, path, reason, remedy }, false)
        }
        (
            Source::InvalidPath { .. }
            | Source::NotSupported { .. }
            | Source::NotImplemented { .. }
            | Source::UnknownConfigurationKey { .. },
            _,
        ) => (StorageError::BadUrl { url, reason: format!("path {path:?}: {reason}") }, false),
        _ if reason.contains("169.254.169.254") => {
            (StorageError::Credentials { url, reason: no_credentials(&reason) }, true)
        }
        _ if reason.contains("status code: 507") => {
            (StorageError::Full { url, path, reason }, false)
        }
        _ => {
            let passes = !is_wrong_request(&reason);
            (StorageError::Unavailable { url, path, attempts, reason }, passes)
        }
    }
}

fn no_credentials(reason: &str) -> String {
    format!(
        "no credentials: none are in the environment (AWS_ACCESS_KEY_ID and \
         AWS_SECRET_ACCESS_KEY, AWS_WEB_IDENTITY_TOKEN_FILE, or a profile in ~/.aws/credentials \
         chosen by AWS_PROFILE), and this machine has no metadata service to ask: {reason}"
    )
}

/// Whether the server said that the request is wrong, which it will say again.
fn is_wrong_request(reason: &str) -> bool {
    let Some((_, status)) = reason.split_once("status code: ") else { return false };
    let passing = ["408", "409", "425", "429"];
    let status: String = status.chars().take(3).collect();
    (status.starts_with('4') || status.starts_with('3')) && !passing.contains(&status.as_str())
}

/// The kind of the first I/O error below `source`.
fn io_kind(source: &object_store::Error) -> Option<ErrorKind> {
    let mut next: Option<&(dyn Error + 'static)> = Some(source);
    while let Some(error) = next {
        if let Some(io) = error.downcast_ref::<std::io::Error>() {
            return Some(io.kind());
        }
        next = error.source();
    }
    None
}

/// The error and what is below it, each said once.
fn reason(source: &object_store::Error) -> String {
    let mut text = source.to_string();
    let mut next = source.source();
    while let Some(error) = next {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        next = error.source();
    }
    text.trim_end().trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn io(kind: ErrorKind) -> object_store::Error {
        generic(Box::new(std::io::Error::from(kind)))
    }

    fn generic(source: Box<dyn Error + Send + Sync>) -> object_store::Error {
        object_store::Error::Generic { store: "S3", source }
    }

    fn check(source: object_store::Error, text: &str, passes: bool) {
        let subject = Subject { url: "s3://bucket/root", path: "a/b" };
        let (error, actual) = classify(subject, 3, &source);
        assert!(error.to_string().contains(text), "{error}");
        assert!(error.to_string().contains("s3://bucket/root"), "{error}");
        assert_eq!(actual, passes, "{error}");
    }

    #[test]
    fn a_failure_is_named_by_what_to_do_and_tried_again_only_if_it_may_pass() {
        check(io(ErrorKind::StorageFull), "is full, \"a/b\" was not written", false);
        check(io(ErrorKind::PermissionDenied), "refused access to \"a/b\"", false);
        check(io(ErrorKind::ConnectionReset), "failed on \"a/b\" 3 times", true);
        check(generic("status code: 503 Slow Down".into()), "3 times", true);
        check(generic("status code: 429 Slow Down".into()), "3 times", true);
        check(generic("status code: 400 Bad Request".into()), "400 Bad Request", false);
        check(generic("status code: 301 Moved".into()), "301 Moved", false);
        check(generic("PUT http://169.254.169.254/latest".into()), "no credentials", true);
        let path = "a/b".to_owned();
        let gone = object_store::Error::NotFound { path: path.clone(), source: "x".into() };
        check(gone, "has no object \"a/b\"", false);
        let denied = object_store::Error::PermissionDenied { path, source: "x".into() };
        check(denied, "check the credentials", false);
    }
}

//! Storage failures, classified by remedy.

use std::error::Error;
use std::io::ErrorKind;

use object_store::path::Error as PathError;

/// Why an operation on a [`Storage`](crate::Storage) failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StorageError {
    /// The object, or its bucket, does not exist.
    #[error("storage {url}: object {path:?} not found (or no such bucket): {reason}")]
    NotFound {
        /// URL of the root.
        url: String,
        /// Path below the root.
        path: String,
        /// Error of the store.
        reason: String,
    },
    /// The store denied access. Provide other credentials or permissions.
    #[error("storage {url} refused access to {path:?}: {reason}; {remedy}")]
    Refused {
        /// URL of the root.
        url: String,
        /// Path below the root.
        path: String,
        /// Error of the store.
        reason: String,
        /// Action for the user.
        remedy: &'static str,
    },
    /// The environment contains no usable credentials.
    #[error("storage {url}: {reason}")]
    Credentials {
        /// URL of the root.
        url: String,
        /// Cause and remedy.
        reason: String,
    },
    /// No space is left. Free some, or choose another root.
    #[error(
        "storage {url} is full, {path:?} was not written: {reason}; free some space or choose \
         another root"
    )]
    Full {
        /// URL of the root.
        url: String,
        /// Path below the root.
        path: String,
        /// Error of the store.
        reason: String,
    },
    /// All retries failed. The operation may succeed later.
    #[error(
        "storage {url} failed on {path:?} {attempts} times, last with: {reason}; check its URL \
         and whether it is reachable"
    )]
    Unavailable {
        /// URL of the root.
        url: String,
        /// Path below the root.
        path: String,
        /// Number of attempts.
        attempts: u32,
        /// Last error of the store.
        reason: String,
    },
    /// The storage is slower than the writers, or has been unavailable for long.
    #[error(
        "storage {url} is unavailable or too slow: {} MiB wait to be written; check whether it is \
         reachable",
        bytes >> 20
    )]
    BufferFull {
        /// URL of the root.
        url: String,
        /// Limit of the bytes that wait.
        bytes: usize,
    },
    /// The URL or a path is invalid.
    #[error("storage {url:?}: {reason}")]
    BadUrl {
        /// The invalid URL, or that of the root.
        url: String,
        /// Cause and remedy.
        reason: String,
    },
}

impl StorageError {
    /// Returns the environment variables with the keys of this storage, by the scheme of its URL.
    pub fn key_variables(&self) -> &'static str {
        match self {
            Self::NotFound { url, .. }
            | Self::Refused { url, .. }
            | Self::Credentials { url, .. }
            | Self::Full { url, .. }
            | Self::Unavailable { url, .. }
            | Self::BufferFull { url, .. }
            | Self::BadUrl { url, .. } => key_variables(url),
        }
    }
}

/// Error codes of responses with status 400 that a retry may fix.
const TRANSIENT_CODES: [&str; 7] = [
    // The client sent too slowly.
    "RequestTimeout",
    // AWS STS, which returns the credentials of a service account, is busy, or cannot reach the
    // issuer of its token. The kubelet renews an expired token.
    "Throttling",
    "ThrottlingException",
    "RequestThrottled",
    "IDPCommunicationError",
    "InvalidIdentityToken",
    "ExpiredTokenException",
];

/// Codes of S3 for temporary keys that are no longer valid.
const EXPIRED_CODES: [&str; 3] = ["ExpiredToken", "InvalidToken", "TokenRefreshRequired"];

/// Root and path of an operation, for its error.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Subject<'a> {
    pub(crate) url: &'a str,
    pub(crate) path: &'a str,
}

/// Classifies `source`. The second value is `true` if the failure may be transient.
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
            let remedy = "grant this user write permission, or choose another root";
            (StorageError::Refused { url, path, reason, remedy }, false)
        }
        (Source::NotFound { .. }, _) => (StorageError::NotFound { url, path, reason }, false),
        // The clock may be corrected while the request is retried.
        (Source::PermissionDenied { .. }, _) if has_code(&reason, "RequestTimeTooSkewed") => {
            let remedy = "correct the clock of this machine";
            (StorageError::Refused { url, path, reason, remedy }, true)
        }
        (Source::PermissionDenied { .. } | Source::Unauthenticated { .. }, _) => {
            let remedy = "check the credentials in the environment and their permissions";
            (StorageError::Refused { url, path, reason, remedy }, false)
        }
        // S3 answers expired temporary keys with the status 400.
        _ if EXPIRED_CODES.iter().any(|code| has_code(&reason, code)) => {
            let remedy = "the keys in the environment have expired; replace them";
            (StorageError::Refused { url, path, reason, remedy }, false)
        }
        // Paths of callers were parsed before, so the store returned this one in a list.
        (
            Source::InvalidPath {
                source:
                    PathError::EmptySegment { path: key }
                    | PathError::BadSegment { path: key, .. }
                    | PathError::NonUnicode { path: key, .. },
            },
            _,
        ) => {
            let reason = bad_key(&url, &path, key);
            (StorageError::BadUrl { url, reason }, false)
        }
        (
            Source::InvalidPath { .. }
            | Source::NotSupported { .. }
            | Source::NotImplemented { .. }
            | Source::UnknownConfigurationKey { .. },
            _,
        ) => (StorageError::BadUrl { url, reason: format!("path {path:?}: {reason}") }, false),
        _ if reason.contains("169.254.169.254") => {
            (StorageError::Credentials { url, reason: no_credentials(subject.url, &reason) }, true)
        }
        _ if reason.contains("status code: 507") => {
            (StorageError::Full { url, path, reason }, false)
        }
        _ => {
            let is_transient = !is_wrong_request(&reason);
            (StorageError::Unavailable { url, path, attempts, reason }, is_transient)
        }
    }
}

fn key_variables(url: &str) -> &'static str {
    match url.split_once("://") {
        Some(("az", _)) => "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
        Some(("gs", _)) => "GOOGLE_SERVICE_ACCOUNT_KEY",
        _ => "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    }
}

/// The metadata services of AWS, Azure and Google Cloud have the same address.
fn no_credentials(url: &str, reason: &str) -> String {
    let others = match url.split_once("://") {
        Some(("az", _)) => {
            "or bind the pod's service account to an Azure identity (workload identity)"
        }
        Some(("gs", _)) => {
            "or bind the pod's service account to a Google service account (workload identity), or \
             run `gcloud auth application-default login`"
        }
        _ => {
            "or AWS_PROFILE with a profile in ~/.aws/credentials, or bind the pod's service \
             account to an AWS role"
        }
    };
    let names = key_variables(url);
    format!(
        "no credentials found: set {names}, {others}; the metadata service of this machine \
         failed: {reason}"
    )
}

fn bad_key(url: &str, path: &str, key: &str) -> String {
    // Local roots add a slash to the path below the root.
    let is_local = url.starts_with('/') || url.starts_with("file:");
    let key = if is_local { key.trim_start_matches('/') } else { key };
    let (keys, objects) = match key.ends_with('/') {
        true => (format!("keys that begin with {key:?} have"), "these objects"),
        false => (format!("the key {key:?} has"), "the object"),
    };
    format!(
        "cannot list {path:?}: {keys} a name that is empty, `.`, `..` or not plain text, so Stoker \
         did not write it; delete or rename {objects}"
    )
}

/// Returns `true` if the server rejected the request itself, so that a retry is useless.
fn is_wrong_request(reason: &str) -> bool {
    if TRANSIENT_CODES.iter().any(|code| has_code(reason, code)) {
        return false;
    }
    let Some((_, status)) = reason.split_once("status code: ") else { return false };
    let passing = ["408", "409", "425", "429"];
    let status: String = status.chars().take(3).collect();
    (status.starts_with('4') || status.starts_with('3')) && !passing.contains(&status.as_str())
}

/// Returns `true` if the body of the response has this error code of AWS or Azure.
pub(crate) fn has_code(reason: &str, code: &str) -> bool {
    reason.contains(&format!("<Code>{code}</Code>"))
}

/// Returns the kind of the first I/O error in the chain of `source`.
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

/// Returns the error and its chain of causes, each text once.
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

    fn check(source: object_store::Error, text: &str, is_transient: bool) {
        let subject = Subject { url: "s3://bucket/root", path: "a/b" };
        let (error, actual) = classify(subject, 3, &source);
        assert!(error.to_string().contains(text), "{error}");
        assert!(error.to_string().contains("s3://bucket/root"), "{error}");
        assert_eq!(actual, is_transient, "{error}");
    }

    #[test]
    fn errors_are_classified_by_remedy_and_transience() {
        check(io(ErrorKind::StorageFull), "is full, \"a/b\" was not written", false);
        check(io(ErrorKind::PermissionDenied), "refused access to \"a/b\"", false);
        check(io(ErrorKind::ConnectionReset), "failed on \"a/b\" 3 times", true);
        check(generic("status code: 503 Slow Down".into()), "3 times", true);
        check(generic("status code: 429 Slow Down".into()), "3 times", true);
        check(generic("status code: 400 Bad Request".into()), "400 Bad Request", false);
        let code = |status, code| format!("status code: {status}: <Error><Code>{code}</Code>");
        for transient in TRANSIENT_CODES {
            check(generic(code("400 Bad Request", transient).into()), "3 times", true);
        }
        check(generic(code("400 Bad Request", "InvalidPart").into()), "3 times", false);
        for expired in EXPIRED_CODES {
            check(generic(code("400 Bad Request", expired).into()), "have expired", false);
        }
        check(generic("status code: 301 Moved".into()), "301 Moved", false);
        let path = "a/b".to_owned();
        let missing = object_store::Error::NotFound { path: path.clone(), source: "x".into() };
        check(missing, "object \"a/b\" not found", false);
        let denied = object_store::Error::PermissionDenied { path, source: "x".into() };
        check(denied, "check the credentials", false);
        let source = code("403 Forbidden", "RequestTimeTooSkewed").into();
        let skewed = object_store::Error::PermissionDenied { path: "a/b".into(), source };
        check(skewed, "correct the clock", true);
    }

    /// The names are those of the table in docs/install.md.
    #[test]
    fn missing_credentials_are_named_by_scheme() {
        let check = |url: &str, texts: &[&str]| {
            let source = generic("PUT http://169.254.169.254/latest".into());
            let (error, is_transient) = classify(Subject { url, path: "a/b" }, 3, &source);
            let error = error.to_string();
            assert!(is_transient && error.contains("no credentials found: set "), "{error}");
            for text in texts {
                assert!(error.contains(text), "{text}: {error}");
            }
            let others = ["AWS_", "AZURE_", "GOOGLE_"].map(|name| error.contains(name));
            assert_eq!(others.iter().filter(|is_named| **is_named).count(), 1, "{error}");
        };
        check("s3://b/p", &["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS role"]);
        check(
            "az://c/p",
            &["AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY", "Azure identity"],
        );
        check("gs://b/p", &["GOOGLE_SERVICE_ACCOUNT_KEY", "Google service account"]);
        let error = StorageError::BadUrl { url: "az://c".to_owned(), reason: String::new() };
        assert!(error.key_variables().contains("AZURE_STORAGE_ACCOUNT_KEY"));
    }
}

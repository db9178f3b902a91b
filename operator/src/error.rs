//! Errors of requests to the API server, classified by what to do next.

use std::future::Future;
use std::time::Duration;

use kube::core::Status;
use stoker_api::trial::AttemptEnd;
use stoker_engine::experiment::{ADMISSION_REFUSED, POD_INVALID, TrialRecord, malformed_pod};

/// Request timeout: a leader whose lease (15 s by default) ends must not still be waiting.
const REQUEST_MAX: Duration = Duration::from_secs(8);

/// Why a reconcile stopped early. Completed writes stay, and the next plan contains the rest.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Another client changed the object since it was read. Read it again and retry.
    #[error("cannot {operation}: the object was modified since it was read")]
    Conflict {
        /// Operation that failed, as the rest of "cannot ...".
        operation: String,
    },
    /// The object was deleted.
    #[error("cannot {operation}: the object no longer exists")]
    Gone {
        /// Operation that failed.
        operation: String,
    },
    /// The API server rejects the object in its current form.
    #[error("cannot {operation}: {message}")]
    Refused {
        /// Operation that failed.
        operation: String,
        /// HTTP status code: 403 from a quota or a policy, 422 for an invalid object.
        code: u16,
        /// Message of the API server.
        message: String,
    },
    /// An object with this name already exists.
    #[error("cannot {operation}: an object with this name already exists")]
    Exists {
        /// Operation that failed.
        operation: String,
    },
    /// The API server is unavailable. Usually transient.
    #[error("cannot {operation}: {reason}")]
    Unavailable {
        /// Operation that failed.
        operation: String,
        /// Error message of the client or the API server.
        reason: String,
    },
}

impl Error {
    fn new(operation: String, error: kube::Error) -> Self {
        let kube::Error::Api(status) = error else {
            return Self::Unavailable { operation, reason: error.to_string() };
        };
        let Status { code, message, reason, .. } = *status;
        match code {
            409 if reason == "AlreadyExists" => Self::Exists { operation },
            409 => Self::Conflict { operation },
            404 | 410 => Self::Gone { operation },
            // An API server that has just started denies everything until it has loaded RBAC rules.
            403 if message.contains(" is forbidden: User \"") => {
                Self::Unavailable { operation, reason: format!("{code}: {message}") }
            }
            400 | 403 | 413 | 422 => Self::Refused { operation, code, message },
            _ if is_too_large(&message) => Self::Refused { operation, code, message },
            _ => Self::Unavailable { operation, reason: format!("{code}: {message}") },
        }
    }
}

/// Returns whether etcd, or the API server's client of it, rejects the size of an object. The API
/// server reports this with code 500, but a retry would be rejected too.
fn is_too_large(message: &str) -> bool {
    message.contains("etcdserver: request is too large")
        || message.contains("trying to send message larger than max")
}

/// Classifies a rejected pod, Service or trial: the attempt's end, a reason in one word, and a
/// human-readable message.
///
/// # Errors
///
/// Returns `error` itself if it is not a rejection and may pass.
pub fn refusal(error: Error) -> Result<(AttemptEnd, &'static str, String), Error> {
    Ok(match error {
        Error::Exists { operation } => {
            let text = format!(
                "cannot {operation}: an object with this name has another owner; delete it"
            );
            (AttemptEnd::NotStarted, "NameTaken", text)
        }
        Error::Refused { operation, code: 403, message } => {
            let is_quota = message.contains("exceeded quota");
            let reason = if is_quota { "QuotaExceeded" } else { ADMISSION_REFUSED };
            (AttemptEnd::NotStarted, reason, format!("cannot {operation}: {message}"))
        }
        // Webhooks and policies reject with any code, but their messages contain these words.
        Error::Refused { operation, message, .. }
            if message.contains("denied the request") || message.contains("denied request") =>
        {
            (AttemptEnd::NotStarted, ADMISSION_REFUSED, format!("cannot {operation}: {message}"))
        }
        Error::Refused { operation, message, .. } => {
            (AttemptEnd::UserError, POD_INVALID, format!("cannot {operation}: {message}"))
        }
        other => return Err(other),
    })
}

/// Same as [`refusal`], for a pod or Service of an experiment with these trials.
///
/// # Errors
///
/// Returns `error` itself if it is not a rejection and may pass.
pub fn pod_refusal<'a>(
    error: Error,
    trials: impl Iterator<Item = &'a TrialRecord>,
) -> Result<(AttemptEnd, &'static str, String), Error> {
    let (end, reason, message) = refusal(error)?;
    let (end, reason) = match reason {
        POD_INVALID => malformed_pod(trials),
        _ => (end, reason),
    };
    Ok((end, reason, message))
}

/// Awaits a request to the API server, with a timeout of 8 s.
///
/// # Errors
///
/// See [`Error`].
pub async fn request<T>(
    operation: impl Into<String>,
    request: impl Future<Output = kube::Result<T>>,
) -> Result<T, Error> {
    match tokio::time::timeout(REQUEST_MAX, request).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error)) => Err(Error::new(operation.into(), error)),
        Err(_) => {
            let reason = format!("no response within {} s", REQUEST_MAX.as_secs());
            Err(Error::Unavailable { operation: operation.into(), reason })
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn api_errors_are_classified_by_next_step() {
        let error = |code: u16, reason: &str, message: &str| {
            let status = Status::failure(message, reason).with_code(code);
            Error::new("do it".to_owned(), kube::Error::Api(Box::new(status)))
        };
        let check = |code: u16, reason: &str, expected: &str| {
            assert_eq!(error(code, reason, "why").to_string(), expected);
        };
        let rights =
            error(403, "Forbidden", "pods is forbidden: User \"x\" cannot create resource");
        assert!(matches!(rights, Error::Unavailable { .. }), "{rights:?}");
        let quota = error(403, "Forbidden", "pods \"p\" is forbidden: exceeded quota: q");
        assert!(matches!(quota, Error::Refused { .. }), "{quota:?}");
        check(409, "AlreadyExists", "cannot do it: an object with this name already exists");
        check(409, "Conflict", "cannot do it: the object was modified since it was read");
        check(404, "NotFound", "cannot do it: the object no longer exists");
        check(403, "Forbidden", "cannot do it: why");
        check(422, "Invalid", "cannot do it: why");
        check(500, "InternalError", "cannot do it: 500: why");
        check(429, "TooManyRequests", "cannot do it: 429: why");
        check(413, "RequestEntityTooLarge", "cannot do it: why");
        let large = error(500, "InternalError", "etcdserver: request is too large");
        assert!(matches!(large, Error::Refused { .. }), "{large:?}");
    }

    #[test]
    fn malformed_pod_waits_once_a_pod_was_accepted() {
        let spec = json!({
            "experiment": "mnist", "index": 0, "requestId": "r", "seed": 0, "hyperparameters": {},
            "unit": "batches", "units": 100,
        });
        let check = |code: u16, attempts: Value, expected: (AttemptEnd, &str)| {
            let trial = json!({ "spec": spec, "status": { "attempts": attempts } });
            let record: TrialRecord = serde_json::from_value(trial).unwrap();
            let (operation, message) = ("create pod p".to_owned(), "why".to_owned());
            let error = Error::Refused { operation, code, message };
            let (end, reason, text) = pod_refusal(error, [&record].into_iter()).unwrap();
            assert_eq!((end, reason), expected, "{code} {attempts}");
            assert_eq!(text, "cannot create pod p: why");
        };
        let refused = (AttemptEnd::NotStarted, "AdmissionRefused");
        let first = || json!([{ "number": 0 }]);
        let accepted = json!({ "number": 0, "end": "Infrastructure", "hasPods": true });
        let second = || json!([accepted, { "number": 1 }]);
        check(422, first(), (AttemptEnd::UserError, "PodInvalid"));
        check(422, second(), refused);
        check(400, second(), refused);
        check(403, first(), refused);
    }
}

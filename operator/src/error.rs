//! Why something could not be carried out, by what to do next.

use std::future::Future;
use std::time::Duration;

use kube::core::Status;
use stoker_api::trial::AttemptEnd;
use stoker_engine::experiment::POD_INVALID;

/// Requests take no longer: a leader whose lease ended must not be waiting for one.
const REQUEST_MAX: Duration = Duration::from_secs(8);

/// Why a reconcile was cut short. What it did so far stands, and planning again gives the rest.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Somebody wrote the object since it was read: look again.
    #[error("cannot {doing}: it was changed meanwhile")]
    Conflict {
        /// What was attempted, as the rest of "cannot ...".
        doing: String,
    },
    /// The object is gone.
    #[error("cannot {doing}: it is gone")]
    Gone {
        /// What was attempted.
        doing: String,
    },
    /// The API server will not take it as it is.
    #[error("cannot {doing}: {message}")]
    Refused {
        /// What was attempted.
        doing: String,
        /// The status code: 403 by a quota or a policy, 422 for what is no such object.
        code: u16,
        /// What it said.
        message: String,
    },
    /// An object of this name is there.
    #[error("cannot {doing}: an object of this name exists")]
    Exists {
        /// What was attempted.
        doing: String,
    },
    /// The API server could not be asked. Usually passes.
    #[error("cannot {doing}: {reason}")]
    Away {
        /// What was attempted.
        doing: String,
        /// What the client reported.
        reason: String,
    },
}

impl Error {
    fn new(doing: String, error: kube::Error) -> Self {
        let kube::Error::Api(status) = error else {
            return Self::Away { doing, reason: error.to_string() };
        };
        let Status { code, message, reason, .. } = *status;
        match code {
            409 if reason == "AlreadyExists" => Self::Exists { doing },
            409 => Self::Conflict { doing },
            404 | 410 => Self::Gone { doing },
            // An API server that has just begun knows no rules yet, and forbids everything.
            403 if message.contains(" is forbidden: User \"") => {
                Self::Away { doing, reason: format!("{code}: {message}") }
            }
            400 | 403 | 422 => Self::Refused { doing, code, message },
            _ => Self::Away { doing, reason: format!("{code}: {message}") },
        }
    }
}

/// The end of an attempt whose pod, or what it needs, was refused: with why in one word and for people.
///
/// # Errors
///
/// The error again, if it refuses nothing: it may work later.
pub fn refusal(error: Error) -> Result<(AttemptEnd, &'static str, String), Error> {
    Ok(match error {
        Error::Exists { doing } => {
            let text =
                format!("cannot {doing}: an object of this name has another owner; delete it");
            (AttemptEnd::NotStarted, "NameTaken", text)
        }
        Error::Refused { doing, code: 403, message } => {
            let is_quota = message.contains("exceeded quota");
            let reason = if is_quota { "QuotaExceeded" } else { "AdmissionRefused" };
            (AttemptEnd::NotStarted, reason, format!("cannot {doing}: {message}"))
        }
        // Webhooks and policies refuse with any code, but always say so.
        Error::Refused { doing, message, .. }
            if message.contains("denied the request") || message.contains("denied request") =>
        {
            (AttemptEnd::NotStarted, "AdmissionRefused", format!("cannot {doing}: {message}"))
        }
        Error::Refused { doing, message, .. } => {
            (AttemptEnd::UserError, POD_INVALID, format!("cannot {doing}: {message}"))
        }
        other => return Err(other),
    })
}

/// Awaits a request of the API server's, with a deadline.
///
/// # Errors
///
/// See [`Error`].
pub async fn request<T>(
    doing: impl Into<String>,
    request: impl Future<Output = kube::Result<T>>,
) -> Result<T, Error> {
    match tokio::time::timeout(REQUEST_MAX, request).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error)) => Err(Error::new(doing.into(), error)),
        Err(_) => {
            let reason = format!("no answer within {} s", REQUEST_MAX.as_secs());
            Err(Error::Away { doing: doing.into(), reason })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_told_apart_by_what_to_do_next() {
        let said = |code: u16, reason: &str, message: &str| {
            let status = Status::failure(message, reason).with_code(code);
            Error::new("do it".to_owned(), kube::Error::Api(Box::new(status)))
        };
        let check = |code: u16, reason: &str, expected: &str| {
            assert_eq!(said(code, reason, "why").to_string(), expected);
        };
        let rights = said(403, "Forbidden", "pods is forbidden: User \"x\" cannot create resource");
        assert!(matches!(rights, Error::Away { .. }), "{rights:?}");
        let quota = said(403, "Forbidden", "pods \"p\" is forbidden: exceeded quota: q");
        assert!(matches!(quota, Error::Refused { .. }), "{quota:?}");
        check(409, "AlreadyExists", "cannot do it: an object of this name exists");
        check(409, "Conflict", "cannot do it: it was changed meanwhile");
        check(404, "NotFound", "cannot do it: it is gone");
        check(403, "Forbidden", "cannot do it: why");
        check(422, "Invalid", "cannot do it: why");
        check(500, "InternalError", "cannot do it: 500: why");
        check(429, "TooManyRequests", "cannot do it: 429: why");
    }
}

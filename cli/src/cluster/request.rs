//! Requests with a timeout, and their errors.

use std::future::Future;
use std::time::Duration;

use super::connect::Cluster;
use crate::failure::Failure;

/// Timeout for a response of the API server.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(60);

/// Failed request.
#[derive(Debug)]
pub(crate) struct RequestError {
    pub(crate) failure: Failure,
    /// Status code of the response; `None` if the API server did not respond.
    pub(crate) code: Option<u16>,
}

/// Class of failed requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FailureClass {
    /// The API server denied the user access.
    Denied,
    /// The API server responded with another error.
    Refused,
    /// The API server did not respond.
    NoResponse,
}

impl RequestError {
    /// Returns the class of the error.
    pub(crate) fn class(&self) -> FailureClass {
        match self.code {
            Some(_) if self.is_denied() => FailureClass::Denied,
            Some(_) => FailureClass::Refused,
            None => FailureClass::NoResponse,
        }
    }

    /// Returns `true` if the API server denied the user access.
    pub(crate) fn is_denied(&self) -> bool {
        matches!(self.code, Some(401 | 403))
    }
}

impl Cluster {
    /// Runs a request with a timeout. Errors name the requested object by `target`, such as
    /// "experiment `mnist`".
    pub(crate) async fn request<T>(
        &self,
        target: &str,
        call: impl Future<Output = kube::Result<T>>,
    ) -> Result<T, Failure> {
        self.try_request(target, call).await.map_err(|error| error.failure)
    }

    /// Same as [`request`](Self::request), for callers that decide whether to repeat the request.
    pub(crate) async fn try_request<T>(
        &self,
        target: &str,
        call: impl Future<Output = kube::Result<T>>,
    ) -> Result<T, RequestError> {
        match tokio::time::timeout(RESPONSE_TIMEOUT, call).await {
            Ok(response) => response.map_err(|error| {
                let code = match &error {
                    kube::Error::Api(status) => Some(status.code),
                    _ => None,
                };
                RequestError { failure: self.failure(target, error), code }
            }),
            Err(_) => {
                let failure = Failure::System(format!(
                    "request for {target} timed out: no response from the cluster at {} within \
                     {} s",
                    self.server,
                    RESPONSE_TIMEOUT.as_secs()
                ));
                Err(RequestError { failure, code: None })
            }
        }
    }
}

//! Sends one report over HTTP and interprets the response.

use std::time::Duration;

use reqwest::header::{HeaderMap, RETRY_AFTER};
use reqwest::{Certificate, Client, StatusCode, redirect};
use serde_json::Value;
use stoker_api::contract::{Directive, Report, ReportEndpoint, ReportResponse};
use stoker_api::names::{HEADER_PRUNABLE, HEADER_RECORD, parse_checkpoint_name};

use super::{BACKOFF_FIRST, BACKOFF_MAX};
use crate::Result;
use crate::error::{Infrastructure, with_sources};

/// Timeout for connecting.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout of a request; longer than the server delays a response.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum wait that is accepted from a `Retry-After` header.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(30);
/// Maximum number of characters of a response that are logged.
const RESPONSE_CHARS_MAX: usize = 1_000;

/// Result of a request.
#[derive(Debug)]
pub(super) enum PostOutcome {
    /// Directive, with the names of superfluous checkpoints, and the trial's record.
    Response(Directive, Vec<String>, Option<Value>),
    /// The server will never accept this report.
    Rejected(String),
    /// Transient failure; retry later.
    Unavailable(PostFailure),
}

/// A failed attempt to send.
#[derive(Debug, Default)]
pub(super) struct PostFailure {
    /// HTTP status; `None` without a response.
    pub(super) status: Option<StatusCode>,
    pub(super) reason: String,
    /// Wait requested by the server.
    pub(super) retry_after: Option<Duration>,
}

impl PostFailure {
    pub(super) fn without_response(reason: String) -> Self {
        Self { reason, ..Self::default() }
    }
}

/// Failures since the last successful request.
#[derive(Debug, Default)]
pub(super) struct Outage {
    pub(super) num_failed: u32,
    pub(super) logged_status: Option<StatusCode>,
}

impl Outage {
    /// Counts a failure and logs it once for each new status; returns the wait before the next
    /// attempt.
    pub(super) fn record_failure(&mut self, failure: &PostFailure) -> Duration {
        if self.num_failed == 0 || failure.status != self.logged_status {
            let reason = &failure.reason;
            eprintln!("stoker: {reason}; training continues, and reports will be retried");
            self.logged_status = failure.status;
        }
        let wait = BACKOFF_FIRST.saturating_mul(1 << self.num_failed.min(10)).min(BACKOFF_MAX);
        self.num_failed = self.num_failed.saturating_add(1);
        wait.max(failure.retry_after.unwrap_or_default().min(RETRY_AFTER_MAX))
    }
}

/// Creates the HTTP client. It ignores proxies of the environment and does not follow redirects, so
/// that the token is sent to the report server only. If the server has a custom CA, no other CA is
/// trusted.
pub(super) fn client(endpoint: &ReportEndpoint) -> Result<Client> {
    let failed = |what: &str, error: reqwest::Error| {
        Infrastructure(format!(
            "cannot create the client of the report server: {what}{}",
            with_sources(&error)
        ))
    };
    let mut client = Client::builder()
        .no_proxy()
        .redirect(redirect::Policy::none())
        .connect_timeout(CONNECT_TIMEOUT)
        .timeout(REQUEST_TIMEOUT);
    if let Some(ca) = &endpoint.ca {
        let trusted = Certificate::from_pem_bundle(ca.as_bytes());
        let trusted = trusted.map_err(|error| failed("invalid CA: ", error))?;
        if trusted.is_empty() {
            let text = "cannot create the client of the report server: the CA contains no PEM \
                        certificate";
            return Err(Infrastructure(text.into()).into());
        }
        client = client.tls_certs_only(trusted);
    }
    Ok(client.build().map_err(|error| failed("", error))?)
}

/// Returns the checkpoints listed in the response header. Other names are ignored, because a name
/// becomes part of a path.
pub(super) fn prunable(headers: &HeaderMap) -> Vec<String> {
    let list =
        headers.get(HEADER_PRUNABLE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let names = list.split(',').filter(|name| parse_checkpoint_name(name).is_some());
    names.map(str::to_owned).collect()
}

/// Posts one report. Reads the token for each attempt, because the kubelet renews the file.
pub(super) async fn send(
    client: &Client,
    endpoint: &ReportEndpoint,
    report: &Report,
) -> PostOutcome {
    let token = match std::fs::read_to_string(&endpoint.token_file) {
        Ok(token) => token,
        Err(error) => {
            let reason = format!("cannot read the token file {}: {error}", endpoint.token_file);
            return PostOutcome::Unavailable(PostFailure::without_response(reason));
        }
    };
    let request = client.post(&endpoint.url).bearer_auth(token.trim()).json(report);
    let request = request.header(HEADER_RECORD, "yes");
    let response = match request.send().await {
        Ok(response) => response,
        Err(error) => {
            return PostOutcome::Unavailable(PostFailure::without_response(with_sources(&error)));
        }
    };
    let status = response.status();
    if status == StatusCode::OK {
        let prunable = prunable(response.headers());
        return match response.json().await {
            Ok(ReportResponse::Plain(directive)) => {
                PostOutcome::Response(directive, prunable, None)
            }
            Ok(ReportResponse::Recorded { directive, record }) => {
                PostOutcome::Response(directive, prunable, Some(record))
            }
            Err(error) => {
                let reason = format!("{} returned an invalid directive: {error}", endpoint.url);
                PostOutcome::Unavailable(PostFailure {
                    status: Some(status),
                    reason,
                    retry_after: None,
                })
            }
        };
    }
    let retry_after = retry_after(response.headers());
    let text = response.text().await.unwrap_or_default();
    let text: String = text.trim().chars().take(RESPONSE_CHARS_MAX).collect();
    let colon = if text.is_empty() { "" } else { ": " };
    let reason = format!("{} returned {status}{colon}{text}", endpoint.url);
    match status {
        // The server would reject the report each time.
        StatusCode::PAYLOAD_TOO_LARGE => PostOutcome::Rejected(format!(
            "{reason}; use shorter names of metrics, or raise the limit of a proxy"
        )),
        StatusCode::UNPROCESSABLE_ENTITY => PostOutcome::Rejected(reason),
        _ => PostOutcome::Unavailable(PostFailure { status: Some(status), reason, retry_after }),
    }
}

/// Parses `Retry-After` in seconds; the date form is ignored.
pub(super) fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get(RETRY_AFTER)?.to_str().ok()?;
    text.trim().parse().ok().map(Duration::from_secs)
}

#[cfg(test)]
mod header_tests {
    use super::*;

    #[test]
    fn invalid_checkpoint_names_are_ignored() {
        let check = |header: &str, expected: &[&str]| {
            let mut headers = HeaderMap::new();
            headers.insert(HEADER_PRUNABLE, header.parse().unwrap());
            assert_eq!(prunable(&headers), expected, "{header}");
        };
        check("000000000100-0,000000000200-1", &["000000000100-0", "000000000200-1"]);
        check("../../x,000000000100-0", &["000000000100-0"]);
        check("", &[]);
    }
}

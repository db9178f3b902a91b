//! One report over HTTP, and what its answer means.

use std::time::Duration;

use reqwest::header::{HeaderMap, RETRY_AFTER};
use reqwest::{Certificate, Client, StatusCode, redirect};
use stoker_api::contract::{Directive, Door, Report};
use stoker_api::names::{HEADER_SUPERFLUOUS, parse_checkpoint_name};

use super::{BACKOFF_FIRST, BACKOFF_MAX};
use crate::Result;
use crate::error::{Infrastructure, chain};

/// Time for a connection.
const CONNECT_MAX: Duration = Duration::from_secs(5);
/// Time for a request: longer than the door holds one that it cannot answer yet.
const REQUEST_MAX: Duration = Duration::from_secs(60);
/// The longest wait that a server can request with `Retry-After`.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(30);
/// Characters of an answer that are logged.
const ANSWER_CHARS_MAX: usize = 1_000;

/// What came of a request.
#[derive(Debug)]
pub(super) enum Outcome {
    /// With names of checkpoints that nobody needs any more.
    Answer(Directive, Vec<String>),
    /// The door will never take this report.
    Rejected(String),
    /// It may work later.
    Away(Refused),
}

/// A try that failed.
#[derive(Debug, Default)]
pub(super) struct Refused {
    /// The HTTP status; `None` without an answer.
    pub(super) status: Option<StatusCode>,
    pub(super) reason: String,
    /// The wait that the server requests.
    pub(super) retry_after: Option<Duration>,
}

impl Refused {
    pub(super) fn unanswered(reason: String) -> Self {
        Self { reason, ..Self::default() }
    }
}

/// Failed tries since the last answer.
#[derive(Debug, Default)]
pub(super) struct Outage {
    pub(super) num_failed: u32,
    pub(super) logged_status: Option<StatusCode>,
}

impl Outage {
    /// Counts a failed try and logs it once for each new status; returns the wait before the next.
    pub(super) fn failed(&mut self, refused: &Refused) -> Duration {
        if self.num_failed == 0 || refused.status != self.logged_status {
            let reason = &refused.reason;
            eprintln!("stoker: {reason}; training continues, and reports are tried again");
            self.logged_status = refused.status;
        }
        let wait = BACKOFF_FIRST.saturating_mul(1 << self.num_failed.min(10)).min(BACKOFF_MAX);
        self.num_failed = self.num_failed.saturating_add(1);
        wait.max(refused.retry_after.unwrap_or_default().min(RETRY_AFTER_MAX))
    }
}

/// The door is near: a proxy of the environment is for others, and the token goes nowhere else.
/// Where the door has an authority of its own, no other is trusted.
pub(super) fn client(door: &Door) -> Result<Client> {
    let failed = |what: &str, error: reqwest::Error| {
        Infrastructure(format!("no report can be sent: {what}{}", chain(&error)))
    };
    let mut client = Client::builder()
        .no_proxy()
        .redirect(redirect::Policy::none())
        .connect_timeout(CONNECT_MAX)
        .timeout(REQUEST_MAX);
    if let Some(ca) = &door.ca {
        let trusted = Certificate::from_pem_bundle(ca.as_bytes());
        let trusted = trusted.map_err(|error| failed("the door's authority: ", error))?;
        if trusted.is_empty() {
            let text = "no report can be sent: the door's authority holds no PEM certificate";
            return Err(Infrastructure(text.into()).into());
        }
        client = client.tls_certs_only(trusted);
    }
    Ok(client.build().map_err(|error| failed("", error))?)
}

/// What an answer names, if it is named as checkpoints are: a name becomes part of a path.
pub(super) fn superfluous(headers: &HeaderMap) -> Vec<String> {
    let named = headers.get(HEADER_SUPERFLUOUS).and_then(|it| it.to_str().ok()).unwrap_or_default();
    let names = named.split(',').filter(|it| parse_checkpoint_name(it).is_some());
    names.map(str::to_owned).collect()
}

/// Posts one report. The token is read again for each try, because the kubelet renews the file.
pub(super) async fn send(client: &Client, door: &Door, report: &Report) -> Outcome {
    let token = match std::fs::read_to_string(&door.token_file) {
        Ok(token) => token,
        Err(error) => {
            let reason = format!("the token {} cannot be read: {error}", door.token_file);
            return Outcome::Away(Refused::unanswered(reason));
        }
    };
    let request = client.post(&door.url).bearer_auth(token.trim()).json(report);
    let response = match request.send().await {
        Ok(response) => response,
        Err(error) => return Outcome::Away(Refused::unanswered(chain(&error))),
    };
    let status = response.status();
    if status == StatusCode::OK {
        let superfluous = superfluous(response.headers());
        return match response.json().await {
            Ok(directive) => Outcome::Answer(directive, superfluous),
            Err(error) => {
                let reason = format!("{} gave no directive: {error}", door.url);
                Outcome::Away(Refused { status: Some(status), reason, retry_after: None })
            }
        };
    }
    let retry_after = retry_after(response.headers());
    let text = response.text().await.unwrap_or_default();
    let text: String = text.trim().chars().take(ANSWER_CHARS_MAX).collect();
    let colon = if text.is_empty() { "" } else { ": " };
    let reason = format!("{} answered {status}{colon}{text}", door.url);
    match status {
        // The server has read the report and will refuse it each time.
        StatusCode::PAYLOAD_TOO_LARGE | StatusCode::UNPROCESSABLE_ENTITY => {
            Outcome::Rejected(reason)
        }
        _ => Outcome::Away(Refused { status: Some(status), reason, retry_after }),
    }
}

/// `Retry-After` in seconds; its form with a date is ignored.
pub(super) fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get(RETRY_AFTER)?.to_str().ok()?;
    text.trim().parse().ok().map(Duration::from_secs)
}

#[cfg(test)]
mod header_tests {
    use super::*;

    #[test]
    fn only_names_of_checkpoints_are_taken_from_an_answer() {
        let check = |header: &str, expected: &[&str]| {
            let mut headers = HeaderMap::new();
            headers.insert(HEADER_SUPERFLUOUS, header.parse().unwrap());
            assert_eq!(superfluous(&headers), expected, "{header}");
        };
        check("000000000100-0,000000000200-1", &["000000000100-0", "000000000200-1"]);
        check("../../x,000000000100-0", &["000000000100-0"]);
        check("", &[]);
    }
}

//! One question as one HTTP request on a new connection.

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::client::conn::http1;
use hyper::header::{CONTENT_TYPE, HOST};
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use stoker_api::external::{ANSWER_BYTES_MAX, ANSWER_SECONDS_MAX, Answer, Question, SearcherUrl};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::{ANSWER_TIMEOUT, AskError, parse, too_large, words};

/// Asks a searcher by `POST` and waits for its answer, at most 30 seconds. Connects to `host`, with
/// the port and path of `url`.
///
/// # Errors
///
/// [`AskError::Unavailable`] without a response or for status 429 and from 500 on, otherwise
/// [`AskError::BadAnswer`] for all that is no answer.
pub async fn ask(host: &str, url: &SearcherUrl, question: &Question) -> Result<Answer, AskError> {
    ask_at(host, host, url, question).await
}

/// Same as [`ask`], but connects to `address` without a lookup of `host`.
///
/// # Errors
///
/// Same as [`ask`].
pub async fn ask_at(
    address: &str,
    host: &str,
    url: &SearcherUrl,
    question: &Question,
) -> Result<Answer, AskError> {
    let place = format!("http://{}{}", authority(host, url.port), url.path);
    let late = |_| {
        AskError::Unavailable(format!(
            "no answer of the external searcher at {place} within {ANSWER_SECONDS_MAX} s"
        ))
    };
    timeout(ANSWER_TIMEOUT, exchange(address, host, url, question, &place)).await.map_err(late)?
}

/// Returns `HOST:PORT`, with an address of IPv6 in brackets.
fn authority(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

async fn exchange(
    address: &str,
    host: &str,
    url: &SearcherUrl,
    question: &Question,
    place: &str,
) -> Result<Answer, AskError> {
    let unavailable = |error: &dyn std::error::Error| {
        // The cause says more than the error of the client.
        let cause = error.source().map(|cause| format!(": {cause}")).unwrap_or_default();
        AskError::Unavailable(format!(
            "cannot reach the external searcher at {place}: {error}{cause}"
        ))
    };
    let body = serde_json::to_vec(question).map_err(|error| unavailable(&error))?;
    let stream =
        TcpStream::connect((address, url.port)).await.map_err(|error| unavailable(&error))?;
    let handshake = http1::handshake(TokioIo::new(stream)).await;
    let (mut sender, connection) = handshake.map_err(|error| unavailable(&error))?;
    // Dropping the set ends the connection.
    let mut connections = JoinSet::new();
    connections.spawn(connection);
    let request = Request::post(&url.path)
        .header(HOST, authority(host, url.port))
        .header(CONTENT_TYPE, "application/json")
        .body(Full::new(Bytes::from(body)))
        .map_err(|error| unavailable(&error))?;
    let response = sender.send_request(request).await.map_err(|error| unavailable(&error))?;
    let status = response.status();
    let body = match Limited::new(response.into_body(), ANSWER_BYTES_MAX).collect().await {
        Ok(body) => body.to_bytes(),
        Err(error) if error.is::<http_body_util::LengthLimitError>() => return Err(too_large()),
        Err(error) => return Err(unavailable(&*error)),
    };
    match status {
        StatusCode::OK => parse(&body),
        status => Err(no_answer(status, place, &body)),
    }
}

fn no_answer(status: StatusCode, place: &str, body: &[u8]) -> AskError {
    let words = words(body);
    let response = format!("the external searcher at {place} responded with {status}: `{words}`");
    if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS {
        return AskError::Unavailable(response);
    }
    let rule = if status.is_redirection() { "redirects are not followed" } else { "expected 200" };
    AskError::BadAnswer(format!("{response}; {rule}"))
}

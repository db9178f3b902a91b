//! Asks external searchers over HTTP, and reads their answers.
//!
//! ```text
//!   question -> ask -> answer, or an error that says when to ask again
//! ```
//!
//! A searcher is a service of the user, so nothing of it is trusted: an answer is limited in size
//! and time, redirects are not followed, and no proxy is used. The caller chooses the host.

mod http;

use std::time::Duration;

use stoker_api::external::{ANSWER_BYTES_MAX, ANSWER_SECONDS_MAX, Answer};

pub use http::{ask, ask_at};

/// Time within which an answer must arrive.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(ANSWER_SECONDS_MAX);
/// Wait after the first failure. It doubles with each further one.
const FIRST_WAIT: Duration = Duration::from_secs(1);
/// Longest wait before a question is repeated.
const WAIT_MAX: Duration = Duration::from_secs(60);
/// Maximum number of characters that an error repeats of a response.
const WORDS_CHARS_MAX: usize = 300;

/// Why a question has no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AskError {
    /// The searcher does not respond. Usually transient.
    #[error("{0}")]
    Unavailable(String),
    /// The searcher responds, but not with an answer. Its user must repair it.
    #[error("{0}")]
    BadAnswer(String),
}

impl AskError {
    /// Returns the reason in one word, for a condition.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Unavailable(_) => "SearcherUnavailable",
            Self::BadAnswer(_) => "AnswerRefused",
        }
    }
}

/// Parses an answer.
///
/// # Errors
///
/// [`AskError::BadAnswer`] with the beginning of the text.
pub fn parse(answer: &[u8]) -> Result<Answer, AskError> {
    if answer.len() > ANSWER_BYTES_MAX {
        return Err(too_large());
    }
    serde_json::from_slice(answer).map_err(|error| {
        AskError::BadAnswer(format!(
            "cannot read the answer of the external searcher: {error}; it begins with `{}`",
            words(answer)
        ))
    })
}

/// Returns the error of an answer that is refused, for a reason that begins with a field.
pub fn refused(why: &str) -> AskError {
    AskError::BadAnswer(format!(
        "the answer of the external searcher was refused: {why}; the question is repeated until \
         its answer is accepted"
    ))
}

/// Returns the wait before a question is repeated, after this number of failures in a row.
///
/// # Examples
///
/// ```
/// let seconds = |failures| stoker_searcher::back_off(failures).as_secs();
/// assert_eq!([1, 2, 3, 7, 99].map(seconds), [1, 2, 4, 60, 60]);
/// ```
pub fn back_off(num_failures: u32) -> Duration {
    let doublings = num_failures.saturating_sub(1).min(16);
    (FIRST_WAIT * (1 << doublings)).min(WAIT_MAX)
}

fn too_large() -> AskError {
    AskError::BadAnswer(format!(
        "the answer of the external searcher has more than {ANSWER_BYTES_MAX} bytes; create fewer \
         trials in one answer"
    ))
}

/// Returns the beginning of a response on one line.
pub fn words(response: &[u8]) -> String {
    let text = String::from_utf8_lossy(response);
    let mut words: String = text.trim().chars().take(WORDS_CHARS_MAX).collect();
    if words.len() < text.trim().len() {
        words.push_str("...");
    }
    words.chars().map(|char| if char.is_control() { ' ' } else { char }).collect()
}

#[cfg(test)]
mod tests;

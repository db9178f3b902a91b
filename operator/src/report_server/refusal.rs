//! Responses of the report server without a directive.

use std::time::Duration;

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};

use super::RETRY_AFTER;
use super::auth::AuthError;
use crate::metrics::Answer;

/// Response to a report without a directive.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) answer: Answer,
    pub(super) status: StatusCode,
    pub(super) why: String,
    pub(super) retry_after: Option<Duration>,
}

impl Refusal {
    pub(super) fn new(answer: Answer, status: StatusCode, why: String) -> Self {
        Self { answer, status, why, retry_after: None }
    }

    pub(super) fn forbidden(why: String) -> Self {
        Self::new(Answer::Unauthorized, StatusCode::FORBIDDEN, why)
    }

    pub(super) fn unavailable(why: String) -> Self {
        let refusal = Self::new(Answer::Unavailable, StatusCode::SERVICE_UNAVAILABLE, why);
        Self { retry_after: Some(RETRY_AFTER), ..refusal }
    }

    pub(super) fn limited(why: String, retry_after: Duration) -> Self {
        let refusal = Self::new(Answer::Limited, StatusCode::TOO_MANY_REQUESTS, why);
        Self { retry_after: Some(retry_after), ..refusal }
    }
}

impl From<AuthError> for Refusal {
    fn from(denied: AuthError) -> Self {
        match denied {
            AuthError::Unauthenticated(why) => {
                Self::new(Answer::Unauthorized, StatusCode::UNAUTHORIZED, why)
            }
            AuthError::Unavailable(why) => Self::unavailable(why),
        }
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let mut response = (self.status, self.why).into_response();
        if let Some(wait) = self.retry_after {
            let seconds = wait.as_secs_f64().ceil().max(1.0) as u64;
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}

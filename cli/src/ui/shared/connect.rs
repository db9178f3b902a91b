//! Clients with the tokens of viewers, which share connections.

use std::task::{Context, Poll};
use std::time::Duration;

use axum::http::header::AUTHORIZATION;
use axum::http::{HeaderValue, Request, Response};
use futures::FutureExt as _;
use futures::future::BoxFuture;
use kube::Client;
use kube::client::Body;
use stoker_ui::{Refusal, Token};
use tower_service::Service;

/// Timeout for a review or a Secret: a page waits for it.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Adds a token to each request.
struct WithToken {
    client: Client,
    header: HeaderValue,
}

impl Service<Request<Body>> for WithToken {
    type Response = Response<Body>;
    type Error = kube::Error;
    type Future = BoxFuture<'static, kube::Result<Response<Body>>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<kube::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        request.headers_mut().insert(AUTHORIZATION, self.header.clone());
        let client = self.client.clone();
        async move { client.send(request).await }.boxed()
    }
}

/// Returns a client with this token, over the connections of `client`.
pub(super) fn with_token(client: &Client, token: &Token) -> Result<Client, Refusal> {
    let header = HeaderValue::from_str(&format!("Bearer {}", token.expose()));
    let mut header = header.map_err(|_| Refusal::Token("this is not a token".to_owned()))?;
    // Keep the token out of debug output.
    header.set_sensitive(true);
    Ok(Client::new(WithToken { client: client.clone(), header }, "default"))
}

/// Waits for a request, but not long.
pub(super) async fn within_limit<T>(
    request: impl Future<Output = kube::Result<T>>,
) -> Result<T, Refusal> {
    match tokio::time::timeout(TIMEOUT, request).await {
        Ok(answer) => answer.map_err(|error| super::refusal(&error)),
        Err(_) => Err(Refusal::Unavailable(format!(
            "the API server does not answer within {} s",
            TIMEOUT.as_secs()
        ))),
    }
}

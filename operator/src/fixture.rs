//! Shared state for tests, without an API server.

use std::sync::{Arc, Mutex};
use std::task::{Context as TaskContext, Poll};

use axum::http::{Request, Response};
use clap::Parser as _;
use kube::Client;
use kube::client::Body;
use tower_service::Service;

use crate::context::Context;
use crate::options::{Arguments, Command, Options};
use crate::trial::config::OperatorConfig;

/// Returns options with this path of all files.
pub(crate) fn options(key: &str) -> Options {
    let required = ["--identity", "a", "--door-url", "https://door", "--trainer-image", "i"];
    let files = ["--tls-ca", key, "--gang-key-file", key];
    let arguments = [&["stoker-operator", "run"][..], &required, &files].concat();
    let Command::Run(options) = Arguments::parse_from(arguments).command;
    *options
}

/// Returns shared state with empty caches, whose requests go to `client`.
pub(crate) fn context(client: Client) -> Arc<Context> {
    let folder = tempfile::tempdir().unwrap();
    let key = folder.path().join("key");
    std::fs::write(&key, [7; 32]).unwrap();
    let options = options(key.to_str().unwrap());
    let operator_config = OperatorConfig::read(&options).unwrap_or_else(|error| panic!("{error}"));
    Context::new(client, options, operator_config).0
}

/// An API server that refuses each request, and records its method and the last part of its path.
#[derive(Clone, Default)]
pub(crate) struct RefusingServer(Arc<Mutex<Vec<String>>>);

impl RefusingServer {
    pub(crate) fn client(&self) -> Client {
        Client::new(self.clone(), "default")
    }

    /// Returns the requests so far, such as `PATCH mnist`.
    pub(crate) fn requests(&self) -> Vec<String> {
        self.0.lock().unwrap().clone()
    }
}

impl Service<Request<Body>> for RefusingServer {
    type Response = Response<Body>;
    type Error = std::convert::Infallible;
    type Future = std::future::Ready<Result<Response<Body>, Self::Error>>;

    fn poll_ready(&mut self, _: &mut TaskContext<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let path = request.uri().path().rsplit('/').next().unwrap_or_default();
        self.0.lock().unwrap().push(format!("{} {path}", request.method()));
        std::future::ready(Ok(Response::builder().status(500).body(Body::empty()).unwrap()))
    }
}

//! Shared state for tests, without an API server.

use std::sync::Arc;

use clap::Parser as _;
use kube::Client;

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

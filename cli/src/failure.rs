//! Errors of commands, grouped by exit code.

use std::path::Path;

use serde_json::{Value, json};
use stoker_storage::StorageError;

use crate::print::{self, Output};

/// Exit code for invalid input.
const INPUT: u8 = 2;

/// Error of a command.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// Invalid user input: exit code 2.
    #[error("{0}")]
    Input(String),
    /// The infrastructure failed: exit code 1.
    #[error("{0}")]
    System(String),
    /// The storage failed: exit code 1.
    #[error(transparent)]
    Storage(StorageError),
}

impl From<StorageError> for Failure {
    fn from(error: StorageError) -> Self {
        match error {
            StorageError::BadUrl { .. } => Self::Input(error.to_string()),
            error => Self::Storage(error),
        }
    }
}

impl Failure {
    /// Returns `cannot {what} {path}: {error}`.
    pub(crate) fn file(what: &str, path: &Path, error: impl std::fmt::Display) -> Self {
        Self::System(format!("cannot {what} {}: {error}", path.display()))
    }

    /// Returns the exit code of the command.
    pub(crate) fn code(&self) -> u8 {
        match self {
            Self::Input(_) => INPUT,
            Self::System(_) | Self::Storage(_) => 1,
        }
    }

    /// Prints the error to standard error. `name` is the object that the command failed for, if the
    /// command has several.
    pub(crate) fn print(&self, name: Option<&str>, output: Output) {
        match (output, name) {
            (Output::Json, _) => print::err(self.json(name)),
            (Output::Text, Some(name)) => print::err(format!("stoker: {name}: {self}")),
            (Output::Text, None) => print::err(format!("stoker: {self}")),
        }
    }

    fn json(&self, name: Option<&str>) -> Value {
        let kind = match self {
            Self::Input(_) => "input",
            Self::System(_) => "system",
            Self::Storage(_) => "storage",
        };
        let mut value = error_value(kind, &self.to_string(), self.code());
        if let Some(name) = name {
            value["error"]["name"] = name.into();
        }
        value
    }
}

/// Returns the JSON value of an error. All errors have these fields; some have more.
pub(crate) fn error_value(kind: &str, message: &str, exit_code: u8) -> Value {
    json!({ "error": { "kind": kind, "message": message, "exitCode": exit_code } })
}

/// Prints an error of the command line, or the requested help. Returns the exit code.
pub(crate) fn print_usage(error: &clap::Error, output: Output) -> u8 {
    use clap::error::ContextKind as Kind;
    let code = u8::try_from(error.exit_code()).unwrap_or(INPUT);
    if code == 0 || output == Output::Text {
        // Ignore the error: the reader may have closed the pipe.
        let _ = error.print();
        return code;
    }
    let text = error.to_string();
    let mut lines = text.lines().map(str::trim).take_while(|line| !line.starts_with("Usage:"));
    let first = lines.next().unwrap_or_default();
    let mut message = first.strip_prefix("error: ").unwrap_or(first).to_owned();
    for line in lines.filter(|line| !line.is_empty()) {
        message.push_str(if line.starts_with("tip:") { "; " } else { " " });
        message.push_str(line);
    }
    let mut value = error_value("usage", &message, code);
    for (kind, field) in [(Kind::InvalidArg, "argument"), (Kind::InvalidValue, "value")] {
        if let Some(of) = error.get(kind) {
            value["error"][field] = of.to_string().into();
        }
    }
    print::err(value);
    code
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_errors_have_kind_message_and_exit_code() {
        let check = |failure: Failure, name: Option<&str>, expected: Value| {
            assert_eq!(failure.json(name)["error"], expected);
        };
        check(
            Failure::Input("x is unknown".to_owned()),
            None,
            json!({"kind": "input", "message": "x is unknown", "exitCode": 2}),
        );
        check(
            Failure::System("y is away".to_owned()),
            Some("mnist"),
            json!({"kind": "system", "message": "y is away", "exitCode": 1, "name": "mnist"}),
        );
        let (url, reason) = ("s3x://a".to_owned(), "unknown scheme".to_owned());
        check(
            StorageError::BadUrl { url: url.clone(), reason: reason.clone() }.into(),
            None,
            json!({
                "kind": "input", "message": "storage \"s3x://a\": unknown scheme", "exitCode": 2,
            }),
        );
        check(
            StorageError::Credentials { url, reason }.into(),
            None,
            json!({
                "kind": "storage", "message": "storage s3x://a: unknown scheme", "exitCode": 1,
            }),
        );
    }
}

//! Optuna's side: a Python script beside this package.

use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::BenchError;

/// Runs `optuna_side.py` with these arguments and returns the JSON value that it prints.
///
/// # Errors
///
/// The script cannot be started, fails, or prints no JSON.
pub(crate) fn call(python: &Path, arguments: &[&str]) -> Result<Value, BenchError> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("optuna_side.py");
    let mut command = Command::new(python);
    command.arg(script).args(arguments).stderr(Stdio::inherit());
    let output = command.output().map_err(|error| format!("cannot start {python:?}: {error}"))?;
    if !output.status.success() {
        return Err(format!("optuna_side.py failed: {}", output.status).into());
    }
    Ok(serde_json::from_slice(&output.stdout)?)
}

//! Benchmarks: gets what they compare with, and runs the package `stoker-benches`. The operator's are
//! tests of its own that print what they count.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::repository;

/// Why nothing was measured.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BenchError {
    /// A program could not be started.
    #[error("{program} cannot be started: {source}")]
    Start {
        /// The program.
        program: String,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A program failed, and has said why.
    #[error("{program} failed; it says why above")]
    Failed {
        /// The program.
        program: String,
    },
}

/// Runs `stoker-bench` with these arguments.
///
/// # Errors
///
/// The rivals cannot be fetched, the benchmark does not build, or it fails.
pub(crate) fn run(arguments: &[String]) -> Result<(), BenchError> {
    if arguments == ["operator"] {
        return operator();
    }
    let mut bench = Command::new(env!("CARGO"));
    bench.current_dir(repository());
    bench.args(["run", "--quiet", "--release", "--package", "stoker-benches", "--"]);
    bench.args(arguments);
    let needs_no_rivals = |it: &String| ["help", "--help", "-h", "--python"].contains(&it.as_str());
    if !arguments.is_empty() && !arguments.iter().any(needs_no_rivals) {
        let reads_images = arguments.first().is_some_and(|it| it == "data");
        bench.arg("--python").arg(python(reads_images)?);
    }
    let status = bench.status().map_err(|source| start("cargo", source))?;
    succeeded("the benchmark", status.success())
}

/// Runs what counts and times the operator, against a real API server.
fn operator() -> Result<(), BenchError> {
    let mut bench = Command::new(env!("CARGO"));
    bench.current_dir(repository());
    bench.args(["test", "--quiet", "--release", "--package", "stoker-operator", "--test", "all"]);
    bench.args(["--", "bench::", "--include-ignored", "--nocapture", "--test-threads", "1"]);
    let status = bench.status().map_err(|source| start("cargo", source))?;
    succeeded("the benchmark", status.success())
}

/// The Python that has the rivals, from a script that installs them if they are missing.
fn python(reads_images: bool) -> Result<PathBuf, BenchError> {
    let script = repository().join("scripts/fetch-bench-tools");
    let program = script.display().to_string();
    let mut fetch = Command::new(&script);
    fetch.args(reads_images.then_some("images"));
    let output = fetch.stderr(Stdio::inherit()).output().map_err(|it| start(&program, it))?;
    succeeded(&program, output.status.success())?;
    Ok(PathBuf::from(String::from_utf8_lossy(&output.stdout).trim()))
}

fn succeeded(program: &str, has_succeeded: bool) -> Result<(), BenchError> {
    match has_succeeded {
        true => Ok(()),
        false => Err(BenchError::Failed { program: program.into() }),
    }
}

fn start(program: &str, source: std::io::Error) -> BenchError {
    BenchError::Start { program: program.into(), source }
}

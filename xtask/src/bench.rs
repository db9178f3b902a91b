//! Benchmarks: installs the programs to compare with, and runs the packages `stoker-benches` and
//! `stoker-search-benches`. The operator's benchmarks are tests in its package that print their
//! results.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::repository;

/// Why a benchmark failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BenchError {
    /// A program could not be started.
    #[error("cannot start {program}: {source}")]
    Start {
        /// Name of the program.
        program: String,
        /// Error of the system.
        source: std::io::Error,
    },
    /// Another option than `--update`.
    #[error("usage: cargo xtask bench instructions [--update]")]
    Usage,
    /// Instructions cannot be counted, or their number has changed.
    #[error(transparent)]
    Count(#[from] crate::instructions::CountError),
    /// A program failed and printed the reason.
    #[error("{program} failed; the output above has the reason")]
    Failed {
        /// Name of the program.
        program: String,
    },
}

/// Runs `stoker-bench` with these arguments.
///
/// # Errors
///
/// The programs to compare with cannot be installed, the benchmark does not build, or it fails.
pub(crate) fn run(arguments: &[String]) -> Result<(), BenchError> {
    match arguments.first().map(String::as_str) {
        Some("operator") if arguments.len() == 1 => return operator(),
        Some("search") => return search(&arguments[1..]),
        Some("instructions") => match &arguments[1..] {
            [] => return Ok(crate::instructions::run(false)?),
            [option] if option == "--update" => return Ok(crate::instructions::run(true)?),
            _ => return Err(BenchError::Usage),
        },
        _ => {}
    }
    // Both `--device cuda` and `--device=cuda`.
    let is_for_gpus = arguments.first().is_some_and(|bench| bench == "trainer")
        && arguments.join("=").contains("--device=cuda")
        && !arguments.iter().any(|argument| ["--help", "-h"].contains(&argument.as_str()));
    if is_for_gpus {
        return on_gpu(arguments);
    }
    let mut bench = Command::new(env!("CARGO"));
    bench.current_dir(repository());
    bench.args(["run", "--quiet", "--release", "--package", "stoker-benches", "--"]);
    bench.args(arguments);
    let needs_no_python = |argument: &String| {
        ["help", "--help", "-h", "--python", "kernels", "bucket"].contains(&argument.as_str())
    };
    if !arguments.is_empty() && !arguments.iter().any(needs_no_python) {
        let reads_images = arguments.first().is_some_and(|bench| bench == "data");
        bench.arg("--python").arg(python(reads_images.then_some("images"))?);
    }
    let needs_no_jax = |argument: &String| ["--help", "-h", "--jax"].contains(&argument.as_str());
    if arguments.first().is_some_and(|bench| bench == "trainer")
        && !arguments.iter().any(needs_no_jax)
    {
        bench.arg("--jax").arg(python(Some("jax"))?);
    }
    let status = bench.status().map_err(|source| start("cargo", source))?;
    succeeded("the benchmark", status.success())
}

/// Builds `stoker-bench` for GPUs, and runs it.
fn on_gpu(arguments: &[String]) -> Result<(), BenchError> {
    let mut more = vec![];
    if !arguments.iter().any(|argument| argument.starts_with("--python")) {
        more.extend(["--python".into(), python(None)?.into_os_string()]);
    }
    let trainer = printed_path("scripts/build-cuda", &["--package", "stoker-benches"])?;
    let program = repository().join(trainer.with_file_name("stoker-bench"));
    let status = Command::new(&program).args(arguments).args(more).status();
    let status = status.map_err(|source| start(&program.display().to_string(), source))?;
    succeeded("the benchmark", status.success())
}

/// Runs the operator's benchmarks against a real API server.
fn operator() -> Result<(), BenchError> {
    let mut bench = Command::new(env!("CARGO"));
    bench.current_dir(repository());
    bench.args(["test", "--quiet", "--release", "--package", "stoker-operator", "--test", "all"]);
    bench.args(["--", "bench::", "--include-ignored", "--nocapture", "--test-threads", "1"]);
    let status = bench.status().map_err(|source| start("cargo", source))?;
    succeeded("the benchmark", status.success())
}

/// Runs the benchmarks of the search, with the parts that `arguments` name.
fn search(arguments: &[String]) -> Result<(), BenchError> {
    let mut bench = Command::new(env!("CARGO"));
    bench.current_dir(repository());
    bench.args(["run", "--quiet", "--release", "--package", "stoker-search-benches", "--"]);
    bench.args(arguments);
    let is_for = |parts: &[&str]| {
        let needs_help = arguments.iter().any(|argument| ["--help", "-h"].contains(&&**argument));
        let part = arguments.first().filter(|argument| !argument.starts_with('-'));
        !needs_help && part.is_none_or(|part| parts.contains(&&**part))
    };
    if is_for(&["decisions", "quality"]) {
        bench.arg("--python").arg(python(Some("search"))?);
    }
    if is_for(&["runner", "page"]) {
        bench.arg("--stoker").arg(stoker()?);
    }
    if is_for(&["page"]) {
        bench.arg("--browser").arg(printed_path("scripts/fetch-browser", &[])?);
    }
    let status = bench.status().map_err(|source| start("cargo", source))?;
    succeeded("the benchmark", status.success())
}

/// Builds the program `stoker` and returns its path.
fn stoker() -> Result<PathBuf, BenchError> {
    let mut build = Command::new(env!("CARGO"));
    build.current_dir(repository());
    build.args(["build", "--quiet", "--release", "--package", "stoker-cli"]);
    let status = build.status().map_err(|source| start("cargo", source))?;
    succeeded("the build of stoker", status.success())?;
    let target = std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into());
    Ok(repository().join(target).join("release/stoker"))
}

/// Returns the path of a Python with the packages to compare with. A script installs missing
/// packages. `set` names packages other than PyTorch.
fn python(set: Option<&str>) -> Result<PathBuf, BenchError> {
    printed_path("scripts/fetch-bench-tools", set.as_slice())
}

/// Runs a script of the repository and returns the path that it prints.
fn printed_path(script: &str, arguments: &[&str]) -> Result<PathBuf, BenchError> {
    let script = repository().join(script);
    let program = script.display().to_string();
    let mut fetch = Command::new(&script);
    fetch.args(arguments);
    let output = fetch.stderr(Stdio::inherit()).output();
    let output = output.map_err(|error| start(&program, error))?;
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

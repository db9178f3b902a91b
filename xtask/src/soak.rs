//! Soak test: random faults on the two-node test cluster.

use std::process::Command;

use crate::repository;

/// Options of `cargo xtask soak`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Minutes of faults, after an undisturbed round of a few minutes
    #[arg(long, default_value_t = 30.0)]
    minutes: f64,
    /// Seed of the faults' kinds, order and durations; random if unset. The test prints it
    #[arg(long)]
    seed: Option<u64>,
    /// Run the test of a search on four fake GPUs instead, without and with faults; about 25
    /// minutes
    #[arg(long, conflicts_with_all = ["minutes", "seed"])]
    search: bool,
}

/// Why the soak test failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SoakError {
    /// A program could not be started.
    #[error("cannot start {program}: {source}")]
    Start {
        /// The program.
        program: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// A step failed and printed the reason.
    #[error("{step} failed; the output above has the reason")]
    Failed {
        /// The step.
        step: String,
    },
}

const TEST: &str = "two_nodes::soak::random_faults_change_no_result";
const SEARCH_TEST: &str = "two_nodes::search::promotion_keeps_gpus_busy_and_survives_faults";

/// Fetches the servers and data sets that are missing, builds the programs, and runs the soak test.
///
/// # Errors
///
/// A step fails: fetching, building, or the test.
pub(crate) fn run(options: &Options) -> Result<(), SoakError> {
    let script = |name: &str| Command::new(repository().join("scripts").join(name));
    let mut data = script("fetch-data");
    data.args(["mnist", "iris"]);
    step("scripts/fetch-data", data)?;
    step("scripts/fetch-tools", script("fetch-tools"))?;
    step("scripts/fetch-cluster", script("fetch-cluster"))?;
    // The whole workspace, which selects the same features as all tests: nothing is built twice.
    let mut build = Command::new(env!("CARGO"));
    build.args(["build", "--workspace", "--bins"]);
    step("cargo build", build)?;
    let mut test = Command::new(env!("CARGO"));
    test.args(["test", "--quiet", "--workspace", "--test=system", "--"]);
    let name = if options.search { SEARCH_TEST } else { TEST };
    test.args(["--exact", name, "--ignored", "--nocapture"]);
    test.env("STOKER_TEST_SOAK_MINUTES", options.minutes.to_string());
    if let Some(seed) = options.seed {
        test.env("STOKER_TEST_SOAK_SEED", seed.to_string());
    }
    step("the soak test", test)
}

fn step(step: &str, mut command: Command) -> Result<(), SoakError> {
    let program = command.get_program().to_string_lossy().into_owned();
    let status = command.current_dir(repository()).status();
    let status = status.map_err(|source| SoakError::Start { program, source })?;
    if status.success() { Ok(()) } else { Err(SoakError::Failed { step: step.to_owned() }) }
}

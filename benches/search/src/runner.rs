//! Processor time of `stoker run` for each trial of a program that does nothing.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::BenchError;
use crate::space::UNITS_MAX;

/// Interval between two readings of the runner's processor time.
const INTERVAL: Duration = Duration::from_millis(20);
/// Ticks of the kernel's clock for processor time, per second: `USER_HZ` on Linux.
const TICKS_PER_SECOND: f64 = 100.0;

/// Prints the processor time per trial for each number of trials.
pub(crate) fn run(stoker: &Path, trials: &[u32]) -> Result<(), BenchError> {
    println!("runner: processor time of `stoker run`, without the trainers' processes");
    println!("{:>8} {:>12} {:>10}", "trials", "ms per trial", "seconds");
    for trials in trials {
        let begin = Instant::now();
        let milliseconds = time(stoker, *trials)? * 1e3 / f64::from(*trials);
        let seconds = begin.elapsed().as_secs_f64();
        println!("{trials:>8} {milliseconds:>12.2} {seconds:>10.1}");
    }
    Ok(())
}

/// Runs an experiment and returns the processor time of the runner in seconds.
fn time(stoker: &Path, trials: u32) -> Result<f64, BenchError> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("experiment.yaml");
    let experiment = json!({
        "apiVersion": "stoker.dev/v1alpha1",
        "kind": "Experiment",
        "metadata": {"name": "no-op"},
        "spec": {
            "entrypoint": {"command": [std::env::current_exe()?, "no-op"]},
            "hyperparameters": {"x": {"double": {"min": 0.0, "max": 1.0}}},
            "searcher": {
                "metric": "loss",
                "maxLength": {"batches": UNITS_MAX},
                "random": {"maxTrials": trials, "maxConcurrentTrials": 4},
            },
        },
    });
    std::fs::write(&file, experiment.to_string())?;
    let mut command = Command::new(stoker);
    command.args(["run", "--output", "json", "--slots", "4", "--root"]);
    command.arg(folder.path().join("root")).arg(&file);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut runner =
        command.spawn().map_err(|error| format!("cannot start {stoker:?}: {error}"))?;
    let mut seconds = 0.0;
    loop {
        // The statistics of a process vanish when it is waited for, so read them before.
        seconds = processor_time(runner.id()).unwrap_or(seconds);
        if let Some(status) = runner.try_wait()? {
            return match status.success() {
                true => Ok(seconds),
                false => Err(format!("stoker run failed: {status}").into()),
            };
        }
        std::thread::sleep(INTERVAL);
    }
}

/// Returns the processor time of a process without its children, in seconds.
fn processor_time(process: u32) -> Option<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name of the program, in parentheses, may contain spaces.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = |field: usize| fields.get(field)?.parse::<f64>().ok();
    Some((ticks(11)? + ticks(12)?) / TICKS_PER_SECOND)
}

//! A simulated search with a million trials, on one core.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::Instant;

use serde_json::json;
use stoker_api::experiment::AsyncHalvingSearch;
use stoker_api::validate::Method;
use stoker_engine::search::simulate::{Curve, Machine, no_searcher, simulate};

use crate::space::{self, UNITS_MAX};
use crate::{BenchError, clock};

/// Number of trials of the search.
const TRIALS: u32 = 1_000_000;
/// Number of different learning curves.
const CURVES: u32 = 65_536;

/// Prints the time and the peak memory of both forms of asynchronous halving, each in a process of
/// its own.
pub(crate) fn run() -> Result<(), BenchError> {
    println!("million: asyncHalving with {TRIALS} trials, 5 rungs, 1,024 workers, one thread");
    let mut command = Command::new(std::env::current_exe()?);
    let output = command.arg("million-side").output()?;
    print!("{}", String::from_utf8_lossy(&output.stdout));
    match output.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&output.stderr).into()),
    }
}

/// Simulates the searches and prints their times and the peak memory so far.
pub(crate) fn side() -> Result<(), BenchError> {
    let lengths = || (0..5).map(|rung| UNITS_MAX >> (2 * rung));
    let curve = |number: u32| Curve {
        metrics: lengths().map(|units| (units, space::metric(number, units))).collect(),
        others: BTreeMap::new(),
        exit: None,
        seconds_per_unit: 1.0,
    };
    let curves: Vec<Curve> = (0..CURVES).map(curve).collect();
    for (name, stop_once) in [("promotion", false), ("stopping", true)] {
        let searcher = json!({"asyncHalving": {"maxTrials": 2, "numRungs": 5}});
        let mut config = space::config(&searcher, 1)?;
        config.method = Method::AsyncHalving(AsyncHalvingSearch {
            max_trials: TRIALS,
            num_rungs: 5,
            divisor: 4,
            max_concurrent_trials: 1_024,
            stop_once,
        });
        let machine = Machine { workers: 1_024, ..Machine::default() };
        let (begin, processor_time) = (Instant::now(), clock::processor_time()?);
        let curve_of = |trial: u32, _: &_| curves.get((trial % CURVES) as usize);
        let simulation = simulate(&config, machine, &mut no_searcher, curve_of)?;
        let processor_seconds = clock::processor_time()? - processor_time;
        let seconds = begin.elapsed().as_secs_f64();
        let mut rungs = BTreeMap::new();
        simulation.trials.iter().for_each(|trial| *rungs.entry(trial.units).or_insert(0) += 1);
        println!(
            "{name}: {seconds:.1} s, {processor_seconds:.1} s of processor time, {} decisions, \
             {:.2} us of processor time per decision, peak memory {:.2} GiB, trials by length \
             {rungs:?}",
            simulation.events.len(),
            processor_seconds * 1e6 / simulation.events.len() as f64,
            peak_gib()?,
        );
    }
    Ok(())
}

/// Returns the peak memory of this process.
fn peak_gib() -> Result<f64, BenchError> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB"));
    let kib: f64 = kib.ok_or("/proc/self/status has no VmHWM")?.trim().parse()?;
    Ok(kib / 1024.0 / 1024.0)
}

//! `stoker simulate`: runs a search on recorded learning curves, without training.

mod asker;
mod curves;

use std::path::PathBuf;

use serde_json::{Value, json};
use stoker_api::validate::ValidExperiment;
use stoker_engine::search::SearchConfig;
use stoker_engine::search::simulate::{
    Decision, Exit, Machine, Outcome, ParetoPoint, SimulateError, Simulation, simulate,
};
use stoker_engine::search::state::SearchState;
use stoker_engine::trial::config::experiment_seed;

use self::asker::Asker;
use self::curves::Curves;
use crate::cluster::text;
use crate::failure::Failure;
use crate::file;
use crate::print::{self, Output};

/// Replaces the run's UID if the file sets no seed; a real run samples other values.
const UID: &str = "simulate";
/// Maximum number of trials of the Pareto front in the text output, as in the status.
const PARETO_MAX: usize = 64;

/// Arguments of `stoker simulate`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Experiment file (YAML); its program does not run
    file: PathBuf,
    /// Learning curves, one JSON object per line: {"trial": 0, "units": 1, "metric": 0.5}
    #[arg(long, value_name = "FILE")]
    curves: PathBuf,
    /// Number of trials that train at the same time; 0 means as many as the search asks for
    #[arg(long, value_name = "N", default_value_t = 0)]
    workers: u32,
    /// Seconds until a new trial trains
    #[arg(long, value_name = "SECONDS", default_value_t = 0.0, value_parser = seconds)]
    start_seconds: f64,
    /// Seconds until a paused trial trains again
    #[arg(long, value_name = "SECONDS", default_value_t = 0.0, value_parser = seconds)]
    resume_seconds: f64,
    /// Train from the beginning instead of from a checkpoint whenever a trial continues
    #[arg(long)]
    from_scratch: bool,
    /// Number of simulations, each with the next seed
    #[arg(
        long,
        value_name = "K",
        default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    seeds: u32,
    /// Override a field of the file, such as searcher.asyncHalving.maxTrials=64; repeatable
    #[arg(long, value_name = "PATH=VALUE")]
    set: Vec<String>,
}

fn seconds(text: &str) -> Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|error| format!("{error}"))?;
    let is_valid = seconds.is_finite() && seconds >= 0.0;
    is_valid.then_some(seconds).ok_or_else(|| "must be a finite number of at least 0".to_owned())
}

/// Prints the result of each simulation. Returns the exit code.
pub(crate) fn run_simulations(args: &Args, output: Output) -> Result<u8, Failure> {
    let loaded = match file::load(&args.file, &args.set) {
        Ok(loaded) => loaded,
        Err(error) => return Ok(crate::validate::print_error(&error, output)),
    };
    let valid = &loaded.valid;
    let curves = Curves::read(&args.curves)?;
    note_missing(valid, &curves, args);
    let machine = Machine {
        workers: args.workers,
        start_seconds: args.start_seconds,
        resume_seconds: args.resume_seconds,
        is_from_scratch: args.from_scratch,
    };
    let first_seed = experiment_seed(valid, UID);
    for number in 0..args.seeds {
        let seed = first_seed.wrapping_add(number) & 0x7fff_ffff;
        let config = SearchConfig::new(valid, seed);
        let curve_of = |trial: u32, values: &Value| curves.find(number, trial, values);
        let mut asker = Asker::new(valid, &config)?;
        let mut ask =
            |search: &SearchState, question, tags: &[_]| asker.ask(search, question, tags);
        let simulation =
            simulate(&config, machine, &mut ask, curve_of).map_err(|error| match error {
                SimulateError::NoCurve { .. } | SimulateError::NoMetric { .. } => {
                    Failure::Input(format!("{}: seed {number}: {error}", args.curves.display()))
                }
                SimulateError::NoAnswer { .. } => {
                    Failure::System(format!("seed {number}: {error}"))
                }
            })?;
        match output {
            Output::Json => print::out(to_json(&simulation, (args.seeds > 1).then_some(number))),
            Output::Text => print_text(&simulation, (args.seeds > 1).then_some(number)),
        }
    }
    Ok(0)
}

/// Prints a note for each objective that no curve has.
fn note_missing(valid: &ValidExperiment, curves: &Curves, args: &Args) {
    for objective in valid.spec.searcher.other_objectives() {
        if !curves.has_other(&objective.metric) {
            let (metric, file) = (&objective.metric, args.curves.display());
            print::err(format!(
                "note: no line of {file} has the objective {metric}, so it ranks last in all \
                 results; add it to metrics"
            ));
        }
    }
}

fn outcome(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Completed => "completed",
        Outcome::Stopped => "stopped",
        Outcome::Exited(exit) => exit_name(exit),
    }
}

fn exit_name(exit: Exit) -> &'static str {
    match exit {
        Exit::Failed => "failed",
        Exit::Invalid => "invalid",
        Exit::Early => "early",
    }
}

fn decision(decision: Decision) -> &'static str {
    match decision {
        Decision::Continue => "continue",
        Decision::Complete => "complete",
        Decision::Stop => "stop",
        Decision::Pause => "pause",
        Decision::Exit(exit) => exit_name(exit),
    }
}

fn to_json(simulation: &Simulation, seed: Option<u32>) -> Value {
    let trials: Vec<Value> = (0..)
        .zip(&simulation.trials)
        .map(|(index, trial): (u32, _)| {
            json!({ "index": index, "units": trial.units, "outcome": outcome(trial.outcome) })
        })
        .collect();
    let events: Vec<Value> = simulation
        .events
        .iter()
        .map(|event| {
            json!({
                "time": event.time,
                "trial": event.trial,
                "units": event.units,
                "metric": event.metric,
                "decision": decision(event.decision),
            })
        })
        .collect();
    let best = simulation
        .best
        .map(|(trial, units, metric)| json!({ "trial": trial, "units": units, "metric": metric }));
    let mut value = json!({
        "units_total": simulation.units_total,
        "time_total": simulation.time_total,
        "trials": trials,
        "events": events,
        "best": best,
    });
    if let Some((limit, time)) = simulation.limit_reached {
        value["limit_reached"] = json!({ "limit": limit.name(), "time": time });
    }
    if let Some(front) = &simulation.pareto {
        let point = |point: &ParetoPoint| {
            let ParetoPoint { trial, units, values } = point;
            json!({ "trial": trial, "units": units, "values": values })
        };
        value["pareto"] = front.iter().map(point).collect();
    }
    if let Some(seed) = seed {
        value["seed"] = json!(seed);
    }
    value
}

fn print_text(simulation: &Simulation, seed: Option<u32>) {
    let mut counts: std::collections::BTreeMap<(u64, &str), u32> = Default::default();
    for trial in &simulation.trials {
        *counts.entry((trial.units, outcome(trial.outcome))).or_default() += 1;
    }
    let rows: Vec<Vec<String>> = counts
        .into_iter()
        .map(|((units, outcome), num)| vec![num.to_string(), units.to_string(), outcome.to_owned()])
        .collect();
    if let Some(seed) = seed {
        print::out(format!("seed {seed}"));
    }
    print::out(print::table(&["TRIALS", "UNITS", "OUTCOME"], &rows));
    let (units, time) = (simulation.units_total, simulation.time_total);
    print::out(format!("total: {units} units in {time} s"));
    if let Some((limit, time)) = simulation.limit_reached {
        print::out(format!("limit: {} reached at {time} s", limit.name()));
    }
    if let Some((trial, units, metric)) = simulation.best {
        print::out(format!("best: trial {trial} with {metric} at {units} units"));
    }
    let front: Vec<u32> = simulation.pareto.iter().flatten().map(|point| point.trial).collect();
    if !front.is_empty() {
        print::out(format!("Pareto front: {}", text::trials(&front, PARETO_MAX)));
    }
}

//! `stoker-bench trainer`: a training step against PyTorch, and our loop against a custom loop.

use std::path::{Path, PathBuf};
use std::process::Command;

use clap::{Args, ValueEnum};
use stoker_trainer::Result;

use crate::protocol::{Ready, Side, Steps};
use crate::rounds::{Comparison, median};
use crate::training::{LoopKind, Model};

/// Options of `trainer`.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// Turns of each side per process, after one warm-up turn
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Number of times that both sides are restarted. The memory layout can make one process slower
    /// than another for its whole run
    #[arg(long, default_value_t = 4)]
    lives: usize,
    /// Numbers of threads to benchmark
    #[arg(long, value_delimiter = ',', default_value = "1,2")]
    threads: Vec<usize>,
    /// Models to benchmark
    #[arg(long, value_delimiter = ',', default_value = "mlp,cnn,gpt")]
    models: Vec<Model>,
    /// Parts to run: a training step against PyTorch, and the whole loop against a custom loop
    #[arg(long, value_delimiter = ',', default_value = "step,loop")]
    parts: Vec<Part>,
    /// Steps of each side in one turn of `step`
    #[arg(long, default_value_t = 20)]
    steps: usize,
    /// Python with PyTorch, required for `step`
    #[arg(long)]
    python: Option<PathBuf>,
    /// Directory for the checkpoints and metrics of `loop` [default: a temporary directory]
    #[arg(long)]
    folder: Option<PathBuf>,
    /// Print one JSON value
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum Part {
    Step,
    Loop,
}

/// Program with PyTorch's models.
pub(crate) const TORCH_STEPS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/torch_steps.py");

/// Runs the benchmark and prints the results.
///
/// # Errors
///
/// A side failed or does not learn, or the models have different numbers of parameters.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let mut comparisons = vec![];
    for &part in &arguments.parts {
        if !arguments.json {
            println!("{}", heading(part));
        }
        for &threads in &arguments.threads {
            for &model in &arguments.models {
                let measured = match part {
                    Part::Step => vec![step(arguments, model, threads)?],
                    Part::Loop => whole_loop(arguments, model, threads)?,
                };
                if !arguments.json {
                    measured.iter().for_each(|comparison| println!("{comparison}"));
                }
                comparisons.extend(measured);
            }
        }
    }
    if arguments.json {
        println!("{}", serde_json::to_string_pretty(&comparisons)?);
    }
    Ok(())
}

fn heading(part: Part) -> String {
    let (what, theirs) = match part {
        Part::Step => ("ms per step", "PyTorch"),
        Part::Loop => ("ms per batch", "bare"),
    };
    format!("{what:<34} {:>10} {theirs:>10} {:>8}   over rounds", "Stoker", "ratio")
}

/// Benchmarks forward, loss, backward and optimizer step on a batch in memory.
fn step(arguments: &Arguments, model: Model, threads: usize) -> Result<Comparison> {
    let Some(python) = &arguments.python else {
        return Err("part step requires --python; `cargo xtask bench trainer` sets it".into());
    };
    let mut torch = Command::new(python);
    torch.args([TORCH_STEPS, &name(model), &threads.to_string()]);
    torch.env("OMP_NUM_THREADS", threads.to_string());
    let take = |steps: &Steps| {
        median(steps.nanoseconds.iter().map(|nanoseconds| *nanoseconds as f64).collect())
    };
    let mut rounds = vec![];
    for _ in 0..arguments.lives {
        let ours = start_side(LoopKind::Step, model, threads, Path::new("unused"))?;
        let theirs = Side::start("PyTorch", &mut torch)?;
        let sides = [ours, theirs];
        rounds.extend(alternate_turns(sides, arguments.steps, arguments.rounds, true, take)?);
    }
    let name = format!("step {}, threads {threads}", name(model));
    Ok(Comparison::new(name, &milliseconds(rounds)))
}

/// Benchmarks all of `Context::fit`: the median batch, and the mean batch, which includes the
/// turn's one checkpoint and its rows of metrics.
fn whole_loop(arguments: &Arguments, model: Model, threads: usize) -> Result<Vec<Comparison>> {
    let name = format!("{}, threads {threads}", name(model));
    let take = |steps: &Steps| {
        let nanoseconds: Vec<f64> = steps.nanoseconds.iter().map(|time| *time as f64).collect();
        (median(nanoseconds.clone()), nanoseconds.iter().sum::<f64>() / nanoseconds.len() as f64)
    };
    let mut rounds = vec![];
    for _ in 0..arguments.lives {
        let folder = match &arguments.folder {
            Some(folder) => tempfile::tempdir_in(folder)?,
            None => tempfile::tempdir()?,
        };
        let bare = start_side(LoopKind::Bare, model, threads, folder.path())?;
        let fit = start_side(LoopKind::Fit, model, threads, folder.path())?;
        let sides = [fit, bare];
        let steps = model.checkpoint_batches();
        rounds.extend(alternate_turns(sides, steps, arguments.rounds, false, take)?);
    }
    let medians: Vec<_> = rounds.iter().map(|(ours, theirs)| (ours.0, theirs.0)).collect();
    let means: Vec<_> = rounds.iter().map(|(ours, theirs)| (ours.1, theirs.1)).collect();
    Ok([("median", medians), ("mean", means)]
        .map(|(what, rounds)| {
            Comparison::new(format!("loop {name}, {what}"), &milliseconds(rounds))
        })
        .into())
}

fn milliseconds(rounds: Vec<(f64, f64)>) -> Vec<(f64, f64)> {
    rounds.into_iter().map(|(ours, theirs)| (ours / 1e6, theirs / 1e6)).collect()
}

fn start_side(way: LoopKind, model: Model, threads: usize, folder: &Path) -> Result<Side> {
    let way = way.to_possible_value().ok_or("the way has no name")?;
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["side", way.get_name(), &name(model), "--folder"]).arg(folder);
    command.env("RAYON_NUM_THREADS", threads.to_string());
    Side::start(way.get_name(), &mut command)
}

pub(crate) fn name(model: Model) -> String {
    model.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

/// Runs both sides in turns, and returns the result of `take` for both sides in each round. The
/// first side of a round alternates. Both sides must train the same number of parameters. With
/// `learns`, their losses must fall.
fn alternate_turns<T: Copy + Default>(
    mut sides: [Side; 2],
    steps: usize,
    rounds: usize,
    learns: bool,
    take: impl Fn(&Steps) -> T,
) -> Result<Vec<(T, T)>> {
    let mut parameters = vec![];
    for side in &mut sides {
        parameters.push(side.receive::<Ready>()?.parameters);
    }
    if parameters[0] != parameters[1] {
        return Err(format!("the models differ: {parameters:?} parameters").into());
    }
    let command = steps.to_string();
    let mut first = vec![];
    for side in &mut sides {
        first.push(side.request::<Steps>(&command)?.losses.0);
    }
    let mut all = vec![];
    let mut last = [0.0; 2];
    for round in 0..rounds {
        let mut taken = [T::default(); 2];
        for turn in [round % 2, (round + 1) % 2] {
            let steps: Steps = sides[turn].request(&command)?;
            taken[turn] = take(&steps);
            last[turn] = steps.losses.1;
        }
        all.push((taken[0], taken[1]));
    }
    let fell = first.iter().zip(last).all(|(first, last)| last < *first);
    if learns && !fell {
        return Err(format!("a loss did not fall: from {first:?} to {last:?}").into());
    }
    if learns {
        eprintln!("losses of Stoker and PyTorch fell from {first:.4?} to {last:.4?}");
    }
    Ok(all)
}

//! `stoker-bench trainer`: a training step against PyTorch and JAX, and our loop against a custom
//! loop.

use std::path::{Path, PathBuf};
use std::process::Command;

use clap::{Args, ValueEnum};
use stoker_api::names::ENV_DEVICE;
use stoker_trainer::Result;

use crate::limit;
use crate::protocol::{Ready, Side, Steps};
use crate::rounds::{Comparison, median};
use crate::training::{LoopKind, Model, Precision};

/// Options of `trainer`.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// Turns of each side per process, after one warm-up turn
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Number of times that all sides are restarted. The memory layout can make one process slower
    /// than another for its whole run
    #[arg(long, default_value_t = 4)]
    lives: usize,
    /// Numbers of threads to benchmark
    #[arg(long, value_delimiter = ',', default_value = "1,2")]
    threads: Vec<usize>,
    /// Models to benchmark
    #[arg(long, value_delimiter = ',', default_value = "mlp,cnn,gpt")]
    models: Vec<Model>,
    /// Device of `step`. With `cuda`, only the first value of `--threads` is used
    #[arg(long, default_value = "cpu")]
    device: DeviceKind,
    /// Precisions of `step`. Only `f32` on CPUs
    #[arg(long, value_delimiter = ',', default_value = "f32")]
    precisions: Vec<Precision>,
    /// Parts to run: a training step against PyTorch and JAX, and the loop against a custom loop
    #[arg(long, value_delimiter = ',', default_value = "step,loop")]
    parts: Vec<Part>,
    /// Steps of each side in one turn of `step`
    #[arg(long, default_value_t = 20)]
    steps: usize,
    /// Programs to compare a step with. `channels-last` applies to models of images [default: all
    /// on CPUs, `eager,compile` on GPUs]
    #[arg(long, value_delimiter = ',')]
    rivals: Vec<Rival>,
    /// Python with PyTorch. `cargo xtask bench` sets it
    #[arg(long)]
    python: Option<PathBuf>,
    /// Python with JAX. `cargo xtask bench` sets it for CPUs
    #[arg(long)]
    jax: Option<PathBuf>,
    /// Directory for the checkpoints and metrics of `loop` [default: a temporary directory]
    #[arg(long)]
    folder: Option<PathBuf>,
    /// Print one JSON value
    #[arg(long)]
    json: bool,
}

impl Arguments {
    /// Fails if the options exclude each other, or if a required path is not set.
    fn check(&self) -> Result<()> {
        let on_gpu = self.device == DeviceKind::Cuda;
        if on_gpu && self.parts != [Part::Step] {
            return Err("--device cuda requires --parts step".into());
        }
        if !on_gpu && self.precisions != [Precision::F32] {
            return Err("--precisions other than f32 require --device cuda".into());
        }
        if !self.parts.contains(&Part::Step) {
            return Ok(());
        }
        let rivals = self.rivals();
        let has_jax = rivals.contains(&Rival::Jax);
        if has_jax && on_gpu {
            return Err("--rivals jax requires --device cpu".into());
        }
        if has_jax && self.jax.is_none() {
            return Err("--rivals jax requires --jax, the path of a Python with JAX".into());
        }
        if rivals.iter().any(|rival| *rival != Rival::Jax) && self.python.is_none() {
            return Err("part step requires --python, the path of a Python with PyTorch".into());
        }
        Ok(())
    }

    fn rivals(&self) -> Vec<Rival> {
        match (self.rivals.is_empty(), self.device) {
            (false, _) => self.rivals.clone(),
            (true, DeviceKind::Cpu) => Rival::value_variants().to_vec(),
            (true, DeviceKind::Cuda) => vec![Rival::Eager, Rival::Compile],
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum Part {
    Step,
    Loop,
}

/// The device of a step.
#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum DeviceKind {
    Cpu,
    Cuda,
}

/// Settings that all sides of a step share.
#[derive(Clone, Copy, Debug)]
struct Setting {
    model: Model,
    threads: usize,
    device: DeviceKind,
    precision: Precision,
}

impl Setting {
    fn title(self) -> String {
        match self.device {
            DeviceKind::Cpu => format!("{}, threads {}", name(self.model), self.threads),
            DeviceKind::Cuda => format!("{}, {}", name(self.model), name(self.precision)),
        }
    }

    fn options(self) -> [String; 2] {
        [name(self.device), name(self.precision)]
    }
}

/// A program to compare a step with.
#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum Rival {
    /// PyTorch, operator by operator
    Eager,
    /// PyTorch with forward pass, loss and backward pass compiled by `torch.compile`
    Compile,
    /// PyTorch, operator by operator, with the channels of images last
    ChannelsLast,
    /// JAX with the whole step compiled by `jax.jit`
    Jax,
}

/// Program with PyTorch's models.
pub(crate) const TORCH_STEPS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/torch_steps.py");
/// Program with JAX's models.
const JAX_STEPS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/jax_steps.py");

/// Runs the benchmark and prints the results.
///
/// # Errors
///
/// A side failed or does not learn, or the models have different numbers of parameters.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    arguments.check()?;
    let threads = match arguments.device {
        DeviceKind::Cpu => &arguments.threads[..],
        DeviceKind::Cuda => &arguments.threads[..1],
    };
    let mut comparisons = vec![];
    for &part in &arguments.parts {
        if !arguments.json {
            println!("{}", heading(part));
        }
        for (&threads, &precision) in pairs(threads, &arguments.precisions) {
            let gflops = match part {
                Part::Step => best_rate(arguments, threads, precision)?,
                Part::Loop => 0.0,
            };
            for &model in &arguments.models {
                let setting = Setting { model, threads, device: arguments.device, precision };
                let measured = match part {
                    Part::Step => step(arguments, setting, gflops)?,
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

/// Returns all pairs of an element of each slice.
fn pairs<'a, A, B>(first: &'a [A], second: &'a [B]) -> impl Iterator<Item = (&'a A, &'a B)> {
    first.iter().flat_map(move |a| second.iter().map(move |b| (a, b)))
}

fn heading(part: Part) -> String {
    let (what, theirs) = match part {
        Part::Step => ("ms per step", "theirs"),
        Part::Loop => ("ms per batch", "bare"),
    };
    format!("{what:<34} {:>10} {theirs:>10} {:>8}   over rounds", "Stoker", "ratio")
}

/// Returns the rate of the fastest matrix product of all programs, in 1e9 operations per second.
///
/// JAX measures products only on CPUs.
fn best_rate(arguments: &Arguments, threads: usize, precision: Precision) -> Result<f64> {
    let on_gpu = arguments.device == DeviceKind::Cuda;
    let own = std::env::current_exe()?;
    let mut programs = vec![];
    let words = |script: &str| [script, "product", &threads.to_string()].map(str::to_owned);
    if let Some(python) = &arguments.python {
        let mut words = words(TORCH_STEPS).to_vec();
        words.extend([name(Rival::Eager), name(arguments.device), name(precision)]);
        programs.push((python.as_path(), words));
    }
    let own_words = ["product-side", "--precision", &name(precision)].map(str::to_owned);
    programs.push((own.as_path(), own_words.into()));
    if !on_gpu {
        let jax = arguments.jax.iter().map(|python| (python.as_path(), words(JAX_STEPS).into()));
        programs.extend(jax);
    }
    let gflops = limit::best_rate(programs, threads, &name(arguments.device))?;
    let device = match arguments.device {
        DeviceKind::Cpu => format!("{threads} threads"),
        DeviceKind::Cuda => format!("the GPU in {}", name(precision)),
    };
    eprintln!("the fastest matrix product on {device}: {gflops:.0} GFLOP/s");
    Ok(gflops)
}

fn start_rival(arguments: &Arguments, rival: Rival, setting: Setting) -> Result<Side> {
    let (python, script) = match rival {
        Rival::Jax => (&arguments.jax, JAX_STEPS),
        Rival::Eager | Rival::Compile | Rival::ChannelsLast => (&arguments.python, TORCH_STEPS),
    };
    let python = python.as_ref().ok_or("a rival without Python")?;
    let mut command = Command::new(python);
    let threads = setting.threads.to_string();
    command.args([script, &name(setting.model), &threads, &name(rival)]).args(setting.options());
    command.env("OMP_NUM_THREADS", threads);
    Side::start(&name(rival), &mut command)
}

/// Benchmarks forward, loss, backward and optimizer step on a batch in memory, and the peak memory
/// of the processes on the CPU. `gflops` is the rate of the fastest matrix product.
fn step(arguments: &Arguments, setting: Setting, gflops: f64) -> Result<Vec<Comparison>> {
    let Setting { model, threads, device, precision } = setting;
    let mut rivals = arguments.rivals();
    rivals.retain(|rival| match rival {
        Rival::ChannelsLast => model == Model::Cnn,
        Rival::Jax => model != Model::Gpt768,
        Rival::Eager | Rival::Compile => true,
    });
    let take = |steps: &Steps| {
        median(steps.nanoseconds.iter().map(|nanoseconds| *nanoseconds as f64 / 1e6).collect())
    };
    let (mut rounds, mut peaks) = (vec![], vec![]);
    for _ in 0..arguments.lives {
        if threads > 1 && device == DeviceKind::Cpu {
            let time = limit::round_trip().map(|time| format!("{time:.0} ns"));
            let time = time.unwrap_or_else(|| "unknown, both ran on one processor".to_owned());
            eprintln!("round trip between two threads: {time}");
        }
        let mut ours = side_command(LoopKind::Step, model, threads, Path::new("unused"))?;
        ours.args(["--precision", &name(precision)]).env(ENV_DEVICE, name(device));
        let mut sides = vec![Side::start("Stoker", &mut ours)?];
        for rival in &rivals {
            sides.push(start_rival(arguments, *rival, setting)?);
        }
        rounds.extend(take_turns(&mut sides, arguments.steps, arguments.rounds, true, take)?);
        peaks.push(sides.iter().map(Side::peak_mib).collect::<Result<Vec<_>>>()?);
    }
    let title = setting.title();
    let against = |measured: &[Vec<f64>], side: usize| -> Vec<_> {
        measured.iter().map(|sides| (sides[0], sides[side])).collect()
    };
    let mut comparisons = vec![];
    for (what, measured) in [("step", &rounds), ("MiB", &peaks)] {
        for (side, rival) in (1..).zip(&rivals) {
            let name = format!("{what} {title}, {}", name(*rival));
            comparisons.push(Comparison::new(name, &against(measured, side)));
        }
    }
    let limit = model.flops() / gflops / 1e6;
    let to_limit: Vec<_> = rounds.iter().map(|sides| (sides[0], limit)).collect();
    comparisons.insert(rivals.len(), Comparison::new(format!("step {title}, limit"), &to_limit));
    Ok(comparisons)
}

/// Benchmarks all of `Context::fit`: the median batch, and the mean batch, which includes the
/// turn's one checkpoint and its rows of metrics.
fn whole_loop(arguments: &Arguments, model: Model, threads: usize) -> Result<Vec<Comparison>> {
    let title = format!("{}, threads {threads}", name(model));
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
        let start = |way| {
            let mut command = side_command(way, model, threads, folder.path())?;
            Side::start(&name(way), &mut command)
        };
        let (bare, fit) = (start(LoopKind::Bare)?, start(LoopKind::Fit)?);
        let steps = model.checkpoint_batches();
        rounds.extend(take_turns(&mut [fit, bare], steps, arguments.rounds, false, take)?);
    }
    let medians: Vec<_> = rounds.iter().map(|sides| (sides[0].0, sides[1].0)).collect();
    let means: Vec<_> = rounds.iter().map(|sides| (sides[0].1, sides[1].1)).collect();
    Ok([("median", medians), ("mean", means)]
        .map(|(what, rounds)| {
            Comparison::new(format!("loop {title}, {what}"), &milliseconds(rounds))
        })
        .into())
}

fn milliseconds(rounds: Vec<(f64, f64)>) -> Vec<(f64, f64)> {
    rounds.into_iter().map(|(ours, theirs)| (ours / 1e6, theirs / 1e6)).collect()
}

fn side_command(way: LoopKind, model: Model, threads: usize, folder: &Path) -> Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["side", &name(way), &name(model), "--folder"]).arg(folder);
    command.env("RAYON_NUM_THREADS", threads.to_string()).env(ENV_DEVICE, "cpu");
    Ok(command)
}

/// Returns the name of a value on the command line.
pub(crate) fn name(value: impl ValueEnum) -> String {
    value.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

/// Runs all sides in turns, and returns the result of `take` for each side in each round. The first
/// side changes from round to round. All sides must train the same number of parameters. With
/// `learns`, their losses must fall.
fn take_turns<T: Copy + Default>(
    sides: &mut [Side],
    steps: usize,
    rounds: usize,
    learns: bool,
    take: impl Fn(&Steps) -> T,
) -> Result<Vec<Vec<T>>> {
    let mut parameters = vec![];
    for side in &mut *sides {
        parameters.push(side.receive::<Ready>()?.parameters);
    }
    if parameters.iter().any(|number| *number != parameters[0]) {
        return Err(format!("the models differ: {parameters:?} parameters").into());
    }
    let command = steps.to_string();
    let mut first = vec![];
    for side in &mut *sides {
        first.push(side.request::<Steps>(&command)?.losses.0);
    }
    let mut all = vec![];
    let mut last = vec![0.0; sides.len()];
    for round in 0..rounds {
        let mut taken = vec![T::default(); sides.len()];
        let num = sides.len();
        for turn in (0..num).map(|turn| (round + turn) % num) {
            let steps: Steps = sides[turn].request(&command)?;
            taken[turn] = take(&steps);
            last[turn] = steps.losses.1;
        }
        all.push(taken);
    }
    let fell = first.iter().zip(&last).all(|(first, last)| last < first);
    if learns && !fell {
        return Err(format!("a loss did not fall: from {first:?} to {last:?}").into());
    }
    if learns {
        eprintln!("losses of all sides fell from {first:.4?} to {last:.4?}");
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        arguments: Arguments,
    }

    #[test]
    fn options_that_exclude_each_other_are_named() {
        let check = |options: &str, expected: Option<&str>| {
            let words = ["bench"].into_iter().chain(options.split_whitespace());
            let arguments = Cli::try_parse_from(words).unwrap().arguments;
            let refused = arguments.check().map_err(|error| error.to_string());
            match expected {
                None => assert_eq!(refused, Ok(()), "{options}"),
                Some(expected) => assert!(refused.unwrap_err().contains(expected), "{options}"),
            }
        };
        check("--python p --jax j", None);
        check("--python p", Some("--rivals jax requires --jax"));
        check("--jax j", Some("part step requires --python"));
        check("--python p --rivals eager", None);
        check("--parts loop", None);
        check("--python p --device cuda --parts step", None);
        check("--python p --device cuda", Some("requires --parts step"));
        check("--device cuda --parts step --rivals jax", Some("requires --device cpu"));
        check("--jax j --precisions bf16", Some("require --device cuda"));
    }
}

//! `stoker-bench collective`: all-reduce against PyTorch's gloo, and its cost in training.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};
use stoker_api::names::ENV_DEVICE;
use stoker_trainer::{Distributed, Result};

use crate::protocol::{self, Ready, Side, Steps};
use crate::rounds::{Comparison, alternate, median};
use crate::trainer::{TORCH_STEPS, name};
use crate::training::Model;

/// Options of `collective`.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// Turns of each side, after one warm-up turn
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// World sizes of part `sum`
    #[arg(long, value_delimiter = ',', default_value = "2,4")]
    ranks: Vec<usize>,
    /// Buffer sizes of part `sum`, in KiB
    #[arg(long, value_delimiter = ',', default_value = "1,16,256,1024,4096,16384,65536,262144")]
    kib: Vec<usize>,
    /// Models of part `train`
    #[arg(long, value_delimiter = ',', default_value = "mlp,cnn,gpt")]
    models: Vec<Model>,
    /// Parts to run: successive all-reduces, and training on two ranks
    #[arg(long, value_delimiter = ',', default_value = "sum,train")]
    parts: Vec<Part>,
    /// Number of steps in a turn of part `train`
    #[arg(long, default_value_t = 30)]
    steps: usize,
    /// Python with PyTorch
    #[arg(long)]
    python: Option<PathBuf>,
    /// Print one JSON value
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum Part {
    Sum,
    Train,
}

/// Program with PyTorch's all-reduce.
const TORCH_SUMS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/torch_collective.py");
/// Number of bytes to all-reduce in a turn. It determines the number of repetitions, at least 3.
const TURN_BYTES: usize = 256 << 20;
/// Maximum number of all-reduces in a turn.
const TIMES_MAX: usize = 300;

/// Runs the benchmark and prints the results.
///
/// # Errors
///
/// A side failed.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let python = arguments.python.as_deref();
    let python =
        python.ok_or("this benchmark requires --python; `cargo xtask bench collective` sets it")?;
    let mut comparisons = vec![];
    let mut report = |heading: &str, measured: Vec<Comparison>| {
        if !arguments.json {
            println!(
                "{heading:<34} {:>10} {:>10} {:>8}   over rounds",
                "Stoker", "PyTorch", "ratio"
            );
            measured.iter().for_each(|comparison| println!("{comparison}"));
        }
        comparisons.extend(measured);
    };
    if arguments.parts.contains(&Part::Sum) {
        for &ranks in &arguments.ranks {
            report("µs per all-reduce", sums(arguments, python, ranks)?);
        }
    }
    if arguments.parts.contains(&Part::Train) {
        for &model in &arguments.models {
            report("two ranks with one thread each", train(arguments, python, model)?);
        }
    }
    if arguments.json {
        println!("{}", serde_json::to_string_pretty(&comparisons)?);
    }
    Ok(())
}

/// The ranks of one side. Only rank 0 receives commands; the other ranks follow it.
struct Gang {
    first: Side,
    others: Vec<Child>,
}

impl Drop for Gang {
    fn drop(&mut self) {
        // Kill rank 0 too: a rank that outlives the others would report them as lost.
        self.first.kill();
        for other in &mut self.others {
            let _ = other.kill();
            let _ = other.wait();
        }
    }
}

impl Gang {
    fn start(name: &str, size: usize, make: impl Fn() -> Result<Command>) -> Result<Self> {
        let [port] = stoker_test_cluster::free_ports()?;
        let port = port.to_string();
        let ranked = |rank: usize| -> Result<Command> {
            let mut command = make()?;
            let (rank, size) = (rank.to_string(), size.to_string());
            let variables = [
                ("RANK", &*rank),
                ("WORLD_SIZE", &size),
                ("LOCAL_RANK", &rank),
                ("LOCAL_WORLD_SIZE", &size),
                ("GROUP_RANK", "0"),
                ("GROUP_WORLD_SIZE", "1"),
                ("MASTER_ADDR", "127.0.0.1"),
                ("MASTER_PORT", &port),
            ];
            command.envs(variables);
            Ok(command)
        };
        let mut others = vec![];
        for rank in 1..size {
            let mut command = ranked(rank)?;
            // Discard the output: these ranks end with rank 0 and report a lost connection.
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            others.push(command.spawn()?);
        }
        Ok(Self { first: Side::start(name, &mut ranked(0)?)?, others })
    }
}

/// Times of the all-reduces in one turn.
#[derive(Debug, Deserialize, Serialize)]
struct Times {
    nanoseconds: Vec<u64>,
}

fn sums(arguments: &Arguments, python: &Path, size: usize) -> Result<Vec<Comparison>> {
    let mut ours = Gang::start("Stoker", size, || {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("sum-side");
        Ok(command)
    })?;
    let mut theirs = Gang::start("PyTorch", size, || {
        let mut command = Command::new(python);
        command.arg(TORCH_SUMS).env("OMP_NUM_THREADS", "1");
        Ok(command)
    })?;
    let mut comparisons = vec![];
    for kib in &arguments.kib {
        let num_bytes = kib << 10;
        let times = (TURN_BYTES / num_bytes).clamp(3, TIMES_MAX);
        let command = format!("{num_bytes} {times}");
        let take = |side: &mut Gang| -> Result<f64> {
            let times: Times = side.first.request(&command)?;
            Ok(median(times.nanoseconds.iter().map(|time| *time as f64 / 1e3).collect()))
        };
        let rounds = alternate(arguments.rounds, || take(&mut ours), || take(&mut theirs))?;
        comparisons.push(Comparison::new(format!("{size} ranks, {kib} KiB"), &rounds));
    }
    Ok(comparisons)
}

/// Runs one rank of our side of part `sum`.
///
/// # Errors
///
/// The connection to other ranks is lost, or a command is invalid.
pub(crate) fn side() -> Result<()> {
    let ranks = Distributed::from_environment()?;
    loop {
        let command = if ranks.rank() == 0 { protocol::next_command()? } else { None };
        let Some(command) = ranks.broadcast(command)? else { return Ok(()) };
        let (num_bytes, times) =
            command.split_once(' ').ok_or("the command must be BYTES TIMES")?;
        let mut values = vec![1.0_f32; num_bytes.parse::<usize>()? / size_of::<f32>()];
        let mut nanoseconds = vec![];
        for _ in 0..times.parse()? {
            ranks.barrier()?;
            let begin = Instant::now();
            ranks.collective().sum_f32(&mut values)?;
            nanoseconds.push(begin.elapsed().as_nanos() as u64);
        }
        if ranks.rank() == 0 {
            protocol::respond(&Times { nanoseconds })?;
        }
    }
}

/// Benchmarks a training step on two ranks. Also measures the step in two independent processes
/// that run at the same time. The difference is the cost of the all-reduce.
fn train(arguments: &Arguments, python: &Path, model: Model) -> Result<Vec<Comparison>> {
    let ours = || -> Result<Command> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["side", "step", &name(model), "--folder", "unused"]);
        command.env("RAYON_NUM_THREADS", "1").env(ENV_DEVICE, "cpu");
        Ok(command)
    };
    let theirs = || -> Result<Command> {
        let mut command = Command::new(python);
        command.args([TORCH_STEPS, &name(model), "1"]).env("OMP_NUM_THREADS", "1");
        Ok(command)
    };
    let mut together = [Gang::start("Stoker", 2, ours)?, Gang::start("PyTorch", 2, theirs)?];
    let alone = |make: &dyn Fn() -> Result<Command>, name: &str| -> Result<[Side; 2]> {
        Ok([Side::start(name, &mut make()?)?, Side::start(name, &mut make()?)?])
    };
    let mut apart = [alone(&ours, "Stoker")?, alone(&theirs, "PyTorch")?];
    for side in &mut together {
        side.first.receive::<Ready>()?;
    }
    for side in apart.iter_mut().flatten() {
        side.receive::<Ready>()?;
    }
    let command = arguments.steps.to_string();
    let milliseconds =
        |steps: &Steps| median(steps.nanoseconds.iter().map(|time| *time as f64 / 1e6).collect());
    let mut times = [vec![], vec![]];
    for round in 0..=arguments.rounds {
        for turn in [round % 2, (round + 1) % 2] {
            let with = milliseconds(&together[turn].first.request::<Steps>(&command)?);
            let [first, second] = &mut apart[turn];
            first.send(&command)?;
            second.send(&command)?;
            let both = [milliseconds(&first.receive()?), milliseconds(&second.receive()?)];
            // The first round is the warm-up.
            if round > 0 {
                times[turn].push((with, both[0].max(both[1])));
            }
        }
    }
    let [ours, theirs] = &times;
    let pairs = |of: fn(&(f64, f64)) -> f64| -> Vec<(f64, f64)> {
        ours.iter().zip(theirs).map(|(ours, theirs)| (of(ours), of(theirs))).collect()
    };
    let name = name(model);
    Ok(vec![
        Comparison::new(format!("{name}: ms per step, together"), &pairs(|(with, _)| *with)),
        Comparison::new(format!("{name}: ms per step, apart"), &pairs(|(_, apart)| *apart)),
        Comparison::new(format!("{name}: ms cost of ranks"), &pairs(|(with, apart)| with - apart)),
        Comparison::new(
            format!("{name}: apart over together"),
            &pairs(|(with, apart)| apart / with),
        ),
    ])
}

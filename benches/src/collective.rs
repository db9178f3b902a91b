//! `stoker-bench collective`: sums over ranks against PyTorch's gloo, and what they cost a training.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};
use stoker_trainer::{Distributed, Result};

use crate::orders::{self, Ready, Side, Steps};
use crate::rounds::{Comparison, median};
use crate::trainer::{TORCH_STEPS, name};
use crate::training::Model;

/// What `collective` measures.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// Turns of each side, after one to warm up
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Numbers of ranks of `sum`
    #[arg(long, value_delimiter = ',', default_value = "2,4")]
    ranks: Vec<usize>,
    /// Sizes of `sum` in KiB
    #[arg(long, value_delimiter = ',', default_value = "1,16,256,1024,4096,16384,65536,262144")]
    kib: Vec<usize>,
    /// The models of `train`
    #[arg(long, value_delimiter = ',', default_value = "mlp,cnn,gpt")]
    models: Vec<Model>,
    /// The parts: one sum after the other, and training on two ranks
    #[arg(long, value_delimiter = ',', default_value = "sum,train")]
    parts: Vec<Part>,
    /// Steps of a side in one turn of `train`
    #[arg(long, default_value_t = 30)]
    steps: usize,
    /// The Python that has PyTorch
    #[arg(long)]
    python: Option<PathBuf>,
    /// Prints one JSON value
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum Part {
    Sum,
    Train,
}

/// The program that has PyTorch's sums.
const TORCH_SUMS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/torch_collective.py");
/// Bytes that a turn of sums moves, about: small ones are repeated.
const TURN_BYTES: usize = 256 << 20;
/// Sums of a turn at most.
const TIMES_MAX: usize = 300;

/// Measures and prints.
///
/// # Errors
///
/// A side failed.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let python = arguments.python.as_deref();
    let python = python.ok_or("it needs --python; `cargo xtask bench collective` gives it")?;
    let mut comparisons = vec![];
    let mut tell = |heading: &str, measured: Vec<Comparison>| {
        if !arguments.json {
            println!(
                "{heading:<34} {:>10} {:>10} {:>8}   over rounds",
                "Stoker", "PyTorch", "ratio"
            );
            measured.iter().for_each(|it| println!("{it}"));
        }
        comparisons.extend(measured);
    };
    if arguments.parts.contains(&Part::Sum) {
        for &ranks in &arguments.ranks {
            tell("microseconds of a sum", sums(arguments, python, ranks)?);
        }
    }
    if arguments.parts.contains(&Part::Train) {
        for &model in &arguments.models {
            tell("two ranks of one thread", train(arguments, python, model)?);
        }
    }
    if arguments.json {
        println!("{}", serde_json::to_string_pretty(&comparisons)?);
    }
    Ok(())
}

/// One side: rank 0, and the other ranks, which do as it does.
struct Gang {
    first: Side,
    others: Vec<Child>,
}

impl Drop for Gang {
    fn drop(&mut self) {
        // They would say of each other that they are gone.
        self.first.kill();
        for other in &mut self.others {
            let _ = other.kill();
            let _ = other.wait();
        }
    }
}

impl Gang {
    fn start(name: &str, size: usize, make: impl Fn() -> Result<Command>) -> Result<Self> {
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port().to_string();
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
            // They end when rank 0 does, and say so.
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            others.push(command.spawn()?);
        }
        Ok(Self { first: Side::start(name, &mut ranked(0)?)?, others })
    }
}

/// The times of one turn of sums.
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
        let order = format!("{num_bytes} {times}");
        let take = |side: &mut Gang| -> Result<f64> {
            let times: Times = side.first.ask(&order)?;
            Ok(median(times.nanoseconds.iter().map(|it| *it as f64 / 1e3).collect()))
        };
        take(&mut ours)?;
        take(&mut theirs)?;
        let mut rounds = vec![];
        for round in 0..arguments.rounds {
            rounds.push(if round % 2 == 0 {
                (take(&mut ours)?, take(&mut theirs)?)
            } else {
                let theirs = take(&mut theirs)?;
                (take(&mut ours)?, theirs)
            });
        }
        comparisons.push(Comparison::new(format!("{size} ranks, {kib} KiB"), &rounds));
    }
    Ok(comparisons)
}

/// A rank that adds up.
///
/// # Errors
///
/// The other ranks are gone, or an order makes no sense.
pub(crate) fn side() -> Result<()> {
    let ranks = Distributed::from_environment()?;
    loop {
        let order = if ranks.rank() == 0 { orders::next()? } else { None };
        let Some(order) = ranks.broadcast(order)? else { return Ok(()) };
        let (num_bytes, times) = order.split_once(' ').ok_or("an order is BYTES TIMES")?;
        let mut values = vec![1.0_f32; num_bytes.parse::<usize>()? / size_of::<f32>()];
        let mut nanoseconds = vec![];
        for _ in 0..times.parse()? {
            ranks.barrier()?;
            let begin = Instant::now();
            ranks.collective().sum_f32(&mut values)?;
            nanoseconds.push(begin.elapsed().as_nanos() as u64);
        }
        if ranks.rank() == 0 {
            orders::answer(&Times { nanoseconds })?;
        }
    }
}

/// Milliseconds of a step on two ranks that train together, and of two that train at the same time and
/// alone: what two busy cores allow.
fn train(arguments: &Arguments, python: &Path, model: Model) -> Result<Vec<Comparison>> {
    let ours = || -> Result<Command> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["side", "step", &name(model), "--folder", "unused"]);
        command.env("RAYON_NUM_THREADS", "1");
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
        side.first.hear::<Ready>()?;
    }
    for side in apart.iter_mut().flatten() {
        side.hear::<Ready>()?;
    }
    let order = arguments.steps.to_string();
    let milliseconds =
        |steps: &Steps| median(steps.nanoseconds.iter().map(|it| *it as f64 / 1e6).collect());
    let mut times = [vec![], vec![]];
    for round in 0..=arguments.rounds {
        for turn in [round % 2, (round + 1) % 2] {
            let with = milliseconds(&together[turn].first.ask::<Steps>(&order)?);
            let [first, second] = &mut apart[turn];
            first.order(&order)?;
            second.order(&order)?;
            let both = [milliseconds(&first.hear()?), milliseconds(&second.hear()?)];
            // The first round is to warm up.
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
        Comparison::new(format!("{name}: ms of a step, together"), &pairs(|it| it.0)),
        Comparison::new(format!("{name}: ms of a step, apart"), &pairs(|it| it.1)),
        Comparison::new(format!("{name}: ms that ranks cost"), &pairs(|it| it.0 - it.1)),
        Comparison::new(format!("{name}: apart over together"), &pairs(|it| it.1 / it.0)),
    ])
}

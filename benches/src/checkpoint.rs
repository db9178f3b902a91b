//! `stoker-bench checkpoint`: saving and restoring against safetensors and torch.save.

use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;
use stoker_trainer::Result;

use crate::protocol::Side;
use crate::rounds::{Comparison, median};
use crate::saving::OperationTimes;

/// Options of `checkpoint`.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// Turns of each side, after one warm-up turn
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// Python with PyTorch and safetensors
    #[arg(long)]
    python: PathBuf,
    /// Number of layers of 64 MiB. Both sides together need five times their size of memory
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..))]
    layers: u16,
    /// Directory for all files [default: a temporary directory]
    #[arg(long)]
    folder: Option<PathBuf>,
    /// Print one JSON value
    #[arg(long)]
    json: bool,
}

/// Program of the other side.
const TORCH_FILES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/torch_files.py");
/// Size of the parameters of a layer in MiB.
const LAYER_MEBIBYTES: f64 = 64.0;
/// Pairs of operations to compare: ours and theirs. `blocked` is the part of our `save` that blocks
/// the training loop. `save-sync` also syncs the file to disk, as our `save` does.
const PAIRS: [(&str, &str); 10] = [
    ("save", "save safetensors"),
    ("save", "save-sync safetensors"),
    ("save", "save torch"),
    ("save", "save-sync torch"),
    ("blocked", "save safetensors"),
    ("blocked", "save torch"),
    ("restore", "restore safetensors"),
    ("restore", "restore torch"),
    ("load", "restore safetensors"),
    ("load", "restore torch"),
];

/// Runs the benchmark and prints the results.
///
/// # Errors
///
/// A side failed, or restored weights that differ from the saved ones.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let folder = match &arguments.folder {
        Some(folder) => tempfile::tempdir_in(folder)?,
        None => tempfile::tempdir()?,
    };
    let mut sides = Sides::start(arguments, folder.path())?;
    let _ = sides.round()?;
    let rounds: Vec<Round> = (0..arguments.rounds).map(|_| sides.round()).collect::<Result<_>>()?;
    let comparisons = compare(&rounds, f64::from(arguments.layers) * LAYER_MEBIBYTES)?;
    if arguments.json {
        println!("{}", serde_json::to_string_pretty(&comparisons)?);
        return Ok(());
    }
    println!("{:<34} {:>10} {:>10} {:>8}   over rounds", "MiB/s", "Stoker", "other", "ratio");
    for comparison in comparisons {
        println!("{comparison}");
    }
    let share = |round: &Round| Some(seconds(round, "blocked")? / seconds(round, "save")?);
    let share = 100.0 * median(rounds.iter().filter_map(share).collect());
    println!("the loop is blocked for {share:.2} % of a save");
    Ok(())
}

/// Seconds of each operation, measured once.
type Round = Vec<(&'static str, f64)>;

fn seconds(round: &Round, done: &str) -> Option<f64> {
    round.iter().find(|(name, _)| *name == done).map(|(_, seconds)| *seconds)
}

fn compare(rounds: &[Round], mebibytes: f64) -> Result<Vec<Comparison>> {
    let mut comparisons = vec![];
    for (ours, theirs) in PAIRS {
        let rate = |round: &Round, done| seconds(round, done).map(|seconds| mebibytes / seconds);
        let rates: Option<Vec<(f64, f64)>> =
            rounds.iter().map(|round| Some((rate(round, ours)?, rate(round, theirs)?))).collect();
        let rates = rates.ok_or_else(|| format!("{ours} or {theirs} was not measured"))?;
        comparisons.push(Comparison::new(format!("{ours} / {theirs}"), &rates));
    }
    Ok(comparisons)
}

/// The processes of both sides. They take turns, because they use the same disk.
struct Sides {
    ours: Side,
    theirs: Side,
}

impl Sides {
    fn start(arguments: &Arguments, folder: &Path) -> Result<Self> {
        let layers = arguments.layers.to_string();
        let mut ours = Command::new(std::env::current_exe()?);
        ours.args(["save-side", "--layers", &layers, "--folder"]).arg(folder);
        let mut theirs = Command::new(&arguments.python);
        theirs.arg(TORCH_FILES).arg(folder).arg(&layers);
        let (ours, theirs) =
            (Side::start("Stoker", &mut ours)?, Side::start("PyTorch", &mut theirs)?);
        Ok(Self { ours, theirs })
    }

    /// Runs each operation once.
    fn round(&mut self) -> Result<Round> {
        let mut round = vec![];
        for command in ["save", "restore", "load"] {
            let times: OperationTimes = self.ours.request(command)?;
            round.push((command, times.seconds));
            round.extend(times.blocked.map(|blocked| ("blocked", blocked)));
        }
        for (_, command) in PAIRS {
            if seconds(&round, command).is_none() {
                round.push((command, self.theirs.request::<OperationTimes>(command)?.seconds));
            }
        }
        Ok(round)
    }
}

//! `stoker-bench data`: pictures from files against PyTorch's DataLoader, and a training that they feed.

use std::path::{Path, PathBuf};
use std::process::Command;

use clap::{Args, ValueEnum};
use stoker_trainer::Result;
use stoker_trainer::datasets::Cache;

use crate::loading::{BATCH, Feed, Found, Loaded, Moments};
use crate::orders::{Ready, Side, Steps};
use crate::pictures::{Format, Way};
use crate::rounds::{Comparison, median};

/// What `data` measures.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// Turns of each side, after one to warm up
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// Numbers of workers to measure with
    #[arg(long, value_delimiter = ',', default_value = "1,2")]
    workers: Vec<usize>,
    /// The formats of files
    #[arg(long, value_delimiter = ',', default_value = "jpg,png")]
    formats: Vec<Format>,
    /// How our batches are made
    #[arg(long, value_delimiter = ',', default_value = "stream,source")]
    ways: Vec<Way>,
    /// What decodes on the other side
    #[arg(long, value_delimiter = ',', default_value = "pil,torchvision")]
    decoders: Vec<Decoder>,
    /// The parts: batches alone, and a training's steps with files and with memory
    #[arg(long, value_delimiter = ',', default_value = "load,feed")]
    parts: Vec<Part>,
    /// Batches of 32 of a side in one turn
    #[arg(long, default_value_t = 48)]
    batches: usize,
    /// The Python that has PyTorch, torchvision and Pillow
    #[arg(long)]
    python: PathBuf,
    /// The pictures' folder, filled if there is none [default: in Stoker's cache]
    #[arg(long)]
    folder: Option<PathBuf>,
    /// Prints one JSON value
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum Part {
    Load,
    Feed,
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum Decoder {
    /// Pillow, as PyTorch's tutorials read pictures
    Pil,
    /// torchvision's own, from bytes to tensors
    Torchvision,
}

/// The program of the others.
const TORCH_DATA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/torch_data.py");
/// The folder in the cache; another name where other pictures are made.
const FOLDER: &str = "bench-pictures-1";
/// Pictures, each in both formats.
const PICTURES: usize = 2048;
/// Pictures that both sides must decode alike, and by how much their means may differ: decoders of JPEG
/// round in their own ways, by one of 255 levels.
const CHECKED: usize = 16;
const MOMENTS_APART_MAX: f64 = 0.01;

/// Measures and prints.
///
/// # Errors
///
/// A side failed, or the sides do not decode alike.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let folder = match &arguments.folder {
        Some(folder) => folder.clone(),
        None => Cache::standard()?.folder().join(FOLDER),
    };
    make_pictures(&arguments.python, &folder)?;
    let mut comparisons = vec![];
    for &part in &arguments.parts {
        if !arguments.json {
            println!("{}", heading(part));
        }
        for &format in &arguments.formats {
            for &workers in &arguments.workers {
                let measured = match part {
                    Part::Load => loads(arguments, &folder, format, workers)?,
                    Part::Feed => vec![feeds(arguments, &folder, format, workers)?],
                };
                if !arguments.json {
                    measured.iter().for_each(|it| println!("{it}"));
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
    let (what, ours, theirs) = match part {
        Part::Load => ("pictures a second", "Stoker", "PyTorch"),
        Part::Feed => ("milliseconds of a batch, 1 thread", "files", "memory"),
    };
    format!("{what:<34} {ours:>10} {theirs:>10} {:>8}   over rounds", "ratio")
}

/// Fills the folder, whole or not at all.
fn make_pictures(python: &Path, folder: &Path) -> Result<()> {
    if folder.exists() {
        return Ok(());
    }
    eprintln!("making {PICTURES} pictures in {} (once)", folder.display());
    let parent = folder.parent().ok_or("the pictures' folder has no parent")?;
    std::fs::create_dir_all(parent)?;
    let made = tempfile::tempdir_in(parent)?;
    let mut make = Command::new(python);
    make.args([TORCH_DATA, "make"]).arg(made.path()).arg(PICTURES.to_string());
    if !make.status()?.success() {
        return Err("the pictures could not be made; it says why above".into());
    }
    std::fs::rename(made.keep(), folder)?;
    Ok(())
}

/// Each of our ways against each of their decoders, in turns.
fn loads(
    arguments: &Arguments,
    folder: &Path,
    format: Format,
    workers: usize,
) -> Result<Vec<Comparison>> {
    let (format, workers) = (name(format), workers.to_string());
    let mut sides = vec![];
    for way in arguments.ways.iter().map(|it| name(*it)) {
        let mut ours = Command::new(std::env::current_exe()?);
        ours.args(["load-side", &format, &way, &workers, "--folder"]).arg(folder);
        sides.push((way.clone(), Side::start(&way, &mut ours)?));
    }
    for decoder in arguments.decoders.iter().map(|it| name(*it)) {
        let mut theirs = Command::new(&arguments.python);
        theirs.args([TORCH_DATA, "serve"]).arg(folder).args([&format, &decoder, &workers]);
        sides.push((decoder.clone(), Side::start(&decoder, &mut theirs)?));
    }
    decode_alike(&mut sides)?;
    let order = arguments.batches.to_string();
    let turn = |side: &mut Side| -> Result<f64> {
        let Loaded { nanoseconds } = side.ask(&order)?;
        Ok((arguments.batches * BATCH) as f64 / (nanoseconds as f64 / 1e9))
    };
    let mut rates = vec![vec![]; sides.len()];
    for round in 0..=arguments.rounds {
        for place in 0..sides.len() {
            let place = (place + round) % sides.len();
            let rate = turn(&mut sides[place].1)?;
            rates[place].extend((round > 0).then_some(rate));
        }
    }
    let mut comparisons = vec![];
    for ours in 0..arguments.ways.len() {
        for theirs in arguments.ways.len()..sides.len() {
            let rounds: Vec<_> =
                rates[ours].iter().copied().zip(rates[theirs].iter().copied()).collect();
            let (ours, theirs) = (&sides[ours].0, &sides[theirs].0);
            let name = format!("{format}, workers {workers}, {ours} / {theirs}");
            comparisons.push(Comparison::new(name, &rounds));
        }
    }
    Ok(comparisons)
}

/// The sides must find the same files and make the same numbers of them.
fn decode_alike(sides: &mut [(String, Side)]) -> Result<()> {
    let mut all: Vec<(usize, Moments)> = vec![];
    for (_, side) in sides.iter_mut() {
        let Found { pictures } = side.hear()?;
        all.push((pictures, side.ask(&format!("check {CHECKED}"))?));
    }
    let differs = |(pictures, it): &(usize, Moments)| {
        let (first_pictures, first) = &all[0];
        let apart =
            f64::max((it.mean - first.mean).abs(), (it.mean_square - first.mean_square).abs());
        pictures != first_pictures || apart > MOMENTS_APART_MAX
    };
    match all.iter().any(differs) {
        true => Err(format!("the sides do not decode alike: {all:?}").into()),
        false => Ok(()),
    }
}

/// A training step with pictures from files, and with the same pictures in memory.
fn feeds(
    arguments: &Arguments,
    folder: &Path,
    format: Format,
    workers: usize,
) -> Result<Comparison> {
    let mut sides = vec![];
    for feed in [Feed::Files, Feed::Memory].map(name) {
        let mut side = Command::new(std::env::current_exe()?);
        side.args(["feed-side", &name(format), &feed, &workers.to_string(), "--folder"]);
        side.arg(folder).env("RAYON_NUM_THREADS", "1");
        let mut side = Side::start(&feed, &mut side)?;
        side.hear::<Ready>()?;
        sides.push(side);
    }
    let order = arguments.batches.to_string();
    let mut rounds = vec![];
    for round in 0..=arguments.rounds {
        let mut taken = [0.0; 2];
        for turn in [round % 2, (round + 1) % 2] {
            let steps: Steps = sides[turn].ask(&order)?;
            // Of the second half: between two turns batches were made ahead.
            let half = &steps.nanoseconds[steps.nanoseconds.len() / 2..];
            taken[turn] = median(half.iter().map(|it| *it as f64 / 1e6).collect());
        }
        rounds.extend((round > 0).then_some((taken[0], taken[1])));
    }
    let name = format!("fed from {}, workers {workers}", name(format));
    Ok(Comparison::new(name, &rounds))
}

fn name(value: impl ValueEnum) -> String {
    value.to_possible_value().map(|it| it.get_name().to_owned()).unwrap_or_default()
}

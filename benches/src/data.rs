//! `stoker-bench data`: image loading against PyTorch's DataLoader, and training on loaded images.

use std::path::{Path, PathBuf};
use std::process::Command;

use clap::{Args, ValueEnum};
use stoker_trainer::Result;
use stoker_trainer::datasets::Cache;

use crate::loading::{BATCH, FileCount, ImageSource, LoadTime, Moments};
use crate::pictures::{Format, LoaderKind};
use crate::protocol::{Ready, Side, Steps};
use crate::rounds::{Comparison, median};

/// Options of `data`.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// Turns of each side, after one warm-up turn
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// Worker counts to benchmark
    #[arg(long, value_delimiter = ',', default_value = "1,2")]
    workers: Vec<usize>,
    /// File formats
    #[arg(long, value_delimiter = ',', default_value = "jpg,png")]
    formats: Vec<Format>,
    /// Trainer APIs that build our batches
    #[arg(long, value_delimiter = ',', default_value = "stream,source")]
    ways: Vec<LoaderKind>,
    /// Decoders of the other side
    #[arg(long, value_delimiter = ',', default_value = "pil,torchvision")]
    decoders: Vec<Decoder>,
    /// Parts to run: loading only, and training steps with images from files and from memory
    #[arg(long, value_delimiter = ',', default_value = "load,feed")]
    parts: Vec<Part>,
    /// Number of batches of 32 images in a turn
    #[arg(long, default_value_t = 48)]
    batches: usize,
    /// Python with PyTorch, torchvision and Pillow
    #[arg(long)]
    python: PathBuf,
    /// Directory of the images, created if missing [default: in Stoker's cache]
    #[arg(long)]
    folder: Option<PathBuf>,
    /// Print one JSON value
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
    /// Pillow, as in PyTorch's tutorials
    Pil,
    /// torchvision's decoder, from bytes to tensors
    Torchvision,
}

/// Program of the other side.
const TORCH_DATA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/torch_data.py");
/// Directory in the cache. Rename it whenever the generated images change.
const FOLDER: &str = "bench-pictures-1";
/// Number of images, each in both formats.
const PICTURES: usize = 2048;
/// Number of images that both sides must decode alike.
const CHECKED: usize = 16;
/// Maximum difference between the moments of two sides. JPEG decoders may differ by one of 255
/// levels.
const MOMENTS_APART_MAX: f64 = 0.01;

/// Runs the benchmark and prints the results.
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
                    Part::Load => compare_loading(arguments, &folder, format, workers)?,
                    Part::Feed => vec![compare_training(arguments, &folder, format, workers)?],
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
    let (what, ours, theirs) = match part {
        Part::Load => ("images per second", "Stoker", "PyTorch"),
        Part::Feed => ("ms per batch, 1 thread", "files", "memory"),
    };
    format!("{what:<34} {ours:>10} {theirs:>10} {:>8}   over rounds", "ratio")
}

/// Creates the directory with images, unless it exists. The directory appears atomically.
fn make_pictures(python: &Path, folder: &Path) -> Result<()> {
    if folder.exists() {
        return Ok(());
    }
    eprintln!("generating {PICTURES} images in {} (once)", folder.display());
    let parent = folder.parent().ok_or("the directory of the images has no parent")?;
    std::fs::create_dir_all(parent)?;
    let made = tempfile::tempdir_in(parent)?;
    let mut make = Command::new(python);
    make.args([TORCH_DATA, "make"]).arg(made.path()).arg(PICTURES.to_string());
    if !make.status()?.success() {
        return Err("cannot generate images; the output above has the reason".into());
    }
    std::fs::rename(made.keep(), folder)?;
    Ok(())
}

/// Benchmarks each of our APIs against each decoder of the other side. All of them take turns.
fn compare_loading(
    arguments: &Arguments,
    folder: &Path,
    format: Format,
    workers: usize,
) -> Result<Vec<Comparison>> {
    let (format, workers) = (name(format), workers.to_string());
    let mut sides = vec![];
    for way in arguments.ways.iter().map(|way| name(*way)) {
        let mut ours = Command::new(std::env::current_exe()?);
        ours.args(["load-side", &format, &way, &workers, "--folder"]).arg(folder);
        sides.push((way.clone(), Side::start(&way, &mut ours)?));
    }
    for decoder in arguments.decoders.iter().map(|decoder| name(*decoder)) {
        let mut theirs = Command::new(&arguments.python);
        theirs.args([TORCH_DATA, "serve"]).arg(folder).args([&format, &decoder, &workers]);
        sides.push((decoder.clone(), Side::start(&decoder, &mut theirs)?));
    }
    check_decoding(&mut sides)?;
    let command = arguments.batches.to_string();
    let turn = |side: &mut Side| -> Result<f64> {
        let LoadTime { nanoseconds } = side.request(&command)?;
        Ok((arguments.batches * BATCH) as f64 / (nanoseconds as f64 / 1e9))
    };
    let mut rates = vec![vec![]; sides.len()];
    for round in 0..=arguments.rounds {
        for turn_idx in 0..sides.len() {
            let idx = (turn_idx + round) % sides.len();
            let rate = turn(&mut sides[idx].1)?;
            rates[idx].extend((round > 0).then_some(rate));
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

/// Checks that all sides find the same files and decode them to the same values.
fn check_decoding(sides: &mut [(String, Side)]) -> Result<()> {
    let mut all: Vec<(usize, Moments)> = vec![];
    for (_, side) in sides.iter_mut() {
        let FileCount { pictures } = side.receive()?;
        all.push((pictures, side.request(&format!("check {CHECKED}"))?));
    }
    let differs = |(pictures, moments): &(usize, Moments)| {
        let (first_pictures, first) = &all[0];
        let mean_apart = (moments.mean - first.mean).abs();
        let apart = f64::max(mean_apart, (moments.mean_square - first.mean_square).abs());
        pictures != first_pictures || apart > MOMENTS_APART_MAX
    };
    match all.iter().any(differs) {
        true => Err(format!("the sides decode images differently: {all:?}").into()),
        false => Ok(()),
    }
}

/// Benchmarks a training step with images from files against the same images from memory.
fn compare_training(
    arguments: &Arguments,
    folder: &Path,
    format: Format,
    workers: usize,
) -> Result<Comparison> {
    let mut sides = vec![];
    for feed in [ImageSource::Files, ImageSource::Memory].map(name) {
        let mut side = Command::new(std::env::current_exe()?);
        side.args(["feed-side", &name(format), &feed, &workers.to_string(), "--folder"]);
        side.arg(folder).env("RAYON_NUM_THREADS", "1");
        let mut side = Side::start(&feed, &mut side)?;
        side.receive::<Ready>()?;
        sides.push(side);
    }
    let command = arguments.batches.to_string();
    let mut rounds = vec![];
    for round in 0..=arguments.rounds {
        let mut taken = [0.0; 2];
        for turn in [round % 2, (round + 1) % 2] {
            let steps: Steps = sides[turn].request(&command)?;
            // Ignore the first half: workers prefetched batches between two turns.
            let half = &steps.nanoseconds[steps.nanoseconds.len() / 2..];
            taken[turn] = median(half.iter().map(|time| *time as f64 / 1e6).collect());
        }
        rounds.extend((round > 0).then_some((taken[0], taken[1])));
    }
    let name = format!("fed from {}, workers {workers}", name(format));
    Ok(Comparison::new(name, &rounds))
}

fn name(value: impl ValueEnum) -> String {
    value.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

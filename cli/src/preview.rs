//! `stoker preview`: what a search would do, before anything is trained.

use std::path::PathBuf;

use stoker_api::experiment::Unit;
use stoker_engine::preview::{self, Preview};
use stoker_engine::search::SearchConfig;

use crate::failure::Failure;
use crate::file;
use crate::print::{self, Output};
use crate::run;

/// Stands for the run's id where the file sets no seed: a run of its own draws others.
const UID: &str = "preview";

/// What `stoker preview` is asked to do.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The experiment's file (YAML)
    file: PathBuf,
    /// How many trials to draw
    #[arg(long, value_name = "N", default_value_t = 5)]
    samples: u32,
    /// Change a field of the file before it is read, such as searcher.random.maxTrials=4; may be
    /// given more than once
    #[arg(long, value_name = "PATH=VALUE")]
    set: Vec<String>,
}

/// Prints the lengths and the first draws; returns the exit code.
pub(crate) fn preview(args: &Args, output: Output) -> Result<u8, Failure> {
    let loaded = match file::load(&args.file, &args.set) {
        Ok(loaded) => loaded,
        Err(error) => return Ok(crate::validate::print_error(&error, output)),
    };
    let valid = &loaded.valid;
    let config = SearchConfig::new(valid, run::seed(valid, UID));
    let preview = preview::preview(&config, args.samples);
    if output == Output::Json {
        let value = serde_json::to_value(&preview);
        print::out(value.map_err(|error| Failure::System(error.to_string()))?);
        return Ok(0);
    }
    loaded.notes.iter().for_each(print::err);
    print_text(&preview, valid.unit);
    if valid.spec.reproducibility.experiment_seed.is_none() {
        print::err(
            "the file sets no reproducibility.experimentSeed: each run draws values of its own, \
             these are an example",
        );
    }
    Ok(0)
}

fn print_text(preview: &Preview, unit: Unit) {
    let unit = match unit {
        Unit::Records => "records",
        Unit::Batches => "batches",
        Unit::Epochs => "epochs",
    };
    let lengths: Vec<Vec<String>> = preview
        .lengths
        .iter()
        .map(|it| vec![it.trials.to_string(), format!("{} {unit}", it.units)])
        .collect();
    print::out(print::table(&["TRIALS", "LENGTH"], &lengths));
    print::out(format!("total: {} {unit}", preview.total_units()));
    if preview.samples.is_empty() {
        return;
    }
    let samples: Vec<Vec<String>> = preview
        .samples
        .iter()
        .map(|it| {
            let hyperparameters = run::hyperparameters(&it.hyperparameters);
            vec![it.index.to_string(), it.seed.to_string(), hyperparameters]
        })
        .collect();
    print::out("");
    print::out(print::table(&["TRIAL", "SEED", "HYPERPARAMETERS"], &samples));
}

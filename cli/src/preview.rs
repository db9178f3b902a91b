//! `stoker preview`: simulates a search without training.

use std::path::PathBuf;

use stoker_api::experiment::Unit;
use stoker_engine::preview::{self, Preview};
use stoker_engine::search::SearchConfig;
use stoker_engine::trial::config::experiment_seed;

use crate::failure::Failure;
use crate::file;
use crate::print::{self, Output};
use crate::run;

/// UID to derive the seed from if the file sets none. Each run has another UID, and therefore other
/// samples.
const UID: &str = "preview";

/// Arguments of `stoker preview`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Experiment file (YAML)
    file: PathBuf,
    /// Number of trials to sample
    #[arg(long, value_name = "N", default_value_t = 5)]
    samples: u32,
    /// Override a field of the file, such as searcher.random.maxTrials=4; repeatable
    #[arg(long, value_name = "PATH=VALUE")]
    set: Vec<String>,
}

/// Prints the training lengths and the first sampled trials. Returns the exit code.
pub(crate) fn preview(args: &Args, output: Output) -> Result<u8, Failure> {
    let loaded = match file::load(&args.file, &args.set) {
        Ok(loaded) => loaded,
        Err(error) => return Ok(crate::validate::print_error(&error, output)),
    };
    let valid = &loaded.valid;
    let config = SearchConfig::new(valid, experiment_seed(valid, UID));
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
            "these values are an example: reproducibility.experimentSeed is unset, so each run \
             samples different ones",
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
        .map(|length| vec![length.trials.to_string(), format!("{} {unit}", length.units)])
        .collect();
    print::out(print::table(&["TRIALS", "LENGTH"], &lengths));
    print::out(format!("total: {} {unit}", preview.total_units()));
    if preview.samples.is_empty() {
        return;
    }
    let samples: Vec<Vec<String>> = preview
        .samples
        .iter()
        .map(|sample| {
            let hyperparameters = run::hyperparameters(&sample.hyperparameters);
            vec![sample.index.to_string(), sample.seed.to_string(), hyperparameters]
        })
        .collect();
    print::out("");
    print::out(print::table(&["TRIAL", "SEED", "HYPERPARAMETERS"], &samples));
}

//! `stoker preview`: simulates a search without training.

use std::path::PathBuf;

use serde_json::{Value, json};
use stoker_api::decisions::SearchLimit;
use stoker_api::experiment::{SearchLimits, Unit};
use stoker_api::validate::Method;
use stoker_engine::experiment::explain::length;
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
    /// Seconds in which a trial trains one unit of maxLength with all its slots; adds the slot time
    /// of the search, which is GPU time if slots are GPUs
    #[arg(long, value_name = "X", value_parser = positive)]
    seconds_per_unit: Option<f64>,
    /// Override a field of the file, such as searcher.random.maxTrials=4; repeatable
    #[arg(long, value_name = "PATH=VALUE")]
    set: Vec<String>,
}

fn positive(text: &str) -> Result<f64, String> {
    let number: f64 = text.parse().map_err(|error| format!("{error}"))?;
    let is_valid = number.is_finite() && number > 0.0;
    is_valid.then_some(number).ok_or_else(|| "must be a finite number above 0".to_owned())
}

/// Prints the training lengths and the first sampled trials. Returns the exit code.
pub(crate) fn preview(args: &Args, output: Output) -> Result<u8, Failure> {
    let loaded = match file::load(&args.file, &args.set) {
        Ok(loaded) => loaded,
        Err(error) => return Ok(crate::validate::print_error(&error, output)),
    };
    let valid = &loaded.valid;
    let cost = args.seconds_per_unit.map(|seconds_per_unit| Cost {
        seconds_per_unit,
        slots_per_trial: valid.spec.resources.slots_per_trial,
    });
    let note = limits_note(&valid.spec.searcher.limits.unwrap_or_default(), valid.unit);
    if let Method::External(search) = &valid.method {
        let what = External { max_trials: search.max_trials, max_length: valid.units_max, cost };
        match output {
            Output::Json => print::out(what.to_json()),
            Output::Text => print::out(what.text(valid.unit)),
        }
        note.iter().for_each(print::err);
        return Ok(0);
    }
    let config = SearchConfig::new(valid, experiment_seed(valid, UID));
    let preview = preview::preview(&config, args.samples);
    note.iter().for_each(print::err);
    if output == Output::Json {
        let value = serde_json::to_value(&preview);
        let value = value.map_err(|error| Failure::System(error.to_string()))?;
        print::out(cost.map_or(value.clone(), |cost| cost.add_to(value, &preview)));
        return Ok(0);
    }
    loaded.notes.iter().for_each(print::err);
    print::out(text(&preview, valid.unit, cost));
    if valid.spec.reproducibility.experiment_seed.is_none() {
        print::err(
            "these values are an example: reproducibility.experimentSeed is unset, so each run \
             samples different ones",
        );
    }
    Ok(0)
}

/// Returns a note about the limits, which the preview does not apply; `None` without a limit.
fn limits_note(limits: &SearchLimits, unit: Unit) -> Option<String> {
    let limits: Vec<String> = limits
        .all()
        .map(|(limit, maximum)| match limit {
            SearchLimit::Units => length(maximum, unit),
            SearchLimit::SlotSeconds => format!("{} of slots", slot_time(maximum as f64)),
            SearchLimit::Seconds => format!("{} after its begin", slot_time(maximum as f64)),
        })
        .collect();
    (!limits.is_empty()).then(|| {
        let limits = limits.join(", or ");
        format!("note: searcher.limits ends the search at {limits}; this preview is without limits")
    })
}

/// All that is known about the trials of an external searcher.
#[derive(Clone, Copy, Debug)]
struct External {
    max_trials: u32,
    max_length: u64,
    cost: Option<Cost>,
}

impl External {
    /// Returns the greatest slot time of the search, in seconds.
    fn slot_seconds(self) -> Option<f64> {
        let units = u64::from(self.max_trials).saturating_mul(self.max_length);
        Some(self.cost?.slot_seconds(units))
    }

    fn to_json(self) -> Value {
        let mut external = json!({ "maxTrials": self.max_trials, "maxLength": self.max_length });
        if let Some(seconds) = self.slot_seconds() {
            external["maxSlotSeconds"] = seconds.into();
        }
        json!({ "lengths": [], "samples": [], "external": external })
    }

    fn text(self, unit: Unit) -> String {
        let Self { max_trials, max_length, .. } = self;
        let time = self.slot_seconds().map(|time| format!(", {} of slots", slot_time(time)));
        format!(
            "the external searcher decides how many trials run, with which hyperparameters, and \
             how long: at most {max_trials} trials of {}{}; `stoker simulate` asks it",
            length(max_length, unit),
            time.unwrap_or_default()
        )
    }
}

/// Duration of a unit, and slots that it takes.
#[derive(Clone, Copy, Debug)]
struct Cost {
    seconds_per_unit: f64,
    slots_per_trial: u32,
}

impl Cost {
    fn slot_seconds(self, units: u64) -> f64 {
        units as f64 * self.seconds_per_unit * f64::from(self.slots_per_trial)
    }

    /// Adds the slot time of each length and of the search.
    fn add_to(self, mut value: Value, preview: &Preview) -> Value {
        let lengths = value["lengths"].as_array_mut().into_iter().flatten();
        for (fields, length) in lengths.zip(&preview.lengths) {
            fields["slotSeconds"] = self.slot_seconds(length.total_units()).into();
        }
        value["secondsPerUnit"] = self.seconds_per_unit.into();
        value["slotsPerTrial"] = self.slots_per_trial.into();
        value["slotSeconds"] = self.slot_seconds(preview.total_units()).into();
        value
    }
}

/// Formats a slot time: `40 s`, `12 min`, `3.5 h` or `1200 h`.
fn slot_time(seconds: f64) -> String {
    match seconds {
        ..59.5 => format!("{seconds:.0} s"),
        ..3570.0 => format!("{:.0} min", seconds / 60.0),
        ..359_820.0 => format!("{:.1} h", seconds / 3600.0),
        _ => format!("{:.0} h", seconds / 3600.0),
    }
}

fn text(preview: &Preview, unit: Unit, cost: Option<Cost>) -> String {
    let header: &[&str] = match cost {
        None => &["TRIALS", "LENGTH"],
        Some(_) => &["TRIALS", "LENGTH", "SLOT TIME"],
    };
    let lengths: Vec<Vec<String>> = preview
        .lengths
        .iter()
        .map(|count| {
            let time = cost.map(|cost| slot_time(cost.slot_seconds(count.total_units())));
            let cells = [count.trials.to_string(), length(count.units, unit)];
            cells.into_iter().chain(time).collect()
        })
        .collect();
    let total = preview.total_units();
    let time = cost.map(|cost| format!(", {} of slots", slot_time(cost.slot_seconds(total))));
    let mut text = print::table(header, &lengths);
    text += &format!("\ntotal: {}{}", length(total, unit), time.unwrap_or_default());
    if preview.copied_units > 0 {
        text += &format!(
            "\nwithout {} that copies take over from other trials",
            length(preview.copied_units, unit)
        );
    }
    if preview.samples.is_empty() {
        return text;
    }
    let samples: Vec<Vec<String>> = preview
        .samples
        .iter()
        .map(|sample| {
            let hyperparameters = run::hyperparameters(&sample.hyperparameters);
            vec![sample.index.to_string(), sample.seed.to_string(), hyperparameters]
        })
        .collect();
    text + "\n\n" + &print::table(&["TRIAL", "SEED", "HYPERPARAMETERS"], &samples)
}

#[cfg(test)]
mod tests {
    use stoker_engine::preview::LengthCount;

    use super::*;

    fn preview() -> Preview {
        let lengths = [(1, 54), (3, 18), (9, 9)];
        let lengths =
            lengths.into_iter().map(|(units, trials)| LengthCount { units, trials }).collect();
        Preview { lengths, copied_units: 0, samples: vec![] }
    }

    const COST: Cost = Cost { seconds_per_unit: 90.0, slots_per_trial: 4 };

    #[test]
    fn slot_time_is_shown_for_each_length() {
        let without = "TRIALS  LENGTH\n54      1 epoch\n18      3 epochs\n9       9 epochs\n\
                       total: 189 epochs";
        assert_eq!(text(&preview(), Unit::Epochs, None), without);
        let with = "TRIALS  LENGTH    SLOT TIME\n54      1 epoch   5.4 h\n\
                    18      3 epochs  5.4 h\n9       9 epochs  8.1 h\n\
                    total: 189 epochs, 18.9 h of slots";
        assert_eq!(text(&preview(), Unit::Epochs, Some(COST)), with);
    }

    #[test]
    fn json_has_the_slot_seconds() {
        let value = COST.add_to(json!(preview()), &preview());
        let expected = json!({
            "lengths": [
                { "units": 1, "trials": 54, "slotSeconds": 19440.0 },
                { "units": 3, "trials": 18, "slotSeconds": 19440.0 },
                { "units": 9, "trials": 9, "slotSeconds": 29160.0 },
            ],
            "samples": [], "secondsPerUnit": 90.0, "slotsPerTrial": 4, "slotSeconds": 68040.0,
        });
        assert_eq!(value, expected);
    }

    #[test]
    fn slot_times_have_a_suitable_unit() {
        let times = [0.0, 59.0, 60.0, 3540.0, 3599.0, 5400.0, 360_000.0].map(slot_time);
        assert_eq!(times, ["0 s", "59 s", "1 min", "59 min", "1.0 h", "1.5 h", "100 h"]);
    }

    #[test]
    fn external_searcher_has_only_limits() {
        let external = External { max_trials: 9, max_length: 1, cost: None };
        let text = external.text(Unit::Epochs);
        assert!(text.contains("at most 9 trials of 1 epoch;"), "{text}");
        assert_eq!(external.to_json()["lengths"], json!([]));
        let external = External { cost: Some(COST), ..external };
        let text = external.text(Unit::Epochs);
        assert!(text.contains("at most 9 trials of 1 epoch, 54 min of slots;"), "{text}");
        assert_eq!(external.to_json()["external"]["maxSlotSeconds"], 3240.0);
    }

    #[test]
    fn limits_are_noted() {
        let note =
            |limits: Value| limits_note(&serde_json::from_value(limits).unwrap(), Unit::Epochs);
        assert_eq!(note(json!({})), None);
        let both = note(json!({ "units": 50, "slotSeconds": 7200 })).unwrap();
        assert!(both.contains("at 2.0 h of slots, or 50 epochs;"), "{both}");
    }

    #[test]
    fn unit_duration_must_be_positive() {
        assert_eq!(positive("0.5"), Ok(0.5));
        for wrong in ["0", "-1", "NaN", "inf", "1e400", "x"] {
            assert!(positive(wrong).is_err(), "{wrong}");
        }
        assert_eq!(positive("1e400").unwrap_err(), "must be a finite number above 0");
    }
}

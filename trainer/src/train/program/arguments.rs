//! Arguments and environment of a program without a runner.

use serde_json::{Value, json};
use stoker_api::experiment::{Length, MixedPrecision, Unit};

use super::Standalone;
use crate::Result;

/// Environment variable with hyperparameters as a JSON object.
const ENV_HPARAMS: &str = "STOKER_HPARAMS";

/// Output of `--help`.
pub(super) const HELP: &str = "\
Options for training without a runner:

  --hparams JSON         hyperparameters, an object (default: $STOKER_HPARAMS)
  --hparam NAME=VALUE    one hyperparameter; may be repeated
  --data JSON            value of an experiment's `data`, an object
  --seed N               seed of all random numbers (default: 0)
  --epochs N             length; or --batches N, or --records N (default: 1 epoch)
  --units N              length in the own count of a program with a custom loop
  --folder PATH          stores checkpoints and metrics, and resumes from the latest checkpoint
  --save-batches N       saves every N batches instead of after each epoch
  --save-trial-latest N  retains the N latest checkpoints (default: 1)
  --save-trial-best N    retains the N best checkpoints by validation_loss (default: 1)
  --row-batches N        batches between rows of training metrics (default: 100)
  --mixed-precision KIND none or bf16: half precision of steps and validations (default: none)";

/// Returns the options set in the environment.
pub(crate) fn from_environment() -> Result<Standalone> {
    let mut standalone = Standalone::default();
    if let Ok(text) = std::env::var(ENV_HPARAMS) {
        standalone.hyperparameters = object(ENV_HPARAMS, &text)?;
    }
    Ok(standalone)
}

/// Parses the arguments. Returns `None` if they request help.
pub(super) fn parse(arguments: impl IntoIterator<Item = String>) -> Result<Option<Standalone>> {
    let mut standalone = from_environment()?;
    let mut arguments = arguments.into_iter();
    while let Some(argument) = arguments.next() {
        if argument == "--help" || argument == "-h" {
            return Ok(None);
        }
        let (name, joined) = match argument.split_once('=') {
            Some((name, value)) => (name.to_owned(), Some(value.to_owned())),
            None => (argument, None),
        };
        if !NAMES.contains(&name.as_str()) {
            return Err(format!("unknown argument {name}; see --help").into());
        }
        let value =
            joined.or_else(|| arguments.next()).ok_or_else(|| format!("{name} needs a value"))?;
        set(&mut standalone, &name, &value)?;
    }
    Ok(Some(standalone))
}

const NAMES: [&str; 14] = [
    "--hparams",
    "--hparam",
    "--data",
    "--seed",
    "--epochs",
    "--batches",
    "--records",
    "--units",
    "--folder",
    "--save-batches",
    "--save-trial-latest",
    "--save-trial-best",
    "--row-batches",
    "--mixed-precision",
];

fn set(standalone: &mut Standalone, name: &str, value: &str) -> Result<()> {
    match name {
        "--hparams" => standalone.hyperparameters = object(name, value)?,
        "--hparam" => {
            let (key, value) = value
                .split_once('=')
                .ok_or_else(|| format!("--hparam {value} must be NAME=VALUE"))?;
            // Treat a value that is not JSON as a string.
            let value = serde_json::from_str(value).unwrap_or_else(|_| json!(value));
            standalone.hyperparameters[key] = value;
        }
        "--data" => standalone.data = object(name, value)?,
        "--seed" => standalone.seed = number(name, value)?,
        "--epochs" => standalone.length = Some(length(name, value, Unit::Epochs)?),
        "--batches" => standalone.length = Some(length(name, value, Unit::Batches)?),
        "--records" => standalone.length = Some(length(name, value, Unit::Records)?),
        "--units" => standalone.length = Some(length(name, value, Unit::Units)?),
        "--folder" => standalone.folder = Some(value.into()),
        "--save-batches" => {
            standalone.checkpoint_period = Some(length(name, value, Unit::Batches)?);
        }
        "--save-trial-latest" => match number(name, value)? {
            0 => return Err(format!("{name} must be at least 1").into()),
            latest => standalone.save_trial_latest = latest,
        },
        "--save-trial-best" => standalone.save_trial_best = number(name, value)?,
        "--mixed-precision" => standalone.mixed_precision = mixed_precision(name, value)?,
        _ => standalone.scheduling_unit = number::<u64>(name, value)?.max(1),
    }
    Ok(())
}

pub(crate) fn object(name: &str, text: &str) -> Result<Value> {
    let value: Value = serde_json::from_str(text)
        .map_err(|error| format!("{name} must be a JSON object, not {text}: {error}"))?;
    if value.is_object() {
        Ok(value)
    } else {
        Err(format!("{name} must be a JSON object, not {text}").into())
    }
}

pub(crate) fn number<N: std::str::FromStr>(name: &str, text: &str) -> Result<N> {
    Ok(text.parse().map_err(|_| format!("{name} must be a non-negative integer, not {text}"))?)
}

fn length(name: &str, text: &str, unit: Unit) -> Result<Length> {
    match number(name, text)? {
        0 => Err(format!("{name} must be at least 1").into()),
        units => Ok(Length::new(unit, units)),
    }
}

fn mixed_precision(name: &str, text: &str) -> Result<MixedPrecision> {
    match text {
        "none" => Ok(MixedPrecision::None),
        "bf16" => Ok(MixedPrecision::Bf16),
        _ => Err(format!("{name} must be none or bf16, not {text}").into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Result<Option<Standalone>> {
        parse(text.split_whitespace().map(String::from))
    }

    #[test]
    fn arguments_set_options() {
        let check = |text: &str, expected: Standalone| {
            assert_eq!(of(text).unwrap(), Some(expected), "{text}");
        };
        let none = Standalone::default();
        check("", none.clone());
        let hyperparameters = json!({"a": 1, "b": "x"});
        check(
            "--hparams {\"a\":2} --hparam a=1 --hparam=b=x --seed=7",
            Standalone { hyperparameters, seed: 7, ..none.clone() },
        );
        let length = Some(Length::new(Unit::Batches, 9));
        check("--epochs 2 --batches 9", Standalone { length, ..none.clone() });
        let length = Some(Length::new(Unit::Units, 900));
        check("--units 900", Standalone { length, ..none.clone() });
        check("--folder a/b", Standalone { folder: Some("a/b".into()), ..none.clone() });
        check(
            "--save-trial-latest 3 --save-trial-best=0",
            Standalone { save_trial_latest: 3, save_trial_best: 0, ..none.clone() },
        );
        let bf16 = Standalone { mixed_precision: MixedPrecision::Bf16, ..none.clone() };
        assert_eq!(bf16.clone().config().unwrap().mixed_precision, MixedPrecision::Bf16);
        check("--mixed-precision bf16", bf16);
        check("--mixed-precision=none", none);
        assert_eq!(of("--epochs 1 --help").unwrap(), None);
    }

    #[test]
    fn invalid_arguments_are_named() {
        let check = |text: &str, expected: &str| {
            assert_eq!(of(text).unwrap_err().to_string(), expected);
        };
        check("--epoch 1", "unknown argument --epoch; see --help");
        check("--epochs", "--epochs needs a value");
        check("--epochs 0", "--epochs must be at least 1");
        check("--save-trial-latest 0", "--save-trial-latest must be at least 1");
        check("--mixed-precision f16", "--mixed-precision must be none or bf16, not f16");
        check("--seed x", "--seed must be a non-negative integer, not x");
        check("--hparams 1", "--hparams must be a JSON object, not 1");
        check("--hparam a", "--hparam a must be NAME=VALUE");
    }
}

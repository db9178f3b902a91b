//! Contexts of processes that a runner started.

use std::path::Path;

use stoker_api::contract::TrialConfig;
use stoker_api::names::ENV_TRIAL_CONFIG;

use super::context;
use crate::context::Context;
use crate::error::Infrastructure;
use crate::{Error, InvalidInput, Result};

/// Returns the context of an inference program.
pub(crate) fn inference(path: &Path) -> Result<Context> {
    context(read_config(path)?, None)
}

/// Returns the context of a training program.
///
/// # Errors
///
/// Fails if this process belongs to an inference job.
pub(super) fn training(path: &Path) -> Result<Context> {
    let config = read_config(path)?;
    if config.inference.is_some() {
        let text = "this program trains, but a job requires an inference program, which calls \
                    `infer`; change entrypoint.command of the job, for example to [stoker-trainer, \
                    iris-predict]";
        return Err(InvalidInput(text.into()).into());
    }
    context(config, None)
}

fn read_config(path: &Path) -> Result<TrialConfig> {
    let config = std::fs::read(path)
        .map_err(Error::from)
        .and_then(|bytes| serde_json::from_slice::<TrialConfig>(&bytes).map_err(Error::from));
    Ok(config.map_err(|error| {
        Infrastructure(format!("cannot read {ENV_TRIAL_CONFIG} {}: {error}", path.display()))
    })?)
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use stoker_api::contract::ExitCode;

    use super::super::Standalone;
    use super::*;
    use crate::error::exit_code;

    #[test]
    fn jobs_refuse_training_programs() {
        let mut config = serde_json::to_value(Standalone::default().config().unwrap()).unwrap();
        config["inference"] = json!({
            "role": "plan", "slot": 0, "slots": 1, "input": { "url": "in" }, "output": {},
            "shardRows": 3, "batchRows": 2,
        });
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.json");
        std::fs::write(&path, config.to_string()).unwrap();
        let error = training(&path).unwrap_err();
        assert_eq!(exit_code(&*error), ExitCode::InvalidHyperparameters, "{error}");
        assert!(error.to_string().contains("this program trains, but a job requires"), "{error}");
    }
}

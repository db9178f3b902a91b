//! Writes a trial's sampled hyperparameters next to its checkpoints, so that the bucket alone
//! identifies the models.

use serde_json::json;
use stoker_api::contract::TrialConfig;
use stoker_api::names::API_VERSION;
use stoker_storage::{Storage, layout};

use crate::Result;

/// Writes the trial's hyperparameters, as a `Trial` object, to `record.json` in its directory. All
/// attempts write the same contents, except for the granted length.
///
/// # Errors
///
/// Returns the error of the storage.
pub(super) async fn write(storage: &Storage, config: &TrialConfig) -> Result<()> {
    let record = json!({
        "apiVersion": API_VERSION,
        "kind": "Trial",
        "metadata": { "name": format!("{}-{}", config.experiment, config.trial) },
        "spec": {
            "experiment": config.experiment,
            "index": config.trial,
            "seed": config.seed,
            "hyperparameters": config.hyperparameters,
            "unit": config.unit,
            "units": config.units,
        },
    });
    let path = layout::record_path(&config.storage.trial_path);
    storage.put(&path, serde_json::to_vec_pretty(&record)?.into()).await?;
    Ok(())
}

//! What a trial was drawn beside its checkpoints, so that a bucket alone tells which model they are of.

use serde_json::json;
use stoker_api::contract::TrialConfig;
use stoker_api::names::API_VERSION;
use stoker_storage::{Storage, layout};

use crate::Result;

/// Writes a trial's draw, in the form of its object, to `record.json` in its folder. Each attempt writes the same but
/// for the length that is granted.
///
/// # Errors
///
/// What the storage failed with.
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

//! End of a cancelled or killed run without a runner.

use futures::{StreamExt as _, TryStreamExt as _, stream};
use stoker_api::validate::ValidExperiment;
use stoker_engine::trial::TrialRecord;
use stoker_engine::trial::config::experiment_seed;
use stoker_storage::Storage;

use super::outcome::{self, RunPaths};
use super::record::RecordDir;
use super::report_server::SharedState;
use super::request::Request;
use super::state::State;
use crate::failure::Failure;

/// Maximum number of records that are written concurrently.
const WRITES_MAX: usize = 16;

/// Ends the run as its requests demand: closes its trials in the record. Then deletes checkpoints
/// that are not retained, and copies the records to the storage, as a runner does. The caller holds
/// the lock of the record.
///
/// # Errors
///
/// The record could not be read or written. An error of the storage is returned as a message: the
/// next `stoker run` of the file repeats that part.
pub(crate) async fn end_without_runner(
    folder: &RecordDir,
    valid: &ValidExperiment,
    storage: Result<Storage, Failure>,
    paths: &RunPaths,
) -> Result<Option<String>, Failure> {
    let Some(experiment) = folder.experiment()? else { return Ok(None) };
    // The state ignores requests that cannot be read, and would continue the search.
    Request::read(folder.path())?;
    let seed = experiment_seed(valid, &paths.uid);
    let state = State::new(experiment, folder.trials()?, vec![], valid, seed, folder.clone())?;
    let shared = SharedState::new(state);
    shared.state().settle()?;
    shared.state().finish_status();
    let stored = match storage {
        Ok(storage) => store(&shared, &storage, valid, paths).await,
        Err(error) => Err(error),
    };
    Ok(stored.err().map(|error| error.to_string()))
}

async fn store(
    shared: &SharedState,
    storage: &Storage,
    valid: &ValidExperiment,
    paths: &RunPaths,
) -> Result<(), Failure> {
    let policy = &valid.spec.checkpoint_storage;
    outcome::retain(shared, storage, paths, policy, valid.spec.searcher.smaller_is_better).await?;
    let trials: Vec<TrialRecord> = shared.state().trials.values().cloned().collect();
    let copy =
        |trial: TrialRecord| async move { outcome::copy_record(storage, paths, &trial).await };
    stream::iter(trials).map(copy).buffer_unordered(WRITES_MAX).try_collect().await
}

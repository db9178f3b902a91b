//! Where things lie under a storage root. Paths are relative to it, with `/` between names.
//!
//! ```text
//! NAMESPACE/EXPERIMENT-UID8/trials/INDEX/
//!   checkpoints/BATCHES-ATTEMPT/{files, manifest.json}
//!   metrics/ATTEMPT-SEQ.jsonl
//!   tensorboard/events.out.tfevents.ATTEMPT-SEQ
//!   logs/ATTEMPT/RANK-SEQ.log
//!   record.json
//! ```

use stoker_api::names::{MANIFEST, RECORD};

/// The folder of an experiment: its name and the first 8 characters of its id, so that a later
/// experiment of the same name has a folder of its own.
///
/// # Examples
///
/// ```
/// let path = stoker_storage::layout::experiment_path("default", "mnist", "0b3f9c1e-77aa");
/// assert_eq!(path, "default/mnist-0b3f9c1e");
/// ```
pub fn experiment_path(namespace: &str, experiment: &str, experiment_id: &str) -> String {
    let uid8: String = experiment_id.chars().filter(char::is_ascii_alphanumeric).take(8).collect();
    format!("{namespace}/{experiment}-{uid8}")
}

/// The folder of a trial: what [`StorageConfig::trial_path`] holds.
///
/// [`StorageConfig::trial_path`]: stoker_api::contract::StorageConfig::trial_path
pub fn trial_path(namespace: &str, experiment: &str, experiment_id: &str, trial: u32) -> String {
    format!("{}/trials/{trial}", experiment_path(namespace, experiment, experiment_id))
}

/// The name of the checkpoint that `attempt` takes after `batches` global batches. Names sort by
/// batches; two attempts never share one.
pub fn checkpoint_name(batches: u64, attempt: u32) -> String {
    format!("{batches:012}-{attempt}")
}

/// The batches and the attempt in a name that [`checkpoint_name`] wrote; `None` for another name.
pub fn parse_checkpoint_name(name: &str) -> Option<(u64, u32)> {
    let (batches, attempt) = name.split_once('-')?;
    let parsed = (batches.parse().ok()?, attempt.parse().ok()?);
    (checkpoint_name(parsed.0, parsed.1) == name).then_some(parsed)
}

/// The folder that holds all checkpoints of a trial.
pub fn checkpoints_path(trial_path: &str) -> String {
    format!("{trial_path}/checkpoints")
}

/// The folder of one checkpoint.
pub fn checkpoint_path(trial_path: &str, name: &str) -> String {
    format!("{trial_path}/checkpoints/{name}")
}

/// One file of a checkpoint.
pub fn checkpoint_file(trial_path: &str, name: &str, file: &str) -> String {
    format!("{trial_path}/checkpoints/{name}/{file}")
}

/// The manifest of a checkpoint.
pub fn manifest_path(trial_path: &str, name: &str) -> String {
    checkpoint_file(trial_path, name, MANIFEST)
}

/// The folder of a trial's metrics.
pub fn metrics_path(trial_path: &str) -> String {
    format!("{trial_path}/metrics")
}

/// The folder of a trial's TensorBoard event files.
pub fn tensorboard_path(trial_path: &str) -> String {
    format!("{trial_path}/tensorboard")
}

/// The folder of the logs of one attempt.
pub fn logs_path(trial_path: &str, attempt: u32) -> String {
    format!("{trial_path}/logs/{attempt}")
}

/// What a trial's record says, carried beside its files.
pub fn record_path(trial_path: &str) -> String {
    format!("{trial_path}/{RECORD}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_name(name: &str, expected: Option<(u64, u32)>) {
        assert_eq!(parse_checkpoint_name(name), expected, "{name}");
    }

    #[test]
    fn checkpoint_names_are_read_back_and_other_names_are_not() {
        check_name(&checkpoint_name(100, 3), Some((100, 3)));
        check_name("000000000100-3", Some((100, 3)));
        check_name("000000000100-03", None);
        check_name("100-3", None);
        check_name("manifest.json", None);
    }

    #[test]
    fn names_sort_by_batches() {
        assert!(checkpoint_name(999, 12) < checkpoint_name(1_000, 2));
    }

    #[test]
    fn paths_are_those_of_the_design() {
        let trial = trial_path("default", "mnist", "0b3f9c1e-77aa-4c01", 4);
        assert_eq!(trial, "default/mnist-0b3f9c1e/trials/4");
        let name = checkpoint_name(100, 0);
        assert_eq!(
            manifest_path(&trial, &name),
            "default/mnist-0b3f9c1e/trials/4/checkpoints/000000000100-0/manifest.json"
        );
    }
}

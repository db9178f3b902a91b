//! Layout of objects below a storage root. Paths are relative to the root, with `/` between names.
//!
//! ```text
//! NAMESPACE/contexts/SHA256.tar.gz
//! NAMESPACE/EXPERIMENT-UID8/record.json
//! NAMESPACE/EXPERIMENT-UID8/trials/INDEX/
//!   checkpoints/BATCHES-ATTEMPT/{files, manifest.json}
//!   metrics/ATTEMPT-SEQ.jsonl
//!   tensorboard/events.out.tfevents.ATTEMPT-SEQ
//!   profiler/ATTEMPT-RANK-SEQ.jsonl
//!   logs/ATTEMPT/RANK-SEQ.log
//!   record.json
//! NAMESPACE/JOB-UID8/workers/SLOT/logs/ATTEMPT/RANK-SEQ.log
//! ```

use stoker_api::names::MANIFEST;
pub use stoker_api::names::{
    checkpoint_name, context_path, experiment_path, parse_checkpoint_name, record_path, trial_path,
    worker_path, workers_path,
};

use crate::segments::Segments;

/// Returns the directory of a trial's checkpoints.
pub fn checkpoints_path(trial_path: &str) -> String {
    format!("{trial_path}/checkpoints")
}

/// Returns the directory of one checkpoint.
pub fn checkpoint_path(trial_path: &str, name: &str) -> String {
    format!("{trial_path}/checkpoints/{name}")
}

/// Returns the path of one file of a checkpoint.
pub fn checkpoint_file(trial_path: &str, name: &str, file: &str) -> String {
    format!("{trial_path}/checkpoints/{name}/{file}")
}

/// Returns the path of a checkpoint's manifest.
pub fn manifest_path(trial_path: &str, name: &str) -> String {
    checkpoint_file(trial_path, name, MANIFEST)
}

/// Returns the directory of a trial's metrics.
pub fn metrics_path(trial_path: &str) -> String {
    format!("{trial_path}/metrics")
}

/// Returns the directory of a trial's TensorBoard event files.
pub fn tensorboard_path(trial_path: &str) -> String {
    format!("{trial_path}/tensorboard")
}

/// Returns the directory of the profiler samples of a trial's ranks.
pub fn profiler_path(trial_path: &str) -> String {
    format!("{trial_path}/profiler")
}

/// Returns the directory of one attempt's logs.
pub fn logs_path(trial_path: &str, attempt: u32) -> String {
    format!("{trial_path}/logs/{attempt}")
}

/// Returns the segments to which a rank's output in `attempt` is written.
pub fn log_segments(trial_path: &str, attempt: u32, rank: u32) -> Segments {
    Segments::new(format!("{}/{rank}-", logs_path(trial_path, attempt)), ".log")
}

/// Returns rank and number of a segment from [`log_segments`], given its path; `None` for other
/// files.
pub fn parse_log_segment(path: &str) -> Option<(u32, u64)> {
    let name = path.rsplit_once('/')?.1.strip_suffix(".log")?;
    let (rank, seq) = name.split_once('-')?;
    Some((rank.parse().ok()?, seq.parse().ok()?))
}

/// Returns the attempt that wrote a file, given the path below the trial's directory; `None` for
/// files that do not belong to an attempt.
///
/// # Examples
///
/// ```
/// assert_eq!(stoker_storage::layout::attempt_of("metrics/3-00000000.jsonl"), Some(3));
/// ```
pub fn attempt_of(path: &str) -> Option<u32> {
    let (folder, rest) = path.split_once('/')?;
    let (name, _) = rest.split_once('/').unwrap_or((rest, ""));
    match folder {
        "checkpoints" => parse_checkpoint_name(name).map(|(_, attempt)| attempt),
        "metrics" | "profiler" => name.split_once('-')?.0.parse().ok(),
        "tensorboard" => name.strip_prefix("events.out.tfevents.")?.split_once('-')?.0.parse().ok(),
        "logs" => name.parse().ok(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempt_is_read_from_the_path() {
        let trial = trial_path("default", "mnist", "0b3f9c1e", 4);
        let check = |path: &str, expected: Option<u32>| {
            let below = path.strip_prefix(&format!("{trial}/")).unwrap();
            assert_eq!(attempt_of(below), expected, "{below}");
        };
        check(&checkpoint_file(&trial, &checkpoint_name(100, 12), "model.bpk"), Some(12));
        check(&manifest_path(&trial, "x"), None);
        check(&crate::metrics::segments(&trial, 12).path(3), Some(12));
        let events = format!("{}/events.out.tfevents.000012-", tensorboard_path(&trial));
        check(&format!("{events}00000000.stoker"), Some(12));
        check(&format!("{}/12-3-00000000.jsonl", profiler_path(&trial)), Some(12));
        check(&log_segments(&trial, 12, 0).path(0), Some(12));
        check(&record_path(&trial), None);
        check(&format!("{}/notes.txt", metrics_path(&trial)), None);
    }

    #[test]
    fn log_segments_give_rank_and_number() {
        let check = |path: &str, expected: Option<(u32, u64)>| {
            assert_eq!(parse_log_segment(path), expected, "{path}");
        };
        let job = worker_path("default/species-0b3f9c1e", 2);
        assert_eq!(job, "default/species-0b3f9c1e/workers/2");
        let path = log_segments(&job, 0, 3).path(12);
        assert_eq!(path, "default/species-0b3f9c1e/workers/2/logs/0/3-00000012.log");
        check(&path, Some((3, 12)));
        check("a/logs/0/10-00000000.log", Some((10, 0)));
        check("a/logs/0/notes.txt", None);
        check("a/logs/0/x-1.log", None);
        check("3-00000012.log", None);
    }

    #[test]
    fn paths_follow_the_layout() {
        let trial = trial_path("default", "mnist", "0b3f9c1e-77aa-4c01", 4);
        assert_eq!(trial, "default/mnist-0b3f9c1e/trials/4");
        let name = checkpoint_name(100, 0);
        assert_eq!(
            manifest_path(&trial, &name),
            "default/mnist-0b3f9c1e/trials/4/checkpoints/000000000100-0/manifest.json"
        );
        assert_eq!(context_path("default", "ab12"), "default/contexts/ab12.tar.gz");
    }
}

//! Logs in the storage.

use std::collections::BTreeSet;

use stoker_api::experiment::CheckpointStorage;
use stoker_api::inference::InferenceJob;
use stoker_storage::layout;

use super::tag::{Gang, Tag};
use crate::cluster::{job as cluster_job, storage};
use crate::failure::Failure;
use crate::print::Output;

/// Prints the stored logs of an attempt in `folder`, rank by rank. Returns the number of objects.
pub(super) async fn print(
    spec: &CheckpointStorage,
    folder: &str,
    options: &storage::Options,
    tag: &Tag,
    rank: Option<u32>,
    output: Output,
) -> Result<usize, Failure> {
    let opened = options.open(spec)?;
    let fail = |error| storage::failure(error, spec);
    let mut objects: Vec<(u32, u64, String)> = opened
        .list(folder)
        .await
        .map_err(fail)?
        .into_iter()
        .filter_map(|path| parse(&path).map(|(rank, seq)| (rank, seq, path)))
        .filter(|(of_rank, ..)| rank.is_none_or(|rank| *of_rank == rank))
        .collect();
    objects.sort();
    for (rank, _, path) in &objects {
        let bytes = opened.get(path).await.map_err(fail)?;
        let pod = if tag.is_job { tag.pod } else { rank / tag.gang.ranks_per_pod };
        let tag = Tag { pod, ..*tag };
        for line in String::from_utf8_lossy(&bytes).lines() {
            // The rank is only in the object name, so add the prefix.
            let line = match !tag.is_job && tag.gang.world_size > 1 && !line.starts_with("[rank=") {
                true => format!("[rank={rank}] {line}"),
                false => line.to_owned(),
            };
            tag.print(&line, None, output);
        }
    }
    Ok(objects.len())
}

/// Prints the stored logs of a job, process by process. Returns the number of processes.
pub(super) async fn print_job(
    job: &InferenceJob,
    options: &storage::Options,
    gang: Gang,
    slot: Option<u32>,
    output: Output,
) -> Result<usize, Failure> {
    let spec = &cluster_job::storage_of(job);
    let opened = options.open(spec)?;
    let folder = format!("{}/workers", cluster_job::path(job));
    let paths = opened.list(&folder).await.map_err(|error| storage::failure(error, spec))?;
    let parsed = paths.iter().filter_map(|path| process_of(path.strip_prefix(&folder)?));
    let processes: BTreeSet<(u32, u32)> =
        parsed.filter(|(_, of_slot)| slot.is_none_or(|slot| *of_slot == slot)).collect();
    for (attempt, slot) in &processes {
        let (attempt, pod) = (*attempt, *slot);
        let tag = Tag { trial: pod, attempt, pod, gang, with_trial: false, is_job: true };
        let folder = layout::logs_path(&format!("{folder}/{pod}"), attempt);
        print(spec, &folder, options, &tag, None, output).await?;
    }
    Ok(processes.len())
}

/// Parses attempt and slot from `/SLOT/logs/ATTEMPT/...`.
fn process_of(path: &str) -> Option<(u32, u32)> {
    let mut parts = path.strip_prefix('/')?.split('/');
    let slot = parts.next()?.parse().ok()?;
    let attempt = parts.nth(1)?.parse().ok()?;
    Some((attempt, slot))
}

/// Parses rank and sequence number from `.../RANK-SEQ.log`.
fn parse(path: &str) -> Option<(u32, u64)> {
    let name = path.rsplit_once('/')?.1.strip_suffix(".log")?;
    let (rank, seq) = name.split_once('-')?;
    Some((rank.parse().ok()?, seq.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn job_paths_give_attempt_and_slot() {
        let check = |path: &str, expected: Option<(u32, u32)>| {
            assert_eq!(process_of(path), expected, "{path}");
        };
        check("/3/logs/7/0-00000000.log", Some((7, 3)));
        check("/3/notes", None);
        check("x", None);
    }

    #[test]
    fn object_names_give_rank_and_number() {
        let check = |path: &str, expected: Option<(u32, u64)>| assert_eq!(parse(path), expected);
        check("a/logs/0/3-00000012.log", Some((3, 12)));
        check("a/logs/0/10-00000000.log", Some((10, 0)));
        check("a/logs/0/notes.txt", None);
        check("a/logs/0/x-1.log", None);
    }
}

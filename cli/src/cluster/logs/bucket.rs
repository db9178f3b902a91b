//! Logs in the storage.

use std::collections::BTreeSet;
use std::pin::pin;

use futures::TryStreamExt as _;
use k8s_openapi::jiff::Timestamp;
use stoker_storage::{Storage, StorageError, layout};

use super::line::{LineTime, LogLine, LogPrinter};
use super::tag::{Gang, Tag};

/// Stored logs of one attempt.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StoredLogs<'a> {
    pub(crate) storage: &'a Storage,
    /// Directory of the attempt's logs.
    pub(crate) folder: &'a str,
    /// Whether one object contains the lines of all ranks, as after a local run.
    pub(crate) is_merged: bool,
}

impl StoredLogs<'_> {
    /// Prints the logs, rank by rank. Returns the number of objects.
    pub(crate) async fn print(
        self,
        tag: &Tag,
        rank: Option<u32>,
        printer: &mut LogPrinter,
    ) -> Result<usize, StorageError> {
        let objects = self.storage.list_timed(self.folder).await?.into_iter();
        let mut objects: Vec<(u32, u64, String, i64)> = objects
            .filter_map(|(path, stored)| parse(&path).map(|(rank, seq)| (rank, seq, path, stored)))
            .filter(|(of, ..)| self.is_merged || rank.is_none_or(|rank| *of == rank))
            .collect();
        objects.sort();
        let paths = objects.iter().map(|(_, _, path, _)| path.clone()).collect();
        let mut reads = pin!(self.storage.get_each(paths));
        for (rank, _, _, stored) in &objects {
            let Some(bytes) = reads.try_next().await? else { break };
            let time = Timestamp::from_second(*stored).map_or(LineTime::Unknown, LineTime::Stored);
            let pod = match tag.is_job || self.is_merged {
                true => tag.pod,
                false => rank / tag.gang.ranks_per_pod,
            };
            let tag = Tag { pod, ..*tag };
            let has_ranks = !tag.is_job && !self.is_merged && tag.gang.world_size > 1;
            for line in String::from_utf8_lossy(&bytes).lines() {
                // The rank is only in the object name, so add the prefix.
                let text = match has_ranks && !line.starts_with("[rank=") {
                    true => format!("[rank={rank}] {line}"),
                    false => line.to_owned(),
                };
                printer.add(&tag, &LogLine { time, text });
            }
        }
        Ok(objects.len())
    }
}

/// Prints the stored logs of a job in its directory `path`, process by process. Returns the number
/// of processes.
pub(crate) async fn print_job(
    storage: &Storage,
    path: &str,
    gang: Gang,
    slot: Option<u32>,
    printer: &mut LogPrinter,
) -> Result<usize, StorageError> {
    let folder = format!("{path}/workers");
    let paths = storage.list(&folder).await?;
    let parsed = paths.iter().filter_map(|path| process_of(path.strip_prefix(&folder)?));
    let processes: BTreeSet<(u32, u32)> =
        parsed.filter(|(_, of_slot)| slot.is_none_or(|slot| *of_slot == slot)).collect();
    for (attempt, slot) in &processes {
        let (attempt, pod) = (*attempt, *slot);
        let tag = Tag { trial: pod, attempt, pod, gang, with_trial: false, is_job: true };
        let folder = layout::logs_path(&format!("{folder}/{pod}"), attempt);
        let stored = StoredLogs { storage, folder: &folder, is_merged: false };
        stored.print(&tag, None, printer).await?;
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

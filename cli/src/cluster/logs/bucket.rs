//! Logs in the storage.

use std::collections::{BTreeMap, BTreeSet};
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

/// An object with lines. A list sorts by rank, then by position.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct LogObject {
    rank: u32,
    seq: u64,
    path: String,
    /// Time of the last write, in seconds.
    stored: i64,
}

/// Position in the stored logs of one attempt.
#[derive(Debug, Default)]
pub(crate) struct Position {
    /// Bytes of each object that were printed.
    printed: BTreeMap<String, usize>,
    /// Objects that do not grow any more.
    complete: BTreeSet<String>,
}

impl Position {
    /// Returns the new complete lines of an object, which only grows.
    fn advance<'a>(&mut self, path: &str, bytes: &'a [u8]) -> &'a [u8] {
        let printed = self.printed.entry(path.to_owned()).or_default();
        let new = bytes.get(*printed..).unwrap_or_default();
        let num_complete = new.iter().rposition(|byte| *byte == b'\n').map_or(0, |last| last + 1);
        *printed += num_complete;
        &new[..num_complete]
    }
}

impl StoredLogs<'_> {
    /// Prints the logs, rank by rank. Returns the number of objects.
    pub(crate) async fn print(
        self,
        tag: &Tag,
        rank: Option<u32>,
        printer: &mut LogPrinter,
    ) -> Result<usize, StorageError> {
        let objects = self.objects(rank).await?;
        let paths = objects.iter().map(|object| object.path.clone()).collect();
        let mut reads = pin!(self.storage.get_each(paths));
        for object in &objects {
            let Some(bytes) = reads.try_next().await? else { break };
            self.add_lines(tag, object, &bytes, printer);
        }
        Ok(objects.len())
    }

    /// Prints the complete lines that were stored since `position`, and advances it.
    pub(crate) async fn print_new(
        self,
        tag: &Tag,
        rank: Option<u32>,
        printer: &mut LogPrinter,
        position: &mut Position,
    ) -> Result<(), StorageError> {
        let objects = self.objects(rank).await?;
        for (i, object) in objects.iter().enumerate() {
            // Of each rank, only the latest object grows.
            let is_latest = objects.get(i + 1).is_none_or(|next| next.rank != object.rank);
            if position.complete.contains(&object.path) {
                continue;
            }
            let bytes = self.storage.get(&object.path).await?;
            self.add_lines(tag, object, position.advance(&object.path, &bytes), printer);
            if !is_latest {
                position.complete.insert(object.path.clone());
            }
        }
        Ok(())
    }

    /// Returns the objects of the selected rank, in the order of their lines.
    async fn objects(self, rank: Option<u32>) -> Result<Vec<LogObject>, StorageError> {
        let listed = self.storage.list_timed(self.folder).await?.into_iter();
        let mut objects: Vec<LogObject> = listed
            .filter_map(|(path, stored)| {
                let (rank, seq) = layout::parse_log_segment(&path)?;
                Some(LogObject { rank, seq, path, stored })
            })
            .filter(|object| self.is_merged || rank.is_none_or(|rank| object.rank == rank))
            .collect();
        objects.sort();
        Ok(objects)
    }

    fn add_lines(self, tag: &Tag, object: &LogObject, bytes: &[u8], printer: &mut LogPrinter) {
        let rank = object.rank;
        let time =
            Timestamp::from_second(object.stored).map_or(LineTime::Unknown, LineTime::Stored);
        let pod = match tag.is_job || self.is_merged {
            true => tag.pod,
            false => rank / tag.gang.ranks_per_pod,
        };
        let tag = Tag { pod, ..*tag };
        let has_ranks = !tag.is_job && !self.is_merged && tag.gang.world_size > 1;
        for line in String::from_utf8_lossy(bytes).lines() {
            // The rank is only in the object name, so add the prefix.
            let text = match has_ranks && !line.starts_with("[rank=") {
                true => format!("[rank={rank}] {line}"),
                false => line.to_owned(),
            };
            printer.add(&tag, &LogLine { time, text });
        }
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
    let processes = job_processes(storage, path, slot).await?;
    for (attempt, slot) in &processes {
        let (attempt, pod) = (*attempt, *slot);
        let tag = Tag { trial: pod, attempt, pod, gang, with_trial: false, is_job: true };
        let folder = layout::logs_path(&layout::worker_path(path, pod), attempt);
        let stored = StoredLogs { storage, folder: &folder, is_merged: false };
        stored.print(&tag, None, printer).await?;
    }
    Ok(processes.len())
}

/// Returns attempt and slot of each process of a job that has stored logs, in their order.
pub(crate) async fn job_processes(
    storage: &Storage,
    path: &str,
    slot: Option<u32>,
) -> Result<BTreeSet<(u32, u32)>, StorageError> {
    let folder = layout::workers_path(path);
    let paths = storage.list(&folder).await?;
    let parsed = paths.iter().filter_map(|path| process_of(path.strip_prefix(&folder)?));
    Ok(parsed.filter(|(_, of_slot)| slot.is_none_or(|slot| *of_slot == slot)).collect())
}

/// Parses attempt and slot from `/SLOT/logs/ATTEMPT/...`.
fn process_of(path: &str) -> Option<(u32, u32)> {
    let mut parts = path.strip_prefix('/')?.split('/');
    let slot = parts.next()?.parse().ok()?;
    let attempt = parts.nth(1)?.parse().ok()?;
    Some((attempt, slot))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_a_growing_object_are_new_once() {
        let mut position = Position::default();
        let mut check = |path: &str, bytes: &str, expected: &str| {
            assert_eq!(position.advance(path, bytes.as_bytes()), expected.as_bytes(), "{bytes:?}");
        };
        check("0-0.log", "a\nb", "a\n");
        check("0-0.log", "a\nb", "");
        check("0-0.log", "a\nbc\nd\n", "bc\nd\n");
        check("0-1.log", "e\n", "e\n");
        check("0-0.log", "a\nbc\nd\n", "");
        check("0-0.log", "", "");
    }

    #[test]
    fn job_paths_give_attempt_and_slot() {
        let check = |path: &str, expected: Option<(u32, u32)>| {
            assert_eq!(process_of(path), expected, "{path}");
        };
        check("/3/logs/7/0-00000000.log", Some((7, 3)));
        check("/3/notes", None);
        check("x", None);
    }
}

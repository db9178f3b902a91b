//! Checkpoint retention for programs without a runner.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::sync::mpsc::{SyncSender, sync_channel};

use stoker_api::contract::FALLBACK_CHECKPOINTS;
use stoker_storage::{Storage, StorageError, layout};
use tokio::runtime::Handle;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::{SavedCheckpoint, delete, parse};

/// Number of checkpoints that a program without a runner retains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RetentionLimits {
    /// Number of latest checkpoints; at least 1 is retained.
    pub(crate) latest: u32,
    /// Number of best checkpoints by the searched metric.
    pub(crate) best: u32,
}

impl RetentionLimits {
    fn during_training(self) -> Self {
        Self { latest: self.latest.max(FALLBACK_CHECKPOINTS), ..self }
    }
}

impl Default for RetentionLimits {
    fn default() -> Self {
        Self { latest: 1, best: 1 }
    }
}

/// A complete checkpoint.
#[derive(Clone, Debug, PartialEq)]
struct CompleteCheckpoint {
    name: String,
    metric: Option<f64>,
}

/// Returns the checkpoints to delete, in the order of `known`. A checkpoint of a later attempt
/// counts as newer than all of an earlier attempt, which had corrupt newer checkpoints. Among equal
/// metrics, the checkpoint with the fewest batches is the best, then that of the newest attempt.
///
/// Those in `refused` stay, and do not count: they may be corrupt, or intact and only of a format
/// that this program does not know. The checkpoint with the most batches stays too, because an
/// earlier process may have refused it: a short training must not replace a long one.
fn prunable(
    limits: RetentionLimits,
    smaller_is_better: bool,
    known: &[CompleteCheckpoint],
    refused: &BTreeSet<String>,
) -> Vec<String> {
    let age = |known: &CompleteCheckpoint| {
        layout::parse_checkpoint_name(&known.name).map(|(batches, attempt)| (attempt, batches))
    };
    let mut by_age: Vec<&CompleteCheckpoint> = known.iter().collect();
    by_age.sort_by_key(|known| Reverse(age(known)));
    let sign = if smaller_is_better { 1.0 } else { -1.0 };
    let loss = |known: &CompleteCheckpoint| {
        known.metric.filter(|metric| !metric.is_nan()).map(|metric| sign * metric)
    };
    let mut best: Vec<(f64, &CompleteCheckpoint)> =
        by_age.iter().filter_map(|known| Some((loss(known)?, *known))).collect();
    let batches = |known: &CompleteCheckpoint| age(known).map(|(_, batches)| batches);
    // Stable: the newest attempt stays first.
    best.sort_by(|a, b| a.0.total_cmp(&b.0).then_with(|| batches(a.1).cmp(&batches(b.1))));
    let best = best.into_iter().map(|(_, known)| known).collect();
    let mut kept: BTreeSet<&str> = refused.iter().map(String::as_str).collect();
    let longest = known.iter().max_by_key(|known| batches(known));
    kept.extend(longest.map(|known| known.name.as_str()));
    for (ranked, num) in [(by_age, limits.latest.max(1)), (best, limits.best)] {
        let usable = ranked.iter().filter(|known| !refused.contains(&known.name));
        kept.extend(usable.take(num as usize).map(|known| known.name.as_str()));
    }
    let is_prunable = |known: &&CompleteCheckpoint| !kept.contains(known.name.as_str());
    known.iter().filter(is_prunable).map(|known| known.name.clone()).collect()
}

/// Message to the retention task.
enum Message {
    Saved(CompleteCheckpoint),
    /// Names of checkpoints that could not be restored.
    Refused(Vec<String>),
    /// Name of a checkpoint that the program has deleted.
    Deleted(String),
    /// Reply after all earlier messages are handled. With `is_over`, first prune to the final
    /// number of checkpoints.
    Finish {
        is_over: bool,
        done: SyncSender<()>,
    },
}

/// Handle to the background task that deletes checkpoints as new ones are saved.
#[derive(Debug)]
pub(crate) struct Retention(UnboundedSender<Message>);

impl Retention {
    pub(crate) fn start(rt: &Handle, task: RetentionTask) -> Self {
        let (sender, messages) = unbounded_channel();
        rt.spawn(task.run(messages));
        Self(sender)
    }

    /// Reports a new checkpoint, so that the task deletes those no longer retained. Never blocks.
    pub(crate) fn record_saved(&self, saved: &SavedCheckpoint) {
        let known = CompleteCheckpoint { name: saved.name.clone(), metric: saved.metric };
        // Ignore the error: the task only ends with the process.
        let _ = self.0.send(Message::Saved(known));
    }

    /// Reports checkpoints that could not be restored. Never blocks.
    pub(crate) fn record_refused(&self, names: Vec<String>) {
        // Ignore the error: the task only ends with the process.
        let _ = self.0.send(Message::Refused(names));
    }

    /// Reports a checkpoint that the program has deleted, so that the next best one is retained.
    /// Never blocks.
    pub(crate) fn record_deleted(&self, name: &str) {
        // Ignore the error: the task only ends with the process.
        let _ = self.0.send(Message::Deleted(name.to_owned()));
    }

    /// Waits until all pending deletions are done. With `is_over`, training no longer needs
    /// fallback checkpoints, and they are deleted too.
    pub(crate) fn finish(&self, is_over: bool) {
        let (done, finished) = sync_channel(1);
        if self.0.send(Message::Finish { is_over, done }).is_ok() {
            let _ = finished.recv();
        }
    }
}

/// Task that deletes checkpoints of one trial.
#[derive(Debug)]
pub(crate) struct RetentionTask {
    pub(crate) storage: Storage,
    pub(crate) trial_path: String,
    pub(crate) attempt: u32,
    pub(crate) limits: RetentionLimits,
    pub(crate) smaller_is_better: bool,
}

impl RetentionTask {
    async fn run(self, mut messages: UnboundedReceiver<Message>) {
        let (mut known, mut refused, mut has_earlier) = (vec![], BTreeSet::new(), false);
        while let Some(message) = messages.recv().await {
            match message {
                Message::Saved(saved) => known.push(saved),
                Message::Refused(names) => {
                    refused.extend(names);
                    continue;
                }
                Message::Deleted(name) => {
                    known.retain(|known: &CompleteCheckpoint| known.name != name);
                    continue;
                }
                Message::Finish { is_over, done } => {
                    if is_over && has_earlier {
                        self.prune(self.limits, &mut known, &refused).await;
                    }
                    let _ = done.send(());
                    continue;
                }
            }
            // List earlier attempts at the first save, not before, to keep the start fast.
            if !has_earlier {
                match self.list_earlier(&mut refused).await {
                    Ok(earlier) => known.splice(..0, earlier).for_each(drop),
                    Err(error) => {
                        eprintln!(
                            "stoker: cannot list checkpoints: {error}; retrying at the next save"
                        );
                        continue;
                    }
                }
                has_earlier = true;
            }
            self.prune(self.limits.during_training(), &mut known, &refused).await;
        }
    }

    /// Returns the complete checkpoints of earlier attempts. Deletes the remains of their
    /// interrupted saves. Adds checkpoints with unreadable manifests to `refused`.
    ///
    /// # Errors
    ///
    /// Fails if the storage is unavailable: some manifests cannot be read, and no other can.
    async fn list_earlier(
        &self,
        refused: &mut BTreeSet<String>,
    ) -> Result<Vec<CompleteCheckpoint>, StorageError> {
        let (mut known, mut unreadable, mut is_any_read) = (vec![], vec![], false);
        for name in self.storage.folders(&layout::checkpoints_path(&self.trial_path)).await? {
            match layout::parse_checkpoint_name(&name) {
                Some((_, attempt)) if attempt < self.attempt => {}
                _ => continue,
            }
            let path = layout::manifest_path(&self.trial_path, &name);
            match self.storage.get(&path).await {
                Ok(text) => {
                    is_any_read = true;
                    let metric = parse(&text).ok().and_then(|manifest| manifest.metric);
                    let metric = metric.as_deref().and_then(stoker_api::number::parse);
                    known.push(CompleteCheckpoint { name, metric });
                }
                Err(StorageError::NotFound { .. }) => {
                    delete(&self.storage, &self.trial_path, &name).await?;
                }
                Err(error) => {
                    if !refused.contains(&name) {
                        unreadable.push((name.clone(), error));
                    }
                    known.push(CompleteCheckpoint { name, metric: None });
                }
            }
        }
        if let (Some((_, error)), false) = (unreadable.first(), is_any_read) {
            return Err(error.clone());
        }
        for (name, error) in unreadable {
            eprintln!("stoker: cannot read checkpoint {name}, which is therefore kept: {error}");
            refused.insert(name);
        }
        Ok(known)
    }

    async fn prune(
        &self,
        limits: RetentionLimits,
        known: &mut Vec<CompleteCheckpoint>,
        refused: &BTreeSet<String>,
    ) {
        for name in prunable(limits, self.smaller_is_better, known, refused) {
            match delete(&self.storage, &self.trial_path, &name).await {
                Ok(()) => known.retain(|known| known.name != name),
                Err(error) => {
                    eprintln!(
                        "stoker: cannot delete checkpoint {name}: {error}; retrying at the next \
                         save"
                    );
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latest_and_best_are_kept() {
        type Known<'a> = &'a [(&'a str, Option<f64>)];
        let check_refused = |refused: &[&str], limits, known: Known<'_>, expected: &[&str]| {
            let refused = refused.iter().map(|name| (*name).to_owned()).collect();
            let (latest, best): (u32, u32) = limits;
            let limits = RetentionLimits { latest, best };
            let known: Vec<CompleteCheckpoint> = known
                .iter()
                .map(|(name, metric)| CompleteCheckpoint {
                    name: (*name).to_owned(),
                    metric: *metric,
                })
                .collect();
            assert_eq!(
                prunable(limits, true, &known, &refused),
                expected,
                "{limits:?} of {known:?}"
            );
        };
        let check = |limits, known: Known<'_>, expected: &[&str]| {
            check_refused(&[], limits, known, expected);
        };
        let [a, b, c, d] = ["000000000100-0", "000000000200-0", "000000000300-0", "000000000400-0"];
        let all = [(a, Some(0.5)), (b, Some(0.25)), (c, Some(0.75)), (d, None)];
        check((1, 1), &all, &[a, c]);
        check((1, 0), &all, &[a, b, c]);
        // The latest is always retained, since a restart needs it.
        check((0, 0), &all, &[a, b, c]);
        check((2, 2), &all, &[]);
        check((u32::MAX, 1), &all, &[]);
        // Among equal metrics the one with the fewest batches is best; NaN is never best.
        check((1, 1), &[(a, Some(0.5)), (b, Some(0.5)), (c, Some(f64::NAN)), (d, None)], &[b, c]);
        // The second attempt resumed from batch 100, because it could not read batch 400.
        check((1, 0), &[(a, None), (d, None), ("000000000150-1", None)], &[a]);
        // It trained batch 200 again, with the same metric or with a worse one.
        let (again, next) = ("000000000200-1", "000000000300-1");
        let same = [(a, None), (b, Some(0.5)), (again, Some(0.5)), (next, None)];
        check((1, 1), &same, &[a, b]);
        let worse = [(a, None), (b, Some(0.5)), (again, Some(0.75)), (next, None)];
        check((1, 1), &worse, &[a, again]);
        check_refused(&[b], (1, 1), &worse, &[a]);
        check_refused(&[b, c], (2, 0), &[(a, None), (b, None), (c, None), (again, None)], &[]);
        check_refused(&[b], (1, 0), &[(a, None), (b, None), (c, None), (again, None)], &[a]);
        let larger = [(a, Some(0.5)), (b, Some(0.25)), (c, None)];
        let larger =
            larger.map(|(name, metric)| CompleteCheckpoint { name: name.to_owned(), metric });
        let limits = RetentionLimits::default();
        assert_eq!(prunable(limits, false, &larger, &BTreeSet::new()), [b]);
    }
}

//! Which checkpoints a program that trains alone keeps: no runner deletes them.

use std::sync::mpsc::{SyncSender, sync_channel};

use stoker_storage::{Storage, StorageError, layout};
use tokio::runtime::Handle;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::{Saved, delete, parse};

/// How many checkpoints a program that trains alone keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Keep {
    /// The latest; at least 1 is kept.
    pub(crate) latest: u32,
    /// The best by the searched metric.
    pub(crate) best: u32,
}

/// The latest checkpoints to keep while training may still resume from them: the newest, and others if it is
/// corrupt. As many as a runner keeps.
const FALLBACKS: u32 = 3;

impl Keep {
    fn while_training(self) -> Self {
        Self { latest: self.latest.max(FALLBACKS), ..self }
    }
}

impl Default for Keep {
    fn default() -> Self {
        Self { latest: 1, best: 1 }
    }
}

/// A complete checkpoint.
#[derive(Clone, Debug, PartialEq)]
struct Known {
    name: String,
    metric: Option<f64>,
}

/// Names of the checkpoints to delete, in the order of `known`. A later attempt is later than any batch of an
/// earlier one: it resumed because the earlier attempt's newer checkpoints were corrupt. Of equal metrics the
/// first checkpoint is the best.
fn superfluous(keep: Keep, smaller_is_better: bool, known: &[Known]) -> Vec<String> {
    let age = |known: &Known| {
        layout::parse_checkpoint_name(&known.name).map(|(batches, attempt)| (attempt, batches))
    };
    let mut by_age: Vec<&Known> = known.iter().collect();
    by_age.sort_by_key(|known| age(known));
    let sign = if smaller_is_better { 1.0 } else { -1.0 };
    let loss = |known: &Known| known.metric.filter(|metric| !metric.is_nan()).map(|it| sign * it);
    let mut best: Vec<(f64, &Known)> =
        by_age.iter().filter_map(|known| Some((loss(known)?, *known))).collect();
    best.sort_by(|a, b| a.0.total_cmp(&b.0));
    let latest = by_age.iter().rev().take(keep.latest.max(1) as usize).copied();
    let best = best.iter().take(keep.best as usize).map(|(_, known)| *known);
    let kept: Vec<&Known> = latest.chain(best).collect();
    let is_superfluous = |known: &&Known| !kept.iter().any(|kept| kept.name == known.name);
    known.iter().filter(is_superfluous).map(|known| known.name.clone()).collect()
}

/// What the task that deletes is sent.
enum Message {
    Saved(Known),
    /// To answer when all before is done, and if training is over, when only what stays is left.
    Finish {
        is_over: bool,
        done: SyncSender<()>,
    },
}

/// Deletes checkpoints beside the loop, as others are saved.
#[derive(Debug)]
pub(crate) struct Retention(UnboundedSender<Message>);

impl Retention {
    pub(crate) fn start(rt: &Handle, task: RetentionTask) -> Self {
        let (sender, messages) = unbounded_channel();
        rt.spawn(task.run(messages));
        Self(sender)
    }

    /// Deletes what this checkpoint makes superfluous; never waits.
    pub(crate) fn saved(&self, saved: &Saved) {
        let known = Known { name: saved.name.clone(), metric: saved.metric };
        // The task ends with the process.
        let _ = self.0.send(Message::Saved(known));
    }

    /// Waits until all that is superfluous is deleted. Training keeps no checkpoints to fall back to once it
    /// `is_over`.
    pub(crate) fn finish(&self, is_over: bool) {
        let (done, finished) = sync_channel(1);
        if self.0.send(Message::Finish { is_over, done }).is_ok() {
            let _ = finished.recv();
        }
    }
}

/// Deletes checkpoints of one trial.
#[derive(Debug)]
pub(crate) struct RetentionTask {
    pub(crate) storage: Storage,
    pub(crate) trial_path: String,
    pub(crate) attempt: u32,
    pub(crate) keep: Keep,
    pub(crate) smaller_is_better: bool,
}

impl RetentionTask {
    async fn run(self, mut messages: UnboundedReceiver<Message>) {
        let (mut known, mut has_earlier) = (vec![], false);
        while let Some(message) = messages.recv().await {
            match message {
                Message::Saved(saved) => known.push(saved),
                Message::Finish { is_over, done } => {
                    if is_over && has_earlier {
                        self.prune(self.keep, &mut known).await;
                    }
                    let _ = done.send(());
                    continue;
                }
            }
            // Read at the first save, to keep the start short.
            if !has_earlier {
                match self.earlier().await {
                    Ok(earlier) => known.splice(..0, earlier).for_each(drop),
                    Err(error) => {
                        eprintln!(
                            "stoker: cannot list checkpoints: {error}; the next save tries again"
                        );
                        continue;
                    }
                }
                has_earlier = true;
            }
            self.prune(self.keep.while_training(), &mut known).await;
        }
    }

    /// The complete checkpoints of earlier attempts. Deletes what interrupted saves of these have left.
    async fn earlier(&self) -> Result<Vec<Known>, StorageError> {
        let mut known = vec![];
        for name in self.storage.folders(&layout::checkpoints_path(&self.trial_path)).await? {
            match layout::parse_checkpoint_name(&name) {
                Some((_, attempt)) if attempt < self.attempt => {}
                _ => continue,
            }
            let path = layout::manifest_path(&self.trial_path, &name);
            match self.storage.get(&path).await {
                Ok(text) => {
                    let metric = parse(&text).ok().and_then(|manifest| manifest.metric);
                    let metric = metric.as_deref().and_then(stoker_api::number::parse);
                    known.push(Known { name, metric });
                }
                Err(StorageError::NotFound { .. }) => {
                    delete(&self.storage, &self.trial_path, &name).await?;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(known)
    }

    async fn prune(&self, keep: Keep, known: &mut Vec<Known>) {
        for name in superfluous(keep, self.smaller_is_better, known) {
            match delete(&self.storage, &self.trial_path, &name).await {
                Ok(()) => known.retain(|known| known.name != name),
                Err(error) => {
                    eprintln!(
                        "stoker: cannot delete checkpoint {name}: {error}; the next save tries again"
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
    fn the_latest_and_the_best_are_kept() {
        let check = |keep: (u32, u32), known: &[(&str, Option<f64>)], expected: &[&str]| {
            let keep = Keep { latest: keep.0, best: keep.1 };
            let known: Vec<Known> = known
                .iter()
                .map(|(name, metric)| Known { name: (*name).to_owned(), metric: *metric })
                .collect();
            assert_eq!(superfluous(keep, true, &known), expected, "{keep:?} of {known:?}");
        };
        let [a, b, c, d] = ["000000000100-0", "000000000200-0", "000000000300-0", "000000000400-0"];
        let all = [(a, Some(0.5)), (b, Some(0.25)), (c, Some(0.75)), (d, None)];
        check((1, 1), &all, &[a, c]);
        check((1, 0), &all, &[a, b, c]);
        // A restart needs the latest.
        check((0, 0), &all, &[a, b, c]);
        check((2, 2), &all, &[]);
        check((u32::MAX, 1), &all, &[]);
        // Of equal metrics the first; a metric that is no number is the best of none.
        check((1, 1), &[(a, Some(0.5)), (b, Some(0.5)), (c, Some(f64::NAN)), (d, None)], &[b, c]);
        // The second attempt resumed from batch 100, because batch 400 was corrupt.
        check((1, 0), &[(a, None), (d, None), ("000000000150-1", None)], &[a, d]);
        let larger = [(a, Some(0.5)), (b, Some(0.25)), (c, None)];
        let larger = larger.map(|(name, metric)| Known { name: name.to_owned(), metric });
        assert_eq!(superfluous(Keep::default(), false, &larger), [b]);
    }
}

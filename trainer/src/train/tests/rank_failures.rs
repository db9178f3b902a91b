//! Every kind of data on one, two and three ranks. One rank dies in the middle of an epoch, after
//! an older checkpoint, and is later preempted. Results are bit-identical, and each row appears
//! once.

use std::fmt::Debug;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use stoker_api::contract::TrialConfig;
use stoker_storage::Storage;
use stoker_storage::metrics;

use super::data_kinds::{BATCHES, of_ranks_with_config};
use super::*;
use crate::stop::StopSignal;

/// Batches between checkpoints.
const PERIOD: u64 = 3;

/// Number of an attempt and the batch from which it started.
type Started = (u32, u64);

/// Contents of a row, without the attempt number.
type RowContents = (u64, String, u64, Vec<(String, u64)>);

/// How a rank ends.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum FailurePoint {
    /// At the end of the granted length.
    None,
    /// With an error after this batch, once the previous checkpoint is complete.
    Fails(u64),
    /// Preempted after this batch, as by a signal.
    Preempted(u64),
}

/// Callback that ends a rank after a batch.
pub(super) struct RankFailure {
    pub(super) ends: FailurePoint,
    pub(super) folder: PathBuf,
    pub(super) stop: StopSignal,
}

impl Callback for RankFailure {
    fn on_batch_end(&mut self, _: &Logs, control: &mut Control) -> Result<()> {
        match self.ends {
            FailurePoint::Fails(at) if at == control.batches() => {
                wait_for_checkpoint(&self.folder, last_saved(at));
                Err("the rank fails".into())
            }
            FailurePoint::Preempted(at) if at == control.batches() => {
                self.stop.set();
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

impl RankFailure {
    /// Returns the callback for this rank if rank `of` ends like this.
    pub(super) fn of(context: &Context, ends: FailurePoint, of: usize) -> Box<dyn Callback> {
        let ends = if context.distributed().rank() == of { ends } else { FailurePoint::None };
        let folder = PathBuf::from(&context.config.storage.url);
        Self { ends, folder, stop: context.stop.clone() }.boxed()
    }
}

/// Returns the batch of the last checkpoint of a process that dies after this batch.
pub(super) fn last_saved(batch: u64) -> u64 {
    (batch - 1) / PERIOD * PERIOD
}

/// Waits until the checkpoint at this batch is complete.
fn wait_for_checkpoint(folder: &Path, batch: u64) {
    let start = Instant::now();
    let prefix = format!("{batch:012}-");
    let is_complete = |path: PathBuf| {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        name.starts_with(&prefix) && path.join("manifest.json").exists()
    };
    let has_checkpoint = || {
        let entries = std::fs::read_dir(folder.join("trial/checkpoints"));
        entries.into_iter().flatten().any(|entry| is_complete(entry.unwrap().path()))
    };
    while batch > 0 && !has_checkpoint() {
        assert!(start.elapsed() < Duration::from_secs(60), "no checkpoint of batch {batch}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Configures frequent checkpoints and rows, with different periods.
fn often(config: &mut TrialConfig) {
    config.checkpoint_period = Some(Length::new(Unit::Batches, PERIOD));
    config.scheduling_unit = 2;
}

/// Runs one attempt of a gang in `folder`. Returns each rank's result, and where the attempt
/// started. If a rank dies, the last rows may or may not be stored.
pub(super) fn attempt<T: Send>(
    folder: &Path,
    size: usize,
    has_rows_stored: bool,
    train: impl Fn(&Context) -> Result<T> + Sync,
) -> (Vec<Result<T>>, Started) {
    let ranks = of_ranks_with_config(folder, size, BATCHES, often, |context| {
        let trained = train(context);
        if has_rows_stored && context.distributed().rank() == 0 {
            context.io().flush().unwrap();
        }
        let from = context.config.resume_from.first();
        let from = from.map_or(0, |checkpoint| checkpoint.name[..12].parse().unwrap());
        (trained, (context.config.attempt, from))
    });
    let started = ranks[0].1;
    (ranks.into_iter().map(|(trained, _)| trained).collect(), started)
}

/// Returns the valid rows of these attempts.
pub(super) fn rows_that_count(folder: &Path, attempts: &[Started]) -> Vec<RowContents> {
    let storage = Storage::open(folder.to_str().unwrap(), None).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let rows = runtime.block_on(metrics::read(&storage, "trial", attempts)).unwrap();
    let contents = rows.into_iter().map(|row| {
        let metrics = row.metrics.into_iter().map(|(name, value)| (name, value.to_bits()));
        (row.batches, row.group, row.epoch, metrics.collect())
    });
    contents.collect()
}

/// Trains without interruption. Then, for each of these batches, one rank dies after it, and the
/// next attempt is preempted. Results and rows must be the same. Returns the results and the number
/// of rows that were written twice.
pub(super) fn check_failure_points<T: PartialEq + Send + Debug>(
    what: &str,
    size: usize,
    batches: RangeInclusive<u64>,
    train: impl Fn(&Context, FailurePoint, usize) -> Result<T> + Sync,
) -> (T, usize) {
    let straight = brief_folder();
    let (ranks, started) =
        attempt(straight.path(), size, false, |context| train(context, FailurePoint::None, 0));
    let mut trained: Vec<T> = ranks.into_iter().map(Result::unwrap).collect();
    assert!(trained.iter().all(|rank| *rank == trained[0]), "{what} on {size}: ranks differ");
    let rows_straight = rows_that_count(straight.path(), &[started]);
    assert!(rows_straight.iter().any(|(_, group, ..)| group == "validation"), "{rows_straight:?}");
    let mut num_twice = 0;
    for batch in batches {
        let what = format!("{what} on {size}, ends after {batch}");
        let folder = brief_folder();
        let of = batch as usize % size;
        // A killed process leaves the rows that it has stored, up to any batch before its end.
        let (died, first) = attempt(folder.path(), size, batch % 2 == 1, |context| {
            train(context, FailurePoint::Fails(batch), of)
        });
        assert!(died.iter().all(Result::is_err), "{what}");
        let error = died[of].as_ref().unwrap_err().to_string();
        assert_eq!(error, "callback RankFailure: the rank fails", "{what}");
        let (left, second) = attempt(folder.path(), size, false, |context| {
            train(context, FailurePoint::Preempted(batch), of)
        });
        for left in left {
            let error = left.unwrap_err();
            assert_eq!(exit_code(&*error), ExitCode::Preempted, "{what}: {error}");
        }
        let (ranks, third) =
            attempt(folder.path(), size, false, |context| train(context, FailurePoint::None, 0));
        assert_eq!((first.1, second.1), (0, last_saved(batch)), "{what}");
        // A gang receives a signal with its next exchange: at a save, or with the next gradients.
        let is_late = third.1.checked_sub(batch).unwrap();
        assert!(is_late <= u64::from(size > 1), "{what}: stopped {is_late} batches late");
        for (rank, result) in ranks.into_iter().enumerate() {
            assert!(result.unwrap() == trained[0], "{what}: rank {rank} has other results");
        }
        let mut attempts = vec![first, second, third];
        // An attempt that stored nothing left no attempt number, so the next one has the same.
        attempts.dedup_by_key(|(attempt, _)| *attempt);
        assert_eq!(rows_that_count(folder.path(), &attempts), rows_straight, "{what}");
        num_twice += rows(folder.path()).len() - rows_straight.len();
        if folder.path().join("built").exists() {
            let built = std::fs::read_to_string(folder.path().join("built")).unwrap();
            assert_eq!(built.lines().count(), 1, "{what}: the set was built again");
        }
    }
    (trained.swap_remove(0), num_twice)
}

#[test]
fn recovery_is_bit_identical_for_every_data_kind() {
    let _stream = lock_random_stream();
    let mut of_kinds = BTreeMap::new();
    for kind in more_data_kinds::all() {
        for size in [1, 2, 3] {
            let (bits, num_twice) = check_failure_points(kind, size, 1..=7, |context, ends, of| {
                let workers = context.config.attempt as usize % 3;
                more_data_kinds::rank(
                    context,
                    kind,
                    workers,
                    vec![RankFailure::of(context, ends, of)],
                )
            });
            // At least the attempts that die after batches 3 and 5 stored their last row.
            assert!(num_twice >= 2, "{kind} on {size}: {num_twice} rows were written twice");
            if size == 1 {
                of_kinds.insert(kind, bits);
            }
        }
    }
    // The same samples in the same order give the same training, regardless of their container.
    let same = |kinds: &[&str]| {
        for kind in kinds {
            assert!(of_kinds[kind] == of_kinds[kinds[0]], "{kind} differs from {}", kinds[0]);
        }
    };
    same(&["arrays", "list", "named", "items", "cached"]);
    same(&["own weights", "weighted items"]);
    same(&["outputs in a list", "outputs by name"]);
    #[cfg(feature = "learner")]
    same(&["arrays", "dataset", "dataset by index"]);
    // All other kinds differ from each other.
    let mut different: Vec<_> = of_kinds.values().collect();
    different.sort();
    different.dedup();
    assert_eq!(different.len(), 13, "{:?}", of_kinds.keys());
}

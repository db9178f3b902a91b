//! Each kind of data on one, two and three ranks, of which one dies in the midst of an epoch, whose
//! checkpoints are older, and which is then asked to leave: the same bits, and each row once.

use std::fmt::Debug;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use stoker_api::contract::TrialConfig;
use stoker_storage::Storage;
use stoker_storage::metrics;

use super::kinds::{BATCHES, of_ranks_told};
use super::*;
use crate::stop::StopSignal;

/// Batches between two checkpoints.
const PERIOD: u64 = 3;

/// An attempt and the batch that it started from.
type Started = (u32, u64);

/// What a row says, without what tells attempts apart.
type RowSaid = (u64, String, u64, Vec<(String, u64)>);

/// How a rank ends after a batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Ends {
    /// At the length.
    Not,
    /// Without a word; the checkpoint before is whole by then.
    Dies(u64),
    /// As a signal asks it to.
    Leaves(u64),
}

/// Ends a rank after a batch.
pub(super) struct Fate {
    pub(super) ends: Ends,
    pub(super) folder: PathBuf,
    pub(super) stop: StopSignal,
}

impl Callback for Fate {
    fn on_batch_end(&mut self, _: &Logs, control: &mut Control) -> Result<()> {
        match self.ends {
            Ends::Dies(at) if at == control.batches() => {
                until_whole(&self.folder, last_saved(at));
                Err("it dies".into())
            }
            Ends::Leaves(at) if at == control.batches() => {
                self.stop.set();
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

impl Fate {
    /// What becomes of this rank where rank `of` ends so.
    pub(super) fn of(context: &Context, ends: Ends, of: usize) -> Box<dyn Callback> {
        let ends = if context.distributed().rank() == of { ends } else { Ends::Not };
        let folder = PathBuf::from(&context.config.storage.url);
        Self { ends, folder, stop: context.stop.clone() }.boxed()
    }
}

/// The batch of the last checkpoint of a process that dies at the end of a batch.
pub(super) fn last_saved(batch: u64) -> u64 {
    (batch - 1) / PERIOD * PERIOD
}

/// Waits until the checkpoint of a batch is one.
fn until_whole(folder: &Path, batch: u64) {
    let start = Instant::now();
    let of = format!("{batch:012}-");
    let is_whole = || {
        let found = std::fs::read_dir(folder.join("trial/checkpoints"));
        found.into_iter().flatten().map(|it| it.unwrap().path()).any(|it| {
            let name = it.file_name().unwrap().to_string_lossy().into_owned();
            name.starts_with(&of) && it.join("manifest.json").exists()
        })
    };
    while batch > 0 && !is_whole() {
        assert!(start.elapsed() < Duration::from_secs(60), "no checkpoint of batch {batch}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Saves and writes rows often, each at times of its own.
fn often(config: &mut TrialConfig) {
    config.checkpoint_period = Some(Length::new(Unit::Batches, PERIOD));
    config.scheduling_unit = 2;
}

/// One attempt of a gang in `folder`, of which one rank ends so: each rank's end, and where it
/// started. The rows of one that dies are stored or not, as it happens.
pub(super) fn attempt<T: Send>(
    folder: &Path,
    size: usize,
    has_rows_stored: bool,
    train: impl Fn(&Context) -> Result<T> + Sync,
) -> (Vec<Result<T>>, Started) {
    let told = of_ranks_told(folder, size, BATCHES, often, |context| {
        let trained = train(context);
        if has_rows_stored && context.distributed().rank() == 0 {
            context.outlet().flush().unwrap();
        }
        let from = context.config.resume_from.first();
        let from = from.map_or(0, |it| it.name[..12].parse().unwrap());
        (trained, (context.config.attempt, from))
    });
    let started = told[0].1;
    (told.into_iter().map(|it| it.0).collect(), started)
}

/// The rows that count of these attempts.
pub(super) fn rows_that_count(folder: &Path, attempts: &[Started]) -> Vec<RowSaid> {
    let storage = Storage::open(folder.to_str().unwrap(), None).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let rows = runtime.block_on(metrics::read(&storage, "trial", attempts)).unwrap();
    let said = rows.into_iter().map(|it| {
        let metrics = it.metrics.into_iter().map(|(name, value)| (name, value.to_bits()));
        (it.batches, it.group, it.epoch, metrics.collect())
    });
    said.collect()
}

/// Trains straight, and where after each of these batches one rank dies and the next attempt leaves:
/// the same results and rows. Gives the results, and the rows that were written twice.
pub(super) fn check_ends<T: PartialEq + Send + Debug>(
    what: &str,
    size: usize,
    batches: RangeInclusive<u64>,
    train: impl Fn(&Context, Ends, usize) -> Result<T> + Sync,
) -> (T, usize) {
    let straight = brief_folder();
    let (ranks, started) =
        attempt(straight.path(), size, false, |context| train(context, Ends::Not, 0));
    let mut trained: Vec<T> = ranks.into_iter().map(Result::unwrap).collect();
    assert!(trained.iter().all(|it| *it == trained[0]), "{what} on {size}: ranks differ");
    let rows_straight = rows_that_count(straight.path(), &[started]);
    assert!(rows_straight.iter().any(|it| it.1 == "validation"), "{rows_straight:?}");
    let mut num_twice = 0;
    for batch in batches {
        let what = format!("{what} on {size}, ends after {batch}");
        let folder = brief_folder();
        let of = batch as usize % size;
        // A process that is killed leaves the rows that it has stored: any up to there.
        let (died, first) = attempt(folder.path(), size, batch % 2 == 1, |context| {
            train(context, Ends::Dies(batch), of)
        });
        assert!(died.iter().all(Result::is_err), "{what}");
        let said = died[of].as_ref().unwrap_err().to_string();
        assert_eq!(said, "callback Fate: it dies", "{what}");
        let (left, second) =
            attempt(folder.path(), size, false, |context| train(context, Ends::Leaves(batch), of));
        for left in left {
            let error = left.unwrap_err();
            assert_eq!(exit_code(&*error), ExitCode::Preempted, "{what}: {error}");
        }
        let (ranks, third) =
            attempt(folder.path(), size, false, |context| train(context, Ends::Not, 0));
        assert_eq!((first.1, second.1), (0, last_saved(batch)), "{what}");
        // A gang hears of a signal with what it says next: as it saves, or with the next sums.
        let is_late = third.1.checked_sub(batch).unwrap();
        assert!(is_late <= u64::from(size > 1), "{what}: left {is_late} batches late");
        for (rank, it) in ranks.into_iter().enumerate() {
            assert!(it.unwrap() == trained[0], "{what}: rank {rank} has other results");
        }
        let mut attempts = vec![first, second, third];
        // One that has stored nothing has left no number to count on from.
        attempts.dedup_by_key(|it| it.0);
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
fn each_kind_of_data_goes_on_from_an_older_checkpoint_to_the_same_bits_and_rows() {
    let _stream = alone_on_the_stream();
    let mut of_kinds = BTreeMap::new();
    for kind in others::all() {
        for size in [1, 2, 3] {
            let (bits, num_twice) = check_ends(kind, size, 1..=7, |context, ends, of| {
                let workers = context.config.attempt as usize % 3;
                others::rank(context, kind, workers, vec![Fate::of(context, ends, of)])
            });
            // Of those that die after batches 3 and 5 at least, the last row was stored.
            assert!(num_twice >= 2, "{kind} on {size}: {num_twice} rows were written twice");
            if size == 1 {
                of_kinds.insert(kind, bits);
            }
        }
    }
    // The same samples in the same order are the same training, whatever they are kept in.
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
    // And what differs, differs.
    let mut different: Vec<_> = of_kinds.values().collect();
    different.sort();
    different.dedup();
    assert_eq!(different.len(), 13, "{:?}", of_kinds.keys());
}

//! Follows the logs of local runs: reads the growing segments of the storage again and again.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt as _;
use std::time::Duration;

use stoker_api::experiment::Experiment;
use stoker_engine::trial::{TrialRecord, closed};
use stoker_storage::{Storage, StorageError, layout};

use super::RecordedRun;
use super::steer::RunFiles;
use super::wait::stop_message;
use crate::cluster::logs::LogSelection;
use crate::cluster::logs::bucket::{Position, StoredLogs};
use crate::cluster::logs::line::{LogArgs, LogPrinter};
use crate::cluster::logs::tag::Tag;
use crate::cluster::resource::ClusterResource as _;
use crate::failure::Failure;
use crate::print::{self, Output};
use crate::run::record::read_trial;

/// Interval between two reads of a local directory.
const LOCAL_INTERVAL: Duration = Duration::from_millis(500);
/// Interval between two reads of a bucket, where list requests cost money.
const BUCKET_INTERVAL: Duration = Duration::from_secs(5);
/// Maximum number of consecutive failed reads of the storage.
const FAILURES_MAX: u32 = 60;

/// Prints new lines of stored logs, each once.
pub(crate) struct StoredFollower<'a> {
    storage: &'a Storage,
    printer: LogPrinter,
    args: LogArgs,
    rank: Option<u32>,
    output: Output,
    is_merged: bool,
    /// Position in the logs of each attempt.
    positions: BTreeMap<(u32, u32), Position>,
    /// Trials of which some lines were printed.
    begun: BTreeSet<u32>,
    num_failures: u32,
}

impl<'a> StoredFollower<'a> {
    /// Creates a follower. `is_merged`: one object contains the lines of all ranks.
    pub(crate) fn new(
        storage: &'a Storage,
        args: LogArgs,
        rank: Option<u32>,
        output: Output,
        is_merged: bool,
    ) -> Self {
        let printer = LogPrinter::new(args, rank, output).following();
        let (positions, begun) = (BTreeMap::new(), BTreeSet::new());
        Self { storage, printer, args, rank, output, is_merged, positions, begun, num_failures: 0 }
    }

    /// Prints the new lines of an attempt, or of a job's process. The first lines of a trial are
    /// limited by `--tail`. Failures of the storage are repeated by the next call.
    pub(crate) async fn print_new(&mut self, tag: &Tag, folder: &str) -> Result<(), Failure> {
        let stored = StoredLogs { storage: self.storage, folder, is_merged: self.is_merged };
        let position = self.positions.entry((tag.trial, tag.attempt)).or_default();
        let is_first = !self.begun.contains(&tag.trial);
        let mut first = LogPrinter::new(self.args, self.rank, self.output);
        let printer = if is_first { &mut first } else { &mut self.printer };
        let read = stored.print_new(tag, self.rank, printer, position).await;
        if is_first {
            first.finish();
        }
        self.begun.insert(tag.trial);
        self.count(read)
    }

    /// Tolerates failures of the storage, unless there are many in a row.
    fn count(&mut self, read: Result<(), StorageError>) -> Result<(), Failure> {
        match read {
            Ok(()) => self.num_failures = 0,
            Err(error) if self.num_failures < FAILURES_MAX => {
                if self.num_failures == 0 {
                    print::err(format!("stoker: {error}; retrying"));
                }
                self.num_failures += 1;
            }
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    /// Returns whether the latest reads have succeeded.
    pub(crate) fn is_up_to_date(&self) -> bool {
        self.num_failures == 0
    }

    /// Waits until the next read is due.
    pub(crate) async fn wait(&self) {
        let is_local = self.storage.folder().is_some();
        let interval = if is_local { LOCAL_INTERVAL } else { BUCKET_INTERVAL };
        tokio::time::sleep(interval).await;
    }
}

/// Trials of a run, read again when their files change.
struct Trials<'a> {
    files: &'a RunFiles,
    /// Latest record of each trial, with inode and time of its file.
    records: BTreeMap<u32, ((u64, i64, i64), TrialRecord)>,
}

impl Trials<'_> {
    /// Reads the changed trials; `None` if the record was deleted.
    fn read(&mut self) -> Result<Option<()>, Failure> {
        let folder = self.files.record.path().join("trials");
        let entries = match std::fs::read_dir(&folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(Failure::file("read", &folder, error)),
        };
        for entry in entries {
            let path = entry.map_err(|error| Failure::file("read", &folder, error))?.path();
            let index = path.file_name().and_then(|name| name.to_str()?.strip_suffix(".json"));
            let Some(index) = index.and_then(|index| index.parse().ok()) else { continue };
            let metadata = match path.metadata() {
                Ok(metadata) => metadata,
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
                Err(error) => return Err(Failure::file("read", &path, error)),
            };
            let version = (metadata.ino(), metadata.mtime(), metadata.mtime_nsec());
            if self.records.get(&index).is_none_or(|(known, _)| *known != version) {
                self.records.insert(index, (version, read_trial(&path)?));
            }
        }
        Ok(Some(()))
    }
}

/// Trials and lines to follow.
#[derive(Clone, Copy, Debug)]
pub(super) struct FollowTarget {
    /// Index of the only trial; `None` for all trials.
    pub(super) trial: Option<u32>,
    pub(super) selection: LogSelection,
}

/// Prints the lines of a run's trials from their latest attempts on, until they end or no runner is
/// alive.
pub(super) async fn follow(
    root: Option<&str>,
    run: &RecordedRun,
    target: FollowTarget,
    output: Output,
) -> Result<(), Failure> {
    let files = RunFiles::of(root, run, "follow the logs of")?;
    let storage = run.storage()?;
    let LogSelection { rank, args, .. } = target.selection;
    let latest = |trial: &TrialRecord| trial.status.attempts.last().map(|attempt| attempt.number);
    let first = run.trials.iter().filter_map(|(index, trial)| Some((*index, latest(trial)?)));
    let mut follow = Follow {
        run,
        target,
        lines: StoredFollower::new(&storage, args, rank, output, true),
        first: first.collect(),
        complete: BTreeSet::new(),
    };
    let mut trials = Trials { files: &files, records: BTreeMap::new() };
    loop {
        // The order matters: a runner records an end after it has stored all lines before it.
        let has_runner = files.has_runner()?;
        let experiment = files.record.experiment()?;
        let (Some(experiment), Some(())) = (experiment, trials.read()?) else {
            print::err(format!("experiment {} was deleted", run.name()));
            return Ok(());
        };
        let mut is_over = experiment.phase().is_terminal();
        for (_, trial) in trials.records.values() {
            if target.trial.is_none_or(|only| only == trial.spec.index) {
                is_over |= follow.print_trial(trial).await?;
            }
        }
        if is_over && follow.lines.is_up_to_date() {
            return Ok(());
        }
        if !has_runner {
            print::err(stop_message::<Experiment>(&run.name()));
            return Ok(());
        }
        follow.lines.wait().await;
    }
}

/// Lines of a run that were printed.
struct Follow<'a> {
    run: &'a RecordedRun,
    target: FollowTarget,
    lines: StoredFollower<'a>,
    /// First attempt of each trial to print; of other trials, all attempts are printed.
    first: BTreeMap<u32, u32>,
    /// Ended attempts, of which all lines were printed.
    complete: BTreeSet<(u32, u32)>,
}

impl Follow<'_> {
    /// Prints the new lines of a trial. Returns whether it is the only one, and no more follow.
    async fn print_trial(&mut self, trial: &TrialRecord) -> Result<bool, Failure> {
        let index = trial.spec.index;
        let FollowTarget { trial: only_trial, selection } = self.target;
        let first = self.first.get(&index).copied().unwrap_or(0);
        let mut is_over = only_trial.is_some() && closed(trial).is_some();
        for attempt in &trial.status.attempts {
            let number = attempt.number;
            let is_selected = match selection.attempt {
                Some(only) => number == only,
                None => number >= first,
            };
            if !is_selected || self.complete.contains(&(index, number)) {
                continue;
            }
            let (gang, with_trial) = (self.run.gang(), only_trial.is_none());
            let tag =
                Tag { trial: index, attempt: number, pod: 0, gang, with_trial, is_job: false };
            let folder = layout::logs_path(&self.run.paths.trial(index), number);
            self.lines.print_new(&tag, &folder).await?;
            if attempt.end.is_some() && self.lines.is_up_to_date() {
                self.complete.insert((index, number));
                is_over |= selection.attempt.is_some();
            }
        }
        Ok(is_over)
    }
}

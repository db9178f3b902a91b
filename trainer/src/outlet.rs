//! Where a trial's reports, metrics and checkpoints go: to a runner, or nowhere further than this
//! machine.

use std::collections::BTreeMap;
use std::fs::File;
use std::time::Duration;

use stoker_api::contract::{CheckpointRef, Directive, ExitCode, Report, ReportEvent, TrialConfig};
use stoker_storage::segments::Stored;
use stoker_storage::{Storage, hash, layout};
use tokio::runtime::Handle;
use tokio::sync::mpsc;

use crate::Result;
use crate::callback::Logs;
use crate::checkpoint::{
    Checkpoints, Keep, Parts, Place, Restored, Retention, RetentionTask, Save, Saved, delete_each,
};
use crate::metrics::MetricsWriter;
use crate::reporter::Reporter;
use crate::session::{Activity, GrantedLength, Reported};
use crate::terminal::Terminal;

mod background;
mod lock;

use background::Background;

/// What writes a checkpoint's files.
pub(crate) type Make = Box<dyn FnOnce() -> Result<Parts, String> + Send>;

/// The ways out of this process.
#[derive(Debug)]
pub(crate) struct Outlet {
    reporter: Option<Reporter>,
    files: Option<Files>,
    resume_from: Vec<CheckpointRef>,
    /// Whether a runner decides how long to train.
    has_runner: bool,
    /// Whether this is rank 0, which alone writes and reports.
    is_lead: bool,
    /// Global batches trained, by the last report, over all that the trial has trained.
    pub(crate) batches: u64,
    /// Batches at which the granted length ends, as last reported.
    pub(crate) batches_total: u64,
    /// The batches that the trial had trained before this training began: a warm start counts from 0, and
    /// the trial's record does not.
    pub(crate) base: u64,
    /// The checkpoint that was last saved by this process.
    last_saved: Option<CheckpointRef>,
    /// The checkpoint that this process has gone on from.
    pub(crate) restored: Option<String>,
    /// What the manifest of that checkpoint says of the validation at its batch.
    pub(crate) restored_validation: Option<(u64, Logs)>,
    /// Whether a loop of ours trains in this process: checkpoints are then its own.
    pub(crate) has_loop: bool,
    /// Whether the runner knows that this attempt trains.
    pub(crate) is_started: bool,
    pub(crate) reported: Reported,
    pub(crate) length: GrantedLength,
    pub(crate) activity: Activity,
    pub(crate) terminal: Terminal,
    /// Deletes checkpoints where no runner does.
    retention: Option<Retention>,
    /// Dropped after the others: their tasks run on it.
    _background: Background,
    /// Keeps other programs out of the folder until all of the above is done.
    _lock: Option<File>,
}

/// A trial's files.
#[derive(Debug)]
struct Files {
    checkpoints: Checkpoints,
    metrics: MetricsWriter,
}

impl Outlet {
    /// Opens what `config` names. Alone, there is no door, and storage only where a URL is given.
    /// Ranks other than the lead read, and write and report nothing. `alone` is `None` under a runner.
    ///
    /// # Errors
    ///
    /// The storage cannot be opened or listed; alone, another program uses the folder.
    pub(crate) fn open(
        config: &mut TrialConfig,
        alone: Option<Keep>,
        is_lead: bool,
    ) -> Result<Self> {
        let background = Background::start()?;
        let rt = background.handle.clone();
        let (mut files, mut retention, mut lock) = (None, None, None);
        if !config.storage.url.is_empty() {
            let storage = Storage::open(&config.storage.url, config.storage.endpoint.as_deref())?;
            if let Some(keep) = alone {
                if is_lead {
                    lock = storage.folder().map(lock::lock).transpose()?;
                }
                resume_latest(&rt, &storage, config)?;
                let task = RetentionTask {
                    storage: storage.clone(),
                    trial_path: config.storage.trial_path.clone(),
                    attempt: config.attempt,
                    keep,
                    smaller_is_better: config.smaller_is_better,
                };
                retention = is_lead.then(|| Retention::start(&rt, task));
            }
            let checkpoints = Checkpoints::new(rt.clone(), storage.clone(), config);
            let metrics = MetricsWriter::new(rt.clone(), storage, config);
            files = Some(Files { checkpoints, metrics });
        }
        // Processes of a job that runs on this machine report to nobody: what they commit is seen.
        let has_door = config.inference.is_none() || !config.door.url.is_empty();
        let reporter = (alone.is_none() && is_lead && has_door)
            .then(|| Reporter::new(rt.clone(), config))
            .transpose()?;
        if let (Some(reporter), false) = (&reporter, config.storage.url.is_empty()) {
            let storage = Storage::open(&config.storage.url, config.storage.endpoint.as_deref())?;
            let (deleter, names) = mpsc::unbounded_channel();
            rt.spawn(delete_each(storage, config.storage.trial_path.clone(), names));
            reporter.tell_superfluous(deleter);
        }
        Ok(Self {
            reporter,
            files,
            resume_from: config.resume_from.clone(),
            has_runner: alone.is_none(),
            is_lead,
            batches: 0,
            batches_total: 0,
            base: 0,
            last_saved: None,
            restored: None,
            restored_validation: None,
            has_loop: false,
            is_started: false,
            reported: Reported::default(),
            length: GrantedLength::new(config.units),
            activity: Activity::default(),
            terminal: if is_lead { Terminal::new(alone.is_some()) } else { Terminal::silent() },
            retention,
            _background: background,
            _lock: lock,
        })
    }

    pub(crate) fn runtime(&self) -> &Handle {
        &self._background.handle
    }

    /// Whether a runner decides how long to train.
    pub(crate) fn has_runner(&self) -> bool {
        self.has_runner
    }

    /// Whether checkpoints are kept.
    pub(crate) fn has_storage(&self) -> bool {
        self.files.is_some()
    }

    /// Whether this process writes and reports.
    pub(crate) fn is_lead(&self) -> bool {
        self.is_lead
    }

    /// The checkpoint to go on from: the first that is whole.
    pub(crate) fn restore(&self) -> Result<Restored> {
        self.restore_from(&self.resume_from)
    }

    /// As [`Outlet::restore`], of those named.
    pub(crate) fn restore_from(&self, resume_from: &[CheckpointRef]) -> Result<Restored> {
        match &self.files {
            Some(files) => Ok(files.checkpoints.restore(resume_from)?),
            None => Ok(Restored::default()),
        }
    }

    /// What the record says of the checkpoint of this name.
    pub(crate) fn checkpoint_ref(&self, name: &str) -> Option<CheckpointRef> {
        self.resume_from.iter().find(|it| it.name == name).cloned()
    }

    /// The checkpoint that was last saved by this process.
    pub(crate) fn last_saved(&self) -> Option<CheckpointRef> {
        self.last_saved.clone()
    }

    /// The trial's files, where this process writes them.
    fn own_files(&mut self) -> Option<&mut Files> {
        self.files.as_mut().filter(|_| self.is_lead)
    }

    /// Sends what an earlier attempt could not.
    pub(crate) fn restore_unsent(&self, reports: Vec<Report>) {
        if let Some(reporter) = &self.reporter {
            reporter.restore_unsent(reports);
        }
    }

    /// What has no answer yet and still matters.
    pub(crate) fn unsent(&self) -> Vec<Report> {
        self.reporter.as_ref().map(Reporter::unsent).unwrap_or_default()
    }

    /// Global batches trained, by the last report.
    pub(crate) fn batches(&self) -> u64 {
        self.batches
    }

    /// A sign of life and a question for the directive.
    pub(crate) fn progress(&mut self, batches: u64, batches_total: u64) {
        let (batches_total, activity) = (self.base + batches_total, self.activity.due());
        self.post(batches, ReportEvent::Progress { batches_total, activity });
    }

    /// Reports; never waits.
    pub(crate) fn post(&mut self, batches: u64, event: ReportEvent) {
        self.post_at(self.base + batches, event);
    }

    /// As [`post`](Self::post), at a batch as the trial's record counts.
    pub(crate) fn post_at(&mut self, batches: u64, event: ReportEvent) {
        self.batches = self.batches.max(batches);
        self.is_started |= matches!(event, ReportEvent::Started { .. });
        if let ReportEvent::Started { batches_total, .. }
        | ReportEvent::Progress { batches_total, .. } = event
        {
            self.batches_total = batches_total;
        }
        if let Some(reporter) = &self.reporter {
            reporter.post(batches, event);
        }
    }

    /// Reports and waits for the answer; `None` where none came in a while.
    pub(crate) fn ask(&self, batches: u64, event: ReportEvent) -> Option<Directive> {
        self.reporter.as_ref()?.ask_within(self.base + batches, event, crate::train::ANSWER_WAIT)
    }

    /// The latest answer.
    pub(crate) fn directive(&self) -> Option<Directive> {
        self.reporter.as_ref()?.directive()
    }

    /// The process is about to end.
    pub(crate) fn close(&self, batches: u64, code: ExitCode, message: Option<String>) {
        if let Some(reporter) = &self.reporter {
            reporter.close(batches, code, message);
        }
    }

    /// Writes a row of metrics of a loop of ours.
    pub(crate) fn row(
        &mut self,
        group: &str,
        batches: u64,
        epoch: u64,
        metrics: &Logs,
    ) -> Result<()> {
        self.reported.note(group, batches, metrics);
        self.write_row(group, batches, epoch, metrics)
    }

    /// Writes a row of metrics.
    pub(crate) fn write_row(
        &mut self,
        group: &str,
        batches: u64,
        epoch: u64,
        metrics: &Logs,
    ) -> Result<()> {
        let batches = self.base + batches;
        if let Some(files) = self.own_files() {
            files.metrics.row(group, batches, epoch, metrics)?;
        }
        self.terminal.row(group, batches, epoch, metrics);
        Ok(())
    }

    /// Writes a histogram for TensorBoard.
    pub(crate) fn histogram(&mut self, name: &str, batches: u64, values: &[f32]) {
        let batches = self.base + batches;
        if let Some(files) = self.own_files() {
            files.metrics.histogram(name, batches, values);
        }
    }

    /// Starts a save; waits only for one in flight.
    pub(crate) fn save(&mut self, batches: u64, metric: Option<f64>, make: Make) -> Result<()> {
        let (unsent, batches) = (self.unsent(), self.base + batches);
        let Some(files) = self.own_files() else { return Ok(()) };
        let after = files.metrics.stored();
        let metadata = BTreeMap::new();
        let save = Save { batches, metric, unsent, metadata, after };
        Ok(files.checkpoints.begin(save, make)?)
    }

    /// Where checkpoints are, and what drives their transfer.
    pub(crate) fn place(&self) -> Option<(Handle, Place)> {
        let files = self.files.as_ref()?;
        Some((self.runtime().clone(), files.checkpoints.place().clone()))
    }

    /// Checkpoints to go on from, the best first.
    pub(crate) fn resume_from(&self) -> &[CheckpointRef] {
        &self.resume_from
    }

    /// The name of the checkpoint that a restart would go on from.
    pub(crate) fn latest(&self) -> Option<String> {
        let saved = self.last_saved.as_ref().map(|it| it.name.clone());
        let first = || self.resume_from.first().map(|it| it.name.clone());
        saved.or_else(|| self.restored.clone()).or_else(first)
    }

    /// What a checkpoint that is written now waits for: the rows of metrics until now.
    pub(crate) fn rows_stored(&mut self) -> Vec<Stored> {
        self.own_files().map(|it| it.metrics.stored()).unwrap_or_default()
    }

    /// Reports a checkpoint that has come to exist.
    pub(crate) fn saved(&mut self, saved: Saved) {
        if let Some(retention) = &self.retention {
            retention.saved(&saved);
        }
        let (name, manifest_sha256) = (saved.name.clone(), saved.manifest_sha256.clone());
        self.last_saved = Some(CheckpointRef { name, manifest_sha256 });
        self.post_at(saved.batches, checkpointed(saved));
    }

    /// Reports checkpoints that have come to exist; waits for the one in flight if `wait`.
    pub(crate) fn report_saved(&mut self, wait: bool) -> Result<()> {
        while let Some(files) = self.own_files() {
            let checkpoints = &mut files.checkpoints;
            let saved = if wait { checkpoints.finish()? } else { checkpoints.poll()? };
            let Some(saved) = saved else { break };
            self.saved(saved);
        }
        Ok(())
    }

    /// Waits until all rows of metrics are stored, but not for longer than `wait`.
    pub(crate) fn flush_within(&mut self, wait: Duration) -> Result<()> {
        let Some(files) = self.own_files() else { return Ok(()) };
        let stored = files.metrics.flushing();
        let all = async {
            for stored in stored {
                stored.wait().await?;
            }
            Ok(())
        };
        let done = async { tokio::time::timeout(wait, all).await };
        match self._background.handle.block_on(done) {
            Ok(done) => done,
            Err(_) => Err(format!("the storage took longer than {} s", wait.as_secs()).into()),
        }
    }

    /// Deletes the checkpoints that were only kept to fall back to: training is over.
    pub(crate) fn end_training(&self) {
        if let Some(retention) = &self.retention {
            retention.finish(true);
        }
    }

    /// Waits until all rows of metrics are stored, and superfluous checkpoints deleted.
    pub(crate) fn flush(&mut self) -> Result<()> {
        if let Some(retention) = &self.retention {
            retention.finish(false);
        }
        match self.own_files() {
            Some(files) => Ok(files.metrics.flush()?),
            None => Ok(()),
        }
    }
}

fn checkpointed(saved: Saved) -> ReportEvent {
    ReportEvent::Checkpointed {
        name: saved.name,
        manifest_sha256: saved.manifest_sha256,
        bytes: saved.bytes,
        metric: saved.metric.map(stoker_api::number::format),
    }
}

/// Checkpoints that a program alone may resume from: the newest, and others if that is corrupt. As many as a runner
/// names.
const RESUME_FROM_MAX: usize = 16;

/// Alone, the program finds its own checkpoints, newest first, and counts its attempts by all that
/// they have written: one that was killed may have left rows and no checkpoint. It reads the manifests of
/// the newest alone: a folder may have thousands.
fn resume_latest(rt: &Handle, storage: &Storage, config: &mut TrialConfig) -> Result<()> {
    let folder = format!("{}/", config.storage.trial_path);
    let (mut found, mut attempts) = (vec![], 0);
    let listed: Result<Vec<CheckpointRef>> = rt.block_on(async {
        for path in storage.list(&folder).await? {
            let below = path.strip_prefix(&folder).unwrap_or(&path).to_owned();
            attempts = layout::attempt_of(&below).map_or(attempts, |it| attempts.max(it + 1));
            let mut names = path.rsplit('/');
            let (file, name) = (names.next(), names.next().unwrap_or_default());
            let place = layout::parse_checkpoint_name(name);
            if let (Some(stoker_api::names::MANIFEST), Some(place)) = (file, place) {
                found.push((place, name.to_owned(), path));
            }
        }
        found.sort_by_key(|(place, ..)| std::cmp::Reverse(*place));
        let mut newest = vec![];
        for (_, name, path) in found.into_iter().take(RESUME_FROM_MAX) {
            let manifest_sha256 = hash::sha256_hex(&storage.get(&path).await?);
            newest.push(CheckpointRef { name, manifest_sha256 });
        }
        Ok(newest)
    });
    config.resume_from = listed?;
    config.attempt = attempts;
    Ok(())
}

#[cfg(test)]
mod tests;

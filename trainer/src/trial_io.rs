//! Destinations of a trial's reports, metrics and checkpoints: a runner and storage, or only this
//! machine.

use std::fs::File;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use stoker_api::contract::{CheckpointRef, Directive, ExitCode, Report, ReportEvent, TrialConfig};
use stoker_api::names::parse_checkpoint_name;
use stoker_storage::Storage;
use tokio::runtime::Handle;
use tokio::sync::mpsc;

use crate::Result;
use crate::callback::Logs;
use crate::checkpoint::{
    Checkpointer, Restored, Retention, RetentionLimits, RetentionTask, delete_each,
    delete_interrupted,
};
use crate::metrics::MetricsWriter;
use crate::reporter::Reporter;
use crate::session::{Activity, GrantedLength, ReportedMetrics};
use crate::terminal::Terminal;

mod background;
mod lock;
mod record_writer;
mod resume;
mod storage;
mod unreported;

use background::Background;
pub(crate) use record_writer::RecordMessage;
use record_writer::RecordWriter;
use resume::resume_latest;
use unreported::UnreportedCheckpoints;

/// Time without a response of the runner at the end of the granted length, after which the process
/// exits.
const SILENCE_MAX: Duration = Duration::from_secs(600);
/// Time after the last report at which `fit` and `training` report progress, although no row is
/// due. Stop requests of the runner arrive in responses to reports.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);

/// Reports, metrics, checkpoints and terminal output of this process.
#[derive(Debug)]
pub(crate) struct TrialIo {
    /// A save in progress has a weak reference.
    reporter: Option<Arc<Reporter>>,
    files: Option<TrialFiles>,
    /// Stores the trial's record, if the runner returns it.
    record_writer: Option<RecordWriter>,
    resume_from: Vec<CheckpointRef>,
    unreported: UnreportedCheckpoints,
    /// Whether a runner decides how long to train.
    has_runner: bool,
    /// Whether this is rank 0. Only rank 0 writes and reports.
    is_lead: bool,
    /// Global batches that the trial has trained, as of the last report.
    pub(crate) batches: u64,
    /// Batches at the end of the granted length, as of the last report.
    pub(crate) batches_total: u64,
    /// When the last report was queued.
    pub(crate) posted_at: Option<Instant>,
    /// Batches that the trial had trained before this training began. A warm start counts from 0,
    /// but the trial's record does not.
    pub(crate) base: u64,
    /// Checkpoint that this process saved last.
    last_saved: Option<CheckpointRef>,
    /// Checkpoint from which this process resumed.
    pub(crate) restored: Option<String>,
    /// Validation in the manifest of that checkpoint, with its batch.
    pub(crate) restored_validation: Option<(u64, Logs)>,
    /// Whether `fit` or `training` runs in this process and saves its own checkpoints.
    pub(crate) has_loop: bool,
    /// Whether the start of this attempt was reported to the runner.
    pub(crate) is_started: bool,
    pub(crate) reported: ReportedMetrics,
    pub(crate) length: GrantedLength,
    /// Names of the validation metrics on which the runner's decisions depend.
    pub(crate) decisive_metrics: Vec<String>,
    pub(crate) activity: Activity,
    /// Rows of the profilers of this process. A second writer would replace the files of the first.
    pub(crate) profiler: Option<Arc<Mutex<MetricsWriter>>>,
    pub(crate) terminal: Terminal,
    /// Deletes checkpoints when there is no runner to do so.
    retention: Option<Retention>,
    /// Dropped after the fields above, because their tasks run on it.
    _background: Background,
    /// Keeps other programs out of the directory until the fields above are dropped.
    _lock: Option<File>,
}

/// Checkpoints and metrics of a trial.
#[derive(Debug)]
struct TrialFiles {
    checkpointer: Checkpointer,
    metrics: MetricsWriter,
}

impl TrialIo {
    /// Opens what `config` names. Without a runner, there is no report server, and storage only if
    /// a URL is set. Ranks other than 0 read, but do not write or report. `standalone_limits` is
    /// `None` under a runner.
    ///
    /// # Errors
    ///
    /// Fails if the storage cannot be opened or listed, or if another program uses the directory.
    pub(crate) fn open(
        config: &mut TrialConfig,
        standalone_limits: Option<RetentionLimits>,
        is_lead: bool,
    ) -> Result<Self> {
        let background = Background::start()?;
        let rt = background.handle.clone();
        let (mut files, mut retention, mut lock) = (None, None, None);
        if !config.storage.url.is_empty() {
            let storage = Storage::open(&config.storage.url, config.storage.endpoint.as_deref())?;
            if let Some(limits) = standalone_limits {
                lock = storage.folder().filter(|_| is_lead).map(lock::lock).transpose()?;
                resume_latest(&rt, &storage, config)?;
                let task = RetentionTask {
                    storage: storage.clone(),
                    trial_path: config.storage.trial_path.clone(),
                    attempt: config.attempt,
                    limits,
                    smaller_is_better: config.smaller_is_better,
                };
                retention = is_lead.then(|| Retention::start(&rt, task));
            }
            // The training since the last checkpoint is lost if one of these writes fails.
            let storage = storage.with_long_retries();
            let checkpointer = Checkpointer::new(rt.clone(), storage.clone(), config);
            let metrics = MetricsWriter::new(rt.clone(), storage, config);
            files = Some(TrialFiles { checkpointer, metrics });
        }
        // Processes of a job that runs on this machine do not report: the runner sees their
        // commits.
        let has_report_server =
            config.inference.is_none() || !config.report_endpoint.url.is_empty();
        let reporter = (standalone_limits.is_none() && is_lead && has_report_server)
            .then(|| Reporter::new(rt.clone(), config).map(Arc::new))
            .transpose()?;
        let record_writer = match (&reporter, config.storage.url.is_empty()) {
            (Some(reporter), false) => Some(handle_responses(&rt, reporter, config)?),
            _ => None,
        };
        Ok(Self {
            reporter,
            files,
            record_writer,
            resume_from: config.resume_from.clone(),
            unreported: UnreportedCheckpoints::new(config.unreported_since.filter(|_| is_lead)),
            has_runner: standalone_limits.is_none(),
            is_lead,
            batches: 0,
            batches_total: 0,
            posted_at: None,
            base: 0,
            last_saved: None,
            restored: None,
            restored_validation: None,
            has_loop: false,
            is_started: false,
            reported: ReportedMetrics::default(),
            length: GrantedLength::new(config.units),
            decisive_metrics: config.decisive_metrics(),
            activity: Activity::default(),
            profiler: None,
            terminal: match is_lead {
                true => Terminal::new(standalone_limits.is_some()),
                false => Terminal::silent(),
            },
            retention,
            _background: background,
            _lock: lock,
        })
    }

    pub(crate) fn runtime(&self) -> &Handle {
        &self._background.handle
    }

    /// Returns whether a runner decides how long to train.
    pub(crate) fn has_runner(&self) -> bool {
        self.has_runner
    }

    /// Returns whether checkpoints are stored.
    pub(crate) fn has_storage(&self) -> bool {
        self.files.is_some()
    }

    /// Returns whether this process writes and reports.
    pub(crate) fn is_lead(&self) -> bool {
        self.is_lead
    }

    /// Restores the first complete one of these checkpoints, if any.
    pub(crate) fn restore_from(&self, resume_from: &[CheckpointRef]) -> Result<Restored> {
        match &self.files {
            Some(files) => Ok(files.checkpointer.restore(resume_from)?),
            None => Ok(Restored::default()),
        }
    }

    /// Returns the number of batches of the checkpoint that [`restore`](Self::restore) tries first.
    /// The training starts at another batch if that checkpoint cannot be used or belongs to another
    /// training, or if the trial has had a warm start.
    pub(crate) fn expected_batches(&self) -> Option<u64> {
        let (batches, _) = parse_checkpoint_name(&self.resume_from.first()?.name)?;
        Some(batches)
    }

    /// Returns the checkpoint that this process saved last.
    pub(crate) fn last_saved(&self) -> Option<CheckpointRef> {
        self.last_saved.clone()
    }

    /// Returns the trial's files if this process writes them.
    fn writable_files(&mut self) -> Option<&mut TrialFiles> {
        self.files.as_mut().filter(|_| self.is_lead)
    }

    /// Queues reports that an earlier attempt could not send.
    pub(crate) fn restore_unsent(&self, reports: Vec<Report>) {
        if let Some(reporter) = &self.reporter {
            reporter.restore_unsent(reports);
        }
    }

    /// Returns reports without a response that still matter.
    pub(crate) fn unsent(&self) -> Vec<Report> {
        self.reporter.as_deref().map(Reporter::unsent).unwrap_or_default()
    }

    /// Returns the number of global batches trained, as of the last report.
    pub(crate) fn batches(&self) -> u64 {
        self.batches
    }

    /// Reports progress, which serves as a heartbeat and gets the next directive.
    pub(crate) fn progress(&mut self, batches: u64, batches_total: u64) {
        let (batches_total, activity) = (self.base + batches_total, self.activity.due());
        self.post(batches, ReportEvent::Progress { batches_total, activity });
    }

    /// Reports progress if the last report was [`PROGRESS_INTERVAL`] ago.
    pub(crate) fn progress_if_due(&mut self, batches: u64, batches_total: u64) {
        let is_due = self.posted_at.is_none_or(|at| at.elapsed() >= PROGRESS_INTERVAL);
        if is_due && self.reporter.is_some() {
            self.progress(batches, batches_total);
        }
    }

    /// Queues a report; never blocks.
    pub(crate) fn post(&mut self, batches: u64, event: ReportEvent) {
        self.post_at(self.base + batches, event);
    }

    /// Same as [`post`](Self::post), with the batch as counted in the trial's record.
    pub(crate) fn post_at(&mut self, batches: u64, event: ReportEvent) {
        self.posted_at = Some(Instant::now());
        self.batches = self.batches.max(batches);
        self.is_started |= matches!(event, ReportEvent::Started { .. });
        if let ReportEvent::Started { batches_total, .. }
        | ReportEvent::Progress { batches_total, .. } = event
        {
            self.batches_total = batches_total;
        }
        if let (Some(retention), ReportEvent::Started { refused, .. }) = (&self.retention, &event) {
            retention.record_refused(refused.keys().cloned().collect());
        }
        if let Some(reporter) = &self.reporter {
            reporter.post(batches, event);
        }
    }

    /// Reports and waits for the response. Returns `None` after
    /// [`RESPONSE_TIMEOUT`](crate::train::RESPONSE_TIMEOUT).
    ///
    /// # Errors
    ///
    /// Fails if the runner rejects this report, or an earlier one that was sent in this way: a
    /// later request would wait for a decision on it forever.
    pub(crate) fn request_directive(
        &self,
        batches: u64,
        event: ReportEvent,
    ) -> Result<Option<Directive>> {
        let Some(reporter) = &self.reporter else { return Ok(None) };
        let batches = self.base + batches;
        Ok(reporter.post_and_wait_within(batches, event, crate::train::RESPONSE_TIMEOUT)?)
    }

    /// Returns whether the runner has not responded for ten minutes, in a wait that began at
    /// `start`. Responses that arrived after the timeout of
    /// [`request_directive`](Self::request_directive) count too.
    pub(crate) fn is_runner_silent(&self, start: Instant) -> bool {
        let responded_at = self.reporter.as_deref().and_then(Reporter::responded_at);
        is_silent(responded_at, start, Instant::now())
    }

    /// Returns the latest directive.
    pub(crate) fn directive(&self) -> Option<Directive> {
        self.reporter.as_ref()?.directive()
    }

    /// Reports that the process is about to exit.
    pub(crate) fn close(&self, batches: u64, code: ExitCode, message: Option<String>) {
        if let Some(reporter) = &self.reporter {
            reporter.close(batches, code, message);
            self.record_writer.iter().for_each(RecordWriter::flush);
        }
    }

    /// Writes a row of metrics for `fit` or `training`.
    pub(crate) fn row(
        &mut self,
        group: &str,
        batches: u64,
        epoch: u64,
        metrics: &Logs,
    ) -> Result<()> {
        self.reported.record(group, batches, metrics);
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
        if let Some(files) = self.writable_files() {
            files.metrics.row(group, batches, epoch, metrics)?;
        }
        self.terminal.row(group, batches, epoch, metrics);
        Ok(())
    }
}

/// Returns whether the last response and the start of the wait are [`SILENCE_MAX`] ago.
fn is_silent(responded_at: Option<Instant>, start: Instant, now: Instant) -> bool {
    let since = responded_at.map_or(start, |responded_at| responded_at.max(start));
    now.saturating_duration_since(since) >= SILENCE_MAX
}

/// Starts the tasks that delete the checkpoints and store the record in responses to reports. Also
/// starts to delete what interrupted saves of earlier attempts left.
fn handle_responses(
    rt: &Handle,
    reporter: &Reporter,
    config: &TrialConfig,
) -> Result<RecordWriter> {
    let storage = Storage::open(&config.storage.url, config.storage.endpoint.as_deref())?;
    let trial_path = &config.storage.trial_path;
    if config.attempt > 0 && config.inference.is_none() {
        let known = config.resume_from.iter().map(|checkpoint| checkpoint.name.clone()).collect();
        let (storage, trial_path) = (storage.clone(), trial_path.clone());
        rt.spawn(delete_interrupted(storage, trial_path, config.attempt, known));
    }
    let (deleter, names) = mpsc::unbounded_channel();
    rt.spawn(delete_each(storage.clone(), trial_path.clone(), names));
    reporter.set_checkpoint_deleter(deleter);
    let writer = RecordWriter::start(rt, storage, trial_path);
    reporter.set_record_sink(writer.sender());
    Ok(writer)
}

#[cfg(test)]
mod tests;

//! Metrics of one attempt, as JSON lines and as TensorBoard event files.
//!
//! JSON lines are authoritative: exact, and stored before a checkpoint completes. Event files are
//! for display: single precision, written less often.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use stoker_api::contract::TrialConfig;
use stoker_storage::metrics::{self, Row};
use stoker_storage::segments::{PendingFlush, SegmentWriter, Segments};
use stoker_storage::{Storage, StorageError, layout};
use tokio::runtime::Handle;

use crate::session::VALIDATION;
use crate::tensorboard::hparams::{self, SessionStatus};
use crate::tensorboard::{self, Display};

/// Maximum age of an event file before it is stored, for attempts that write little.
const EVENT_FILE_AGE_MAX: Duration = Duration::from_secs(30);

/// Size at which an event file is full. TensorBoard opens each of them.
const EVENT_FILE_BYTES_MAX: usize = 1 << 20;

/// Writes metrics in the background.
#[derive(Debug)]
pub struct MetricsWriter {
    attempt: u32,
    rows: SegmentWriter,
    events: SegmentWriter,
    /// Whether no row was written yet.
    is_new: bool,
    /// Whether the event files lack the restart of this attempt.
    is_restart_due: bool,
    /// First step of this attempt; `None` for that of its first event.
    first_step: Option<u64>,
    /// Configuration of the trial, for the records of TensorBoard's HParams plugin; `None` for
    /// other metrics than the trial's.
    session: Option<TrialConfig>,
    /// Whether the metrics of the experiment are unknown to the plugin.
    is_undescribed: bool,
}

impl MetricsWriter {
    /// Creates a writer for the metrics of `config`'s attempt. Another thread must drive `rt`, with
    /// I/O and time enabled.
    pub fn new(rt: Handle, storage: Storage, config: &TrialConfig) -> Self {
        let trial_path = &config.storage.trial_path;
        let rows = metrics::segments(trial_path, config.attempt);
        let events = layout::tensorboard_path(trial_path);
        let writer = Self::of(rt, storage, config.attempt, rows, &events);
        // Processes of inference jobs are not trials.
        let session = config.inference.is_none().then(|| config.clone());
        Self { session, ..writer }
    }

    /// Creates a writer for the profiler samples of a rank, stored separately from the trial's
    /// metrics.
    pub(crate) fn for_profiler(
        rt: Handle,
        storage: Storage,
        config: &TrialConfig,
        rank: usize,
    ) -> Self {
        let (trial_path, attempt) = (&config.storage.trial_path, config.attempt);
        let folder = layout::profiler_path(trial_path);
        let rows = Segments::new(format!("{folder}/{attempt}-{rank}-"), ".jsonl");
        let folder = format!("{}/profiler-rank-{rank}", layout::tensorboard_path(trial_path));
        Self::of(rt, storage, attempt, rows, &folder)
    }

    fn of(rt: Handle, storage: Storage, attempt: u32, rows: Segments, events: &str) -> Self {
        // Readers process the files of a directory in name order.
        let events = Segments {
            header: tensorboard::header(now()).into(),
            age_max: EVENT_FILE_AGE_MAX,
            bytes_max: EVENT_FILE_BYTES_MAX,
            // TensorBoard keeps files open, and would not see the lines of a replaced one.
            appends_locally: true,
            ..Segments::new(format!("{events}/events.out.tfevents.{attempt:06}-"), ".stoker")
        };
        Self {
            attempt,
            rows: SegmentWriter::new(&rt, storage.clone(), rows),
            events: SegmentWriter::new(&rt, storage, events),
            is_new: true,
            is_restart_due: attempt > 0,
            first_step: None,
            session: None,
            is_undescribed: true,
        }
    }

    /// Queues one row; never blocks. `group` is `training` or `validation`; `epoch` is the
    /// epoch of the last batch, counted from 0.
    ///
    /// # Errors
    ///
    /// Fails if the queue is full because the storage was unavailable for too long. The row is
    /// lost; resume from the last checkpoint, which has all rows before it.
    ///
    /// # Panics
    ///
    /// Never: a row can always be serialized to JSON.
    pub fn row(
        &mut self,
        group: &str,
        batches: u64,
        epoch: u64,
        metrics: &BTreeMap<String, f64>,
    ) -> Result<(), StorageError> {
        let time = now();
        let row = Row {
            group: group.to_owned(),
            batches,
            epoch,
            attempt: self.attempt,
            time: Some(time),
            metrics: metrics.clone(),
        };
        let mut line = serde_json::to_vec(&row).expect("all keys of a row are strings");
        line.push(b'\n');
        let is_queued = self.rows.append(line);
        let mut event = self.restart(time, batches);
        let is_new = std::mem::take(&mut self.is_new);
        if let Some(session) = &self.session {
            if is_new {
                event.extend(hparams::session_start(time, session));
            }
            // The names of the metrics are unknown before the first validation.
            if group == VALIDATION && std::mem::take(&mut self.is_undescribed) {
                event.extend(hparams::experiment(time, session, group, metrics.keys()));
            }
        }
        event.extend(tensorboard::scalars(time, batches, group, metrics));
        // Ignore a full queue here: event files are only for display.
        self.events.append(event);
        if is_queued { Ok(()) } else { Err(self.rows.buffer_full_error()) }
    }

    /// Queues a histogram, an image or a text at a batch, for the event files only.
    pub(crate) fn display(&mut self, name: &str, batches: u64, display: &Display) {
        let time = now();
        let mut event = self.restart(time, batches);
        event.extend(display.event(time, batches, name));
        self.events.append(event);
    }

    /// Sets the first step of this attempt. Events of earlier attempts before it remain valid.
    pub(crate) fn set_first_step(&mut self, step: u64) {
        self.first_step = Some(step);
    }

    /// Returns the restart event before the first event of a later attempt, and nothing before
    /// others. TensorBoard then discards all events that it has read, from the first step on.
    fn restart(&mut self, time: f64, batches: u64) -> Vec<u8> {
        match std::mem::take(&mut self.is_restart_due) {
            true => tensorboard::restart(time, self.first_step.unwrap_or(batches)),
            false => Vec::new(),
        }
    }

    /// Queues the end of the trial, for the event files only.
    pub(crate) fn end_session(&mut self, status: SessionStatus) {
        if self.session.is_some() && !self.is_new {
            self.events.append(hparams::session_end(now(), status));
        }
    }

    /// Returns the writes of all rows so far, for [`SaveRequest::after`]. The checkpoint's manifest
    /// then waits for them, and the training loop does not.
    ///
    /// [`SaveRequest::after`]: crate::checkpoint::SaveRequest::after
    pub fn stored(&mut self) -> Vec<PendingFlush> {
        vec![self.rows.request_flush()]
    }

    /// Starts to store all rows so far, in both forms, and returns the writes to wait for.
    pub(crate) fn flushing(&mut self) -> Vec<PendingFlush> {
        vec![self.rows.request_flush(), self.events.request_flush()]
    }

    /// Waits until all rows so far are stored, in both forms. Call it at the end.
    ///
    /// # Errors
    ///
    /// Fails if the storage does. The rows are kept and retried later.
    ///
    /// # Panics
    ///
    /// Panics if called within an asynchronous task.
    pub fn flush(&mut self) -> Result<(), StorageError> {
        self.flushing().into_iter().try_for_each(PendingFlush::wait_blocking)
    }
}

/// Returns the seconds since the Unix epoch.
fn now() -> f64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(url: &str, attempt: u32) -> TrialConfig {
        serde_json::from_value(serde_json::json!({
            "version": 1, "experiment": "mnist", "experimentId": "id-1", "trial": 4,
            "attempt": attempt, "seed": 1, "experimentSeed": 1, "hyperparameters": {},
            "unit": "batches", "units": 10, "metric": "loss", "smallerIsBetter": true,
            "schedulingUnit": 1, "aggregationFrequency": 1,
            "storage": {"url": url, "trialPath": "t"},
            "door": {"url": "http://127.0.0.1:1", "tokenFile": "/nowhere"},
        }))
        .unwrap()
    }

    #[test]
    fn restart_precedes_all_events_of_an_attempt() {
        let rt = tokio::runtime::Runtime::new().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let url = folder.path().to_str().unwrap().to_owned();
        let storage = Storage::open(&url, None).unwrap();
        let check = |attempt: u32, first_step: Option<u64>, expected: Option<u8>| {
            let config = config(&url, attempt);
            let mut writer = MetricsWriter::new(rt.handle().clone(), storage.clone(), &config);
            if let Some(step) = first_step {
                writer.set_first_step(step);
            }
            writer.display("shown", 20, &Display::Text("text".to_owned()));
            writer.row("validation", 20, 0, &BTreeMap::from([("loss".to_owned(), 1.0)])).unwrap();
            writer.flush().unwrap();
            let of_attempt = |path: &String| path.contains(&format!("tfevents.{attempt:06}"));
            let paths = rt.block_on(storage.list("t/tensorboard")).unwrap();
            let path = paths.into_iter().find(of_attempt).unwrap();
            let events = rt.block_on(storage.get(&path)).unwrap();
            let find = |bytes: &[u8]| events.windows(bytes.len()).position(|part| part == bytes);
            // The session log with the status START, after the step.
            let restart = find(&[0x3a, 2, 8, 1]);
            assert_eq!(restart.map(|begin| events[begin - 1]), expected);
            assert!(restart < find(b"shown") && find(b"shown") < find(b"validation/loss"));
        };
        check(0, None, None);
        check(1, None, Some(20));
        // An image of the checkpoint's own batch must not discard the rows of this batch.
        check(2, Some(21), Some(21));
    }

    /// Two attempts of one trial: the second resumes from batch 20 and overlaps the first.
    #[test]
    fn rows_of_two_attempts_are_merged() {
        let rt = tokio::runtime::Runtime::new().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let url = folder.path().to_str().unwrap().to_owned();
        let storage = Storage::open(&url, None).unwrap();
        let loss = |value: f64| BTreeMap::from([("loss".to_owned(), value)]);
        for (attempt, batches) in [(0u32, [10u32, 20, 30]), (1, [30, 40, 50])] {
            let config = config(&url, attempt);
            let mut writer = MetricsWriter::new(rt.handle().clone(), storage.clone(), &config);
            for batch in batches {
                let value = if batch == 40 { f64::NAN } else { 1.0 / f64::from(batch) };
                writer.row("training", u64::from(batch), 0, &loss(value)).unwrap();
            }
            writer.row("validation", u64::from(batches[2]), 1, &loss(0.25)).unwrap();
            for stored in writer.stored() {
                rt.block_on(stored.wait()).unwrap();
            }
            writer.flush().unwrap();
        }
        let rows = rt.block_on(metrics::read(&storage, "t", &[(0, 0), (1, 20)])).unwrap();
        let actual: Vec<_> =
            rows.iter().map(|row| (row.batches, row.group.as_str(), row.attempt)).collect();
        let training = [(10, 0), (20, 0), (30, 1), (40, 1), (50, 1)];
        let mut expected = training.map(|(batch, attempt)| (batch, "training", attempt)).to_vec();
        expected.push((50, "validation", 1));
        assert_eq!(actual, expected);
        assert_eq!(rows[1].metrics["loss"].to_bits(), (1.0f64 / 20.0).to_bits());
        assert!(rows[3].metrics["loss"].is_nan());
        assert_eq!(rt.block_on(storage.list("t/tensorboard")).unwrap().len(), 2);
    }
}

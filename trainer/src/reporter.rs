//! Reports of rank 0 and the directives in response.
//!
//! A background task posts reports in order, so that training never waits for the report server.
//! During an outage, the task retries and training continues; each checkpoint stores the reports
//! that are still unsent.
//!
//! Only the directive `fenced` in a 200 response ends an attempt. A proxy or a failed token review
//! can return 401, 403 or 410 to many trials at once, so every other response means "unavailable".

mod delivery;
mod post;
mod search_metric;

use std::collections::VecDeque;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use stoker_api::contract::{
    CONTRACT_VERSION, Directive, ExitCode, Report, ReportEvent, TrialConfig,
};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::sync::mpsc::UnboundedSender;

use self::delivery::send_reports;
use self::post::client;
use self::search_metric::SearchMetric;
use crate::Result;
use crate::trial_io::RecordMessage;

/// Maximum queue length. Beyond it, the oldest checkpoint report that is not the best is dropped.
const QUEUE_MAX: usize = 4_096;
/// Maximum number of queued validations without a result: the newest, the best, and a few for
/// display.
const INTERMEDIATE_VALIDATIONS_MAX: usize = 16;
/// The same during an outage. A trial's record stores only the newest and the best metrics.
const INTERMEDIATE_VALIDATIONS_IN_OUTAGE_MAX: usize = 2;
/// Wait after the first failure; doubles with each further failure.
const BACKOFF_FIRST: Duration = Duration::from_millis(100);
/// Maximum wait between two attempts, so that a recovered server is noticed soon.
const BACKOFF_MAX: Duration = Duration::from_secs(5);
/// Timeout of [`Reporter::ask`].
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(60);
/// Timeout of [`Reporter::close`]. The exit code carries the same information as the last report.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

/// Posts reports in the background, in order.
#[derive(Debug)]
pub struct Reporter {
    attempt: u32,
    search_metric: SearchMetric,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    /// Notified for each queued report.
    queued: Notify,
    /// Notified for each urgent report.
    urgent: Notify,
    deleter: OnceLock<UnboundedSender<String>>,
    record_sink: OnceLock<UnboundedSender<RecordMessage>>,
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<QueuedReport>,
    next_id: u64,
    /// Whether the reporter was dropped and no further report will be queued.
    is_closed: bool,
    /// Whether the last attempt to send failed.
    is_outage: bool,
    directive: Option<Directive>,
    /// When the last directive arrived.
    responded_at: Option<Instant>,
    /// Rejection of a report whose response a caller waits for, until the caller gets it.
    rejected: Option<Rejected>,
}

/// The report server will never accept a report.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the report of batch {batches} was rejected: {reason}")]
pub struct Rejected {
    batches: u64,
    reason: String,
}

impl State {
    /// Returns the report to send next. During an outage, urgent reports come first.
    fn next(&self) -> Option<&QueuedReport> {
        let urgent = self.queue.iter().find(|queued| self.is_outage && queued.is_urgent());
        urgent.or_else(|| self.queue.front())
    }

    /// Drops old validations without a result, except the best one.
    fn coalesce(&mut self, search_metric: &SearchMetric) {
        let max = match self.is_outage {
            true => INTERMEDIATE_VALIDATIONS_IN_OUTAGE_MAX,
            false => INTERMEDIATE_VALIDATIONS_MAX,
        };
        let is_candidate = |queued: &QueuedReport| {
            queued.is_intermediate_validation() && queued.reply_to.is_none()
        };
        let mut num = self.queue.iter().filter(|queued| is_candidate(queued)).count();
        if num <= max {
            return;
        }
        let best = search_metric.best(self.queue.iter().filter(|queued| is_candidate(queued)));
        self.queue.retain(|queued| {
            let is_dropped = num > max && is_candidate(queued) && Some(queued.id) != best;
            num -= usize::from(is_dropped);
            !is_dropped
        });
    }

    /// Makes space in a full queue, if no result is lost by that.
    fn drop_oldest_checkpoint(&mut self, search_metric: &SearchMetric) {
        if self.queue.len() < QUEUE_MAX {
            return;
        }
        let is_checkpoint = |queued: &&QueuedReport| {
            matches!(queued.report.event, ReportEvent::Checkpointed { .. })
        };
        let best = search_metric.best(self.queue.iter().filter(is_checkpoint));
        let is_dropped = |queued: &QueuedReport| is_checkpoint(&queued) && Some(queued.id) != best;
        if let Some(oldest) = self.queue.iter().position(is_dropped) {
            self.queue.remove(oldest);
        }
    }
}

#[derive(Debug)]
struct QueuedReport {
    id: u64,
    report: Report,
    reply_to: Option<SyncSender<Directive>>,
    /// Whether a caller depends on the response, even if its wait has timed out.
    is_awaited: bool,
}

impl QueuedReport {
    fn is_progress(&self) -> bool {
        matches!(self.report.event, ReportEvent::Progress { .. })
    }

    fn take_activity(&mut self) -> Option<String> {
        match &mut self.report.event {
            ReportEvent::Progress { activity, .. } => activity.take(),
            _ => None,
        }
    }

    fn set_activity_if_missing(&mut self, previous: Option<String>) {
        if let ReportEvent::Progress { activity, .. } = &mut self.report.event {
            *activity = activity.take().or(previous);
        }
    }

    fn is_intermediate_validation(&self) -> bool {
        matches!(self.report.event, ReportEvent::Validated { granted_units: None, .. })
    }

    /// Returns `true` if the runner's decisions depend on this report, so that it may overtake
    /// others. The exit report stays behind the validations, because a program that stops early is
    /// judged by them.
    fn is_urgent(&self) -> bool {
        let is_exit = matches!(self.report.event, ReportEvent::Exiting { .. });
        !is_exit && !self.is_progress() && !self.is_intermediate_validation()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Reporter {
    /// Creates a reporter for `config.report_endpoint`. Another thread must drive `rt`, with I/O
    /// and time enabled.
    ///
    /// # Errors
    ///
    /// Fails if the server's CA is not a valid certificate, or if the HTTP client cannot be
    /// created.
    pub fn new(rt: Handle, config: &TrialConfig) -> Result<Self> {
        let client = client(&config.report_endpoint)?;
        let shared = Arc::new(Shared::default());
        rt.spawn(send_reports(shared.clone(), client, config.report_endpoint.clone()));
        let search_metric = SearchMetric {
            metric: config.metric.clone(),
            smaller_is_better: config.smaller_is_better,
        };
        Ok(Self { attempt: config.attempt, search_metric, shared })
    }

    /// Sends the names of checkpoints that responses list as superfluous to `deleter`.
    pub(crate) fn set_checkpoint_deleter(&self, deleter: UnboundedSender<String>) {
        // Ignore the error: `open` calls this once, and the first sender stays in use.
        let _ = self.shared.deleter.set(deleter);
    }

    /// Sends the trial's record to `sink` whenever a response contains it.
    pub(crate) fn set_record_sink(&self, sink: UnboundedSender<RecordMessage>) {
        // Ignore the error: `open` calls this once, and the first sender stays in use.
        let _ = self.shared.record_sink.set(sink);
    }

    /// Queues a report; never blocks. A newer [`ReportEvent::Progress`] replaces a queued one. Of
    /// many queued validations without `granted_units`, the newest ones and the best are kept.
    pub fn post(&self, batches: u64, event: ReportEvent) {
        self.queue(batches, event, None);
    }

    /// Returns the latest directive, or `None` before the first response. `Fenced` is final.
    pub fn directive(&self) -> Option<Directive> {
        self.shared.lock().directive
    }

    /// Returns when the last directive arrived. It may belong to a report whose wait has timed out:
    /// the server holds back responses while the search is undecided.
    pub fn responded_at(&self) -> Option<Instant> {
        self.shared.lock().responded_at
    }

    /// Queues a report and waits for its response, which generally follows the responses to all
    /// earlier reports. Returns `None` after one minute. After a timeout, the report stays queued,
    /// unless it is [`ReportEvent::Progress`].
    ///
    /// # Errors
    ///
    /// Fails if the server rejects this report, or an earlier one whose wait has timed out.
    pub fn post_and_wait(
        &self,
        batches: u64,
        event: ReportEvent,
    ) -> Result<Option<Directive>, Rejected> {
        self.post_and_wait_within(batches, event, RESPONSE_TIMEOUT)
    }

    /// Same as [`post_and_wait`](Self::post_and_wait), with a custom timeout, so that the caller
    /// can check for signals. To continue waiting, post [`ReportEvent::Progress`]: a queued report
    /// is sent only once.
    ///
    /// # Errors
    ///
    /// Same as [`post_and_wait`](Self::post_and_wait).
    pub fn post_and_wait_within(
        &self,
        batches: u64,
        event: ReportEvent,
        wait: Duration,
    ) -> Result<Option<Directive>, Rejected> {
        let (reply_to, response) = sync_channel(1);
        let Some(id) = self.queue(batches, event, Some(reply_to)) else {
            return Ok(self.directive());
        };
        let response = response.recv_timeout(wait).ok();
        let mut state = self.shared.lock();
        if response.is_none() {
            state.queue.retain(|queued| queued.id != id || !queued.is_progress());
            let own = state.queue.iter_mut().filter(|queued| queued.id == id);
            own.for_each(|queued| queued.reply_to = None);
        }
        // The fence may arrive after this call timed out, so check the stored directive too.
        let fenced = state.directive.filter(|directive| *directive == Directive::Fenced);
        match state.rejected.take() {
            Some(rejected) if fenced.is_none() => Err(rejected),
            _ => Ok(response.or(fenced)),
        }
    }

    /// Returns the unanswered reports that still matter after a restore: validations and
    /// checkpoints.
    pub fn unsent(&self) -> Vec<Report> {
        let matters = |queued: &&QueuedReport| {
            let event = &queued.report.event;
            matches!(event, ReportEvent::Validated { .. } | ReportEvent::Checkpointed { .. })
        };
        self.shared
            .lock()
            .queue
            .iter()
            .filter(matters)
            .map(|queued| queued.report.clone())
            .collect()
    }

    /// Queues reports that an earlier attempt could not send, as reports of this attempt.
    pub fn restore_unsent(&self, reports: Vec<Report>) {
        for report in reports {
            self.post(report.batches, report.event);
        }
    }

    /// Posts [`ReportEvent::Exiting`] and waits up to ten seconds until all reports are sent.
    /// Returns whether they were, without a fence.
    pub fn close(&self, batches: u64, code: ExitCode, message: Option<String>) -> bool {
        let event = ReportEvent::Exiting { code: code as u8, message };
        let response = self.post_and_wait_within(batches, event, CLOSE_TIMEOUT);
        if let Err(rejected) = &response {
            eprintln!("stoker: {rejected}");
        }
        matches!(response, Ok(Some(directive)) if directive != Directive::Fenced)
    }

    /// Queues a report and returns its ID; `None` once fenced.
    fn queue(
        &self,
        batches: u64,
        event: ReportEvent,
        reply_to: Option<SyncSender<Directive>>,
    ) -> Option<u64> {
        let report = Report { version: CONTRACT_VERSION, attempt: self.attempt, batches, event };
        let mut state = self.shared.lock();
        if state.directive == Some(Directive::Fenced) {
            return None;
        }
        let id = state.next_id;
        state.next_id += 1;
        let is_awaited = reply_to.is_some();
        let mut queued = QueuedReport { id, report, reply_to, is_awaited };
        if queued.is_progress() {
            // Keep the activity of the queued report that this one replaces.
            let is_replaced =
                |queued: &QueuedReport| queued.is_progress() && queued.reply_to.is_none();
            let waiting = state.queue.iter_mut().filter(|queued| is_replaced(queued));
            let activity = waiting.filter_map(QueuedReport::take_activity).last();
            queued.set_activity_if_missing(activity);
            state.queue.retain(|queued| !is_replaced(queued));
        }
        state.drop_oldest_checkpoint(&self.search_metric);
        let is_urgent = queued.is_urgent();
        state.queue.push_back(queued);
        state.coalesce(&self.search_metric);
        drop(state);
        self.shared.queued.notify_one();
        if is_urgent {
            self.shared.urgent.notify_one();
        }
        Some(id)
    }
}

impl Drop for Reporter {
    fn drop(&mut self) {
        self.shared.lock().is_closed = true;
        self.shared.queued.notify_one();
    }
}

#[cfg(test)]
pub(crate) mod tests;

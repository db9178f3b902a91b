//! Reports of rank 0 and the directives in response.
//!
//! A background task posts reports in order, so that training never waits for the report server.
//! During an outage, the task retries and training continues; each checkpoint stores the reports
//! that are still unsent.
//!
//! Only the directive `fenced` in a 200 response ends an attempt. A proxy or a failed token review
//! can return 401, 403 or 410 to many trials at once, so every other response means "unavailable".

mod post;

use std::collections::VecDeque;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use reqwest::{Client, StatusCode};
use stoker_api::contract::{
    CONTRACT_VERSION, Directive, ExitCode, Report, ReportEndpoint, ReportEvent, TrialConfig,
};
use stoker_api::number;
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::sync::mpsc::UnboundedSender;

use self::post::{Outage, Outcome, client, send};
use crate::Result;

/// Maximum queue length. Beyond it, the oldest checkpoint report that is not the best is dropped.
const QUEUE_MAX: usize = 4_096;
/// Maximum number of queued validations without a result: the newest, the best, and a few for
/// display.
const IDLE_VALIDATIONS_MAX: usize = 16;
/// The same during an outage. A trial's record stores only the newest and the best metrics.
const IDLE_VALIDATIONS_IN_OUTAGE_MAX: usize = 2;
/// Wait after the first failure; doubles with each further failure.
const BACKOFF_FIRST: Duration = Duration::from_millis(100);
/// Maximum wait between two attempts, so that a recovered server is noticed soon.
const BACKOFF_MAX: Duration = Duration::from_secs(5);
/// Timeout of [`Reporter::ask`].
const ASK_MAX: Duration = Duration::from_secs(60);
/// Timeout of [`Reporter::close`]. The exit code carries the same information as the last report.
const CLOSE_MAX: Duration = Duration::from_secs(10);

/// Posts reports in the background, in order.
#[derive(Debug)]
pub struct Reporter {
    attempt: u32,
    searched: Searched,
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
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<Item>,
    next_id: u64,
    /// Whether the reporter was dropped and no further report will be queued.
    is_closed: bool,
    /// Whether the last attempt to send failed.
    is_outage: bool,
    directive: Option<Directive>,
}

impl State {
    /// Returns the report to send next. During an outage, urgent reports come first.
    fn next(&self) -> Option<&Item> {
        let urgent = self.queue.iter().find(|item| self.is_outage && item.is_urgent());
        urgent.or_else(|| self.queue.front())
    }

    /// Drops old validations without a result, except the best one.
    fn coalesce(&mut self, searched: &Searched) {
        let max = match self.is_outage {
            true => IDLE_VALIDATIONS_IN_OUTAGE_MAX,
            false => IDLE_VALIDATIONS_MAX,
        };
        let is_candidate = |item: &Item| item.is_idle_validation() && item.asker.is_none();
        let mut num = self.queue.iter().filter(|item| is_candidate(item)).count();
        if num <= max {
            return;
        }
        let best = searched.best(self.queue.iter().filter(|item| is_candidate(item)));
        self.queue.retain(|item| {
            let is_dropped = num > max && is_candidate(item) && Some(item.id) != best;
            num -= usize::from(is_dropped);
            !is_dropped
        });
    }

    /// Makes space in a full queue, if no result is lost by that.
    fn drop_oldest_checkpoint(&mut self, searched: &Searched) {
        if self.queue.len() < QUEUE_MAX {
            return;
        }
        let is_checkpoint =
            |item: &&Item| matches!(item.report.event, ReportEvent::Checkpointed { .. });
        let best = searched.best(self.queue.iter().filter(is_checkpoint));
        let is_dropped = |item: &Item| is_checkpoint(&item) && Some(item.id) != best;
        if let Some(oldest) = self.queue.iter().position(is_dropped) {
            self.queue.remove(oldest);
        }
    }
}

/// The metric that the search optimizes.
#[derive(Debug)]
struct Searched {
    metric: String,
    smaller_is_better: bool,
}

impl Searched {
    /// Returns the ID of the item with the best metric, the first among equals; `None` if no item
    /// has a numeric metric.
    fn best<'a>(&self, items: impl Iterator<Item = &'a Item>) -> Option<u64> {
        let loss = |item: &Item| {
            let metric = match &item.report.event {
                ReportEvent::Validated { metrics, .. } => metrics.get(&self.metric),
                ReportEvent::Checkpointed { metric, .. } => metric.as_ref(),
                _ => None,
            };
            let metric = number::parse(metric?).filter(|metric| !metric.is_nan())?;
            Some((if self.smaller_is_better { metric } else { -metric }, item.id))
        };
        let best = items.filter_map(loss).min_by(|a, b| a.0.total_cmp(&b.0));
        best.map(|(_, id)| id)
    }
}

#[derive(Debug)]
struct Item {
    id: u64,
    report: Report,
    asker: Option<SyncSender<Directive>>,
}

impl Item {
    fn is_progress(&self) -> bool {
        matches!(self.report.event, ReportEvent::Progress { .. })
    }

    fn take_activity(&mut self) -> Option<String> {
        match &mut self.report.event {
            ReportEvent::Progress { activity, .. } => activity.take(),
            _ => None,
        }
    }

    fn inherit_activity(&mut self, previous: Option<String>) {
        if let ReportEvent::Progress { activity, .. } = &mut self.report.event {
            *activity = activity.take().or(previous);
        }
    }

    fn is_idle_validation(&self) -> bool {
        matches!(self.report.event, ReportEvent::Validated { granted_units: None, .. })
    }

    /// Returns `true` if the runner's decisions depend on this report, so that it may overtake
    /// others. The exit report stays behind the validations, because a program that stops early is
    /// judged by them.
    fn is_urgent(&self) -> bool {
        let is_exit = matches!(self.report.event, ReportEvent::Exiting { .. });
        !is_exit && !self.is_progress() && !self.is_idle_validation()
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
        rt.spawn(run(shared.clone(), client, config.report_endpoint.clone()));
        let searched =
            Searched { metric: config.metric.clone(), smaller_is_better: config.smaller_is_better };
        Ok(Self { attempt: config.attempt, searched, shared })
    }

    /// Sends the names of checkpoints that responses list as superfluous to `deleter`.
    pub(crate) fn tell_superfluous(&self, deleter: UnboundedSender<String>) {
        // Ignore the error: `open` calls this once, and the first sender stays in use.
        let _ = self.shared.deleter.set(deleter);
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

    /// Queues a report and waits for its response, which generally follows the responses to all
    /// earlier reports. Returns `None` after one minute, or if the server rejects the report. After
    /// a timeout, the report stays queued, unless it is [`ReportEvent::Progress`].
    pub fn ask(&self, batches: u64, event: ReportEvent) -> Option<Directive> {
        self.ask_within(batches, event, ASK_MAX)
    }

    /// Same as [`ask`](Self::ask), with a custom timeout, so that the caller can check for signals.
    /// To continue waiting, ask with [`ReportEvent::Progress`]: a queued report is sent only once.
    pub fn ask_within(
        &self,
        batches: u64,
        event: ReportEvent,
        wait: Duration,
    ) -> Option<Directive> {
        let (asker, answer) = sync_channel(1);
        let Some(id) = self.queue(batches, event, Some(asker)) else { return self.directive() };
        let answer = answer.recv_timeout(wait).ok();
        if answer.is_none() {
            let mut state = self.shared.lock();
            state.queue.retain(|item| item.id != id || !item.is_progress());
            let own = state.queue.iter_mut().filter(|item| item.id == id);
            own.for_each(|item| item.asker = None);
        }
        // The fence may arrive after this call timed out, so check the stored directive too.
        answer.or_else(|| self.directive().filter(|directive| *directive == Directive::Fenced))
    }

    /// Returns the unanswered reports that still matter after a restore: validations and
    /// checkpoints.
    pub fn unsent(&self) -> Vec<Report> {
        let matters = |item: &&Item| {
            let event = &item.report.event;
            matches!(event, ReportEvent::Validated { .. } | ReportEvent::Checkpointed { .. })
        };
        self.shared.lock().queue.iter().filter(matters).map(|item| item.report.clone()).collect()
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
        let answer = self.ask_within(batches, event, CLOSE_MAX);
        answer.is_some_and(|directive| directive != Directive::Fenced)
    }

    /// Queues a report and returns its ID; `None` once fenced.
    fn queue(
        &self,
        batches: u64,
        event: ReportEvent,
        asker: Option<SyncSender<Directive>>,
    ) -> Option<u64> {
        let report = Report { version: CONTRACT_VERSION, attempt: self.attempt, batches, event };
        let mut state = self.shared.lock();
        if state.directive == Some(Directive::Fenced) {
            return None;
        }
        let id = state.next_id;
        state.next_id += 1;
        let mut item = Item { id, report, asker };
        if item.is_progress() {
            // Keep the activity of the queued report that this one replaces.
            let is_replaced = |item: &Item| item.is_progress() && item.asker.is_none();
            let waiting = state.queue.iter_mut().filter(|item| is_replaced(item));
            let activity = waiting.filter_map(Item::take_activity).last();
            item.inherit_activity(activity);
            state.queue.retain(|item| !is_replaced(item));
        }
        state.drop_oldest_checkpoint(&self.searched);
        let is_urgent = item.is_urgent();
        state.queue.push_back(item);
        state.coalesce(&self.searched);
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

async fn run(shared: Arc<Shared>, client: Client, endpoint: ReportEndpoint) {
    let mut outage = Outage::default();
    loop {
        let next =
            shared.lock().next().map(|item| (item.id, item.report.clone(), item.is_urgent()));
        let Some((id, report, is_urgent)) = next else {
            if shared.lock().is_closed {
                return;
            }
            shared.queued.notified().await;
            continue;
        };
        match send(&client, &endpoint, &report).await {
            Outcome::Answer(directive, superfluous) => {
                if let Some(deleter) = shared.deleter.get() {
                    // Ignore the error: without the deleter, the final clean-up deletes the rest.
                    superfluous.into_iter().for_each(|name| drop(deleter.send(name)));
                }
                if outage.num_failed > 0 {
                    eprintln!("stoker: {} is available again", endpoint.url);
                }
                outage = Outage::default();
                shared.lock().is_outage = false;
                if answered(&shared, id, directive) {
                    return;
                }
            }
            Outcome::Rejected(reason) => {
                eprintln!("stoker: the report of batch {} was rejected: {reason}", report.batches);
                shared.lock().queue.retain(|item| item.id != id);
            }
            Outcome::Away(refused) => {
                let wait = outage.failed(&refused);
                let has_urgent = {
                    let mut state = shared.lock();
                    if state.is_closed {
                        return;
                    }
                    state.is_outage = true;
                    state.queue.iter().any(Item::is_urgent)
                };
                // A server that throttles reports without a result may still accept the others.
                let is_slowed = refused.status == Some(StatusCode::TOO_MANY_REQUESTS) && !is_urgent;
                let wait = if is_slowed && has_urgent { BACKOFF_FIRST } else { wait };
                tokio::select! {
                    () = tokio::time::sleep(wait) => {}
                    () = shared.urgent.notified(), if is_slowed && !has_urgent => {}
                }
            }
        }
    }
}

/// Records a response; returns `true` if it was the last (fenced).
fn answered(shared: &Shared, id: u64, directive: Directive) -> bool {
    let is_last = directive == Directive::Fenced;
    let mut state = shared.lock();
    state.directive = Some(directive);
    for item in state.queue.iter_mut().filter(|item| is_last || item.id == id) {
        if let Some(asker) = item.asker.take() {
            // Ignore the error: the caller may have timed out. The channel has capacity for one.
            let _ = asker.try_send(directive);
        }
    }
    state.queue.retain(|item| item.id != id);
    is_last
}

#[cfg(test)]
pub(crate) mod tests;

//! Reports of rank 0 and the answers to them.
//!
//! Reports are posted one after the other by a background task, so that training never waits for
//! the door. While the door is away the task tries on and training goes on; what is still unsent
//! is kept in each checkpoint.
//!
//! Only the directive `fenced` in a 200 answer ends an attempt. A proxy or a failed token review can
//! answer 401, 403 or 410 to many trials at once, so every other answer means "unavailable".

mod post;

use std::collections::VecDeque;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use reqwest::{Client, StatusCode};
use stoker_api::contract::{
    CONTRACT_VERSION, Directive, Door, ExitCode, Report, ReportEvent, TrialConfig,
};
use stoker_api::number;
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::sync::mpsc::UnboundedSender;

use self::post::{Outage, Outcome, client, send};
use crate::Result;

/// Reports that wait; beyond them the oldest checkpoint goes, unless it is the best one.
const QUEUE_MAX: usize = 4_096;
/// Validations that wait and decide nothing: the newest and the best one, and a few for the terminal.
const IDLE_VALIDATIONS_MAX: usize = 16;
/// The same during an outage. A record holds no more than the newest metrics and the best one.
const IDLE_VALIDATIONS_IN_OUTAGE_MAX: usize = 2;
/// The wait after the first failure; it doubles.
const BACKOFF_FIRST: Duration = Duration::from_millis(100);
/// The longest wait between two tries, so that a door that is back is soon seen.
const BACKOFF_MAX: Duration = Duration::from_secs(5);
/// How long [`Reporter::ask`] waits.
const ASK_MAX: Duration = Duration::from_secs(60);
/// How long [`Reporter::close`] waits. The exit code says the same as the last report.
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
    /// Notified of each queued report.
    queued: Notify,
    /// Notified of each queued report that must not wait behind one that decides nothing.
    urgent: Notify,
    deleter: OnceLock<UnboundedSender<String>>,
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<Item>,
    next_id: u64,
    /// Whether nothing more will be queued.
    is_closed: bool,
    /// Whether the last try failed.
    is_outage: bool,
    directive: Option<Directive>,
}

impl State {
    /// The report to send next. During an outage, reports that decide something come first.
    fn next(&self) -> Option<&Item> {
        let urgent = self.queue.iter().find(|item| self.is_outage && item.is_urgent());
        urgent.or_else(|| self.queue.front())
    }

    /// Drops validations that add nothing to the newest and the best one.
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

    /// Makes room in a full queue, if that loses no result.
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

/// The metric that a search goes by.
#[derive(Debug)]
struct Searched {
    metric: String,
    smaller_is_better: bool,
}

impl Searched {
    /// The id of the item with the best metric, the first of equals; `None` if none has a number.
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

    fn inherit_activity(&mut self, said: Option<String>) {
        if let ReportEvent::Progress { activity, .. } = &mut self.report.event {
            *activity = activity.take().or(said);
        }
    }

    fn is_idle_validation(&self) -> bool {
        matches!(self.report.event, ReportEvent::Validated { granted_units: None, .. })
    }

    /// Whether it decides something, and may overtake reports that do not. The exit stays behind the
    /// validations: a program that stops early is judged by them.
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
    /// Reports to `config.door`. `rt` must be driven by a thread of its own,
    /// with I/O and time enabled.
    ///
    /// # Errors
    ///
    /// The door's authority is no certificate, or the system lets nobody make a client.
    pub fn new(rt: Handle, config: &TrialConfig) -> Result<Self> {
        let client = client(&config.door)?;
        let shared = Arc::new(Shared::default());
        rt.spawn(run(shared.clone(), client, config.door.clone()));
        let searched =
            Searched { metric: config.metric.clone(), smaller_is_better: config.smaller_is_better };
        Ok(Self { attempt: config.attempt, searched, shared })
    }

    /// Hands on the names of checkpoints that nobody needs any more, as answers name them.
    pub(crate) fn tell_superfluous(&self, deleter: UnboundedSender<String>) {
        // It is told once; a second one would never hear anything.
        let _ = self.shared.deleter.set(deleter);
    }

    /// Queues a report; never waits. A newer [`ReportEvent::Progress`] takes the place of one
    /// that waits. Of many waiting validations without `granted_units`, the newest and the best stay.
    pub fn post(&self, batches: u64, event: ReportEvent) {
        self.queue(batches, event, None);
    }

    /// The latest answer; `Fenced` stays. `None` before the first.
    pub fn directive(&self) -> Option<Directive> {
        self.shared.lock().directive
    }

    /// Queues a report and waits for its answer, in general after all reports before it; `None` if none came
    /// within a minute, or if the door does not understand it. The report stays queued.
    pub fn ask(&self, batches: u64, event: ReportEvent) -> Option<Directive> {
        self.ask_within(batches, event, ASK_MAX)
    }

    /// [`ask`](Self::ask) with a deadline of the caller's, to look at a signal in between. Ask on
    /// with [`ReportEvent::Progress`]: a report that was queued once is sent once.
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
            state.queue.retain(|it| it.id != id || !it.is_progress());
            state.queue.iter_mut().filter(|it| it.id == id).for_each(|it| it.asker = None);
        }
        // An answer that came with the fence may have had no asker any more.
        answer.or_else(|| self.directive().filter(|it| *it == Directive::Fenced))
    }

    /// Reports that have no answer and still matter after a restore: validations and checkpoints.
    pub fn unsent(&self) -> Vec<Report> {
        let matters = |it: &&Item| {
            let event = &it.report.event;
            matches!(event, ReportEvent::Validated { .. } | ReportEvent::Checkpointed { .. })
        };
        self.shared.lock().queue.iter().filter(matters).map(|it| it.report.clone()).collect()
    }

    /// Queues reports that an earlier attempt could not send, as this attempt's.
    pub fn restore_unsent(&self, reports: Vec<Report>) {
        for report in reports {
            self.post(report.batches, report.event);
        }
    }

    /// Posts [`ReportEvent::Exiting`] and waits ten seconds at most until all is sent; says
    /// whether it was.
    pub fn close(&self, batches: u64, code: ExitCode, message: Option<String>) -> bool {
        let event = ReportEvent::Exiting { code: code as u8, message };
        let answer = self.ask_within(batches, event, CLOSE_MAX);
        answer.is_some_and(|it| it != Directive::Fenced)
    }

    /// The report's id in the queue; `None` once fenced.
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
            // What it said it does is told by the one that takes its place.
            let waiting =
                state.queue.iter_mut().filter(|it| it.is_progress() && it.asker.is_none());
            let said = waiting.filter_map(Item::take_activity).last();
            item.inherit_activity(said);
            state.queue.retain(|it| !it.is_progress() || it.asker.is_some());
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

async fn run(shared: Arc<Shared>, client: Client, door: Door) {
    let mut outage = Outage::default();
    loop {
        let next = shared.lock().next().map(|it| (it.id, it.report.clone(), it.is_urgent()));
        let Some((id, report, is_urgent)) = next else {
            if shared.lock().is_closed {
                return;
            }
            shared.queued.notified().await;
            continue;
        };
        match send(&client, &door, &report).await {
            Outcome::Answer(directive, superfluous) => {
                if let Some(deleter) = shared.deleter.get() {
                    // Whoever deletes ends with the process; the rest is deleted at the end.
                    superfluous.into_iter().for_each(|it| drop(deleter.send(it)));
                }
                if outage.num_failed > 0 {
                    eprintln!("stoker: {} answers again", door.url);
                }
                outage = Outage::default();
                shared.lock().is_outage = false;
                if answered(&shared, id, directive) {
                    return;
                }
            }
            Outcome::Rejected(reason) => {
                eprintln!("stoker: a report of batch {} was refused: {reason}", report.batches);
                shared.lock().queue.retain(|it| it.id != id);
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
                // A server that slows down reports without effect may still take the others at once.
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

/// Takes note of an answer; says whether it was the last.
fn answered(shared: &Shared, id: u64, directive: Directive) -> bool {
    let is_last = directive == Directive::Fenced;
    let mut state = shared.lock();
    state.directive = Some(directive);
    for item in state.queue.iter_mut().filter(|it| is_last || it.id == id) {
        if let Some(asker) = item.asker.take() {
            // An asker whose time is over needs no answer; there is room for one.
            let _ = asker.try_send(directive);
        }
    }
    state.queue.retain(|it| it.id != id);
    is_last
}

#[cfg(test)]
pub(crate) mod tests;

//! Events that wait to be written by background tasks, so that an events API that hangs delays no
//! decision.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::future::join_all;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::runtime::events::{Event, Recorder};
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use crate::error::request;

/// Maximum number of events that wait. They take at most a few KB each. The end of a large search
/// may cause more at once if the events API is slow.
const EVENTS_MAX: usize = 4096;
/// Number of events that are written at the same time. One writer has all events of an object, so
/// that they stay in order.
const WRITERS: usize = 16;
/// Minimum time between two log lines about dropped events.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// An event, the object that it is about, and its place among the waiting events.
type Waiting = (Event, ObjectReference, OwnedSemaphorePermit);

/// Events of one writer.
struct Shard {
    sender: UnboundedSender<Waiting>,
    receiver: tokio::sync::Mutex<UnboundedReceiver<Waiting>>,
}

/// Events that were dropped since the last log line about them.
#[derive(Default)]
struct Dropped {
    num: u64,
    logged_at: Option<Instant>,
}

impl Dropped {
    /// Returns the number of dropped events if it must be logged now, and resets it.
    fn take(&mut self) -> Option<u64> {
        let is_due = self.logged_at.is_none_or(|at| at.elapsed() >= LOG_INTERVAL);
        if self.num == 0 || !is_due {
            return None;
        }
        self.logged_at = Some(Instant::now());
        Some(std::mem::take(&mut self.num))
    }
}

/// Queue of events, each with the object that it is about.
pub(crate) struct EventQueue {
    recorder: Recorder,
    places: Arc<Semaphore>,
    shards: Vec<Shard>,
    dropped: Mutex<Dropped>,
}

impl EventQueue {
    pub(crate) fn new(recorder: Recorder) -> Self {
        let shard = |_| {
            let (sender, receiver) = mpsc::unbounded_channel();
            Shard { sender, receiver: tokio::sync::Mutex::new(receiver) }
        };
        Self {
            recorder,
            places: Arc::new(Semaphore::new(EVENTS_MAX)),
            shards: (0..WRITERS).map(shard).collect(),
            dropped: Mutex::default(),
        }
    }

    /// Adds an event. It is dropped if the queue is full.
    pub(crate) fn add(&self, event: Event, object: ObjectReference) {
        if !self.try_add(event, object) {
            self.log_dropped(1);
        }
    }

    fn try_add(&self, event: Event, object: ObjectReference) -> bool {
        let Ok(place) = self.places.clone().try_acquire_owned() else { return false };
        let mut hasher = DefaultHasher::new();
        object.uid.hash(&mut hasher);
        let shard = &self.shards[(hasher.finish() % WRITERS as u64) as usize];
        shard.sender.send((event, object, place)).is_ok()
    }

    /// Logs the number of dropped events, `more` of them new, at most once in [`LOG_INTERVAL`].
    fn log_dropped(&self, more: u64) {
        let mut dropped = self.dropped.lock().unwrap_or_else(PoisonError::into_inner);
        dropped.num += more;
        if let Some(num) = dropped.take() {
            tracing::warn!(num, "dropped events: too many events wait");
        }
    }

    /// Writes the events, oldest first for each object, and waits for more. Each event gets the
    /// time of its write. Failures are only logged.
    pub(crate) async fn write_all(&self) {
        let writers: Vec<_> = self.shards.iter().map(|shard| self.write_shard(shard)).collect();
        join_all(writers).await;
    }

    async fn write_shard(&self, shard: &Shard) {
        let mut receiver = shard.receiver.lock().await;
        while let Some((event, object, place)) = receiver.recv().await {
            drop(place);
            self.log_dropped(0);
            let published = self.recorder.publish(&event, &object);
            if let Err(error) = request("write an event", published).await {
                tracing::warn!(%error, reason = event.reason, "cannot write an event");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use kube::Client;
    use kube::runtime::events::{EventType, Reporter};
    use tokio::net::TcpListener;

    use super::*;

    fn event() -> Event {
        Event {
            type_: EventType::Normal,
            reason: "Running".to_owned(),
            note: None,
            action: "Reconcile".to_owned(),
            secondary: None,
        }
    }

    /// Returns a queue of events that are written to this address.
    fn queue(listener: &TcpListener) -> EventQueue {
        let url = format!("http://{}", listener.local_addr().unwrap());
        let client = Client::try_from(kube::Config::new(url.parse().unwrap())).unwrap();
        let reporter = Reporter { controller: "stoker-operator".to_owned(), instance: None };
        EventQueue::new(Recorder::new(client, reporter))
    }

    #[tokio::test]
    async fn events_are_dropped_while_the_api_hangs() {
        // Connections wait in the backlog, and get no response.
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let queue = queue(&listener);
        let add = || queue.try_add(event(), ObjectReference::default());
        let adds = async {
            assert!(add());
            // The writer takes the first event.
            tokio::task::yield_now().await;
            (0..=EVENTS_MAX).filter(|_| add()).count()
        };
        let num_added = tokio::select! {
            biased;
            num_added = adds => num_added,
            () = queue.write_all() => panic!("the queue is open"),
        };
        assert_eq!(num_added, EVENTS_MAX);
    }

    #[tokio::test]
    async fn slow_events_do_not_delay_other_objects() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let queue = queue(&listener);
        for number in 0..64 {
            let uid = Some(number.to_string());
            queue.add(event(), ObjectReference { uid, ..ObjectReference::default() });
        }
        let accepts = async {
            let first = listener.accept().await.unwrap();
            (first, listener.accept().await.unwrap())
        };
        // Less than the timeout of a request.
        let accepted = tokio::time::timeout(Duration::from_secs(6), accepts);
        tokio::select! {
            accepted = accepted => assert!(accepted.is_ok()),
            () = queue.write_all() => panic!("the queue is open"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn dropped_events_are_logged_once_a_minute() {
        let mut dropped = Dropped::default();
        assert_eq!(dropped.take(), None);
        dropped.num = 1;
        assert_eq!(dropped.take(), Some(1));
        dropped.num = 5;
        assert_eq!(dropped.take(), None);
        tokio::time::advance(LOG_INTERVAL).await;
        assert_eq!(dropped.take(), Some(5));
        assert_eq!(dropped.take(), None);
    }
}

//! Events that wait to be written by a background task, so that an events API that hangs delays no
//! decision.

use k8s_openapi::api::core::v1::ObjectReference;
use kube::runtime::events::{Event, Recorder};
use tokio::sync::{Mutex, mpsc};

use crate::error::request;

/// Maximum number of events that wait. They take at most a few KB each, and a burst of decisions
/// has fewer.
const EVENTS_MAX: usize = 4096;

/// Queue of events, each with the object that it is about.
pub(crate) struct EventQueue {
    recorder: Recorder,
    sender: mpsc::Sender<(Event, ObjectReference)>,
    receiver: Mutex<mpsc::Receiver<(Event, ObjectReference)>>,
}

impl EventQueue {
    pub(crate) fn new(recorder: Recorder) -> Self {
        let (sender, receiver) = mpsc::channel(EVENTS_MAX);
        Self { recorder, sender, receiver: Mutex::new(receiver) }
    }

    /// Adds an event. Returns `false` if the queue is full; the event is dropped then.
    pub(crate) fn add(&self, event: Event, object: ObjectReference) -> bool {
        self.sender.try_send((event, object)).is_ok()
    }

    /// Writes the events, oldest first, and waits for more. Failures are only logged.
    pub(crate) async fn write_all(&self) {
        let mut receiver = self.receiver.lock().await;
        while let Some((event, object)) = receiver.recv().await {
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

    #[tokio::test]
    async fn events_are_dropped_while_the_api_hangs() {
        // Connections wait in the backlog, and get no response.
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let client = Client::try_from(kube::Config::new(url.parse().unwrap())).unwrap();
        let reporter = Reporter { controller: "stoker-operator".to_owned(), instance: None };
        let queue = EventQueue::new(Recorder::new(client, reporter));
        let add = || queue.add(event(), ObjectReference::default());
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
}

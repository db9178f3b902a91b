//! Work queue of a controller: each key is queued once and held by at most one worker.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use crate::cache::Key;

/// Keys with the time at which each is due.
#[derive(Debug, Default)]
pub struct Queue {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    due: BTreeSet<(Instant, Key)>,
    at: HashMap<Key, Instant>,
    /// Keys that workers hold, with the time at which each is due again.
    in_progress: BTreeMap<Key, Option<Instant>>,
    is_closed: bool,
}

impl State {
    fn put(&mut self, key: Key, at: Instant) {
        match self.at.get(&key) {
            Some(sooner) if *sooner <= at => return,
            Some(later) => {
                self.due.remove(&(*later, key.clone()));
            }
            None => {}
        }
        self.at.insert(key.clone(), at);
        self.due.insert((at, key));
    }
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues `key` now.
    pub fn add(&self, key: Key) {
        self.add_after(key, Duration::ZERO);
    }

    /// Queues `key` after `delay`, or leaves it unchanged if it is due earlier. Does nothing while
    /// the queue is closed: a replica that starts to lead adds all objects.
    pub fn add_after(&self, key: Key, delay: Duration) {
        let at = Instant::now() + delay;
        let mut state = self.lock();
        if state.is_closed {
            return;
        }
        if let Some(due_again) = state.in_progress.get_mut(&key) {
            *due_again = Some(due_again.map_or(at, |due| due.min(at)));
            return;
        }
        state.put(key, at);
        drop(state);
        self.changed.notify_one();
    }

    /// Number of queued keys, due or not.
    pub fn len(&self) -> usize {
        self.lock().due.len()
    }

    /// Whether no key is queued.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Removes all keys. The next leader queues all objects again.
    pub fn clear(&self) {
        let mut state = self.lock();
        state.due.clear();
        state.at.clear();
        // The workers that held these keys have ended and never call `done`.
        state.in_progress.clear();
    }

    /// Closes the queue, which ends [`next`](Self::next) for all workers, or opens it again.
    pub fn set_closed(&self, is_closed: bool) {
        self.lock().is_closed = is_closed;
        self.changed.notify_waiters();
        self.changed.notify_one();
    }

    /// Waits for a due key and takes it; `None` once the queue is closed. The caller returns every
    /// key with [`done`](Self::done).
    pub async fn next(&self) -> Option<Key> {
        loop {
            let changed = self.changed.notified();
            let until = {
                let mut state = self.lock();
                if state.is_closed {
                    drop(state);
                    self.changed.notify_one();
                    return None;
                }
                let first = state.due.first().cloned();
                match first {
                    Some((at, key)) if at <= Instant::now() => {
                        state.due.remove(&(at, key.clone()));
                        state.at.remove(&key);
                        state.in_progress.insert(key.clone(), None);
                        let has_more = !state.due.is_empty();
                        drop(state);
                        if has_more {
                            self.changed.notify_one();
                        }
                        return Some(key);
                    }
                    first => first.map(|(at, _)| at),
                }
            };
            match until {
                Some(until) => tokio::select! {
                    () = changed => {}
                    () = sleep_until(until) => {}
                },
                None => changed.await,
            }
        }
    }

    /// Returns a key, which is due again after `delay` if set.
    pub fn done(&self, key: Key, delay: Option<Duration>) {
        let mut state = self.lock();
        let due_again = state.in_progress.remove(&key).flatten();
        let at = delay.map(|delay| Instant::now() + delay).filter(|_| !state.is_closed);
        if let Some(at) = [due_again, at].into_iter().flatten().min() {
            state.put(key, at);
            drop(state);
            self.changed.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str) -> Key {
        Key::new("ns", name)
    }

    const SOON: Duration = Duration::from_millis(30);
    const LATER: Duration = Duration::from_millis(120);
    const NEVER: Duration = Duration::from_secs(600);

    #[tokio::test]
    async fn keys_come_once_when_due() {
        let queue = Queue::default();
        queue.add_after(key("later"), SOON);
        queue.add(key("now"));
        queue.add(key("now"));
        let start = Instant::now();
        assert_eq!(queue.next().await, Some(key("now")));
        assert_eq!(queue.next().await, Some(key("later")));
        assert!(start.elapsed() >= SOON);
        assert!(queue.is_empty());
    }

    #[tokio::test]
    async fn earlier_due_time_wins() {
        let queue = Queue::default();
        queue.add_after(key("a"), NEVER);
        queue.add_after(key("a"), LATER);
        queue.add_after(key("a"), NEVER);
        assert_eq!(queue.next().await, Some(key("a")));
        assert!(queue.is_empty());
    }

    #[tokio::test]
    async fn taken_key_added_again_comes_after_done() {
        let queue = Queue::default();
        queue.add(key("a"));
        assert_eq!(queue.next().await, Some(key("a")));
        queue.add(key("a"));
        assert!(queue.is_empty());
        queue.done(key("a"), Some(NEVER));
        assert_eq!(queue.next().await, Some(key("a")));
        queue.done(key("a"), None);
        assert!(queue.is_empty());
    }

    #[tokio::test]
    async fn clear_releases_taken_keys() {
        let queue = Queue::default();
        queue.add(key("a"));
        assert_eq!(queue.next().await, Some(key("a")));
        queue.clear();
        queue.add(key("a"));
        assert_eq!(queue.next().await, Some(key("a")));
    }

    #[tokio::test]
    async fn closed_queue_ignores_new_keys() {
        let queue = Queue::default();
        queue.add(key("taken"));
        assert_eq!(queue.next().await, Some(key("taken")));
        queue.set_closed(true);
        queue.add(key("a"));
        queue.done(key("taken"), Some(NEVER));
        assert!(queue.is_empty());
        queue.set_closed(false);
        queue.add(key("a"));
        assert_eq!(queue.next().await, Some(key("a")));
    }

    #[tokio::test]
    async fn closing_ends_waiting_workers() {
        let queue = std::sync::Arc::new(Queue::default());
        let worker = |queue: std::sync::Arc<Queue>| tokio::spawn(async move { queue.next().await });
        let workers = [worker(queue.clone()), worker(queue.clone())];
        tokio::time::sleep(SOON).await;
        queue.set_closed(true);
        for worker in workers {
            assert_eq!(worker.await.unwrap(), None);
        }
    }
}

//! Limits on concurrent token reviews, in total and per namespace.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Concurrent reviews. Unauthenticated callers must not use up the API server's capacity.
const REVIEWS_MAX: usize = 32;
/// Concurrent reviews of one namespace.
const NAMESPACE_REVIEWS_MAX: usize = 8;
/// Number of namespaces above which those without a current caller are dropped.
const NAMESPACES_MAX: usize = 256;

/// Permits, and the share of each namespace.
#[derive(Debug)]
pub(super) struct ReviewPermits {
    all: Arc<Semaphore>,
    shares: Mutex<HashMap<String, Arc<Semaphore>>>,
}

/// Permits one review until dropped.
#[derive(Debug)]
pub(super) struct ReviewPermit {
    _share: OwnedSemaphorePermit,
    _all: OwnedSemaphorePermit,
}

impl Default for ReviewPermits {
    fn default() -> Self {
        Self { all: Arc::new(Semaphore::new(REVIEWS_MAX)), shares: Mutex::default() }
    }
}

impl ReviewPermits {
    /// Waits for a permit. A namespace that has used its share does not block the others.
    pub(super) async fn acquire(&self, namespace: &str) -> ReviewPermit {
        let share = acquired(self.share(namespace)).await;
        ReviewPermit { _share: share, _all: acquired(self.all.clone()).await }
    }

    fn share(&self, namespace: &str) -> Arc<Semaphore> {
        let mut shares = self.shares.lock().unwrap_or_else(PoisonError::into_inner);
        if shares.len() >= NAMESPACES_MAX {
            // A semaphore with a permit or a waiter has a second reference.
            shares.retain(|_, share| Arc::strong_count(share) > 1);
        }
        let new = || Arc::new(Semaphore::new(NAMESPACE_REVIEWS_MAX));
        shares.entry(namespace.to_owned()).or_insert_with(new).clone()
    }
}

async fn acquired(semaphore: Arc<Semaphore>) -> OwnedSemaphorePermit {
    semaphore.acquire_owned().await.expect("no code closes this semaphore")
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[test]
    fn one_namespace_cannot_use_all_permits() {
        let permits = ReviewPermits::default();
        let acquire = |namespace: &str| permits.acquire(namespace).now_or_never();
        let mut held: Vec<ReviewPermit> =
            (0..NAMESPACE_REVIEWS_MAX).filter_map(|_| acquire("a")).collect();
        assert_eq!(held.len(), NAMESPACE_REVIEWS_MAX);
        assert!(acquire("a").is_none(), "the share is used up");
        for namespace in ["b", "c", "d"] {
            held.extend((0..NAMESPACE_REVIEWS_MAX).filter_map(|_| acquire(namespace)));
        }
        assert_eq!(held.len(), REVIEWS_MAX);
        assert!(acquire("e").is_none(), "all permits are used up");
        held.remove(0);
        assert!(acquire("e").is_some());
        assert!(acquire("a").is_some());
    }

    #[test]
    fn shares_without_a_caller_are_dropped() {
        let permits = ReviewPermits::default();
        let held = permits.acquire("held").now_or_never().unwrap();
        for number in 0..3 * NAMESPACES_MAX {
            assert!(permits.acquire(&number.to_string()).now_or_never().is_some());
        }
        let shares = permits.shares.lock().unwrap();
        assert!(shares.len() <= NAMESPACES_MAX && shares.contains_key("held"));
        drop(held);
    }
}

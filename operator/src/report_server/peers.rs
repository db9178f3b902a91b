//! Limits the concurrent connections of one address, so that a pod cannot use up those of all.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Concurrent connections of one address. Pods of one node may share its address.
pub(super) const PEER_CONNECTIONS_MAX: usize = 512;
/// Time between two warnings, so that trainers that retry do not fill the log.
const WARNING_INTERVAL: Duration = Duration::from_secs(60);

/// Number of connections by address.
#[derive(Clone, Debug, Default)]
pub(super) struct Peers {
    counts: Arc<Mutex<HashMap<IpAddr, usize>>>,
}

/// Connection that counts until it is dropped.
#[derive(Debug)]
pub(super) struct PeerConnection {
    peers: Peers,
    address: IpAddr,
}

impl Peers {
    /// Counts a connection. Returns `None` if its address has too many.
    pub(super) fn connect(&self, address: IpAddr) -> Option<PeerConnection> {
        let address = address.to_canonical();
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let count = counts.entry(address).or_default();
        // The proxy of a service mesh connects from this pod, for all trainers.
        if *count >= PEER_CONNECTIONS_MAX && !address.is_loopback() {
            return None;
        }
        *count += 1;
        Some(PeerConnection { peers: self.clone(), address })
    }
}

impl Drop for PeerConnection {
    fn drop(&mut self) {
        let mut counts = self.peers.counts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = counts.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.address);
            }
        }
    }
}

/// Limits the rate of a warning.
#[derive(Debug, Default)]
pub(super) struct Warnings {
    last: Option<Instant>,
}

impl Warnings {
    /// Returns whether to warn now, and then counts the warning.
    pub(super) fn is_due(&mut self, now: Instant) -> bool {
        let is_due = self.last.is_none_or(|last| now.duration_since(last) >= WARNING_INTERVAL);
        if is_due {
            self.last = Some(now);
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warnings_are_a_minute_apart() {
        let (mut warnings, start) = (Warnings::default(), Instant::now());
        let due = [0, 1, 59, 60, 61, 119, 120]
            .map(|seconds| warnings.is_due(start + Duration::from_secs(seconds)));
        assert_eq!(due, [true, false, false, true, false, false, true]);
    }

    #[test]
    fn one_address_leaves_connections_for_others() {
        let peers = Peers::default();
        let connect = |address: &str| peers.connect(address.parse().unwrap());
        let mut connections: Vec<_> = (0..600).filter_map(|_| connect("10.0.0.1")).collect();
        assert_eq!(connections.len(), PEER_CONNECTIONS_MAX);
        assert!(connect("::ffff:10.0.0.1").is_none());
        assert!(connect("10.0.0.2").is_some());
        connections.pop();
        assert!(connect("10.0.0.1").is_some());
        let local: Vec<_> = (0..600).filter_map(|_| connect("127.0.0.6")).collect();
        assert_eq!(local.len(), 600);
        drop((connections, local));
        assert!(peers.counts.lock().unwrap().is_empty());
    }
}

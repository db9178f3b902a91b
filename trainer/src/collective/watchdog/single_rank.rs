//! Watchdog of a process without other ranks.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use super::super::progress::{ProgressState, StallLimits};
use super::{GangAbort, Watchdog};

/// Watchdog of a process without other ranks. It stops when this value is dropped.
#[derive(Debug)]
pub(in crate::collective) struct SingleRankWatchdog(GangAbort);

impl SingleRankWatchdog {
    /// Starts the watchdog thread.
    ///
    /// # Errors
    ///
    /// Fails if the system has no more threads.
    pub(in crate::collective) fn start(
        limits: StallLimits,
        progress: Arc<ProgressState>,
    ) -> io::Result<Self> {
        let (abort, peers) = (GangAbort::default(), BTreeMap::new());
        let own = abort.clone();
        Watchdog { rank: 0, limits, progress, abort, peers, is_single: true }.start()?;
        Ok(Self(own))
    }
}

impl Drop for SingleRankWatchdog {
    fn drop(&mut self) {
        self.0.stop_watchdog();
    }
}

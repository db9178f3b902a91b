//! The signals that are passed on to a program: requests to end, and to tell what its threads do.

use tokio::signal::unix::{self, SignalKind, signal};

use crate::Result;
use crate::error::Infrastructure;

/// Listens for them. The first process of a container gets none that it does not
/// listen for.
#[derive(Debug)]
pub(super) struct Signals {
    terminate: unix::Signal,
    interrupt: unix::Signal,
    hang_up: unix::Signal,
    tell: unix::Signal,
}

impl Signals {
    /// Listens from now on. Must be called within a runtime.
    pub(super) fn listen() -> Result<Self> {
        let listen = |kind| {
            signal(kind).map_err(|error| Infrastructure(format!("no signal handlers: {error}")))
        };
        Ok(Self {
            terminate: listen(SignalKind::terminate())?,
            interrupt: listen(SignalKind::interrupt())?,
            hang_up: listen(SignalKind::hangup())?,
            tell: listen(SignalKind::user_defined1())?,
        })
    }

    /// The next one.
    pub(super) async fn next(&mut self) -> rustix::process::Signal {
        use rustix::process::Signal;
        tokio::select! {
            _ = self.terminate.recv() => Signal::TERM,
            _ = self.interrupt.recv() => Signal::INT,
            _ = self.hang_up.recv() => Signal::HUP,
            _ = self.tell.recv() => Signal::USR1,
        }
    }

    /// Waits for a request to end.
    pub(super) async fn end(&mut self) {
        while self.next().await == rustix::process::Signal::USR1 {}
    }
}

//! Signals forwarded to a program: stop requests, and requests to report its threads.

use tokio::signal::unix::{self, SignalKind, signal};

use crate::Result;
use crate::error::Infrastructure;
use crate::stop::is_ignored;

/// Listens for signals. The first process of a container only receives signals that it listens for.
#[derive(Debug)]
pub(super) struct Signals {
    terminate: unix::Signal,
    /// `None` if this process was started with SIGINT ignored.
    interrupt: Option<unix::Signal>,
    /// `None` if this process was started with SIGHUP ignored, as by `nohup`.
    hang_up: Option<unix::Signal>,
    thread_report: unix::Signal,
}

impl Signals {
    /// Starts to listen. Must be called within a runtime.
    pub(super) fn listen() -> Result<Self> {
        use rustix::process::Signal;
        let listen = |kind| {
            signal(kind).map_err(|error| Infrastructure(format!("cannot handle signals: {error}")))
        };
        let unless_ignored = |signal: Signal, kind| match is_ignored(signal) {
            true => Ok(None),
            false => listen(kind).map(Some),
        };
        Ok(Self {
            interrupt: unless_ignored(Signal::INT, SignalKind::interrupt())?,
            hang_up: unless_ignored(Signal::HUP, SignalKind::hangup())?,
            terminate: listen(SignalKind::terminate())?,
            thread_report: listen(SignalKind::user_defined1())?,
        })
    }

    /// Waits for the next signal.
    pub(super) async fn next(&mut self) -> rustix::process::Signal {
        use rustix::process::Signal;
        tokio::select! {
            _ = self.terminate.recv() => Signal::TERM,
            () = received(&mut self.interrupt) => Signal::INT,
            () = received(&mut self.hang_up) => Signal::HUP,
            _ = self.thread_report.recv() => Signal::USR1,
        }
    }

    /// Waits for a stop request.
    pub(super) async fn stop_requested(&mut self) {
        while self.next().await == rustix::process::Signal::USR1 {}
    }
}

async fn received(signal: &mut Option<unix::Signal>) {
    match signal {
        Some(signal) => _ = signal.recv().await,
        None => std::future::pending().await,
    }
}

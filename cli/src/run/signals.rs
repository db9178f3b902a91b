//! Signals that stop a run.

use std::time::Duration;

use rustix::process::Signal;
use tokio::signal::unix::{self, SignalKind, signal};
use tokio::time::Instant;

use crate::failure::Failure;

/// Time after the first signal in which others belong to the same request. `timeout` and other
/// wrappers send a signal to the program, and then to its process group.
const SAME_REQUEST: Duration = Duration::from_secs(1);

/// SIGINT, SIGTERM and SIGHUP, which all request a stop.
///
/// SIGINT and SIGHUP stay ignored if this process inherited them as ignored, for example from
/// `nohup` or as a background job of a script.
#[derive(Debug)]
pub(crate) struct Signals {
    terminate: unix::Signal,
    interrupt: Option<unix::Signal>,
    hang_up: Option<unix::Signal>,
}

impl Signals {
    /// Installs the signal handlers.
    pub(crate) fn listen() -> Result<Self, Failure> {
        let listen = |kind| {
            signal(kind)
                .map_err(|error| Failure::System(format!("cannot listen for signals: {error}")))
        };
        // A handler would replace the inherited disposition, so read it first.
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let unless_ignored = |signal: Signal, kind| match is_ignored(&status, signal) {
            true => Ok(None),
            false => listen(kind).map(Some),
        };
        Ok(Self {
            interrupt: unless_ignored(Signal::INT, SignalKind::interrupt())?,
            hang_up: unless_ignored(Signal::HUP, SignalKind::hangup())?,
            terminate: listen(SignalKind::terminate())?,
        })
    }

    /// Waits for the next signal.
    pub(crate) async fn next(&mut self) {
        tokio::select! {
            () = received(&mut self.interrupt) => {}
            () = received(&mut self.hang_up) => {}
            _ = self.terminate.recv() => {}
        }
    }
}

/// Lets writes above the limit of file sizes (`ulimit -f`) fail with an error. By default, they end
/// the process without a message. Programs that this process starts are not affected.
pub(crate) fn report_large_files() {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    if !is_ignored(&status, Signal::XFSZ) {
        // The handler stays installed. Without it, the default applies.
        let _ = signal(SignalKind::from_raw(Signal::XFSZ.as_raw()));
    }
}

/// Signals received so far.
#[derive(Debug, Default)]
pub(crate) struct StopRequests {
    first_at: Option<Instant>,
}

/// Meaning of a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StopRequest {
    /// A stop with checkpoints.
    Stop,
    /// The same stop as an earlier signal.
    SameStop,
    /// The immediate end of all processes.
    Kill,
}

impl StopRequests {
    /// Returns whether a signal was received.
    pub(crate) fn any(&self) -> bool {
        self.first_at.is_some()
    }

    /// Records a signal and returns its meaning.
    pub(crate) fn record(&mut self, now: Instant) -> StopRequest {
        match self.first_at {
            None => {
                self.first_at = Some(now);
                StopRequest::Stop
            }
            Some(first_at) if now.duration_since(first_at) < SAME_REQUEST => StopRequest::SameStop,
            Some(_) => StopRequest::Kill,
        }
    }
}

async fn received(signal: &mut Option<unix::Signal>) {
    match signal {
        Some(signal) => _ = signal.recv().await,
        None => std::future::pending().await,
    }
}

/// Returns `true` if the process with this `/proc/PID/status` ignores a signal.
fn is_ignored(status: &str, signal: Signal) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask & (1 << (signal.as_raw() - 1)) != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_of_a_wrapper_are_one_request() {
        let (mut requests, begin) = (StopRequests::default(), Instant::now());
        assert!(!requests.any());
        let meanings = [0, 1, 999, 1000, 1001].map(|ms| {
            let meaning = requests.record(begin + Duration::from_millis(ms));
            assert!(requests.any());
            meaning
        });
        use StopRequest::{Kill, SameStop, Stop};
        assert_eq!(meanings, [Stop, SameStop, SameStop, Kill, Kill]);
    }

    #[test]
    fn ignored_signals_are_read_from_the_status() {
        let check = |status: &str, expected: [bool; 3]| {
            let signals = [Signal::HUP, Signal::INT, Signal::TERM];
            assert_eq!(signals.map(|signal| is_ignored(status, signal)), expected, "{status}");
        };
        check("Name:\tsh\nSigIgn:\t0000000000000000\nSigCgt:\tffff\n", [false; 3]);
        check("SigIgn:\t0000000000000001\n", [true, false, false]);
        check("SigIgn:\t0000000000001003\n", [true, true, false]);
        check("SigIgn:\tffffffffffffffff\n", [true; 3]);
        check("", [false; 3]);
    }
}

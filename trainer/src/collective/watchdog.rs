//! Watchdog: all ranks send heartbeats with their progress to rank 0, and rank 0 sends heartbeats
//! to all.
//!
//! A rank without progress would block all others forever in the next collective call. The watchdog
//! blames the ranks that have progressed least, and reports their last known position. Then it
//! closes all connections, which ends every wait. If this does not end the process, the watchdog
//! does. It ends a process without other ranks only if the environment sets a limit.

use std::collections::BTreeMap;
use std::io::{self, Read, Write as _};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use stoker_api::contract::ExitCode;
use stoker_api::names::ENV_SILENCE_SECONDS;

use super::link::Link;
use super::progress::{HEARTBEAT_BYTES, Heartbeat, ProgressState, StallLimits};

mod single_rank;

pub(super) use single_rank::SingleRankWatchdog;

/// Interval of heartbeats.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);
/// Timeout for TCP acknowledgments of a peer's machine; after it, the link or the machine has
/// failed.
const ACK_TIMEOUT: Duration = Duration::from_secs(30);
/// Time that this process may take to exit after its gang has failed, in case it waits for
/// something else.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(30);
/// Time that the forced exit may take, since a driver may hang in it too.
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);
/// Additional limit on ranks other than 0, so that rank 0 reports first.
const REPORT_DELAY: Duration = Duration::from_secs(5);

/// Abort flag of the gang, shared by all waits, with the reason.
#[derive(Clone, Debug, Default)]
pub(super) struct GangAbort(Arc<AbortState>);

#[derive(Debug, Default)]
struct AbortState {
    reason: OnceLock<String>,
    /// Connections that an abort closes. They are shared instead of cloned, because rank 0 needs a
    /// file descriptor for each.
    streams: Vec<Arc<TcpStream>>,
    ring: Vec<Link>,
    /// A collective call failed, or a rank exited without a shutdown message.
    has_failed: AtomicBool,
    /// First rank that exited, cleanly or not, and when the watchdog noticed it.
    first_exit: OnceLock<(usize, Instant)>,
    is_stopped: AtomicBool,
}

impl GangAbort {
    /// Creates the flag with the connections that an abort closes.
    pub(super) fn new(streams: Vec<Arc<TcpStream>>, ring: Vec<Link>) -> Self {
        Self(Arc::new(AbortState { streams, ring, ..AbortState::default() }))
    }

    /// Returns the reason of the abort, if the gang was aborted.
    pub(super) fn reason(&self) -> Option<&str> {
        self.0.reason.get().map(String::as_str)
    }

    /// Aborts the gang: closes every connection.
    pub(super) fn abort(&self, reason: String) {
        let _ = self.0.reason.set(reason);
        self.close();
    }

    /// Marks the gang as failed.
    pub(super) fn mark_failed(&self) {
        self.0.has_failed.store(true, Ordering::Relaxed);
    }

    /// Closes every connection, which notifies the other ranks.
    pub(super) fn close(&self) {
        // Ignore errors: the connections may be closed already.
        for stream in &self.0.streams {
            let _ = stream.shutdown(Shutdown::Both);
        }
        for link in &self.0.ring {
            let _ = link.shutdown();
        }
    }

    /// Returns `true` if the gang has failed.
    pub(super) fn has_failed(&self) -> bool {
        self.reason().is_some() || self.0.has_failed.load(Ordering::Relaxed)
    }

    /// Returns a rank that exited at least `grace` ago, if any. Ranks other than 0 notice only the
    /// exit of rank 0.
    pub(super) fn exited_rank(&self, grace: Duration) -> Option<usize> {
        let (rank, noticed_at) = self.0.first_exit.get()?;
        (noticed_at.elapsed() >= grace).then_some(*rank)
    }

    fn record_exit(&self, rank: usize) {
        // Ignore the error: an earlier exit is recorded.
        let _ = self.0.first_exit.set((rank, Instant::now()));
    }

    /// Stops the watchdog.
    pub(super) fn stop_watchdog(&self) {
        self.0.is_stopped.store(true, Ordering::Relaxed);
    }

    fn is_stopped(&self) -> bool {
        self.0.is_stopped.load(Ordering::Relaxed)
    }
}

/// State of a peer, as known from its heartbeats.
#[derive(Debug)]
struct PeerState {
    stream: Option<Arc<TcpStream>>,
    received: Vec<u8>,
    heartbeat: Heartbeat,
    /// When the heartbeat's contents last changed.
    changed_at: Instant,
    /// When the last heartbeat arrived.
    heard_at: Instant,
}

/// Starts the watchdog thread, which runs until `abort` stops it. `peers` are all other ranks on
/// rank 0, and rank 0 elsewhere.
///
/// # Errors
///
/// Fails if the system has no more threads, or rejects a socket option.
pub(super) fn start(
    rank: usize,
    peers: Vec<(usize, Arc<TcpStream>)>,
    limits: StallLimits,
    progress: Arc<ProgressState>,
    abort: GangAbort,
) -> io::Result<()> {
    let mut states = BTreeMap::new();
    for (peer, stream) in peers {
        use rustix::net::sockopt;
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        // The kernel of a live machine acknowledges heartbeats, even if its program hangs.
        let ack_timeout = u32::try_from(ACK_TIMEOUT.as_millis()).unwrap_or(u32::MAX);
        sockopt::set_tcp_user_timeout(&stream, ack_timeout)?;
        let now = Instant::now();
        let (stream, heartbeat) = (Some(stream), Heartbeat::default());
        states.insert(
            peer,
            PeerState { stream, received: vec![], heartbeat, changed_at: now, heard_at: now },
        );
    }
    Watchdog { rank, limits, progress, abort, peers: states, is_single: false }.start()
}

struct Watchdog {
    rank: usize,
    limits: StallLimits,
    progress: Arc<ProgressState>,
    abort: GangAbort,
    peers: BTreeMap<usize, PeerState>,
    /// Whether this process is the only rank.
    is_single: bool,
}

impl Watchdog {
    fn start(self) -> io::Result<()> {
        std::thread::Builder::new().name("stoker-watch".into()).spawn(move || self.run())?;
        Ok(())
    }

    fn run(mut self) {
        let (mut local, mut local_since) = (self.progress.heartbeat(), Instant::now());
        while !self.abort.is_stopped() {
            std::thread::sleep(HEARTBEAT_INTERVAL);
            let heartbeat = self.progress.heartbeat();
            if heartbeat != local {
                (local, local_since) = (heartbeat, Instant::now());
            }
            let makes_progress = |peer: &PeerState| {
                peer.stream.is_some()
                    && (peer.changed_at.elapsed() < 2 * HEARTBEAT_INTERVAL
                        || peer.heartbeat.is_waiting())
            };
            if self.rank == 0 && self.peers.values().any(makes_progress) {
                self.progress.record_gang_progress();
            }
            let bytes = heartbeat.to_bytes();
            for (rank, peer) in &mut self.peers {
                match peer.exchange(&bytes) {
                    Ok(true) => {}
                    // Ranks in a collective call notice the exit by themselves. Other ranks must
                    // end too, unless training is over.
                    Ok(false) if !self.progress.is_training_finished() => self.abort.mark_failed(),
                    Ok(false) => {}
                    Err(error) if !self.abort.is_stopped() => {
                        let text = format!(
                            "rank {rank}, last seen {}: {error}",
                            peer.heartbeat.position()
                        );
                        self.abort.abort(text);
                    }
                    Err(_) => {}
                }
                if peer.stream.is_none() {
                    self.abort.record_exit(*rank);
                }
            }
            if self.peers.values().any(|peer| peer.heartbeat.has_stop_request()) {
                self.progress.request_stop();
            }
            if let Some(text) = self.stall_reason(local, local_since) {
                self.abort.abort(text);
            }
            if self.abort.has_failed() {
                return self.force_exit();
            }
        }
    }

    /// Describes the ranks that made no progress for too long, if any.
    fn stall_reason(&self, local: Heartbeat, local_since: Instant) -> Option<String> {
        let mut limit = self.limits.limit(self.progress.median_step())?;
        if self.rank > 0 {
            // Rank 0 knows the state of all ranks, so it should report first.
            limit += REPORT_DELAY;
        }
        let seconds = limit.as_secs_f64();
        let mut others = self.peers.iter().filter(|(_, peer)| peer.stream.is_some());
        if let Some((rank, peer)) = others.find(|(_, peer)| peer.heard_at.elapsed() > limit) {
            let position = peer.heartbeat.position();
            return Some(format!(
                "no heartbeat from rank {rank} for {seconds:.0} s: last seen {position}"
            ));
        }
        let ranks = || {
            let others = self.peers.iter().filter(|(_, peer)| peer.stream.is_some());
            let others = others.map(|(rank, peer)| (*rank, peer.heartbeat, peer.changed_at));
            others.chain([(self.rank, local, local_since)])
        };
        // Ranks may wait for the storage or the runner, and the last rank of a gang blocks no
        // other.
        let is_over = self.is_single && self.progress.is_training_finished();
        let blocks_none = is_over || (ranks().count() == 1 && !self.is_single);
        if blocks_none || ranks().any(|(_, heartbeat, _)| heartbeat.is_waiting()) {
            return None;
        }
        // As long as one rank makes progress, the others may continue. Reading data and compiling
        // kernels before the first complete step may take any time, unless all ranks wait.
        let can_judge = self.progress.has_completed_step()
            || ranks().all(|(_, heartbeat, _)| heartbeat.is_in_collective());
        if !can_judge || ranks().any(|(_, _, changed_at)| changed_at.elapsed() <= limit) {
            return None;
        }
        let furthest = ranks().map(|(_, heartbeat, _)| heartbeat.progress()).max()?;
        let is_behind =
            |(_, heartbeat, _): &(usize, Heartbeat, Instant)| heartbeat.progress() < furthest;
        // Only rank 0 can detect that all ranks wait for each other.
        let all_wait = self.rank == 0 && !ranks().any(|rank| is_behind(&rank));
        let blamed: Vec<_> = ranks().filter(|rank| all_wait || is_behind(rank)).collect();
        if blamed.is_empty() {
            return None;
        }
        let describe = |(rank, heartbeat, _): &(usize, Heartbeat, Instant)| match self.is_single {
            true => format!("last seen {}", heartbeat.position_of_single_rank()),
            false => format!("rank {rank} last seen {}", heartbeat.position()),
        };
        let descriptions: Vec<String> = blamed.iter().map(describe).collect();
        let descriptions = descriptions.join(", ");
        Some(format!(
            "no progress for {seconds:.0} s: {descriptions}; if a step may take longer, increase \
             {ENV_SILENCE_SECONDS}"
        ))
    }

    /// Waits for the process to exit after the connections were closed, then forces the exit. A
    /// process without connections has no reason to exit.
    fn force_exit(&self) {
        let mut deadline = Instant::now();
        if !self.is_single {
            deadline += SHUTDOWN_TIMEOUT;
        }
        while Instant::now() < deadline {
            if self.abort.is_stopped() {
                return;
            }
            if self.progress.heartbeat().is_waiting() {
                // A checkpoint upload is in progress, which has its own timeout.
                deadline = Instant::now() + SHUTDOWN_TIMEOUT;
            }
            std::thread::sleep(HEARTBEAT_INTERVAL);
        }
        // The forced exit may hang for the same reason as the process.
        let _ = std::thread::Builder::new().name("stoker-end".into()).spawn(|| {
            std::thread::sleep(EXIT_TIMEOUT);
            let _ = rustix::process::kill_process(rustix::process::getpid(), Signal::KILL);
        });
        let code = match self.abort.reason() {
            Some(_) => ExitCode::Infrastructure,
            None => ExitCode::PeerFailed,
        };
        let reason = self.abort.reason().unwrap_or("the gang failed, but this rank did not react");
        crate::termination::record_exit_if_missing(code, reason);
        let _ = writeln!(io::stderr(), "error: {reason}; forcing the exit of this process");
        std::process::exit(code as i32);
    }
}

impl PeerState {
    /// Sends a heartbeat and reads those of the peer; returns `false` if the peer exited without a
    /// shutdown message.
    ///
    /// # Errors
    ///
    /// Fails if the peer's machine does not respond.
    fn exchange(&mut self, bytes: &[u8; HEARTBEAT_BYTES]) -> io::Result<bool> {
        let Some(mut stream) = self.stream.as_deref() else { return Ok(true) };
        let result = read_available(stream, &mut self.received).and_then(|is_open| match is_open {
            // Skip the heartbeat if the send buffer is full; losing one does not matter.
            true => match stream.write(bytes) {
                Ok(num) if num == bytes.len() => Ok(true),
                Ok(_) => Err(io::Error::other("a heartbeat was sent partially")),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(true),
                Err(error) => Err(error),
            },
            false => Ok(false),
        });
        match result {
            Ok(true) => {}
            Ok(false) => self.stream = None,
            Err(error) if is_connection_closed(&error) => self.stream = None,
            Err(error) => {
                self.stream = None;
                return Err(error);
            }
        }
        while self.received.len() >= HEARTBEAT_BYTES {
            let mut heartbeat = [0; HEARTBEAT_BYTES];
            heartbeat.copy_from_slice(&self.received[..HEARTBEAT_BYTES]);
            self.received.drain(..HEARTBEAT_BYTES);
            self.heard_at = Instant::now();
            let heartbeat = Heartbeat::from_bytes(&heartbeat);
            if heartbeat != self.heartbeat {
                (self.heartbeat, self.changed_at) = (heartbeat, Instant::now());
            }
        }
        Ok(self.stream.is_some() || self.heartbeat.has_exited())
    }
}

/// Sends a shutdown message, so that peers ignore the end of the connections.
pub(super) fn send_shutdown(streams: &[Arc<TcpStream>], progress: &ProgressState) {
    for stream in streams {
        let mut stream: &TcpStream = stream;
        // Ignore the error: the peer may have exited.
        let _ = stream.write(&progress.heartbeat().to_bytes());
    }
}

/// Reads available bytes; returns `false` if the peer closed the connection.
fn read_available(mut stream: &TcpStream, received: &mut Vec<u8>) -> io::Result<bool> {
    let mut bytes = [0; 64 * HEARTBEAT_BYTES];
    loop {
        match stream.read(&mut bytes) {
            Ok(0) => return Ok(false),
            Ok(num) => received.extend_from_slice(&bytes[..num]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(true),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

fn is_connection_closed(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests;

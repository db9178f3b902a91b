//! Watchdog: all ranks send heartbeats with their progress to rank 0, and rank 0 sends heartbeats
//! to all.
//!
//! A rank without progress would block all others forever in the next collective call. The watchdog
//! blames the ranks that have progressed least, and reports their last known position. Then it
//! closes all connections, which ends every wait. If this does not end the process, the watchdog
//! does.

use std::collections::BTreeMap;
use std::io::{self, Read, Write as _};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use stoker_api::contract::ExitCode;

use super::pulse::{BEAT_BYTES, Beat, Limits, Pulse};

/// Interval of heartbeats.
const BEAT: Duration = Duration::from_secs(1);
/// Timeout for TCP acknowledgments of a peer's machine; after it, the link or the machine has
/// failed.
const UNHEARD_MAX: Duration = Duration::from_secs(30);
/// Time that this process may take to exit after its gang has failed, in case it waits for
/// something else.
const END_MAX: Duration = Duration::from_secs(30);
/// Time that the forced exit may take, since a driver may hang in it too.
const EXIT_MAX: Duration = Duration::from_secs(5);
/// Additional limit on ranks other than 0, so that rank 0 reports first.
const LATER: Duration = Duration::from_secs(5);

/// Abort flag of the gang, shared by all waits, with the reason.
#[derive(Clone, Debug, Default)]
pub(super) struct Alarm(Arc<AlarmState>);

#[derive(Debug, Default)]
struct AlarmState {
    why: OnceLock<String>,
    streams: Mutex<Vec<TcpStream>>,
    /// A collective call failed, or a rank exited without a shutdown message.
    has_failed: AtomicBool,
    is_over: AtomicBool,
}

impl Alarm {
    /// Adds connections that an abort closes.
    ///
    /// # Errors
    ///
    /// Fails if the system has no more file descriptors.
    pub(super) fn guard<'a>(
        &self,
        streams: impl IntoIterator<Item = &'a TcpStream>,
    ) -> io::Result<()> {
        let mut own = self.0.streams.lock().unwrap_or_else(PoisonError::into_inner);
        for stream in streams {
            own.push(stream.try_clone()?);
        }
        Ok(())
    }

    /// Returns the reason of the abort, if the gang was aborted.
    pub(super) fn why(&self) -> Option<&str> {
        self.0.why.get().map(String::as_str)
    }

    /// Aborts the gang: closes every connection.
    pub(super) fn ring(&self, why: String) {
        let _ = self.0.why.set(why);
        self.close();
    }

    /// Marks the gang as failed.
    pub(super) fn fail(&self) {
        self.0.has_failed.store(true, Ordering::Relaxed);
    }

    /// Closes every connection, which notifies the other ranks.
    pub(super) fn close(&self) {
        let streams = self.0.streams.lock().unwrap_or_else(PoisonError::into_inner);
        for stream in streams.iter() {
            // Ignore the error: the connection may be closed already.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Returns `true` if the gang has failed.
    pub(super) fn is_ringing(&self) -> bool {
        self.why().is_some() || self.0.has_failed.load(Ordering::Relaxed)
    }

    /// Stops the watchdog.
    pub(super) fn end(&self) {
        self.0.is_over.store(true, Ordering::Relaxed);
    }

    fn is_over(&self) -> bool {
        self.0.is_over.load(Ordering::Relaxed)
    }
}

/// State of a peer, as known from its heartbeats.
#[derive(Debug)]
struct Seen {
    stream: Option<TcpStream>,
    part: Vec<u8>,
    beat: Beat,
    /// When the heartbeat's contents last changed.
    since: Instant,
    /// When the last heartbeat arrived.
    heard: Instant,
}

/// Starts the watchdog thread, which runs until `alarm` ends. `peers` are all other ranks on rank
/// 0, and rank 0 elsewhere.
///
/// # Errors
///
/// Fails if the system has no more threads or file descriptors.
pub(super) fn start(
    rank: usize,
    peers: Vec<(usize, TcpStream)>,
    limits: Limits,
    pulse: Arc<Pulse>,
    alarm: Alarm,
) -> io::Result<()> {
    let mut seen = BTreeMap::new();
    for (peer, stream) in peers {
        use rustix::net::sockopt;
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        // Heartbeats are acknowledged by the kernel of a live machine, whatever its program does.
        let unheard = u32::try_from(UNHEARD_MAX.as_millis()).unwrap_or(u32::MAX);
        sockopt::set_tcp_user_timeout(&stream, unheard)?;
        let now = Instant::now();
        let (stream, beat) = (Some(stream), Beat::default());
        seen.insert(peer, Seen { stream, part: vec![], beat, since: now, heard: now });
    }
    let watch = Watch { rank, limits, pulse, alarm, seen };
    std::thread::Builder::new().name("stoker-watch".into()).spawn(move || watch.run())?;
    Ok(())
}

struct Watch {
    rank: usize,
    limits: Limits,
    pulse: Arc<Pulse>,
    alarm: Alarm,
    seen: BTreeMap<usize, Seen>,
}

impl Watch {
    fn run(mut self) {
        let (mut own, mut own_since) = (self.pulse.beat(), Instant::now());
        while !self.alarm.is_over() {
            std::thread::sleep(BEAT);
            let beat = self.pulse.beat();
            if beat != own {
                (own, own_since) = (beat, Instant::now());
            }
            let moves = |seen: &Seen| {
                seen.stream.is_some() && (seen.since.elapsed() < 2 * BEAT || seen.beat.waits())
            };
            if self.rank == 0 && self.seen.values().any(moves) {
                self.pulse.gang_moves();
            }
            let bytes = beat.to_bytes();
            for (rank, seen) in &mut self.seen {
                match seen.exchange(&bytes) {
                    Ok(true) => {}
                    // Ranks in a collective call notice the exit by themselves. Other ranks must
                    // end
                    // too, unless training is over.
                    Ok(false) if !self.pulse.is_resting() => self.alarm.fail(),
                    Ok(false) => {}
                    Err(error) if !self.alarm.is_over() => {
                        let text = format!("rank {rank}, last seen {}: {error}", seen.beat.place());
                        self.alarm.ring(text);
                    }
                    Err(_) => {}
                }
            }
            if self.seen.values().any(|seen| seen.beat.asks()) {
                self.pulse.ask();
            }
            if let Some(text) = self.silent(own, own_since) {
                self.alarm.ring(text);
            }
            if self.alarm.is_ringing() {
                return self.end();
            }
        }
    }

    /// Describes the ranks that made no progress for too long, if any.
    fn silent(&self, own: Beat, own_since: Instant) -> Option<String> {
        let mut limit = self.limits.limit(self.pulse.median_step())?;
        if self.rank > 0 {
            // Rank 0 knows the state of all ranks, so it should report first.
            limit += LATER;
        }
        let seconds = limit.as_secs_f64();
        let mut others = self.seen.iter().filter(|(_, seen)| seen.stream.is_some());
        if let Some((rank, seen)) = others.find(|(_, seen)| seen.heard.elapsed() > limit) {
            let place = seen.beat.place();
            return Some(format!(
                "no heartbeat from rank {rank} for {seconds:.0} s: last seen {place}"
            ));
        }
        let beats = || {
            let others = self.seen.iter().filter(|(_, seen)| seen.stream.is_some());
            let others = others.map(|(rank, seen)| (*rank, seen.beat, seen.since));
            others.chain([(self.rank, own, own_since)])
        };
        // Ranks may wait for the storage or the runner, and a single remaining rank blocks no
        // other.
        if beats().count() == 1 || beats().any(|(_, beat, _)| beat.waits()) {
            return None;
        }
        // As long as one rank makes progress, the others may continue. Reading data and compiling
        // kernels before the first complete step may take any time, unless all ranks wait.
        let is_serious = self.pulse.has_begun() || beats().all(|(_, beat, _)| beat.is_together());
        if !is_serious || beats().any(|(_, _, since)| since.elapsed() <= limit) {
            return None;
        }
        let furthest = beats().map(|(_, beat, _)| beat.progress()).max()?;
        let is_behind = |(_, beat, _): &(usize, Beat, Instant)| beat.progress() < furthest;
        // Only rank 0 can detect that all ranks wait for each other.
        let all_wait = self.rank == 0 && !beats().any(|rank| is_behind(&rank));
        let blamed: Vec<_> = beats().filter(|rank| all_wait || is_behind(rank)).collect();
        if blamed.is_empty() {
            return None;
        }
        let name = |(rank, beat, _): &(usize, Beat, Instant)| {
            format!("rank {rank} last seen {}", beat.place())
        };
        let names: Vec<String> = blamed.iter().map(name).collect();
        Some(format!("no progress for {seconds:.0} s: {}", names.join(", ")))
    }

    /// Waits for the process to exit after the connections were closed, then forces the exit.
    fn end(&self) {
        let mut until = Instant::now() + END_MAX;
        while Instant::now() < until {
            if self.alarm.is_over() {
                return;
            }
            if self.pulse.beat().waits() {
                // A checkpoint upload is in progress, which has its own timeout.
                until = Instant::now() + END_MAX;
            }
            std::thread::sleep(BEAT);
        }
        // The forced exit may hang for the same reason as the process.
        let _ = std::thread::Builder::new().name("stoker-end".into()).spawn(|| {
            std::thread::sleep(EXIT_MAX);
            let _ = rustix::process::kill_process(rustix::process::getpid(), Signal::KILL);
        });
        let code = match self.alarm.why() {
            Some(_) => ExitCode::Infrastructure,
            None => ExitCode::PeerFailed,
        };
        let why = self.alarm.why().unwrap_or("the gang failed, but this rank did not react");
        crate::termination::record_exit_if_missing(code, why);
        let _ = writeln!(io::stderr(), "error: {why}; forcing the exit of this process");
        std::process::exit(code as i32);
    }
}

impl Seen {
    /// Sends a heartbeat and reads those of the peer; returns `false` if the peer exited without a
    /// shutdown message.
    ///
    /// # Errors
    ///
    /// Fails if the peer's machine does not respond.
    fn exchange(&mut self, bytes: &[u8; BEAT_BYTES]) -> io::Result<bool> {
        let Some(stream) = &mut self.stream else { return Ok(true) };
        let done = hear(stream, &mut self.part).and_then(|is_there| match is_there {
            // Skip the heartbeat if the send buffer is full; losing one does not matter.
            true => match stream.write(bytes) {
                Ok(num) if num == bytes.len() => Ok(true),
                Ok(_) => Err(io::Error::other("a heartbeat was sent partially")),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(true),
                Err(error) => Err(error),
            },
            false => Ok(false),
        });
        match done {
            Ok(true) => {}
            Ok(false) => self.stream = None,
            Err(error) if is_end(&error) => self.stream = None,
            Err(error) => {
                self.stream = None;
                return Err(error);
            }
        }
        while self.part.len() >= BEAT_BYTES {
            let mut beat = [0; BEAT_BYTES];
            beat.copy_from_slice(&self.part[..BEAT_BYTES]);
            self.part.drain(..BEAT_BYTES);
            self.heard = Instant::now();
            let beat = Beat::from_bytes(&beat);
            if beat != self.beat {
                (self.beat, self.since) = (beat, Instant::now());
            }
        }
        Ok(self.stream.is_some() || self.beat.is_over())
    }
}

/// Sends a shutdown message, so that peers ignore the end of the connections.
pub(super) fn farewell(streams: &[TcpStream], pulse: &Pulse) {
    for mut stream in streams {
        // Ignore the error: the peer may have exited.
        let _ = stream.write(&pulse.beat().to_bytes());
    }
}

/// Reads available bytes; returns `false` if the peer closed the connection.
fn hear(stream: &mut TcpStream, part: &mut Vec<u8>) -> io::Result<bool> {
    let mut bytes = [0; 64 * BEAT_BYTES];
    loop {
        match stream.read(&mut bytes) {
            Ok(0) => return Ok(false),
            Ok(num) => part.extend_from_slice(&bytes[..num]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(true),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

fn is_end(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe)
}

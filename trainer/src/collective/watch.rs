//! The watchdog: ranks tell rank 0 where they are, and rank 0 tells them that it is there.
//!
//! A rank that moves no more, in whatever it does, holds all others up for ever: they wait for it in
//! a sum. Who is to blame is the one that has not come as far as the others, and it is named with
//! the place where it was last seen. Then all connections are closed, which ends every wait, and
//! this process ends too if that does not end it.

use std::collections::BTreeMap;
use std::io::{self, Read, Write as _};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use stoker_api::contract::ExitCode;

use super::pulse::{BEAT_BYTES, Beat, Limits, Pulse};

/// How often a rank tells where it is.
const BEAT: Duration = Duration::from_secs(1);
/// How long a peer's machine may not answer: its link is cut, or it is gone.
const UNHEARD_MAX: Duration = Duration::from_secs(30);
/// How long this process may go on after its gang has ended: it may wait where no connection is.
const END_MAX: Duration = Duration::from_secs(30);
/// How long that end may take, in which a driver may stand still too.
const EXIT_MAX: Duration = Duration::from_secs(5);
/// How much longer than rank 0 the others wait.
const LATER: Duration = Duration::from_secs(5);

/// Tells all who wait that the gang is over, and why.
#[derive(Clone, Debug, Default)]
pub(super) struct Alarm(Arc<AlarmState>);

#[derive(Debug, Default)]
struct AlarmState {
    why: OnceLock<String>,
    streams: Mutex<Vec<TcpStream>>,
    /// A sum has failed, or somebody has gone without a farewell.
    has_failed: AtomicBool,
    is_over: AtomicBool,
}

impl Alarm {
    /// Closes these too when it rings.
    ///
    /// # Errors
    ///
    /// The system has no more descriptors.
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

    /// Why the gang was ended, if it was.
    pub(super) fn why(&self) -> Option<&str> {
        self.0.why.get().map(String::as_str)
    }

    /// Ends the gang: every connection is closed.
    pub(super) fn ring(&self, why: String) {
        let _ = self.0.why.set(why);
        self.close();
    }

    /// Notes that nothing can come of the gang any more.
    pub(super) fn fail(&self) {
        self.0.has_failed.store(true, Ordering::Relaxed);
    }

    /// Closes every connection, so that the others learn of it.
    pub(super) fn close(&self) {
        let streams = self.0.streams.lock().unwrap_or_else(PoisonError::into_inner);
        for stream in streams.iter() {
            // It may be closed already.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Whether nothing can come of the gang any more.
    pub(super) fn is_ringing(&self) -> bool {
        self.why().is_some() || self.0.has_failed.load(Ordering::Relaxed)
    }

    /// Nobody watches any more.
    pub(super) fn end(&self) {
        self.0.is_over.store(true, Ordering::Relaxed);
    }

    fn is_over(&self) -> bool {
        self.0.is_over.load(Ordering::Relaxed)
    }
}

/// A rank as it is seen from here.
#[derive(Debug)]
struct Seen {
    stream: Option<TcpStream>,
    part: Vec<u8>,
    beat: Beat,
    /// When that changed.
    since: Instant,
    /// When anything came.
    heard: Instant,
}

/// Watches `peers`, which are all others at rank 0 and elsewhere rank 0, on a thread of its own until
/// `alarm` ends.
///
/// # Errors
///
/// The system has no more threads or descriptors.
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
        // What is sent each second is taken by a machine that is there, whatever its program does.
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
            let moves = |it: &Seen| {
                it.stream.is_some() && (it.since.elapsed() < 2 * BEAT || it.beat.waits())
            };
            if self.rank == 0 && self.seen.values().any(moves) {
                self.pulse.gang_moves();
            }
            let bytes = beat.to_bytes();
            for (rank, seen) in &mut self.seen {
                match seen.exchange(&bytes) {
                    Ok(true) => {}
                    // Whoever needs it finds out; who does not must end all the same, but for one whose
                    // training is over.
                    Ok(false) if !self.pulse.is_resting() => self.alarm.fail(),
                    Ok(false) => {}
                    Err(error) if !self.alarm.is_over() => {
                        let text = format!("rank {rank}, last seen {}: {error}", seen.beat.place());
                        self.alarm.ring(text);
                    }
                    Err(_) => {}
                }
            }
            if self.seen.values().any(|it| it.beat.asks()) {
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

    /// Who has been silent for too long, if somebody has.
    fn silent(&self, own: Beat, own_since: Instant) -> Option<String> {
        let mut limit = self.limits.limit(self.pulse.median_step())?;
        if self.rank > 0 {
            // Rank 0 sees all, and is to speak first.
            limit += LATER;
        }
        let seconds = limit.as_secs_f64();
        let mut others = self.seen.iter().filter(|it| it.1.stream.is_some());
        if let Some((rank, seen)) = others.find(|it| it.1.heard.elapsed() > limit) {
            let place = seen.beat.place();
            return Some(format!("rank {rank} says nothing for {seconds:.0} s: last seen {place}"));
        }
        let beats = || {
            let others = self.seen.iter().filter(|it| it.1.stream.is_some());
            others.map(|(rank, it)| (*rank, it.beat, it.since)).chain([(self.rank, own, own_since)])
        };
        // Whoever waits for the storage or the runner is waited for, and one that is left alone holds
        // nobody up.
        if beats().count() == 1 || beats().any(|it| it.1.waits()) {
            return None;
        }
        // Where one moves, all may go on. Before the first step is whole a program reads its data and
        // is compiled, for as long as that takes, unless all wait for each other.
        let is_serious = self.pulse.has_begun() || beats().all(|it| it.1.is_together());
        if !is_serious || beats().any(|it| it.2.elapsed() <= limit) {
            return None;
        }
        let furthest = beats().map(|it| it.1.progress()).max()?;
        let is_behind = |it: &(usize, Beat, Instant)| it.1.progress() < furthest;
        // Where all wait for each other, rank 0 alone can see it.
        let all_wait = self.rank == 0 && !beats().any(|it| is_behind(&it));
        let blamed: Vec<_> = beats().filter(|it| all_wait || is_behind(it)).collect();
        if blamed.is_empty() {
            return None;
        }
        let name =
            |it: &(usize, Beat, Instant)| format!("rank {} last seen {}", it.0, it.1.place());
        let names: Vec<String> = blamed.iter().map(name).collect();
        Some(format!("nothing moved for {seconds:.0} s: {}", names.join(", ")))
    }

    /// The connections are closed; the program may be somewhere else.
    fn end(&self) {
        let mut until = Instant::now() + END_MAX;
        while Instant::now() < until {
            if self.alarm.is_over() {
                return;
            }
            if self.pulse.beat().waits() {
                // A checkpoint on its way to the storage, which has a deadline of its own.
                until = Instant::now() + END_MAX;
            }
            std::thread::sleep(BEAT);
        }
        // Whatever holds this process may hold its end too.
        let _ = std::thread::Builder::new().name("stoker-end".into()).spawn(|| {
            std::thread::sleep(EXIT_MAX);
            let _ = rustix::process::kill_process(rustix::process::getpid(), Signal::KILL);
        });
        let code = match self.alarm.why() {
            Some(_) => ExitCode::Infrastructure,
            None => ExitCode::PeerFailed,
        };
        let why = self.alarm.why().unwrap_or("the gang has failed, and this rank does not notice");
        crate::termination::leave_if_silent(code, why);
        let _ = writeln!(io::stderr(), "error: {why}; this process does not end by itself");
        std::process::exit(code as i32);
    }
}

impl Seen {
    /// Tells where this rank is, and hears where the other is; `false` where it has gone without a
    /// farewell.
    ///
    /// # Errors
    ///
    /// Its machine does not answer.
    fn exchange(&mut self, bytes: &[u8; BEAT_BYTES]) -> io::Result<bool> {
        let Some(stream) = &mut self.stream else { return Ok(true) };
        let done = hear(stream, &mut self.part).and_then(|is_there| match is_there {
            // A beat more or less does not matter: one that is not taken is not told.
            true => match stream.write(bytes) {
                Ok(num) if num == bytes.len() => Ok(true),
                Ok(_) => Err(io::Error::other("its beats are cut")),
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

/// Says farewell: that the connections end now means nothing.
pub(super) fn farewell(streams: &[TcpStream], pulse: &Pulse) {
    for mut stream in streams {
        // Who does not take it is gone.
        let _ = stream.write(&pulse.beat().to_bytes());
    }
}

/// Reads what has come; `false` where the other has ended.
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

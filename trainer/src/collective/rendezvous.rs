//! How the ranks of an attempt find each other: rank 0 listens, the others come.
//!
//! | rank 0 | another rank |
//! |---|---|
//! | magic, version, nonce | |
//! | | magic, version, attempt, rank, world size, nonce, proof |
//! | once all are there: verdict, proof | |
//!
//! A proof is an HMAC-SHA256 by the gang's secret over both nonces and all that was said, so that
//! neither side takes a stranger, or somebody of another attempt, for one of the gang. A stranger
//! is given a few seconds and no attention that a rank would need.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream, ToSocketAddrs as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;
use stoker_api::contract::{ExitCode, Gang};

use super::tcp::Tcp;
use crate::Result;
use crate::error::{Infrastructure, Interrupted};
use crate::stop::StopSignal;

/// How long ranks wait for each other, unless the environment says otherwise: images of a gang may
/// be pulled on many nodes.
const WAIT: Duration = Duration::from_secs(600);
/// Says it in seconds.
const ENV_WAIT: &str = "STOKER_RENDEZVOUS_SECONDS";
/// How long whoever connects may take to say who it is.
const HELLO_MAX: Duration = Duration::from_secs(5);
/// Connections whose hello is awaited at a time; more are closed, and come again if they are ranks.
const HELLOS_MAX: usize = 256;
/// How often waits look at the signal.
const LOOK: Duration = Duration::from_millis(50);
/// The pause between two tries to connect.
const RETRY: Duration = Duration::from_millis(250);

const MAGIC: [u8; 8] = *b"stoker-g";
const VERSION: u32 = 1;
const NONCE_BYTES: usize = 32;
const PROOF_BYTES: usize = 32;
/// Magic, version, nonce.
const GREETING_BYTES: usize = 8 + 4 + NONCE_BYTES;
/// Magic, version, attempt, rank, world size, nonce.
const HELLO_BYTES: usize = 8 + 4 * 4 + NONCE_BYTES;

/// Rank 0's verdict on a hello whose proof is right.
const WELCOME: u8 = 0;
/// The hello is of another attempt or another gang.
const NOT_OURS: u8 = 1;

/// One rank at the meeting.
#[derive(Clone, Debug)]
struct Guest {
    secret: Vec<u8>,
    attempt: u32,
    rank: u32,
    world_size: u32,
    deadline: Instant,
    wait: Duration,
}

/// Connects the ranks of an attempt.
///
/// # Errors
///
/// Not all came in time, which names the missing, or `stop` was set.
pub(super) fn meet(gang: &Gang, attempt: u32, rank: u32, stop: &StopSignal) -> Result<Tcp> {
    let wait = match std::env::var(ENV_WAIT) {
        Err(_) => WAIT,
        Ok(text) => Duration::from_secs(text.parse().map_err(|_| {
            Infrastructure(format!("{ENV_WAIT} is {text:?}, but must be a number of seconds"))
        })?),
    };
    meet_within(gang, attempt, rank, stop, wait)
}

pub(super) fn meet_within(
    gang: &Gang,
    attempt: u32,
    rank: u32,
    stop: &StopSignal,
    wait: Duration,
) -> Result<Tcp> {
    let guest = Guest {
        secret: gang.secret.clone().into_bytes(),
        attempt,
        rank,
        world_size: gang.world_size,
        deadline: Instant::now() + wait,
        wait,
    };
    let streams = match rank {
        0 => guest.host(&gang.rendezvous, stop)?,
        _ => vec![guest.visit(&gang.rendezvous, stop)?],
    };
    Tcp::new(rank as usize, gang.world_size as usize, streams)
}

/// Somebody whose proof was right, and what the verdict must be over.
#[derive(Debug)]
struct Arrived {
    rank: u32,
    stream: TcpStream,
    transcript: Vec<u8>,
}

impl Guest {
    /// Rank 0: waits for all others.
    fn host(&self, rendezvous: &str, stop: &StopSignal) -> Result<Vec<TcpStream>> {
        let listener = listen(rendezvous)?;
        let (sender, arrivals) = channel();
        let num_open = Arc::new(AtomicUsize::new(0));
        let mut here = BTreeMap::new();
        while here.len() + 1 < self.world_size as usize {
            look(stop)?;
            match listener.accept() {
                Ok((stream, _)) => self.receive(stream, &sender, &num_open),
                // Nobody, or nobody any more.
                Err(_) => self.take_arrivals(&arrivals, &mut here, LOOK),
            }
            self.take_arrivals(&arrivals, &mut here, Duration::ZERO);
            if Instant::now() > self.deadline {
                return Err(self.missing(rendezvous, &here));
            }
        }
        let welcome = |mut it: Arrived| {
            let said = self.send_verdict(&mut it.stream, WELCOME, &it.transcript);
            // One that has gone is found out by the first sum.
            let _ = said;
            it.stream
        };
        Ok(here.into_values().map(welcome).collect())
    }

    /// Hears who somebody is, on a thread of its own.
    fn receive(&self, stream: TcpStream, sender: &Sender<Arrived>, num_open: &Arc<AtomicUsize>) {
        if num_open.fetch_add(1, Ordering::Relaxed) >= HELLOS_MAX {
            num_open.fetch_sub(1, Ordering::Relaxed);
            return;
        }
        let (guest, sender, num_open) = (self.clone(), sender.clone(), num_open.clone());
        let thread = std::thread::Builder::new().name("stoker-hello".into());
        let open = num_open.clone();
        let started = thread.spawn(move || {
            if let Ok(Some(arrived)) = guest.hear(stream) {
                // A meeting that is over needs nobody.
                let _ = sender.send(arrived);
            }
            open.fetch_sub(1, Ordering::Relaxed);
        });
        if started.is_err() {
            num_open.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Who it is; `None` for a stranger and for somebody of another attempt, who is told so.
    fn hear(&self, mut stream: TcpStream) -> io::Result<Option<Arrived>> {
        stream.set_nonblocking(false)?;
        stream.set_write_timeout(Some(HELLO_MAX))?;
        let deadline = Instant::now() + HELLO_MAX;
        let mut transcript = greeting()?;
        stream.write_all(&transcript)?;
        let mut hello = [0; HELLO_BYTES];
        read_until(&mut stream, &mut hello, deadline)?;
        let mut proof = [0; PROOF_BYTES];
        read_until(&mut stream, &mut proof, deadline)?;
        transcript.extend_from_slice(&hello);
        if self.mac(b"hello", &transcript).verify_slice(&proof).is_err() {
            return Ok(None);
        }
        let rank = number(&hello, 16);
        let is_ours = hello[..12] == opening()
            && number(&hello, 12) == self.attempt
            && number(&hello, 20) == self.world_size
            && (1..self.world_size).contains(&rank);
        if !is_ours {
            self.send_verdict(&mut stream, NOT_OURS, &transcript)?;
            return Ok(None);
        }
        Ok(Some(Arrived { rank, stream, transcript }))
    }

    /// A rank that comes again has given its first connection up.
    fn take_arrivals(
        &self,
        arrivals: &Receiver<Arrived>,
        here: &mut BTreeMap<u32, Arrived>,
        wait: Duration,
    ) {
        if let Ok(arrived) = arrivals.recv_timeout(wait) {
            here.insert(arrived.rank, arrived);
        }
    }

    fn missing(&self, rendezvous: &str, here: &BTreeMap<u32, Arrived>) -> crate::Error {
        let missing = (1..self.world_size).filter(|rank| !here.contains_key(rank));
        let missing: Vec<String> = missing.map(|rank| rank.to_string()).collect();
        Infrastructure(format!(
            "of {} ranks, {} did not come to {rendezvous} within {} s",
            self.world_size,
            missing.join(", "),
            self.wait.as_secs()
        ))
        .into()
    }

    /// Another rank: goes to rank 0 until it is let in.
    fn visit(&self, rendezvous: &str, stop: &StopSignal) -> Result<TcpStream> {
        let mut before = String::new();
        loop {
            let error = match self.connect(rendezvous) {
                Ok((stream, transcript)) => match self.await_verdict(stream, &transcript, stop)? {
                    Ok(stream) => return Ok(stream),
                    Err(error) => error,
                },
                Err(error) => error,
            };
            if Instant::now() > self.deadline {
                let text = format!(
                    "rank 0 was not met at {rendezvous} within {} s: {error}{before}",
                    self.wait.as_secs()
                );
                return Err(Infrastructure(text).into());
            }
            before = format!(" (before that: {error})");
            let again = Instant::now() + RETRY;
            while Instant::now() < again {
                look(stop)?;
                std::thread::sleep(LOOK);
            }
        }
    }

    /// Says who this is.
    fn connect(&self, rendezvous: &str) -> io::Result<(TcpStream, Vec<u8>)> {
        let mut stream = None;
        // Names of pods come to be known while they start.
        for address in rendezvous.to_socket_addrs()? {
            stream = Some(TcpStream::connect_timeout(&address, HELLO_MAX));
            if matches!(stream, Some(Ok(_))) {
                break;
            }
        }
        let no_address = || io::Error::other("its name has no address");
        let mut stream = stream.ok_or_else(no_address)??;
        stream.set_write_timeout(Some(HELLO_MAX))?;
        let mut transcript = vec![0; GREETING_BYTES];
        read_until(&mut stream, &mut transcript, Instant::now() + HELLO_MAX)?;
        if transcript[..12] != opening() {
            return Err(io::Error::other("who answers is no rank 0 of this version"));
        }
        let mut hello = opening().to_vec();
        for number in [self.attempt, self.rank, self.world_size] {
            hello.extend_from_slice(&number.to_le_bytes());
        }
        hello.extend_from_slice(&nonce()?);
        transcript.extend_from_slice(&hello);
        stream.write_all(&hello)?;
        let proof = self.mac(b"hello", &transcript).finalize().into_bytes();
        stream.write_all(&proof)?;
        Ok((stream, transcript))
    }

    /// Waits until rank 0 has all. The inner error may pass.
    fn await_verdict(
        &self,
        mut stream: TcpStream,
        transcript: &[u8],
        stop: &StopSignal,
    ) -> Result<io::Result<TcpStream>> {
        let (mut answer, mut num_read) = ([0; 1 + PROOF_BYTES], 0);
        while num_read < answer.len() {
            look(stop)?;
            if Instant::now() > self.deadline {
                return Ok(Err(io::Error::other("it waits for other ranks")));
            }
            let timed = stream.set_read_timeout(Some(LOOK));
            match timed.and_then(|()| stream.read(&mut answer[num_read..])) {
                Ok(0) => return Ok(Err(io::Error::other("it has closed the connection"))),
                Ok(num) => num_read += num,
                Err(error) if is_timeout(&error) => {}
                Err(error) => return Ok(Err(error)),
            }
        }
        let (verdict, proof) = (answer[0], &answer[1..]);
        if self.verdict_mac(verdict, transcript).verify_slice(proof).is_err() {
            return Ok(Err(io::Error::other("who answers does not know the gang's secret")));
        }
        match verdict {
            WELCOME => Ok(Ok(stream)),
            _ => {
                let (attempt, size) = (self.attempt, self.world_size);
                let text = format!("rank 0 is not of attempt {attempt} with {size} ranks");
                Err(Infrastructure(text).into())
            }
        }
    }

    fn send_verdict(
        &self,
        stream: &mut TcpStream,
        verdict: u8,
        transcript: &[u8],
    ) -> io::Result<()> {
        let mut answer = vec![verdict];
        answer.extend_from_slice(&self.verdict_mac(verdict, transcript).finalize().into_bytes());
        stream.write_all(&answer)
    }

    fn verdict_mac(&self, verdict: u8, transcript: &[u8]) -> Hmac<Sha256> {
        self.mac(&[b'v', verdict], transcript)
    }

    /// `what` keeps proofs of one kind from being used as another.
    fn mac(&self, what: &[u8], transcript: &[u8]) -> Hmac<Sha256> {
        let mut mac =
            Hmac::<Sha256>::new_from_slice(&self.secret).expect("a key may have any length");
        mac.update(what);
        mac.update(transcript);
        mac
    }
}

/// The port of the address; whoever asks has come to this machine already.
fn listen(rendezvous: &str) -> Result<TcpListener> {
    let port = rendezvous.rsplit_once(':').and_then(|(_, port)| port.parse::<u16>().ok());
    let port = port.ok_or_else(|| {
        Infrastructure(format!("the rendezvous is {rendezvous:?}, but must be HOST:PORT"))
    })?;
    // Both families, where the machine has both.
    let listener =
        TcpListener::bind(("::", port)).or_else(|_| TcpListener::bind(("0.0.0.0", port)));
    let listener = listener.and_then(|it| it.set_nonblocking(true).map(|()| it));
    Ok(listener.map_err(|error| {
        Infrastructure(format!("rank 0 cannot listen on port {port}: {error}; set C10D_PORT"))
    })?)
}

fn look(stop: &StopSignal) -> Result<()> {
    if !stop.is_set() {
        return Ok(());
    }
    let why = "asked to stop by a signal before all ranks had met".into();
    Err(Interrupted { code: ExitCode::Preempted, fenced: false, why }.into())
}

fn opening() -> [u8; 12] {
    let mut opening = [0; 12];
    opening[..8].copy_from_slice(&MAGIC);
    opening[8..].copy_from_slice(&VERSION.to_le_bytes());
    opening
}

fn greeting() -> io::Result<Vec<u8>> {
    let mut greeting = opening().to_vec();
    greeting.extend_from_slice(&nonce()?);
    Ok(greeting)
}

fn nonce() -> io::Result<[u8; NONCE_BYTES]> {
    let mut nonce = [0; NONCE_BYTES];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut nonce)?;
    Ok(nonce)
}

fn number(bytes: &[u8], at: usize) -> u32 {
    let mut own = [0; 4];
    own.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(own)
}

/// As `read_exact`, with one deadline for all of it.
fn read_until(stream: &mut TcpStream, mut bytes: &mut [u8], deadline: Instant) -> io::Result<()> {
    while !bytes.is_empty() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(bytes)? {
            0 => return Err(io::Error::other("it has closed the connection")),
            num => bytes = &mut bytes[num..],
        }
    }
    Ok(())
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

//! Mutual authentication of two ranks of one attempt.
//!
//! | listener sends | connecting rank sends |
//! |---|---|
//! | magic, version, nonce | |
//! | | magic, version, purpose, identity, nonce, proof |
//! | later: verdict, its text, proof | |
//!
//! A proof is an HMAC-SHA256 with the gang's secret over both nonces and all previous messages. It
//! keeps each side from accepting a stranger or a rank of another attempt. An unauthenticated
//! connection is closed after a few seconds and does not delay ranks.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;
use stoker_api::contract::ExitCode;

use crate::Result;
use crate::error::{Infrastructure, Interrupted};
use crate::stop::StopSignal;

/// Timeout for the hello of a connecting rank.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of connections without a hello. Further connections are closed; ranks retry.
const HELLOS_MAX: usize = 256;
/// How often waits check for a stop signal.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(50);

const MAGIC: [u8; 8] = *b"stoker-g";
const VERSION: u32 = 3;
const NONCE_BYTES: usize = 32;
const PROOF_BYTES: usize = 32;
const DIGEST_BYTES: usize = 32;
/// Magic, version, nonce.
const GREETING_BYTES: usize = 12 + NONCE_BYTES;
/// Magic, version, identity, program, configuration, nonce.
const HELLO_BYTES: usize = 12 + 5 * 4 + 2 * DIGEST_BYTES + NONCE_BYTES;
/// Verdict, length of its text.
const VERDICT_BYTES: usize = 1 + 4;
/// Maximum length of a verdict's text, which contains the addresses of all ranks.
const TEXT_BYTES_MAX: usize = 1 << 20;

/// Purpose of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Purpose {
    /// Registration with rank 0, addresses of the other ranks, and the watchdog.
    Register = 1,
    /// Small messages through rank 0.
    Hub = 2,
    /// Small messages through the first rank of a pod.
    LocalHub = 3,
    /// Ring connection from a rank to the next.
    Ring = 4,
}

/// Fingerprints that must be equal on all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Fingerprint {
    /// Digest of the program: see [`program::fingerprint`](super::program::fingerprint).
    pub(super) program: [u8; DIGEST_BYTES],
    /// SHA-256 of the configuration.
    pub(super) config: [u8; DIGEST_BYTES],
}

/// Identity of this rank.
#[derive(Clone, Debug)]
pub(super) struct RankIdentity {
    pub(super) secret: Vec<u8>,
    pub(super) attempt: u32,
    pub(super) rank: u32,
    pub(super) world_size: u32,
    pub(super) fingerprint: Fingerprint,
    /// Port on which this rank listens.
    pub(super) port: u16,
}

/// An authenticated peer.
#[derive(Debug)]
pub(super) struct AuthenticatedPeer {
    pub(super) purpose: u32,
    pub(super) rank: u32,
    pub(super) port: u16,
    pub(super) fingerprint: Fingerprint,
    pub(super) stream: TcpStream,
    transcript: Vec<u8>,
}

/// Response to a hello.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Verdict {
    Accepted = 0,
    /// The peer belongs to another attempt, gang or program; the text contains details.
    Refused = 1,
}

/// Accepts connections from other ranks.
#[derive(Debug)]
pub(super) struct RankListener {
    listener: TcpListener,
    identity: RankIdentity,
    sender: Sender<AuthenticatedPeer>,
    peers: Receiver<AuthenticatedPeer>,
    num_open: Arc<AtomicUsize>,
}

impl RankListener {
    /// Starts to accept connections.
    ///
    /// # Errors
    ///
    /// Fails if the listener cannot be made non-blocking.
    pub(super) fn new(listener: TcpListener, identity: RankIdentity) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let (sender, peers) = channel();
        Ok(Self { listener, identity, sender, peers, num_open: Arc::default() })
    }

    /// Returns the next authenticated peer; `None` after a short wait without one.
    pub(super) fn next(&self) -> Option<AuthenticatedPeer> {
        while let Ok((stream, _)) = self.listener.accept() {
            self.authenticate(stream);
        }
        self.peers.recv_timeout(POLL_INTERVAL).ok()
    }

    /// Authenticates a connection on a separate thread.
    fn authenticate(&self, stream: TcpStream) {
        if self.num_open.fetch_add(1, Ordering::Relaxed) >= HELLOS_MAX {
            self.num_open.fetch_sub(1, Ordering::Relaxed);
            return;
        }
        let (identity, sender) = (self.identity.clone(), self.sender.clone());
        let open = self.num_open.clone();
        let thread = std::thread::Builder::new().name("stoker-hello".into());
        let started = thread.spawn(move || {
            if let Ok(Some(peer)) = identity.authenticate(stream) {
                // Ignore the error: the rendezvous may be over.
                let _ = sender.send(peer);
            }
            open.fetch_sub(1, Ordering::Relaxed);
        });
        if started.is_err() {
            self.num_open.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl AuthenticatedPeer {
    /// Sends the verdict to the peer.
    ///
    /// # Errors
    ///
    /// Fails if the connection does.
    pub(super) fn send_verdict(
        &mut self,
        identity: &RankIdentity,
        verdict: Verdict,
        text: &str,
    ) -> io::Result<()> {
        let mut message = vec![verdict as u8];
        message.extend_from_slice(&(text.len() as u32).to_le_bytes());
        message.extend_from_slice(text.as_bytes());
        let proof = identity.verdict_mac(&message, &self.transcript).finalize().into_bytes();
        message.extend_from_slice(&proof);
        self.stream.write_all(&message)
    }
}

impl RankIdentity {
    /// Authenticates a connection. Returns `None` for a stranger and for a peer of another attempt,
    /// which receives a verdict.
    fn authenticate(&self, mut stream: TcpStream) -> io::Result<Option<AuthenticatedPeer>> {
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(HELLO_TIMEOUT))?;
        let deadline = Instant::now() + HELLO_TIMEOUT;
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
        let [purpose, attempt, rank, world_size, port] =
            [0, 1, 2, 3, 4].map(|index| u32_at(&hello, 12 + index * 4));
        let digest = |at: usize| {
            let mut digest = [0; DIGEST_BYTES];
            digest.copy_from_slice(&hello[at..at + DIGEST_BYTES]);
            digest
        };
        let fingerprint = Fingerprint { program: digest(32), config: digest(32 + DIGEST_BYTES) };
        let port = u16::try_from(port).unwrap_or_default();
        let mut peer = AuthenticatedPeer { purpose, rank, port, fingerprint, stream, transcript };
        let is_same_gang = hello[..12] == preamble()
            && attempt == self.attempt
            && world_size == self.world_size
            && rank < world_size
            && rank != self.rank;
        if !is_same_gang {
            let text = format!(
                "rank {} belongs to attempt {} with {} ranks, but the connecting rank {rank} \
                 belongs to attempt {attempt} with {world_size} ranks",
                self.rank, self.attempt, self.world_size
            );
            peer.send_verdict(self, Verdict::Refused, &text)?;
            return Ok(None);
        }
        Ok(Some(peer))
    }

    /// Connects to a rank and sends the hello; returns the connection and the transcript so far.
    ///
    /// # Errors
    ///
    /// Fails if the rank is unreachable, or does not speak this protocol version.
    pub(super) fn send_hello(
        &self,
        addresses: &[SocketAddr],
        purpose: Purpose,
    ) -> io::Result<(TcpStream, Vec<u8>)> {
        let mut stream = None;
        for address in addresses {
            stream = Some(TcpStream::connect_timeout(address, HELLO_TIMEOUT));
            if matches!(stream, Some(Ok(_))) {
                break;
            }
        }
        let no_address = || io::Error::other("the host name has no address");
        let mut stream = stream.ok_or_else(no_address)??;
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(HELLO_TIMEOUT))?;
        let mut transcript = vec![0; GREETING_BYTES];
        read_until(&mut stream, &mut transcript, Instant::now() + HELLO_TIMEOUT)?;
        if transcript[..12] != preamble() {
            return Err(io::Error::other(
                "the listener is not a rank of this version; check the rendezvous address",
            ));
        }
        let mut hello = preamble().to_vec();
        let numbers =
            [purpose as u32, self.attempt, self.rank, self.world_size, u32::from(self.port)];
        numbers.iter().for_each(|number| hello.extend_from_slice(&number.to_le_bytes()));
        hello.extend_from_slice(&self.fingerprint.program);
        hello.extend_from_slice(&self.fingerprint.config);
        hello.extend_from_slice(&nonce()?);
        transcript.extend_from_slice(&hello);
        let proof = self.mac(b"hello", &transcript).finalize().into_bytes();
        hello.extend_from_slice(&proof);
        stream.write_all(&hello)?;
        Ok((stream, transcript))
    }

    /// Waits for the verdict and returns the text of a welcome. The inner error may be transient,
    /// the outer error is final.
    ///
    /// # Errors
    ///
    /// Fails if the listener refuses this rank, or if `stop` is set.
    pub(super) fn await_verdict(
        &self,
        stream: &mut TcpStream,
        transcript: &[u8],
        deadline: Instant,
        stop: &StopSignal,
    ) -> Result<io::Result<String>> {
        let mut message = vec![0; VERDICT_BYTES];
        match self.read_interruptibly(stream, &mut message, deadline, stop)? {
            Ok(()) => {}
            Err(error) => return Ok(Err(error)),
        }
        let length = u32_at(&message, 1) as usize;
        if length > TEXT_BYTES_MAX {
            return Ok(Err(io::Error::other(
                "the listener is not a rank: its verdict is too long",
            )));
        }
        message.resize(VERDICT_BYTES + length + PROOF_BYTES, 0);
        let rest = &mut message[VERDICT_BYTES..];
        if let Err(error) = self.read_interruptibly(stream, rest, deadline, stop)? {
            return Ok(Err(error));
        }
        let (verdict, proof) = message.split_at(VERDICT_BYTES + length);
        if self.verdict_mac(verdict, transcript).verify_slice(proof).is_err() {
            return Ok(Err(io::Error::other(
                "peer authentication failed: gang secrets differ; check the rendezvous address",
            )));
        }
        let text = String::from_utf8_lossy(&verdict[VERDICT_BYTES..]).into_owned();
        match verdict[0] == Verdict::Accepted as u8 {
            true => Ok(Ok(text)),
            false => Err(Infrastructure(text).into()),
        }
    }

    pub(super) fn read_interruptibly(
        &self,
        stream: &mut TcpStream,
        mut bytes: &mut [u8],
        deadline: Instant,
        stop: &StopSignal,
    ) -> Result<io::Result<()>> {
        while !bytes.is_empty() {
            check_interrupt(stop)?;
            if Instant::now() > deadline {
                let text = "rank 0 still waits for other ranks";
                return Ok(Err(io::Error::new(io::ErrorKind::TimedOut, text)));
            }
            let timed = stream.set_read_timeout(Some(POLL_INTERVAL));
            match timed.and_then(|()| stream.read(bytes)) {
                Ok(0) => return Ok(Err(io::Error::other("the peer closed the connection"))),
                Ok(num) => bytes = &mut bytes[num..],
                Err(error) if is_timeout(&error) => {}
                // A signal arrived. With a timeout, the kernel does not restart the call.
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Ok(Err(error)),
            }
        }
        Ok(Ok(()))
    }

    fn verdict_mac(&self, verdict: &[u8], transcript: &[u8]) -> Hmac<Sha256> {
        let mut mac = self.mac(b"verdict", transcript);
        mac.update(verdict);
        mac
    }

    /// `label` separates the kinds of proofs, so that one kind cannot be used as another.
    fn mac(&self, label: &[u8], transcript: &[u8]) -> Hmac<Sha256> {
        let mut mac =
            Hmac::<Sha256>::new_from_slice(&self.secret).expect("a key may have any length");
        mac.update(label);
        mac.update(transcript);
        mac
    }
}

/// Fails if this process received a stop signal.
pub(super) fn check_interrupt(stop: &StopSignal) -> Result<()> {
    if !stop.is_set() {
        return Ok(());
    }
    let why = "preempted by a signal before all ranks were connected".into();
    Err(Interrupted { code: ExitCode::Preempted, fenced: false, why }.into())
}

fn preamble() -> [u8; 12] {
    let mut preamble = [0; 12];
    preamble[..8].copy_from_slice(&MAGIC);
    preamble[8..].copy_from_slice(&VERSION.to_le_bytes());
    preamble
}

fn greeting() -> io::Result<Vec<u8>> {
    let mut greeting = preamble().to_vec();
    greeting.extend_from_slice(&nonce()?);
    Ok(greeting)
}

pub(super) fn nonce() -> io::Result<[u8; NONCE_BYTES]> {
    let mut nonce = [0; NONCE_BYTES];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut nonce)?;
    Ok(nonce)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}

/// Same as `read_exact`, with a deadline for the whole read.
fn read_until(stream: &mut TcpStream, mut bytes: &mut [u8], deadline: Instant) -> io::Result<()> {
    while !bytes.is_empty() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(bytes)? {
            0 => return Err(io::Error::other("the peer closed the connection")),
            num => bytes = &mut bytes[num..],
        }
    }
    Ok(())
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

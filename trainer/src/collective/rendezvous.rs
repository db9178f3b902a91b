//! Rendezvous of the ranks of an attempt. Rank 0 listens; the other ranks register and receive the
//! addresses of all. Then each rank connects to the ranks that it communicates with.

use std::collections::BTreeMap;
use std::io;
use std::net::{
    Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6, TcpListener, TcpStream, ToSocketAddrs as _,
};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net;
use stoker_api::contract::Gang;
use stoker_api::names::ENV_RENDEZVOUS_SECONDS;

use super::Topology;
use super::handshake::{
    AuthenticatedPeer, Fingerprint, POLL_INTERVAL, Purpose, RankIdentity, RankListener, Verdict,
    check_interrupt,
};
use super::link::Link;
use crate::Result;
use crate::error::Infrastructure;
use crate::stop::StopSignal;

mod links;
mod local;
mod open_files;

/// Default timeout. It is long because the gang's images may be pulled on many nodes.
const TIMEOUT_DEFAULT: Duration = Duration::from_secs(600);
/// Maximum number of connections that wait to be accepted. The kernel may set a lower one.
const BACKLOG: i32 = 4096;
/// Pause between two connection attempts.
const RETRY_PAUSE: Duration = Duration::from_millis(250);

/// Connections of one rank.
#[derive(Debug)]
pub(super) struct Connections {
    /// Watchdog connections: on rank 0 to all others by rank, elsewhere to rank 0.
    pub(super) watchdog_streams: Vec<(usize, TcpStream)>,
    /// Connections for small messages, likewise. Empty for two ranks, which use the ring.
    pub(super) hub: Vec<(usize, TcpStream)>,
    /// The same within this pod, if it does not contain all ranks.
    pub(super) local_hub: Vec<(usize, TcpStream)>,
    /// To the next rank and from the previous rank.
    pub(super) ring: (Link, Link),
}

/// A rank in the rendezvous.
#[derive(Debug)]
struct Participant<'a> {
    topology: Topology,
    identity: RankIdentity,
    rendezvous: &'a str,
    stop: &'a StopSignal,
    deadline: Instant,
    timeout: Duration,
}

/// Connects the ranks of an attempt.
///
/// # Errors
///
/// Fails on a timeout, naming the missing ranks; if programs or configurations differ; if rank 0
/// may not open enough files; or if `stop` is set.
pub(super) fn connect(
    gang: &Gang,
    attempt: u32,
    topology: Topology,
    fingerprint: Fingerprint,
    stop: &StopSignal,
) -> Result<Connections> {
    let timeout = match std::env::var(ENV_RENDEZVOUS_SECONDS) {
        Err(_) => TIMEOUT_DEFAULT,
        Ok(text) => Duration::from_secs(text.parse().map_err(|_| {
            format!("{ENV_RENDEZVOUS_SECONDS} is {text:?}, but must be a number of seconds")
        })?),
    };
    connect_within(gang, attempt, topology, fingerprint, stop, timeout)
}

pub(super) fn connect_within(
    gang: &Gang,
    attempt: u32,
    topology: Topology,
    fingerprint: Fingerprint,
    stop: &StopSignal,
    timeout: Duration,
) -> Result<Connections> {
    let listener = match topology.rank {
        0 => {
            open_files::allow_connections(topology)?;
            listen(&gang.rendezvous)?
        }
        _ => bind(0).map_err(|error| Infrastructure(format!("cannot open a port: {error}")))?,
    };
    let socket_error =
        |error: io::Error| Infrastructure(format!("cannot configure the listening port: {error}"));
    let port = listener.local_addr().map_err(socket_error)?.port();
    let identity = RankIdentity {
        secret: gang.secret.clone().into_bytes(),
        attempt,
        rank: topology.rank as u32,
        world_size: topology.size as u32,
        fingerprint,
        port,
    };
    let listener = RankListener::new(listener, identity.clone()).map_err(socket_error)?;
    let deadline = Instant::now() + timeout;
    let rendezvous = &gang.rendezvous;
    let participant = Participant { topology, identity, rendezvous, stop, deadline, timeout };
    let (watchdog_streams, addresses, early_peers) = match topology.rank {
        0 => participant.accept_registrations(&listener)?,
        _ => participant.register()?,
    };
    participant.connect_links(listener, watchdog_streams, &addresses, early_peers)
}

/// Result of the registration: watchdog connections, addresses of all ranks, and peers that
/// connected early for other purposes.
type Registration = (Vec<(usize, TcpStream)>, Vec<SocketAddr>, Vec<AuthenticatedPeer>);

impl Participant<'_> {
    /// On rank 0: waits for all other ranks, then sends them the addresses.
    fn accept_registrations(&self, listener: &RankListener) -> Result<Registration> {
        let (mut registered, mut early_peers) = (BTreeMap::new(), vec![]);
        while registered.len() + 1 < self.topology.size {
            check_interrupt(self.stop)?;
            match listener.next() {
                // A rank that connects again has abandoned its first connection.
                Some(peer) if peer.purpose == Purpose::Register as u32 => {
                    registered.insert(peer.rank, peer);
                }
                Some(peer) => early_peers.push(peer),
                None => {}
            }
            if Instant::now() > self.deadline {
                let text = self.missing_ranks(&registered);
                self.refuse(&mut registered, &text);
                return Err(Infrastructure(text).into());
            }
        }
        self.check_fingerprints(&mut registered)?;
        let address = |peer: &AuthenticatedPeer| -> io::Result<SocketAddr> {
            let ip = peer.stream.peer_addr()?.ip().to_canonical();
            Ok(SocketAddr::new(ip, peer.port))
        };
        let connection_lost = |error: io::Error| {
            Infrastructure(format!("lost the connection to a rank during the rendezvous: {error}"))
        };
        let addresses = registered
            .values()
            .map(address)
            .collect::<io::Result<Vec<_>>>()
            .map_err(connection_lost)?;
        let text = serde_json::to_string(&addresses)?;
        let mut watchdog_streams = vec![];
        for (rank, mut peer) in registered {
            // Ignore the error: the first collective call detects a rank that exited.
            let _ = peer.send_verdict(&self.identity, Verdict::Accepted, &text);
            watchdog_streams.push((rank as usize, peer.stream));
        }
        Ok((watchdog_streams, self.with_rank_0(None, addresses), early_peers))
    }

    /// Refuses ranks with another program or configuration, which would train something else.
    fn check_fingerprints(&self, registered: &mut BTreeMap<u32, AuthenticatedPeer>) -> Result<()> {
        let own = self.identity.fingerprint;
        let other = registered.values().find(|peer| peer.fingerprint != own);
        let Some(other) = other else { return Ok(()) };
        let difference = match other.fingerprint.program == own.program {
            true => "has another configuration than rank 0",
            false => {
                "runs another program than rank 0: the image tag may have moved during the pull; \
                 specify the image by digest"
            }
        };
        let text = format!("rank {} {difference}", other.rank);
        self.refuse(registered, &text);
        Err(Infrastructure(text).into())
    }

    /// Sends the reason of the failure to the ranks that registered.
    fn refuse(&self, registered: &mut BTreeMap<u32, AuthenticatedPeer>, why: &str) {
        for peer in registered.values_mut() {
            let _ = peer.send_verdict(&self.identity, Verdict::Refused, why);
        }
    }

    fn missing_ranks(&self, registered: &BTreeMap<u32, AuthenticatedPeer>) -> String {
        let size = self.topology.size;
        let missing_ranks = (1..size).filter(|rank| !registered.contains_key(&(*rank as u32)));
        let missing_ranks: Vec<String> = missing_ranks.map(|rank| rank.to_string()).collect();
        format!(
            "timeout after {} s: of {size} ranks, {} did not connect to {}; check their pods",
            self.timeout.as_secs(),
            missing_ranks.join(", "),
            self.rendezvous
        )
    }

    /// On other ranks: registers with rank 0, retrying until the deadline.
    fn register(&self) -> Result<Registration> {
        // Report the error before the last one too, because repeated errors may hide the cause.
        let (mut earlier, mut last) = (String::new(), String::new());
        loop {
            let error = match self.try_register()? {
                Ok(registration) => return Ok(registration),
                Err(error) => error.to_string(),
            };
            if error != last && !last.is_empty() {
                earlier = format!(" (previous error: {last})");
            }
            if Instant::now() > self.deadline {
                let text = format!(
                    "rank 0 was not reached at {} within {} s: {error}{earlier}",
                    self.rendezvous,
                    self.timeout.as_secs()
                );
                return Err(Infrastructure(text).into());
            }
            last = error;
            self.pause_before_retry()?;
        }
    }

    fn try_register(&self) -> Result<io::Result<Registration>> {
        // The names of pods become resolvable only while the pods start.
        let resolved = self.rendezvous.to_socket_addrs().map(Iterator::collect::<Vec<_>>);
        let hello =
            resolved.and_then(|addresses| self.identity.send_hello(&addresses, Purpose::Register));
        let (mut stream, transcript) = match hello {
            Ok(hello) => hello,
            Err(error) => return Ok(Err(error)),
        };
        let verdict =
            self.identity.await_verdict(&mut stream, &transcript, self.deadline, self.stop)?;
        let registration = verdict.and_then(|text| {
            let addresses: Vec<SocketAddr> = serde_json::from_str(&text)?;
            let rank_0 = stream.peer_addr()?;
            Ok((vec![(0, stream)], self.with_rank_0(Some(rank_0), addresses), vec![]))
        });
        Ok(registration)
    }

    /// Returns the addresses of all ranks, in order. Rank 0's own entry is unused.
    fn with_rank_0(&self, rank_0: Option<SocketAddr>, others: Vec<SocketAddr>) -> Vec<SocketAddr> {
        let unspecified = SocketAddr::from(([0, 0, 0, 0], 0));
        let mut all = vec![rank_0.unwrap_or(unspecified)];
        all.extend(others);
        all
    }

    fn pause_before_retry(&self) -> Result<()> {
        let resume_at = Instant::now() + RETRY_PAUSE;
        while Instant::now() < resume_at {
            check_interrupt(self.stop)?;
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }
}

/// Listens on the port of the address. Peers resolved its host name to this machine already.
fn listen(rendezvous: &str) -> Result<TcpListener> {
    let port = rendezvous.rsplit_once(':').and_then(|(_, port)| port.parse::<u16>().ok());
    let port = port.ok_or_else(|| {
        Infrastructure(format!("the rendezvous is {rendezvous:?}, but must be HOST:PORT"))
    })?;
    Ok(bind(port).map_err(|error| {
        Infrastructure(format!(
            "rank 0 cannot listen on port {port}: {error}; set C10D_PORT, or MASTER_PORT if \
             another tool starts the ranks"
        ))
    })?)
}

/// Binds to IPv6 and IPv4, or to IPv4 only if the kernel has no IPv6.
pub(super) fn bind(port: u16) -> io::Result<TcpListener> {
    match ipv6_socket().and_then(|socket| listen_on_all(socket, port)) {
        Err(error) if lacks_ipv6(&error) => TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)),
        bound => bound,
    }
}

/// Returns whether listening failed because IPv6 is unavailable. Another address must not hide
/// other errors, such as a port in use.
pub(super) fn lacks_ipv6(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::AFNOSUPPORT | Errno::ADDRNOTAVAIL))
}

/// Returns a socket without an address.
pub(super) fn ipv6_socket() -> io::Result<OwnedFd> {
    let (family, flags) = (net::AddressFamily::INET6, net::SocketFlags::CLOEXEC);
    Ok(net::socket_with(family, net::SocketType::STREAM, flags, None)?)
}

/// Listens for IPv6 and IPv4, even if the kernel's setting `net.ipv6.bindv6only` is 1.
pub(super) fn listen_on_all(socket: OwnedFd, port: u16) -> io::Result<TcpListener> {
    // Ignore the error: without the option, the socket follows the setting.
    let _ = net::sockopt::set_ipv6_v6only(&socket, false);
    // As in `TcpListener::bind`: the next attempt takes the port while old connections close.
    net::sockopt::set_socket_reuseaddr(&socket, true)?;
    net::bind(&socket, &SocketAddrV6::new(Ipv6Addr::UNSPECIFIED, port, 0, 0))?;
    net::listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

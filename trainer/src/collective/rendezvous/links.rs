//! Links of a rank to its neighbors and hubs, connected once all ranks are registered.

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use super::super::Topology;
use super::super::handshake::{AuthenticatedPeer, Purpose, RankListener, Verdict, check_interrupt};
use super::{Connections, Participant};
use crate::Result;
use crate::error::Infrastructure;

/// Timeout for connections between registered ranks.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(60);

impl Participant<'_> {
    /// Connects to the outgoing links and accepts the incoming links.
    pub(super) fn connect_links(
        self,
        listener: RankListener,
        watchdog_streams: Vec<(usize, TcpStream)>,
        addresses: &[SocketAddr],
        early_peers: Vec<AuthenticatedPeer>,
    ) -> Result<Connections> {
        let deadline = Instant::now() + CONNECT_TIMEOUT;
        let links = Links::for_rank(self.topology);
        let (incoming_streams, outgoing_streams) = std::thread::scope(|scope| {
            let (participant, incoming) = (&self, &links.incoming);
            let incoming_streams = scope.spawn(move || {
                participant.accept_links(&listener, incoming, early_peers, deadline)
            });
            let outgoing_streams: Result<Vec<_>> = links
                .outgoing
                .iter()
                .map(|(purpose, rank)| self.connect_to(addresses, *purpose, *rank, deadline))
                .collect();
            (incoming_streams.join().expect("accepting ranks does not panic"), outgoing_streams)
        });
        // Report an outgoing failure first, since it is more specific than a missing rank.
        let mut outgoing = outgoing_streams?;
        let mut incoming = incoming_streams?;
        let mut take = |purpose: Purpose| -> Vec<(usize, TcpStream)> {
            let to_peer = |(_, rank, stream)| (rank, stream);
            let mut all: Vec<_> =
                incoming.extract_if(.., |link| link.0 == purpose).map(to_peer).collect();
            all.extend(outgoing.extract_if(.., |link| link.0 == purpose).map(to_peer));
            all
        };
        let (mut hub, mut local_hub) = (take(Purpose::Hub), take(Purpose::LocalHub));
        hub.sort_by_key(|(rank, _)| *rank);
        local_hub.sort_by_key(|(rank, _)| *rank);
        let mut ring = take(Purpose::Ring).into_iter().map(|(_, stream)| stream);
        let (Some(previous), Some(next)) = (ring.next(), ring.next()) else {
            return Err(Infrastructure("the ring lacks a neighbor connection".into()).into());
        };
        let ring = self.prefer_local(next, previous, deadline)?;
        Ok(Connections { watchdog_streams, hub, local_hub, ring })
    }

    /// Accepts the expected connections.
    fn accept_links(
        &self,
        listener: &RankListener,
        incoming: &[(Purpose, usize)],
        early_peers: Vec<AuthenticatedPeer>,
        deadline: Instant,
    ) -> Result<Vec<(Purpose, usize, TcpStream)>> {
        let (mut incoming_streams, mut early_peers) = (BTreeMap::new(), early_peers.into_iter());
        while incoming_streams.len() < incoming.len() {
            check_interrupt(self.stop)?;
            if Instant::now() > deadline {
                let missing_ranks =
                    incoming.iter().filter(|link| !incoming_streams.contains_key(&key(link)));
                let missing_ranks: Vec<String> =
                    missing_ranks.map(|(_, rank)| format!("rank {rank}")).collect();
                let text = format!(
                    "{} did not connect to rank {} within {} s",
                    missing_ranks.join(", "),
                    self.topology.rank,
                    CONNECT_TIMEOUT.as_secs()
                );
                return Err(Infrastructure(text).into());
            }
            let Some(mut peer) = early_peers.next().or_else(|| listener.next()) else { continue };
            let expected =
                incoming.iter().find(|link| key(link) == (peer.purpose, peer.rank as usize));
            if let Some(link) = expected
                && peer.send_verdict(&self.identity, Verdict::Accepted, "").is_ok()
            {
                // A rank that connects again has abandoned its first connection.
                incoming_streams.insert(key(link), (link.0, link.1, peer.stream));
            }
        }
        Ok(incoming_streams.into_values().collect())
    }

    /// Connects to a rank, retrying until the deadline.
    fn connect_to(
        &self,
        addresses: &[SocketAddr],
        purpose: Purpose,
        rank: usize,
        deadline: Instant,
    ) -> Result<(Purpose, usize, TcpStream)> {
        let address = addresses.get(rank).copied();
        let address =
            address.ok_or_else(|| Infrastructure(format!("address of rank {rank} not found")))?;
        loop {
            let error = match self.identity.send_hello(&[address], purpose) {
                Ok((mut stream, transcript)) => {
                    let identity = &self.identity;
                    let verdict =
                        identity.await_verdict(&mut stream, &transcript, deadline, self.stop)?;
                    match verdict {
                        Ok(_) => return Ok((purpose, rank, stream)),
                        Err(error) => error,
                    }
                }
                Err(error) => error,
            };
            if Instant::now() > deadline {
                let text = format!(
                    "cannot connect to rank {rank} at {address} from rank {}: {error}; check \
                     network policies",
                    self.topology.rank
                );
                return Err(Infrastructure(text).into());
            }
            self.pause_before_retry()?;
        }
    }
}

fn key(link: &(Purpose, usize)) -> (u32, usize) {
    (link.0 as u32, link.1)
}

/// Links of a rank, by direction of the connection.
#[derive(Debug, PartialEq, Eq)]
struct Links {
    outgoing: Vec<(Purpose, usize)>,
    incoming: Vec<(Purpose, usize)>,
}

impl Links {
    fn for_rank(topology: Topology) -> Self {
        let Topology { rank, size, .. } = topology;
        let mut outgoing = vec![];
        let mut incoming = vec![(Purpose::Ring, (rank + size - 1) % size)];
        let mut star = |purpose: Purpose, ranks: std::ops::Range<usize>| {
            if rank == ranks.start {
                incoming.extend(ranks.skip(1).map(|rank| (purpose, rank)));
            } else {
                outgoing.push((purpose, ranks.start));
            }
        };
        // Two ranks use the ring for all messages.
        if size > 2 {
            star(Purpose::Hub, 0..size);
        }
        if topology.has_local_group() {
            star(Purpose::LocalHub, topology.local_ranks());
        }
        outgoing.push((Purpose::Ring, (rank + 1) % size));
        Self { outgoing, incoming }
    }
}

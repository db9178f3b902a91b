//! Rendezvous of the ranks of an attempt. Rank 0 listens; the other ranks register and receive the
//! addresses of all. Then each rank connects to the ranks that it communicates with.

use std::collections::BTreeMap;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs as _};
use std::time::{Duration, Instant};

use stoker_api::contract::Gang;
use stoker_api::names::ENV_RENDEZVOUS_SECONDS;

use super::Numbers;
use super::handshake::{Arrived, Door, LOOK, Passport, Purpose, Sameness, Verdict, look};
use crate::Result;
use crate::error::Infrastructure;
use crate::stop::StopSignal;

/// Default timeout. It is long because the gang's images may be pulled on many nodes.
const WAIT: Duration = Duration::from_secs(600);
/// Overrides the timeout, in seconds.
const ENV_WAIT: &str = ENV_RENDEZVOUS_SECONDS;
/// Timeout for connections between registered ranks.
const CONNECT_MAX: Duration = Duration::from_secs(60);
/// Pause between two connection attempts.
const RETRY: Duration = Duration::from_millis(250);

/// Connections of one rank.
#[derive(Debug)]
pub(super) struct Connections {
    /// Watchdog connections: on rank 0 to all others by rank, elsewhere to rank 0.
    pub(super) watch: Vec<(usize, TcpStream)>,
    /// Connections for small messages, likewise. Empty for two ranks, which use the ring.
    pub(super) hub: Vec<(usize, TcpStream)>,
    /// The same within this pod, if it does not contain all ranks.
    pub(super) local_hub: Vec<(usize, TcpStream)>,
    /// To the next rank and from the previous rank.
    pub(super) ring: (TcpStream, TcpStream),
}

/// A rank in the rendezvous.
#[derive(Debug)]
struct Guest<'a> {
    numbers: Numbers,
    passport: Passport,
    rendezvous: &'a str,
    stop: &'a StopSignal,
    deadline: Instant,
    wait: Duration,
}

/// Connects the ranks of an attempt.
///
/// # Errors
///
/// Fails on a timeout, naming the missing ranks; if programs or configurations differ; or if `stop`
/// is set.
pub(super) fn meet(
    gang: &Gang,
    attempt: u32,
    numbers: Numbers,
    sameness: Sameness,
    stop: &StopSignal,
) -> Result<Connections> {
    let wait = match std::env::var(ENV_WAIT) {
        Err(_) => WAIT,
        Ok(text) => Duration::from_secs(
            text.parse()
                .map_err(|_| format!("{ENV_WAIT} is {text:?}, but must be a number of seconds"))?,
        ),
    };
    meet_within(gang, attempt, numbers, sameness, stop, wait)
}

pub(super) fn meet_within(
    gang: &Gang,
    attempt: u32,
    numbers: Numbers,
    sameness: Sameness,
    stop: &StopSignal,
    wait: Duration,
) -> Result<Connections> {
    let listener = match numbers.rank {
        0 => listen(&gang.rendezvous)?,
        _ => bind(0).map_err(|error| Infrastructure(format!("cannot open a port: {error}")))?,
    };
    let useless =
        |error: io::Error| Infrastructure(format!("cannot configure the listening port: {error}"));
    let port = listener.local_addr().map_err(useless)?.port();
    let passport = Passport {
        secret: gang.secret.clone().into_bytes(),
        attempt,
        rank: numbers.rank as u32,
        world_size: numbers.size as u32,
        sameness,
        port,
    };
    let door = Door::new(listener, passport.clone()).map_err(useless)?;
    let deadline = Instant::now() + wait;
    let rendezvous = &gang.rendezvous;
    let guest = Guest { numbers, passport, rendezvous, stop, deadline, wait };
    let (watch, addresses, early) = match numbers.rank {
        0 => guest.host(&door)?,
        _ => guest.visit()?,
    };
    guest.connect(door, watch, &addresses, early)
}

/// Result of the registration: watchdog connections, addresses of all ranks, and peers that
/// connected early for other purposes.
type Met = (Vec<(usize, TcpStream)>, Vec<SocketAddr>, Vec<Arrived>);

impl Guest<'_> {
    /// On rank 0: waits for all other ranks, then sends them the addresses.
    fn host(&self, door: &Door) -> Result<Met> {
        let (mut here, mut early) = (BTreeMap::new(), vec![]);
        while here.len() + 1 < self.numbers.size {
            look(self.stop)?;
            match door.next() {
                // A rank that connects again has abandoned its first connection.
                Some(arrived) if arrived.purpose == Purpose::Meet as u32 => {
                    here.insert(arrived.rank, arrived);
                }
                Some(arrived) => early.push(arrived),
                None => {}
            }
            if Instant::now() > self.deadline {
                let text = self.missing(&here);
                self.refuse(&mut here, &text);
                return Err(Infrastructure(text).into());
            }
        }
        self.check_sameness(&mut here)?;
        let address = |arrived: &Arrived| -> io::Result<SocketAddr> {
            let ip = arrived.stream.peer_addr()?.ip().to_canonical();
            Ok(SocketAddr::new(ip, arrived.port))
        };
        let lost = |error: io::Error| {
            Infrastructure(format!("lost the connection to a rank during the rendezvous: {error}"))
        };
        let addresses = here.values().map(address).collect::<io::Result<Vec<_>>>().map_err(lost)?;
        let text = serde_json::to_string(&addresses)?;
        let mut watch = vec![];
        for (rank, mut arrived) in here {
            // Ignore the error: the first collective call detects a rank that exited.
            let _ = arrived.answer(&self.passport, Verdict::Welcome, &text);
            watch.push((rank as usize, arrived.stream));
        }
        Ok((watch, self.with_rank_0(None, addresses), early))
    }

    /// Refuses ranks with another program or configuration, which would train something else.
    fn check_sameness(&self, here: &mut BTreeMap<u32, Arrived>) -> Result<()> {
        let own = self.passport.sameness;
        let other = here.values().find(|arrived| arrived.sameness != own);
        let Some(other) = other else { return Ok(()) };
        let what = match other.sameness.program == own.program {
            true => "has another configuration than rank 0",
            false => {
                "runs another program than rank 0: the image tag may have moved during the pull; \
                 specify the image by digest"
            }
        };
        let text = format!("rank {} {what}", other.rank);
        self.refuse(here, &text);
        Err(Infrastructure(text).into())
    }

    /// Sends the reason of the failure to the ranks that registered.
    fn refuse(&self, here: &mut BTreeMap<u32, Arrived>, why: &str) {
        for arrived in here.values_mut() {
            let _ = arrived.answer(&self.passport, Verdict::NotOurs, why);
        }
    }

    fn missing(&self, here: &BTreeMap<u32, Arrived>) -> String {
        let size = self.numbers.size;
        let missing = (1..size).filter(|rank| !here.contains_key(&(*rank as u32)));
        let missing: Vec<String> = missing.map(|rank| rank.to_string()).collect();
        format!(
            "timeout after {} s: of {size} ranks, {} did not connect to {}; check their pods",
            self.wait.as_secs(),
            missing.join(", "),
            self.rendezvous
        )
    }

    /// On other ranks: registers with rank 0, retrying until the deadline.
    fn visit(&self) -> Result<Met> {
        // Report the error before the last one too, because repeated errors may hide the cause.
        let (mut before, mut last) = (String::new(), String::new());
        loop {
            let error = match self.try_visit()? {
                Ok(met) => return Ok(met),
                Err(error) => error.to_string(),
            };
            if error != last && !last.is_empty() {
                before = format!(" (previous error: {last})");
            }
            if Instant::now() > self.deadline {
                let text = format!(
                    "rank 0 was not reached at {} within {} s: {error}{before}",
                    self.rendezvous,
                    self.wait.as_secs()
                );
                return Err(Infrastructure(text).into());
            }
            last = error;
            self.pause()?;
        }
    }

    fn try_visit(&self) -> Result<io::Result<Met>> {
        // The names of pods become resolvable only while the pods start.
        let resolved = self.rendezvous.to_socket_addrs().map(Iterator::collect::<Vec<_>>);
        let greeted = resolved.and_then(|found| self.passport.greet(&found, Purpose::Meet));
        let (mut stream, transcript) = match greeted {
            Ok(greeted) => greeted,
            Err(error) => return Ok(Err(error)),
        };
        let verdict =
            self.passport.await_verdict(&mut stream, &transcript, self.deadline, self.stop)?;
        let met = verdict.and_then(|text| {
            let addresses: Vec<SocketAddr> = serde_json::from_str(&text)?;
            let root = stream.peer_addr()?;
            Ok((vec![(0, stream)], self.with_rank_0(Some(root), addresses), vec![]))
        });
        Ok(met)
    }

    /// Returns the addresses of all ranks, in order. Rank 0's own entry is unused.
    fn with_rank_0(&self, root: Option<SocketAddr>, others: Vec<SocketAddr>) -> Vec<SocketAddr> {
        let nowhere = SocketAddr::from(([0, 0, 0, 0], 0));
        let mut all = vec![root.unwrap_or(nowhere)];
        all.extend(others);
        all
    }

    fn pause(&self) -> Result<()> {
        let again = Instant::now() + RETRY;
        while Instant::now() < again {
            look(self.stop)?;
            std::thread::sleep(LOOK);
        }
        Ok(())
    }

    /// Connects to the outgoing links and accepts the incoming links.
    fn connect(
        self,
        door: Door,
        watch: Vec<(usize, TcpStream)>,
        addresses: &[SocketAddr],
        early: Vec<Arrived>,
    ) -> Result<Connections> {
        let deadline = Instant::now() + CONNECT_MAX;
        let links = Links::of(self.numbers);
        let (came, went) = std::thread::scope(|scope| {
            let (guest, incoming) = (&self, &links.incoming);
            let came = scope.spawn(move || guest.let_in(&door, incoming, early, deadline));
            let went: Result<Vec<_>> = links
                .outgoing
                .iter()
                .map(|(purpose, rank)| self.go_to(addresses, *purpose, *rank, deadline))
                .collect();
            (came.join().expect("accepting ranks does not panic"), went)
        });
        // Report an outgoing failure first, since it is more specific than a missing rank.
        let mut outgoing = went?;
        let mut incoming = came?;
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
        Ok(Connections { watch, hub, local_hub, ring: (next, previous) })
    }

    /// Accepts the expected connections.
    fn let_in(
        &self,
        door: &Door,
        incoming: &[(Purpose, usize)],
        early: Vec<Arrived>,
        deadline: Instant,
    ) -> Result<Vec<(Purpose, usize, TcpStream)>> {
        let (mut came, mut early) = (BTreeMap::new(), early.into_iter());
        while came.len() < incoming.len() {
            look(self.stop)?;
            if Instant::now() > deadline {
                let missing = incoming.iter().filter(|link| !came.contains_key(&name(link)));
                let missing: Vec<String> =
                    missing.map(|(_, rank)| format!("rank {rank}")).collect();
                let text = format!(
                    "{} did not connect to rank {} within {} s",
                    missing.join(", "),
                    self.numbers.rank,
                    CONNECT_MAX.as_secs()
                );
                return Err(Infrastructure(text).into());
            }
            let Some(mut arrived) = early.next().or_else(|| door.next()) else { continue };
            let expected =
                incoming.iter().find(|link| name(link) == (arrived.purpose, arrived.rank as usize));
            if let Some(link) = expected
                && arrived.answer(&self.passport, Verdict::Welcome, "").is_ok()
            {
                // A rank that connects again has abandoned its first connection.
                came.insert(name(link), (link.0, link.1, arrived.stream));
            }
        }
        Ok(came.into_values().collect())
    }

    /// Connects to a rank, retrying until the deadline.
    fn go_to(
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
            let error = match self.passport.greet(&[address], purpose) {
                Ok((mut stream, transcript)) => {
                    let passport = &self.passport;
                    let verdict =
                        passport.await_verdict(&mut stream, &transcript, deadline, self.stop)?;
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
                    self.numbers.rank
                );
                return Err(Infrastructure(text).into());
            }
            self.pause()?;
        }
    }
}

fn name(link: &(Purpose, usize)) -> (u32, usize) {
    (link.0 as u32, link.1)
}

/// Links of a rank, by direction of the connection.
#[derive(Debug, PartialEq, Eq)]
struct Links {
    outgoing: Vec<(Purpose, usize)>,
    incoming: Vec<(Purpose, usize)>,
}

impl Links {
    fn of(numbers: Numbers) -> Self {
        let Numbers { rank, size, .. } = numbers;
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
        if numbers.has_local_group() {
            star(Purpose::LocalHub, numbers.local_ranks());
        }
        outgoing.push((Purpose::Ring, (rank + 1) % size));
        Self { outgoing, incoming }
    }
}

/// Listens on the port of the address. Peers resolved its host name to this machine already.
fn listen(rendezvous: &str) -> Result<TcpListener> {
    let port = rendezvous.rsplit_once(':').and_then(|(_, port)| port.parse::<u16>().ok());
    let port = port.ok_or_else(|| {
        Infrastructure(format!("the rendezvous is {rendezvous:?}, but must be HOST:PORT"))
    })?;
    Ok(bind(port).map_err(|error| {
        Infrastructure(format!("rank 0 cannot listen on port {port}: {error}; set C10D_PORT"))
    })?)
}

/// Binds to IPv6 and IPv4 if available, otherwise to IPv4 only.
fn bind(port: u16) -> io::Result<TcpListener> {
    TcpListener::bind(("::", port)).or_else(|_| TcpListener::bind(("0.0.0.0", port)))
}

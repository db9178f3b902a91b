//! How the ranks of an attempt find each other: rank 0 listens, the others come and are told where
//! all are; then each connects to those that it will speak with.

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

/// How long ranks wait for each other, unless the environment says otherwise: images of a gang may
/// be pulled on many nodes.
const WAIT: Duration = Duration::from_secs(600);
/// Says it in seconds.
const ENV_WAIT: &str = ENV_RENDEZVOUS_SECONDS;
/// How long ranks that have met may take to connect with each other.
const CONNECT_MAX: Duration = Duration::from_secs(60);
/// The pause between two tries to connect.
const RETRY: Duration = Duration::from_millis(250);

/// The connections of one rank.
#[derive(Debug)]
pub(super) struct Connections {
    /// At rank 0 those of all others by rank, elsewhere that of rank 0: to be watched.
    pub(super) watch: Vec<(usize, TcpStream)>,
    /// The same, for what is small; none between two ranks, who say it over the ring.
    pub(super) hub: Vec<(usize, TcpStream)>,
    /// The same among the ranks of this pod, where it does not hold all.
    pub(super) local_hub: Vec<(usize, TcpStream)>,
    /// To the next rank, and from the one before.
    pub(super) ring: (TcpStream, TcpStream),
}

/// One rank at the meeting.
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
/// Not all came in time, which names the missing, one of them is another program, or `stop` was
/// set.
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
        _ => bind(0).map_err(|it| Infrastructure(format!("no port is free: {it}")))?,
    };
    let useless = |it: io::Error| Infrastructure(format!("a port is of no use: {it}"));
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

/// What a meeting gives: connections to be watched, where each rank is, and who came for more
/// before it was over.
type Met = (Vec<(usize, TcpStream)>, Vec<SocketAddr>, Vec<Arrived>);

impl Guest<'_> {
    /// Rank 0: waits for all others, and tells them where all are.
    fn host(&self, door: &Door) -> Result<Met> {
        let (mut here, mut early) = (BTreeMap::new(), vec![]);
        while here.len() + 1 < self.numbers.size {
            look(self.stop)?;
            match door.next() {
                // A rank that comes again has given its first connection up.
                Some(it) if it.purpose == Purpose::Meet as u32 => {
                    here.insert(it.rank, it);
                }
                Some(it) => early.push(it),
                None => {}
            }
            if Instant::now() > self.deadline {
                let text = self.missing(&here);
                self.refuse(&mut here, &text);
                return Err(Infrastructure(text).into());
            }
        }
        self.check_sameness(&mut here)?;
        let address = |it: &Arrived| -> io::Result<SocketAddr> {
            Ok(SocketAddr::new(it.stream.peer_addr()?.ip().to_canonical(), it.port))
        };
        let gone = |it: io::Error| Infrastructure(format!("a rank left the meeting: {it}"));
        let addresses = here.values().map(address).collect::<io::Result<Vec<_>>>().map_err(gone)?;
        let text = serde_json::to_string(&addresses)?;
        let mut watch = vec![];
        for (rank, mut arrived) in here {
            // One that has gone is found out by the first sum.
            let _ = arrived.answer(&self.passport, Verdict::Welcome, &text);
            watch.push((rank as usize, arrived.stream));
        }
        Ok((watch, self.with_rank_0(None, addresses), early))
    }

    /// Ranks of another program or another configuration would train something else.
    fn check_sameness(&self, here: &mut BTreeMap<u32, Arrived>) -> Result<()> {
        let own = self.passport.sameness;
        let other = here.values().find(|it| it.sameness != own);
        let Some(other) = other else { return Ok(()) };
        let what = match other.sameness.program == own.program {
            true => "was told something else than rank 0 of how to train",
            false => {
                "runs another program than rank 0: a tag may have moved while images were pulled; \
                 name the image by its digest"
            }
        };
        let text = format!("rank {} {what}", other.rank);
        self.refuse(here, &text);
        Err(Infrastructure(text).into())
    }

    /// Tells those who came why nothing comes of it.
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
            "of {size} ranks, {} did not come to {} within {} s",
            missing.join(", "),
            self.rendezvous,
            self.wait.as_secs()
        )
    }

    /// Another rank: goes to rank 0 until it is let in.
    fn visit(&self) -> Result<Met> {
        // The same error again and again would hide what it began with.
        let (mut before, mut last) = (String::new(), String::new());
        loop {
            let error = match self.try_visit()? {
                Ok(met) => return Ok(met),
                Err(error) => error.to_string(),
            };
            if error != last && !last.is_empty() {
                before = format!(" (before that: {last})");
            }
            if Instant::now() > self.deadline {
                let text = format!(
                    "rank 0 was not met at {} within {} s: {error}{before}",
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
        // Names of pods come to be known while they start.
        let found = self.rendezvous.to_socket_addrs().map(Iterator::collect::<Vec<_>>);
        let greeted = found.and_then(|it| self.passport.greet(&it, Purpose::Meet));
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

    /// Where each rank is, in order. Nobody goes to rank 0 from itself.
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

    /// Goes to those that are expected to be gone to, and lets in those that are expected to come.
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
            (came.join().expect("letting ranks in does not panic"), went)
        });
        // Where this rank could not go says more than who did not come.
        let mut went = went?;
        let mut came = came?;
        let mut take = |purpose: Purpose| -> Vec<(usize, TcpStream)> {
            let mut all: Vec<_> =
                came.extract_if(.., |it| it.0 == purpose).map(|it| (it.1, it.2)).collect();
            all.extend(went.extract_if(.., |it| it.0 == purpose).map(|it| (it.1, it.2)));
            all
        };
        let (mut hub, mut local_hub) = (take(Purpose::Hub), take(Purpose::LocalHub));
        hub.sort_by_key(|it| it.0);
        local_hub.sort_by_key(|it| it.0);
        let mut ring = take(Purpose::Ring).into_iter().map(|it| it.1);
        let (Some(previous), Some(next)) = (ring.next(), ring.next()) else {
            return Err(Infrastructure("a ring has no two neighbours".into()).into());
        };
        Ok(Connections { watch, hub, local_hub, ring: (next, previous) })
    }

    /// Waits for those that are expected.
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
                let missing = incoming.iter().filter(|it| !came.contains_key(&name(it)));
                let missing: Vec<String> = missing.map(|it| format!("rank {}", it.1)).collect();
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
                incoming.iter().find(|it| name(it) == (arrived.purpose, arrived.rank as usize));
            if let Some(link) = expected
                && arrived.answer(&self.passport, Verdict::Welcome, "").is_ok()
            {
                // One that comes again has given its first connection up.
                came.insert(name(link), (link.0, link.1, arrived.stream));
            }
        }
        Ok(came.into_values().collect())
    }

    /// Goes to a rank until it is let in.
    fn go_to(
        &self,
        addresses: &[SocketAddr],
        purpose: Purpose,
        rank: usize,
        deadline: Instant,
    ) -> Result<(Purpose, usize, TcpStream)> {
        let address = addresses.get(rank).copied();
        let address = address.ok_or_else(|| Infrastructure(format!("rank {rank} is nowhere")))?;
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
                    "rank {rank} cannot be reached at {address} from rank {}: {error}",
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

/// Who goes to whom.
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
                incoming.extend(ranks.skip(1).map(|it| (purpose, it)));
            } else {
                outgoing.push((purpose, ranks.start));
            }
        };
        // Two say all over the ring.
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

/// The port of the address; whoever asks has come to this machine already.
fn listen(rendezvous: &str) -> Result<TcpListener> {
    let port = rendezvous.rsplit_once(':').and_then(|(_, port)| port.parse::<u16>().ok());
    let port = port.ok_or_else(|| {
        Infrastructure(format!("the rendezvous is {rendezvous:?}, but must be HOST:PORT"))
    })?;
    Ok(bind(port).map_err(|error| {
        Infrastructure(format!("rank 0 cannot listen on port {port}: {error}; set C10D_PORT"))
    })?)
}

/// Both families, where the machine has both.
fn bind(port: u16) -> io::Result<TcpListener> {
    TcpListener::bind(("::", port)).or_else(|_| TcpListener::bind(("0.0.0.0", port)))
}

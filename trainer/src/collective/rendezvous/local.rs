//! Unix sockets between neighbors of the ring that are in the same pod.
//!
//! Both neighbors know from the topology that they share a pod. They agree over their authenticated
//! TCP connection:
//!
//! | listener sends | connecting rank sends |
//! |---|---|
//! | offer: whether it listens, name, token | |
//! | | over the Unix socket: token |
//! | | answer: whether it has connected |
//!
//! The name is in the abstract namespace of the network, so it needs no file, and other processes
//! can see it. The token is secret. Without a Unix socket, both stay with TCP.

use std::io::{self, Read as _, Write as _};
use std::net::TcpStream;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::{Duration, Instant};

use super::super::handshake::{check_interrupt, nonce};
use super::super::link::Link;
use super::Participant;
use crate::Result;
use crate::error::Infrastructure;

/// Length of a name and of a token.
const TOKEN_BYTES: usize = 32;
const OFFER_BYTES: usize = 1 + 2 * TOKEN_BYTES;
/// Timeout for a token on an accepted connection. The neighbor has sent it already.
const TOKEN_TIMEOUT: Duration = Duration::from_secs(5);

/// Name and token of a listener.
type Offer = ([u8; TOKEN_BYTES], [u8; TOKEN_BYTES]);

impl Participant<'_> {
    /// Replaces the connections to neighbors in the same pod by Unix sockets.
    ///
    /// # Errors
    ///
    /// Fails if a neighbor exits, does not answer until the deadline, or if `stop` is set.
    pub(super) fn prefer_unix(
        &self,
        mut next: TcpStream,
        mut previous: TcpStream,
        deadline: Instant,
    ) -> Result<(Link, Link)> {
        let (rank, size) = (self.topology.rank, self.topology.size);
        let local_ranks = self.topology.local_ranks();
        let [has_next, has_previous] =
            [(rank + 1) % size, (rank + size - 1) % size].map(|rank| local_ranks.contains(&rank));
        // Offers do not wait, so that no cycle of ranks waits for each other.
        let listener = match has_previous {
            true => {
                let listener = listen().ok();
                let message = offer_message(listener.as_ref().map(|(_, offer)| *offer));
                previous.write_all(&message).map_err(lost)?;
                listener
            }
            false => None,
        };
        let mut connected = None;
        if has_next {
            let mut message = [0; OFFER_BYTES];
            self.read_answer(&mut next, &mut message, deadline)?;
            connected = parse_offer(&message).and_then(|offer| connect(offer).ok());
            next.write_all(&[u8::from(connected.is_some())]).map_err(lost)?;
        }
        let mut accepted = None;
        if has_previous {
            let mut answer = [0];
            self.read_answer(&mut previous, &mut answer, deadline)?;
            if let (Some((listener, (_, token))), [1]) = (listener, answer) {
                accepted = Some(self.accept(&listener, token, deadline)?);
            }
        }
        let next = connected.map_or(Link::Tcp(next), Link::Unix);
        Ok((next, accepted.map_or(Link::Tcp(previous), Link::Unix)))
    }

    fn read_answer(
        &self,
        stream: &mut TcpStream,
        bytes: &mut [u8],
        deadline: Instant,
    ) -> Result<()> {
        Ok(self.identity.read_interruptibly(stream, bytes, deadline, self.stop)?.map_err(lost)?)
    }

    /// Accepts the connection that sends the token. Closes all others.
    fn accept(
        &self,
        listener: &UnixListener,
        token: [u8; TOKEN_BYTES],
        deadline: Instant,
    ) -> Result<UnixStream> {
        // The neighbor has connected before its answer, so this does not wait.
        while Instant::now() < deadline {
            check_interrupt(self.stop)?;
            let (mut stream, _) = listener.accept().map_err(lost)?;
            let mut received = [0; TOKEN_BYTES];
            let read = stream
                .set_read_timeout(Some(TOKEN_TIMEOUT))
                .and_then(|()| stream.read_exact(&mut received));
            if read.is_ok() && received == token {
                return Ok(stream);
            }
        }
        Err(lost(io::ErrorKind::TimedOut.into()).into())
    }
}

fn listen() -> io::Result<(UnixListener, Offer)> {
    let (name, token) = (nonce()?, nonce()?);
    let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?)?;
    listener.set_nonblocking(true)?;
    Ok((listener, (name, token)))
}

fn connect((name, token): Offer) -> io::Result<UnixStream> {
    let mut stream = UnixStream::connect_addr(&SocketAddr::from_abstract_name(name)?)?;
    stream.write_all(&token)?;
    Ok(stream)
}

fn offer_message(offer: Option<Offer>) -> [u8; OFFER_BYTES] {
    let mut message = [0; OFFER_BYTES];
    if let Some((name, token)) = offer {
        message[0] = 1;
        message[1..=TOKEN_BYTES].copy_from_slice(&name);
        message[1 + TOKEN_BYTES..].copy_from_slice(&token);
    }
    message
}

fn parse_offer(message: &[u8; OFFER_BYTES]) -> Option<Offer> {
    let (name, token) = message.split_first()?.1.split_first_chunk()?;
    (message[0] == 1).then_some((*name, token.try_into().ok()?))
}

fn lost(error: io::Error) -> Infrastructure {
    Infrastructure(format!("lost the connection to a neighbor during the rendezvous: {error}"))
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::super::super::Topology;
    use super::super::super::handshake::{Fingerprint, RankIdentity};
    use super::*;
    use crate::stop::StopSignal;

    const SECONDS: Duration = Duration::from_secs(20);

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (stream, listener.accept().unwrap().0)
    }

    /// Rank 0 of two in a pod. The test plays the other rank on the connections that it gets: the
    /// one to rank 1, and the one from rank 1.
    fn rank_0(play: impl FnOnce(TcpStream, TcpStream)) -> Result<(Link, Link)> {
        let stop = StopSignal::default();
        let identity = RankIdentity {
            secret: vec![],
            attempt: 0,
            rank: 0,
            world_size: 2,
            fingerprint: Fingerprint::default(),
            port: 0,
        };
        let topology = Topology {
            rank: 0,
            size: 2,
            local_rank: 0,
            local_size: 2,
            cross_rank: 0,
            cross_size: 1,
        };
        let deadline = Instant::now() + SECONDS;
        let participant = Participant {
            topology,
            identity,
            rendezvous: "",
            stop: &stop,
            deadline,
            timeout: SECONDS,
        };
        let ((next, to), (previous, from)) = (pair(), pair());
        std::thread::scope(|scope| {
            let links = scope.spawn(move || participant.prefer_unix(next, previous, deadline));
            play(to, from);
            links.join().unwrap()
        })
    }

    fn read_offer(stream: &mut TcpStream) -> Option<Offer> {
        let mut message = [0; OFFER_BYTES];
        stream.read_exact(&mut message).unwrap();
        parse_offer(&message)
    }

    #[test]
    fn ranks_without_a_unix_socket_stay_with_tcp() {
        let links = rank_0(|mut to, mut from| {
            // Rank 1 listens nowhere, and cannot connect.
            to.write_all(&offer_message(None)).unwrap();
            let mut answer = [7];
            to.read_exact(&mut answer).unwrap();
            assert_eq!(answer, [0]);
            assert!(read_offer(&mut from).is_some());
            from.write_all(&[0]).unwrap();
        });
        assert!(matches!(links.unwrap(), (Link::Tcp(_), Link::Tcp(_))));
    }

    #[test]
    fn names_of_another_network_are_declined() {
        let links = rank_0(|mut to, mut from| {
            to.write_all(&offer_message(Some((nonce().unwrap(), nonce().unwrap())))).unwrap();
            let mut answer = [7];
            to.read_exact(&mut answer).unwrap();
            assert_eq!(answer, [0]);
            read_offer(&mut from);
            from.write_all(&[0]).unwrap();
        });
        assert!(matches!(links.unwrap(), (Link::Tcp(_), Link::Tcp(_))));
    }

    #[test]
    fn strangers_without_the_token_are_closed() {
        let mut stranger = None;
        let links = rank_0(|mut to, mut from| {
            let (listener, offer) = listen().unwrap();
            to.write_all(&offer_message(Some(offer))).unwrap();
            let (name, token) = read_offer(&mut from).unwrap();
            stranger = connect((name, nonce().unwrap())).ok();
            let mut own = connect((name, token)).unwrap();
            own.write_all(b"from the previous rank").unwrap();
            from.write_all(&[1]).unwrap();
            let mut answer = [7];
            to.read_exact(&mut answer).unwrap();
            assert_eq!(answer, [1]);
            listener.set_nonblocking(false).unwrap();
            let (mut next, _) = listener.accept().unwrap();
            let mut received = [0; TOKEN_BYTES];
            next.read_exact(&mut received).unwrap();
            assert_eq!(received, offer.1);
        });
        let (next, mut previous) = links.unwrap();
        assert!(matches!(next, Link::Unix(_)));
        let mut text = [0; 22];
        previous.read_exact(&mut text).unwrap();
        assert_eq!(&text, b"from the previous rank");
        let closed = stranger.unwrap().read(&mut [0]);
        assert!(matches!(closed, Ok(0) | Err(_)), "{closed:?}");
    }

    #[test]
    fn neighbors_that_exit_end_the_wait() {
        let error = rank_0(|to, from| drop((to, from))).unwrap_err().to_string();
        assert!(error.starts_with("lost the connection to a neighbor"), "{error}");
    }
}

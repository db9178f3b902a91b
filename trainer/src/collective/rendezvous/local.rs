//! Unix sockets and shared memory between neighbors of the ring that are in the same pod.
//!
//! Neighbors agree over their authenticated TCP connection:
//!
//! | listener sends | connecting rank sends |
//! |---|---|
//! | offer: whether it listens, name, token | |
//! | | over the Unix socket: token, with the file of the shared memory if it could be created |
//! | | answer: whether it has connected |
//! | whether it has mapped the memory | |
//!
//! The name is in the abstract namespace of the network, so no file must be created or deleted.
//! Other processes can see the name, but not the token. Without a Unix socket, both neighbors stay
//! with TCP; without shared memory, they use the Unix socket.

use std::io::{self, IoSlice, IoSliceMut, Write as _};
use std::mem::MaybeUninit;
use std::net::TcpStream;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::Instant;

use rustix::cmsg_space;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recvmsg,
    sendmsg, socket_with,
};

use super::super::handshake::{check_interrupt, nonce};
use super::super::link::Link;
use super::super::pipe::{PipeReceiver, PipeSender};
use super::Participant;
use crate::Result;
use crate::error::Infrastructure;

/// Length of a name and of a token.
const TOKEN_BYTES: usize = 32;
const OFFER_BYTES: usize = 1 + 2 * TOKEN_BYTES;

/// Name and token of a listener.
type Offer = ([u8; TOKEN_BYTES], [u8; TOKEN_BYTES]);

impl Participant<'_> {
    /// Replaces the connections to neighbors in the same pod by shared memory or Unix sockets. All
    /// neighbors exchange offers and answers, also in different pods.
    ///
    /// # Errors
    ///
    /// Fails if a neighbor exits, does not answer until the deadline, or if `stop` is set.
    pub(super) fn prefer_local(
        &self,
        mut next: TcpStream,
        mut previous: TcpStream,
        deadline: Instant,
    ) -> Result<(Link, Link)> {
        let (rank, size) = (self.topology.rank, self.topology.size);
        let (next_rank, previous_rank) = ((rank + 1) % size, (rank + size - 1) % size);
        let is_local = |rank| self.topology.local_ranks().contains(&rank);
        // Offers do not wait, so that no cycle of ranks waits for each other.
        let listener = if is_local(previous_rank) { listen().ok() } else { None };
        let message = offer_message(listener.as_ref().map(|(_, offer)| *offer));
        previous.write_all(&message).map_err(|error| lost(previous_rank, &error))?;

        let mut message = [0; OFFER_BYTES];
        self.read_of_neighbor(&mut next, next_rank, &mut message, deadline)?;
        let offer = parse_offer(&message).filter(|_| is_local(next_rank));
        let connected = offer.and_then(|offer| accept_offer(offer).ok());
        let answer = [u8::from(connected.is_some())];
        next.write_all(&answer).map_err(|error| lost(next_rank, &error))?;

        let mut answer = [0];
        self.read_of_neighbor(&mut previous, previous_rank, &mut answer, deadline)?;
        let accepted = match (listener, answer) {
            (Some((listener, (_, token))), [1]) => {
                Some(accept(&listener, token).map_err(|error| lost(previous_rank, &error))?)
            }
            _ => None,
        };
        let is_mapped = [u8::from(matches!(accepted, Some(Link::Receiver(_))))];
        previous.write_all(&is_mapped).map_err(|error| lost(previous_rank, &error))?;

        let mut is_mapped = [0];
        self.read_of_neighbor(&mut next, next_rank, &mut is_mapped, deadline)?;
        check_interrupt(self.stop)?;
        let next = match connected {
            Some(Link::Sender(pipe)) if is_mapped == [0] => Link::Unix(pipe.into_socket()),
            Some(link) => link,
            None => Link::Tcp(next),
        };
        Ok((next, accepted.unwrap_or(Link::Tcp(previous))))
    }

    fn read_of_neighbor(
        &self,
        stream: &mut TcpStream,
        rank: usize,
        bytes: &mut [u8],
        deadline: Instant,
    ) -> Result<()> {
        let read = self.identity.read_interruptibly(stream, bytes, deadline, self.stop)?;
        Ok(read.map_err(|error| lost(rank, &error))?)
    }
}

fn listen() -> io::Result<(UnixListener, Offer)> {
    let (name, token) = (nonce()?, nonce()?);
    let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?)?;
    listener.set_nonblocking(true)?;
    Ok((listener, (name, token)))
}

/// Returns the connection that has sent the token. Closes all others. The neighbor has connected
/// and sent its token before its answer, so this does not wait for it.
fn accept(listener: &UnixListener, token: [u8; TOKEN_BYTES]) -> io::Result<Link> {
    loop {
        let (socket, _) = listener.accept()?;
        socket.set_nonblocking(true)?;
        if let Ok((received, memory)) = receive_token(&socket)
            && received == token
        {
            let opened = match memory {
                Some(memory) => PipeReceiver::open(socket, &memory),
                None => Err(socket),
            };
            return Ok(opened.map_or_else(Link::Unix, Link::Receiver));
        }
    }
}

/// Connects to the listener of an offer and sends the token. Fails instead of waiting, so that
/// other processes that connect to the name cannot block the ranks.
fn accept_offer((name, token): Offer) -> io::Result<Link> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new_abstract_name(&name)?)?;
    match PipeSender::create(UnixStream::from(socket)) {
        Ok((pipe, memory)) => {
            send_token(pipe.socket(), token, Some(&memory))?;
            Ok(Link::Sender(pipe))
        }
        Err(socket) => {
            send_token(&socket, token, None)?;
            Ok(Link::Unix(socket))
        }
    }
}

fn send_token(
    socket: &UnixStream,
    token: [u8; TOKEN_BYTES],
    memory: Option<&OwnedFd>,
) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let files = memory.map(|memory| [memory.as_fd()]);
    if let Some(files) = &files {
        control.push(SendAncillaryMessage::ScmRights(files));
    }
    match sendmsg(socket, &[IoSlice::new(&token)], &mut control, SendFlags::NOSIGNAL)? {
        TOKEN_BYTES => Ok(()),
        _ => Err(io::ErrorKind::WriteZero.into()),
    }
}

/// Receives a token, with the file of shared memory if the neighbor sent one and the system passed
/// it, which it does not if this process has too many files.
fn receive_token(socket: &UnixStream) -> io::Result<([u8; TOKEN_BYTES], Option<OwnedFd>)> {
    let mut token = [0; TOKEN_BYTES];
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let slices = &mut [IoSliceMut::new(&mut token)];
    if recvmsg(socket, slices, &mut control, RecvFlags::CMSG_CLOEXEC)?.bytes != TOKEN_BYTES {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let files = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(files) => Some(files),
        _ => None,
    });
    let memory = files.flatten().next();
    Ok((token, memory))
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

fn lost(rank: usize, error: &io::Error) -> Infrastructure {
    let why = match error.kind() {
        io::ErrorKind::TimedOut => "it did not answer in time".to_owned(),
        _ => error.to_string(),
    };
    Infrastructure(format!("cannot agree with rank {rank} on a connection: {why}"))
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::net::TcpListener;
    use std::time::Duration;

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
            let links = scope.spawn(move || participant.prefer_local(next, previous, deadline));
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
            to.write_all(&[0]).unwrap();
        });
        assert!(matches!(links.unwrap(), (Link::Tcp(_), Link::Tcp(_))));
    }

    #[test]
    fn unreachable_names_are_declined() {
        let links = rank_0(|mut to, mut from| {
            to.write_all(&offer_message(Some((nonce().unwrap(), nonce().unwrap())))).unwrap();
            let mut answer = [7];
            to.read_exact(&mut answer).unwrap();
            assert_eq!(answer, [0]);
            read_offer(&mut from);
            from.write_all(&[0]).unwrap();
            to.write_all(&[0]).unwrap();
        });
        assert!(matches!(links.unwrap(), (Link::Tcp(_), Link::Tcp(_))));
    }

    #[test]
    fn strangers_without_the_token_are_closed() {
        let mut strangers = vec![];
        let links = rank_0(|mut to, mut from| {
            let (listener, offer) = listen().unwrap();
            to.write_all(&offer_message(Some(offer))).unwrap();
            let (name, token) = read_offer(&mut from).unwrap();
            // One with a wrong token, one that is silent.
            let address = SocketAddr::from_abstract_name(name).unwrap();
            strangers.extend([(), ()].map(|()| UnixStream::connect_addr(&address).unwrap()));
            send_token(&strangers[0], nonce().unwrap(), None).unwrap();
            let mut previous = accept_offer((name, token)).unwrap();
            previous.write_all(b"from the previous rank").unwrap();
            from.write_all(&[1]).unwrap();
            let mut answer = [7];
            to.read_exact(&mut answer).unwrap();
            assert_eq!(answer, [1]);
            accept(&listener, offer.1).unwrap();
            to.write_all(&[1]).unwrap();
            from.read_exact(&mut answer).unwrap();
            assert_eq!(answer, [1]);
        });
        let (next, mut previous) = links.unwrap();
        assert!(matches!(next, Link::Sender(_)));
        let mut text = [0; 22];
        previous.read_exact(&mut text).unwrap();
        assert_eq!(&text, b"from the previous rank");
        for stranger in strangers {
            stranger.set_nonblocking(true).unwrap();
            let read = (&stranger).read(&mut [0]).map_err(|error| error.kind());
            assert!(matches!(read, Ok(0) | Err(io::ErrorKind::ConnectionReset)), "{read:?}");
        }
    }

    #[test]
    fn neighbors_without_shared_memory_use_the_socket() {
        let links = rank_0(|mut to, mut from| {
            to.write_all(&offer_message(None)).unwrap();
            let (name, token) = read_offer(&mut from).unwrap();
            let address = SocketAddr::from_abstract_name(name).unwrap();
            let mut previous = UnixStream::connect_addr(&address).unwrap();
            send_token(&previous, token, None).unwrap();
            previous.write_all(b"from the previous rank").unwrap();
            from.write_all(&[1]).unwrap();
            to.read_exact(&mut [0]).unwrap();
            to.write_all(&[0]).unwrap();
            let mut is_mapped = [7];
            from.read_exact(&mut is_mapped).unwrap();
            assert_eq!(is_mapped, [0]);
        });
        let (_, mut previous) = links.unwrap();
        assert!(matches!(previous, Link::Unix(_)));
        let mut text = [0; 22];
        previous.read_exact(&mut text).unwrap();
        assert_eq!(&text, b"from the previous rank");
    }

    /// Launchers may describe one pod differently to its ranks.
    #[test]
    fn offers_that_are_declined_leave_tcp() {
        let links = rank_0(|mut to, mut from| {
            let (listener, offer) = listen().unwrap();
            to.write_all(&offer_message(Some(offer))).unwrap();
            let mut answer = [7];
            to.read_exact(&mut answer).unwrap();
            assert_eq!(answer, [1]);
            accept(&listener, offer.1).unwrap();
            assert!(read_offer(&mut from).is_some());
            from.write_all(&[0]).unwrap();
            to.write_all(&[1]).unwrap();
        });
        assert!(matches!(links.unwrap(), (Link::Sender(_), Link::Tcp(_))));
    }

    #[test]
    fn memory_that_the_neighbor_cannot_map_is_unused() {
        let links = rank_0(|mut to, mut from| {
            let (listener, offer) = listen().unwrap();
            to.write_all(&offer_message(Some(offer))).unwrap();
            to.read_exact(&mut [0]).unwrap();
            accept(&listener, offer.1).unwrap();
            read_offer(&mut from);
            from.write_all(&[0]).unwrap();
            to.write_all(&[0]).unwrap();
        });
        assert!(matches!(links.unwrap(), (Link::Unix(_), Link::Tcp(_))));
    }

    #[test]
    fn neighbors_that_exit_end_the_wait() {
        let error = rank_0(|to, from| drop((to, from))).unwrap_err().to_string();
        assert!(error.starts_with("cannot agree with rank 1 on a connection: "), "{error}");
    }
}

//! Sums over plain connections: rank 0 adds up in the order of ranks and sends the sum to all.
//!
//! Every message begins with what it is, its number and its length, so that ranks that do different
//! things are told so. The first failure closes all connections, by which the others learn of it.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::ops::AddAssign;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;

use super::Collective;
use crate::Result;
use crate::error::{Infrastructure, PeerFailed};

/// Bytes that are converted at a time.
const CHUNK_BYTES: usize = 64 << 10;
/// A silent peer is asked after this time whether it is there.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(10);
/// The pause between two such questions.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
/// Questions without an answer after which a peer is gone.
const KEEPALIVE_COUNT: u32 = 6;
/// How long a peer may take nothing of what is sent: longer than any step of a rank that is well.
const UNTAKEN_MAX: Duration = Duration::from_secs(600);

/// A gang's connections.
#[derive(Debug)]
pub(super) struct Tcp {
    rank: usize,
    size: usize,
    /// None once something has failed.
    links: Mutex<Option<Links>>,
}

#[derive(Debug)]
struct Links {
    /// On rank 0 those of all others in order, elsewhere that of rank 0.
    peers: Vec<Peer>,
    /// The number of the next message.
    next: u32,
}

#[derive(Debug)]
struct Peer {
    rank: usize,
    stream: TcpStream,
}

/// What a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Kind {
    SumF32 = 1,
    SumF64 = 2,
    Gather = 3,
}

/// What goes before each message: kind, number, length.
const HEADER_BYTES: usize = 16;

impl Tcp {
    /// `streams` are on rank 0 those of ranks 1, 2, ..., elsewhere that of rank 0.
    ///
    /// # Errors
    ///
    /// A stream is of no use.
    pub(super) fn new(rank: usize, size: usize, streams: Vec<TcpStream>) -> Result<Self> {
        let first = usize::from(rank == 0);
        let mut peers = vec![];
        for (idx, stream) in streams.into_iter().enumerate() {
            let set = configure(&stream);
            set.map_err(|error| Infrastructure(format!("a connection is of no use: {error}")))?;
            peers.push(Peer { rank: first + idx, stream });
        }
        Ok(Self { rank, size, links: Mutex::new(Some(Links { peers, next: 0 })) })
    }

    fn with_links<T>(&self, act: impl FnOnce(&mut Links) -> Result<T>) -> Result<T> {
        let mut links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(open) = links.as_mut() else {
            return Err(PeerFailed("the gang has failed before".into()).into());
        };
        let done = act(open);
        match done {
            Ok(_) => open.next = open.next.wrapping_add(1),
            // A collective that fails is final.
            Err(_) => *links = None,
        }
        done
    }

    fn sum<T: Summed>(&self, kind: Kind, values: &mut [T]) -> Result<()> {
        let length = (values.len() * T::BYTES) as u64;
        self.with_links(|links| {
            if self.rank > 0 {
                links.each(|peer, next| {
                    peer.send_header(kind, next, length)?;
                    peer.write_values(values)
                })?;
            } else {
                links.each(|peer, next| {
                    peer.expect(kind, next, Some(length))?;
                    peer.read_values(values, |value, other| *value += other)
                })?;
            }
            links.each(|peer, next| {
                if self.rank == 0 {
                    peer.send_header(kind, next, length)?;
                    return peer.write_values(values);
                }
                peer.expect(kind, next, Some(length))?;
                peer.read_values(values, |value, sum| *value = sum)
            })
        })
    }
}

impl Collective for Tcp {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn sum_f32(&self, values: &mut [f32]) -> Result<()> {
        self.sum(Kind::SumF32, values)
    }

    fn sum_f64(&self, values: &mut [f64]) -> Result<()> {
        self.sum(Kind::SumF64, values)
    }

    fn gather(&self, mine: Bytes) -> Result<Vec<Bytes>> {
        self.with_links(|links| {
            let mut all = vec![];
            if self.rank > 0 {
                links.each(|peer, next| peer.send(Kind::Gather, next, &mine))?;
                links.each(|peer, next| {
                    for _ in 0..self.size {
                        all.push(peer.receive(Kind::Gather, next)?);
                    }
                    Ok(())
                })?;
                return Ok(all);
            }
            all.push(mine);
            links.each(|peer, next| {
                all.push(peer.receive(Kind::Gather, next)?);
                Ok(())
            })?;
            links.each(|peer, next| {
                all.iter().try_for_each(|said| peer.send(Kind::Gather, next, said))
            })?;
            Ok(all)
        })
    }
}

impl Links {
    fn each(&mut self, mut act: impl FnMut(&mut Peer, u32) -> Result<()>) -> Result<()> {
        let next = self.next;
        self.peers.iter_mut().try_for_each(|peer| act(peer, next))
    }
}

impl Peer {
    fn send(&mut self, kind: Kind, number: u32, bytes: &[u8]) -> Result<()> {
        self.send_header(kind, number, bytes.len() as u64)?;
        let sent = self.stream.write_all(bytes);
        sent.map_err(|error| self.gone(&error))
    }

    fn receive(&mut self, kind: Kind, number: u32) -> Result<Bytes> {
        let length = self.expect(kind, number, None)?;
        let mut bytes = vec![];
        let read = Read::by_ref(&mut self.stream).take(length).read_to_end(&mut bytes);
        read.map_err(|error| self.gone(&error))?;
        match bytes.len() as u64 == length {
            true => Ok(bytes.into()),
            false => Err(self.gone(&io::ErrorKind::UnexpectedEof.into())),
        }
    }

    fn send_header(&mut self, kind: Kind, number: u32, length: u64) -> Result<()> {
        let mut header = [0; HEADER_BYTES];
        header[0] = kind as u8;
        header[4..8].copy_from_slice(&number.to_le_bytes());
        header[8..].copy_from_slice(&length.to_le_bytes());
        self.stream.write_all(&header).map_err(|error| self.gone(&error))
    }

    /// Reads a header; gives the length.
    fn expect(&mut self, kind: Kind, number: u32, length: Option<u64>) -> Result<u64> {
        let mut header = [0; HEADER_BYTES];
        self.stream.read_exact(&mut header).map_err(|error| self.gone(&error))?;
        let mut wanted = header;
        wanted[0] = kind as u8;
        wanted[4..8].copy_from_slice(&number.to_le_bytes());
        if let Some(length) = length {
            wanted[8..].copy_from_slice(&length.to_le_bytes());
        }
        if header != wanted {
            return Err(format!(
                "rank {} does something else than this one: the program must do the same on all \
                 ranks",
                self.rank
            )
            .into());
        }
        let mut length = [0; 8];
        length.copy_from_slice(&header[8..]);
        Ok(u64::from_le_bytes(length))
    }

    fn write_values<T: Summed>(&mut self, values: &[T]) -> Result<()> {
        let mut chunk = Vec::with_capacity(CHUNK_BYTES);
        for part in values.chunks(CHUNK_BYTES / T::BYTES) {
            chunk.clear();
            part.iter().for_each(|value| value.put(&mut chunk));
            self.stream.write_all(&chunk).map_err(|error| self.gone(&error))?;
        }
        Ok(())
    }

    fn read_values<T: Summed>(&mut self, values: &mut [T], take: impl Fn(&mut T, T)) -> Result<()> {
        let mut chunk = vec![0; CHUNK_BYTES];
        for part in values.chunks_mut(CHUNK_BYTES / T::BYTES) {
            let bytes = &mut chunk[..part.len() * T::BYTES];
            self.stream.read_exact(bytes).map_err(|error| self.gone(&error))?;
            for (value, bytes) in part.iter_mut().zip(bytes.chunks_exact(T::BYTES)) {
                take(value, T::read(bytes));
            }
        }
        Ok(())
    }

    fn gone(&self, error: &io::Error) -> crate::Error {
        let why = match error.kind() {
            io::ErrorKind::UnexpectedEof => "it has closed its connection".into(),
            _ => error.to_string(),
        };
        PeerFailed(format!("rank {} is gone: {why}", self.rank)).into()
    }
}

/// A number that is added up.
trait Summed: Copy + AddAssign {
    const BYTES: usize;
    fn put(self, to: &mut Vec<u8>);
    /// Of exactly [`Summed::BYTES`].
    fn read(bytes: &[u8]) -> Self;
}

macro_rules! summed {
    ($number:ty) => {
        impl Summed for $number {
            const BYTES: usize = size_of::<$number>();

            fn put(self, to: &mut Vec<u8>) {
                to.extend_from_slice(&self.to_le_bytes());
            }

            fn read(bytes: &[u8]) -> Self {
                let mut own = [0; size_of::<$number>()];
                own.copy_from_slice(bytes);
                Self::from_le_bytes(own)
            }
        }
    };
}

summed!(f32);
summed!(f64);

/// From a connection that is being made to one that is used: it may be silent for long, but not
/// dead.
fn configure(stream: &TcpStream) -> io::Result<()> {
    use rustix::net::sockopt;
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(None)?;
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(stream, KEEPALIVE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(stream, KEEPALIVE_COUNT)?;
    let untaken = u32::try_from(UNTAKEN_MAX.as_millis()).unwrap_or(u32::MAX);
    sockopt::set_tcp_user_timeout(stream, untaken)?;
    Ok(())
}

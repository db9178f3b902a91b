//! What is small goes over one rank: each tells it, and it tells all what each said.

use std::io::{self, Read as _, Write as _};
use std::net::TcpStream;

use bytes::Bytes;

use super::Kind;
use super::pulse::Pulse;
use super::wire::{HEADER_BYTES, configure, differs, gone, header, length};
use crate::Result;

/// Bytes that are read before this rank counts as having moved.
const PART_BYTES: u64 = 1 << 20;
/// Bytes of a length before what it is of.
const LENGTH_BYTES: usize = 8;

/// The connections of a group: at its first rank those to all others, elsewhere that to the first.
#[derive(Debug)]
pub(super) struct Hub {
    peers: Vec<Peer>,
    is_first: bool,
}

#[derive(Debug)]
struct Peer {
    rank: usize,
    stream: TcpStream,
}

impl Hub {
    /// `peers` are ranks with their connections: at the first rank all others in order, elsewhere the
    /// first.
    ///
    /// # Errors
    ///
    /// A connection is of no use.
    pub(super) fn new(is_first: bool, peers: Vec<(usize, TcpStream)>) -> Result<Self> {
        peers.iter().try_for_each(|it| configure(&it.1))?;
        let peers = peers.into_iter().map(|(rank, stream)| Peer { rank, stream }).collect();
        Ok(Self { peers, is_first })
    }

    /// What each rank gives, in their order.
    ///
    /// # Errors
    ///
    /// A rank is gone, or does something else.
    pub(super) fn gather(
        &mut self,
        kind: Kind,
        number: u32,
        mine: Bytes,
        pulse: &Pulse,
    ) -> Result<Vec<Bytes>> {
        if !self.is_first {
            let first = &mut self.peers[0];
            first.send(kind, number, &mine, pulse)?;
            let all = first.receive(kind, number, pulse)?;
            return unframed(&all).ok_or_else(|| differs(first.rank));
        }
        let mut all = vec![mine];
        for peer in &mut self.peers {
            all.push(peer.receive(kind, number, pulse)?);
        }
        // Where the first alone wants to know, the others hear that it does.
        let framed = if kind == Kind::Collect { vec![] } else { framed(&all) };
        self.peers.iter_mut().try_for_each(|peer| peer.send(kind, number, &framed, pulse))?;
        Ok(all)
    }
}

impl Peer {
    fn send(&mut self, kind: Kind, number: u32, bytes: &[u8], pulse: &Pulse) -> Result<()> {
        let header = header(kind, number, bytes.len() as u64);
        let mut slices = [io::IoSlice::new(&header), io::IoSlice::new(bytes)];
        let (mut slices, mut left) = (&mut slices[..], HEADER_BYTES + bytes.len());
        while left > 0 {
            let num = match self.stream.write_vectored(slices) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                written => written.map_err(|error| gone(self.rank, &error))?,
            };
            left -= num;
            pulse.flow();
            io::IoSlice::advance_slices(&mut slices, num);
        }
        Ok(())
    }

    fn receive(&mut self, kind: Kind, number: u32, pulse: &Pulse) -> Result<Bytes> {
        let mut found = [0; HEADER_BYTES];
        self.stream.read_exact(&mut found).map_err(|error| gone(self.rank, &error))?;
        let length = length(&found, &header(kind, number, 0), self.rank)?;
        // Memory is taken as bytes come, not as many as are announced.
        let mut bytes = vec![];
        while (bytes.len() as u64) < length {
            let room = (length - bytes.len() as u64).min(PART_BYTES);
            let part = io::Read::by_ref(&mut self.stream).take(room).read_to_end(&mut bytes);
            match part.map_err(|error| gone(self.rank, &error))? {
                0 => return Err(gone(self.rank, &io::ErrorKind::UnexpectedEof.into())),
                _ => pulse.flow(),
            }
        }
        Ok(bytes.into())
    }
}

/// All as one, each behind its length.
fn framed(all: &[Bytes]) -> Vec<u8> {
    let num_bytes = all.iter().map(|it| LENGTH_BYTES + it.len()).sum();
    let mut framed = Vec::with_capacity(num_bytes);
    for said in all {
        framed.extend_from_slice(&(said.len() as u64).to_le_bytes());
        framed.extend_from_slice(said);
    }
    framed
}

/// The parts of what was framed; `None` of anything else.
fn unframed(framed: &Bytes) -> Option<Vec<Bytes>> {
    let (mut all, mut rest) = (vec![], framed.clone());
    while !rest.is_empty() {
        let length = rest.get(..LENGTH_BYTES)?.try_into().ok().map(u64::from_le_bytes)?;
        let _ = rest.split_to(LENGTH_BYTES);
        let length = usize::try_from(length).ok().filter(|it| *it <= rest.len())?;
        all.push(rest.split_to(length));
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_framed_comes_apart_again_and_nothing_else_does() {
        let all = [Bytes::from_static(b"one"), Bytes::new(), Bytes::from_static(b"three")];
        let whole = Bytes::from(framed(&all));
        assert_eq!(unframed(&whole).unwrap(), all);
        assert_eq!(unframed(&Bytes::new()).unwrap(), Vec::<Bytes>::new());
        for cut in [1, 8, 10, 12, 19] {
            assert_eq!(unframed(&whole.slice(..whole.len() - cut)), None, "{cut}");
        }
    }
}

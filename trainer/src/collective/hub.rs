//! Small messages go through the first rank, which gathers them and sends all, or only their sums,
//! to each rank.

use std::io::{self, Read as _, Write as _};
use std::net::TcpStream;
use std::sync::Arc;

use bytes::Bytes;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::CollectiveOp;
use super::progress::ProgressState;
use super::ring::Ring;
use super::wire::{HEADER_BYTES, configure, connection_lost, header, length, mismatched_call};
use crate::Result;

/// Bytes read between two progress updates for the watchdog.
const PART_BYTES: u64 = 1 << 20;
/// Size of the length prefix of a framed message.
const LENGTH_BYTES: usize = 8;
/// Time without a message after which a rank checks whether its neighbor uses the ring instead.
const CHECK_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// Connections of a group: from the first rank to all others, or from another rank to the first.
#[derive(Debug)]
pub(super) struct Hub {
    peers: Vec<Peer>,
    is_first: bool,
}

/// A call of all ranks, in which they exchange one message each.
#[derive(Clone, Copy, Debug)]
pub(super) struct Call<'a> {
    pub(super) op: CollectiveOp,
    pub(super) number: u32,
    pub(super) progress: &'a ProgressState,
    /// Ring of the same ranks, for larger messages. If some ranks use it for this call, each of
    /// them sends to the next one, so a rank that waits here finds the message of one of them.
    pub(super) ring: Option<&'a Ring>,
}

#[derive(Debug)]
struct Peer {
    rank: usize,
    stream: Arc<TcpStream>,
}

impl Hub {
    /// Creates the hub from ranks with their connections: on the first rank all others in order,
    /// elsewhere only the first.
    ///
    /// # Errors
    ///
    /// Fails if the system rejects a socket option.
    pub(super) fn new(is_first: bool, peers: Vec<(usize, Arc<TcpStream>)>) -> Result<Self> {
        peers.iter().try_for_each(|(_, stream)| configure(stream))?;
        let peers = peers.into_iter().map(|(rank, stream)| Peer { rank, stream }).collect();
        Ok(Self { peers, is_first })
    }

    /// Gathers each rank's bytes, in rank order.
    ///
    /// # Errors
    ///
    /// Fails if another rank exited, or made a different call.
    pub(super) fn gather(&mut self, call: Call<'_>, local: Bytes) -> Result<Vec<Bytes>> {
        if !self.is_first {
            let first = &mut self.peers[0];
            first.send(call, &local)?;
            let all = first.receive(call)?;
            return unframe(&all).ok_or_else(|| mismatched_call(first.rank));
        }
        let all = self.receive_all(call, local)?;
        // For `Gather`, only the first rank needs the data; the others get an empty confirmation.
        let frame = if call.op == CollectiveOp::Gather { vec![] } else { frame(&all) };
        self.peers.iter_mut().try_for_each(|peer| peer.send(call, &frame))?;
        Ok(all)
    }

    /// Returns the sums over each rank's bytes. The first rank computes them with `sum` from all
    /// bytes in rank order, so each rank sends and receives as many bytes as it contributes.
    ///
    /// # Errors
    ///
    /// Fails if another rank exited, or made a different call.
    pub(super) fn sum(
        &mut self,
        call: Call<'_>,
        local: Bytes,
        sum: impl FnOnce(&[Bytes]) -> Result<Bytes>,
    ) -> Result<Bytes> {
        if !self.is_first {
            let first = &mut self.peers[0];
            first.send(call, &local)?;
            return first.receive(call);
        }
        let sums = sum(&self.receive_all(call, local)?)?;
        self.peers.iter_mut().try_for_each(|peer| peer.send(call, &sums))?;
        Ok(sums)
    }

    /// Receives the bytes of all other ranks on the first rank. Returns all, in rank order.
    fn receive_all(&mut self, call: Call<'_>, local: Bytes) -> Result<Vec<Bytes>> {
        let mut all = vec![local];
        for peer in &mut self.peers {
            all.push(peer.receive(call)?);
        }
        Ok(all)
    }

    /// Returns the first rank.
    pub(super) fn first_rank(&self) -> usize {
        if self.is_first { 0 } else { self.peers[0].rank }
    }
}

impl Peer {
    fn send(&mut self, call: Call<'_>, bytes: &[u8]) -> Result<()> {
        let header = header(call.op, call.number, bytes.len() as u64);
        let mut slices = [io::IoSlice::new(&header), io::IoSlice::new(bytes)];
        let (mut slices, mut left) = (&mut slices[..], HEADER_BYTES + bytes.len());
        let mut stream: &TcpStream = &self.stream;
        while left > 0 {
            let num = match stream.write_vectored(slices) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                written => written.map_err(|error| connection_lost(self.rank, &error))?,
            };
            left -= num;
            call.progress.record_transfer();
            io::IoSlice::advance_slices(&mut slices, num);
        }
        Ok(())
    }

    fn receive(&mut self, call: Call<'_>) -> Result<Bytes> {
        self.wait(call)?;
        let mut stream: &TcpStream = &self.stream;
        let mut actual = [0; HEADER_BYTES];
        stream.read_exact(&mut actual).map_err(|error| connection_lost(self.rank, &error))?;
        let length = length(&actual, &header(call.op, call.number, 0), self.rank)?;
        // Allocate as bytes arrive, not the announced length, which a faulty peer could inflate.
        let mut bytes = vec![];
        while (bytes.len() as u64) < length {
            let limit = (length - bytes.len() as u64).min(PART_BYTES);
            let part = stream.take(limit).read_to_end(&mut bytes);
            match part.map_err(|error| connection_lost(self.rank, &error))? {
                0 => return Err(connection_lost(self.rank, &io::ErrorKind::UnexpectedEof.into())),
                _ => call.progress.record_transfer(),
            }
        }
        Ok(bytes.into())
    }

    /// Waits until a message arrives or the connection fails.
    fn wait(&self, call: Call<'_>) -> Result<()> {
        let Some(ring) = call.ring else { return Ok(()) };
        loop {
            let mut fds = [PollFd::new(&self.stream, PollFlags::IN)];
            match poll(&mut fds, Some(&CHECK_INTERVAL)) {
                Ok(0) => ring.check_unused(call.number)?,
                Ok(_) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    return Err(connection_lost(self.rank, &error.into()));
                }
            }
        }
    }
}

/// Concatenates messages, each with a length prefix.
fn frame(all: &[Bytes]) -> Vec<u8> {
    let num_bytes = all.iter().map(|message| LENGTH_BYTES + message.len()).sum();
    let mut frame = Vec::with_capacity(num_bytes);
    for message in all {
        frame.extend_from_slice(&(message.len() as u64).to_le_bytes());
        frame.extend_from_slice(message);
    }
    frame
}

/// Splits framed messages; `None` if the framing is invalid.
fn unframe(frame: &Bytes) -> Option<Vec<Bytes>> {
    let (mut all, mut rest) = (vec![], frame.clone());
    while !rest.is_empty() {
        let length = rest.get(..LENGTH_BYTES)?.try_into().ok().map(u64::from_le_bytes)?;
        let _ = rest.split_to(LENGTH_BYTES);
        let length = usize::try_from(length).ok().filter(|length| *length <= rest.len())?;
        all.push(rest.split_to(length));
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn framing_round_trips_and_detects_truncation() {
        let all = [Bytes::from_static(b"one"), Bytes::new(), Bytes::from_static(b"three")];
        let complete = Bytes::from(frame(&all));
        assert_eq!(unframe(&complete).unwrap(), all);
        assert_eq!(unframe(&Bytes::new()).unwrap(), Vec::<Bytes>::new());
        for cut in [1, 8, 10, 12, 19] {
            assert_eq!(unframe(&complete.slice(..complete.len() - cut)), None, "{cut}");
        }
    }
}

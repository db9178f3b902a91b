//! Bandwidth-optimal all-reduce over a ring of connections.
//!
//! The values are divided into as many parts as there are ranks. Each part goes around the ring
//! twice. In the first pass, which starts at the rank with the part's number, each rank adds its
//! values. The second pass distributes the sum. All ranks send and receive at the same time, and
//! forward received bytes before their part is complete. See P. Patarasuk and X. Yuan, "Bandwidth
//! optimal all-reduce algorithms for clusters of workstations", 2009.
//!
//! The ranks add to a part one after the other, in an order fixed by the part's number, and the sum
//! is then copied. The result is therefore bit-identical on all ranks and across runs with the same
//! world size.

use std::io::{self, Read as _, Write as _};
use std::net::TcpStream;
use std::ops::{AddAssign, Range};

use burn::tensor::{bf16, f16};
use bytemuck::Pod;
use bytes::Bytes;
use half::slice::HalfFloatSliceExt as _;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::Kind;
use super::pulse::Pulse;
use super::wire::{HEADER_BYTES, configure, differs, gone, header, length, useless};
use crate::Result;
use crate::error::Infrastructure;

/// Size of the receive buffer for values to add, which should fit into the processor's cache.
const SCRATCH_BYTES: usize = 128 << 10;
/// Maximum number of bytes per write.
const SEND_BYTES: usize = 256 << 10;
/// Number of half-precision values converted at a time.
const CONVERTED: usize = 512;
/// Timeout of one wait for a neighbor; waits are repeated.
const WAIT: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// Element type of an all-reduce.
pub(super) trait Summed: Pod + AddAssign {
    /// Adds `remote` to `local`, element by element.
    fn add_each(local: &mut [Self], remote: &[Self]) {
        local.iter_mut().zip(remote).for_each(|(local, remote)| *local += *remote);
    }
}

impl Summed for f32 {}
impl Summed for f64 {}
impl Summed for bf16 {}

impl Summed for f16 {
    fn add_each(local: &mut [Self], remote: &[Self]) {
        // Convert in chunks: SIMD converts eight values in the time of one.
        let (mut left, mut right) = ([0.0; CONVERTED], [0.0; CONVERTED]);
        for (local, remote) in local.chunks_mut(CONVERTED).zip(remote.chunks(CONVERTED)) {
            let (left, right) = (&mut left[..local.len()], &mut right[..local.len()]);
            local.convert_to_f32_slice(left);
            remote.convert_to_f32_slice(right);
            left.iter_mut().zip(right).for_each(|(left, right)| *left += *right);
            local.convert_from_f32_slice(left);
        }
    }
}

/// Connections to the two neighbors.
#[derive(Debug)]
pub(super) struct Ring {
    rank: usize,
    size: usize,
    next: TcpStream,
    previous: TcpStream,
    scratch: Vec<f64>,
}

impl Ring {
    /// Creates the ring: `next` leads to the next rank, `previous` comes from the previous rank.
    ///
    /// # Errors
    ///
    /// Fails if the system rejects a socket option.
    pub(super) fn new(
        rank: usize,
        size: usize,
        next: TcpStream,
        previous: TcpStream,
    ) -> Result<Self> {
        for stream in [&next, &previous] {
            configure(stream)?;
            stream.set_nonblocking(true).map_err(useless)?;
        }
        let scratch = vec![0.0; SCRATCH_BYTES / size_of::<f64>()];
        Ok(Self { rank, size, next, previous, scratch })
    }

    fn next_rank(&self) -> usize {
        (self.rank + 1) % self.size
    }

    fn previous_rank(&self) -> usize {
        (self.rank + self.size - 1) % self.size
    }

    /// All-reduces `values` in place.
    ///
    /// # Errors
    ///
    /// Fails if a neighbor exited, or made a different call.
    pub(super) fn sum<T: Summed>(
        &mut self,
        kind: Kind,
        number: u32,
        values: &mut [T],
        pulse: &Pulse,
    ) -> Result<()> {
        let header = header(kind, number, size_of_val(values) as u64);
        let mut way = Way::new(self.rank, self.size, values.len(), size_of::<T>());
        let (mut header_sent, mut header_received) = (Piece::default(), Head::default());
        loop {
            let mut has_moved = self.say(&header, &mut header_sent)?;
            if header_sent.is_done(HEADER_BYTES) {
                has_moved |= self.send(bytemuck::cast_slice(values), &mut way)?;
            }
            if !header_received.is_whole() {
                has_moved |= self.hear(&mut header_received)?;
                if header_received.is_whole() && header_received.bytes != header {
                    return Err(differs(self.previous_rank()));
                }
            }
            if header_received.is_whole() {
                has_moved |= self.receive(values, &mut way)?;
            }
            if way.is_over() {
                return Ok(());
            }
            if has_moved {
                pulse.flow();
            } else {
                let has_more = !header_sent.is_done(HEADER_BYTES) || way.sendable().is_some();
                self.wait(has_more, !way.has_received())?;
            }
        }
    }

    /// Sends `local` to the next rank and returns the bytes of the previous rank. With two ranks,
    /// this is a complete gather.
    ///
    /// # Errors
    ///
    /// Fails if a neighbor exited, or made a different call.
    pub(super) fn exchange(
        &mut self,
        kind: Kind,
        number: u32,
        local: &[u8],
        pulse: &Pulse,
    ) -> Result<Bytes> {
        let header = header(kind, number, local.len() as u64);
        let (mut header_sent, mut sent) = (Piece::default(), Piece::default());
        let mut header_received = Head::default();
        let (mut remote, mut num_remote) = (vec![], None);
        loop {
            let mut has_moved = self.say(&header, &mut header_sent)?;
            if header_sent.is_done(HEADER_BYTES) && !sent.is_done(local.len()) {
                let num = self.write(&local[sent.at..])?;
                sent.at += num;
                has_moved |= num > 0;
            }
            if !header_received.is_whole() {
                has_moved |= self.hear(&mut header_received)?;
                if header_received.is_whole() {
                    num_remote =
                        Some(length(&header_received.bytes, &header, self.previous_rank())?);
                }
            }
            if let Some(num_remote) = num_remote.map(|num| num as usize)
                && remote.len() < num_remote
            {
                let from = self.previous_rank();
                let scratch: &mut [u8] = bytemuck::cast_slice_mut(&mut self.scratch);
                let room = scratch.len().min(num_remote - remote.len());
                let read = read(&mut self.previous, &mut scratch[..room]);
                let num = read.map_err(|error| gone(from, &error))?;
                remote.extend_from_slice(&scratch[..num]);
                has_moved |= num > 0;
            }
            let has_all = num_remote.is_some_and(|num| remote.len() as u64 == num);
            let has_sent = header_sent.is_done(HEADER_BYTES) && sent.is_done(local.len());
            if has_all && has_sent {
                return Ok(remote.into());
            }
            if has_moved {
                pulse.flow();
            } else {
                self.wait(!has_sent, !has_all)?;
            }
        }
    }

    fn say(&mut self, header: &[u8; HEADER_BYTES], sent: &mut Piece) -> Result<bool> {
        if sent.is_done(HEADER_BYTES) {
            return Ok(false);
        }
        let num = self.write(&header[sent.at..])?;
        sent.at += num;
        Ok(num > 0)
    }

    fn hear(&mut self, header: &mut Head) -> Result<bool> {
        let read = read(&mut self.previous, &mut header.bytes[header.at..]);
        let num = read.map_err(|error| gone(self.previous_rank(), &error))?;
        header.at += num;
        Ok(num > 0)
    }

    /// Sends as much as the connection accepts now.
    fn send(&mut self, values: &[u8], way: &mut Way) -> Result<bool> {
        let mut has_moved = false;
        while let Some(range) = way.sendable() {
            let offered = &values[range.start..range.end.min(range.start + SEND_BYTES)];
            let num = self.write(offered)?;
            way.sent(num);
            has_moved |= num > 0;
            if num < offered.len() {
                break;
            }
        }
        Ok(has_moved)
    }

    /// Receives available bytes, at most as many as fit into the cache, so that the next rank is
    /// not kept waiting.
    fn receive<T: Summed>(&mut self, values: &mut [T], way: &mut Way) -> Result<bool> {
        let Some(range) = way.receivable() else { return Ok(false) };
        let from = self.previous_rank();
        if !way.is_adding() {
            let bytes: &mut [u8] = bytemuck::cast_slice_mut(values);
            let end = range.end.min(range.start + SEND_BYTES);
            let num = read(&mut self.previous, &mut bytes[range.start..end]);
            let num = num.map_err(|error| gone(from, &error))?;
            way.received(num);
            return Ok(num > 0);
        }
        let scratch: &mut [u8] = bytemuck::cast_slice_mut(&mut self.scratch);
        let carried = way.carried;
        let room = scratch.len().min(range.len());
        let num = read(&mut self.previous, &mut scratch[carried..room]);
        let num = num.map_err(|error| gone(from, &error))?;
        let have = carried + num;
        let complete = have - have % size_of::<T>();
        let first = range.start / size_of::<T>();
        let remote: &[T] = bytemuck::cast_slice(&scratch[..complete]);
        let local = &mut values[first..first + remote.len()];
        T::add_each(local, remote);
        scratch.copy_within(complete..have, 0);
        way.carried = have - complete;
        way.received(complete);
        Ok(num > 0)
    }

    /// Writes as much as the connection accepts now.
    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        let to = self.next_rank();
        match self.next.write(bytes) {
            Ok(num) => Ok(num),
            Err(error) if is_later(&error) => Ok(0),
            Err(error) => Err(gone(to, &error)),
        }
    }

    /// Waits until a neighbor is ready or its connection fails, at most [`WAIT`].
    fn wait(&self, for_next: bool, for_previous: bool) -> Result<()> {
        let mut fds = vec![];
        if for_next {
            fds.push(PollFd::new(&self.next, PollFlags::OUT));
        }
        if for_previous {
            fds.push(PollFd::new(&self.previous, PollFlags::IN));
        }
        match poll(&mut fds, Some(&WAIT)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => {
                Err(Infrastructure(format!("cannot wait for connections: {error}")).into())
            }
        }
    }
}

/// Reads available bytes; returns 0 if there are none, and an error at the end of the stream.
fn read(stream: &mut TcpStream, bytes: &mut [u8]) -> io::Result<usize> {
    if bytes.is_empty() {
        return Ok(0);
    }
    match stream.read(bytes) {
        Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
        Ok(num) => Ok(num),
        Err(error) if is_later(&error) => Ok(0),
        Err(error) => Err(error),
    }
}

fn is_later(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// Number of bytes transferred so far.
#[derive(Debug, Default)]
struct Piece {
    at: usize,
}

impl Piece {
    fn is_done(&self, length: usize) -> bool {
        self.at == length
    }
}

/// A partially received header.
#[derive(Debug, Default)]
struct Head {
    bytes: [u8; HEADER_BYTES],
    at: usize,
}

impl Head {
    fn is_whole(&self) -> bool {
        self.at == HEADER_BYTES
    }
}

/// Progress of the parts around the ring: turn `k + 1` sends what turn `k` received.
#[derive(Debug)]
struct Way {
    rank: usize,
    size: usize,
    /// Start of each part in bytes, then the end of the last.
    bounds: Vec<usize>,
    /// Next byte to send: turn, and offset in its part.
    send: (usize, usize),
    /// Next byte to receive: turn, and offset in its part.
    receive: (usize, usize),
    /// Number of bytes of an incomplete element.
    carried: usize,
}

impl Way {
    fn new(rank: usize, size: usize, len: usize, element_bytes: usize) -> Self {
        let bounds = (0..=size).map(|part| part * len / size * element_bytes).collect();
        let mut way = Self { rank, size, bounds, send: (0, 0), receive: (0, 0), carried: 0 };
        way.skip();
        way
    }

    fn num_turns(&self) -> usize {
        2 * (self.size - 1)
    }

    /// Returns the byte range of the part that `rank` sends in turn `turn`.
    fn part(&self, rank: usize, turn: usize) -> Range<usize> {
        let part = (rank + 2 * self.size - turn % self.size) % self.size;
        self.bounds[part]..self.bounds[part + 1]
    }

    /// Returns the bytes that can be sent now, if any.
    fn sendable(&self) -> Option<Range<usize>> {
        let (turn, at) = self.send;
        if turn == self.num_turns() {
            return None;
        }
        let part = self.part(self.rank, turn);
        let ready = match turn.checked_sub(1) {
            // The part of this turn was received in the turn before.
            Some(before) if before == self.receive.0 => part.start + self.receive.1,
            Some(before) if before > self.receive.0 => part.start,
            _ => part.end,
        };
        let start = part.start + at;
        (start < ready).then_some(start..ready)
    }

    fn sent(&mut self, num: usize) {
        self.send.1 += num;
        self.skip();
    }

    /// Returns the bytes that remain to be received in this turn.
    fn receivable(&self) -> Option<Range<usize>> {
        let (turn, at) = self.receive;
        if turn == self.num_turns() {
            return None;
        }
        let part = self.part(self.rank + self.size - 1, turn);
        Some(part.start + at..part.end)
    }

    fn received(&mut self, num: usize) {
        self.receive.1 += num;
        self.skip();
    }

    /// Returns `true` in the first pass, in which received values are added.
    fn is_adding(&self) -> bool {
        self.receive.0 < self.size - 1
    }

    /// Advances past completed turns and empty parts.
    fn skip(&mut self) {
        while self.send.0 < self.num_turns()
            && self.part(self.rank, self.send.0).len() == self.send.1
        {
            self.send = (self.send.0 + 1, 0);
        }
        while self.receivable().is_some_and(|range| range.is_empty()) {
            self.receive = (self.receive.0 + 1, 0);
        }
    }

    fn has_received(&self) -> bool {
        self.receive.0 == self.num_turns()
    }

    fn is_over(&self) -> bool {
        self.has_received() && self.send.0 == self.num_turns()
    }
}

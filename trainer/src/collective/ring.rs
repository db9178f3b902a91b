//! Sums over a ring of connections, as many bytes over each as can be done with.
//!
//! The values are cut into as many parts as there are ranks. Each part goes around twice: once from
//! the rank of its number to the one before that, which each add their own, and once more, to bring
//! the sum to all. Each rank sends and receives all the time, and what was received is sent on
//! before its part is whole. See P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms
//! for clusters of workstations", 2009.
//!
//! A part is added up by one rank after the other, in an order that its number fixes, and then
//! copied: the sums are the same bits on all ranks, and again in another run of as many.

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

/// Bytes that are read before they are added: they stay in the processor's cache.
const SCRATCH_BYTES: usize = 128 << 10;
/// Bytes that are offered to a connection at once.
const SEND_BYTES: usize = 256 << 10;
/// Numbers of half precision that are converted at once.
const CONVERTED: usize = 512;
/// How long a wait for either neighbour takes before it is begun again.
const WAIT: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// A number that is added up.
pub(super) trait Summed: Pod + AddAssign {
    /// Adds each of `theirs` to one of `mine`.
    fn add_each(mine: &mut [Self], theirs: &[Self]) {
        mine.iter_mut().zip(theirs).for_each(|(mine, theirs)| *mine += *theirs);
    }
}

impl Summed for f32 {}
impl Summed for f64 {}
impl Summed for bf16 {}

impl Summed for f16 {
    fn add_each(mine: &mut [Self], theirs: &[Self]) {
        // Many at a time: one is as slow to convert as eight.
        let (mut left, mut right) = ([0.0; CONVERTED], [0.0; CONVERTED]);
        for (mine, theirs) in mine.chunks_mut(CONVERTED).zip(theirs.chunks(CONVERTED)) {
            let (left, right) = (&mut left[..mine.len()], &mut right[..mine.len()]);
            mine.convert_to_f32_slice(left);
            theirs.convert_to_f32_slice(right);
            left.iter_mut().zip(right).for_each(|(left, right)| *left += *right);
            mine.convert_from_f32_slice(left);
        }
    }
}

/// This rank's two neighbours.
#[derive(Debug)]
pub(super) struct Ring {
    rank: usize,
    size: usize,
    next: TcpStream,
    previous: TcpStream,
    scratch: Vec<f64>,
}

impl Ring {
    /// `next` leads to the rank after this one, `previous` comes from the one before.
    ///
    /// # Errors
    ///
    /// A connection is of no use.
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

    /// Replaces `values` by their sums.
    ///
    /// # Errors
    ///
    /// A neighbour is gone, or does something else.
    pub(super) fn sum<T: Summed>(
        &mut self,
        kind: Kind,
        number: u32,
        values: &mut [T],
        pulse: &Pulse,
    ) -> Result<()> {
        let header = header(kind, number, size_of_val(values) as u64);
        let mut way = Way::new(self.rank, self.size, values.len(), size_of::<T>());
        let (mut said, mut heard) = (Piece::default(), Head::default());
        loop {
            let mut has_moved = self.say(&header, &mut said)?;
            if said.is_done(HEADER_BYTES) {
                has_moved |= self.send(bytemuck::cast_slice(values), &mut way)?;
            }
            if !heard.is_whole() {
                has_moved |= self.hear(&mut heard)?;
                if heard.is_whole() && heard.bytes != header {
                    return Err(differs(self.previous_rank()));
                }
            }
            if heard.is_whole() {
                has_moved |= self.receive(values, &mut way)?;
            }
            if way.is_over() {
                return Ok(());
            }
            if has_moved {
                pulse.flow();
            } else {
                let has_more = !said.is_done(HEADER_BYTES) || way.sendable().is_some();
                self.wait(has_more, !way.has_received())?;
            }
        }
    }

    /// Gives `mine` to the next rank and takes what the one before gives: between two ranks, all
    /// that there is to say.
    ///
    /// # Errors
    ///
    /// A neighbour is gone, or does something else.
    pub(super) fn exchange(
        &mut self,
        kind: Kind,
        number: u32,
        mine: &[u8],
        pulse: &Pulse,
    ) -> Result<Bytes> {
        let header = header(kind, number, mine.len() as u64);
        let (mut said, mut sent, mut heard) = (Piece::default(), Piece::default(), Head::default());
        let (mut theirs, mut num_theirs) = (vec![], None);
        loop {
            let mut has_moved = self.say(&header, &mut said)?;
            if said.is_done(HEADER_BYTES) && !sent.is_done(mine.len()) {
                let num = self.write(&mine[sent.at..])?;
                sent.at += num;
                has_moved |= num > 0;
            }
            if !heard.is_whole() {
                has_moved |= self.hear(&mut heard)?;
                if heard.is_whole() {
                    num_theirs = Some(length(&heard.bytes, &header, self.previous_rank())?);
                }
            }
            if let Some(num_theirs) = num_theirs.map(|it| it as usize)
                && theirs.len() < num_theirs
            {
                let from = self.previous_rank();
                let scratch: &mut [u8] = bytemuck::cast_slice_mut(&mut self.scratch);
                let room = scratch.len().min(num_theirs - theirs.len());
                let read = read(&mut self.previous, &mut scratch[..room]);
                let num = read.map_err(|error| gone(from, &error))?;
                theirs.extend_from_slice(&scratch[..num]);
                has_moved |= num > 0;
            }
            let has_all = num_theirs.is_some_and(|it| theirs.len() as u64 == it);
            let has_sent = said.is_done(HEADER_BYTES) && sent.is_done(mine.len());
            if has_all && has_sent {
                return Ok(theirs.into());
            }
            if has_moved {
                pulse.flow();
            } else {
                self.wait(!has_sent, !has_all)?;
            }
        }
    }

    fn say(&mut self, header: &[u8; HEADER_BYTES], said: &mut Piece) -> Result<bool> {
        if said.is_done(HEADER_BYTES) {
            return Ok(false);
        }
        let num = self.write(&header[said.at..])?;
        said.at += num;
        Ok(num > 0)
    }

    fn hear(&mut self, heard: &mut Head) -> Result<bool> {
        let read = read(&mut self.previous, &mut heard.bytes[heard.at..]);
        let num = read.map_err(|error| gone(self.previous_rank(), &error))?;
        heard.at += num;
        Ok(num > 0)
    }

    /// Sends what can be sent now.
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

    /// Takes in what has come, but not more than a cache holds: the next rank waits for it.
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
        let whole = have - have % size_of::<T>();
        let first = range.start / size_of::<T>();
        let theirs: &[T] = bytemuck::cast_slice(&scratch[..whole]);
        let mine = &mut values[first..first + theirs.len()];
        T::add_each(mine, theirs);
        scratch.copy_within(whole..have, 0);
        way.carried = have - whole;
        way.received(whole);
        Ok(num > 0)
    }

    /// Writes what the connection takes now.
    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        let to = self.next_rank();
        match self.next.write(bytes) {
            Ok(num) => Ok(num),
            Err(error) if is_later(&error) => Ok(0),
            Err(error) => Err(gone(to, &error)),
        }
    }

    /// Waits until a neighbour takes or gives something, or is gone.
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
                Err(Infrastructure(format!("connections cannot be waited for: {error}")).into())
            }
        }
    }
}

/// Reads what is there; none is 0, an end is an error.
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

/// How much of something is done.
#[derive(Debug, Default)]
struct Piece {
    at: usize,
}

impl Piece {
    fn is_done(&self, length: usize) -> bool {
        self.at == length
    }
}

/// A header as far as it was heard.
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

/// How far the parts have come on their way around: what is sent in turn `k + 1` is what came in
/// turn `k`.
#[derive(Debug)]
struct Way {
    rank: usize,
    size: usize,
    /// Where each part begins, in bytes, and the end.
    bounds: Vec<usize>,
    /// The turn and the byte of its part to send next.
    send: (usize, usize),
    /// The turn and the byte of its part to receive next.
    receive: (usize, usize),
    /// Bytes of an element that has not come whole.
    carried: usize,
}

impl Way {
    fn new(rank: usize, size: usize, len: usize, element_bytes: usize) -> Self {
        let bounds = (0..=size).map(|it| it * len / size * element_bytes).collect();
        let mut way = Self { rank, size, bounds, send: (0, 0), receive: (0, 0), carried: 0 };
        way.skip();
        way
    }

    fn num_turns(&self) -> usize {
        2 * (self.size - 1)
    }

    /// The part that goes around the ring `turn` turns after that of `rank`.
    fn part(&self, rank: usize, turn: usize) -> Range<usize> {
        let part = (rank + 2 * self.size - turn % self.size) % self.size;
        self.bounds[part]..self.bounds[part + 1]
    }

    /// The bytes that can be sent now, if there are any.
    fn sendable(&self) -> Option<Range<usize>> {
        let (turn, at) = self.send;
        if turn == self.num_turns() {
            return None;
        }
        let part = self.part(self.rank, turn);
        let ready = match turn.checked_sub(1) {
            // It came in the turn before.
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

    /// The bytes still to come in this turn.
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

    /// Whether what comes now is added; later it is the sum.
    fn is_adding(&self) -> bool {
        self.receive.0 < self.size - 1
    }

    /// Goes on to the next turn where this one is done, and over empty parts.
    fn skip(&mut self) {
        while self.send.0 < self.num_turns()
            && self.part(self.rank, self.send.0).len() == self.send.1
        {
            self.send = (self.send.0 + 1, 0);
        }
        while self.receivable().is_some_and(|it| it.is_empty()) {
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

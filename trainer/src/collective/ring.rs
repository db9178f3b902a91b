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
//! world size. A head of few values in double precision belongs to the first part, so its values
//! are added in rank order.

use std::io::{self, IoSlice, Read as _, Write as _};
use std::ops::AddAssign;

use burn::tensor::{bf16, f16};
use bytemuck::Pod;
use bytes::Bytes;
use half::slice::HalfFloatSliceExt as _;

use super::CollectiveOp;
use super::link::Link;
use super::progress::ProgressState;
use super::wire::{HEADER_BYTES, call_number, connection_lost, header, length, mismatched_call};
use crate::Result;

mod buffer;
mod schedule;
mod wait;

pub(super) use buffer::Buffer;
use schedule::RingProgress;
use wait::NextWait;

/// Size of the receive buffer for values to add, which should fit into the processor's cache.
const SCRATCH_BYTES: usize = 128 << 10;
/// Maximum number of bytes per write.
const SEND_BYTES: usize = 256 << 10;
/// Number of half-precision values converted at a time.
const CONVERT_CHUNK: usize = 512;

/// Element type of an all-reduce.
pub(super) trait Summable: Pod + AddAssign {
    /// Adds `remote` to `local`, element by element.
    fn add_each(local: &mut [Self], remote: &[Self]) {
        local.iter_mut().zip(remote).for_each(|(local, remote)| *local += *remote);
    }
}

impl Summable for f32 {
    fn add_each(local: &mut [Self], remote: &[Self]) {
        stoker_kernels::add_each(local, remote);
    }
}

impl Summable for f64 {}
impl Summable for bf16 {}

impl Summable for f16 {
    fn add_each(local: &mut [Self], remote: &[Self]) {
        // Convert in chunks: SIMD converts eight values in the time of one.
        let (mut left, mut right) = ([0.0; CONVERT_CHUNK], [0.0; CONVERT_CHUNK]);
        for (local, remote) in local.chunks_mut(CONVERT_CHUNK).zip(remote.chunks(CONVERT_CHUNK)) {
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
    next: Link,
    previous: Link,
    scratch: Vec<f64>,
}

impl Ring {
    /// Creates the ring: `next` leads to the next rank, `previous` comes from the previous rank.
    ///
    /// # Errors
    ///
    /// Fails if the system rejects a socket option.
    pub(super) fn new(rank: usize, size: usize, next: Link, previous: Link) -> Result<Self> {
        for link in [&next, &previous] {
            link.configure()?;
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
    pub(super) fn sum<T: Summable>(
        &mut self,
        op: CollectiveOp,
        sequence: u32,
        mut values: Buffer<'_, T>,
        progress: &ProgressState,
    ) -> Result<()> {
        let (head_bytes, num_bytes) = (values.head_bytes(), values.num_bytes());
        let header = header(op, sequence, num_bytes as u64);
        let num_elements = (num_bytes - head_bytes) / size_of::<T>();
        let (rank, size) = (self.rank, self.size);
        let mut schedule = RingProgress::new(rank, size, head_bytes, num_elements, size_of::<T>());
        let (mut header_sent, mut header_received) = (Cursor::default(), PartialHeader::default());
        loop {
            let mut has_transferred =
                self.send(&header, &mut header_sent, &values, &mut schedule)?;
            if !header_received.is_complete() {
                has_transferred |= self.receive_header(&mut header_received)?;
                if header_received.is_complete() && header_received.bytes != header {
                    return Err(mismatched_call(self.previous_rank()));
                }
            }
            if header_received.is_complete() {
                has_transferred |= self.receive(&mut values, &mut schedule)?;
            }
            if schedule.is_complete() {
                return Ok(());
            }
            if has_transferred {
                progress.record_transfer();
            } else {
                let can_send = !header_sent.is_done(HEADER_BYTES) || schedule.sendable().is_some();
                let next = match () {
                    () if can_send => NextWait::Accepts,
                    () if schedule.has_sent() => NextWait::Nothing,
                    () => NextWait::Closed,
                };
                self.wait(next, !schedule.has_received())?;
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
        op: CollectiveOp,
        sequence: u32,
        local: &[u8],
        progress: &ProgressState,
    ) -> Result<Bytes> {
        let header = header(op, sequence, local.len() as u64);
        let (mut header_sent, mut sent) = (Cursor::default(), Cursor::default());
        let mut header_received = PartialHeader::default();
        let (mut remote, mut num_remote) = (vec![], None);
        loop {
            let mut has_transferred = self.send_header(&header, &mut header_sent)?;
            if header_sent.is_done(HEADER_BYTES) && !sent.is_done(local.len()) {
                let num = self.write(&local[sent.at..])?;
                sent.at += num;
                has_transferred |= num > 0;
            }
            if !header_received.is_complete() {
                has_transferred |= self.receive_header(&mut header_received)?;
                if header_received.is_complete() {
                    num_remote =
                        Some(length(&header_received.bytes, &header, self.previous_rank())?);
                }
            }
            if let Some(num_remote) = num_remote.map(|num| num as usize)
                && remote.len() < num_remote
            {
                let from = self.previous_rank();
                let scratch: &mut [u8] = bytemuck::cast_slice_mut(&mut self.scratch);
                let capacity = scratch.len().min(num_remote - remote.len());
                let read = read(&mut self.previous, &mut scratch[..capacity]);
                let num = read.map_err(|error| connection_lost(from, &error))?;
                remote.extend_from_slice(&scratch[..num]);
                has_transferred |= num > 0;
            }
            let has_all = num_remote.is_some_and(|num| remote.len() as u64 == num);
            let has_sent = header_sent.is_done(HEADER_BYTES) && sent.is_done(local.len());
            if has_all && has_sent {
                return Ok(remote.into());
            }
            if has_transferred {
                progress.record_transfer();
            } else {
                let next = if has_sent { NextWait::Nothing } else { NextWait::Accepts };
                self.wait(next, !has_all)?;
            }
        }
    }

    /// Checks that the previous rank does not use the ring for the call with this number, which
    /// this rank makes without the ring.
    ///
    /// # Errors
    ///
    /// Fails if it has sent a message for this call. A failed connection is no error here.
    pub(super) fn check_unused(&self, number: u32) -> Result<()> {
        let mut header = [0; HEADER_BYTES];
        let is_complete = self.previous.peek(&mut header);
        match is_complete && call_number(&header) == number {
            true => Err(mismatched_call(self.previous_rank())),
            false => Ok(()),
        }
    }

    fn send_header(&mut self, header: &[u8; HEADER_BYTES], sent: &mut Cursor) -> Result<bool> {
        if sent.is_done(HEADER_BYTES) {
            return Ok(false);
        }
        let num = self.write(&header[sent.at..])?;
        sent.at += num;
        Ok(num > 0)
    }

    fn receive_header(&mut self, header: &mut PartialHeader) -> Result<bool> {
        let read = read(&mut self.previous, &mut header.bytes[header.at..]);
        let num = read.map_err(|error| connection_lost(self.previous_rank(), &error))?;
        header.at += num;
        Ok(num > 0)
    }

    /// Sends as much as the connection accepts now, the header together with the first values.
    fn send<T: Summable>(
        &mut self,
        header: &[u8; HEADER_BYTES],
        header_sent: &mut Cursor,
        values: &Buffer<'_, T>,
        schedule: &mut RingProgress,
    ) -> Result<bool> {
        let mut has_transferred = false;
        loop {
            let header = &header[header_sent.at..];
            let range = schedule.sendable().unwrap_or_default();
            let range = range.start..range.end.min(range.start + SEND_BYTES);
            let mut slices = vec![IoSlice::new(header)];
            slices.extend(values.slices(range));
            let num_offered: usize = slices.iter().map(|slice| slice.len()).sum();
            if num_offered == 0 {
                return Ok(has_transferred);
            }
            let num = self.accepted(|next| next.write_vectored(&slices))?;
            let num_of_header = num.min(header.len());
            header_sent.at += num_of_header;
            schedule.sent(num - num_of_header);
            has_transferred |= num > 0;
            if num < num_offered {
                return Ok(has_transferred);
            }
        }
    }

    /// Receives available bytes, at most as many as fit into the cache, so that the next rank is
    /// not kept waiting.
    fn receive<T: Summable>(
        &mut self,
        values: &mut Buffer<'_, T>,
        schedule: &mut RingProgress,
    ) -> Result<bool> {
        let Some(range) = schedule.receivable() else { return Ok(false) };
        let from = self.previous_rank();
        if !schedule.is_adding() {
            let end = range.end.min(range.start + SEND_BYTES);
            let mut slices = values.slices_mut(range.start..end);
            let num = available(self.previous.read_vectored(&mut slices));
            let num = num.map_err(|error| connection_lost(from, &error))?;
            schedule.received(num);
            return Ok(num > 0);
        }
        let (end, element_bytes) = values.same_elements(&range);
        let scratch: &mut [u8] = bytemuck::cast_slice_mut(&mut self.scratch);
        let partial_bytes = schedule.partial_bytes;
        let capacity = scratch.len().min(end - range.start);
        let num = read(&mut self.previous, &mut scratch[partial_bytes..capacity]);
        let num = num.map_err(|error| connection_lost(from, &error))?;
        let buffered = partial_bytes + num;
        let complete = buffered - buffered % element_bytes;
        values.add(range.start, &scratch[..complete]);
        scratch.copy_within(complete..buffered, 0);
        schedule.partial_bytes = buffered - complete;
        schedule.received(complete);
        Ok(num > 0)
    }

    /// Writes as much as the connection accepts now.
    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        self.accepted(|next| next.write(bytes))
    }

    /// Returns how many bytes a write has sent, 0 if the connection accepts none now.
    fn accepted(&mut self, write: impl FnOnce(&mut Link) -> io::Result<usize>) -> Result<usize> {
        let to = self.next_rank();
        match write(&mut self.next) {
            Ok(num) => Ok(num),
            Err(error) if is_transient(&error) => Ok(0),
            Err(error) => Err(connection_lost(to, &error)),
        }
    }
}

/// Reads available bytes; returns 0 if there are none, and an error at the end of the stream.
fn read(stream: &mut Link, bytes: &mut [u8]) -> io::Result<usize> {
    if bytes.is_empty() {
        return Ok(0);
    }
    available(stream.read(bytes))
}

/// Returns how many bytes a read of at least one byte has received, 0 if none are available, and an
/// error at the end of the stream.
fn available(received: io::Result<usize>) -> io::Result<usize> {
    match received {
        Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
        Ok(num) => Ok(num),
        Err(error) if is_transient(&error) => Ok(0),
        Err(error) => Err(error),
    }
}

fn is_transient(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// Number of bytes transferred so far.
#[derive(Debug, Default)]
struct Cursor {
    at: usize,
}

impl Cursor {
    fn is_done(&self, length: usize) -> bool {
        self.at == length
    }
}

/// A partially received header.
#[derive(Debug, Default)]
struct PartialHeader {
    bytes: [u8; HEADER_BYTES],
    at: usize,
}

impl PartialHeader {
    fn is_complete(&self) -> bool {
        self.at == HEADER_BYTES
    }
}

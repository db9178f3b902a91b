//! Pipe between two processes of one machine, in memory that both share.
//!
//! The sender copies bytes into a ring buffer, and the receiver copies them out, without any system
//! call. A Unix socket is for waiting: a side that finds nothing to do announces that it sleeps,
//! and the other sends a byte to wake it. The end of the socket is the end of the pipe.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::fence;

mod memory;

use memory::{CAPACITY, Memory, Word};

/// Maximum number of bytes per call. The other side gets them when all are copied, so large pieces
/// would keep it waiting. A piece should also fit into the processor's cache.
const PIECE_BYTES: usize = 64 << 10;

/// The side that writes.
#[derive(Debug)]
pub(super) struct PipeSender(Side);

/// The side that reads.
#[derive(Debug)]
pub(super) struct PipeReceiver {
    side: Side,
    /// Whether the sender has closed its socket. Bytes may remain.
    has_ended: bool,
}

#[derive(Debug)]
struct Side {
    memory: Memory,
    socket: UnixStream,
    /// Number of bytes written or read so far by this side.
    position: u64,
}

impl PipeSender {
    /// Creates a pipe over a connected socket, and the file for the receiver.
    ///
    /// # Errors
    ///
    /// Returns the socket if the system rejects shared memory.
    pub(super) fn create(socket: UnixStream) -> Result<(Self, OwnedFd), UnixStream> {
        match Memory::create() {
            Ok((memory, file)) => Ok((Self(Side { memory, socket, position: 0 }), file)),
            Err(_) => Err(socket),
        }
    }

    pub(super) fn socket(&self) -> &UnixStream {
        &self.0.socket
    }

    /// Gives up the shared memory.
    pub(super) fn into_socket(self) -> UnixStream {
        self.0.socket
    }

    fn num_free(&self) -> io::Result<usize> {
        let num_read = self.0.memory.word(Word::Read).load(Acquire);
        let in_transit = self.0.position.checked_sub(num_read);
        let num_free = in_transit.and_then(|num| (CAPACITY as u64).checked_sub(num));
        num_free.map(|num| num as usize).ok_or_else(|| impossible(self.0.position, num_read))
    }

    /// Returns `true` if the pipe accepts bytes.
    pub(super) fn is_ready(&self) -> bool {
        self.num_free().is_ok_and(|num| num > 0)
    }

    /// Asks the receiver for a byte on the socket once it has read something. Returns `true` if
    /// the pipe accepts bytes already.
    pub(super) fn announce_sleep(&self) -> bool {
        self.0.announce_sleep(Word::SenderSleeps);
        self.is_ready()
    }

    pub(super) fn end_sleep(&mut self) {
        self.0.end_sleep(Word::SenderSleeps);
    }
}

impl Write for PipeSender {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut num_free = self.num_free()?.min(PIECE_BYTES);
        let start = self.0.position;
        for slice in slices {
            let piece = &slice[..slice.len().min(num_free)];
            self.0.memory.copy_in(self.0.position, piece);
            self.0.position += piece.len() as u64;
            num_free -= piece.len();
        }
        self.0.advance(start, Word::Written, Word::ReceiverSleeps)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl PipeReceiver {
    /// Opens the pipe of a sender, whose file came over this socket.
    ///
    /// # Errors
    ///
    /// Returns the socket if no sender created the file, or if the system rejects its use.
    pub(super) fn open(socket: UnixStream, file: &OwnedFd) -> Result<Self, UnixStream> {
        match Memory::map(file) {
            Ok(memory) => Ok(Self { side: Side { memory, socket, position: 0 }, has_ended: false }),
            Err(_) => Err(socket),
        }
    }

    pub(super) fn socket(&self) -> &UnixStream {
        &self.side.socket
    }

    fn num_available(&self) -> io::Result<usize> {
        let num_written = self.side.memory.word(Word::Written).load(Acquire);
        let num_available = num_written.checked_sub(self.side.position);
        let num_available = num_available.filter(|num| *num <= CAPACITY as u64);
        let impossible = || impossible(num_written, self.side.position);
        num_available.map(|num| num as usize).ok_or_else(impossible)
    }

    /// Returns `true` if a read does not fail for lack of bytes.
    pub(super) fn is_ready(&self) -> bool {
        self.has_ended || self.num_available().map_or(true, |num| num > 0)
    }

    /// Copies the next bytes without removing them. Returns `false` if there are not as many.
    pub(super) fn peek(&self, bytes: &mut [u8]) -> bool {
        let has_all = self.num_available().is_ok_and(|num| num >= bytes.len());
        if has_all {
            self.side.memory.copy_out(self.side.position, bytes);
        }
        has_all
    }

    /// Asks the sender for a byte on the socket once it has written something. Returns `true` if
    /// the pipe has bytes already.
    pub(super) fn announce_sleep(&self) -> bool {
        self.side.announce_sleep(Word::ReceiverSleeps);
        self.is_ready()
    }

    pub(super) fn end_sleep(&mut self) {
        self.has_ended |= self.side.end_sleep(Word::ReceiverSleeps);
    }
}

impl Read for PipeReceiver {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.read_vectored(&mut [IoSliceMut::new(bytes)])
    }

    fn read_vectored(&mut self, slices: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        // A sender that has ended wrote everything before, so this order misses nothing.
        let has_ended = self.has_ended;
        let mut num_available = self.num_available()?.min(PIECE_BYTES);
        if num_available == 0 && has_ended {
            return Ok(0);
        }
        let start = self.side.position;
        for slice in slices {
            let num = slice.len().min(num_available);
            self.side.memory.copy_out(self.side.position, &mut slice[..num]);
            self.side.position += num as u64;
            num_available -= num;
        }
        self.side.advance(start, Word::Read, Word::SenderSleeps)
    }
}

impl Side {
    /// Publishes the position of this side, and wakes the other. Returns the number of bytes since
    /// `start`.
    fn advance(&self, start: u64, own: Word, other_sleeps: Word) -> io::Result<usize> {
        if self.position == start {
            return Err(ErrorKind::WouldBlock.into());
        }
        self.memory.word(own).store(self.position, Release);
        // Either this side sees that the other sleeps, or the other sees the new position before
        // it sleeps: both write first and then read, with a fence between.
        fence(SeqCst);
        let sleeps = self.memory.word(other_sleeps);
        if sleeps.load(Relaxed) != 0 && sleeps.swap(0, Relaxed) != 0 {
            // Ignore errors: a side that has closed its socket needs no byte. If the system lacks
            // memory for the byte, the other side wakes by its timeout.
            let _ = (&self.socket).write(&[0]);
        }
        Ok((self.position - start) as usize)
    }

    fn announce_sleep(&self, own: Word) {
        self.memory.word(own).store(1, Relaxed);
        fence(SeqCst);
    }

    /// Removes bytes that woke this side. Returns `true` if the other side has closed its socket.
    fn end_sleep(&self, own: Word) -> bool {
        self.memory.word(own).store(0, Relaxed);
        let mut bytes = [0; 16];
        loop {
            match (&self.socket).read(&mut bytes) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return error.kind() != ErrorKind::WouldBlock,
            }
        }
    }
}

/// Error: the other side has published an impossible position.
fn impossible(written: u64, read: u64) -> io::Error {
    let text = format!("impossible positions in shared memory: {written} written, {read} read");
    io::Error::new(ErrorKind::InvalidData, text)
}

#[cfg(test)]
mod tests;

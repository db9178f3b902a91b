//! Stream connection between two neighbors in the ring: TCP, or within a pod a Unix socket or
//! shared memory.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use rustix::event::PollFlags;
use rustix::net::{RecvFlags, recv};

use super::pipe::{PipeReceiver, PipeSender};
use super::wire::{configure, socket_error};
use crate::Result;

#[derive(Debug)]
pub(super) enum Link {
    Tcp(TcpStream),
    /// Moves more than twice as many bytes per second as TCP over loopback.
    Unix(UnixStream),
    /// Shared memory to the next rank, twice as fast as a Unix socket.
    Sender(PipeSender),
    /// Shared memory from the previous rank.
    Receiver(PipeReceiver),
}

impl Link {
    /// Switches the connection from handshake to non-blocking operation.
    ///
    /// # Errors
    ///
    /// Fails if the system rejects a socket option.
    pub(super) fn configure(&self) -> Result<()> {
        let socket = match self {
            Self::Tcp(stream) => {
                configure(stream)?;
                return Ok(stream.set_nonblocking(true).map_err(socket_error)?);
            }
            Self::Unix(stream) => stream,
            Self::Sender(pipe) => pipe.socket(),
            Self::Receiver(pipe) => pipe.socket(),
        };
        Ok(socket.set_nonblocking(true).map_err(socket_error)?)
    }

    /// Returns another handle of the connection's socket, which can close it.
    pub(super) fn try_clone_socket(&self) -> io::Result<Self> {
        Ok(match self {
            Self::Tcp(stream) => Self::Tcp(stream.try_clone()?),
            Self::Unix(stream) => Self::Unix(stream.try_clone()?),
            Self::Sender(pipe) => Self::Unix(pipe.socket().try_clone()?),
            Self::Receiver(pipe) => Self::Unix(pipe.socket().try_clone()?),
        })
    }

    /// Closes both directions, also for clones. Bytes in shared memory can still be received.
    pub(super) fn shutdown(&self) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.shutdown(Shutdown::Both),
            Self::Unix(stream) => stream.shutdown(Shutdown::Both),
            Self::Sender(pipe) => pipe.socket().shutdown(Shutdown::Both),
            Self::Receiver(pipe) => pipe.socket().shutdown(Shutdown::Both),
        }
    }

    /// Copies the next bytes without removing them. Returns `false` if there are not as many.
    pub(super) fn peek(&self, bytes: &mut [u8]) -> bool {
        let socket = match self {
            Self::Receiver(pipe) => return pipe.peek(bytes),
            Self::Tcp(_) | Self::Unix(_) | Self::Sender(_) => self.as_fd(),
        };
        let num_bytes = bytes.len();
        recv(socket, bytes, RecvFlags::PEEK | RecvFlags::DONTWAIT)
            .is_ok_and(|(_, num)| num == num_bytes)
    }

    /// Returns `true` if [`is_ready`](Self::is_ready) applies to this connection.
    pub(super) fn is_shared(&self) -> bool {
        matches!(self, Self::Sender(_) | Self::Receiver(_))
    }

    /// Returns `true` if shared memory accepts or has bytes. Sockets need `poll`.
    pub(super) fn is_ready(&self) -> bool {
        match self {
            Self::Tcp(_) | Self::Unix(_) => false,
            Self::Sender(pipe) => pipe.is_ready(),
            Self::Receiver(pipe) => pipe.is_ready(),
        }
    }

    /// Prepares a wait with `poll`. Returns `true` if the connection is ready already.
    pub(super) fn announce_sleep(&self) -> bool {
        match self {
            Self::Tcp(_) | Self::Unix(_) => false,
            Self::Sender(pipe) => pipe.announce_sleep(),
            Self::Receiver(pipe) => pipe.announce_sleep(),
        }
    }

    /// Ends a wait.
    pub(super) fn end_sleep(&mut self) {
        match self {
            Self::Tcp(_) | Self::Unix(_) => {}
            Self::Sender(pipe) => pipe.end_sleep(),
            Self::Receiver(pipe) => pipe.end_sleep(),
        }
    }

    /// Returns the event of the socket that shows that the connection accepts bytes.
    pub(super) fn accepts_event(&self) -> PollFlags {
        match self {
            Self::Tcp(_) | Self::Unix(_) => PollFlags::OUT,
            Self::Sender(_) | Self::Receiver(_) => PollFlags::IN,
        }
    }
}

impl Read for Link {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.read(bytes),
            Self::Unix(stream) => stream.read(bytes),
            Self::Receiver(pipe) => pipe.read(bytes),
            Self::Sender(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    fn read_vectored(&mut self, slices: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.read_vectored(slices),
            Self::Unix(stream) => stream.read_vectored(slices),
            Self::Receiver(pipe) => pipe.read_vectored(slices),
            Self::Sender(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }
}

impl Write for Link {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.write(bytes),
            Self::Unix(stream) => stream.write(bytes),
            Self::Sender(pipe) => pipe.write(bytes),
            Self::Receiver(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.write_vectored(slices),
            Self::Unix(stream) => stream.write_vectored(slices),
            Self::Sender(pipe) => pipe.write_vectored(slices),
            Self::Receiver(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(stream) => stream.as_fd(),
            Self::Unix(stream) => stream.as_fd(),
            Self::Sender(pipe) => pipe.socket().as_fd(),
            Self::Receiver(pipe) => pipe.socket().as_fd(),
        }
    }
}

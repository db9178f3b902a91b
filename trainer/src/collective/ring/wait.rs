//! Waits of a rank for its neighbors in the ring.

use std::io;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::super::link::Link;
use super::super::wire::connection_lost;
use super::Ring;
use crate::Result;
use crate::error::Infrastructure;

/// Time for which a rank polls shared memory before it sleeps. With 10 us, small sums take twice as
/// long.
const SPIN: Duration = Duration::from_micros(50);
/// Timeout of one wait for a neighbor; waits are repeated.
const POLL_TIMEOUT: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// Event for which a rank waits at the connection to the next rank.
#[derive(Clone, Copy, Debug)]
pub(super) enum NextWait {
    /// The connection accepts bytes.
    Accepts,
    /// The connection fails. Bytes remain to be sent, but this rank has to receive them first.
    Closed,
    /// None, because all bytes are sent.
    Nothing,
}

impl Ring {
    /// Waits until a neighbor is ready or its connection fails, at most [`POLL_TIMEOUT`].
    ///
    /// # Errors
    ///
    /// Fails if the next rank has closed its connection before it has all bytes.
    pub(super) fn wait(&mut self, next: NextWait, for_previous: bool) -> Result<()> {
        let for_next = matches!(next, NextWait::Accepts);
        if self.spin(for_next, for_previous) {
            return Ok(());
        }
        let is_ready = (for_next && self.next.announce_sleep())
            | (for_previous && self.previous.announce_sleep());
        let polled = if is_ready { Ok(()) } else { self.poll(next, for_previous) };
        self.next.end_sleep();
        self.previous.end_sleep();
        polled
    }

    /// Waits a short time for shared memory. Returns `true` if it is ready.
    fn spin(&self, for_next: bool, for_previous: bool) -> bool {
        let next = Some(&self.next).filter(|link| for_next && link.is_shared());
        let previous = Some(&self.previous).filter(|link| for_previous && link.is_shared());
        let begin = Instant::now();
        while (next.is_some() || previous.is_some()) && begin.elapsed() < SPIN {
            if next.into_iter().chain(previous).any(Link::is_ready) {
                return true;
            }
            // The other rank may need this processor.
            std::thread::yield_now();
        }
        false
    }

    fn poll(&self, next: NextWait, for_previous: bool) -> Result<()> {
        let closed = PollFlags::RDHUP | PollFlags::HUP;
        let mut fds = vec![];
        let flags = match next {
            NextWait::Accepts => Some(self.next.accepts_event() | PollFlags::RDHUP),
            NextWait::Closed => Some(PollFlags::RDHUP),
            NextWait::Nothing => None,
        };
        fds.extend(flags.map(|flags| PollFd::new(&self.next, flags)));
        if for_previous {
            fds.push(PollFd::new(&self.previous, PollFlags::IN));
        }
        match poll(&mut fds, Some(&POLL_TIMEOUT)) {
            Ok(_) if flags.is_some() && fds[0].revents().intersects(closed) => {
                let ended = io::ErrorKind::UnexpectedEof.into();
                Err(connection_lost(self.next_rank(), &ended))
            }
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => {
                Err(Infrastructure(format!("cannot wait for connections: {error}")).into())
            }
        }
    }
}

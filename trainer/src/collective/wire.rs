//! What goes over a connection between two ranks: a header, and what it says follows.
//!
//! The header says what is done, the how-manieth it is and its length, so that ranks that do
//! different things are told so.

use std::io;
use std::net::TcpStream;
use std::time::Duration;

use super::Kind;
use crate::error::{Infrastructure, PeerFailed};

/// A silent peer is asked after this time whether it is there.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(10);
/// The pause between two such questions.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
/// Questions without an answer after which a peer is gone.
const KEEPALIVE_COUNT: u32 = 6;

/// Bytes of a header: kind, number, length.
pub(super) const HEADER_BYTES: usize = 16;

/// What goes before each message.
pub(super) fn header(kind: Kind, number: u32, length: u64) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    header[0] = kind as u8;
    header[4..8].copy_from_slice(&number.to_le_bytes());
    header[8..].copy_from_slice(&length.to_le_bytes());
    header
}

/// The length in a header that is as expected but for it.
///
/// # Errors
///
/// Rank `from` does something else.
pub(super) fn length(
    found: &[u8; HEADER_BYTES],
    expected: &[u8; HEADER_BYTES],
    from: usize,
) -> crate::Result<u64> {
    if found[..8] != expected[..8] {
        return Err(differs(from));
    }
    let mut length = [0; 8];
    length.copy_from_slice(&found[8..]);
    Ok(u64::from_le_bytes(length))
}

/// Rank `from` is at another place of the program.
pub(super) fn differs(from: usize) -> crate::Error {
    let rule = "the program must do the same on all ranks";
    format!("rank {from} does something else than this one: {rule}").into()
}

/// Rank `from` cannot be heard any more.
pub(super) fn gone(from: usize, error: &io::Error) -> crate::Error {
    let why = match error.kind() {
        io::ErrorKind::UnexpectedEof => "it has closed its connection".into(),
        _ => error.to_string(),
    };
    PeerFailed(format!("rank {from} is gone: {why}")).into()
}

/// From a connection that is being made to one that is used: it may be silent for long, but not
/// dead.
///
/// # Errors
///
/// The system refuses an option.
pub(super) fn configure(stream: &TcpStream) -> crate::Result<()> {
    Ok(set_options(stream).map_err(useless)?)
}

/// The system does not let a connection be used as it must.
pub(super) fn useless(error: io::Error) -> Infrastructure {
    Infrastructure(format!("a connection is of no use: {error}"))
}

fn set_options(stream: &TcpStream) -> io::Result<()> {
    use rustix::net::sockopt;
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(None)?;
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(stream, KEEPALIVE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(stream, KEEPALIVE_COUNT)?;
    Ok(())
}

//! Framing on a connection between two ranks: a header, then the payload.
//!
//! The header has the kind of the operation, its sequence number and the payload length. Ranks that
//! execute different operations therefore fail with a clear error.

use std::io;
use std::net::TcpStream;
use std::time::Duration;

use super::CollectiveOp;
use crate::error::{Infrastructure, PeerFailed};

/// Idle time before the first TCP keepalive probe.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(10);
/// Time between two keepalive probes.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
/// Unanswered keepalive probes after which the connection fails.
const KEEPALIVE_COUNT: u32 = 6;

/// Size of a header: kind, sequence number, length.
pub(super) const HEADER_BYTES: usize = 16;

/// Builds the header of a message.
pub(super) fn header(op: CollectiveOp, number: u32, length: u64) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    header[0] = op as u8;
    header[4..8].copy_from_slice(&number.to_le_bytes());
    header[8..].copy_from_slice(&length.to_le_bytes());
    header
}

/// Returns the sequence number in a header.
pub(super) fn call_number(header: &[u8; HEADER_BYTES]) -> u32 {
    let mut number = [0; 4];
    number.copy_from_slice(&header[4..8]);
    u32::from_le_bytes(number)
}

/// Returns the length in a header whose other fields must be as expected.
///
/// # Errors
///
/// Fails if rank `from` executes a different operation.
pub(super) fn length(
    actual: &[u8; HEADER_BYTES],
    expected: &[u8; HEADER_BYTES],
    from: usize,
) -> crate::Result<u64> {
    if actual[..8] != expected[..8] {
        return Err(mismatched_call(from));
    }
    let mut length = [0; 8];
    length.copy_from_slice(&actual[8..]);
    Ok(u64::from_le_bytes(length))
}

/// Error: rank `from` executes a different operation.
pub(super) fn mismatched_call(from: usize) -> crate::Error {
    format!(
        "rank {from} made a different collective call than this rank; the program must make the \
         same calls in the same order on all ranks"
    )
    .into()
}

/// Error: the connection to rank `from` failed.
pub(super) fn connection_lost(from: usize, error: &io::Error) -> crate::Error {
    let why = match error.kind() {
        io::ErrorKind::UnexpectedEof => "it closed its connection".into(),
        _ => error.to_string(),
    };
    PeerFailed(format!("lost the connection to rank {from}: {why}")).into()
}

/// Switches an established connection from handshake to normal operation: blocking, without
/// timeouts, with keepalive.
///
/// # Errors
///
/// Fails if the system rejects a socket option.
pub(super) fn configure(stream: &TcpStream) -> crate::Result<()> {
    Ok(set_options(stream).map_err(socket_error)?)
}

/// Error: the system rejects a socket option.
pub(super) fn socket_error(error: io::Error) -> Infrastructure {
    Infrastructure(format!("cannot configure a connection between ranks: {error}"))
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

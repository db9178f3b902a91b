//! A port that refuses connections until a test opens it.

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener};

use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, listen, socket_with};

/// A bound port of 127.0.0.1 without a listener. It stays bound, so that the kernel assigns it to
/// no other test.
#[derive(Debug)]
pub(crate) struct ClosedPort(TcpListener);

impl ClosedPort {
    pub(crate) fn new() -> Self {
        let (family, flags) = (AddressFamily::INET, SocketFlags::CLOEXEC);
        let socket = socket_with(family, SocketType::STREAM, flags, None).unwrap();
        bind(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0)).unwrap();
        Self(socket.into())
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.0.local_addr().unwrap()
    }

    /// Accepts connections from now on.
    pub(crate) fn open(self) -> TcpListener {
        listen(&self.0, 128).unwrap();
        self.0
    }
}

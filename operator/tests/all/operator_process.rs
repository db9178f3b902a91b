//! An operator process: signals, readiness and metrics.

use std::process::{Child, Command};
use std::time::Duration;

use stoker_test_cluster::wait_until;
use tokio::task::block_in_place;

use crate::setup::TestNamespace;

/// Start of a successful response.
const READY: &str = "HTTP/1.1 200";

/// An operator process, killed on drop.
pub(crate) struct Operator {
    pub(crate) child: Child,
    pub(crate) port: u16,
}

impl Operator {
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits until the operator is ready.
    pub(crate) fn wait_ready(&mut self, ns: &TestNamespace) {
        // Other tasks of this runtime may proxy the operator's requests, so they must not be
        // blocked.
        let ready = block_in_place(|| {
            wait_until("the operator is ready", || match self.readiness() {
                Ok(text) if text.starts_with(READY) => Ok(()),
                other => Err(format!("{other:?}")),
            })
        });
        if let Err(error) = ready {
            panic!("{error}: {:?}\n{}", self.child.try_wait(), ns.logs());
        }
    }

    fn readiness(&self) -> std::io::Result<String> {
        get(&format!("127.0.0.1:{}", self.port + 1), "/readyz")
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.readiness().is_ok_and(|response| response.starts_with(READY))
    }

    pub(crate) fn signal(&self, signal: &str) {
        let pid = self.pid().to_string();
        assert!(Command::new("kill").args([signal, &pid]).status().unwrap().success());
    }

    /// Kills the operator with SIGKILL.
    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub(crate) fn is_alive(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Returns the operator's metrics. Repeats a request that a busy machine answers too late.
    pub(crate) fn metrics(&self) -> String {
        let address = format!("127.0.0.1:{}", self.port + 1);
        let read = || get(&address, "/metrics").map_err(|error| error.to_string());
        let metrics = block_in_place(|| wait_until("the operator's metrics", read));
        metrics.unwrap_or_else(|error| panic!("{error}"))
    }
}

impl Drop for Operator {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Sends a GET request without a client library.
pub(crate) fn get(address: &str, path: &str) -> std::io::Result<String> {
    use std::io::{Read as _, Write as _};
    let mut stream = std::net::TcpStream::connect(address)?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(text)
}

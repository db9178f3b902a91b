//! An HTTP proxy that simulates a bad network: every n-th request fails.

use std::io::{Error, ErrorKind, Read as _, Result, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Faults of failing requests, in turn.
const FAULTS: [Fault; 3] = [Fault::Refused, Fault::Cut, Fault::AnswerLost];

/// How a request fails.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// The proxy answers with 503 and does not forward the request.
    Refused,
    /// The proxy closes the connection and does not forward the request.
    Cut,
    /// The proxy forwards the request, then closes the connection without an answer.
    AnswerLost,
}

/// A proxy on loopback. It runs until the process ends.
#[derive(Debug)]
pub(crate) struct Proxy {
    pub(crate) port: u16,
    requests: Arc<AtomicU64>,
    every: u64,
}

impl Proxy {
    /// Starts a proxy for the HTTP server at port `upstream`. Every `every`-th request fails.
    pub(crate) fn start(upstream: u16, every: u64) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let requests = Arc::new(AtomicU64::new(0));
        let counter = requests.clone();
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let counter = counter.clone();
                std::thread::spawn(move || {
                    // Ignore errors: they are further faults for the client.
                    let _ = serve(client, upstream, every, &counter);
                });
            }
        });
        Self { port, requests, every }
    }

    /// Returns the number of requests and how many of them failed.
    pub(crate) fn counts(&self) -> (u64, u64) {
        let requests = self.requests.load(Ordering::Relaxed);
        (requests, requests / self.every)
    }
}

/// Serves one request, then closes the connection.
fn serve(mut client: TcpStream, upstream: u16, every: u64, counter: &AtomicU64) -> Result<()> {
    client.set_read_timeout(Some(Duration::from_secs(60)))?;
    let Some(request) = read_request(&mut client)? else { return Ok(()) };
    let number = counter.fetch_add(1, Ordering::Relaxed) + 1;
    let is_failing = number.is_multiple_of(every);
    let fault = is_failing.then(|| FAULTS[(number / every) as usize % FAULTS.len()]);
    match fault {
        Some(Fault::Cut) => return client.shutdown(Shutdown::Both),
        Some(Fault::Refused) => {
            let answer = "HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
            return client.write_all(answer.as_bytes());
        }
        Some(Fault::AnswerLost) | None => {}
    }
    let mut server = TcpStream::connect(("127.0.0.1", upstream))?;
    server.write_all(&request)?;
    let mut answer = Vec::new();
    server.read_to_end(&mut answer)?;
    if fault.is_none() {
        client.write_all(&answer)?;
    }
    client.shutdown(Shutdown::Both)
}

/// Reads one request and adds `Connection: close`. Returns `None` if the client closed the
/// connection.
fn read_request(client: &mut TcpStream) -> Result<Option<Vec<u8>>> {
    let (mut bytes, mut buffer) = (Vec::new(), [0; 1 << 16]);
    let head_len = loop {
        if let Some(at) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            break at;
        }
        match client.read(&mut buffer)? {
            0 => return Ok(None),
            len => bytes.extend_from_slice(&buffer[..len]),
        }
    };
    let body = bytes.split_off(head_len + 4);
    let head = String::from_utf8_lossy(&bytes[..head_len]).into_owned();
    let (mut sent, mut body_len) = (String::new(), 0);
    for line in head.split("\r\n") {
        let (name, value) = line.split_once(':').unwrap_or((line, ""));
        match name.to_ascii_lowercase().as_str() {
            "connection" => continue,
            "transfer-encoding" => return Err(Error::from(ErrorKind::Unsupported)),
            "content-length" => body_len = value.trim().parse().unwrap_or(0),
            _ => {}
        }
        sent.push_str(line);
        sent.push_str("\r\n");
    }
    sent.push_str("Connection: close\r\n\r\n");
    let mut request = sent.into_bytes();
    let total = request.len() + body_len;
    request.extend_from_slice(&body);
    while request.len() < total {
        match client.read(&mut buffer)? {
            0 => return Ok(None),
            len => request.extend_from_slice(&buffer[..len]),
        }
    }
    Ok(Some(request))
}

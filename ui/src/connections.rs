//! Connections of the page: limits their number, and closes idle and stalled ones.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use rustix::net::sockopt;
use rustix::process::{Resource, getrlimit};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::timeout;

/// Delay after a failed accept, usually because of too many open files.
const ACCEPT_DELAY: Duration = Duration::from_millis(100);

/// Limits of the connections, which need no sign-in.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Maximum number of open connections. Others wait in the kernel.
    pub(crate) connections: usize,
    /// Time limit for the first byte.
    pub(crate) first: Duration,
    /// Time limit for the headers of a request, and for the next request.
    pub(crate) header: Duration,
    /// Time limit for a client that takes no byte of a response.
    pub(crate) stalled: Duration,
}

/// Limits of the page. The sessions of a shared page have a stream of live updates for each tab.
///
/// A proxy may send a form on a connection at the moment in which the page closes it, and cannot
/// know whether the form had an effect. `header` is therefore longer than the 60 s for which
/// proxies keep idle connections.
pub(crate) const LIMITS: Limits = Limits {
    connections: 4_096,
    first: Duration::from_secs(10),
    header: Duration::from_secs(75),
    stalled: Duration::from_secs(30),
};

impl Limits {
    /// Returns the same limits with fewer connections if this process may have few open files. The
    /// other half is for storages, records and the API server.
    pub(crate) fn within_open_files(self) -> Self {
        self.within(getrlimit(Resource::Nofile).current)
    }

    fn within(self, open_files: Option<u64>) -> Self {
        let half = open_files.and_then(|num| usize::try_from(num / 2).ok());
        Self { connections: half.unwrap_or(usize::MAX).clamp(1, self.connections), ..self }
    }
}

/// Serves `router` until the future is dropped. Open connections stay.
pub(crate) async fn serve(listener: TcpListener, router: Router, limits: Limits) -> Infallible {
    let connections = Arc::new(Semaphore::new(limits.connections));
    loop {
        // Ignore the error: the semaphore is never closed.
        let permit = connections.clone().acquire_owned().await.ok();
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(ACCEPT_DELAY).await;
            continue;
        };
        limit_stalls(&stream, limits.stalled);
        let service = TowerToHyperService::new(router.clone());
        tokio::spawn(async move {
            let _permit = permit;
            if !matches!(timeout(limits.first, stream.readable()).await, Ok(Ok(()))) {
                return;
            }
            let mut builder = Builder::new(TokioExecutor::new()).http1_only();
            builder.http1().timer(TokioTimer::new()).header_read_timeout(limits.header);
            // Ignore errors: the browser repeats the request or shows the failure.
            let _ = builder.serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

/// Lets the kernel end a connection whose client takes no byte for `limit`. The client's kernel
/// acknowledges probes also if its program never reads, so the connection would stay open.
fn limit_stalls(stream: &TcpStream, limit: Duration) {
    let limit = u32::try_from(limit.as_millis()).unwrap_or(u32::MAX);
    // Ignore the error: the connection has ended.
    let _ = sockopt::set_tcp_user_timeout(stream, limit);
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use axum::routing::get;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n";

    #[test]
    fn connections_leave_open_files_for_other_uses() {
        let check = |open_files: Option<u64>, expected: usize| {
            assert_eq!(LIMITS.within(open_files).connections, expected, "{open_files:?}");
        };
        check(None, 4_096);
        check(Some(1_048_576), 4_096);
        check(Some(1_024), 512);
        check(Some(1), 1);
    }

    /// Serves a small and a large page. Returns the address.
    async fn serve_pages(limits: Limits) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new()
            .route("/", get(|| async { "page" }))
            .route("/large", get(|| async { vec![0_u8; 64 << 20] }));
        tokio::spawn(serve(listener, router, limits));
        address
    }

    #[tokio::test]
    async fn silent_connections_make_room_for_others() {
        let (first, header) = (Duration::from_millis(200), Duration::from_millis(300));
        let address = serve_pages(Limits { connections: 2, first, header, ..LIMITS }).await;
        let mut silent = TcpStream::connect(address).await.unwrap();
        let mut slow = TcpStream::connect(address).await.unwrap();
        slow.write_all(&REQUEST[..9]).await.unwrap();
        let mut other = TcpStream::connect(address).await.unwrap();
        other.write_all(REQUEST).await.unwrap();
        let answers = async {
            let mut answers = [Vec::new(), Vec::new(), Vec::new()];
            for (stream, answer) in
                [&mut other, &mut silent, &mut slow].into_iter().zip(&mut answers)
            {
                // A connection may end by a reset.
                let _ = stream.read_to_end(answer).await;
            }
            answers.map(|answer| String::from_utf8_lossy(&answer).contains("page"))
        };
        let answers = timeout(Duration::from_secs(20), answers).await;
        assert_eq!(answers, Ok([true, false, false]));
    }

    #[tokio::test]
    async fn stalled_readers_make_room_for_others() {
        let stalled = Duration::from_millis(300);
        let address = serve_pages(Limits { connections: 1, stalled, ..LIMITS }).await;
        let mut reader = TcpStream::connect(address).await.unwrap();
        reader.write_all(b"GET /large HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
        let mut other = TcpStream::connect(address).await.unwrap();
        other.write_all(REQUEST).await.unwrap();
        let mut answer = Vec::new();
        let read = timeout(Duration::from_secs(20), other.read_to_end(&mut answer)).await;
        assert!(read.is_ok() && answer.ends_with(b"page"));
        drop(reader);
    }

    #[tokio::test]
    async fn connections_stay_open_between_requests() {
        let first = Duration::from_secs(1);
        let address = serve_pages(Limits { first, ..LIMITS }).await;
        let mut stream = TcpStream::connect(address).await.unwrap();
        for request in 0..2 {
            stream.write_all(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
            let mut answer = Vec::new();
            while !answer.ends_with(b"page") {
                assert_ne!(stream.read_buf(&mut answer).await.unwrap(), 0, "{request}");
            }
            if request == 0 {
                tokio::time::sleep(2 * first).await;
            }
        }
    }
}

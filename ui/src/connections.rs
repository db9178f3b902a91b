//! Connections of the page: limits their number, and closes those on which no request arrives.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

/// Delay after a failed accept, usually because of too many open files.
const ACCEPT_DELAY: Duration = Duration::from_millis(100);

/// Limits of the connections, which need no sign-in.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Maximum number of open connections. Others wait in the kernel.
    pub(crate) connections: usize,
    /// Time limit for the headers of a request, and for the first or next request.
    pub(crate) header: Duration,
}

/// Limits of the page. The sessions of a shared page have a stream of live updates for each tab.
pub(crate) const LIMITS: Limits = Limits { connections: 4_096, header: Duration::from_secs(10) };

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
        let service = TowerToHyperService::new(router.clone());
        tokio::spawn(async move {
            let mut builder = Builder::new(TokioExecutor::new()).http1_only();
            builder.http1().timer(TokioTimer::new()).header_read_timeout(limits.header);
            // Ignore errors: the browser repeats the request or shows the failure.
            let _ = builder.serve_connection(TokioIo::new(stream), service).await;
            drop(permit);
        });
    }
}

#[cfg(test)]
mod tests {
    use axum::routing::get;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpStream;

    use super::*;

    const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n";

    #[tokio::test]
    async fn silent_connections_make_room_for_others() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let limits = Limits { connections: 2, header: Duration::from_millis(200) };
        let router = Router::new().route("/", get(|| async { "page" }));
        tokio::spawn(serve(listener, router, limits));
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
        let answers = tokio::time::timeout(Duration::from_secs(20), answers).await;
        assert_eq!(answers, Ok([true, false, false]));
    }
}

//! A TCP forwarder between operators and trainers or the API server, which can be cut.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// A TCP forwarder: each connection goes to the next target that accepts it. While cut, it passes
/// no data in either direction and signals nothing to the peers.
pub(crate) struct TcpForwarder {
    pub(crate) port: u16,
    is_cut: watch::Sender<bool>,
    /// Connections with a lower number are dead.
    dead: watch::Sender<usize>,
    num_connections: Arc<AtomicUsize>,
    task: JoinHandle<()>,
}

impl Drop for TcpForwarder {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl TcpForwarder {
    pub(crate) async fn start(targets: Vec<SocketAddr>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (is_cut, cut) = watch::channel(false);
        let (dead, dead_receiver) = watch::channel(0);
        let num_connections = Arc::new(AtomicUsize::new(0));
        let num = num_connections.clone();
        let task = tokio::spawn(async move {
            loop {
                let Ok((from, _)) = listener.accept().await else { continue };
                let number = num.fetch_add(1, Ordering::Relaxed);
                let (targets, cut, mut dead) =
                    (targets.clone(), cut.clone(), dead_receiver.clone());
                tokio::spawn(async move {
                    let mut forwarding =
                        std::pin::pin!(forward_connection(from, targets, number, cut));
                    let is_dead = async { dead.wait_for(|dead| number < *dead).await.is_ok() };
                    let is_dead = tokio::select! {
                        () = &mut forwarding => false,
                        is_dead = is_dead => is_dead,
                    };
                    if is_dead {
                        // Keep the sockets open without passing any data.
                        std::future::pending().await
                    }
                });
            }
        });
        Self { port, is_cut, dead, num_connections, task }
    }

    /// Makes all connections go dead silently, like a firewall that loses its state. New ones work.
    pub(crate) fn forget_connections(&self) {
        self.dead.send_replace(self.num_connections.load(Ordering::Relaxed));
    }

    pub(crate) fn cut(&self, is_cut: bool) {
        self.is_cut.send_replace(is_cut);
    }
}

async fn forward_connection(
    mut from: TcpStream,
    targets: Vec<SocketAddr>,
    number: usize,
    cut: watch::Receiver<bool>,
) {
    if *cut.borrow() {
        // The connection hangs until the forwarder is restored, and is then closed.
        return wait_until_cut_is(cut, false).await;
    }
    for offset in 0..targets.len() {
        let target = targets[(number + offset) % targets.len()];
        let Ok(mut to) = TcpStream::connect(target).await else { continue };
        tokio::select! {
            _ = tokio::io::copy_bidirectional(&mut from, &mut to) => {}
            () = wait_until_cut_is(cut.clone(), true) => wait_until_cut_is(cut, false).await,
        }
        return;
    }
}

async fn wait_until_cut_is(mut cut: watch::Receiver<bool>, expected: bool) {
    let _ = cut.wait_for(|is_cut| *is_cut == expected).await;
}

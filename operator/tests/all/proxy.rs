//! Proxies to the API server and to report servers. Tests use them to count, delay, cut and break
//! requests.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::{Method, StatusCode};
use axum::response::Response;
use kube::Client;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;

/// When the sender of a write is killed, relative to the write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum When {
    /// Before the API server receives the write, which never arrives.
    Before,
    /// After the API server has responded, but before the sender receives the response.
    After,
    /// Before the API server receives the write, which arrives while the next operator runs.
    Late,
}

/// Delay of a late write. The next operator has read all objects by then.
pub(crate) const LATE: Duration = Duration::from_millis(1200);

/// Kills a process at its n-th write.
struct Trap {
    left: usize,
    when: When,
    pid: u32,
    /// Receives the name of the write that triggered the trap.
    sprung: oneshot::Sender<String>,
}

/// How token reviews are answered.
#[derive(Clone, Debug)]
pub(crate) enum Reviews {
    /// By the API server.
    Real,
    /// With this review status.
    Status(serde_json::Value),
    /// With this HTTP status code.
    Code(u16),
    /// Not at all.
    Hang,
}

/// A write to hold back.
struct Hold {
    /// Part of the write's path.
    path: String,
    reached: oneshot::Sender<()>,
    released: oneshot::Receiver<()>,
}

/// API server for one operator: forwards requests to the real one and counts writes.
pub(crate) struct Proxy {
    pub(crate) kubeconfig: PathBuf,
    shared: Arc<Shared>,
    task: JoinHandle<()>,
}

struct Shared {
    client: Client,
    trap: Mutex<Option<Trap>>,
    num_writes: AtomicUsize,
    /// Delay of each lease request, in milliseconds.
    lease_delay: AtomicU64,
    /// Faults of some writes, by `METHOD PATH`.
    rule: Mutex<Option<Arc<Rule>>>,
    /// Writes that a rule answered or held.
    num_ruled: AtomicUsize,
    /// Held writes that have reached the API server.
    num_released: AtomicUsize,
    reviews: Mutex<Reviews>,
    num_reviews: AtomicUsize,
    hold: Mutex<Option<Hold>>,
}

/// Fault of a write.
#[derive(Clone, Debug)]
pub(crate) enum Fault {
    /// The response has this status code, reason and message.
    Refused(u16, &'static str, &'static str),
    /// The write waits until the rule is removed, and then reaches the API server.
    Held,
}

type Rule = dyn Fn(&str) -> Option<Fault> + Send + Sync;

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Proxy {
    /// Starts a proxy and writes its kubeconfig to `folder`.
    pub(crate) async fn start(client: Client, folder: &Path) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let kubeconfig = folder.join("proxy.kubeconfig");
        let text = format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: it\n\
             clusters: [{{name: it, cluster: {{server: 'http://127.0.0.1:{port}'}}}}]\n\
             contexts: [{{name: it, context: {{cluster: it, user: it}}}}]\n\
             users: [{{name: it, user: {{}}}}]\n"
        );
        std::fs::write(&kubeconfig, text).unwrap();
        let (trap, num_writes) = (Mutex::default(), AtomicUsize::new(0));
        let lease_delay = AtomicU64::new(0);
        let shared = Arc::new(Shared {
            client,
            trap,
            num_writes,
            lease_delay,
            rule: Mutex::default(),
            num_ruled: AtomicUsize::new(0),
            num_released: AtomicUsize::new(0),
            reviews: Mutex::new(Reviews::Real),
            num_reviews: AtomicUsize::new(0),
            hold: Mutex::default(),
        });
        let router = Router::new().fallback(pass).with_state(shared.clone());
        let task = tokio::spawn(async move {
            axum::serve(listener, router).await.unwrap();
        });
        Self { kubeconfig, shared, task }
    }

    /// Number of writes so far, except to the lease and for token reviews.
    pub(crate) fn num_writes(&self) -> usize {
        self.shared.num_writes.load(Ordering::Relaxed)
    }

    /// Kills process `pid` at its `n`-th write from now on, and sends the name of that write.
    pub(crate) fn arm(&self, n: usize, when: When, pid: u32) -> oneshot::Receiver<String> {
        let (sprung, receiver) = oneshot::channel();
        *self.shared.trap.lock().unwrap() = Some(Trap { left: n, when, pid, sprung });
        receiver
    }

    /// Delays each lease request from now on.
    pub(crate) fn delay_leases(&self, delay: Duration) {
        let milliseconds = u64::try_from(delay.as_millis()).unwrap();
        self.shared.lease_delay.store(milliseconds, Ordering::Relaxed);
    }

    /// Sets the rule that maps `METHOD PATH` of a write to its fault.
    pub(crate) fn set_rule(&self, rule: impl Fn(&str) -> Option<Fault> + Send + Sync + 'static) {
        *self.shared.rule.lock().unwrap() = Some(Arc::new(rule));
    }

    /// Removes the rule.
    pub(crate) fn clear_rule(&self) {
        *self.shared.rule.lock().unwrap() = None;
    }

    /// Waits until `num` writes in total were answered or held by a rule.
    pub(crate) async fn wait_ruled(&self, num: usize) {
        self.wait(&self.shared.num_ruled, num, "answered or held").await;
    }

    /// Waits until `num` held writes in total have reached the API server.
    pub(crate) async fn wait_released(&self, num: usize) {
        self.wait(&self.shared.num_released, num, "released").await;
    }

    async fn wait(&self, count: &AtomicUsize, num: usize, what: &str) {
        let end = std::time::Instant::now() + Duration::from_secs(60);
        while count.load(Ordering::Relaxed) < num {
            assert!(std::time::Instant::now() < end, "{num} writes were not {what}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Sets how token reviews are answered from now on.
    pub(crate) fn set_reviews(&self, reviews: Reviews) {
        *self.shared.reviews.lock().unwrap() = reviews;
    }

    /// Number of token reviews so far.
    pub(crate) fn num_reviews(&self) -> usize {
        self.shared.num_reviews.load(Ordering::Relaxed)
    }

    /// Holds back the next write whose path contains `path`. The receiver is notified when the
    /// write has arrived; a message to the sender releases it.
    pub(crate) fn hold(&self, path: &str) -> (oneshot::Receiver<()>, oneshot::Sender<()>) {
        let (reached, is_reached) = oneshot::channel();
        let (release, released) = oneshot::channel();
        let hold = Hold { path: path.to_owned(), reached, released };
        *self.shared.hold.lock().unwrap() = Some(hold);
        (is_reached, release)
    }

    /// Removes the trap, and returns whether it was still armed.
    pub(crate) fn disarm(&self) -> bool {
        self.shared.trap.lock().unwrap().take().is_some()
    }
}

async fn pass(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let name = format!("{} {}", parts.method, parts.uri.path());
    let is_lease = name.contains("/leases");
    let is_write = parts.method != Method::GET && !is_lease && !name.contains("/tokenreviews");
    if is_lease {
        let delay = shared.lease_delay.load(Ordering::Relaxed);
        tokio::time::sleep(Duration::from_millis(delay)).await;
    }
    if name.contains("/tokenreviews") {
        shared.num_reviews.fetch_add(1, Ordering::Relaxed);
        let reviews = shared.reviews.lock().unwrap().clone();
        match reviews {
            Reviews::Real => {}
            Reviews::Status(status) => return reviewed(&status),
            Reviews::Code(code) => {
                return axum::http::Response::builder().status(code).body(Body::empty()).unwrap();
            }
            Reviews::Hang => std::future::pending().await,
        }
    }
    let held = shared.hold.lock().unwrap().take_if(|hold| is_write && name.contains(&hold.path));
    if let Some(hold) = held {
        let _ = hold.reached.send(());
        let _ = hold.released.await;
    }
    let body = to_bytes(body, 64 << 20).await.unwrap_or_default();
    let request = axum::http::Request::from_parts(parts, kube::client::Body::from(body));
    if is_write && let Some(fault) = ruled(&shared, &name) {
        return fail(shared, fault, request).await;
    }
    let trap = match is_write {
        true => sprung(&shared),
        false => None,
    };
    let Some(trap) = trap else { return forward(&shared, request).await };
    match trap.when {
        When::Before => kill(trap.pid),
        When::After => {
            forward(&shared, request).await;
            kill(trap.pid);
        }
        When::Late => {
            kill(trap.pid);
            let shared = shared.clone();
            tokio::spawn(async move {
                tokio::time::sleep(LATE).await;
                forward(&shared, request).await;
            });
        }
    }
    let _ = trap.sprung.send(name);
    // The sender of the request is dead.
    no_answer()
}

/// Returns the rule's fault for a write.
fn ruled(shared: &Shared, name: &str) -> Option<Fault> {
    let rule = shared.rule.lock().unwrap().clone()?;
    let fault = rule(name)?;
    shared.num_ruled.fetch_add(1, Ordering::Relaxed);
    Some(fault)
}

async fn fail(
    shared: Arc<Shared>,
    fault: Fault,
    request: axum::http::Request<kube::client::Body>,
) -> Response {
    match fault {
        Fault::Refused(code, reason, message) => {
            let status = serde_json::json!({
                "kind": "Status", "apiVersion": "v1", "status": "Failure",
                "reason": reason, "message": message, "code": code,
            });
            let mut response = Response::new(Body::from(status.to_string()));
            *response.status_mut() = StatusCode::from_u16(code).unwrap();
            response.headers_mut().insert("content-type", "application/json".parse().unwrap());
            response
        }
        Fault::Held => {
            // The write survives the connection of its sender.
            let held = tokio::spawn(async move {
                while shared.rule.lock().unwrap().is_some() {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                let response = forward(&shared, request).await;
                shared.num_released.fetch_add(1, Ordering::Relaxed);
                response
            });
            held.await.unwrap()
        }
    }
}

/// Response to a token review.
fn reviewed(status: &serde_json::Value) -> Response {
    let review = serde_json::json!({
        "apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview",
        "metadata": {}, "spec": {}, "status": status,
    });
    let mut response = Response::new(Body::from(review.to_string()));
    *response.status_mut() = StatusCode::CREATED;
    response
}

/// Counts a write, and returns the trap if this write triggers it.
fn sprung(shared: &Shared) -> Option<Trap> {
    shared.num_writes.fetch_add(1, Ordering::Relaxed);
    let mut trap = shared.trap.lock().unwrap();
    let armed = trap.as_mut()?;
    armed.left -= 1;
    if armed.left == 0 { trap.take() } else { None }
}

async fn forward(shared: &Shared, request: axum::http::Request<kube::client::Body>) -> Response {
    match shared.client.send(request).await {
        Ok(response) => response.map(Body::new),
        Err(_) => no_answer(),
    }
}

fn no_answer() -> Response {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::BAD_GATEWAY;
    response
}

fn kill(pid: u32) {
    let status = std::process::Command::new("kill").args(["-9", &pid.to_string()]).status();
    assert!(status.unwrap().success());
}

/// A TCP forwarder: each connection goes to the next target that accepts it. While cut, it passes
/// no data in either direction and signals nothing to the peers.
pub(crate) struct Wire {
    pub(crate) port: u16,
    is_cut: watch::Sender<bool>,
    /// Connections with a lower number are dead.
    dead: watch::Sender<usize>,
    num_connections: Arc<AtomicUsize>,
    task: JoinHandle<()>,
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Wire {
    pub(crate) async fn start(targets: Vec<SocketAddr>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (is_cut, cut) = watch::channel(false);
        let (dead, dead_to) = watch::channel(0);
        let num_connections = Arc::new(AtomicUsize::new(0));
        let num = num_connections.clone();
        let task = tokio::spawn(async move {
            loop {
                let Ok((from, _)) = listener.accept().await else { continue };
                let turn = num.fetch_add(1, Ordering::Relaxed);
                let (targets, cut, mut dead) = (targets.clone(), cut.clone(), dead_to.clone());
                tokio::spawn(async move {
                    let mut carrying = std::pin::pin!(carry(from, targets, turn, cut));
                    let is_dead = async { dead.wait_for(|dead| turn < *dead).await.is_ok() };
                    let is_dead = tokio::select! {
                        () = &mut carrying => false,
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

async fn carry(
    mut from: TcpStream,
    targets: Vec<SocketAddr>,
    turn: usize,
    cut: watch::Receiver<bool>,
) {
    if *cut.borrow() {
        // The connection hangs until the wire is restored, and is then closed.
        return becomes(cut, false).await;
    }
    for offset in 0..targets.len() {
        let target = targets[(turn + offset) % targets.len()];
        let Ok(mut to) = TcpStream::connect(target).await else { continue };
        tokio::select! {
            _ = tokio::io::copy_bidirectional(&mut from, &mut to) => {}
            () = becomes(cut.clone(), true) => becomes(cut, false).await,
        }
        return;
    }
}

async fn becomes(mut cut: watch::Receiver<bool>, wanted: bool) {
    let _ = cut.wait_for(|is_cut| *is_cut == wanted).await;
}

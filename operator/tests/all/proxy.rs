//! A proxy to the API server. Tests use it to count, delay and break requests.

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
use stoker_test_cluster::PATIENCE;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// When the sender of a write is killed, relative to the write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum KillTime {
    /// Before the API server receives the write, which never arrives.
    Before,
    /// After the API server has responded, but before the sender receives the response. A sender
    /// that stops waiting may send other writes before.
    After,
    /// Before the API server receives the write, which arrives while the next operator runs.
    Late,
}

impl KillTime {
    pub(crate) const ALL: [Self; 3] = [Self::Before, Self::After, Self::Late];
}

/// Delay of a late write. The next operator has read all objects by then.
pub(crate) const LATE: Duration = Duration::from_millis(1200);

/// Kills a process at its n-th write.
struct KillTrigger {
    /// Kind of the writes that count, and a part of their path or body; `None` for all writes.
    counted: Option<(String, String)>,
    left: usize,
    when: KillTime,
    pid: u32,
    /// Receives the name of the write that triggered the kill.
    triggered_by: oneshot::Sender<String>,
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
    trigger: Mutex<Option<KillTrigger>>,
    /// Kinds of all writes.
    kinds: Mutex<Vec<String>>,
    /// Delay of each lease request, in milliseconds.
    lease_delay: AtomicU64,
    /// Faults of some writes, by `METHOD PATH`.
    rule: Mutex<Option<Arc<Rule>>>,
    /// Writes that a rule answered or held.
    num_faults: AtomicUsize,
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
        let lease_delay = AtomicU64::new(0);
        let shared = Arc::new(Shared {
            client,
            trigger: Mutex::default(),
            kinds: Mutex::default(),
            lease_delay,
            rule: Mutex::default(),
            num_faults: AtomicUsize::new(0),
            num_released: AtomicUsize::new(0),
            reviews: Mutex::new(Reviews::Real),
            num_reviews: AtomicUsize::new(0),
            hold: Mutex::default(),
        });
        let router = Router::new().fallback(handle).with_state(shared.clone());
        let task = tokio::spawn(async move {
            axum::serve(listener, router).await.unwrap();
        });
        Self { kubeconfig, shared, task }
    }

    /// Kinds of all writes so far, except to the lease and for token reviews: see [`kind_of`].
    pub(crate) fn writes(&self) -> Vec<String> {
        self.shared.kinds.lock().unwrap().clone()
    }

    /// Kills process `pid` at its `n`-th write from now on, and sends the name of that write.
    pub(crate) fn arm(&self, n: usize, when: KillTime, pid: u32) -> oneshot::Receiver<String> {
        self.arm_counting(None, n, when, pid)
    }

    /// Same as [`arm`](Self::arm), but counts only writes of this kind whose path or body contains
    /// `part`.
    pub(crate) fn arm_for(
        &self,
        (kind, part): (&str, &str),
        n: usize,
        when: KillTime,
        pid: u32,
    ) -> oneshot::Receiver<String> {
        self.arm_counting(Some((kind.to_owned(), part.to_owned())), n, when, pid)
    }

    fn arm_counting(
        &self,
        counted: Option<(String, String)>,
        left: usize,
        when: KillTime,
        pid: u32,
    ) -> oneshot::Receiver<String> {
        let (triggered_by, receiver) = oneshot::channel();
        let trigger = KillTrigger { counted, left, when, pid, triggered_by };
        *self.shared.trigger.lock().unwrap() = Some(trigger);
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
    pub(crate) async fn wait_faults(&self, num: usize) {
        self.wait(&self.shared.num_faults, num, "answered or held").await;
    }

    /// Waits until `num` held writes in total have reached the API server.
    pub(crate) async fn wait_released(&self, num: usize) {
        self.wait(&self.shared.num_released, num, "released").await;
    }

    async fn wait(&self, count: &AtomicUsize, num: usize, what: &str) {
        let end = std::time::Instant::now() + PATIENCE;
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

    /// Removes the trigger, and returns whether it was still armed.
    pub(crate) fn disarm(&self) -> bool {
        self.shared.trigger.lock().unwrap().take().is_some()
    }
}

async fn handle(State(shared): State<Arc<Shared>>, request: Request) -> Response {
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
            Reviews::Status(status) => return review_response(&status),
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
    let text = String::from_utf8_lossy(&body).into_owned();
    let request = axum::http::Request::from_parts(parts, kube::client::Body::from(body));
    if is_write && let Some(fault) = matching_fault(&shared, &name) {
        return fail(shared, fault, request).await;
    }
    let trigger = match is_write {
        true => take_trigger(&shared, &name, &text),
        false => None,
    };
    let Some(trigger) = trigger else { return forward(&shared, request).await };
    // If the sender closes the connection, this handler is cancelled, but the task kills it.
    tokio::spawn(kill_sender(shared, trigger, name, request)).await.unwrap();
    // The sender of the request is dead.
    bad_gateway()
}

/// Kills the sender of a write, and forwards or drops the write, as the trigger specifies. Then
/// sends the write's name to the test.
async fn kill_sender(
    shared: Arc<Shared>,
    trigger: KillTrigger,
    name: String,
    request: axum::http::Request<kube::client::Body>,
) {
    match trigger.when {
        KillTime::Before => kill(trigger.pid),
        KillTime::After => {
            let _ = timeout(PATIENCE, forward(&shared, request)).await;
            kill(trigger.pid);
        }
        KillTime::Late => {
            kill(trigger.pid);
            tokio::spawn(async move {
                tokio::time::sleep(LATE).await;
                forward(&shared, request).await;
            });
        }
    }
    let _ = trigger.triggered_by.send(name);
}

/// Returns the rule's fault for a write.
fn matching_fault(shared: &Shared, name: &str) -> Option<Fault> {
    let rule = shared.rule.lock().unwrap().clone()?;
    let fault = rule(name)?;
    shared.num_faults.fetch_add(1, Ordering::Relaxed);
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
fn review_response(status: &serde_json::Value) -> Response {
    let review = serde_json::json!({
        "apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview",
        "metadata": {}, "spec": {}, "status": status,
    });
    let mut response = Response::new(Body::from(review.to_string()));
    *response.status_mut() = StatusCode::CREATED;
    response
}

/// Records a write, and returns the trigger if this is the write that it waits for.
fn take_trigger(shared: &Shared, name: &str, body: &str) -> Option<KillTrigger> {
    let kind = kind_of(name);
    shared.kinds.lock().unwrap().push(kind.clone());
    let mut trigger = shared.trigger.lock().unwrap();
    let armed = trigger.as_mut()?;
    let counts = armed.counted.as_ref().is_none_or(|(counted, part)| {
        *counted == kind && (name.contains(part) || body.contains(part))
    });
    armed.left -= usize::from(counts);
    if armed.left == 0 { trigger.take() } else { None }
}

/// Returns the kind of a write: method, resource and subresource, such as `PATCH trials/status`.
/// `name` is the method and the path of an object in a namespace.
pub(crate) fn kind_of(name: &str) -> String {
    let (method, path) = name.split_once(' ').unwrap_or_default();
    let mut parts = path.split('/').skip_while(|part| *part != "namespaces").skip(2);
    let resource = parts.next().unwrap_or(path);
    match parts.nth(1) {
        Some(subresource) => format!("{method} {resource}/{subresource}"),
        None => format!("{method} {resource}"),
    }
}

async fn forward(shared: &Shared, request: axum::http::Request<kube::client::Body>) -> Response {
    match shared.client.send(request).await {
        Ok(response) => response.map(Body::new),
        Err(_) => bad_gateway(),
    }
}

fn bad_gateway() -> Response {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::BAD_GATEWAY;
    response
}

fn kill(pid: u32) {
    let status = std::process::Command::new("kill").args(["-9", &pid.to_string()]).status();
    assert!(status.unwrap().success());
}

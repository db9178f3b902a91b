//! Tests of a sweep against an API server in memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context as TaskContext, Poll};

use axum::http::{Request, Response};
use kube::client::Body;
use stoker_api::experiment::{Experiment, Phase};
use stoker_api::trial::Trial;
use tokio::time::Instant;
use tower_service::Service;

use super::*;

/// An API server that answers each request with this code and body, and counts them.
#[derive(Clone)]
struct Server {
    code: u16,
    body: String,
    num_requests: Arc<AtomicUsize>,
}

impl Server {
    fn new(code: u16, body: &Value) -> Self {
        Self { code, body: body.to_string(), num_requests: Arc::default() }
    }

    fn client(&self) -> Client {
        Client::new(self.clone(), "default")
    }

    fn num_requests(&self) -> usize {
        self.num_requests.load(Ordering::SeqCst)
    }
}

impl Service<Request<Body>> for Server {
    type Response = Response<Body>;
    type Error = std::convert::Infallible;
    type Future = std::future::Ready<Result<Response<Body>, Self::Error>>;

    fn poll_ready(&mut self, _: &mut TaskContext<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<Body>) -> Self::Future {
        self.num_requests.fetch_add(1, Ordering::SeqCst);
        let response = Response::builder().status(self.code);
        std::future::ready(Ok(response.body(Body::from(self.body.clone().into_bytes())).unwrap()))
    }
}

fn options() -> Options {
    crate::fixture::options("key")
}

/// Response of an API server that fails.
fn failure(code: u16) -> Value {
    json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "why",
        "reason": "Why", "code": code,
    })
}

/// Object of a newer version, which this one cannot parse.
fn newer(kind: &str) -> Value {
    json!({
        "apiVersion": "stoker.dev/v1alpha1", "kind": kind, "spec": { "newer": true },
        "metadata": { "name": "e-0", "namespace": "ns", "uid": "u", "resourceVersion": "9" },
    })
}

#[tokio::test]
async fn unparsable_objects_are_written_once() {
    let (key, patch) = (Key::new("ns", "e-0"), leader_patch(&options(), Timestamp::UNIX_EPOCH));
    let server = Server::new(200, &newer("Experiment"));
    let (experiments, _changes) = Cache::new();
    let read = CachedExperiment::new;
    assert!(touch::<Experiment, _>(server.client(), &experiments, read, &key, &patch).await);
    let cached = experiments.get(&key).unwrap();
    assert_eq!((cached.version(), cached.object.is_err()), ("9", true));
    assert_eq!(server.num_requests(), 1);

    let server = Server::new(200, &newer("Trial"));
    let (trials, _changes) = Cache::new();
    assert!(touch::<Trial, _>(server.client(), &trials, CachedTrial::read, &key, &patch).await);
    let cached = trials.get(&key).unwrap();
    assert_eq!((cached.version(), cached.unreadable.is_some()), ("9", true));
    assert_eq!(server.num_requests(), 1);
}

#[tokio::test]
async fn reading_again_updates_the_cache() {
    let key = Key::new("ns", "e-0");
    let (experiments, _changes) = Cache::<CachedExperiment>::new();
    let read_from = async |server: Server| {
        let read = CachedExperiment::new;
        read_again::<Experiment, _>(&server.client(), &experiments, read, &key).await.is_ok()
    };
    assert!(read_from(Server::new(200, &newer("Experiment"))).await);
    assert_eq!(experiments.get(&key).unwrap().version(), "9");
    assert!(!read_from(Server::new(503, &failure(503))).await);
    assert_eq!(experiments.len(), 1);
    assert!(read_from(Server::new(404, &failure(404))).await);
    assert!(experiments.is_empty());
}

#[tokio::test(start_paused = true)]
async fn failing_writes_delay_a_takeover_briefly() {
    let check = async |code: u16, num: u32, num_requests: usize, seconds: f64| {
        let server = Server::new(code, &failure(code));
        let (cache, _changes) = Cache::new();
        let keys = (0..num).map(|index| Key::new("ns", &index.to_string())).collect();
        let begin = Instant::now();
        let read = CachedExperiment::new;
        let touched = touch_all(
            &server.client(),
            &cache,
            read,
            keys,
            &leader_patch(&options(), Timestamp::UNIX_EPOCH),
        )
        .await;
        assert_eq!((touched, server.num_requests()), (0, num_requests), "{code}");
        let elapsed = begin.elapsed().as_secs_f64();
        assert!((elapsed - seconds).abs() < 0.1, "{code}: {elapsed} s");
    };
    check(503, 1, 5, 8.2).await;
    check(503, 32, 160, 16.4).await;
    // The API server refuses the object in any state.
    check(422, 1, 1, 0.0).await;
    check(404, 1, 1, 0.0).await;
}

#[test]
fn each_sweep_writes_a_new_value() {
    let patch = |nanosecond| leader_patch(&options(), Timestamp::new(9, nanosecond).unwrap());
    assert_ne!(patch(0), patch(1));
}

#[test]
fn trials_that_may_get_a_turn_are_fenced() {
    let record = |facts: &[Value], placed: &[u32], desired: &str, phase: Phase| {
        let grants = placed.iter().map(|fact| json!({ "order": 3, "fact": fact, "units": 9 }));
        let spec = json!({
            "experiment": "e", "index": 0, "requestId": "r", "seed": 1, "hyperparameters": {},
            "unit": "batches", "units": 9, "wanted": desired,
            "grants": grants.collect::<Vec<_>>(),
        });
        TrialRecord {
            spec: serde_json::from_value(spec).unwrap(),
            status: serde_json::from_value(json!({ "facts": facts, "phase": phase })).unwrap(),
        }
    };
    let closed = |cause: &str| json!({ "closed": { "cause": cause } });
    let result = || json!({ "result": { "units": 9, "metric": "0.5" } });
    let check = |facts: &[Value], placed: &[u32], desired: &str, expected: bool| {
        let record = record(facts, placed, desired, Phase::Failed);
        assert_eq!(may_be_written(&record, true), expected, "{facts:?} {placed:?} {desired}");
    };
    check(&[closed("Failed")], &[], "run", true);
    check(&[closed("Failed")], &[0], "run", false);
    check(&[closed("InvalidHyperparameters")], &[], "run", true);
    check(&[result(), closed("StoppedEarly")], &[0], "run", true);
    check(&[result(), closed("Completed")], &[0], "run", true);
    check(&[result(), closed("Completed")], &[0], "kill", true);
    check(&[closed("Cancelled")], &[], "stop", true);
    // The search stopped it.
    check(&[result(), closed("Completed")], &[0], "stop", false);
    check(&[result(), closed("Completed")], &[], "stop", true);
    // In an ended experiment, the ends of killed trials never get a turn.
    let killed = record(&[closed("Cancelled")], &[], "kill", Phase::Cancelled);
    assert!(!may_be_written(&killed, false));
    let open = record(&[result()], &[0], "run", Phase::Running);
    assert!(may_be_written(&open, true) && may_be_written(&open, false));
}

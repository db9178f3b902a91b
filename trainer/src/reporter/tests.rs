//! Tests of a reporter with a small report server on a TCP socket.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::time::Instant;

use reqwest::header::{HeaderMap, RETRY_AFTER};
use stoker_test_cluster::PATIENCE;
use tokio::runtime::Runtime;

use super::post::{Outage, PostFailure, retry_after};
use super::*;
use crate::closed_port::ClosedPort;

mod awaited;
mod encrypted;

/// Report server that responds by a script, repeating the last entry. Records tokens and reports.
pub(crate) struct TestReportServer {
    pub(crate) address: SocketAddr,
    pub(crate) received: Arc<Mutex<Vec<(String, Report)>>>,
}

impl TestReportServer {
    pub(crate) fn scripted(script: Vec<(u16, String)>) -> Self {
        Self::serve(TcpListener::bind("127.0.0.1:0").unwrap(), script)
    }

    /// Creates a server whose directive depends on the report.
    pub(crate) fn with_directives(
        directive: impl Fn(&Report) -> Directive + Send + 'static,
    ) -> Self {
        Self::with_responses(move |report| response(200, directive(report)))
    }

    /// Creates a server whose status and text depend on the report.
    pub(crate) fn with_responses(
        response: impl Fn(&Report) -> (u16, String) + Send + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        Self::serve_with(listener, move |_, _, report| response(report))
    }

    fn serve(listener: TcpListener, script: Vec<(u16, String)>) -> Self {
        Self::serve_with(listener, move |idx, _, _| script[idx.min(script.len() - 1)].clone())
    }

    fn serve_with(
        listener: TcpListener,
        response: impl Fn(usize, &str, &Report) -> (u16, String) + Send + 'static,
    ) -> Self {
        let address = listener.local_addr().unwrap();
        let received = Arc::new(Mutex::new(vec![]));
        let log = received.clone();
        std::thread::spawn(move || {
            for (idx, stream) in listener.incoming().enumerate() {
                let mut stream = stream.unwrap();
                let mut reader = BufReader::new(stream.try_clone().unwrap());
                let (mut token, mut length) = (String::new(), 0);
                let mut line = String::new();
                while reader.read_line(&mut line).unwrap_or(0) > 2 {
                    let (name, value) = line.trim().split_once(": ").unwrap_or_default();
                    match name.to_lowercase().as_str() {
                        "authorization" => token = value.to_owned(),
                        "content-length" => length = value.parse().unwrap(),
                        _ => {}
                    }
                    line.clear();
                }
                let mut body = vec![0; length];
                reader.read_exact(&mut body).unwrap();
                let report: Report = serde_json::from_slice(&body).unwrap();
                let (status, text) = response(idx, &token, &report);
                log.lock().unwrap().push((token, report));
                let length = text.len();
                let mut head = format!("HTTP/1.1 {status} X\r\ncontent-length: {length}");
                if let Some(seconds) = text.strip_prefix("retry-after ") {
                    head += &format!("\r\nretry-after: {seconds}");
                }
                let _ = write!(stream, "{head}\r\nconnection: close\r\n\r\n{text}");
            }
        });
        Self { address, received }
    }

    fn batches(&self) -> Vec<u64> {
        self.received.lock().unwrap().iter().map(|(_, report)| report.batches).collect()
    }
}

struct Fixture {
    rt: Runtime,
    folder: tempfile::TempDir,
}

impl Fixture {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("token"), "one\n").unwrap();
        Self { rt: Runtime::new().unwrap(), folder }
    }

    fn reporter(&self, address: SocketAddr) -> Reporter {
        let token = self.folder.path().join("token");
        let config = serde_json::from_value(serde_json::json!({
            "version": 1, "experiment": "mnist", "experimentId": "id-1", "trial": 4,
            "attempt": 2, "seed": 1, "experimentSeed": 1, "hyperparameters": {},
            "unit": "batches", "units": 10, "metric": "loss", "smallerIsBetter": true,
            "schedulingUnit": 1, "aggregationFrequency": 1,
            "storage": {"url": "memory://", "trialPath": "t"},
            "door": {"url": format!("http://{address}/report"), "tokenFile": token},
        }));
        Reporter::new(self.rt.handle().clone(), &config.unwrap()).unwrap()
    }
}

fn progress() -> ReportEvent {
    ReportEvent::Progress { batches_total: 100, activity: None }
}

fn validated() -> ReportEvent {
    ReportEvent::Validated { metrics: BTreeMap::new(), granted_units: Some(1) }
}

fn response(status: u16, directive: Directive) -> (u16, String) {
    (status, serde_json::to_string(&directive).unwrap())
}

fn plain(status: u16) -> (u16, String) {
    (status, "no".to_owned())
}

/// Polls until `is_so` returns `true`.
fn until(what: &str, is_so: impl Fn() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PATIENCE, "{what} took too long");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn check(script: Vec<(u16, String)>, expected: Directive, requests: usize) {
    let fixture = Fixture::new();
    let server = TestReportServer::scripted(script.clone());
    let reporter = fixture.reporter(server.address);
    let actual = reporter.post_and_wait(7, validated());
    let expected = Ok(Some(expected));
    assert_eq!(actual, expected, "{script:?}");
    assert_eq!(server.batches().len(), requests, "{script:?}");
    assert!(reporter.unsent().is_empty(), "{script:?}");
}

#[test]
fn responses_are_interpreted_by_status() {
    let go = Directive::Continue { units: 5 };
    check(vec![response(200, go)], go, 1);
    check(vec![response(200, Directive::Preempt)], Directive::Preempt, 1);
    check(vec![response(200, Directive::Fenced)], Directive::Fenced, 1);
    // Any cause is retried.
    for status in [204, 302, 400, 401, 403, 404, 408, 410, 415, 429, 500, 502, 503] {
        check(vec![plain(status), plain(status), response(200, go)], go, 3);
    }
    // Only a 200 response fences.
    for status in [401, 403, 410, 500] {
        check(vec![response(status, Directive::Fenced), response(200, go)], go, 2);
    }
    check(vec![(200, "<html>".to_owned()), response(200, go)], go, 2);
}

#[test]
fn reports_arrive_in_order_with_current_token() {
    let fixture = Fixture::new();
    let server = TestReportServer::scripted(vec![response(200, Directive::Wait)]);
    let reporter = fixture.reporter(server.address);
    assert_eq!(reporter.directive(), None);
    reporter.post(1, validated());
    reporter.post(2, validated());
    assert_eq!(reporter.post_and_wait(3, progress()), Ok(Some(Directive::Wait)));
    assert_eq!(reporter.directive(), Some(Directive::Wait));
    std::fs::write(fixture.folder.path().join("token"), "two").unwrap();
    assert!(reporter.close(4, ExitCode::Completed, None));
    assert_eq!(server.batches(), [1, 2, 3, 4]);
    let received = server.received.lock().unwrap();
    assert_eq!(received[2].0, "Bearer one");
    assert_eq!(received[3].0, "Bearer two");
    assert!(
        received
            .iter()
            .all(|(_, report)| report.attempt == 2 && report.version == CONTRACT_VERSION)
    );
    assert_eq!(received[3].1.event, ReportEvent::Exiting { code: 0, message: None });
}

#[test]
fn outage_delays_reports_only() {
    let fixture = Fixture::new();
    let port = ClosedPort::new();
    let address = port.address();
    let reporter = fixture.reporter(address);
    let start = Instant::now();
    reporter.post(1, validated());
    reporter.post(1, progress());
    reporter.post(2, progress());
    // A post that waited for its delivery would not return: nothing serves the address yet.
    assert!(start.elapsed() < Duration::from_secs(30));
    assert_eq!(reporter.post_and_wait_within(3, validated(), Duration::from_millis(300)), Ok(None));
    assert_eq!(reporter.post_and_wait_within(4, progress(), Duration::from_millis(100)), Ok(None));
    let unsent = reporter.unsent();
    assert_eq!(unsent.iter().map(|report| report.batches).collect::<Vec<_>>(), [1, 3]);

    // This attempt sends them once the server is back; a later attempt can send them too.
    let server = TestReportServer::serve(port.open(), vec![response(200, Directive::Wait)]);
    assert_eq!(reporter.post_and_wait(5, progress()), Ok(Some(Directive::Wait)));
    assert_eq!(server.batches(), [1, 3, 5]);
    assert!(reporter.unsent().is_empty());
    let later = fixture.reporter(address);
    later.restore_unsent(unsent);
    assert!(later.close(9, ExitCode::Preempted, Some("asked to".to_owned())));
    assert_eq!(server.batches(), [1, 3, 5, 1, 3, 9]);
}

#[test]
fn renewed_token_is_used_after_a_refusal() {
    let fixture = Fixture::new();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let server = TestReportServer::serve_with(listener, |_, token, _| match token {
        "Bearer two" => response(200, Directive::Continue { units: 5 }),
        _ => (401, "the token has expired".to_owned()),
    });
    let reporter = fixture.reporter(server.address);
    reporter.post(1, validated());
    // When the second request arrives, the first response was processed.
    until("the second request", || server.batches().len() >= 2);
    assert_eq!(reporter.directive(), None);
    assert_eq!(reporter.unsent().len(), 1);
    std::fs::write(fixture.folder.path().join("token"), "two\n").unwrap();
    assert_eq!(reporter.post_and_wait(2, validated()), Ok(Some(Directive::Continue { units: 5 })));
    assert!(reporter.unsent().is_empty());
    assert_eq!(server.received.lock().unwrap().last().unwrap().0, "Bearer two");
}

#[test]
fn retry_after_is_respected() {
    let check = |header: &str, num_failed: u32, expected_ms: u64| {
        let mut headers = HeaderMap::new();
        headers.insert(RETRY_AFTER, header.parse().unwrap());
        let failure = PostFailure { retry_after: retry_after(&headers), ..PostFailure::default() };
        let wait = Outage { num_failed, ..Outage::default() }.record_failure(&failure);
        assert_eq!(wait, Duration::from_millis(expected_ms), "{header} after {num_failed}");
    };
    check("0", 0, 100);
    check("3", 0, 3_000);
    check("3", 10, 5_000);
    check("86400", 0, 30_000);
    check("Fri, 31 Dec 1999 23:59:59 GMT", 0, 100);
}

#[test]
fn fenced_reporter_sends_nothing() {
    let fixture = Fixture::new();
    let server = TestReportServer::scripted(vec![
        response(200, Directive::Fenced),
        response(200, Directive::Wait),
    ]);
    let reporter = fixture.reporter(server.address);
    assert_eq!(reporter.post_and_wait(1, validated()), Ok(Some(Directive::Fenced)));
    reporter.post(2, validated());
    assert_eq!(reporter.post_and_wait(3, progress()), Ok(Some(Directive::Fenced)));
    assert!(!reporter.close(4, ExitCode::Preempted, None));
    assert_eq!(server.batches(), [1]);
    assert_eq!(reporter.directive(), Some(Directive::Fenced));
}

fn intermediate(loss: &str) -> ReportEvent {
    let metrics = [("loss".to_owned(), loss.to_owned())].into();
    ReportEvent::Validated { metrics, granted_units: None }
}

fn checkpointed(batches: u64, loss: &str) -> ReportEvent {
    ReportEvent::Checkpointed {
        name: stoker_api::names::checkpoint_name(batches, 2),
        manifest_sha256: String::new(),
        bytes: 1,
        metric: Some(loss.to_owned()),
    }
}

/// Returns a reporter that has noticed that its server is unavailable, and the server's port.
fn reporter_in_outage(fixture: &Fixture) -> (Reporter, ClosedPort) {
    let port = ClosedPort::new();
    let reporter = fixture.reporter(port.address());
    reporter.post(0, validated());
    until("the first failure", || reporter.shared.lock().is_outage);
    (reporter, port)
}

fn unsent_batches(reporter: &Reporter) -> Vec<u64> {
    reporter.unsent().iter().map(|report| report.batches).collect()
}

#[test]
fn outage_keeps_newest_and_best_validation() {
    let fixture = Fixture::new();
    let (reporter, _port) = reporter_in_outage(&fixture);
    for batches in 1..=40 {
        let loss = ["0.5", "0.1", "NaN", "0.1"][(batches % 4) as usize];
        reporter.post(batches, intermediate(loss));
        reporter.post(batches, checkpointed(batches, loss));
    }
    reporter.post(41, validated());
    let unsent = reporter.unsent();
    let batches_of = |is_wanted: fn(&ReportEvent) -> bool| -> Vec<u64> {
        let wanted = unsent.iter().filter(|report| is_wanted(&report.event));
        wanted.map(|report| report.batches).collect()
    };
    let is_intermediate =
        |event: &ReportEvent| matches!(event, ReportEvent::Validated { granted_units: None, .. });
    let is_result = |event: &ReportEvent| {
        matches!(event, ReportEvent::Validated { granted_units: Some(_), .. })
    };
    assert_eq!(batches_of(is_intermediate), [1, 40]);
    assert_eq!(batches_of(is_result), [0, 41]);
    assert_eq!(unsent.len(), 4 + 40, "all checkpoints are kept");
}

#[test]
fn queued_validations_are_bounded() {
    let search_metric = SearchMetric { metric: "loss".to_owned(), smaller_is_better: false };
    let mut state = State::default();
    for batches in 0..100 {
        let event = intermediate(if batches == 7 { "0.9" } else { "0.5" });
        let report = Report { version: CONTRACT_VERSION, attempt: 2, batches, event };
        state.queue.push_back(QueuedReport {
            id: batches,
            report,
            reply_to: None,
            is_awaited: false,
        });
        state.coalesce(&search_metric);
    }
    let ids: Vec<u64> = state.queue.iter().map(|queued| queued.id).collect();
    assert_eq!(ids, [&[7][..], &(85..100).collect::<Vec<_>>()].concat());
}

#[test]
fn full_queue_keeps_results_and_best_checkpoint() {
    let fixture = Fixture::new();
    let (reporter, _port) = reporter_in_outage(&fixture);
    let num = QUEUE_MAX as u64 + 10;
    for batches in 1..=num {
        reporter.post(batches, checkpointed(batches, if batches == 3 { "0.1" } else { "0.5" }));
    }
    reporter.post(num, validated());
    let unsent = unsent_batches(&reporter);
    assert_eq!(unsent.len(), QUEUE_MAX);
    assert_eq!(unsent[..3], [0, 3, 14]);
    assert_eq!(unsent[QUEUE_MAX - 2..], [num, num]);
}

#[test]
fn results_overtake_throttled_validations() {
    let fixture = Fixture::new();
    let go = Directive::Continue { units: 5 };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let server = TestReportServer::serve_with(listener, move |_, _, report| match report.event {
        ReportEvent::Validated { granted_units: None, .. } => (429, "retry-after 30".to_owned()),
        _ => response(200, go),
    });
    let reporter = fixture.reporter(server.address);
    reporter.post(1, intermediate("0.5"));
    until("the first request", || !server.batches().is_empty());
    // Neither the requested wait nor the refused report delays these.
    let within = Duration::from_secs(20);
    assert_eq!(reporter.post_and_wait_within(2, validated(), within), Ok(Some(go)));
    reporter.post(3, intermediate("0.4"));
    assert_eq!(reporter.post_and_wait_within(4, checkpointed(4, "0.4"), within), Ok(Some(go)));
    assert_eq!(unsent_batches(&reporter), [1, 3]);
}

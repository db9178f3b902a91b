//! A reporter and a small door on a real socket.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::time::Instant;

use tokio::runtime::Runtime;

use super::*;

mod encrypted;

/// Answers requests by a script, the last entry for ever; records token and report.
pub(crate) struct TestDoor {
    pub(crate) address: SocketAddr,
    pub(crate) seen: Arc<Mutex<Vec<(String, Report)>>>,
}

impl TestDoor {
    pub(crate) fn open(script: Vec<(u16, String)>) -> Self {
        Self::serve(TcpListener::bind("127.0.0.1:0").unwrap(), script)
    }

    /// Answers each report by what it says.
    pub(crate) fn answering(directive: impl Fn(&Report) -> Directive + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        Self::serve_with(listener, move |_, report| {
            (200, serde_json::to_string(&directive(report)).unwrap())
        })
    }

    fn serve(listener: TcpListener, script: Vec<(u16, String)>) -> Self {
        Self::serve_with(listener, move |idx, _| script[idx.min(script.len() - 1)].clone())
    }

    fn serve_with(
        listener: TcpListener,
        answer: impl Fn(usize, &Report) -> (u16, String) + Send + 'static,
    ) -> Self {
        let address = listener.local_addr().unwrap();
        let seen = Arc::new(Mutex::new(vec![]));
        let log = seen.clone();
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
                let (status, text) = answer(idx, &report);
                log.lock().unwrap().push((token, report));
                let length = text.len();
                let head = format!("HTTP/1.1 {status} X\r\ncontent-length: {length}");
                let _ = write!(stream, "{head}\r\nconnection: close\r\n\r\n{text}");
            }
        });
        Self { address, seen }
    }

    fn batches(&self) -> Vec<u64> {
        self.seen.lock().unwrap().iter().map(|it| it.1.batches).collect()
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

fn answer(status: u16, directive: Directive) -> (u16, String) {
    (status, serde_json::to_string(&directive).unwrap())
}

fn plain(status: u16) -> (u16, String) {
    (status, "no".to_owned())
}

fn check(script: Vec<(u16, String)>, expected: Option<Directive>, requests: usize) {
    let it = Fixture::new();
    let door = TestDoor::open(script.clone());
    let reporter = it.reporter(door.address);
    let actual = reporter.ask_within(7, validated(), Duration::from_secs(3));
    assert_eq!(actual, expected, "{script:?}");
    assert_eq!(door.batches().len(), requests, "{script:?}");
    assert!(reporter.unsent().is_empty(), "{script:?}");
}

#[test]
fn each_answer_has_its_meaning() {
    let go = Directive::Continue { units: 5 };
    check(vec![answer(200, go)], Some(go), 1);
    check(vec![answer(200, Directive::Preempt)], Some(Directive::Preempt), 1);
    check(vec![answer(200, Directive::Fenced)], Some(Directive::Fenced), 1);
    for status in [401, 403, 410] {
        check(vec![plain(status)], Some(Directive::Fenced), 1);
    }
    // Tried again.
    for status in [404, 429, 500, 503] {
        check(vec![plain(status), plain(status), answer(200, go)], Some(go), 3);
    }
    check(vec![(200, "<html>".to_owned()), answer(200, go)], Some(go), 2);
    // Not tried again.
    check(vec![plain(422)], None, 1);
}

#[test]
fn reports_arrive_in_order_with_the_token_of_the_moment() {
    let it = Fixture::new();
    let door = TestDoor::open(vec![answer(200, Directive::Wait)]);
    let reporter = it.reporter(door.address);
    assert_eq!(reporter.directive(), None);
    reporter.post(1, validated());
    reporter.post(2, validated());
    assert_eq!(reporter.ask(3, progress()), Some(Directive::Wait));
    assert_eq!(reporter.directive(), Some(Directive::Wait));
    std::fs::write(it.folder.path().join("token"), "two").unwrap();
    assert!(reporter.close(4, ExitCode::Completed, None));
    assert_eq!(door.batches(), [1, 2, 3, 4]);
    let seen = door.seen.lock().unwrap();
    assert_eq!(seen[2].0, "Bearer one");
    assert_eq!(seen[3].0, "Bearer two");
    assert!(seen.iter().all(|it| it.1.attempt == 2 && it.1.version == CONTRACT_VERSION));
    assert_eq!(seen[3].1.event, ReportEvent::Exiting { code: 0, message: None });
}

#[test]
fn a_door_that_is_away_delays_reports_and_nothing_else() {
    let it = Fixture::new();
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let reporter = it.reporter(address);
    let start = Instant::now();
    reporter.post(1, validated());
    reporter.post(1, progress());
    reporter.post(2, progress());
    assert!(start.elapsed() < Duration::from_millis(50));
    assert_eq!(reporter.ask_within(3, validated(), Duration::from_millis(300)), None);
    assert_eq!(reporter.ask_within(4, progress(), Duration::from_millis(100)), None);
    let unsent = reporter.unsent();
    assert_eq!(unsent.iter().map(|it| it.batches).collect::<Vec<_>>(), [1, 3]);

    // A later attempt sends them; so does this one once the door is back.
    let door =
        TestDoor::serve(TcpListener::bind(address).unwrap(), vec![answer(200, Directive::Wait)]);
    assert_eq!(reporter.ask(5, progress()), Some(Directive::Wait));
    assert_eq!(door.batches(), [1, 3, 5]);
    assert!(reporter.unsent().is_empty());
    let later = it.reporter(address);
    later.restore_unsent(unsent);
    assert!(later.close(9, ExitCode::Preempted, Some("asked to".to_owned())));
    assert_eq!(door.batches(), [1, 3, 5, 1, 3, 9]);
}

#[test]
fn a_fenced_reporter_says_nothing_more() {
    let it = Fixture::new();
    let door = TestDoor::open(vec![plain(410), answer(200, Directive::Wait)]);
    let reporter = it.reporter(door.address);
    assert_eq!(reporter.ask(1, validated()), Some(Directive::Fenced));
    reporter.post(2, validated());
    assert_eq!(reporter.ask(3, progress()), Some(Directive::Fenced));
    assert!(!reporter.close(4, ExitCode::Preempted, None));
    assert_eq!(door.batches(), [1]);
    assert_eq!(reporter.directive(), Some(Directive::Fenced));
}

#[test]
fn the_oldest_report_that_decides_nothing_goes_first() {
    let it = Fixture::new();
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let reporter = it.reporter(address);
    let idle = || ReportEvent::Validated { metrics: BTreeMap::new(), granted_units: None };
    reporter.post(0, validated());
    for batches in 1..=QUEUE_MAX as u64 {
        reporter.post(batches, idle());
    }
    let unsent = reporter.unsent();
    assert_eq!(unsent.len(), QUEUE_MAX);
    assert_eq!((unsent[0].batches, unsent[1].batches), (0, 2));
}

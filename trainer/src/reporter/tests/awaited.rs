//! Reports whose responses a caller waits for.

use super::*;

/// A rejected report is not sent again. Its reason reaches the caller also after a timeout.
#[test]
fn rejection_of_an_awaited_report_fails() {
    for (status, within) in [(413, 60_000), (422, 60_000), (422, 0)] {
        let fixture = Fixture::new();
        let go = Directive::Continue { units: 5 };
        let server = TestReportServer::scripted(vec![plain(status), response(200, go)]);
        let reporter = fixture.reporter(server.address);
        let within = Duration::from_millis(within);
        let mut response = reporter.post_and_wait_within(7, validated(), within);
        if response == Ok(None) {
            response = reporter.post_and_wait(7, progress());
        }
        let error = response.unwrap_err().to_string();
        assert!(error.starts_with("the report of batch 7 was rejected: http://"), "{error}");
        assert!(error.contains(&format!("returned {status}")) && error.contains(": no"), "{error}");
        assert!(reporter.unsent().is_empty());
        // The reason is returned once. A report that no caller waits for fails nothing.
        assert_eq!(reporter.post_and_wait(8, progress()), Ok(Some(go)), "{status}");
    }
    let fixture = Fixture::new();
    let directive = response(200, Directive::Wait);
    let server = TestReportServer::scripted(vec![plain(413), directive]);
    let reporter = fixture.reporter(server.address);
    reporter.post(1, intermediate("0.5"));
    assert_eq!(reporter.post_and_wait(2, progress()), Ok(Some(Directive::Wait)));
    assert_eq!(server.batches(), [1, 2]);
}

/// The operator holds back a response for up to 20 s while the search is undecided.
#[test]
fn response_after_a_timeout_is_recorded() {
    let fixture = Fixture::new();
    let (release, released) = std::sync::mpsc::channel::<()>();
    let server = TestReportServer::with_responses(move |_| {
        // Returns once the test drops the sender.
        let _ = released.recv();
        response(200, Directive::Wait)
    });
    let reporter = fixture.reporter(server.address);
    assert_eq!(reporter.post_and_wait_within(1, progress(), Duration::ZERO), Ok(None));
    // The report is removed if its request has not begun, so post another one.
    reporter.post(1, progress());
    drop(release);
    until("the response", || reporter.responded_at().is_some());
    assert_eq!(reporter.directive(), Some(Directive::Wait));
}

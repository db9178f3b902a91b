//! Background task that sends the queued reports and records the responses.

use std::sync::Arc;
use std::time::Instant;

use reqwest::{Client, StatusCode};
use stoker_api::contract::{Directive, ReportEndpoint};

use super::post::{Outage, PostOutcome, send};
use super::{BACKOFF_FIRST, QueuedReport, Rejected, Shared};
use crate::trial_io::RecordMessage;

/// Sends the queued reports until the reporter is dropped or fenced.
pub(super) async fn send_reports(shared: Arc<Shared>, client: Client, endpoint: ReportEndpoint) {
    let mut outage = Outage::default();
    loop {
        let next = shared
            .lock()
            .next()
            .map(|queued| (queued.id, queued.report.clone(), queued.is_urgent()));
        let Some((id, report, is_urgent)) = next else {
            if shared.lock().is_closed {
                return;
            }
            shared.queued.notified().await;
            continue;
        };
        match send(&client, &endpoint, &report).await {
            PostOutcome::Response(directive, prunable, record) => {
                if let (Some(sink), Some(record)) = (shared.record_sink.get(), record) {
                    // Ignore the error: the next record contains this one.
                    let _ = sink.send(RecordMessage::Record(record));
                }
                if let Some(deleter) = shared.deleter.get() {
                    // Ignore the error: without the deleter, the final clean-up deletes the rest.
                    prunable.into_iter().for_each(|name| drop(deleter.send(name)));
                }
                if outage.num_failed > 0 {
                    eprintln!("stoker: {} is available again", endpoint.url);
                }
                outage = Outage::default();
                shared.lock().is_outage = false;
                if record_response(&shared, id, directive) {
                    return;
                }
            }
            PostOutcome::Rejected(reason) => {
                record_rejection(&shared, id, Rejected { batches: report.batches, reason });
            }
            PostOutcome::Unavailable(failure) => {
                let wait = outage.record_failure(&failure);
                let has_urgent = {
                    let mut state = shared.lock();
                    if state.is_closed {
                        return;
                    }
                    state.is_outage = true;
                    state.queue.iter().any(QueuedReport::is_urgent)
                };
                // A server that throttles reports without a result may still accept the others.
                let is_throttled =
                    failure.status == Some(StatusCode::TOO_MANY_REQUESTS) && !is_urgent;
                let wait = if is_throttled && has_urgent { BACKOFF_FIRST } else { wait };
                tokio::select! {
                    () = tokio::time::sleep(wait) => {}
                    () = shared.urgent.notified(), if is_throttled && !has_urgent => {}
                }
            }
        }
    }
}

/// Records a response; returns `true` if it was the last (fenced).
fn record_response(shared: &Shared, id: u64, directive: Directive) -> bool {
    let is_last = directive == Directive::Fenced;
    let mut state = shared.lock();
    state.directive = Some(directive);
    state.responded_at = Some(Instant::now());
    for queued in state.queue.iter_mut().filter(|queued| is_last || queued.id == id) {
        if let Some(reply_to) = queued.reply_to.take() {
            // Ignore the error: the caller may have timed out. The channel has capacity for one.
            let _ = reply_to.try_send(directive);
        }
    }
    state.queue.retain(|queued| queued.id != id);
    is_last
}

/// Drops a rejected report. A caller that depends on its response gets the reason.
fn record_rejection(shared: &Shared, id: u64, rejected: Rejected) {
    let mut state = shared.lock();
    if state.queue.iter().any(|queued| queued.id == id && queued.is_awaited) {
        // Store the reason first: dropping the report ends the caller's wait.
        state.rejected = Some(rejected);
    } else {
        eprintln!("stoker: {rejected}");
    }
    state.queue.retain(|queued| queued.id != id);
}

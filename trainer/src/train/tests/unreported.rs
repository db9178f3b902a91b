//! Checkpoints that an attempt has stored, but could not report before it was killed.

use stoker_api::contract::{Directive, ReportEvent, TrialConfig};

use super::early_ends::config_under_runner;
use super::*;
use crate::reporter::tests::TestReportServer;

/// Trains an attempt to batch 20, or stops it after batch `stop_at`. It validates and saves after
/// every fifth batch.
fn train_attempt(
    folder: &Path,
    server: &TestReportServer,
    attempt: u32,
    stop_at: u64,
) -> Result<Fitted<Net>> {
    train_granted(folder, server, (attempt, 20), stop_at)
}

/// The same with another granted length.
fn train_granted(
    folder: &Path,
    server: &TestReportServer,
    (attempt, units): (u32, u64),
    stop_at: u64,
) -> Result<Fitted<Net>> {
    let config = TrialConfig {
        attempt,
        units,
        unreported_since: attempt.checked_sub(1),
        validation_period: Some(Length::new(Unit::Batches, 5)),
        ..config_under_runner(server, "val_loss", folder)
    };
    let context = program::context(config, None)?;
    context.silence();
    let stop = StopAt(stop_at, context.stop.clone()).boxed();
    let data = || Data::arrays(samples());
    let fit = Fit::new(data()?).validation(data()?).batch_size(10).callbacks(vec![stop]);
    let step = |model: &Net, (x, y): Pair| StepOutput::classification(model.forward(x), y);
    context.fit(Net::new(context.device()), optimizers(), step, fit)
}

#[test]
fn unreported_checkpoint_is_resumed_and_reported() {
    let _stream = lock_random_stream();
    let server = || {
        TestReportServer::with_directives(|report| match report.event {
            ReportEvent::Validated { granted_units: Some(_), .. } => Directive::Stop,
            _ => Directive::Continue { units: 20 },
        })
    };
    let straight = train_attempt(brief_folder().path(), &server(), 0, u64::MAX).unwrap();

    // The error ends the process without an exit report, like a kill.
    let folder = brief_folder();
    let unavailable = TestReportServer::scripted(vec![(503, String::new())]);
    let error = train_attempt(folder.path(), &unavailable, 0, 8).map(drop).unwrap_err();
    assert_eq!(exit_code(&*error), ExitCode::Preempted, "{error}");

    let server = server();
    let resumed = train_attempt(folder.path(), &server, 1, u64::MAX).unwrap();
    assert_eq!(resumed.history, straight.history);
    let received = server.received.lock().unwrap();
    let events: Vec<&ReportEvent> = received.iter().map(|(_, report)| &report.event).collect();
    let is_start = |event: &&ReportEvent| matches!(event, ReportEvent::Started { .. });
    let start = events.iter().position(is_start).unwrap();
    let ReportEvent::Started { resumed_from, .. } = events[start] else { unreachable!() };
    assert_eq!(resumed_from.as_deref(), Some("000000000008-0"));
    let names = events[..start].iter().filter_map(|event| match event {
        ReportEvent::Checkpointed { name, .. } => Some(name.as_str()),
        _ => None,
    });
    // The checkpoint at batch 8 contains the report of the earlier one, and both are found.
    let expected = ["000000000005-0", "000000000005-0", "000000000008-0"];
    assert_eq!(names.collect::<Vec<_>>(), expected);
    let validated = |event: &&&ReportEvent| matches!(event, ReportEvent::Validated { .. });
    assert_eq!(events[..start].iter().filter(validated).count(), 1, "{events:?}");
}

/// The record of the runner was restored from a backup: the trial had been granted 20 batches
/// since.
#[test]
fn unreported_checkpoint_beyond_the_grant_is_left_out() {
    let _stream = lock_random_stream();
    let folder = brief_folder();
    let server = |units: u64| {
        TestReportServer::with_directives(move |report| match report.event {
            ReportEvent::Validated { granted_units: Some(_), .. } => Directive::Stop,
            _ => Directive::Continue { units },
        })
    };
    train_attempt(folder.path(), &server(20), 0, 13).map(drop).unwrap_err();
    let restored = server(10);
    train_granted(folder.path(), &restored, (1, 10), u64::MAX).unwrap();
    let received = restored.received.lock().unwrap();
    let mut events = received.iter().map(|(_, report)| &report.event);
    let resumed_from = events.find_map(|event| match event {
        ReportEvent::Started { resumed_from, .. } => Some(resumed_from.clone()),
        _ => None,
    });
    assert_eq!(resumed_from, Some(Some("000000000010-0".to_owned())));
    let saved = events.clone().filter(|event| matches!(event, ReportEvent::Checkpointed { .. }));
    assert_eq!(saved.count(), 0, "{received:?}");
    let result = received.iter().find_map(|(_, report)| match &report.event {
        ReportEvent::Validated { granted_units: Some(units), .. } => Some((report.batches, *units)),
        _ => None,
    });
    assert_eq!(result, Some((10, 10)));
}

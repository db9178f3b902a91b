//! Trainings that end early: by a callback, an error or a missing metric.

use std::time::Instant;

use stoker_api::contract::{Directive, Report, ReportEvent, TrialConfig};
use stoker_test_cluster::PATIENCE;

use super::*;
use crate::reporter::tests::TestReportServer;
use crate::trial_io::TrialIo;

/// A callback that fails at the first batch.
pub(super) struct Fails;

impl Callback for Fails {
    fn on_batch_end(&mut self, _: &Logs, _: &mut Control) -> Result<()> {
        Err("no".into())
    }
}

#[test]
fn callback_error_carries_its_name() {
    let _stream = lock_random_stream();
    let adam = Optimizers::one(AdamConfig::new().init(), 0.1);
    assert_eq!(refused(10, adam, vec![Fails.boxed()]), "callback Fails: no");
}

#[test]
fn rows_before_a_failure_are_stored() {
    let _stream = lock_random_stream();
    struct FailurePoint(bool);
    impl Callback for FailurePoint {
        fn on_batch_end(&mut self, _: &Logs, control: &mut Control) -> Result<()> {
            match (control.batches(), self.0) {
                (0..6, _) => Ok(()),
                (_, true) => panic!("expected"),
                (_, false) => Err("expected".into()),
            }
        }
    }
    for panics in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        program::finish(alone(Some(folder.path()), 20).context(), |context| {
            let fit = Fit::new(Data::arrays(samples())?).batch_size(10);
            let fit = fit.callbacks(vec![FailurePoint(panics).boxed()]);
            let step = |model: &Net, (x, y): Pair| StepOutput::classification(model.forward(x), y);
            context.fit(Net::new(context.device()), optimizers(), step, fit).map(drop)
        });
        let batches: Vec<_> = rows(folder.path()).iter().map(|row| row.0).collect();
        assert_eq!(batches, [4], "panics: {panics}");
    }
}

#[test]
fn callback_stop_is_final() {
    let _stream = lock_random_stream();
    let folder = tempfile::tempdir().unwrap();
    let once = || {
        let context = alone(Some(folder.path()), 20).context().unwrap();
        let data = Data::arrays(samples()).unwrap();
        let fit = Fit::new(data).batch_size(10).callbacks(vec![Stops(3).boxed()]);
        let step = |model: &Net, (x, y): Pair| StepOutput::classification(model.forward(x), y);
        let fitted = context.fit(Net::new(context.device()), optimizers(), step, fit).unwrap();
        (fitted.stopped, context.io().batches())
    };
    assert_eq!(once(), (Some("enough".into()), 3));
    assert_eq!(once(), (Some("enough".into()), 3));
}

/// A callback that stops training.
pub(super) struct Stops(pub(super) u64);

impl Callback for Stops {
    fn on_batch_end(&mut self, _: &Logs, control: &mut Control) -> Result<()> {
        if control.batches() == self.0 {
            control.stop_training("enough");
        }
        Ok(())
    }
}

/// Trains to batch 20, or until the callback stops training, under a runner whose searched metric
/// is `metric`. Returns the reports too.
pub(super) fn train_under_runner(
    metric: &str,
    callback: impl Callback + 'static,
) -> (Result<Fitted<Net>>, Vec<Report>) {
    train_under_runner_with(metric, callback, Some(Data::arrays(samples()).unwrap()))
}

/// Same as [`train_under_runner`], with this validation data.
pub(super) fn train_under_runner_with(
    metric: &str,
    callback: impl Callback + 'static,
    validation: Option<Data<Pair>>,
) -> (Result<Fitted<Net>>, Vec<Report>) {
    let door = TestReportServer::scripted(vec![continue_to_20()]);
    train_with_server(&door, metric, callback, validation)
}

pub(super) fn continue_to_20() -> (u16, String) {
    (200, r#"{"continue":{"units":20}}"#.into())
}

/// Same as [`train_under_runner_with`], with this report server.
fn train_with_server(
    door: &TestReportServer,
    metric: &str,
    callback: impl Callback + 'static,
    validation: Option<Data<Pair>>,
) -> (Result<Fitted<Net>>, Vec<Report>) {
    let folder = tempfile::tempdir().unwrap();
    let context = under_runner(door, metric, folder.path());
    let fit = Fit::new(Data::arrays(samples()).unwrap()).batch_size(10);
    let fit = Fit { validation, ..fit }.callbacks(vec![callback.boxed()]);
    let step = |model: &Net, (x, y): Pair| StepOutput::classification(model.forward(x), y);
    let fitted = context.fit(Net::new(context.device()), optimizers(), step, fit);
    let reports = door.received.lock().unwrap().iter().map(|(_, report)| report.clone()).collect();
    (fitted, reports)
}

/// Returns the context of a trial of 20 batches with this report server and searched metric.
pub(super) fn under_runner(door: &TestReportServer, metric: &str, folder: &Path) -> Context {
    program::context(config_under_runner(door, metric, folder), None).unwrap()
}

/// Returns the configuration of that trial.
pub(in crate::train) fn config_under_runner(
    door: &TestReportServer,
    metric: &str,
    folder: &Path,
) -> TrialConfig {
    let token = folder.join("token");
    std::fs::write(&token, "one").unwrap();
    let config = json!({
        "version": 1, "experiment": "x", "experimentId": "x", "trial": 0, "attempt": 0, "seed": 7,
        "experimentSeed": 7, "hyperparameters": {}, "unit": "batches", "units": 20,
        "metric": metric, "smallerIsBetter": true, "schedulingUnit": 100,
        "aggregationFrequency": 1, "storage": {"url": folder, "trialPath": "trial"},
        "door": {"url": format!("http://{}/", door.address), "tokenFile": token},
    });
    serde_json::from_value(config).unwrap()
}

/// The program fails while a checkpoint is being stored.
#[test]
fn checkpoint_in_progress_is_reported_before_the_exit() {
    let _stream = lock_random_stream();
    let folder = tempfile::tempdir().unwrap();
    let door = TestReportServer::scripted(vec![continue_to_20()]);
    let context = under_runner(&door, "val_loss", folder.path());
    program::finish(Ok(context), |context| {
        let delay = std::time::Duration::from_millis(300);
        let make = Box::new(move || {
            std::thread::sleep(delay);
            Ok(crate::checkpoint::NewContents::new())
        });
        context.io().save(7, None, make)?;
        Err("no".into())
    });
    let manifest = folder.path().join("trial/checkpoints/000000000007-0/manifest.json");
    assert!(manifest.exists());
    let received = door.received.lock().unwrap();
    let events: Vec<_> = received.iter().map(|(_, report)| &report.event).collect();
    let is_expected = matches!(
        &events[..],
        [.., ReportEvent::Checkpointed { .. }, ReportEvent::Exiting { code: 1, .. }]
    );
    assert!(is_expected, "{events:?}");
}

/// Waits in each validation until a checkpoint is reported.
struct AwaitsCheckpoint(Arc<Mutex<Vec<(String, Report)>>>);

impl Callback for AwaitsCheckpoint {
    fn on_validation_begin(&mut self, _: &mut Control) -> Result<()> {
        let is_checkpoint = |(_, report): &(String, Report)| {
            matches!(report.event, ReportEvent::Checkpointed { .. })
        };
        let start = Instant::now();
        while !self.0.lock().unwrap().iter().any(is_checkpoint) {
            if start.elapsed() >= PATIENCE {
                return Err("the checkpoint was not reported".into());
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        Ok(())
    }
}

#[test]
fn checkpoint_is_reported_during_a_validation() {
    let _stream = lock_random_stream();
    let folder = tempfile::tempdir().unwrap();
    let server = TestReportServer::with_directives(|report| match report.event {
        ReportEvent::Validated { .. } => Directive::Stop,
        _ => Directive::Continue { units: 20 },
    });
    let mut config = config_under_runner(&server, "val_loss", folder.path());
    // The validation after batch 20 begins soon after this checkpoint.
    config.checkpoint_period = Some(Length::new(Unit::Batches, 19));
    let context = program::context(config, None).unwrap();
    let callback = AwaitsCheckpoint(server.received.clone());
    let data = || Data::arrays(samples()).unwrap();
    let fit = Fit::new(data()).validation(data()).batch_size(10).callbacks(vec![callback.boxed()]);
    let step = |model: &Net, (x, y): Pair| StepOutput::classification(model.forward(x), y);
    context.fit(Net::new(context.device()), optimizers(), step, fit).unwrap();
    let received = server.received.lock().unwrap();
    let names = received.iter().filter_map(|(_, report)| match &report.event {
        ReportEvent::Checkpointed { name, .. } => Some(name.as_str()),
        _ => None,
    });
    assert_eq!(names.collect::<Vec<_>>(), ["000000000019-0", "000000000020-0"]);
}

#[test]
fn remains_of_interrupted_saves_are_deleted() {
    let folder = tempfile::tempdir().unwrap();
    let server = TestReportServer::scripted(vec![continue_to_20()]);
    let checkpoints = folder.path().join("trial/checkpoints");
    // The manifest of a known one may be unavailable. They are deleted in the order of their names.
    let [known, complete, own, interrupted] = [(7, 0), (8, 0), (9, 1), (10, 0)]
        .map(|(batches, attempt)| stoker_storage::layout::checkpoint_name(batches, attempt));
    for name in [&interrupted, &known, &complete, &own] {
        std::fs::create_dir_all(checkpoints.join(name)).unwrap();
        std::fs::write(checkpoints.join(name).join("model.bpk"), "x").unwrap();
    }
    std::fs::write(checkpoints.join(&complete).join("manifest.json"), "{}").unwrap();
    let mut config = config_under_runner(&server, "val_loss", folder.path());
    config.attempt = 1;
    let checkpoint = json!({"name": known, "manifestSha256": ""});
    config.resume_from = vec![serde_json::from_value(checkpoint).unwrap()];
    let context = program::context(config, None).unwrap();
    let start = Instant::now();
    while checkpoints.join(&interrupted).exists() {
        assert!(start.elapsed() < PATIENCE, "{interrupted} remains");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    drop(context);
    for name in [&known, &complete, &own] {
        assert!(checkpoints.join(name).join("model.bpk").exists(), "{name} was deleted");
    }
}

/// Lets the time to the next report pass after each batch.
struct ReportsAreDue {
    io: Arc<Mutex<TrialIo>>,
    start: Instant,
}

impl Callback for ReportsAreDue {
    fn on_batch_end(&mut self, _: &Logs, _: &mut Control) -> Result<()> {
        self.io.lock().unwrap().posted_at = None;
        match self.start.elapsed() < PATIENCE {
            true => Ok(()),
            false => Err("no stop request arrived".into()),
        }
    }
}

#[test]
fn stop_requests_arrive_between_rows() {
    let _stream = lock_random_stream();
    let folder = tempfile::tempdir().unwrap();
    let door = TestReportServer::with_directives(|report| match report.event {
        ReportEvent::Started { .. } => Directive::Continue { units: 1_000_000 },
        _ => Directive::Preempt,
    });
    let mut config = config_under_runner(&door, "val_loss", folder.path());
    (config.units, config.scheduling_unit) = (1_000_000, 1_000_000);
    let context = program::context(config, None).unwrap();
    let callback = ReportsAreDue { io: context.io.clone(), start: Instant::now() };
    let data = || Data::arrays(samples()).unwrap();
    let fit = Fit::new(data()).validation(data()).batch_size(10).callbacks(vec![callback.boxed()]);
    let step = |model: &Net, (x, y): Pair| StepOutput::classification(model.forward(x), y);
    let error = context.fit(Net::new(context.device()), optimizers(), step, fit).unwrap_err();
    assert_eq!(error.to_string(), "preempted by the runner");
}

#[test]
fn training_continues_while_reports_are_refused() {
    let _stream = lock_random_stream();
    let refusals = [401, 403, 410, 401, 500].map(|status| (status, "not now".to_owned()));
    let door = TestReportServer::scripted([&refusals[..], &[continue_to_20()]].concat());
    let validation = Some(Data::arrays(samples()).unwrap());
    let (fitted, reports) = train_with_server(&door, "val_loss", Stops(20), validation);
    assert_eq!(fitted.unwrap().stopped.as_deref(), Some("enough"));
    let num_refused = reports[1..].iter().take_while(|report| **report == reports[0]).count();
    assert_eq!(num_refused, refusals.len(), "the refused report is sent again");
    let is_result = |report: &&Report| {
        matches!(report.event, ReportEvent::Validated { granted_units: Some(20), .. })
    };
    assert_eq!(reports.iter().filter(is_result).count(), 1);
}

#[test]
fn early_stop_reports_a_result_only_at_length() {
    let _stream = lock_random_stream();
    let check = |stop_at, expected| {
        let (fitted, reports) = train_under_runner("val_loss", Stops(stop_at));
        assert_eq!(fitted.unwrap().stopped.as_deref(), Some("enough"));
        let validated = |report: &Report| match report.event {
            ReportEvent::Validated { granted_units, .. } => Some((report.batches, granted_units)),
            _ => None,
        };
        let reported: Vec<_> = reports.iter().filter_map(validated).collect();
        assert_eq!(reported, [expected]);
    };
    check(3, (3, None));
    check(20, (20, Some(20)));
}

/// The runner would never decide on a rejected result.
#[test]
fn rejected_result_fails_with_the_reason() {
    let _stream = lock_random_stream();
    let door = TestReportServer::with_responses(|report| match report.event {
        ReportEvent::Validated { .. } => (422, "unusable".into()),
        _ => continue_to_20(),
    });
    let validation = Some(Data::arrays(samples()).unwrap());
    let (fitted, reports) = train_with_server(&door, "val_loss", Stops(u64::MAX), validation);
    let error = fitted.unwrap_err();
    assert_eq!(exit_code(&*error), ExitCode::UserError);
    let text = error.to_string();
    assert!(text.starts_with("the report of batch 20 was rejected: "), "{text}");
    assert!(text.ends_with("unusable"), "{text}");
    let is_validated = |report: &&Report| matches!(report.event, ReportEvent::Validated { .. });
    assert_eq!(reports.iter().filter(is_validated).count(), 1, "{reports:?}");
}

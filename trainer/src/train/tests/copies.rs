//! Copies of trials: they continue from the checkpoint of another trial, with their own
//! hyperparameters.

use stoker_api::contract::{Directive, Report, ReportEvent};
use stoker_storage::hash::sha256_hex;

use super::*;
use crate::reporter::tests::TestReportServer;

/// Batch of the source's checkpoint.
const COPIED: u64 = 5;
const CHECKPOINT: &str = "000000000005-0";

type Steps = Arc<Mutex<Vec<u64>>>;

/// Trains with the context's hyperparameters, and records the optimizer's steps. Returns the output
/// weights.
fn fit(context: &Context, steps: &Steps) -> Result<Vec<f32>> {
    let number = |name: &str, or: f64| context.hparam(name).and_then(Value::as_f64).unwrap_or(or);
    let (rate, batch_size) = (number("rate", 0.1), number("batch", 10.0) as usize);
    let steps = steps.clone();
    let schedule = move |step: u64| {
        steps.lock().unwrap().push(step);
        rate
    };
    let optimizers = match context.hparam("adam") {
        None => Optimizers::one(SgdConfig::new().build(), schedule),
        Some(_) => Optimizers::one(AdamConfig::new().build(), schedule),
    };
    let data = || Data::arrays(samples());
    let fit = Fit::new(data()?).validation(data()?).batch_size(batch_size);
    let step = |model: &Net, (x, y): Pair| StepOutput::classification(model.forward(x), y);
    let model = Net::new(context.device());
    let fitted = context.fit(model, optimizers, step, fit)?;
    Ok(fitted.model.output.weight.val().into_data().iter::<f32>().collect())
}

/// Trains the source. Returns its weights, and its experiment with the hash of its checkpoint.
fn train_source(folder: &Path) -> (Vec<f32>, Value, String) {
    let context = alone(Some(folder), COPIED).context().unwrap();
    let weights = fit(&context, &Steps::default()).unwrap();
    let manifest = folder.join("trial/checkpoints").join(CHECKPOINT).join("manifest.json");
    let text = std::fs::read(manifest).unwrap();
    let manifest: Value = serde_json::from_slice(&text).unwrap();
    (weights, manifest["experimentId"].clone(), sha256_hex(&text))
}

/// Trains a copy to batch 8, under a runner. Returns its weights and its reports.
fn train_copy(
    folder: &Path,
    experiment: &Value,
    sha256: &str,
    hyperparameters: &Value,
    steps: &Steps,
) -> (Result<Vec<f32>>, Vec<Report>) {
    let server = TestReportServer::with_directives(|report| match report.event {
        ReportEvent::Validated { granted_units: Some(_), .. } => Directive::Stop,
        _ => Directive::Continue { units: 8 },
    });
    let token = folder.join("token");
    std::fs::write(&token, "one").unwrap();
    let config = json!({
        "version": 1, "experiment": "x", "experimentId": experiment, "trial": 3, "attempt": 0,
        "seed": 99, "experimentSeed": 7, "hyperparameters": hyperparameters,
        "unit": "batches", "units": 8,
        "metric": "val_loss", "smallerIsBetter": true, "schedulingUnit": 100,
        "aggregationFrequency": 1, "storage": {"url": folder, "trialPath": "copy"},
        "resumeFrom": [{"name": CHECKPOINT, "manifestSha256": sha256, "trialPath": "trial"}],
        "door": {"url": format!("http://{}/", server.address), "tokenFile": token},
    });
    let context = program::context(serde_json::from_value(config).unwrap(), None).unwrap();
    let weights = fit(&context, steps);
    drop(context);
    let received = server.received.lock().unwrap();
    let reports = received.iter().map(|(_, report)| report.clone()).collect();
    (weights, reports)
}

#[test]
fn copy_continues_its_source_with_its_own_rate() {
    let _stream = lock_random_stream();
    let folder = tempfile::tempdir().unwrap();
    let (weights, experiment, sha256) = train_source(folder.path());
    let steps = Steps::default();
    let rate = |rate: f64| json!({"rate": rate});
    let (still, reports) = train_copy(folder.path(), &experiment, &sha256, &rate(0.0), &steps);
    // Without a learning rate, the weights stay those of the source.
    assert_eq!(still.unwrap(), weights);
    assert_eq!(*steps.lock().unwrap(), [5, 6, 7], "the step counter continues");
    let ReportEvent::Started { resumed_from, .. } = &reports[0].event else {
        panic!("{reports:?}")
    };
    assert_eq!((reports[0].batches, resumed_from.as_deref()), (COPIED, Some(CHECKPOINT)));
    // The copy has its own directory, and the source keeps its checkpoint.
    assert!(folder.path().join("copy/checkpoints/000000000008-0/manifest.json").exists());
    assert!(folder.path().join("trial/checkpoints").join(CHECKPOINT).exists());
    let (moved, _) = train_copy(folder.path(), &experiment, &sha256, &rate(0.1), &steps);
    assert_ne!(moved.unwrap(), weights);
}

#[test]
fn copy_with_another_batch_size_is_invalid() {
    let _stream = lock_random_stream();
    let folder = tempfile::tempdir().unwrap();
    let (_, experiment, sha256) = train_source(folder.path());
    let batch = json!({"batch": 20});
    let (copy, _) = train_copy(folder.path(), &experiment, &sha256, &batch, &Steps::default());
    let error = copy.unwrap_err();
    assert_eq!(exit_code(&*error), ExitCode::InvalidHyperparameters, "{error}");
    assert!(error.to_string().contains("global batches of 10, not on 100 in 20"), "{error}");
}

#[test]
fn copy_with_another_optimizer_is_invalid() {
    let _stream = lock_random_stream();
    let folder = tempfile::tempdir().unwrap();
    let (_, experiment, sha256) = train_source(folder.path());
    let adam = json!({"adam": true});
    let (copy, _) = train_copy(folder.path(), &experiment, &sha256, &adam, &Steps::default());
    let error = copy.unwrap_err();
    assert_eq!(exit_code(&*error), ExitCode::InvalidHyperparameters, "{error}");
    assert!(
        error.to_string().contains("the state of another optimizer (hidden.weight)"),
        "{error}"
    );
}

#[test]
fn copy_never_trains_from_scratch() {
    let _stream = lock_random_stream();
    let folder = tempfile::tempdir().unwrap();
    let (_, experiment, _) = train_source(folder.path());
    let other = "0".repeat(64);
    let steps = Steps::default();
    let (copy, reports) = train_copy(folder.path(), &experiment, &other, &json!({}), &steps);
    let error = copy.unwrap_err();
    assert_eq!(exit_code(&*error), ExitCode::Infrastructure, "{error}");
    let expected = format!("cannot start from checkpoint {CHECKPOINT} of trial, which this trial");
    assert!(error.to_string().contains(&expected), "{error}");
    assert!(steps.lock().unwrap().is_empty());
    let is_start = |report: &&Report| matches!(report.event, ReportEvent::Started { .. });
    assert_eq!(reports.iter().find(is_start), None);
}

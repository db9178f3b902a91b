//! Attempts that can use none of their checkpoints, under a runner.

use std::collections::BTreeMap;
use std::path::Path;

use stoker_api::contract::{CheckpointRef, ExitCode, ReportEvent};
use stoker_storage::hash::sha256_hex;

use super::early_ends::{Stops, config_under_runner, continue_to_20};
use super::*;
use crate::error::exit_code;
use crate::reporter::tests::TestReportServer;

const NAME: &str = "000000000005-0";

/// Trains an attempt that resumes from a checkpoint with this manifest. Returns the refused
/// checkpoints that it reports.
fn train(folder: &Path, manifest: Option<&str>) -> Result<BTreeMap<String, String>> {
    let text = manifest.unwrap_or_default();
    if manifest.is_some() {
        let path = folder.join("trial/checkpoints").join(NAME);
        std::fs::create_dir_all(&path).unwrap();
        std::fs::write(path.join("manifest.json"), text).unwrap();
    }
    let _stream = lock_random_stream();
    let door = TestReportServer::scripted(vec![continue_to_20()]);
    let mut config = config_under_runner(&door, "val_loss", folder);
    let manifest_sha256 = sha256_hex(text.as_bytes());
    config.attempt = 1;
    config.resume_from =
        vec![CheckpointRef { name: NAME.into(), manifest_sha256, trial_path: None }];
    let context = program::context(config, None).unwrap();
    let fit = Fit::new(Data::arrays(samples()).unwrap()).batch_size(10);
    let fit = fit.validation(Data::arrays(samples()).unwrap()).callbacks(vec![Stops(1).boxed()]);
    let step = |model: &Net, (x, y): Pair| StepOutput::classification(model.forward(x), y);
    context.fit(Net::new(context.device()), optimizers(), step, fit)?;
    let received = door.received.lock().unwrap();
    let started = received.iter().find_map(|(_, report)| match &report.event {
        ReportEvent::Started { resumed_from: None, refused, .. } => Some(refused.clone()),
        _ => None,
    });
    Ok(started.unwrap())
}

/// The version that wrote the checkpoint can resume from it.
#[test]
fn newer_checkpoints_are_not_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let error = train(folder.path(), Some(r#"{"format": 99}"#)).unwrap_err();
    assert_eq!(exit_code(&*error), ExitCode::Infrastructure, "{error}");
    let expected = format!("checkpoint {NAME}: cannot read manifest.json: it has format 99");
    assert!(error.to_string().starts_with(&expected), "{error}");
}

#[test]
fn lost_checkpoints_are_reported_with_the_start() {
    for (manifest, why) in [(None, "manifest.json is missing"), (Some("{"), "EOF while parsing")] {
        let folder = tempfile::tempdir().unwrap();
        let refused = train(folder.path(), manifest).unwrap();
        assert!(refused[NAME].contains(why), "{refused:?}");
    }
}

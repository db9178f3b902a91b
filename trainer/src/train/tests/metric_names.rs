//! Names of metrics, checked before the first batch.

use super::early_ends::{Fails, continue_to_20, train_under_runner, train_under_runner_with};
use super::early_ends::{Stops, under_runner};
use super::*;
use crate::reporter::tests::TestReportServer;

#[test]
fn missing_searched_metric_fails_before_the_first_batch() {
    let _stream = lock_random_stream();
    let check = |metric, expected: &str, code| {
        let error = train_under_runner(metric, Fails).0.unwrap_err();
        assert_eq!((error.to_string().as_str(), exit_code(&*error)), (expected, code));
    };
    check(
        "validation_los",
        "searched metric validation_los not found: validation reported validation_accuracy, \
         validation_loss; report it or change searcher.metric",
        ExitCode::Unrecoverable,
    );
    check("validation_loss", "callback Fails: no", ExitCode::UserError);
}

#[test]
fn missing_watched_metric_fails_before_the_first_batch() {
    let _stream = lock_random_stream();
    let check = |metric, expected: &str| {
        let adam = Optimizers::one(AdamConfig::new().init(), 0.1);
        let callbacks = vec![ReduceOnPlateau::new(metric).boxed(), Fails.boxed()];
        assert_eq!(refused(10, adam, callbacks), expected);
    };
    check(
        "val_los",
        "callback ReduceOnPlateau: metric val_los not found: validation reported val_accuracy, \
         val_loss; watch one of these, or report it in validations",
    );
    check("validation_loss", "callback Fails: no");
}

/// A step that counts the samples of a validation itself.
struct Counts(Mutex<usize>);

impl Step<Net, Pair> for Counts {
    fn train(&self, model: &Net, (x, y): Pair) -> StepOutput {
        StepOutput::classification(model.forward(x), y)
    }

    fn validate(&self, model: &Net, (x, y): Pair) -> StepOutput {
        *self.0.lock().unwrap() += y.dims()[0];
        self.train(model, (x, y))
    }

    fn validated(&self, mut sums: crate::Metrics) -> Result<crate::Metrics> {
        let samples = std::mem::take(&mut *self.0.lock().unwrap());
        sums.add_one("samples", samples as f64, 1.0);
        Ok(sums)
    }
}

/// The searched metric exists only after the last batch of a validation.
#[test]
fn check_of_metric_names_is_a_complete_validation() {
    let _stream = lock_random_stream();
    let folder = tempfile::tempdir().unwrap();
    let door = TestReportServer::scripted(vec![continue_to_20()]);
    let context = under_runner(&door, "val_samples", folder.path());
    let data = || Data::arrays(samples()).unwrap();
    let fit = Fit::new(data()).validation(data()).batch_size(10);
    let fit = fit.callbacks(vec![Stops(20).boxed()]);
    let model = Net::new(context.device());
    let fitted = context.fit_with(model, optimizers(), Counts(Mutex::default()), fit).unwrap();
    assert_eq!(fitted.history[1]["val_samples"], 100.0);
}

#[test]
fn missing_validation_data_fails_before_the_first_batch() {
    let _stream = lock_random_stream();
    for metric in ["val_loss", "validation_loss"] {
        // The callback would fail at the first batch.
        let (fitted, reports) = train_under_runner_with(metric, Fails, None);
        let error = fitted.unwrap_err();
        assert_eq!(exit_code(&*error), ExitCode::UserError);
        let expected = format!(
            "no validation data for searcher.metric {metric}; add it with `Fit::validation`"
        );
        assert_eq!(error.to_string(), expected);
        assert!(reports.iter().all(|report| report.batches == 0), "{reports:?}");
    }
}

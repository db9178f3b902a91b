//! Stops by a signal or the runner during a validation.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use burn::tensor::Distribution;
use stoker_api::contract::Directive;
use stoker_test_cluster::PATIENCE;

use super::data_kinds::Tiny;
use super::early_ends::{Stops, config_under_runner};
use super::*;
use crate::reporter::tests::TestReportServer;
use crate::trial_io::TrialIo;
use crate::{Distributed, NextAction, ThreadRank};

/// Requests a stop like a signal, after this batch of the validation after this training batch.
struct StopInValidation(Option<[u64; 2]>, StopSignal);

impl Callback for StopInValidation {
    fn wants_batch_logs(&self) -> bool {
        false
    }

    fn on_validation_batch_end(&mut self, index: u64, control: &mut Control) -> Result<()> {
        if self.0 == Some([control.batches(), index]) {
            self.1.set();
        }
        Ok(())
    }
}

/// Returns the loss and a metric that samples a random number.
fn noisy_step(model: &Net, (x, y): Pair) -> StepOutput {
    let noise = Tensor::<1>::random([1], Distribution::Default, &x.device());
    StepOutput::classification(model.forward(x), y).metric("noise", noise, 1_usize)
}

/// Trains for 20 batches, with validations after batches 7, 14 and 20 of 7 batches each.
fn train_until(folder: &Path, stop_at: Option<[u64; 2]>) -> Result<Fitted<Net>> {
    let context = alone(Some(folder), 20).context()?;
    let callbacks = vec![
        EarlyStopping::new("val_loss").patience(9).boxed(),
        StopInValidation(stop_at, context.stop.clone()).boxed(),
    ];
    let data = || Data::arrays(samples());
    let fit = Fit::new(data()?).validation(data()?).batch_size(16).callbacks(callbacks);
    context.fit(Net::new(context.device()), optimizers(), noisy_step, fit)
}

/// Same as [`train_until`], with a custom loop.
fn loop_until(folder: &Path, stop_at: Option<[u64; 2]>) -> Result<Fitted<Net>> {
    let context = alone(Some(folder), 20).context()?;
    let callbacks = vec![
        EarlyStopping::new("val_loss").patience(9).boxed(),
        StopInValidation(None, context.stop.clone()).boxed(),
    ];
    run_loop(&context, callbacks, stop_at)
}

fn run_loop(
    context: &Context,
    callbacks: Vec<Box<dyn Callback>>,
    stop_at: Option<[u64; 2]>,
) -> Result<Fitted<Net>> {
    let data = || Data::arrays(samples());
    let fit = Fit::new(data()?).batch_size(16).callbacks(callbacks);
    let step = noisy_step;
    let mut training = context.training(Net::new(context.device()), optimizers(), fit)?;
    while let Some(action) = training.next()? {
        match action {
            NextAction::Train(batch) => {
                let output = batch.map(|batch| step(&training.model(), batch));
                training.learn(output)?;
            }
            NextAction::Validate => {
                let (batches, index) = (training.batches(), Cell::new(0));
                let validate = |model: &Net, batch: Pair| {
                    if stop_at == Some([batches, index.replace(index.get() + 1)]) {
                        context.stop.set();
                    }
                    step(model, batch)
                };
                let metrics = training.evaluate(validate, &data()?, 16)?;
                training.validated(&metrics)?;
            }
        }
    }
    training.finish()
}

#[test]
fn interrupted_validations_start_over_after_a_resume() {
    let _stream = lock_random_stream();
    let straight = brief_folder();
    let fitted = train_until(straight.path(), None).unwrap();
    let (files, rows_straight) = (last_checkpoint(straight.path()), rows(straight.path()));
    for train in [train_until, loop_until] {
        for stop_at in [[7, 0], [14, 5], [20, 3]] {
            let folder = brief_folder();
            // The second process is interrupted too.
            for _ in 0..2 {
                let error = train(folder.path(), Some(stop_at)).unwrap_err();
                assert_eq!(exit_code(&*error), ExitCode::Preempted, "{error}");
                let last = rows(folder.path()).pop().unwrap();
                assert!((last.0, &*last.1) < (stop_at[0], "validation"), "{stop_at:?}: {last:?}");
            }
            let resumed = train(folder.path(), None).unwrap();
            assert_eq!(resumed.history, fitted.history, "{stop_at:?}");
            assert_eq!(rows(folder.path()), rows_straight, "{stop_at:?}");
            if stop_at[0] < 20 {
                assert!(last_checkpoint(folder.path()) == files, "{stop_at:?}");
            }
        }
    }
}

/// A callback stops training at a batch without a validation; a signal then interrupts the final
/// validation.
#[test]
fn resumed_final_validation_is_saved() {
    let _stream = lock_random_stream();
    for has_custom_loop in [false, true] {
        let folder = brief_folder();
        let train = |stop_at| {
            let context = alone(Some(folder.path()), 20).context().unwrap();
            if has_custom_loop {
                return run_loop(&context, vec![Stops(9).boxed()], stop_at);
            }
            let stop = StopInValidation(stop_at, context.stop.clone()).boxed();
            let data = || Data::arrays(samples()).unwrap();
            let fit = Fit::new(data()).validation(data()).batch_size(16);
            let fit = fit.callbacks(vec![Stops(9).boxed(), stop]);
            context.fit(Net::new(context.device()), optimizers(), noisy_step, fit)
        };
        let has_metric = |attempt: u32| {
            let manifest = format!("trial/checkpoints/000000000009-{attempt}/manifest.json");
            let manifest = std::fs::read_to_string(folder.path().join(manifest)).unwrap();
            !serde_json::from_str::<Value>(&manifest).unwrap()["metric"].is_null()
        };
        train(Some([9, 2])).unwrap_err();
        assert!(!has_metric(0));
        train(None).unwrap();
        assert!(has_metric(1), "custom loop: {has_custom_loop}");
    }
}

#[test]
fn custom_loops_make_up_interrupted_validations() {
    let _stream = lock_random_stream();
    let (straight, folder) = (brief_folder(), brief_folder());
    let fitted = train_until(straight.path(), None).unwrap();
    train_until(folder.path(), Some([7, 2])).unwrap_err();
    assert_eq!(loop_until(folder.path(), None).unwrap().history, fitted.history);
    assert_eq!(rows(folder.path()), rows(straight.path()));
    assert!(last_checkpoint(folder.path()) == last_checkpoint(straight.path()));
}

/// Trains on two ranks under a runner that grants 20 batches. Both must be preempted, without a
/// validation.
fn check_ranks_are_preempted(train: impl Fn(&Context) -> Result<()> + Sync) {
    let folder = brief_folder();
    let directive = Directive::Continue { units: 20 };
    let server = TestReportServer::with_directives(move |_| directive);
    let context = |rank: ThreadRank| {
        let mut config = config_under_runner(&server, "val_loss", folder.path());
        let ranks = Distributed::from_collective(Box::new(rank));
        let io = TrialIo::open(&mut config, None, ranks.rank() == 0).unwrap();
        let device = Device::flex().autodiff();
        let context = Context::new(config, io, StopSignal::default(), device, ranks);
        context.silence();
        context
    };
    let contexts: Vec<Context> = ThreadRank::group(2).into_iter().map(context).collect();
    let errors: Vec<_> = std::thread::scope(|scope| {
        let train = &train;
        let ranks: Vec<_> =
            contexts.into_iter().map(|context| scope.spawn(move || train(&context))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap().unwrap_err()).collect()
    });
    for error in errors {
        assert_eq!(exit_code(&*error), ExitCode::Preempted, "{error}");
    }
    assert!(rows(folder.path()).iter().all(|row| row.1 != "validation"));
}

#[test]
fn all_ranks_stop_in_one_validation() {
    let _stream = lock_random_stream();
    check_ranks_are_preempted(|context| {
        // 25 batches per validation; the signal reaches one rank.
        let stop_at = (context.distributed().rank() == 1).then_some([20, 3]);
        let stop = StopInValidation(stop_at, context.stop.clone()).boxed();
        let data = || Data::arrays(samples());
        let fit = Fit::new(data()?).validation(data()?).batch_size(2).callbacks(vec![stop]);
        let adam = Optimizers::one(AdamConfig::new().init(), 0.01);
        context.fit(Tiny::new(context.device()), adam, tiny_step, fit).map(drop)
    });
}

#[test]
fn check_stop_agrees_on_all_ranks() {
    let _stream = lock_random_stream();
    check_ranks_are_preempted(|context| {
        let fit = Fit::new(Data::arrays(samples())?).batch_size(2);
        let adam = Optimizers::one(AdamConfig::new().init(), 0.01);
        let mut training = context.training(Tiny::new(context.device()), adam, fit)?;
        let error = training.check_stop().unwrap_err().to_string();
        assert!(error.starts_with("cannot call `check_stop`: `next` was not called"), "{error}");
        while let Some(action) = training.next()? {
            let NextAction::Train(batch) = action else { break };
            let output = batch.map(|batch| tiny_step(&training.model(), batch));
            training.learn(output)?;
        }
        assert_eq!(training.batches(), 20);
        for index in 0..25 {
            training.check_stop()?;
            if index == 3 && context.distributed().rank() == 1 {
                context.stop.set();
            }
        }
        Err("the validation was not stopped".into())
    });
}

fn tiny_step(model: &Tiny, (x, y): Pair) -> StepOutput {
    StepOutput::classification(model.output.forward(x), y)
}

/// Lets the time to the next report pass in a validation, and waits for the directive to it.
struct WaitsForPreemption {
    io: Arc<Mutex<TrialIo>>,
    is_validating: Arc<AtomicBool>,
}

impl Callback for WaitsForPreemption {
    fn on_validation_batch_end(&mut self, index: u64, _: &mut Control) -> Result<()> {
        let start = Instant::now();
        match index {
            // The next batch begins with a report, and the directive stops the batch after it.
            0 => {
                self.is_validating.store(true, Ordering::Relaxed);
                self.io.lock().unwrap().posted_at = None;
            }
            1 => {
                while self.io.lock().unwrap().directive() != Some(Directive::Preempt) {
                    if start.elapsed() > PATIENCE {
                        return Err("no progress was reported".into());
                    }
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            _ => return Err("the validation did not stop".into()),
        }
        Ok(())
    }
}

#[test]
fn runner_stops_a_validation() {
    let _stream = lock_random_stream();
    let folder = brief_folder();
    let is_validating = Arc::new(AtomicBool::new(false));
    let is_preempted = is_validating.clone();
    let server =
        TestReportServer::with_directives(move |_| match is_preempted.load(Ordering::Relaxed) {
            true => Directive::Preempt,
            false => Directive::Continue { units: 20 },
        });
    let config = config_under_runner(&server, "val_loss", folder.path());
    let context = program::context(config, None).unwrap();
    let callback = WaitsForPreemption { io: context.io.clone(), is_validating }.boxed();
    let data = || Data::arrays(samples()).unwrap();
    let fit = Fit::new(data()).validation(data()).batch_size(10).callbacks(vec![callback]);
    let step = |model: &Net, (x, y): Pair| StepOutput::classification(model.forward(x), y);
    let error = context.fit(Net::new(context.device()), optimizers(), step, fit).unwrap_err();
    assert_eq!(error.to_string(), "preempted by the runner");
    assert!(rows(folder.path()).iter().all(|row| row.1 != "validation"));
    last_checkpoint(folder.path());
}

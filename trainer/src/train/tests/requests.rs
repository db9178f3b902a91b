//! Errors, stops and requests of programs and callbacks.

use super::*;
use crate::callback::CheckpointFiles;
use crate::{InvalidHyperparameters, raise, record};

/// Stores a number in checkpoints and records the restored numbers.
struct Keeps {
    number: u64,
    restored: Arc<Mutex<Vec<u64>>>,
}

impl Callback for Keeps {
    fn state(&self) -> Result<Value> {
        Ok(json!(self.number))
    }

    fn load_state(&mut self, state: Value) -> Result<()> {
        self.restored.lock().unwrap().push(serde_json::from_value(state)?);
        Ok(())
    }
}

fn step(model: &Net, (x, y): Pair) -> StepOutput {
    StepOutput::classification(model.forward(x), y)
}

/// Trains to batch `until` with these callbacks.
fn fit(
    folder: &Path,
    seed: u32,
    until: u64,
    callbacks: Vec<Box<dyn Callback>>,
) -> Result<Fitted<Net>> {
    let context = Standalone { seed, ..alone(Some(folder), until) }.context()?;
    let fit = Fit::new(Data::arrays(samples())?).batch_size(16).callbacks(callbacks);
    context.fit(Net::new(context.device()), optimizers(), step, fit)
}

#[test]
fn callbacks_of_one_type_restore_their_own_state() {
    let _stream = lock_random_stream();
    let (folder, restored) = (tempfile::tempdir().unwrap(), Arc::default());
    let keeps = |number| Keeps { number, restored: Arc::clone(&restored) }.boxed();
    let callbacks = || [5, 6, 7].map(keeps).into();
    fit(folder.path(), 7, 3, callbacks()).unwrap();
    assert!(restored.lock().unwrap().is_empty());
    fit(folder.path(), 7, 4, callbacks()).unwrap();
    assert_eq!(*restored.lock().unwrap(), [5, 6, 7]);
}

#[test]
fn duplicate_callback_names_get_unused_numbers() {
    struct Named(&'static str);
    impl Callback for Named {
        fn name(&self) -> String {
            self.0.into()
        }
    }
    let callbacks = ["a", "b", "a", "a 2", "a"].map(|name| Named(name).boxed());
    assert_eq!(unique_names(&callbacks), ["a", "b", "a 2", "a 2 2", "a 3"]);
}

#[test]
fn callback_panic_names_the_callback() {
    struct Panics;
    impl Callback for Panics {
        fn on_batch_begin(&mut self, _: &mut Control) -> Result<()> {
            panic!("at {}", 3)
        }
    }
    let _stream = lock_random_stream();
    let adam = Optimizers::one(AdamConfig::new().init(), 0.1);
    assert_eq!(refused(10, adam, vec![Panics.boxed()]), "callback Panics: panicked: at 3");
}

#[test]
fn raised_errors_end_training() {
    struct Raises;
    impl Callback for Raises {
        fn on_batch_end(&mut self, _: &Logs, _: &mut Control) -> Result<()> {
            raise(InvalidHyperparameters("in a callback".into()))
        }
    }
    let _stream = lock_random_stream();
    let check = |position: &'static str, workers| {
        let context = alone(None, 4).context().unwrap();
        let at = move |here| {
            if here == position {
                raise(InvalidHyperparameters(position.into()))
            }
        };
        let data = |map_position| {
            let map = move |pair| {
                at(map_position);
                Ok(pair)
            };
            Data::arrays(samples()).unwrap().map(map).workers(workers)
        };
        let callbacks = if position == "in a callback" { vec![Raises.boxed()] } else { vec![] };
        let fit = Fit::new(data("in the data"))
            .validation(data("in validation's data"))
            .batch_size(16)
            .callbacks(callbacks);
        let num_steps = std::cell::Cell::new(0);
        let step = |model: &Net, pair: Pair| {
            num_steps.set(num_steps.get() + 1);
            at(if num_steps.get() == 1 { "in the first step" } else { "in a step" });
            step(model, pair)
        };
        let error = context.fit(Net::new(context.device()), optimizers(), step, fit).unwrap_err();
        assert_eq!(exit_code(&*error), ExitCode::InvalidHyperparameters, "{position}: {error}");
        assert!(
            error.to_string().ends_with(&format!("invalid hyperparameters: {position}")),
            "{error}"
        );
    };
    for position in ["in the first step", "in a step", "in a callback"] {
        check(position, 0);
    }
    for position in ["in the data", "in validation's data"] {
        check(position, 0);
        check(position, 2);
    }
}

#[test]
fn raised_errors_end_evaluation_and_prediction() {
    let _stream = lock_random_stream();
    let context = alone(None, 4).context().unwrap();
    let (model, data) = (Net::new(context.device()), Data::arrays(samples()).unwrap());
    let raised = |_: &Net, _: Pair| -> StepOutput { raise("raised") };
    let error = context.evaluate(&model, raised, &data, 16).unwrap_err();
    assert_eq!(error.to_string(), "raised");
    let error = context.predict(&model, &data, 16, raised).unwrap_err();
    assert_eq!(error.to_string(), "raised");
    let error = context.predict(&model, &data, 0, |_, _| ()).unwrap_err();
    assert_eq!(error.to_string(), "batch_size is 0; it must be at least 1");
}

/// Requests a learning rate scale, and optionally a stop, in one hook.
struct Asks {
    at: &'static str,
    scale: f64,
    stops: bool,
    seen: Arc<Mutex<Vec<(u64, f64)>>>,
}

impl Asks {
    fn request(&self, at: &str, control: &mut Control) {
        if self.at != at {
            return;
        }
        control.set_learning_rate_scale(self.scale);
        if self.stops {
            control.stop_training("enough");
        }
    }
}

impl Callback for Asks {
    fn on_train_begin(&mut self, control: &mut Control) -> Result<()> {
        self.request("train begin", control);
        Ok(())
    }

    fn on_batch_end(&mut self, _: &Logs, control: &mut Control) -> Result<()> {
        self.seen.lock().unwrap().push((control.batches(), control.learning_rate_scale()));
        Ok(())
    }

    fn on_checkpoint(&mut self, _: &mut CheckpointFiles, control: &mut Control) -> Result<()> {
        self.request("checkpoint", control);
        Ok(())
    }
}

#[test]
fn requests_on_train_begin_do_not_override_checkpoints() {
    let _stream = lock_random_stream();
    let (folder, seen) = (tempfile::tempdir().unwrap(), Arc::default());
    let asks = |at, scale| Asks { at, scale, stops: false, seen: Arc::clone(&seen) }.boxed();
    fit(folder.path(), 7, 2, vec![asks("train begin", 0.5), asks("checkpoint", 0.25)]).unwrap();
    fit(folder.path(), 7, 3, vec![asks("train begin", 0.5)]).unwrap();
    let seen = seen.lock().unwrap();
    let scales: Vec<_> = seen.iter().map(|(_, scale)| *scale).collect();
    // First process: two callbacks, two batches. Second process: the scale from the checkpoint.
    assert_eq!(scales, [0.5, 0.5, 0.5, 0.5, 0.25]);
}

#[test]
fn stop_from_on_checkpoint_applies_one_batch_later() {
    let _stream = lock_random_stream();
    let (folder, seen) = (tempfile::tempdir().unwrap(), Arc::<Mutex<Vec<_>>>::default());
    // The checkpoint is after an epoch of seven batches.
    let asks = Asks { at: "checkpoint", scale: 1.0, stops: true, seen: seen.clone() }.boxed();
    let fitted = fit(folder.path(), 7, 20, vec![asks]).unwrap();
    assert_eq!(fitted.stopped.as_deref(), Some("enough"));
    assert_eq!(seen.lock().unwrap().last().unwrap().0, 8);
    // All batches have rows, although none was due at the last batch.
    let rows: Vec<_> = rows(folder.path()).iter().map(|row| row.0).collect();
    assert_eq!(rows, [4, 8]);
}

#[test]
fn stop_from_on_checkpoint_survives_a_restart() {
    let _stream = lock_random_stream();
    let (folder, seen) = (tempfile::tempdir().unwrap(), Arc::<Mutex<Vec<_>>>::default());
    let asks =
        |stops| Asks { at: "checkpoint", scale: 1.0, stops, seen: Arc::clone(&seen) }.boxed();
    // The first process ends after the checkpoint, before another hook for a batch.
    fit(folder.path(), 7, 7, vec![asks(true)]).unwrap();
    let fitted = fit(folder.path(), 7, 20, vec![asks(false)]).unwrap();
    assert_eq!(fitted.stopped.as_deref(), Some("enough"));
    assert_eq!(seen.lock().unwrap().last().unwrap().0, 8);
}

#[test]
fn callback_stop_writes_the_last_row() {
    struct Stops;
    impl Callback for Stops {
        fn on_batch_end(&mut self, _: &Logs, control: &mut Control) -> Result<()> {
            if control.batches() == 6 {
                control.stop_training("enough");
            }
            Ok(())
        }
    }
    let _stream = lock_random_stream();
    let folder = tempfile::tempdir().unwrap();
    for _ in 0..2 {
        fit(folder.path(), 7, 20, vec![Stops.boxed()]).unwrap();
        let rows: Vec<_> = rows(folder.path()).iter().map(|row| row.0).collect();
        assert_eq!(rows, [4, 6]);
    }
}

#[test]
fn invalid_learning_rate_scale_is_rejected() {
    let _stream = lock_random_stream();
    let (folder, seen) = (tempfile::tempdir().unwrap(), Arc::default());
    for scale in [f64::NAN, -1.0] {
        let asks = Asks { at: "train begin", scale, stops: false, seen: Arc::clone(&seen) };
        let error = fit(folder.path(), 7, 2, vec![asks.boxed()]).unwrap_err().to_string();
        assert!(error.contains(&format!("learning rate scale to {scale};")), "{error}");
    }
}

#[test]
fn resume_with_another_data_order_fails() {
    let _stream = lock_random_stream();
    let folder = tempfile::tempdir().unwrap();
    fit(folder.path(), 7, 3, vec![]).unwrap();
    let error = fit(folder.path(), 8, 4, vec![]).unwrap_err().to_string();
    assert!(error.contains("it was trained with the seed 7 "), "{error}");
    assert!(error.contains("not with the seed 8 ") && error.contains("continue_id"), "{error}");
    fit(folder.path(), 7, 4, vec![]).unwrap();
}

#[test]
fn second_training_in_a_process_fails() {
    let _stream = lock_random_stream();
    let folder = tempfile::tempdir().unwrap();
    fit(folder.path(), 7, 3, vec![]).unwrap();
    let context = alone(Some(folder.path()), 3).context().unwrap();
    let once = || {
        let fit = Fit::new(Data::arrays(samples()).unwrap()).batch_size(16);
        context.fit(Net::new(context.device()), optimizers(), step, fit)
    };
    once().unwrap();
    let error = once().unwrap_err().to_string();
    assert!(error.contains("a second training could not be resumed"), "{error}");
}

#[test]
fn invalid_validation_data_fails_before_the_first_step() {
    let _stream = lock_random_stream();
    let context = alone(None, 7).context().unwrap();
    let (x, y) = samples();
    let narrow = Data::arrays((x.narrow(1, 0, 19), y)).unwrap();
    let fit = Fit::new(Data::arrays(samples()).unwrap()).validation(narrow).batch_size(16);
    let num_trained = std::cell::Cell::new(0);
    let step = |model: &Net, (x, y): Pair| {
        num_trained.set(num_trained.get() + usize::from(x.dims()[1] == 20));
        step(model, (x, y))
    };
    let error =
        context.fit(Net::new(context.device()), optimizers(), step, fit).unwrap_err().to_string();
    assert!(
        error.starts_with("the step failed on the first validation batch: panicked:"),
        "{error}"
    );
    assert_eq!(num_trained.get(), 0);
}

#[test]
fn zero_count_keeps_weights_and_invalid_counts_fail() {
    let _stream = lock_random_stream();
    let weights = |counts: f64, factor: f32| {
        let context = alone(None, 1).context().unwrap();
        let linear = LinearConfig::new(20, 5).init(context.device());
        let model = context.with_weight_seed(|| record::initialize(linear));
        let before = record::snapshot(&model).into_bytes().unwrap();
        let fit = Fit::new(Data::arrays(samples()).unwrap()).batch_size(16);
        let step = |model: &Linear, (x, _): Pair| {
            StepOutput::sum(model.forward(x).sum().mul_scalar(factor), counts)
        };
        let sgd = Optimizers::one(SgdConfig::new().build(), 0.1);
        let fitted = context.fit(model, sgd, step, fit).map_err(|error| error.to_string())?;
        Ok::<_, String>(record::snapshot(&fitted.model).into_bytes().unwrap() == before)
    };
    assert_eq!(weights(0.0, 0.0), Ok(true));
    assert_eq!(weights(16.0, 1.0), Ok(false));
    for (count, factor) in [(0.0, 1.0), (-1.0, 1.0), (f64::NAN, 0.0)] {
        let error = weights(count, factor).unwrap_err();
        assert!(error.contains(&format!("cannot step: the sample count is {count};")), "{error}");
    }
}

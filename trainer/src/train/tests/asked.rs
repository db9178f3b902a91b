//! What programs and callbacks ask for, wherever they ask for it.

use super::*;
use crate::callback::CheckpointFiles;
use crate::{InvalidHyperparameters, raise, record};

/// Keeps a number in checkpoints, and says which it came back with.
struct Keeps {
    number: u64,
    found: Arc<Mutex<Vec<u64>>>,
}

impl Callback for Keeps {
    fn state(&self) -> Result<Value> {
        Ok(json!(self.number))
    }

    fn load_state(&mut self, state: Value) -> Result<()> {
        self.found.lock().unwrap().push(serde_json::from_value(state)?);
        Ok(())
    }
}

fn step(model: &Net, (x, y): Pair) -> StepOutput {
    StepOutput::classification(model.forward(x), y)
}

/// Trains to a batch with these callbacks.
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
fn two_callbacks_of_a_type_come_back_each_with_its_own_state() {
    let _stream = alone_on_the_stream();
    let (folder, found) = (tempfile::tempdir().unwrap(), Arc::default());
    let callbacks =
        || [5, 6, 7].map(|number| Keeps { number, found: Arc::clone(&found) }.boxed()).into();
    fit(folder.path(), 7, 3, callbacks()).unwrap();
    assert!(found.lock().unwrap().is_empty());
    fit(folder.path(), 7, 4, callbacks()).unwrap();
    assert_eq!(*found.lock().unwrap(), [5, 6, 7]);
}

#[test]
fn callbacks_of_a_name_are_numbered_past_names_that_are_taken() {
    struct Named(&'static str);
    impl Callback for Named {
        fn name(&self) -> String {
            self.0.into()
        }
    }
    let callbacks = ["a", "b", "a", "a 2", "a"].map(|name| Named(name).boxed());
    assert_eq!(names(&callbacks), ["a", "b", "a 2", "a 2 2", "a 3"]);
}

#[test]
fn a_callback_that_panics_is_named() {
    struct Panics;
    impl Callback for Panics {
        fn on_batch_begin(&mut self, _: &mut Control) -> Result<()> {
            panic!("at {}", 3)
        }
    }
    let _stream = alone_on_the_stream();
    let adam = Optimizers::one(AdamConfig::new().init(), 0.1);
    assert_eq!(refused(10, adam, vec![Panics.boxed()]), "callback Panics: panicked: at 3");
}

#[test]
fn what_is_raised_anywhere_in_a_program_is_what_training_ends_with() {
    struct Raises;
    impl Callback for Raises {
        fn on_batch_end(&mut self, _: &Logs, _: &mut Control) -> Result<()> {
            raise(InvalidHyperparameters("in a callback".into()))
        }
    }
    let _stream = alone_on_the_stream();
    let check = |place: &'static str, workers| {
        let context = alone(None, 4).context().unwrap();
        let at = move |here| {
            if here == place {
                raise(InvalidHyperparameters(place.into()))
            }
        };
        let data = |map_place| {
            let map = move |pair| {
                at(map_place);
                Ok(pair)
            };
            Data::arrays(samples()).unwrap().map(map).workers(workers)
        };
        let callbacks = if place == "in a callback" { vec![Raises.boxed()] } else { vec![] };
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
        assert_eq!(exit_code(&*error), ExitCode::InvalidHyperparameters, "{place}: {error}");
        assert!(
            error.to_string().ends_with(&format!("invalid hyperparameters: {place}")),
            "{error}"
        );
    };
    for place in ["in the first step", "in a step", "in a callback"] {
        check(place, 0);
    }
    for place in ["in the data", "in validation's data"] {
        check(place, 0);
        check(place, 2);
    }
}

#[test]
fn what_is_raised_in_an_evaluation_or_a_prediction_is_what_it_ends_with() {
    let _stream = alone_on_the_stream();
    let context = alone(None, 4).context().unwrap();
    let (model, data) = (Net::new(context.device()), Data::arrays(samples()).unwrap());
    let raised = |_: &Net, _: Pair| -> StepOutput { raise("as asked") };
    let error = context.evaluate(&model, raised, &data, 16).unwrap_err();
    assert_eq!(error.to_string(), "as asked");
    let error = context.predict(&model, &data, 16, raised).unwrap_err();
    assert_eq!(error.to_string(), "as asked");
    let error = context.predict(&model, &data, 0, |_, _| ()).unwrap_err();
    assert_eq!(error.to_string(), "batch_size is 0; it must be at least 1");
}

/// Asks at one hook for a scale, and perhaps for an end.
struct Asks {
    at: &'static str,
    scale: f64,
    stops: bool,
    seen: Arc<Mutex<Vec<(u64, f64)>>>,
}

impl Asks {
    fn asked(&self, at: &str, control: &mut Control) {
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
        self.asked("train begin", control);
        Ok(())
    }

    fn on_batch_end(&mut self, _: &Logs, control: &mut Control) -> Result<()> {
        self.seen.lock().unwrap().push((control.batches(), control.learning_rate_scale()));
        Ok(())
    }

    fn on_checkpoint(&mut self, _: &mut CheckpointFiles, control: &mut Control) -> Result<()> {
        self.asked("checkpoint", control);
        Ok(())
    }
}

#[test]
fn what_is_asked_for_as_training_begins_holds_from_the_first_batch_and_not_over_a_checkpoint() {
    let _stream = alone_on_the_stream();
    let (folder, seen) = (tempfile::tempdir().unwrap(), Arc::default());
    let asks = |at, scale| Asks { at, scale, stops: false, seen: Arc::clone(&seen) }.boxed();
    fit(folder.path(), 7, 2, vec![asks("train begin", 0.5), asks("checkpoint", 0.25)]).unwrap();
    fit(folder.path(), 7, 3, vec![asks("train begin", 0.5)]).unwrap();
    let seen = seen.lock().unwrap();
    let firsts: Vec<_> = seen.iter().map(|it| it.1).collect();
    // Both callbacks of the first process, two batches; then the checkpoint's.
    assert_eq!(firsts, [0.5, 0.5, 0.5, 0.5, 0.25]);
}

#[test]
fn a_stop_that_a_checkpoint_brings_comes_after_the_next_batch() {
    let _stream = alone_on_the_stream();
    let (folder, seen) = (tempfile::tempdir().unwrap(), Arc::<Mutex<Vec<_>>>::default());
    // An epoch has seven batches, after which there is a checkpoint.
    let asks = Asks { at: "checkpoint", scale: 1.0, stops: true, seen: seen.clone() }.boxed();
    let fitted = fit(folder.path(), 7, 20, vec![asks]).unwrap();
    assert_eq!(fitted.stopped.as_deref(), Some("enough"));
    assert_eq!(seen.lock().unwrap().last().unwrap().0, 8);
    // The rows of all batches are there, though none was due at the last.
    let rows: Vec<_> = rows(folder.path()).iter().map(|row| row.0).collect();
    assert_eq!(rows, [4, 8]);
}

#[test]
fn a_training_that_a_callback_ends_between_two_rows_has_a_row_of_its_last_batches() {
    struct Stops;
    impl Callback for Stops {
        fn on_batch_end(&mut self, _: &Logs, control: &mut Control) -> Result<()> {
            if control.batches() == 6 {
                control.stop_training("enough");
            }
            Ok(())
        }
    }
    let _stream = alone_on_the_stream();
    let folder = tempfile::tempdir().unwrap();
    for _ in 0..2 {
        fit(folder.path(), 7, 20, vec![Stops.boxed()]).unwrap();
        let rows: Vec<_> = rows(folder.path()).iter().map(|row| row.0).collect();
        assert_eq!(rows, [4, 6]);
    }
}

#[test]
fn a_scale_that_is_none_is_refused() {
    let _stream = alone_on_the_stream();
    let (folder, seen) = (tempfile::tempdir().unwrap(), Arc::default());
    for scale in [f64::NAN, -1.0] {
        let asks = Asks { at: "train begin", scale, stops: false, seen: Arc::clone(&seen) };
        let error = fit(folder.path(), 7, 2, vec![asks.boxed()]).unwrap_err().to_string();
        assert!(error.contains(&format!("scale {scale}, but it must be")), "{error}");
    }
}

#[test]
fn a_position_in_another_order_of_the_data_is_not_gone_on_from() {
    let _stream = alone_on_the_stream();
    let folder = tempfile::tempdir().unwrap();
    fit(folder.path(), 7, 3, vec![]).unwrap();
    let error = fit(folder.path(), 8, 4, vec![]).unwrap_err().to_string();
    assert!(error.contains("it was trained with the seed 7 "), "{error}");
    assert!(error.contains("not with the seed 8 ") && error.contains("continue_id"), "{error}");
    fit(folder.path(), 7, 4, vec![]).unwrap();
}

#[test]
fn a_second_training_in_a_process_is_refused_also_where_the_first_had_ended_before() {
    let _stream = alone_on_the_stream();
    let folder = tempfile::tempdir().unwrap();
    fit(folder.path(), 7, 3, vec![]).unwrap();
    let context = alone(Some(folder.path()), 3).context().unwrap();
    let once = || {
        let fit = Fit::new(Data::arrays(samples()).unwrap()).batch_size(16);
        context.fit(Net::new(context.device()), optimizers(), step, fit)
    };
    once().unwrap();
    let error = once().unwrap_err().to_string();
    assert!(error.contains("a second training in it"), "{error}");
}

#[test]
fn validation_data_that_does_not_fit_is_refused_before_the_first_step() {
    let _stream = alone_on_the_stream();
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
        error.starts_with("the step fails on the first validation batch: panicked:"),
        "{error}"
    );
    assert_eq!(num_trained.get(), 0);
}

#[test]
fn a_batch_of_no_weight_moves_nothing_and_a_count_that_is_none_is_told() {
    let _stream = alone_on_the_stream();
    let weights = |counts: f64, factor: f32| {
        let context = alone(None, 1).context().unwrap();
        let linear = LinearConfig::new(20, 5).init(context.device());
        let model = context.draw_weights(|| record::initialise(linear));
        let before = record::snapshot(&model).into_bytes().unwrap();
        let fit = Fit::new(Data::arrays(samples()).unwrap()).batch_size(16);
        let step = |model: &Linear, (x, _): Pair| {
            StepOutput::sum(model.forward(x).sum().mul_scalar(factor), counts)
        };
        let sgd = Optimizers::one(SgdConfig::new().build(), 0.1);
        let fitted = context.fit(model, sgd, step, fit).map_err(|it| it.to_string())?;
        Ok::<_, String>(record::snapshot(&fitted.model).into_bytes().unwrap() == before)
    };
    assert_eq!(weights(0.0, 0.0), Ok(true));
    assert_eq!(weights(16.0, 1.0), Ok(false));
    for (count, factor) in [(0.0, 1.0), (-1.0, 1.0), (f64::NAN, 0.0)] {
        let error = weights(count, factor).unwrap_err();
        assert!(error.contains(&format!("a step over a count of {count}:")), "{error}");
    }
}

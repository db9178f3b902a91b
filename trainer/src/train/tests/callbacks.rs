//! Callbacks that change how a training goes, in whole trainings on one and two ranks, resumed at every
//! batch: the learning rates that steps use, and where they stop.
//!
//! The model is one number whose gradient is 1, so that it falls by the learning rate in each step; all
//! numbers are exact in a float.

use burn::module::Param;

use super::killed::{Ends, Fate};
use super::kinds::of_ranks;
use super::*;
use crate::{Lambda, LearningRateSchedule, ReduceOnPlateau};

/// Batches of an epoch, each of four samples.
pub(super) const EPOCH: u64 = 3;

/// One number, which begins at 4.
#[derive(Module, Debug)]
pub(super) struct Falling {
    height: Param<Tensor<1>>,
}

impl Falling {
    pub(super) fn new(device: &Device) -> Self {
        Self { height: Param::from_tensor(Tensor::from_floats([4.0], device)) }
    }

    fn height(&self) -> f32 {
        self.height.val().into_scalar()
    }
}

/// Notes the height before each step; a validation's loss is the height, but for the ground.
pub(super) struct Falls {
    pub(super) ground: f32,
    pub(super) heights: Mutex<Vec<f32>>,
}

impl Falls {
    pub(super) fn learned(model: &Falling, samples: usize) -> StepOutput {
        StepOutput::sum(model.height.val() * samples as f64, samples)
    }

    pub(super) fn validated(&self, model: &Falling, samples: usize) -> StepOutput {
        let height = model.height.val().clamp_min(self.ground);
        StepOutput::sum(height * samples as f64, samples)
    }
}

impl Step<Falling, usize> for Falls {
    fn train(&self, model: &Falling, samples: usize) -> StepOutput {
        self.heights.lock().unwrap().push(model.height());
        Self::learned(model, samples)
    }

    fn validate(&self, model: &Falling, samples: usize) -> StepOutput {
        self.validated(model, samples)
    }
}

/// Batches that are the number of their samples.
pub(super) fn counted() -> Data<usize> {
    Data::items(4 * EPOCH as usize, Some, |items, _| items.len())
}

/// What is multiplied by what callbacks say: it goes by steps.
fn rate(step: u64) -> f64 {
    if step.is_multiple_of(2) { 0.5 } else { 0.25 }
}

pub(super) fn falling_optimizers() -> Optimizers {
    Optimizers::one(SgdConfig::new().build(), rate)
}

/// What a rank saw of a training: the heights before its steps, and the last where it ended.
#[derive(Clone, Debug, PartialEq)]
struct Seen {
    heights: Vec<f32>,
    /// What the callbacks noted.
    notes: Vec<String>,
    /// Why it was stopped early.
    stopped: Option<String>,
}

type Notes = Arc<Mutex<Vec<String>>>;

fn train(
    context: &Context,
    ends: Ends,
    callbacks: &dyn Fn(&Notes) -> Vec<Box<dyn Callback>>,
) -> Result<Seen, Seen> {
    let ranks = context.distributed();
    let (notes, step) = (Notes::default(), Falls { ground: 1.5, heights: Mutex::default() });
    let fit = Fit::new(counted())
        .validation(counted())
        .batch_size(4 / ranks.size())
        .callbacks(callbacks(&notes))
        .callbacks(vec![Fate::of(context, ends, ranks.size() - 1)]);
    let step = Arc::new(step);
    struct Shared(Arc<Falls>);
    impl Step<Falling, usize> for Shared {
        fn train(&self, model: &Falling, samples: usize) -> StepOutput {
            self.0.train(model, samples)
        }

        fn validate(&self, model: &Falling, samples: usize) -> StepOutput {
            self.0.validate(model, samples)
        }
    }
    let model = Falling::new(context.device());
    let fitted = context.fit_with(model, falling_optimizers(), Shared(step.clone()), fit);
    let mut heights = step.heights.lock().unwrap().clone();
    let notes = notes.lock().unwrap().clone();
    match fitted {
        Ok(fitted) => {
            heights.push(fitted.model.height());
            Ok(Seen { heights, notes, stopped: fitted.stopped })
        }
        Err(error) => {
            assert_eq!(exit_code(&*error), ExitCode::Preempted, "{error}");
            Err(Seen { heights, notes, stopped: None })
        }
    }
}

/// Trains for `batches` on one and on two ranks, straight and left after each batch: steps use
/// these learning rates. Gives what one rank saw of a straight run.
fn check(
    what: &str,
    batches: u64,
    callbacks: impl Fn(&Notes) -> Vec<Box<dyn Callback>> + Sync,
    rates: &[f64],
) -> Seen {
    let of_process = |note: &String| !note.starts_with("train_");
    let mut straights = vec![];
    for size in [1, 2] {
        let run = |folder: &Path, ends| {
            of_ranks(folder, size, batches, |context| train(context, ends, &callbacks))
        };
        let folder = brief_folder();
        let straight = run(folder.path(), Ends::Not).into_iter().map(Result::unwrap);
        let straight: Vec<_> = straight.collect();
        let rows_straight = rows(folder.path());
        for seen in &straight {
            let fallen = seen.heights.windows(2).map(|it| f64::from(it[0] - it[1]));
            assert_eq!(fallen.collect::<Vec<_>>(), rates, "{what} on {size}");
        }
        for batch in 1..rates.len() as u64 {
            let what = format!("{what} on {size}, left after {batch}");
            let folder = brief_folder();
            let left = run(folder.path(), Ends::Leaves(batch));
            let rest = run(folder.path(), Ends::Not);
            for ((left, rest), straight) in left.into_iter().zip(rest).zip(&straight) {
                // Where a batch is the last, a gang hears of the signal too late.
                let Err(mut seen) = left else { continue };
                let rest = rest.unwrap();
                let is_late = (seen.heights.len() as u64).checked_sub(batch).unwrap();
                assert!(is_late <= u64::from(size > 1), "{what}: {is_late} batches late");
                seen.heights.extend(rest.heights);
                seen.notes.extend(rest.notes);
                assert_eq!(seen.heights, straight.heights, "{what}");
                assert_eq!(rest.stopped, straight.stopped, "{what}");
                let notes = |seen: &Seen| -> Vec<String> {
                    seen.notes.iter().filter(|it| of_process(it)).cloned().collect()
                };
                assert_eq!(notes(&seen), notes(straight), "{what}");
            }
            assert_eq!(rows(folder.path()), rows_straight, "{what}");
        }
        straights.extend(straight);
    }
    straights.swap_remove(0)
}

/// The rates of steps, where what they are multiplied by is of epochs.
fn by_epoch(scales: &[f64]) -> Vec<f64> {
    let of_steps = scales.iter().flat_map(|scale| std::iter::repeat_n(scale, EPOCH as usize));
    of_steps.zip(0..).map(|(scale, step)| scale * rate(step)).collect()
}

#[test]
fn a_schedule_by_epoch_gives_its_rates_wherever_it_was_resumed() {
    let _stream = alone_on_the_stream();
    // A rate of none is followed by others.
    let scales = [1.0, 0.5, 0.0, 2.0, 0.25];
    let callbacks = move |_: &Notes| {
        vec![LearningRateSchedule::by_epoch(move |epoch| scales[epoch as usize]).boxed()]
    };
    check("schedule", 15, callbacks, &by_epoch(&scales));
}

#[test]
fn a_plateau_lowers_the_rate_wherever_it_was_resumed() {
    let _stream = alone_on_the_stream();
    let reduce = |_: &Notes| {
        let reduce = ReduceOnPlateau::new("val_loss").factor(0.5).patience(2).cooldown(1);
        vec![reduce.min_scale(0.125).boxed()]
    };
    // It falls by 1.25, 1 and 1.25 in the first epochs, and is on the ground, at 1.5, after the third.
    // Two that wait, one that cools and waits already, one that waits, and so on; 1/8 is the least.
    let scales = [1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125, 0.125];
    check("plateau", 36, reduce, &by_epoch(&scales));
}

#[test]
fn a_training_that_waits_no_more_stops_at_the_same_batch_wherever_it_was_resumed() {
    let _stream = alone_on_the_stream();
    let stopping = |_: &Notes| vec![EarlyStopping::new("val_loss").patience(2).boxed()];
    let seen = check("stopping", 36, stopping, &by_epoch(&[1.0; 5]));
    let expected = "val_loss has not improved on 1.5 for 2 validations";
    assert_eq!(seen.stopped.as_deref(), Some(expected));
}

/// A callback of closures that sets the rate, and stops where the ground is reached.
fn closures(notes: &Notes) -> Lambda {
    let note = |notes: &Notes| {
        let notes = notes.clone();
        move |text: String| notes.lock().unwrap().push(text)
    };
    let [begin, epoch_begin, batch_end, validation_end, epoch_end, end] =
        std::array::from_fn(|_| note(notes));
    Lambda::new("closures")
        .train_begin(move |control| {
            begin(format!("train_begin {}", control.batches()));
            Ok(())
        })
        .epoch_begin(move |epoch, control| {
            control.set_learning_rate_scale(if epoch.is_multiple_of(2) { 1.0 } else { 0.5 });
            epoch_begin(format!("epoch_begin {epoch} {}", control.batches()));
            Ok(())
        })
        .batch_end(move |logs, control| {
            batch_end(format!("batch_end {} {}", control.batches(), logs["loss"]));
            Ok(())
        })
        .validation_end(move |logs, control| {
            validation_end(format!("validation_end {}", logs["val_loss"]));
            if logs["val_loss"] <= 1.5 {
                control.stop_training("it is on the ground");
            }
            Ok(())
        })
        .epoch_end(move |epoch, logs, _| {
            epoch_end(format!("epoch_end {epoch} {}", logs["val_loss"]));
            Ok(())
        })
        .train_end(move |control| {
            end(format!("train_end {}", control.batches()));
            Ok(())
        })
}

#[test]
fn closures_are_called_in_their_order_and_change_training_wherever_it_was_resumed() {
    let _stream = alone_on_the_stream();
    let callbacks = |notes: &Notes| vec![closures(notes).boxed()];
    let seen = check("closures", 36, callbacks, &by_epoch(&[1.0, 0.5, 1.0]));
    assert_eq!(seen.stopped.as_deref(), Some("it is on the ground"));
    let expected = "train_begin 0, epoch_begin 0 0, batch_end 1 4, batch_end 2 3.5, batch_end 3 3.25, \
                    validation_end 2.75, epoch_end 0 2.75, epoch_begin 1 3, batch_end 4 2.75, \
                    batch_end 5 2.625, batch_end 6 2.375, validation_end 2.25, epoch_end 1 2.25, \
                    epoch_begin 2 6, batch_end 7 2.25, batch_end 8 1.75, batch_end 9 1.5, \
                    validation_end 1.5, epoch_end 2 1.5, train_end 9";
    assert_eq!(seen.notes.join(", "), expected);
}

#[test]
fn closures_that_fail_end_training_under_their_name() {
    let _stream = alone_on_the_stream();
    let context = alone(None, 6).context().unwrap();
    let fails = Lambda::new("mine").epoch_end(|_, _, _| Err("no more".into()));
    let fit = Fit::new(counted()).batch_size(4).callbacks(vec![fails.boxed()]);
    let step = Falls { ground: 0.0, heights: Mutex::default() };
    let model = Falling::new(context.device());
    let error = context.fit_with(model, falling_optimizers(), step, fit).unwrap_err();
    assert_eq!(error.to_string(), "callback mine: no more");
}

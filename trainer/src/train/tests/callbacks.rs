//! Callbacks that change training, on one and two ranks, resumed after every batch. The tests check
//! the learning rates of all steps, and where training stops.
//!
//! The model is one number whose gradient is 1, so each step lowers it by the learning rate. All
//! numbers are exact in a float.

use burn::module::Param;

use super::data_kinds::of_ranks;
use super::rank_failures::{FailurePoint, RankFailure};
use super::*;
use crate::{Lambda, LearningRateSchedule, ReduceOnPlateau};

/// Batches per epoch, of four samples each.
pub(super) const EPOCH: u64 = 3;

/// One number, initially 4.
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

/// Records the height before each step. The loss of a validation is the height, but at least
/// `ground`.
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

/// Batches that contain only their number of samples.
pub(super) fn counted() -> Data<usize> {
    Data::items(4 * EPOCH as usize, Some, |items, _| items.len())
}

/// The learning rate per step, which callbacks scale.
fn rate(step: u64) -> f64 {
    if step.is_multiple_of(2) { 0.5 } else { 0.25 }
}

pub(super) fn falling_optimizers() -> Optimizers {
    Optimizers::one(SgdConfig::new().build(), rate)
}

/// Observations of a rank: the heights before its steps, and the final height.
#[derive(Clone, Debug, PartialEq)]
struct Seen {
    heights: Vec<f32>,
    /// Notes of the callbacks.
    notes: Vec<String>,
    /// Why training stopped early.
    stopped: Option<String>,
}

type Notes = Arc<Mutex<Vec<String>>>;

fn train(
    context: &Context,
    ends: FailurePoint,
    callbacks: &dyn Fn(&Notes) -> Vec<Box<dyn Callback>>,
) -> Result<Seen, Seen> {
    let ranks = context.distributed();
    let (notes, step) = (Notes::default(), Falls { ground: 1.5, heights: Mutex::default() });
    let fit = Fit::new(counted())
        .validation(counted())
        .batch_size(4 / ranks.size())
        .callbacks(callbacks(&notes))
        .callbacks(vec![RankFailure::of(context, ends, ranks.size() - 1)]);
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

/// Trains for `batches` batches on one and two ranks, uninterrupted and stopped after each batch.
/// Steps must use these learning rates. Returns what one rank observed in an uninterrupted run.
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
        let straight = run(folder.path(), FailurePoint::None).into_iter().map(Result::unwrap);
        let straight: Vec<_> = straight.collect();
        let rows_straight = rows(folder.path());
        for seen in &straight {
            let fallen = seen.heights.windows(2).map(|pair| f64::from(pair[0] - pair[1]));
            assert_eq!(fallen.collect::<Vec<_>>(), rates, "{what} on {size}");
        }
        for batch in 1..rates.len() as u64 {
            let what = format!("{what} on {size}, stopped after {batch}");
            let folder = brief_folder();
            let left = run(folder.path(), FailurePoint::Preempted(batch));
            let rest = run(folder.path(), FailurePoint::None);
            for ((left, rest), straight) in left.into_iter().zip(rest).zip(&straight) {
                // A gang stops up to one batch late. After the last batch, it has completed.
                let Err(mut seen) = left else { continue };
                let rest = rest.unwrap();
                let is_late = (seen.heights.len() as u64).checked_sub(batch).unwrap();
                assert!(is_late <= u64::from(size > 1), "{what}: {is_late} batches late");
                seen.heights.extend(rest.heights);
                seen.notes.extend(rest.notes);
                assert_eq!(seen.heights, straight.heights, "{what}");
                assert_eq!(rest.stopped, straight.stopped, "{what}");
                let notes = |seen: &Seen| -> Vec<String> {
                    seen.notes.iter().filter(|note| of_process(note)).cloned().collect()
                };
                assert_eq!(notes(&seen), notes(straight), "{what}");
            }
            assert_eq!(rows(folder.path()), rows_straight, "{what}");
        }
        straights.extend(straight);
    }
    straights.swap_remove(0)
}

/// Returns the learning rates of all steps, given the scale of each epoch.
fn by_epoch(scales: &[f64]) -> Vec<f64> {
    let of_steps = scales.iter().flat_map(|scale| std::iter::repeat_n(scale, EPOCH as usize));
    of_steps.zip(0..).map(|(scale, step)| scale * rate(step)).collect()
}

#[test]
fn epoch_schedule_resumes_exactly() {
    let _stream = lock_random_stream();
    // A scale of zero is followed by others.
    let scales = [1.0, 0.5, 0.0, 2.0, 0.25];
    let callbacks = move |_: &Notes| {
        vec![LearningRateSchedule::by_epoch(move |epoch| scales[epoch as usize]).boxed()]
    };
    check("schedule", 15, callbacks, &by_epoch(&scales));
}

#[test]
fn plateau_reduction_resumes_exactly() {
    let _stream = lock_random_stream();
    let reduce = |_: &Notes| {
        let reduce = ReduceOnPlateau::new("val_loss").factor(0.5).patience(2).cooldown(1);
        vec![reduce.min_scale(0.125).boxed()]
    };
    // The validation loss improves in epochs 0 to 2, and then stays at 1.5. Epochs 3 and 4 exhaust
    // the patience, so the scale is halved for epoch 5. The cooldown ends in epoch 5, which already
    // counts as an epoch without improvement. Epoch 6 is the second, so the scale is halved again,
    // and so on, down to 1/8.
    let scales = [1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125, 0.125];
    check("plateau", 36, reduce, &by_epoch(&scales));
}

#[test]
fn early_stopping_resumes_exactly() {
    let _stream = lock_random_stream();
    let stopping = |_: &Notes| vec![EarlyStopping::new("val_loss").patience(2).boxed()];
    let seen = check("stopping", 36, stopping, &by_epoch(&[1.0; 5]));
    let expected = "val_loss has not improved on 1.5 for 2 validations";
    assert_eq!(seen.stopped.as_deref(), Some(expected));
}

/// A callback of closures that sets the scale, and stops when the height reaches the ground.
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
fn lambda_callbacks_resume_exactly() {
    let _stream = lock_random_stream();
    let callbacks = |notes: &Notes| vec![closures(notes).boxed()];
    let seen = check("closures", 36, callbacks, &by_epoch(&[1.0, 0.5, 1.0]));
    assert_eq!(seen.stopped.as_deref(), Some("it is on the ground"));
    let expected = "train_begin 0, epoch_begin 0 0, batch_end 1 4, batch_end 2 3.5, \
                    batch_end 3 3.25, validation_end 2.75, epoch_end 0 2.75, epoch_begin 1 3, \
                    batch_end 4 2.75, batch_end 5 2.625, batch_end 6 2.375, validation_end 2.25, \
                    epoch_end 1 2.25, epoch_begin 2 6, batch_end 7 2.25, batch_end 8 1.75, \
                    batch_end 9 1.5, validation_end 1.5, epoch_end 2 1.5, train_end 9";
    assert_eq!(seen.notes.join(", "), expected);
}

#[test]
fn lambda_error_carries_its_name() {
    let _stream = lock_random_stream();
    let context = alone(None, 6).context().unwrap();
    let fails = Lambda::new("mine").epoch_end(|_, _, _| Err("no more".into()));
    let fit = Fit::new(counted()).batch_size(4).callbacks(vec![fails.boxed()]);
    let step = Falls { ground: 0.0, heights: Mutex::default() };
    let model = Falling::new(context.device());
    let error = context.fit_with(model, falling_optimizers(), step, fit).unwrap_err();
    assert_eq!(error.to_string(), "callback mine: no more");
}

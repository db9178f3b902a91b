//! Every kind of data on one, two and three ranks. Trainings stopped after each batch of an epoch
//! are bit-identical to uninterrupted ones.

use std::sync::LazyLock;

use burn::module::Param;
use burn::tensor::DType;
use stoker_api::contract::TrialConfig;

use super::*;
use crate::trial_io::TrialIo;
use crate::{BatchContext, Distributed, Sequence, Stream, ThreadRank};

/// Inputs, labels, and sample weights, if any.
pub(super) type Batch = (Tensor<2>, Tensor<1, Int>, Option<Tensor<1>>);

/// Batches to train: more than one epoch, which has seven batches, or four for a sequence on two
/// ranks.
pub(super) const BATCHES: u64 = 9;

#[derive(Module, Debug)]
pub(super) struct Tiny {
    pub(super) output: Linear,
}

impl Tiny {
    /// Creates weights without random numbers: threads share the random stream in no fixed order.
    pub(super) fn new(device: &Device) -> Self {
        let mut output = LinearConfig::new(20, 5).init(device);
        output.weight = Param::from_tensor(Tensor::zeros([20, 5], device));
        output.bias = Some(Param::from_tensor(Tensor::zeros([5], device)));
        Self { output }
    }

    /// Returns the bits of all weights.
    pub(super) fn bits(self) -> Vec<u32> {
        let Self { output } = self;
        let data = [output.weight.val().into_data(), output.bias.unwrap().val().into_data()];
        data.iter().flat_map(|values| values.iter::<f32>()).map(f32::to_bits).collect()
    }
}

/// Returns one sample, as a program might read it from a file.
pub(super) fn item(index: usize) -> (Vec<f32>, i64) {
    static ROWS: LazyLock<Vec<f32>> =
        LazyLock::new(|| samples().0.into_data().try_to_vec().unwrap());
    (ROWS[index * 20..(index + 1) * 20].to_vec(), (index % 5) as i64)
}

pub(super) fn batch(items: Vec<(Vec<f32>, i64)>, device: &Device) -> Batch {
    let (rows, labels): (Vec<_>, Vec<_>) = items.into_iter().unzip();
    let x = TensorData::new(rows.concat(), [labels.len(), 20]);
    let x = Tensor::from_data(x, (device, DType::F32));
    (x, Tensor::from_data(labels.as_slice(), device), None)
}

struct Sixteens;

impl Sequence<Batch> for Sixteens {
    fn batches(&self) -> usize {
        7
    }

    fn batch(&self, index: usize, context: &BatchContext) -> Result<Batch> {
        let of =
            |offset: usize| item((index * 16 + offset + context.epoch as usize) % SAMPLES as usize);
        Ok(batch((0..16).map(of).collect(), context.device))
    }
}

fn stream() -> Stream<(Vec<f32>, i64)> {
    let files = Stream::list((0..12).collect());
    let lines = |file: usize| Ok((0..10).map(move |line| Ok(file * 10 + line)));
    // Keep the samples below 100.
    let lines = files.interleave(3, 2, lines).filter(|index| *index < SAMPLES as usize).shuffle(16);
    lines.map_seeded(|index, seed| {
        let (mut row, label) = item(index);
        row[0] += (seed % 100) as f32 / 1000.0;
        Ok((row, label))
    })
}

pub(super) const KINDS: [&str; 7] =
    ["arrays", "weights", "list", "named", "items", "stream", "sequence"];

/// Returns data of a kind, with all samples.
pub(super) fn data(kind: &str) -> Result<Data<Batch>> {
    let bare = |(x, y): Pair| Ok((x, y, None));
    let (x, y) = samples();
    let half = |from: usize| x.clone().slice([0..SAMPLES as usize, from..from + 10]);
    match kind {
        "arrays" => Ok(Data::arrays((x, y))?.map(bare)),
        "weights" => {
            let data = Data::arrays((x, y))?.class_weights(&[1.0, 2.0, 0.5, 1.0, 3.0]);
            Ok(data.map(|(x, y, weights)| Ok((x, y, Some(weights)))))
        }
        "list" => {
            let data = Data::arrays((vec![half(0), half(10)], y))?;
            Ok(data.map(|(x, y)| Ok((Tensor::cat(x, 1), y, None))))
        }
        "named" => {
            let x = [("left", half(0)), ("right", half(10))];
            let x = BTreeMap::from(x.map(|(name, half)| (name.to_owned(), half)));
            let data = Data::arrays((x, y))?;
            Ok(data.map(|(mut x, y)| {
                let both = ["left", "right"].map(|name| x.remove(name).unwrap());
                Ok((Tensor::cat(both.to_vec(), 1), y, None))
            }))
        }
        "items" => Ok(Data::items(SAMPLES as usize, |index| Some(item(index)), batch)),
        "stream" => Data::stream(stream(), batch),
        "sequence" => Ok(Data::sequence(Sixteens)),
        other => panic!("{other}"),
    }
}

/// Only the size of validation batches is checked otherwise.
#[test]
fn zero_batch_size_is_refused_with_sequences() {
    let context = alone(None, 2).context().unwrap();
    let fit = Fit::new(data("sequence").unwrap()).validation(data("list").unwrap()).batch_size(0);
    let step =
        |model: &Tiny, (x, y, _): Batch| StepOutput::classification(model.output.forward(x), y);
    let sgd = Optimizers::one(SgdConfig::new().init(), 0.1);
    let error = context.fit(Tiny::new(context.device()), sgd, step, fit).unwrap_err();
    let expected = "batch_size is 0, but must be at least 1; change `Fit::batch_size`";
    assert_eq!(error.to_string(), expected);
}

/// Trains one rank and returns the bits of its weights.
fn rank(context: &Context, kind: &str, workers: usize, stop_at: u64) -> Result<Vec<u32>> {
    // One rank gets a stop request, and all ranks stop.
    let ranks = context.distributed();
    let stop_at = if ranks.rank() == ranks.size() - 1 { stop_at } else { u64::MAX };
    let stop = StopAt(stop_at, context.stop.clone()).boxed();
    let fit = Fit::new(data(kind)?.workers(workers).queue(3))
        .validation(data(kind)?)
        .batch_size(ranks.shard_batch_size(18)?)
        .callbacks(vec![stop]);
    let step = |model: &Tiny, (x, y, weights): Batch| {
        let logits = model.output.forward(x);
        match weights {
            Some(weights) => StepOutput::weighted_classification(logits, y, weights),
            None => StepOutput::classification(logits, y),
        }
    };
    let adam = Optimizers::one(AdamConfig::new().init(), 0.01).aggregate(2);
    Ok(context.fit(Tiny::new(context.device()), adam, step, fit)?.model.bits())
}

/// Trains a gang of threads in `folder`.
fn gang(
    folder: &Path,
    size: usize,
    kind: &str,
    workers: usize,
    stop_at: u64,
) -> Vec<Result<Vec<u32>>> {
    of_ranks(folder, size, BATCHES, |context| rank(context, kind, workers, stop_at))
}

/// Runs `run` on each of `size` ranks in threads, which train in `folder`.
pub(super) fn of_ranks<T: Send>(
    folder: &Path,
    size: usize,
    batches: u64,
    run: impl Fn(&Context) -> T + Sync,
) -> Vec<T> {
    of_ranks_with_config(folder, size, batches, |_| (), run)
}

/// Same as [`of_ranks`], with a change to the configuration of all ranks.
pub(super) fn of_ranks_with_config<T: Send>(
    folder: &Path,
    size: usize,
    batches: u64,
    configure: impl Fn(&mut TrialConfig),
    run: impl Fn(&Context) -> T + Sync,
) -> Vec<T> {
    let contexts: Vec<Context> = ThreadRank::group(size)
        .into_iter()
        .enumerate()
        .map(|(number, rank)| {
            let standalone = alone(Some(folder), batches);
            let (limits, mut config) =
                (Some(standalone.retention_limits()), standalone.config().unwrap());
            let io = TrialIo::open(&mut config, limits, number == 0).unwrap();
            let stop = StopSignal::default();
            let ranks = Distributed::from_collective(Box::new(rank));
            configure(&mut config);
            let context = Context::new(config, io, stop, Device::flex().autodiff(), ranks);
            context.silence();
            context
        })
        .collect();
    let run = &run;
    std::thread::scope(|scope| {
        let run = |context| scope.spawn(move || run(&context));
        let ranks: Vec<_> = contexts.into_iter().map(run).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn resume_is_bit_identical_for_every_data_kind() {
    let _stream = lock_random_stream();
    for kind in KINDS {
        for size in [1, 2, 3] {
            let folder = brief_folder();
            let straight = gang(folder.path(), size, kind, 0, u64::MAX);
            let straight: Vec<_> = straight.into_iter().map(Result::unwrap).collect();
            assert!(straight.iter().all(|rank| *rank == straight[0]), "{kind} on {size}");
            let rows_straight = rows(folder.path());
            assert!(
                rows_straight.iter().any(|(_, group, _)| group == "validation"),
                "{rows_straight:?}"
            );
            for stop_at in 1..8 {
                let what = format!("{kind} on {size} ranks, stopped at {stop_at}");
                let folder = brief_folder();
                for left in gang(folder.path(), size, kind, 2, stop_at) {
                    let error = left.unwrap_err();
                    assert_eq!(exit_code(&*error), ExitCode::Preempted, "{what}: {error}");
                }
                let resumed = gang(folder.path(), size, kind, 1, u64::MAX);
                for model in resumed {
                    assert!(model.unwrap() == straight[0], "{what}: other weights");
                }
                assert_eq!(rows(folder.path()), rows_straight, "{what}");
            }
        }
    }
}

#[test]
fn step_error_describes_the_data() {
    let _stream = lock_random_stream();
    let context = alone(None, 2).context().unwrap();
    let (x, y) = samples();
    let narrow = x.slice([0..SAMPLES as usize, 0..19]);
    let fit = Fit::new(Data::arrays((narrow, y)).unwrap()).batch_size(10);
    let step = |model: &Net, (x, y): Pair| StepOutput::classification(model.forward(x), y);
    let fitted = context.fit(Net::new(context.device()), optimizers(), step, fit);
    let error = fitted.unwrap_err().to_string();
    assert!(error.starts_with("the step failed on the first batch: panicked: "), "{error}");
    assert!(error.ends_with("; the data is data.0 [100, 19] F32, data.1 [100] I32"), "{error}");
}

#[test]
fn empty_validation_set_is_rejected() {
    let _stream = lock_random_stream();
    let context = alone(None, 2).context().unwrap();
    let none = Data::items(0, |index| Some(item(index)), batch);
    let fit = Fit::new(data("items").unwrap()).validation(none).batch_size(10);
    let step =
        |model: &Tiny, (x, y, _): Batch| StepOutput::classification(model.output.forward(x), y);
    let model = Tiny { output: LinearConfig::new(20, 5).init(context.device()) };
    let adam = Optimizers::one(AdamConfig::new().init(), 0.01);
    let error = context.fit(model, adam, step, fit).unwrap_err().to_string();
    assert_eq!(error, "the validation data has no samples");
}

#[test]
fn validation_set_smaller_than_a_batch_is_rejected() {
    let _stream = lock_random_stream();
    let context = alone(None, 2).context().unwrap();
    let few = Data::items(9, |index| Some(item(index)), batch).drop_last();
    let error = few.check_validation(&context.loader_plan(10, false)).unwrap_err().to_string();
    assert!(error.contains("9 samples, which fill no batch of 10"), "{error}");
    assert!(few.check_validation(&context.loader_plan(9, false)).is_ok());
}

#[test]
fn ranks_with_different_data_are_rejected() {
    let check_all = |of_ranks: [(usize, usize, Option<usize>); 3]| {
        std::thread::scope(|scope| {
            let ranks = ThreadRank::group(3).into_iter().zip(of_ranks);
            let check = |(rank, data)| {
                scope.spawn(move || {
                    let ranks = Distributed::from_collective(Box::new(rank));
                    start::check_same_data(&ranks, data).map_err(|error| error.to_string())
                })
            };
            let ranks: Vec<_> = ranks.map(check).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
        })
    };
    let data = (100, 18, Some(10));
    assert!(check_all([data; 3]).iter().all(Result::is_ok));
    for answer in check_all([data, data, (99, 18, Some(10))]) {
        let error = answer.unwrap_err();
        assert!(error.starts_with("rank 2 has 99 training samples"), "{error}");
    }
}

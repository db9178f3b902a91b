//! Tests of data kinds in gangs with a rank killed within an epoch. The next attempt must resume
//! from the latest complete checkpoint with bit-identical weights and metrics. Also tests the
//! warning about a batch that cannot be divided over the ranks.

use std::path::PathBuf;
use std::process::ExitCode;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use stoker_storage::Storage;
use stoker_storage::metrics;
use stoker_trainer::burn::module::{Module, Param};
use stoker_trainer::burn::nn::{Linear, LinearConfig};
use stoker_trainer::burn::optim::AdamConfig;
use stoker_trainer::burn::tensor::{DType, Device, Int, Tensor, TensorData};
use stoker_trainer::{Context, Data, Fit, Optimizers, Result, StepOutput, Stream, Trial, mix_seed};

use crate::gang::{Gang, codes, to_the_end};
use crate::process::{Pod, until};
use crate::training::{ENV_OUT, ENV_SIGNAL, callbacks};

/// Number of samples in an epoch: seven batches, the last of size 4.
const SAMPLES: usize = 100;

/// Number of samples in a batch, over all ranks.
const GLOBAL_BATCH: usize = 16;

type Pair = (Tensor<2>, Tensor<1, Int>);

#[derive(Module, Debug)]
struct Net {
    output: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let mut output = LinearConfig::new(8, 3).with_bias(false).init(device);
        output.weight = Param::from_tensor(Tensor::zeros([8, 3], device));
        Self { output }
    }
}

/// Returns a sample, as a program might read it from a file.
fn item(index: usize) -> (Vec<f32>, i64) {
    let noise =
        |column: usize| (mix_seed(&[index as u64, column as u64]) >> 40) as f32 / (1 << 24) as f32;
    let row = (0..8).map(|column| noise(column) + if column % 3 == index % 3 { 0.5 } else { 0.0 });
    (row.collect(), (index % 3) as i64)
}

fn batch(items: Vec<(Vec<f32>, i64)>, device: &Device) -> Pair {
    let (rows, labels): (Vec<_>, Vec<_>) = items.into_iter().unzip();
    let x = TensorData::new(rows.concat(), [labels.len(), 8]);
    (Tensor::from_data(x, (device, DType::F32)), Tensor::from_data(labels.as_slice(), device))
}

fn data(kind: &str) -> Result<Data<Pair>> {
    match kind {
        "indexed" => Ok(Data::items(SAMPLES, |index| Some(item(index)), batch).workers(2)),
        "streamed" => {
            let files = Stream::list((0..10).collect());
            let lines = |file: usize| Ok((0..10).map(move |line| Ok(file * 10 + line)));
            let noisy = |index: usize, seed: u64| {
                let (mut row, label) = item(index);
                row[0] += (seed % 100) as f32 / 1000.0;
                Ok((row, label))
            };
            let stream = files.interleave(3, 2, lines).shuffle(16).map_seeded(noisy);
            Ok(Data::stream(stream, batch)?.workers(2))
        }
        "endless" => {
            let mut is_first = true;
            let items = move || {
                if std::mem::take(&mut is_first) {
                    eprintln!("counting");
                }
                Ok(item(0))
            };
            let stream = Stream::new(move |_| Ok(std::iter::repeat_with(items)));
            Data::stream(stream, batch)
        }
        other => panic!("{other}"),
    }
}

fn step(net: &Net, (x, y): Pair) -> StepOutput {
    StepOutput::classification(net.output.forward(x), y)
}

/// The program of one rank.
pub(crate) fn train(kind: &str) -> ExitCode {
    stoker_trainer::run(|context: &Context| {
        let ranks = context.distributed();
        let fit = Fit::new(data(kind)?)
            .validation(data(kind)?)
            .batch_size(ranks.shard_batch_size(GLOBAL_BATCH)?)
            .callbacks(callbacks(ranks.rank()));
        let adam = Optimizers::one(AdamConfig::new().init(), 0.01).aggregate(2);
        let fitted = context.fit(Net::new(context.device()), adam, step, fit)?;
        let weights = fitted.model.output.weight.val().into_data();
        let weights: Vec<u32> = weights.iter::<f32>().map(f32::to_bits).collect();
        let folder = PathBuf::from(std::env::var(ENV_OUT)?);
        let left = json!({"weights": weights, "history": fitted.history});
        std::fs::write(folder.join(format!("{}.json", ranks.rank())), left.to_string())?;
        Ok(())
    })
}

/// Creates a gang that trains twenty batches, with a checkpoint every three batches and a metrics
/// row every two.
fn gang() -> Gang {
    let periods = json!({
        "schedulingUnit": 2,
        "checkpointPeriod": {"batches": 3}, "validationPeriod": {"epochs": 1},
    });
    Gang::new(2, to_the_end).with_config(&periods)
}

/// Returns the effective rows of these attempts, each given with its first batch: batch, group,
/// epoch and values.
fn rows(gang: &Gang, attempts: &[(u32, u64)]) -> Vec<(u64, String, u64, Vec<u64>)> {
    let storage = Storage::open(gang.pods[0].file("storage").to_str().unwrap(), None).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let rows = runtime.block_on(metrics::read(&storage, "trial", attempts)).unwrap();
    let effective = rows.into_iter().map(|row| {
        let values = row.metrics.values().map(|value| value.to_bits()).collect();
        (row.batches, row.group, row.epoch, values)
    });
    effective.collect()
}

fn check_killed(kind: &str) {
    let role = format!("kind {kind}");
    let straight = gang();
    let left = straight.run_as(&role);
    assert_eq!(codes(&left), [0, 0], "{left:?}");
    let (trained, rows_straight) = (straight.trained(), rows(&straight, &[(3, 0)]));
    assert_eq!(trained[0], trained[1], "{kind}: ranks differ");
    let positions: Vec<_> =
        rows_straight.iter().map(|(batches, group, ..)| (*batches, &**group)).collect();
    let of_training = (1..=10).map(|index| (2 * index, "training"));
    let mut expected: Vec<_> = of_training.collect();
    expected.extend([7, 14, 20].map(|batch| (batch, "validation")));
    expected.sort_unstable();
    assert_eq!(positions, expected);
    let mut from = vec![];
    for (batch, rank) in [(1, 0), (4, 1), (5, 0), (6, 1), (8, 0)] {
        let what = format!("{kind}, rank {rank} killed after {batch}");
        let gang = gang().env(ENV_SIGNAL, &format!("{rank} {batch} KILL"));
        let left = gang.run_as(&role);
        assert_eq!(left[rank].code, 137, "{what}: {left:?}");
        assert_ne!(left[1 - rank].code, 0, "{what}: {left:?}");
        let saved: u64 = gang.latest().map_or(0, |(name, _)| name[..12].parse().unwrap());
        // The policy `best` also saves after the first validation, at the end of the epoch.
        let is_due = saved.is_multiple_of(3) || saved == 7;
        assert!(saved < batch && is_due, "{what}: saved {saved}");
        from.push(saved);
        let gang = gang.again();
        let left = gang.run_as(&role);
        assert_eq!(codes(&left), [0, 0], "{what}: {left:?}");
        assert!(gang.trained() == trained, "{what}: weights differ");
        assert_eq!(rows(&gang, &[(3, 0), (4, saved)]), rows_straight, "{what}");
    }
    // The checkpoints of batches 6 and 7 may be in flight at batch 8, but the one of batch 3 is
    // complete.
    assert!(from[4] >= 3, "{kind}: attempts resumed from {from:?}");
}

#[test]
fn indexed_data_resumes_bit_identical_after_kill() {
    check_killed("indexed");
}

#[test]
fn streamed_data_resumes_bit_identical_after_kill() {
    check_killed("streamed");
}

#[test]
fn sigterm_ends_the_count_of_a_stream() {
    let pod = Pod::new();
    let child = pod.start("kind endless");
    let errors = || std::fs::read_to_string(pod.file("errors")).unwrap();
    until("the count", || errors().contains("counting"));
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    let left = pod.wait(child);
    assert_eq!(left.code, 79, "{left:?}");
    assert!(left.errors.contains("preempted before the items of a stream"), "{left:?}");
}

/// A trial of one batch.
struct Shared;

impl Trial for Shared {
    type Model = Net;
    type Batch = Pair;

    fn new(_: &Context) -> Result<Self> {
        Ok(Self)
    }

    fn build_model(&self, device: &Device) -> Result<Net> {
        Ok(Net::new(device))
    }

    fn build_optimizers(&self) -> Result<Optimizers> {
        Ok(Optimizers::one(AdamConfig::new().init(), 0.01))
    }

    fn build_training_data(&self) -> Result<Data<Pair>> {
        data("indexed")
    }

    fn build_validation_data(&self) -> Result<Data<Pair>> {
        data("indexed")
    }

    fn step(&self, net: &Net, batch: Pair) -> StepOutput {
        step(net, batch)
    }
}

/// The program of one rank of a trial.
pub(crate) fn try_trial() -> ExitCode {
    stoker_trainer::main_with::<Shared>([])
}

/// `run` ignores the program's arguments.
#[test]
fn note_of_unstored_training_fits_the_entry_point() {
    let note = |role| Pod::new().without_trial().run(role).errors;
    let (run, main) = (note("allocate"), note("trial"));
    assert!(run.contains("call `run_in(FOLDER, program)` to store them and resume"), "{run}");
    assert!(main.contains("set `--folder PATH` to store them and resume"), "{main}");
}

#[test]
fn indivisible_batch_size_is_reported_once() {
    let output = |global_batch: u64| {
        let hyperparameters = json!({"global_batch_size": global_batch});
        let fields = json!({"units": 1, "hyperparameters": hyperparameters});
        let gang = Gang::new(2, to_the_end).with_config(&fields);
        let left = gang.run_as("trial");
        assert_eq!(codes(&left), [0, 0], "{left:?}");
        left.iter().map(|rank| format!("{}{}", rank.out, rank.errors)).collect::<Vec<_>>()
    };
    let warning = "stoker: global_batch_size is 25, of which 2 ranks train 24 at a time: 12 each";
    let count = |text: &String| text.matches(warning).count();
    let counts: Vec<usize> = output(25).iter().map(count).collect();
    assert_eq!(counts, [1, 0]);
    assert!(output(24).iter().all(|text| !text.contains("global_batch_size is")));
}

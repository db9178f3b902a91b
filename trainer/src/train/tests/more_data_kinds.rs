//! More kinds of data: sample weights, several outputs, custom sources, data sets cached on disk,
//! and options.

use std::fs::OpenOptions;
use std::io::Write as _;

use burn::tensor::activation::log_softmax;

use super::data_kinds::{self, Tiny, batch, item};
use super::*;
use crate::{BatchContext, DataCache, Sequence, Source, Split, Stream};

/// Input of a step with any kind of data.
pub(super) struct Given {
    x: Tensor<2>,
    y: Tensor<1, Int>,
    weights: Option<Tensor<1>>,
    /// A second label with two classes, predicted by the last two logits.
    parity: Option<Tensor<1, Int>>,
}

/// A sample and its weight.
type Weighted = ((Vec<f32>, i64), f32);

/// Returns all kinds, including those of `data_kinds`.
pub(super) fn all() -> Vec<&'static str> {
    let mut all = data_kinds::KINDS.to_vec();
    all.extend(OTHERS);
    #[cfg(feature = "learner")]
    all.extend(["dataset", "dataset by index"]);
    all
}

const OTHERS: [&str; 12] = [
    "own weights",
    "outputs in a list",
    "outputs by name",
    "source",
    "cached",
    "weighted items",
    "weighted stream",
    "weighted sequence",
    "split",
    "drop last",
    "one order",
    "no shuffling",
];

/// Returns the weight of a sample; neighbors have different weights.
fn weight(sample: usize) -> f32 {
    0.25 * (1 + sample % 7) as f32
}

fn weighted(sample: usize) -> Weighted {
    (item(sample), weight(sample))
}

fn weighted_batch(items: Vec<Weighted>, device: &Device) -> Given {
    let (items, weights): (Vec<_>, Vec<_>) = items.into_iter().unzip();
    let (x, y, _) = batch(items, device);
    Given { x, y, weights: Some(Tensor::from_floats(weights.as_slice(), device)), parity: None }
}

fn plain((x, y, weights): data_kinds::Batch) -> Given {
    Given { x, y, weights, parity: None }
}

/// A custom source. Its noise differs between epochs, but not between ranks.
struct Noisy;

impl Source<Given> for Noisy {
    fn samples(&self) -> usize {
        SAMPLES as usize
    }

    fn batch(&self, samples: &[usize], context: &BatchContext) -> Result<Given> {
        let noisy = |sample: &usize| {
            let (mut row, label) = item(*sample);
            row[1] += (context.sample_seed(*sample) % 100) as f32 / 1000.0;
            (row, label)
        };
        Ok(plain(batch(samples.iter().map(noisy).collect(), context.device)))
    }
}

/// Batches of 16, with the same sample weights as in the other weighted kinds.
struct Sixteens;

impl Sequence<Given> for Sixteens {
    fn batches(&self) -> usize {
        7
    }

    fn batch(&self, index: usize, context: &BatchContext) -> Result<Given> {
        let of = |offset: usize| {
            weighted((index * 16 + offset + context.epoch as usize) % SAMPLES as usize)
        };
        Ok(weighted_batch((0..16).map(of).collect(), context.device))
    }
}

/// Returns the labels of two outputs, with three and two classes.
fn labels() -> [Tensor<1, Int>; 2] {
    let of = |classes: i64| {
        let labels: Vec<i64> = (0..SAMPLES as i64).map(|sample| sample % 5 % classes).collect();
        Tensor::from_data(labels.as_slice(), &Device::flex())
    };
    [of(3), of(2)]
}

/// Opens the cached set in this directory. Each build adds a line to the file `built`.
fn cached(folder: &Path) -> Result<Data<Given>> {
    let cache = DataCache::new(folder.join("sets"));
    let set = cache.open("samples", "v1", Split::Training, || {
        writeln!(OpenOptions::new().create(true).append(true).open(folder.join("built"))?, "once")?;
        Ok((0..SAMPLES as usize).map(|sample| Ok(item(sample))))
    })?;
    Ok(set.data(|items, device| plain(batch(items, device))))
}

/// Returns training and validation data of a kind; `folder` stores cached sets.
pub(super) fn data(kind: &str, folder: &Path) -> Result<(Data<Given>, Data<Given>)> {
    let samples_max = SAMPLES as usize;
    let (x, y) = samples();
    let plain_of =
        |kind| -> Result<_> { Ok(data_kinds::data(kind)?.map(|batch| Ok(plain(batch)))) };
    let plain_arrays = || plain_of("arrays");
    let two = || match kind {
        "own weights" => {
            let weights: Vec<f32> = (0..samples_max).map(weight).collect();
            let weights = Tensor::<1>::from_floats(weights.as_slice(), &Device::flex());
            let data = Data::arrays((x.clone(), y.clone(), weights))?;
            Ok(data.map(|(x, y, weights)| Ok(plain((x, y, Some(weights))))))
        }
        "outputs in a list" => {
            let data = Data::arrays((x.clone(), labels().to_vec()))?;
            Ok(data.map(|(x, mut y)| {
                let parity = y.pop();
                Ok(Given { x, y: y.remove(0), weights: None, parity })
            }))
        }
        "outputs by name" => {
            let [class, parity] = labels();
            let y = BTreeMap::from([("class".to_owned(), class), ("parity".into(), parity)]);
            Ok(Data::arrays((x.clone(), y))?.map(|(x, mut y)| {
                let parity = y.remove("parity");
                Ok(Given { x, y: y.remove("class").unwrap(), weights: None, parity })
            }))
        }
        "source" => Ok(Data::new(Noisy)),
        "cached" => cached(folder),
        "weighted items" => {
            Ok(Data::items(samples_max, |index| Some(weighted(index)), weighted_batch))
        }
        "weighted stream" => {
            let stream = Stream::list((0..samples_max).collect()).shuffle(16);
            Data::stream(stream.map(|index| Ok(weighted(index))), weighted_batch)
        }
        "weighted sequence" => Ok(Data::sequence(Sixteens)),
        "drop last" => Ok(plain_arrays()?.drop_last()),
        "one order" => Ok(plain_arrays()?.skip_shuffle_at_epoch_end()),
        "no shuffling" => Ok(plain_arrays()?.shuffle(false)),
        #[cfg(feature = "learner")]
        "dataset" => Ok(Data::dataset(burns::set(), burns::Batches)),
        #[cfg(feature = "learner")]
        "dataset by index" => {
            use burn::data::dataloader::batcher::Batcher as _;
            use burn::data::dataset::Dataset as _;
            let set = burns::set();
            let batches = |items, device: &Device| burns::Batches.batch(items, device);
            Ok(Data::items(set.len(), move |index| set.get(index), batches))
        }
        other => plain_of(other),
    };
    if kind == "split" {
        return plain_arrays()?.validation_split(0.2);
    }
    Ok((two()?, two()?))
}

/// Data sets and batchers of burn.
#[cfg(feature = "learner")]
mod burns {
    use burn::data::dataloader::batcher::Batcher;
    use burn::data::dataset::InMemDataset;

    use super::*;

    pub(super) fn set() -> InMemDataset<(Vec<f32>, i64)> {
        InMemDataset::new((0..SAMPLES as usize).map(item).collect())
    }

    #[derive(Clone)]
    pub(super) struct Batches;

    impl Batcher<(Vec<f32>, i64), Given> for Batches {
        fn batch(&self, items: Vec<(Vec<f32>, i64)>, device: &Device) -> Given {
            plain(batch(items, device))
        }
    }
}

/// Step for all kinds.
pub(super) fn step(model: &Tiny, given: Given) -> StepOutput {
    let Given { x, y, weights, parity } = given;
    let logits = model.output.forward(x);
    match (weights, parity) {
        (Some(weights), _) => StepOutput::weighted_classification(logits, y, weights),
        (None, None) => StepOutput::classification(logits, y),
        (None, Some(parity)) => {
            let samples = y.dims()[0];
            let chosen = |from: usize, to: usize, labels: Tensor<1, Int>| {
                let of = log_softmax(logits.clone().slice([0..samples, from..to]), 1);
                of.gather(1, labels.unsqueeze_dim(1)).sum().neg()
            };
            let (of_class, of_parity) = (chosen(0, 3, y), chosen(3, 5, parity));
            StepOutput::sum(of_class + of_parity.clone(), samples).metric(
                "parity_loss",
                of_parity,
                samples,
            )
        }
    }
}

/// Trains one rank with a kind of data and returns the bits of its weights.
pub(super) fn rank(
    context: &Context,
    kind: &str,
    workers: usize,
    callbacks: Vec<Box<dyn Callback>>,
) -> Result<Vec<u32>> {
    let (train, validation) = data(kind, Path::new(&context.config.storage.url))?;
    let fit = Fit::new(train.workers(workers).queue(3))
        .validation(validation)
        .batch_size(context.distributed().shard_batch_size(18)?)
        .callbacks(callbacks);
    let adam = Optimizers::one(AdamConfig::new().init(), 0.01).aggregate(2);
    Ok(context.fit(Tiny::new(context.device()), adam, step, fit)?.model.bits())
}

/// A source whose batches contain noise from burn's random stream.
struct RandomNoise;

impl Source<Pair> for RandomNoise {
    fn samples(&self) -> usize {
        SAMPLES as usize
    }

    fn batch(&self, samples: &[usize], context: &BatchContext) -> Result<Pair> {
        let (x, y, _) = batch(samples.iter().map(|sample| item(*sample)).collect(), context.device);
        let noise = x.random_like(burn::tensor::Distribution::Normal(0.0, 0.1));
        Ok((x + noise, y))
    }
}

#[test]
fn loop_batches_sample_from_the_step_seed() {
    let _stream = lock_random_stream();
    let train = |folder: &Path, stop_at: u64| {
        let context = alone(Some(folder), 6).context().unwrap();
        let stop = StopAt(stop_at, context.stop.clone()).boxed();
        let fit = Fit::new(Data::new(RandomNoise).workers(0)).batch_size(16).callbacks(vec![stop]);
        let step = |model: &Net, (x, y): Pair| StepOutput::classification(model.forward(x), y);
        let fitted = context.fit(Net::new(context.device()), optimizers(), step, fit)?;
        crate::record::snapshot(&fitted.model).into_bytes()
    };
    let straight = train(brief_folder().path(), u64::MAX).unwrap();
    for stop_at in [1, 4] {
        let folder = brief_folder();
        let error = train(folder.path(), stop_at).unwrap_err();
        assert_eq!(exit_code(&*error), ExitCode::Preempted, "{error}");
        let resumed = train(folder.path(), u64::MAX).unwrap();
        assert!(resumed == straight, "stopped after batch {stop_at}");
    }
}

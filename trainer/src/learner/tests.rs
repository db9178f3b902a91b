//! A plain burn program with and without Stoker: bit-identical results, across stops and on every
//! rank.

use std::path::Path;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::{Dataset, DatasetError, InMemDataset};
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Linear, LinearConfig, Relu};
use burn::optim::AdamConfig;
use burn::tensor::{Device, Int, Tensor, TensorData, TensorReadError};
use burn::train::metric::store::{Aggregate, Direction, Split};
use burn::train::metric::{AccuracyMetric, LossMetric, Metric, MetricMetadata, SerializedEntry};
use burn::train::{
    ClassificationOutput, InferenceStep, Learner, MetricEarlyStoppingStrategy, StoppingCondition,
    TrainOutput, TrainStep,
};
use stoker_api::contract::ExitCode;
use stoker_api::experiment::{Length, Unit};

use super::metric_collector::snake_case;
use super::*;
use crate::checkpoint::RetentionLimits;
use crate::error::exit_code;
use crate::train::tests::lock_random_stream;
use crate::trial_io::TrialIo;
use crate::{Data, Distributed, Standalone, mix_seed, record, rng};

mod errors;
mod loaders;
mod ranks;

/// Samples per epoch: seven batches of 16, of which the last has 4.
const SAMPLES: u64 = 100;

#[derive(Module, Debug)]
struct Net {
    hidden: Linear,
    norm: Option<BatchNorm>,
    dropout: Dropout,
    output: Linear,
}

impl Net {
    fn new(dropout: f64, is_normed: bool, device: &Device) -> Self {
        Self {
            hidden: LinearConfig::new(20, 16).init(device),
            norm: is_normed.then(|| BatchNormConfig::new(16).init(device)),
            dropout: DropoutConfig::new(dropout).init(),
            output: LinearConfig::new(16, 5).init(device),
        }
    }

    fn classify(&self, (x, y): Pair) -> ClassificationOutput {
        let [samples, _] = x.dims();
        let mut x = self.hidden.forward(x);
        if let Some(norm) = &self.norm {
            x = norm.forward(x.reshape([samples, 16, 1])).reshape([samples, 16]);
        }
        let output = self.output.forward(self.dropout.forward(Relu.forward(x)));
        let loss = CrossEntropyLossConfig::new().init(&output.device());
        ClassificationOutput::new(loss.forward(output.clone(), y.clone()), output, y)
    }
}

type Pair = (Tensor<2>, Tensor<1, Int>);

impl TrainStep for Net {
    type Input = Pair;
    type Output = ClassificationOutput;

    fn step(&self, batch: Pair) -> TrainOutput<ClassificationOutput> {
        let output = self.classify(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for Net {
    type Input = Pair;
    type Output = ClassificationOutput;

    fn step(&self, batch: Pair) -> ClassificationOutput {
        self.classify(batch)
    }
}

/// Returns noise, with brighter pixels for the sample's class.
fn items() -> Vec<(Vec<f32>, i64)> {
    let noise = |i: u64, k: u64| (mix_seed(&[i, k]) >> 40) as f32 / (1 << 24) as f32;
    let pixel = |i: u64, k: u64| noise(i, k) + if k % 5 == i % 5 { 0.5 } else { 0.0 };
    let item = |i: u64| ((0..20).map(|k| pixel(i, k)).collect(), (i % 5) as i64);
    (0..SAMPLES).map(item).collect()
}

#[derive(Clone)]
struct Pairs;

impl Batcher<(Vec<f32>, i64), Pair> for Pairs {
    fn batch(&self, items: Vec<(Vec<f32>, i64)>, device: &Device) -> Pair {
        let n = items.len();
        let (x, y): (Vec<_>, Vec<_>) = items.into_iter().unzip();
        let x = Tensor::from_data(TensorData::new(x.concat(), [n, 20]), device);
        (x, Tensor::from_data(TensorData::new(y, [n]), device))
    }
}

fn burns(shuffle: bool) -> Arc<dyn DataLoader<Pair>> {
    burns_of(16, shuffle)
}

fn burns_of(batch_size: usize, shuffle: bool) -> Arc<dyn DataLoader<Pair>> {
    let builder = DataLoaderBuilder::new(Pairs).batch_size(batch_size);
    let builder = if shuffle { builder.shuffle(5) } else { builder };
    builder.build(InMemDataset::new(items()))
}

fn learner(dropout: f64) -> Learner<Net> {
    learner_of(dropout, true)
}

fn learner_of(dropout: f64, is_normed: bool) -> Learner<Net> {
    let device = Device::flex().autodiff();
    // burn samples weights on first use.
    let net = Net::new(dropout, is_normed, &device);
    let net = rng::with_weight_seed(&device, 3, || record::initialize(net));
    let schedule = CosineAnnealingLrSchedulerConfig::new(1e-2, 50).init().unwrap();
    Learner::new(net, AdamConfig::new().init(), schedule)
}

fn training(
    folder: &Path,
    (train, valid): (Arc<dyn DataLoader<Pair>>, Arc<dyn DataLoader<Pair>>),
) -> SupervisedTraining<Net> {
    SupervisedTraining::new(folder, train, valid)
        .metrics((AccuracyMetric::new(), LossMetric::new()))
        .with_application_logger(None)
        .num_epochs(3)
}

/// Returns all values of a model as bits.
fn bits(model: &Net) -> Vec<u32> {
    #[derive(Default)]
    struct Read(Vec<u32>);
    impl ModuleVisitor for Read {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let values: Vec<f32> = param.val().into_data().try_to_vec().unwrap();
            self.0.extend(values.iter().map(|value| value.to_bits()));
        }
    }
    let mut read = Read::default();
    model.visit(&mut read);
    read.0
}

fn standalone(folder: Option<&Path>) -> Standalone {
    Standalone {
        seed: 7,
        folder: folder.map(Path::to_path_buf),
        checkpoint_period: Some(Length::new(Unit::Batches, 1_000)),
        quiet: true,
        ..Standalone::default()
    }
}

/// Data loaders of a training.
#[derive(Clone, Copy, Debug)]
enum Loaders {
    Burn,
    Ours { workers: usize },
}

impl Loaders {
    fn make(self, context: &Context) -> (Arc<dyn DataLoader<Pair>>, Arc<dyn DataLoader<Pair>>) {
        let data = || Data::dataset(InMemDataset::new(items()), Pairs);
        match self {
            Self::Burn => (burns(true), burns(false)),
            Self::Ours { workers } => {
                let share = 16 / context.distributed().size();
                let train = context.dataloader(data().workers(workers), share);
                (train, context.dataloader(data(), share))
            }
        }
    }
}

/// Trains three epochs. Stops after batch `stop_at`, as after a signal.
fn supervised(
    loaders: Loaders,
    folder: Option<&Path>,
    stop_at: Option<u64>,
) -> (Vec<u32>, Result<()>) {
    let scratch = tempfile::tempdir().unwrap();
    let context = standalone(folder).context().unwrap();
    let stop = StopSigned::by_signal(stop_at, &context);
    let training = training(scratch.path(), loaders.make(&context));
    let result = context.supervise(training).metric_train(stop).launch(learner(0.3));
    let outcome = context.learner_state.outcome(Ok(()));
    assert_eq!(result.interrupted.is_some(), outcome.is_err());
    (bits(&result.model), outcome)
}

/// A metric that requests a stop, because a program with burn's loop has no hooks.
#[derive(Clone)]
struct StopSigned {
    at: Option<u64>,
    stop: Arc<dyn Fn() + Send + Sync>,
}

impl StopSigned {
    fn by_signal(at: Option<u64>, context: &Context) -> Self {
        let stop = context.stop.clone();
        Self { at, stop: Arc::new(move || stop.set()) }
    }
}

impl Metric for StopSigned {
    type Input = ();

    fn name(&self) -> Arc<String> {
        Arc::new("stop".into())
    }

    fn update(&mut self, _: &(), _: &MetricMetadata) -> Result<SerializedEntry, TensorReadError> {
        if let Some(left) = &mut self.at {
            *left = left.saturating_sub(1);
            if *left == 0 {
                (self.stop)();
            }
        }
        Ok(SerializedEntry::new(String::new(), String::new()))
    }

    fn compute(&mut self) -> Result<SerializedEntry, TensorReadError> {
        Ok(SerializedEntry::new(String::new(), String::new()))
    }

    fn clear(&mut self) {}
}

#[test]
fn both_loops_are_bit_identical() {
    let _guard = lock_random_stream();
    let folder = tempfile::tempdir().unwrap();
    let plain = training(folder.path(), (burns(true), burns(false)))
        .renderer(Box::new(SilentRenderer))
        .launch(learner(0.0));
    let context = standalone(None).context().unwrap();
    let under = context.supervise(training(folder.path(), (burns(true), burns(false))));
    let under = under.launch(learner(0.0));
    assert!(context.learner_state.outcome(Ok(())).is_ok());
    assert!(bits(&plain.model) == bits(&under.model));
}

#[test]
fn resumed_training_is_bit_identical() {
    let _guard = lock_random_stream();
    for loaders in [Loaders::Burn, Loaders::Ours { workers: 0 }, Loaders::Ours { workers: 3 }] {
        let (straight, outcome) = supervised(loaders, None, None);
        outcome.unwrap();
        for stop_at in [1, 6, 7, 8, 13, 20] {
            let folder = tempfile::tempdir().unwrap();
            let (stopped, outcome) = supervised(loaders, Some(folder.path()), Some(stop_at));
            assert_eq!(exit_code(&*outcome.unwrap_err()), ExitCode::Preempted);
            assert!(stopped != straight, "it was not stopped after {stop_at}");
            let (resumed, outcome) = supervised(loaders, Some(folder.path()), None);
            outcome.unwrap();
            assert!(resumed == straight, "{loaders:?}, stopped after {stop_at}: other bits");
        }
    }
}

#[test]
fn workers_do_not_change_the_model() {
    let _guard = lock_random_stream();
    let (none, _) = supervised(Loaders::Ours { workers: 0 }, None, None);
    let (three, _) = supervised(Loaders::Ours { workers: 3 }, None, None);
    assert!(none == three);
}

#[test]
fn metrics_have_searchable_names() {
    let _guard = lock_random_stream();
    let (folder, scratch) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let context = standalone(Some(folder.path())).context().unwrap();
    let training = training(scratch.path(), Loaders::Burn.make(&context)).num_epochs(2);
    context.supervise(training).launch(learner(0.0));
    context.io().flush().unwrap();
    let rows = std::fs::read_dir(folder.path().join("trial/metrics")).unwrap();
    let text: String =
        rows.map(|row| std::fs::read_to_string(row.unwrap().path()).unwrap()).collect();
    let rows: Vec<serde_json::Value> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for (group, prefix, num) in
        [("training", "", 1), ("epoch", "", 2), ("validation", "validation_", 2)]
    {
        let of: Vec<_> = rows.iter().filter(|row| row["group"] == group).collect();
        assert_eq!(of.len(), num, "{group}: {rows:?}");
        for row in of {
            let metric = |name: &str| row["metrics"][format!("{prefix}{name}")].as_f64();
            assert!(metric("loss").unwrap() > 0.0, "{row}");
            assert!(metric("accuracy").unwrap() > 10.0, "{row}");
        }
    }
}

/// Training stops after the third epoch, even if another process trained the first two.
#[test]
fn early_stopping_state_survives_a_resume() {
    let _guard = lock_random_stream();
    let train = |folder: Option<&Path>, stop_at: Option<u64>| {
        let scratch = tempfile::tempdir().unwrap();
        let context = standalone(folder).context().unwrap();
        let stop = StopSigned::by_signal(stop_at, &context);
        let never_better = MetricEarlyStoppingStrategy::new(
            &LossMetric::new(),
            Aggregate::Mean,
            // The loss falls, so the first epoch remains the best.
            Direction::Highest,
            Split::Valid,
            StoppingCondition::NoImprovementSince { n_epochs: 2 },
        );
        let training = training(scratch.path(), Loaders::Burn.make(&context))
            .num_epochs(9)
            .early_stopping(never_better);
        let result = context.supervise(training).metric_train(stop).launch(learner(0.0));
        let batches = context.io().batches();
        (bits(&result.model), batches)
    };
    let (straight, _) = train(None, None);
    for stop_at in [9, 16] {
        let folder = tempfile::tempdir().unwrap();
        train(Some(folder.path()), Some(stop_at));
        let (resumed, batches) = train(Some(folder.path()), None);
        assert_eq!(batches, 21, "stopped after {stop_at}");
        assert!(resumed == straight, "stopped after {stop_at}");
    }
}

#[test]
fn accumulated_gradients_survive_a_resume() {
    let _guard = lock_random_stream();
    let train = |folder: Option<&Path>, stop_at: Option<u64>, sum: usize| {
        let scratch = tempfile::tempdir().unwrap();
        let context = standalone(folder).context().unwrap();
        let stop = StopSigned::by_signal(stop_at, &context);
        let training = training(scratch.path(), Loaders::Burn.make(&context));
        let training = training.grads_accumulation(sum);
        bits(&context.supervise(training).metric_train(stop).launch(learner(0.3)).model)
    };
    let straight = train(None, None, 3);
    assert!(straight != train(None, None, 1));
    for stop_at in [4, 8] {
        let folder = tempfile::tempdir().unwrap();
        train(Some(folder.path()), Some(stop_at), 3);
        assert!(train(Some(folder.path()), None, 3) == straight, "stopped after {stop_at}");
    }
}

#[test]
fn names_are_in_snake_case() {
    let check = |name, expected| assert_eq!(snake_case(name), expected);
    check("Loss", "loss");
    check("Learning Rate", "learning_rate");
    check("AUROC", "auroc");
    check("Top-K Accuracy @ K = 5", "top_k_accuracy_k_5");
    check("FBetaScore (2) @ Threshold(0.5) [Macro]", "fbeta_score_2_threshold_0_5_macro");
    check("wordErrorRate", "word_error_rate");
}

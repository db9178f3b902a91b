//! Tests of a program with burn's training loop, under a runner and in gangs.

use std::path::PathBuf;
use std::process::ExitCode;

use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::lr_scheduler::constant::ConstantLr;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig, Relu};
use burn::optim::AdamConfig;
use burn::tensor::{Device, Int, Tensor, TensorData, TensorReadError};
use burn::train::metric::{AccuracyMetric, LossMetric, Metric, MetricMetadata, SerializedEntry};
use burn::train::{
    ClassificationOutput, InferenceStep, Learner, SupervisedTraining, TrainOutput, TrainStep,
};
use rustix::process::{Signal, getpid, kill_process};
use serde_json::json;
use stoker_api::contract::{Directive, Report, ReportEvent};
use stoker_trainer::{Context, Data, burn, mix_seed};

use crate::gang::{Gang, codes, to_the_end};
use crate::training::{ENV_OUT, ENV_SIGNAL};

/// If set, use `context.dataloader` instead of burn's loaders.
const ENV_OURS: &str = "TEST_OURS";

#[derive(Module, Debug)]
struct Net {
    hidden: Linear,
    dropout: Dropout,
    output: Linear,
}

type Pair = (Tensor<2>, Tensor<1, Int>);

impl Net {
    fn classify(&self, (x, y): Pair) -> ClassificationOutput {
        let x = self.dropout.forward(Relu.forward(self.hidden.forward(x)));
        let output = self.output.forward(x);
        let loss = CrossEntropyLossConfig::new().init(&output.device());
        ClassificationOutput::new(loss.forward(output.clone(), y.clone()), output, y)
    }
}

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

type Item = (Vec<f32>, i64);

/// Noise, with brighter pixels for the class. Two ranks have 51 and 52 of the items.
fn items() -> InMemDataset<Item> {
    let noise = |i: u64, k: u64| (mix_seed(&[i, k]) >> 40) as f32 / (1 << 24) as f32;
    let pixel = |i: u64, k: u64| noise(i, k) + if k % 5 == i % 5 { 0.5 } else { 0.0 };
    let item = |i: u64| ((0..20).map(|k| pixel(i, k)).collect(), (i % 5) as i64);
    InMemDataset::new((0..103).map(item).collect())
}

#[derive(Clone)]
struct Pairs;

impl Batcher<Item, Pair> for Pairs {
    fn batch(&self, items: Vec<Item>, device: &Device) -> Pair {
        let n = items.len();
        let (x, y): (Vec<_>, Vec<_>) = items.into_iter().unzip();
        let x = Tensor::from_data(TensorData::new(x.concat(), [n, 20]), device);
        (x, Tensor::from_data(TensorData::new(y, [n]), device))
    }
}

/// Sends a signal to this process after a batch, since programs with burn's loop have no callbacks.
#[derive(Clone)]
struct SignalsItself(u64);

impl Metric for SignalsItself {
    type Input = ();

    fn name(&self) -> std::sync::Arc<String> {
        std::sync::Arc::new("signal".into())
    }

    fn update(&mut self, _: &(), _: &MetricMetadata) -> Result<SerializedEntry, TensorReadError> {
        self.0 = self.0.wrapping_sub(1);
        if self.0 == 0 {
            kill_process(getpid(), Signal::TERM).unwrap();
        }
        self.compute()
    }

    fn compute(&mut self) -> Result<SerializedEntry, TensorReadError> {
        Ok(SerializedEntry::new(String::new(), String::new()))
    }

    fn clear(&mut self) {}
}

/// The program of one rank.
pub(crate) fn train() -> ExitCode {
    stoker_trainer::run(|context: &Context| {
        let ranks = context.distributed();
        // Ranks start with different weights, so that missing synchronization is visible.
        context.device().seed(ranks.rank() as u64);
        let model = Net {
            hidden: LinearConfig::new(20, 16).init(context.device()),
            dropout: DropoutConfig::new(0.3).init(),
            output: LinearConfig::new(16, 5).init(context.device()),
        };
        let loader = |shuffle: bool| match std::env::var_os(ENV_OURS) {
            Some(_) => context.dataloader(Data::dataset(items(), Pairs), 8),
            None => {
                let builder = DataLoaderBuilder::new(Pairs).batch_size(8);
                if shuffle { builder.shuffle(3) } else { builder }.build(items())
            }
        };
        let folder = PathBuf::from(std::env::var(ENV_OUT)?);
        let burns = folder.join(format!("burn-{}", ranks.rank()));
        let mut training = SupervisedTraining::new(burns, loader(true), loader(false))
            .metrics((AccuracyMetric::new(), LossMetric::new()))
            .num_epochs(99);
        let signal = std::env::var(ENV_SIGNAL).unwrap_or_default();
        let mut signal = signal.split(' ');
        if signal.next() == Some(&ranks.rank().to_string()) {
            training = training.metric_train(SignalsItself(signal.next().unwrap().parse()?));
        }
        let schedule = ModuleLrScheduler::new(ConstantLr::new(1e-2));
        let learner = Learner::new(model, AdamConfig::new().init(), schedule);
        let result = context.supervise(training).launch(learner);
        let left = json!({"weights": bits(&result.model)});
        std::fs::write(folder.join(format!("{}.json", ranks.rank())), left.to_string())?;
        Ok(())
    })
}

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

fn gang(size: u32, is_ours: bool) -> Gang {
    let gang = Gang::new(size, to_the_end);
    // Enough batches, since a signal takes effect a few batches later.
    let fields = json!({"metric": "validation_accuracy", "smallerIsBetter": false, "units": 80});
    let gang = gang.with_config(&fields);
    if is_ours { gang.env(ENV_OURS, "1") } else { gang }
}

#[test]
fn burn_gang_resumes_bit_identical() {
    for is_ours in [false, true] {
        let straight = gang(2, is_ours);
        let left = straight.run_as("learn");
        assert_eq!(codes(&left), [0, 0], "{left:?}");
        let straight = straight.trained();
        assert!(straight[0] == straight[1], "ranks differ");
        // Stop in the middle of the first and the third epoch of seven batches.
        for (rank, batch) in [(1, 3), (0, 16)] {
            let gang = gang(2, is_ours).env(ENV_SIGNAL, &format!("{rank} {batch} TERM"));
            let left = gang.run_as("learn");
            assert_eq!(codes(&left), [79, 79], "{left:?}");
            let stopped: u64 = gang.checkpoint().0[..12].parse().unwrap();
            assert!((batch..80).contains(&stopped), "signal at {batch}, stopped after {stopped}");
            let gang = gang.again();
            let left = gang.run_as("learn");
            assert_eq!(codes(&left), [0, 0], "{left:?}");
            assert!(gang.trained() == straight, "stopped after {stopped}: weights differ");
        }
    }
}

#[test]
fn runner_gets_the_metric_and_grants_lengths() {
    // Three epochs of 13 batches, then three more.
    let answer = |report: &Report| match report.event {
        ReportEvent::Validated { granted_units: Some(3), .. } => Directive::Continue { units: 6 },
        ReportEvent::Validated { granted_units: Some(_), .. } => Directive::Stop,
        _ => Directive::Continue { units: 3 },
    };
    let gang = Gang::new(1, answer).with_config(&json!({
        "metric": "val_accuracy", "unit": "epochs", "units": 3, "validationPeriod": {"epochs": 1},
    }));
    let left = gang.run_as("learn");
    assert_eq!(codes(&left), [0], "{left:?}");
    let reports = gang.server.reports.lock().unwrap();
    let results: Vec<_> = reports
        .iter()
        .filter_map(|report| match &report.event {
            ReportEvent::Validated { granted_units: Some(units), metrics } => {
                let metric: f64 = metrics["validation_accuracy"].parse().unwrap();
                assert!(metric > 20.0 && metrics.contains_key("validation_loss"), "{metrics:?}");
                Some((report.batches, *units))
            }
            _ => None,
        })
        .collect();
    assert_eq!(results, [(39, 3), (78, 6)]);
}

#[test]
fn unknown_searched_metric_is_refused_early() {
    let gang = gang(1, false).with_config(&json!({"metric": "validation_f1"}));
    let left = gang.run_as("learn");
    assert_eq!(codes(&left), [82], "{left:?}");
    let errors = &left[0].errors;
    assert!(errors.contains("searched metric validation_f1"), "{left:?}");
    assert!(errors.contains("validation_accuracy, validation_loss"), "{left:?}");
}

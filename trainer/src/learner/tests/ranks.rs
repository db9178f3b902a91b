//! burn's trainings on several ranks.

use burn::train::metric::{MetricAttributes, Numeric, NumericAttributes, NumericEntry};

use super::*;
use crate::stop::StopSignal;

/// Returns the models of ranks in threads after two epochs, with `global` samples per global batch.
fn ranks(size: usize, is_ours: bool, global: usize, is_normed: bool) -> Vec<Vec<u32>> {
    let train = |rank: crate::ThreadRank| {
        let scratch = tempfile::tempdir().unwrap();
        let Context { mut config, stop, .. } = standalone(None).context().unwrap();
        let is_lead = crate::Collective::rank(&rank) == 0;
        let io = TrialIo::open(&mut config, Some(RetentionLimits::default()), is_lead).unwrap();
        let ranks = Distributed::from_collective(Box::new(rank));
        let context = Context::new(config, io, stop, Device::flex().autodiff(), ranks);
        let data = || Data::dataset(InMemDataset::new(items()), Pairs);
        let loaders = match is_ours {
            true => {
                let train = context.dataloader(data(), global / size);
                (train, context.dataloader(data(), global / size))
            }
            false => (burns_of(global / size, true), burns_of(global / size, false)),
        };
        let training = training(scratch.path(), loaders).num_epochs(2);
        let result = context.supervise(training).launch(learner_of(0.0, is_normed));
        context.learner_state.outcome(Ok(())).unwrap();
        bits(&result.model)
    };
    std::thread::scope(|scope| {
        let ranks = crate::ThreadRank::group(size);
        let threads: Vec<_> =
            ranks.into_iter().map(|rank| scope.spawn(move || train(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn ranks_are_bit_identical() {
    let _guard = lock_random_stream();
    // In the last row, burn's loader gives each rank one batch per epoch, of 50 samples.
    for (is_ours, global) in [(false, 16), (true, 16), (false, 128)] {
        let all = ranks(2, is_ours, global, true);
        assert!(all[0] == all[1], "{is_ours} {global}");
    }
}

/// Of the last batch, with four samples, one rank has two and the others have one.
#[test]
fn three_ranks_train_like_one() {
    let _guard = lock_random_stream();
    let one = ranks(1, true, 12, false).swap_remove(0);
    let three = ranks(3, true, 12, false);
    assert!(three[0] == three[1] && three[0] == three[2]);
    let float = |bits: &[u32]| bits.iter().map(|bits| f64::from(f32::from_bits(*bits))).collect();
    let (one, three): (Vec<f64>, Vec<f64>) = (float(&one), float(&three[0]));
    let squares = |values: &mut dyn Iterator<Item = f64>| -> f64 { values.map(|x| x * x).sum() };
    let far = squares(&mut one.iter().zip(&three).map(|(a, b)| a - b));
    let far = (far / squares(&mut one.iter().copied())).sqrt();
    assert!(far < 1e-5, "{far}");
}

/// A metric of the whole pass: the number of samples.
#[derive(Clone, Default)]
struct NumSamples(usize);

impl Metric for NumSamples {
    type Input = ();

    fn name(&self) -> Arc<String> {
        Arc::new("samples".into())
    }

    fn attributes(&self) -> MetricAttributes {
        NumericAttributes::default().into()
    }

    fn update(
        &mut self,
        _: &(),
        metadata: &MetricMetadata,
    ) -> Result<SerializedEntry, TensorReadError> {
        self.0 = metadata.progress.items_processed;
        Ok(SerializedEntry::not_available(None))
    }

    fn compute(&mut self) -> Result<SerializedEntry, TensorReadError> {
        let text = self.final_value().serialize();
        Ok(SerializedEntry::new(text.clone(), text))
    }

    fn clear(&mut self) {
        self.0 = 0;
    }
}

impl Numeric for NumSamples {
    fn value(&self) -> Option<NumericEntry> {
        None
    }

    fn running_value(&self) -> Option<NumericEntry> {
        None
    }

    fn final_value(&self) -> NumericEntry {
        NumericEntry::Final(self.0 as f64)
    }
}

/// The ranks have 33, 33 and 34 samples.
#[test]
fn pass_metrics_are_weighted_by_samples() {
    let _guard = lock_random_stream();
    let folder = tempfile::tempdir().unwrap();
    let open = |rank: crate::ThreadRank| {
        let mut config = standalone(Some(folder.path())).config().unwrap();
        let is_lead = crate::Collective::rank(&rank) == 0;
        let io = TrialIo::open(&mut config, Some(RetentionLimits::default()), is_lead).unwrap();
        let ranks = Distributed::from_collective(Box::new(rank));
        let device = Device::flex().autodiff();
        let context = Context::new(config, io, StopSignal::default(), device, ranks);
        context.silence();
        context
    };
    let train = |context: Context| {
        let scratch = tempfile::tempdir().unwrap();
        let training = training(scratch.path(), (burns(true), burns(false))).num_epochs(1);
        let training = context.supervise(training).metric_train_numeric(NumSamples::default());
        training.launch(learner_of(0.0, false));
        context.learner_state.outcome(Ok(())).unwrap();
        context.io().flush().unwrap();
    };
    let contexts: Vec<_> = crate::ThreadRank::group(3).into_iter().map(open).collect();
    std::thread::scope(|scope| {
        let train = &train;
        for context in contexts {
            scope.spawn(move || train(context));
        }
    });
    let rows = std::fs::read_dir(folder.path().join("trial/metrics")).unwrap();
    let text: String =
        rows.map(|row| std::fs::read_to_string(row.unwrap().path()).unwrap()).collect();
    let rows = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let of_epoch = rows.filter(|row| row["group"] == "epoch");
    let samples: Vec<_> = of_epoch.map(|row| row["metrics"]["samples"].as_f64()).collect();
    assert_eq!(samples, [Some((33.0 * 33.0 * 2.0 + 34.0 * 34.0) / 100.0)]);
}

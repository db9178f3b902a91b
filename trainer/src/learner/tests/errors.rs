//! Data errors and interruptions of burn's trainings.

use super::*;
use crate::stop::StopSignal;

#[test]
fn data_error_ends_the_program() {
    struct Broken;
    impl Dataset<(Vec<f32>, i64)> for Broken {
        fn get(&self, index: usize) -> Result<(Vec<f32>, i64), DatasetError> {
            match index {
                40 => Err(DatasetError::new(std::io::Error::other("sample 40 is torn"))),
                _ => Ok(items()[index].clone()),
            }
        }

        fn len(&self) -> usize {
            100
        }
    }
    let _guard = lock_random_stream();
    let scratch = tempfile::tempdir().unwrap();
    let context = standalone(None).context().unwrap();
    let broken = DataLoaderBuilder::new(Pairs).batch_size(16).build(Broken);
    let ours = context.dataloader(Data::dataset(Broken, Pairs), 16);
    for train in [broken, ours] {
        let training = training(scratch.path(), (train, burns(false)));
        let result = context.supervise(training).launch(learner(0.0));
        assert!(result.interrupted.is_some());
        let error = context.learner_state.outcome(Ok(())).unwrap_err().to_string();
        assert!(error.contains("sample 40 is torn"), "{error}");
    }
}

/// Trains until the program interrupts training, after batch `at` if it is set. Returns the model
/// and the number of batches.
fn interrupted(context: &Context, at: Option<u64>) -> (Vec<u32>, u64) {
    let scratch = tempfile::tempdir().unwrap();
    let training = training(scratch.path(), Loaders::Burn.make(context));
    let interrupter = training.interrupter();
    let stop = Arc::new(move || interrupter.stop(Some("the loss is NaN")));
    let stop = StopSigned { at, stop };
    let model = context.supervise(training).metric_train(stop).launch(learner(0.0)).model;
    context.learner_state.outcome(Ok(())).unwrap();
    let batches = context.io().batches();
    (bits(&model), batches)
}

fn saving_every(batches: u64, folder: &Path) -> Standalone {
    let checkpoint_period = Some(Length::new(Unit::Batches, batches));
    Standalone { checkpoint_period, ..standalone(Some(folder)) }
}

/// Training is interrupted within an epoch, and at a batch with a checkpoint.
#[test]
fn interrupted_training_is_not_restarted() {
    let _guard = lock_random_stream();
    for (at, period) in [(5, 1_000), (7, 7)] {
        let folder = tempfile::tempdir().unwrap();
        let train =
            || interrupted(&saving_every(period, folder.path()).context().unwrap(), Some(at));
        let first = train();
        assert_eq!(first.1, at);
        assert!(train() == first, "the second attempt trains after batch {at}");
    }
}

/// Only rank 1 interrupts training. An epoch has four batches.
#[test]
fn interrupted_gang_is_not_restarted() {
    let _guard = lock_random_stream();
    let folder = tempfile::tempdir().unwrap();
    let train = || {
        let open = |rank: crate::ThreadRank| {
            let mut config = saving_every(4, folder.path()).config().unwrap();
            let number = crate::Collective::rank(&rank);
            let limits = Some(RetentionLimits::default());
            let io = TrialIo::open(&mut config, limits, number == 0).unwrap();
            let ranks = Distributed::from_collective(Box::new(rank));
            let device = Device::flex().autodiff();
            let context = Context::new(config, io, StopSignal::default(), device, ranks);
            context.silence();
            (context, (number == 1).then_some(4))
        };
        let contexts: Vec<_> = crate::ThreadRank::group(2).into_iter().map(open).collect();
        std::thread::scope(|scope| {
            let train = |(context, at): (Context, Option<u64>)| {
                scope.spawn(move || interrupted(&context, at).1)
            };
            let threads: Vec<_> = contexts.into_iter().map(train).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        })
    };
    assert_eq!(train(), [4, 4]);
    assert_eq!(train(), [4, 4], "the second attempt trains");
}

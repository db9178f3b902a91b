//! Data errors and interruptions of burn's trainings.

use super::*;

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

#[test]
fn interrupted_training_is_not_restarted() {
    let _guard = lock_random_stream();
    let (scratch, folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let train = || {
        let context = standalone(Some(folder.path())).context().unwrap();
        let training = training(scratch.path(), Loaders::Burn.make(&context));
        let interrupter = training.interrupter();
        let stop = Arc::new(move || interrupter.stop(Some("the loss is NaN")));
        let stop = StopSigned { at: Some(5), stop };
        let model = context.supervise(training).metric_train(stop).launch(learner(0.0)).model;
        context.learner_state.outcome(Ok(())).unwrap();
        let batches = context.io().batches();
        (bits(&model), batches)
    };
    let first = train();
    assert_eq!(first.1, 5);
    assert!(train() == first, "the second attempt trains nothing");
}

//! Training ends with the weights of its best validation, over stops and on ranks; where it begins.

use burn::module::Param;

use super::kinds::of_ranks;
use super::*;

/// The first validation is the best, and the third in a row after it stops: after batch 28.
fn stopping() -> EarlyStopping {
    EarlyStopping::new("val_loss").patience(3).min_delta(1e9).restore_best_weights()
}

/// Trains for `batches`, or leaves after batch `stop_at`; gives the model as bytes, too.
fn train(folder: &Path, batches: u64, stop_at: u64) -> Result<(Fitted<Net>, Vec<u8>)> {
    let context = alone(Some(folder), batches).context()?;
    let stop = StopAt(stop_at, context.stop.clone()).boxed();
    let data = || Data::arrays(samples());
    let fit = Fit::new(data()?)
        .validation(data()?)
        .batch_size(16)
        .callbacks(vec![stopping().boxed(), stop]);
    let step = |model: &Net, (x, y): Pair| StepOutput::classification(model.forward(x), y);
    let fitted = context.fit(Net::new(context.device()), optimizers(), step, fit)?;
    let model = crate::record::snapshot(&fitted.model).into_bytes()?.to_vec();
    Ok((fitted, model))
}

/// A file of the checkpoint after this batch, of whatever attempt.
fn file(folder: &Path, batch: u64, name: &str) -> Option<Vec<u8>> {
    let checkpoints = std::fs::read_dir(folder.join("trial/checkpoints")).unwrap();
    let of = format!("{batch:012}-");
    let mut found = checkpoints.map(|it| it.unwrap().path());
    let found = found.find(|it| it.file_name().unwrap().to_string_lossy().starts_with(&of));
    std::fs::read(found.unwrap().join(name)).ok()
}

#[test]
fn a_training_that_a_callback_stops_ends_with_the_kept_weights_wherever_it_was_resumed() {
    let _stream = alone_on_the_stream();
    let straight = tempfile::tempdir().unwrap();
    let (fitted, model) = train(straight.path(), 40, u64::MAX).unwrap();
    assert!(fitted.stopped.unwrap().contains("has not improved"));
    let of = |batch, name| file(straight.path(), batch, name);
    let best = of(7, "model.bpk").unwrap();
    assert!(model == best, "the model that training gives back");
    assert!(of(28, "model.bpk").unwrap() == best, "the last checkpoint");
    assert!(of(21, "model.bpk").unwrap() != best, "a checkpoint before");
    assert!(of(21, "kept.bpk").unwrap() == best, "what it keeps beside its model");
    let metric = |batch| -> Value {
        serde_json::from_slice::<Value>(&of(batch, "manifest.json").unwrap()).unwrap()["metric"]
            .clone()
    };
    assert!(metric(7).is_string() || metric(7).is_number(), "{}", metric(7));
    assert_eq!(metric(28), metric(7), "the metric of the last checkpoint");
    assert_ne!(metric(21), metric(7));
    for stop_at in [1, 6, 7, 8, 13, 14, 20, 21, 22, 27] {
        let folder = tempfile::tempdir().unwrap();
        train(folder.path(), 40, stop_at).unwrap_err();
        let (_, resumed) = train(folder.path(), 40, u64::MAX).unwrap();
        assert!(resumed == model, "stopped at {stop_at}");
        for name in ["model.bpk", "kept.bpk", "state.json", "optimizers.bpk"] {
            assert!(file(folder.path(), 28, name) == of(28, name), "stopped at {stop_at}: {name}");
        }
        // What has ended ends again.
        assert!(train(folder.path(), 40, u64::MAX).unwrap().1 == model, "stopped at {stop_at}");
    }
}

#[test]
fn a_length_ends_with_the_kept_weights_and_a_longer_one_goes_on_from_the_last() {
    let _stream = alone_on_the_stream();
    let (longer, straight) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (fitted, model) = train(longer.path(), 14, u64::MAX).unwrap();
    assert_eq!(fitted.stopped, None);
    assert!(model == file(longer.path(), 7, "model.bpk").unwrap());
    assert!(model != file(longer.path(), 14, "model.bpk").unwrap());
    train(straight.path(), 20, u64::MAX).unwrap();
    let (_, again) = train(longer.path(), 20, u64::MAX).unwrap();
    assert!(again == model);
    for name in ["model.bpk", "kept.bpk", "optimizers.bpk"] {
        assert!(file(longer.path(), 20, name) == file(straight.path(), 20, name), "{name}");
    }
}

#[test]
fn all_ranks_end_with_the_kept_weights() {
    let _stream = alone_on_the_stream();
    let rank = |context: &Context, stop_at: u64| -> Result<(Vec<u32>, Vec<u32>)> {
        let stop_at = if context.distributed().rank() == 1 { stop_at } else { u64::MAX };
        let stop = StopAt(stop_at, context.stop.clone()).boxed();
        let data = || Data::arrays(samples());
        let fit = Fit::new(data()?)
            .validation(data()?)
            .batch_size(context.distributed().shard_batch_size(18)?)
            .callbacks(vec![stopping().boxed(), stop]);
        let step = |model: &Linear, (x, y): Pair| StepOutput::classification(model.forward(x), y);
        let mut model = LinearConfig::new(20, 5).with_bias(false).init(context.device());
        model.weight = Param::from_tensor(Tensor::zeros([20, 5], context.device()));
        let adam = Optimizers::one(AdamConfig::new().init(), 0.01);
        let bits = |model: &Linear| {
            model.weight.val().into_data().iter::<f32>().map(f32::to_bits).collect::<Vec<_>>()
        };
        let fitted = context.fit(model, adam, step, fit)?.model;
        let fresh = LinearConfig::new(20, 5).with_bias(false).init(context.device());
        let url = context.config.storage.url.clone();
        let best = Path::new(&url).join("trial/checkpoints/000000000006-0");
        Ok((bits(&fitted), bits(&context.load_checkpoint_model(fresh, best)?)))
    };
    for size in [2, 3] {
        let folder = tempfile::tempdir().unwrap();
        for told in of_ranks(folder.path(), size, 40, |context| rank(context, u64::MAX)) {
            let (fitted, best) = told.unwrap();
            assert!(fitted == best, "on {size}");
        }
        let folder = tempfile::tempdir().unwrap();
        let left = of_ranks(folder.path(), size, 40, |context| rank(context, 17));
        assert!(left.iter().all(Result::is_err));
        for told in of_ranks(folder.path(), size, 40, |context| rank(context, u64::MAX)) {
            let (fitted, best) = told.unwrap();
            assert!(fitted == best, "on {size}, stopped at 17");
        }
    }
}

#[test]
fn a_training_alone_begins_with_the_epoch_that_it_is_told() {
    let _stream = alone_on_the_stream();
    /// Notes epochs and the batches before them.
    struct Epochs(Arc<Mutex<Vec<(u64, u64)>>>);
    impl Callback for Epochs {
        fn on_epoch_begin(&mut self, epoch: u64, control: &mut Control) -> Result<()> {
            self.0.lock().unwrap().push((epoch, control.batches()));
            Ok(())
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let train = |initial_epoch, epochs| {
        let context =
            Standalone { length: None, ..alone(Some(folder.path()), 1) }.context().unwrap();
        let begun = Arc::default();
        let fit = Fit::new(Data::arrays(samples()).unwrap())
            .batch_size(16)
            .epochs(epochs)
            .initial_epoch(initial_epoch)
            .callbacks(vec![Epochs(Arc::clone(&begun)).boxed()]);
        let step = |model: &Net, (x, y): Pair| StepOutput::classification(model.forward(x), y);
        let fitted = context.fit(Net::new(context.device()), optimizers(), step, fit).unwrap();
        let begun = begun.lock().unwrap().clone();
        (begun, fitted.history.len())
    };
    assert_eq!(train(3, 5), (vec![(3, 21), (4, 28)], 2));
    // A checkpoint says where it was.
    assert_eq!(train(3, 7), (vec![(5, 35), (6, 42)], 4));
}

#[test]
fn an_evaluation_calls_its_hooks_and_gives_the_score() {
    struct Counts(Arc<Mutex<Vec<String>>>);
    impl Callback for Counts {
        fn on_validation_begin(&mut self, _: &mut Control) -> Result<()> {
            self.0.lock().unwrap().push("begin".into());
            Ok(())
        }

        fn on_validation_batch_begin(&mut self, batch: u64, _: &mut Control) -> Result<()> {
            self.0.lock().unwrap().push(format!("{batch}"));
            Ok(())
        }

        fn on_validation_batch_end(&mut self, batch: u64, _: &mut Control) -> Result<()> {
            self.0.lock().unwrap().push(format!("/{batch}"));
            Ok(())
        }

        fn on_validation_end(&mut self, logs: &Logs, _: &mut Control) -> Result<()> {
            let names: Vec<_> = logs.keys().map(String::as_str).collect();
            self.0.lock().unwrap().push(format!("end {names:?} {}", logs["val_loss"]));
            Ok(())
        }
    }
    let _stream = alone_on_the_stream();
    let context = alone(None, 1).context().unwrap();
    let data = Data::arrays(samples()).unwrap();
    let calls: Arc<Mutex<Vec<String>>> = Arc::default();
    let mut callbacks = vec![Counts(calls.clone()).boxed()];
    let model = Net::new(context.device());
    let step = |model: &Net, (x, y): Pair| StepOutput::classification(model.forward(x), y);
    let metrics = context.evaluate_with(&model, step, &data, 40, &mut callbacks).unwrap();
    let loss = metrics.mean("loss").unwrap();
    let end = format!("end [\"val_accuracy\", \"val_loss\"] {loss}");
    assert_eq!(*calls.lock().unwrap(), ["begin", "0", "/0", "1", "/1", "2", "/2", &end]);
}

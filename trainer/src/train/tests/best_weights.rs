//! Best weights at the end of training, across stops and ranks; initial epoch; evaluation.

use burn::module::Param;

use super::data_kinds::of_ranks;
use super::*;

/// Stops at batch 28: the first validation is the best, and patience is three.
fn stopping() -> EarlyStopping {
    EarlyStopping::new("val_loss").patience(3).min_delta(1e9).restore_best_weights()
}

/// Trains for `batches` batches, or stops after batch `stop_at`. Also returns the model as bytes.
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

/// Reads a file of the checkpoint after this batch, of any attempt.
fn file(folder: &Path, batch: u64, name: &str) -> Option<Vec<u8>> {
    let checkpoints = std::fs::read_dir(folder.join("trial/checkpoints")).unwrap();
    let prefix = format!("{batch:012}-");
    let mut paths = checkpoints.map(|entry| entry.unwrap().path());
    let is_at = |path: &std::path::PathBuf| {
        path.file_name().unwrap().to_string_lossy().starts_with(&prefix)
    };
    std::fs::read(paths.find(is_at).unwrap().join(name)).ok()
}

#[test]
fn early_stop_restores_best_weights_after_any_resume() {
    let _stream = lock_random_stream();
    let straight = tempfile::tempdir().unwrap();
    let (fitted, model) = train(straight.path(), 40, u64::MAX).unwrap();
    assert!(fitted.stopped.unwrap().contains("has not improved"));
    let of = |batch, name| file(straight.path(), batch, name);
    let best = of(7, "model.bpk").unwrap();
    assert!(model == best, "the returned model");
    assert!(of(28, "model.bpk").unwrap() == best, "the last checkpoint");
    assert!(of(21, "model.bpk").unwrap() != best, "an earlier checkpoint");
    assert!(of(21, "kept.bpk").unwrap() == best, "the kept copy");
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
        // A finished training returns the same model again.
        assert!(train(folder.path(), 40, u64::MAX).unwrap().1 == model, "stopped at {stop_at}");
    }
}

#[test]
fn longer_training_continues_from_current_weights() {
    let _stream = lock_random_stream();
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
fn all_ranks_restore_the_best_weights() {
    let _stream = lock_random_stream();
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
        for result in of_ranks(folder.path(), size, 40, |context| rank(context, u64::MAX)) {
            let (fitted, best) = result.unwrap();
            assert!(fitted == best, "on {size}");
        }
        let folder = tempfile::tempdir().unwrap();
        let stopped = of_ranks(folder.path(), size, 40, |context| rank(context, 17));
        assert!(stopped.iter().all(Result::is_err));
        for result in of_ranks(folder.path(), size, 40, |context| rank(context, u64::MAX)) {
            let (fitted, best) = result.unwrap();
            assert!(fitted == best, "on {size}, stopped at 17");
        }
    }
}

#[test]
fn initial_epoch_applies_without_a_checkpoint() {
    let _stream = lock_random_stream();
    /// Records epochs and the batches before them.
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
    // A checkpoint takes precedence over the initial epoch.
    assert_eq!(train(3, 7), (vec![(5, 35), (6, 42)], 4));
}

#[test]
fn evaluate_calls_its_hooks() {
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
    let _stream = lock_random_stream();
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

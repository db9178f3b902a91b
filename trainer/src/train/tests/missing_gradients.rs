//! Losses without gradients, which would train nothing.

use super::data_kinds::{Batch, Tiny, data, of_ranks};
use super::*;
use crate::Metrics;
use crate::train::custom_loop::NextAction;

fn sgd() -> Optimizers {
    Optimizers::one(SgdConfig::new().build(), 0.1)
}

/// Returns the errors of all ranks.
fn fit_errors(
    size: usize,
    optimizers: impl Fn() -> Optimizers + Sync,
    adapt: impl Fn(Tiny) -> Tiny + Sync,
    loss: impl Fn(&Tiny, Batch) -> Tensor<1> + Sync,
) -> Vec<String> {
    let results = of_ranks(brief_folder().path(), size, 24, |context| {
        let step = |model: &Tiny, batch: Batch| StepOutput::mean(loss(model, batch), 2);
        let fit = Fit::new(data("items")?).batch_size(context.distributed().shard_batch_size(18)?);
        context.fit(adapt(Tiny::new(context.device())), optimizers(), step, fit)
    });
    results.into_iter().map(|result| result.map(drop).unwrap_err().to_string()).collect()
}

#[test]
fn losses_without_gradients_are_refused() {
    let _stream = lock_random_stream();
    let detached = |model: &Tiny, (x, _, _): Batch| {
        let detached = model.output.weight.val().detach().require_grad();
        x.matmul(detached).mean()
    };
    let mean = |model: &Tiny, (x, _, _): Batch| model.output.forward(x).mean();
    for size in [1, 2] {
        for error in fit_errors(size, || sgd().aggregate(2), |model| model, detached) {
            let expected = "the loss of the first 10 steps has no gradient for any parameter, so \
                            nothing is trained; compute it from the present model, ";
            assert!(error.starts_with(expected), "{error}");
        }
        for error in fit_errors(size, sgd, Tiny::freeze, mean) {
            let expected = "all parameters of the model are frozen, so nothing would be trained; ";
            assert!(error.starts_with(expected), "{error}");
        }
    }
}

/// For example, batches without targets.
#[test]
fn losses_of_some_batches_may_be_constant() {
    let _stream = lock_random_stream();
    let context = alone(None, 24).context().unwrap();
    let fit = Fit::new(data("items").unwrap()).batch_size(18);
    let mut training = context.training(Tiny::new(context.device()), sgd(), fit).unwrap();
    while let Some(action) = training.next().unwrap() {
        let NextAction::Train(Some((x, y, _))) = action else {
            training.validated(&Metrics::default()).unwrap();
            continue;
        };
        let output = match training.batches() {
            9 => StepOutput::classification(training.model().output.forward(x), y),
            _ => StepOutput::mean(Tensor::<1>::ones([1], context.device()).require_grad(), 1),
        };
        training.learn(Some(output)).unwrap();
    }
}

#[test]
fn stale_losses_of_a_batch_are_refused() {
    let _stream = lock_random_stream();
    let results: Vec<Result<String>> = of_ranks(brief_folder().path(), 2, 1, |context| {
        let fit = Fit::new(data("items")?).batch_size(9);
        let mut training = context.training(Tiny::new(context.device()), sgd(), fit)?;
        let Some(NextAction::Train(batch)) = training.next()? else { panic!("no batch") };
        let loss = |training: &Training<'_, Tiny, Batch>, factor: f64| {
            let (x, y, _) = batch.clone().unwrap();
            let logits = training.model().output.forward(x) * factor;
            Some(StepOutput::classification(logits, y).loss_as(&factor.to_string()))
        };
        let (first, second) = (loss(&training, 1.0), loss(&training, -1.0));
        training.step("weight", first)?;
        let error = training.step("weight", second).unwrap_err().to_string();
        // The training continues with a loss of the current weights.
        let second = loss(&training, -1.0);
        training.step("weight", second)?;
        training.end_batch()?;
        Ok(error)
    });
    for error in results {
        let error = error.unwrap();
        let expected = "step of \"weight\": the loss has no gradient for these parameters; \
                        compute it from `Training::model`, after the previous step of the batch";
        assert_eq!(error, expected);
    }
}

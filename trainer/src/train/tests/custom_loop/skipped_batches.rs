//! Custom loops that skip batches, while gradients are aggregated.

use super::super::data_kinds::{Batch, Tiny, data, of_ranks};
use super::*;

/// Trains with two batches per step. `learns` returns whether a batch is learned from, and
/// `has_output` whether a rank has an output for it. Returns the weights as bits.
fn train(
    context: &Context,
    stop_at: u64,
    learns: impl Fn(u64) -> bool,
    has_output: impl Fn(usize) -> bool,
) -> Result<Vec<u32>> {
    let ranks = context.distributed();
    let sgd = Optimizers::one(SgdConfig::new().build(), 0.1).aggregate(2);
    let fit = Fit::new(data("items")?)
        .batch_size(ranks.shard_batch_size(18)?)
        .callbacks(vec![StopAt(stop_at, context.stop.clone()).boxed()]);
    let mut training = context.training(Tiny::new(context.device()), sgd, fit)?;
    while let Some(action) = training.next()? {
        match action {
            NextAction::Train(batch) if learns(training.batches()) => {
                let output = batch.filter(|_| has_output(ranks.rank())).map(|(x, y, _): Batch| {
                    StepOutput::classification(training.model().output.forward(x), y)
                });
                training.learn(output)?;
            }
            NextAction::Train(_) => training.end_batch()?,
            NextAction::Validate => training.validated(&Metrics::default())?,
        }
    }
    Ok(training.finish()?.model.bits())
}

fn on_ranks(
    folder: &Path,
    size: usize,
    stop_at: u64,
    learns: impl Fn(u64) -> bool + Sync,
    has_output: impl Fn(usize) -> bool + Sync,
) -> Vec<Result<Vec<u32>>> {
    of_ranks(folder, size, 8, |context| train(context, stop_at, &learns, &has_output))
}

/// A batch that ends without an output is like one whose output every rank lacks.
#[test]
fn skipped_batches_take_the_due_step() {
    let _stream = lock_random_stream();
    let is_even = |batch: u64| batch.is_multiple_of(2);
    for size in [1, 2, 3] {
        // All ranks step if only the last one has a sum.
        for has_output in [|_| true, |rank| rank > 0] {
            let trained = |stop_at, folder: &Path| {
                on_ranks(folder, size, stop_at, is_even, move |rank| size == 1 || has_output(rank))
            };
            let straight: Vec<_> =
                trained(u64::MAX, brief_folder().path()).into_iter().map(Result::unwrap).collect();
            assert!(straight.iter().all(|rank| *rank == straight[0]), "{size} ranks differ");
            assert!(straight[0].iter().any(|bits| *bits != 0), "{size} ranks: no step");
            for stop_at in [3, 4] {
                let folder = brief_folder();
                trained(stop_at, folder.path())
                    .into_iter()
                    .for_each(|rank| drop(rank.unwrap_err()));
                let resumed = trained(u64::MAX, folder.path());
                for rank in resumed {
                    assert!(rank.unwrap() == straight[0], "{size} ranks, stopped at {stop_at}");
                }
            }
        }
    }
}

#[test]
fn batches_without_gradients_take_no_step() {
    let _stream = lock_random_stream();
    for size in [1, 2] {
        for rank in on_ranks(brief_folder().path(), size, u64::MAX, |_| false, |_| true) {
            assert!(rank.unwrap().iter().all(|bits| *bits == 0));
        }
    }
    // Batch 3 takes the step of batch 2.
    let bits = |learns: fn(u64) -> bool| {
        on_ranks(brief_folder().path(), 1, u64::MAX, learns, |_| true).remove(0).unwrap()
    };
    assert_ne!(bits(|batch| batch < 2), bits(|batch| batch < 3));
}

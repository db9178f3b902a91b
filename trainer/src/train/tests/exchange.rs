//! Tests of the exchange of a step: its number of calls, exact metrics, and ranks that differ.

use burn::module::Param;
use bytes::Bytes;

use super::data_kinds::{Batch, Tiny, data};
use super::*;
use crate::collective::Collective;
use crate::collective::tests::{connected, gang_of};
use crate::train::custom_loop::NextAction;
use crate::{Distributed, Metrics, ThreadRank};

/// Collective calls of a rank since they were last taken.
type Calls = Arc<Mutex<Vec<&'static str>>>;

/// A rank that records its calls.
#[derive(Debug)]
struct Recorded {
    ranks: Box<dyn Collective>,
    /// Whether to sum tensors as NCCL does.
    on_device: bool,
    calls: Calls,
}

impl Recorded {
    fn record(&self, call: &'static str) {
        self.calls.lock().unwrap().push(call);
    }
}

impl Collective for Recorded {
    fn rank(&self) -> usize {
        self.ranks.rank()
    }

    fn size(&self) -> usize {
        self.ranks.size()
    }

    fn sum_f32(&self, values: &mut [f32]) -> Result<()> {
        self.record("sum_f32");
        self.ranks.sum_f32(values)
    }

    fn sum_segments(&self, head: &mut [f64], segments: &mut [&mut [f32]]) -> Result<()> {
        self.record("sum_segments");
        self.ranks.sum_segments(head, segments)
    }

    fn sum_f64(&self, values: &mut [f64]) -> Result<()> {
        self.record("sum_f64");
        self.ranks.sum_f64(values)
    }

    fn sum_tensor(&self, values: Tensor<1>) -> Result<Tensor<1>> {
        self.record("sum_tensor");
        self.ranks.sum_tensor(values)
    }

    fn sums_on_device(&self) -> bool {
        self.on_device
    }

    fn all_gather(&self, local: Bytes) -> Result<Vec<Bytes>> {
        self.record("all_gather");
        self.ranks.all_gather(local)
    }

    fn broadcast(&self, local: Bytes) -> Result<Bytes> {
        self.record("broadcast");
        self.ranks.broadcast(local)
    }
}

/// Runs `run` on ranks in threads, which are connected directly or over TCP.
fn on_ranks<T: Send>(
    has_connections: bool,
    size: usize,
    run: impl Fn(&Context, &Calls) -> T + Sync,
) -> Vec<T> {
    on_ranks_of((has_connections, false), size, run)
}

/// Same as [`on_ranks`], with ranks that sum tensors as NCCL does if `on_device` is set.
fn on_ranks_of<T: Send>(
    (has_connections, on_device): (bool, bool),
    size: usize,
    run: impl Fn(&Context, &Calls) -> T + Sync,
) -> Vec<T> {
    let gang = has_connections.then(|| gang_of(size as u32));
    let (gang, run) = (&gang, &run);
    std::thread::scope(|scope| {
        let start = |(rank, thread): (usize, ThreadRank)| {
            scope.spawn(move || {
                let ranks: Box<dyn Collective> = match gang {
                    Some(gang) => connected(gang, rank),
                    None => Box::new(thread),
                };
                let calls = Calls::default();
                let ranks = Box::new(Recorded { ranks, on_device, calls: calls.clone() });
                let Context { config, io, stop, .. } = alone(None, 8).context().unwrap();
                let io = Arc::into_inner(io).unwrap().into_inner().unwrap();
                let ranks = Distributed::from_collective(ranks);
                let context = Context::new(config, io, stop, Device::flex().autodiff(), ranks);
                run(&context, &calls)
            })
        };
        let threads: Vec<_> = ThreadRank::group(size).into_iter().enumerate().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Outcome of eight batches: the weights as bits, the history, and metrics and calls by batch.
struct Trained {
    bits: Vec<u32>,
    history: Vec<Logs>,
    metrics: Vec<Metrics>,
    calls: Vec<Vec<&'static str>>,
}

/// Trains a layer with this many outputs. `adapt` changes the output of a batch on this rank.
fn train(
    context: &Context,
    calls: &Calls,
    (outputs, aggregation): (usize, u32),
    adapt: impl Fn(u64, StepOutput) -> Option<StepOutput>,
) -> Result<Trained> {
    let mut model = Tiny::new(context.device());
    model.output.weight = Param::from_tensor(Tensor::zeros([20, outputs], context.device()));
    model.output.bias = Some(Param::from_tensor(Tensor::zeros([outputs], context.device())));
    let adam = Optimizers::one(AdamConfig::new().init(), 0.01).aggregate(aggregation);
    let fit = Fit::new(data("items")?).batch_size(context.distributed().shard_batch_size(18)?);
    let mut training = context.training(model, adam, fit)?;
    let (mut metrics, mut of_batches) = (vec![], vec![]);
    while let Some(action) = training.next()? {
        let NextAction::Train(batch) = action else {
            training.validated(&Metrics::default())?;
            continue;
        };
        let batches = training.batches();
        let output = batch.and_then(|(x, y, _): Batch| {
            let logits = training.model().output.forward(x);
            adapt(batches, StepOutput::classification(logits, y))
        });
        calls.lock().unwrap().clear();
        if aggregation == 1 {
            metrics.push(training.step("weight|bias", output)?);
            of_batches.push(std::mem::take(&mut *calls.lock().unwrap()));
            training.end_batch()?;
        } else {
            training.learn(output)?;
            of_batches.push(std::mem::take(&mut *calls.lock().unwrap()));
        }
    }
    let Fitted { model, history, .. } = training.finish()?;
    Ok(Trained { bits: model.bits(), history, metrics, calls: of_batches })
}

/// The first step also compares the sizes of gradients, and agrees on the names of metrics. The
/// metrics of the last batch before a scheduling boundary or the end of an epoch need another
/// exchange. These are after the batches 4, 6 and 8.
#[test]
fn step_is_one_exchange() {
    let _stream = lock_random_stream();
    let calls_of = |aggregation| {
        on_ranks(false, 3, |context, calls| {
            train(context, calls, (5, aggregation), |_, output| Some(output)).unwrap().calls
        })
    };
    for calls in calls_of(1) {
        assert_eq!(calls[0], ["all_gather", "sum_segments", "all_gather", "sum_segments"]);
        assert_eq!(calls[1..], [["sum_segments"]; 7]);
    }
    // Only each second batch has a step.
    for calls in calls_of(2) {
        assert_eq!(calls[0], ["sum_segments", "all_gather", "sum_segments"]);
        assert_eq!(calls[1], ["all_gather", "sum_segments"]);
        for batches in calls[2..].chunks(2) {
            assert_eq!(*batches, [vec!["sum_segments"], vec!["sum_segments"; 2]]);
        }
    }
}

/// If models differ, all ranks get that of rank 0.
#[test]
fn models_are_broadcast_only_if_they_differ() {
    let _stream = lock_random_stream();
    let ranks = |has_connections, bias_of: fn(usize) -> f32| {
        on_ranks(has_connections, 3, |context, calls| {
            let mut model = Tiny::new(context.device());
            let bias = bias_of(context.distributed().rank());
            model.output.bias = Some(Param::from_tensor(Tensor::full([5], bias, context.device())));
            let fit = Fit::new(data("items").unwrap()).batch_size(6);
            let sgd = Optimizers::one(SgdConfig::new().build(), 0.0);
            let training = context.training(model, sgd, fit).unwrap();
            let bias = training.model().output.bias.as_ref().unwrap().val().into_data();
            let num = calls.lock().unwrap().iter().filter(|call| **call == "broadcast").count();
            (num, bias.iter::<f32>().collect::<Vec<_>>())
        })
    };
    for has_connections in [false, true] {
        assert_eq!(ranks(has_connections, |_| 0.5), vec![(0, vec![0.5; 5]); 3]);
        let one_differs = |rank| if rank == 2 { 2.0 } else { 0.25 };
        assert_eq!(ranks(has_connections, one_differs), vec![(1, vec![0.25; 5]); 3]);
        let first_differs = |rank| if rank == 0 { 0.75 } else { 0.25 };
        assert_eq!(ranks(has_connections, first_differs), vec![(1, vec![0.75; 5]); 3]);
    }
}

/// One rank has no output of batch 3, and metrics appear and disappear on single ranks.
#[test]
fn metrics_of_steps_are_exact() {
    let _stream = lock_random_stream();
    const LARGE: usize = (1 << 24) + 1;
    let tenths = |rank: usize| 0.1 * (rank + 1) as f64;
    for has_connections in [false, true] {
        let ranks = on_ranks(has_connections, 3, |context, calls| {
            let rank = context.distributed().rank();
            let trained = train(context, calls, (5, 1), |batch, output| {
                let output = output.metric("large", LARGE + rank, LARGE);
                let output = output.metric("tenths", tenths(rank), 1);
                let output = match (rank, batch) {
                    (1, 2 | 5) => output.metric("late", -0.0, LARGE),
                    (2, 6) => output.metric("nan", f64::NAN, 1),
                    _ => output,
                };
                ((rank, batch) != (2, 3)).then_some(output)
            });
            trained.unwrap().metrics
        });
        for metrics in &ranks {
            for (batch, metrics) in metrics.iter().enumerate() {
                let num = if batch == 3 { 2 } else { 3 };
                let bits = |name| {
                    let found = metrics.sum_and_count(name);
                    found.map(|(sum, count)| [sum.to_bits(), count.to_bits()])
                };
                let expected = |sum: f64, count: f64| Some([sum.to_bits(), count.to_bits()]);
                let large = (num * LARGE + (0..num).sum::<usize>()) as f64;
                assert_eq!(bits("large"), expected(large, (num * LARGE) as f64), "{batch}");
                let in_rank_order = (1..num).fold(tenths(0), |sum, rank| sum + tenths(rank));
                assert_eq!(bits("tenths"), expected(in_rank_order, num as f64), "{batch}");
                let late = matches!(batch, 2 | 5)
                    .then_some([(-0.0_f64).to_bits(), (LARGE as f64).to_bits()]);
                assert_eq!(bits("late"), late, "{batch}");
                let nan = metrics.sum_and_count("nan").map(|(sum, count)| (sum.is_nan(), count));
                assert_eq!(nan, (batch == 6).then_some((true, 1.0)), "{batch}");
                let (loss, count) = metrics.sum_and_count("loss").unwrap();
                assert!(loss > 0.0 && count > 0.0 && count <= 18.0, "{batch}: {loss} {count}");
            }
        }
    }
}

/// The sums exceed 16 KiB, and every second exchange has no gradients.
#[test]
fn many_metrics_are_added_in_rank_order() {
    let _stream = lock_random_stream();
    let histories = |has_connections| {
        on_ranks(has_connections, 3, |context, calls| {
            let rank = context.distributed().rank();
            let trained = train(context, calls, (5, 2), |_, output| {
                let value = |i: usize| 1.0 / (1 + rank * 31 + i) as f64;
                let names = (0..700).map(|i| (i, format!("metric-{i}")));
                Some(names.fold(output, |output, (i, name)| output.metric(&name, value(i), 1)))
            });
            trained.unwrap().history
        })
    };
    let (connected, threads) = (histories(true), histories(false));
    assert_eq!(threads[0].len(), 1, "an epoch has six batches");
    assert!(connected == threads);
}

/// A layer of 5 outputs is summed by rank 0, one of 300 by the ring. With two ranks, both add in
/// the same order as threads do.
#[test]
fn connected_ranks_train_like_threads() {
    let _stream = lock_random_stream();
    let trained = |has_connections, size, outputs| {
        let ranks = on_ranks(has_connections, size, |context, calls| {
            train(context, calls, (outputs, 1), |_, output| Some(output)).unwrap()
        });
        let ranks: Vec<_> = ranks.into_iter().map(|rank| (rank.bits, rank.metrics)).collect();
        assert!(ranks.iter().all(|rank| *rank == ranks[0]), "{size} ranks, {outputs}: they differ");
        ranks.into_iter().next().unwrap()
    };
    for (size, outputs) in [(2, 5), (3, 5), (2, 300)] {
        let (connected, threads) = (trained(true, size, outputs), trained(false, size, outputs));
        assert!(connected == threads, "{size} ranks, {outputs} outputs");
    }
    assert!(trained(true, 3, 300) == trained(true, 3, 300), "runs differ");
}

#[test]
fn ranks_at_different_steps_are_named() {
    let _stream = lock_random_stream();
    for has_connections in [false, true] {
        let errors = on_ranks(has_connections, 2, |context, _| {
            let part = ["weight", "bias"][context.distributed().rank()];
            let adam = Optimizers::one(AdamConfig::new().init(), 0.01);
            let fit = Fit::new(data("items").unwrap()).batch_size(9);
            let model = Tiny::new(context.device());
            let mut training = context.training(model, adam, fit).unwrap();
            training.next().unwrap();
            training.step(part, None).unwrap_err().to_string()
        });
        let expected = "rank 1 is at `step of parameters [1] of batch 0`, but this rank is at";
        assert!(errors[0].contains(expected), "{errors:?}");
        let expected = "rank 0 is at `step of parameters [0] of batch 0`, but this rank is at";
        assert!(errors[1].contains(expected), "{errors:?}");
    }
}

/// Checks whether it gets the logs of batches, and may end training after a batch.
struct Logged {
    wants: bool,
    gets: bool,
    end: u64,
    ended: StopSignal,
}

impl Callback for Logged {
    fn wants_batch_logs(&self) -> bool {
        self.wants
    }

    fn on_batch_end(&mut self, logs: &Logs, control: &mut Control) -> Result<()> {
        assert_eq!(logs.contains_key("loss"), self.gets, "{logs:?}");
        if control.batches() == self.end {
            self.ended.set();
        }
        Ok(())
    }
}

/// A workload has four batches, an epoch six. The program ends training at the end of a workload,
/// within one, or not at all.
#[test]
fn late_metrics_do_not_change_trainings() {
    let _stream = lock_random_stream();
    for (size, on_device, end) in
        [(1, false, 0), (3, false, 0), (3, false, 4), (3, true, 6), (3, true, 0)]
    {
        let trained = |gets| {
            let ranks = on_ranks_of((false, on_device), size, |context, _| {
                let ranks = context.distributed();
                let wants = gets && ranks.rank() == size - 1;
                let logged = Logged { wants, gets, end, ended: context.ended.clone() };
                let fit = Fit::new(data("items").unwrap())
                    .batch_size(ranks.shard_batch_size(18).unwrap())
                    .callbacks(vec![logged.boxed()]);
                let adam = Optimizers::one(AdamConfig::new().init(), 0.01);
                let step = |model: &Tiny, (x, y, _): Batch| {
                    StepOutput::classification(model.output.forward(x), y)
                };
                let fitted = context.fit(Tiny::new(context.device()), adam, step, fit).unwrap();
                (fitted.model.bits(), fitted.history, fitted.stopped)
            });
            assert!(ranks.iter().all(|rank| *rank == ranks[0]), "{size}, {on_device}: they differ");
            ranks.into_iter().next().unwrap()
        };
        let (late, at_once) = (trained(false), trained(true));
        assert_eq!(late.2.is_some(), end > 0);
        assert!(late == at_once, "{size}, {on_device}, {end}: {:?} {:?}", late.1, at_once.1);
    }
}

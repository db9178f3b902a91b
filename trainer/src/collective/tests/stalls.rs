//! Tests of ranks that make no progress.

use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::tensor::Device;
use stoker_api::contract::ExitCode;

use super::super::group::DeviceAllReduce;
use super::super::progress::{ProgressState, StallLimits};
use super::super::*;
use super::rendezvous::{LIMITS, gang_of, join_watched};
use crate::error::exit_code;

/// Trains on three ranks until `is_stuck`, called with rank and step, returns `true` to stall one
/// rank. Returns the errors of the others, with the time until each.
fn train(
    is_stuck: impl Fn(usize, u64) -> bool + Sync,
) -> Vec<Option<(String, ExitCode, Duration)>> {
    let gang = gang_of(3);
    let rank = |rank: usize| {
        let progress = Arc::<ProgressState>::default();
        let ranks = join_watched(&gang, rank, SHORT, &progress);
        let mut begin = Instant::now();
        for step in 0..20 {
            progress.begin_step(step);
            if is_stuck(rank, step) {
                return Some((ranks, None));
            }
            begin = Instant::now();
            let done = ranks.sum_f32(&mut [1.0]).and_then(|()| ranks.sum_f64(&mut [1.0; 9_000]));
            if let Err(error) = done {
                let (text, code) = (error.to_string(), exit_code(&*error));
                return Some((ranks, Some((text, code, begin.elapsed()))));
            }
        }
        let _ = begin;
        None
    };
    let rank = &rank;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..3).map(|index| scope.spawn(move || rank(index))).collect();
        // A stalled rank keeps its connections open until all others have ended.
        let ended: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        ended.into_iter().map(|ended| ended.and_then(|(_, error)| error)).collect()
    })
}

/// Longer than a thread waits for a core on a busy machine: a late heartbeat would also be a stall.
const SHORT: StallLimits = StallLimits { min: Duration::from_secs(6), steps: 0.0 };

fn check_stalled_rank(stuck: usize) {
    let ended = train(|rank, step| (rank, step) == (stuck, 7));
    assert!(ended[stuck].is_none());
    let (text, code, time) = ended[(stuck + 1) % 3].clone().unwrap();
    assert!((6.0..60.0).contains(&time.as_secs_f64()), "{time:?}");
    let expected =
        format!("no progress for 6 s: rank {stuck} last seen at step 7 after 0 collective calls");
    // Rank 0 may itself notice first and exit; then only the lost connection is reported.
    let is_gone = stuck == 0 && code == ExitCode::PeerFailed;
    assert!(is_gone || (text.starts_with(&expected) && code == ExitCode::Infrastructure), "{text}");
    let is_prompt = |(_, _, time): &(String, ExitCode, Duration)| *time < Duration::from_secs(60);
    assert!(ended.iter().flatten().all(is_prompt), "{ended:?}");
}

#[test]
fn stalled_rank_is_named_with_its_position() {
    std::thread::scope(|scope| {
        for stuck in [0, 2] {
            scope.spawn(move || check_stalled_rank(stuck));
        }
    });
}

#[test]
fn clean_exit_is_announced_but_failure_is_not() {
    for fails in [false, true] {
        let gang = gang_of(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let progress = Arc::<ProgressState>::default();
                let ranks = join_watched(&gang, 1, LIMITS, &progress);
                if fails {
                    progress.record_failure();
                }
                drop(ranks);
            });
            let ranks = join_watched(&gang, 0, LIMITS, &Arc::default());
            let start = Instant::now();
            // Several heartbeats: the first one after the exit of rank 1 reports a failure.
            while !ranks.has_failed() && (fails || start.elapsed() < Duration::from_secs(3)) {
                assert!(start.elapsed() < Duration::from_secs(60), "the exit of rank 1 is ignored");
                std::thread::sleep(Duration::from_millis(10));
            }
            assert_eq!(ranks.has_failed(), fails);
        });
    }
}

/// A stand-in for NCCL, which does not notice that another rank of its machine has exited.
#[derive(Debug)]
struct WaitingDevice;

impl DeviceAllReduce for WaitingDevice {
    fn sum(&mut self, _: Tensor<1>, check_running: &dyn Fn() -> Result<()>) -> Result<Tensor<1>> {
        let start = Instant::now();
        loop {
            check_running()?;
            assert!(start.elapsed() < Duration::from_secs(60), "the exit of rank 1 is ignored");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn supports(&self, _: &Tensor<1>) -> bool {
        true
    }

    fn mark_failed(&mut self) {}
}

#[test]
fn clean_exit_ends_sums_on_devices() {
    let gang = gang_of(2);
    std::thread::scope(|scope| {
        scope.spawn(|| drop(join_watched(&gang, 1, LIMITS, &Arc::default())));
        let mut ranks = join_watched(&gang, 0, LIMITS, &Arc::default());
        ranks.attach_device(Box::new(WaitingDevice));
        let error = ranks.sum_tensor(Tensor::zeros([3], &Device::flex())).unwrap_err();
        assert_eq!(error.to_string(), "rank 1 has exited");
        assert_eq!(exit_code(&*error), ExitCode::PeerFailed);
    });
}

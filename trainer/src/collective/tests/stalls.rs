//! Tests of ranks that make no progress.

use std::sync::Arc;
use std::time::{Duration, Instant};

use stoker_api::contract::ExitCode;

use super::super::progress::{ProgressState, StallLimits};
use super::super::*;
use super::rendezvous::{gang_of, join_watched};
use crate::error::exit_code;

/// Trains on three ranks until `act`, called with rank and step, returns `true` to stall one rank.
/// Returns the errors of the others, with the time until each.
fn train(
    limits: StallLimits,
    act: impl Fn(usize, u64, &ProgressState) -> bool + Sync,
) -> Vec<Option<(String, ExitCode, Duration)>> {
    let gang = gang_of(3);
    let rank = |rank: usize| {
        let progress = Arc::<ProgressState>::default();
        let ranks = join_watched(&gang, rank, limits, &progress);
        let mut begin = Instant::now();
        for step in 0..20 {
            progress.begin_step(step);
            if act(rank, step, &progress) {
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

const SHORT: StallLimits = StallLimits { min: Duration::from_secs(2), steps: 10.0 };

#[test]
fn stalled_rank_is_named_with_its_position() {
    for stuck in [0, 2] {
        let ended = train(SHORT, |rank, step, _| (rank, step) == (stuck, 7));
        assert!(ended[stuck].is_none());
        let (text, code, time) = ended[(stuck + 1) % 3].clone().unwrap();
        assert!((2.0..60.0).contains(&time.as_secs_f64()), "{time:?}");
        let expected = format!(
            "no progress for 2 s: rank {stuck} last seen at step 7 after 0 collective calls"
        );
        // Rank 0 may itself notice first and exit; then only the lost connection is reported.
        let is_gone = stuck == 0 && code == ExitCode::PeerFailed;
        assert!(is_gone || (text == expected && code == ExitCode::Infrastructure), "{text}");
        let is_prompt =
            |(_, _, time): &(String, ExitCode, Duration)| *time < Duration::from_secs(60);
        assert!(ended.iter().flatten().all(is_prompt), "{ended:?}");
    }
}

#[test]
fn waiting_for_storage_is_not_a_stall() {
    let ended = train(SHORT, |rank, step, progress| {
        if (rank, step) == (0, 7) {
            progress.record_activity(RankActivity::Wait);
            std::thread::sleep(Duration::from_secs(5));
            progress.record_activity(RankActivity::Train);
        }
        false
    });
    assert!(ended.iter().all(Option::is_none), "{ended:?}");
}

#[test]
fn limit_grows_with_the_step_duration() {
    // Ten times the median step of 400 ms exceeds the minimum of two seconds.
    let ended = train(SHORT, |rank, step, _| {
        let time = if (rank, step) == (1, 9) { 3_000 } else { 400 };
        if rank == 1 {
            std::thread::sleep(Duration::from_millis(time));
        }
        false
    });
    assert!(ended.iter().all(Option::is_none), "{ended:?}");
}

#[test]
fn stalls_after_training_are_ignored() {
    // Rank 0 marks training as over. Rank 2 is left alone when the others have exited.
    let ended = train(SHORT, |rank, step, progress| {
        if step == 7 && rank == 0 {
            progress.training_finished();
        }
        if step == 7 && rank < 2 {
            std::thread::sleep(Duration::from_secs(4));
        }
        false
    });
    assert!(ended.iter().all(Option::is_none), "{ended:?}");
}

#[test]
fn stalls_before_the_first_step_are_ignored() {
    let gang = gang_of(2);
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let gang = &gang;
            scope.spawn(move || {
                let ranks = join_watched(gang, rank, SHORT, &Arc::default());
                // One rank reads its data for longer than the limit.
                std::thread::sleep(Duration::from_secs(if rank == 0 { 4 } else { 0 }));
                ranks.all_gather(Bytes::new()).unwrap();
            });
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
                let ranks = join_watched(&gang, 1, SHORT, &progress);
                if fails {
                    progress.record_failure();
                }
                drop(ranks);
            });
            let ranks = join_watched(&gang, 0, SHORT, &Arc::default());
            let start = Instant::now();
            // Longer than rank 0's limit for a rank without heartbeats.
            while !ranks.has_failed() && (fails || start.elapsed() < Duration::from_secs(3)) {
                assert!(start.elapsed() < Duration::from_secs(60), "the exit of rank 1 is ignored");
                std::thread::sleep(Duration::from_millis(10));
            }
            assert_eq!(ranks.has_failed(), fails);
        });
    }
}

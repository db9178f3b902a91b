//! Ranks that are there and do not move.

use std::sync::Arc;
use std::time::{Duration, Instant};

use stoker_api::contract::ExitCode;

use super::super::pulse::{Limits, Pulse};
use super::super::*;
use super::meeting::{gang_of, watched};
use crate::error::exit_code;

/// Trains on three ranks until `act`, which is told the rank and the step, says that one goes no
/// further; gives the errors of the others and how long they took.
fn train(
    limits: Limits,
    act: impl Fn(usize, u64, &Pulse) -> bool + Sync,
) -> Vec<Option<(String, ExitCode, Duration)>> {
    let gang = gang_of(3);
    let rank = |rank: usize| {
        let pulse = Arc::<Pulse>::default();
        let ranks = watched(&gang, rank, limits, &pulse);
        let mut begin = Instant::now();
        for step in 0..20 {
            pulse.step(step);
            if act(rank, step, &pulse) {
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
        let threads: Vec<_> = (0..3).map(|it| scope.spawn(move || rank(it))).collect();
        // Whoever stands still keeps its connections until all others have ended.
        let ended: Vec<_> = threads.into_iter().map(|it| it.join().unwrap()).collect();
        ended.into_iter().map(|it| it.and_then(|it| it.1)).collect()
    })
}

const SHORT: Limits = Limits { silence: Duration::from_secs(2), steps: 10.0 };

#[test]
fn a_rank_that_stands_still_is_named_with_its_place() {
    for stuck in [0, 2] {
        let ended = train(SHORT, |rank, step, _| (rank, step) == (stuck, 7));
        assert!(ended[stuck].is_none());
        let (text, code, time) = ended[(stuck + 1) % 3].clone().unwrap();
        assert!((2.0..60.0).contains(&time.as_secs_f64()), "{time:?}");
        let expected =
            format!("nothing moved for 2 s: rank {stuck} last seen at step 7 after 0 sums");
        // Rank 0 itself may be the first to notice, and takes its word with it.
        let is_gone = stuck == 0 && code == ExitCode::PeerFailed;
        assert!(is_gone || (text == expected && code == ExitCode::Infrastructure), "{text}");
        assert!(ended.iter().flatten().all(|it| it.2 < Duration::from_secs(60)), "{ended:?}");
    }
}

#[test]
fn a_rank_that_waits_for_the_storage_is_waited_for() {
    let ended = train(SHORT, |rank, step, pulse| {
        if (rank, step) == (0, 7) {
            pulse.tick(Doing::Wait);
            std::thread::sleep(Duration::from_secs(5));
            pulse.tick(Doing::Train);
        }
        false
    });
    assert!(ended.iter().all(Option::is_none), "{ended:?}");
}

#[test]
fn a_rank_whose_steps_are_long_is_given_as_long() {
    // Ten times a step of 400 ms is more than two seconds.
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
fn what_a_rank_does_after_training_is_its_own_matter() {
    // One rests, as after training; one is alone in the end, as the others have gone.
    let ended = train(SHORT, |rank, step, pulse| {
        if step == 7 && rank == 0 {
            pulse.rest();
        }
        if step == 7 && rank < 2 {
            std::thread::sleep(Duration::from_secs(4));
        }
        false
    });
    assert!(ended.iter().all(Option::is_none), "{ended:?}");
}

#[test]
fn nobody_is_blamed_before_training_has_begun() {
    let gang = gang_of(2);
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let gang = &gang;
            scope.spawn(move || {
                let ranks = watched(gang, rank, SHORT, &Arc::default());
                // A data set that is read on one of them.
                std::thread::sleep(Duration::from_secs(if rank == 0 { 4 } else { 0 }));
                ranks.gather(Bytes::new()).unwrap();
            });
        }
    });
}

#[test]
fn a_rank_that_ends_in_order_says_farewell_and_one_that_fails_does_not() {
    for fails in [false, true] {
        let gang = gang_of(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let pulse = Arc::<Pulse>::default();
                let ranks = watched(&gang, 1, SHORT, &pulse);
                if fails {
                    pulse.fail();
                }
                drop(ranks);
            });
            let ranks = watched(&gang, 0, SHORT, &Arc::default());
            let start = Instant::now();
            // Longer than rank 0 would wait for a rank that said nothing.
            while !ranks.is_over() && (fails || start.elapsed() < Duration::from_secs(3)) {
                assert!(start.elapsed() < Duration::from_secs(60), "rank 1 is not missed");
                std::thread::sleep(Duration::from_millis(10));
            }
            assert_eq!(ranks.is_over(), fails);
        });
    }
}

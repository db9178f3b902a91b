//! Gangs of threads, and strangers.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use stoker_api::contract::{ExitCode, Gang};

use super::rendezvous::meet_within;
use super::*;
use crate::error::exit_code;

fn gang(world_size: u32) -> Gang {
    // A port that is free now.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let rendezvous = format!("127.0.0.1:{port}");
    Gang { world_size, ranks_per_pod: 1, rendezvous, secret: "5ec7e7".into() }
}

fn join(gang: &Gang, attempt: u32, rank: u32, wait_ms: u64) -> Result<Box<dyn Collective>> {
    let (stop, wait) = (StopSignal::default(), Duration::from_millis(wait_ms));
    Ok(Box::new(meet_within(gang, attempt, rank, &stop, wait)?))
}

/// Runs `act` on each rank of a gang; gives what it gives, in order.
fn on_ranks<T: Send>(size: u32, act: impl Fn(&dyn Collective) -> T + Sync) -> Vec<T> {
    let gang = gang(size);
    let rank = |rank: u32| act(&*join(&gang, 0, rank, 20_000).unwrap());
    let rank = &rank;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..size).map(|it| scope.spawn(move || rank(it))).collect();
        threads.into_iter().map(|it| it.join().unwrap()).collect()
    })
}

#[test]
fn sums_are_added_up_in_the_order_of_ranks_and_the_same_everywhere() {
    for size in [2, 3, 5] {
        // Rounding shows the order; more than one chunk shows the pieces.
        let value = |rank: usize, i: usize| 1.0 / (1.0 + (rank * 31 + i) as f32);
        let len = 70_001;
        let found = on_ranks(size, |ranks| {
            let mut single: Vec<f32> = (0..len).map(|i| value(ranks.rank(), i)).collect();
            let mut double: Vec<f64> = single.iter().map(|it| f64::from(*it).sqrt()).collect();
            ranks.sum_f32(&mut single).unwrap();
            ranks.sum_f64(&mut double).unwrap();
            ranks.sum_f32(&mut []).unwrap();
            (single, double)
        });
        let sum = |i| (1..size as usize).fold(value(0, i), |sum, rank| sum + value(rank, i));
        let expected: Vec<f32> = (0..len).map(sum).collect();
        for (single, double) in &found {
            assert!(*single == expected, "{size} ranks");
            assert!(*double == found[0].1, "{size} ranks");
        }
    }
}

#[test]
fn what_ranks_say_comes_in_their_order() {
    let found = on_ranks(3, |ranks| {
        let said = exchange(ranks, "step", format!("rank {}", ranks.rank())).unwrap();
        let mine = Bytes::from(vec![ranks.rank() as u8 + 5; 100_000]);
        (said, ranks.broadcast(mine).unwrap())
    });
    for (said, model) in found {
        assert_eq!(said, ["rank 0", "rank 1", "rank 2"]);
        assert!(model == vec![5; 100_000]);
    }
}

#[test]
fn ranks_that_do_different_things_are_told_so() {
    let places = on_ranks(2, |ranks| {
        let place = ["step", "validation"][ranks.rank()];
        exchange(ranks, place, 1).unwrap_err().to_string()
    });
    assert!(places[0].contains("rank 1 is at its validation, this rank at its step"), "{places:?}");
    let lengths = on_ranks(2, |ranks| {
        let error = ranks.sum_f32(&mut vec![0.0; 3 + ranks.rank()]).unwrap_err();
        (exit_code(&*error), error.to_string())
    });
    assert!(lengths[0].1.contains("rank 1 does something else"), "{lengths:?}");
    assert_eq!(lengths[1].0, ExitCode::PeerFailed, "{lengths:?}");
}

#[test]
fn a_rank_that_goes_is_the_end_for_the_others() {
    for goes in 0..3 {
        let start = Instant::now();
        let codes = on_ranks(3, |ranks| {
            ranks.sum_f32(&mut [1.0]).unwrap();
            if ranks.rank() == goes {
                return ExitCode::PeerFailed;
            }
            let error = ranks.sum_f32(&mut vec![1.0; 1_000_000]).unwrap_err();
            // It is final.
            assert_eq!(exit_code(&*ranks.sum_f32(&mut [1.0]).unwrap_err()), ExitCode::PeerFailed);
            exit_code(&*error)
        });
        assert_eq!(codes, [ExitCode::PeerFailed; 3], "rank {goes}");
        assert!(start.elapsed() < Duration::from_secs(10), "rank {goes}");
    }
}

#[test]
fn ranks_that_do_not_come_are_named() {
    let gang = gang(4);
    let error = std::thread::scope(|scope| {
        let others = scope.spawn(|| join(&gang, 0, 2, 1_500));
        let error = join(&gang, 0, 0, 1_000).unwrap_err();
        assert!(others.join().unwrap().is_err());
        error
    });
    let expected = format!("of 4 ranks, 1, 3 did not come to {} within 1 s", gang.rendezvous);
    assert_eq!((error.to_string(), exit_code(&*error)), (expected, ExitCode::Infrastructure));

    let error = join(&gang, 0, 1, 600).unwrap_err();
    assert!(error.to_string().starts_with("rank 0 was not met at 127.0.0.1:"), "{error}");
    assert_eq!(exit_code(&*error), ExitCode::Infrastructure);
}

#[test]
fn strangers_and_other_attempts_are_refused_and_hold_nobody_up() {
    let gang = gang(2);
    let start = Instant::now();
    std::thread::scope(|scope| {
        let root = scope.spawn(|| join(&gang, 7, 0, 20_000).map(drop));
        let connect = || loop {
            if let Ok(stream) = TcpStream::connect(&gang.rendezvous) {
                return stream;
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        // Silent ones, one that sends garbage, one that says what another gang would.
        let _silent: Vec<_> = (0..20).map(|_| connect()).collect();
        let mut garbage = connect();
        garbage.write_all(&[7; 10_000]).unwrap();
        garbage.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let mut said = vec![];
        let _ = garbage.read_to_end(&mut said);
        assert!(said.len() <= 44, "garbage was answered with more than a greeting");
        let other = Gang { secret: "0ther".into(), ..gang.clone() };
        let error = join(&other, 7, 1, 1_000).unwrap_err().to_string();
        assert!(error.contains("it has closed the connection"), "{error}");
        let error = join(&gang, 6, 1, 10_000).unwrap_err().to_string();
        assert_eq!(error, "rank 0 is not of attempt 6 with 2 ranks");
        let larger = Gang { world_size: 3, ..gang.clone() };
        let error = join(&larger, 7, 1, 10_000).unwrap_err().to_string();
        assert_eq!(error, "rank 0 is not of attempt 7 with 3 ranks");
        join(&gang, 7, 1, 10_000).unwrap();
        root.join().unwrap().unwrap();
    });
    assert!(start.elapsed() < Duration::from_secs(5), "strangers held the gang up");
}

#[test]
fn one_who_plays_rank_0_without_the_secret_is_not_believed() {
    let gang = gang(2);
    let listener = TcpListener::bind(&gang.rendezvous).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut greeting = b"stoker-g\x01\0\0\0".to_vec();
            greeting.extend([9; 32]);
            stream.write_all(&greeting).unwrap();
            let _ = stream.read_exact(&mut [0; 56 + 32]);
            let _ = stream.write_all(&[0; 33]);
        }
    });
    let error = join(&gang, 0, 1, 600).unwrap_err().to_string();
    assert!(error.contains("does not know the gang's secret"), "{error}");
}

#[test]
fn a_signal_ends_the_wait_for_others() {
    let gang = gang(2);
    for rank in [0, 1] {
        let stop = StopSignal::default();
        let start = Instant::now();
        std::thread::scope(|scope| {
            let (gang, told) = (&gang, &stop);
            let wait = Duration::from_secs(20);
            let met = scope.spawn(move || meet_within(gang, 0, rank, told, wait).map(drop));
            std::thread::sleep(Duration::from_millis(100));
            stop.set();
            let error = met.join().unwrap().unwrap_err();
            assert_eq!(exit_code(&*error), ExitCode::Preempted, "rank {rank}: {error}");
        });
        assert!(start.elapsed() < Duration::from_secs(5), "rank {rank}");
    }
}

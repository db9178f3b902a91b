//! Tests of the rendezvous: authentication, refusals and timeouts.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use stoker_api::contract::{ExitCode, Gang};

use super::super::group::{Group, create_groups};
use super::super::handshake::Fingerprint;
use super::super::progress::{ProgressState, StallLimits};
use super::super::rendezvous::{bind, connect_within, ipv6_socket, lacks_ipv6, listen_on_all};
use super::super::*;
use crate::error::exit_code;
use crate::stop::StopSignal;

pub(crate) fn gang_of(world_size: u32) -> Gang {
    let [port] = stoker_test_cluster::free_ports().unwrap();
    let rendezvous = format!("127.0.0.1:{port}");
    Gang { world_size, ranks_per_pod: 1, rendezvous, secret: "5ec7e7".into() }
}

fn topology(gang: &Gang, rank: usize, ranks_per_pod: usize) -> Topology {
    let size = gang.world_size as usize;
    let (cross_rank, local_rank) = (rank / ranks_per_pod, rank % ranks_per_pod);
    let local_size = ranks_per_pod.min(size - cross_rank * ranks_per_pod);
    let cross_size = size.div_ceil(ranks_per_pod);
    Topology { rank, size, local_rank, local_size, cross_rank, cross_size }
}

/// Limits that no test here reaches.
pub(super) const LIMITS: StallLimits = StallLimits { min: Duration::from_secs(300), steps: 10.0 };

pub(super) fn joined(
    gang: &Gang,
    attempt: u32,
    rank: usize,
    ranks_per_pod: usize,
    wait_ms: u64,
) -> Result<(Group, Option<Group>)> {
    join_as(gang, attempt, topology(gang, rank, ranks_per_pod), Fingerprint::default(), wait_ms)
}

/// Runs `act` on each rank of a new gang.
pub(super) fn connect_all(
    size: usize,
    ranks_per_pod: usize,
    act: &(dyn Fn(&dyn Collective) + Sync),
) {
    if size == 1 {
        // A single rank does not need connections.
        return act(&SingleRank);
    }
    let gang = gang_of(size as u32);
    std::thread::scope(|scope| {
        for rank in 0..size {
            let gang = &gang;
            scope.spawn(move || act(&joined(gang, 0, rank, ranks_per_pod, 20_000).unwrap().0));
        }
    });
}

/// Joins as a rank in a separate pod, with these limits on stalls.
pub(super) fn join_watched(
    gang: &Gang,
    rank: usize,
    limits: StallLimits,
    progress: &Arc<ProgressState>,
) -> Group {
    let (stop, wait) = (StopSignal::default(), Duration::from_secs(20));
    let (topology, same) = (topology(gang, rank, 1), Fingerprint::default());
    let connections = connect_within(gang, 0, topology, same, &stop, wait).unwrap();
    create_groups(topology, connections, limits, progress.clone()).unwrap().0
}

fn join_as(
    gang: &Gang,
    attempt: u32,
    topology: Topology,
    fingerprint: Fingerprint,
    wait_ms: u64,
) -> Result<(Group, Option<Group>)> {
    let (stop, wait) = (StopSignal::default(), Duration::from_millis(wait_ms));
    let connections = connect_within(gang, attempt, topology, fingerprint, &stop, wait)?;
    create_groups(topology, connections, LIMITS, Default::default())
}

fn join(gang: &Gang, attempt: u32, rank: usize, wait_ms: u64) -> Result<()> {
    joined(gang, attempt, rank, 1, wait_ms).map(drop)
}

#[test]
fn missing_ranks_are_named() {
    let gang = gang_of(4);
    let error = std::thread::scope(|scope| {
        // Rank 2 connects at its next retry after rank 0 has opened its port.
        let others = scope.spawn(|| join(&gang, 0, 2, 60_000));
        let error = join(&gang, 0, 0, 4_000).unwrap_err();
        let others = others.join().unwrap().unwrap_err();
        assert_eq!(others.to_string(), error.to_string());
        error
    });
    let expected = format!(
        "timeout after 4 s: of 4 ranks, 1, 3 did not connect to {}; check their pods",
        gang.rendezvous
    );
    assert_eq!((error.to_string(), exit_code(&*error)), (expected, ExitCode::Infrastructure));

    let error = join(&gang, 0, 1, 600).unwrap_err();
    assert!(error.to_string().starts_with("rank 0 was not reached at 127.0.0.1:"), "{error}");
    assert_eq!(exit_code(&*error), ExitCode::Infrastructure);
}

#[test]
fn strangers_and_other_attempts_are_refused() {
    let gang = gang_of(2);
    std::thread::scope(|scope| {
        let root = scope.spawn(|| join(&gang, 7, 0, 60_000));
        let start = Instant::now();
        let connect = || loop {
            assert!(start.elapsed() < Duration::from_secs(60), "rank 0 does not listen");
            if let Ok(stream) = TcpStream::connect(&gang.rendezvous) {
                return stream;
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        // Strangers: 20 silent connections, one that sends garbage, and a rank of another gang. If
        // rank 0 handled silent connections one by one, this would exceed its timeout of 60 s.
        let _silent: Vec<_> = (0..20).map(|_| connect()).collect();
        let mut garbage = connect();
        garbage.write_all(&[7; 10_000]).unwrap();
        garbage.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let mut response = vec![];
        let _ = garbage.read_to_end(&mut response);
        assert!(response.len() <= 44, "garbage was answered with more than a greeting");
        let other = Gang { secret: "0ther".into(), ..gang.clone() };
        // Each refusal is retried until the timeout.
        let error = join(&other, 7, 1, 3_000).unwrap_err().to_string();
        assert!(error.contains("the peer closed the connection"), "{error}");
        let refused = |gang: &Gang, attempt: u32, expected: &str| {
            let error = join(gang, attempt, 1, 60_000).unwrap_err();
            let own = "rank 0 belongs to attempt 7 with 2 ranks, but the connecting rank 1";
            assert_eq!(error.to_string(), format!("{own} belongs to {expected} ranks"));
            assert_eq!(exit_code(&*error), ExitCode::Infrastructure);
        };
        refused(&gang, 6, "attempt 6 with 2");
        refused(&Gang { world_size: 3, ..gang.clone() }, 7, "attempt 7 with 3");
        join(&gang, 7, 1, 60_000).unwrap();
        root.join().unwrap().unwrap();
    });
}

#[test]
fn other_programs_and_configurations_are_refused() {
    let own = Fingerprint::default();
    for (other, expected) in [
        (Fingerprint { program: [1; 32], ..own }, "rank 2 runs another program than rank 0: the"),
        (Fingerprint { config: [1; 32], ..own }, "rank 2 has another configuration than rank 0"),
    ] {
        let gang = gang_of(3);
        std::thread::scope(|scope| {
            let ranks = [own, own, other].into_iter().enumerate().map(|(rank, fingerprint)| {
                let gang = &gang;
                scope.spawn(move || {
                    join_as(gang, 0, topology(gang, rank, 1), fingerprint, 20_000).map(drop)
                })
            });
            for rank in ranks.collect::<Vec<_>>() {
                let error = rank.join().unwrap().unwrap_err();
                assert!(error.to_string().starts_with(expected), "{error}");
                assert_eq!(exit_code(&*error), ExitCode::Infrastructure);
            }
        });
    }
}

#[test]
fn rank_0_without_the_secret_is_refused() {
    let gang = gang_of(2);
    let listener = TcpListener::bind(&gang.rendezvous).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut greeting = b"stoker-g\x03\0\0\0".to_vec();
            greeting.extend([9; 32]);
            stream.write_all(&greeting).unwrap();
            let _ = stream.read_exact(&mut [0; 128 + 32]);
            let _ = stream.write_all(&[0; 5 + 32]);
        }
    });
    let error = join(&gang, 0, 1, 3_000).unwrap_err().to_string();
    assert!(error.contains("gang secrets differ"), "{error}");
}

/// A new socket has the option on a node whose setting `net.ipv6.bindv6only` is 1.
#[test]
fn ipv6_only_sockets_accept_ipv4() {
    if TcpListener::bind("[::1]:0").is_err() {
        stoker_test_cluster::record_skip("needs IPv6");
        return;
    }
    let socket = ipv6_socket().unwrap();
    rustix::net::sockopt::set_ipv6_v6only(&socket, true).unwrap();
    let listener = listen_on_all(socket, 0).unwrap();
    let port = listener.local_addr().unwrap().port();
    assert!(TcpStream::connect(("127.0.0.1", port)).is_ok());
}

/// With IPv4 alone, ranks that use IPv6 would reach the other process.
#[test]
fn port_in_use_on_ipv6_is_refused() {
    let Ok(other) = TcpListener::bind("[::1]:0") else {
        stoker_test_cluster::record_skip("needs IPv6");
        return;
    };
    assert!(bind(other.local_addr().unwrap().port()).is_err());
}

#[test]
fn ipv4_replaces_only_missing_ipv6() {
    let is_missing = [Errno::AFNOSUPPORT, Errno::ADDRNOTAVAIL, Errno::ADDRINUSE, Errno::ACCESS]
        .map(|code| lacks_ipv6(&code.into()));
    assert_eq!(is_missing, [true, true, false, false]);
}

#[test]
fn late_rank_is_waited_for() {
    let gang = gang_of(3);
    std::thread::scope(|scope| {
        for rank in 0..3 {
            let gang = &gang;
            scope.spawn(move || {
                std::thread::sleep(Duration::from_millis([0, 1_500, 300][rank]));
                let (all, _) = joined(gang, 0, rank, 1, 20_000).unwrap();
                let mut sum = [1.0];
                all.sum_f32(&mut sum).unwrap();
                assert_eq!(sum, [3.0]);
            });
        }
    });
}

#[test]
fn neighbors_of_a_pod_share_memory() {
    let gang = gang_of(4);
    std::thread::scope(|scope| {
        let ranks = [0, 1, 2, 3].map(|rank| {
            let gang = &gang;
            scope.spawn(move || {
                let (stop, wait) = (StopSignal::default(), Duration::from_secs(20));
                let (topology, same) = (topology(gang, rank, 2), Fingerprint::default());
                connect_within(gang, 0, topology, same, &stop, wait).unwrap().ring
            })
        });
        let is_shared = ranks.map(|rank| {
            let (next, previous) = rank.join().unwrap();
            [next, previous].map(|link| link.is_shared())
        });
        assert_eq!(is_shared, [[true, false], [false, true], [true, false], [false, true]]);
    });
}

#[test]
fn signal_ends_the_rendezvous() {
    let gang = gang_of(2);
    for rank in [0, 1] {
        let stop = StopSignal::default();
        std::thread::scope(|scope| {
            let (gang, signal) = (&gang, &stop);
            let (wait, topology) = (Duration::from_secs(20), topology(gang, rank, 1));
            let met = scope.spawn(move || {
                connect_within(gang, 0, topology, Fingerprint::default(), signal, wait).map(drop)
            });
            std::thread::sleep(Duration::from_millis(100));
            stop.set();
            let error = met.join().unwrap().unwrap_err();
            assert_eq!(exit_code(&*error), ExitCode::Preempted, "rank {rank}: {error}");
        });
    }
}

//! Two replicas, of which the leader dies, is suspended, or loses the API server. The other takes
//! over, and nothing is lost or happens twice.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::Value;
use stoker_api::experiment::Phase;

use crate::flow::grid;
use crate::kubelet::{Kubelet, Line, Script};
use crate::proxy::{Proxy, Wire};
use crate::setup::{LEASE_SECONDS, Operator, Place, client_of, free_ports, runtime};
use crate::writes::{check, wait_for_units};

/// Fault of the leader.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fate {
    Nothing,
    Killed,
    /// Suspended for longer than its lease, then resumed.
    Stopped,
    /// Cut off from the API server for longer than its lease. Trainers can still reach it.
    CutOff,
}

/// Duration of the leader's fault: longer than its lease.
const AWAY: Duration = Duration::from_secs(LEASE_SECONDS + 3);
/// Limit of each wait for a change of leader. A change takes the lease's time, one poll and a few
/// lists; the rest is for machines that have other work.
const TAKE_OVER: Duration = Duration::from_secs(LEASE_SECONDS + 30);

/// Longest time for a replica to list all objects again on a busy machine.
const LIST_MAX: Duration = Duration::from_secs(20);

fn leads(operator: &Operator) -> bool {
    operator.metrics().contains("\nstoker_leader 1\n")
}

/// Creates a kubeconfig that reaches the API server through a wire.
async fn wired(place: &Place, name: &str) -> (Wire, PathBuf) {
    let text = std::fs::read_to_string(&place.kubeconfig).unwrap();
    let at = text.find("https://127.0.0.1:").unwrap() + "https://".len();
    let is_address = |char: &char| char.is_ascii_digit() || ".:".contains(*char);
    let address: String = text[at..].chars().take_while(is_address).collect();
    let wire = Wire::start(vec![address.parse().unwrap()]).await;
    let path = place.path(name);
    std::fs::write(&path, text.replace(&address, &format!("127.0.0.1:{}", wire.port))).unwrap();
    (wire, path)
}

/// Polls a report server without a token, and fails unless each response is 401.
async fn answers_always(line: &Line, url: &str) {
    loop {
        let answer = line.send(b"{}".to_vec(), None, url).await;
        assert_eq!(answer.map(|(code, _)| code), Some(401), "{url}");
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
}

async fn run(fate: Fate) -> Vec<Value> {
    let place = Place::new(&format!("leaders-{fate:?}").to_lowercase()).await;
    let (port_a, port_b) = (free_ports(), free_ports());
    let address = |port| ([127, 0, 0, 1], port).into();
    let door = Wire::start(vec![address(port_a), address(port_b)]).await;
    let door_url = format!("https://127.0.0.1:{}", door.port);
    let (wire, kubeconfig) = wired(&place, "wired").await;
    let more = ["--door-url", &door_url];
    let mut a = place.operator_by("a", port_a, &kubeconfig, &more);
    a.wait_ready(&place);
    until("a leads", TAKE_OVER, || leads(&a)).await;
    let mut b = place.operator_by("b", port_b, &place.kubeconfig, &more);
    b.wait_ready(&place);

    let kubelet =
        Kubelet::start(&place.client, &place.namespace, |_| Script::Train { unit_ms: 150 });
    place.apply("grid", grid(5, 30, 2));
    wait_for_units(&kubelet, 20).await;
    assert!(leads(&a) && !leads(&b), "{fate:?}\n{}", place.logs());
    let ca = std::fs::read_to_string(place.path("ca.crt")).unwrap();
    let url = |port: u16| format!("https://127.0.0.1:{port}/v1/trials/n/t/reports");
    let line = Line::by_authority(&ca, url(port_b));
    let probes = tokio::spawn(async move { answers_always(&line, &url(port_b)).await });

    let a = if fate == Fate::Killed {
        a.kill();
        None
    } else {
        Some(a)
    };
    match (fate, &a) {
        (Fate::Stopped, Some(a)) => a.signal("-STOP"),
        (Fate::CutOff, _) => wire.cut(true),
        _ => {}
    }
    if fate != Fate::Nothing {
        let begin = Instant::now();
        until(&format!("b leads: {fate:?}"), TAKE_OVER, || leads(&b)).await;
        if fate == Fate::CutOff {
            let a = a.as_ref().unwrap();
            assert!(!leads(a), "two replicas lead at the same time");
            until("a is not ready", TAKE_OVER, || !a.is_ready()).await;
        }
        tokio::time::sleep(AWAY.saturating_sub(begin.elapsed())).await;
        wire.cut(false);
        if let (Fate::Stopped, Some(a)) = (fate, &a) {
            a.signal("-CONT");
        }
    }
    place.wait_for("grid", &[Phase::Completed, Phase::Failed], 180).await;
    if let (Fate::Stopped | Fate::CutOff, Some(a)) = (fate, &a) {
        until("a knows that it does not lead", TAKE_OVER, || !leads(a)).await;
        until("a is ready again", TAKE_OVER, || a.is_ready()).await;
    }
    assert_eq!(leads(&b), fate != Fate::Nothing, "{fate:?}");
    assert!(b.metrics().contains("stoker_reports_total{answer=\"Directive\"}"), "{fate:?}");
    assert!(!probes.is_finished(), "b's report server was unavailable");
    probes.abort();
    check(&place, &kubelet, "grid", &format!("{fate:?}")).await
}

async fn until(what: &str, time: Duration, is_so: impl Fn() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < time, "{what}: not within {time:?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[test]
fn search_result_does_not_depend_on_leader_faults() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let fates = [Fate::Nothing, Fate::Killed, Fate::Stopped, Fate::CutOff];
        let [expected, others @ ..] = fates.map(|fate| tokio::spawn(run(fate)));
        let expected = expected.await.unwrap();
        assert_eq!(expected.len(), 5);
        for (other, fate) in others.into_iter().zip(&fates[1..]) {
            assert_eq!(other.await.unwrap(), expected, "{fate:?}");
        }
    });
}

#[test]
fn dead_watches_are_replaced_within_a_minute() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let place = Place::new("deadwatch").await;
        let mut leader = place.operator("a", free_ports());
        leader.wait_ready(&place);
        until("a leads", TAKE_OVER, || leads(&leader)).await;
        // A new leader lists everything again, so the observed replica must not lead.
        let (wire, kubeconfig) = wired(&place, "wired").await;
        let mut standby = place.operator_by("b", free_ports(), &kubeconfig, &[]);
        standby.wait_ready(&place);
        let knows = |num: u32| {
            let gauge = format!("\nstoker_cached_objects{{kind=\"experiments\"}} {num}\n");
            standby.metrics().contains(&gauge)
        };
        assert!(knows(0));
        wire.forget_connections();
        place.apply("grid", grid(1, 2, 1));
        let minute = Duration::from_secs(60);
        // The rest is for listing the objects again.
        until("the standby replica has the experiment", minute + LIST_MAX, || knows(1)).await;
    });
}

#[test]
fn late_lease_renewal_loses_no_due_keys() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let place = Place::new("late").await;
        let proxy = Proxy::start(client_of(&place.kubeconfig).await, place.folder.path()).await;
        // Each renewal succeeds within its timeout, but shortly after the leadership has lapsed.
        proxy.delay_leases(Duration::from_secs(LEASE_SECONDS) * 9 / 64);
        let mut operator = place.operator_by("a", free_ports(), &proxy.kubeconfig, &[]);
        operator.wait_ready(&place);
        let kubelet = Kubelet::start(&place.client, "late", |_| Script::Train { unit_ms: 10 });
        for number in 0..5 {
            let name = format!("late-{number}");
            place.apply(&name, grid(3, 2, 1));
            place.wait_for(&name, &[Phase::Completed], 120).await;
        }
        assert_eq!(kubelet.started().len(), 15);
    });
}

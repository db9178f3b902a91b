//! Two replicas of which the leading one dies, stops for a while, or is cut off from the API
//! server: the other takes over, and nothing of the search is lost or happens twice.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::Value;
use stoker_api::experiment::Phase;

use crate::flow::grid;
use crate::kubelet::{Kubelet, Line, Script};
use crate::proxy::{Proxy, Wire};
use crate::setup::{LEASE_SECONDS, Operator, Place, client_of, free_ports, runtime};
use crate::writes::{check, wait_for_units};

/// What happens to the leader.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fate {
    Nothing,
    Killed,
    /// Stopped for longer than its lease, and let go.
    Stopped,
    /// Cut off from the API server for longer than its lease; trainers still reach it.
    CutOff,
}

/// How long a leader is away: longer than its lease.
const AWAY: Duration = Duration::from_secs(LEASE_SECONDS + 3);
/// Limit of each wait for a change of leader. A change takes the lease's time, one poll and a few
/// lists; the rest is for machines that have other work.
const TAKE_OVER: Duration = Duration::from_secs(LEASE_SECONDS + 30);

/// How long a replica may take to list all objects again, on a machine that has other work.
const LIST_MAX: Duration = Duration::from_secs(20);

fn leads(operator: &Operator) -> bool {
    operator.metrics().contains("\nstoker_leader 1\n")
}

/// A kubeconfig by which the API server is reached over a wire.
async fn wired(place: &Place, name: &str) -> (Wire, PathBuf) {
    let text = std::fs::read_to_string(&place.kubeconfig).unwrap();
    let at = text.find("https://127.0.0.1:").unwrap() + "https://".len();
    let address: String =
        text[at..].chars().take_while(|it| it.is_ascii_digit() || ".:".contains(*it)).collect();
    let wire = Wire::start(vec![address.parse().unwrap()]).await;
    let path = place.path(name);
    std::fs::write(&path, text.replace(&address, &format!("127.0.0.1:{}", wire.port))).unwrap();
    (wire, path)
}

/// Asks a door once and again, without a token: `false` as soon as it does not refuse that.
async fn answers_always(line: &Line, url: &str) {
    loop {
        let answer = line.send(b"{}".to_vec(), None, url).await;
        assert_eq!(answer.map(|it| it.0), Some(401), "{url}");
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
            assert!(!leads(a), "two lead at a time");
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
    assert!(!probes.is_finished(), "b's door was always open");
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
fn whatever_becomes_of_the_leader_the_search_ends_as_if_nothing_had_been() {
    if !stoker_test_cluster::wanted() {
        return;
    }
    runtime().block_on(async {
        let fates = [Fate::Nothing, Fate::Killed, Fate::Stopped, Fate::CutOff];
        let [expected, others @ ..] = fates.map(|it| tokio::spawn(run(it)));
        let expected = expected.await.unwrap();
        assert_eq!(expected.len(), 5);
        for (other, fate) in others.into_iter().zip(&fates[1..]) {
            assert_eq!(other.await.unwrap(), expected, "{fate:?}");
        }
    });
}

#[test]
fn dead_watches_are_replaced_within_a_minute() {
    if !stoker_test_cluster::wanted() {
        return;
    }
    runtime().block_on(async {
        let place = Place::new("deadwatch").await;
        let mut leader = place.operator("a", free_ports());
        leader.wait_ready(&place);
        until("a leads", TAKE_OVER, || leads(&leader)).await;
        // A replica that begins to lead lists everything again, so this one does not lead.
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
        // The rest is time to list the objects again.
        until("the standby replica knows it", minute + LIST_MAX, || knows(1)).await;
    });
}

#[test]
fn a_lease_that_is_renewed_late_loses_nothing_that_is_due() {
    if !stoker_test_cluster::wanted() {
        return;
    }
    runtime().block_on(async {
        let place = Place::new("late").await;
        let proxy = Proxy::start(client_of(&place.kubeconfig).await, place.folder.path()).await;
        // Read and renewed it is within the time for it, and after its end by a moment each time.
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

//! Two replicas, of which the leader dies, is suspended, or loses the API server. The other takes
//! over, and nothing is lost or happens twice.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::Value;
use stoker_api::experiment::Phase;
use tokio::task::block_in_place;

use crate::flow::grid;
use crate::kubelet::{Kubelet, Script};
use crate::operator_process::Operator;
use crate::proxy::Proxy;
use crate::setup::{LEASE_SECONDS, TestNamespace, client_of, operator_port, rbac_rules, runtime};
use crate::tcp_forwarder::TcpForwarder;
use crate::trainer::ReportConnection;
use crate::writes::{check, wait_for_units};

/// Fault of the leader.
#[derive(Clone, Copy, Debug, PartialEq)]
enum LeaderFault {
    Nothing,
    Killed,
    /// Suspended for longer than its lease, then resumed.
    Stopped,
    /// Cut off from the API server for longer than its lease. Trainers can still reach it.
    CutOff,
}

/// Duration of the leader's fault: longer than its lease.
const FAULT_DURATION: Duration = Duration::from_secs(LEASE_SECONDS + 3);
/// Limit of each wait for a change of leader. A change takes the lease's time, one poll and a few
/// lists; the rest is for machines that have other work.
const TAKEOVER_MAX: Duration = Duration::from_secs(LEASE_SECONDS + 30);
/// Limit of each wait for an operator to notice a deleted or new namespace: it checks every 15 to
/// 30 seconds, and four times in six seconds.
const RESTART_MAX: Duration = Duration::from_secs(120);

/// Maximum number of runs of a scenario.
const RUNS_MAX: u32 = 3;

/// Longest time for a replica to list all objects again on a busy machine.
const LIST_MAX: Duration = Duration::from_secs(20);

fn leads(operator: &Operator) -> bool {
    operator.metrics().contains("\nstoker_leader 1\n")
}

/// Creates a kubeconfig that reaches the API server through a forwarder.
async fn forwarded_kubeconfig(ns: &TestNamespace, name: &str) -> (TcpForwarder, PathBuf) {
    let text = std::fs::read_to_string(&ns.kubeconfig).unwrap();
    let at = text.find("https://127.0.0.1:").unwrap() + "https://".len();
    let is_address = |char: &char| char.is_ascii_digit() || ".:".contains(*char);
    let address: String = text[at..].chars().take_while(is_address).collect();
    let forwarder = TcpForwarder::start(vec![address.parse().unwrap()]).await;
    let path = ns.path(name);
    std::fs::write(&path, text.replace(&address, &format!("127.0.0.1:{}", forwarder.port)))
        .unwrap();
    (forwarder, path)
}

/// Polls a report server without a token, and fails unless each response is 401.
async fn answers_always(connection: &ReportConnection, url: &str) {
    loop {
        let answer = connection.send(b"{}".to_vec(), None, url).await;
        assert_eq!(answer.map(|(code, _)| code), Some(401), "{url}");
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
}

/// Returns whether a replica lost its lease because the API server was slow.
fn has_lost_its_lease(ns: &TestNamespace, name: &str) -> bool {
    let log = std::fs::read_to_string(ns.path(&format!("{name}.log"))).unwrap_or_default();
    log.contains("cannot renew the lease: no response in time")
}

/// Returns the results of a search whose leader has this fault. On a busy machine, the API server
/// may be so slow that a replica loses its lease without a fault. Such a run shows nothing, and is
/// repeated.
async fn run(fault: LeaderFault) -> Vec<Value> {
    for number in 0..RUNS_MAX {
        if let Some(results) = run_once(fault, number).await {
            return results;
        }
    }
    panic!("{fault:?}: a replica lost its lease without a fault in each of {RUNS_MAX} runs");
}

/// Returns `None` if a replica lost its lease without a fault.
async fn run_once(fault: LeaderFault, number: u32) -> Option<Vec<Value>> {
    let ns = TestNamespace::new(&format!("leaders-{fault:?}-{number}").to_lowercase()).await;
    let (port_a, port_b) = (operator_port(), operator_port());
    let address = |port| ([127, 0, 0, 1], port).into();
    let report_server = TcpForwarder::start(vec![address(port_a), address(port_b)]).await;
    let door_url = format!("https://127.0.0.1:{}", report_server.port);
    let (forwarder, kubeconfig) = forwarded_kubeconfig(&ns, "wired").await;
    let more = ["--door-url", &door_url];
    let mut a = ns.operator_by("a", port_a, &kubeconfig, &more);
    a.wait_ready(&ns);
    wait_until("a leads", TAKEOVER_MAX, || leads(&a)).await;
    let mut b = ns.operator_by("b", port_b, &ns.kubeconfig, &more);
    b.wait_ready(&ns);

    let kubelet = Kubelet::start(&ns.client, &ns.namespace, |_| Script::Train { unit_ms: 150 });
    ns.apply("grid", grid(5, 30, 2));
    wait_for_units(&kubelet, 20).await;
    if has_lost_its_lease(&ns, "a") {
        return None;
    }
    assert!(leads(&a) && !leads(&b), "{fault:?}\n{}", ns.logs());
    let ca = std::fs::read_to_string(ns.path("ca.crt")).unwrap();
    let url = |port: u16| format!("https://127.0.0.1:{port}/v1/trials/n/t/reports");
    let connection = ReportConnection::by_authority(&ca, url(port_b));
    let probes = tokio::spawn(async move { answers_always(&connection, &url(port_b)).await });

    let a = if fault == LeaderFault::Killed {
        a.kill();
        None
    } else {
        Some(a)
    };
    match (fault, &a) {
        (LeaderFault::Stopped, Some(a)) => a.signal("-STOP"),
        (LeaderFault::CutOff, _) => forwarder.cut(true),
        _ => {}
    }
    if fault != LeaderFault::Nothing {
        let begin = Instant::now();
        wait_until(&format!("b leads: {fault:?}"), TAKEOVER_MAX, || leads(&b)).await;
        if fault == LeaderFault::CutOff {
            let a = a.as_ref().unwrap();
            assert!(!leads(a), "two replicas lead at the same time");
            wait_until("a is not ready", TAKEOVER_MAX, || !a.is_ready()).await;
        }
        tokio::time::sleep(FAULT_DURATION.saturating_sub(begin.elapsed())).await;
        forwarder.cut(false);
        if let (LeaderFault::Stopped, Some(a)) = (fault, &a) {
            a.signal("-CONT");
        }
    }
    ns.wait_for("grid", &[Phase::Completed, Phase::Failed]).await;
    if let (LeaderFault::Stopped | LeaderFault::CutOff, Some(a)) = (fault, &a) {
        wait_until("a knows that it does not lead", TAKEOVER_MAX, || !leads(a)).await;
        wait_until("a is ready again", TAKEOVER_MAX, || a.is_ready()).await;
    }
    let is_lost = fault == LeaderFault::Nothing && has_lost_its_lease(&ns, "a");
    if is_lost || has_lost_its_lease(&ns, "b") {
        probes.abort();
        return None;
    }
    assert_eq!(leads(&b), fault != LeaderFault::Nothing, "{fault:?}");
    assert!(b.metrics().contains("stoker_reports_total{answer=\"Directive\"}"), "{fault:?}");
    assert!(!probes.is_finished(), "b's report server was unavailable");
    probes.abort();
    Some(check(&ns, &kubelet, "grid", &format!("{fault:?}")).await)
}

async fn wait_until(what: &str, time: Duration, is_expected: impl Fn() -> bool) {
    let begin = Instant::now();
    while !is_expected() {
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
        let faults =
            [LeaderFault::Nothing, LeaderFault::Killed, LeaderFault::Stopped, LeaderFault::CutOff];
        let [expected, others @ ..] = faults.map(|fault| tokio::spawn(run(fault)));
        let expected = expected.await.unwrap();
        assert_eq!(expected.len(), 5);
        for (other, fault) in others.into_iter().zip(&faults[1..]) {
            assert_eq!(other.await.unwrap(), expected, "{fault:?}");
        }
    });
}

#[test]
fn dead_watches_are_replaced_within_a_minute() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("deadwatch").await;
        let mut leader = ns.operator("a", operator_port());
        leader.wait_ready(&ns);
        wait_until("a leads", TAKEOVER_MAX, || leads(&leader)).await;
        // A new leader lists everything again, so the observed replica must not lead.
        let (forwarder, kubeconfig) = forwarded_kubeconfig(&ns, "wired").await;
        let mut standby = ns.operator_by("b", operator_port(), &kubeconfig, &[]);
        standby.wait_ready(&ns);
        let knows = |num: u32| {
            let gauge = format!("\nstoker_cached_objects{{kind=\"experiments\"}} {num}\n");
            standby.metrics().contains(&gauge)
        };
        assert!(knows(0));
        forwarder.forget_connections();
        ns.apply("grid", grid(1, 2, 1));
        let minute = Duration::from_secs(60);
        // The rest is for listing the objects again.
        wait_until("the standby replica has the experiment", minute + LIST_MAX, || knows(1)).await;
    });
}

#[test]
fn late_lease_renewal_loses_no_due_keys() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("late").await;
        let proxy = Proxy::start(client_of(&ns.kubeconfig).await, ns.folder.path()).await;
        // Each renewal succeeds within its timeout, but shortly after the leadership has lapsed.
        proxy.delay_leases(Duration::from_secs(LEASE_SECONDS) * 9 / 64);
        let mut operator = ns.operator_by("a", operator_port(), &proxy.kubeconfig, &[]);
        operator.wait_ready(&ns);
        let kubelet = Kubelet::start(&ns.client, "late", |_| Script::Train { unit_ms: 10 });
        for number in 0..5 {
            let name = format!("late-{number}");
            ns.apply(&name, grid(3, 2, 1));
            ns.wait_for(&name, &[Phase::Completed]).await;
        }
        assert_eq!(kubelet.started().len(), 15);
    });
}

#[test]
fn deleted_namespace_does_not_block_the_others() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let mut ns = TestNamespace::new("outlives").await;
        // Lists of the deleted namespace are denied.
        ns.checks_rules = false;
        let add_namespace = || {
            block_in_place(|| {
                ns.plane.make_namespace("outlived").unwrap();
                ns.plane.apply(&rbac_rules(ns.plane, "outlives", "outlives,outlived")).unwrap();
            });
        };
        add_namespace();
        let start = || ns.operator_with("a", operator_port(), &["--watch-namespaces", "outlived"]);
        let exits = async |operator: &mut Operator, why: &str| {
            let operator = std::cell::RefCell::new(operator);
            wait_until(why, RESTART_MAX, || !operator.borrow_mut().is_alive()).await;
            let log = std::fs::read_to_string(ns.path("a.log")).unwrap();
            assert!(log.contains(why), "{log}");
        };
        let mut operator = start();
        operator.wait_ready(&ns);
        let delete = ["delete", "namespace", "outlived", "--wait"];
        block_in_place(|| ns.plane.kubectl(&delete)).unwrap();
        exits(&mut operator, "\"outlived\" can no longer be read; restarting without it").await;
        let mut operator = start();
        operator.wait_ready(&ns);
        let _kubelet = Kubelet::start(&ns.client, "outlives", |_| Script::Train { unit_ms: 10 });
        ns.apply("grid", grid(2, 2, 1));
        ns.wait_for("grid", &[Phase::Completed]).await;
        add_namespace();
        exits(&mut operator, "\"outlived\" can be read now; restarting with it").await;
    });
}

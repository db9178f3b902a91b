//! The operator dies at each of its writes, or loses what it depends on for a while. The search
//! ends as without a fault, and no pod is started twice.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use stoker_api::experiment::Phase;
use stoker_api::trial::Trial;
use stoker_test_cluster::ControlPlane;

use crate::flow::grid;
use crate::kubelet::{Kubelet, Script};
use crate::operator_process::Operator;
use crate::proxy::{KillTime, LATE, Proxy};
use crate::setup::{TestNamespace, client_of, decisions_of, free_ports, runtime};

/// Whether to test all writes instead of a sample.
fn tests_all_writes() -> bool {
    std::env::var("STOKER_TEST_WRITES").is_ok_and(|value| value == "all")
}

/// Number of deaths in a sample.
const SAMPLE: usize = 36;
/// Duration of the API server's outage.
const OUTAGE: Duration = Duration::from_secs(60);
/// Number of experiments that run concurrently.
const NUM_CONCURRENT: usize = 3;
const PODS: usize = 2;
const TRIALS: usize = 3;

/// Checks the invariants of an experiment whose operator may have died, and returns the decisions.
pub(crate) async fn check(
    ns: &TestNamespace,
    kubelet: &Kubelet,
    name: &str,
    what: &str,
) -> Vec<Value> {
    let trials = ns.trials_of(name).await;
    let mut orders = BTreeSet::new();
    for trial in &trials {
        let status = trial.status.clone().unwrap();
        let attempts: Vec<_> =
            status.attempts.iter().map(|attempt| (attempt.number, attempt.end)).collect();
        assert_eq!(attempts.len(), 1, "{what}: {attempts:?}\n{}", ns.logs());
        for grant in &trial.spec.grants {
            assert!(orders.insert(grant.order), "{what}: order {} twice", grant.order);
        }
        assert_eq!(trial.spec.grants.len(), status.facts.len(), "{what}: {:#?}", trial.spec);
    }
    let prefix = format!("{name}-");
    let mut started = kubelet.started();
    started.retain(|pod| pod.starts_with(&prefix));
    started.sort();
    let pods = 0..PODS;
    let expected: Vec<String> = (0..trials.len())
        .flat_map(|trial| pods.clone().map(move |pod| (trial, pod)))
        .map(|(trial, pod)| format!("{name}-{trial}-a0-r{pod}"))
        .collect();
    assert_eq!(started, expected, "{what}\n{}", ns.logs());
    without_names(&trials)
}

fn without_names(trials: &[Trial]) -> Vec<Value> {
    let mut all = decisions_of(trials);
    all.iter_mut().for_each(|trial| trial["name"] = json!(null));
    all
}

/// A namespace with an operator behind a proxy.
struct ProxiedOperator {
    ns: TestNamespace,
    proxy: Proxy,
    kubelet: Kubelet,
    operator: Option<Operator>,
    port: u16,
}

impl ProxiedOperator {
    async fn new(namespace: &str) -> Self {
        let ns = TestNamespace::new(namespace).await;
        let proxy = Proxy::start(client_of(&ns.kubeconfig).await, ns.folder.path()).await;
        let kubelet = Kubelet::start(&ns.client, namespace, |_| Script::Train { unit_ms: 10 });
        let mut proxied_operator = Self { ns, proxy, kubelet, operator: None, port: free_ports() };
        proxied_operator.begin();
        proxied_operator.operator.as_mut().unwrap().wait_ready(&proxied_operator.ns);
        proxied_operator
    }

    fn begin(&mut self) {
        // Finished pods must stay until a late write has arrived: it collides only with existing
        // pods.
        let stay = (2 * LATE.as_secs() + 1).to_string();
        let more = ["--finished-pods-seconds", &stay, "--starting-gangs-max", "3"];
        let kubeconfig = &self.proxy.kubeconfig;
        self.operator = Some(self.ns.operator_by("a", self.port, kubeconfig, &more));
    }

    /// Runs an experiment whose operator dies at its n-th write, if it has that many. Returns the
    /// decisions and the name of that write.
    async fn run(&mut self, n: usize, when: KillTime) -> (Vec<Value>, Option<String>) {
        let name = format!("{when:?}-{n}").to_lowercase();
        let pid = self.operator.as_ref().unwrap().pid();
        let mut death = self.proxy.arm(n, when, pid);
        self.ns.apply(&name, grid(TRIALS as u32, 2, PODS as u32));
        let ends = [Phase::Completed, Phase::Failed, Phase::Cancelled];
        let triggered_by = tokio::select! {
            triggered_by = &mut death => Some(triggered_by.unwrap()),
            _ = self.ns.wait_for(&name, &ends, 60) => None,
        };
        // A write after the end may trigger the kill while the test observes the end.
        let is_late = !self.proxy.disarm() && triggered_by.is_none();
        let triggered_by = if is_late { death.await.ok() } else { triggered_by };
        if triggered_by.is_some() {
            self.operator.take().unwrap().kill();
            self.begin();
        }
        let what = format!("killed {when:?} write {n}, {triggered_by:?}");
        let ended = self.ns.wait_for(&name, &ends, 60).await.status.unwrap();
        assert_eq!(ended.phase, Phase::Completed, "{what}: {ended:#?}");
        assert_eq!((ended.trials_created, ended.trials_closed), (3, 3), "{what}: {ended:#?}");
        (check(&self.ns, &self.kubelet, &name, &what).await, triggered_by)
    }
}

/// All writes with all times of death, shuffled so that any part is a sample.
fn deaths(num_writes: usize) -> Vec<(usize, KillTime)> {
    let mut all: Vec<_> = (1..=num_writes)
        .flat_map(|n| [KillTime::Before, KillTime::After, KillTime::Late].map(|when| (n, when)))
        .collect();
    all.sort_by_key(|&(n, when)| (n * 7 + when as usize * 5) * 2_654_435_761 % 65_521);
    all
}

fn reason(error: tokio::task::JoinError) -> String {
    match error.try_into_panic().map(|panic| panic.downcast::<String>()) {
        Ok(Ok(text)) => *text,
        other => format!("{other:?}"),
    }
}

#[test]
fn operator_death_at_any_write_changes_nothing() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let mut first = ProxiedOperator::new("writes-0").await;
        let before = first.proxy.num_writes();
        let (expected, _) = first.run(100_000, KillTime::Before).await;
        assert_eq!(expected.len(), TRIALS);
        // Pods are deleted after the end, so the next experiment's writes include those deletions.
        tokio::time::sleep(Duration::from_secs(6)).await;
        let num_writes = first.proxy.num_writes() - before;
        let mut to_do = deaths(num_writes);
        let num_all = to_do.len();
        if !tests_all_writes() {
            to_do.truncate(SAMPLE);
        }
        let to_do = Arc::new(Mutex::new(to_do));
        let mut tasks = tokio::task::JoinSet::new();
        for number in 0..NUM_CONCURRENT {
            let (to_do, expected) = (to_do.clone(), expected.clone());
            tasks.spawn(async move {
                let mut proxied_operator =
                    ProxiedOperator::new(&format!("writes-{}", number + 1)).await;
                let mut triggered_by = BTreeSet::new();
                let mut num_runs = 0;
                loop {
                    let Some((n, when)) = to_do.lock().unwrap().pop() else { break };
                    let (decisions, write) = proxied_operator.run(n, when).await;
                    assert_eq!(decisions, expected, "killed {when:?} write {n}, {write:?}");
                    let kind = |write: String| {
                        let parts = write.split('/').filter(|part| !part.contains('-'));
                        parts.collect::<Vec<_>>().join("/")
                    };
                    num_runs += usize::from(write.is_some());
                    triggered_by.extend(write.map(kind));
                }
                (num_runs, triggered_by)
            });
        }
        let (mut num_runs, mut kinds) = (0, BTreeSet::new());
        while let Some(done) = tasks.join_next().await {
            // Repeat the panic message here, where the test's output is read.
            let (runs, triggered_by) = done.unwrap_or_else(|error| panic!("{}", reason(error)));
            num_runs += runs;
            kinds.extend(triggered_by);
        }
        println!("{num_writes} writes; died {num_runs} times of {num_all}; at: {kinds:#?}");
        assert!(num_runs >= 10, "{num_runs}");
    });
}

#[test]
fn api_server_outage_changes_nothing() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let plane: &ControlPlane =
            Box::leak(Box::new(ControlPlane::start().unwrap_or_else(|error| panic!("{error}"))));
        plane.apply_crds(&crate::setup::crds()).unwrap();
        let mut ns = TestNamespace::on(plane, "away").await;
        // An API server that has just started denies everything until it has loaded RBAC rules.
        ns.checks_rules = false;
        let mut operator = ns.operator("a", free_ports());
        operator.wait_ready(&ns);
        let kubelet = Kubelet::start(&ns.client, "away", |_| Script::Train { unit_ms: 200 });
        ns.apply("grid", grid(TRIALS as u32, 30, PODS as u32));
        ns.wait_for("grid", &[Phase::Running], 20).await;
        wait_for_units(&kubelet, 10).await;
        plane.stop_api();
        let before = kubelet.units();
        tokio::time::sleep(OUTAGE).await;
        assert!(kubelet.units() >= before + 30, "trainers did not continue");
        assert!(operator.is_alive());
        plane.start_api().unwrap();
        ns.wait_for("grid", &[Phase::Completed], 90).await;
        check(&ns, &kubelet, "grid", "API server unavailable").await;
    });
}

#[test]
fn training_continues_without_the_report_server() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("doorless").await;
        let port = free_ports();
        let mut operator = ns.operator("a", port);
        operator.wait_ready(&ns);
        let kubelet = Kubelet::start(&ns.client, "doorless", |_| Script::Train { unit_ms: 100 });
        ns.apply("grid", grid(TRIALS as u32, 40, PODS as u32));
        // A trainer without a first directive does not train, so wait for the first checkpoints.
        let trains = |trial: &Trial| {
            trial.status.as_ref().is_some_and(|status| !status.checkpoints.is_empty())
        };
        while ns.trials_of("grid").await.iter().filter(|trial| trains(trial)).count() < TRIALS {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        operator.kill();
        wait_for_units(&kubelet, 40 * TRIALS as u64).await;
        let trials = ns.trials_of("grid").await;
        let is_open = |trial: &Trial| trial.status.as_ref().unwrap().facts.is_empty();
        assert!(trials.iter().any(is_open), "all results were recorded without a report server");
        let _operator = ns.operator("a", port);
        ns.wait_for("grid", &[Phase::Completed], 30).await;
        check(&ns, &kubelet, "grid", "report server unavailable").await;
        for trial in ns.trials_of("grid").await {
            // Units trained during the outage are recorded, one by one.
            assert_eq!(trial.status.unwrap().checkpoints.last().unwrap().batches, 40);
        }
    });
}

pub(crate) async fn wait_for_units(kubelet: &Kubelet, units: u64) {
    let end = Instant::now() + Duration::from_secs(30);
    while kubelet.units() < units {
        assert!(Instant::now() < end, "{} of {units} units", kubelet.units());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

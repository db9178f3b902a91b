//! The operator dies at each of its writes, or loses what it depends on for a while. The search
//! ends as without a fault, and no pod is started twice.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use serde_json::{Value, json};
use stoker_api::experiment::Phase;
use stoker_api::trial::{Fact, Trial};
use stoker_test_cluster::PATIENCE;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::Command;
use tokio::time::timeout;

use crate::flow::grid;
use crate::kubelet::{Kubelet, Script};
use crate::operator_process::Operator;
use crate::proxy::{KillTime, LATE, Proxy, kind_of};
use crate::setup::{TestNamespace, client_of, decisions_of, operator_port, own_plane, runtime};
use crate::standby::poll_until;

/// Whether to test all writes instead of a sample.
fn tests_all_writes() -> bool {
    std::env::var("STOKER_TEST_WRITES").is_ok_and(|value| value == "all")
}

/// Number of deaths in a sample. It is larger if kinds and times have more combinations.
const SAMPLE: usize = 36;
/// Longest time from the end of an experiment until the operator has cleaned up.
const CLEAN_UP_MAX: Duration = Duration::from_secs(20);
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
        for grant in trial.spec.grants.iter().filter(|grant| grant.fact.is_some()) {
            assert!(orders.insert(grant.order), "{what}: order {} twice", grant.order);
        }
        assert!(has_placed_results(trial), "{what}: {:#?}", trial.spec);
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

/// Returns whether each result of a trial has exactly one place in the order of the search.
pub(crate) fn has_placed_results(trial: &Trial) -> bool {
    let facts = trial.status.iter().flat_map(|status| &status.facts);
    facts.enumerate().filter(|(_, fact)| matches!(fact, Fact::Result(_))).all(|(index, _)| {
        let is_place = |fact: u32| fact as usize == index;
        trial.spec.grants.iter().filter(|grant| grant.fact.is_some_and(is_place)).count() == 1
    })
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
        let mut proxied_operator =
            Self { ns, proxy, kubelet, operator: None, port: operator_port() };
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

    /// Runs experiment `number`, whose operator may die at a write. Returns the decisions and the
    /// name of that write; `None` if the experiment did not have it.
    async fn run(&mut self, number: usize, death: Option<&Death>) -> (Vec<Value>, Option<String>) {
        let name = format!("death-{number:03}");
        let pid = self.operator.as_ref().unwrap().pid();
        let mut is_dead = match death {
            None => self.proxy.arm(usize::MAX, KillTime::Before, pid),
            Some(Death { write: Write::Nth(n), when }) => self.proxy.arm(*n, *when, pid),
            Some(Death { write: Write::OfKind(kind, n), when }) => {
                self.proxy.arm_for((kind, &name), *n, *when, pid)
            }
        };
        self.ns.apply(&name, grid(TRIALS as u32, 2, PODS as u32));
        let ends = [Phase::Completed, Phase::Failed, Phase::Cancelled];
        let mut triggered_by = tokio::select! {
            triggered_by = &mut is_dead => Some(triggered_by.unwrap()),
            _ = self.ns.wait_for(&name, &ends) => None,
        };
        let is_of_kind = matches!(death, Some(Death { write: Write::OfKind(..), .. }));
        if triggered_by.is_none() && is_of_kind {
            // The operator deletes pods and checkpoints after the end.
            triggered_by = timeout(CLEAN_UP_MAX, &mut is_dead).await.ok().map(Result::unwrap);
        }
        // A write after the end may trigger the kill while the test observes the end.
        if triggered_by.is_none() && !self.proxy.disarm() {
            triggered_by = is_dead.await.ok();
        }
        if triggered_by.is_some() {
            self.operator.take().unwrap().kill();
            self.begin();
        }
        let what = format!("{death:?}, {triggered_by:?}");
        let ended = self.ns.wait_for(&name, &ends).await.status.unwrap();
        assert_eq!(ended.phase, Phase::Completed, "{what}: {ended:#?}");
        assert_eq!((ended.trials_created, ended.trials_closed), (3, 3), "{what}: {ended:#?}");
        (check(&self.ns, &self.kubelet, &name, &what).await, triggered_by)
    }

    /// Returns an error until the operator has cleaned up after an experiment.
    async fn check_clean_up(&self, name: &str) -> Result<(), String> {
        let cleaned_up = self.ns.experiment(name).await.status.unwrap().cleaned_up;
        let pods: Api<Pod> = Api::namespaced(self.ns.client.clone(), &self.ns.namespace);
        let mut left = pods.list(&Default::default()).await.unwrap().items;
        left.retain(|pod| pod.metadata.deletion_timestamp.is_none());
        match cleaned_up && left.is_empty() {
            true => Ok(()),
            false => Err(format!("cleanedUp: {cleaned_up}, {} pods", left.len())),
        }
    }
}

/// Write at which an operator dies. Numbers start at 1.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Write {
    /// The n-th write after the creation of the experiment, for any object.
    Nth(usize),
    /// The n-th write of this kind for the experiment.
    OfKind(String, usize),
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Death {
    write: Write,
    when: KillTime,
}

/// Each kind of write with each time of death. `writes` has the kinds of an undisturbed run.
fn deaths_by_kind(writes: &[String]) -> Vec<Death> {
    let kinds: BTreeSet<&String> = writes.iter().collect();
    let deaths = |kind: &String| {
        let count = writes.iter().filter(|write| *write == kind).count();
        // Another run may have fewer writes of the kind, since one may cover several changes.
        // Therefore use the first half.
        let n = |time: usize| 1 + time * (count / 2) / KillTime::ALL.len();
        let death =
            |time| Death { write: Write::OfKind(kind.clone(), n(time)), when: KillTime::ALL[time] };
        (0..KillTime::ALL.len()).map(death).collect::<Vec<_>>()
    };
    kinds.into_iter().flat_map(deaths).collect()
}

/// `num` deaths, spread evenly over the writes of a run.
fn spread_deaths(num_writes: usize, num: usize) -> Vec<Death> {
    let death = |index| Death {
        write: Write::Nth(1 + index * num_writes / num),
        when: KillTime::ALL[index % KillTime::ALL.len()],
    };
    (0..num).map(death).collect()
}

/// All writes of a run with all times of death.
fn all_deaths(num_writes: usize) -> Vec<Death> {
    let deaths = |n| KillTime::ALL.map(|when| Death { write: Write::Nth(n), when });
    (1..=num_writes).flat_map(deaths).collect()
}

/// Prints and checks how often an operator died at each kind of write and each time.
fn check_coverage(writes: &[String], num_deaths: &BTreeMap<(String, KillTime), usize>) {
    let total: usize = num_deaths.values().sum();
    println!("{} writes in an undisturbed run; {total} deaths:", writes.len());
    let mut missing = Vec::new();
    let of_run: BTreeSet<&String> = writes.iter().collect();
    let all: BTreeSet<&String> = num_deaths.keys().map(|(kind, _)| kind).chain(of_run).collect();
    for kind in all {
        let num = |when| num_deaths.get(&(kind.clone(), when)).copied().unwrap_or(0);
        let nums = KillTime::ALL.map(|when| (when, num(when)));
        println!("{kind:28} {nums:?}");
        let lacks = nums.into_iter().filter(|(_, num)| *num == 0 && writes.contains(kind));
        missing.extend(lacks.map(|(when, _)| (kind.clone(), when)));
    }
    assert_eq!(missing, [], "no operator died at these writes and times");
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
        let num_before = first.proxy.writes().len();
        let (expected, _) = first.run(0, None).await;
        assert_eq!(expected.len(), TRIALS);
        // The operator deletes pods and checkpoints after the end.
        poll_until("the clean-up", async || first.check_clean_up("death-000").await).await;
        let writes = first.proxy.writes().split_off(num_before);
        let mut deaths = deaths_by_kind(&writes);
        deaths.extend(match tests_all_writes() {
            true => all_deaths(writes.len()),
            false => spread_deaths(writes.len(), SAMPLE.saturating_sub(deaths.len())),
        });
        let deaths = Arc::new(Mutex::new(deaths.into_iter().enumerate()));
        let mut tasks = tokio::task::JoinSet::new();
        for number in 1..=NUM_CONCURRENT {
            let (deaths, expected) = (deaths.clone(), expected.clone());
            tasks.spawn(async move {
                let mut proxied_operator = ProxiedOperator::new(&format!("writes-{number}")).await;
                let mut died = Vec::new();
                loop {
                    let Some((number, death)) = deaths.lock().unwrap().next() else { break };
                    let (decisions, write) = proxied_operator.run(number, Some(&death)).await;
                    assert_eq!(decisions, expected, "{death:?}, {write:?}");
                    died.extend(write.map(|write| (kind_of(&write), death.when)));
                }
                died
            });
        }
        let mut num_deaths = BTreeMap::new();
        while let Some(done) = tasks.join_next().await {
            // Repeat the panic message here, where the test's output is read.
            for died in done.unwrap_or_else(|error| panic!("{}", reason(error))) {
                *num_deaths.entry(died).or_default() += 1;
            }
        }
        check_coverage(&writes, &num_deaths);
    });
}

#[test]
fn proxy_kills_senders_that_stopped_waiting() {
    let test = async {
        let api_server = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = api_server.local_addr().unwrap().port();
        let config = kube::Config::new(format!("http://127.0.0.1:{port}").parse().unwrap());
        let folder = tempfile::tempdir().unwrap();
        let proxy = Proxy::start(kube::Client::try_from(config).unwrap(), folder.path()).await;
        let mut sender = Command::new("sleep").arg("1000").kill_on_drop(true).spawn().unwrap();
        let is_dead = proxy.arm(1, KillTime::After, sender.id().unwrap());
        let kubeconfig = std::fs::read_to_string(&proxy.kubeconfig).unwrap();
        let address = kubeconfig.split("http://").nth(1).unwrap().split('\'').next().unwrap();
        let mut connection = TcpStream::connect(address).await.unwrap();
        let path = "/api/v1/namespaces/a/pods/b";
        let write = format!("DELETE {path} HTTP/1.1\r\nHost: {address}\r\n\r\n");
        connection.write_all(write.as_bytes()).await.unwrap();
        let (mut forwarded, _) = api_server.accept().await.unwrap();
        forwarded.read_u8().await.unwrap();
        // The proxy closes its side too, once it has cancelled the handler of this connection.
        connection.shutdown().await.unwrap();
        assert_eq!(connection.read(&mut [0]).await.unwrap(), 0);
        let response = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
        forwarded.write_all(response).await.unwrap();
        assert_eq!(is_dead.await.unwrap(), format!("DELETE {path}"));
        assert!(!sender.wait().await.unwrap().success());
    };
    runtime().block_on(async { timeout(PATIENCE, test).await.unwrap() });
}

#[test]
fn api_server_outage_changes_nothing() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let plane = own_plane(Default::default(), |_| {});
        let mut ns = TestNamespace::on(plane, "away").await;
        // An API server that has just started denies everything until it has loaded RBAC rules.
        ns.checks_rules = false;
        let mut operator = ns.operator("a", operator_port());
        operator.wait_ready(&ns);
        let kubelet = Kubelet::start(&ns.client, "away", |_| Script::Train { unit_ms: 200 });
        // The trials train for 20 s, so that a late stop of the server leaves enough to train.
        ns.apply("grid", grid(TRIALS as u32, 100, PODS as u32));
        ns.wait_for("grid", &[Phase::Running]).await;
        wait_for_units(&kubelet, 10).await;
        plane.stop_api();
        let before = kubelet.units();
        tokio::time::sleep(OUTAGE).await;
        assert!(kubelet.units() >= before + 30, "trainers did not continue");
        assert!(operator.is_alive());
        plane.start_api().unwrap();
        ns.wait_for("grid", &[Phase::Completed]).await;
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
        let port = operator_port();
        let mut operator = ns.operator("a", port);
        operator.wait_ready(&ns);
        let kubelet = Kubelet::start(&ns.client, "doorless", |_| Script::Train { unit_ms: 100 });
        ns.apply("grid", grid(TRIALS as u32, 40, PODS as u32));
        // A trainer without a first directive does not train, so wait for the first checkpoints.
        let trains = |trial: &Trial| {
            trial.status.as_ref().is_some_and(|status| !status.checkpoints.is_empty())
        };
        poll_until("the first checkpoints", async || {
            let trials = ns.trials_of("grid").await;
            match trials.iter().filter(|trial| trains(trial)).count() {
                TRIALS => Ok(()),
                num => Err(format!("{num} trials have one")),
            }
        })
        .await;
        operator.kill();
        wait_for_units(&kubelet, 40 * TRIALS as u64).await;
        let trials = ns.trials_of("grid").await;
        let is_open = |trial: &Trial| trial.status.as_ref().unwrap().facts.is_empty();
        assert!(trials.iter().any(is_open), "all results were recorded without a report server");
        let _operator = ns.operator("a", port);
        ns.wait_for("grid", &[Phase::Completed]).await;
        check(&ns, &kubelet, "grid", "report server unavailable").await;
        for trial in ns.trials_of("grid").await {
            // Units trained during the outage are recorded, one by one.
            assert_eq!(trial.status.unwrap().checkpoints.last().unwrap().batches, 40);
        }
    });
}

pub(crate) async fn wait_for_units(kubelet: &Kubelet, units: u64) {
    let end = Instant::now() + PATIENCE;
    while kubelet.units() < units {
        assert!(Instant::now() < end, "{} of {units} units", kubelet.units());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

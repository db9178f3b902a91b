//! The operator killed at each of its writes, and its surroundings taken away for a while: the
//! search ends as if nothing had been, and no pod is started twice.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use stoker_api::experiment::Phase;
use stoker_api::trial::Trial;
use stoker_test_cluster::ControlPlane;

use crate::flow::grid;
use crate::kubelet::{Kubelet, Script};
use crate::proxy::{LATE, Proxy, When};
use crate::setup::{Operator, Place, client_of, decided, free_ports, runtime};

/// Whether to go through everything, however long it takes.
fn all_wanted() -> bool {
    std::env::var("STOKER_TEST_WRITES").is_ok_and(|it| it == "all")
}

/// The time that a sample may take: on most machines it is enough for all.
const SAMPLE: Duration = Duration::from_secs(600);
/// How long the API server is away.
const AWAY: Duration = Duration::from_secs(60);
/// Experiments that are run at the same time.
const LANES: usize = 3;
const PODS: usize = 2;
const TRIALS: usize = 3;

/// Checks what must hold of an experiment however often its operator died: what was decided.
pub(crate) async fn check(place: &Place, kubelet: &Kubelet, name: &str, what: &str) -> Vec<Value> {
    let trials = place.trials_of(name).await;
    let mut orders = BTreeSet::new();
    for trial in &trials {
        let status = trial.status.clone().unwrap();
        let attempts: Vec<_> = status.attempts.iter().map(|it| (it.number, it.end)).collect();
        assert_eq!(attempts.len(), 1, "{what}: {attempts:?}\n{}", place.logs());
        for grant in &trial.spec.grants {
            assert!(orders.insert(grant.order), "{what}: order {} twice", grant.order);
        }
        assert_eq!(trial.spec.grants.len(), status.facts.len(), "{what}: {:#?}", trial.spec);
    }
    let prefix = format!("{name}-");
    let mut started = kubelet.started();
    started.retain(|it| it.starts_with(&prefix));
    started.sort();
    let pods = 0..PODS;
    let expected: Vec<String> = (0..trials.len())
        .flat_map(|trial| pods.clone().map(move |pod| (trial, pod)))
        .map(|(trial, pod)| format!("{name}-{trial}-a0-r{pod}"))
        .collect();
    assert_eq!(started, expected, "{what}\n{}", place.logs());
    without_names(&trials)
}

fn without_names(trials: &[Trial]) -> Vec<Value> {
    let mut all = decided(trials);
    all.iter_mut().for_each(|it| it["name"] = json!(null));
    all
}

/// A namespace with an operator behind a proxy.
struct Lane {
    place: Place,
    proxy: Proxy,
    kubelet: Kubelet,
    operator: Option<Operator>,
    port: u16,
}

impl Lane {
    async fn new(namespace: &str) -> Self {
        let place = Place::new(namespace).await;
        let proxy = Proxy::start(client_of(&place.kubeconfig).await, place.folder.path()).await;
        let kubelet = Kubelet::start(&place.client, namespace, |_| Script::Train { unit_ms: 10 });
        let mut lane = Self { place, proxy, kubelet, operator: None, port: free_ports() };
        lane.begin();
        lane.operator.as_mut().unwrap().wait_ready(&lane.place);
        lane
    }

    fn begin(&mut self) {
        // A write that comes late collides only with what is there.
        let stay = (2 * LATE.as_secs() + 1).to_string();
        let more = ["--finished-pods-seconds", &stay, "--starting-gangs-max", "3"];
        let kubeconfig = &self.proxy.kubeconfig;
        self.operator = Some(self.place.operator_by("a", self.port, kubeconfig, &more));
    }

    /// Runs an experiment whose operator dies at its n-th write, if it has so many: what was
    /// decided, and which write it was.
    async fn run(&mut self, n: usize, when: When) -> (Vec<Value>, Option<String>) {
        let name = format!("{when:?}-{n}").to_lowercase();
        let pid = self.operator.as_ref().unwrap().pid();
        let mut told = self.proxy.arm(n, when, pid);
        self.place.apply(&name, grid(TRIALS as u32, 2, PODS as u32));
        let ends = [Phase::Completed, Phase::Failed, Phase::Cancelled];
        let sprung = tokio::select! {
            sprung = &mut told => Some(sprung.unwrap()),
            _ = self.place.wait_for(&name, &ends, 60) => None,
        };
        // A write that follows the end may spring the trap while the end is seen.
        let is_late = !self.proxy.disarm() && sprung.is_none();
        let sprung = if is_late { told.await.ok() } else { sprung };
        if sprung.is_some() {
            self.operator.take().unwrap().kill();
            self.begin();
        }
        let what = format!("killed {when:?} write {n}, {sprung:?}");
        let ended = self.place.wait_for(&name, &ends, 60).await.status.unwrap();
        assert_eq!(ended.phase, Phase::Completed, "{what}: {ended:#?}");
        assert_eq!((ended.trials_created, ended.trials_closed), (3, 3), "{what}: {ended:#?}");
        (check(&self.place, &self.kubelet, &name, &what).await, sprung)
    }
}

/// Each write with each time to die at it, mixed, so that the first of them are a sample.
fn deaths(num_writes: usize) -> Vec<(usize, When)> {
    let mut all: Vec<_> = (1..=num_writes)
        .flat_map(|n| [When::Before, When::After, When::Late].map(|when| (n, when)))
        .collect();
    all.sort_by_key(|it| (it.0 * 7 + it.1 as usize * 5) * 2_654_435_761 % 65_521);
    all
}

fn reason(error: tokio::task::JoinError) -> String {
    match error.try_into_panic().map(|it| it.downcast::<String>()) {
        Ok(Ok(text)) => *text,
        other => format!("{other:?}"),
    }
}

#[test]
fn a_death_at_any_write_changes_no_decision_and_restarts_no_pod() {
    if !stoker_test_cluster::wanted() {
        return;
    }
    runtime().block_on(async {
        let mut first = Lane::new("writes-0").await;
        let before = first.proxy.num_writes();
        let (expected, _) = first.run(100_000, When::Before).await;
        assert_eq!(expected.len(), TRIALS);
        // Pods are cleaned up after the end; the next experiment's writes have those between them.
        tokio::time::sleep(Duration::from_secs(6)).await;
        let num_writes = first.proxy.num_writes() - before;
        let to_do = Arc::new(Mutex::new(deaths(num_writes)));
        let (num_all, begin) = (to_do.lock().unwrap().len(), Instant::now());
        let mut lanes = tokio::task::JoinSet::new();
        for number in 0..LANES {
            let (to_do, expected) = (to_do.clone(), expected.clone());
            lanes.spawn(async move {
                let mut lane = Lane::new(&format!("writes-{}", number + 1)).await;
                let mut sprung = BTreeSet::new();
                let mut num_runs = 0;
                while all_wanted() || begin.elapsed() < SAMPLE {
                    let Some((n, when)) = to_do.lock().unwrap().pop() else { break };
                    let (found, write) = lane.run(n, when).await;
                    assert_eq!(found, expected, "killed {when:?} write {n}, {write:?}");
                    let kind = |it: String| {
                        let it = it.split('/').filter(|it| !it.contains('-'));
                        it.collect::<Vec<_>>().join("/")
                    };
                    num_runs += usize::from(write.is_some());
                    sprung.extend(write.map(kind));
                }
                (num_runs, sprung)
            });
        }
        let (mut num_runs, mut kinds) = (0, BTreeSet::new());
        while let Some(done) = lanes.join_next().await {
            // A lane's reason is told here, where a test's reasons are looked for.
            let (runs, sprung) = done.unwrap_or_else(|it| panic!("{}", reason(it)));
            num_runs += runs;
            kinds.extend(sprung);
        }
        println!("{num_writes} writes; died {num_runs} times of {num_all}; at: {kinds:#?}");
        assert!(num_runs >= 10, "{num_runs}");
    });
}

#[test]
fn an_api_server_that_is_away_for_a_while_costs_nothing() {
    if !stoker_test_cluster::wanted() {
        return;
    }
    runtime().block_on(async {
        let plane: &ControlPlane =
            Box::leak(Box::new(ControlPlane::start().unwrap_or_else(|it| panic!("{it}"))));
        plane.apply_crds(&crate::setup::crds()).unwrap();
        let mut place = Place::on(plane, "away").await;
        // An API server that has just begun knows no rules, and forbids everything for a moment.
        place.checks_rules = false;
        let mut operator = place.operator("a", free_ports());
        operator.wait_ready(&place);
        let kubelet = Kubelet::start(&place.client, "away", |_| Script::Train { unit_ms: 200 });
        place.apply("grid", grid(TRIALS as u32, 30, PODS as u32));
        place.wait_for("grid", &[Phase::Running], 20).await;
        wait_for_units(&kubelet, 10).await;
        plane.stop_api();
        let before = kubelet.units();
        tokio::time::sleep(AWAY).await;
        assert!(kubelet.units() >= before + 30, "trainers trained on");
        assert!(operator.is_alive());
        plane.start_api().unwrap();
        place.wait_for("grid", &[Phase::Completed], 90).await;
        check(&place, &kubelet, "grid", "API server away").await;
    });
}

#[test]
fn trainers_train_on_while_the_door_is_away_and_tell_it_later() {
    if !stoker_test_cluster::wanted() {
        return;
    }
    runtime().block_on(async {
        let place = Place::new("doorless").await;
        let port = free_ports();
        let mut operator = place.operator("a", port);
        operator.wait_ready(&place);
        let kubelet = Kubelet::start(&place.client, "doorless", |_| Script::Train { unit_ms: 100 });
        place.apply("grid", grid(TRIALS as u32, 40, PODS as u32));
        // What was never told how to begin does not train.
        let trains = |it: &Trial| it.status.as_ref().is_some_and(|it| !it.checkpoints.is_empty());
        while place.trials_of("grid").await.iter().filter(|it| trains(it)).count() < TRIALS {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        operator.kill();
        wait_for_units(&kubelet, 40 * TRIALS as u64).await;
        let trials = place.trials_of("grid").await;
        let is_open = |it: &Trial| it.status.as_ref().unwrap().facts.is_empty();
        assert!(trials.iter().any(is_open), "the door was away");
        let _operator = place.operator("a", port);
        place.wait_for("grid", &[Phase::Completed], 30).await;
        check(&place, &kubelet, "grid", "door away").await;
        for trial in place.trials_of("grid").await {
            // What was trained meanwhile is recorded, unit by unit.
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

//! Faults at random times. Each is undone after a random time.

use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process};
use serde_json::Value;
use stoker_api::time::Timestamp;
use stoker_test_cluster::Cluster;

use super::{Log, now};
use crate::interrupted::SeededRng;
use crate::two_nodes::{NAMESPACE, OPERATOR_PODS, helm_install};

/// Kinds of faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FaultKind {
    /// A trial's pod is deleted, gracefully or by force.
    PodDeleted,
    /// A node loses power.
    NodeStopped,
    /// A node loses its network; its processes continue.
    NodeCutOff,
    /// The API server is killed and started again later.
    ApiUnavailable,
    /// The S3 server is killed and started again later.
    StoreUnavailable,
    /// One replica of the operator or all are killed, or their pods deleted.
    OperatorKilled,
    /// Connections to the report server are rejected.
    ReportsRefused,
    /// The chart is upgraded with other values, and back.
    ValuesChanged,
}

impl FaultKind {
    pub(super) const ALL: [Self; 8] = [
        Self::PodDeleted,
        Self::NodeStopped,
        Self::NodeCutOff,
        Self::ApiUnavailable,
        Self::StoreUnavailable,
        Self::OperatorKilled,
        Self::ReportsRefused,
        Self::ValuesChanged,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::PodDeleted => "pod deleted",
            Self::NodeStopped => "node stopped",
            Self::NodeCutOff => "node cut off",
            Self::ApiUnavailable => "API server unavailable",
            Self::StoreUnavailable => "S3 server unavailable",
            Self::OperatorKilled => "operator killed",
            Self::ReportsRefused => "reports refused",
            Self::ValuesChanged => "chart values changed",
        }
    }
}

/// A fault that was injected.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fault {
    pub(super) kind: FaultKind,
    pub(super) from: Timestamp,
    /// When the fault had been undone.
    pub(super) to: Timestamp,
}

/// Values of the chart that may change at any time.
const VALUES: [&str; 9] = [
    "log.level=debug",
    "limits.startDeadlineSeconds=120",
    "limits.finishedPodsSeconds=120",
    "limits.startingGangsMax=2",
    "limits.nodeLostSeconds=25",
    "replicas=1",
    "replicas=3",
    "podAnnotations.soak=changed",
    // Experiments keep the storage with which they started.
    "storage.url=s3://runs/elsewhere",
];

/// Port of the report server in the operator's pods.
const REPORT_PORT: u16 = 8443;
const PROGRAM: &str = "stoker-operator";

/// Least and most seconds between faults.
const PAUSE_SECONDS: [u64; 2] = [5, 25];
/// Least and most seconds of an outage.
const OUTAGE_SECONDS: [u64; 2] = [3, 45];

struct Injector<'a, F> {
    cluster: &'a Cluster,
    rng: SeededRng,
    log: &'a Log,
    keeps_going: F,
    faults: Vec<Fault>,
}

/// Injects faults, all kinds equally often, until `keeps_going` is false. Then undoes the last one.
pub(super) fn inject(
    cluster: &Cluster,
    seed: u64,
    keeps_going: impl Fn() -> bool,
    log: &Log,
) -> Result<Vec<Fault>, String> {
    // Xorshift never leaves 0, and its first numbers are similar for similar seeds.
    let mut rng = SeededRng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    for _ in 0..8 {
        rng.below(2);
    }
    let mut injector = Injector { cluster, rng, log, keeps_going, faults: vec![] };
    loop {
        for kind in injector.shuffled() {
            injector.pause();
            if !(injector.keeps_going)() {
                return Ok(injector.faults);
            }
            injector.fault(kind).map_err(|error| format!("{}: {error}", kind.name()))?;
            cluster.check().map_err(|error| error.to_string())?;
        }
    }
}

type FaultResult = Result<(), Box<dyn std::error::Error>>;

impl<F: Fn() -> bool> Injector<'_, F> {
    fn shuffled(&mut self) -> Vec<FaultKind> {
        let mut kinds = FaultKind::ALL.to_vec();
        for end in (1..kinds.len()).rev() {
            kinds.swap(end, self.rng.below(end as u64 + 1) as usize);
        }
        kinds
    }

    fn between(&mut self, [least, most]: [u64; 2]) -> Duration {
        Duration::from_millis(least * 1000 + self.rng.below((most - least) * 1000))
    }

    fn pause(&mut self) {
        let until = Instant::now() + self.between(PAUSE_SECONDS);
        self.sleep(until);
    }

    fn sleep(&self, until: Instant) {
        while Instant::now() < until && (self.keeps_going)() {
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    fn fault(&mut self, kind: FaultKind) -> FaultResult {
        let cluster = self.cluster;
        match kind {
            FaultKind::PodDeleted => self.delete_pod(),
            FaultKind::OperatorKilled => self.kill_operator(),
            FaultKind::NodeStopped => {
                let node = self.node();
                let stop = || cluster.kill_node(node);
                self.outage(kind, &format!("node-{node}"), stop, || cluster.restart_node(node))
            }
            FaultKind::NodeCutOff => {
                let node = self.node();
                let cut = || cluster.disconnect_node(node);
                self.outage(kind, &format!("node-{node}"), cut, || cluster.reconnect_node(node))
            }
            FaultKind::ApiUnavailable => {
                let stop = || {
                    cluster.stop_api();
                    Ok(())
                };
                self.outage(kind, "", stop, || cluster.start_api())
            }
            FaultKind::StoreUnavailable => {
                let stop = || {
                    cluster.stop_s3();
                    Ok(())
                };
                self.outage(kind, "", stop, || cluster.start_s3())
            }
            FaultKind::ReportsRefused => {
                let reject = || cluster.reject_port(REPORT_PORT);
                self.outage(kind, "", reject, || cluster.accept_port(REPORT_PORT))
            }
            FaultKind::ValuesChanged => {
                let value = VALUES[self.rng.below(VALUES.len() as u64) as usize];
                let upgrade = |values: &[&str]| {
                    let wait = ["--timeout", "300s"];
                    helm_install(cluster, "upgrade", &[&wait, values].concat()).map(drop)
                };
                self.outage(kind, value, || upgrade(&["--set", value]), || upgrade(&[]))
            }
        }
    }

    fn node(&mut self) -> usize {
        1 + self.rng.below(2) as usize
    }

    /// Begins an outage and ends it. In half of the outages, a pod or an operator dies too, if
    /// possible.
    fn outage(
        &mut self,
        kind: FaultKind,
        what: &str,
        begin: impl FnOnce() -> Result<(), stoker_test_cluster::Error>,
        end: impl FnOnce() -> Result<(), stoker_test_cluster::Error>,
    ) -> FaultResult {
        let (from, begun) = (now(), Instant::now());
        let length = self.between(OUTAGE_SECONDS);
        let name = kind.name();
        self.log.print(&format!("{name} {what} for {:.0} s", length.as_secs_f64()));
        begin()?;
        let also = self.rng.below(4);
        if kind != FaultKind::ApiUnavailable && also < 2 {
            self.sleep(begun + length / 2);
            if also == 0 { self.delete_pod() } else { self.kill_operator() }?;
        }
        self.sleep(begun + length);
        end()?;
        self.log
            .print(&format!("{name} {what}: undone after {:.0} s", begun.elapsed().as_secs_f64()));
        self.faults.push(Fault { kind, from, to: now() });
        Ok(())
    }

    /// Deletes a running pod of a trial, if any.
    fn delete_pod(&mut self) -> FaultResult {
        let pods = self.pods(&["-n", NAMESPACE, "-l", "stoker.dev/component=trial"])?;
        let Some(pod) = self.pick(&pods) else { return Ok(()) };
        let force = ["--force", "--grace-period=0"];
        let is_forced = self.rng.below(2) == 0;
        let more = if is_forced { &force[..] } else { &[] };
        self.log.print(&format!("pod {pod} deleted{}", if is_forced { " by force" } else { "" }));
        self.inject_momentary(FaultKind::PodDeleted, |this| {
            let delete = ["delete", "pod", "-n", NAMESPACE, "--wait=false", "--ignore-not-found"];
            this.cluster.kubectl(&[&delete[..], &[&pod], more].concat())?;
            Ok(())
        })
    }

    fn kill_operator(&mut self) -> FaultResult {
        let is_one = self.rng.below(2) == 0;
        let by_signal = self.rng.below(2) == 0;
        let which = if is_one { "one operator" } else { "all operators" };
        let how = if by_signal { "killed" } else { "deleted by force" };
        self.log.print(&format!("{which} {how}"));
        self.inject_momentary(FaultKind::OperatorKilled, |this| {
            if by_signal {
                let mut processes = this.cluster.processes(PROGRAM);
                if is_one && !processes.is_empty() {
                    let one = this.rng.below(processes.len() as u64) as usize;
                    processes = vec![processes[one]];
                }
                // Ignore the error: a process may have ended since it was listed.
                for pid in processes {
                    let _ = kill_process(pid, Signal::KILL);
                }
                return Ok(());
            }
            let select = ["-n", "stoker-system", "-l", OPERATOR_PODS];
            let mut pods = this.pods(&select)?;
            if is_one && let Some(pod) = this.pick(&pods) {
                pods = vec![pod];
            }
            let pods: Vec<&str> = pods.iter().map(String::as_str).collect();
            let delete = ["delete", "pod", "-n", "stoker-system", "--wait=false"];
            let now = ["--force", "--grace-period=0", "--ignore-not-found"];
            if !pods.is_empty() {
                this.cluster.kubectl(&[&delete[..], &now, &pods].concat())?;
            }
            Ok(())
        })
    }

    /// Injects a fault that needs no undoing, and records its time.
    fn inject_momentary(
        &mut self,
        kind: FaultKind,
        act: impl FnOnce(&mut Self) -> FaultResult,
    ) -> FaultResult {
        let from = now();
        act(self)?;
        self.faults.push(Fault { kind, from, to: now() });
        Ok(())
    }

    /// Returns the names of running pods.
    fn pods(&self, select: &[&str]) -> Result<Vec<String>, stoker_test_cluster::Error> {
        let pods = self.cluster.get(&[&["pods"], select].concat())?;
        let pods = pods["items"].as_array().cloned().unwrap_or_default();
        let running = pods.iter().filter(|pod| pod["status"]["phase"] == "Running");
        let name = |pod: &Value| pod["metadata"]["name"].as_str().map(str::to_owned);
        Ok(running.filter_map(name).collect())
    }

    fn pick(&mut self, names: &[String]) -> Option<String> {
        let at = self.rng.below(names.len().max(1) as u64) as usize;
        names.get(at).cloned()
    }
}

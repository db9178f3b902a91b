//! A scripted kubelet without containers. It sets the status of each pod by its script; the scripts
//! of programs talk to the report server like a trainer.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::StreamExt as _;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, ResourceExt as _};
use serde_json::{Value, json};
use stoker_api::names::{COMPONENT_CLEANUP, LABEL_COMPONENT};
use tokio::sync::watch;

use crate::trainer::train;
use crate::worker::{Outputs, Work, work};

/// Behavior of a pod.
#[derive(Clone, Debug)]
pub(crate) enum Script {
    /// Trains for `unit_ms` milliseconds per unit, with a metric that depends on the
    /// hyperparameters.
    Train { unit_ms: u64 },
    /// Trains as above once the gate is `true`. Until then, its container runs.
    TrainAfter { gate: watch::Receiver<bool>, unit_ms: u64 },
    /// Sets this status and does nothing else.
    Status(Value),
    /// Runs until the pod is deleted, then exits with code 137.
    Hang,
    /// Runs for `after_ms` milliseconds and exits with `code`.
    Exit { after_ms: u64, code: i32 },
    /// Runs a process of a job.
    Work(Work),
    /// Binds to this node and runs there, without further status updates.
    OnNode(String),
}

/// Pods of the namespace by name, as last observed.
pub(crate) type Pods = watch::Receiver<BTreeMap<String, Pod>>;

type Scripts = dyn Fn(&Pod) -> Script + Send + Sync;

/// Runs the pods of a namespace until dropped.
pub(crate) struct Kubelet {
    task: tokio::task::JoinHandle<()>,
    record: Arc<KubeletRecord>,
}

/// Record of what a kubelet did.
#[derive(Default)]
struct KubeletRecord {
    /// Names of started pods, in order.
    started: Mutex<Vec<String>>,
    /// Pods as first observed, by name.
    pods: Mutex<HashMap<String, Pod>>,
    /// Units trained in all pods together.
    units: AtomicU64,
    outputs: Outputs,
}

impl Drop for Kubelet {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Kubelet {
    pub(crate) fn start(
        client: &Client,
        namespace: &str,
        script: impl Fn(&Pod) -> Script + Send + Sync + 'static,
    ) -> Self {
        Self::with_capacity(client, namespace, usize::MAX, script)
    }

    /// Same as [`start`](Self::start), for at most `capacity` concurrent pods. Other pods are
    /// unschedulable.
    pub(crate) fn with_capacity(
        client: &Client,
        namespace: &str,
        capacity: usize,
        script: impl Fn(&Pod) -> Script + Send + Sync + 'static,
    ) -> Self {
        let record = Arc::<KubeletRecord>::default();
        let (client, namespace) = (client.clone(), namespace.to_owned());
        let task = tokio::spawn(run(client, namespace, capacity, Arc::new(script), record.clone()));
        Self { task, record }
    }

    pub(crate) fn started(&self) -> Vec<String> {
        self.record.started.lock().unwrap().clone()
    }

    /// Returns a pod as this kubelet first observed it.
    pub(crate) fn pod(&self, name: &str) -> Option<Pod> {
        self.record.pods.lock().unwrap().get(name).cloned()
    }

    /// Output of all jobs.
    pub(crate) fn outputs(&self) -> &Outputs {
        &self.record.outputs
    }

    /// Number of units trained so far.
    pub(crate) fn units(&self) -> u64 {
        self.record.units.load(Ordering::Relaxed)
    }
}

async fn run(
    client: Client,
    namespace: String,
    capacity: usize,
    script: Arc<Scripts>,
    record: Arc<KubeletRecord>,
) {
    let pods: Api<Pod> = Api::namespaced(client.clone(), &namespace);
    let (sender, mut observed) = watch::channel(BTreeMap::new());
    tokio::spawn(observe(pods.clone(), sender));
    let (mut started, mut reported) = (HashSet::new(), HashSet::new());
    while observed.changed().await.is_ok() {
        // Pods that are created together start in the order below.
        tokio::time::sleep(Duration::from_millis(40)).await;
        let mut new: Vec<Pod> = observed.borrow_and_update().values().cloned().collect();
        let uid = |pod: &Pod| pod.uid().unwrap_or_default();
        let num_here =
            new.iter().filter(|pod| started.contains(&uid(pod)) && !is_over(pod)).count();
        let mut free = capacity.saturating_sub(num_here);
        new.retain(|pod| pod.metadata.deletion_timestamp.is_none() && !started.contains(&uid(pod)));
        new.retain(|pod| !is_gated(pod));
        // The worst order for gangs: they get pods in turn.
        new.sort_by_key(|pod| pod.name_any().rsplit_once("-r").map(|(_, index)| index.to_owned()));
        for pod in new {
            if free == 0 {
                if reported.insert(uid(&pod)) {
                    let patch = json!({ "status": { "conditions": [unschedulable()] } });
                    let (parameters, patch) = (PatchParams::default(), Patch::Merge(&patch));
                    let _ = pods.patch_status(&pod.name_any(), &parameters, &patch).await;
                }
                continue;
            }
            free -= 1;
            started.insert(uid(&pod));
            record.pods.lock().unwrap().entry(pod.name_any()).or_insert_with(|| pod.clone());
            let script = if !is_cleanup(&pod) {
                record.started.lock().unwrap().push(pod.name_any());
                script(&pod)
            } else {
                Script::Exit { after_ms: 20, code: 0 }
            };
            let (observed, record) = (observed.clone(), record.clone());
            tokio::spawn(run_pod(client.clone(), namespace.clone(), pod, script, observed, record));
        }
    }
}

/// Watches the pods until all receivers are dropped.
async fn observe(pods: Api<Pod>, sender: watch::Sender<BTreeMap<String, Pod>>) {
    let mut events = std::pin::pin!(watcher(pods, watcher::Config::default()));
    let mut listed = BTreeMap::new();
    loop {
        let event = tokio::select! {
            event = events.next() => event,
            () = sender.closed() => return,
        };
        match event {
            Some(Ok(Event::Init)) => listed.clear(),
            Some(Ok(Event::InitApply(pod))) => drop(listed.insert(pod.name_any(), pod)),
            Some(Ok(Event::InitDone)) => drop(sender.send_replace(std::mem::take(&mut listed))),
            Some(Ok(Event::Apply(pod))) => {
                sender.send_modify(|pods| drop(pods.insert(pod.name_any(), pod)));
            }
            Some(Ok(Event::Delete(pod))) => {
                sender.send_modify(|pods| drop(pods.remove(&pod.name_any())));
            }
            // The API server is unavailable; the pods may still exist.
            Some(Err(_)) => tokio::time::sleep(Duration::from_millis(100)).await,
            None => return,
        }
    }
}

/// Whether the pod deletes checkpoints instead of running a program.
fn is_cleanup(pod: &Pod) -> bool {
    pod.labels().get(LABEL_COMPONENT).is_some_and(|component| component == COMPONENT_CLEANUP)
}

/// Whether a scheduling gate holds the pod back.
fn is_gated(pod: &Pod) -> bool {
    let gates = pod.spec.iter().flat_map(|spec| spec.scheduling_gates.iter().flatten());
    gates.count() > 0
}

fn is_over(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

/// Condition that a scheduler sets on a pod that fits on no node.
pub(crate) fn unschedulable() -> Value {
    json!({
        "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
        "message": "0/2 nodes are available: 2 Insufficient slots",
        "lastTransitionTime": now(),
    })
}

/// Binds a pod to a node.
async fn bind(pods: &Api<Pod>, name: &str, node: &str) {
    let binding = json!({
        "apiVersion": "v1", "kind": "Binding", "metadata": { "name": name },
        "target": { "apiVersion": "v1", "kind": "Node", "name": node },
    });
    let parameters = PostParams::default();
    let bound: kube::Result<Value> =
        pods.create_subresource("binding", name, &parameters, &binding).await;
    bound.unwrap();
}

/// Returns the status of a running pod.
fn running() -> Value {
    let scheduled =
        json!({ "type": "PodScheduled", "status": "True", "lastTransitionTime": now() });
    json!({ "phase": "Running", "conditions": [scheduled] })
}

/// Runs a pod's script until the pod has ended or was deleted.
async fn run_pod(
    client: Client,
    namespace: String,
    pod: Pod,
    script: Script,
    observed: Pods,
    record: Arc<KubeletRecord>,
) {
    let pods: Api<Pod> = Api::namespaced(client.clone(), &namespace);
    let name = pod.name_any();
    let set_status = async |status: Value| {
        let patch = json!({ "metadata": { "uid": pod.uid() }, "status": status });
        for _ in 0..100 {
            let (parameters, patch) = (PatchParams::default(), Patch::Merge(&patch));
            match pods.patch_status(&name, &parameters, &patch).await {
                Ok(_) => return,
                Err(kube::Error::Api(status)) if status.code < 500 => return,
                // The API server may be unavailable for a while. Retry, as a kubelet does.
                Err(_) => tokio::time::sleep(Duration::from_millis(500)).await,
            }
        }
    };
    let code = match script {
        Script::Status(status) => return set_status(status).await,
        Script::OnNode(node) => {
            bind(&pods, &name, &node).await;
            return set_status(running()).await;
        }
        Script::Hang => {
            set_status(running()).await;
            wait_deleted(&observed, &pod).await;
            137
        }
        Script::Exit { after_ms, code } => {
            set_status(running()).await;
            tokio::time::sleep(Duration::from_millis(after_ms)).await;
            code
        }
        Script::Train { unit_ms } => {
            set_status(running()).await;
            tokio::select! {
                code = train(&client, &observed, &pod, unit_ms, &record.units) => code,
                () = wait_deleted(&observed, &pod) => 143,
            }
        }
        Script::TrainAfter { mut gate, unit_ms } => {
            set_status(running()).await;
            let training = async {
                gate.wait_for(|is_open| *is_open).await.unwrap();
                train(&client, &observed, &pod, unit_ms, &record.units).await
            };
            tokio::select! {
                code = training => code,
                () = wait_deleted(&observed, &pod) => 143,
            }
        }
        Script::Work(script) => {
            set_status(running()).await;
            tokio::select! {
                code = work(&client, &pod, script, &record.outputs) => code,
                () = wait_deleted(&observed, &pod) => 79,
            }
        }
    };
    set_status(ended(code)).await;
    // As a kubelet does, remove a deleted pod once its containers have ended.
    wait_deleted(&observed, &pod).await;
    let now = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
    let _ = pods.delete(&name, &now).await;
}

/// Status of a pod whose program exited with this code.
pub(crate) fn ended(code: i32) -> Value {
    let phase = if code == 0 { "Succeeded" } else { "Failed" };
    json!({
        "phase": phase,
        "containerStatuses": [{
            "name": "trainer", "image": "", "imageID": "", "ready": false, "restartCount": 0,
            "state": { "terminated": {
                "exitCode": code, "reason": if code == 0 { "Completed" } else { "Error" },
                "finishedAt": now(),
            } },
        }],
    })
}

pub(crate) fn now() -> String {
    stoker_operator::context::now().to_string()
}

/// Waits until the pods meet a condition, and returns them.
pub(crate) async fn wait_for(
    observed: &Pods,
    is_met: impl FnMut(&BTreeMap<String, Pod>) -> bool,
) -> BTreeMap<String, Pod> {
    let met = observed.clone().wait_for(is_met).await.ok().map(|pods| pods.clone());
    match met {
        Some(pods) => pods,
        // The watch ends with the test.
        None => std::future::pending().await,
    }
}

/// Waits until a pod is being deleted or no longer exists.
async fn wait_deleted(observed: &Pods, pod: &Pod) {
    let is_gone = |pods: &BTreeMap<String, Pod>| {
        pods.get(&pod.name_any()).is_none_or(|current| {
            current.uid() != pod.uid() || current.metadata.deletion_timestamp.is_some()
        })
    };
    wait_for(observed, is_gone).await;
}

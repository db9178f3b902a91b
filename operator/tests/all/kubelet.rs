//! A scripted kubelet without containers. It sets the status of each pod by its script; the scripts
//! of programs talk to the report server like a trainer.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use k8s_openapi::api::authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Pod, ServiceAccount};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt as _};
use serde_json::{Value, json};
use stoker_api::contract::{CONTRACT_VERSION, Directive, Report, ReportEvent, TrialConfig};
use stoker_api::names::{
    ANNOTATION_TRIAL_CONFIG, COMPONENT_CLEANUP, LABEL_COMPONENT, checkpoint_name,
};

use crate::worker::{Outputs, Work, work};

/// Behavior of a pod.
#[derive(Clone, Debug)]
pub(crate) enum Script {
    /// Trains for `unit_ms` milliseconds per unit, with a metric that depends on the
    /// hyperparameters.
    Train { unit_ms: u64 },
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

type Scripts = dyn Fn(&Pod) -> Script + Send + Sync;

/// Runs the pods of a namespace until dropped.
pub(crate) struct Kubelet {
    task: tokio::task::JoinHandle<()>,
    seen: Arc<Seen>,
}

/// Record of what a kubelet did.
#[derive(Default)]
struct Seen {
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
        Self::with_room(client, namespace, usize::MAX, script)
    }

    /// Same as [`start`](Self::start), with capacity for `room` concurrent pods. Other pods are
    /// unschedulable.
    pub(crate) fn with_room(
        client: &Client,
        namespace: &str,
        room: usize,
        script: impl Fn(&Pod) -> Script + Send + Sync + 'static,
    ) -> Self {
        let seen = Arc::<Seen>::default();
        let (client, namespace) = (client.clone(), namespace.to_owned());
        let task = tokio::spawn(run(client, namespace, room, Arc::new(script), seen.clone()));
        Self { task, seen }
    }

    pub(crate) fn started(&self) -> Vec<String> {
        self.seen.started.lock().unwrap().clone()
    }

    /// Returns a pod as this kubelet first observed it.
    pub(crate) fn pod(&self, name: &str) -> Option<Pod> {
        self.seen.pods.lock().unwrap().get(name).cloned()
    }

    /// Output of all jobs.
    pub(crate) fn outputs(&self) -> &Outputs {
        &self.seen.outputs
    }

    /// Number of units trained so far.
    pub(crate) fn units(&self) -> u64 {
        self.seen.units.load(Ordering::Relaxed)
    }
}

async fn run(
    client: Client,
    namespace: String,
    room: usize,
    script: Arc<Scripts>,
    notes: Arc<Seen>,
) {
    let pods: Api<Pod> = Api::namespaced(client.clone(), &namespace);
    let (mut seen, mut reported) = (HashSet::new(), HashSet::new());
    loop {
        tokio::time::sleep(Duration::from_millis(40)).await;
        let Ok(list) = pods.list(&Default::default()).await else { continue };
        let uid = |pod: &Pod| pod.uid().unwrap_or_default();
        let num_here = list.iter().filter(|pod| seen.contains(&uid(pod)) && !is_over(pod)).count();
        let mut free = room.saturating_sub(num_here);
        let mut new: Vec<Pod> = list.items;
        new.retain(|pod| pod.metadata.deletion_timestamp.is_none() && !seen.contains(&uid(pod)));
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
            seen.insert(uid(&pod));
            notes.pods.lock().unwrap().entry(pod.name_any()).or_insert_with(|| pod.clone());
            let script = if !is_cleanup(&pod) {
                notes.started.lock().unwrap().push(pod.name_any());
                script(&pod)
            } else {
                Script::Exit { after_ms: 20, code: 0 }
            };
            tokio::spawn(live(client.clone(), namespace.clone(), pod, script, notes.clone()));
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

/// Runs a pod's script until the pod has ended or was deleted.
async fn live(client: Client, namespace: String, pod: Pod, script: Script, notes: Arc<Seen>) {
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
    let running = json!({
        "phase": "Running",
        "conditions": [{ "type": "PodScheduled", "status": "True", "lastTransitionTime": now() }],
    });
    let code = match script {
        Script::Status(status) => return set_status(status).await,
        Script::OnNode(node) => {
            let binding = json!({
                "apiVersion": "v1", "kind": "Binding", "metadata": { "name": name },
                "target": { "apiVersion": "v1", "kind": "Node", "name": node },
            });
            let parameters = PostParams::default();
            let bound: kube::Result<Value> =
                pods.create_subresource("binding", &name, &parameters, &binding).await;
            bound.unwrap();
            return set_status(running).await;
        }
        Script::Hang => {
            set_status(running).await;
            wait_deleted(&pods, &pod).await;
            137
        }
        Script::Exit { after_ms, code } => {
            set_status(running).await;
            tokio::time::sleep(Duration::from_millis(after_ms)).await;
            code
        }
        Script::Train { unit_ms } => {
            set_status(running).await;
            tokio::select! {
                code = train(&client, &namespace, &pod, unit_ms, &notes) => code,
                () = wait_deleted(&pods, &pod) => 143,
            }
        }
        Script::Work(script) => {
            set_status(running).await;
            tokio::select! {
                code = work(&client, &pod, script, &notes.outputs) => code,
                () = wait_deleted(&pods, &pod) => 79,
            }
        }
    };
    set_status(ended(code)).await;
    // As a kubelet does, remove a deleted pod once its containers have ended.
    wait_deleted(&pods, &pod).await;
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

/// Waits until a pod is being deleted or no longer exists.
async fn wait_deleted(pods: &Api<Pod>, pod: &Pod) {
    loop {
        match pods.get_opt(&pod.name_any()).await {
            Ok(Some(current))
                if current.uid() == pod.uid() && current.metadata.deletion_timestamp.is_none() => {}
            Ok(_) => return,
            // The API server is unavailable, which says nothing about the pod.
            Err(_) => {}
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Requests a trainer's token, like the one that a kubelet projects.
pub(crate) async fn token(client: &Client, namespace: &str, pod: &Pod) -> Option<String> {
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), namespace);
    let request = TokenRequest {
        spec: Some(TokenRequestSpec {
            audiences: Some(vec!["stoker".to_owned()]),
            bound_object_ref: Some(BoundObjectReference {
                api_version: Some("v1".to_owned()),
                kind: Some("Pod".to_owned()),
                name: Some(pod.name_any()),
                uid: pod.uid(),
            }),
            expiration_seconds: Some(600),
        }),
        ..TokenRequest::default()
    };
    let account = pod
        .spec
        .as_ref()
        .and_then(|spec| spec.service_account_name.clone())
        .unwrap_or("default".into());
    let made = accounts.create_token_request(&account, &PostParams::default(), &request).await;
    made.ok()?.status?.token
}

/// Searched metric of a trial after this many units. Smaller is better; other hyperparameters give
/// another value.
pub(crate) fn loss(config: &TrialConfig, units: u64) -> String {
    let x = config.hyperparameters["x"].as_f64().unwrap_or(0.0);
    stoker_api::number::format((x - 0.3).abs() + 1.0 / units as f64)
}

/// Configuration of a pod's program.
pub(crate) fn config_of(pod: &Pod) -> TrialConfig {
    serde_json::from_str(&pod.annotations()[ANNOTATION_TRIAL_CONFIG]).unwrap()
}

/// Connection to the report server.
pub(crate) struct Line {
    client: reqwest::Client,
    url: String,
    pub(crate) token: String,
}

impl Line {
    pub(crate) fn new(config: &TrialConfig, token: String) -> Self {
        let ca = config.report_endpoint.ca.as_deref().unwrap();
        Self { token, ..Self::by_authority(ca, config.report_endpoint.url.clone()) }
    }

    /// Connection to a report server whose certificate this CA has signed.
    pub(crate) fn by_authority(ca: &str, url: String) -> Self {
        let ca = reqwest::Certificate::from_pem(ca.as_bytes()).unwrap();
        let client = reqwest::Client::builder()
            .no_proxy()
            .tls_certs_only([ca])
            .timeout(Duration::from_secs(60))
            .build()
            .unwrap();
        Self { client, url, token: String::new() }
    }

    /// Sends a body with any token to any URL, and returns status and text of the response.
    pub(crate) async fn send(
        &self,
        body: Vec<u8>,
        token: Option<&str>,
        url: &str,
    ) -> Option<(u16, String)> {
        let response = self.respond(body, token, url).await?;
        Some((response.status().as_u16(), response.text().await.ok()?))
    }

    /// Same as [`send`](Self::send), but returns the response with its headers.
    pub(crate) async fn respond(
        &self,
        body: Vec<u8>,
        token: Option<&str>,
        url: &str,
    ) -> Option<reqwest::Response> {
        let mut request = self.client.post(url).header("content-type", "application/json");
        if let Some(token) = token {
            request = request.bearer_auth(token);
        }
        request.body(body).send().await.ok()
    }

    /// Sends one report, and returns status and text of the response.
    pub(crate) async fn post(&self, report: &Report) -> Option<(u16, String)> {
        let body = serde_json::to_vec(report).unwrap();
        self.send(body, Some(&self.token), &self.url).await
    }

    /// Sends a report until it is answered with a directive.
    pub(crate) async fn ask(&self, attempt: u32, batches: u64, event: ReportEvent) -> Directive {
        loop {
            match self.try_ask(attempt, batches, event.clone()).await {
                Some(answer) => return answer,
                None => tokio::time::sleep(Duration::from_millis(200)).await,
            }
        }
    }

    /// Sends a report, and returns the directive; `None` if the report server is unavailable.
    async fn try_ask(&self, attempt: u32, batches: u64, event: ReportEvent) -> Option<Directive> {
        let report = Report { version: CONTRACT_VERSION, attempt, batches, event };
        match self.post(&report).await {
            Some((200, text)) => Some(serde_json::from_str(&text).unwrap()),
            Some((code @ (400 | 422), text)) => panic!("{code}: {text}"),
            _ => None,
        }
    }
}

/// Runs a program that trains, and returns its exit code. Only rank 0's pod reports.
async fn train(client: &Client, namespace: &str, pod: &Pod, unit_ms: u64, notes: &Seen) -> i32 {
    if !pod.name_any().ends_with("-r0") {
        return follow(client, namespace, pod).await;
    }
    let config = config_of(pod);
    let Some(token) = token(client, namespace, pod).await else { return 80 };
    let line = Line::new(&config, token);
    let (attempt, mut units) = (config.attempt, config.units);
    let from = config.resume_from.first().map(|checkpoint| checkpoint.name.clone());
    let from_name =
        |name: &String| stoker_api::names::parse_checkpoint_name(name).map(|(batches, _)| batches);
    let mut done = from.as_ref().and_then(from_name).unwrap_or(0);
    let started = ReportEvent::Started {
        resumed_from: from,
        batches_total: units,
        refused: Default::default(),
    };
    let mut directive = line.ask(attempt, done, started).await;
    let mut unsent = VecDeque::new();
    loop {
        match directive {
            Directive::Continue { units: more } => units = units.max(more),
            Directive::Stop => return 0,
            Directive::Preempt => return 79,
            Directive::Fenced => return 80,
            Directive::Wait => {}
        }
        if done >= units {
            tokio::time::sleep(Duration::from_millis(20)).await;
            let event = ReportEvent::Progress { batches_total: units, activity: None };
            directive = line.ask(attempt, done, event).await;
            continue;
        }
        tokio::time::sleep(Duration::from_millis(unit_ms)).await;
        done += 1;
        notes.units.fetch_add(1, Ordering::Relaxed);
        let metric = loss(&config, done);
        unsent.push_back((
            done,
            ReportEvent::Checkpointed {
                name: checkpoint_name(done, attempt),
                manifest_sha256: "0".repeat(64),
                bytes: 1,
                metric: Some(metric.clone()),
            },
        ));
        let metrics = [(config.metric.clone(), metric)].into();
        let granted_units = (done == units).then_some(done);
        unsent.push_back((done, ReportEvent::Validated { metrics, granted_units }));
        // Without the report server, training continues up to the granted length.
        while let Some((batches, event)) = unsent.front().cloned() {
            let answer = match done == units {
                true => Some(line.ask(attempt, batches, event).await),
                false => line.try_ask(attempt, batches, event).await,
            };
            let Some(answer) = answer else { break };
            directive = answer;
            unsent.pop_front();
        }
    }
}

/// Waits for rank 0's pod, in place of a collective, and returns its exit code.
async fn follow(client: &Client, namespace: &str, pod: &Pod) -> i32 {
    let first = pod.name_any().rsplit_once("-r").unwrap().0.to_owned() + "-r0";
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    loop {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let Ok(pod) = pods.get_opt(&first).await else { continue };
        let status = pod.and_then(|pod| pod.status).unwrap_or_default();
        let containers = status.container_statuses.into_iter().flatten();
        let states = containers.filter_map(|container| container.state);
        if let Some(end) = states.filter_map(|state| state.terminated).next() {
            return end.exit_code;
        }
    }
}

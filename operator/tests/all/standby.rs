//! A report server that never leads, because its lease requests hang. Tests create all objects
//! themselves, so no controller changes them.

use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::core::NamespaceResourceScope;
use kube::{Api, Resource, ResourceExt as _};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use stoker_api::inference::{InferenceJob, InferenceStatus};
use stoker_api::names::{
    API_VERSION, COMPONENT_JOB, COMPONENT_TRIAL, LABEL_ATTEMPT, LABEL_COMPONENT, LABEL_EXPERIMENT,
    LABEL_JOB, LABEL_POD_INDEX, LABEL_TRIAL,
};
use stoker_api::trial::{Trial, TrialStatus};

use crate::flow::grid;
use crate::jobs::{apply_job, job};
use crate::operator_process::{Operator, get};
use crate::proxy::Proxy;
use crate::setup::{TestNamespace, operator_port};
use crate::trainer::{ReportConnection, token};

/// Length of trials, in batches.
pub(crate) const UNITS: u64 = 100;

pub(crate) struct Standby {
    pub(crate) ns: TestNamespace,
    pub(crate) proxy: Proxy,
    pub(crate) operator: Operator,
}

/// A pod with a token and its connection to the report server.
pub(crate) struct Sender {
    pub(crate) connection: ReportConnection,
    pub(crate) pod: Pod,
    url: String,
}

impl Sender {
    /// Sends a report of the pod's own trial or job, and returns status and text of the response.
    pub(crate) async fn send(&self, report: &Value) -> (u16, String) {
        self.send_to(report, &self.url).await
    }

    /// Sends a report, and returns status, `Retry-After` in seconds, and text of the response.
    pub(crate) async fn send_for_wait(&self, report: &Value) -> (u16, Option<u64>, String) {
        let body = report.to_string().into_bytes();
        let response =
            self.connection.respond(body, Some(&self.connection.token), &self.url).await.unwrap();
        let wait = response.headers().get("retry-after");
        let wait = wait.map(|value| value.to_str().unwrap().parse().unwrap());
        (response.status().as_u16(), wait, response.text().await.unwrap())
    }

    pub(crate) async fn send_to(&self, report: &Value, url: &str) -> (u16, String) {
        let body = report.to_string().into_bytes();
        self.connection.send(body, Some(&self.connection.token), url).await.unwrap()
    }
}

pub(crate) fn progress(attempt: u32, batches: u64) -> Value {
    json!({
        "version": 1, "attempt": attempt, "batches": batches,
        "event": { "progress": { "batchesTotal": UNITS } },
    })
}

pub(crate) fn validated(attempt: u32, batches: u64, loss: &str, granted: Option<u64>) -> Value {
    json!({
        "version": 1, "attempt": attempt, "batches": batches,
        "event": { "validated": { "metrics": { "loss": loss }, "grantedUnits": granted } },
    })
}

/// Polls until `probe` returns a value.
pub(crate) async fn poll_until<T>(
    what: &str,
    mut probe: impl AsyncFnMut() -> Result<T, String>,
) -> T {
    let end = Instant::now() + stoker_test_cluster::PATIENCE;
    loop {
        match probe().await {
            Ok(value) => return value,
            Err(reason) => assert!(Instant::now() < end, "waited too long for {what}: {reason}"),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

impl Standby {
    pub(crate) async fn start(namespace: &str, more: &[&str]) -> Self {
        let ns = TestNamespace::new(namespace).await;
        let proxy = Proxy::start(ns.client.clone(), ns.folder.path()).await;
        proxy.delay_leases(Duration::from_secs(3_600));
        let operator = ns.operator_by("a", operator_port(), &proxy.kubeconfig, more);
        let standby = Self { ns, proxy, operator };
        let address = standby.address();
        poll_until("the operator to serve", async || {
            get(&address, "/healthz").map_err(|error| error.to_string())
        })
        .await;
        standby
    }

    fn address(&self) -> String {
        format!("127.0.0.1:{}", self.operator.port + 1)
    }

    pub(crate) fn api<K>(&self) -> Api<K>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.ns.client.clone(), &self.ns.namespace)
    }

    pub(crate) fn url(&self, kind: &str, name: &str) -> String {
        let (port, namespace) = (self.operator.port, &self.ns.namespace);
        format!("https://127.0.0.1:{port}/v1/{kind}/{namespace}/{name}/reports")
    }

    /// Value of a metric of the operator, by name and labels.
    pub(crate) fn metric(&self, line: &str) -> u64 {
        let metrics = self.operator.metrics();
        let value = metrics.lines().find_map(|text| text.strip_prefix(line)?.strip_prefix(' '));
        value.map_or(0, |text| text.parse().unwrap())
    }

    async fn wait_for_cached(&self, kind: &str, at_least: u64) {
        let line = format!("stoker_cached_objects{{kind=\"{kind}\"}}");
        poll_until(&line, async || match self.metric(&line) {
            num if num >= at_least => Ok(()),
            num => Err(num.to_string()),
        })
        .await;
    }

    /// Creates an experiment, waits until the server has it in its cache, and returns its UID.
    pub(crate) async fn add_experiment(&self, name: &str) -> String {
        self.ns.apply(name, grid(1, UNITS, 1));
        self.wait_for_cached("experiments", 1).await;
        self.ns.experiment(name).await.uid().unwrap()
    }

    /// Creates the first trial of an experiment with `attempt` as its live attempt. Returns its
    /// UID.
    pub(crate) async fn add_trial(&self, experiment: &str, owner: &str, attempt: u32) -> String {
        let name = format!("{experiment}-0");
        let object = json!({
            "apiVersion": API_VERSION, "kind": "Trial",
            "metadata": {
                "name": name,
                "labels": { LABEL_EXPERIMENT: experiment, LABEL_TRIAL: name },
                "ownerReferences": [{
                    "apiVersion": API_VERSION, "kind": "Experiment", "name": experiment,
                    "uid": owner, "controller": true,
                }],
            },
            "spec": {
                "experiment": experiment, "index": 0, "requestId": "0", "seed": 1,
                "hyperparameters": { "x": 0.5 }, "unit": "batches", "units": UNITS,
            },
        });
        let trial: Trial = serde_json::from_value(object).unwrap();
        let uid = self.api().create(&PostParams::default(), &trial).await.unwrap().uid().unwrap();
        let ended = (0..attempt).map(|number| json!({ "number": number, "end": "UserError" }));
        let attempts: Vec<Value> = ended.chain([json!({ "number": attempt })]).collect();
        self.set_status::<Trial>(&name, &json!({ "phase": "Running", "attempts": attempts })).await;
        uid
    }

    /// Creates a job whose live attempt 0 is its planner. Returns its UID.
    pub(crate) async fn add_job(&self, name: &str) -> String {
        apply_job(&self.ns, name, job(1));
        let status = json!({
            "phase": "Running", "stage": "plan", "attempts": 1, "workers": [{ "attempt": 0 }],
        });
        self.set_status::<InferenceJob>(name, &status).await;
        self.api::<InferenceJob>().get(name).await.unwrap().uid().unwrap()
    }

    /// Merges `status` into the status of an object.
    pub(crate) async fn set_status<K>(&self, name: &str, status: &Value)
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
            + Clone
            + DeserializeOwned
            + std::fmt::Debug,
    {
        let patch = Patch::Merge(json!({ "status": status }));
        self.api::<K>().patch_status(name, &PatchParams::default(), &patch).await.unwrap();
    }

    /// Creates a trial's pod that no node runs, with a token.
    pub(crate) async fn add_pod(&self, of: &str, owner: &str, attempt: u32, index: u32) -> Sender {
        let name = format!("{of}-a{attempt}-r{index}");
        let labels = json!({ LABEL_TRIAL: of, LABEL_COMPONENT: COMPONENT_TRIAL });
        self.add_named_pod(&name, labels, ("Trial", of, owner), (attempt, index)).await
    }

    /// Same as [`add_pod`](Self::add_pod), for the planner of a job.
    pub(crate) async fn add_planner(&self, job: &str, owner: &str) -> Sender {
        let labels = json!({ LABEL_JOB: job, LABEL_COMPONENT: COMPONENT_JOB });
        let name = format!("{job}-a0-plan");
        self.add_named_pod(&name, labels, ("InferenceJob", job, owner), (0, 0)).await
    }

    /// Same as [`add_pod`](Self::add_pod), with any name. The pod has no owner if `uid` is empty.
    pub(crate) async fn add_named_pod(
        &self,
        name: &str,
        mut labels: Value,
        (kind, of, uid): (&str, &str, &str),
        (attempt, index): (u32, u32),
    ) -> Sender {
        labels[LABEL_ATTEMPT] = attempt.to_string().into();
        labels[LABEL_POD_INDEX] = index.to_string().into();
        let mut object = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": { "name": name, "labels": labels },
            "spec": { "containers": [{ "name": "trainer", "image": "trainer:1" }] },
        });
        if !uid.is_empty() {
            object["metadata"]["ownerReferences"] = json!([{
                "apiVersion": API_VERSION, "kind": kind, "name": of, "uid": uid, "controller": true,
            }]);
        }
        let pod: Pod = serde_json::from_value(object).unwrap();
        let pod = self.api::<Pod>().create(&PostParams::default(), &pod).await.unwrap();
        self.sender(pod, if kind == "Trial" { "trials" } else { "jobs" }, of).await
    }

    /// Requests a new token for a pod.
    pub(crate) async fn sender(&self, pod: Pod, kind: &str, of: &str) -> Sender {
        let token = token(&self.ns.client, &self.ns.namespace, &pod).await.unwrap();
        let ca = std::fs::read_to_string(self.ns.path("ca.crt")).unwrap();
        let url = self.url(kind, of);
        let mut connection = ReportConnection::by_authority(&ca, url.clone());
        connection.token = token;
        Sender { connection, pod, url }
    }

    /// Deletes an object and waits until it no longer exists.
    pub(crate) async fn delete<K>(&self, name: &str)
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
            + Clone
            + DeserializeOwned
            + std::fmt::Debug,
    {
        let api = self.api::<K>();
        let old = api.get(name).await.unwrap().meta().uid.clone();
        let now = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
        api.delete(name, &now).await.unwrap();
        poll_until(&format!("{name} to be deleted"), async || {
            match api.get_opt(name).await.unwrap() {
                Some(object) if object.meta().uid == old => Err("it still exists".to_owned()),
                _ => Ok(()),
            }
        })
        .await;
    }

    pub(crate) async fn trial_status(&self, name: &str) -> TrialStatus {
        self.api::<Trial>().get(name).await.unwrap().status.unwrap_or_default()
    }

    pub(crate) async fn job_status(&self, name: &str) -> InferenceStatus {
        self.api::<InferenceJob>().get(name).await.unwrap().status.unwrap_or_default()
    }
}

//! A scripted trainer: its token, its connection to the report server, and its training.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use k8s_openapi::api::authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Pod, ServiceAccount};
use kube::api::PostParams;
use kube::{Api, Client, ResourceExt as _};
use stoker_api::contract::{
    CONTRACT_VERSION, Directive, Report, ReportEvent, ReportResponse, TrialConfig,
};
use stoker_api::names::{ANNOTATION_TRIAL_CONFIG, HEADER_RECORD, checkpoint_name};

use crate::kubelet::{Pods, wait_for};

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
pub(crate) struct ReportConnection {
    client: reqwest::Client,
    url: String,
    pub(crate) token: String,
}

impl ReportConnection {
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

    /// Sends one report and requests the trial's record. Returns `None` if it is not recorded.
    pub(crate) async fn post_for_record(&self, report: &Report) -> Option<ReportResponse> {
        let request = self.client.post(&self.url).bearer_auth(&self.token).json(report);
        let response = request.header(HEADER_RECORD, "yes").send().await.ok()?;
        response.error_for_status().ok()?.json().await.ok()
    }

    /// Sends a report until it is answered with a directive.
    pub(crate) async fn send_until_answered(
        &self,
        attempt: u32,
        batches: u64,
        event: ReportEvent,
    ) -> Directive {
        loop {
            match self.try_send(attempt, batches, event.clone()).await {
                Some(answer) => return answer,
                None => tokio::time::sleep(Duration::from_millis(200)).await,
            }
        }
    }

    /// Sends a report, and returns the directive; `None` if the report server is unavailable.
    async fn try_send(&self, attempt: u32, batches: u64, event: ReportEvent) -> Option<Directive> {
        let report = Report { version: CONTRACT_VERSION, attempt, batches, event };
        match self.post(&report).await {
            Some((200, text)) => Some(serde_json::from_str(&text).unwrap()),
            Some((code @ (400 | 422), text)) => panic!("{code}: {text}"),
            _ => None,
        }
    }
}

/// Runs a program that trains, and returns its exit code. Only rank 0's pod reports.
pub(crate) async fn train(
    client: &Client,
    observed: &Pods,
    pod: &Pod,
    unit_ms: u64,
    num_units: &AtomicU64,
) -> i32 {
    if !pod.name_any().ends_with("-r0") {
        return follow(observed, pod).await;
    }
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let config = config_of(pod);
    let Some(token) = token(client, namespace, pod).await else { return 80 };
    let connection = ReportConnection::new(&config, token);
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
    let mut directive = connection.send_until_answered(attempt, done, started).await;
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
            directive = connection.send_until_answered(attempt, done, event).await;
            continue;
        }
        tokio::time::sleep(Duration::from_millis(unit_ms)).await;
        done += 1;
        num_units.fetch_add(1, Ordering::Relaxed);
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
                true => Some(connection.send_until_answered(attempt, batches, event).await),
                false => connection.try_send(attempt, batches, event).await,
            };
            let Some(answer) = answer else { break };
            directive = answer;
            unsent.pop_front();
        }
    }
}

/// Waits for rank 0's pod, in place of a collective, and returns its exit code.
async fn follow(observed: &Pods, pod: &Pod) -> i32 {
    let first = pod.name_any().rsplit_once("-r").unwrap().0.to_owned() + "-r0";
    let exit_code = |pods: &BTreeMap<String, Pod>| {
        let status = pods.get(&first)?.status.as_ref()?;
        let containers = status.container_statuses.iter().flatten();
        let states = containers.filter_map(|container| container.state.as_ref());
        states.filter_map(|state| state.terminated.as_ref()).map(|end| end.exit_code).next()
    };
    exit_code(&wait_for(observed, |pods| exit_code(pods).is_some()).await).unwrap()
}

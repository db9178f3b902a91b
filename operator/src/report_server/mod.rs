//! Report server: receives the trainers' reports and answers with directives.
//!
//! It records and reads state and makes no decisions; every replica serves it. A report that a
//! decision can depend on is in the trial's status before it is answered. Only the directive
//! `fenced` ends an attempt, and only callers with a reviewed token receive it.

mod auth;
mod delayed;
mod job;
mod peers;
mod pod_names;
mod record;
mod refusal;
mod review_permits;
pub mod tls;
mod write_budget;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::body::{Body, to_bytes};
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::routing::post;
use axum::{Json, Router};
use serde_json::Value;
use stoker_api::contract::{Directive, Report, ReportResponse};
use stoker_api::names::{HEADER_PRUNABLE, HEADER_RECORD};
use stoker_engine::trial::{TargetState, directive};

use crate::cache::Key;
use crate::context::{Context, now};
use crate::metrics::{Answer, AnswerLabel};
use crate::records;
use auth::{AuthError, Authenticator, Caller};
use delayed::DelayedValidations;
use refusal::Refusal;
use write_budget::WriteBudgets;

/// Largest accepted report. Reports with a few metrics are far smaller.
const REPORT_BYTES_MAX: usize = 256 << 10;
/// Time limit for receiving a report.
const BODY_MAX: Duration = Duration::from_secs(10);
/// Token bucket of one pod's reports: burst size and refill rate per second.
const BURST: f64 = 40.0;
const PER_SECOND: f64 = 20.0;
/// Longest time for which a response is held back while the directive is `Wait`.
const WAIT_MAX: Duration = Duration::from_secs(20);
/// Delay after which a trainer should resend a refused report.
const RETRY_AFTER: Duration = Duration::from_secs(1);
/// Shared permit key for token reviews of callers that report for unknown objects.
const UNKNOWN_OBJECTS: &str = "";

/// State shared by all requests to the report server.
#[derive(Debug)]
pub struct ReportServer {
    context: Arc<Context>,
    authenticator: Authenticator,
    /// Reports that each pod, by UID, may still send, and when that was computed.
    budgets: Mutex<HashMap<String, (f64, Instant)>>,
    /// Write budgets of the namespaces.
    writes: WriteBudgets,
    delayed: DelayedValidations,
}

impl ReportServer {
    /// Creates the report server of this replica.
    pub fn new(context: Arc<Context>) -> Arc<Self> {
        let authenticator = Authenticator::new(context.client.clone());
        let writes = WriteBudgets::new(context.options.report_writes_per_second);
        let (budgets, delayed) = (Mutex::default(), DelayedValidations::default());
        Arc::new(Self { context, authenticator, budgets, writes, delayed })
    }

    /// Routes of the report server.
    pub fn router(self: Arc<Self>) -> Router {
        Router::new()
            .route("/v1/trials/{namespace}/{name}/reports", post(report))
            .route("/v1/jobs/{namespace}/{name}/reports", post(job::report))
            .with_state(self)
    }

    /// Ends the delay of validations, for a clean end of this replica: writes those that are
    /// delayed, for at most a few seconds, and all later ones at once.
    pub async fn write_delayed(&self) {
        record::write_all_delayed(self).await;
    }

    fn count(&self, answer: Answer) {
        self.context.metrics.reports.get_or_create(&AnswerLabel { answer }).inc();
    }

    /// Reads the report from a request body.
    async fn read(&self, body: Body) -> Result<Report, Refusal> {
        let refused = |status, why| Err(Refusal::new(Answer::Refused, status, why));
        let bytes = tokio::time::timeout(BODY_MAX, to_bytes(body, REPORT_BYTES_MAX)).await;
        match bytes {
            Err(_) => {
                let why = format!("report not received within {} s", BODY_MAX.as_secs());
                refused(StatusCode::REQUEST_TIMEOUT, why)
            }
            Ok(Err(error)) => refused(
                StatusCode::PAYLOAD_TOO_LARGE,
                format!("cannot read the report (limit {REPORT_BYTES_MAX} bytes): {error}"),
            ),
            Ok(Ok(bytes)) => serde_json::from_slice(&bytes)
                .or_else(|error| refused(StatusCode::UNPROCESSABLE_ENTITY, error.to_string())),
        }
    }

    /// Takes one report from a pod's budget. Returns `false` if none is left.
    fn is_within_budget(&self, caller: &Caller) -> bool {
        let mut budgets = self.budgets.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        // A pod with a full budget need not be remembered.
        if budgets.len() > 10_000 {
            let full = Duration::from_secs_f64(BURST / PER_SECOND);
            budgets.retain(|_, (_, at)| now.duration_since(*at) < full);
        }
        let (left, since) = budgets.entry(caller.uid.clone()).or_insert((BURST, now));
        let grown = *left + now.duration_since(*since).as_secs_f64() * PER_SECOND;
        (*left, *since) = (grown.min(BURST), now);
        let is_within = *left >= 1.0;
        if is_within {
            *left -= 1.0;
        }
        is_within
    }
}

/// Response to a report with a directive.
#[derive(Debug)]
struct Accepted {
    answer: Answer,
    directive: Directive,
    /// Checkpoints that were pruned from the record, whose files the trainer deletes.
    prunable: Vec<String>,
    /// Record of the trial, if the trainer stores it.
    record: Option<Value>,
}

impl Accepted {
    fn new(answer: Answer, directive: Directive) -> Self {
        Self { answer, directive, prunable: vec![], record: None }
    }

    fn fenced() -> Self {
        Self::new(Answer::Fenced, Directive::Fenced)
    }
}

/// Rights of the caller's pod. Other callers are refused.
#[derive(Debug)]
enum Authorization {
    /// The pod reports for the object with this UID.
    Granted { owner: String, index: u32 },
    /// The attempt was replaced, or the object or the pod was deleted: the pod is fenced.
    Fenced,
}

async fn report(
    State(server): State<Arc<ReportServer>>,
    Path((namespace, name)): Path<(String, String)>,
    headers: HeaderMap,
    body: Body,
) -> Result<(HeaderMap, Json<ReportResponse>), Refusal> {
    let start = Instant::now();
    let key = Key::new(&namespace, &name);
    let accepted = server.handle_report(&key, &headers, body, start).await;
    server
        .count(accepted.as_ref().map_or_else(|refusal| refusal.answer, |accepted| accepted.answer));
    if !matches!(accepted, Ok(Accepted { directive: Directive::Wait, .. })) {
        server.context.metrics.report_seconds.observe(start.elapsed().as_secs_f64());
    }
    let Accepted { directive, prunable, record, .. } = accepted?;
    let mut headers = HeaderMap::new();
    if let (false, Ok(names)) = (prunable.is_empty(), prunable.join(",").parse()) {
        headers.insert(HEADER_PRUNABLE, names);
    }
    let response = match record {
        Some(record) => ReportResponse::Recorded { directive, record },
        None => ReportResponse::Plain(directive),
    };
    Ok((headers, Json(response)))
}

impl ReportServer {
    /// Authenticates a request and reads its report. `is_known`: whether the path's object is
    /// cached.
    async fn authenticate(
        &self,
        key: &Key,
        is_known: bool,
        headers: &HeaderMap,
        body: Body,
    ) -> Result<(Caller, Report), Refusal> {
        let token = headers
            .get(header::AUTHORIZATION)
            .and_then(|value| value.to_str().ok())
            .and_then(|value| value.strip_prefix("Bearer "))
            .unwrap_or_default();
        // Do not read the body before the caller is authenticated and within its rate limit.
        let share = if is_known { &*key.namespace } else { UNKNOWN_OBJECTS };
        let caller = self.authenticator.identify(token, share).await?;
        if !self.is_within_budget(&caller) {
            let text =
                format!("pod {} sends more than {PER_SECOND} reports per second", caller.pod);
            return Err(Refusal::limited(text, RETRY_AFTER));
        }
        let report = self.read(body).await?;
        Ok((caller, report))
    }

    /// Handles one report of a trainer.
    async fn handle_report(
        self: &Arc<Self>,
        key: &Key,
        headers: &HeaderMap,
        body: Body,
        start: Instant,
    ) -> Result<Accepted, Refusal> {
        let is_known = self.context.trials.get(key).is_some();
        let (caller, report) = self.authenticate(key, is_known, headers, body).await?;
        match self.authorize(&caller, key, &report).await? {
            Authorization::Granted { owner, .. } => {
                let mut accepted = self.record_and_answer(key, &owner, &report, start).await?;
                let is_stored = headers.contains_key(HEADER_RECORD)
                    && accepted.directive != Directive::Fenced
                    && records::is_stored_after(&report.event);
                let trial = self.context.trials.get(key).filter(|trial| trial.uid() == owner);
                accepted.record = trial
                    .filter(|_| is_stored)
                    .map(|trial| records::of_trial(&trial.trial, &trial.record.status, now()));
                Ok(accepted)
            }
            Authorization::Fenced => Ok(Accepted::fenced()),
        }
    }

    /// Checks that the caller is rank 0's pod and that the report is for its attempt, which must be
    /// live.
    async fn authorize(
        &self,
        caller: &Caller,
        key: &Key,
        report: &Report,
    ) -> Result<Authorization, Refusal> {
        let not_owned =
            || Refusal::forbidden(format!("pod {} does not belong to trial {key}", caller.pod));
        let names = pod_names::parse_trial_pod(&caller.pod.name, &key.name);
        let names = names.filter(|_| caller.pod.namespace == key.namespace);
        let (attempt, index) = names.ok_or_else(not_owned)?;
        if index != 0 {
            let why = format!("pod {} does not run rank 0; only rank 0 reports", caller.pod);
            return Err(Refusal::forbidden(why));
        }
        let Some(owner) = self.owner(caller, (attempt, index)).await? else {
            return Ok(Authorization::Fenced);
        };
        let owner = owner.ok_or_else(not_owned)?;
        // Answer a deleted trial and another trial of its name alike, so as not to reveal the
        // latter.
        let Some(trial) = record::owned_trial(&self.context, key, &owner).await? else {
            return Ok(Authorization::Fenced);
        };
        if attempt == report.attempt {
            return Ok(Authorization::Granted { owner, index });
        }
        // The cached record may be older than the pod's attempt.
        let is_over =
            |record: &_| directive(record, attempt, TargetState::Run) == Directive::Fenced;
        if is_over(&trial.record) {
            let trial = record::read_owned_trial(&self.context, key, &owner).await?;
            if trial.is_none_or(|trial| is_over(&trial.record)) {
                return Ok(Authorization::Fenced);
            }
        }
        Err(Refusal::forbidden(format!(
            "pod {} belongs to attempt {attempt}, but its report is for attempt {}",
            caller.pod, report.attempt
        )))
    }

    /// Returns the owner UID of the caller's pod. The outer `None` means that the pod no longer
    /// exists, and the inner one that its labels contradict its name or that it has no owner.
    async fn owner(
        &self,
        caller: &Caller,
        (attempt, index): (u32, u32),
    ) -> Result<Option<Option<String>>, Refusal> {
        let pod = self.authenticator.pod(&self.context, caller).await;
        let pod = pod.map_err(|error| AuthError::Unavailable(error.to_string()))?;
        Ok(pod.map(|pod| {
            let is_named = (pod.observed.attempt, pod.observed.index) == (attempt, index);
            (is_named && !pod.owner.is_empty()).then(|| pod.owner.clone())
        }))
    }

    /// Waits until the namespace's budget allows a status write. Returns whether it waited.
    async fn wait_to_write(&self, key: &Key, is_decisive: bool) -> Result<bool, Refusal> {
        let Err(throttled) = self.writes.take(&key.namespace, is_decisive) else {
            return Ok(false);
        };
        let (namespace, rate) = (&key.namespace, self.writes.per_second());
        if throttled.warns {
            tracing::warn!(
                %namespace,
                writes_per_second = rate,
                "reports of this namespace exceed its status-write limit and are slowed down"
            );
        }
        self.context.metrics.reports_slowed.inc();
        if throttled.is_refused {
            let why = format!(
                "report not recorded: namespace {namespace} exceeds {rate} status writes per \
                 second; retry later"
            );
            return Err(Refusal::limited(why, throttled.wait));
        }
        tokio::time::sleep(throttled.wait).await;
        Ok(true)
    }

    /// Records a report and answers it. While the directive is `Wait`, holds the response back.
    async fn record_and_answer(
        self: &Arc<Self>,
        key: &Key,
        owner: &str,
        report: &Report,
        start: Instant,
    ) -> Result<Accepted, Refusal> {
        let mut changes = self.context.trial_changes.subscribe();
        let mut accepted = record::record(self, key, owner, report).await?;
        while accepted.directive == Directive::Wait {
            let Some(rest) = WAIT_MAX.checked_sub(start.elapsed()) else { break };
            match tokio::time::timeout(rest, changes.recv()).await {
                Ok(Ok(changed)) if changed != *key => continue,
                // Missed changes may include this trial's.
                Ok(Ok(_) | Err(tokio::sync::broadcast::error::RecvError::Lagged(_))) => {}
                Ok(Err(_)) | Err(_) => break,
            }
            accepted.directive =
                record::current_directive(&self.context, key, owner, report.attempt).await;
        }
        Ok(accepted)
    }
}

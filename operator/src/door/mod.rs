//! The door: where trainers report, and are told what to do.
//!
//! It records and reads, and decides nothing; every replica serves it. A report is in the trial's
//! status before it is answered.

mod auth;
mod job;
mod record;
pub mod tls;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::body::{Body, to_bytes};
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::routing::post;
use axum::{Json, Router};
use stoker_api::contract::{Directive, Report};
use stoker_api::names::HEADER_SUPERFLUOUS;

use crate::cache::Key;
use crate::metrics::{Answer, Answered};
use crate::world::World;
use auth::{Caller, Callers, Denied};

/// The largest report read; one holds some metrics, and is far smaller.
const REPORT_BYTES_MAX: usize = 256 << 10;
/// Time for a report to come in whole.
const BODY_MAX: Duration = Duration::from_secs(10);
/// Reports that one pod may send at once, and a second after that.
const BURST: f64 = 40.0;
const PER_SECOND: f64 = 20.0;
/// How long a trainer that can only wait is kept waiting; it asks again after.
const WAIT_MAX: Duration = Duration::from_secs(20);

/// What the door shares over its requests.
#[derive(Debug)]
pub struct Door {
    world: Arc<World>,
    callers: Callers,
    /// What each pod, by its UID, may still send, and when that was reckoned.
    budgets: Mutex<HashMap<String, (f64, Instant)>>,
}

impl Door {
    /// A door of this replica.
    pub fn new(world: Arc<World>) -> Arc<Self> {
        let callers = Callers::new(world.client.clone());
        Arc::new(Self { world, callers, budgets: Mutex::default() })
    }

    /// The door's paths.
    pub fn router(self: Arc<Self>) -> Router {
        Router::new()
            .route("/v1/trials/{namespace}/{name}/reports", post(report))
            .route("/v1/jobs/{namespace}/{name}/reports", post(job::report))
            .with_state(self)
    }

    fn count(&self, answer: Answer) {
        self.world.metrics.reports.get_or_create(&Answered { answer }).inc();
    }

    /// The report in a request.
    async fn read(&self, body: Body) -> Result<Report, Refusal> {
        let refused = |status: StatusCode, why: String| {
            self.count(Answer::Refused);
            Err((status, why))
        };
        let bytes = tokio::time::timeout(BODY_MAX, to_bytes(body, REPORT_BYTES_MAX)).await;
        match bytes {
            Err(_) => refused(StatusCode::REQUEST_TIMEOUT, "the report took too long".to_owned()),
            Ok(Err(error)) => refused(
                StatusCode::PAYLOAD_TOO_LARGE,
                format!("a report has at most {REPORT_BYTES_MAX} bytes: {error}"),
            ),
            Ok(Ok(bytes)) => serde_json::from_slice(&bytes)
                .or_else(|error| refused(StatusCode::UNPROCESSABLE_ENTITY, error.to_string())),
        }
    }

    /// Takes one report from a pod's budget; false if it has none left.
    fn is_within_budget(&self, caller: &Caller) -> bool {
        let mut budgets = self.budgets.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        // Whoever has all of its budget back need not be remembered.
        if budgets.len() > 10_000 {
            let full = Duration::from_secs_f64(BURST / PER_SECOND);
            budgets.retain(|_, it| now.duration_since(it.1) < full);
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

type Refusal = (StatusCode, String);

async fn report(
    State(door): State<Arc<Door>>,
    Path((namespace, name)): Path<(String, String)>,
    headers: HeaderMap,
    body: Body,
) -> Result<(HeaderMap, Json<Directive>), Refusal> {
    let start = Instant::now();
    let key = Key::new(&namespace, &name);
    let (caller, report) = door.hear(&headers, body).await?;
    door.check(&caller, &key, &report).await?;
    let answered = door.take(&key, &report, start).await;
    if !matches!(answered, Ok((Directive::Wait, _))) {
        door.world.metrics.report_seconds.observe(start.elapsed().as_secs_f64());
    }
    let (directive, superfluous) = answered?;
    let mut headers = HeaderMap::new();
    if let (false, Ok(names)) = (superfluous.is_empty(), superfluous.join(",").parse()) {
        headers.insert(HEADER_SUPERFLUOUS, names);
    }
    Ok((headers, Json(directive)))
}

impl Door {
    /// The report in a request, and who sends it.
    async fn hear(&self, headers: &HeaderMap, body: Body) -> Result<(Caller, Report), Refusal> {
        let token = headers
            .get(header::AUTHORIZATION)
            .and_then(|it| it.to_str().ok())
            .and_then(|it| it.strip_prefix("Bearer "))
            .unwrap_or_default();
        // Nothing is read of, or looked up for, somebody unknown or somebody who asks too much.
        let caller = self.callers.identify(token).await.map_err(|denied| self.denied(denied))?;
        if !self.is_within_budget(&caller) {
            self.count(Answer::Limited);
            let text = format!("pod {} sends more than {PER_SECOND} reports a second", caller.pod);
            return Err((StatusCode::TOO_MANY_REQUESTS, text));
        }
        let report = self.read(body).await?;
        Ok((caller, report))
    }

    fn denied(&self, denied: Denied) -> Refusal {
        match denied {
            Denied::Unknown(why) => {
                self.count(Answer::Unauthorized);
                (StatusCode::UNAUTHORIZED, why)
            }
            Denied::Away(why) => {
                self.count(Answer::Unavailable);
                (StatusCode::SERVICE_UNAVAILABLE, why)
            }
        }
    }

    /// Whether the caller is rank 0's pod of the attempt that the report is of.
    async fn check(&self, caller: &Caller, key: &Key, report: &Report) -> Result<(), Refusal> {
        let forbidden = |why: String| {
            self.count(Answer::Unauthorized);
            Err((StatusCode::FORBIDDEN, why))
        };
        let not_of = || format!("pod {} is not of trial {key}", caller.pod);
        if caller.pod.namespace != key.namespace {
            return forbidden(not_of());
        }
        let pod = match self.callers.pod(&self.world, caller).await {
            Ok(Some(pod)) => pod,
            Ok(None) => return forbidden(format!("pod {} is gone", caller.pod)),
            Err(error) => return Err(self.denied(Denied::Away(error.to_string()))),
        };
        let trial = record::trial(&self.world, key).await.map_err(|it| self.denied(it))?;
        // Whether there is such a trial is nobody else's business.
        let Some(trial) = trial.filter(|it| pod.owner == it.uid()) else {
            return forbidden(not_of());
        };
        drop(trial);
        if pod.seen.index != 0 {
            return forbidden(format!("pod {} is not rank 0's", caller.pod));
        }
        if pod.seen.attempt != report.attempt {
            return forbidden(format!(
                "pod {} is of attempt {}, the report of attempt {}",
                caller.pod, pod.seen.attempt, report.attempt
            ));
        }
        Ok(())
    }

    /// Records a report and answers it, or waits for an answer that is worth more than `Wait`.
    async fn take(
        &self,
        key: &Key,
        report: &Report,
        start: Instant,
    ) -> Result<(Directive, Vec<String>), Refusal> {
        let mut changes = self.world.trial_changes.subscribe();
        let (mut directive, superfluous) = record::record(self, key, report).await?;
        while directive == Directive::Wait {
            let Some(rest) = WAIT_MAX.checked_sub(start.elapsed()) else { break };
            match tokio::time::timeout(rest, changes.recv()).await {
                Ok(Ok(changed)) if changed != *key => continue,
                // Changes that were missed may have been of this trial.
                Ok(Ok(_) | Err(tokio::sync::broadcast::error::RecvError::Lagged(_))) => {}
                Ok(Err(_)) | Err(_) => break,
            }
            directive = record::answer(&self.world, key, report.attempt);
        }
        Ok((directive, superfluous))
    }
}

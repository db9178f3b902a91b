//! The door: where trainers report, and are told what to do.
//!
//! It records and reads, and decides nothing; every replica serves it. A report that a decision can
//! follow from is in the trial's status before it is answered. Only an answer with the directive
//! `fenced` ends an attempt, and only a caller whose token was reviewed gets one.

mod auth;
mod budget;
mod held;
mod job;
mod names;
mod permits;
mod record;
pub mod tls;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::body::{Body, to_bytes};
use axum::extract::{Path, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
use stoker_api::contract::{Directive, Report};
use stoker_api::names::HEADER_SUPERFLUOUS;
use stoker_engine::trial::{Wanted, directive};

use crate::cache::Key;
use crate::metrics::{Answer, Answered};
use crate::world::World;
use auth::{Caller, Callers, Denied};
use budget::WriteBudgets;
use held::Held;

/// The largest report read; one holds some metrics, and is far smaller.
const REPORT_BYTES_MAX: usize = 256 << 10;
/// Time for a report to come in whole.
const BODY_MAX: Duration = Duration::from_secs(10);
/// Reports that one pod may send at once, and a second after that.
const BURST: f64 = 40.0;
const PER_SECOND: f64 = 20.0;
/// How long a trainer that can only wait is kept waiting; it asks again after.
const WAIT_MAX: Duration = Duration::from_secs(20);
/// The wait before a refused report is sent again.
const RETRY_AFTER: Duration = Duration::from_secs(1);
/// The share of token reviews that callers of unknown objects have in common.
const STRANGERS: &str = "";

/// What the door shares over its requests.
#[derive(Debug)]
pub struct Door {
    world: Arc<World>,
    callers: Callers,
    /// What each pod, by its UID, may still send, and when that was reckoned.
    budgets: Mutex<HashMap<String, (f64, Instant)>>,
    /// Status writes that the reports of each namespace may cause.
    writes: WriteBudgets,
    held: Held,
}

impl Door {
    /// A door of this replica.
    pub fn new(world: Arc<World>) -> Arc<Self> {
        let callers = Callers::new(world.client.clone());
        let writes = WriteBudgets::new(world.options.report_writes_per_second);
        let (budgets, held) = (Mutex::default(), Held::default());
        Arc::new(Self { world, callers, budgets, writes, held })
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
        let refused = |status, why| Err(Refusal::new(Answer::Refused, status, why));
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

/// A report that is not answered with a directive.
#[derive(Debug)]
struct Refusal {
    answer: Answer,
    status: StatusCode,
    why: String,
    retry_after: Option<Duration>,
}

impl Refusal {
    fn new(answer: Answer, status: StatusCode, why: String) -> Self {
        Self { answer, status, why, retry_after: None }
    }

    fn forbidden(why: String) -> Self {
        Self::new(Answer::Unauthorized, StatusCode::FORBIDDEN, why)
    }

    fn unavailable(why: String) -> Self {
        let refusal = Self::new(Answer::Unavailable, StatusCode::SERVICE_UNAVAILABLE, why);
        Self { retry_after: Some(RETRY_AFTER), ..refusal }
    }

    fn limited(why: String, retry_after: Duration) -> Self {
        let refusal = Self::new(Answer::Limited, StatusCode::TOO_MANY_REQUESTS, why);
        Self { retry_after: Some(retry_after), ..refusal }
    }
}

impl From<Denied> for Refusal {
    fn from(denied: Denied) -> Self {
        match denied {
            Denied::Unknown(why) => Self::new(Answer::Unauthorized, StatusCode::UNAUTHORIZED, why),
            Denied::Away(why) => Self::unavailable(why),
        }
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let mut response = (self.status, self.why).into_response();
        if let Some(wait) = self.retry_after {
            let seconds = wait.as_secs_f64().ceil().max(1.0) as u64;
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}

/// A report that is answered with a directive.
#[derive(Debug)]
struct Taken {
    answer: Answer,
    directive: Directive,
    /// Checkpoints that the record has forgotten.
    superfluous: Vec<String>,
}

impl Taken {
    fn new(answer: Answer, directive: Directive) -> Self {
        Self { answer, directive, superfluous: vec![] }
    }

    fn fenced() -> Self {
        Self::new(Answer::Fenced, Directive::Fenced)
    }
}

/// What a caller's pod may do. A caller without either is refused.
#[derive(Debug)]
enum Standing {
    /// It reports for the object of this UID.
    Live { owner: String, index: u32 },
    /// Its attempt was replaced, its object was deleted, or the pod itself was: it is fenced.
    Over,
}

async fn report(
    State(door): State<Arc<Door>>,
    Path((namespace, name)): Path<(String, String)>,
    headers: HeaderMap,
    body: Body,
) -> Result<(HeaderMap, Json<Directive>), Refusal> {
    let start = Instant::now();
    let key = Key::new(&namespace, &name);
    let taken = door.take(&key, &headers, body, start).await;
    door.count(taken.as_ref().map_or_else(|refusal| refusal.answer, |taken| taken.answer));
    if !matches!(taken, Ok(Taken { directive: Directive::Wait, .. })) {
        door.world.metrics.report_seconds.observe(start.elapsed().as_secs_f64());
    }
    let Taken { directive, superfluous, .. } = taken?;
    let mut headers = HeaderMap::new();
    if let (false, Ok(names)) = (superfluous.is_empty(), superfluous.join(",").parse()) {
        headers.insert(HEADER_SUPERFLUOUS, names);
    }
    Ok((headers, Json(directive)))
}

impl Door {
    /// The report in a request, and who sends it. `is_known`: whether the path's object is known.
    async fn hear(
        &self,
        key: &Key,
        is_known: bool,
        headers: &HeaderMap,
        body: Body,
    ) -> Result<(Caller, Report), Refusal> {
        let token = headers
            .get(header::AUTHORIZATION)
            .and_then(|it| it.to_str().ok())
            .and_then(|it| it.strip_prefix("Bearer "))
            .unwrap_or_default();
        // Nothing is read of, or looked up for, somebody unknown or somebody who asks too much.
        let share = if is_known { &*key.namespace } else { STRANGERS };
        let caller = self.callers.identify(token, share).await?;
        if !self.is_within_budget(&caller) {
            let text = format!("pod {} sends more than {PER_SECOND} reports a second", caller.pod);
            return Err(Refusal::limited(text, RETRY_AFTER));
        }
        let report = self.read(body).await?;
        Ok((caller, report))
    }

    /// Takes one report of a trainer.
    async fn take(
        self: &Arc<Self>,
        key: &Key,
        headers: &HeaderMap,
        body: Body,
        start: Instant,
    ) -> Result<Taken, Refusal> {
        let is_known = self.world.trials.get(key).is_some();
        let (caller, report) = self.hear(key, is_known, headers, body).await?;
        match self.check(&caller, key, &report).await? {
            Standing::Live { owner, .. } => self.take_live(key, &owner, &report, start).await,
            Standing::Over => Ok(Taken::fenced()),
        }
    }

    /// Checks that the caller is rank 0's pod of the live attempt, and that the report is too.
    async fn check(
        &self,
        caller: &Caller,
        key: &Key,
        report: &Report,
    ) -> Result<Standing, Refusal> {
        let not_of = || Refusal::forbidden(format!("pod {} is not of trial {key}", caller.pod));
        let names = names::trial_pod(&caller.pod.name, &key.name);
        let names = names.filter(|_| caller.pod.namespace == key.namespace);
        let (attempt, index) = names.ok_or_else(not_of)?;
        if index != 0 {
            return Err(Refusal::forbidden(format!("pod {} is not rank 0's", caller.pod)));
        }
        let Some(owner) = self.owner(caller, (attempt, index)).await? else {
            return Ok(Standing::Over);
        };
        let owner = owner.ok_or_else(not_of)?;
        // The same answer for a deleted trial and for another of its name: its existence is private.
        let Some(trial) = record::owned(&self.world, key, &owner).await? else {
            return Ok(Standing::Over);
        };
        if attempt == report.attempt {
            return Ok(Standing::Live { owner, index });
        }
        // The cached record may be older than the pod's attempt.
        let is_over = |it: &_| directive(it, attempt, Wanted::Run) == Directive::Fenced;
        if is_over(&trial.record) {
            let trial = record::read_owned(&self.world, key, &owner).await?;
            if trial.is_none_or(|trial| is_over(&trial.record)) {
                return Ok(Standing::Over);
            }
        }
        Err(Refusal::forbidden(format!(
            "pod {} is of attempt {attempt}, the report of attempt {}",
            caller.pod, report.attempt
        )))
    }

    /// The UID of the owner of the caller's pod: the outer `None` if the pod is gone, the inner one if
    /// the pod is not what its name says.
    async fn owner(
        &self,
        caller: &Caller,
        (attempt, index): (u32, u32),
    ) -> Result<Option<Option<String>>, Refusal> {
        let pod = self.callers.pod(&self.world, caller).await;
        let pod = pod.map_err(|error| Denied::Away(error.to_string()))?;
        Ok(pod.map(|pod| {
            let is_named = (pod.seen.attempt, pod.seen.index) == (attempt, index);
            (is_named && !pod.owner.is_empty()).then(|| pod.owner.clone())
        }))
    }

    /// Waits until the namespace's budget allows a status write; returns whether it waited.
    async fn wait_to_write(&self, key: &Key, decides: bool) -> Result<bool, Refusal> {
        let Err(slowed) = self.writes.take(&key.namespace, decides) else { return Ok(false) };
        let (namespace, rate) = (&key.namespace, self.writes.per_second());
        if slowed.warns {
            tracing::warn!(
                %namespace,
                writes_per_second = rate,
                "reports of this namespace need more status writes than they may cause: they are slowed down"
            );
        }
        self.world.metrics.reports_slowed.inc();
        if slowed.is_refused {
            let why = format!(
                "the report is not recorded yet: reports of namespace {namespace} need more than {rate} \
                 status writes a second; it is taken later"
            );
            return Err(Refusal::limited(why, slowed.wait));
        }
        tokio::time::sleep(slowed.wait).await;
        Ok(true)
    }

    /// Records a report and answers it, or waits for an answer that is worth more than `Wait`.
    async fn take_live(
        self: &Arc<Self>,
        key: &Key,
        owner: &str,
        report: &Report,
        start: Instant,
    ) -> Result<Taken, Refusal> {
        let mut changes = self.world.trial_changes.subscribe();
        let mut taken = record::record(self, key, owner, report).await?;
        while taken.directive == Directive::Wait {
            let Some(rest) = WAIT_MAX.checked_sub(start.elapsed()) else { break };
            match tokio::time::timeout(rest, changes.recv()).await {
                Ok(Ok(changed)) if changed != *key => continue,
                // Changes that were missed may have been of this trial.
                Ok(Ok(_) | Err(tokio::sync::broadcast::error::RecvError::Lagged(_))) => {}
                Ok(Err(_)) | Err(_) => break,
            }
            taken.directive = record::answer(&self.world, key, owner, report.attempt).await;
        }
        Ok(taken)
    }
}

//! Report server: receives reports from trainers and replies with directives.
//!
//! The server listens only on the loopback interface. Each attempt has a separate random token in
//! a file that only the user can read. Reports other than plain progress are durable before the
//! reply. Only the token of a known attempt gets a directive; after the attempt has ended, the
//! directive is `fenced`.

use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::extract::rejection::JsonRejection;
use axum::extract::{DefaultBodyLimit, Path, State as Shared};
use axum::http::{HeaderMap, StatusCode, header};
use axum::routing::{get, post};
use axum::{Json, Router};
use stoker_api::contract::{Directive, Report};
use tokio::net::TcpListener;
use tokio::sync::Notify;

use super::state::State;
use crate::failure::Failure;

/// Maximum size of a report, far above the size of real reports.
const REPORT_BYTES_MAX: usize = 1 << 20;

/// State shared by the report server and the runner's loop.
#[derive(Clone, Debug)]
pub(crate) struct SharedState {
    state: Arc<Mutex<State>>,
    changed: Arc<Notify>,
}

impl SharedState {
    /// Shares `state`.
    pub(crate) fn new(state: State) -> Self {
        Self { state: Arc::new(Mutex::new(state)), changed: Arc::new(Notify::new()) }
    }

    /// Locks the state. The guard must not be held across an await.
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until a report has changed the state.
    pub(crate) async fn changed(&self) {
        self.changed.notified().await;
    }
}

/// Starts the report server, which runs until the runtime ends. Returns its address,
/// `http://127.0.0.1:PORT`.
pub(crate) async fn start(shared: SharedState) -> Result<String, Failure> {
    let failed = |error| {
        Failure::System(format!(
            "cannot listen on 127.0.0.1 for reports of trainers: {error}; if no port is free, \
             stop the processes that use them or widen net.ipv4.ip_local_port_range"
        ))
    };
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    let router = Router::new()
        .route("/healthz", get(async || "ok"))
        .route("/v1/trials/{index}/reports", post(report))
        .layer(DefaultBodyLimit::max(REPORT_BYTES_MAX))
        .with_state(shared);
    tokio::spawn(async move {
        // Ignore the result: `serve` retries failed accepts and never returns.
        let _ = axum::serve(listener, router).await;
    });
    Ok(format!("http://{address}"))
}

/// Returns the URL for a trial's reports.
pub(crate) fn reports_url(server_url: &str, trial: u32) -> String {
    format!("{server_url}/v1/trials/{trial}/reports")
}

async fn report(
    Shared(shared): Shared<SharedState>,
    Path(index): Path<u32>,
    headers: HeaderMap,
    body: Result<Json<Report>, JsonRejection>,
) -> Result<Json<Directive>, (StatusCode, String)> {
    let token = headers
        .get(header::AUTHORIZATION)
        .and_then(|value| value.to_str().ok())
        .and_then(|value| value.strip_prefix("Bearer "))
        .unwrap_or_default();
    let mut state = shared.state();
    let Some(attempt) = state.attempt_of(index, token) else {
        let text = format!("authentication failed: no attempt of trial {index} has this token");
        return Err((StatusCode::UNAUTHORIZED, text));
    };
    // Check this before parsing: a trainer treats every other reply as an outage.
    if state.is_over(index, attempt) {
        return Ok(Json(Directive::Fenced));
    }
    let Json(report) = body.map_err(|error| (error.status(), error.body_text()))?;
    if report.attempt != attempt {
        let text = format!(
            "report refused: the token is for attempt {attempt}, the report for attempt {}",
            report.attempt
        );
        return Err((StatusCode::FORBIDDEN, text));
    }
    let reply = state.report(index, &report);
    drop(state);
    shared.changed.notify_one();
    reply.map(Json).map_err(|error| match error {
        Failure::Input(why) => (StatusCode::UNPROCESSABLE_ENTITY, why),
        error => (StatusCode::SERVICE_UNAVAILABLE, error.to_string()),
    })
}

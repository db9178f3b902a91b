//! The door: where trainers report, and are told what to do.
//!
//! It listens on the loopback interface alone. Each attempt has a token of its own, which nobody
//! else can guess or read. A report is on the disk before it is answered. Only a token that was given
//! to an attempt gets a directive; the token of an attempt that is over gets `fenced`.

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

/// The largest report read; one holds some metrics, and is far smaller.
const REPORT_BYTES_MAX: usize = 1 << 20;

/// What the door and the runner's loop share.
#[derive(Clone, Debug)]
pub(crate) struct Desk {
    state: Arc<Mutex<State>>,
    changed: Arc<Notify>,
}

impl Desk {
    /// A desk with this state.
    pub(crate) fn new(state: State) -> Self {
        Self { state: Arc::new(Mutex::new(state)), changed: Arc::new(Notify::new()) }
    }

    /// The state. Held for a moment, never over an await.
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until a report has changed the state.
    pub(crate) async fn changed(&self) {
        self.changed.notified().await;
    }
}

/// Opens the door and serves it until the runtime ends; returns its address,
/// `http://127.0.0.1:PORT`.
pub(crate) async fn open(desk: Desk) -> Result<String, Failure> {
    let failed = |error| {
        Failure::System(format!(
            "cannot listen on 127.0.0.1, where trainers report: {error}; no port of this machine \
             may be free: end what holds them, or widen net.ipv4.ip_local_port_range"
        ))
    };
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    let router = Router::new()
        .route("/healthz", get(async || "ok"))
        .route("/v1/trials/{index}/reports", post(report))
        .layer(DefaultBodyLimit::max(REPORT_BYTES_MAX))
        .with_state(desk);
    tokio::spawn(async move {
        // Accepting is tried again inside, so this ends only with the runtime.
        let _ = axum::serve(listener, router).await;
    });
    Ok(format!("http://{address}"))
}

/// The path that a trial's reports are posted to.
pub(crate) fn reports_url(door: &str, trial: u32) -> String {
    format!("{door}/v1/trials/{trial}/reports")
}

async fn report(
    Shared(desk): Shared<Desk>,
    Path(index): Path<u32>,
    headers: HeaderMap,
    body: Result<Json<Report>, JsonRejection>,
) -> Result<Json<Directive>, (StatusCode, String)> {
    let token = headers
        .get(header::AUTHORIZATION)
        .and_then(|it| it.to_str().ok())
        .and_then(|it| it.strip_prefix("Bearer "))
        .unwrap_or_default();
    let mut state = desk.state();
    let Some(attempt) = state.attempt_of(index, token) else {
        let text = format!("the token is not that of an attempt of trial {index}");
        return Err((StatusCode::UNAUTHORIZED, text));
    };
    // A trainer takes every other answer than this one for an outage.
    if state.is_over(index, attempt) {
        return Ok(Json(Directive::Fenced));
    }
    let Json(report) = body.map_err(|error| (error.status(), error.body_text()))?;
    if report.attempt != attempt {
        let text =
            format!("the token is attempt {attempt}'s, the report attempt {}'s", report.attempt);
        return Err((StatusCode::FORBIDDEN, text));
    }
    let answer = state.report(index, &report);
    drop(state);
    desk.changed.notify_one();
    answer.map(Json).map_err(|error| match error {
        Failure::Input(why) => (StatusCode::UNPROCESSABLE_ENTITY, why),
        error => (StatusCode::SERVICE_UNAVAILABLE, error.to_string()),
    })
}

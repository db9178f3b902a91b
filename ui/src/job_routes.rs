//! Routes of batch inference jobs.

use std::sync::Arc;

use axum::extract::{Extension, Path};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::Value;
use stoker_api::names::MANIFEST;

use crate::build::job::Output;
use crate::build::{job, jobs};
use crate::job::Job;
use crate::respond::{csv_of, html, json};
use crate::server::{App, missing};
use crate::viewer::Viewer;

/// List of jobs.
pub(crate) async fn list(Extension(viewer): App) -> Response {
    html(&jobs::page(&viewer.site, &viewer.visible))
}

pub(crate) async fn list_json(Extension(viewer): App) -> Response {
    json(&Value::Array(jobs::export(&viewer.visible)))
}

pub(crate) async fn list_csv(Extension(viewer): App) -> Response {
    csv_of(&jobs::export(&viewer.visible))
}

async fn find(viewer: &Viewer, namespace: &str, name: &str) -> Result<Arc<Job>, Box<Response>> {
    viewer.job(namespace, name).await.ok_or_else(|| {
        let text = format!("`{name}` is not a job of namespace `{namespace}`.");
        missing(&viewer.site, "Job", text, viewer.visible.jobs_error_in(namespace))
    })
}

/// Page of a job.
pub(crate) async fn page(
    Extension(viewer): App,
    Path((namespace, name)): Path<(String, String)>,
) -> Response {
    let found = match find(&viewer, &namespace, &name).await {
        Ok(found) => found,
        Err(response) => return *response,
    };
    let manifest = found.manifest().await;
    let rejected = match &manifest {
        Ok(manifest) => found.rejected(manifest).await,
        Err(_) => Ok(Vec::new()),
    };
    html(&job::page(&viewer.site, &found, &Output { manifest, rejected }))
}

/// Manifest of a job's output, with all parts.
pub(crate) async fn manifest(
    Extension(viewer): App,
    Path((namespace, name)): Path<(String, String)>,
) -> Response {
    let found = match find(&viewer, &namespace, &name).await {
        Ok(found) => found,
        Err(response) => return *response,
    };
    match found.manifest().await {
        Ok(manifest) => {
            let name = format!("attachment; filename=\"{}-{MANIFEST}\"", found.id());
            ([(header::CONTENT_DISPOSITION, name)], json(&manifest)).into_response()
        }
        Err(error) => (StatusCode::NOT_FOUND, format!("{error}\n")).into_response(),
    }
}

//! Routes of actions: a question, and the form that carries the action out.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{Extension, Path, RawQuery};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Redirect, Response};

use crate::actions::{Action, ActionAccess, Target};
use crate::build::{actions, cluster};
use crate::respond::{html, message};
use crate::server::{App, find, values};
use crate::site::Site;
use crate::store::{Run, Standing};
use crate::viewer::Viewer;

/// Slots of the cluster, or of this machine.
pub(crate) async fn slots(Extension(viewer): App) -> Response {
    let objects = match &viewer.site.actions {
        Some(access) => access.objects().await,
        None => None,
    };
    html(&cluster::page(&viewer.site, &viewer.visible, objects.as_deref()))
}

/// Why an action is refused.
pub(crate) type Refusal = (StatusCode, String);

/// Returns the access to actions, or the response that says why the page is read-only.
pub(crate) fn access(viewer: &Viewer) -> Result<&Arc<ActionAccess>, Box<Response>> {
    let text = match &viewer.site.actions {
        Some(access) if access.allows_actions() => return Ok(access),
        Some(_) if viewer.session.is_some() => {
            "An administrator allows actions with the chart's value ui.allowActions."
        }
        _ => "Start it again with --allow-actions to act on experiments.",
    };
    let status = StatusCode::FORBIDDEN;
    Err(Box::new(message(&viewer.site, status, "This page is read-only", text)))
}

/// Returns the question of an action, with the reason why it was refused.
fn question(viewer: &Viewer, run: &Run, action: Action, refusal: Option<Refusal>) -> Response {
    let (status, error) = match refusal {
        Some((status, error)) => (status, Some(error)),
        None => (StatusCode::OK, None),
    };
    (status, html(&actions::confirm(&viewer.site, run, action, error))).into_response()
}

/// Checks that the token of a form is that of this server. Another site can send a form with the
/// browser of the viewer, but cannot read the token.
pub(crate) fn check_token(
    viewer: &Viewer,
    access: &ActionAccess,
    token: &str,
) -> Result<(), Box<Response>> {
    if access.is_token(token) {
        return Ok(());
    }
    let text = "The form is not one of this page, or the page was started again. Go back, load \
                the page again, and repeat the action.";
    Err(Box::new(message(&viewer.site, StatusCode::FORBIDDEN, "Form not accepted", text)))
}

/// Returns the response to a URL that names no action.
pub(crate) fn no_action(site: &Site) -> Box<Response> {
    let text = "The URL does not name an action on an experiment.";
    Box::new(message(site, StatusCode::NOT_FOUND, "Page not found", text))
}

/// Checks that the viewer may carry out an action now.
pub(crate) async fn check_allowed(
    site: &Site,
    access: &ActionAccess,
    run: &Run,
    action: Action,
) -> Result<(), Refusal> {
    access.ask(&run.namespace).await;
    let (allowed, note) = actions::allowed(site, access, run);
    if allowed.iter().any(|one| one.word() == action.word()) {
        return Ok(());
    }
    // The note may name a permission that another action needs.
    let is_state = match access.permissions(&run.namespace) {
        Ok(may) if run.standing == Standing::Current => match action {
            Action::Delete => may.may_delete,
            _ => may.may_patch,
        },
        _ => note.is_empty(),
    };
    Err(match is_state {
        true => (StatusCode::CONFLICT, "The state of the experiment does not allow it.".into()),
        false => (StatusCode::FORBIDDEN, note),
    })
}

/// Carries out an action.
pub(crate) async fn carry_out(
    site: &Site,
    access: &ActionAccess,
    run: &Run,
    action: Action,
) -> Result<(), Refusal> {
    let target =
        Target { namespace: run.namespace.clone(), name: run.name.clone(), uid: run.uid.clone() };
    let acted = access.act(&target, action, site.is_cluster || run.is_running).await;
    acted.map_err(|error| match site.is_cluster {
        true => (StatusCode::BAD_GATEWAY, error),
        false => (StatusCode::CONFLICT, error),
    })
}

/// Checks that an action exists, and that the viewer may carry it out now.
async fn check(
    viewer: &Viewer,
    access: &ActionAccess,
    run: &Run,
    action: Option<Action>,
) -> Result<Action, Box<Response>> {
    let site = &viewer.site;
    let action = action.ok_or_else(|| no_action(site))?;
    let checked = check_allowed(site, access, run, action).await;
    checked.map(|()| action).map_err(|(status, text)| {
        let title = format!("{} is not possible", action.title());
        Box::new(message(site, status, &title, &text))
    })
}

/// Asks before an action.
pub(crate) async fn ask(
    Extension(viewer): App,
    Path((namespace, name, word)): Path<(String, String, String)>,
    RawQuery(query): RawQuery,
) -> Response {
    let trials = values(query.as_deref(), "trials").pop().unwrap_or_default();
    let checked = async {
        let access = access(&viewer)?;
        let run = find(&viewer, &namespace, &name).await?;
        let action = check(&viewer, access, &run, Action::of(&word, &trials)).await?;
        Ok::<_, Box<Response>>(question(&viewer, &run, action, None))
    };
    checked.await.unwrap_or_else(|response| *response)
}

/// Carries out an action that a form asks for.
pub(crate) async fn act(
    Extension(viewer): App,
    Path((namespace, name, word)): Path<(String, String, String)>,
    body: Bytes,
) -> Response {
    let form = String::from_utf8_lossy(&body).into_owned();
    acted(&viewer, (&namespace, &name), &word, &form).await.unwrap_or_else(|response| *response)
}

async fn acted(
    viewer: &Viewer,
    (namespace, name): (&str, &str),
    word: &str,
    form: &str,
) -> Result<Response, Box<Response>> {
    let field = |name: &str| values(Some(form), name).pop().unwrap_or_default();
    let access = access(viewer)?;
    check_token(viewer, access, &field("token"))?;
    let run = find(viewer, namespace, name).await?;
    let action = check(viewer, access, &run, Action::of(word, &field("trials"))).await?;
    if field("uid") != run.uid {
        let text = "Another experiment has this name now. Nothing was changed.";
        let status = StatusCode::CONFLICT;
        return Err(Box::new(message(&viewer.site, status, "Experiment replaced", text)));
    }
    if action == Action::Delete && field("name") != run.name {
        let error = format!("type the name {} to confirm", run.name);
        let refusal = Some((StatusCode::UNPROCESSABLE_ENTITY, error));
        return Ok(question(viewer, &run, action, refusal));
    }
    if let Err(refusal) = carry_out(&viewer.site, access, &run, action).await {
        return Ok(question(viewer, &run, action, Some(refusal)));
    }
    let next = match action {
        Action::Delete => "/experiments".to_owned(),
        _ => run.base(),
    };
    Ok(Redirect::to(&next).into_response())
}

#[cfg(test)]
pub(crate) mod tests;

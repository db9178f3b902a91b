//! Routes of one action on several experiments: a question, and the form that carries it out.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{Extension, Path, RawQuery};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Redirect, Response};

use crate::action_routes::{Refusal, access, carry_out, check_allowed, check_token, no_action};
use crate::actions::{Action, ActionAccess};
use crate::build::bulk::{self, Choice};
use crate::respond::{html, message};
use crate::server::{App, values};
use crate::store::Run;
use crate::viewer::Viewer;

/// Maximum number of experiments of one action. Proxies limit the length of URLs.
const CHOSEN_MAX: usize = 100;

/// Returns the action of a URL.
fn action_of(viewer: &Viewer, word: &str) -> Result<Action, Box<Response>> {
    let action = Action::of(word, "").filter(|action| bulk::ACTIONS.contains(action));
    action.ok_or_else(|| no_action(&viewer.site))
}

/// Returns the chosen experiments of a query or form: each `e` is `NS/ID` or `NS/ID/UID`.
fn chosen(text: Option<&str>, viewer: &Viewer) -> Result<Vec<String>, Box<Response>> {
    let mut chosen = values(text, "e");
    chosen.sort();
    chosen.dedup();
    if chosen.is_empty() {
        let text = "Select experiments in the list, then press the button of an action.";
        let status = StatusCode::UNPROCESSABLE_ENTITY;
        return Err(Box::new(message(&viewer.site, status, "Nothing is selected", text)));
    }
    if chosen.len() > CHOSEN_MAX {
        let text = format!(
            "{} experiments are selected. Select at most {CHOSEN_MAX} at a time.",
            chosen.len()
        );
        let status = StatusCode::UNPROCESSABLE_ENTITY;
        return Err(Box::new(message(&viewer.site, status, "Too many are selected", &text)));
    }
    Ok(chosen)
}

/// Returns a chosen experiment, if the viewer may carry out the action on it now.
async fn find(
    viewer: &Viewer,
    access: &ActionAccess,
    choice: &str,
    needs_uid: bool,
    action: Action,
) -> Result<Arc<Run>, Refusal> {
    let mut parts = choice.splitn(3, '/');
    let (namespace, id) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    let run = viewer.run(namespace, id).await.ok_or_else(|| {
        (StatusCode::NOT_FOUND, "The experiment does not exist, or is deleted already.".to_owned())
    })?;
    if parts.next().map_or(needs_uid, |uid| uid != run.uid) {
        let text = "Another experiment has this name now.";
        return Err((StatusCode::CONFLICT, text.to_owned()));
    }
    check_allowed(&viewer.site, access, &run, action).await?;
    Ok(run)
}

/// Finds all chosen experiments.
async fn find_all(
    viewer: &Viewer,
    access: &ActionAccess,
    chosen: &[String],
    action: Action,
) -> Vec<Choice> {
    let mut choices = Vec::new();
    for choice in chosen {
        let run = find(viewer, access, choice, false, action).await;
        choices.push(Choice { text: choice.clone(), run: run.map_err(|(_, text)| text) });
    }
    choices
}

/// Asks before an action.
pub(crate) async fn ask(
    Extension(viewer): App,
    Path(word): Path<String>,
    RawQuery(query): RawQuery,
) -> Response {
    let asked = async {
        let access = access(&viewer)?;
        let action = action_of(&viewer, &word)?;
        let chosen = chosen(query.as_deref(), &viewer)?;
        let choices = find_all(&viewer, access, &chosen, action).await;
        Ok::<_, Box<Response>>(html(&bulk::question(&viewer.site, action, &choices, false)))
    };
    asked.await.unwrap_or_else(|response| *response)
}

/// Carries out an action that a form asks for.
pub(crate) async fn act(Extension(viewer): App, Path(word): Path<String>, body: Bytes) -> Response {
    let form = String::from_utf8_lossy(&body).into_owned();
    // All of it is done, also if the browser does not wait for the response.
    let done = tokio::spawn(async move {
        acted(&viewer, &word, &form).await.unwrap_or_else(|response| *response)
    });
    done.await.unwrap_or_else(|error| {
        let text = format!("cannot act on experiments: {error}\n");
        (StatusCode::INTERNAL_SERVER_ERROR, text).into_response()
    })
}

async fn acted(viewer: &Viewer, word: &str, form: &str) -> Result<Response, Box<Response>> {
    let field = |name: &str| values(Some(form), name).pop().unwrap_or_default();
    let access = access(viewer)?;
    check_token(viewer, access, &field("token"))?;
    let action = action_of(viewer, word)?;
    let chosen = chosen(Some(form), viewer)?;
    if action == Action::Delete && field("confirmation") != bulk::confirmation(chosen.len()) {
        let choices = find_all(viewer, access, &chosen, action).await;
        let page = bulk::question(&viewer.site, action, &choices, true);
        return Ok((StatusCode::UNPROCESSABLE_ENTITY, html(&page)).into_response());
    }
    let mut failed = Vec::new();
    let mut status = None;
    for choice in &chosen {
        let done = async {
            let run = find(viewer, access, choice, true, action).await?;
            carry_out(&viewer.site, access, &run, action).await
        };
        if let Err((code, text)) = done.await {
            status.get_or_insert(code);
            failed.push(Choice { text: choice.clone(), run: Err(text) });
        }
    }
    Ok(match status {
        None => Redirect::to("/experiments").into_response(),
        Some(status) => {
            let page = bulk::outcome(&viewer.site, action, &failed, chosen.len());
            (status, html(&page)).into_response()
        }
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::action_routes::tests::{ALL, Fake, Page, block_on};
    use crate::fixture::{self, UID};

    const OTHER: &str = "feedc0defeedc0defeedc0defeedc0de";

    /// A page with a running and a completed experiment.
    fn page(refusal: Option<&str>) -> Page {
        let fake = Fake { may: ALL, refusal: refusal.map(str::to_owned), ..Fake::default() };
        let page = Page::new(fake, true, json!({"phase": "Running"}), &[]);
        let mut other = fixture::run(json!({}), json!({"phase": "Completed"}), &[]);
        (other.name, other.uid) = ("other".to_owned(), OTHER.to_owned());
        page.store.replace(other);
        page
    }

    fn running() -> String {
        format!("ml/iris-{}/{UID}", &UID[..8])
    }

    fn completed() -> String {
        format!("ml/other-{}/{OTHER}", &OTHER[..8])
    }

    /// Sends a form. Returns status, body and the actions that were carried out.
    fn post(page: &Page, word: &str, form: &str) -> (u16, String, Vec<String>) {
        let response = block_on(acted(&page.viewer, word, form)).unwrap_or_else(|other| *other);
        let status = response.status().as_u16();
        let body = block_on(axum::body::to_bytes(response.into_body(), 1 << 20)).unwrap();
        let acted = page.fake.acted.lock().unwrap();
        let name = |(target, action): &(crate::actions::Target, Action)| {
            format!("{} {}", action.word(), target.uid)
        };
        (status, String::from_utf8(body.to_vec()).unwrap(), acted.iter().map(name).collect())
    }

    fn form(more: &str) -> String {
        format!("token=secret&e={}&e={}{more}", running(), completed())
    }

    #[test]
    fn several_experiments_are_deleted_after_their_number() {
        let mut second = page(None);
        second.viewer.site.is_cluster = true;
        let (status, body, acted) = post(&second, "delete", &form("&confirmation=delete"));
        assert_eq!((status, acted.len()), (422, 0), "{body}");
        assert!(body.contains("type delete 2 to confirm"), "{body}");
        let (status, _, acted) = post(&second, "delete", &form("&confirmation=delete+2"));
        assert_eq!((status, acted.len()), (303, 2));
    }

    #[test]
    fn refused_experiments_are_named_and_others_are_paused() {
        let page = page(None);
        let (status, body, acted) = post(&page, "pause", &form(""));
        assert_eq!((status, acted), (409, vec![format!("pause {UID}")]));
        assert!(body.contains("Pause: 1 of 2 experiments"), "{body}");
        assert!(body.contains("The state of the experiment does not allow it"), "{body}");
    }

    #[test]
    fn refusals_of_the_server_are_shown_for_each() {
        let page = page(Some("it <stays>"));
        let (status, body, _) = post(&page, "delete", &form("&confirmation=delete+2"));
        assert_eq!(status, 502);
        assert_eq!(body.matches("it &#60;stays&#62;").count(), 2, "{body}");
    }

    #[test]
    fn nothing_is_done_without_a_token_or_a_selection() {
        let page = page(None);
        let check = |word: &str, form: &str, expected: u16| {
            let (status, _, acted) = post(&page, word, form);
            assert_eq!((status, acted), (expected, Vec::new()), "{word} {form}");
        };
        check("kill", &form("").replace("secret", "other"), 403);
        check("kill", "token=secret", 422);
        check("continue", &form(""), 404);
        check("explode", &form(""), 404);
        check("kill", "token=secret&e=ml/iris", 409);
        check("kill", "token=secret&e=ml/rose", 404);
        check("kill", "token=secret&e=iris", 404);
        check("kill", &format!("token=secret&e=ml/iris-{}/{OTHER}", &UID[..8]), 409);
    }

    #[test]
    fn too_many_experiments_are_refused() {
        let page = page(None);
        let many: String = (0..=CHOSEN_MAX).map(|at| format!("&e=ml/run-{at}/uid")).collect();
        let (status, body, _) = post(&page, "kill", &format!("token=secret{many}"));
        assert_eq!(status, 422);
        assert!(body.contains("101 experiments are selected. Select at most 100"), "{body}");
    }

    #[test]
    fn question_offers_only_what_is_possible() {
        let page = page(None);
        let query = format!("e={}&e={}", running(), completed());
        let response = block_on(ask(
            Extension(Arc::new(page.viewer)),
            Path("cancel".to_owned()),
            RawQuery(Some(query)),
        ));
        let body = block_on(axum::body::to_bytes(response.into_body(), 1 << 20)).unwrap();
        let body = String::from_utf8(body.to_vec()).unwrap();
        assert!(body.contains("Cancel 1 experiment?"), "{body}");
        let field = |choice: &str| format!("name=\"e\" value=\"{choice}\"");
        assert!(body.contains(&field(&running())), "{body}");
        assert!(!body.contains(&field(&completed())), "{body}");
    }
}

//! Routes of actions: a question, and the form that carries the action out.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{Path, RawQuery, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Redirect, Response};

use crate::actions::{Action, ClusterAccess, Target};
use crate::build::{actions, cluster};
use crate::respond::{html, message};
use crate::server::{App, Shared, find, values};
use crate::store::Run;

/// Slots of the cluster, or of this machine.
pub(crate) async fn slots(State(shared): App) -> Response {
    let objects = match &shared.site.cluster {
        Some(access) => Some(access.objects().await),
        None => None,
    };
    html(&cluster::page(&shared.site, &shared.store, objects.as_deref()))
}

/// Returns the access to the cluster, or the response that says why the page is read-only.
fn access(shared: &Shared) -> Result<&Arc<ClusterAccess>, Box<Response>> {
    let text = match &shared.site.cluster {
        Some(access) if access.allows_actions() => return Ok(access),
        Some(_) => "Start it with `stoker ui --allow-actions` to act on the cluster.",
        None => "Local experiments are controlled from the terminal that runs them.",
    };
    let status = StatusCode::FORBIDDEN;
    Err(Box::new(message(&shared.site, status, "This page is read-only", text)))
}

/// Returns the question of an action, with the reason why it was refused.
fn question(
    shared: &Shared,
    run: &Run,
    action: Action,
    refusal: Option<(StatusCode, String)>,
) -> Response {
    let (status, error) = match refusal {
        Some((status, error)) => (status, Some(error)),
        None => (StatusCode::OK, None),
    };
    (status, html(&actions::confirm(&shared.site, run, action, error))).into_response()
}

/// Checks that an action exists, and that the viewer may carry it out now.
async fn check(
    shared: &Shared,
    access: &ClusterAccess,
    run: &Run,
    action: Option<Action>,
) -> Result<Action, Box<Response>> {
    let site = &shared.site;
    let Some(action) = action else {
        let text = "The URL does not name an action on an experiment.";
        return Err(Box::new(message(site, StatusCode::NOT_FOUND, "Page not found", text)));
    };
    access.ask(&run.namespace).await;
    let (allowed, note) = actions::allowed(access, run);
    if allowed.iter().any(|one| one.word() == action.word()) {
        return Ok(action);
    }
    let (status, text) = match note.is_empty() {
        true => (StatusCode::CONFLICT, "It has no effect in the state of the experiment.".into()),
        false => (StatusCode::FORBIDDEN, note),
    };
    let title = format!("{} is not possible", action.title());
    Err(Box::new(message(site, status, &title, &text)))
}

/// Asks before an action.
pub(crate) async fn ask(
    State(shared): App,
    Path((namespace, name, word)): Path<(String, String, String)>,
    RawQuery(query): RawQuery,
) -> Response {
    let trials = values(query.as_deref(), "trials").pop().unwrap_or_default();
    let checked = async {
        let access = access(&shared)?;
        let run = find(&shared, &namespace, &name)?;
        let action = check(&shared, access, &run, Action::of(&word, &trials)).await?;
        Ok::<_, Box<Response>>(question(&shared, &run, action, None))
    };
    checked.await.unwrap_or_else(|response| *response)
}

/// Carries out an action that a form asks for.
pub(crate) async fn act(
    State(shared): App,
    Path((namespace, name, word)): Path<(String, String, String)>,
    body: Bytes,
) -> Response {
    let form = String::from_utf8_lossy(&body).into_owned();
    acted(&shared, (&namespace, &name), &word, &form).await.unwrap_or_else(|response| *response)
}

async fn acted(
    shared: &Shared,
    (namespace, name): (&str, &str),
    word: &str,
    form: &str,
) -> Result<Response, Box<Response>> {
    let field = |name: &str| values(Some(form), name).pop().unwrap_or_default();
    let access = access(shared)?;
    // Another site can send a form with the browser of the viewer, but cannot read the token.
    if !access.is_token(&field("token")) {
        let text = "The form is not one of this page, or the page was started again. Go back, \
                    load the page again, and repeat the action.";
        let status = StatusCode::FORBIDDEN;
        return Err(Box::new(message(&shared.site, status, "Form not accepted", text)));
    }
    let run = find(shared, namespace, name)?;
    let action = check(shared, access, &run, Action::of(word, &field("trials"))).await?;
    if field("uid") != run.uid {
        let text = "Another experiment has this name now. Nothing was changed.";
        let status = StatusCode::CONFLICT;
        return Err(Box::new(message(&shared.site, status, "Experiment replaced", text)));
    }
    if action == Action::Delete && field("name") != run.name {
        let error = format!("type the name {} to confirm", run.name);
        let refusal = Some((StatusCode::UNPROCESSABLE_ENTITY, error));
        return Ok(question(shared, &run, action, refusal));
    }
    let target =
        Target { namespace: run.namespace.clone(), name: run.name.clone(), uid: run.uid.clone() };
    if let Err(error) = access.act(&target, action).await {
        let refusal = Some((StatusCode::BAD_GATEWAY, error));
        return Ok(question(shared, &run, action, refusal));
    }
    let next = match action {
        Action::Delete => "/experiments".to_owned(),
        _ => run.base(),
    };
    Ok(Redirect::to(&next).into_response())
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use futures::FutureExt as _;
    use futures::future::BoxFuture;
    use serde_json::{Value, json};
    use stoker_api::experiment::ReopenedTrials;

    use super::*;
    use crate::actions::{ClusterApi, ClusterObjects, Permissions};
    use crate::build::actions::controls;
    use crate::fixture::{self, UID};
    use crate::rows::MetricsCache;
    use crate::site::Site;
    use crate::store::Store;

    /// Records actions, and how often permissions were asked.
    #[derive(Debug, Default)]
    struct Fake {
        acted: Mutex<Vec<(Target, Action)>>,
        asked: Mutex<usize>,
        may: Permissions,
        refusal: Option<String>,
    }

    impl ClusterApi for Fake {
        fn act<'a>(
            &'a self,
            target: &'a Target,
            action: Action,
        ) -> BoxFuture<'a, Result<String, String>> {
            self.acted.lock().unwrap().push((target.clone(), action));
            let answer = self.refusal.clone().map_or_else(|| Ok("done".to_owned()), Err);
            async move { answer }.boxed()
        }

        fn permissions<'a>(&'a self, _: &'a str) -> BoxFuture<'a, Result<Permissions, String>> {
            *self.asked.lock().unwrap() += 1;
            async move { Ok(self.may) }.boxed()
        }

        fn objects(&self) -> BoxFuture<'_, ClusterObjects> {
            let (nodes, pods) = (Ok(Vec::new()), Ok(Vec::new()));
            async move { ClusterObjects { nodes, pods, namespace: None } }.boxed()
        }
    }

    const ALL: Permissions = Permissions { may_patch: true, may_delete: true };

    struct Page {
        shared: Shared,
        fake: Arc<Fake>,
    }

    impl Page {
        fn new(fake: Fake, allows_actions: bool, status: Value, trials: &[Value]) -> Self {
            let fake = Arc::new(fake);
            let access = ClusterAccess::new(fake.clone(), allows_actions, "secret".to_owned());
            let cluster = Some(Arc::new(access));
            let site = Site { is_cluster: true, cluster, ..Site::default() };
            let store = Arc::new(Store::default());
            store.replace(fixture::run(json!({}), status, trials));
            Self { shared: Shared { store, site, metrics: MetricsCache::default() }, fake }
        }

        fn running(may: Permissions) -> Self {
            let fake = Fake { may, ..Fake::default() };
            Self::new(fake, true, json!({"phase": "Running"}), &[])
        }

        /// Sends a form. Returns the status and the actions that were carried out so far.
        fn post(&self, word: &str, form: &str) -> (u16, Vec<Action>) {
            let response = block_on(acted(&self.shared, ("ml", "iris"), word, form));
            let status = response.unwrap_or_else(|response| *response).status();
            let acted = self.fake.acted.lock().unwrap();
            let is_expected = |target: &Target| {
                (&*target.namespace, &*target.name, &*target.uid) == ("ml", "iris", UID)
            };
            assert!(acted.iter().all(|(target, _)| is_expected(target)), "{acted:?}");
            (status.as_u16(), acted.iter().map(|(_, action)| *action).collect())
        }

        fn buttons(&self) -> (Vec<&'static str>, String) {
            let cluster = self.shared.site.cluster.as_ref().unwrap();
            block_on(cluster.ask("ml"));
            let run = self.shared.store.run("ml", "iris").unwrap();
            let controls = controls(&self.shared.site, &run);
            (controls.buttons.iter().map(|button| button.title).collect(), controls.note)
        }
    }

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(future)
    }

    fn form(more: &str) -> String {
        format!("token=secret&uid={UID}{more}")
    }

    #[test]
    fn forms_need_the_token_of_this_server() {
        let page = Page::running(ALL);
        for token in ["", "token=", "token=wrong", "token=secre", "token=secret2", "other=secret"] {
            let sent = page.post("kill", &format!("{token}&uid={UID}"));
            assert_eq!(sent, (403, vec![]), "{token}");
        }
        assert_eq!(page.post("kill", &form("")), (303, vec![Action::Kill]));
    }

    #[test]
    fn namesakes_are_not_touched() {
        let page = Page::running(ALL);
        assert_eq!(page.post("pause", "token=secret"), (409, vec![]));
        assert_eq!(page.post("pause", "token=secret&uid=other"), (409, vec![]));
        assert_eq!(page.post("pause", &form("")), (303, vec![Action::Pause]));
    }

    #[test]
    fn deletion_needs_the_name() {
        let page = Page::running(ALL);
        assert_eq!(page.post("delete", &form("")), (422, vec![]));
        assert_eq!(page.post("delete", &form("&name=irises")), (422, vec![]));
        assert_eq!(page.post("delete", &form("&name=iris")), (303, vec![Action::Delete]));
    }

    #[test]
    fn continued_trials_are_chosen_in_the_form() {
        let fake = Fake { may: ALL, ..Fake::default() };
        let failed = json!({"phase": "Failed"});
        let page = Page::new(fake, true, json!({"phase": "Completed"}), &[failed]);
        let expected = vec![Action::Continue(ReopenedTrials::Failed)];
        assert_eq!(page.post("continue", &form("&trials=failed")), (303, expected));
        // An ended experiment cannot be paused.
        assert_eq!(page.post("pause", &form("")).0, 409);
        assert_eq!(page.post("explode", &form("")).0, 404);
    }

    #[test]
    fn page_is_read_only_without_the_option() {
        let fake = Fake { may: ALL, ..Fake::default() };
        let page = Page::new(fake, false, json!({"phase": "Running"}), &[]);
        assert_eq!(page.post("pause", &form("")), (403, vec![]));
        assert!(access(&page.shared).is_err());
        assert!(page.buttons().0.is_empty());
        // Nothing is asked either.
        assert_eq!(*page.fake.asked.lock().unwrap(), 0);
    }

    #[test]
    fn missing_permissions_remove_buttons() {
        let check = |may_patch: bool, may_delete: bool, buttons: &[&str], note: &str| {
            let page = Page::running(Permissions { may_patch, may_delete });
            assert_eq!(page.buttons(), (buttons.to_vec(), note.to_owned()));
            page.buttons();
            assert_eq!(*page.fake.asked.lock().unwrap(), 1, "permissions are kept for a minute");
            assert_eq!(page.post("pause", &form("")).0, if may_patch { 303 } else { 403 });
        };
        check(true, true, &["Pause", "Cancel", "Kill", "Delete"], "");
        let note = "you may not delete experiments in namespace ml";
        check(true, false, &["Pause", "Cancel", "Kill"], note);
        let note = "read-only: you may not patch experiments in namespace ml";
        check(false, true, &["Delete"], note);
        let note = "read-only: you may not patch or delete experiments in namespace ml";
        check(false, false, &[], note);
    }

    #[test]
    fn refusals_show_the_words_of_the_server() {
        let refusal = Some("it stays <killed>".to_owned());
        let fake = Fake { may: ALL, refusal, ..Fake::default() };
        let page = Page::new(fake, true, json!({"phase": "Running"}), &[]);
        let response = block_on(acted(&page.shared, ("ml", "iris"), "cancel", &form("")));
        let body = axum::body::to_bytes(response.unwrap().into_body(), 1 << 20);
        let body = String::from_utf8(block_on(body).unwrap().to_vec()).unwrap();
        assert!(body.contains("it stays &#60;killed&#62;"), "{body}");
        let asked = page.shared.site.cluster.as_ref().unwrap().asked(UID);
        assert!(asked.is_none(), "{asked:?}");
    }

    #[test]
    fn accepted_actions_are_shown_until_confirmed() {
        let page = Page::running(ALL);
        page.post("pause", &form(""));
        let asked = |page: &Page| {
            let run = page.shared.store.run("ml", "iris").unwrap();
            controls(&page.shared.site, &run).asked.map(|notice| notice.title)
        };
        assert!(asked(&page).unwrap().starts_with("Pause asked at "));
        page.shared.store.replace(fixture::run(json!({}), json!({"phase": "Paused"}), &[]));
        assert_eq!(asked(&page), None);
    }
}

//! Tests of actions on one experiment, and a page for tests.

use std::sync::Mutex;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use serde_json::{Value, json};
use stoker_api::experiment::ReopenedTrials;

use super::*;
use crate::actions::{ActionBackend, ClusterObjects, Permissions};
use crate::build::actions::controls;
use crate::fixture::{self, UID};
use crate::store::{Standing, Store};
use crate::visible::Visible;

/// Records actions, and how often permissions were asked.
#[derive(Debug, Default)]
pub(crate) struct Fake {
    pub(crate) acted: Mutex<Vec<(Target, Action)>>,
    pub(crate) asked: Mutex<usize>,
    pub(crate) may: Permissions,
    pub(crate) refusal: Option<String>,
}

impl ActionBackend for Fake {
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

    fn objects(&self) -> BoxFuture<'_, Option<ClusterObjects>> {
        async { None }.boxed()
    }
}

pub(crate) const ALL: Permissions = Permissions { may_patch: true, may_delete: true };

/// A page with the run `ml/iris`.
pub(crate) struct Page {
    pub(crate) viewer: Viewer,
    pub(crate) store: Arc<Store>,
    pub(crate) fake: Arc<Fake>,
}

impl Page {
    pub(crate) fn new(fake: Fake, allows_actions: bool, status: Value, trials: &[Value]) -> Self {
        let fake = Arc::new(fake);
        let access = ActionAccess::new(fake.clone(), allows_actions, "secret".to_owned());
        let actions = Some(Arc::new(access));
        let site = Site { is_cluster: true, actions, ..Site::default() };
        let store = Arc::new(Store::default());
        store.replace(fixture::run(json!({}), status, trials));
        let visible = Visible::all(store.clone());
        let viewer = Viewer { visible, site, metrics: Arc::default(), session: None };
        Self { viewer, store, fake }
    }

    fn running(may: Permissions) -> Self {
        let fake = Fake { may, ..Fake::default() };
        Self::new(fake, true, json!({"phase": "Running"}), &[])
    }

    /// Sends a form. Returns the status and the actions that were carried out so far.
    fn post(&self, word: &str, form: &str) -> (u16, Vec<Action>) {
        let response = block_on(acted(&self.viewer, ("ml", "iris"), word, form));
        let status = response.unwrap_or_else(|response| *response).status();
        let acted = self.fake.acted.lock().unwrap();
        let is_expected = |target: &Target| {
            (&*target.namespace, &*target.name, &*target.uid) == ("ml", "iris", UID)
        };
        assert!(acted.iter().all(|(target, _)| is_expected(target)), "{acted:?}");
        (status.as_u16(), acted.iter().map(|(_, action)| *action).collect())
    }

    fn buttons(&self) -> (Vec<&'static str>, String) {
        let actions = self.viewer.site.actions.as_ref().unwrap();
        block_on(actions.ask("ml"));
        let run = self.viewer.visible.run("ml", "iris").unwrap();
        let controls = controls(&self.viewer.site, &run);
        (controls.buttons.iter().map(|button| button.title).collect(), controls.note)
    }
}

pub(crate) fn block_on<T>(future: impl Future<Output = T>) -> T {
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
    assert!(access(&page.viewer).is_err());
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
        // The experiment is not paused: that is the reason only for those who may activate it.
        assert_eq!(page.post("activate", &form("")).0, if may_patch { 409 } else { 403 });
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
    let response = block_on(acted(&page.viewer, ("ml", "iris"), "cancel", &form("")));
    let body = axum::body::to_bytes(response.unwrap().into_body(), 1 << 20);
    let body = String::from_utf8(block_on(body).unwrap().to_vec()).unwrap();
    assert!(body.contains("it stays &#60;killed&#62;"), "{body}");
    let asked = page.viewer.site.actions.as_ref().unwrap().asked(UID);
    assert!(asked.is_none(), "{asked:?}");
}

#[test]
fn replaced_and_stored_runs_refuse_actions() {
    let check = |standing: Standing, word: &str, expected: u16| {
        let page = Page::running(ALL);
        let run = fixture::run(json!({}), json!({"phase": "Running"}), &[]);
        page.store.replace(run.with_standing(standing));
        let (status, acted) = page.post(word, &form("&name=iris"));
        assert_eq!((status, acted.len()), (expected, usize::from(expected == 303)), "{word}");
    };
    check(Standing::Replaced, "kill", 403);
    check(Standing::Replaced, "delete", 303);
    check(Standing::Stored, "kill", 403);
    check(Standing::Stored, "delete", 403);
}

#[test]
fn local_actions_are_shown_while_they_are_news() {
    let check = |had_runner: bool, has_runner: bool, phase: &str, expected: Option<&str>| {
        let mut page = Page::running(ALL);
        page.viewer.site.is_cluster = false;
        let replace = |is_running: bool, phase: &str| {
            let mut run = fixture::run(json!({}), json!({ "phase": phase }), &[]);
            run.is_running = is_running;
            page.store.replace(run);
        };
        replace(had_runner, "Running");
        assert_eq!(page.post("pause", &form("")).0, 303);
        replace(has_runner, phase);
        let run = page.viewer.visible.run("ml", "iris").unwrap();
        let title = controls(&page.viewer.site, &run).asked.map(|notice| notice.title);
        let title = title.map(|title| title.contains("waits for the record"));
        assert_eq!(title, expected.map(|word| word == "waits"), "{had_runner} {phase}");
    };
    check(true, true, "Running", Some("waits"));
    check(true, true, "Paused", None);
    // The runner has exited.
    check(true, false, "Running", None);
    // Without a runner, the effect says what comes next.
    check(false, false, "Running", Some("done"));
}

#[test]
fn accepted_actions_are_shown_until_confirmed() {
    let page = Page::running(ALL);
    page.post("pause", &form(""));
    let asked = |page: &Page| {
        let run = page.viewer.visible.run("ml", "iris").unwrap();
        controls(&page.viewer.site, &run).asked.map(|notice| notice.title)
    };
    let expected = "Pause was requested and waits for the record since";
    assert_eq!(asked(&page).unwrap(), expected);
    page.store.replace(fixture::run(json!({}), json!({"phase": "Paused"}), &[]));
    assert_eq!(asked(&page), None);
}

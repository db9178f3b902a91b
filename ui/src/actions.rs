//! Actions on experiments of a cluster or of this machine, and what the page asks the API server.
//!
//! On a cluster, all requests use the viewer's own kubeconfig: the page may do what the viewer may
//! do with `stoker` or `kubectl`, and nothing else.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::{Node, Pod};
use stoker_api::experiment::{DesiredState, ReopenedTrials};
use stoker_api::time::Timestamp;
use tokio::time::{Instant, timeout};

use crate::security::is_equal;
use crate::text;

/// Time for which the answer about permissions is used.
const PERMISSIONS_AGE: Duration = Duration::from_secs(60);
/// Time for which all viewers use the same nodes and pods.
const OBJECTS_AGE: Duration = Duration::from_secs(5);
/// Maximum time that a page waits for the answer about permissions.
const PERMISSIONS_TIMEOUT: Duration = Duration::from_secs(3);
/// Seconds after which a page stops to mention an action that the record does not confirm.
const ASKED_SECONDS: u64 = 600;

/// Action on an experiment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Trials checkpoint and exit, until the experiment is activated again.
    Pause,
    /// Ends a pause.
    Activate,
    /// Trials checkpoint and exit; the experiment ends.
    Cancel,
    /// The experiment ends at once.
    Kill,
    /// Deletes the objects of the experiment and its trials; of a local run, also the files.
    Delete,
    /// Continues trials that have ended.
    Continue(ReopenedTrials),
}

impl Action {
    /// Returns the action of a URL. `trials` selects the trials to continue.
    pub(crate) fn of(word: &str, trials: &str) -> Option<Self> {
        Some(match word {
            "pause" => Self::Pause,
            "activate" => Self::Activate,
            "cancel" => Self::Cancel,
            "kill" => Self::Kill,
            "delete" => Self::Delete,
            "continue" if trials == "failed" => Self::Continue(ReopenedTrials::Failed),
            "continue" => Self::Continue(ReopenedTrials::Stopped),
            _ => return None,
        })
    }

    /// Returns the desired state that an action requests; `None` for Delete and Continue.
    pub fn desired_state(self) -> Option<DesiredState> {
        match self {
            Self::Pause => Some(DesiredState::Paused),
            Self::Activate => Some(DesiredState::Active),
            Self::Cancel => Some(DesiredState::Cancelled),
            Self::Kill => Some(DesiredState::Killed),
            Self::Delete | Self::Continue(_) => None,
        }
    }

    /// Returns the word in the URL.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Pause => "pause",
            Self::Activate => "activate",
            Self::Cancel => "cancel",
            Self::Kill => "kill",
            Self::Delete => "delete",
            Self::Continue(_) => "continue",
        }
    }

    /// Returns the text of the button.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Pause => "Pause",
            Self::Activate => "Activate",
            Self::Cancel => "Cancel",
            Self::Kill => "Kill",
            Self::Delete => "Delete",
            Self::Continue(_) => "Continue",
        }
    }
}

/// Experiment of an action. Another experiment of the same name has another UID.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// Namespace of the experiment.
    pub namespace: String,
    /// Name of the experiment.
    pub name: String,
    /// UID of the experiment.
    pub uid: String,
}

/// Actions that the viewer may use on experiments of a namespace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Permissions {
    /// Whether the viewer may patch experiments.
    pub may_patch: bool,
    /// Whether the viewer may delete experiments.
    pub may_delete: bool,
}

/// Nodes and Stoker's pods, each with the reason if the viewer may not list them.
#[derive(Clone, Debug)]
pub struct ClusterObjects {
    /// All nodes.
    pub nodes: Result<Vec<Node>, String>,
    /// Pods of trials and jobs.
    pub pods: Result<Vec<Pod>, String>,
    /// Namespace of `pods`; `None` for all namespaces.
    pub namespace: Option<String>,
}

/// Carries out actions: by requests to an API server, or to local runs.
pub trait ActionBackend: Debug + Send + Sync {
    /// Carries out an action, unless the experiment has another UID. Returns the effect as a
    /// sentence, or the reason of a refusal, such as the words of the API server.
    fn act<'a>(
        &'a self,
        target: &'a Target,
        action: Action,
    ) -> BoxFuture<'a, Result<String, String>>;

    /// Asks what the viewer may do in a namespace.
    fn permissions<'a>(&'a self, namespace: &'a str) -> BoxFuture<'a, Result<Permissions, String>>;

    /// Reads nodes and pods; `None` for local runs.
    fn objects(&self) -> BoxFuture<'_, Option<ClusterObjects>>;
}

/// An action that was accepted, and that the record may not confirm yet.
#[derive(Clone, Debug)]
pub(crate) struct Asked {
    pub(crate) action: Action,
    pub(crate) at: Timestamp,
    /// The effect as a sentence.
    pub(crate) effect: String,
    /// Whether a runner or the operator follows the request.
    pub(crate) is_followed: bool,
}

type Answer = Result<Permissions, String>;

/// Access to actions: requests, with their latest answers.
#[derive(Debug)]
pub struct ActionAccess {
    backend: Arc<dyn ActionBackend>,
    allows_actions: bool,
    token: String,
    /// Answers by namespace.
    permissions: Mutex<BTreeMap<String, (Instant, Answer)>>,
    /// A lock across the request: viewers at the same time share one.
    objects: tokio::sync::Mutex<Option<(Instant, Option<Arc<ClusterObjects>>)>>,
    /// Latest action by UID of the experiment.
    asked: Mutex<BTreeMap<String, Asked>>,
}

impl ActionAccess {
    /// Creates the access. `token` is a random secret of this server, which all forms contain.
    pub fn new(backend: Arc<dyn ActionBackend>, allows_actions: bool, token: String) -> Self {
        Self {
            backend,
            allows_actions,
            token,
            permissions: Mutex::default(),
            objects: tokio::sync::Mutex::default(),
            asked: Mutex::default(),
        }
    }

    /// Returns whether the command line allows actions on this page.
    pub(crate) fn allows_actions(&self) -> bool {
        self.allows_actions
    }

    pub(crate) fn token(&self) -> &str {
        &self.token
    }

    /// Compares a token of a form with that of this server.
    pub(crate) fn is_token(&self, given: &str) -> bool {
        is_equal(given, &self.token)
    }

    /// Asks about permissions, if actions are allowed and the last answer is too old.
    pub(crate) async fn ask(&self, namespace: &str) {
        let is_known = lock(&self.permissions)
            .get(namespace)
            .is_some_and(|(at, _)| at.elapsed() < PERMISSIONS_AGE);
        if !self.allows_actions || is_known {
            return;
        }
        let answer = timeout(PERMISSIONS_TIMEOUT, self.backend.permissions(namespace)).await;
        let answer = answer.unwrap_or_else(|_| Err("the API server does not answer".to_owned()));
        lock(&self.permissions).insert(namespace.to_owned(), (Instant::now(), answer));
    }

    /// Returns the last answer about permissions.
    pub(crate) fn permissions(&self, namespace: &str) -> Answer {
        let answer = lock(&self.permissions).get(namespace).map(|(_, answer)| answer.clone());
        answer.unwrap_or_else(|| Err("they are not known yet".to_owned()))
    }

    /// Returns nodes and pods that are at most some seconds old; `None` for local runs.
    pub(crate) async fn objects(&self) -> Option<Arc<ClusterObjects>> {
        let mut known = self.objects.lock().await;
        match known.as_ref() {
            Some((at, objects)) if at.elapsed() < OBJECTS_AGE => objects.clone(),
            _ => {
                let objects = self.backend.objects().await.map(Arc::new);
                *known = Some((Instant::now(), objects.clone()));
                objects
            }
        }
    }

    /// Carries out an action, and remembers it until the record confirms it. `is_followed` says
    /// whether a runner or the operator follows the request.
    pub(crate) async fn act(
        &self,
        target: &Target,
        action: Action,
        is_followed: bool,
    ) -> Result<(), String> {
        let effect = self.backend.act(target, action).await?;
        let now = text::now();
        let mut asked = lock(&self.asked);
        asked.retain(|_, asked| now.seconds_since(asked.at) < ASKED_SECONDS);
        asked.insert(target.uid.clone(), Asked { action, at: now, effect, is_followed });
        Ok(())
    }

    /// Returns the latest action on the experiment with this UID.
    pub(crate) fn asked(&self, uid: &str) -> Option<Asked> {
        let asked = lock(&self.asked).get(uid).cloned();
        asked.filter(|asked| text::now().seconds_since(asked.at) < ASKED_SECONDS)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

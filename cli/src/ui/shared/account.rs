//! A viewer who has signed in: permissions, namespaces and storages.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use futures::future::BoxFuture;
use futures::{FutureExt as _, StreamExt as _, TryStreamExt as _, stream};
use kube::Client;
use serde_json::Value;
use stoker_storage::Storage;
use stoker_ui::{Account, ActionBackend, Job, Refusal, Run, Sight, Token};
use tokio::sync::watch::{Receiver, Sender};
use tokio::time::Instant;

use super::hub::{Kind, Scope};
use super::secrets::{Address, Answers};
use super::{Shared, connect, lock};
use crate::cluster::connect::Cluster;
use crate::cluster::{self, storage};
use crate::ui::requests::{Requests, may};

/// Time for which the answers about permissions are used.
const RIGHTS_AGE: Duration = Duration::from_secs(60);
/// Time for which a failed review is not repeated. Requests that waited for it share the failure:
/// one after the other, each would wait for the API server. It is shorter than the interval of live
/// updates, so that one lost connection does not blank two of them.
const FAILURE_AGE: Duration = Duration::from_secs(1);
/// Maximum number of namespaces whose permissions are asked for at the same time.
const REVIEWS_MAX: usize = 8;
const VERBS: [&str; 2] = ["list", "watch"];

/// Scopes that a viewer may list and watch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Scopes {
    All,
    Namespaces(BTreeSet<String>),
}

impl Scopes {
    fn contains(&self, scope: &Scope) -> bool {
        match (self, scope) {
            (Self::All, _) => true,
            (Self::Namespaces(names), Some(name)) => names.contains(name),
            (Self::Namespaces(_), None) => false,
        }
    }
}

/// Permissions of a viewer, as the API server last answered.
#[derive(Clone, Debug)]
pub(super) struct Rights {
    /// Scopes in which the viewer may list and watch experiments and trials.
    pub(super) experiments: Scopes,
    /// Same for inference jobs, within `experiments`.
    pub(super) jobs: Scopes,
    /// Why jobs of some namespaces are missing.
    pub(super) jobs_error: Option<String>,
    /// Checked namespaces, each with what is missing.
    namespaces: Vec<(String, Option<String>)>,
}

impl Rights {
    fn none() -> Self {
        let none = Scopes::Namespaces(BTreeSet::new());
        Self { experiments: none.clone(), jobs: none, jobs_error: None, namespaces: Vec::new() }
    }
}

/// Latest review of a viewer's permissions.
#[derive(Debug)]
struct Review {
    at: Instant,
    result: Result<(), Refusal>,
}

impl Review {
    fn new(result: Result<(), Refusal>) -> Self {
        Self { at: Instant::now(), result }
    }

    /// Returns the result if it holds still. `is_stale`: the permissions have changed since.
    fn current(&self, is_stale: bool, now: Instant) -> Option<Result<(), Refusal>> {
        let age = now.duration_since(self.at);
        let is_current = match self.result {
            Ok(()) => !is_stale && age < RIGHTS_AGE,
            Err(_) => age < FAILURE_AGE,
        };
        is_current.then(|| self.result.clone())
    }
}

/// A viewer of the cluster's page.
#[derive(Debug)]
pub(super) struct ClusterAccount {
    this: Weak<Self>,
    shared: Arc<Shared>,
    name: String,
    expires_at: Option<i64>,
    cluster: Cluster,
    /// Last review. The lock lasts across it: requests at the same time share one.
    reviewed: tokio::sync::Mutex<Option<Review>>,
    is_stale: AtomicBool,
    rights: Mutex<Rights>,
    /// Names of the shown namespaces; empty for all.
    shown: Arc<Mutex<Vec<String>>>,
    answers: Answers,
    ended: Sender<bool>,
}

impl ClusterAccount {
    pub(super) fn new(
        shared: Arc<Shared>,
        client: Client,
        name: String,
        token: &Token,
    ) -> Arc<Self> {
        let cluster = Cluster { client, ..shared.cluster.clone() };
        Arc::new_cyclic(|this| Self {
            this: this.clone(),
            shared,
            name,
            expires_at: expiry(token.expose()),
            cluster,
            reviewed: tokio::sync::Mutex::default(),
            is_stale: AtomicBool::new(false),
            rights: Mutex::new(Rights::none()),
            shown: Arc::default(),
            answers: Answers::default(),
            ended: Sender::new(false),
        })
    }

    pub(super) fn client(&self) -> Client {
        self.cluster.client.clone()
    }

    /// Returns a receiver of the end of the session.
    pub(super) fn ended(&self) -> Receiver<bool> {
        self.ended.subscribe()
    }

    /// Returns whether a watch may use the token. The API server decides each time it starts.
    pub(super) fn may_watch(&self, kind: Kind, scope: &Scope) -> bool {
        let rights = lock(&self.rights);
        let scopes = match kind {
            Kind::Experiments => &rights.experiments,
            Kind::Jobs => &rights.jobs,
        };
        !*self.ended.borrow() && scopes.contains(scope)
    }

    /// Drops all permissions until the next review, after the API server has refused a request.
    pub(super) fn forget_rights(&self) {
        self.is_stale.store(true, Ordering::Release);
        *lock(&self.rights) = Rights::none();
    }

    /// Returns permissions that are at most a minute old.
    async fn rights(&self) -> Result<Rights, Refusal> {
        let mut reviewed = self.reviewed.lock().await;
        let is_stale = self.is_stale.swap(false, Ordering::AcqRel);
        let now = Instant::now();
        if let Some(result) = reviewed.as_ref().and_then(|review| review.current(is_stale, now)) {
            return result.map(|()| lock(&self.rights).clone());
        }
        // A request that is dropped meanwhile leaves no review.
        *reviewed = None;
        let rights = connect::within_limit(self.review()).await;
        *reviewed = Some(Review::new(rights.as_ref().map(drop).map_err(Clone::clone)));
        // After a failure nothing is shown: permissions may have been withdrawn.
        let rights = rights?;
        let shown = match &rights.experiments {
            Scopes::All => Vec::new(),
            Scopes::Namespaces(names) => names.iter().cloned().collect(),
        };
        *lock(&self.shown) = shown;
        *lock(&self.rights) = rights.clone();
        Ok(rights)
    }

    /// Asks the API server for all permissions.
    async fn review(&self) -> kube::Result<Rights> {
        if self.missing(None, "experiments").await?.is_none()
            && self.missing(None, "trials").await?.is_none()
        {
            let jobs_error = self.missing(None, "inferencejobs").await?;
            let jobs = match jobs_error {
                None => Scopes::All,
                Some(_) => Scopes::Namespaces(BTreeSet::new()),
            };
            let experiments = Scopes::All;
            return Ok(Rights { experiments, jobs, jobs_error, namespaces: Vec::new() });
        }
        let mut names = self.shared.offered.clone();
        names.extend(self.shared.added.of(&self.name));
        let reviews = names.into_iter().map(|name| async move {
            let missing = match self.missing(Some(&name), "experiments").await? {
                None => self.missing(Some(&name), "trials").await?,
                missing => missing,
            };
            let jobs = match &missing {
                None => self.missing(Some(&name), "inferencejobs").await?,
                Some(_) => None,
            };
            Ok::<_, kube::Error>((name, missing, jobs))
        });
        let reviews: Vec<_> = reviews.collect();
        let reviews: Vec<(String, Option<String>, Option<String>)> =
            stream::iter(reviews).buffered(REVIEWS_MAX).try_collect().await?;
        let shown = || reviews.iter().filter(|(_, missing, _)| missing.is_none());
        let with_jobs = shown().filter(|(_, _, jobs)| jobs.is_none());
        Ok(Rights {
            experiments: Scopes::Namespaces(shown().map(|(name, ..)| name.clone()).collect()),
            jobs: Scopes::Namespaces(with_jobs.map(|(name, ..)| name.clone()).collect()),
            jobs_error: shown().find_map(|(_, _, jobs)| jobs.clone()),
            namespaces: reviews.into_iter().map(|(name, missing, _)| (name, missing)).collect(),
        })
    }

    /// Returns the verb that the viewer lacks to list and watch a kind.
    async fn missing(&self, namespace: Option<&str>, kind: &str) -> kube::Result<Option<String>> {
        for verb in VERBS {
            if !may(&self.cluster.client, namespace, kind, verb).await? {
                let place = match namespace {
                    Some(namespace) => format!("namespace {namespace}"),
                    None => "all namespaces".to_owned(),
                };
                return Ok(Some(format!("you may not {verb} {kind} in {place}")));
            }
        }
        Ok(None)
    }

    async fn open(&self, address: Result<Address, String>) -> Result<Arc<Storage>, String> {
        self.shared.storages.open(&self.cluster.client, &self.answers, address?).await
    }
}

impl Account for ClusterAccount {
    fn name(&self) -> &str {
        &self.name
    }

    fn expires_at(&self) -> Option<i64> {
        self.expires_at
    }

    fn sight(&self) -> BoxFuture<'_, Result<Sight, Refusal>> {
        async move {
            let rights = self.rights().await?;
            let ended = || Refusal::Token("the session has ended".to_owned());
            let this = self.this.upgrade().ok_or_else(ended)?;
            let visible = self.shared.hub.visible(&this, &rights).await;
            let place = match &rights.experiments {
                Scopes::All => "All namespaces".to_owned(),
                Scopes::Namespaces(names) if names.is_empty() => "No namespace".to_owned(),
                Scopes::Namespaces(names) => {
                    let names: Vec<&str> = names.iter().map(String::as_str).collect();
                    let word = if names.len() == 1 { "Namespace" } else { "Namespaces" };
                    format!("{word} {}", names.join(", "))
                }
            };
            let is_everywhere = rights.experiments == Scopes::All;
            Ok(Sight { visible, place, is_everywhere, namespaces: rights.namespaces })
        }
        .boxed()
    }

    fn add_namespace(&self, name: &str) -> Result<(), String> {
        self.shared.added.add(&self.name, name)?;
        self.is_stale.store(true, Ordering::Release);
        Ok(())
    }

    fn storage<'a>(&'a self, run: &'a Run) -> BoxFuture<'a, Result<Arc<Storage>, String>> {
        self.open(Address::new(&run.namespace, &storage::of(&run.experiment), None)).boxed()
    }

    fn output<'a>(&'a self, job: &'a Job) -> BoxFuture<'a, Result<Arc<Storage>, String>> {
        let mut storage = cluster::job::storage_of(&job.job);
        let address = match &job.job.spec.output.url {
            _ if job.output_url.is_empty() => Err(cluster::job::NO_OUTPUT.to_owned()),
            Some(_) => {
                storage.url = Some(job.output_url.clone());
                storage.endpoint = job.job.spec.output.endpoint.clone();
                Address::new(&job.namespace, &storage, None)
            }
            None => {
                let path = format!("{}/output", cluster::job::path(&job.job));
                Address::new(&job.namespace, &storage, Some(&path))
            }
        };
        self.open(address).boxed()
    }

    fn api(&self) -> Arc<dyn ActionBackend> {
        Arc::new(Requests::new(self.cluster.clone(), self.shown.clone()))
    }

    fn end(&self) {
        self.ended.send_replace(true);
        *lock(&self.rights) = Rights::none();
    }
}

/// Returns the time at which a JSON web token expires. The API server verifies the token; this only
/// ends the session in time.
fn expiry(token: &str) -> Option<i64> {
    let payload = URL_SAFE_NO_PAD.decode(token.split('.').nth(1)?).ok()?;
    let claims: Value = serde_json::from_slice(&payload).ok()?;
    claims["exp"].as_i64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_reviews_are_shared_for_seconds() {
        let failure = Err(Refusal::Unavailable("no answer".to_owned()));
        let (failed, accepted) = (Review::new(failure.clone()), Review::new(Ok(())));
        let now = failed.at;
        assert_eq!(failed.current(true, now), Some(failure));
        assert_eq!(failed.current(false, now + FAILURE_AGE), None);
        assert_eq!(accepted.current(false, now + FAILURE_AGE), Some(Ok(())));
        assert_eq!(accepted.current(true, now), None);
        assert_eq!(accepted.current(false, now + 2 * RIGHTS_AGE), None);
    }

    #[test]
    fn expiry_of_a_web_token_is_read() {
        // {"exp":1767225600,"sub":"a?~"}
        let token = "e30.eyJleHAiOjE3NjcyMjU2MDAsInN1YiI6ImE_fiJ9.c2ln";
        assert_eq!(expiry(token), Some(1_767_225_600));
        for other in ["opaque", "a.b.c", "a.!!.c", "", "e30.e30.e30"] {
            assert_eq!(expiry(other), None, "{other}");
        }
    }

    #[test]
    fn scopes_contain_their_namespaces() {
        let ml = Scopes::Namespaces(BTreeSet::from(["ml".to_owned()]));
        let scope = |name: &str| Some(name.to_owned());
        assert!(ml.contains(&scope("ml")) && !ml.contains(&scope("vision")) && !ml.contains(&None));
        assert!(Scopes::All.contains(&scope("ml")) && Scopes::All.contains(&None));
    }
}

//! Watched namespaces that the operator may read.
//!
//! When a namespace is deleted, the Role in it is deleted too, and every list is denied. A new
//! leader would wait for these lists and start nothing in the other namespaces. A replica therefore
//! leaves out namespaces that it cannot read, and restarts when their number changes: the start of
//! a leader also fences its predecessor in all namespaces.

use std::fmt::Debug;
use std::time::Duration;

use futures::future::join_all;
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::core::NamespaceResourceScope;
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use stoker_api::experiment::Experiment;
use stoker_api::inference::InferenceJob;
use stoker_api::trial::Trial;

/// Checks of a namespace before it counts as unreadable, and the delay between them. The API server
/// denies everything until it has loaded its RBAC rules.
const CHECKS: u32 = 4;
const CHECK_DELAY: Duration = Duration::from_secs(2);
/// Interval of the checks for changes.
const INTERVAL: Duration = Duration::from_secs(15);
/// Time limit of a list. Without an answer, a namespace counts as readable.
const LIST_MAX: Duration = Duration::from_secs(8);

/// Returns the namespaces of `watched` that the operator may read, in their order. Returns all of
/// them if it may read none: then the installation is broken, and the replica is not ready. A
/// single entry, which may stand for all namespaces, is not checked.
pub async fn readable(client: &Client, watched: Vec<Option<String>>) -> Vec<Option<String>> {
    if watched.len() < 2 {
        return watched;
    }
    let denied = denied(client, watched.iter().flatten()).await;
    let is_denied = |space: &Option<String>| space.as_ref().is_some_and(|ns| denied.contains(ns));
    if watched.iter().all(is_denied) {
        return watched;
    }
    for namespace in &denied {
        tracing::warn!(
            namespace,
            "left out: the operator may not read this namespace; if it was deleted, remove it from \
             watchNamespaces"
        );
    }
    watched.into_iter().filter(|space| !is_denied(space)).collect()
}

/// Waits until the operator may read other namespaces of `watched` than `readable`. Returns why the
/// replica must restart.
pub async fn changed(
    client: Client,
    watched: Vec<Option<String>>,
    readable: Vec<Option<String>>,
) -> String {
    let (known, left_out): (Vec<String>, Vec<String>) =
        watched.iter().flatten().cloned().partition(|ns| readable.contains(&Some(ns.clone())));
    if watched.len() < 2 {
        return std::future::pending().await;
    }
    loop {
        tokio::time::sleep(INTERVAL).await;
        for namespace in &left_out {
            if !is_denied(&client, namespace).await {
                return format!("namespace {namespace:?} can be read now; restarting with it");
            }
        }
        let lost = denied(&client, known.iter()).await;
        if let Some(namespace) = lost.first().filter(|_| lost.len() < known.len()) {
            return format!("namespace {namespace:?} can no longer be read; restarting without it");
        }
    }
}

/// Returns the namespaces in which several checks were denied.
async fn denied(client: &Client, namespaces: impl Iterator<Item = &String>) -> Vec<String> {
    let mut denied: Vec<String> = namespaces.cloned().collect();
    for number in 0..CHECKS {
        if number > 0 {
            tokio::time::sleep(CHECK_DELAY).await;
        }
        let checks = denied.iter().map(|namespace| is_denied(client, namespace));
        let results = join_all(checks).await;
        let mut results = results.into_iter();
        denied.retain(|_| results.next().unwrap_or_default());
        if denied.is_empty() {
            break;
        }
    }
    denied
}

/// Returns whether the API server denies the lists of all watched kinds. If it allows some of them,
/// the others are missing in the Role by mistake: without them, the leader must not start.
async fn is_denied(client: &Client, namespace: &str) -> bool {
    is_list_denied::<Experiment>(client, namespace).await
        && is_list_denied::<Trial>(client, namespace).await
        && is_list_denied::<InferenceJob>(client, namespace).await
        && is_list_denied::<Pod>(client, namespace).await
}

async fn is_list_denied<K>(client: &Client, namespace: &str) -> bool
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + Debug
        + DeserializeOwned,
{
    let api: Api<K> = Api::namespaced(client.clone(), namespace);
    let one = ListParams::default().match_any().limit(1);
    let listed = tokio::time::timeout(LIST_MAX, api.list_metadata(&one)).await;
    matches!(listed, Ok(Err(kube::Error::Api(status))) if status.code == 403)
}

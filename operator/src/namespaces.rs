//! Watched namespaces that the operator may read.
//!
//! When a namespace is deleted, the Role in it is deleted too, and every list is denied. A new
//! leader would wait for these lists and start nothing in the other namespaces. A replica therefore
//! leaves out namespaces that it cannot read, and restarts when their number changes: the start of
//! a leader also fences its predecessor in all namespaces.

use std::fmt::Debug;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
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

use crate::context::Context;

/// Checks of a namespace before it counts as unreadable, and the delay between them. The API server
/// denies everything until it has loaded its RBAC rules.
const CHECKS: u32 = 4;
const CHECK_DELAY: Duration = Duration::from_secs(2);
/// Shortest interval of the checks for changes. The longest is twice as long.
const INTERVAL: Duration = Duration::from_secs(15);
/// Time limit of a list.
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
    context: &Context,
    watched: Vec<Option<String>>,
    readable: Vec<Option<String>>,
) -> String {
    let (known, left_out): (Vec<String>, Vec<String>) =
        watched.iter().flatten().cloned().partition(|ns| readable.contains(&Some(ns.clone())));
    if watched.len() < 2 {
        return std::future::pending().await;
    }
    let client = &context.client;
    let interval = INTERVAL.mul_f64(1.0 + share(&context.options.identity));
    loop {
        tokio::time::sleep(interval).await;
        for namespace in &left_out {
            if access(client, namespace).await == Access::Allowed {
                return format!("namespace {namespace:?} can be read now; restarting with it");
            }
        }
        let lost = denied(client, known.iter()).await;
        if let Some(namespace) = lost.first().filter(|_| lost.len() < known.len()) {
            return format!("namespace {namespace:?} can no longer be read; restarting without it");
        }
    }
}

/// Returns a number from 0 to 1 for a replica, so that two do not restart at the same time.
fn share(identity: &str) -> f64 {
    let mut hasher = DefaultHasher::new();
    identity.hash(&mut hasher);
    hasher.finish() as f64 / u64::MAX as f64
}

/// Returns the namespaces in which all checks were denied. A check without an answer decides
/// nothing.
async fn denied(client: &Client, namespaces: impl Iterator<Item = &String>) -> Vec<String> {
    let mut open: Vec<(String, Access)> =
        namespaces.map(|namespace| (namespace.clone(), Access::Unknown)).collect();
    for number in 0..CHECKS {
        if number > 0 {
            tokio::time::sleep(CHECK_DELAY).await;
        }
        let checks = open.iter().map(|(namespace, _)| access(client, namespace));
        let results = join_all(checks).await;
        open.iter_mut().zip(results).for_each(|((_, last), result)| *last = result);
        open.retain(|(_, last)| *last != Access::Allowed);
        if open.is_empty() {
            break;
        }
    }
    open.retain(|(_, last)| *last == Access::Denied);
    open.into_iter().map(|(namespace, _)| namespace).collect()
}

/// Whether the operator may read a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Access {
    Allowed,
    Denied,
    /// The API server did not answer.
    Unknown,
}

/// Returns whether the API server allows lists. If it denies only some kinds, these are missing in
/// the Role by mistake: without them, the leader must not start.
async fn access(client: &Client, namespace: &str) -> Access {
    let of_kinds = [
        list_access::<Experiment>(client, namespace).await,
        list_access::<Trial>(client, namespace).await,
        list_access::<InferenceJob>(client, namespace).await,
        list_access::<Pod>(client, namespace).await,
    ];
    let first = [Access::Allowed, Access::Unknown].into_iter().find(|one| of_kinds.contains(one));
    first.unwrap_or(Access::Denied)
}

async fn list_access<K>(client: &Client, namespace: &str) -> Access
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + Debug
        + DeserializeOwned,
{
    let api: Api<K> = Api::namespaced(client.clone(), namespace);
    let one = ListParams::default().match_any().limit(1);
    match tokio::time::timeout(LIST_MAX, api.list_metadata(&one)).await {
        Ok(Ok(_)) => Access::Allowed,
        Ok(Err(kube::Error::Api(status))) if status.code == 403 => Access::Denied,
        Ok(Err(_)) | Err(_) => Access::Unknown,
    }
}

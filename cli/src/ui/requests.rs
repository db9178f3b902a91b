//! Requests of the page to the API server: actions, permissions, nodes and pods.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::future::BoxFuture;
use futures::{FutureExt as _, StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec,
};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{ListParams, PostParams};
use kube::{Api, Client};
use serde::de::DeserializeOwned;
use stoker_api::experiment::Experiment;
use stoker_api::names::{COMPONENT_JOB, COMPONENT_TRIAL, GROUP, LABEL_COMPONENT};
use stoker_ui::{Action, ActionBackend, ClusterObjects, Permissions, Target};

use crate::cluster::connect::{Cluster, chain};
use crate::cluster::experiment;
use crate::failure::Failure;
use crate::reopen;

/// Timeout for lists of nodes and pods: the page shows the rest without them.
const LIST_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of namespaces whose pods are listed at the same time.
const LISTS_MAX: usize = 8;

/// Requests with the viewer's credentials.
#[derive(Debug)]
pub(super) struct Requests {
    cluster: Cluster,
    /// Namespaces of the page; empty if it shows all.
    shown: Arc<Mutex<Vec<String>>>,
}

impl Requests {
    pub(super) fn new(cluster: Cluster, shown: Arc<Mutex<Vec<String>>>) -> Self {
        Self { cluster, shown }
    }

    async fn may(&self, namespace: &str, verb: &str) -> Result<bool, String> {
        let asked = may(&self.cluster.client, Some(namespace), "experiments", verb);
        let answer = self.cluster.request("permissions", asked).await;
        answer.map_err(|error| error.to_string())
    }

    async fn list<K>(&self, api: Api<K>, params: &ListParams) -> Result<Vec<K>, String>
    where
        K: Clone + DeserializeOwned + std::fmt::Debug,
    {
        // Nodes and pods that are some seconds old are good enough, and spare the API server.
        let params = params.clone().match_any();
        match tokio::time::timeout(LIST_TIMEOUT, api.list(&params)).await {
            Ok(Ok(list)) => Ok(list.items),
            Ok(Err(kube::Error::Api(status))) => Err(status.message.clone()),
            Ok(Err(error)) => Err(chain(&error)),
            Err(_) => Err(format!("no answer within {} s", LIST_TIMEOUT.as_secs())),
        }
    }

    /// Lists Stoker's pods of all namespaces, or of the page's namespaces if the viewer may not.
    async fn pods(&self) -> (Result<Vec<Pod>, String>, Option<String>) {
        let labels = format!("{LABEL_COMPONENT} in ({COMPONENT_TRIAL},{COMPONENT_JOB})");
        let params = ListParams::default().labels(&labels);
        let all = self.list(Api::all(self.cluster.client.clone()), &params).await;
        let shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if all.is_ok() || shown.is_empty() {
            return (all, None);
        }
        let lists = shown.iter().map(|namespace| {
            let api = Api::namespaced(self.cluster.client.clone(), namespace);
            async { self.list::<Pod>(api, &params).await }
        });
        let lists: Vec<_> = lists.collect();
        let listed: Result<Vec<Vec<Pod>>, String> =
            stream::iter(lists).buffered(LISTS_MAX).try_collect().await;
        (listed.map(|lists| lists.concat()), Some(shown.join(", ")))
    }
}

/// Asks the API server whether the user of a client may use a verb on a kind of Stoker, in a
/// namespace or in all.
pub(super) async fn may(
    client: &Client,
    namespace: Option<&str>,
    resource: &str,
    verb: &str,
) -> kube::Result<bool> {
    let attributes = ResourceAttributes {
        group: Some(GROUP.to_owned()),
        resource: Some(resource.to_owned()),
        verb: Some(verb.to_owned()),
        namespace: namespace.map(str::to_owned),
        ..ResourceAttributes::default()
    };
    let review = SelfSubjectAccessReview {
        spec: SelfSubjectAccessReviewSpec {
            resource_attributes: Some(attributes),
            ..SelfSubjectAccessReviewSpec::default()
        },
        ..SelfSubjectAccessReview::default()
    };
    let api: Api<SelfSubjectAccessReview> = Api::all(client.clone());
    let answer = api.create(&PostParams::default(), &review).await?;
    Ok(answer.status.is_some_and(|status| status.allowed))
}

async fn act(cluster: &Cluster, target: &Target, action: Action) -> Result<String, Failure> {
    let (name, uid) = (target.name.as_str(), target.uid.as_str());
    if let Some(state) = action.desired_state() {
        let (effect, _) =
            experiment::request_state::<Experiment>(cluster, name, Some(uid), state).await?;
        return Ok(effect);
    }
    if let Action::Continue(trials) = action {
        return reopen::continue_same(cluster, name, uid, trials).await;
    }
    let removed: Experiment = experiment::remove(cluster, name, Some(uid)).await?;
    let left = experiment::storage_location(&removed);
    Ok(format!("checkpoints, metrics and logs remain in {left}"))
}

impl ActionBackend for Requests {
    fn act<'a>(
        &'a self,
        target: &'a Target,
        action: Action,
    ) -> BoxFuture<'a, Result<String, String>> {
        async move {
            let cluster = self.cluster.in_namespace(&target.namespace);
            act(&cluster, target, action).await.map_err(|error| error.to_string())
        }
        .boxed()
    }

    fn permissions<'a>(&'a self, namespace: &'a str) -> BoxFuture<'a, Result<Permissions, String>> {
        async move {
            let (patch, delete) =
                tokio::try_join!(self.may(namespace, "patch"), self.may(namespace, "delete"))?;
            Ok(Permissions { may_patch: patch, may_delete: delete })
        }
        .boxed()
    }

    fn objects(&self) -> BoxFuture<'_, Option<ClusterObjects>> {
        async move {
            let params = ListParams::default();
            let nodes = self.list::<Node>(Api::all(self.cluster.client.clone()), &params);
            let (nodes, (pods, namespace)) = tokio::join!(nodes, self.pods());
            Some(ClusterObjects { nodes, pods, namespace })
        }
        .boxed()
    }
}

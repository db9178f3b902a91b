//! Lists and watches a kind, with the client of a permitted viewer.

use std::sync::Arc;
use std::time::Duration;

use futures::future::{pending, select_all};
use futures::{FutureExt as _, StreamExt as _, TryStreamExt as _};
use kube::api::{ListParams, WatchEvent, WatchParams};
use kube::core::{DeserializeGuard, NamespaceResourceScope};
use kube::{Api, Client, Resource, ResourceExt as _};
use serde::de::DeserializeOwned;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::watch::Receiver;

use super::objects::{Change, Watched};
use crate::cluster::connect::chain;
use crate::print;

/// Delay before a failed watch starts again.
const RETRY: Duration = Duration::from_secs(2);
/// Delay before a watch starts again that the API server refuses.
const RETRY_FORBIDDEN: Duration = Duration::from_secs(60);
/// Seconds after which the server ends a watch, and this program starts the next one. The server
/// checks permissions only at the start.
const WATCH_SECONDS: u32 = 60;
/// Objects per page of a list.
const PAGE_SIZE: u32 = 500;

/// A client, and the signal after which it must not be used.
pub(super) struct Lease {
    pub(super) client: Client,
    /// Becomes `true` when the lease ends; `None` if it does not end.
    pub(super) ended: Option<Receiver<bool>>,
}

impl Lease {
    async fn ended(&self) {
        match self.ended.clone() {
            // An error means that the owner is gone.
            Some(mut ended) => drop(ended.wait_for(|ended| *ended).await),
            None => pending().await,
        }
    }
}

/// Clients for the requests of a watch.
pub(super) trait Clients: Send + Sync {
    /// Returns the client for the next request; `None` if there is none any more.
    fn next(&self) -> Option<Lease>;

    /// Takes note that the API server has refused the last client. Returns whether to try the next
    /// one at once.
    fn refused(&self) -> bool;
}

/// The client of the only viewer.
pub(super) struct OneClient(pub(super) Client);

impl Clients for OneClient {
    fn next(&self) -> Option<Lease> {
        Some(Lease { client: self.0.clone(), ended: None })
    }

    fn refused(&self) -> bool {
        false
    }
}

/// Lists and watches a kind in a namespace, or in all, until the receiver of the changes is
/// dropped. Without a client, sends [`Change::Ended`].
pub(super) async fn watch<K>(
    clients: Arc<dyn Clients>,
    namespace: Option<String>,
    sender: UnboundedSender<Change>,
) where
    K: Watched + Resource<DynamicType = (), Scope = NamespaceResourceScope> + DeserializeOwned,
    K: Clone + std::fmt::Debug + Send + 'static,
{
    let (mut version, mut num_failures) = (None, 0);
    loop {
        let Some(lease) = clients.next() else {
            let _ = sender.send(Change::Ended);
            return;
        };
        let api: Api<DeserializeGuard<K>> = match &namespace {
            Some(namespace) => Api::namespaced(lease.client.clone(), namespace),
            None => Api::all(lease.client.clone()),
        };
        let followed = {
            let ended = select_all([lease.ended().boxed(), sender.closed().boxed()]);
            tokio::select! {
                followed = follow(&api, &mut version, &mut num_failures, &sender) => followed,
                _ = ended => Ok(()),
            }
        };
        if sender.is_closed() {
            return;
        }
        let Err(error) = followed else { continue };
        let (mut delay, mut is_refused) = (RETRY, false);
        if let kube::Error::Api(status) = &error {
            is_refused = status.is_forbidden() || status.code == 401;
            if is_refused && clients.refused() {
                continue;
            }
            if is_refused {
                delay = RETRY_FORBIDDEN;
            }
            // The version is too old: list again. A server that keeps answering this must not get
            // one list after the other.
            if status.code == 410 {
                version = None;
                tokio::time::sleep(delay).await;
                continue;
            }
        }
        let why = chain(&error);
        print::err(format!("stoker: cannot watch the cluster: {why}; trying again"));
        // A watch that ends once misses nothing: the next one continues at its version.
        if num_failures > 0 || is_refused || version.is_none() {
            let _ = sender.send(Change::Failed(K::KIND, why));
        }
        num_failures += 1;
        tokio::time::sleep(delay).await;
    }
}

/// Lists unless `version` is known, and takes in one watch. Once it has started, `num_failures` is
/// zero.
async fn follow<K>(
    api: &Api<DeserializeGuard<K>>,
    version: &mut Option<String>,
    num_failures: &mut u32,
    sender: &UnboundedSender<Change>,
) -> kube::Result<()>
where
    K: Watched + Resource<DynamicType = ()> + DeserializeOwned + Clone + std::fmt::Debug + 'static,
{
    let mut from = match version.take() {
        Some(version) => version,
        None => {
            let mut params = ListParams::default().limit(PAGE_SIZE);
            let mut objects = Vec::new();
            loop {
                let list = api.list(&params).await?;
                objects.extend(list.items);
                match list.metadata.continue_.filter(|token| !token.is_empty()) {
                    Some(token) => params.continue_token = Some(token),
                    None => {
                        let _ = sender.send(K::listed(objects));
                        break list.metadata.resource_version.unwrap_or_default();
                    }
                }
            }
        }
    };
    // Another client continues at this version.
    *version = Some(from.clone());
    let params = WatchParams::default().timeout(WATCH_SECONDS);
    let mut events = api.watch(&params, &from).await?.boxed();
    if std::mem::take(num_failures) > 0 {
        let _ = sender.send(Change::Recovered(K::KIND));
    }
    while let Some(event) = events.try_next().await? {
        let (object, is_there) = match event {
            WatchEvent::Added(object) | WatchEvent::Modified(object) => (object, true),
            WatchEvent::Deleted(object) => (object, false),
            WatchEvent::Bookmark(bookmark) => {
                *version = Some(bookmark.metadata.resource_version);
                continue;
            }
            // Usually the version is too old.
            WatchEvent::Error(status) => {
                *version = None;
                return Err(kube::Error::Api(status));
            }
        };
        from = object.resource_version().unwrap_or(from);
        *version = Some(from.clone());
        let _ = sender.send(K::changed(object, is_there));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Context, Poll};

    use axum::http::{Request, Response};
    use futures::future::BoxFuture;
    use kube::client::Body;
    use serde_json::json;
    use stoker_api::experiment::Experiment;
    use tokio::sync::mpsc::unbounded_channel;
    use tower_service::Service;

    use super::*;

    /// Lists no objects, and ends each watch with an error event of this code. Does not answer
    /// after many lists.
    #[derive(Clone)]
    struct Failing {
        code: u16,
        num_lists: Arc<AtomicUsize>,
    }

    impl Service<Request<Body>> for Failing {
        type Response = Response<Body>;
        type Error = Infallible;
        type Future = BoxFuture<'static, Result<Response<Body>, Infallible>>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, request: Request<Body>) -> Self::Future {
            let is_watch = request.uri().query().is_some_and(|query| query.contains("watch=true"));
            if !is_watch && self.num_lists.fetch_add(1, Ordering::AcqRel) > 50 {
                return pending().boxed();
            }
            let text = match is_watch {
                true => {
                    let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {},
                        "status": "Failure", "message": "no", "reason": "x", "code": self.code});
                    format!("{}\n", json!({"type": "ERROR", "object": status}))
                }
                false => json!({"apiVersion": "stoker.dev/v1alpha1", "kind": "ExperimentList",
                    "metadata": {"resourceVersion": "1"}, "items": []})
                .to_string(),
            };
            async move { Ok(Response::new(Body::from(text.into_bytes()))) }.boxed()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn error_events_delay_the_next_list() {
        for (code, is_reported) in [(500, true), (410, false)] {
            let num_lists = Arc::new(AtomicUsize::new(0));
            let service = Failing { code, num_lists: num_lists.clone() };
            let client = Arc::new(OneClient(Client::new(service, "default")));
            let (sender, mut receiver) = unbounded_channel();
            let watched = watch::<Experiment>(client, None, sender);
            assert!(tokio::time::timeout(RETRY / 4, watched).await.is_err());
            assert_eq!(num_lists.load(Ordering::Acquire), 1, "{code}");
            let mut changes = std::iter::from_fn(|| receiver.try_recv().ok());
            let is_failure = |change: Change| matches!(change, Change::Failed(..));
            assert_eq!(changes.any(is_failure), is_reported, "{code}");
        }
    }
}

//! A cluster for one viewer: one list and one watch per kind, with the viewer's kubeconfig.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use kube::api::ListParams;
use stoker_api::experiment::Experiment;
use stoker_api::inference::InferenceJob;
use stoker_api::trial::Trial;
use stoker_ui::{ActionAccess, Site, Store, quoted};
use tokio::sync::mpsc::unbounded_channel;

use super::objects::{Objects, Opening};
use super::requests::Requests;
use super::watch::{Clients, OneClient, watch};
use crate::cluster::connect::{Cluster, Options};
use crate::cluster::storage;
use crate::failure::Failure;
use crate::run::record::random_hex;

/// Maximum number of events that are taken in before the pages see them.
pub(super) const BATCH: usize = 1_000;

/// Starts tasks that put the experiments and jobs of the cluster into the store.
///
/// # Errors
///
/// The cluster cannot be reached, or refuses to list experiments or trials.
pub(super) async fn start(
    options: &Options,
    all: bool,
    storage: storage::Options,
    store: Arc<Store>,
    allows_actions: bool,
) -> Result<Site, Failure> {
    let cluster = Cluster::connect(options).await?;
    // The first lists, so that a refusal ends the command with the server's words.
    cluster.list::<Experiment>("experiments", &ListParams::default().limit(1), all).await?;
    cluster.list::<Trial>("trials", &ListParams::default().limit(1), all).await?;
    let place = match all {
        true => format!("Cluster at {}, all namespaces", cluster.server),
        false => format!("Namespace {} of the cluster at {}", cluster.namespace, cluster.server),
    };
    let (sender, mut receiver) = unbounded_channel();
    let client: Arc<dyn Clients> = Arc::new(OneClient(cluster.client.clone()));
    let namespace = (!all).then(|| cluster.namespace.clone());
    tokio::spawn(watch::<Experiment>(client.clone(), namespace.clone(), sender.clone()));
    tokio::spawn(watch::<Trial>(client.clone(), namespace.clone(), sender.clone()));
    // A viewer who may not list jobs sees the experiments.
    tokio::spawn(watch::<InferenceJob>(client, namespace.clone(), sender));
    let mut objects = Objects::new(Opening::Once(storage));
    // Missing records may exist until the first lists are complete.
    objects.publish_failures(&store);
    tokio::spawn(async move {
        let mut changes = Vec::new();
        while receiver.recv_many(&mut changes, BATCH).await > 0 {
            let changed: BTreeSet<String> =
                changes.drain(..).flat_map(|change| objects.take_in(change)).collect();
            objects.publish(&changed, &store);
        }
    });
    let token = random_hex(super::TOKEN_BYTES)?;
    let shown = Arc::new(Mutex::new(namespace.into_iter().collect()));
    let created_in = cluster.namespace.clone();
    let requests = Arc::new(Requests::new(cluster, shown));
    Ok(Site {
        place,
        is_cluster: true,
        arguments: arguments(options),
        namespace: Some(created_in),
        actions: Some(Arc::new(ActionAccess::new(requests, allows_actions, token))),
        ..Site::default()
    })
}

/// Returns the arguments for commands that act on the same cluster, in any working directory.
/// Commands add the namespace where they need it.
fn arguments(options: &Options) -> String {
    let kubeconfig = options.kubeconfig.as_ref().map(|path| {
        let path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
        format!("--kubeconfig {}", quoted(&path.to_string_lossy()))
    });
    let context = options.context.as_deref();
    let context = context.map(|context| format!("--context {}", quoted(context)));
    kubeconfig.into_iter().chain(context).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copied_commands_name_the_cluster() {
        let check = |kubeconfig: Option<&str>, context: Option<&str>, expected: &str| {
            let options = Options {
                kubeconfig: kubeconfig.map(Into::into),
                context: context.map(str::to_owned),
                namespace: Some("ml".to_owned()),
            };
            assert_eq!(arguments(&options), expected);
        };
        check(None, None, "");
        check(None, Some("prod"), "--context prod");
        check(None, Some("prod east"), "--context 'prod east'");
        check(Some("/etc/kube"), Some("prod"), "--kubeconfig /etc/kube --context prod");
    }
}

//! `stoker version`: this program's, and the cluster's.

use serde_json::{Value, json};
use stoker_api::names::{API_VERSION, GROUP};

use super::connect::{Cluster, Options};
use crate::print::{self, Output};

const CLIENT: &str = env!("CARGO_PKG_VERSION");

/// What a cluster says of itself.
#[derive(Debug)]
struct Server {
    address: String,
    kubernetes: String,
    /// The versions of Stoker's resources that it serves; none where Stoker is not installed.
    versions: Vec<String>,
}

/// Prints the versions. A cluster that cannot be asked is told of, and is no failure.
pub(crate) async fn version(options: &Options, output: Output) {
    let server = match options.is_any() {
        true => Some(ask(options).await),
        false => None,
    };
    match output {
        Output::Json => print::out(value(server.as_ref())),
        Output::Text => print::out(text(server.as_ref())),
    }
}

async fn ask(options: &Options) -> Result<Server, String> {
    let cluster = Cluster::connect(options).await.map_err(|error| error.to_string())?;
    let kubernetes = cluster.ask("its version", cluster.client.apiserver_version()).await;
    let kubernetes = kubernetes.map_err(|error| error.to_string())?.git_version;
    let groups = cluster.ask("its API groups", cluster.client.list_api_groups()).await;
    let groups = groups.map_err(|error| error.to_string())?.groups;
    let ours = groups.into_iter().filter(|it| it.name == GROUP).flat_map(|it| it.versions);
    let versions = ours.map(|it| it.group_version).collect();
    Ok(Server { address: cluster.server, kubernetes, versions })
}

fn value(server: Option<&Result<Server, String>>) -> Value {
    let cluster = server.map(|it| match it {
        Ok(it) => json!({
            "server": it.address, "kubernetes": it.kubernetes, "resources": it.versions,
        }),
        Err(error) => json!({ "error": error }),
    });
    json!({ "client": CLIENT, "resources": API_VERSION, "cluster": cluster })
}

fn text(server: Option<&Result<Server, String>>) -> String {
    let client = format!("stoker {CLIENT}, for {API_VERSION}");
    let cluster = match server {
        None => "no cluster: there is no kubeconfig".to_owned(),
        Some(Err(error)) => error.clone(),
        Some(Ok(it)) => {
            let ours = match it.versions.as_slice() {
                [] => "Stoker is not installed".to_owned(),
                versions if versions.iter().any(|it| it == API_VERSION) => versions.join(", "),
                versions => {
                    format!("{}, which this stoker does not know", versions.join(", "))
                }
            };
            format!("cluster {}: Kubernetes {}, {ours}", it.address, it.kubernetes)
        }
    };
    format!("{client}\n{cluster}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(versions: &[&str], expected: &str) {
        let server = Server {
            address: "https://here".to_owned(),
            kubernetes: "v1.36.3".to_owned(),
            versions: versions.iter().map(|it| (*it).to_owned()).collect(),
        };
        let text = text(Some(&Ok(server)));
        let expected = format!("cluster https://here: Kubernetes v1.36.3, {expected}");
        assert_eq!(text.lines().nth(1), Some(expected.as_str()));
    }

    #[test]
    fn a_cluster_without_stoker_or_with_another_one_is_told_of() {
        check(&["stoker.dev/v1alpha1"], "stoker.dev/v1alpha1");
        check(&[], "Stoker is not installed");
        check(&["stoker.dev/v7"], "stoker.dev/v7, which this stoker does not know");
        assert!(text(None).contains("no cluster"));
        assert_eq!(value(None)["cluster"], Value::Null);
    }
}

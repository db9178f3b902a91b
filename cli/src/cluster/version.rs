//! `stoker version`: versions of this program and of the cluster.

use serde_json::{Value, json};
use stoker_api::names::{API_VERSION, GROUP};

use super::connect::{Cluster, Options};
use crate::print::{self, Output};

const CLIENT: &str = env!("CARGO_PKG_VERSION");

/// Versions of a cluster.
#[derive(Debug)]
struct Server {
    address: String,
    kubernetes: String,
    /// Served API versions of Stoker; empty if Stoker is not installed.
    versions: Vec<String>,
}

/// Prints the versions. Prints the error of an unreachable cluster, but does not fail.
pub(crate) async fn version(options: &Options, output: Output) {
    let server = match options.selects_cluster() {
        true => Some(query_server(options).await),
        false => None,
    };
    match output {
        Output::Json => print::out(value(server.as_ref())),
        Output::Text => print::out(text(server.as_ref())),
    }
}

async fn query_server(options: &Options) -> Result<Server, String> {
    let cluster = Cluster::connect(options).await.map_err(|error| error.to_string())?;
    let kubernetes = cluster.request("the Kubernetes version", cluster.client.apiserver_version());
    let kubernetes = kubernetes.await.map_err(|error| error.to_string())?.git_version;
    let groups = cluster.request("the API groups", cluster.client.list_api_groups()).await;
    let groups = groups.map_err(|error| error.to_string())?.groups;
    let ours = groups.into_iter().filter(|group| group.name == GROUP);
    let versions = ours.flat_map(|group| group.versions);
    let versions = versions.map(|version| version.group_version).collect();
    Ok(Server { address: cluster.server, kubernetes, versions })
}

fn value(server: Option<&Result<Server, String>>) -> Value {
    let cluster = server.map(|server| match server {
        Ok(server) => json!({
            "server": server.address,
            "kubernetes": server.kubernetes,
            "resources": server.versions,
        }),
        Err(error) => json!({ "error": error }),
    });
    json!({ "client": CLIENT, "resources": API_VERSION, "cluster": cluster })
}

fn text(server: Option<&Result<Server, String>>) -> String {
    let client = format!("stoker {CLIENT}, for {API_VERSION}");
    let cluster = match server {
        None => "no cluster: kubeconfig not found".to_owned(),
        Some(Err(error)) => error.clone(),
        Some(Ok(server)) => {
            let ours = match server.versions.as_slice() {
                [] => "Stoker is not installed".to_owned(),
                versions if versions.iter().any(|version| version == API_VERSION) => {
                    versions.join(", ")
                }
                versions => {
                    format!("{}, not supported by this version of stoker", versions.join(", "))
                }
            };
            format!("cluster {}: Kubernetes {}, {ours}", server.address, server.kubernetes)
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
            versions: versions.iter().map(|version| (*version).to_owned()).collect(),
        };
        let text = text(Some(&Ok(server)));
        let expected = format!("cluster https://here: Kubernetes v1.36.3, {expected}");
        assert_eq!(text.lines().nth(1), Some(expected.as_str()));
    }

    #[test]
    fn missing_and_unknown_versions_are_shown() {
        check(&["stoker.dev/v1alpha1"], "stoker.dev/v1alpha1");
        check(&[], "Stoker is not installed");
        check(&["stoker.dev/v7"], "stoker.dev/v7, not supported by this version of stoker");
        assert!(text(None).contains("no cluster"));
        assert_eq!(value(None)["cluster"], Value::Null);
    }
}

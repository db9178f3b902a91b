//! The page of the cluster in a browser: its own image, a viewer with a token, data in the bucket.

use serde_json::{Value, json};
use stoker_test_cluster::{Cluster, PATIENCE, wait_until};
use stoker_tests::repository;

use super::{NAMESPACE, cleaned_up, cluster, ended, helm_install, state, stoker_on, wait_for};
use crate::browser::{Browser, Tools};

/// Name of the viewer's service account.
const VIEWER: &str = "ada";

/// Installs the page, and returns its URL on this machine.
fn install_page(cluster: &Cluster) -> String {
    let sets = ["enabled=true", "image.pullPolicy=Never"].map(|set| format!("ui.{set}"));
    let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
    helm_install(cluster, "upgrade", &sets).unwrap();
    // The service of the page has this pod only. Services cannot be reached from here.
    let label = "app.kubernetes.io/component=ui";
    let address = wait_until("the page's pod is the only one and ready", || {
        let pods = cluster.get(&["-n", "stoker-system", "pods", "-l", label]);
        let pods = pods.map_err(|error| error.to_string())?;
        match pods["items"].as_array().map(Vec::as_slice) {
            Some([pod]) if pod["status"]["containerStatuses"][0]["ready"] == json!(true) => {
                Ok(pod["status"]["podIP"].as_str().unwrap().to_owned())
            }
            _ => Err(pods.to_string()),
        }
    });
    let address = address.unwrap_or_else(|error| panic!("{error}\n{}", state(cluster)));
    format!("http://localhost:{}/", cluster.forward(&address, 8265).unwrap())
}

/// Creates a viewer as docs/ui.md describes, and returns its token.
fn viewer(cluster: &Cluster) -> String {
    let account = format!("--serviceaccount={NAMESPACE}:{VIEWER}");
    for arguments in [
        &["create", "serviceaccount", VIEWER][..],
        &["create", "rolebinding", VIEWER, "--clusterrole=view", &account],
        &[
            "create",
            "role",
            "read-storage",
            "--verb=get",
            "--resource=secrets",
            "--resource-name=storage",
        ],
        &["create", "rolebinding", "read-storage", "--role=read-storage", &account],
        &["create", "clusterrole", "list-nodes", "--verb=list", "--resource=nodes"],
        &["create", "clusterrolebinding", "list-nodes", "--clusterrole=list-nodes", &account],
    ] {
        cluster.kubectl(&[&["-n", NAMESPACE][..], arguments].concat()).unwrap();
    }
    cluster.token(NAMESPACE, VIEWER, None).unwrap()
}

/// Creates an experiment from an example of iris.
fn create(cluster: &Cluster, file: &str, sets: &[&str]) {
    let path = repository().join("examples/iris").join(file).display().to_string();
    let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
    stoker_on(cluster, &[&["experiment", "create", &path][..], &sets].concat());
}

/// Waits until an experiment has completed.
fn wait_for_completion(cluster: &Cluster, name: &str) {
    let experiment = ended(cluster, name);
    assert_eq!(experiment["status"]["phase"], "Completed", "{}", state(cluster));
}

/// Returns a trial and one of its checkpoints, as the script reads them.
fn checkpoint_of(cluster: &Cluster, name: &str, trial: &Value) -> String {
    let arguments = ["checkpoint", "list", name, "--output", "json"];
    let list: Vec<Value> = serde_json::from_str(&stoker_on(cluster, &arguments)).unwrap();
    let found = list.iter().find(|one| one["trial"] == *trial);
    let checkpoint = found.unwrap_or_else(|| panic!("{trial} {list:?}"));
    json!({ "trial": trial, "checkpoint": checkpoint["name"] }).to_string()
}

#[test]
fn viewers_follow_a_search_in_a_browser() {
    if !stoker_test_cluster::nodes_enabled() {
        return;
    }
    let Some(tools) = Tools::find() else { return };
    let (cluster, _turn) = cluster();
    let input = json!({
        "url": install_page(cluster), "token": viewer(cluster), "namespace": NAMESPACE,
        "id": "iris-asha", "other": "iris-random",
    });
    // Trains one short trial after the other, for as long as the browser needs.
    let long = [
        "searcher.maxLength.epochs=2",
        "searcher.random.maxTrials=1000",
        "searcher.random.maxConcurrentTrials=1",
    ];
    create(cluster, "random.yaml", &long);
    let browser = Browser::wait();
    tools.run(&browser, "cluster.mjs", &input, |command| match command {
        "start" => {
            let sets = [
                "searcher.maxLength.epochs=4",
                "searcher.asyncHalving.maxTrials=3",
                "searcher.asyncHalving.numRungs=2",
                "minValidationPeriod={epochs: 1}",
            ];
            create(cluster, "asha.yaml", &sets);
            "created".to_owned()
        }
        "end" => {
            wait_for_completion(cluster, "iris-asha");
            "ended".to_owned()
        }
        "running" => {
            for trial in ["iris-random-0", "iris-random-1"] {
                wait_for(PATIENCE, cluster, "trial", trial, "completes", |status| {
                    status["phase"] == "Completed"
                });
            }
            checkpoint_of(cluster, "iris-random", &json!(0))
        }
        "details" => {
            stoker_on(cluster, &["experiment", "cancel", "iris-random"]);
            ended(cluster, "iris-random");
            // Superfluous checkpoints are deleted after the end.
            let best = cleaned_up(cluster, "iris-asha")["status"]["best"].clone();
            checkpoint_of(cluster, "iris-asha", &best["index"])
        }
        other => panic!("the script printed {other:?}"),
    });
    for name in ["iris-asha", "iris-random"] {
        stoker_on(cluster, &["experiment", "delete", name]);
    }
}

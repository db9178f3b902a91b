//! An inference job on the cluster processes each row exactly once, although its workers and the
//! operator are killed.

use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};
use stoker_storage::Storage;
use stoker_test_cluster::{Cluster, PATIENCE};
use stoker_tests::{describe_output, repository};

use super::{NAMESPACE, OPERATOR_PODS, cluster, ended, get, state, stoker_on, wait_for};

/// Number of input rows.
const ROWS: usize = 6000;
/// Directory of the bucket that [`download`] downloads: URL, space, endpoint.
const ENV_FROM: &str = "STOKER_TEST_FROM";
/// Local directory that [`download`] writes to.
const ENV_TO: &str = "STOKER_TEST_TO";

/// Not a test: a separate process, with the store's credentials in its environment, that downloads
/// a directory of the bucket.
#[test]
fn download() {
    let variable = |name: &str| std::env::var(name).ok();
    let (Some(from), Some(to)) = (variable(ENV_FROM), variable(ENV_TO)) else { return };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let (url, endpoint) = from.split_once(' ').unwrap();
        let storage = Storage::open(url, Some(endpoint)).unwrap();
        for path in storage.list("").await.unwrap() {
            let file = Path::new(&to).join(&path);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, storage.get(&path).await.unwrap()).unwrap();
        }
    });
}

/// Downloads a directory of the bucket in a separate process.
fn fetch(cluster: &Cluster, url: &str, to: &Path) {
    let s3 = cluster.s3();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "two_nodes::jobs::download"])
        .env(ENV_FROM, format!("{url} {}", s3.local_endpoint))
        .env(ENV_TO, to)
        .env("AWS_ACCESS_KEY_ID", &s3.access_key)
        .env("AWS_SECRET_ACCESS_KEY", &s3.secret_key)
        .env("AWS_REGION", "us-east-1")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", describe_output(&output));
}

fn job(cluster: &Cluster, name: &str) -> Value {
    get(cluster, "inferencejob", name)["status"].clone()
}

fn wait_for_rows(cluster: &Cluster, name: &str, rows: u64) {
    let what = format!("has {rows} rows");
    wait_for(PATIENCE, cluster, "inferencejob", name, &what, |status| {
        status["rows"].as_u64().is_some_and(|done| done >= rows)
    });
}

/// Returns the name of the pod of a slot's live attempt.
fn pod_of(cluster: &Cluster, name: &str, slot: usize) -> String {
    let attempt = job(cluster, name)["workers"][slot]["attempt"].as_u64().unwrap();
    format!("{name}-a{attempt}-w{slot}")
}

/// Returns IDs and species from all parts, in manifest order.
fn rows(folder: &Path) -> Vec<(String, String)> {
    let read = |name: &str| std::fs::read_to_string(folder.join(name)).unwrap();
    let manifest: Value = serde_json::from_str(&read("manifest.json")).unwrap();
    let mut rows = vec![];
    for part in manifest["parts"].as_array().unwrap() {
        for line in read(part["name"].as_str().unwrap()).lines().skip(1) {
            let mut cells = line.split(',').map(str::to_owned);
            rows.push((cells.next().unwrap(), cells.next().unwrap()));
        }
    }
    assert_eq!(manifest["rows"], json!(rows.len()));
    rows
}

#[test]
fn kills_neither_lose_nor_duplicate_cluster_rows() {
    if !stoker_test_cluster::nodes_enabled() {
        return;
    }
    let (cluster, _turn) = cluster();
    let iris = repository().join("examples/iris");
    let path = |name: &str| iris.join(name).display().to_string();
    let local = cluster.s3().local_endpoint.clone();
    stoker_on(cluster, &["experiment", "create", &path("const.yaml")]);
    assert_eq!(ended(cluster, "iris")["status"]["phase"], "Completed", "{}", state(cluster));
    // The input repeats the six flowers. It is sent with the job.
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (folder.path().join("input"), folder.path().join("output"));
    std::fs::create_dir(&input).unwrap();
    let flowers = std::fs::read_to_string(iris.join("flowers.csv")).unwrap();
    let (header, flowers) = flowers.split_once('\n').unwrap();
    let flowers = flowers.lines().map(|line| line.split_once(',').unwrap());
    let flowers: Vec<&str> = flowers.map(|(_, flower)| flower).collect();
    let mut text = format!("{header}\n");
    for (id, flower) in (0..ROWS).zip(flowers.iter().cycle()) {
        text += &format!("{id},{flower}\n");
    }
    std::fs::write(input.join("many.csv"), text).unwrap();
    let input = input.display().to_string();
    let file = path("job.yaml");
    let create = ["job", "create", &file, &input, "--set", "input.url=many.csv"];
    let sets = ["--set", "shardRows=4", "--set", "resources.slots=3", "--storage-endpoint", &local];
    // URL of the operator's storage. The endpoint differs from the operator's.
    let at = format!("s3://{}/e2e", cluster.s3().bucket);
    stoker_on(cluster, &[&create[..], &sets, &["--storage-url", &at]].concat());

    let name = "iris-species";
    wait_for_rows(cluster, name, 200);
    let kill = |pod: &str| {
        let now = ["--force", "--grace-period=0"];
        cluster.kubectl(&[&["-n", NAMESPACE, "delete", "pod", pod], &now[..]].concat()).unwrap();
    };
    kill(&pod_of(cluster, name, 0));
    let operators = [OPERATOR_PODS, "-n", "stoker-system", "--wait=false"];
    cluster.kubectl(&[&["delete", "pod", "-l"], &operators[..]].concat()).unwrap();
    kill(&pod_of(cluster, name, 1));
    let done = job(cluster, name)["rows"].as_u64().unwrap();
    assert!(done < ROWS as u64, "killed too late: {done}");

    let wait = ["job", "wait", name, "--timeout", "5m", "--output", "json"];
    let outcome: Value = serde_json::from_str(&stoker_on(cluster, &wait)).unwrap();
    assert_eq!(outcome["phase"], "Completed", "{outcome}\n{}", state(cluster));
    assert_eq!((&outcome["rows"], &outcome["inputRows"]), (&json!(ROWS), &json!(ROWS)));
    let status = job(cluster, name);
    assert_eq!((&status["restarts"], &status["progressPercent"]), (&json!(0), &json!(100)));
    assert!(status["attempts"].as_u64().unwrap() >= 7, "{status}");
    assert!(status["ends"].as_array().is_some_and(|ends| ends.len() >= 2), "{status}");

    fetch(cluster, outcome["output"].as_str().unwrap(), &output);
    let rows = rows(&output);
    let ids: Vec<String> = rows.iter().map(|(id, _)| id.clone()).collect();
    assert_eq!(ids, (0..ROWS).map(|id| id.to_string()).collect::<Vec<_>>());
    for (at, (_, species)) in rows.iter().enumerate() {
        assert_eq!(*species, rows[at % flowers.len()].1, "row {at}");
    }
    // The data set numbers its species. The first flower is a setosa, the second a versicolor.
    assert_eq!((rows[0].1.as_str(), rows[1].1.as_str()), ("0", "1"));
    let described = stoker_on(cluster, &["job", "describe", name]);
    assert!(described.contains("PodDeleted") || described.contains("Preempted"), "{described}");
    let logs = stoker_on(cluster, &["job", "logs", name, "--storage-endpoint", &local]);
    assert!(logs.contains("6000 rows of 1 files in 1500 shards"), "{logs}");
    let listed = stoker_on(cluster, &["job", "list"]);
    assert!(listed.contains("Completed") && listed.contains("6000"), "{listed}");
}

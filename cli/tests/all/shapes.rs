//! Commands print the same shape of JSON for local runs and for a cluster. The cluster has the
//! objects of the local run.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::cluster_fixture::ClusterFixture;
use crate::fixture::{RunFixture, check, files, random};

/// Fields of Kubernetes, which local objects lack.
const OF_KUBERNETES: [&str; 3] = ["generation", "resourceVersion", "creationTimestamp"];
/// Annotation of `kubectl apply`.
const OF_KUBECTL: &str = "kubectl.kubernetes.io/last-applied-configuration";
/// Commands with the same shape of output.
const COMMANDS: [&str; 11] = [
    "experiment list",
    "experiment describe scripted",
    "trial list scripted",
    "trial describe scripted-0",
    "checkpoint list scripted",
    "checkpoint list scripted-0",
    "trial logs scripted-0",
    "experiment logs scripted",
    "job list",
    "job describe species",
    "job logs species",
];

/// Returns keys and types of a value. Elements of an array are merged.
fn shape(value: &Value) -> Value {
    match value {
        Value::Object(fields) => {
            fields.iter().map(|(name, value)| (name.clone(), shape(value))).collect()
        }
        Value::Array(items) => {
            let mut merged = json!({});
            for item in items {
                match (shape(item), merged.as_object_mut()) {
                    (Value::Object(fields), Some(merged)) => merged.extend(fields),
                    (other, _) => merged = other,
                }
            }
            json!([merged])
        }
        Value::String(_) => "string".into(),
        Value::Number(_) => "number".into(),
        Value::Bool(_) => "bool".into(),
        Value::Null => "null".into(),
    }
}

fn without_kubernetes(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            if let Some(metadata) = fields.get_mut("metadata").and_then(Value::as_object_mut) {
                metadata.retain(|name, _| !OF_KUBERNETES.contains(&name.as_str()));
                if let Some(annotations) = metadata.get_mut("annotations") {
                    annotations.as_object_mut().unwrap().remove(OF_KUBECTL);
                }
                metadata.retain(|_, value| *value != json!({}));
                // Trials have a UID only on a cluster.
                if metadata.get("name").is_some_and(|name| name != "scripted" && name != "species")
                {
                    metadata.remove("uid");
                }
            }
            fields.values_mut().for_each(without_kubernetes);
        }
        Value::Array(items) => items.iter_mut().for_each(without_kubernetes),
        _ => {}
    }
}

/// Returns the shapes of the lines of an output.
fn shapes(text: &str) -> Vec<Value> {
    let of = |line: &str| {
        let mut value: Value = serde_json::from_str(line).unwrap();
        without_kubernetes(&mut value);
        shape(&value)
    };
    text.lines().map(of).collect()
}

/// Returns the objects of the local run, by kind and name.
fn objects(local: &RunFixture) -> BTreeMap<(String, String), Value> {
    let mut objects = BTreeMap::new();
    for run in files(&local.root().join("local")).iter().filter(|path| path.is_dir()) {
        let record = run.join("record");
        let mut paths = files(&record.join("trials"));
        paths.extend([record.join("experiment.json"), record.join("job.json")]);
        for path in paths.iter().filter(|path| path.exists()) {
            let object: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
            let text = |value: &Value| value.as_str().unwrap().to_lowercase();
            objects.insert((text(&object["kind"]), text(&object["metadata"]["name"])), object);
        }
    }
    objects
}

/// Writes the record and a log of a local job.
fn write_job(local: &RunFixture, cluster: &ClusterFixture) {
    let mut job = cluster.job();
    job["spec"]["output"]["url"] = json!("s3://bucket/out");
    job["metadata"]["uid"] = json!("0123456789abcdef");
    job["metadata"]["namespace"] = json!("default");
    job["metadata"]["annotations"] = json!({"stoker.dev/root": "x"});
    job["status"] = json!({
        "phase": "Running", "stage": "work", "attempts": 3, "running": 2, "rows": 20,
        "rowsTotal": 80, "rejected": 0, "restarts": 1, "progressPercent": 25,
        "observedGeneration": 1, "output": "s3://bucket/out", "workers": [],
    });
    let write = |path: &str, text: &str| {
        let path = local.root().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    };
    write("local/species-01234567/record/job.json", &job.to_string());
    write("default/species-01234567/workers/0/logs/0/0-00000000.log", "planned\n");
}

/// Creates the objects of the local run in the cluster, with logs.
fn copy(local: &RunFixture, cluster: &ClusterFixture) {
    for ((kind, name), object) in objects(local) {
        let mut copy = object.clone();
        let metadata = copy["metadata"].as_object_mut().unwrap();
        metadata.retain(|field, _| ["name", "labels", "annotations"].contains(&field.as_str()));
        if kind == "trial" {
            let labels = json!({"stoker.dev/experiment": "scripted", "stoker.dev/trial": name});
            metadata.insert("labels".to_owned(), labels);
        }
        copy.as_object_mut().unwrap().remove("status");
        cluster.apply(copy);
        cluster.set_status(&kind, &name, &object["status"]);
    }
    let uid = |kind: &str, name: &str| -> String {
        let uid = cluster.object(kind, name)["metadata"]["uid"].clone();
        uid.as_str().unwrap()[..8].to_owned()
    };
    let folder = format!("store/{}", cluster.namespace);
    let trials = format!("{folder}/scripted-{}/trials", uid("experiment", "scripted"));
    for trial in 0..2 {
        cluster.write(&format!("{trials}/{trial}/logs/0/0-00000000.log"), "line\n");
    }
    let job = format!("{folder}/species-{}", uid("inferencejob", "species"));
    cluster.write(&format!("{job}/workers/0/logs/0/0-00000000.log"), "planned\n");
}

#[test]
fn local_and_cluster_outputs_have_the_same_shape() {
    let Some(cluster) = ClusterFixture::new("shapes") else { return };
    let mut local = RunFixture::new(random(2), "");
    local.labels = json!({"team": "a"});
    local.spec["checkpointStorage"] = json!({"url": local.root()});
    check(&local.run(&[]), 0, "");
    write_job(&local, &cluster);
    copy(&local, &cluster);
    for command in COMMANDS {
        let json = format!("{command} --output json");
        let (here, there) = (local.check(&json, 0, ""), cluster.check(&json, 0, ""));
        let (here, there) = (shapes(&here), shapes(&there));
        assert_eq!(here[0], there[0], "{command}");
    }
    for command in
        ["experiment list", "trial list scripted", "checkpoint list scripted", "job list"]
    {
        let header = |text: String| -> Vec<String> {
            let words = text.lines().next().unwrap().split_whitespace();
            words.map(str::to_owned).collect()
        };
        let wide = format!("{command} -o wide");
        let (here, there) = (local.check(&wide, 0, ""), cluster.check(&wide, 0, ""));
        assert_eq!(header(here), header(there), "{command}");
    }
}

//! The admission policy for free-form fields.

use serde_json::{Value, json};
use tokio::task::block_in_place;

use crate::setup::{TestNamespace, runtime};

/// Updates an object without an effect, and returns the error if the API server refuses it.
fn try_patch(ns: &TestNamespace, object: &str, patch: &Value) -> Result<String, String> {
    let (space, patch) = (ns.namespace.as_str(), patch.to_string());
    let arguments =
        ["patch", object, "-n", space, "--type=merge", "-p", &patch, "--dry-run=server"];
    block_in_place(|| ns.plane.kubectl(&arguments)).map_err(|error| error.to_string())
}

/// The rules of the definitions accept all of these changes.
#[test]
fn renamed_keys_of_free_form_fields_are_refused() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("free-form").await;
        let common = json!({
            "entrypoint": { "command": ["stoker-trainer", "iris"] },
            "data": { "train": "s3://a" },
            "hyperparameters": { "x": 1.0 },
            "pod": { "volumes": [{ "name": "data", "emptyDir": {} }] },
            "podOverrides": { "spec": { "hostNetwork": false } },
        });
        let mut experiment = json!({ "searcher": {
            "metric": "loss", "maxLength": { "batches": 4 }, "random": { "maxTrials": 2 },
        } });
        let mut job = crate::jobs::job(1);
        for (kind, spec) in [("Experiment", &mut experiment), ("InferenceJob", &mut job)] {
            crate::setup::merge(spec, &common);
            let object = json!({
                "apiVersion": "stoker.dev/v1alpha1", "kind": kind,
                "metadata": { "name": "free", "namespace": ns.namespace }, "spec": spec,
            });
            block_in_place(|| ns.plane.apply(&object.to_string())).unwrap();
        }
        for object in ["experiment/free", "inferencejob/free"] {
            for (field, change) in [
                ("data", json!({ "train": null, "training": "s3://b" })),
                ("hyperparameters", json!({ "x": null, "y": 1.0 })),
                ("pod", json!({ "volumes": [{ "name": "data", "hostPath": { "path": "/" } }] })),
                ("podOverrides", json!({ "spec": null, "metadata": {} })),
            ] {
                let patch = json!({ "spec": { field: change } });
                // A new policy takes effect soon after it was created.
                let error = stoker_test_cluster::wait_until("the change is refused", || {
                    try_patch(&ns, object, &patch).err().ok_or_else(|| patch.to_string())
                });
                let error = error.unwrap();
                let expected = format!("spec.{field} cannot change after creation");
                assert!(error.contains(&expected), "{object}: {error}");
            }
        }
        for (object, patch) in [
            (
                "experiment/free",
                json!({ "spec": { "searcher": { "random": { "maxTrials": 3 } } } }),
            ),
            ("inferencejob/free", json!({ "spec": { "state": "paused" } })),
        ] {
            try_patch(&ns, object, &patch).unwrap();
        }
    });
}

/// A field that only the API server sets is a conflict between `helm` and `kubectl apply`.
#[test]
fn policy_in_the_chart_is_complete() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("complete-policy").await;
        for object in stoker_api::crd::policy() {
            let (kind, name) = (&object["kind"], &object["metadata"]["name"]);
            let (kind, name) = (kind.as_str().unwrap(), name.as_str().unwrap());
            let stored = block_in_place(|| ns.plane.get(&[kind, name])).unwrap();
            assert_eq!(stored["spec"], object["spec"], "{kind}");
        }
    });
}

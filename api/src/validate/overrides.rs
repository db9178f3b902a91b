//! Validation of `podOverrides` against the Kubernetes types.

use k8s_openapi::api::core::v1::PodTemplateSpec;
use serde_ignored::Path;
use serde_json::Value;

use super::{FieldError, item, member};

/// Rejects values of the wrong type, and keys that a pod template does not have. Kubernetes would
/// drop such a key, and the pod would run without it.
pub(super) fn check(root: &str, overrides: &Value, errors: &mut Vec<FieldError>) {
    let mut unknown = Vec::new();
    let mut note = |path: Path<'_>| {
        let mut segments = Vec::new();
        collect(&path, &mut segments);
        unknown.push(segments);
    };
    let ignored = serde_ignored::Deserializer::new(overrides, &mut note);
    let parsed: Result<PodTemplateSpec, _> = serde_path_to_error::deserialize(ignored);
    for segments in unknown {
        let (path, value) = locate(root, overrides, &segments);
        // Another rule already rejects this key, with a more specific remedy.
        if !errors.iter().any(|error| error.path == path) {
            let rule = "is not a field of a Kubernetes pod template; correct or remove it";
            errors.push(FieldError::new(&path, value, rule));
        }
    }
    if let Err(error) = parsed {
        let segments = error.path().iter().filter_map(|segment| match segment {
            serde_path_to_error::Segment::Seq { index } => Some(Segment::Item(*index)),
            serde_path_to_error::Segment::Map { key } => Some(Segment::Key(key.clone())),
            _ => None,
        });
        let (path, value) = locate(root, overrides, &segments.collect::<Vec<_>>());
        let rule = format!("does not fit a Kubernetes pod template: {}", error.inner());
        errors.push(FieldError::new(&path, value, &rule));
    }
}

enum Segment {
    Key(String),
    Item(usize),
}

fn collect(path: &Path<'_>, segments: &mut Vec<Segment>) {
    match path {
        Path::Root => {}
        Path::Seq { parent, index } => {
            collect(parent, segments);
            segments.push(Segment::Item(*index));
        }
        Path::Map { parent, key } => {
            collect(parent, segments);
            segments.push(Segment::Key(key.clone()));
        }
        Path::Some { parent }
        | Path::NewtypeStruct { parent }
        | Path::NewtypeVariant { parent } => collect(parent, segments),
    }
}

/// Returns the path and the value of a field.
fn locate<'a>(root: &str, overrides: &'a Value, segments: &[Segment]) -> (String, &'a Value) {
    let start = (root.to_owned(), overrides);
    segments.iter().fold(start, |(path, value), segment| match segment {
        Segment::Key(key) => (member(&path, key), &value[key]),
        Segment::Item(idx) => (item(&path, *idx), &value[*idx]),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn check(overrides: Value, expected: &[&str]) {
        let mut errors = Vec::new();
        super::check("spec.podOverrides", &overrides, &mut errors);
        let paths: Vec<_> = errors.iter().map(|error| error.path.as_str()).collect();
        assert_eq!(paths, expected, "{errors:#?}");
    }

    #[test]
    fn unknown_keys_are_rejected_with_their_path() {
        check(json!({ "spce": {} }), &["spec.podOverrides.spce"]);
        check(json!({ "spec": { "contianers": [] } }), &["spec.podOverrides.spec.contianers"]);
        check(
            json!({ "spec": { "containers": [{ "name": "a" }, {
                "name": "trainer", "ressources": {}, "env": [{ "name": "A", "val": "1" }],
            }] } }),
            &[
                "spec.podOverrides.spec.containers[1].env[0].val",
                "spec.podOverrides.spec.containers[1].ressources",
            ],
        );
        check(json!({ "spec": { "hostnme": null } }), &["spec.podOverrides.spec.hostnme"]);
        check(json!({ "spec": { "containers": 5 } }), &["spec.podOverrides.spec.containers"]);
        check(
            json!({ "spec": { "containers": [{ "name": "trainer", "stdin": "yes" }] } }),
            &["spec.podOverrides.spec.containers[0].stdin"],
        );
    }

    #[test]
    fn known_keys_are_accepted() {
        check(json!({}), &[]);
        check(json!({ "metadata": null, "spec": null }), &[]);
        check(
            json!({
                "metadata": { "labels": { "any.key/x": "y" }, "annotations": { "a": "b" } },
                "spec": {
                    "containers": [{
                        "name": "trainer", "stdin": true,
                        "resources": { "limits": { "cpu": 4, "memory": "1Gi", "x.y/z": "1" } },
                        "livenessProbe": { "httpGet": { "port": "http" } },
                        "env": [{
                            "name": "A",
                            "valueFrom": { "fieldRef": { "fieldPath": "spec.nodeName" } },
                        }],
                    }],
                    "securityContext": { "runAsUser": 1000, "fsGroup": null },
                    "hostNetwork": true,
                    "dnsPolicy": "Sometimes",
                    "resourceClaims": [{ "name": "gpu", "resourceClaimTemplateName": "one" }],
                    "volumes": [{
                        "name": "v",
                        "csi": { "driver": "d", "volumeAttributes": { "k": "v" } },
                    }],
                    "topologySpreadConstraints": [{
                        "maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule", "topologyKey": "zone",
                        "labelSelector": { "matchLabels": { "a": "b" } },
                    }],
                    "affinity": { "podAffinity": {
                        "requiredDuringSchedulingIgnoredDuringExecution": [
                            { "topologyKey": "z" },
                        ],
                    } },
                },
            }),
            &[],
        );
    }
}

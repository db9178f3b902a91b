//! Validation of `podOverrides` against the Kubernetes types.

use k8s_openapi::api::core::v1::PodTemplateSpec;
use serde_ignored::Path;
use serde_json::{Map, Value};

use super::{FieldError, item, member};

/// Rejects values of the wrong type, and keys that a pod template does not have. Kubernetes would
/// drop such a key, and the pod would run without it.
pub(super) fn check(root: &str, overrides: &Value, errors: &mut Vec<FieldError>) {
    let mut rest = overrides.clone();
    let mut parsed = parse(&rest);
    let mut wrong: Vec<String> = Vec::new();
    // The parser stops at the first wrong value, so each one is removed.
    while let Some((mut segments, rule)) = parsed.wrong.take() {
        let (path, value) = locate(root, overrides, &segments);
        let mut replacement = Value::Null;
        if wrong.contains(&path) {
            // The value must not be empty either.
            segments.pop();
        } else {
            if let Some(Segment::Item(_)) = segments.last() {
                replacement = Value::Object(Map::new());
            }
            errors.push(FieldError::new(&path, value, &rule));
            wrong.push(path);
        }
        let target = locate_mut(&mut rest, &segments).filter(|_| !segments.is_empty());
        let Some(target) = target else { break };
        *target = replacement;
        parsed = parse(&rest);
    }
    for segments in parsed.unknown {
        let (path, value) = locate(root, overrides, &segments);
        // Another rule already rejects this key, with a more specific remedy.
        if !errors.iter().any(|error| error.path == path) {
            let rule = "is not a field of a Kubernetes pod template; correct or remove it";
            errors.push(FieldError::new(&path, value, rule));
        }
    }
}

/// Result of reading a pod template.
struct Parsed {
    /// Keys that a pod template does not have, before the wrong value.
    unknown: Vec<Vec<Segment>>,
    /// First value of a wrong type, with the rule.
    wrong: Option<(Vec<Segment>, String)>,
}

fn parse(overrides: &Value) -> Parsed {
    let mut unknown = Vec::new();
    let mut note = |path: Path<'_>| {
        let mut segments = Vec::new();
        collect(&path, &mut segments);
        unknown.push(segments);
    };
    let ignored = serde_ignored::Deserializer::new(overrides, &mut note);
    let parsed: Result<PodTemplateSpec, _> = serde_path_to_error::deserialize(ignored);
    let wrong = parsed.err().map(|error| {
        let segments = error.path().iter().filter_map(|segment| match segment {
            serde_path_to_error::Segment::Seq { index } => Some(Segment::Item(*index)),
            serde_path_to_error::Segment::Map { key } => Some(Segment::Key(key.clone())),
            _ => None,
        });
        (segments.collect(), rule_of(&error.inner().to_string()))
    });
    Parsed { unknown, wrong }
}

/// Converts an error of the parser, such as `invalid type: map, expected a sequence`.
fn rule_of(error: &str) -> String {
    let expected = error.rsplit_once("expected ").map_or("", |(_, expected)| expected);
    let is_out_of_range = error.starts_with("invalid value: integer");
    let kind = match expected {
        "a sequence" => "a list",
        "a string" => "a string",
        "a boolean" => "true or false",
        "i32" if is_out_of_range => "an integer from -2147483648 to 2147483647",
        "i32" | "i64" if !is_out_of_range => "an integer",
        "Quantity" => "a quantity such as 500m",
        "IntOrString" => "an integer or a string",
        // A type of Kubernetes, such as `PodSpec`.
        name if name == "a map" || name.starts_with(|char: char| char.is_ascii_uppercase()) => {
            "an object"
        }
        _ => return format!("does not fit a Kubernetes pod template: {error}"),
    };
    format!("must be {kind}, as in a Kubernetes pod template")
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

fn locate_mut<'a>(overrides: &'a mut Value, segments: &[Segment]) -> Option<&'a mut Value> {
    segments.iter().try_fold(overrides, |value, segment| match segment {
        Segment::Key(key) => value.get_mut(key.as_str()),
        Segment::Item(idx) => value.get_mut(*idx),
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
    fn all_values_of_wrong_types_are_rejected() {
        let overrides = json!({ "spec": {
            "containers": [3, {
                "name": "trainer", "args": ["a", 7, 8], "tty": 1,
                "livenessProbe": { "periodSeconds": 3_000_000_000_u32 },
            }],
            "hostname": [], "priority": "high", "securityContext": true, "volumes": {}, "x": 1,
        } });
        let mut errors = Vec::new();
        super::check("root", &overrides, &mut errors);
        let mut texts: Vec<_> = errors.iter().map(ToString::to_string).collect();
        texts.sort();
        let texts = texts.join("\n").replace(", as in a Kubernetes pod template", "");
        let expected = "\
root.spec.containers[0]: must be an object (found 3)
root.spec.containers[1].args[1]: must be a string (found 7)
root.spec.containers[1].livenessProbe.periodSeconds: must be an integer from -2147483648 to \
2147483647 (found 3000000000)
root.spec.containers[1].tty: must be true or false (found 1)
root.spec.hostname: must be a string (found [])
root.spec.priority: must be an integer (found \"high\")
root.spec.securityContext: must be an object (found true)
root.spec.volumes: must be a list (found {})
root.spec.x: is not a field of a Kubernetes pod template; correct or remove it (found 1)";
        assert_eq!(texts, expected);
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

//! Values of the chart: all are documented, and unknown or invalid values are refused.

use serde_json::{Value, json};
use stoker_tests::{describe_output, repository};

use super::{arguments, helm, objects, read, run};

/// Checks that helm refuses `values` with the error `expected`.
#[track_caller]
fn check_refused(values: &str, expected: &str) {
    let Some(helm) = helm() else { return };
    let output = run(&helm, &["template", "stoker", "charts/stoker"], values);
    let text = describe_output(&output);
    assert!(!output.status.success() && text.contains(expected), "{values}: {text}");
}

#[test]
fn unknown_and_invalid_values_are_refused() {
    check_refused("wathcNamespaces: [a]", "additional properties 'wathcNamespaces' not allowed");
    check_refused("image: { name: a }", "at '/image': additional properties 'name'");
    check_refused("networkPolicy: { egress: { on: true } }", "at '/networkPolicy/egress'");
    check_refused("affinity: { pods: {} }", "at '/affinity': additional properties 'pods'");
    check_refused(
        "tolerations: [{ keys: a }]",
        "at '/tolerations/0': additional properties 'keys'",
    );
    check_refused("extraEnv: [{ name: A, valeu: b }]", "at '/extraEnv/0': additional properties");
    check_refused("replicas: two", "at '/replicas': got string, want integer");
    check_refused("log: { level: loud noise }", "at '/log/level'");
    check_refused("limits: { startingGangsMax: 0 }", "minimum: got 0, want 1");
    check_refused("watchNamespaces: [Vision]", "at '/watchNamespaces/0'");
    check_refused("storage: { url: bucket/root }", "at '/storage/url'");
    let without = "networkPolicy: { enabled: false }\nui: { from: [{ podSelector: {} }] }";
    check_refused(without, "at '/ui/from': maxItems");
    let without = "networkPolicy: { enabled: false, metricsFrom: [{ podSelector: {} }] }";
    check_refused(without, "at '/networkPolicy/metricsFrom': maxItems");
    let without = "networkPolicy: { enabled: false, egress: { enabled: true } }";
    check_refused(without, "at '/networkPolicy/egress/enabled'");
    check_refused("storage: { endpoint: 'http://s3:8333' }", "at '/storage/url'");
}

/// With a tag in the values, an upgrade would keep the image of the old version.
#[test]
fn trainer_follows_the_version_of_the_chart() {
    let check = |values: &str, expected: &str| {
        if helm().is_some() {
            let expected = format!("--trainer-image={expected}");
            assert!(arguments(&objects(values)).contains(&expected), "{values}: {expected}");
        }
    };
    let version = env!("CARGO_PKG_VERSION");
    check("", &format!("localhost/stoker-trainer:{version}"));
    // Without a repository, as `helm upgrade --reuse-values` passes the values of an older chart.
    check("trainer: { repository: null, image: 'r/t:1' }", "r/t:1");
    check_refused("trainer: { repository: null }", "at '/trainer'");
    check("trainer: { repository: r/t }", &format!("r/t:{version}"));
    check("trainer: { repository: r/t, tag: '7-cuda' }", "r/t:7-cuda");
    let digest = format!("sha256:{}", "0".repeat(64));
    check(
        &format!("trainer: {{ digest: '{digest}' }}"),
        &format!("localhost/stoker-trainer@{digest}"),
    );
    check_refused("trainer: { image: 'r/t:1', tag: '2' }", "at '/trainer/tag'");
}

#[test]
fn parent_chart_enables_and_disables_this_one() {
    let Some(helm) = helm() else { return };
    let parent = tempfile::tempdir().unwrap();
    let chart = json!({
        "apiVersion": "v2", "name": "parent", "version": "1.0.0",
        "dependencies": [{
            "name": "stoker", "version": env!("CARGO_PKG_VERSION"), "condition": "stoker.enabled",
        }],
    });
    std::fs::write(parent.path().join("Chart.yaml"), chart.to_string()).unwrap();
    std::fs::create_dir(parent.path().join("charts")).unwrap();
    let link = parent.path().join("charts/stoker");
    std::os::unix::fs::symlink(repository().join("charts/stoker"), link).unwrap();
    for is_enabled in [true, false] {
        let values = format!("stoker: {{ enabled: {is_enabled} }}");
        let output = run(&helm, &["template", "all", parent.path().to_str().unwrap()], &values);
        let text = describe_output(&output);
        assert!(output.status.success(), "{values}: {text}");
        assert_eq!(text.contains("kind: Deployment"), is_enabled, "{values}: {text}");
    }
}

/// Collects the paths of schema objects that accept unknown names, except maps of strings and
/// quantities.
fn open_schemas(at: &str, schema: &Value, paths: &mut Vec<String>) {
    let is_object = schema.get("type").is_some_and(|type_| type_ == "object");
    let value_type = schema["additionalProperties"].get("type");
    let is_map = value_type.is_some_and(|type_| type_ != "object");
    if is_object && schema["additionalProperties"] != json!(false) && !is_map {
        paths.push(at.to_owned());
    }
    let children: Vec<(String, &Value)> = match schema {
        Value::Object(map) => map.iter().map(|(key, child)| (key.clone(), child)).collect(),
        Value::Array(list) => {
            list.iter().enumerate().map(|(index, child)| (index.to_string(), child)).collect()
        }
        _ => Vec::new(),
    };
    for (key, child) in children {
        open_schemas(&format!("{at}/{key}"), child, paths);
    }
}

/// Collects the paths of values that are in the schema and not in `values.yaml`.
fn hidden_values(at: &str, schema: &Value, values: &Value, paths: &mut Vec<String>) {
    let (Some(properties), Some(values)) = (schema["properties"].as_object(), values.as_object())
    else {
        return;
    };
    // An empty map has a type of Kubernetes, such as an affinity.
    for (key, schema) in properties.iter().filter(|_| !values.is_empty()) {
        match values.get(key) {
            Some(value) => hidden_values(&format!("{at}.{key}"), schema, value, paths),
            None => paths.push(format!("{at}.{key}")),
        }
    }
}

#[test]
fn the_schema_is_closed_at_every_level() {
    let schema: Value = serde_json::from_str(&read("charts/stoker/values.schema.json")).unwrap();
    let mut open = Vec::new();
    open_schemas("", &schema, &mut open);
    assert_eq!(open, ["/properties/global"], "only `global`, which other charts use, may be open");
}

#[test]
fn values_file_has_every_value_of_the_schema() {
    let schema: Value = serde_json::from_str(&read("charts/stoker/values.schema.json")).unwrap();
    let values: Value = serde_saphyr::from_str(&read("charts/stoker/values.yaml")).unwrap();
    let mut hidden = Vec::new();
    hidden_values("", &schema, &values, &mut hidden);
    // `resources` has a type of Kubernetes, too.
    hidden.retain(|path| !path.starts_with(".resources."));
    assert_eq!(hidden, Vec::<String>::new());
}

#[test]
fn chart_version_matches_the_workspace() {
    let chart: Value = serde_saphyr::from_str(&read("charts/stoker/Chart.yaml")).unwrap();
    assert_eq!(chart["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(chart["appVersion"], env!("CARGO_PKG_VERSION"));
}

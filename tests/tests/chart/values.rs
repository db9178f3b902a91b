//! Values: all are documented, none that is unknown or wrong passes.

use serde_json::{Value, json};
use stoker_tests::said;

use super::{helm, read, run};

/// Renders with a value that is wrong, and compares what helm says.
#[track_caller]
fn check_refused(values: &str, expected: &str) {
    let Some(helm) = helm() else { return };
    let output = run(&helm, &["template", "stoker", "charts/stoker"], values);
    let text = said(&output);
    assert!(!output.status.success() && text.contains(expected), "{values}: {text}");
}

#[test]
fn what_is_not_a_value_is_refused() {
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
    check_refused("storage: { endpoint: 'http://s3:8333' }", "at '/storage/url'");
}

/// The schema's objects that let unknown names pass, by where they are. Maps of strings and
/// quantities may.
fn open_schemas(at: &str, schema: &Value, found: &mut Vec<String>) {
    let is_object = schema.get("type").is_some_and(|it| it == "object");
    let is_map = schema["additionalProperties"].get("type").is_some_and(|it| it != "object");
    if is_object && schema["additionalProperties"] != json!(false) && !is_map {
        found.push(at.to_owned());
    }
    let children: Vec<(String, &Value)> = match schema {
        Value::Object(map) => map.iter().map(|(key, it)| (key.clone(), it)).collect(),
        Value::Array(list) => list.iter().enumerate().map(|(i, it)| (i.to_string(), it)).collect(),
        _ => Vec::new(),
    };
    for (key, child) in children {
        open_schemas(&format!("{at}/{key}"), child, found);
    }
}

/// Values that the schema knows and `values.yaml` does not name, by their paths.
fn hidden_values(at: &str, schema: &Value, values: &Value, found: &mut Vec<String>) {
    let (Some(properties), Some(values)) = (schema["properties"].as_object(), values.as_object())
    else {
        return;
    };
    // An empty map is one of Kubernetes' own types, such as an affinity.
    for (key, schema) in properties.iter().filter(|_| !values.is_empty()) {
        match values.get(key) {
            Some(value) => hidden_values(&format!("{at}.{key}"), schema, value, found),
            None => found.push(format!("{at}.{key}")),
        }
    }
}

#[test]
fn the_schema_is_closed_at_every_level() {
    let schema: Value = serde_json::from_str(&read("charts/stoker/values.schema.json")).unwrap();
    let mut found = Vec::new();
    open_schemas("", &schema, &mut found);
    assert_eq!(
        found,
        ["/properties/global"],
        "global belongs to other charts, no other may be open"
    );
}

#[test]
fn every_value_is_in_the_file_of_values() {
    let schema: Value = serde_json::from_str(&read("charts/stoker/values.schema.json")).unwrap();
    let values: Value = serde_saphyr::from_str(&read("charts/stoker/values.yaml")).unwrap();
    let mut found = Vec::new();
    hidden_values("", &schema, &values, &mut found);
    // Kubernetes' own, as the empty maps are.
    found.retain(|it| !it.starts_with(".resources."));
    assert_eq!(found, Vec::<String>::new());
}

#[test]
fn the_chart_has_the_version_of_what_it_installs() {
    let chart: Value = serde_saphyr::from_str(&read("charts/stoker/Chart.yaml")).unwrap();
    assert_eq!(chart["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(chart["appVersion"], env!("CARGO_PKG_VERSION"));
}

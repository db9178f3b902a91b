//! The web page of the chart: a pod without permissions.

use std::process::Command;

use serde_json::{Value, json};
use stoker_tests::{describe_output, program};

use super::{ALL_VALUES, helm, objects, of_kind, role};

const ENABLED: &str = "ui: { enabled: true }\nwatchNamespaces: [vision, ml]";

fn arguments(objects: &[Value]) -> Vec<String> {
    let page = role(objects, "Deployment", "stoker-ui");
    let container = &page["spec"]["template"]["spec"]["containers"][0];
    serde_json::from_value(container["args"].clone()).unwrap()
}

#[test]
fn page_has_no_permissions() {
    if helm().is_none() {
        return;
    }
    for values in [ENABLED, ALL_VALUES] {
        let all = objects(values);
        let account = role(&all, "ServiceAccount", "stoker-ui");
        assert_eq!(account["automountServiceAccountToken"], false);
        for kind in ["RoleBinding", "ClusterRoleBinding"] {
            for binding in of_kind(&all, kind) {
                assert_ne!(binding["subjects"][0]["name"], "stoker-ui", "{binding:#}");
            }
        }
        let pod = &role(&all, "Deployment", "stoker-ui")["spec"]["template"]["spec"];
        assert_eq!(pod["automountServiceAccountToken"], false);
        assert_eq!(pod["securityContext"]["runAsNonRoot"], true);
        let expected = json!({
            "allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true,
            "runAsNonRoot": true, "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        });
        assert_eq!(pod["containers"][0]["securityContext"], expected);
        let volume = json!([{"name": "ca", "configMap": {"name": "kube-root-ca.crt",
            "items": [{"key": "ca.crt", "path": "ca.crt"}]}}]);
        assert_eq!(pod["volumes"], volume);
    }
}

#[test]
fn every_value_reaches_the_page() {
    if helm().is_none() {
        return;
    }
    let defaults = [
        "ui",
        "--sign-in=form",
        "--listen=[::]:8265",
        "--host=stoker-ui.123.svc",
        "--offer-namespaces=vision,ml",
    ];
    assert_eq!(arguments(&objects(ENABLED)), defaults);
    let all = objects(ALL_VALUES);
    let expected = [
        "ui",
        "--sign-in=header",
        "--listen=[::]:8265",
        "--host=stoker-ui.123.svc",
        "--host=stoker.example.com",
        "--offer-namespaces=1e3,ml",
        "--allow-actions",
    ];
    assert_eq!(arguments(&all), expected);
    let pod = &role(&all, "Deployment", "stoker-ui")["spec"]["template"]["spec"];
    let image = pod["containers"][0]["image"].as_str().unwrap();
    assert!(image.starts_with("example/stoker@sha256:0"), "{image}");
    assert_eq!(pod["priorityClassName"], "shared");
    let policy = role(&all, "NetworkPolicy", "stoker-ui");
    let peer = json!([{"podSelector": {"matchLabels": {"app": "proxy"}}}]);
    assert_eq!(policy["spec"]["ingress"][0]["from"], peer);
}

#[test]
fn selectors_keep_operator_and_page_apart() {
    if helm().is_none() {
        return;
    }
    let all = objects(ENABLED);
    let labels = |name: &str| {
        role(&all, "Deployment", name)["spec"]["template"]["metadata"]["labels"].clone()
    };
    let selects = |selector: &Value, labels: &Value| {
        selector.as_object().unwrap().iter().all(|(name, value)| labels[name] == *value)
    };
    for service in of_kind(&all, "Service") {
        let is_page = service["metadata"]["name"] == "stoker-ui";
        let selector = &service["spec"]["selector"];
        assert_eq!(selects(selector, &labels("stoker-ui")), is_page, "{service:#}");
        assert_eq!(selects(selector, &labels("stoker-operator")), !is_page, "{service:#}");
    }
}

#[test]
fn the_program_accepts_its_arguments() {
    if helm().is_none() {
        return;
    }
    for values in [ENABLED, ALL_VALUES] {
        // The program prints its help only if all arguments before `--help` are valid.
        let mut page = Command::new(program("stoker"));
        let output = page.args(arguments(&objects(values))).arg("--help").output().unwrap();
        let text = describe_output(&output);
        assert!(output.status.success() && text.contains("--offer-namespaces"), "{text}");
    }
}

//! The API server's audit log: who asked for what, and what came of it.

use std::path::Path;

use serde_json::Value;

use crate::error::{At, Error};

/// Every request once, when it is answered: who, what, and the answer's code, but no bodies. A
/// watch is there when it begins.
pub(crate) const POLICY: &str = r#"
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules: [{level: Metadata}]
"#;

/// One line of the log.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Such as `system:serviceaccount:stoker:stoker-operator`.
    pub user: String,
    /// Such as `get`, `patch`, `watch`.
    pub verb: String,
    /// Such as `stoker.dev`; empty for the core group.
    pub group: String,
    /// Such as `trials/status`; empty for what is no resource.
    pub resource: String,
    /// The object's namespace, or empty.
    pub namespace: String,
    /// The object's name, or empty for a list, and for a creation too.
    pub name: String,
    /// The answer, such as 200, 409, 403.
    pub code: u64,
    /// All that the log says.
    pub event: Value,
}

/// Reads an audit log; a line that is being written is left out.
pub(crate) fn read(path: &Path) -> Result<Vec<Request>, Error> {
    let text = std::fs::read_to_string(path).at(path)?;
    Ok(text.lines().filter_map(|it| serde_json::from_str(it).ok()).filter_map(request).collect())
}

/// Of a request with two stages, such as a watch, its beginning.
fn request(event: Value) -> Option<Request> {
    let has_begun = event["stage"] == "ResponseStarted";
    if event["stage"] == "ResponseComplete" && event["verb"] == "watch" && !is_refused(&event) {
        return None;
    }
    if has_begun && event["verb"] != "watch" {
        return None;
    }
    let text = |pointer: &str| {
        let value = event.pointer(pointer).and_then(Value::as_str);
        value.unwrap_or_default().to_string()
    };
    let mut resource = text("/objectRef/resource");
    let part = text("/objectRef/subresource");
    if !part.is_empty() {
        resource = format!("{resource}/{part}");
    }
    Some(Request {
        user: text("/user/username"),
        verb: text("/verb"),
        group: text("/objectRef/apiGroup"),
        resource,
        namespace: text("/objectRef/namespace"),
        name: text("/objectRef/name"),
        code: code(&event),
        event,
    })
}

fn code(event: &Value) -> u64 {
    event.pointer("/responseStatus/code").and_then(Value::as_u64).unwrap_or(0)
}

/// A refused watch has no beginning.
fn is_refused(event: &Value) -> bool {
    code(event) >= 400
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(line: &str, expected: Option<(&str, &str, &str, u64)>) {
        let event = serde_json::from_str(line).unwrap();
        let found = request(event);
        let found = found
            .as_ref()
            .map(|it| (it.verb.as_str(), it.group.as_str(), it.resource.as_str(), it.code));
        assert_eq!(found, expected, "{line}");
    }

    #[test]
    fn each_request_counts_once() {
        check(
            r#"{"stage":"ResponseComplete","verb":"patch","objectRef":{"resource":"trials",
                "subresource":"status","apiGroup":"stoker.dev"},"responseStatus":{"code":200}}"#,
            Some(("patch", "stoker.dev", "trials/status", 200)),
        );
        let watch = r#"{"stage":"STAGE","verb":"watch","objectRef":{"resource":"pods"},
            "responseStatus":{"code":CODE}}"#;
        let watch = |stage: &str, code: &str| watch.replace("STAGE", stage).replace("CODE", code);
        check(&watch("ResponseStarted", "200"), Some(("watch", "", "pods", 200)));
        check(&watch("ResponseComplete", "200"), None);
        check(&watch("ResponseComplete", "403"), Some(("watch", "", "pods", 403)));
        check(
            r#"{"stage":"ResponseStarted","verb":"get","objectRef":{"resource":"pods",
                "subresource":"log"},"responseStatus":{"code":200}}"#,
            None,
        );
    }
}

//! The API server's audit log: user, request and response code.

use std::path::Path;

use serde_json::Value;

use crate::error::{Error, WithPath};

/// Logs every request once, with its response code but without bodies. A watch is logged when it
/// starts.
pub(crate) const POLICY: &str = r#"
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules: [{level: Metadata}]
"#;

/// One entry of the log.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// User name, such as `system:serviceaccount:stoker:stoker-operator`.
    pub user: String,
    /// Verb, such as `get`, `patch`, `watch`.
    pub verb: String,
    /// API group, such as `stoker.dev`; empty for the core group.
    pub group: String,
    /// Resource, such as `trials/status`; empty for other URLs.
    pub resource: String,
    /// Namespace of the object; may be empty.
    pub namespace: String,
    /// Name of the object; empty for lists and creations.
    pub name: String,
    /// Response code, such as 200, 409, 403.
    pub code: u64,
    /// Complete log entry.
    pub event: Value,
}

/// Reads an audit log, and ignores an incomplete last line.
pub(crate) fn read(path: &Path) -> Result<Vec<Request>, Error> {
    let text = std::fs::read_to_string(path).with_path(path)?;
    let events = text.lines().filter_map(|line| serde_json::from_str(line).ok());
    Ok(events.filter_map(request).collect())
}

/// Converts a log entry. Of the two stages of a watch, only the first counts.
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

/// Whether a request was refused. A refused watch has no first stage.
fn is_refused(event: &Value) -> bool {
    code(event) >= 400
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(line: &str, expected: Option<(&str, &str, &str, u64)>) {
        let event = serde_json::from_str(line).unwrap();
        let parsed = request(event);
        let parsed = parsed.as_ref().map(|request| {
            let Request { verb, group, resource, code, .. } = request;
            (verb.as_str(), group.as_str(), resource.as_str(), *code)
        });
        assert_eq!(parsed, expected, "{line}");
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

//! Masks credentials of files in Determined's format in errors.

use super::super::Problem;

/// Fields of storages that contain no credential. Any other name may be a misspelled credential.
const SHOWN: [&str; 16] = [
    "bucket",
    "container",
    "containerpath",
    "endpoint",
    "endpointurl",
    "hostpath",
    "prefix",
    "propagation",
    "saveexperimentbest",
    "savetrialbest",
    "savetriallatest",
    "storagepath",
    "tensorboardpath",
    "checkpointpath",
    "type",
    "url",
];

/// Substrings of the names of credential fields.
const CREDENTIALS: [&str; 8] = [
    "accesskey",
    "apikey",
    "connectionstring",
    "credential",
    "passw",
    "privatekey",
    "registryauth",
    "secret",
];

/// Masks the value of a problem if it is, or may contain, a credential.
pub(in super::super) fn mask(problem: &mut Problem) {
    let Problem { field, value, .. } = problem;
    let is_masked = match field.as_str() {
        // The value is PATH=VALUE.
        "--set" => is_credential(value.split('=').next().unwrap_or("")),
        field => is_credential(field),
    };
    let first = value.chars().next();
    match first {
        Some(_) if is_masked => *value = "...".to_owned(),
        Some('{') if !is_space(field) => *value = "{...}".to_owned(),
        Some('[') if !is_space(field) => *value = "[...]".to_owned(),
        _ => {}
    }
}

/// Returns `true` if the field at `path` may contain a credential.
fn is_credential(path: &str) -> bool {
    if is_space(path) {
        return false;
    }
    let path = path.strip_prefix("spec.").unwrap_or(path);
    let parts: Vec<String> = path
        .split(['.', '[', ']'])
        .filter(|part| !part.is_empty())
        .map(|part| part.replace(['_', '-'], "").to_lowercase())
        .collect();
    let part = |index: usize| parts.get(index).map_or("", String::as_str);
    let last = parts.last().map_or("", String::as_str);
    match part(0) {
        "checkpointstorage" | "tensorboardstorage" | "datalayer" | "security" | "integrations" => {
            !SHOWN.contains(&last)
        }
        "environment" if ["environmentvariables", "podspec"].contains(&part(1)) => true,
        "env" => last == "value",
        _ => parts.iter().any(|part| {
            let is_named = CREDENTIALS.iter().any(|name| part.contains(name));
            is_named || part.ends_with("token") || part == "auth"
        }),
    }
}

/// Returns `true` if a field is part of the search space, whose values are not secret.
fn is_space(path: &str) -> bool {
    let path = path.strip_prefix("spec.").unwrap_or(path);
    path.starts_with("hyperparameters") || path.starts_with("searcher")
}

//! Validation rules of external searchers.

use serde_json::json;

use super::FieldError;
use super::rules::union_error;
use crate::experiment::{ExternalSearch, Searcher};
use crate::external::{SearcherHost, SearcherUrl};

const PATH: &str = "spec.searcher.external";

/// Checks the fields that no other search has.
pub(super) fn check(searcher: &Searcher, search: &ExternalSearch, errors: &mut Vec<FieldError>) {
    let set = [("url", search.url.is_some()), ("command", !search.command.is_empty())];
    let set: Vec<&str> = set.iter().filter(|(_, is_set)| *is_set).map(|(name, _)| *name).collect();
    if set.len() != 1 {
        errors.push(union_error(PATH, &set, "exactly one of url and command must be set"));
    }
    if let Some(url) = &search.url
        && let Err(rule) = SearcherUrl::parse(url)
    {
        errors.push(FieldError::new(&format!("{PATH}.url"), &json!(url), rule));
    }
    if search.command.first().is_some_and(|program| program.trim().is_empty()) {
        let rule = "the first word must name the program to run";
        errors.push(FieldError::new(&format!("{PATH}.command[0]"), &json!(""), rule));
    }
    for (i, word) in search.command.iter().enumerate().filter(|(_, word)| word.contains('\0')) {
        let rule = "must not contain a NUL character";
        errors.push(FieldError::new(&format!("{PATH}.command[{i}]"), &json!(word), rule));
    }
    if let Some(rule) = searcher.median_stopping {
        let reason = "must be unset: an external searcher stops trials by its own rules";
        errors.push(FieldError::new("spec.searcher.medianStopping", &json!(rule), reason));
    }
    if let Some(prior) = &searcher.prior_trials {
        let reason = "must be unset: give earlier trials to the external searcher itself";
        errors.push(FieldError::new("spec.searcher.priorTrials", &json!(prior), reason));
    }
}

/// Checks what an external searcher needs on a cluster: it is a Service. A pod of the operator runs
/// no programs of users, and reaches no address that users choose freely.
///
/// # Errors
///
/// The field, with the remedy.
pub fn check_on_cluster(searcher: &Searcher) -> Result<(), FieldError> {
    let Some(search) = &searcher.external else { return Ok(()) };
    let Some(url) = &search.url else {
        let rule = "command runs only under `stoker run`; on a cluster, run the program behind a \
                    Service of the experiment's namespace and set url";
        return Err(FieldError::new(&format!("{PATH}.command"), &json!(search.command), rule));
    };
    match SearcherUrl::parse(url).map(|url| url.host) {
        Ok(SearcherHost::Service(_)) => Ok(()),
        Ok(SearcherHost::Loopback(_)) | Err(_) => {
            let rule = "must be http://SERVICE[:PORT][/PATH] on a cluster, with the name of a \
                        Service of the experiment's namespace; other hosts work only under \
                        `stoker run`";
            Err(FieldError::new(&format!("{PATH}.url"), &json!(url), rule))
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::validate::validate;

    /// Checks the fields with errors, and whether a cluster accepts the searcher.
    fn check(external: Value, more: Value, expected: &[&str], is_for_cluster: bool) {
        let mut searcher = json!({
            "metric": "loss", "maxLength": { "epochs": 9 }, "external": external,
        });
        searcher["external"]["maxTrials"] = json!(9);
        searcher.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let spec = json!({ "entrypoint": { "command": ["x"] }, "searcher": searcher });
        let spec = serde_json::from_value(spec).unwrap();
        let errors = validate("external", &spec).err().unwrap_or_default();
        let paths: Vec<_> = errors.iter().map(|error| error.path.as_str()).collect();
        assert_eq!(paths, expected, "{errors:?}");
        assert_eq!(check_on_cluster(&spec.searcher).is_ok(), is_for_cluster, "{searcher}");
    }

    #[test]
    fn external_searcher_is_a_url_or_a_command() {
        let none = json!({});
        check(json!({ "url": "http://optuna:80/a" }), none.clone(), &[], true);
        check(json!({ "url": "http://localhost:80/a" }), none.clone(), &[], false);
        check(json!({ "command": ["python3", "a.py"] }), none.clone(), &[], false);
        check(json!({}), none.clone(), &["spec.searcher.external"], false);
        let both = json!({ "url": "http://optuna", "command": ["x"] });
        check(both, none.clone(), &["spec.searcher.external"], true);
        let url = json!({ "url": "http://optuna.other.svc/" });
        check(url, none.clone(), &["spec.searcher.external.url"], false);
        check(json!({ "command": [" "] }), none, &["spec.searcher.external.command[0]"], false);
        let more = json!({
            "medianStopping": { "everyUnits": 1 }, "priorTrials": { "experiments": ["a"] },
        });
        let expected = ["spec.searcher.medianStopping", "spec.searcher.priorTrials"];
        check(json!({ "url": "http://optuna" }), more, &expected, true);
        check(json!({ "url": "http://optuna" }), json!({ "sampler": { "tpe": {} } }), &[], true);
    }
}

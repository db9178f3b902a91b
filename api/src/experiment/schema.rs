//! Schema parts that types cannot express.

use serde_json::{Value, json};

use super::samplers::MEDIAN_STEPS_MAX;
use super::search::SEARCH_METHODS;

/// CEL rule: no field except `state`, `reopen` and `searcher` has changed. The searcher has its own
/// rules.
pub(crate) const UNCHANGED_RULE: &str = "self.entrypoint == oldSelf.entrypoint && \
    self.resources == oldSelf.resources && \
    self.checkpointStorage == oldSelf.checkpointStorage && \
    self.checkpointPolicy == oldSelf.checkpointPolicy && \
    self.performInitialValidation == oldSelf.performInitialValidation && \
    self.recordsPerEpoch == oldSelf.recordsPerEpoch && \
    self.schedulingUnit == oldSelf.schedulingUnit && \
    self.maxRestarts == oldSelf.maxRestarts && \
    self.preemptionTimeoutSeconds == oldSelf.preemptionTimeoutSeconds && \
    self.reproducibility == oldSelf.reproducibility && \
    self.optimizations == oldSelf.optimizations && \
    self.pod == oldSelf.pod && \
    self.data == oldSelf.data && \
    self.hyperparameters == oldSelf.hyperparameters && \
    has(self.description) == has(oldSelf.description) && \
    (!has(self.description) || self.description == oldSelf.description) && \
    has(self.labels) == has(oldSelf.labels) && \
    (!has(self.labels) || self.labels == oldSelf.labels) && \
    has(self.env) == has(oldSelf.env) && \
    (!has(self.env) || self.env == oldSelf.env) && \
    has(self.minValidationPeriod) == has(oldSelf.minValidationPeriod) && \
    (!has(self.minValidationPeriod) || self.minValidationPeriod == oldSelf.minValidationPeriod) && \
    has(self.minCheckpointPeriod) == has(oldSelf.minCheckpointPeriod) && \
    (!has(self.minCheckpointPeriod) || self.minCheckpointPeriod == oldSelf.minCheckpointPeriod) && \
    has(self.context) == has(oldSelf.context) && \
    (!has(self.context) || self.context == oldSelf.context) && \
    has(self.podOverrides) == has(oldSelf.podOverrides) && \
    (!has(self.podOverrides) || self.podOverrides == oldSelf.podOverrides)";

/// CEL rule: a request to reopen trials is only replaced by one with a greater number, and not in a
/// cancelled experiment.
pub(crate) const REOPEN_RULE: &str = "has(self.reopen) == has(oldSelf.reopen) && \
    (!has(self.reopen) || self.reopen == oldSelf.reopen) || \
    has(self.reopen) && !(has(self.state) && self.state in ['cancelled', 'killed']) && \
    (!has(oldSelf.reopen) || self.reopen.number > oldSelf.reopen.number)";
/// Message of [`REOPEN_RULE`].
pub(crate) const REOPEN_MESSAGE: &str = "reopen cannot be removed, and can only be replaced by a \
    request with a greater number; a cancelled experiment cannot be continued";

/// CEL rule: intervals are not in the program's own count, which no training loop knows.
pub(crate) const PERIODS_RULE: &str = "\
    !(has(self.minValidationPeriod) && has(self.minValidationPeriod.units)) && \
    !(has(self.minCheckpointPeriod) && has(self.minCheckpointPeriod.units))";
/// Message of [`PERIODS_RULE`].
pub(crate) const PERIODS_MESSAGE: &str = "minValidationPeriod and minCheckpointPeriod must be in \
    records, batches or epochs: a program that counts units validates and saves by itself";

/// Returns the CEL rule that these fields have not changed.
fn unchanged(fields: &[&str]) -> String {
    let rule = |name: &&str| {
        let (new, old) = (format!("self.{name}"), format!("oldSelf.{name}"));
        format!("has({new}) == has({old}) && (!has({new}) || {new} == {old})")
    };
    fields.iter().map(rule).collect::<Vec<_>>().join(" && ")
}

/// Returns the rules of a search method whose other fields may be edited.
pub(crate) fn fixed(fields: &[&str]) -> Value {
    let names = fields.join(", ");
    let message = format!("{names}: cannot change after creation; create a new experiment");
    json!([{ "rule": unchanged(fields), "message": message }])
}

/// Returns the rules of an external searcher, which runs on a cluster only as a Service.
pub(crate) fn external_rules() -> Value {
    let service = "^http://[a-z]([-a-z0-9]*[a-z0-9])?(:[0-9]+)?(/[^ #]*)?$";
    json!([
        {
            "rule": unchanged(&EXTERNAL),
            "message": "url, command: cannot change after creation; create a new experiment",
        },
        {
            "rule": "!has(self.command)",
            "message": "command runs only under `stoker run`; on a cluster, run the program behind \
                        a Service and set url",
        },
        {
            "rule": format!(
                "has(self.url) && self.url.matches('{service}') && \
                 !self.url.matches('^http://localhost([:/]|$)')"
            ),
            "message": "url must be http://SERVICE[:PORT][/PATH] with the name of a Service in the \
                        experiment's namespace",
        },
    ])
}

/// Fields of a length.
const UNITS: [&str; 4] = ["records", "batches", "epochs", "units"];

/// Returns the CEL rule that a raised `maxLength` leaves no more steps of median stopping than
/// validation allows. The edit could not be taken back. Divides, since a product may overflow.
fn steps_rule() -> String {
    let fits = UNITS.map(|unit| {
        let units = format!("self.maxLength.{unit}");
        format!(
            "(!has({units}) || ({units} - 1) / {MEDIAN_STEPS_MAX} < self.medianStopping.everyUnits)"
        )
    });
    format!(
        "!has(self.medianStopping) || !has(self.maxLength) || \
         self.maxLength == oldSelf.maxLength || ({})",
        fits.join(" && ")
    )
}

/// Returns the rules of the searcher.
pub(crate) fn searcher_rules() -> Value {
    let one = SEARCH_METHODS.map(|method| format!("has(self.{method})")).join(", ");
    let method =
        SEARCH_METHODS.map(|method| format!("has(self.{method}) == has(oldSelf.{method})"));
    let unit = UNITS.map(|unit| {
        let (new, old) = (format!("self.maxLength.{unit}"), format!("oldSelf.maxLength.{unit}"));
        format!("has({new}) == has({old}) && (!has({new}) || {new} >= {old})")
    });
    let has_length = "has(self.maxLength) == has(oldSelf.maxLength)";
    json!([
        {
            "rule": "has(self.maxLength) || has(self.pbt)",
            "message": "maxLength must be set",
        },
        {
            "rule": format!("[{one}].exists_one(x, x)"),
            "message": "exactly one search method must be set",
        },
        {
            "rule": method.join(" && "),
            "message": "the search method cannot change after creation; create a new experiment",
        },
        {
            "rule": unchanged(&SEARCHER_FIXED),
            "message": "metric, smallerIsBetter, timeMetric, sampler, priorTrials, \
                        medianStopping and objectives cannot change after creation; create a new \
                        experiment",
        },
        {
            "rule": "!has(self.timeMetric) || has(self.maxLength.units)",
            "message": "timeMetric requires maxLength.units",
        },
        {
            "rule": format!("{has_length} && (!has(self.maxLength) || ({}))", unit.join(" && ")),
            "message": "maxLength can only be raised after creation, in its unit",
        },
        {
            "rule": steps_rule(),
            "message": format!(
                "maxLength must be at most {MEDIAN_STEPS_MAX} times medianStopping.everyUnits; \
                 lower it"
            ),
        },
        {
            "rule": "!(has(self.syncHalving) || has(self.adaptive) || has(self.adaptiveSimple) || \
                     has(self.hyperband) || has(self.pbt)) || !has(self.maxLength) || \
                     self.maxLength == oldSelf.maxLength",
            "message": "maxLength of a synchronous search cannot change after creation; create a \
                        new experiment",
        },
    ])
}

/// Fields of search methods that cannot be edited.
pub(crate) const ASYNC_HALVING: [&str; 3] = ["numRungs", "divisor", "stopOnce"];
pub(crate) const ADAPTIVE_ASHA: [&str; 5] =
    ["mode", "maxRungs", "bracketRungs", "divisor", "stopOnce"];
pub(crate) const SYNC_HALVING: [&str; 3] = ["numRungs", "budget", "divisor"];
pub(crate) const ADAPTIVE: [&str; 5] = ["budget", "mode", "maxRungs", "bracketRungs", "divisor"];
pub(crate) const ADAPTIVE_SIMPLE: [&str; 5] =
    ["maxTrials", "mode", "maxRungs", "bracketRungs", "divisor"];
pub(crate) const HYPERBAND: [&str; 2] = ["numBrackets", "divisor"];
pub(crate) const EXTERNAL: [&str; 2] = ["url", "command"];
pub(crate) const TPE: [&str; 1] = ["multivariate"];
pub(crate) const PBT: [&str; 6] = [
    "populationSize",
    "lengthPerRound",
    "numRounds",
    "truncateFraction",
    "resampleProbability",
    "perturbFactor",
];
/// Fields of the searcher that cannot be edited, besides the search method.
const SEARCHER_FIXED: [&str; 7] = [
    "metric",
    "smallerIsBetter",
    "timeMetric",
    "sampler",
    "priorTrials",
    "medianStopping",
    "objectives",
];

/// The name rule of `crate::validate` in CEL.
pub(crate) const NAME_RULE: &str = "self.metadata.name.size() <= 40 && \
                                    self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')";
/// Message of [`NAME_RULE`].
pub(crate) const NAME_MESSAGE: &str = "metadata.name must be at most 40 lowercase letters, \
    digits and `-`, begin with a letter and not end with `-`";

/// An object of any shape: Kubernetes keeps all of its fields.
pub(crate) fn free_object(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true })
}

/// A list of objects of any shape.
pub(crate) fn free_objects(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({
        "type": "array",
        "items": { "type": "object", "x-kubernetes-preserve-unknown-fields": true }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crd::experiment_spec_schema;

    /// Fields that may be edited.
    const EDITABLE: [&str; 5] =
        ["maxTrials", "maxConcurrentTrials", "maxLength", "limits", "releaseSeconds"];

    /// Checks that every field is in a transition rule of its object, or may be edited.
    fn check(schema: &Value, exceptions: &[&str]) {
        let rules = schema["x-kubernetes-validations"].to_string();
        for name in schema["properties"].as_object().into_iter().flat_map(|fields| fields.keys()) {
            let is_fixed = rules.contains(&format!("oldSelf.{name})"));
            let is_editable = EDITABLE.contains(&name.as_str());
            let is_excepted = exceptions.contains(&name.as_str());
            assert!(is_fixed || is_editable || is_excepted, "{name} can change: {rules}");
        }
    }

    /// A field in neither list would be mutable.
    #[test]
    fn searcher_is_immutable_except_for_edits() {
        let searcher = &experiment_spec_schema()["properties"]["searcher"];
        check(searcher, &[]);
        for method in SEARCH_METHODS {
            let fixed: &[&str] = match method {
                "adaptiveSimple" => &[],
                _ => &["maxTrials"],
            };
            check(&searcher["properties"][method], fixed);
        }
        let simple = &searcher["properties"]["adaptiveSimple"]["x-kubernetes-validations"];
        assert!(simple.to_string().contains("oldSelf.maxTrials"));
    }
}

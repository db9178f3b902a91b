//! Records of an experiment and its trials on their way to the storage.
//!
//! A record is the object as Kubernetes shows it, as JSON: metadata, spec and status. The operator
//! has no access to storage, so it hands records to pods.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::Directive;

/// Records that an attempt stores before its program starts.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct StartRecords {
    /// Record of the experiment. Unset if it is too large.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experiment: Option<Value>,
    /// Record of the trial, which contains the attempt.
    pub trial: Value,
}

/// A record with its path in the storage.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct StoredRecord {
    /// Path of the file below the storage root.
    pub path: String,
    /// The record.
    pub record: Value,
}

/// Response to a report. The trial's record is added for requests with
/// [`HEADER_RECORD`](crate::names::HEADER_RECORD), if the report has changed it.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(untagged)]
pub enum ReportResponse {
    /// Directive with the trial's record, which contains the report.
    Recorded {
        /// The directive.
        directive: Directive,
        /// Record of the trial.
        record: Value,
    },
    /// Only the directive.
    Plain(Directive),
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn both_forms_of_responses_are_read() {
        let check = |text: &str, expected: ReportResponse| {
            assert_eq!(serde_json::from_str::<ReportResponse>(text).unwrap(), expected, "{text}");
        };
        check(r#""wait""#, ReportResponse::Plain(Directive::Wait));
        let directive = Directive::Continue { units: 3 };
        check(r#"{"continue":{"units":3}}"#, ReportResponse::Plain(directive));
        let record = json!({ "kind": "Trial" });
        check(
            r#"{"directive":{"continue":{"units":3}},"record":{"kind":"Trial"}}"#,
            ReportResponse::Recorded { directive, record },
        );
    }
}

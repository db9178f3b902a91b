//! Searches that a service of the user decides.

use serde::{Deserialize, Serialize};

/// A search whose trials are created, continued and stopped by a service of the user. Exactly one
/// of `url` and `command` must be set.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[cfg_attr(
    feature = "crd",
    schemars(extend("x-kubernetes-validations" = super::schema::external_rules()))
)]
#[serde(rename_all = "camelCase")]
pub struct ExternalSearch {
    /// URL to which questions are sent by POST. On a cluster `http://SERVICE[:PORT][/PATH]` of a
    /// Service in the namespace of the experiment, under `stoker run` `http://127.0.0.1:PORT`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "crd", schemars(extend("maxLength" = 1024)))]
    pub url: Option<String>,
    /// Program with its arguments that reads questions from its standard input and writes answers
    /// to its standard output, one JSON object per line. Only under `stoker run`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "crd", schemars(extend("maxItems" = 64)))]
    pub command: Vec<String>,
    /// Maximum number of trials that the service may create, from 1 to 100,000.
    #[cfg_attr(feature = "crd", schemars(range(min = 1, max = 100_000)))]
    pub max_trials: u32,
    /// Maximum number of trials that train concurrently; 0 means no limit. Trials that the service
    /// creates beyond it wait. Default: 16.
    #[serde(default = "super::search::default_max_concurrent_trials")]
    #[cfg_attr(feature = "crd", schemars(range(max = u32::MAX)))]
    pub max_concurrent_trials: u32,
}

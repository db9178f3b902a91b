//! What a user says of a trial's pods. `stoker run` starts processes, not pods, and reads none of it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// How a trial's pods are made. Fields mean what Kubernetes' fields of the same names mean; what is not here can be
/// set by `podOverrides`.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", default)]
pub struct PodTemplate {
    /// The image that holds the program. Unset: the stock image, whose `stoker-trainer` holds the examples.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// `Always`, `IfNotPresent` or `Never`. Unset: as the operator is set up.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image_pull_policy: Option<String>,
    /// Names of Secrets with credentials of the registry.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub image_pull_secrets: Vec<String>,
    /// The service account that the pods run under. They get no token of it for the Kubernetes API.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service_account_name: Option<String>,
    /// Names of Secrets whose keys become environment variables.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub env_from_secrets: Vec<String>,
    /// Volumes, such as a claim that holds the data.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "crd", schemars(schema_with = "crate::experiment::schema::free_objects"))]
    pub volumes: Vec<Value>,
    /// Where the volumes are mounted in the program's container.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub volume_mounts: Vec<VolumeMount>,
    /// Labels of the nodes that may run the pods.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub node_selector: BTreeMap<String, String>,
    /// Taints that the pods tolerate.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "crd", schemars(schema_with = "crate::experiment::schema::free_objects"))]
    pub tolerations: Vec<Value>,
    /// Which nodes and neighbours the pods want.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "crd", schemars(schema_with = "crate::experiment::schema::free_object"))]
    pub affinity: Option<Value>,
    /// The priority class of the pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority_class_name: Option<String>,
    /// The runtime class of the pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub runtime_class_name: Option<String>,
    /// The scheduler of the pods. Unset: the cluster's own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scheduler_name: Option<String>,
}

/// Where a volume is mounted in the program's container.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct VolumeMount {
    /// The volume's name.
    #[cfg_attr(feature = "crd", schemars(length(min = 1)))]
    pub name: String,
    /// The folder that it becomes.
    #[cfg_attr(feature = "crd", schemars(length(min = 1)))]
    pub mount_path: String,
    /// The folder in the volume that is mounted. Unset: all of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sub_path: Option<String>,
    /// Whether the program cannot write to it.
    #[serde(default)]
    pub read_only: bool,
}

//! Pod settings that users may specify. `stoker run` starts processes instead of pods and ignores
//! these settings.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Pod settings, with the meaning of the Kubernetes fields of the same names. Set other fields in
/// `podOverrides`.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", default)]
pub struct PodTemplate {
    /// Container image of the program. Unset: the operator's stock image, whose `stoker-trainer`
    /// contains the examples.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// Image pull policy: `Always`, `IfNotPresent` or `Never`. Unset: the operator's default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image_pull_policy: Option<String>,
    /// Names of Secrets with registry credentials, in the same namespace.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub image_pull_secrets: Vec<String>,
    /// Service account of the pods. Its token for the Kubernetes API is not mounted. Unset: the
    /// namespace's default service account.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service_account_name: Option<String>,
    /// Names of Secrets whose keys become environment variables, in the same namespace.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub env_from_secrets: Vec<String>,
    /// Volumes of the pods, such as a PersistentVolumeClaim with the data set. Names that start
    /// with `stoker-` are reserved.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "crd", schemars(schema_with = "crate::experiment::schema::free_objects"))]
    pub volumes: Vec<Value>,
    /// Mounts of these volumes in the program's container.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub volume_mounts: Vec<VolumeMount>,
    /// Labels that a node must have to run the pods.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub node_selector: BTreeMap<String, String>,
    /// Tolerations of the pods for node taints.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "crd", schemars(schema_with = "crate::experiment::schema::free_objects"))]
    pub tolerations: Vec<Value>,
    /// Scheduling constraints: node affinity, pod affinity and pod anti-affinity.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "crd", schemars(schema_with = "crate::experiment::schema::free_object"))]
    pub affinity: Option<Value>,
    /// Priority class of the pods. Unset: the cluster's default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority_class_name: Option<String>,
    /// Runtime class of the pods. Unset: the cluster's default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub runtime_class_name: Option<String>,
    /// Scheduler of the pods. Unset: the cluster's default scheduler.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scheduler_name: Option<String>,
}

/// A mount of a volume in the program's container.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct VolumeMount {
    /// Name of a volume in `volumes`.
    #[cfg_attr(feature = "crd", schemars(length(min = 1)))]
    pub name: String,
    /// Absolute path of the mount in the container.
    #[cfg_attr(feature = "crd", schemars(length(min = 1)))]
    pub mount_path: String,
    /// Path within the volume to mount. Unset: the root of the volume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sub_path: Option<String>,
    /// Whether the mount is read-only. Default: false.
    #[serde(default)]
    pub read_only: bool,
}

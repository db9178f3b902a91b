//! Cluster resources of a trial.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Resources of a trial.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", default)]
pub struct Resources {
    /// Number of slots of each trial, from 1 to 1024. One rank runs on each slot: a GPU, or a CPU
    /// rank if `slotResource` is unset. Default: 1.
    #[cfg_attr(feature = "crd", schemars(range(min = 1, max = 1024)))]
    pub slots_per_trial: u32,
    /// Number of slots of each pod. Must divide `slotsPerTrial`. Unset: the largest divisor of
    /// `slotsPerTrial` that is at most 8.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "crd", schemars(range(min = 1)))]
    pub slots_per_pod: Option<u32>,
    /// Extended resource of a slot, such as `nvidia.com/gpu`. Each pod requests one unit per slot.
    /// Unset: slots are CPU ranks, and pods request only the resources in `requests` and `limits`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slot_resource: Option<String>,
    /// Resource requests of each pod, such as `cpu: "4"`. Must not contain `slotResource`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub requests: BTreeMap<String, String>,
    /// Resource limits of each pod, such as `memory: 16Gi`. Must not contain `slotResource`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub limits: BTreeMap<String, String>,
    /// Size limit of the memory-backed volume at `/dev/shm`. Default: `4Gi`.
    pub shm_size: String,
}

impl Default for Resources {
    fn default() -> Self {
        Self {
            slots_per_trial: 1,
            slots_per_pod: None,
            slot_resource: None,
            requests: BTreeMap::new(),
            limits: BTreeMap::new(),
            shm_size: "4Gi".to_owned(),
        }
    }
}

/// Maximum number of slots of a pod by default: common machines have 8 GPUs.
const SLOTS_PER_POD_MAX: u32 = 8;

impl Resources {
    /// Returns the number of slots of each pod: the field `slots_per_pod`, or its default.
    ///
    /// # Examples
    ///
    /// ```
    /// use stoker_api::experiment::Resources;
    ///
    /// let of = |slots_per_trial| Resources { slots_per_trial, ..Resources::default() };
    /// assert_eq!([1, 8, 12, 13, 16].map(|slots| of(slots).slots_per_pod()), [1, 8, 6, 1, 8]);
    /// ```
    pub fn slots_per_pod(&self) -> u32 {
        let slots = self.slots_per_trial.max(1);
        let divides = |per_pod: &u32| slots.is_multiple_of(*per_pod);
        let largest = || (1..=SLOTS_PER_POD_MAX.min(slots)).rev().find(divides);
        self.slots_per_pod.filter(|per_pod| *per_pod > 0).or_else(largest).unwrap_or(1)
    }

    /// Returns the number of pods of each trial.
    pub fn num_pods(&self) -> u32 {
        (self.slots_per_trial / self.slots_per_pod()).max(1)
    }
}

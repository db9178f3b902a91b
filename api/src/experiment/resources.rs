//! What a trial needs of the cluster.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// What a trial needs.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", default)]
pub struct Resources {
    /// Slots of each trial: GPUs, or CPU ranks where there are none; at least 1.
    #[cfg_attr(feature = "crd", schemars(range(min = 1, max = 1024)))]
    pub slots_per_trial: u32,
    /// Slots of each pod; divides `slotsPerTrial`. Unset: the most that divides it and is not over 8.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "crd", schemars(range(min = 1)))]
    pub slots_per_pod: Option<u32>,
    /// The resource that is a slot, such as `nvidia.com/gpu`: a pod asks for as many as it has slots. Unset: slots are
    /// CPU ranks, and a pod asks for what `requests` and `limits` say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slot_resource: Option<String>,
    /// What each pod asks for, by resource, such as `cpu: "4"`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub requests: BTreeMap<String, String>,
    /// What each pod may use at most, by resource, such as `memory: 16Gi`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub limits: BTreeMap<String, String>,
    /// The size of `/dev/shm`.
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

/// Slots of a pod where nothing says otherwise: those of a common machine.
const SLOTS_PER_POD_MAX: u32 = 8;

impl Resources {
    /// Slots of each pod.
    ///
    /// # Examples
    ///
    /// ```
    /// use stoker_api::experiment::Resources;
    ///
    /// let of = |slots_per_trial| Resources { slots_per_trial, ..Resources::default() };
    /// assert_eq!([1, 8, 12, 13, 16].map(|it| of(it).slots_per_pod()), [1, 8, 6, 1, 8]);
    /// ```
    pub fn slots_per_pod(&self) -> u32 {
        let slots = self.slots_per_trial.max(1);
        let most = || (1..=SLOTS_PER_POD_MAX.min(slots)).rev().find(|it| slots.is_multiple_of(*it));
        self.slots_per_pod.filter(|it| *it > 0).or_else(most).unwrap_or(1)
    }

    /// Pods of each trial.
    pub fn num_pods(&self) -> u32 {
        (self.slots_per_trial / self.slots_per_pod()).max(1)
    }
}

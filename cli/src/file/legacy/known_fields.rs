//! Known fields of files in Determined's format.

/// Fields that change no result, with the reason why they are left out and the alternative. Their
/// values are not printed: some contain credentials.
pub(super) const LEFT_OUT: &[(&str, &str)] = &[
    ("data_layer", "each machine builds its data cache; set STOKER_DATA_CACHE for its directory"),
    ("environment.drop_capabilities", "pods drop all capabilities"),
    ("environment.ports", "use `kubectl port-forward`"),
    ("environment.proxy_ports", "use `kubectl port-forward`"),
    ("integrations", "no other service is notified; use `stoker experiment wait`"),
    ("log_policies", "lines of the log change neither retries nor nodes; see spec.maxRestarts"),
    ("optimizations.auto_tune_tensor_fusion", "it tunes Horovod"),
    ("optimizations.grad_updates_size_file", "it tunes Horovod"),
    ("optimizations.tensor_fusion_cycle_time", "it tunes Horovod"),
    ("optimizations.tensor_fusion_threshold", "it tunes Horovod"),
    ("pbs", "PBS starts no pods; use spec.resources and spec.pod"),
    ("profiling", "the program starts the profiler; use `Session::profile`"),
    ("resources.agent_label", "it has no effect"),
    ("resources.devices", "name the device plugin's resource in spec.resources.limits"),
    ("resources.max_slots", "set maxConcurrentTrials of the search"),
    ("resources.native_parallel", "it has no effect"),
    ("resources.priority", "its direction depends on the cluster; use spec.pod.priorityClassName"),
    ("resources.resource_pool", "use spec.pod.nodeSelector and spec.pod.tolerations"),
    ("resources.slots", "it has no effect on experiments"),
    ("resources.weight", "the operator has no fair shares; use quotas of namespaces"),
    ("retention_policy", "logs are kept with the records of the experiment"),
    ("security", "it has no effect"),
    ("slurm", "Slurm starts no pods; use spec.resources and spec.pod"),
    ("tensorboard_storage", "event files are stored beside the checkpoints"),
];

/// Returns the known fields of an object. Those that no part reads have no counterpart.
pub(super) fn known(parent: &str) -> &'static [&'static str] {
    match parent {
        "" => TOP_LEVEL,
        "searcher" => SEARCHER,
        "resources" => RESOURCES,
        "environment" => ENVIRONMENT,
        "checkpoint_storage" => CHECKPOINT_STORAGE,
        "optimizations" => OPTIMIZATIONS,
        "reproducibility" => REPRODUCIBILITY,
        _ => &[],
    }
}

/// Returns `true` if the fields of this object are checked one by one.
pub(super) fn is_group(name: &str) -> bool {
    !name.is_empty() && !known(name).is_empty()
}

/// Returns the fields of Stoker that do the same as a field that is not translated.
pub(super) fn counterpart(path: &str) -> Option<&'static str> {
    Some(match path {
        "bind_mounts" => "spec.pod.volumes and spec.pod.volumeMounts",
        "environment.force_pull_image" => "spec.pod.imagePullPolicy",
        "environment.image" => "spec.pod.image",
        "environment.pod_spec" => "spec.podOverrides",
        "environment.registry_auth" => "spec.pod.imagePullSecrets",
        "resources.shm_size" => "spec.resources.shmSize",
        _ => return None,
    })
}

const TOP_LEVEL: &[&str] = &[
    "batches_per_step",
    "bind_mounts",
    "checkpoint_policy",
    "checkpoint_storage",
    "data",
    "data_layer",
    "debug",
    "description",
    "entrypoint",
    "environment",
    "hyperparameters",
    "integrations",
    "internal",
    "labels",
    "log_policies",
    "max_restarts",
    "min_checkpoint_period",
    "min_validation_period",
    "name",
    "optimizations",
    "pbs",
    "perform_initial_validation",
    "preemption_timeout",
    "profiling",
    "project",
    "records_per_epoch",
    "reproducibility",
    "resources",
    "retention_policy",
    "scheduling_unit",
    "searcher",
    "security",
    "slurm",
    "tensorboard_storage",
    "workspace",
];

const SEARCHER: &[&str] = &[
    "bracket_rungs",
    "budget",
    "divisor",
    "explore_function",
    "length_per_round",
    "max_concurrent_trials",
    "max_length",
    "max_rungs",
    "max_steps",
    "max_time",
    "max_trials",
    "metric",
    "mode",
    "name",
    "num_rounds",
    "num_rungs",
    "population_size",
    "replace_function",
    "smaller_is_better",
    "source_checkpoint_uuid",
    "source_trial_id",
    "step_budget",
    "steps_per_round",
    "stop_once",
    "target_trial_steps",
    "time_metric",
    "train_stragglers",
    "unit",
];

const RESOURCES: &[&str] = &[
    "agent_label",
    "devices",
    "is_single_node",
    "max_slots",
    "native_parallel",
    "priority",
    "resource_pool",
    "shm_size",
    "slots",
    "slots_per_trial",
    "weight",
];

const ENVIRONMENT: &[&str] = &[
    "add_capabilities",
    "drop_capabilities",
    "environment_variables",
    "force_pull_image",
    "image",
    "pod_spec",
    "ports",
    "proxy_ports",
    "registry_auth",
];

const CHECKPOINT_STORAGE: &[&str] = &[
    "access_key",
    "account_url",
    "bucket",
    "connection_string",
    "container",
    "container_path",
    "credential",
    "endpoint_url",
    "host_path",
    "prefix",
    "propagation",
    "save_experiment_best",
    "save_trial_best",
    "save_trial_latest",
    "secret_key",
    "storage_path",
    "type",
];

const OPTIMIZATIONS: &[&str] = &[
    "aggregation_frequency",
    "auto_tune_tensor_fusion",
    "average_aggregated_gradients",
    "average_training_metrics",
    "grad_updates_size_file",
    "gradient_compression",
    "mixed_precision",
    "tensor_fusion_cycle_time",
    "tensor_fusion_threshold",
];

const REPRODUCIBILITY: &[&str] = &["experiment_seed"];

//! Command-line options of the operator.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use stoker_engine::gang::Timeouts;
use stoker_engine::gang::admission::AdmissionLimits;

/// Runs deep-learning experiments and inference jobs on the cluster it is installed in.
#[derive(Debug, Parser)]
#[command(name = "stoker-operator", version)]
pub struct Arguments {
    /// Subcommand.
    #[command(subcommand)]
    pub command: Command,
}

/// Subcommands of the operator.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Runs the operator until it receives SIGTERM or SIGINT.
    Run(Box<Options>),
}

/// Options of `stoker-operator run`.
#[derive(Clone, Debug, Args)]
pub struct Options {
    /// Namespace of the operator, which holds its lease
    #[arg(long, env = "POD_NAMESPACE", default_value = "stoker-system")]
    pub namespace: String,
    /// Name of this replica in the lease
    #[arg(long, env = "POD_NAME")]
    pub identity: String,
    /// Name of the lease
    #[arg(long, default_value = "stoker-operator")]
    pub lease_name: String,
    /// Lease duration in seconds; a leader that cannot renew stops before the lease expires
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u64).range(3..))]
    pub lease_seconds: u64,
    /// Comma-separated namespaces to watch; all namespaces if empty
    #[arg(long, env = "STOKER_WATCH_NAMESPACES", value_delimiter = ',')]
    pub watch_namespaces: Vec<String>,
    /// Listen address of the report server
    #[arg(long, default_value = "[::]:8443")]
    pub door_listen: String,
    /// URL of the report server that is passed to trainers
    #[arg(long, env = "STOKER_DOOR_URL")]
    pub door_url: String,
    /// TLS certificate of the report server (PEM); reloaded when the file changes
    #[arg(long, default_value = "/etc/stoker/tls/tls.crt")]
    pub tls_cert: PathBuf,
    /// TLS private key of the report server (PEM); reloaded when the file changes
    #[arg(long, default_value = "/etc/stoker/tls/tls.key")]
    pub tls_key: PathBuf,
    /// CA certificate with which trainers verify the report server (PEM)
    #[arg(long, default_value = "/etc/stoker/tls/ca.crt")]
    pub tls_ca: PathBuf,
    /// Key from which the secrets of gangs are derived; at least 16 random bytes
    #[arg(long, default_value = "/etc/stoker/gang/key")]
    pub gang_key_file: PathBuf,
    /// Listen address of /metrics, /healthz and /readyz
    #[arg(long, default_value = "[::]:9090")]
    pub observe_listen: String,
    /// Default trainer image; also runs the set-up and clean-up containers
    #[arg(long, env = "STOKER_TRAINER_IMAGE")]
    pub trainer_image: String,
    /// Default image pull policy
    #[arg(long, env = "STOKER_IMAGE_PULL_POLICY", default_value = "IfNotPresent")]
    pub image_pull_policy: String,
    /// Default storage URL of experiments and inference jobs
    #[arg(long, env = "STOKER_STORAGE_URL", default_value = "")]
    pub storage_url: String,
    /// Default S3 endpoint, for experiments and jobs without a storage URL
    #[arg(long, env = "STOKER_STORAGE_ENDPOINT", default_value = "")]
    pub storage_endpoint: String,
    /// Secret with the credentials of the default storage, in the namespace of the experiment or
    /// job. Experiments and jobs with a storage URL do not use it
    #[arg(long, env = "STOKER_STORAGE_SECRET", default_value = "")]
    pub storage_secret: String,
    /// Seconds within which all pods of a gang must be scheduled, once no pod has a scheduling gate
    #[arg(long, default_value_t = 600)]
    pub start_deadline_seconds: u64,
    /// Seconds after which a scheduled pod fails if an image cannot be pulled
    #[arg(long, default_value_t = 300)]
    pub pull_deadline_seconds: u64,
    /// Seconds after which the pods of a node that is not ready are deleted. They count as lost
    /// 30 s later. While most nodes are not ready, no pod is deleted because of its node
    #[arg(long, default_value_t = 60)]
    pub node_lost_seconds: u64,
    /// Seconds for which finished pods are kept. Use less than 60 only in tests: an operator that
    /// dies may leave a pod creation in flight, which collides with its successor's pod only
    /// while that pod exists
    #[arg(long, default_value_t = 600)]
    pub finished_pods_seconds: u64,
    /// Maximum number of multi-pod gangs that wait for the scheduler's first response
    #[arg(long, default_value_t = 1)]
    pub starting_gangs_max: u32,
    /// Maximum number of one-pod trials that wait for the scheduler's first response
    #[arg(long, default_value_t = 32)]
    pub starting_pods_max: u32,
    /// Maximum status writes per second for reports of one namespace; more reports are delayed
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..))]
    pub report_writes_per_second: u32,
    /// Seconds between two writes of validations that decide nothing
    #[arg(
        long,
        default_value_t = 5,
        value_parser = clap::value_parser!(u64).range(1..),
        hide = true
    )]
    pub validation_write_seconds: u64,
    /// Maximum number of one-pod trials per namespace whose pod has no node; also for gangs
    #[arg(long, default_value_t = 32)]
    pub pending_trials_max: u32,
    /// Log format
    #[arg(long, value_enum, default_value_t = LogFormat::Json)]
    pub log_format: LogFormat,
    /// Log level, or directives in the syntax of tracing's `EnvFilter`
    #[arg(long, env = "STOKER_LOG", default_value = "info")]
    pub log_level: String,
}

/// Log format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// One JSON object per line.
    Json,
    /// Human-readable text.
    Text,
}

impl Options {
    /// Timeouts of a trial or job with this preemption timeout.
    pub fn timeouts(&self, preemption_timeout_seconds: u32) -> Timeouts {
        Timeouts {
            start_deadline_seconds: self.start_deadline_seconds,
            pull_deadline_seconds: self.pull_deadline_seconds,
            node_lost_seconds: self.node_lost_seconds,
            finished_pods_seconds: self.finished_pods_seconds,
            end_grace_seconds: 30,
            preemption_timeout_seconds: preemption_timeout_seconds.into(),
        }
    }

    /// Limits on concurrent starts of trials.
    pub fn admission_limits(&self) -> AdmissionLimits {
        AdmissionLimits {
            starting_gangs_max: self.starting_gangs_max,
            starting_pods_max: self.starting_pods_max,
            pending_trials_max: self.pending_trials_max,
        }
    }

    /// Namespaces to watch; a single `None` stands for all.
    pub fn namespaces(&self) -> Vec<Option<String>> {
        let named =
            self.watch_namespaces.iter().map(|name| name.trim()).filter(|name| !name.is_empty());
        let named: Vec<_> = named.map(|name| Some(name.to_owned())).collect();
        if named.is_empty() { vec![None] } else { named }
    }
}

//! What the operator is started with.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use stoker_engine::gang::Patience;
use stoker_engine::gang::admission::Caps;

/// Runs deep-learning experiments on the cluster that it is installed in.
#[derive(Debug, Parser)]
#[command(name = "stoker-operator", version)]
pub struct Arguments {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serves until it is stopped.
    Run(Box<Options>),
}

/// How to serve.
#[derive(Clone, Debug, Args)]
pub struct Options {
    /// The operator's own namespace, where its lease lies
    #[arg(long, env = "POD_NAMESPACE", default_value = "stoker-system")]
    pub namespace: String,
    /// This replica's name in the lease
    #[arg(long, env = "POD_NAME")]
    pub identity: String,
    /// The lease's name
    #[arg(long, default_value = "stoker-operator")]
    pub lease_name: String,
    /// Seconds that a leader leads without renewing
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u64).range(3..))]
    pub lease_seconds: u64,
    /// Namespaces whose experiments are run, by commas; none: all
    #[arg(long, env = "STOKER_WATCH_NAMESPACES", value_delimiter = ',')]
    pub watch_namespaces: Vec<String>,
    /// Where trainers report: address to listen on
    #[arg(long, default_value = "0.0.0.0:8443")]
    pub door_listen: String,
    /// Where trainers report: the address that they are told
    #[arg(long, env = "STOKER_DOOR_URL")]
    pub door_url: String,
    /// The door's certificate, PEM; read again when it changes
    #[arg(long, default_value = "/etc/stoker/tls/tls.crt")]
    pub tls_cert: PathBuf,
    /// The door's key, PEM
    #[arg(long, default_value = "/etc/stoker/tls/tls.key")]
    pub tls_key: PathBuf,
    /// The authority that trainers check the certificate by, PEM
    #[arg(long, default_value = "/etc/stoker/tls/ca.crt")]
    pub tls_ca: PathBuf,
    /// The key that gangs' secrets are made with: any bytes, at least 16
    #[arg(long, default_value = "/etc/stoker/gang/key")]
    pub gang_key_file: PathBuf,
    /// Where /metrics, /healthz and /readyz are served
    #[arg(long, default_value = "0.0.0.0:9090")]
    pub observe_listen: String,
    /// The stock image
    #[arg(long, env = "STOKER_TRAINER_IMAGE")]
    pub trainer_image: String,
    /// The pull policy of pods that set none
    #[arg(long, env = "STOKER_IMAGE_PULL_POLICY", default_value = "IfNotPresent")]
    pub image_pull_policy: String,
    /// The storage of experiments that set none
    #[arg(long, env = "STOKER_STORAGE_URL", default_value = "")]
    pub storage_url: String,
    /// The S3 server of experiments that set no storage
    #[arg(long, env = "STOKER_STORAGE_ENDPOINT", default_value = "")]
    pub storage_endpoint: String,
    /// The Secret with the storage's credentials, in the experiment's namespace, of experiments that set none
    #[arg(long, env = "STOKER_STORAGE_SECRET", default_value = "")]
    pub storage_secret: String,
    /// Seconds for all pods of a gang to be scheduled, once none has a scheduling gate
    #[arg(long, default_value_t = 600)]
    pub start_deadline_seconds: u64,
    /// Seconds for the containers of a scheduled pod to start when its images cannot be pulled
    #[arg(long, default_value_t = 300)]
    pub pull_deadline_seconds: u64,
    /// Seconds after which a node that is not ready is given up
    #[arg(long, default_value_t = 60)]
    pub node_lost_seconds: u64,
    /// Seconds that finished pods stay. Less than a minute is for tests: a pod's creation that was under
    /// way when an operator died collides with the pod that its successor made only while that is there
    #[arg(long, default_value_t = 600)]
    pub finished_pods_seconds: u64,
    /// Gangs of several pods that wait for the scheduler's first answer at a time
    #[arg(long, default_value_t = 1)]
    pub starting_gangs_max: u32,
    /// One-pod trials that wait for the scheduler's first answer at a time
    #[arg(long, default_value_t = 32)]
    pub starting_pods_max: u32,
    /// Status writes a second that reports of one namespace may cause; more are slowed down
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..))]
    pub report_writes_per_second: u32,
    /// One-pod trials of a namespace whose pod has no node, and likewise gangs
    #[arg(long, default_value_t = 32)]
    pub pending_trials_max: u32,
    /// How logs are written
    #[arg(long, value_enum, default_value_t = LogFormat::Json)]
    pub log_format: LogFormat,
    /// What is logged: a level, or rules as of tracing's `EnvFilter`
    #[arg(long, env = "STOKER_LOG", default_value = "info")]
    pub log_level: String,
}

/// How logs are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// One JSON object a line.
    Json,
    /// For people.
    Text,
}

impl Options {
    /// How patient to be with a trial that has so many seconds to exit when asked to.
    pub fn patience(&self, preemption_timeout_seconds: u32) -> Patience {
        Patience {
            start_deadline_seconds: self.start_deadline_seconds,
            pull_deadline_seconds: self.pull_deadline_seconds,
            node_lost_seconds: self.node_lost_seconds,
            finished_pods_seconds: self.finished_pods_seconds,
            end_grace_seconds: 30,
            preemption_timeout_seconds: preemption_timeout_seconds.into(),
        }
    }

    /// How many trials start at a time.
    pub fn caps(&self) -> Caps {
        Caps {
            starting_gangs_max: self.starting_gangs_max,
            starting_pods_max: self.starting_pods_max,
            pending_trials_max: self.pending_trials_max,
        }
    }

    /// The namespaces to watch; `None` for all.
    pub fn namespaces(&self) -> Vec<Option<String>> {
        let named = self.watch_namespaces.iter().map(|it| it.trim()).filter(|it| !it.is_empty());
        let named: Vec<_> = named.map(|it| Some(it.to_owned())).collect();
        if named.is_empty() { vec![None] } else { named }
    }
}

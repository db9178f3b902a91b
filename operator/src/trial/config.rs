//! The operator's part of the configuration of an attempt: storage, report server and gang.

use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;
use stoker_api::contract::{ContextRef, Gang, ReportEndpoint, TrialConfig};
use stoker_api::experiment::{CheckpointStorage, ExperimentSpec, StorageRecord};
use stoker_api::names::{context_path, pod_paths};
use stoker_api::validate::ValidExperiment;
use stoker_engine::trial::config::AttemptContext;
use stoker_engine::trial::{TrialRecord, granted_units, resume_from, unreported_since};

use crate::options::Options;

/// The operator's contribution to a [`TrialConfig`] and to pods.
#[derive(Clone, Debug)]
pub struct OperatorConfig {
    /// Base URL of the report server.
    pub report_server_url: String,
    /// File with the CA certificate of the report server. It may change, so it is read for each
    /// attempt.
    pub report_server_ca: std::path::PathBuf,
    /// Key from which the secrets of gangs are derived.
    pub gang_key: Vec<u8>,
    /// Default storage URL.
    pub storage_url: String,
    /// Default S3 endpoint, for specs without a storage URL.
    pub storage_endpoint: Option<String>,
    /// Secret with the credentials of the default storage.
    pub storage_secret: Option<String>,
    /// Stock trainer image.
    pub trainer_image: String,
    /// Default image pull policy.
    pub image_pull_policy: String,
    /// Seconds within which all pods of a gang must be scheduled.
    pub start_deadline_seconds: u64,
}

impl OperatorConfig {
    /// Reads the files that the options specify.
    ///
    /// # Errors
    ///
    /// A file cannot be read, or the gang key is too short.
    pub fn read(options: &Options) -> Result<Self, String> {
        let failed = |flag: &str, path: &std::path::Path, why: String| {
            format!("{flag} {}: {why}", path.display())
        };
        std::fs::read_to_string(&options.tls_ca)
            .map_err(|error| failed("--tls-ca", &options.tls_ca, error.to_string()))?;
        let gang_key = std::fs::read(&options.gang_key_file).map_err(|error| {
            failed("--gang-key-file", &options.gang_key_file, error.to_string())
        })?;
        if gang_key.len() < 16 {
            let why =
                format!("{} bytes is too short; use at least 16 random bytes", gang_key.len());
            return Err(failed("--gang-key-file", &options.gang_key_file, why));
        }
        let set = |text: &String| Some(text.clone()).filter(|text| !text.is_empty());
        Ok(Self {
            report_server_url: options.door_url.trim_end_matches('/').to_owned(),
            report_server_ca: options.tls_ca.clone(),
            gang_key,
            storage_url: options.storage_url.clone(),
            storage_endpoint: set(&options.storage_endpoint),
            storage_secret: set(&options.storage_secret),
            trainer_image: options.trainer_image.clone(),
            image_pull_policy: options.image_pull_policy.clone(),
            start_deadline_seconds: options.start_deadline_seconds,
        })
    }

    /// Returns the storage according to the current settings. Its URL is empty if neither `spec`
    /// nor the operator specifies one.
    pub fn storage(&self, spec: &CheckpointStorage, path: String) -> StorageRecord {
        let (url, endpoint) = self.storage_location(spec.url.as_ref(), spec.endpoint.as_ref());
        let secret_name = self.secret_name(spec.url.as_ref(), spec.secret_name.as_ref());
        StorageRecord { url, endpoint, path, secret_name, fixed_at: None }
    }

    /// Returns root URL and endpoint of a storage from the values of a spec, with the operator's
    /// defaults. The root is empty if neither specifies one.
    pub fn storage_location(
        &self,
        url: Option<&String>,
        endpoint: Option<&String>,
    ) -> (String, Option<String>) {
        let of_default = || endpoint.or(self.storage_endpoint.as_ref()).cloned();
        match url {
            Some(url) => (url.clone(), endpoint.cloned()),
            None => (self.storage_url.clone(), of_default()),
        }
    }

    /// Returns the Secret with storage credentials from the values of a spec. The default Secret
    /// is only for the default storage: a storage of the user may get its credentials from a
    /// service account or need none, and must not receive those of the default storage.
    pub fn secret_name(&self, url: Option<&String>, name: Option<&String>) -> Option<String> {
        let of_default = || self.storage_secret.as_ref().filter(|_| url.is_none());
        name.or_else(of_default).cloned()
    }

    fn gang_secret(&self, trial_uid: &str, attempt: u32) -> String {
        let mut mac =
            Hmac::<Sha256>::new_from_slice(&self.gang_key).expect("HMAC takes keys of any length");
        mac.update(format!("{trial_uid}/{attempt}").as_bytes());
        mac.finalize().into_bytes().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// Names and UIDs of a trial.
#[derive(Clone, Copy, Debug)]
pub struct TrialNames<'a> {
    /// Namespace.
    pub namespace: &'a str,
    /// Name of the trial.
    pub trial: &'a str,
    /// UID of the trial.
    pub uid: &'a str,
    /// UID of the experiment.
    pub experiment_uid: &'a str,
}

/// Builds the configuration of an attempt.
pub fn trial_config(
    operator_config: &OperatorConfig,
    valid: &ValidExperiment,
    storage: &StorageRecord,
    record: &TrialRecord,
    names: TrialNames<'_>,
    attempt: u32,
) -> TrialConfig {
    let (spec, namespace) = (&valid.spec, names.namespace);
    stoker_engine::trial::config::trial_config(AttemptContext {
        valid,
        namespace,
        experiment_id: names.experiment_uid,
        trial: &record.spec,
        attempt,
        units: granted_units(&record.spec),
        resume_from: resume_from(record),
        unreported_since: unreported_since(record, attempt),
        root: storage.url.clone(),
        endpoint: storage.endpoint.clone(),
        report_endpoint: ReportEndpoint {
            url: format!(
                "{}/v1/trials/{namespace}/{}/reports",
                operator_config.report_server_url, names.trial
            ),
            token_file: pod_paths::TOKEN.to_owned(),
            ca: std::fs::read_to_string(&operator_config.report_server_ca).ok(),
        },
        gang: Some(Gang {
            world_size: spec.resources.slots_per_trial,
            ranks_per_pod: spec.resources.slots_per_pod(),
            rendezvous: rendezvous(spec, names.trial, namespace, attempt),
            secret: operator_config.gang_secret(names.uid, attempt),
        }),
        context: spec.context.as_ref().map(|context| ContextRef {
            path: context_path(namespace, &context.sha256),
            sha256: context.sha256.clone(),
        }),
    })
}

/// Rendezvous address of rank 0. The ranks of a single pod use loopback, because such a trial has
/// no Service that would resolve its name.
fn rendezvous(spec: &ExperimentSpec, trial: &str, namespace: &str, attempt: u32) -> String {
    let port = super::pods::port(spec);
    match spec.resources.num_pods() {
        1 => format!("127.0.0.1:{port}"),
        _ => super::pods::host(trial, namespace, attempt, 0, port),
    }
}

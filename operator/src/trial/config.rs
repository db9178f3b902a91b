//! What an attempt is told.

use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;
use stoker_api::contract::{CONTRACT_VERSION, ContextRef, Door, Gang, StorageConfig, TrialConfig};
use stoker_api::experiment::{CheckpointStorage, ExperimentSpec, UsedStorage};
use stoker_api::names::{context_path, pod_paths, trial_path};
use stoker_api::validate::{ValidExperiment, derive_seed};
use stoker_engine::trial::{TrialRecord, granted_units, resume_from};

use crate::options::Options;

/// The parts of a [`TrialConfig`] that are the operator's own.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The door's address, without a path.
    pub door_url: String,
    /// The file of the authority that signed its certificate: read for each attempt, as it may change.
    pub door_ca: std::path::PathBuf,
    /// The key that gangs' secrets are made with.
    pub gang_key: Vec<u8>,
    /// The storage of experiments that set none.
    pub storage_url: String,
    /// The S3 server of experiments that set no storage.
    pub storage_endpoint: Option<String>,
    /// The Secret of experiments that set none.
    pub storage_secret: Option<String>,
    /// The stock image.
    pub trainer_image: String,
    /// The pull policy of pods that set none.
    pub image_pull_policy: String,
}

impl Setup {
    /// Reads the files that the options name.
    ///
    /// # Errors
    ///
    /// A file that cannot be read, or a key that is too short, with what to do.
    pub fn read(options: &Options) -> Result<Self, String> {
        let failed = |flag: &str, path: &std::path::Path, why: String| {
            format!("{flag} {}: {why}", path.display())
        };
        std::fs::read_to_string(&options.tls_ca)
            .map_err(|it| failed("--tls-ca", &options.tls_ca, it.to_string()))?;
        let gang_key = std::fs::read(&options.gang_key_file)
            .map_err(|it| failed("--gang-key-file", &options.gang_key_file, it.to_string()))?;
        if gang_key.len() < 16 {
            let why = format!("has {} bytes; make at least 16 random ones", gang_key.len());
            return Err(failed("--gang-key-file", &options.gang_key_file, why));
        }
        let set = |text: &String| Some(text.clone()).filter(|it| !it.is_empty());
        Ok(Self {
            door_url: options.door_url.trim_end_matches('/').to_owned(),
            door_ca: options.tls_ca.clone(),
            gang_key,
            storage_url: options.storage_url.clone(),
            storage_endpoint: set(&options.storage_endpoint),
            storage_secret: set(&options.storage_secret),
            trainer_image: options.trainer_image.clone(),
            image_pull_policy: options.image_pull_policy.clone(),
        })
    }

    /// Returns the storage by today's settings. Its URL is empty if neither `spec` nor the operator names one.
    pub fn storage(&self, spec: &CheckpointStorage, path: String) -> UsedStorage {
        let (url, endpoint) = self.place(spec.url.as_ref(), spec.endpoint.as_ref());
        let secret_name = self.secret_of(spec.secret_name.as_ref());
        UsedStorage { url, endpoint, path, secret_name, fixed_at: None }
    }

    /// The root and the endpoint of a storage, of which so much is said; the root is empty if nobody
    /// says.
    pub fn place(
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

    /// The Secret with the credentials of a storage that names this one, or none.
    pub fn secret_of(&self, name: Option<&String>) -> Option<String> {
        name.or(self.storage_secret.as_ref()).cloned()
    }

    fn secret(&self, trial_uid: &str, attempt: u32) -> String {
        let mut mac =
            Hmac::<Sha256>::new_from_slice(&self.gang_key).expect("HMAC takes keys of any length");
        mac.update(format!("{trial_uid}/{attempt}").as_bytes());
        mac.finalize().into_bytes().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// A trial by its names.
#[derive(Clone, Copy, Debug)]
pub struct Names<'a> {
    /// The namespace.
    pub namespace: &'a str,
    /// The trial's name.
    pub trial: &'a str,
    /// The trial's UID.
    pub uid: &'a str,
    /// The experiment's UID.
    pub experiment_uid: &'a str,
}

/// The seed of an experiment.
pub fn seed(valid: &ValidExperiment, uid: &str) -> u32 {
    valid.spec.reproducibility.experiment_seed.unwrap_or_else(|| derive_seed(uid))
}

/// What `attempt` of a trial is told.
pub fn trial_config(
    setup: &Setup,
    valid: &ValidExperiment,
    storage: &UsedStorage,
    record: &TrialRecord,
    names: Names<'_>,
    attempt: u32,
) -> TrialConfig {
    let spec = &valid.spec;
    let (namespace, uid) = (names.namespace, names.experiment_uid);
    let path = trial_path(namespace, &valid.name, uid, record.spec.index);
    TrialConfig {
        version: CONTRACT_VERSION,
        experiment: valid.name.clone(),
        experiment_id: uid.to_owned(),
        trial: record.spec.index,
        attempt,
        seed: record.spec.seed,
        experiment_seed: seed(valid, uid),
        hyperparameters: record.spec.hyperparameters.clone(),
        data: spec.data.clone(),
        spec: spec.for_programs(),
        unit: record.spec.unit,
        units: granted_units(&record.spec),
        metric: spec.searcher.metric.clone(),
        smaller_is_better: spec.searcher.smaller_is_better,
        scheduling_unit: spec.scheduling_unit,
        records_per_epoch: spec.records_per_epoch,
        validation_period: spec.min_validation_period,
        checkpoint_period: spec.min_checkpoint_period,
        checkpoint_policy: spec.checkpoint_policy,
        perform_initial_validation: spec.perform_initial_validation,
        aggregation_frequency: spec.optimizations.aggregation_frequency,
        average_aggregated_gradients: spec.optimizations.average_aggregated_gradients,
        gradient_compression: spec.optimizations.gradient_compression,
        mixed_precision: spec.optimizations.mixed_precision,
        storage: StorageConfig {
            url: storage.url.clone(),
            endpoint: storage.endpoint.clone(),
            trial_path: path,
        },
        resume_from: resume_from(record),
        door: Door {
            url: format!("{}/v1/trials/{namespace}/{}/reports", setup.door_url, names.trial),
            token_file: pod_paths::TOKEN.to_owned(),
            ca: std::fs::read_to_string(&setup.door_ca).ok(),
        },
        gang: Some(Gang {
            world_size: spec.resources.slots_per_trial,
            ranks_per_pod: spec.resources.slots_per_pod(),
            rendezvous: rendezvous(spec, names.trial, namespace, attempt),
            secret: setup.secret(names.uid, attempt),
        }),
        context: spec.context.as_ref().map(|it| ContextRef {
            path: context_path(namespace, &it.sha256),
            sha256: it.sha256.clone(),
        }),
        inference: None,
    }
}

/// Where rank 0 is met. The ranks of one pod meet in it: a pod alone has no Service, by which its name
/// would be known.
fn rendezvous(spec: &ExperimentSpec, trial: &str, namespace: &str, attempt: u32) -> String {
    let port = super::pods::port(spec);
    match spec.resources.num_pods() {
        1 => format!("127.0.0.1:{port}"),
        _ => super::pods::host(trial, namespace, attempt, 0, port),
    }
}

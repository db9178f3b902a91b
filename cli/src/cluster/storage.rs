//! Access from this machine to the storage of an experiment or a job.

use stoker_api::experiment::{CheckpointStorage, Experiment, StorageRecord};
use stoker_storage::{Storage, StorageError, layout};

use crate::failure::Failure;

/// Environment variable with the storage URL of objects whose spec and status contain none.
const ENV_URL: &str = "STOKER_STORAGE_URL";
/// Environment variable with the S3 endpoint of that storage.
pub(crate) const ENV_ENDPOINT: &str = "STOKER_STORAGE_ENDPOINT";

/// Flags that override the storage address, which may differ between cluster and this machine.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct Options {
    /// Storage URL, as seen from this machine [default: the URL recorded by the operator, else that
    /// of the file, else STOKER_STORAGE_URL]. Credentials come from the environment, such as
    /// AWS_ACCESS_KEY_ID
    #[arg(long, value_name = "URL", help_heading = "Storage")]
    storage_url: Option<String>,
    /// S3 endpoint, as seen from this machine [default: the recorded endpoint, else that of the
    /// file; STOKER_STORAGE_ENDPOINT if STOKER_STORAGE_URL is used]
    #[arg(long, value_name = "URL", help_heading = "Storage")]
    storage_endpoint: Option<String>,
}

impl Options {
    /// Returns the storage URL and the endpoint for `spec`.
    pub(crate) fn address(
        &self,
        spec: &CheckpointStorage,
    ) -> Result<(String, Option<String>), Failure> {
        let environment = |name: &str| std::env::var(name).ok();
        self.resolve(spec, &environment)
    }

    fn resolve(
        &self,
        spec: &CheckpointStorage,
        environment: &dyn Fn(&str) -> Option<String>,
    ) -> Result<(String, Option<String>), Failure> {
        let of = |name: &str| environment(name).filter(|value| !value.is_empty());
        let (url, endpoint) = match (&self.storage_url, &spec.url) {
            (Some(url), _) => {
                (url.clone(), spec.endpoint.clone().filter(|_| url.starts_with("s3:")))
            }
            (None, Some(url)) if url.starts_with("file:") || url.starts_with('/') => {
                return Err(Failure::Input(format!(
                    "cannot read the storage {url}: it is a directory in the pods; if it is \
                     mounted on this machine, set --storage-url to its path"
                )));
            }
            (None, Some(url)) => (url.clone(), spec.endpoint.clone()),
            (None, None) => {
                let url = of(ENV_URL).ok_or_else(|| {
                    Failure::Input(format!(
                        "cannot locate the storage: neither spec nor status contains its URL; set \
                         --storage-url or {ENV_URL}, or the storage URL in the file"
                    ))
                })?;
                (url, of(ENV_ENDPOINT))
            }
        };
        Ok((url, self.storage_endpoint.clone().or(endpoint)))
    }

    /// Opens the storage with few retries, because a user is waiting.
    pub(crate) fn open(&self, spec: &CheckpointStorage) -> Result<Storage, Failure> {
        let (url, endpoint) = self.address(spec)?;
        Storage::open(&url, endpoint.as_deref())
            .map(Storage::with_few_retries)
            .map_err(|error| failure(error, spec))
    }

    /// Opens a directory of the storage with few retries, because a user is waiting.
    pub(crate) fn open_at(&self, spec: &CheckpointStorage, path: &str) -> Result<Storage, Failure> {
        let (url, endpoint) = self.address(spec)?;
        let url = format!("{}/{path}", url.trim_end_matches('/'));
        Storage::open(&url, endpoint.as_deref())
            .map(Storage::with_few_retries)
            .map_err(|error| failure(error, spec))
    }
}

/// Returns the storage of an experiment: the one recorded by the operator, else that of the spec.
pub(crate) fn of(experiment: &Experiment) -> CheckpointStorage {
    let used = experiment.status.as_ref().and_then(|status| status.storage.clone());
    with_used(experiment.spec.checkpoint_storage.clone(), used)
}

/// Replaces the storage of the spec by the recorded one, if any.
pub(crate) fn with_used(
    mut storage: CheckpointStorage,
    used: Option<StorageRecord>,
) -> CheckpointStorage {
    if let Some(used) = used.filter(|used| !used.url.is_empty()) {
        storage.url = Some(used.url);
        storage.endpoint = used.endpoint;
        storage.secret_name = used.secret_name.or(storage.secret_name);
    }
    storage
}

/// Adds a remedy to an error of the storage.
pub(crate) fn failure(error: StorageError, spec: &CheckpointStorage) -> Failure {
    if matches!(error, StorageError::BadUrl { .. }) {
        return error.into();
    }
    let which = match &spec.secret_name {
        Some(name) => format!("those of the Secret `{name}`"),
        None => format!("such as {}", error.key_variables()),
    };
    Failure::System(format!(
        "{error}; check the credentials in the environment of this command ({which}); if the \
         storage has another address here, set --storage-url and --storage-endpoint"
    ))
}

/// Returns the path of an experiment, relative to the root.
pub(crate) fn experiment_path(experiment: &Experiment) -> String {
    let of = |text: &Option<String>| text.clone().unwrap_or_default();
    let metadata = &experiment.metadata;
    layout::experiment_path(&of(&metadata.namespace), &of(&metadata.name), &of(&metadata.uid))
}

/// Returns the path of a trial, relative to the root.
pub(crate) fn trial_path(experiment: &Experiment, index: u32) -> String {
    format!("{}/trials/{index}", experiment_path(experiment))
}

/// Returns the URL of a checkpoint, or its path relative to the root if the root is unknown.
pub(crate) fn checkpoint_address(experiment: &Experiment, index: u32, name: &str) -> String {
    let path = layout::checkpoint_path(&trial_path(experiment, index), name);
    match of(experiment).url {
        Some(root) => format!("{}/{path}", root.trim_end_matches('/')),
        None => path,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Address<'a> = (&'a str, Option<&'a str>);

    fn check(
        flags: (Option<&str>, Option<&str>),
        spec: (Option<&str>, Option<&str>),
        expected: Result<Address<'_>, &str>,
    ) {
        let owned = |text: Option<&str>| text.map(str::to_owned);
        let options = Options { storage_url: owned(flags.0), storage_endpoint: owned(flags.1) };
        let (url, endpoint) = (owned(spec.0), owned(spec.1));
        let spec = CheckpointStorage { url, endpoint, ..Default::default() };
        let environment = |name: &str| Some(format!("s3://env/{name}"));
        match (options.resolve(&spec, &environment), expected) {
            (Ok((url, endpoint)), Ok(expected)) => {
                assert_eq!((url.as_str(), endpoint.as_deref()), expected);
            }
            (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
            (actual, expected) => panic!("{actual:?} is not {expected:?}"),
        }
    }

    #[test]
    fn flags_precede_spec_and_environment() {
        let spec = (Some("s3://a"), Some("http://in-cluster"));
        check((None, None), spec, Ok(("s3://a", Some("http://in-cluster"))));
        check((None, Some("http://here")), spec, Ok(("s3://a", Some("http://here"))));
        check((Some("s3://b"), None), spec, Ok(("s3://b", Some("http://in-cluster"))));
        check((None, None), (Some("s3://a"), None), Ok(("s3://a", None)));
        check(
            (None, None),
            (None, None),
            Ok(("s3://env/STOKER_STORAGE_URL", Some("s3://env/STOKER_STORAGE_ENDPOINT"))),
        );
        check((None, None), (Some("file:///data"), None), Err("a directory in the pods"));
        check((Some("file:///mnt"), None), (Some("file:///data"), None), Ok(("file:///mnt", None)));
    }

    #[test]
    fn remedies_name_the_keys_of_the_storage() {
        let reason = "no credentials found".to_owned();
        let error = StorageError::Credentials { url: "az://c/p".to_owned(), reason };
        let text = failure(error, &CheckpointStorage::default()).to_string();
        assert!(text.contains("such as AZURE_STORAGE_ACCOUNT_NAME and"), "{text}");
    }

    #[test]
    fn storage_is_flag_then_record_then_environment() {
        let owned = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
        // URL and endpoint of flag, record, spec and environment, and the expected pair.
        type Pair<'a> = (&'a str, &'a str);
        let check = |flag: Pair, record: Pair, spec: Pair, environment: Pair, expected: Pair| {
            let options = Options { storage_url: owned(flag.0), storage_endpoint: owned(flag.1) };
            let used = owned(record.0).map(|url| StorageRecord {
                url,
                endpoint: owned(record.1),
                path: String::new(),
                secret_name: owned("secret"),
                fixed_at: None,
            });
            let (url, endpoint) = (owned(spec.0), owned(spec.1));
            let spec = CheckpointStorage { url, endpoint, ..Default::default() };
            let storage = with_used(spec, used);
            let environment = |name: &str| match name {
                ENV_URL => owned(environment.0),
                _ => owned(environment.1),
            };
            let (url, endpoint) = options.resolve(&storage, &environment).unwrap();
            assert_eq!((url.as_str(), endpoint.as_deref().unwrap_or("")), expected);
        };
        let none = ("", "");
        let [flag, record] = [("s3://flag", "http://flag"), ("s3://record", "http://record")];
        let [spec, env] = [("s3://spec", "http://spec"), ("s3://env", "http://env")];
        check(flag, record, spec, env, flag);
        check(none, record, spec, env, record);
        check(none, record, none, env, record);
        check(none, record, none, none, record);
        check(none, ("s3://record", ""), none, env, ("s3://record", ""));
        check(none, none, spec, env, spec);
        check(none, none, none, env, env);
        check(("s3://flag", ""), record, spec, env, ("s3://flag", "http://record"));
        check(("", "http://flag"), record, spec, env, ("s3://record", "http://flag"));
        check(("", "http://flag"), none, none, env, ("s3://env", "http://flag"));
    }

    #[test]
    fn missing_storage_error_names_the_flag() {
        let none = |_: &str| None;
        let resolved = Options::default().resolve(&CheckpointStorage::default(), &none);
        assert!(resolved.unwrap_err().to_string().contains("--storage-url"));
    }
}

//! An experiment's storage, opened from here.

use stoker_api::experiment::{CheckpointStorage, Experiment, UsedStorage};
use stoker_storage::{Storage, StorageError, layout};

use crate::failure::Failure;

/// The variable that names the storage of experiments that name none.
const ENV_URL: &str = "STOKER_STORAGE_URL";
/// The address of its S3 server.
const ENV_ENDPOINT: &str = "STOKER_STORAGE_ENDPOINT";

/// Where an experiment's storage lies, seen from here.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct Options {
    /// The storage as it is reached from here [default: the one that the operator recorded, or else
    /// checkpointStorage.url, or else STOKER_STORAGE_URL]. Credentials come from the environment,
    /// such as AWS_ACCESS_KEY_ID
    #[arg(long, value_name = "URL", help_heading = "Storage")]
    storage_url: Option<String>,
    /// The S3 server as it is reached from here [default: the recorded one, or else
    /// checkpointStorage.endpoint, or else, if STOKER_STORAGE_URL is used, STOKER_STORAGE_ENDPOINT]
    #[arg(long, value_name = "URL", help_heading = "Storage")]
    storage_endpoint: Option<String>,
}

impl Options {
    /// The storage's address and endpoint, for an experiment that says `spec`.
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
        let of = |name: &str| environment(name).filter(|it| !it.is_empty());
        let (url, endpoint) = match (&self.storage_url, &spec.url) {
            (Some(url), _) => {
                (url.clone(), spec.endpoint.clone().filter(|_| url.starts_with("s3:")))
            }
            (None, Some(url)) if url.starts_with("file:") || url.starts_with('/') => {
                return Err(Failure::Input(format!(
                    "the storage is {url}, a folder of the pods; if the same folder is mounted \
                     here, name it by --storage-url"
                )));
            }
            (None, Some(url)) => (url.clone(), spec.endpoint.clone()),
            (None, None) => {
                let url = of(ENV_URL).ok_or_else(|| {
                    Failure::Input(format!(
                        "the experiment names no storage, and what the operator uses in its place \
                         is not known here: name it by --storage-url or {ENV_URL}, or set \
                         checkpointStorage.url in the experiment's file"
                    ))
                })?;
                (url, of(ENV_ENDPOINT))
            }
        };
        Ok((url, self.storage_endpoint.clone().or(endpoint)))
    }

    /// Opens it. Little patience: somebody waits.
    pub(crate) fn open(&self, spec: &CheckpointStorage) -> Result<Storage, Failure> {
        let (url, endpoint) = self.address(spec)?;
        Storage::open(&url, endpoint.as_deref())
            .map(Storage::impatient)
            .map_err(|error| failure(error, spec))
    }
}

/// The storage that the operator recorded for an experiment, or else the one in its spec.
pub(crate) fn of(experiment: &Experiment) -> CheckpointStorage {
    let used = experiment.status.as_ref().and_then(|it| it.storage.clone());
    with_used(experiment.spec.checkpoint_storage.clone(), used)
}

/// Returns the recorded storage, or else the one in the spec.
pub(crate) fn with_used(
    mut storage: CheckpointStorage,
    used: Option<UsedStorage>,
) -> CheckpointStorage {
    if let Some(used) = used.filter(|used| !used.url.is_empty()) {
        storage.url = Some(used.url);
        storage.endpoint = used.endpoint;
        storage.secret_name = used.secret_name.or(storage.secret_name);
    }
    storage
}

/// What to do where the storage cannot be read from here.
pub(crate) fn failure(error: StorageError, spec: &CheckpointStorage) -> Failure {
    let whose = match &spec.secret_name {
        Some(name) => format!("those of the Secret `{name}` in the experiment's namespace"),
        None => "such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY".to_owned(),
    };
    Failure::System(format!(
        "{error}; the storage is reached from this machine, with the credentials of its \
         environment, {whose}; where it has another address here, name it by --storage-url and \
         --storage-endpoint"
    ))
}

/// The folder of an experiment, below the root.
pub(crate) fn experiment_path(experiment: &Experiment) -> String {
    let of = |text: &Option<String>| text.clone().unwrap_or_default();
    let metadata = &experiment.metadata;
    layout::experiment_path(&of(&metadata.namespace), &of(&metadata.name), &of(&metadata.uid))
}

/// The folder of a trial, below the root.
pub(crate) fn trial_path(experiment: &Experiment, index: u32) -> String {
    format!("{}/trials/{index}", experiment_path(experiment))
}

/// A checkpoint's address, for people: as the experiment writes it, or below a root that is not
/// known here.
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
        let own = |it: Option<&str>| it.map(str::to_owned);
        let options = Options { storage_url: own(flags.0), storage_endpoint: own(flags.1) };
        let (url, endpoint) = (own(spec.0), own(spec.1));
        let spec = CheckpointStorage { url, endpoint, ..Default::default() };
        let environment = |name: &str| Some(format!("s3://env/{name}"));
        match (options.resolve(&spec, &environment), expected) {
            (Ok(found), Ok((url, endpoint))) => {
                assert_eq!((found.0.as_str(), found.1.as_deref()), (url, endpoint));
            }
            (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
            (found, expected) => panic!("{found:?} is not {expected:?}"),
        }
    }

    #[test]
    fn flags_go_before_the_experiment_and_the_environment_comes_last() {
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
        check((None, None), (Some("file:///data"), None), Err("a folder of the pods"));
        check((Some("file:///mnt"), None), (Some("file:///data"), None), Ok(("file:///mnt", None)));
    }

    #[test]
    fn storage_is_flag_then_record_then_environment() {
        let own = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
        // URL and endpoint of flag, record, spec and environment, and the expected pair.
        type Pair<'a> = (&'a str, &'a str);
        let check = |flag: Pair, record: Pair, spec: Pair, environment: Pair, expected: Pair| {
            let options = Options { storage_url: own(flag.0), storage_endpoint: own(flag.1) };
            let used = own(record.0).map(|url| UsedStorage {
                url,
                endpoint: own(record.1),
                path: String::new(),
                secret_name: own("secret"),
                fixed_at: None,
            });
            let (url, endpoint) = (own(spec.0), own(spec.1));
            let spec = CheckpointStorage { url, endpoint, ..Default::default() };
            let place = with_used(spec, used);
            let environment = |name: &str| match name {
                ENV_URL => own(environment.0),
                _ => own(environment.1),
            };
            let found = options.resolve(&place, &environment).unwrap();
            assert_eq!((found.0.as_str(), found.1.as_deref().unwrap_or("")), expected);
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
    fn an_experiment_without_storage_asks_for_one() {
        let none = |_: &str| None;
        let found = Options::default().resolve(&CheckpointStorage::default(), &none);
        assert!(found.unwrap_err().to_string().contains("--storage-url"));
    }
}

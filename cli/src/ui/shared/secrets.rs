//! Storages that viewers open with the Secrets that they may read.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use k8s_openapi::api::core::v1::Secret;
use kube::{Api, Client, ResourceExt as _};
use stoker_api::experiment::CheckpointStorage;
use stoker_storage::{Credentials, Storage};
use tokio::time::{Instant, timeout};

use super::lock;
use crate::cluster::connect::chain;
use crate::cluster::storage::Options;

/// Time for which the answer about a Secret is used.
const AGE_MAX: Duration = Duration::from_secs(60);
/// Timeout for reading a Secret: a page waits for it.
const TIMEOUT: Duration = Duration::from_secs(10);

type Opened = Result<Arc<Storage>, String>;

/// Address of a storage, and the Secret with its credentials.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Address {
    namespace: String,
    secret: String,
    url: String,
    endpoint: Option<String>,
}

impl Address {
    /// Returns the address of a storage in a record. `path` is a directory in it.
    pub(super) fn new(
        namespace: &str,
        storage: &CheckpointStorage,
        path: Option<&str>,
    ) -> Result<Self, String> {
        let url = storage.url.as_deref().unwrap_or_default();
        if url.is_empty() {
            return Err("the record does not contain the URL of the storage yet".to_owned());
        }
        // A directory in the pods is refused, with a remedy.
        let (url, endpoint) =
            Options::default().address(storage).map_err(|error| error.to_string())?;
        let secret = storage.secret_name.clone().ok_or_else(|| {
            format!(
                "the record names no Secret with credentials for {url}: metrics, logs and \
                 checkpoints are shown only if the spec names a Secret (secretName), or uses \
                 the operator's default storage with its Secret"
            )
        })?;
        let url = match path {
            Some(path) => format!("{}/{path}", url.trim_end_matches('/')),
            None => url,
        };
        Ok(Self { namespace: namespace.to_owned(), secret, url, endpoint })
    }
}

/// Storages of all viewers. A viewer gets one only after reading its Secret.
#[derive(Debug, Default)]
pub(super) struct Storages {
    /// Open storages by address, UID and version of the Secret, so that viewers share connections.
    open: Mutex<BTreeMap<(Address, String, String), Weak<Storage>>>,
}

/// Answers about Secrets for one viewer.
#[derive(Debug, Default)]
pub(super) struct Answers(Mutex<BTreeMap<Address, (Instant, Opened)>>);

impl Storages {
    /// Opens a storage with the Secret that the user of `client` may read.
    pub(super) async fn open(
        &self,
        client: &Client,
        answers: &Answers,
        address: Address,
    ) -> Opened {
        let known = lock(&answers.0).get(&address).cloned();
        if let Some((_, opened)) = known.filter(|(at, _)| at.elapsed() < AGE_MAX) {
            return opened;
        }
        let opened = self.read_and_open(client, &address).await;
        let mut answers = lock(&answers.0);
        answers.retain(|_, (at, _)| at.elapsed() < AGE_MAX);
        answers.insert(address, (Instant::now(), opened.clone()));
        opened
    }

    async fn read_and_open(&self, client: &Client, address: &Address) -> Opened {
        let api: Api<Secret> = Api::namespaced(client.clone(), &address.namespace);
        let of = format!("Secret {} of namespace {}", address.secret, address.namespace);
        let secret = match timeout(TIMEOUT, api.get(&address.secret)).await {
            Ok(Ok(secret)) => secret,
            Ok(Err(kube::Error::Api(status))) if status.is_forbidden() => {
                return Err(format!(
                    "you may not read the {of}, which has the credentials of the storage: {}",
                    status.message
                ));
            }
            Ok(Err(kube::Error::Api(status))) => {
                return Err(format!("cannot read the {of}: {}", status.message));
            }
            Ok(Err(error)) => return Err(format!("cannot read the {of}: {}", chain(&error))),
            Err(_) => {
                return Err(format!("cannot read the {of}: no answer in {} s", TIMEOUT.as_secs()));
            }
        };
        let version = secret.resource_version().unwrap_or_default();
        let key = (address.clone(), secret.uid().unwrap_or_default(), version);
        if let Some(storage) = lock(&self.open).get(&key).and_then(Weak::upgrade) {
            return Ok(storage);
        }
        let values = secret.data.unwrap_or_default().into_iter();
        let credentials: Credentials = values
            .filter_map(|(name, value)| Some((name, String::from_utf8(value.0).ok()?)))
            .collect();
        let opened = Storage::open_with(&address.url, address.endpoint.as_deref(), &credentials);
        let storage = opened
            .map(|storage| Arc::new(storage.with_few_retries()))
            .map_err(|error| format!("cannot use the {of}: {error}"))?;
        let mut open = lock(&self.open);
        open.retain(|_, storage| storage.strong_count() > 0);
        open.insert(key, Arc::downgrade(&storage));
        Ok(storage)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_without_a_secret_are_not_opened() {
        let check = |url: Option<&str>, secret: Option<&str>, part: &str| {
            let storage = CheckpointStorage {
                url: url.map(str::to_owned),
                secret_name: secret.map(str::to_owned),
                ..CheckpointStorage::default()
            };
            match Address::new("ml", &storage, Some("a/output")) {
                Ok(address) => assert_eq!(address.url, part),
                Err(error) => assert!(error.contains(part), "{error}"),
            }
        };
        check(Some("s3://bucket/"), Some("s3"), "s3://bucket/a/output");
        check(Some("s3://bucket"), None, "secretName");
        check(None, Some("s3"), "does not contain");
        check(Some("file:///data"), Some("s3"), "directory in the pods");
    }
}

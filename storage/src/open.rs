//! Opens a store by its URL, and credentials of the environment or of the caller.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{BackoffConfig, ClientOptions, ObjectStore, RetryConfig};
use url::Url;

use crate::credentials::{self, Credentials};
use crate::profile::{self, CredentialSource};
use crate::store::RetryPolicy;
use crate::{Storage, StorageError};

const SCHEMES: &str = "write file:///path, s3://bucket/prefix, gs://bucket/prefix or \
                       az://container/prefix";

/// See [`Storage::open`] and [`Storage::open_with`]. Without `given`, credentials come from the
/// environment.
pub(crate) fn open(
    url: &str,
    endpoint: Option<&str>,
    given: Option<&Credentials>,
) -> Result<Storage, StorageError> {
    let bad_url = |reason: String| StorageError::BadUrl { url: url.to_owned(), reason };
    if given.is_some() && (url.starts_with('/') || url.starts_with("file:")) {
        return Err(bad_url("a directory has no credentials; use a bucket".to_owned()));
    }
    if url.starts_with('/') {
        return open_folder(url, PathBuf::from(url));
    }
    let parsed = Url::parse(url).map_err(|error| bad_url(format!("{error}; {SCHEMES}")))?;
    if endpoint.is_some() && parsed.scheme() != "s3" {
        return Err(bad_url("endpoint is for s3:// only; remove it".to_owned()));
    }
    match parsed.scheme() {
        "file" => {
            let path = parsed.to_file_path().map_err(|()| {
                bad_url("not a local path; write file:///path with three slashes".to_owned())
            })?;
            open_folder(url, path)
        }
        "s3" => {
            let builder = s3(url, &parsed, endpoint, given)?;
            open_network(url, endpoint, &parsed, builder.build())
        }
        "gs" => {
            let builder = match given {
                Some(given) => given.google(url)?,
                None => GoogleCloudStorageBuilder::from_env(),
            };
            let base = builder.get_config_value(&GoogleConfigKey::BaseUrl);
            check_given(url, base.as_deref(), given)?;
            let builder = builder
                .with_bucket_name(bucket(url, &parsed)?)
                .with_retry(retries())
                .with_client_options(client_of(base.as_deref()));
            open_network(url, base.as_deref(), &parsed, builder.build())
        }
        "az" => {
            let builder = match given {
                Some(given) => given.azure(url)?,
                None => MicrosoftAzureBuilder::from_env(),
            };
            let endpoint = builder.get_config_value(&AzureConfigKey::Endpoint);
            check_given(url, endpoint.as_deref(), given)?;
            let builder = builder
                .with_container_name(bucket(url, &parsed)?)
                .with_retry(retries())
                .with_client_options(client_of(endpoint.as_deref()));
            open_network(url, endpoint.as_deref(), &parsed, builder.build())
        }
        "memory" => {
            let store = Arc::new(InMemory::new());
            Ok(Storage::from_store(store.clone(), url).with_parts(store))
        }
        other => Err(bad_url(format!("unknown scheme {other:?}; {SCHEMES}"))),
    }
}

/// Checks the endpoint of credentials that a caller passes.
fn check_given(
    url: &str,
    endpoint: Option<&str>,
    given: Option<&Credentials>,
) -> Result<(), StorageError> {
    match (endpoint, given) {
        (Some(endpoint), Some(_)) => credentials::check_endpoint(url, endpoint),
        _ => Ok(()),
    }
}

fn open_folder(url: &str, path: PathBuf) -> Result<Storage, StorageError> {
    let failed = |error: std::io::Error| StorageError::BadUrl {
        url: url.to_owned(),
        reason: format!(
            "cannot create directory {}: {error}; choose another directory",
            path.display()
        ),
    };
    if path.is_file() {
        let reason = format!("{} is a file; choose another directory", path.display());
        return Err(StorageError::BadUrl { url: url.to_owned(), reason });
    }
    std::fs::create_dir_all(&path).map_err(failed)?;
    let store = LocalFileSystem::new_with_prefix(&path)
        .map_err(|error| StorageError::BadUrl { url: url.to_owned(), reason: error.to_string() })?;
    // Files are staged, synced and renamed, so that a reported checkpoint survives a machine crash.
    let store = Arc::new(store.with_fsync(true));
    Ok(Storage::from_store(store.clone(), url).in_folder(path, store))
}

fn open_network<S>(
    url: &str,
    endpoint: Option<&str>,
    parsed: &Url,
    built: object_store::Result<S>,
) -> Result<Storage, StorageError>
where
    S: ObjectStore + object_store::multipart::MultipartStore,
{
    let store = built.map_err(|error| StorageError::Credentials {
        url: url.to_owned(),
        reason: format!("{error}; check the environment variables with its settings"),
    })?;
    let prefix = Path::from_url_path(parsed.path())
        .map_err(|error| StorageError::BadUrl { url: url.to_owned(), reason: error.to_string() })?;
    let store = Arc::new(store);
    let (server, bucket) = (endpoint.unwrap_or_default(), parsed.host_str().unwrap_or_default());
    let bucket = format!("{server} {}://{bucket}", parsed.scheme());
    Ok(Storage::from_store(store.clone(), url)
        .with_parts(store)
        .with_prefix(prefix)
        .with_retry_policy(RetryPolicy::NETWORK)
        .with_transfers_of(bucket))
}

fn bucket(url: &str, parsed: &Url) -> Result<String, StorageError> {
    parsed.host_str().filter(|name| !name.is_empty()).map(str::to_owned).ok_or_else(|| {
        StorageError::BadUrl { url: url.to_owned(), reason: format!("no bucket; {SCHEMES}") }
    })
}

/// Shortest wait before a request is sent again within one operation. A faster operation has sent
/// one request.
pub(crate) const RETRY_WAIT_FIRST: Duration = Duration::from_secs(1);

/// Retries within one request. [`Storage`] retries in addition.
fn retries() -> RetryConfig {
    RetryConfig {
        backoff: BackoffConfig { init_backoff: RETRY_WAIT_FIRST, ..BackoffConfig::default() },
        max_retries: 3,
        retry_timeout: Duration::from_secs(60),
    }
}

/// Maximum time of a request with its body, and of the response. The largest request, of 16 MiB,
/// then needs 0.75 Mbit/s. A read timeout would not permit less: during an upload, it counts from
/// the start of the request. The kernel detects dead connections earlier, because the client sets
/// `TCP_USER_TIMEOUT` and keepalive probes. This timeout is for servers that do not respond.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(180);

fn client() -> ClientOptions {
    ClientOptions::new().with_connect_timeout(Duration::from_secs(5)).with_timeout(REQUEST_TIMEOUT)
}

/// Same as [`client`], for a server at `endpoint`; allows plain HTTP if the endpoint uses it. These
/// options replace those that the builder reads from the environment.
fn client_of(endpoint: Option<&str>) -> ClientOptions {
    client().with_allow_http(endpoint.is_some_and(|address| address.starts_with("http://")))
}

/// Returns a builder with credentials of the environment, or of a profile.
fn s3_of_environment(url: &str) -> Result<AmazonS3Builder, StorageError> {
    let environment = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let read = |path: &std::path::Path| std::fs::read_to_string(path).ok();
    let mut builder = AmazonS3Builder::from_env();
    match profile::find(&environment, &read) {
        Err(reason) => return Err(StorageError::Credentials { url: url.to_owned(), reason }),
        Ok(CredentialSource::Environment) => {}
        Ok(CredentialSource::Profile(profile)) => {
            let mut default = |key: AmazonS3ConfigKey, value: Option<String>| {
                if let (Some(value), None) = (value, builder.get_config_value(&key)) {
                    builder = std::mem::take(&mut builder).with_config(key, value);
                }
            };
            default(AmazonS3ConfigKey::AccessKeyId, profile.access_key_id);
            default(AmazonS3ConfigKey::SecretAccessKey, profile.secret_access_key);
            default(AmazonS3ConfigKey::Token, profile.session_token);
            default(AmazonS3ConfigKey::Region, profile.region);
            default(AmazonS3ConfigKey::Endpoint, profile.endpoint_url);
        }
    }
    Ok(builder)
}

fn s3(
    url: &str,
    parsed: &Url,
    endpoint: Option<&str>,
    given: Option<&Credentials>,
) -> Result<AmazonS3Builder, StorageError> {
    let mut builder = match given {
        Some(given) => given.s3(url)?,
        None => s3_of_environment(url)?,
    };
    if let Some(endpoint) = endpoint {
        // `S3Endpoint` takes precedence over all endpoints in the environment.
        builder = builder.with_config(AmazonS3ConfigKey::S3Endpoint, endpoint);
    }
    let endpoint_in_use = builder
        .get_config_value(&AmazonS3ConfigKey::S3Endpoint)
        .or_else(|| builder.get_config_value(&AmazonS3ConfigKey::Endpoint));
    check_given(url, endpoint_in_use.as_deref(), given)?;
    if let Some(endpoint) = endpoint_in_use {
        let parsed = Url::parse(&endpoint);
        if !parsed.is_ok_and(|parsed| matches!(parsed.scheme(), "http" | "https")) {
            let reason = format!("endpoint {endpoint:?} is not a URL; write http://host:port");
            return Err(StorageError::BadUrl { url: url.to_owned(), reason });
        }
        builder = builder.with_client_options(client_of(Some(&endpoint)));
    } else {
        builder = builder.with_client_options(client());
    }
    // Some servers support only single deletes.
    Ok(builder
        .with_bucket_name(bucket(url, parsed)?)
        .with_retry(retries())
        .with_disable_bulk_delete(true))
}

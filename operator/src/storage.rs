//! The storage of an experiment or a job, recorded before the first pod that uses it.
//!
//! The operator's settings may change while a trial runs. If the trial followed them, it would look
//! for its checkpoints in the new location and train from scratch.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{Container, Pod};
use kube::api::ListParams;
use kube::{Api, ResourceExt as _};
use serde_json::Value;
use stoker_api::experiment::{Experiment, StorageRecord};
use stoker_api::names::{
    ANNOTATION_TRIAL_CONFIG, COMPONENT_TRIAL, LABEL_COMPONENT, LABEL_EXPERIMENT, experiment_path,
};
use stoker_api::validate::ValidExperiment;

use crate::cache::Key;
use crate::context::{Context, now};
use crate::error::{Error, request};
use crate::objects::{CachedTrial, TRAINER_CONTAINER};

/// Storage as configured in an existing pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PodStorage {
    pub(crate) url: String,
    pub(crate) endpoint: Option<String>,
    /// Secret with its credentials: `None` if `podOverrides` hide it, `Some(None)` if there is no
    /// Secret.
    pub(crate) secret_name: Option<Option<String>>,
}

/// Returns the storage of an experiment: its fixed record, or the record to write. `None` if
/// neither the experiment nor the operator specifies a storage.
pub(crate) async fn of_experiment(
    context: &Context,
    key: &Key,
    experiment: &Experiment,
    valid: &ValidExperiment,
    trials: &[impl AsRef<CachedTrial>],
) -> Result<Option<StorageRecord>, Error> {
    let recorded = experiment.status.as_ref().and_then(|status| status.storage.as_ref());
    if let Some(fixed) = recorded.filter(|storage| storage.is_fixed()) {
        return Ok(Some(fixed.clone()));
    }
    let uid = experiment.metadata.uid.as_deref().unwrap_or_default();
    let path = experiment_path(&key.namespace, &valid.name, uid);
    let settings = context.operator_config.storage(&valid.spec.checkpoint_storage, path);
    let has_started = |trial: &&CachedTrial| !trial.record.status.attempts.is_empty();
    let started: BTreeSet<&str> =
        trials.iter().map(AsRef::as_ref).filter(has_started).map(CachedTrial::uid).collect();
    let in_pod = match started.is_empty() {
        true => None,
        false => {
            let labels =
                format!("{LABEL_EXPERIMENT}={},{LABEL_COMPONENT}={COMPONENT_TRIAL}", valid.name);
            of_newest_pod(context, key, &labels, &started, &valid.spec.pod.env_from_secrets).await?
        }
    };
    let recorded = recorded.filter(|_| !started.is_empty());
    let default_secret = context.operator_config.storage_secret.as_ref();
    let default_secret = default_secret.filter(|_| has_pods(trials));
    Ok(to_record(settings, in_pod, recorded, default_secret))
}

/// Returns whether an attempt has had all its pods. Without a fixed record, only an older operator
/// creates pods.
fn has_pods(trials: &[impl AsRef<CachedTrial>]) -> bool {
    let has_pods =
        |trial: &CachedTrial| trial.record.status.attempts.iter().any(|attempt| attempt.has_pods);
    trials.iter().map(AsRef::as_ref).any(has_pods)
}

/// Returns the storage record to write where no fixed one exists. `in_pod` is the storage of the
/// newest pod. `recorded` comes from an older operator, which followed its settings.
/// `default_secret` is the default Secret if an older operator has created pods. It used this
/// Secret for every storage.
pub(crate) fn to_record(
    settings: StorageRecord,
    in_pod: Option<PodStorage>,
    recorded: Option<&StorageRecord>,
    default_secret: Option<&String>,
) -> Option<StorageRecord> {
    let mut storage = settings;
    storage.secret_name = storage.secret_name.or_else(|| default_secret.cloned());
    if let Some(in_pod) = in_pod {
        (storage.url, storage.endpoint) = (in_pod.url, in_pod.endpoint);
        if let Some(secret_name) = in_pod.secret_name {
            storage.secret_name = secret_name;
        }
    } else if let Some(recorded) = recorded.filter(|recorded| !recorded.url.is_empty()) {
        storage.url.clone_from(&recorded.url);
        storage.endpoint.clone_from(&recorded.endpoint);
    }
    storage.fixed_at = Some(now());
    Some(storage).filter(StorageRecord::is_fixed)
}

/// Reads the storage of the newest pod with these labels and one of these owner UIDs.
pub(crate) async fn of_newest_pod(
    context: &Context,
    key: &Key,
    labels: &str,
    owners: &BTreeSet<&str>,
    env_from_secrets: &[String],
) -> Result<Option<PodStorage>, Error> {
    let api: Api<Pod> = Api::namespaced(context.client.clone(), &key.namespace);
    let parameters = ListParams::default().labels(labels);
    let pods = request(format!("list the pods of {key}"), api.list(&parameters)).await?.items;
    let is_owned =
        |pod: &&Pod| pod.owner_references().iter().any(|owner| owners.contains(owner.uid.as_str()));
    let mut pods: Vec<&Pod> = pods.iter().filter(is_owned).collect();
    pods.sort_by_key(|pod| pod.creation_timestamp());
    Ok(pods.into_iter().rev().find_map(|pod| of_pod(pod, env_from_secrets)))
}

/// Reads the storage of a pod. `env_from_secrets` are the user's Secrets, which precede the
/// storage's.
fn of_pod(pod: &Pod, env_from_secrets: &[String]) -> Option<PodStorage> {
    let config: Value =
        serde_json::from_str(pod.annotations().get(ANNOTATION_TRIAL_CONFIG)?).ok()?;
    let text = |field: &str| config["storage"][field].as_str().map(str::to_owned);
    let url = text("url").filter(|url| !url.is_empty())?;
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    let secrets = containers.into_iter().find(|container| container.name == TRAINER_CONTAINER);
    let secrets = secrets.map(secrets_of).unwrap_or_default();
    let secret_name = match secrets.strip_prefix(env_from_secrets) {
        Some([]) => Some(None),
        Some([secret]) => Some(Some(secret.clone())),
        _ => None,
    };
    Some(PodStorage { url, endpoint: text("endpoint"), secret_name })
}

fn secrets_of(container: &Container) -> Vec<String> {
    let sources = container.env_from.iter().flatten();
    sources.filter_map(|source| Some(source.secret_ref.as_ref()?.name.clone())).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn storage(url: &str, endpoint: Option<&str>, secret_name: Option<&str>) -> StorageRecord {
        let owned = |text: Option<&str>| text.map(str::to_owned);
        let (endpoint, secret_name) = (owned(endpoint), owned(secret_name));
        StorageRecord {
            url: url.to_owned(),
            endpoint,
            path: "p".into(),
            secret_name,
            fixed_at: None,
        }
    }

    #[test]
    fn storage_is_read_from_a_pod() {
        let check = |from: &[&str], user_secrets: &[&str], expected: Option<Option<&str>>| {
            let config = json!({ "storage": { "url": "s3://a", "endpoint": "http://e" } });
            let from: Vec<_> =
                from.iter().map(|name| json!({ "secretRef": { "name": name } })).collect();
            let pod = json!({
                "metadata": { "annotations": { ANNOTATION_TRIAL_CONFIG: config.to_string() } },
                "spec": { "containers": [
                    { "name": "side", "envFrom": [{ "secretRef": { "name": "other" } }] },
                    { "name": "trainer", "envFrom": from },
                ] },
            });
            let user_secrets: Vec<String> =
                user_secrets.iter().map(|&name| name.to_owned()).collect();
            let storage = of_pod(&serde_json::from_value(pod).unwrap(), &user_secrets).unwrap();
            assert_eq!(
                (storage.url.as_str(), storage.endpoint.as_deref()),
                ("s3://a", Some("http://e"))
            );
            let expected = expected.map(|name| name.map(str::to_owned));
            assert_eq!(storage.secret_name, expected, "{from:?} {user_secrets:?}");
        };
        check(&["s"], &[], Some(Some("s")));
        check(&[], &[], Some(None));
        check(&["u", "s"], &["u"], Some(Some("s")));
        check(&["u"], &["u"], Some(None));
        // Overrides can replace the list of Secrets.
        check(&["x", "y"], &["u"], None);
        assert_eq!(of_pod(&Pod::default(), &[]), None);
    }

    #[test]
    fn pods_take_precedence_over_records_and_settings() {
        let settings = || storage("s3://new", Some("http://new"), Some("new"));
        let old = storage("s3://old", None, None);
        let pod = |secret_name: Option<Option<&str>>| PodStorage {
            url: "s3://pod".to_owned(),
            endpoint: None,
            secret_name: secret_name.map(|name| name.map(str::to_owned)),
        };
        let check =
            |in_pod: Option<PodStorage>, old: Option<&StorageRecord>, expected: StorageRecord| {
                let record = to_record(settings(), in_pod, old, None).unwrap();
                assert!(record.is_fixed());
                assert_eq!(StorageRecord { fixed_at: None, ..record }, expected);
            };
        check(Some(pod(Some(Some("own")))), Some(&old), storage("s3://pod", None, Some("own")));
        check(Some(pod(Some(None))), Some(&old), storage("s3://pod", None, None));
        check(Some(pod(None)), None, storage("s3://pod", None, Some("new")));
        check(None, Some(&old), storage("s3://old", None, Some("new")));
        check(None, Some(&storage("", None, None)), settings());
        check(None, None, settings());
        assert_eq!(to_record(storage("", None, None), None, None, None), None);
    }

    #[test]
    fn upgrade_keeps_the_default_secret() {
        let own = || storage("s3://own", None, None);
        let pod = |secret_name: Option<Option<&str>>| PodStorage {
            url: "s3://own".to_owned(),
            endpoint: None,
            secret_name: secret_name.map(|name| name.map(str::to_owned)),
        };
        let default = "default".to_owned();
        let check =
            |in_pod: Option<PodStorage>, old: Option<&StorageRecord>, expected: Option<&str>| {
                let record = to_record(own(), in_pod, old, Some(&default)).unwrap();
                assert_eq!(record.secret_name.as_deref(), expected);
            };
        check(None, None, Some("default"));
        check(None, Some(&own()), Some("default"));
        check(Some(pod(None)), None, Some("default"));
        check(Some(pod(Some(None))), Some(&own()), None);
        check(Some(pod(Some(Some("own")))), None, Some("own"));
        // No attempt has begun.
        assert_eq!(to_record(own(), None, None, None).unwrap().secret_name, None);
    }
}

//! Experiments and jobs of a cluster: one list and one watch per kind, which all viewers share.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt as _, TryStreamExt as _};
use kube::api::{ListParams, WatchEvent, WatchParams};
use kube::{Api, Resource as _};
use stoker_api::experiment::Experiment;
use stoker_api::inference::InferenceJob;
use stoker_api::trial::Trial;
use stoker_engine::trial::TrialRecord;
use stoker_storage::Storage;
use stoker_ui::{ClusterAccess, Job, Run, Site, Store};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

use super::requests::Requests;
use crate::cluster::connect::{Cluster, Options, chain};
use crate::cluster::{self, storage, text};
use crate::failure::Failure;
use crate::print;
use crate::run::record::random_hex;

/// Delay before a failed watch starts again.
const RETRY: Duration = Duration::from_secs(2);
/// Delay before a watch starts again that the API server refuses.
const RETRY_FORBIDDEN: Duration = Duration::from_secs(60);
/// Seconds after which the server ends a watch, and this program starts the next one.
const WATCH_SECONDS: u32 = 60;
/// Maximum number of events that are taken in before the pages see them.
const BATCH: usize = 1_000;

/// A change of an object.
enum Change {
    /// All objects of a kind, by UID. Missing objects are gone.
    Experiments(Vec<Experiment>),
    Trials(Vec<Trial>),
    Jobs(Vec<InferenceJob>),
    Experiment(Box<Experiment>, bool),
    Trial(Box<Trial>, bool),
    Job(Box<InferenceJob>, bool),
    /// Kind that cannot be read now, with the reason.
    Failed(String, String),
}

/// Starts tasks that put the experiments and jobs of the cluster into the store.
///
/// # Errors
///
/// The cluster cannot be reached, or refuses to list experiments or trials.
pub(super) async fn start(
    options: &Options,
    all: bool,
    storage: storage::Options,
    store: Arc<Store>,
    allows_actions: bool,
) -> Result<Site, Failure> {
    let cluster = Cluster::connect(options).await?;
    // The first lists, so that a refusal ends the command with the server's words.
    cluster.list::<Experiment>("experiments", &ListParams::default().limit(1), all).await?;
    cluster.list::<Trial>("trials", &ListParams::default().limit(1), all).await?;
    let place = match all {
        true => format!("Cluster at {}, all namespaces", cluster.server),
        false => format!("Namespace {} of the cluster at {}", cluster.namespace, cluster.server),
    };
    let (sender, mut receiver) = unbounded_channel();
    let experiments = api::<Experiment>(&cluster, all);
    let trials = api::<Trial>(&cluster, all);
    tokio::spawn(watch(experiments, sender.clone(), Change::Experiments, |object, is_there| {
        Change::Experiment(Box::new(object), is_there)
    }));
    tokio::spawn(watch(trials, sender.clone(), Change::Trials, |object, is_there| {
        Change::Trial(Box::new(object), is_there)
    }));
    // A viewer who may not list jobs sees the experiments.
    let jobs = api::<InferenceJob>(&cluster, all);
    tokio::spawn(watch(jobs, sender, Change::Jobs, |object, is_there| {
        Change::Job(Box::new(object), is_there)
    }));
    tokio::spawn(async move {
        let mut objects = Objects { storage, ..Objects::default() };
        let mut changes = Vec::new();
        while receiver.recv_many(&mut changes, BATCH).await > 0 {
            let changed: BTreeSet<String> =
                changes.drain(..).flat_map(|change| objects.take_in(change)).collect();
            objects.publish(&changed, &store);
        }
    });
    let token = random_hex(super::TOKEN_BYTES)?;
    let requests = Arc::new(Requests::new(cluster, all));
    Ok(Site {
        place,
        is_cluster: true,
        arguments: String::new(),
        cluster: Some(Arc::new(ClusterAccess::new(requests, allows_actions, token))),
    })
}

fn api<K>(cluster: &Cluster, all: bool) -> Api<K>
where
    K: kube::Resource<Scope = kube::core::NamespaceResourceScope, DynamicType = ()>,
{
    if all { Api::all(cluster.client.clone()) } else { cluster.api() }
}

/// Lists and watches a kind until the page ends.
async fn watch<K>(
    api: Api<K>,
    sender: UnboundedSender<Change>,
    listed: fn(Vec<K>) -> Change,
    changed: fn(K, bool) -> Change,
) where
    K: kube::Resource<DynamicType = ()>
        + Clone
        + std::fmt::Debug
        + serde::de::DeserializeOwned
        + Send
        + 'static,
{
    while !sender.is_closed() {
        let mut delay = RETRY;
        if let Err(error) = watch_once(&api, &sender, listed, changed).await {
            if matches!(&error, kube::Error::Api(status) if status.is_forbidden()) {
                delay = RETRY_FORBIDDEN;
            }
            let why = chain(&error);
            print::err(format!("stoker: cannot watch the cluster: {why}; trying again"));
            let _ = sender.send(Change::Failed(K::kind(&()).into_owned(), why));
        }
        tokio::time::sleep(delay).await;
    }
}

async fn watch_once<K>(
    api: &Api<K>,
    sender: &UnboundedSender<Change>,
    listed: fn(Vec<K>) -> Change,
    changed: fn(K, bool) -> Change,
) -> kube::Result<()>
where
    K: kube::Resource + Clone + std::fmt::Debug + serde::de::DeserializeOwned + Send + 'static,
{
    let list = api.list(&ListParams::default()).await?;
    let mut version = list.metadata.resource_version.clone().unwrap_or_default();
    let _ = sender.send(listed(list.items));
    let params = WatchParams::default().timeout(WATCH_SECONDS);
    loop {
        let mut events = api.watch(&params, &version).await?.boxed();
        while let Some(event) = events.try_next().await? {
            let change = match event {
                WatchEvent::Added(object) | WatchEvent::Modified(object) => (object, true),
                WatchEvent::Deleted(object) => (object, false),
                WatchEvent::Bookmark(bookmark) => {
                    version = bookmark.metadata.resource_version;
                    continue;
                }
                // The version is too old: list again.
                WatchEvent::Error(_) => return Ok(()),
            };
            version = change.0.meta().resource_version.clone().unwrap_or(version);
            let _ = sender.send(changed(change.0, change.1));
        }
        if sender.is_closed() {
            return Ok(());
        }
    }
}

/// Objects of the cluster.
#[derive(Default)]
struct Objects {
    /// Experiments by UID.
    experiments: BTreeMap<String, Experiment>,
    /// Trials by UID of their experiment and index.
    trials: BTreeMap<String, BTreeMap<u32, Arc<TrialRecord>>>,
    /// Jobs by UID.
    jobs: BTreeMap<String, InferenceJob>,
    /// Why jobs cannot be read.
    jobs_error: Option<String>,
    /// Storage by the UID of the experiment.
    storages: BTreeMap<String, Result<Arc<Storage>, String>>,
    /// Output directory with its URL, by the UID of the job.
    outputs: BTreeMap<String, (String, Result<Arc<Storage>, String>)>,
    storage: storage::Options,
}

fn uid(object: &impl kube::Resource) -> String {
    object.meta().uid.clone().unwrap_or_default()
}

/// Returns the UID of a trial's experiment.
fn owner(trial: &Trial) -> Option<String> {
    let owners = trial.metadata.owner_references.iter().flatten();
    owners.into_iter().find(|owner| owner.kind == "Experiment").map(|owner| owner.uid.clone())
}

impl Objects {
    /// Takes a change in. Returns the UIDs of the experiments and jobs that it concerns.
    fn take_in(&mut self, change: Change) -> Vec<String> {
        match change {
            Change::Experiments(all) => {
                let before: Vec<String> = self.experiments.keys().cloned().collect();
                self.experiments = all.into_iter().map(|one| (uid(&one), one)).collect();
                before.into_iter().chain(self.experiments.keys().cloned()).collect()
            }
            Change::Trials(all) => {
                let before: Vec<String> = self.trials.keys().cloned().collect();
                self.trials.clear();
                all.into_iter().for_each(|trial| drop(self.add(trial)));
                before.into_iter().chain(self.trials.keys().cloned()).collect()
            }
            Change::Experiment(experiment, is_there) => {
                let uid = uid(&*experiment);
                match is_there {
                    true => drop(self.experiments.insert(uid.clone(), *experiment)),
                    false => drop(self.experiments.remove(&uid)),
                }
                vec![uid]
            }
            Change::Jobs(all) => {
                let before: Vec<String> = self.jobs.keys().cloned().collect();
                self.jobs_error = None;
                self.jobs = all.into_iter().map(|one| (uid(&one), one)).collect();
                before.into_iter().chain(self.jobs.keys().cloned()).collect()
            }
            Change::Job(job, is_there) => {
                let uid = uid(&*job);
                match is_there {
                    true => drop(self.jobs.insert(uid.clone(), *job)),
                    false => drop(self.jobs.remove(&uid)),
                }
                vec![uid]
            }
            Change::Failed(kind, why) => {
                if kind == InferenceJob::kind(&()) {
                    self.jobs_error = Some(why);
                }
                Vec::new()
            }
            Change::Trial(trial, true) => self.add(*trial).into_iter().collect(),
            Change::Trial(trial, false) => {
                let Some(owner) = owner(&trial) else { return Vec::new() };
                if let Some(trials) = self.trials.get_mut(&owner) {
                    trials.remove(&trial.spec.index);
                }
                vec![owner]
            }
        }
    }

    fn add(&mut self, trial: Trial) -> Option<String> {
        let owner = owner(&trial)?;
        let record = TrialRecord { spec: trial.spec, status: trial.status.unwrap_or_default() };
        let trials = self.trials.entry(owner.clone()).or_default();
        trials.insert(record.spec.index, Arc::new(record));
        Some(owner)
    }

    /// Puts changed experiments and jobs into the store, and removes deleted ones.
    fn publish(&mut self, changed: &BTreeSet<String>, store: &Store) {
        for uid in changed {
            if let Some(job) = self.jobs.get(uid).cloned() {
                let (url, output) = self.output(uid, &job);
                let created = text::created(&job.metadata);
                store.replace_job(Job::new(job, true, created, url, output));
            }
            let Some(experiment) = self.experiments.get(uid) else { continue };
            let options = &self.storage;
            let storage = self.storages.entry(uid.clone()).or_insert_with(|| {
                let opened = options.open(&storage::of(experiment));
                opened.map(Arc::new).map_err(|error| error.to_string())
            });
            let trials = self.trials.get(uid).cloned().unwrap_or_default();
            store.replace(Run::new(experiment.clone(), trials, true, storage.clone()));
        }
        store.retain(|run| self.experiments.contains_key(&run.uid));
        store.set_jobs_error(self.jobs_error.clone());
        store.retain_jobs(|job| self.jobs.contains_key(&job.uid));
        self.trials.retain(|uid, trials| self.experiments.contains_key(uid) || !trials.is_empty());
        self.storages.retain(|uid, _| self.experiments.contains_key(uid));
        self.outputs.retain(|uid, _| self.jobs.contains_key(uid));
    }

    /// Returns the output directory of a job: its URL, and the storage or why it cannot be read.
    fn output(&mut self, uid: &str, job: &InferenceJob) -> (String, Result<Arc<Storage>, String>) {
        let url = job.status.as_ref().and_then(|status| status.output.clone());
        let url = url.or_else(|| job.spec.output.url.clone()).unwrap_or_default();
        if let Some((known, output)) = self.outputs.get(uid)
            && *known == url
        {
            return (url, output.clone());
        }
        let mut storage = cluster::job::storage_of(job);
        let opened = match &job.spec.output.url {
            _ if url.is_empty() => Err("the operator has not recorded the output yet".to_owned()),
            // Options of this program may replace the address of the job's own storage only.
            Some(_) => {
                storage.url = Some(url.clone());
                storage.endpoint = job.spec.output.endpoint.clone();
                storage::Options::default().open(&storage).map_err(|error| error.to_string())
            }
            None => {
                let path = format!("{}/output", cluster::job::path(job));
                self.storage.open_at(&storage, &path).map_err(|error| error.to_string())
            }
        };
        let opened = opened.map(Arc::new);
        self.outputs.insert(uid.to_owned(), (url.clone(), opened.clone()));
        (url, opened)
    }
}

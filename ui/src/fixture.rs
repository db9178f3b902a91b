//! Runs and jobs for tests.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use serde_json::{Value, json};
use stoker_api::experiment::Experiment;
use stoker_api::time::Timestamp;
use stoker_api::trial::TrialSpec;
use stoker_engine::trial::TrialRecord;
use stoker_storage::Storage;

use crate::actions::{Action, ActionBackend, ClusterObjects, Permissions, Target};
use crate::job::Job;
use crate::store::{Changes, Run, Store};
use crate::viewer::{Account, Directory, Refusal, Sight, Token};
use crate::visible::{Part, Visible};

/// UID of all runs and jobs.
pub(crate) const UID: &str = "0123456789abcdef";

/// Returns the experiment `ml/iris` with these fields of the spec, and trials with these statuses.
pub(crate) fn run(spec: Value, status: Value, trials: &[Value]) -> Run {
    let mut experiment = json!({
        "apiVersion": "stoker.dev/v1alpha1", "kind": "Experiment",
        "metadata": {"name": "iris", "namespace": "ml", "uid": UID},
        "spec": {
            "entrypoint": {"command": ["true"]},
            "searcher": {"metric": "loss", "maxLength": {"batches": 4},
                "random": {"maxTrials": 8}},
        },
        "status": status,
    });
    for (name, value) in spec.as_object().into_iter().flatten() {
        experiment["spec"][name] = value.clone();
    }
    let experiment: Experiment = serde_json::from_value(experiment).unwrap();
    let record = |(index, status): (u32, &Value)| {
        let spec: TrialSpec = serde_json::from_value(json!({
            "experiment": "iris", "index": index, "requestId": "", "seed": 1,
            "hyperparameters": {}, "unit": "batches", "units": 4,
        }))
        .unwrap();
        let status = serde_json::from_value(status.clone()).unwrap();
        (index, Arc::new(TrialRecord { spec, status }))
    };
    let trials = (0..).zip(trials).map(record).collect();
    Run::new(experiment, trials, true, Err("no storage".to_owned()))
}

/// Returns the job `ml/species`, created in 1970, with an empty output directory.
pub(crate) fn job(status: Value, is_running: bool) -> Job {
    let job = serde_json::from_value(json!({
        "apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceJob",
        "metadata": {"name": "species", "namespace": "ml", "uid": UID},
        "spec": {"entrypoint": {"command": ["true"]}, "input": {"url": "rows.csv"}},
        "status": status,
    }));
    let output = Storage::open("memory://", None).unwrap();
    let output = Ok(Arc::new(output));
    Job::new(job.unwrap(), is_running, Some(Timestamp(0)), "memory://".to_owned(), output)
}

/// Accepts any token except `wrong`. Its text before the first `.` is the name of the user. The
/// token `expired` is that. Users see the namespaces in `namespaces`.
#[derive(Debug)]
pub(crate) struct FakeDirectory {
    /// Number of checked tokens.
    pub(crate) asked: Mutex<usize>,
    /// Time that a check takes.
    pub(crate) delay: Duration,
    /// Number of ended accounts.
    pub(crate) ended: Arc<Mutex<usize>>,
    pub(crate) store: Arc<Store>,
    pub(crate) changes: Changes,
    pub(crate) namespaces: Arc<Mutex<Vec<String>>>,
    /// Why the storage cannot be read; `None` for an empty one.
    pub(crate) no_storage: Option<String>,
    /// Whether permissions cannot be reviewed.
    pub(crate) is_unavailable: Arc<AtomicBool>,
}

impl Default for FakeDirectory {
    fn default() -> Self {
        let changes = Changes::default();
        Self {
            asked: Mutex::default(),
            delay: Duration::ZERO,
            ended: Arc::default(),
            store: Arc::new(Store::with_changes(changes.clone())),
            changes,
            namespaces: Arc::default(),
            no_storage: None,
            is_unavailable: Arc::default(),
        }
    }
}

#[derive(Debug)]
struct FakeAccount {
    name: String,
    ended: Arc<Mutex<usize>>,
    store: Arc<Store>,
    changes: Changes,
    namespaces: Arc<Mutex<Vec<String>>>,
    no_storage: Option<String>,
    is_unavailable: Arc<AtomicBool>,
}

impl Directory for FakeDirectory {
    fn sign_in(&self, token: Token) -> BoxFuture<'_, Result<Arc<dyn Account>, Refusal>> {
        *self.asked.lock().unwrap() += 1;
        let answer = match token.expose() {
            "wrong" => Err(Refusal::Token("Unauthorized".to_owned())),
            token => Ok(Arc::new(FakeAccount {
                name: token.split('.').next().unwrap_or_default().to_owned(),
                ended: self.ended.clone(),
                store: self.store.clone(),
                changes: self.changes.clone(),
                namespaces: self.namespaces.clone(),
                no_storage: self.no_storage.clone(),
                is_unavailable: self.is_unavailable.clone(),
            }) as Arc<dyn Account>),
        };
        let delay = self.delay;
        async move {
            if !delay.is_zero() {
                tokio::time::sleep(delay).await;
            }
            answer
        }
        .boxed()
    }
}

impl FakeAccount {
    fn open(&self) -> Result<Arc<Storage>, String> {
        match &self.no_storage {
            Some(why) => Err(why.clone()),
            None => Ok(Arc::new(Storage::open("memory://", None).unwrap())),
        }
    }
}

impl Account for FakeAccount {
    fn name(&self) -> &str {
        &self.name
    }

    fn expires_at(&self) -> Option<i64> {
        (self.name == "expired").then_some(0)
    }

    fn sight(&self) -> BoxFuture<'_, Result<Sight, Refusal>> {
        if self.is_unavailable.load(Ordering::Acquire) {
            return async { Err(Refusal::Unavailable("no answer".to_owned())) }.boxed();
        }
        let names = match self.name.as_str() {
            "eve" => Vec::new(),
            _ => self.namespaces.lock().unwrap().clone(),
        };
        let part =
            Part { store: self.store.clone(), namespaces: Some(names.iter().cloned().collect()) };
        let (runs, jobs) = (vec![part.clone()], vec![part]);
        let visible = Visible::of(runs, jobs, None, self.changes.clone());
        let place = format!("Namespaces {}", names.join(", "));
        let namespaces = names.into_iter().map(|name| (name, None)).collect();
        async move { Ok(Sight { visible, place, is_everywhere: false, namespaces }) }.boxed()
    }

    fn add_namespace(&self, name: &str) -> Result<(), String> {
        self.namespaces.lock().unwrap().push(name.to_owned());
        Ok(())
    }

    fn storage<'a>(&'a self, _: &'a Run) -> BoxFuture<'a, Result<Arc<Storage>, String>> {
        async { self.open() }.boxed()
    }

    fn output<'a>(&'a self, _: &'a Job) -> BoxFuture<'a, Result<Arc<Storage>, String>> {
        async { self.open() }.boxed()
    }

    fn api(&self) -> Arc<dyn ActionBackend> {
        Arc::new(FakeApi)
    }

    fn end(&self) {
        *self.ended.lock().unwrap() += 1;
    }
}

#[derive(Debug)]
pub(crate) struct FakeApi;

impl ActionBackend for FakeApi {
    fn act<'a>(&'a self, _: &'a Target, _: Action) -> BoxFuture<'a, Result<String, String>> {
        async { Ok("done".to_owned()) }.boxed()
    }

    fn permissions<'a>(&'a self, _: &'a str) -> BoxFuture<'a, Result<Permissions, String>> {
        async { Ok(Permissions { may_patch: true, may_delete: true }) }.boxed()
    }

    fn objects(&self) -> BoxFuture<'_, Option<ClusterObjects>> {
        let (nodes, pods) = (Ok(Vec::new()), Ok(Vec::new()));
        async move { Some(ClusterObjects { nodes, pods, namespace: None }) }.boxed()
    }
}

//! State shared by all parts of a replica: client, caches, queues.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use kube::{Api, Client, Resource};
use stoker_api::experiment::Experiment;
use stoker_api::inference::InferenceJob;
use stoker_api::time::Timestamp;
use stoker_api::trial::Trial;
use tokio::sync::{mpsc::UnboundedReceiver, watch};

use crate::cache::{Cache, Cached as _, Change, Key};
use crate::declared::{CachedExperiment, CachedJob};
use crate::metrics::Metrics;
use crate::objects::{CachedNode, CachedPod, CachedTrial};
use crate::options::Options;
use crate::queue::Queue;
use crate::trial::config::Setup;

/// Delay of an experiment's reconcile after a change of a trial, to batch such changes.
const GATHER: Duration = Duration::from_millis(100);
/// The same delay for changes that only the status shows: trials validate often.
const GATHER_TO_SHOW: Duration = Duration::from_secs(2);
/// Interval of the periodic reconcile, which varies by a third in both directions. It works from
/// the caches, so it does not repair events that a watch has missed.
const SAFETY: Duration = Duration::from_secs(600);

/// Longest wait of a new leader for the list of jobs.
const JOBS_MAX: Duration = Duration::from_secs(20);

/// State shared by all parts of a replica.
pub struct World {
    /// Client of the API server.
    pub client: Client,
    /// Command-line options.
    pub options: Options,
    /// Settings and key material for pods.
    pub setup: Setup,
    /// All experiments.
    pub experiments: Arc<Cache<CachedExperiment>>,
    /// All trials.
    pub trials: Arc<Cache<CachedTrial>>,
    /// All inference jobs.
    pub jobs: Arc<Cache<CachedJob>>,
    /// All pods of trials and jobs.
    pub pods: Arc<Cache<CachedPod>>,
    /// All nodes.
    pub nodes: Arc<Cache<CachedNode>>,
    /// Experiments to reconcile.
    pub experiment_queue: Queue,
    /// Trials to reconcile.
    pub trial_queue: Queue,
    /// Jobs to reconcile.
    pub job_queue: Queue,
    /// Held while a job's report is written, since all processes of a job report to the same
    /// object.
    pub job_reports: tokio::sync::Mutex<()>,
    /// Metrics of this replica.
    pub metrics: Metrics,
    /// Restarts all watches.
    pub refresh: watch::Sender<u64>,
    /// Notifies waiting requests of the report server that a trial's spec or status has changed.
    pub trial_changes: tokio::sync::broadcast::Sender<Key>,
    /// Time until which this replica leads without another renewal.
    leads_until: Mutex<Option<Instant>>,
    /// Time of the API server's last response about the lease.
    heard: Mutex<Option<Instant>>,
    /// Why this replica must exit, set when a background task has ended.
    failure: OnceLock<String>,
    /// Objects by generation whose errors were written to their status.
    told: Mutex<HashSet<(Key, i64)>>,
    recorder: Recorder,
    /// Trials that start or wait to start.
    pub admission: crate::trial::observe::SharedAdmission,
    /// When a difference in conditions only was first observed, by object.
    lingering: Mutex<HashMap<Key, Instant>>,
}

/// The changes of each cache.
#[derive(Debug)]
pub struct Changes {
    experiments: UnboundedReceiver<Change<CachedExperiment>>,
    trials: UnboundedReceiver<Change<CachedTrial>>,
    jobs: UnboundedReceiver<Change<CachedJob>>,
    pods: UnboundedReceiver<Change<CachedPod>>,
    nodes: UnboundedReceiver<Change<CachedNode>>,
}

/// The current time, to the second.
pub fn now() -> Timestamp {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    Timestamp(since.map_or(0, |duration| i64::try_from(duration.as_secs()).unwrap_or(i64::MAX)))
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("World").field("options", &self.options).finish_non_exhaustive()
    }
}

impl World {
    /// Shared state with empty caches.
    pub fn new(client: Client, options: Options, setup: Setup) -> (Arc<Self>, Changes) {
        let (experiments, experiment_changes) = Cache::new();
        let (trials, trial_changes) = Cache::new();
        let (jobs, job_changes) = Cache::new();
        let (pods, pod_changes) = Cache::new();
        let (nodes, node_changes) = Cache::new();
        let reporter = Reporter {
            controller: "stoker-operator".to_owned(),
            instance: Some(options.identity.clone()),
        };
        let recorder = Recorder::new(client.clone(), reporter);
        let world = Self {
            client,
            options,
            setup,
            experiments,
            trials,
            jobs,
            pods,
            nodes,
            experiment_queue: Queue::default(),
            trial_queue: Queue::default(),
            job_queue: Queue::default(),
            job_reports: tokio::sync::Mutex::default(),
            metrics: Metrics::default(),
            refresh: watch::Sender::new(0),
            trial_changes: tokio::sync::broadcast::Sender::new(4096),
            leads_until: Mutex::default(),
            heard: Mutex::default(),
            failure: OnceLock::new(),
            told: Mutex::default(),
            recorder,
            admission: Default::default(),
            lingering: Mutex::default(),
        };
        let changes = Changes {
            experiments: experiment_changes,
            trials: trial_changes,
            jobs: job_changes,
            pods: pod_changes,
            nodes: node_changes,
        };
        (Arc::new(world), changes)
    }

    /// Whether this replica leads. Its writes need preconditions all the same.
    pub fn is_leader(&self) -> bool {
        let until = *self.leads_until.lock().unwrap_or_else(PoisonError::into_inner);
        until.is_some_and(|until| Instant::now() < until)
    }

    /// Makes this replica lead until this time; `None` ends its leadership.
    pub fn set_leader(&self, until: Option<Instant>) {
        *self.leads_until.lock().unwrap_or_else(PoisonError::into_inner) = until;
        self.metrics.leader.set(i64::from(until.is_some()));
    }

    /// Whether the errors of this generation of an object were written to its status.
    pub fn was_told(&self, key: &Key, generation: i64) -> bool {
        self.told
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .contains(&(key.clone(), generation))
    }

    /// Records that the errors of this generation were written.
    pub fn tell_once(&self, key: &Key, generation: i64) {
        let mut reported = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        reported.retain(|(reported_key, _)| reported_key != key);
        reported.insert((key.clone(), generation));
    }

    /// API for the trials of a namespace.
    pub fn trial_api(&self, namespace: &str) -> Api<Trial> {
        Api::namespaced(self.client.clone(), namespace)
    }

    /// API for the experiments of a namespace.
    pub fn experiment_api(&self, namespace: &str) -> Api<Experiment> {
        Api::namespaced(self.client.clone(), namespace)
    }

    /// API for the inference jobs of a namespace.
    pub fn job_api(&self, namespace: &str) -> Api<InferenceJob> {
        Api::namespaced(self.client.clone(), namespace)
    }

    /// Records that the API server responded.
    pub fn set_heard(&self) {
        *self.heard.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// Whether the API server responded within a lease duration. Every replica sends requests more
    /// often than that.
    pub fn is_connected(&self) -> bool {
        let last_response = *self.heard.lock().unwrap_or_else(PoisonError::into_inner);
        let lease = Duration::from_secs(self.options.lease_seconds);
        last_response.is_some_and(|at| at.elapsed() < lease)
    }

    /// Marks this replica as failed. The first failure is kept.
    pub fn set_failed(&self, why: String) {
        let _ = self.failure.set(why);
    }

    /// Why this replica has failed; `None` if it has not.
    pub fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }

    /// Whether all caches have received a complete list.
    pub fn is_ready(&self) -> bool {
        self.experiments.is_ready()
            && self.trials.is_ready()
            && self.jobs.is_ready()
            && self.pods.is_ready()
            && self.nodes.is_ready()
    }

    /// Restarts all watches and waits until each has received a complete list.
    pub async fn refresh(&self) {
        self.refresh.send_modify(|generation| *generation += 1);
        let generation = *self.refresh.borrow() + 1;
        self.experiments.ready(generation).await;
        self.trials.ready(generation).await;
        // If the InferenceJob definition is missing, jobs cannot be listed. Trials must not wait.
        let _ = tokio::time::timeout(JOBS_MAX, self.jobs.ready(generation)).await;
        self.pods.ready(generation).await;
        self.nodes.ready(generation).await;
    }

    /// Queues all experiments, trials and jobs.
    pub fn add_all(&self) {
        self.experiments
            .all()
            .iter()
            .for_each(|experiment| self.experiment_queue.add(experiment.key()));
        self.trials.all().iter().for_each(|trial| self.trial_queue.add(trial.key()));
        self.jobs.all().iter().for_each(|job| self.job_queue.add(job.key()));
    }

    /// Interval of the periodic reconcile of an object, spread by name so that not all are due at
    /// once.
    pub fn safety(&self, key: &Key) -> Duration {
        let hash = key
            .name
            .bytes()
            .fold(0u64, |hash, byte| hash.wrapping_mul(31).wrapping_add(u64::from(byte)));
        SAFETY.mul_f64(0.67 + (hash % 1000) as f64 / 1500.0)
    }

    /// Debounces a difference: returns `Ok` once it has been present for `time`.
    ///
    /// # Errors
    ///
    /// Time for which the difference must still be present.
    pub fn lingers(&self, key: &Key, time: Duration) -> Result<(), Duration> {
        let mut lingering = self.lingering.lock().unwrap_or_else(PoisonError::into_inner);
        let since = *lingering.entry(key.clone()).or_insert_with(Instant::now);
        match time.checked_sub(since.elapsed()) {
            None | Some(Duration::ZERO) => {
                lingering.remove(key);
                Ok(())
            }
            Some(rest) => Err(rest),
        }
    }

    /// Ends the debounce of a difference that has disappeared.
    pub fn settled(&self, key: &Key) {
        self.lingering.lock().unwrap_or_else(PoisonError::into_inner).remove(key);
    }

    /// Emits an event for an object. Failures are only logged.
    pub async fn event<K>(&self, object: &K, type_: EventType, reason: &str, note: String)
    where
        K: Resource<DynamicType = ()>,
    {
        self.event_of(object, type_, reason, "Reconcile", note).await;
    }

    /// Same as [`event`](Self::event), with an action other than `Reconcile`. Events with the same
    /// reason and action are merged into one.
    pub async fn event_of<K>(
        &self,
        object: &K,
        type_: EventType,
        reason: &str,
        action: &str,
        note: String,
    ) where
        K: Resource<DynamicType = ()>,
    {
        let event = Event {
            type_,
            reason: reason.to_owned(),
            note: Some(note.chars().take(1000).collect()),
            action: action.to_owned(),
            secondary: None,
        };
        let object = object.object_ref(&());
        let published = self.recorder.publish(&event, &object);
        if let Err(error) = crate::error::request("write an event", published).await {
            tracing::warn!(%error, reason, "cannot write an event");
        }
    }
}

/// Queues the objects that each change affects, for as long as this is polled.
pub async fn dispatch(world: Arc<World>, mut changes: Changes) {
    loop {
        tokio::select! {
            Some(change) = changes.experiments.recv() => on_experiment(&world, &change),
            Some(change) = changes.trials.recv() => on_trial(&world, &change),
            Some(change) = changes.jobs.recv() => {
                let job = change.new.as_ref().or(change.old.as_ref());
                job.into_iter().for_each(|job| world.job_queue.add(job.key()));
            }
            Some(change) = changes.pods.recv() => {
                let pods = [&change.old, &change.new].into_iter().flatten();
                for pod in pods {
                    on_pod(&world, pod);
                    let cleaned = pod.cleans.clone().into_iter();
                    cleaned.for_each(|experiment| world.experiment_queue.add(experiment));
                }
            }
            Some(change) = changes.nodes.recv() => on_node(&world, &change),
            else => return,
        }
    }
}

fn on_experiment(world: &World, change: &Change<CachedExperiment>) {
    let Some(any) = change.new.as_ref().or(change.old.as_ref()) else { return };
    world.experiment_queue.add(any.key());
    // Trials wait until their experiment is cached, as after a restart, and until its storage is
    // recorded.
    let awaited = |object: &Option<Arc<CachedExperiment>>| {
        let experiment = object.as_ref()?.experiment()?;
        let storage = experiment.status.as_ref().and_then(|status| status.storage.clone());
        Some((experiment.metadata.generation, storage))
    };
    if awaited(&change.old) != awaited(&change.new) {
        world.trials.group(&any.key()).iter().for_each(|trial| world.trial_queue.add(trial.key()));
    }
}

fn on_trial(world: &World, change: &Change<CachedTrial>) {
    let Some(any) = change.new.as_ref().or(change.old.as_ref()) else { return };
    let _ = world.trial_changes.send(any.key());
    world.trial_queue.add(any.key());
    let wait = match (&change.old, &change.new) {
        (Some(old), Some(new)) => matters_within(old, new),
        _ => Some(GATHER),
    };
    if let Some(wait) = wait {
        world.experiment_queue.add_after(any.experiment_key(), wait);
    }
}

/// Delay until an experiment must be reconciled after a change of its trial; `None` if the change
/// affects neither its plan nor its status.
fn matters_within(old: &CachedTrial, new: &CachedTrial) -> Option<Duration> {
    let (before, after) = (&old.record.status, &new.record.status);
    let is_alive =
        |trial: &CachedTrial| stoker_engine::trial::live_attempt(&trial.record).is_some();
    let plans = before.facts != after.facts
        || before.phase != after.phase
        || is_alive(old) != is_alive(new)
        || old.record.spec != new.record.spec;
    let shows = before.best_metric != after.best_metric
        || before.reason != after.reason
        || before.message != after.message;
    match shows {
        _ if plans => Some(GATHER),
        true => Some(GATHER_TO_SHOW),
        false => None,
    }
}

/// Queues the job or trial of a pod.
fn on_pod(world: &World, pod: &CachedPod) {
    match &pod.job {
        Some(job) => world.job_queue.add(job.clone()),
        None => pod.group().into_iter().for_each(|trial| world.trial_queue.add(trial)),
    }
}

fn on_node(world: &World, change: &Change<CachedNode>) {
    let Some(any) = change.new.as_ref().or(change.old.as_ref()) else { return };
    let name = any.key().name;
    let pods = world.pods.all();
    let touched = pods.iter().filter(|pod| pod.node.as_ref() == Some(&name));
    touched.for_each(|pod| on_pod(world, pod));
}

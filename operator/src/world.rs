//! What all parts of a replica share: the client, the caches, the queues.

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

/// How long changes of an experiment's trials are gathered before it is looked at.
const GATHER: Duration = Duration::from_millis(100);
/// The same, where it is only shown: many trials validate now and then.
const GATHER_TO_SHOW: Duration = Duration::from_secs(2);
/// The safety requeue: what is known is looked at again within this time, and a third more or less.
/// What no watch told of is not known.
const SAFETY: Duration = Duration::from_secs(600);

/// How long a replica that begins to lead waits for the list of jobs.
const JOBS_MAX: Duration = Duration::from_secs(20);

/// Everything that a replica's parts share.
pub struct World {
    /// The API server.
    pub client: Client,
    /// What the operator was started with.
    pub options: Options,
    /// What pods are made with.
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
    /// Experiments to look at.
    pub experiment_queue: Queue,
    /// Trials to look at.
    pub trial_queue: Queue,
    /// Jobs to look at.
    pub job_queue: Queue,
    /// Held while a job's report is written: all processes of a job report to the same object.
    pub job_reports: tokio::sync::Mutex<()>,
    /// What is counted.
    pub metrics: Metrics,
    /// Begins all watches anew.
    pub refresh: watch::Sender<u64>,
    /// Says that a trial's spec or status changed, to those who wait for it at the door.
    pub trial_changes: tokio::sync::broadcast::Sender<Key>,
    /// Until when this replica leads, if nothing more is heard.
    leads_until: Mutex<Option<Instant>>,
    /// When the API server last answered about the lease.
    heard: Mutex<Option<Instant>>,
    /// Why this replica must end, once a background task has ended.
    failure: OnceLock<String>,
    /// Objects that cannot be read and were told so, by generation.
    told: Mutex<HashSet<(Key, i64)>>,
    recorder: Recorder,
    /// Trials that start, and those that wait to.
    pub admission: crate::trial::observe::SharedAdmission,
    /// When a difference of conditions alone was first seen.
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

/// Now, as the engine is told.
pub fn now() -> Timestamp {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    Timestamp(since.map_or(0, |it| i64::try_from(it.as_secs()).unwrap_or(i64::MAX)))
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("World").field("options", &self.options).finish_non_exhaustive()
    }
}

impl World {
    /// A world whose caches are empty.
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

    /// Whether this replica leads. What it writes is preconditioned all the same.
    pub fn is_leader(&self) -> bool {
        let until = *self.leads_until.lock().unwrap_or_else(PoisonError::into_inner);
        until.is_some_and(|it| Instant::now() < it)
    }

    /// Makes this replica lead until then, or not at all.
    pub fn set_leader(&self, until: Option<Instant>) {
        *self.leads_until.lock().unwrap_or_else(PoisonError::into_inner) = until;
        self.metrics.leader.set(i64::from(until.is_some()));
    }

    /// Whether an object of this generation was told what is wrong with it.
    pub fn was_told(&self, key: &Key, generation: i64) -> bool {
        self.told
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .contains(&(key.clone(), generation))
    }

    /// Notes that it was.
    pub fn tell_once(&self, key: &Key, generation: i64) {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        told.retain(|it| it.0 != *key);
        told.insert((key.clone(), generation));
    }

    /// Trials of a namespace.
    pub fn trial_api(&self, namespace: &str) -> Api<Trial> {
        Api::namespaced(self.client.clone(), namespace)
    }

    /// Experiments of a namespace.
    pub fn experiment_api(&self, namespace: &str) -> Api<Experiment> {
        Api::namespaced(self.client.clone(), namespace)
    }

    /// Inference jobs of a namespace.
    pub fn job_api(&self, namespace: &str) -> Api<InferenceJob> {
        Api::namespaced(self.client.clone(), namespace)
    }

    /// Notes that the API server answered.
    pub fn set_heard(&self) {
        *self.heard.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// Whether the API server answered within a lease's time: every replica asks more often.
    pub fn is_connected(&self) -> bool {
        let heard = *self.heard.lock().unwrap_or_else(PoisonError::into_inner);
        let lease = Duration::from_secs(self.options.lease_seconds);
        heard.is_some_and(|it| it.elapsed() < lease)
    }

    /// Reports this replica as failed from now on. The first failure stays.
    pub fn set_failed(&self, why: String) {
        let _ = self.failure.set(why);
    }

    /// Why this replica has failed, if it has.
    pub fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }

    /// Whether all caches have a whole list.
    pub fn is_ready(&self) -> bool {
        self.experiments.is_ready()
            && self.trials.is_ready()
            && self.jobs.is_ready()
            && self.pods.is_ready()
            && self.nodes.is_ready()
    }

    /// Begins all watches anew, and waits until each has a whole list.
    pub async fn refresh(&self) {
        self.refresh.send_modify(|it| *it += 1);
        let generation = *self.refresh.borrow() + 1;
        self.experiments.ready(generation).await;
        self.trials.ready(generation).await;
        // Without their definition there is no list of jobs, which must hold up no trial.
        let _ = tokio::time::timeout(JOBS_MAX, self.jobs.ready(generation)).await;
        self.pods.ready(generation).await;
        self.nodes.ready(generation).await;
    }

    /// Makes everything due.
    pub fn add_all(&self) {
        self.experiments.all().iter().for_each(|it| self.experiment_queue.add(it.key()));
        self.trials.all().iter().for_each(|it| self.trial_queue.add(it.key()));
        self.jobs.all().iter().for_each(|it| self.job_queue.add(it.key()));
    }

    /// The wait before an object is looked at again although nothing happened: spread by its name, so
    /// that not all come at once.
    pub fn safety(&self, key: &Key) -> Duration {
        let hash = key
            .name
            .bytes()
            .fold(0u64, |hash, byte| hash.wrapping_mul(31).wrapping_add(u64::from(byte)));
        SAFETY.mul_f64(0.67 + (hash % 1000) as f64 / 1500.0)
    }

    /// Whether a difference that was seen now has been there for `time`; otherwise the rest of it.
    ///
    /// # Errors
    ///
    /// How long it must still be there.
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

    /// Forgets a difference that is no more.
    pub fn settled(&self, key: &Key) {
        self.lingering.lock().unwrap_or_else(PoisonError::into_inner).remove(key);
    }

    /// Tells people something of an object. Failing to is not worth failing for.
    pub async fn event<K>(&self, object: &K, type_: EventType, reason: &str, note: String)
    where
        K: Resource<DynamicType = ()>,
    {
        self.event_of(object, type_, reason, "Reconcile", note).await;
    }

    /// As [`event`](Self::event), of one `action` of several: events of one reason and one action are
    /// told as one that came again.
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
            tracing::warn!(%error, reason, "an event is not written");
        }
    }
}

/// Makes due what follows from each change, for as long as this is polled.
pub async fn dispatch(world: Arc<World>, mut changes: Changes) {
    loop {
        tokio::select! {
            Some(change) = changes.experiments.recv() => on_experiment(&world, &change),
            Some(change) = changes.trials.recv() => on_trial(&world, &change),
            Some(change) = changes.jobs.recv() => {
                let job = change.new.as_ref().or(change.old.as_ref());
                job.into_iter().for_each(|it| world.job_queue.add(it.key()));
            }
            Some(change) = changes.pods.recv() => {
                let pods = [&change.old, &change.new].into_iter().flatten();
                for pod in pods {
                    on_pod(&world, pod);
                    pod.cleans.clone().into_iter().for_each(|it| world.experiment_queue.add(it));
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
    // Its trials wait for it where it came after them, as after a restart.
    // They also wait for its storage to be recorded.
    let awaited = |object: &Option<Arc<CachedExperiment>>| {
        let experiment = object.as_ref()?.experiment()?;
        let storage = experiment.status.as_ref().and_then(|status| status.storage.clone());
        Some((experiment.metadata.generation, storage))
    };
    if awaited(&change.old) != awaited(&change.new) {
        world.trials.group(&any.key()).iter().for_each(|it| world.trial_queue.add(it.key()));
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

/// How soon an experiment must be looked at because of a change of its trial; `None` if it plans as
/// before.
fn matters_within(old: &CachedTrial, new: &CachedTrial) -> Option<Duration> {
    let (before, after) = (&old.record.status, &new.record.status);
    let is_alive = |it: &CachedTrial| stoker_engine::trial::live_attempt(&it.record).is_some();
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

/// Makes due what a pod is of.
fn on_pod(world: &World, pod: &CachedPod) {
    match &pod.job {
        Some(job) => world.job_queue.add(job.clone()),
        None => pod.group().into_iter().for_each(|it| world.trial_queue.add(it)),
    }
}

fn on_node(world: &World, change: &Change<CachedNode>) {
    let Some(any) = change.new.as_ref().or(change.old.as_ref()) else { return };
    let name = any.key().name;
    let pods = world.pods.all();
    let touched = pods.iter().filter(|it| it.node.as_ref() == Some(&name));
    touched.for_each(|it| on_pod(world, it));
}

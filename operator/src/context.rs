//! State shared by all parts of a replica: client, caches, queues.

use std::collections::HashMap;
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
use crate::event_queue::EventQueue;
use crate::experiment::homes::UnsettledHomes;
use crate::experiment::kept::KeptSearches;
use crate::metrics::Metrics;
use crate::node::{CachedNode, NodeOutage};
use crate::objects::{CachedPod, CachedTrial};
use crate::options::Options;
use crate::queue::Queue;
use crate::searchers::Searchers;
use crate::trial::config::OperatorConfig;
use crate::user_resources::{CachedExperiment, CachedJob};

/// Interval of the periodic reconcile, which varies by a third in both directions. It works from
/// the caches, so it does not repair events that a watch has missed.
const RESYNC_INTERVAL: Duration = Duration::from_secs(600);

/// Debounce time of deferrable changes in a status: pods start in several steps.
const CONDITIONS_DEBOUNCE: Duration = Duration::from_secs(3);

/// Longest wait of a new leader for the list of jobs.
const JOBS_LIST_MAX: Duration = Duration::from_secs(20);

/// State shared by all parts of a replica.
pub struct Context {
    /// Client of the API server.
    pub client: Client,
    /// Command-line options.
    pub options: Options,
    /// Settings and key material for pods.
    pub operator_config: OperatorConfig,
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
    /// The last outage of many nodes.
    pub node_outage: NodeOutage,
    /// Experiments to reconcile.
    pub experiment_queue: Queue,
    /// Trials to reconcile.
    pub trial_queue: Queue,
    /// Jobs to reconcile.
    pub job_queue: Queue,
    /// Held while a job's report is written, since all processes of a job report to the same
    /// object.
    pub job_reports: tokio::sync::Mutex<()>,
    /// Questions to external searchers.
    pub searchers: Searchers,
    /// Searches in step with their records.
    pub kept_searches: KeptSearches,
    /// Objects with a write of a turn whose outcome is unknown.
    pub unsettled_homes: UnsettledHomes,
    /// Metrics of this replica.
    pub metrics: Metrics,
    /// Restarts all watches.
    pub refresh: watch::Sender<u64>,
    /// Notifies waiting requests of the report server that a trial's spec or status has changed.
    pub trial_changes: tokio::sync::broadcast::Sender<Key>,
    /// Time until which this replica leads without another renewal.
    leads_until: Mutex<Option<Instant>>,
    /// Since when this replica leads without interruption.
    leads_since: Mutex<Option<Instant>>,
    /// Time of the API server's last response about the lease.
    last_contact: Mutex<Option<Instant>>,
    /// Why this replica must exit, set when a background task has ended.
    failure: OnceLock<String>,
    /// Objects whose errors were written to their status.
    pub reported: ReportedErrors,
    event_queue: EventQueue,
    /// Trials that start or wait to start.
    pub admission: crate::trial::observe::SharedAdmission,
    /// When a difference in conditions only was first observed, by object.
    debounced_since: Mutex<HashMap<Key, Instant>>,
}

/// Objects whose errors were written to their status: UID and generation by name.
#[derive(Debug, Default)]
pub struct ReportedErrors(Mutex<HashMap<Key, (String, i64)>>);

impl ReportedErrors {
    /// Whether the errors of this generation of an object were written.
    pub fn contains(&self, key: &Key, uid: &str, generation: i64) -> bool {
        let reported = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        reported.get(key).is_some_and(|(of, number)| of == uid && *number == generation)
    }

    /// Records that the errors of this generation of an object were written.
    pub fn add(&self, key: &Key, uid: &str, generation: i64) {
        let mut reported = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        reported.insert(key.clone(), (uid.to_owned(), generation));
    }
}

/// The changes of each cache.
#[derive(Debug)]
pub struct Changes {
    pub(crate) experiments: UnboundedReceiver<Change<CachedExperiment>>,
    pub(crate) trials: UnboundedReceiver<Change<CachedTrial>>,
    pub(crate) jobs: UnboundedReceiver<Change<CachedJob>>,
    pub(crate) pods: UnboundedReceiver<Change<CachedPod>>,
    pub(crate) nodes: UnboundedReceiver<Change<CachedNode>>,
}

/// The current time, to the second.
pub fn now() -> Timestamp {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    Timestamp(since.map_or(0, |duration| i64::try_from(duration.as_secs()).unwrap_or(i64::MAX)))
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context").field("options", &self.options).finish_non_exhaustive()
    }
}

impl Context {
    /// Shared state with empty caches.
    pub fn new(
        client: Client,
        options: Options,
        operator_config: OperatorConfig,
    ) -> (Arc<Self>, Changes) {
        let (experiments, experiment_changes) = Cache::new();
        let (trials, trial_changes) = Cache::new();
        let (jobs, job_changes) = Cache::new();
        let (pods, pod_changes) = Cache::new();
        let (nodes, node_changes) = Cache::new();
        let reporter = Reporter {
            controller: "stoker-operator".to_owned(),
            instance: Some(options.identity.clone()),
        };
        let event_queue = EventQueue::new(Recorder::new(client.clone(), reporter));
        let context = Self {
            client,
            options,
            operator_config,
            experiments,
            trials,
            jobs,
            pods,
            nodes,
            node_outage: NodeOutage::default(),
            experiment_queue: Queue::default(),
            trial_queue: Queue::default(),
            job_queue: Queue::default(),
            job_reports: tokio::sync::Mutex::default(),
            searchers: Searchers::default(),
            kept_searches: KeptSearches::default(),
            unsettled_homes: UnsettledHomes::default(),
            metrics: Metrics::default(),
            refresh: watch::Sender::new(0),
            trial_changes: tokio::sync::broadcast::Sender::new(4096),
            leads_until: Mutex::default(),
            leads_since: Mutex::default(),
            last_contact: Mutex::default(),
            failure: OnceLock::new(),
            reported: ReportedErrors::default(),
            event_queue,
            admission: Default::default(),
            debounced_since: Mutex::default(),
        };
        let changes = Changes {
            experiments: experiment_changes,
            trials: trial_changes,
            jobs: job_changes,
            pods: pod_changes,
            nodes: node_changes,
        };
        (Arc::new(context), changes)
    }

    /// Whether this replica leads. Its writes need preconditions all the same.
    pub fn is_leader(&self) -> bool {
        let until = *self.leads_until.lock().unwrap_or_else(PoisonError::into_inner);
        until.is_some_and(|until| Instant::now() < until)
    }

    /// Makes this replica lead until this time; `None` ends its leadership.
    pub fn set_leader(&self, until: Option<Instant>) {
        *self.leads_until.lock().unwrap_or_else(PoisonError::into_inner) = until;
        let mut since = self.leads_since.lock().unwrap_or_else(PoisonError::into_inner);
        *since = until.map(|_| since.unwrap_or_else(Instant::now));
        drop(since);
        self.metrics.leader.set(i64::from(until.is_some()));
    }

    /// Returns for how long this replica has led without interruption; `None` if it does not lead.
    pub(crate) fn leads_for(&self) -> Option<Duration> {
        let since = *self.leads_since.lock().unwrap_or_else(PoisonError::into_inner);
        since.filter(|_| self.is_leader()).map(|since| since.elapsed())
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
    pub fn record_contact(&self) {
        *self.last_contact.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// Whether the API server responded within a lease duration. Every replica sends requests more
    /// often than that.
    pub fn is_connected(&self) -> bool {
        let last_response = *self.last_contact.lock().unwrap_or_else(PoisonError::into_inner);
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

    /// Whether all caches except `jobs` have received a complete list. If the InferenceJob
    /// definition is missing, jobs cannot be listed, and the reports of trials must not wait.
    pub fn is_ready(&self) -> bool {
        self.experiments.is_ready()
            && self.trials.is_ready()
            && self.pods.is_ready()
            && self.nodes.is_ready()
    }

    /// Restarts all watches and waits until each has received a complete list.
    pub async fn refresh(&self) {
        self.refresh.send_modify(|generation| *generation += 1);
        let generation = *self.refresh.borrow() + 1;
        self.experiments.wait_listed(generation).await;
        self.trials.wait_listed(generation).await;
        // If the InferenceJob definition is missing, jobs cannot be listed. Trials must not wait.
        let _ = tokio::time::timeout(JOBS_LIST_MAX, self.jobs.wait_listed(generation)).await;
        self.pods.wait_listed(generation).await;
        self.nodes.wait_listed(generation).await;
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
    pub fn resync_interval(&self, key: &Key) -> Duration {
        let hash = key
            .name
            .bytes()
            .fold(0u64, |hash, byte| hash.wrapping_mul(31).wrapping_add(u64::from(byte)));
        RESYNC_INTERVAL.mul_f64(0.67 + (hash % 1000) as f64 / 1500.0)
    }

    /// Debounces a difference: returns `Ok` once it has been present for `CONDITIONS_DEBOUNCE`.
    ///
    /// # Errors
    ///
    /// Time for which the difference must still be present.
    pub fn debounce(&self, key: &Key) -> Result<(), Duration> {
        let mut debounced_since =
            self.debounced_since.lock().unwrap_or_else(PoisonError::into_inner);
        let since = *debounced_since.entry(key.clone()).or_insert_with(Instant::now);
        match CONDITIONS_DEBOUNCE.checked_sub(since.elapsed()) {
            None | Some(Duration::ZERO) => {
                debounced_since.remove(key);
                Ok(())
            }
            Some(rest) => Err(rest),
        }
    }

    /// Ends the debounce of a difference that has disappeared.
    pub fn clear_debounce(&self, key: &Key) {
        self.debounced_since.lock().unwrap_or_else(PoisonError::into_inner).remove(key);
    }

    /// Writes the events of all objects. Never returns.
    pub async fn write_events(&self) {
        self.event_queue.write_all().await;
    }

    /// Emits an event for an object, which [`write_events`](Self::write_events) writes. Failures
    /// are only logged.
    pub fn event<K>(&self, object: &K, type_: EventType, reason: &str, note: String)
    where
        K: Resource<DynamicType = ()>,
    {
        self.event_with_action(object, type_, reason, "Reconcile", note);
    }

    /// Same as [`event`](Self::event), with an action other than `Reconcile`. Events with the same
    /// reason and action are merged into one.
    pub fn event_with_action<K>(
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
        self.event_queue.add(event, object.object_ref(&()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn namesakes_report_their_errors_separately() {
        let reported = ReportedErrors::default();
        let key = Key::new("ns", "e");
        reported.add(&key, "first", 1);
        assert!(reported.contains(&key, "first", 1));
        assert!(!reported.contains(&key, "first", 2));
        assert!(!reported.contains(&key, "second", 1));
        reported.add(&key, "second", 1);
        assert!(reported.contains(&key, "second", 1) && !reported.contains(&key, "first", 1));
    }
}

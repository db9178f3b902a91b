//! Leader election: the replica that holds the lease runs the controllers.
//!
//! The lease names the leader and the time of its last renewal. Replicas do not compare clocks: a
//! lease has expired once it was observed unchanged for its whole duration. A leader that cannot
//! renew stops earlier. Stale writes of a leader that was suspended and resumes fail: its successor
//! changes the version of every open trial before its workers start.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::{FutureExt as _, StreamExt as _};
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff;
use kube::Api;
use kube::api::{ObjectMeta, Patch, PatchParams, PostParams};
use serde_json::json;
use tokio::sync::watch;

use crate::cache::{Cached as _, Key};
use crate::error::{Error, request};
use crate::metrics::{Kind, with_cpu_seconds};
use crate::tasks::{Ended, Tasks};
use crate::world::World;

/// Annotation of a trial: identity and transition count of the leader that last swept it.
const ANNOTATION_LEADER: &str = "stoker.dev/leader";
/// Concurrent writes of the sweep after a change of leader.
const SWEEP_WIDTH: usize = 16;
/// Workers per kind of object, that is, concurrent reconciles.
const EXPERIMENT_WORKERS: usize = 4;
const TRIAL_WORKERS: usize = 16;
const JOB_WORKERS: usize = 4;
/// Delay of a key that is due while the lease has lapsed. The lease may be renewed late; then the
/// key must not be lost.
const LAPSE: Duration = Duration::from_millis(200);
/// Delays after consecutive errors; further errors use the last.
const ERROR_WAITS: [Duration; 5] = [
    Duration::from_millis(200),
    Duration::from_secs(1),
    Duration::from_secs(2),
    Duration::from_secs(5),
    Duration::from_secs(15),
];

/// The lease as last observed.
#[derive(Debug)]
struct Seen {
    version: Option<String>,
    since: Instant,
}

/// Takes part in the election until `stop` is set, and runs the controllers while leading.
///
/// # Errors
///
/// A worker that ended by itself. The lease is released, so that another replica takes over.
pub async fn run(world: Arc<World>, mut stop: watch::Receiver<bool>) -> Result<(), Ended> {
    let duration = Duration::from_secs(world.options.lease_seconds);
    let mut candidate = Candidate { world: world.clone(), seen: None, duration };
    let mut workers: Option<Workers> = None;
    let result = loop {
        let before = Instant::now();
        // A renewal without a timely response must not delay the check of the leadership below.
        let acquired = tokio::time::timeout(duration / 3, candidate.acquire()).await;
        let acquired = acquired.unwrap_or_else(|_| {
            let doing = "renew the lease".to_owned();
            Err(Error::Away { doing, reason: "no response in time".to_owned() })
        });
        if acquired.is_ok() {
            world.set_heard();
        }
        match acquired {
            Ok(Some(transitions)) => {
                // Another replica led in between, so caches and in-flight reconciles are stale.
                if let Some(old) = workers.take_if(|old| old.transitions != transitions) {
                    end(&world, old).await;
                }
                world.set_leader(Some(before + duration * 2 / 3));
                if workers.is_none() {
                    tracing::info!(
                        identity = world.options.identity,
                        transitions,
                        "started leading"
                    );
                    workers = Some(begin(&world, transitions));
                }
            }
            Ok(None) => {
                world.set_leader(None);
            }
            Err(error) => tracing::warn!(%error, "cannot acquire or renew the lease"),
        }
        if !world.is_leader()
            && let Some(old) = workers.take()
        {
            tracing::warn!(identity = world.options.identity, "stopped leading");
            world.set_leader(None);
            end(&world, old).await;
        }
        tokio::select! {
            () = tokio::time::sleep(duration / 5) => {}
            _ = stop.wait_for(|is_set| *is_set) => break Ok(()),
            ended = ended(workers.as_mut()) => break Err(ended),
        }
    };
    if let Err(ended) = &result {
        world.set_failed(ended.to_string());
    }
    if let Some(old) = workers.take() {
        end(&world, old).await;
        candidate.release().await;
    }
    world.set_leader(None);
    result
}

/// Waits until a worker ends by itself. The keys that it had taken are lost.
async fn ended(workers: Option<&mut Workers>) -> Ended {
    match workers {
        Some(workers) => workers.tasks.ended().await,
        None => std::future::pending().await,
    }
}

/// Background tasks that reconcile experiments, trials and jobs while this replica leads.
struct Workers {
    tasks: Tasks,
    /// Number of leader changes when the tasks started.
    transitions: i32,
}

fn begin(world: &Arc<World>, transitions: i32) -> Workers {
    let mut tasks = Tasks::default();
    let ready = watch::Sender::new(false);
    for _ in 0..EXPERIMENT_WORKERS {
        let (world, mut ready) = (world.clone(), ready.subscribe());
        tasks.spawn("experiment worker", async move {
            if ready.wait_for(|is_set| *is_set).await.is_ok() {
                experiments(world).await;
            }
        });
    }
    for _ in 0..TRIAL_WORKERS {
        let (world, mut ready) = (world.clone(), ready.subscribe());
        tasks.spawn("trial worker", async move {
            if ready.wait_for(|is_set| *is_set).await.is_ok() {
                trials(world).await;
            }
        });
    }
    for _ in 0..JOB_WORKERS {
        let (world, mut ready) = (world.clone(), ready.subscribe());
        tasks.spawn("job worker", async move {
            if ready.wait_for(|is_set| *is_set).await.is_ok() {
                jobs(world).await;
            }
        });
    }
    let world = world.clone();
    tasks.spawn("start of the workers", async move {
        // The caches may lack the last writes of the previous leader.
        world.refresh().await;
        if transitions > 0 {
            sweep(&world, transitions).await;
        }
        world.experiment_queue.set_closed(false);
        world.trial_queue.set_closed(false);
        world.job_queue.set_closed(false);
        world.add_all();
        ready.send_replace(true);
        // The sender must outlive its receivers.
        std::future::pending::<()>().await;
    });
    Workers { tasks, transitions }
}

/// Ends the workers. In-flight reconciles are cancelled at their current await point.
async fn end(world: &World, mut workers: Workers) {
    world.experiment_queue.set_closed(true);
    world.trial_queue.set_closed(true);
    world.job_queue.set_closed(true);
    workers.tasks.shutdown().await;
    world.experiment_queue.clear();
    world.trial_queue.clear();
    world.admission.clear();
    world.job_queue.clear();
}

/// Gives every open trial a new version, so that in-flight writes of the previous leader fail.
async fn sweep(world: &Arc<World>, transitions: i32) {
    let mut open = world.trials.all();
    open.retain(|trial| !trial.record.status.phase.is_terminal());
    let touches: Vec<_> =
        open.iter().map(|trial| touch(world.clone(), trial.key(), transitions)).collect();
    let touched = futures::stream::iter(touches).buffer_unordered(SWEEP_WIDTH);
    let touched: Vec<bool> = touched.collect().await;
    let num = touched.iter().filter(|is_touched| **is_touched).count();
    tracing::info!(trials = num, "fenced open trials against the previous leader");
}

async fn touch(world: Arc<World>, key: Key, transitions: i32) -> bool {
    let value = format!("{}/{transitions}", world.options.identity);
    let patch = json!({ "metadata": { "annotations": { ANNOTATION_LEADER: value } } });
    let api = world.trial_api(&key.namespace);
    world.metrics.writes.get_or_create(&Kind { kind: "trial_touch" }).inc();
    for wait in ERROR_WAITS {
        let (parameters, patch) = (PatchParams::default(), Patch::Merge(&patch));
        let doing = format!("touch trial {key}");
        match request(doing, api.patch(&key.name, &parameters, &patch)).await {
            Ok(touched) => {
                world.trials.put(crate::objects::CachedTrial::new(touched));
                return true;
            }
            Err(Error::Gone { .. }) => {
                world.trials.forget(&key);
                return false;
            }
            Err(error) => {
                tracing::warn!(%error, "retrying");
                tokio::time::sleep(wait).await;
            }
        }
    }
    false
}

async fn experiments(world: Arc<World>) {
    let mut failures = Failures::default();
    while let Some(key) = world.experiment_queue.next().await {
        let start = Instant::now();
        let result = match world.is_leader() {
            true => {
                contained(&world, "experiment", crate::experiment::reconcile(&world, &key)).await
            }
            false => Ok(Some(LAPSE)),
        };
        let wait = failures.wait(&world, "experiment", &key, start, result);
        world.experiment_queue.done(key, wait);
    }
}

async fn trials(world: Arc<World>) {
    let mut failures = Failures::default();
    while let Some(key) = world.trial_queue.next().await {
        let start = Instant::now();
        let result = match world.is_leader() {
            true => contained(&world, "trial", crate::trial::reconcile(&world, &key)).await,
            false => Ok(Some(LAPSE)),
        };
        let wait = failures.wait(&world, "trial", &key, start, result);
        world.trial_queue.done(key, wait);
    }
}

async fn jobs(world: Arc<World>) {
    let mut failures = Failures::default();
    while let Some(key) = world.job_queue.next().await {
        let start = Instant::now();
        let result = match world.is_leader() {
            true => contained(&world, "job", crate::job::reconcile(&world, &key)).await,
            false => Ok(Some(LAPSE)),
        };
        let wait = failures.wait(&world, "job", &key, start, result);
        world.job_queue.done(key, wait);
    }
}

/// Contains a panic to one object: the panic is logged where it occurs, and the object is retried.
async fn contained(
    world: &World,
    kind: &'static str,
    reconcile: impl Future<Output = Result<Option<Duration>, Error>>,
) -> Result<Option<Duration>, Error> {
    let panicked = |_| {
        let doing = format!("reconcile this {kind}");
        Err(Error::Away {
            doing,
            reason: "internal error (panic); see the operator's log".to_owned(),
        })
    };
    let reconcile = AssertUnwindSafe(reconcile).catch_unwind();
    let (result, seconds) = with_cpu_seconds(reconcile).await;
    world.metrics.reconcile_cpu_seconds.get_or_create(&Kind { kind }).inc_by(seconds);
    result.unwrap_or_else(panicked)
}

/// Consecutive failures of each key, as one worker observed them.
#[derive(Debug, Default)]
struct Failures(std::collections::HashMap<Key, usize>);

impl Failures {
    fn wait(
        &mut self,
        world: &World,
        kind: &'static str,
        key: &Key,
        start: Instant,
        result: Result<Option<Duration>, Error>,
    ) -> Option<Duration> {
        let seconds = start.elapsed().as_secs_f64();
        world.metrics.reconcile_seconds.get_or_create(&Kind { kind }).observe(seconds);
        let error = match result {
            Ok(wait) => {
                self.0.remove(key);
                return wait;
            }
            // The newer version is in the cache or arrives there soon.
            Err(error @ (Error::Conflict { .. } | Error::Gone { .. })) => {
                tracing::debug!(%error, "retrying");
                let num = self.0.entry(key.clone()).or_default();
                *num += 1;
                return Some(Duration::from_millis(50 << (*num).min(6)));
            }
            Err(error) => error,
        };
        world.metrics.errors.get_or_create(&Kind { kind }).inc();
        let num = self.0.entry(key.clone()).or_default();
        let wait = ERROR_WAITS[(*num).min(ERROR_WAITS.len() - 1)];
        *num += 1;
        tracing::warn!(%error, kind, key = %key, wait_ms = wait.as_millis() as u64, "retrying");
        Some(wait)
    }
}

#[derive(Debug)]
struct Candidate {
    world: Arc<World>,
    seen: Option<Seen>,
    duration: Duration,
}

impl Candidate {
    fn api(&self) -> Api<Lease> {
        Api::namespaced(self.world.client.clone(), &self.world.options.namespace)
    }

    /// Acquires or renews the lease. Returns the number of leader changes if this replica holds it.
    async fn acquire(&mut self) -> Result<Option<i32>, Error> {
        let name = self.world.options.lease_name.clone();
        let api = self.api();
        let current = request("read the lease", api.get_opt(&name)).await?;
        let Some(lease) = current else {
            let metadata = ObjectMeta { name: Some(name), ..ObjectMeta::default() };
            let lease = Lease { metadata, spec: Some(self.spec(None, 0)) };
            let parameters = PostParams::default();
            return match request("create the lease", api.create(&parameters, &lease)).await {
                Ok(_) => Ok(Some(0)),
                Err(Error::Exists { .. }) => Ok(None),
                Err(other) => Err(other),
            };
        };
        let spec = lease.spec.clone().unwrap_or_default();
        let holder = spec.holder_identity.clone().unwrap_or_default();
        let is_ours = holder == self.world.options.identity;
        let version = lease.metadata.resource_version.clone();
        if self.seen.as_ref().is_none_or(|seen| seen.version != version) {
            self.seen = Some(Seen { version, since: Instant::now() });
        }
        let is_over = self.seen.as_ref().is_some_and(|seen| seen.since.elapsed() >= self.duration);
        if !is_ours && !holder.is_empty() && !is_over {
            return Ok(None);
        }
        let transitions = spec.lease_transitions.unwrap_or(0) + i32::from(!is_ours);
        let acquired = spec.acquire_time.filter(|_| is_ours);
        let spec = Some(self.spec(acquired, transitions));
        let lease = Lease { spec, ..lease };
        let parameters = PostParams::default();
        match request("renew the lease", api.replace(&name, &parameters, &lease)).await {
            Ok(_) => Ok(Some(transitions)),
            Err(Error::Conflict { .. }) => Ok(None),
            Err(other) => Err(other),
        }
    }

    fn spec(&self, acquired: Option<MicroTime>, transitions: i32) -> LeaseSpec {
        let now = MicroTime(jiff::Timestamp::now());
        LeaseSpec {
            acquire_time: acquired.or_else(|| Some(now.clone())),
            holder_identity: Some(self.world.options.identity.clone()),
            lease_duration_seconds: i32::try_from(self.duration.as_secs()).ok(),
            lease_transitions: Some(transitions),
            renew_time: Some(now),
            ..LeaseSpec::default()
        }
    }

    /// Releases the lease, so that another replica need not wait until it expires.
    async fn release(&self) {
        let name = &self.world.options.lease_name;
        let api = self.api();
        let released = async {
            let mut lease = request("read the lease", api.get(name)).await?;
            if let Some(spec) = lease.spec.as_mut() {
                let is_ours = spec.holder_identity.as_ref() == Some(&self.world.options.identity);
                if is_ours {
                    spec.holder_identity = Some(String::new());
                }
            }
            let parameters = PostParams::default();
            request("release the lease", api.replace(name, &parameters, &lease)).await
        };
        if let Err(error) = released.await {
            tracing::warn!(%error, "lease not released; another replica waits until it expires");
        }
    }
}

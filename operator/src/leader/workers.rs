//! Workers of the leader: background tasks that reconcile the keys of the queues.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::FutureExt as _;
use tokio::sync::watch;

use super::other;
use super::sweep::sweep;
use super::tenure::{self, Tenure};
use crate::cache::Key;
use crate::context::Context;
use crate::error::Error;
use crate::metrics::{Kind, with_cpu_seconds};
use crate::tasks::Tasks;

/// Workers per kind of object, that is, concurrent reconciles.
const EXPERIMENT_WORKERS: usize = 4;
const TRIAL_WORKERS: usize = 16;
const JOB_WORKERS: usize = 4;
/// Delay of a key that is due while the lease has lapsed. The lease may be renewed late; then the
/// key must not be lost.
const LAPSED_LEASE_DELAY: Duration = Duration::from_millis(200);
/// Delays after consecutive errors; further errors use the last.
const ERROR_WAITS: [Duration; 5] = [
    Duration::from_millis(200),
    Duration::from_secs(1),
    Duration::from_secs(2),
    Duration::from_secs(5),
    Duration::from_secs(15),
];

/// Background tasks that reconcile experiments, trials and jobs while this replica leads.
pub(super) struct Workers {
    pub(super) tasks: Tasks,
    /// Number of leader changes when the tasks started.
    pub(super) transitions: i32,
}

/// Starts the workers. They reconcile nothing before the caches are up to date. `before` is the
/// tenure of the previous leader.
pub(super) fn start(context: &Arc<Context>, transitions: i32, before: Option<Tenure>) -> Workers {
    let mut tasks = Tasks::default();
    let ready = watch::Sender::new(false);
    for _ in 0..EXPERIMENT_WORKERS {
        let (context, mut ready) = (context.clone(), ready.subscribe());
        tasks.spawn("experiment worker", async move {
            if ready.wait_for(|is_set| *is_set).await.is_ok() {
                reconcile_experiments(context).await;
            }
        });
    }
    for _ in 0..TRIAL_WORKERS {
        let (context, mut ready) = (context.clone(), ready.subscribe());
        tasks.spawn("trial worker", async move {
            if ready.wait_for(|is_set| *is_set).await.is_ok() {
                reconcile_trials(context).await;
            }
        });
    }
    for _ in 0..JOB_WORKERS {
        let (context, mut ready) = (context.clone(), ready.subscribe());
        tasks.spawn("job worker", async move {
            if ready.wait_for(|is_set| *is_set).await.is_ok() {
                reconcile_jobs(context).await;
            }
        });
    }
    tasks.spawn("questions to searchers", crate::searchers::ask_all(context.clone()));
    let context = context.clone();
    tasks.spawn("start of the workers", async move {
        // The caches may lack the last writes of the previous leader.
        context.refresh().await;
        if let Some(before) = before {
            tenure::adopt(&context, before);
        }
        sweep(&context).await;
        context.experiment_queue.set_closed(false);
        context.trial_queue.set_closed(false);
        context.job_queue.set_closed(false);
        context.add_all();
        ready.send_replace(true);
        other::answer(&context).await;
        // The sender must outlive its receivers.
        std::future::pending::<()>().await;
    });
    Workers { tasks, transitions }
}

/// Ends the workers. In-flight reconciles are cancelled at their current await point.
pub(super) async fn stop(context: &Context, mut workers: Workers) {
    context.experiment_queue.set_closed(true);
    context.trial_queue.set_closed(true);
    context.job_queue.set_closed(true);
    workers.tasks.shutdown().await;
    context.experiment_queue.clear();
    context.trial_queue.clear();
    context.admission.clear();
    context.searchers.clear();
    context.kept_searches.clear();
    context.job_queue.clear();
}

async fn reconcile_experiments(context: Arc<Context>) {
    let mut failures = Failures::default();
    while let Some(key) = context.experiment_queue.next().await {
        let start = Instant::now();
        let result = match context.is_leader() {
            true => {
                catch_panic(&context, "experiment", crate::experiment::reconcile(&context, &key))
                    .await
            }
            false => Ok(Some(LAPSED_LEASE_DELAY)),
        };
        let wait = failures.wait(&context, "experiment", &key, start, result);
        context.experiment_queue.done(key, wait);
    }
}

async fn reconcile_trials(context: Arc<Context>) {
    let mut failures = Failures::default();
    while let Some(key) = context.trial_queue.next().await {
        let start = Instant::now();
        let result = match context.is_leader() {
            true => catch_panic(&context, "trial", crate::trial::reconcile(&context, &key)).await,
            false => Ok(Some(LAPSED_LEASE_DELAY)),
        };
        let wait = failures.wait(&context, "trial", &key, start, result);
        context.trial_queue.done(key, wait);
    }
}

async fn reconcile_jobs(context: Arc<Context>) {
    let mut failures = Failures::default();
    while let Some(key) = context.job_queue.next().await {
        let start = Instant::now();
        let result = match context.is_leader() {
            true => catch_panic(&context, "job", crate::job::reconcile(&context, &key)).await,
            false => Ok(Some(LAPSED_LEASE_DELAY)),
        };
        let wait = failures.wait(&context, "job", &key, start, result);
        context.job_queue.done(key, wait);
    }
}

/// Contains a panic to one object: the panic is logged where it occurs, and the object is retried.
async fn catch_panic(
    context: &Context,
    kind: &'static str,
    reconcile: impl Future<Output = Result<Option<Duration>, Error>>,
) -> Result<Option<Duration>, Error> {
    let panicked = |_| {
        let operation = format!("reconcile this {kind}");
        Err(Error::Unavailable {
            operation,
            reason: "internal error (panic); see the operator's log".to_owned(),
        })
    };
    let reconcile = AssertUnwindSafe(reconcile).catch_unwind();
    let (result, seconds) = with_cpu_seconds(reconcile).await;
    context.metrics.reconcile_cpu_seconds.get_or_create(&Kind { kind }).inc_by(seconds);
    result.unwrap_or_else(panicked)
}

/// Consecutive failures of each key, as one worker observed them.
#[derive(Debug, Default)]
struct Failures(std::collections::HashMap<Key, usize>);

impl Failures {
    fn wait(
        &mut self,
        context: &Context,
        kind: &'static str,
        key: &Key,
        start: Instant,
        result: Result<Option<Duration>, Error>,
    ) -> Option<Duration> {
        let seconds = start.elapsed().as_secs_f64();
        context.metrics.reconcile_seconds.get_or_create(&Kind { kind }).observe(seconds);
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
        context.metrics.errors.get_or_create(&Kind { kind }).inc();
        let num = self.0.entry(key.clone()).or_default();
        let wait = ERROR_WAITS[(*num).min(ERROR_WAITS.len() - 1)];
        *num += 1;
        tracing::warn!(%error, kind, key = %key, wait_ms = wait.as_millis() as u64, "retrying");
        Some(wait)
    }
}

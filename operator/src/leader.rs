//! Leader election: the replica that holds the lease runs the controllers.
//!
//! The lease names the leader and the time of its last renewal. Replicas do not compare clocks: a
//! lease has expired once it was observed unchanged for its whole duration. A leader that cannot
//! renew stops earlier. Stale writes of a leader that was suspended and resumes fail: its successor
//! changes the version of every object that they may concern before its workers start.

mod lease;
pub(crate) mod other;
mod sweep;
mod tenure;
mod workers;

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use crate::context::Context;
use crate::error::Error;
use crate::tasks::EndedTask;
use lease::Candidate;
pub(crate) use sweep::{fence_experiment, fence_trial, read_experiment, read_trial};
use workers::Workers;

/// Takes part in the election until `stop` is set, and runs the controllers while leading.
///
/// # Errors
///
/// A worker that ended by itself. The lease is released, so that another replica takes over.
pub async fn run(context: Arc<Context>, mut stop: watch::Receiver<bool>) -> Result<(), EndedTask> {
    let duration = Duration::from_secs(context.options.lease_seconds);
    let mut candidate = Candidate::new(context.clone(), duration);
    let mut workers: Option<Workers> = None;
    let result = loop {
        let before = Instant::now();
        // A renewal without a timely response must not delay the check of the leadership below.
        let acquired = tokio::time::timeout(duration / 3, candidate.acquire()).await;
        let acquired = acquired.unwrap_or_else(|_| {
            let operation = "renew the lease".to_owned();
            Err(Error::Unavailable { operation, reason: "no response in time".to_owned() })
        });
        if acquired.is_ok() {
            context.record_contact();
        }
        match acquired {
            Ok(Some(transitions)) => {
                // Another replica led in between, so caches and in-flight reconciles are stale.
                if let Some(old) = workers.take_if(|old| old.transitions != transitions) {
                    workers::stop(&context, old).await;
                }
                context.set_leader(Some(before + duration * 2 / 3));
                if workers.is_none() {
                    tracing::info!(
                        identity = context.options.identity,
                        transitions,
                        "started leading"
                    );
                    workers = Some(workers::start(&context, transitions, candidate.tenure()));
                }
            }
            Ok(None) => {
                context.set_leader(None);
            }
            Err(error) => tracing::warn!(%error, "cannot acquire or renew the lease"),
        }
        if !context.is_leader()
            && let Some(old) = workers.take()
        {
            tracing::warn!(identity = context.options.identity, "stopped leading");
            context.set_leader(None);
            workers::stop(&context, old).await;
        }
        tokio::select! {
            () = tokio::time::sleep(duration / 5) => {}
            _ = stop.wait_for(|is_set| *is_set) => break Ok(()),
            ended = ended_worker(workers.as_mut()) => break Err(ended),
        }
    };
    if let Err(ended) = &result {
        context.set_failed(ended.to_string());
    }
    if let Some(old) = workers.take() {
        workers::stop(&context, old).await;
        candidate.release().await;
    }
    context.set_leader(None);
    result
}

/// Waits until a worker ends by itself. The keys that it had taken are lost.
async fn ended_worker(workers: Option<&mut Workers>) -> EndedTask {
    match workers {
        Some(workers) => workers.tasks.ended().await,
        None => std::future::pending().await,
    }
}

//! Scripted process of a job: plans, commits shards, finishes, and reports its progress.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use stoker_api::contract::{Directive, ReportEvent};
use stoker_api::inference::Role;

use crate::trainer::{ReportConnection, config_of, token};

/// Rows per shard.
pub(crate) const SHARD_ROWS: u64 = 10;

/// Input size and pace of a job.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Work {
    /// Number of shards in the input.
    pub(crate) shards: u32,
    /// Milliseconds per shard.
    pub(crate) shard_ms: u64,
}

/// Output directories of all jobs: the set of committed shards, and all commits in order.
#[derive(Debug, Default)]
pub(crate) struct Outputs(Mutex<BTreeSet<(String, u32)>>, Mutex<Vec<(String, u32)>>);

impl Outputs {
    fn has(&self, job: &str, shard: u32) -> bool {
        self.0.lock().unwrap().contains(&(job.to_owned(), shard))
    }

    fn commit(&self, job: &str, shard: u32) {
        self.0.lock().unwrap().insert((job.to_owned(), shard));
        self.1.lock().unwrap().push((job.to_owned(), shard));
    }

    /// Number of commits of all jobs. Shards that were committed twice count twice.
    pub(crate) fn num_done(&self) -> usize {
        self.1.lock().unwrap().len()
    }
}

/// Runs a process, and returns its exit code.
pub(crate) async fn work(client: &Client, pod: &Pod, work: Work, outputs: &Outputs) -> i32 {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let config = config_of(pod);
    let task = config.inference.clone().unwrap();
    let Some(token) = token(client, namespace, pod).await else { return 80 };
    let connection = ReportConnection::new(&config, token);
    let total = u64::from(work.shards) * SHARD_ROWS;
    let report = async |done: u64, total: u64| {
        let event = ReportEvent::Progress { batches_total: total, activity: None };
        connection.send_until_answered(config.attempt, done, event).await
    };
    let job = config.experiment_id.as_str();
    let code = match task.role {
        Role::Plan => {
            report(0, total).await;
            0
        }
        Role::Work => {
            let own_shards: Vec<u32> =
                (0..work.shards).filter(|shard| shard % task.slots == task.slot).collect();
            for (done, shard) in (1..).zip(&own_shards) {
                if !outputs.has(job, *shard) {
                    tokio::time::sleep(Duration::from_millis(work.shard_ms)).await;
                    outputs.commit(job, *shard);
                }
                let answer = report(done * SHARD_ROWS, own_shards.len() as u64 * SHARD_ROWS).await;
                if answer == Directive::Fenced {
                    return 80;
                }
            }
            0
        }
        Role::Finish if (0..work.shards).all(|shard| outputs.has(job, shard)) => {
            report(total, total).await;
            0
        }
        Role::Finish => 80,
    };
    let exiting = ReportEvent::Exiting { code: code as u8, message: None };
    connection.send_until_answered(config.attempt, 0, exiting).await;
    code
}

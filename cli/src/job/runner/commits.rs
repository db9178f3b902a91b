//! Progress of a job: the committed shards in its output directory.

use std::time::Duration;

use stoker_api::inference::{commits_path, plan_path, shard_of_commit};
use tokio::time::Instant;

use super::{Runner, View, read_json};

/// Interval of counting commits in a local directory, and of saving the progress.
const LOCAL_POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Interval of counting commits in a bucket, where list requests cost money.
const BUCKET_POLL_INTERVAL: Duration = Duration::from_secs(5);

impl Runner<'_> {
    /// Returns the number of shards that a slot has committed.
    pub(super) fn committed_by(&mut self, slot: u32) -> usize {
        let slots = self.job.record.status().workers.len().max(1) as u32;
        self.committed.iter().filter(|shard| **shard % slots == slot).count()
    }

    /// Counts committed shards if that is due. Saves the record if there are new ones; an error,
    /// for example of a full disk, does not end the job.
    pub(super) async fn update_progress(&mut self, view: &mut View) {
        let is_bucket = self.job.output.url().contains("://");
        let pause = if is_bucket { BUCKET_POLL_INTERVAL } else { LOCAL_POLL_INTERVAL };
        let is_due = self.commits_counted_at.is_none_or(|counted_at| counted_at.elapsed() > pause);
        if is_due && self.count_commits(view).await {
            // The next progress, start or end of a process is saved again.
            let _ = self.job.record.save();
        }
    }

    /// Counts committed shards. Storage errors are ignored: the next call tries again. Returns
    /// whether the progress has changed.
    pub(super) async fn count_commits(&mut self, view: &mut View) -> bool {
        self.commits_counted_at = Some(Instant::now());
        let output = self.job.output.clone().with_few_retries();
        let uid = self.job.record.uid().to_owned();
        if self.plan.is_none() {
            self.plan = read_json(&output, &plan_path(&uid)).await.ok().flatten();
        }
        let Some(plan) = &self.plan else { return false };
        if let Ok(paths) = output.list(&commits_path(&uid)).await {
            self.committed = paths.iter().filter_map(|path| shard_of_commit(path)).collect();
        }
        let shards = (0..).zip(&plan.shards).filter(|(index, _)| self.committed.contains(index));
        let status = self.job.record.status();
        let before = (status.rows, status.rows_total);
        status.rows = shards.map(|(_, shard)| u64::from(shard.rows)).sum();
        status.rows_total = plan.rows();
        view.progress(status.rows, status.rows_total, self.running.len());
        before != (status.rows, status.rows_total)
    }
}

//! The output directory of a job: plan, commits, parts and manifest.

use std::collections::BTreeSet;

use bytes::Bytes;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use stoker_api::inference::{
    Commit, FILES_FORMAT, InferenceOutput, OutputManifest, RowFormat, ShardPlan, commit_path,
    commits_path, fresh_run_path, part_name, plan_path, shard_of_commit,
};
use stoker_api::names::MANIFEST;
use stoker_storage::{Storage, StorageError};
use tokio::runtime::Handle;
use tokio::task::JoinSet;

use super::{infrastructure, task};
use crate::context::Context;
use crate::{InvalidInput, Result};

/// Maximum number of concurrent reads.
const IN_FLIGHT: usize = 32;

/// A run of a standalone job that starts over.
#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct FreshRun {
    /// ID of this run, which its files have as job ID.
    pub(super) job_id: String,
    /// Job whose manifest this run may replace.
    pub(super) replaces: Option<String>,
}

/// Output directory of a job.
#[derive(Clone, Debug)]
pub(super) struct OutputFolder {
    pub(super) storage: Storage,
    pub(super) rt: Handle,
    job_id: String,
}

impl OutputFolder {
    /// Opens the job's output directory.
    ///
    /// # Errors
    ///
    /// Fails if the storage cannot be opened.
    pub(super) fn open(context: &Context) -> Result<Self> {
        let output = task(context)?.output;
        let io = context.io();
        let rt = io.runtime().clone();
        Self::new(&output, &context.config.experiment_id, rt)
    }

    pub(super) fn new(output: &InferenceOutput, job_id: &str, rt: Handle) -> Result<Self> {
        let none = || InvalidInput("the job has no output; set output.url".into());
        let url = output.url.as_deref().ok_or_else(none)?;
        let url = match url.contains("://") {
            true => url.to_owned(),
            false => std::path::absolute(url)?.display().to_string(),
        };
        let storage = Storage::open(&url, output.endpoint.as_deref())?;
        Ok(Self { storage, rt, job_id: job_id.to_owned() })
    }

    /// Reads the job's plan.
    ///
    /// # Errors
    ///
    /// Fails if the plan does not exist.
    pub(super) fn plan(&self) -> Result<ShardPlan> {
        let none = || {
            let url = self.storage.url();
            infrastructure(format!("plan of this job not found in {url}; it is not written yet"))
        };
        self.find_plan()?.ok_or_else(none)
    }

    /// Reads the job's plan; `None` if it was not written yet.
    ///
    /// # Errors
    ///
    /// Fails if the plan is invalid.
    pub(super) fn find_plan(&self) -> Result<Option<ShardPlan>> {
        let plan: Option<ShardPlan> = self.read(&plan_path(&self.job_id))?;
        match plan {
            Some(plan) if plan.format != FILES_FORMAT || plan.job_id != self.job_id => {
                let why = format!(
                    "{} has format {} and job {}, expected {FILES_FORMAT} and {}; use another \
                     output directory or start over",
                    plan_path(&self.job_id),
                    plan.format,
                    plan.job_id,
                    self.job_id
                );
                Err(InvalidInput(why).into())
            }
            plan => Ok(plan),
        }
    }

    pub(super) fn write_plan(&self, plan: &ShardPlan) -> Result<()> {
        self.write(&plan_path(&self.job_id), plan)
    }

    /// Reads the latest run with `--fresh`; `None` if there was none.
    ///
    /// # Errors
    ///
    /// Fails if the file is invalid.
    pub(super) fn fresh_run(&self) -> Result<Option<FreshRun>> {
        self.read(&fresh_run_path(&self.job_id))
    }

    pub(super) fn write_fresh_run(&self, run: &FreshRun) -> Result<()> {
        self.write(&fresh_run_path(&self.job_id), run)
    }

    /// Reads the manifest in the directory, which may belong to any job.
    ///
    /// # Errors
    ///
    /// Fails if the manifest is invalid or not from Stoker.
    pub(super) fn manifest(&self) -> Result<Option<OutputManifest>> {
        self.read(MANIFEST)
    }

    /// Returns `true` if the manifest of this job exists.
    pub(super) fn is_finished(&self) -> Result<bool> {
        Ok(self.manifest()?.is_some_and(|manifest| manifest.job_id == self.job_id))
    }

    pub(super) fn write_manifest(&self, manifest: &OutputManifest) -> Result<()> {
        self.write(MANIFEST, manifest)
    }

    /// Returns examples of the file names that the job writes directly into the directory.
    pub(super) fn own_names(&self, format: RowFormat) -> [String; 3] {
        let errors = errors_name(&self.job_id);
        [MANIFEST.to_owned(), part_name(0, 1, &self.job_id, 0, format), errors]
    }

    /// Returns the indices of committed shards.
    pub(super) fn committed(&self) -> Result<BTreeSet<u32>> {
        let paths = self.rt.block_on(self.storage.list(&commits_path(&self.job_id)))?;
        Ok(paths.iter().filter_map(|path| shard_of_commit(path)).collect())
    }

    /// Writes a part, then its commit.
    pub(super) async fn commit(&self, commit: &Commit, bytes: Bytes) -> Result<()> {
        let text = serde_json::to_vec_pretty(commit)?;
        self.storage.put(&commit.part, bytes).await?;
        Ok(self.storage.put(&commit_path(&self.job_id, commit.shard), text.into()).await?)
    }

    /// Returns the commits of all shards, in order; `None` for a shard without a commit, or if the
    /// part is missing or has another size.
    pub(super) fn commits(&self, num_shards: u32) -> Result<Vec<Option<Commit>>> {
        let mut commits = vec![None; num_shards as usize];
        self.rt
            .block_on(async {
                let mut tasks = JoinSet::new();
                let mut next = 0..num_shards;
                loop {
                    while tasks.len() < IN_FLIGHT
                        && let Some(shard) = next.next()
                    {
                        let (storage, path) =
                            (self.storage.clone(), commit_path(&self.job_id, shard));
                        tasks.spawn(async move { (shard, complete_commit(&storage, &path).await) });
                    }
                    let Some(done) = tasks.join_next().await else { return Ok(()) };
                    let (shard, commit) =
                        done.map_err(|error| infrastructure(error.to_string()))?;
                    commits[shard as usize] = commit?;
                }
            })
            .map(|()| commits)
    }

    /// Deletes a commit, so that its shard is processed again.
    pub(super) fn delete_commit(&self, shard: u32) -> Result<()> {
        Ok(self.rt.block_on(self.storage.delete(&commit_path(&self.job_id, shard)))?)
    }

    fn write(&self, path: &str, value: &impl Serialize) -> Result<()> {
        let text = serde_json::to_vec_pretty(value)?;
        Ok(self.rt.block_on(self.storage.put(path, text.into()))?)
    }

    fn read<V: DeserializeOwned>(&self, path: &str) -> Result<Option<V>> {
        let text = match self.rt.block_on(self.storage.get(path)) {
            Ok(text) => text,
            Err(StorageError::NotFound { .. }) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let read = serde_json::from_slice(&text).map_err(|error| {
            InvalidInput(format!(
                "{}/{path} was not written by a job of Stoker: {error}; use another output \
                 directory",
                self.storage.url()
            ))
        });
        Ok(Some(read?))
    }
}

/// Returns the name of the file of rejected rows.
pub(super) fn errors_name(job_id: &str) -> String {
    let uid8: String = job_id.chars().filter(char::is_ascii_alphanumeric).take(8).collect();
    format!("errors-{uid8}.jsonl")
}

async fn complete_commit(storage: &Storage, path: &str) -> Result<Option<Commit>> {
    let text = match storage.get(path).await {
        Ok(text) => text,
        Err(StorageError::NotFound { .. }) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let Ok(commit) = serde_json::from_slice::<Commit>(&text) else { return Ok(None) };
    let is_whole = storage.size(&commit.part).await? == Some(commit.bytes);
    Ok(Some(commit).filter(|_| is_whole))
}

//! Local inference jobs: reads records again when their files change.

use std::collections::{BTreeMap, HashSet};
use std::fs::DirEntry;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use stoker_api::inference::InferenceJob;
use stoker_api::time::Timestamp;
use stoker_storage::Storage;
use stoker_ui::{Job, Store, Unreadable};

use super::{Stamp, changed, has_file};
use crate::failure::Failure;
use crate::job::record;
use crate::run::record::{is_locked, read_json};
use crate::run::setup::current_uid;
use crate::run_root::RunRoot;

/// A record as it was last read.
#[derive(Debug, Default)]
struct Known {
    /// Time and number of the file. Writes replace the file, and two of them can have one time.
    stamp: Option<Stamp>,
    job: Option<InferenceJob>,
    is_running: bool,
    /// Output directory. An error is not kept: the directory appears when the job starts.
    output: Option<Arc<Storage>>,
}

/// Jobs of a root.
#[derive(Debug, Default)]
pub(super) struct Jobs {
    known: BTreeMap<PathBuf, Known>,
}

impl Jobs {
    /// Puts changed jobs of these entries into the store, and removes deleted ones. Adds records
    /// that cannot be read to `unreadable`.
    pub(super) fn refresh(
        &mut self,
        root: &RunRoot,
        store: &Store,
        entries: &[DirEntry],
        unreadable: &mut Unreadable,
    ) {
        let mut there = HashSet::new();
        for entry in entries {
            let path = entry.path().join("record");
            let job = match has_file(&path, "job.json") {
                Ok(false) => continue,
                Ok(true) => self.known.entry(path.clone()).or_default().refresh(root, &path),
                Err(error) => Err(error),
            };
            match job {
                Ok(Some(job)) => store.replace_job(job),
                Ok(None) => {}
                Err(error) => {
                    let id = entry.file_name().to_string_lossy().into_owned();
                    unreadable.insert((String::new(), id), error.to_string());
                }
            }
            there.insert(path);
        }
        self.known.retain(|path, _| there.contains(path));
        store.retain_jobs(|job| there.contains(&root.record_dir(&job.name, &job.uid)));
    }
}

impl Known {
    /// Reads the record if it has changed. Returns the job if it, or its runner, has.
    fn refresh(&mut self, root: &RunRoot, path: &Path) -> Result<Option<Job>, Failure> {
        let file = path.join("job.json");
        // Read the stamp before the file: a change between the two is seen in the next round.
        let stamp = changed(&file);
        let mut is_changed = false;
        if stamp != self.stamp || self.job.is_none() {
            self.job = Some(read_json(&file)?);
            self.stamp = stamp;
            is_changed = true;
        }
        let Some(job) = &self.job else { return Ok(None) };
        let is_running = is_running(root, job);
        is_changed |= is_running != self.is_running;
        self.is_running = is_running;
        if !is_changed {
            return Ok(None);
        }
        let url = record::recorded_output_url(root, job);
        let output = match &self.output {
            Some(output) => Ok(output.clone()),
            None => open(job, &url).map(Arc::new),
        };
        self.output = output.as_ref().ok().cloned();
        let created = std::fs::metadata(path.join("attempts")).and_then(|folder| folder.created());
        let created = created.ok().map(timestamp);
        let mut job = job.clone();
        if !is_running && let Some(status) = &mut job.status {
            // As in `stoker job describe`: a killed runner leaves its last count.
            status.running = 0;
        }
        Ok(Some(Job::new(job, is_running, created, url, output)))
    }
}

fn is_running(root: &RunRoot, job: &InferenceJob) -> bool {
    let of = |text: &Option<String>| text.clone().unwrap_or_default();
    let key = format!("{}.{}.job", of(&job.metadata.namespace), of(&job.metadata.name));
    let local = root.records_dir();
    // The lock is that of the name: only the latest record of a name can run.
    let current = current_uid(&local.join(format!("{key}.current"))).ok().flatten();
    current == job.metadata.uid && is_locked(&local.join(format!("{key}.lock")))
}

/// Opens an output directory, without creating it.
fn open(job: &InferenceJob, url: &str) -> Result<Storage, String> {
    if !url.contains("://") && !Path::new(url).is_dir() {
        return Err(format!("{url} does not exist yet"));
    }
    let spec = &job.spec;
    let endpoint = match spec.output.url {
        Some(_) => &spec.output.endpoint,
        None => &spec.storage.endpoint,
    };
    let storage = Storage::open(url, endpoint.as_deref()).map(Storage::with_few_retries);
    storage.map_err(|error| error.to_string())
}

fn timestamp(time: SystemTime) -> Timestamp {
    let since = time.duration_since(SystemTime::UNIX_EPOCH);
    Timestamp(since.map_or(0, |since| since.as_secs() as i64))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::run::record::{write, write_json};

    fn job(rows: u64) -> InferenceJob {
        serde_json::from_value(json!({
            "apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceJob",
            "metadata": {"name": "species", "namespace": "local", "uid": "0123456789"},
            "spec": {
                "entrypoint": {"command": ["true"]}, "input": {"url": "rows.csv"},
                "output": {"url": "out"},
            },
            "status": {
                "phase": "Running", "stage": "work", "rows": rows, "rowsTotal": 80, "running": 2,
            },
        }))
        .unwrap()
    }

    #[test]
    fn changed_jobs_are_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let root = RunRoot::resolve(folder.path().to_str(), None).unwrap();
        let path = root.record_dir("species", "0123456789");
        std::fs::create_dir_all(&path).unwrap();
        write_json(&path.join("job.json"), &job(20)).unwrap();
        let mut known = Known::default();
        let read = known.refresh(&root, &path).unwrap().unwrap();
        let status = read.job.status.unwrap();
        assert_eq!((status.rows, status.running), (20, 0));
        assert!(read.output.unwrap_err().contains("does not exist yet"));
        assert!(known.refresh(&root, &path).unwrap().is_none());
        write_json(&path.join("job.json"), &job(40)).unwrap();
        let read = known.refresh(&root, &path).unwrap().unwrap();
        assert_eq!(read.job.status.unwrap().rows, 40);
        write(&path.join("job.json"), b"{").unwrap();
        assert!(known.refresh(&root, &path).is_err());
    }
}

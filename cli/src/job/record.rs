//! Record of a job: the same object as on a cluster, stored as a file.
//!
//! ```text
//! LOCAL/local/NAMESPACE.NAME.job.{current,lock,trainers}
//! LOCAL/local/NAME-UID8/record/job.json                     InferenceJob: metadata, spec, status
//! LOCAL/local/NAME-UID8/record/attempts/SLOT-ATTEMPT/{trial.json, termination.json}
//! ```

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use stoker_api::experiment::{DesiredState, Phase};
use stoker_api::inference::{InferenceJob, InferenceJobSpec, InferenceStatus};
use stoker_api::names::experiment_path;
use stoker_engine::inference;
use stoker_storage::Storage;

use super::manifest::{ManifestError, read_manifest};
use crate::failure::Failure;
use crate::file::LoadedJob;
use crate::run::record::{self as files, Lock, RecordDir};
use crate::run::request::{LockedRequest, Request, is_final, may_follow};
use crate::run::setup::{self, ANNOTATION_ROOT};
use crate::run_root::{self, RunRoot};

/// Annotation with the program's working directory.
const ANNOTATION_FOLDER: &str = "stoker.dev/folder";
/// Annotation that allows a job to replace the output of another job.
const ANNOTATION_REPLACE: &str = "stoker.dev/replace";
/// Annotation with the run ID of the job whose output may be replaced; empty if there was none.
const ANNOTATION_REPLACED_JOB: &str = "stoker.dev/replaced-job";

/// Record that only this process may write.
#[derive(Debug)]
pub(super) struct OpenedRecord {
    pub(super) record: Record,
    /// Whether the job resumes an earlier run.
    pub(super) is_resumed: bool,
    /// Lock of the record, held until the runner exits.
    pub(super) _lock: Lock,
    /// File that workers lock while they are alive.
    pub(super) trainers: PathBuf,
}

/// Record of one job.
#[derive(Debug)]
pub(super) struct Record {
    folder: RecordDir,
    job: InferenceJob,
}

/// Opens the record of the job in `loaded`, or creates one. With `fresh`, always creates a new
/// record and keeps the earlier one.
pub(super) fn open(
    run_root: &RunRoot,
    loaded: &LoadedJob,
    folder: &Path,
    fresh: bool,
) -> Result<OpenedRecord, Failure> {
    let local = run_root.records_dir();
    std::fs::create_dir_all(&local).map_err(|error| Failure::file("create", &local, error))?;
    let key = format!("{}.{}.job", loaded.namespace, loaded.name);
    let lock = Lock::take(&local.join(format!("{key}.lock")))?;
    let trainers = local.join(format!("{key}.trainers"));
    files::wait_for_trainers(&trainers)?;
    let pointer = local.join(format!("{key}.current"));
    if !fresh && let Some(uid) = setup::current_uid(&pointer)? {
        let path = run_root.record_dir(&loaded.name, &uid);
        if path.join("job.json").exists() {
            let job: InferenceJob =
                files::read_json(&path.join("job.json")).map_err(setup::with_remedy)?;
            // Commands change the recorded state, and the file's is that of a new run.
            let given = &loaded.valid.spec;
            let compared = InferenceJobSpec { state: given.state, ..job.spec.clone() };
            setup::refuse_changes("job", &compared, given, &path)?;
            let record = Record { folder: RecordDir::new(path), job };
            record.refuse_other_folder(folder)?;
            return Ok(OpenedRecord { record, is_resumed: true, _lock: lock, trainers });
        }
    }
    let uid = files::random_hex(16)?;
    let record_folder = RecordDir::new(run_root.record_dir(&loaded.name, &uid));
    let attempts = record_folder.path().join("attempts");
    std::fs::create_dir_all(&attempts)
        .map_err(|error| Failure::file("create", &attempts, error))?;
    let mut record =
        Record { folder: record_folder, job: new_job(run_root, loaded, folder, &uid, fresh) };
    record.save()?;
    files::write(&pointer, format!("{uid}\n").as_bytes())?;
    Ok(OpenedRecord { record, is_resumed: false, _lock: lock, trainers })
}

fn new_job(
    run_root: &RunRoot,
    loaded: &LoadedJob,
    folder: &Path,
    uid: &str,
    fresh: bool,
) -> InferenceJob {
    let mut job = InferenceJob::new(&loaded.name, loaded.valid.spec.clone());
    job.metadata.namespace = Some(loaded.namespace.clone());
    job.metadata.uid = Some(uid.to_owned());
    let annotations = [
        (ANNOTATION_ROOT.to_owned(), run_root.root.clone()),
        (ANNOTATION_FOLDER.to_owned(), folder.display().to_string()),
        (ANNOTATION_REPLACE.to_owned(), fresh.to_string()),
    ];
    setup::set_metadata(&mut job.metadata, &loaded.metadata, annotations);
    // The file may be the description of an earlier job.
    let recorded = job.metadata.annotations.as_mut();
    recorded.and_then(|annotations| annotations.remove(ANNOTATION_REPLACED_JOB));
    job.status = Some(InferenceStatus::default());
    job
}

impl Record {
    /// Writes the record to disk, with the totals over its slots.
    pub(super) fn save(&mut self) -> Result<(), Failure> {
        inference::update_totals(self.status(), |_| true);
        files::write_json(&self.folder.path().join("job.json"), &self.job)
    }

    /// Returns the job's status.
    pub(super) fn status(&mut self) -> &mut InferenceStatus {
        self.job.status.get_or_insert_default()
    }

    /// Returns the desired state.
    pub(super) fn state(&self) -> DesiredState {
        self.job.spec.state
    }

    /// Records the requested state. Returns whether it is new.
    pub(super) fn follow(&mut self, request: &Request) -> Result<bool, Failure> {
        let before = self.state();
        let state = request.state.filter(|state| *state != before && may_follow(before, *state));
        let Some(state) = state else { return Ok(false) };
        let mut job = self.job.clone();
        job.spec.state = state;
        let mut record = Self { folder: self.folder.clone(), job };
        record.save()?;
        *self = record;
        Ok(true)
    }

    /// Starts or resumes the job, if that is its desired state. No process of an earlier runner is
    /// alive.
    pub(super) fn begin(&mut self, slots: u32) -> Result<(), Failure> {
        // The runner reports requests that cannot be read.
        let request = Request::read(self.path()).unwrap_or_default();
        self.follow(&request)?;
        if self.phase() == Phase::Failed && self.state() == DesiredState::Paused {
            // It failed before it was paused. Running it again retries it.
            let mut locked = LockedRequest::open(self.path())?;
            locked.set(Some(DesiredState::Active), BTreeSet::new())?;
            self.job.spec.state = DesiredState::Active;
        }
        match self.state() {
            DesiredState::Active => inference::resume(self.status(), slots),
            _ => self.status().workers.iter_mut().for_each(|worker| worker.attempt = None),
        }
        self.save()
    }

    /// Creates and returns the directory of a process.
    pub(super) fn attempt(&self, slot: u32, attempt: u32) -> Result<PathBuf, Failure> {
        self.folder.attempt(slot, attempt)
    }

    pub(super) fn path(&self) -> &Path {
        self.folder.path()
    }

    pub(super) fn phase(&self) -> Phase {
        self.job.status.as_ref().map(|status| status.phase).unwrap_or_default()
    }

    pub(super) fn uid(&self) -> &str {
        self.job.metadata.uid.as_deref().unwrap_or_default()
    }

    pub(super) fn id(&self) -> String {
        run_root::run_id(self.job.metadata.name.as_deref().unwrap_or_default(), self.uid())
    }

    /// Returns the job's directory, relative to the root.
    pub(super) fn own_path(&self) -> String {
        own_path(&self.job)
    }

    /// Returns `true` if the job may replace the output in its directory: with `--fresh`, the one
    /// found at the first start. The next save records which one this is.
    pub(super) async fn may_replace(&mut self, output: &Storage) -> Result<bool, Failure> {
        if self.annotation(ANNOTATION_REPLACE) != Some("true") {
            return Ok(false);
        }
        let found = match read_manifest(output, self.uid()).await {
            Err(ManifestError::OtherJob(id)) => id,
            Err(ManifestError::Storage(error)) => return Err(error.into()),
            Ok(_) | Err(ManifestError::Missing | ManifestError::Damaged(_)) => String::new(),
        };
        let annotations = self.job.metadata.annotations.get_or_insert_default();
        let recorded = annotations.entry(ANNOTATION_REPLACED_JOB.to_owned());
        let replaced = recorded.or_insert_with(|| found.clone());
        Ok(!found.is_empty() && *replaced == found)
    }

    /// Returns the path or URL of the output directory.
    pub(super) fn output_url(
        &self,
        run_root: &RunRoot,
        spec: &InferenceJobSpec,
        folder: &Path,
    ) -> String {
        output_url(run_root, &self.own_path(), spec, folder)
    }

    fn annotation(&self, name: &str) -> Option<&str> {
        self.job.metadata.annotations.as_ref()?.get(name).map(String::as_str)
    }

    fn refuse_other_folder(&self, folder: &Path) -> Result<(), Failure> {
        match self.annotation(ANNOTATION_FOLDER) {
            Some(recorded) if Path::new(recorded) != folder => Err(Failure::Input(format!(
                "cannot resume the job in {}: it was started in {recorded}; pass that directory as \
                 DIR to resume, or use --fresh to start over",
                folder.display()
            ))),
            _ => Ok(()),
        }
    }
}

/// Records the desired state of a job in the place of a runner, whose lock the caller holds. No
/// process of the job is alive if the state ends it. Returns the phase of a job that has already
/// ended, which stays as it is.
pub(super) fn follow_without_runner(
    folder: &RecordDir,
    state: DesiredState,
) -> Result<Option<Phase>, Failure> {
    // Read after the lock: a runner may have recorded the end since the command read the job.
    let job: InferenceJob = files::read_json(&folder.path().join("job.json"))?;
    let mut record = Record { folder: folder.clone(), job };
    let phase = record.phase();
    if phase.is_terminal() {
        return Ok(Some(phase));
    }
    record.job.spec.state = state;
    if is_final(state) {
        let status = record.status();
        status.workers.iter_mut().for_each(|worker| worker.attempt = None);
        inference::apply_desired_state(status, state, 0);
    }
    record.save().map(|()| None)
}

fn own_path(job: &InferenceJob) -> String {
    let of = |text: &Option<String>| text.clone().unwrap_or_default();
    let metadata = &job.metadata;
    experiment_path(&of(&metadata.namespace), &of(&metadata.name), &of(&metadata.uid))
}

fn output_url(
    run_root: &RunRoot,
    own_path: &str,
    spec: &InferenceJobSpec,
    folder: &Path,
) -> String {
    match &spec.output.url {
        Some(url) if url.contains("://") => url.clone(),
        Some(path) => folder.join(path).display().to_string(),
        None => format!("{}/{own_path}/output", run_root.root.trim_end_matches('/')),
    }
}

/// Returns the path or URL of the output directory of a recorded job.
pub(crate) fn recorded_output_url(run_root: &RunRoot, job: &InferenceJob) -> String {
    let annotations = job.metadata.annotations.as_ref();
    let folder = annotations.and_then(|all| all.get(ANNOTATION_FOLDER)).cloned();
    output_url(run_root, &own_path(job), &job.spec, Path::new(&folder.unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn job_with_a_damaged_request_starts() {
        let root = tempfile::tempdir().unwrap();
        std::fs::write(root.path().join("request.json"), "{").unwrap();
        let spec = json!({"entrypoint": {"command": ["x"]}, "input": {"url": "s3://data/*.csv"}});
        let job = InferenceJob::new("a", serde_json::from_value(spec).unwrap());
        let folder = RecordDir::new(root.path().to_owned());
        Record { folder, job }.begin(1).unwrap();
    }

    #[test]
    fn job_that_failed_before_its_pause_is_retried() {
        let root = tempfile::tempdir().unwrap();
        let spec = json!({"entrypoint": {"command": ["x"]}, "input": {"url": "s3://data/*.csv"}});
        let mut job = InferenceJob::new("a", serde_json::from_value(spec).unwrap());
        job.status.get_or_insert_default().phase = Phase::Failed;
        let mut request = LockedRequest::open(root.path()).unwrap();
        request.set(Some(DesiredState::Paused), BTreeSet::new()).unwrap();
        drop(request);
        let mut record = Record { folder: RecordDir::new(root.path().to_owned()), job };
        record.begin(1).unwrap();
        assert_eq!((record.phase(), record.state()), (Phase::Running, DesiredState::Active));
        let request = Request::read(root.path()).unwrap();
        assert_eq!(request.state, Some(DesiredState::Active));
    }

    #[tokio::test]
    async fn resumed_job_replaces_only_the_earlier_output() {
        let root = tempfile::tempdir().unwrap();
        let output = Storage::open(&root.path().display().to_string(), None).unwrap();
        let leave_output = |uid: &str| {
            let manifest = json!({
                "format": 1, "job": "b", "jobId": uid, "outputFormat": "jsonLines", "rows": 0,
                "inputRows": 0, "rejected": 0, "parts": [], "input": [],
            });
            std::fs::write(root.path().join("manifest.json"), manifest.to_string()).unwrap();
        };
        let spec = json!({"entrypoint": {"command": ["x"]}, "input": {"url": "s3://data/*.csv"}});
        let new_record = |fresh: bool| {
            let spec = serde_json::from_value(spec.clone()).unwrap();
            let mut job = InferenceJob::new("a", spec);
            let replace = (ANNOTATION_REPLACE.to_owned(), fresh.to_string());
            job.metadata.annotations = Some([replace].into());
            Record { folder: RecordDir::new(root.path().to_owned()), job }
        };
        let mut first = new_record(true);
        assert!(!first.may_replace(&output).await.unwrap(), "no output");
        leave_output("0b3f9c1e");
        assert!(!first.may_replace(&output).await.unwrap(), "the output is later");
        assert!(!new_record(false).may_replace(&output).await.unwrap(), "without --fresh");
        let mut second = new_record(true);
        assert!(second.may_replace(&output).await.unwrap());
        assert!(second.may_replace(&output).await.unwrap(), "resumed");
        leave_output("77aa0b3f");
        assert!(!second.may_replace(&output).await.unwrap(), "another job has finished since");
    }

    #[test]
    fn job_that_has_ended_keeps_its_phase() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("job.json");
        let spec = json!({"entrypoint": {"command": ["x"]}, "input": {"url": "s3://data/*.csv"}});
        let mut job = InferenceJob::new("a", serde_json::from_value(spec).unwrap());
        job.status.get_or_insert_default().phase = Phase::Completed;
        files::write_json(&path, &job).unwrap();
        let folder = RecordDir::new(root.path().to_owned());
        let ended = follow_without_runner(&folder, DesiredState::Cancelled).unwrap();
        assert_eq!(ended, Some(Phase::Completed));
        let job: InferenceJob = files::read_json(&path).unwrap();
        assert_eq!(job.status.unwrap().phase, Phase::Completed);
    }
}

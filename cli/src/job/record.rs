//! Record of a job: the same object as on a cluster, stored as a file.
//!
//! ```text
//! LOCAL/local/NAMESPACE.NAME.job.{current,lock,trainers}
//! LOCAL/local/NAME-UID8/record/job.json                     InferenceJob: metadata, spec, status
//! LOCAL/local/NAME-UID8/record/attempts/SLOT-ATTEMPT/{trial.json, termination.json}
//! ```

use std::path::{Path, PathBuf};

use stoker_api::experiment::{DesiredState, Phase};
use stoker_api::inference::{InferenceJob, InferenceJobSpec, InferenceStatus, OnError};
use stoker_api::names::experiment_path;
use stoker_engine::inference;
use stoker_storage::Storage;

use super::manifest::{ManifestError, read_manifest};
use crate::endpoint;
use crate::failure::Failure;
use crate::file::LoadedJob;
use crate::run::record::{self as files, Lock, RecordDir};
use crate::run::request::{self, Request, is_final, may_follow};
use crate::run::setup::{self, ANNOTATION_ROOT};
use crate::run::spec_changes::spec_changes;
use crate::run_root::{self, RunRoot};

/// Annotation with the program's working directory.
const ANNOTATION_FOLDER: &str = "stoker.dev/folder";
/// Annotation with the run ID of the job whose output may be replaced; empty if there was none.
const ANNOTATION_REPLACED_JOB: &str = "stoker.dev/replaced-job";

/// Record that only this process may write.
#[derive(Debug)]
pub(super) struct OpenedRecord {
    pub(super) record: Record,
    /// Whether the job resumes an earlier run.
    pub(super) is_resumed: bool,
    /// Changes of fields since the earlier run.
    pub(super) edits: Vec<String>,
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

/// Returns whether the job in `loaded` has a record that it resumes, or a damaged record.
pub(super) fn has_run(run_root: &RunRoot, loaded: &LoadedJob) -> bool {
    let key = format!("{}.{}.job", loaded.namespace, loaded.name);
    let record = setup::latest_record(run_root, &key, &loaded.name);
    let Ok(Some(folder)) = record else { return false };
    let path = folder.path().join("job.json");
    match files::read_json::<InferenceJob>(&path) {
        Ok(job) => edited_spec(&job.spec, &loaded.valid.spec, folder.path()).is_ok(),
        // `open` reports the damage.
        Err(_) => path.exists(),
    }
}

/// Sets the endpoints of S3 storages that the file lacks: the recorded ones if this resumes a job,
/// else the endpoint in the environment. Returns a note if the environment has one.
///
/// # Errors
///
/// [`Failure::Input`] if the endpoint of the environment is used and is not a URL.
pub(super) fn set_endpoints(
    loaded: &mut LoadedJob,
    run_root: &RunRoot,
    is_fresh: bool,
    environment: Option<&str>,
) -> Result<Option<String>, Failure> {
    let key = format!("{}.{}.job", loaded.namespace, loaded.name);
    let earlier = setup::latest_record(run_root, &key, &loaded.name).ok().flatten();
    // `open` reports a damaged record.
    let read =
        |folder: RecordDir| files::read_json::<InferenceJob>(&folder.path().join("job.json"));
    let spec = &mut loaded.valid.spec;
    let Some(job) = earlier.and_then(|folder| read(folder).ok()).filter(|_| !is_fresh) else {
        let urls = endpoint::fill_job(spec, &run_root.root, environment)?;
        return Ok(endpoint::note_of_use(&urls, environment));
    };
    // A job without recorded endpoints continues without them.
    let is_in_file = spec.input.endpoint.is_some();
    *spec = endpoint::with_recorded(spec.clone(), &job.spec);
    let environment = environment.filter(|_| !is_in_file);
    let (url, recorded) = (spec.input.url.as_str(), spec.input.endpoint.as_deref());
    Ok(endpoint::note_of_resume("job", url, recorded, environment))
}

/// Returns the recorded spec with the given values of the fields that do not affect committed
/// shards. Fails if another field differs.
fn edited_spec(
    recorded: &InferenceJobSpec,
    given: &InferenceJobSpec,
    folder: &Path,
) -> Result<InferenceJobSpec, Failure> {
    // Shards that were committed with `fail` have no rejected rows, so `skip` gives the same.
    let on_error = match (recorded.on_error, given.on_error) {
        (OnError::Fail, given) => given,
        (OnError::Skip, _) => OnError::Skip,
    };
    let edited = InferenceJobSpec {
        description: given.description.clone(),
        on_error,
        resources: given.resources.clone(),
        env: given.env.clone(),
        max_restarts: given.max_restarts,
        preemption_timeout_seconds: given.preemption_timeout_seconds,
        pod: given.pod.clone(),
        pod_overrides: given.pod_overrides.clone(),
        ..recorded.clone()
    };
    // Commands change the recorded state, and the file's is that of a new run.
    let compared = InferenceJobSpec { state: given.state, ..edited.clone() };
    let given = endpoint::with_recorded(given.clone(), recorded);
    setup::refuse_changes("job", &compared, &given, folder)?;
    Ok(edited)
}

/// Opens the record of the job in `loaded`, or creates one. With `is_fresh`, always creates a new
/// record and keeps the earlier one. The new job may replace the output that it finds.
pub(super) async fn open(
    run_root: &RunRoot,
    loaded: &LoadedJob,
    folder: &Path,
    is_fresh: bool,
) -> Result<OpenedRecord, Failure> {
    let local = run_root.records_dir();
    std::fs::create_dir_all(&local).map_err(|error| Failure::file("create", &local, error))?;
    let key = format!("{}.{}.job", loaded.namespace, loaded.name);
    let lock = Lock::take_to_run(&local.join(format!("{key}.lock")), "job", &loaded.name)?;
    let trainers = local.join(format!("{key}.trainers"));
    files::wait_for_trainers(&trainers)?;
    let pointer = local.join(format!("{key}.current"));
    if !is_fresh && let Some(uid) = setup::current_uid(&pointer)? {
        let path = run_root.record_dir(&loaded.name, &uid);
        if path.join("job.json").exists() {
            let job: InferenceJob =
                files::read_json(&path.join("job.json")).map_err(setup::with_remedy)?;
            let edited = edited_spec(&job.spec, &loaded.valid.spec, &path)?;
            let mut record = Record { folder: RecordDir::new(path), job };
            record.refuse_other_folder(folder)?;
            record.folder.unmark_deleted()?;
            let edits = record.edit(edited)?;
            return Ok(OpenedRecord { record, is_resumed: true, edits, _lock: lock, trainers });
        }
    }
    // Not before: processes of an earlier runner may have written their output until now.
    let replaced_job = match is_fresh {
        true => found_output(&loaded.valid.spec, folder).await?,
        false => String::new(),
    };
    let uid = files::random_hex(16)?;
    let record_folder = RecordDir::new(run_root.record_dir(&loaded.name, &uid));
    let attempts = record_folder.path().join("attempts");
    std::fs::create_dir_all(&attempts)
        .map_err(|error| Failure::file("create", &attempts, error))?;
    let job = new_job(run_root, loaded, folder, &uid, &replaced_job);
    let mut record = Record { folder: record_folder, job };
    record.save()?;
    files::write(&pointer, format!("{uid}\n").as_bytes())?;
    Ok(OpenedRecord { record, is_resumed: false, edits: vec![], _lock: lock, trainers })
}

fn new_job(
    run_root: &RunRoot,
    loaded: &LoadedJob,
    folder: &Path,
    uid: &str,
    replaced_job: &str,
) -> InferenceJob {
    let mut job = InferenceJob::new(&loaded.name, loaded.valid.spec.clone());
    job.metadata.namespace = Some(loaded.namespace.clone());
    job.metadata.uid = Some(uid.to_owned());
    let annotations = [
        (ANNOTATION_ROOT.to_owned(), run_root.root.clone()),
        (ANNOTATION_FOLDER.to_owned(), folder.display().to_string()),
        // Even if empty: the file may be the description of an earlier job.
        (ANNOTATION_REPLACED_JOB.to_owned(), replaced_job.to_owned()),
    ];
    setup::set_metadata(&mut job.metadata, &loaded.metadata, annotations);
    job.status = Some(InferenceStatus::default());
    job
}

impl Record {
    /// Writes the record to disk, with the totals over its slots.
    pub(super) fn save(&mut self) -> Result<(), Failure> {
        inference::update_totals(self.status(), |_| true);
        files::write_json(&self.folder.path().join("job.json"), &self.job)
    }

    /// Records the spec of a job that resumes, and returns its changes. The record of a completed
    /// or cancelled job keeps the spec that it ran with.
    fn edit(&mut self, spec: InferenceJobSpec) -> Result<Vec<String>, Failure> {
        if matches!(self.phase(), Phase::Completed | Phase::Cancelled) {
            return Ok(vec![]);
        }
        let edits = spec_changes("spec", &self.job.spec, &spec)?;
        if !edits.is_empty() {
            self.job.spec = spec;
            self.save()?;
        }
        Ok(edits)
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
        if self.phase().is_terminal() {
            request::withdraw_late(self.path())?;
        }
        // The runner reports requests that cannot be read.
        let request = Request::read(self.path()).unwrap_or_default();
        self.follow(&request)?;
        if self.phase() == Phase::Failed && self.state() == DesiredState::Paused {
            // It failed before it was paused. Running it again retries it.
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

    /// Returns the unique ID of the job whose output this job may replace: with `--fresh`, the one
    /// found before this job was recorded, unless another job has replaced it since.
    pub(super) async fn replaced_job(&self, output: &Storage) -> Result<Option<String>, Failure> {
        let recorded = self.annotation(ANNOTATION_REPLACED_JOB).unwrap_or_default();
        if recorded.is_empty() {
            return Ok(None);
        }
        let found = other_job(output, self.uid()).await?;
        Ok(found.filter(|found| found.id == recorded).map(|found| found.uid))
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

/// Returns the run ID of the job whose output a new run with `--fresh` may replace; empty if there
/// is none. Call this before the run is recorded. Later, another job may have written the output.
async fn found_output(spec: &InferenceJobSpec, folder: &Path) -> Result<String, Failure> {
    // Without a URL in the file, each run has a separate directory.
    let Some(url) = named_output_url(spec, folder) else { return Ok(String::new()) };
    let output = Storage::open(&url, spec.output.endpoint.as_deref())
        .map_err(|error| Failure::Input(error.to_string()))?;
    Ok(other_job(&output, "").await?.map(|found| found.id).unwrap_or_default())
}

/// A job whose output was found.
#[derive(Debug)]
struct FoundJob {
    /// Run ID.
    id: String,
    uid: String,
}

/// Returns the job whose output is in a directory, unless it has this UID.
async fn other_job(output: &Storage, uid: &str) -> Result<Option<FoundJob>, Failure> {
    match read_manifest(output, uid).await {
        Err(ManifestError::OtherJob { id, uid }) => Ok(Some(FoundJob { id, uid })),
        Err(ManifestError::Storage(error)) => Err(error.into()),
        Ok(_) | Err(ManifestError::Missing | ManifestError::Damaged(_)) => Ok(None),
    }
}

fn output_url(
    run_root: &RunRoot,
    own_path: &str,
    spec: &InferenceJobSpec,
    folder: &Path,
) -> String {
    named_output_url(spec, folder)
        .unwrap_or_else(|| format!("{}/{own_path}/output", run_root.root.trim_end_matches('/')))
}

/// Returns the path or URL of the output directory in a job's file, if any.
fn named_output_url(spec: &InferenceJobSpec, folder: &Path) -> Option<String> {
    let url = spec.output.url.as_ref()?;
    Some(match url.contains("://") {
        true => url.clone(),
        false => folder.join(url).display().to_string(),
    })
}

/// Returns the path or URL of the output directory of a recorded job.
pub(crate) fn recorded_output_url(run_root: &RunRoot, job: &InferenceJob) -> String {
    let annotations = job.metadata.annotations.as_ref();
    let folder = annotations.and_then(|all| all.get(ANNOTATION_FOLDER)).cloned();
    output_url(run_root, &own_path(job), &job.spec, Path::new(&folder.unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::thread;
    use std::time::Duration;

    use rustix::fs::{FlockOperation, flock};
    use serde_json::json;

    use super::*;
    use crate::file::load_job;
    use crate::run::request::LockedRequest;

    /// Writes and loads a job file whose job writes to the directory `out`.
    fn load(folder: &Path) -> LoadedJob {
        load_with(folder, &[])
    }

    fn load_with(folder: &Path, set: &[&str]) -> LoadedJob {
        let file = folder.join("job.yaml");
        let text = "apiVersion: stoker.dev/v1alpha1\nkind: InferenceJob\nmetadata: {name: a}\n\
                    spec: {entrypoint: {command: [x]}, input: {url: in}, output: {url: out}}\n";
        fs::write(&file, text).unwrap();
        let set: Vec<String> = set.iter().map(|field| (*field).to_owned()).collect();
        load_job(&file, &set).unwrap()
    }

    fn leave_output(folder: &Path, uid: &str) {
        let text = json!({
            "format": 1, "job": "b", "jobId": uid, "outputFormat": "jsonLines", "rows": 0,
            "inputRows": 0, "rejected": 0, "parts": [], "input": [],
        });
        fs::write(folder.join("out/manifest.json"), text.to_string()).unwrap();
    }

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
    fn job_that_failed_before_its_stop_is_retried() {
        let root = tempfile::tempdir().unwrap();
        let spec = json!({"entrypoint": {"command": ["x"]}, "input": {"url": "s3://data/*.csv"}});
        let mut job = InferenceJob::new("a", serde_json::from_value(spec).unwrap());
        job.status.get_or_insert_default().phase = Phase::Failed;
        let check = |recorded: DesiredState, requested: DesiredState| {
            let mut request = LockedRequest::open(root.path()).unwrap();
            request.set(Some(requested), std::collections::BTreeSet::new()).unwrap();
            drop(request);
            let mut job = job.clone();
            job.spec.state = recorded;
            let mut record = Record { folder: RecordDir::new(root.path().to_owned()), job };
            record.begin(1).unwrap();
            assert_eq!((record.phase(), record.state()), (Phase::Running, DesiredState::Active));
            assert_eq!(Request::read(root.path()).unwrap().state, None);
        };
        check(DesiredState::Paused, DesiredState::Paused);
        check(DesiredState::Active, DesiredState::Paused);
        check(DesiredState::Active, DesiredState::Cancelled);
    }

    #[tokio::test]
    async fn resumed_job_accepts_changes_that_keep_commits() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path();
        let run_root = RunRoot::resolve(folder.to_str(), None).unwrap();
        let run = async |set: &[&str]| {
            let opened = open(&run_root, &load_with(folder, set), folder, false).await;
            opened.map(|opened| (opened.edits.join("; "), opened.record))
        };
        run(&[]).await.unwrap();
        let mut skip = vec!["onError=skip"];
        let (edits, record) = run(&skip).await.unwrap();
        assert_eq!(edits, "spec.onError: was \"fail\", now \"skip\"");
        let path = record.path().join("job.json");
        let recorded = || files::read_json::<InferenceJob>(&path).unwrap().spec;
        assert_eq!(recorded().on_error, OnError::Skip);
        let error = run(&["onError=fail"]).await.unwrap_err().to_string();
        assert!(error.contains("spec.onError: was \"skip\", now \"fail\""), "{error}");
        // Each of these remains set.
        let fields = [
            "description=text",
            "maxRestarts=9",
            "resources.slots=3",
            "preemptionTimeoutSeconds=5",
            "env=[{name: A, value: secret}]",
            "podOverrides={spec: {priority: 1}}",
        ];
        for field in fields {
            skip.push(field);
            let (edits, _) = run(&skip).await.unwrap();
            let name = field.split(['=', '.']).next().unwrap();
            assert!(edits.starts_with(&format!("spec.{name}")), "{edits}");
            assert!(!edits.contains("secret") && !edits.contains("; "), "{edits}");
        }
        assert_eq!((recorded().max_restarts, recorded().resources.slots), (9, 3));
        assert_eq!(run(&skip).await.unwrap().0, "");
        for field in ["shardRows=7", "batchRows=7", "data={a: 1}", "input.url=other"] {
            let set = [&skip[..], &[field]].concat();
            let error = run(&set).await.unwrap_err().to_string();
            assert!(error.contains("its spec has changed"), "{error}");
        }
        let job = InferenceJob { spec: recorded(), ..record.job.clone() };
        let mut ended = Record { folder: record.folder.clone(), job };
        ended.status().phase = Phase::Completed;
        ended.save().unwrap();
        skip.push("maxRestarts=2");
        assert_eq!(run(&skip).await.unwrap().0, "");
        assert_eq!(recorded().max_restarts, 9, "it ran with this value");
    }

    #[tokio::test]
    async fn resumed_job_replaces_only_the_earlier_output() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path();
        let loaded = load(folder);
        let run_root = RunRoot::resolve(folder.to_str(), None).unwrap();
        let output = Storage::open(&folder.join("out").display().to_string(), None).unwrap();
        // The runner is killed as soon as it has recorded the job.
        let start_over = async || drop(open(&run_root, &loaded, folder, true).await.unwrap());
        let replaced_job = async || {
            let opened = open(&run_root, &loaded, folder, false).await.unwrap();
            opened.record.replaced_job(&output).await.unwrap()
        };
        leave_output(folder, "0b3f9c1e77");
        assert_eq!(replaced_job().await, None, "without --fresh");
        start_over().await;
        assert_eq!(replaced_job().await.as_deref(), Some("0b3f9c1e77"));
        leave_output(folder, "77aa0b3f9c");
        assert_eq!(replaced_job().await, None, "another job has finished since");
        fs::remove_file(folder.join("out/manifest.json")).unwrap();
        start_over().await;
        leave_output(folder, "77aa0b3f9c");
        assert_eq!(replaced_job().await, None, "the output is later");
    }

    #[tokio::test]
    async fn fresh_job_replaces_output_of_exiting_processes() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().to_owned();
        let loaded = load(&folder);
        let run_root = RunRoot::resolve(folder.to_str(), None).unwrap();
        let output = Storage::open(&folder.join("out").display().to_string(), None).unwrap();
        let local = run_root.records_dir();
        fs::create_dir_all(&local).unwrap();
        let trainers = local.join(format!("{}.a.job.trainers", loaded.namespace));
        let process = File::create(trainers).unwrap();
        flock(&process, FlockOperation::LockShared).unwrap();
        let path = folder.clone();
        let process = thread::spawn(move || {
            thread::sleep(Duration::from_millis(100));
            leave_output(&path, "0b3f9c1e77");
            drop(process);
        });
        let opened = open(&run_root, &loaded, &folder, true).await.unwrap();
        process.join().unwrap();
        let replaced = opened.record.replaced_job(&output).await.unwrap();
        assert_eq!(replaced.as_deref(), Some("0b3f9c1e77"));
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

    #[tokio::test]
    async fn endpoint_of_environment_is_recorded_and_kept() {
        let temp = tempfile::tempdir().unwrap();
        let root = RunRoot { root: "s3://runs/a".to_owned(), state_dir: temp.path().to_owned() };
        let set = |is_fresh: bool, environment: Option<&str>| {
            let mut loaded = load_with(temp.path(), &["input.url=s3://rows/*.csv"]);
            set_endpoints(&mut loaded, &root, is_fresh, environment).unwrap();
            loaded
        };
        let endpoints =
            |spec: &InferenceJobSpec| (spec.storage.endpoint.clone(), spec.input.endpoint.clone());
        let both = |endpoint: &str| (Some(endpoint.to_owned()), Some(endpoint.to_owned()));
        let (first, other) = ("http://127.0.0.1:1", "http://127.0.0.1:2");
        let opened = open(&root, &set(false, Some(first)), temp.path(), false).await.unwrap();
        assert_eq!(endpoints(&opened.record.job.spec), both(first));
        drop(opened);
        for environment in [None, Some(other)] {
            let loaded = set(false, environment);
            assert_eq!(endpoints(&loaded.valid.spec), both(first));
            assert!(open(&root, &loaded, temp.path(), false).await.unwrap().is_resumed);
        }
        assert!(has_run(&root, &load_with(temp.path(), &["input.url=s3://rows/*.csv"])));
        assert_eq!(endpoints(&set(true, Some(other)).valid.spec), both(other));
    }
}

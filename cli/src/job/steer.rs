//! `stoker job pause|activate|cancel|kill|wait|delete|logs --follow` for local jobs.

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::json;
use stoker_api::experiment::DesiredState;
use stoker_api::inference::InferenceJob;
use stoker_engine::inference;
use stoker_storage::{Storage, layout};

use super::local::{self, LocalJob};
use super::record;
use crate::cluster::job as jobs;
use crate::cluster::logs::bucket;
use crate::cluster::logs::line::LogArgs;
use crate::cluster::logs::tag::{Gang, Tag};
use crate::cluster::resource::ClusterResource as _;
use crate::cluster::wait::exit_code;
use crate::failure::Failure;
use crate::print::{self, Output};
use crate::run::record as files;
use crate::run::request::is_final;
use crate::run_root::RunRoot;
use crate::show::{
    RequestedState, RunFiles, StoredFollower, Waited, delete_record, mark_deleted, stop_message,
    wait_for_end,
};

fn open(root: Option<&str>, name: &str) -> Result<(RunRoot, LocalJob, RunFiles), Failure> {
    let run_root = RunRoot::resolve(root, None)?;
    let job = local::open(&run_root, name)?;
    let metadata = &job.job.metadata;
    let of = |text: &Option<String>| text.clone().unwrap_or_default();
    let key = format!("{}.{}.job", of(&metadata.namespace), job.job.name());
    let files = RunFiles::new(&run_root, &key, &job.job.name(), &of(&metadata.uid));
    Ok((run_root, job, files))
}

fn read(files: &RunFiles) -> Result<Option<InferenceJob>, Failure> {
    let path = files.record.path().join("job.json");
    if path.exists() { files::read_json(&path).map(Some) } else { Ok(None) }
}

/// Sets the desired state of a job. A runner follows within a second. Without one, a cancelled or
/// killed job ends at once, and the next runner follows the other states.
pub(super) fn set_state(
    root: Option<&str>,
    name: &str,
    state: DesiredState,
    output: Output,
) -> Result<(), Failure> {
    let (_, job, files) = open(root, name)?;
    let requested =
        RequestedState::write(&files, name, state, || Ok(read(&files)?.unwrap_or(job.job)))?;
    let (requested, has_runner) = follow(requested, &files, name, state)?;
    requested.print(name, root, has_runner, output);
    Ok(())
}

/// Records the requested state, unless there is a runner. Returns whether there is one.
fn follow(
    requested: RequestedState<InferenceJob>,
    files: &RunFiles,
    name: &str,
    state: DesiredState,
) -> Result<(RequestedState<InferenceJob>, bool), Failure> {
    let Some(_lock) = files.lock_if_free()? else { return Ok((requested, true)) };
    if is_final(state) {
        files::wait_for_trainers(&files.trainers)?;
    }
    match record::follow_without_runner(&files.record, state)? {
        Some(phase) => Err(requested.withdraw(name, phase)),
        None => Ok((requested, false)),
    }
}

/// Waits until a job has ended, then prints the outcome. Returns the exit code.
pub(super) async fn wait(
    root: Option<&str>,
    name: &str,
    timeout: Option<Duration>,
    output: Output,
) -> Result<u8, Failure> {
    let (run_root, _, files) = open(root, name)?;
    let ended = wait_for_end(&files, name, timeout, output, || read(&files)).await?;
    let mut job = match ended {
        Waited::Ended(job) => job,
        Waited::Stopped { code } => return Ok(code),
    };
    let url = record::recorded_output_url(&run_root, &job);
    job.status.get_or_insert_default().output.get_or_insert(url);
    jobs::print_outcome(&job, output);
    Ok(exit_code(job.phase()))
}

/// Deletes a job's record and logs. Its output remains.
pub(super) async fn delete(root: Option<&str>, name: &str, output: Output) -> Result<(), Failure> {
    let (run_root, job, files) = open(root, name)?;
    let storage = storage(&run_root, &job.job)?;
    let lock = mark_deleted(&files, (InferenceJob::KIND_NAME, name, &job.id()))?;
    storage.delete_folder(&layout::workers_path(&jobs::path(&job.job))).await?;
    delete_record(&files, "job.json")?;
    drop(lock);
    let left = record::recorded_output_url(&run_root, &job.job);
    match output {
        Output::Json => print::out(json!({"job": name, "deleted": true, "left": left})),
        Output::Text => {
            print::out(format!("job {name} and its logs deleted"));
            print::out(format!("its output remains in {left}"));
        }
    }
    Ok(())
}

fn storage(run_root: &RunRoot, job: &InferenceJob) -> Result<Storage, Failure> {
    Ok(Storage::open(&run_root.root, job.spec.storage.endpoint.as_deref())?)
}

/// Prints the lines of a job's processes until the job ends, or no runner is alive.
pub(super) async fn follow_logs(
    root: Option<&str>,
    name: &str,
    slot: Option<u32>,
    args: LogArgs,
    output: Output,
) -> Result<(), Failure> {
    let (run_root, job, files) = open(root, name)?;
    let (storage, path) = (storage(&run_root, &job.job)?, jobs::path(&job.job));
    let gang = Gang::of_job(&job.job);
    let mut lines = StoredFollower::new(&storage, args, None, output, false);
    let mut complete: BTreeSet<(u32, u32)> = BTreeSet::new();
    loop {
        // The order matters: a runner records an end after it has stored all lines before it.
        let has_runner = files.has_runner()?;
        let Some(job) = read(&files)? else {
            print::err(format!("job {name} was deleted"));
            return Ok(());
        };
        let is_over = job.phase().is_terminal();
        let status = job.status.unwrap_or_default();
        for (attempt, pod) in bucket::job_processes(&storage, &path, slot).await? {
            if complete.contains(&(attempt, pod)) {
                continue;
            }
            let tag = Tag { trial: pod, attempt, pod, gang, with_trial: false, is_job: true };
            let folder = layout::logs_path(&layout::worker_path(&path, pod), attempt);
            lines.print_new(&tag, &folder).await?;
            // The processes of a killed job are recorded as ended before they are.
            if !is_over && lines.is_up_to_date() && !inference::is_live(&status, attempt) {
                complete.insert((attempt, pod));
            }
        }
        if !has_runner && lines.is_up_to_date() {
            if !is_over {
                print::err(stop_message::<InferenceJob>(name));
            }
            return Ok(());
        }
        lines.wait().await;
    }
}

#[cfg(test)]
mod tests {
    use stoker_api::experiment::Phase;

    use super::*;
    use crate::run::request::Request;

    #[test]
    fn request_that_meets_the_end_is_withdrawn() {
        let root = tempfile::tempdir().unwrap();
        let run_root = RunRoot::resolve(root.path().to_str(), None).unwrap();
        let files = RunFiles::new(&run_root, "default.a.job", "a", "0123456789");
        std::fs::create_dir_all(files.record.path()).unwrap();
        std::fs::write(&files.current, "0123456789\n").unwrap();
        let spec = json!({"entrypoint": {"command": ["x"]}, "input": {"url": "s3://data/*.csv"}});
        let mut job = InferenceJob::new("a", serde_json::from_value(spec).unwrap());
        let state = DesiredState::Paused;
        let requested = RequestedState::write(&files, "a", state, || Ok(job.clone())).unwrap();
        // The runner records the end and exits.
        job.status.get_or_insert_default().phase = Phase::Failed;
        files::write_json(&files.record.path().join("job.json"), &job).unwrap();
        let error = follow(requested, &files, "a", state).unwrap_err().to_string();
        assert!(error.ends_with("it has ended (Failed) meanwhile"), "{error}");
        assert_eq!(Request::read(files.record.path()).unwrap().state, None);
    }
}

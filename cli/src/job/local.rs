//! `stoker job list|describe|logs` for local runs: reads the records of `stoker job run`.

use stoker_api::experiment::DesiredState;
use stoker_api::inference::InferenceJob;
use stoker_storage::Storage;

use super::record::recorded_output_url;
use crate::cluster::job as jobs;
use crate::cluster::logs::bucket;
use crate::cluster::logs::line::{LogArgs, LogPrinter};
use crate::cluster::logs::tag::Gang;
use crate::cluster::resource::ClusterResource as _;
use crate::cluster::text;
use crate::failure::Failure;
use crate::json;
use crate::list;
use crate::list::List;
use crate::list::jobs::Listed;
use crate::print::{self, Format, Output};
use crate::run::record::{is_locked, read_json};
use crate::run::setup;
use crate::run_root::{self, RunRoot};

/// A local job.
#[derive(Debug)]
pub(super) struct LocalJob {
    pub(super) job: InferenceJob,
    /// Whether a runner holds the job's lock.
    is_running: bool,
    /// Whether this is the latest run of its name.
    is_current: bool,
}

impl LocalJob {
    /// Returns the run ID.
    pub(super) fn id(&self) -> String {
        run_root::run_id(&self.job.name(), self.job.metadata.uid.as_deref().unwrap_or_default())
    }

    /// Returns the name in commands: the job's, or the run ID if a later run has the name.
    fn name(&self) -> String {
        if self.is_current { self.job.name() } else { self.id() }
    }

    /// Returns the phase. Without a runner, this is `Paused` if the user has paused the job, else
    /// `Stopped`.
    fn phase(&self) -> String {
        let phase = self.job.phase();
        match phase.is_terminal() || self.is_running {
            true => format!("{phase:?}"),
            false if self.job.spec.state == DesiredState::Paused => "Paused".to_owned(),
            false => "Stopped".to_owned(),
        }
    }
}

fn read(run_root: &RunRoot) -> Result<Vec<LocalJob>, Failure> {
    let local = run_root.records_dir();
    let entries = match std::fs::read_dir(&local) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(vec![]),
        Err(error) => return Err(Failure::file("read", &local, error)),
    };
    let mut jobs = Vec::new();
    for entry in entries {
        let path = entry.map_err(|error| Failure::file("read", &local, error))?.path();
        let path = path.join("record/job.json");
        if !path.exists() {
            continue;
        }
        // One unreadable record does not hide the other jobs.
        match read_json::<InferenceJob>(&path) {
            Ok(job) => jobs.push(local_job(run_root, job)),
            Err(error) => print::err(format!("stoker: skipped a job: {error}")),
        }
    }
    // The latest run of a name is its last one.
    jobs.sort_by_cached_key(|job| {
        (job.job.name(), job.is_current, text::created(&job.job.metadata), job.id())
    });
    Ok(jobs)
}

fn local_job(run_root: &RunRoot, mut job: InferenceJob) -> LocalJob {
    let local = run_root.records_dir();
    let namespace = job.metadata.namespace.clone().unwrap_or_default();
    let key = format!("{namespace}.{}.job", job.name());
    let current = setup::current_uid(&local.join(format!("{key}.current"))).ok().flatten();
    let is_current = current.is_some() && current == job.metadata.uid;
    // The lock is that of the latest run.
    let is_running = is_current && is_locked(&local.join(format!("{key}.lock")));
    let output = recorded_output_url(run_root, &job);
    let status = job.status.get_or_insert_default();
    status.output.get_or_insert(output);
    if !is_running {
        // A killed runner leaves its last count.
        status.running = 0;
    }
    LocalJob { job, is_running, is_current }
}

/// Opens the job with this name or ID. Of several with the name, the latest is used.
pub(super) fn open(run_root: &RunRoot, name: &str) -> Result<LocalJob, Failure> {
    let is_named = |job: &LocalJob| job.job.name() == name || job.id() == name;
    let matches = read(run_root)?.into_iter().filter(is_named);
    // The latest run of the name may have been deleted.
    let order = |job: &LocalJob| (job.is_current, text::created(&job.job.metadata));
    matches.max_by_key(order).ok_or_else(|| {
        Failure::Input(format!(
            "no run of job `{name}` in {}; `stoker job list --root URL` lists the jobs",
            run_root.searched()
        ))
    })
}

/// Lists all jobs.
pub(super) fn jobs(root: Option<&str>) -> Result<List, Failure> {
    let run_root = RunRoot::resolve(root, None)?;
    let jobs = read(&run_root)?.into_iter().map(|job| {
        let (name, phase) = (job.name(), job.phase());
        Listed { job: job.job, name, phase }
    });
    let empty = format!("no jobs in {}", run_root.searched());
    Ok(list::jobs::list(jobs.collect(), false, empty))
}

/// Prints one job.
pub(super) fn describe(root: Option<&str>, name: &str, format: Format) -> Result<(), Failure> {
    let run_root = RunRoot::resolve(root, None)?;
    let job = open(&run_root, name)?;
    if format != Format::Text {
        return print::object(&json::object(&job.job), format);
    }
    let storage = format!("{}/{}", run_root.root.trim_end_matches('/'), jobs::path(&job.job));
    print::out(jobs::render(&job.job, &job.phase(), storage, true, text::now()));
    Ok(())
}

/// Prints the logs of a job, process by process.
pub(super) async fn print_logs(
    root: Option<&str>,
    name: &str,
    slot: Option<u32>,
    args: LogArgs,
    output: Output,
) -> Result<(), Failure> {
    let run_root = RunRoot::resolve(root, None)?;
    let job = open(&run_root, name)?.job;
    let endpoint = job.spec.storage.endpoint.as_deref();
    let storage = Storage::open(&run_root.root, endpoint)?;
    let mut printer = LogPrinter::new(args, None, output);
    let gang = Gang::of_job(&job);
    let path = jobs::path(&job);
    if bucket::print_job(&storage, &path, gang, slot, &mut printer).await? == 0 {
        print::err(format!("no logs found for job {name}"));
    }
    printer.finish();
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn name_stands_for_the_newest_job() {
        let root = tempfile::tempdir().unwrap();
        let run_root = RunRoot::resolve(root.path().to_str(), None).unwrap();
        for (uid, day) in [("00000001-a", 22), ("00000002-a", 21)] {
            let record = run_root.record_dir("species", uid);
            std::fs::create_dir_all(&record).unwrap();
            let job = json!({
                "apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceJob",
                "metadata": {"name": "species", "namespace": "default", "uid": uid,
                    "creationTimestamp": format!("2026-11-{day}T19:00:00Z")},
                "spec": {"entrypoint": {"command": ["x"]}, "input": {"url": "s3://data/*.csv"}},
            });
            std::fs::write(record.join("job.json"), job.to_string()).unwrap();
        }
        assert_eq!(open(&run_root, "species").unwrap().id(), "species-00000001");
        let jobs = read(&run_root).unwrap();
        let ids: Vec<String> = jobs.iter().map(LocalJob::id).collect();
        assert_eq!(ids, ["species-00000002", "species-00000001"]);
    }

    #[test]
    fn paused_jobs_without_a_runner_are_paused() {
        for (state, phase) in [("Paused", "Paused"), ("Active", "Stopped")] {
            let job = json!({
                "apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceJob",
                "metadata": {"name": "species", "namespace": "default", "uid": "00000001-a"},
                "spec": {
                    "entrypoint": {"command": ["x"]}, "input": {"url": "s3://data/*.csv"},
                    "state": state.to_lowercase(),
                },
            });
            let root = tempfile::tempdir().unwrap();
            let run_root = RunRoot::resolve(root.path().to_str(), None).unwrap();
            let job = local_job(&run_root, serde_json::from_value(job).unwrap());
            assert_eq!(job.phase(), phase);
        }
    }
}

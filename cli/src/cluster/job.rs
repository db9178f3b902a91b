//! `stoker job list|describe|delete` on a cluster.

use kube::api::ListParams;
use serde_json::json;
use stoker_api::condition::{Condition, ConditionStatus};
use stoker_api::experiment::CheckpointStorage;
use stoker_api::inference::{CheckpointChoice, InferenceJob, InferenceStatus, WorkerEnd};
use stoker_api::names::experiment_path;
use stoker_api::time::Timestamp;
use stoker_api::trial::AttemptEnd;

use super::connect::Cluster;
use super::resource::ClusterResource as _;
use super::text::{self, Fields};
use super::{events, experiment, storage};
use crate::describe::conditions;
use crate::failure::Failure;
use crate::json;
use crate::list::List;
use crate::list::jobs::{self, Listed};
use crate::print::{self, Format, Output};

/// Lists the jobs of the namespace. If `all` is set, lists the jobs of all namespaces.
pub(crate) async fn list(
    cluster: &Cluster,
    all: bool,
    selector: Option<String>,
) -> Result<List, Failure> {
    let with_labels = experiment::with_labels(selector.as_deref());
    let params = ListParams { label_selector: selector, ..ListParams::default() };
    let listed = cluster.list::<InferenceJob>("jobs", &params, all).await?.into_iter();
    let scope = if all { "any namespace" } else { &format!("namespace `{}`", cluster.namespace) };
    let empty = format!("no jobs{with_labels} in {scope} of the cluster at {}", cluster.server);
    let jobs = listed.map(|(job, _)| {
        let (name, phase) = (job.name(), phase_of(&job));
        Listed { job, name, phase }
    });
    Ok(jobs::list(jobs.collect(), all, empty))
}

/// Returns the phase. If the spec is invalid and the job has not ended, returns `Invalid`, because
/// the operator does not act on such a job.
fn phase(status: &InferenceStatus) -> String {
    match invalid(status) {
        Some(_) if !status.phase.is_terminal() => "Invalid".to_owned(),
        _ => format!("{:?}", status.phase),
    }
}

fn invalid(status: &InferenceStatus) -> Option<&Condition> {
    let mut conditions = status.conditions.iter();
    conditions
        .find(|condition| condition.type_ == "Valid" && condition.status == ConditionStatus::False)
}

/// Prints the state and the events of one job.
pub(crate) async fn describe(cluster: &Cluster, name: &str, format: Format) -> Result<(), Failure> {
    let job: InferenceJob = cluster.read(name).await?;
    if format != Format::Text {
        return print::object(&json::object(&job), format);
    }
    let pods = format!("{name}-a");
    let events = events::section(cluster, "InferenceJob", name, Some(&pods)).await;
    let text = render(&job, &phase_of(&job), storage_location(&job), false, text::now());
    print::out(text + &events);
    Ok(())
}

fn phase_of(job: &InferenceJob) -> String {
    phase(&job.status.clone().unwrap_or_default())
}

/// Describes a job with the phase to show and the location of its files. A local job runs without
/// an image.
pub(crate) fn render(
    job: &InferenceJob,
    phase: &str,
    storage: String,
    is_local: bool,
    now: Timestamp,
) -> String {
    let (metadata, spec) = (&job.metadata, &job.spec);
    let status = job.status.clone().unwrap_or_default();
    let ago = |time: Timestamp| format!("{time} ({} ago)", text::age(Some(time), now));
    let mut fields = Fields::default();
    fields.add("Name", job.name());
    fields.add("Namespace", metadata.namespace.clone().unwrap_or_default());
    fields.add("Description", spec.description.clone().unwrap_or_default());
    fields.add("Created", text::created(metadata).map(ago).unwrap_or_default());
    fields.add("Ended", status.ended_at.map(ago).unwrap_or_default());
    fields.add("Desired", text::word(&spec.state));
    let message =
        status.message.as_ref().map_or_else(String::new, |message| format!(": {message}"));
    fields.add("Phase", format!("{phase}{message}"));
    fields.add("Stage", text::word(&status.stage));
    let rejected = match status.rejected {
        0 => String::new(),
        num => format!(", {num} of them rejected"),
    };
    // Earlier versions recorded no percentage of a completed job.
    let percent = stoker_engine::inference::percent(&status);
    let (rows, total) = (status.rows, status.rows_total);
    fields.add("Progress", format!("{percent}%, {rows} of {total} rows{rejected}"));
    let image = spec.pod.image.as_deref().unwrap_or("the stock image");
    let place = if is_local { String::new() } else { format!(" in {image}") };
    let words = spec.entrypoint.command.iter().chain(&spec.entrypoint.args);
    let words = words.map(String::as_str).collect::<Vec<_>>().join(" ");
    fields.add("Program", format!("{words}{place}"));
    fields.add("Checkpoint", spec.checkpoint.as_ref().map(checkpoint).unwrap_or_default());
    fields.add("Input", spec.input.url.clone());
    fields.add("Output", status.output.clone().unwrap_or_default());
    fields.add("Storage", storage);
    let slot = spec.resources.slot_resource.as_deref().unwrap_or("CPU process");
    let (slots, running) = (spec.resources.slots, status.running);
    fields.add("Slots", format!("{slots} ({slot}), {running} running"));
    fields.add("Attempts", format!("{}, {} restarts", status.attempts, status.restarts));
    let row = |end: &WorkerEnd| {
        vec![
            end.attempt.to_string(),
            text::word(&end.role),
            end.slot.to_string(),
            end_word(end.end),
            end.reason.clone(),
            text::age(Some(end.at), now),
            end.message.replace('\n', " "),
        ]
    };
    let ends: Vec<_> = status.ends.iter().map(row).collect();
    let header = ["ATTEMPT", "STAGE", "SLOT", "END", "REASON", "AGE", "MESSAGE"];
    fields.to_string()
        + &text::section("Latest failures", &header, &ends)
        + &conditions(&status.conditions, now)
}

/// Returns how a process of a job ended. A job has no hyperparameters: its input is invalid.
pub(crate) fn end_word(end: AttemptEnd) -> String {
    match end {
        AttemptEnd::InvalidHyperparameters => "invalid input".to_owned(),
        end => format!("{end:?}"),
    }
}

fn checkpoint(choice: &CheckpointChoice) -> String {
    let of = match (&choice.trial, &choice.folder, &choice.stored) {
        (Some(trial), _, _) => format!("trial {trial}"),
        (_, Some(folder), _) => return folder.clone(),
        (_, _, Some(stored)) => format!("{}/{}", stored.url, stored.trial_path),
        _ => return String::new(),
    };
    let which = choice.name.clone().unwrap_or_else(|| text::word(&choice.which));
    format!("{which} of {of}")
}

/// Deletes a job. Kubernetes then deletes its pods in the background.
pub(crate) async fn delete(cluster: &Cluster, name: &str, output: Output) -> Result<(), Failure> {
    let job: InferenceJob = experiment::remove(cluster, name, None).await?;
    let left = storage_location(&job);
    match output {
        Output::Json => print::out(json!({"job": name, "deleted": true, "left": left})),
        Output::Text => {
            print::out(format!("job {name} and its pods deleted"));
            print::out(format!("output and logs remain in {left}"));
        }
    }
    Ok(())
}

/// Returns the storage of a job: the recorded one, or that of the spec if the operator has not
/// recorded any.
pub(crate) fn storage_of(job: &InferenceJob) -> CheckpointStorage {
    let used = job.status.as_ref().and_then(|status| status.storage.clone());
    storage::with_used(job.storage(), used)
}

/// Reason why the output directory of a job is not known.
pub(crate) const NO_OUTPUT: &str = "the operator has not recorded the output yet";

/// Returns the URL of a job's output directory; empty if it is not known yet.
pub(crate) fn output_url(job: &InferenceJob) -> String {
    let used = job.status.as_ref().and_then(|status| status.output.clone());
    used.or_else(|| job.spec.output.url.clone()).unwrap_or_default()
}

/// Returns the path of a job in its storage.
pub(crate) fn path(job: &InferenceJob) -> String {
    let of = |text: &Option<String>| text.clone().unwrap_or_default();
    let metadata = &job.metadata;
    experiment_path(&of(&metadata.namespace), &of(&metadata.name), &of(&metadata.uid))
}

/// Returns the location of the job's logs and, unless `spec.output.url` is set, its output.
pub(crate) fn storage_location(job: &InferenceJob) -> String {
    let path = path(job);
    match storage_of(job).url {
        Some(url) => format!("{}/{path}", url.trim_end_matches('/')),
        None => format!("{path} in the operator's storage"),
    }
}

/// Returns a job's progress as one line.
pub(crate) fn progress(job: &InferenceJob) -> String {
    let status = job.status.clone().unwrap_or_default();
    let invalid = invalid(&status).map(|condition| condition.message.clone());
    let message = invalid.or(status.message.clone());
    format!(
        "{}: {:?}, {}, {} of {} rows{}",
        job.name(),
        status.phase,
        text::word(&status.stage),
        status.rows,
        status.rows_total,
        message.map_or_else(String::new, |message| format!("; {message}"))
    )
}

/// Warning for a completed job whose input has no rows.
pub(crate) const EMPTY_INPUT: &str = "warning: the input has no rows, so the output is empty";

/// Prints a job's outcome in the format of `stoker job run`.
pub(crate) fn print_outcome(job: &InferenceJob, output: Output) {
    let status = job.status.clone().unwrap_or_default();
    let name = job.name();
    let folder = status.output.clone().unwrap_or_default();
    let folder = folder.trim_end_matches('/');
    let is_complete = status.phase == stoker_api::experiment::Phase::Completed;
    let rows = status.rows.saturating_sub(status.rejected);
    let manifest = is_complete.then(|| format!("{folder}/manifest.json"));
    if is_complete && status.rows_total == 0 {
        print::err(EMPTY_INPUT);
    }
    if output == Output::Json {
        print::out(json!({
            "job": name, "phase": status.phase, "rows": is_complete.then_some(rows),
            "inputRows": status.rows_total, "done": status.rows, "rejected": status.rejected,
            "attempts": status.attempts, "manifest": manifest, "output": folder,
            "message": status.message,
        }));
        return;
    }
    let message = status.message.map_or_else(String::new, |message| format!(": {message}"));
    match manifest {
        Some(manifest) => print::out(format!(
            "{rows} of {} rows written, {} rejected: {manifest}",
            status.rows_total, status.rejected
        )),
        None => print::out(format!(
            "job {name} ended ({:?}) with {} of {} rows done{message}",
            status.phase, status.rows, status.rows_total
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job() -> InferenceJob {
        serde_json::from_value(json!({
            "apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceJob",
            "metadata": {"name": "species", "namespace": "ml", "uid": "0b3f9c1e-77aa",
                "creationTimestamp": "2026-11-21T19:00:00Z"},
            "spec": {
                "entrypoint": {"command": ["stoker-trainer", "iris-predict"]},
                "checkpoint": {"trial": "iris-0", "which": "largestMetric"},
                "input": {"url": "s3://data/*.csv"},
                "resources": {"slots": 4},
            },
            "status": {
                "phase": "Running", "stage": "work", "attempts": 5, "running": 3, "rows": 20,
                "rowsTotal": 80, "progressPercent": 25, "restarts": 1, "observedGeneration": 1,
                "storage": {"url": "s3://runs/", "path": "ml/species-0b3f9c1e"},
                "output": "s3://runs/ml/species-0b3f9c1e/output",
                "ends": [{"attempt": 2, "role": "work", "slot": 1, "end": "UserError",
                    "reason": "OOMKilled", "message": "out of\nmemory",
                    "at": "2026-11-21T19:04:00Z"}],
            },
        }))
        .unwrap()
    }

    fn now() -> Timestamp {
        "2026-11-21T19:05:00Z".parse().unwrap()
    }

    #[test]
    fn description_shows_input_output_and_failures() {
        let mut job = job();
        job.status.as_mut().unwrap().rejected = 2;
        job.status.as_mut().unwrap().ends[0].end = AttemptEnd::InvalidHyperparameters;
        let text = render(&job, "Running", storage_location(&job), false, now());
        for line in [
            "Progress:    25%, 20 of 80 rows, 2 of them rejected",
            "Program:     stoker-trainer iris-predict in the stock image",
            "Checkpoint:  largestMetric of trial iris-0",
            "Output:      s3://runs/ml/species-0b3f9c1e/output",
            "Storage:     s3://runs/ml/species-0b3f9c1e",
            "Slots:       4 (CPU process), 3 running",
            "Attempts:    5, 1 restarts",
            "out of memory",
            "  invalid input  ",
        ] {
            assert!(text.contains(line), "{line} in {text}");
        }
        let local = render(&job, "Running", String::new(), true, now());
        assert!(local.contains("Program:     stoker-trainer iris-predict\n"), "{local}");
    }

    #[test]
    fn progress_is_one_line() {
        assert_eq!(progress(&job()), "species: Running, work, 20 of 80 rows");
    }
}

//! `stoker job list|describe|...` on a cluster.

use kube::api::ListParams;
use serde_json::json;
use stoker_api::condition::{Condition, ConditionStatus};
use stoker_api::experiment::CheckpointStorage;
use stoker_api::inference::{CheckpointChoice, InferenceJob, InferenceStatus, WorkerEnd};
use stoker_api::names::experiment_path;
use stoker_api::time::Timestamp;

use super::connect::Cluster;
use super::kind::Kind as _;
use super::text::{self, Fields};
use super::{events, experiment, storage};
use crate::failure::Failure;
use crate::print::{self, Output};

/// Prints all jobs of the namespace, or of all.
pub(crate) async fn list(cluster: &Cluster, all: bool, output: Output) -> Result<(), Failure> {
    let found = cluster.list::<InferenceJob>("jobs", &ListParams::default(), all).await?;
    if output == Output::Json {
        print::out(json!(found.into_iter().map(|it| it.1).collect::<Vec<_>>()));
        return Ok(());
    }
    if found.is_empty() {
        let place =
            if all { "any namespace" } else { &format!("namespace `{}`", cluster.namespace) };
        print::err(format!("no job in {place} of the cluster at {}", cluster.server));
        return Ok(());
    }
    let now = text::now();
    let rows: Vec<Vec<String>> = found.iter().map(|it| row(&it.0, all, now)).collect();
    let header = ["NAME", "PHASE", "STAGE", "SLOTS", "ROWS", "OF", "REJECTED", "RESTARTS", "AGE"];
    let namespace = all.then_some("NAMESPACE");
    let header: Vec<&str> = namespace.into_iter().chain(header).collect();
    print::out(print::table(&header, &rows));
    Ok(())
}

fn row(job: &InferenceJob, all: bool, now: Timestamp) -> Vec<String> {
    let metadata = &job.metadata;
    let status = job.status.clone().unwrap_or_default();
    let mut cells = vec![
        job.name(),
        phase(&status),
        word(&status.stage),
        job.spec.resources.slots.to_string(),
        status.rows.to_string(),
        status.rows_total.to_string(),
        status.rejected.to_string(),
        status.restarts.to_string(),
        text::age(text::created(metadata), now),
    ];
    if all {
        cells.insert(0, metadata.namespace.clone().unwrap_or_default());
    }
    cells
}

/// A word as the object has it.
fn word(value: &impl serde::Serialize) -> String {
    json!(value).as_str().unwrap_or_default().to_owned()
}

/// Where it stands. One that cannot be read waits for nothing.
fn phase(status: &InferenceStatus) -> String {
    match invalid(status) {
        Some(_) if !status.phase.is_terminal() => "Invalid".to_owned(),
        _ => format!("{:?}", status.phase),
    }
}

fn invalid(status: &InferenceStatus) -> Option<&Condition> {
    status.conditions.iter().find(|it| it.type_ == "Valid" && it.status == ConditionStatus::False)
}

/// Prints one job.
pub(crate) async fn describe(cluster: &Cluster, name: &str, output: Output) -> Result<(), Failure> {
    let job: InferenceJob = cluster.read(name).await?;
    if output == Output::Json {
        print::out(json!(job));
        return Ok(());
    }
    let pods = format!("{name}-a");
    let events = events::section(cluster, "InferenceJob", name, Some(&pods)).await;
    print::out(render(&job, text::now()) + &events);
    Ok(())
}

fn render(job: &InferenceJob, now: Timestamp) -> String {
    let (metadata, spec) = (&job.metadata, &job.spec);
    let status = job.status.clone().unwrap_or_default();
    let ago = |it: Timestamp| format!("{it} ({} ago)", text::age(Some(it), now));
    let mut fields = Fields::default();
    fields.add("Name", job.name());
    fields.add("Namespace", metadata.namespace.clone().unwrap_or_default());
    fields.add("Description", spec.description.clone().unwrap_or_default());
    fields.add("Created", text::created(metadata).map(ago).unwrap_or_default());
    fields.add("Ended", status.ended_at.map(ago).unwrap_or_default());
    fields.add("Wanted", word(&spec.state));
    let message = status.message.as_ref().map_or_else(String::new, |it| format!(": {it}"));
    fields.add("Phase", format!("{}{message}", phase(&status)));
    fields.add("Stage", word(&status.stage));
    let rejected = match status.rejected {
        0 => String::new(),
        num => format!(", {num} rejected"),
    };
    let (rows, total, percent) = (status.rows, status.rows_total, status.progress_percent);
    fields.add("Progress", format!("{percent}%, {rows} of {total} rows{rejected}"));
    let image = spec.pod.image.as_deref().unwrap_or("the stock image");
    let words = spec.entrypoint.command.iter().chain(&spec.entrypoint.args);
    let words = words.map(String::as_str).collect::<Vec<_>>().join(" ");
    fields.add("Program", format!("{words} in {image}"));
    fields.add("Checkpoint", spec.checkpoint.as_ref().map(checkpoint).unwrap_or_default());
    fields.add("Input", spec.input.url.clone());
    fields.add("Output", status.output.clone().unwrap_or_default());
    fields.add("Storage", place(job));
    let slot = spec.resources.slot_resource.as_deref().unwrap_or("CPU process");
    let (slots, running) = (spec.resources.slots, status.running);
    fields.add("Slots", format!("{slots} ({slot}), {running} at work"));
    fields.add("Attempts", format!("{}, {} restarts", status.attempts, status.restarts));
    let row = |it: &WorkerEnd| {
        vec![
            it.attempt.to_string(),
            word(&it.role),
            it.slot.to_string(),
            format!("{:?}", it.end),
            it.reason.clone(),
            text::age(Some(it.at), now),
            it.message.replace('\n', " "),
        ]
    };
    let ends: Vec<_> = status.ends.iter().map(row).collect();
    let header = ["ATTEMPT", "STAGE", "SLOT", "END", "REASON", "AGE", "MESSAGE"];
    fields.to_string()
        + &text::section("Failures, the latest", &header, &ends)
        + &experiment::conditions(&status.conditions, now)
}

fn checkpoint(choice: &CheckpointChoice) -> String {
    let of = match (&choice.trial, &choice.folder, &choice.stored) {
        (Some(trial), _, _) => format!("trial {trial}"),
        (_, Some(folder), _) => return folder.clone(),
        (_, _, Some(stored)) => format!("{}/{}", stored.url, stored.trial_path),
        _ => return String::new(),
    };
    let which = choice.name.clone().unwrap_or_else(|| word(&choice.which));
    format!("{which} of {of}")
}

/// Deletes a job's object, and with it its pods.
pub(crate) async fn delete(cluster: &Cluster, name: &str, output: Output) -> Result<(), Failure> {
    let job: InferenceJob = experiment::remove(cluster, name).await?;
    let left = place(&job);
    match output {
        Output::Json => print::out(json!({"job": name, "deleted": true, "left": left})),
        Output::Text => {
            print::out(format!("job {name} is deleted, and its pods with it"));
            print::out(format!("its output and logs stay: {left}"));
        }
    }
    Ok(())
}

/// What a job says of its storage, with what the operator has said of it where it says nothing.
pub(crate) fn storage_of(job: &InferenceJob) -> CheckpointStorage {
    let used = job.status.as_ref().and_then(|it| it.storage.clone());
    storage::with_used(job.storage(), used)
}

/// The job's folder, below the root.
pub(crate) fn path(job: &InferenceJob) -> String {
    let of = |text: &Option<String>| text.clone().unwrap_or_default();
    let metadata = &job.metadata;
    experiment_path(&of(&metadata.namespace), &of(&metadata.name), &of(&metadata.uid))
}

/// Where its logs lie, and its output unless it says otherwise.
pub(crate) fn place(job: &InferenceJob) -> String {
    let path = path(job);
    match storage_of(job).url {
        Some(url) => format!("{}/{path}", url.trim_end_matches('/')),
        None => format!("{path} in the operator's storage"),
    }
}

/// How it is going, in one line.
pub(crate) fn progress(job: &InferenceJob) -> String {
    let status = job.status.clone().unwrap_or_default();
    let message = invalid(&status).map(|it| it.message.clone()).or(status.message.clone());
    format!(
        "{}: {:?}, {}, {} of {} rows{}",
        job.name(),
        status.phase,
        word(&status.stage),
        status.rows,
        status.rows_total,
        message.map_or_else(String::new, |it| format!("; {it}"))
    )
}

/// Prints its end, as `stoker job run` does.
pub(crate) fn tell(job: &InferenceJob, output: Output) {
    let status = job.status.clone().unwrap_or_default();
    let name = job.name();
    let folder = status.output.clone().unwrap_or_default();
    let folder = folder.trim_end_matches('/');
    let is_whole = status.phase == stoker_api::experiment::Phase::Completed;
    let rows = status.rows.saturating_sub(status.rejected);
    let manifest = is_whole.then(|| format!("{folder}/manifest.json"));
    if output == Output::Json {
        print::out(json!({
            "job": name, "phase": status.phase, "rows": is_whole.then_some(rows),
            "inputRows": status.rows_total, "done": status.rows, "rejected": status.rejected,
            "attempts": status.attempts, "manifest": manifest, "output": folder,
            "message": status.message,
        }));
        return;
    }
    let message = status.message.map_or_else(String::new, |it| format!(": {it}"));
    match manifest {
        Some(manifest) => print::out(format!(
            "{rows} rows of {}, {} rejected: {manifest}",
            status.rows_total, status.rejected
        )),
        None => print::out(format!(
            "job {name} ended as {:?} with {} of {} rows done{message}",
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
    fn a_row_has_what_the_print_columns_have() {
        let cells = row(&job(), true, now());
        assert_eq!(cells, ["ml", "species", "Running", "work", "4", "20", "80", "0", "1", "5m"]);
    }

    #[test]
    fn a_description_says_what_is_read_written_and_wrong() {
        let text = render(&job(), now());
        for line in [
            "Progress:    25%, 20 of 80 rows",
            "Checkpoint:  largestMetric of trial iris-0",
            "Output:      s3://runs/ml/species-0b3f9c1e/output",
            "Storage:     s3://runs/ml/species-0b3f9c1e",
            "Slots:       4 (CPU process), 3 at work",
            "Attempts:    5, 1 restarts",
            "out of memory",
        ] {
            assert!(text.contains(line), "{line} in {text}");
        }
    }

    #[test]
    fn progress_is_one_line() {
        assert_eq!(progress(&job()), "species: Running, work, 20 of 80 rows");
    }
}

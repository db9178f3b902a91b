//! Page of a batch inference job.

use serde_json::{Value, json};
use stoker_api::experiment::{DesiredState, Phase};
use stoker_api::inference::{CheckpointChoice, Role, WorkerEnd, WorkerStatus};
use stoker_engine::inference::percent;

use super::experiment::yaml;
use super::jobs::{badge, num_failed, rejected, rows, stage};
use super::{condition, plain_frame};
use crate::job::Job;
use crate::live::Version;
use crate::site::Site;
use crate::state::{self, COMPLETED, PENDING, QUEUED, RUNNING};
use crate::text;
use crate::views::{
    Crumb, EndRow, Fact, JobPage, Notice, Pair, RejectedRow, ShownTime, StageRow, WorkerRow,
};

/// Maximum number of parts and files of a manifest on the page.
const PARTS_MAX: usize = 20;
/// Maximum number of rejected rows on the page.
const REJECTED_MAX: usize = 20;

/// Files of a job's output, as far as they can be read.
#[derive(Debug)]
pub(crate) struct Output {
    pub(crate) manifest: Result<Value, String>,
    pub(crate) rejected: Result<Vec<Value>, String>,
}

/// Returns the page of a job.
pub(crate) fn page(site: &Site, job: &Job, output: &Output) -> JobPage {
    let status = job.status();
    let name = text::name(&job.name);
    let mut frame = plain_frame(site, "jobs", &format!("{name} · Stoker"));
    frame.base = job.base();
    // A local job without a runner continues when its command runs again.
    frame.live = (!job.phase().is_terminal()).then(|| {
        let version = Version::of_job(job);
        format!("/live?j={}/{}&v={version}", text::query(&job.namespace), job.id())
    });
    let crumb = |text: &str, href: &str| Crumb { text: text.to_owned(), href: href.to_owned() };
    frame.crumbs = vec![crumb("Jobs", "/jobs"), crumb(&text::name(&job.namespace), "")];
    let (manifest, manifest_note) = manifest(output);
    let (rejected, rejected_note) = rejected_rows(job, output);
    JobPage {
        frame,
        namespace: job.namespace.clone(),
        name,
        id: job.id(),
        base: job.base(),
        phase: badge(job),
        notice: notice(job),
        facts: facts(job),
        stages: stages(job),
        workers: workers(job),
        ends: status.ends.iter().rev().map(end).collect(),
        conditions: status.conditions.iter().map(condition).collect(),
        output: job.output_url.clone(),
        rejected,
        rejected_note,
        manifest,
        manifest_note,
        record: yaml(&job.job),
        commands: commands(site, job),
    }
}

fn notice(job: &Job) -> Option<Notice> {
    let status = job.status();
    let message = status.message.clone().unwrap_or_default();
    let new = |class, title: &str, text: String| {
        let (title, text) = (title.to_owned(), text::escape(&text));
        Some(Notice { class, title, at: None, text, links: vec![] })
    };
    match job.phase() {
        _ if job.invalid().is_some() => {
            new("invalid", "The spec is invalid", job.invalid().unwrap_or_default())
        }
        Phase::Failed => new("fail", "The job failed", message),
        Phase::Cancelled => new("info", "The job was cancelled", message),
        Phase::Completed => None,
        _ if !job.is_running => {
            let text = match job.job.spec.state {
                DesiredState::Paused => {
                    "It is paused. Activate it, then run the same command again"
                }
                _ => "Run the same command again to resume; committed shards are kept",
            };
            new("info", "No runner works on this job now", text.to_owned())
        }
        Phase::Pending => new("info", "The job waits", message),
        _ => None,
    }
}

fn facts(job: &Job) -> Vec<Fact> {
    let (spec, status) = (&job.job.spec, job.status());
    let fact = |label: &str, value: String, note: String| Fact {
        label: label.to_owned(),
        value,
        note,
        ..Fact::default()
    };
    // A killed runner leaves its last count, but its processes end with it.
    let running = if job.is_running { status.running } else { 0 };
    let resource = spec.resources.slot_resource.as_deref().unwrap_or("CPU processes");
    let failed = num_failed(job);
    let per_worker = format!("at most {} per worker", spec.max_restarts);
    let mut facts = vec![
        fact("Progress", format!("{} %", percent(&status)), String::new()),
        fact("Rows", rows(status.rows, status.rows_total), String::new()),
        fact("Rejected", rejected(job), "rows without output".to_owned()),
        fact("Attempts", text::count(status.attempts.into()), String::new()),
        fact("Failures", text::count(failed.into()), per_worker),
        fact("Slots", format!("{running} of {}", spec.resources.slots), resource.to_owned()),
        fact("Input", text::escape(&spec.input.url), String::new()),
    ];
    if let Some(checkpoint) = spec.checkpoint.as_ref().map(checkpoint) {
        facts.push(fact("Checkpoint", text::escape(&checkpoint), String::new()));
    }
    let started = status.started_at.or(job.created);
    if let (Some(started), Some(ended)) = (started, status.ended_at) {
        let ran = text::duration(ended.seconds_since(started));
        let at = Some(ShownTime::new(ended));
        facts.push(Fact { at, ..fact("Ran for", ran, "ended".to_owned()) });
    } else if let (Some(started), true) = (started, job.is_live()) {
        let ran = text::duration(text::now().seconds_since(started));
        facts.push(fact("Running for", ran, String::new()));
    }
    facts
}

fn checkpoint(choice: &CheckpointChoice) -> String {
    let which = choice
        .name
        .clone()
        .unwrap_or_else(|| json!(choice.which).as_str().unwrap_or_default().to_owned());
    match (&choice.trial, &choice.folder, &choice.stored) {
        (Some(trial), _, _) => format!("{which} of trial {trial}"),
        (_, Some(folder), _) => folder.clone(),
        (_, _, Some(stored)) => format!("{which} of {}/{}", stored.url, stored.trial_path),
        _ => which,
    }
}

/// Returns the stages with what each has done.
fn stages(job: &Job) -> Vec<StageRow> {
    let status = job.status();
    let position = |role: Role| role as u8;
    let badge = |role: Role| match job.phase() {
        Phase::Completed => COMPLETED,
        _ if position(role) < position(status.stage) => COMPLETED,
        _ if position(role) > position(status.stage) => PENDING,
        Phase::Running if !job.is_running => QUEUED,
        phase => state::of_phase(phase),
    };
    let num_done = status.workers.iter().filter(|worker| worker.is_done).count();
    let plan = match status.rows_total {
        0 => "divides the input into shards".to_owned(),
        total => format!("{} in shards of at most {}", rows_of(total), job.job.spec.shard_rows),
    };
    let work = match status.rows_total {
        0 => "runs the model on each shard".to_owned(),
        total => format!(
            "{} of {} committed; {num_done} of {} slots are done",
            text::count(status.rows),
            rows_of(total),
            job.job.spec.resources.slots
        ),
    };
    // `is_done` counts for the current stage only.
    let work = match status.stage == Role::Work {
        true => work,
        false => work.split(';').next().unwrap_or_default().to_owned(),
    };
    let finish = match job.phase() {
        Phase::Completed => "the manifest lists all parts",
        _ => "writes the manifest after the last row",
    };
    let row = |name, role, text| StageRow { name, badge: badge(role), text };
    vec![
        row("Plan", Role::Plan, plan),
        row("Work", Role::Work, work),
        row("Finish", Role::Finish, finish.to_owned()),
    ]
}

fn rows_of(rows: u64) -> String {
    text::num(usize::try_from(rows).unwrap_or(usize::MAX), "row")
}

fn workers(job: &Job) -> Vec<WorkerRow> {
    let row = |(slot, worker): (usize, &WorkerStatus)| WorkerRow {
        slot,
        badge: match (worker.attempt, worker.is_done) {
            (_, true) => COMPLETED,
            (Some(_), false) if job.is_running => RUNNING,
            // The runner is gone, and its processes with it.
            (Some(_), false) => QUEUED,
            (None, false) => PENDING,
        },
        attempt: worker.attempt.map_or_else(|| text::NONE.to_owned(), |number| number.to_string()),
        rows: match worker.rows {
            0 => text::NONE.to_owned(),
            rows => text::count(rows),
        },
        restarts: text::count(worker.restarts.into()),
    };
    job.status().workers.iter().enumerate().map(row).collect()
}

fn end(end: &WorkerEnd) -> EndRow {
    let (badge, word) = state::of_attempt(Some(end.end));
    EndRow {
        attempt: end.attempt,
        stage: stage(end.role).to_owned(),
        slot: end.slot,
        badge,
        end: word,
        reason: text::escape(&end.reason),
        message: text::escape(&end.message),
        at: end.at.to_string(),
    }
}

/// Returns the manifest as JSON, with a note if entries are left out.
fn manifest(output: &Output) -> (Result<String, String>, String) {
    let mut manifest = match &output.manifest {
        Ok(manifest) => manifest.clone(),
        Err(reason) => return (Err(reason.clone()), String::new()),
    };
    let mut notes = Vec::new();
    for (field, noun) in [("parts", "part"), ("input", "input file")] {
        if let Some(entries) = manifest[field].as_array_mut()
            && entries.len() > PARTS_MAX
        {
            notes.push(text::num(entries.len() - PARTS_MAX, noun));
            entries.truncate(PARTS_MAX);
        }
    }
    let note = match notes.is_empty() {
        true => String::new(),
        false => format!("not shown here: {}", notes.join(" and ")),
    };
    (serde_json::to_string_pretty(&manifest).map_err(|error| error.to_string()), note)
}

fn rejected_rows(job: &Job, output: &Output) -> (Vec<RejectedRow>, String) {
    let rows = match &output.rejected {
        Ok(rows) => rows,
        Err(reason) => return (Vec::new(), format!("The list cannot be read: {reason}")),
    };
    let text_of = |value: &Value| match value {
        Value::String(text) => text::escape(text),
        Value::Number(number) => number.to_string(),
        _ => text::NONE.to_owned(),
    };
    let row = |row: &Value| RejectedRow {
        file: text_of(&row["file"]),
        row: text_of(&row["row"]),
        reason: text_of(&row["reason"]),
    };
    let shown: Vec<RejectedRow> = rows.iter().take(REJECTED_MAX).map(row).collect();
    let total = job.status().rejected.max(shown.len() as u64);
    let note = match total > shown.len() as u64 {
        true => format!("The first {} of {}", shown.len(), text::count(total)),
        false => String::new(),
    };
    (shown, note)
}

fn commands(site: &Site, job: &Job) -> Vec<Pair> {
    if !site.is_cluster {
        return Vec::new();
    }
    let command = |purpose: &str, verb: &str| Pair {
        name: purpose.to_owned(),
        value: site.command(&format!("stoker job {verb} {} -n {}", job.name, job.namespace)),
    };
    let mut commands =
        vec![command("Describe on a terminal", "describe"), command("Logs of all slots", "logs")];
    if !job.phase().is_terminal() {
        commands.extend([command("Pause", "pause"), command("Cancel", "cancel")]);
    }
    commands
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;

    #[test]
    fn stages_follow_the_record() {
        let check = |status: Value, is_running: bool, expected: [&str; 3]| {
            let rows = stages(&fixture::job(status.clone(), is_running));
            let words: Vec<&str> = rows.iter().map(|row| row.badge.word).collect();
            assert_eq!(words, expected, "{status}");
        };
        check(json!({}), true, ["Pending", "Pending", "Pending"]);
        let work = json!({"phase": "Running", "stage": "work", "rowsTotal": 9});
        check(work.clone(), true, ["Completed", "Running", "Pending"]);
        check(work, false, ["Completed", "Queued", "Pending"]);
        let failed = json!({"phase": "Failed", "stage": "finish"});
        check(failed, true, ["Completed", "Completed", "Failed"]);
        let completed = json!({"phase": "Completed", "stage": "finish"});
        check(completed, true, ["Completed", "Completed", "Completed"]);
    }

    #[test]
    fn dead_runner_has_no_running_processes() {
        let status = json!({
            "phase": "Running", "stage": "work", "running": 1,
            "workers": [{"attempt": 1}, {"isDone": true}, {}],
        });
        let check = |is_running: bool, slots: &str, expected: [&str; 3]| {
            let job = fixture::job(status.clone(), is_running);
            let words: Vec<&str> = workers(&job).iter().map(|row| row.badge.word).collect();
            assert_eq!(words, expected);
            let facts = facts(&job);
            let fact = facts.iter().find(|fact| fact.label == "Slots").unwrap();
            assert!(fact.value.starts_with(slots), "{}", fact.value);
        };
        check(true, "1 of ", ["Running", "Completed", "Pending"]);
        check(false, "0 of ", ["Queued", "Completed", "Pending"]);
    }

    #[test]
    fn commands_name_the_cluster() {
        let arguments = "--context prod".to_owned();
        let site = Site { is_cluster: true, arguments, ..Site::default() };
        let commands = commands(&site, &fixture::job(json!({"phase": "Running"}), true));
        assert_eq!(commands.len(), 4);
        for command in commands {
            let value = command.value;
            assert!(value.ends_with(" species -n ml --context prod"), "{value}");
        }
    }

    #[test]
    fn long_manifests_are_cut() {
        let parts: Vec<Value> = (0..391).map(|part| json!({"name": part})).collect();
        let output = Output {
            manifest: Ok(json!({"parts": parts, "input": [{"name": "a.csv"}]})),
            rejected: Ok(Vec::new()),
        };
        let (text, note) = manifest(&output);
        let shown: Value = serde_json::from_str(&text.unwrap()).unwrap();
        assert_eq!(shown["parts"].as_array().unwrap().len(), PARTS_MAX);
        assert_eq!(note, "not shown here: 371 parts");
    }

    #[test]
    fn output_of_another_job_is_refused() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let job = fixture::job(json!({"phase": "Completed"}), true);
            let storage = job.output.clone().unwrap();
            assert!(job.manifest().await.unwrap_err().contains("written last"));
            // The page reads the start of the list only, so the last line may be cut.
            let rejected = "{\"file\": \"a\", \"row\": 3, \"reason\": \"no\"}\n{\"fi";
            storage.put("errors.jsonl", rejected.into()).await.unwrap();
            let mut manifest = json!({
                "job": "species", "jobId": job.uid,
                "errors": {"name": "errors.jsonl", "bytes": rejected.len()},
            });
            storage.put("manifest.json", manifest.to_string().into()).await.unwrap();
            let read = job.manifest().await.unwrap();
            let rows = job.rejected(&read).await.unwrap();
            assert_eq!((rows.len(), &rows[0]["row"]), (1, &json!(3)));
            manifest["jobId"] = json!("other");
            storage.put("manifest.json", manifest.to_string().into()).await.unwrap();
            assert!(job.manifest().await.unwrap_err().contains("another job"));
        });
    }
}

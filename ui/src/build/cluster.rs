//! Slots of a cluster or of this machine: what uses them, what is free, and what waits.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use stoker_api::condition::{self, ConditionStatus};
use stoker_api::experiment::Phase;
use stoker_api::time::Timestamp;
use stoker_engine::trial::TrialRecord;

use super::plain_frame;
use crate::actions::ClusterObjects;
use crate::job::Job;
use crate::site::Site;
use crate::slots::{self, CPU};
use crate::store::Run;
use crate::text;
use crate::views::{Bar, ClusterPage, Fact, NodeRow, RunningRow, Segment, WaitingRow};
use crate::visible::Visible;

/// Returns the page. `objects` are those of a cluster.
pub(crate) fn page(
    site: &Site,
    visible: &Visible,
    objects: Option<&ClusterObjects>,
) -> ClusterPage {
    // Read first: a later change then only loads the page again.
    let version = visible.version();
    let (runs, jobs) = (visible.runs(), visible.jobs());
    let mut frame = plain_frame(site, "cluster", "Slots · Stoker");
    frame.live = Some(format!("/live?v={version}"));
    let waiting = waiting(&runs, &jobs, text::now());
    let running = running(&runs);
    let (mut nodes, mut notes) = (Vec::new(), Vec::new());
    match objects {
        Some(objects) => (nodes, notes) = node_rows(&runs, &jobs, objects),
        None => notes.push(
            "Local runs have no cluster: each `stoker run` has as many slots as its option \
             --slots."
                .to_owned(),
        ),
    }
    let title = if objects.is_some() { "Cluster" } else { "Slots of this machine" };
    let facts = facts(&runs, waiting.len());
    ClusterPage {
        frame,
        title,
        notes,
        facts,
        has_nodes: objects.is_some(),
        nodes,
        running,
        waiting,
    }
}

/// Number of trials of a run that train now.
fn num_running(run: &Run) -> u64 {
    let is_running = |trial: &&Arc<TrialRecord>| trial.status.phase == Phase::Running;
    match run.is_live() {
        true => run.trials.values().filter(is_running).count() as u64,
        false => 0,
    }
}

fn facts(runs: &[Arc<Run>], num_waiting: usize) -> Vec<Fact> {
    let fact = |label: &str, value: u64, note: &str| Fact {
        label: label.to_owned(),
        value: text::count(value),
        note: note.to_owned(),
        ..Fact::default()
    };
    let slots = |run: &Arc<Run>| num_running(run) * slots_of(run);
    let experiments = runs.iter().filter(|run| num_running(run) > 0).count() as u64;
    vec![
        fact("Running trials", runs.iter().map(|run| num_running(run)).sum(), ""),
        fact("Of experiments", experiments, ""),
        fact("Slots in use", runs.iter().map(slots).sum(), "by trials"),
        fact("Waiting", num_waiting as u64, "for slots"),
    ]
}

fn slots_of(run: &Run) -> u64 {
    u64::from(run.experiment.spec.resources.slots_per_trial.max(1))
}

/// Returns the experiments that train now, those with the most slots first.
fn running(runs: &[Arc<Run>]) -> Vec<RunningRow> {
    let mut all: Vec<&Arc<Run>> = runs.iter().filter(|run| num_running(run) > 0).collect();
    all.sort_by_key(|run| Reverse(num_running(run) * slots_of(run)));
    let row = |run: &Arc<Run>| RunningRow {
        experiment: text::name(&run.name),
        namespace: run.namespace.clone(),
        href: run.base(),
        trials: text::count(num_running(run)),
        slots_per_trial: text::count(slots_of(run)),
        slots: text::count(num_running(run) * slots_of(run)),
        resource: resource(run.experiment.spec.resources.slot_resource.as_deref()),
    };
    all.into_iter().map(row).collect()
}

fn resource(slot: Option<&str>) -> String {
    slot.unwrap_or("CPU ranks").to_owned()
}

/// Returns the trials and jobs that wait for slots, the longest wait first.
fn waiting(runs: &[Arc<Run>], jobs: &[Arc<Job>], now: Timestamp) -> Vec<WaitingRow> {
    let trials = runs
        .iter()
        .filter(|run| run.is_live())
        .flat_map(|run| run.trials.values().filter_map(|trial| waiting_trial(run, trial, now)));
    let jobs = jobs.iter().filter(|job| job.is_live());
    let jobs = jobs.filter_map(|job| waiting_job(job, now));
    let mut rows: Vec<WaitingRow> = trials.chain(jobs).collect();
    // Times in RFC 3339 sort as text; unknown ones come last.
    rows.sort_by_key(|row| (row.since.is_empty(), row.since.clone()));
    rows
}

fn waiting_trial(run: &Run, trial: &TrialRecord, now: Timestamp) -> Option<WaitingRow> {
    let status = &trial.status;
    let reason = status.reason.as_deref().filter(|_| status.phase == Phase::Pending)?;
    // Such a trial waits for the search, not for slots.
    if reason == "NoAttempt" {
        return None;
    }
    let scheduled = condition::find(&status.conditions, "Scheduled");
    let scheduled = scheduled.filter(|one| one.status == ConditionStatus::False);
    let since = scheduled.map(|one| one.last_transition_time);
    let index = trial.spec.index;
    Some(WaitingRow {
        what: format!("Trial {index}"),
        href: run.trial_base(index),
        experiment: text::name(&run.name),
        slots: text::count(slots_of(run)),
        since: since.map(|at| at.to_string()).unwrap_or_default(),
        age: age(since, now),
        reason: text::escape(reason),
        message: text::escape(status.message.as_deref().unwrap_or_default()),
    })
}

fn waiting_job(job: &Job, now: Timestamp) -> Option<WaitingRow> {
    let status = job.job.status.as_ref()?;
    let scheduled = condition::find(&status.conditions, "Scheduled")?;
    let is_waiting = scheduled.status == ConditionStatus::False
        && !["NoAttempt", "Ended"].contains(&scheduled.reason.as_str());
    is_waiting.then(|| WaitingRow {
        what: format!("Job {}", text::name(&job.name)),
        href: job.base(),
        experiment: String::new(),
        slots: text::count(job.job.spec.resources.slots.into()),
        since: scheduled.last_transition_time.to_string(),
        age: age(Some(scheduled.last_transition_time), now),
        reason: text::escape(&scheduled.reason),
        message: text::escape(&scheduled.message),
    })
}

fn age(since: Option<Timestamp>, now: Timestamp) -> String {
    since.map_or_else(|| text::NONE.to_owned(), |since| text::age(now.seconds_since(since)))
}

/// Returns a row per node and slot resource, and notes about what is missing.
fn node_rows(
    runs: &[Arc<Run>],
    jobs: &[Arc<Job>],
    objects: &ClusterObjects,
) -> (Vec<NodeRow>, Vec<String>) {
    let mut notes = Vec::new();
    let of = |resource: Option<&String>| resource.map_or(CPU, String::as_str).to_owned();
    let runs_use = runs.iter().map(|run| of(run.experiment.spec.resources.slot_resource.as_ref()));
    let jobs_use = jobs.iter().map(|job| of(job.job.spec.resources.slot_resource.as_ref()));
    let resources: BTreeSet<String> = runs_use.chain(jobs_use).collect();
    let no_pods = Vec::new();
    let pods = match &objects.pods {
        Ok(pods) => pods,
        Err(reason) => {
            notes.push(format!("Slots in use are not known: you may not list pods ({reason})"));
            &no_pods
        }
    };
    if let (Some(namespace), Ok(_)) = (&objects.namespace, &objects.pods) {
        notes.push(format!(
            "Only pods of namespace {namespace} are counted: you may not list pods of all \
             namespaces"
        ));
    }
    let nodes = match &objects.nodes {
        Ok(nodes) => nodes,
        Err(reason) => {
            notes.push(format!("Nodes are not shown: you may not list nodes ({reason})"));
            return (Vec::new(), notes);
        }
    };
    let ranks = ranks(runs);
    let used = slots::used(pods, &ranks);
    let mut rows = Vec::new();
    for node in nodes {
        let node = slots::node(node);
        for resource in &resources {
            let used = used.get(&(node.name.clone(), resource.clone())).copied();
            let allocatable = node.allocatable.get(resource).copied().unwrap_or(0.0);
            if allocatable > 0.0 || used.is_some() {
                let known = objects.pods.is_ok();
                rows.push(node_row(&node, resource, allocatable, used.unwrap_or_default(), known));
            }
        }
    }
    notes.push("Only requests of Stoker's pods are counted as used".to_owned());
    (rows, notes)
}

/// Returns the CPU ranks of a pod, by namespace and experiment without a slot resource.
fn ranks(runs: &[Arc<Run>]) -> BTreeMap<(String, String), u32> {
    let resources = |run: &Arc<Run>| run.experiment.spec.resources.clone();
    let of_cpu = runs.iter().filter(|run| resources(run).slot_resource.is_none());
    of_cpu
        .map(|run| ((run.namespace.clone(), run.name.clone()), resources(run).slots_per_pod()))
        .collect()
}

fn node_row(
    node: &slots::NodeSlots,
    resource: &str,
    allocatable: f64,
    used: slots::Used,
    is_known: bool,
) -> NodeRow {
    let free = (allocatable - used.amount).max(0.0);
    let mut notes = node.notes.clone();
    if used.ranks > 0 {
        notes.push(text::num(used.ranks as usize, "CPU rank"));
    }
    if used.amount > allocatable {
        notes.push("requests exceed what is allocatable".to_owned());
    }
    let number = |value: f64| match is_known {
        true => text::significant(value),
        false => text::NONE.to_owned(),
    };
    NodeRow {
        name: text::name(&node.name),
        resource: resource.to_owned(),
        used: format!("{} of {}", number(used.amount), text::significant(allocatable)),
        free: number(free),
        bar: bar(used.amount, allocatable, is_known),
        note: notes.join(", "),
    }
}

/// Returns the bar of a node: used and free.
fn bar(used: f64, allocatable: f64, is_known: bool) -> Bar {
    if !is_known || allocatable <= 0.0 {
        return Bar::default();
    }
    let share = (used / allocatable).clamp(0.0, 1.0) * 1000.0;
    let segment = |class, word: &str, x: f64, width: f64| Segment {
        class,
        word: word.to_owned(),
        count: width.round() as u32 / 10,
        x: format!("{x:.1}"),
        width: format!("{width:.1}"),
    };
    Bar {
        label: format!("{} % used", (share / 10.0).round()),
        segments: vec![
            segment("running", "used", 0.0, share),
            segment("not-created", "free", share, 1000.0 - share),
        ],
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::fixture;
    use crate::store::Store;

    fn objects() -> ClusterObjects {
        let node = |name: &str, gpus: &str| {
            json!({"metadata": {"name": name}, "status": {
                "allocatable": {"cpu": "8", "nvidia.com/gpu": gpus},
                "conditions": [{"type": "Ready", "status": "True",
                    "lastHeartbeatTime": null, "lastTransitionTime": null}]}})
        };
        let pods = json!([{
            "metadata": {"name": "p", "namespace": "ml",
                "labels": {"stoker.dev/experiment": "iris"}},
            "spec": {"nodeName": "a", "containers": [{"name": "trainer", "resources":
                {"requests": {"nvidia.com/gpu": "3", "cpu": "1500m"}}}]},
            "status": {"phase": "Running"},
        }]);
        ClusterObjects {
            nodes: Ok(serde_json::from_value(json!([node("a", "4"), node("b", "0")])).unwrap()),
            pods: Ok(serde_json::from_value(pods).unwrap()),
            namespace: None,
        }
    }

    fn run(resources: Value) -> Arc<Run> {
        Arc::new(fixture::run(json!({"resources": resources}), json!({}), &[]))
    }

    /// Node, resource, used and free of each row, and the notes.
    fn rows(run: Arc<Run>, objects: &ClusterObjects) -> (Vec<[String; 4]>, Vec<String>) {
        let (rows, notes) = node_rows(&[run], &[], objects);
        let cells = |row: NodeRow| [row.name, row.resource, row.used, row.free];
        (rows.into_iter().map(cells).collect(), notes)
    }

    #[test]
    fn nodes_show_the_slot_resources_of_experiments() {
        let gpu = run(json!({"slotResource": "nvidia.com/gpu"}));
        let (shown, _) = rows(gpu, &objects());
        assert_eq!(shown, [["a", "nvidia.com/gpu", "3 of 4", "1"]]);
        let (shown, _) = rows(run(json!({})), &objects());
        assert_eq!(shown, [["a", "cpu", "1.5 of 8", "6.5"], ["b", "cpu", "0 of 8", "8"]]);
    }

    #[test]
    fn missing_permissions_are_named() {
        let check = |objects: ClusterObjects, num_rows: usize, expected: &str| {
            let (rows, notes) = rows(run(json!({})), &objects);
            assert_eq!(rows.len(), num_rows, "{expected}");
            assert!(notes.iter().any(|note| note.contains(expected)), "{expected} in {notes:?}");
        };
        let denied = || "forbidden".to_owned();
        check(ClusterObjects { nodes: Err(denied()), ..objects() }, 0, "you may not list nodes");
        check(ClusterObjects { pods: Err(denied()), ..objects() }, 2, "you may not list pods");
        let namespace = Some("ml".to_owned());
        check(ClusterObjects { namespace, ..objects() }, 2, "Only pods of namespace ml");
        let (shown, _) = rows(run(json!({})), &ClusterObjects { pods: Err(denied()), ..objects() });
        assert_eq!(shown[0], ["a", "cpu", "– of 8", "–"]);
    }

    #[test]
    fn gangs_wait_with_the_reason() {
        let scheduled = json!([{
            "type": "Scheduled", "status": "False", "reason": "Unschedulable",
            "message": "needs 4 GPUs", "lastTransitionTime": "1970-01-01T00:59:00Z",
        }]);
        let waits = json!({"phase": "Pending", "reason": "Unschedulable",
            "message": "needs 4 GPUs", "conditions": scheduled});
        let trials = [
            json!({"phase": "Running"}),
            json!({"phase": "Pending", "reason": "BackOff"}),
            waits.clone(),
            json!({"phase": "Pending", "reason": "NoAttempt"}),
            json!({"phase": "Pending"}),
        ];
        let spec = json!({"resources": {"slotsPerTrial": 4}});
        let runs = [Arc::new(fixture::run(spec, json!({"phase": "Running"}), &trials))];
        let jobs = [Arc::new(fixture::job(json!({"conditions": scheduled}), true))];
        let rows = waiting(&runs, &jobs, Timestamp(3_600));
        let cells: Vec<[&str; 4]> =
            rows.iter().map(|row| [&*row.what, &*row.slots, &*row.age, &*row.reason]).collect();
        let expected = [
            ["Trial 2", "4", "1 min", "Unschedulable"],
            ["Job species", "1", "1 min", "Unschedulable"],
            ["Trial 1", "4", "–", "BackOff"],
        ];
        assert_eq!(cells, expected);
        let ended = json!({"phase": "Completed"});
        let runs = [Arc::new(fixture::run(json!({}), ended, &[waits]))];
        assert!(waiting(&runs, &[], Timestamp(3_600)).is_empty());
    }

    #[test]
    fn local_runs_show_running_trials_and_slots() {
        let store = Arc::new(Store::default());
        let trials = [json!({"phase": "Running"}), json!({"phase": "Paused"})];
        let spec = json!({"resources": {"slotsPerTrial": 2}});
        store.replace(fixture::run(spec, json!({"phase": "Running"}), &trials));
        let page = page(&Site::default(), &Visible::all(store), None);
        let row = &page.running[0];
        assert_eq!((row.trials.as_str(), row.slots.as_str()), ("1", "2"));
        assert!(!page.has_nodes && page.notes[0].contains("--slots"));
        // Without a runner, no trial trains.
        let trials = [json!({"phase": "Running"})];
        let mut stopped = fixture::run(json!({}), json!({"phase": "Running"}), &trials);
        stopped.is_running = false;
        assert!(running(&[Arc::new(stopped)]).is_empty());
    }
}

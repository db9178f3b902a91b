//! Cost of an experiment for the API server and the operator. The test checks counts; `cargo xtask
//! bench operator` prints times.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use serde_json::json;
use stoker_api::contract::{CONTRACT_VERSION, Report, ReportEvent};
use stoker_api::experiment::Phase;
use stoker_api::names::checkpoint_name;
use stoker_api::trial::{AttemptEnd, Trial, TrialStatus};
use stoker_engine::trial::{
    BackOffLimits, RestartLimits, SearchedMetric, TrialRecord, begin_attempt, end_attempt,
    record_report,
};

use crate::flow::grid;
use crate::kubelet::{Kubelet, Script};
use crate::operator_process::Operator;
use crate::setup::{ACCOUNT, TestNamespace, operator_port, runtime};
use crate::trainer::{ReportConnection, config_of, token};

/// Writes of a namespace's operator by verb and resource, except to leases and token reviews, and
/// except for refused requests: on a busy machine, some are repeated.
fn writes(ns: &TestNamespace) -> BTreeMap<String, usize> {
    let user = format!("system:serviceaccount:{}:{ACCOUNT}", ns.namespace);
    let mut counts = BTreeMap::new();
    for request in ns.plane.requests().unwrap() {
        let is_read = matches!(request.verb.as_str(), "get" | "list" | "watch");
        let is_other = matches!(request.resource.as_str(), "leases" | "tokenreviews");
        if request.user == user && request.code < 300 && !is_read && !is_other {
            *counts.entry(format!("{} {}", request.verb, request.resource)).or_default() += 1;
        }
    }
    counts
}

#[test]
fn experiment_needs_few_writes_and_none_while_waiting() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("counts").await;
        let mut operator =
            ns.operator_with("a", operator_port(), &["--finished-pods-seconds", "2"]);
        operator.wait_ready(&ns);
        let kubelet = Kubelet::start(&ns.client, "counts", |_| Script::Train { unit_ms: 500 });
        ns.apply("grid", grid(4, 2, 2));
        ns.wait_for("grid", &[Phase::Completed]).await;
        tokio::time::sleep(Duration::from_secs(5)).await;
        let counts = writes(&ns);
        let count = |name: &str| counts.get(name).copied().unwrap_or(0) as f64;
        let num_pods = kubelet.started().len() as f64;
        assert!(num_pods == 8.0);
        let per_pod = (count("create pods") + count("delete pods")) / num_pods;
        let per_trial = (count("update trials/status") + count("patch trials/status")) / 4.0;
        println!("writes per pod {per_pod}, of status per trial {per_trial}: {counts:#?}");
        assert!(per_pod <= 2.5, "{counts:#?}");
        // Five of them record the trainer's reports: its start, two checkpoints, two validations.
        assert!(per_trial - 5.0 <= 6.0, "{counts:#?}");

        // Pods that run for half a minute without a report.
        drop(kubelet);
        let _kubelet = Kubelet::start(&ns.client, "counts", |_| Script::Hang);
        ns.apply("quiet", grid(2, 2, 2));
        ns.wait_for("quiet", &[Phase::Running]).await;
        // On a busy machine, the last writes of the start may come late.
        let end = Instant::now() + stoker_test_cluster::PATIENCE;
        let mut before = writes(&ns);
        loop {
            tokio::time::sleep(Duration::from_secs(6)).await;
            let after = writes(&ns);
            if after == before {
                break;
            }
            assert!(Instant::now() < end, "never 6 s without a write: {before:#?} {after:#?}");
            before = after;
        }
        tokio::time::sleep(Duration::from_secs(30)).await;
        assert_eq!(writes(&ns), before);
    });
}

/// CPU seconds used by a process so far.
fn cpu_seconds(pid: u32) -> f64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = text.rsplit_once(')').unwrap().1.split_whitespace().collect();
    let ticks = |field_idx: usize| fields[field_idx].parse::<f64>().unwrap();
    // `utime` and `stime`, in hundredths of a second on Linux.
    (ticks(11) + ticks(12)) / 100.0
}

fn resident_mib(pid: u32) -> f64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<f64>().unwrap() / 1024.0
}

/// Sum of a metric over its labels.
pub(crate) fn metric(operator: &Operator, name: &str) -> f64 {
    let text = operator.metrics();
    let lines = text.lines().filter(|line| line.starts_with(name) && !line.starts_with('#'));
    lines.filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok()).sum()
}

/// CPU time of reconciles.
const CPU: &str = "stoker_reconcile_cpu_seconds_total";

/// Sends reports of one trial at a steady rate, without waiting for responses. Returns the seconds
/// to each response.
async fn report(ns: &TestNamespace, trial: u32, rate: f64, time: Duration) -> Vec<f64> {
    let pods: Api<Pod> = Api::namespaced(ns.client.clone(), &ns.namespace);
    let pod = pods.get(&format!("door-{trial}-a0-r0")).await.unwrap();
    let token = token(&ns.client, &ns.namespace, &pod).await.unwrap();
    let connection = std::sync::Arc::new(ReportConnection::new(&config_of(&pod), token));
    let mut ticks = tokio::time::interval(Duration::from_secs_f64(1.0 / rate));
    let (begin, mut batches, mut answers) = (Instant::now(), 0_u64, vec![]);
    while begin.elapsed() < time {
        ticks.tick().await;
        batches += 1;
        // Each validation is better than the last. Others would share writes.
        let loss = stoker_api::number::format(1.0 / batches as f64);
        let metrics = [("loss".to_owned(), loss)].into();
        let event = ReportEvent::Validated { metrics, granted_units: None };
        let report = Report { version: CONTRACT_VERSION, attempt: 0, batches, event };
        let connection = connection.clone();
        answers.push(tokio::spawn(async move {
            let begin = Instant::now();
            let (code, text) = connection.post(&report).await.unwrap();
            assert_eq!(code, 200, "{text}");
            begin.elapsed().as_secs_f64()
        }));
    }
    let mut seconds = vec![];
    for answer in answers {
        seconds.push(answer.await.unwrap());
    }
    seconds
}

#[test]
#[ignore = "measures: run by `cargo xtask bench operator`"]
fn times() {
    const TRIALS: u32 = 10;
    runtime().block_on(async {
        let ns = std::sync::Arc::new(TestNamespace::new("times").await);
        let mut operator =
            ns.operator_with("a", operator_port(), &["--finished-pods-seconds", "1"]);
        operator.wait_ready(&ns);
        let pid = operator.pid();
        println!("| resident memory at rest, MiB | {:.1} |", resident_mib(pid));
        let kubelet = Kubelet::start(&ns.client, "times", |pod| {
            let is_door = pod.metadata.name.as_ref().unwrap().starts_with("door-");
            if is_door { Script::Hang } else { Script::Train { unit_ms: 50 } }
        });
        let wide = |points: u32, batches: u64| {
            let mut spec = grid(points, batches, 1);
            spec["searcher"]["grid"]["maxConcurrentTrials"] = json!(TRIALS);
            spec
        };
        let (cpu, reconciles) =
            (cpu_seconds(pid), metric(&operator, "stoker_reconcile_seconds_count"));
        let alone = metric(&operator, CPU);
        ns.apply("many", wide(40, 2));
        ns.wait_for("many", &[Phase::Completed]).await;
        tokio::time::sleep(Duration::from_secs(4)).await;
        let cpu = cpu_seconds(pid) - cpu;
        let reconciles = metric(&operator, "stoker_reconcile_seconds_count") - reconciles;
        let alone = metric(&operator, CPU) - alone;
        for kind in ["experiment", "trial"] {
            let of = |name: &str| metric(&operator, &format!("{name}{{kind=\"{kind}\"}}"));
            let (seconds, count) = (of(CPU), of("stoker_reconcile_seconds_count"));
            println!(
                "| of {kind}s: reconciles, CPU each alone, us | {count}, {:.0} |",
                seconds / count * 1e6
            );
        }
        println!("| CPU per trial of 1 pod, all in, ms | {:.1} |", cpu / 40.0 * 1e3);
        println!("| reconciles per trial | {:.1} |", reconciles / 40.0);
        println!("| CPU per reconcile, all in, us | {:.0} |", cpu / reconciles * 1e6);
        println!("| CPU per reconcile alone, us | {:.0} |", alone / reconciles * 1e6);
        println!("| pods run | {} |", kubelet.started().len());

        ns.apply("door", wide(TRIALS, 1_000_000));
        ns.wait_for("door", &[Phase::Running]).await;
        tokio::time::sleep(Duration::from_secs(3)).await;
        let cpu = cpu_seconds(pid);
        let time = Duration::from_secs(20);
        let trials = (0..TRIALS).map(|trial| {
            let ns = ns.clone();
            tokio::spawn(async move { report(&ns, trial, 50.0 / f64::from(TRIALS), time).await })
        });
        let trials: Vec<_> = trials.collect();
        let mut seconds = vec![];
        for trial in trials {
            seconds.extend(trial.await.unwrap());
        }
        let cpu = cpu_seconds(pid) - cpu;
        seconds.sort_by(f64::total_cmp);
        let at = |part: f64| seconds[((seconds.len() - 1) as f64 * part) as usize] * 1e3;
        let per_second = seconds.len() as f64 / time.as_secs_f64();
        println!("| reports a second, each recorded | {per_second:.0} |");
        println!("| report to directive, median, ms | {:.1} |", at(0.5));
        println!("| report to directive, 99 of 100, ms | {:.1} |", at(0.99));
        println!("| report to directive, longest, ms | {:.1} |", at(1.0));
        println!("| CPU per report, all in, ms | {:.2} |", cpu / seconds.len() as f64 * 1e3);
        println!("| resident memory at the end, MiB | {:.1} |", resident_mib(pid));
    });
}

/// Number of waiting trials, unless `STOKER_BENCH_WAITING` sets another.
const WAITING: u32 = 5000;

#[test]
#[ignore = "measures: run by `cargo xtask bench operator`"]
fn waiting_trials() {
    const EXPERIMENTS: u32 = 10;
    let wanted = std::env::var("STOKER_BENCH_WAITING");
    let num = wanted.map_or(WAITING, |text| text.parse().unwrap());
    runtime().block_on(async {
        let ns = TestNamespace::new("waiting").await;
        // One pod, which no scheduler considers, holds the only slot for the whole test.
        let more = ["--starting-pods-max", "1", "--start-deadline-seconds", "86400"];
        let mut operator = ns.operator_with("a", operator_port(), &more);
        operator.wait_ready(&ns);
        let pid = operator.pid();
        let per_experiment = num.div_ceil(EXPERIMENTS);
        for experiment in 0..EXPERIMENTS {
            let mut spec = grid(per_experiment, 2, 1);
            spec["searcher"]["grid"]["maxConcurrentTrials"] = json!(per_experiment);
            ns.apply(&format!("waiting-{experiment}"), spec);
        }
        let num_waiting = async || {
            let trials = ns.trials().list(&Default::default()).await.unwrap().items;
            let waits = |trial: &&Trial| {
                let status = trial.status.as_ref();
                let conditions = status.map(|status| &status.conditions[..]).unwrap_or_default();
                let scheduled = stoker_api::condition::find(conditions, "Scheduled");
                scheduled.is_some_and(|condition| condition.reason == "WaitingForAdmission")
            };
            trials.iter().filter(waits).count() as u32
        };
        let begin = Instant::now();
        while num_waiting().await < EXPERIMENTS * per_experiment - 1 {
            assert!(begin.elapsed() < Duration::from_secs(3600), "{}", ns.logs());
            tokio::time::sleep(Duration::from_secs(5)).await;
        }
        println!("| seconds until {num} trials wait | {:.0} |", begin.elapsed().as_secs_f64());
        tokio::time::sleep(Duration::from_secs(10)).await;
        let reconciles = metric(&operator, "stoker_reconcile_seconds_count");
        let (cpu, begin) = (cpu_seconds(pid), Instant::now());
        tokio::time::sleep(Duration::from_secs(60)).await;
        let (cpu, seconds) = (cpu_seconds(pid) - cpu, begin.elapsed().as_secs_f64());
        let reconciles = metric(&operator, "stoker_reconcile_seconds_count") - reconciles;
        println!("| CPU while {num} trials wait, % of a core | {:.2} |", cpu / seconds * 100.0);
        println!("| reconciles a second while they wait | {:.1} |", reconciles / seconds);
        println!("| resident memory while they wait, MiB | {:.1} |", resident_mib(pid));
    });
}

/// Size of long texts and metric lists, just below the limit of a report in bytes.
const REPORT_BYTES: usize = 250_000;

/// The largest record of a trial that a program can cause by its reports and exits: many attempts,
/// lengths and metrics, and long texts.
fn worst_case() -> TrialRecord {
    let spec = json!({
        "experiment": "e".repeat(40), "index": 65_535, "requestId": "r".repeat(36), "seed": 1,
        "hyperparameters": {}, "unit": "batches", "units": 1,
        "grants": (0..512).map(|order| json!({
            "order": 1_000_000 + order, "fact": order, "units": u64::MAX / 2 + order,
        })).collect::<Vec<_>>(),
    });
    let spec = serde_json::from_value(spec).unwrap();
    let mut record = TrialRecord { spec, status: TrialStatus::default() };
    let searched =
        SearchedMetric { name: "loss", smaller_is_better: true, others: &[], is_copied: false };
    let number = stoker_api::number::format(-f64::MAX / 3.0);
    let metrics: BTreeMap<String, String> = (0..REPORT_BYTES / 100)
        .map(|index| (format!("{index:063}"), number.clone()))
        .chain([("loss".to_owned(), number.clone())])
        .collect();
    let text = "\u{1}".repeat(REPORT_BYTES / 6);
    let limits = RestartLimits::new(u32::MAX, BackOffLimits::CLUSTER, false);
    let apply = |record: &mut TrialRecord, attempt, batches, event| {
        let report = Report { version: CONTRACT_VERSION, attempt, batches, event };
        record_report(record, &report, &searched);
    };
    let lengths: Vec<u64> = record.spec.grants.iter().map(|grant| grant.units).collect();
    for attempt in 0..128 {
        begin_attempt(&mut record, attempt);
        let batches = u64::from(attempt) + 1;
        let resumed_from = Some(checkpoint_name(batches, attempt));
        let event =
            ReportEvent::Started { resumed_from, batches_total: 9, refused: Default::default() };
        apply(&mut record, attempt, batches, event);
        let event = ReportEvent::Checkpointed {
            name: checkpoint_name(batches, attempt),
            manifest_sha256: "0".repeat(64),
            bytes: u64::MAX / 2,
            metric: Some(number.clone()),
        };
        apply(&mut record, attempt, batches, event);
        for length in lengths.iter().skip(attempt as usize * 4).take(4) {
            let metrics = metrics.clone();
            let event = ReportEvent::Validated { metrics, granted_units: Some(*length) };
            apply(&mut record, attempt, batches, event);
        }
        let activity = Some(text.clone());
        let event = ReportEvent::Progress { batches_total: u64::MAX / 2, activity };
        apply(&mut record, attempt, batches, event);
        let event = ReportEvent::Exiting { code: 1, message: Some(text.clone()) };
        apply(&mut record, attempt, batches, event);
        end_attempt(&mut record, AttemptEnd::UserError, Some(text.clone()), &limits);
    }
    record
}

#[test]
#[ignore = "measures: run by `cargo xtask bench operator`"]
fn worst_case_trial() {
    let record = worst_case();
    let bytes = serde_json::to_vec(&record.status).unwrap().len();
    println!("| bytes of the status of a worst-case Trial | {bytes} |");
    println!(
        "| bytes of its grants | {} |",
        serde_json::to_vec(&record.spec.grants).unwrap().len()
    );
}

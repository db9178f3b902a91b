//! Prometheus metrics. Names are stable, and labels have few values.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};
use stoker_api::experiment::Phase;
use stoker_api::trial::AttemptEnd;

/// Label `kind` of a metric: a kind of write, object or end.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Kind {
    /// One of a fixed set of values.
    pub kind: &'static str,
}

impl Kind {
    /// Write of a trial's status.
    pub const TRIAL_STATUS: Self = Self { kind: "trial_status" };
    /// Write of a trial's spec.
    pub const TRIAL_SPEC: Self = Self { kind: "trial_spec" };
    /// Creation of a trial.
    pub const TRIAL_CREATE: Self = Self { kind: "trial_create" };
    /// Write of an experiment's status.
    pub const EXPERIMENT_STATUS: Self = Self { kind: "experiment_status" };
    /// Creation of a pod.
    pub const POD_CREATE: Self = Self { kind: "pod_create" };
    /// Deletion of a pod.
    pub const POD_DELETE: Self = Self { kind: "pod_delete" };
    /// Write of a job's status.
    pub const JOB_STATUS: Self = Self { kind: "job_status" };
    /// Creation of a Service.
    pub const SERVICE_CREATE: Self = Self { kind: "service_create" };
    /// Deletion of a Service.
    pub const SERVICE_DELETE: Self = Self { kind: "service_delete" };
}

/// Outcome of a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum Answer {
    /// Recorded and answered with a directive.
    Directive,
    /// Answered without a write: the report contains nothing new to record.
    Repeat,
    /// Delayed: a validation that decides nothing, to be recorded with a later write.
    Held,
    /// Fenced: the attempt has ended or was replaced.
    Fenced,
    /// Rejected permanently: the report is invalid.
    Refused,
    /// Rejected: the caller may not send this report.
    Unauthorized,
    /// Rejected for now: a rate limit was exceeded.
    Limited,
    /// Rejected for now: the operator cannot record the report at the moment.
    Unavailable,
}

/// Label `answer` of a metric.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct AnswerLabel {
    /// Outcome of the report.
    pub answer: Answer,
}

/// Metrics of a replica.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    /// Writes to the API server, by kind.
    pub writes: Family<Kind, Counter>,
    /// Reconciles that failed.
    pub errors: Family<Kind, Counter>,
    /// Duration of reconciles in seconds, including requests.
    pub reconcile_seconds: Family<Kind, Histogram, fn() -> Histogram>,
    /// CPU seconds of reconciles.
    pub reconcile_cpu_seconds: Family<Kind, Counter<f64, AtomicU64>>,
    /// Attempts started.
    pub attempts_started: Counter,
    ends: Family<Kind, Counter>,
    trial_ends: Family<Kind, Counter>,
    job_ends: Family<Kind, Counter>,
    /// Reports by outcome.
    pub reports: Family<AnswerLabel, Counter>,
    /// Reports that were delayed or rejected because their namespace exceeds its status-write
    /// limit.
    pub reports_slowed: Counter,
    /// Seconds from a report to its response. Responses with the directive `Wait` are excluded.
    pub report_seconds: Histogram,
    /// Searches rebuilt from their records.
    pub searches_rebuilt: Counter,
    /// 1 on the leader, otherwise 0.
    pub leader: Gauge,
    /// 1 while most nodes are not ready, otherwise 0.
    pub node_outage: Gauge,
    /// Objects in the caches.
    pub cached: Family<Kind, Gauge>,
    /// Keys in the work queues.
    pub queued: Family<Kind, Gauge>,
}

fn seconds() -> Histogram {
    Histogram::new(exponential_buckets(0.000_1, 4.0, 10))
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("stoker");
        let metrics = Self {
            registry: Registry::default(),
            writes: Family::default(),
            errors: Family::default(),
            reconcile_seconds: Family::new_with_constructor(seconds),
            reconcile_cpu_seconds: Family::default(),
            attempts_started: Counter::default(),
            ends: Family::default(),
            trial_ends: Family::default(),
            job_ends: Family::default(),
            reports: Family::default(),
            reports_slowed: Counter::default(),
            report_seconds: seconds(),
            searches_rebuilt: Counter::default(),
            leader: Gauge::default(),
            node_outage: Gauge::default(),
            cached: Family::default(),
            queued: Family::default(),
        };
        registry.register(
            "api_writes",
            "Writes to the API server, by kind",
            metrics.writes.clone(),
        );
        registry.register("reconcile_errors", "Reconciles that failed", metrics.errors.clone());
        let help = "Duration of reconciles, including requests";
        registry.register_with_unit(
            "reconcile",
            help,
            Unit::Seconds,
            metrics.reconcile_seconds.clone(),
        );
        let help = "CPU time of reconciles, including the threads' share of their requests";
        let cpu = metrics.reconcile_cpu_seconds.clone();
        registry.register_with_unit("reconcile_cpu", help, Unit::Seconds, cpu);
        registry.register("attempts_started", "Attempts started", metrics.attempts_started.clone());
        registry.register("attempts_ended", "Attempts ended, by outcome", metrics.ends.clone());
        registry.register("trials_ended", "Trials ended, by phase", metrics.trial_ends.clone());
        registry.register("jobs_ended", "Jobs ended, by phase", metrics.job_ends.clone());
        registry.register("reports", "Reports of trainers, by outcome", metrics.reports.clone());
        registry.register(
            "reports_slowed",
            "Reports delayed or rejected because their namespace exceeds its status-write limit",
            metrics.reports_slowed.clone(),
        );
        let help =
            "Time from a report to its response, excluding responses with the directive wait";
        registry.register_with_unit("report", help, Unit::Seconds, metrics.report_seconds.clone());
        let help = "Searches rebuilt from their records, instead of continued in memory";
        registry.register("searches_rebuilt", help, metrics.searches_rebuilt.clone());
        registry.register("leader", "1 on the leader, otherwise 0", metrics.leader.clone());
        let help = "1 while most nodes are not ready, otherwise 0";
        registry.register("node_outage", help, metrics.node_outage.clone());
        registry.register(
            "cached_objects",
            "Objects in the caches, by kind",
            metrics.cached.clone(),
        );
        registry.register("queued", "Keys in the work queues, by kind", metrics.queued.clone());
        Self { registry, ..metrics }
    }
}

fn of_phase(phase: Phase) -> Kind {
    let kind = match phase {
        Phase::Completed => "completed",
        Phase::Failed => "failed",
        _ => "cancelled",
    };
    Kind { kind }
}

/// CPU seconds used by this thread.
fn thread_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// Returns a future's output and the CPU seconds of its polls, summed over all threads that poll
/// it. Work in other tasks, such as a shared connection, is not included.
pub async fn with_cpu_seconds<T>(future: impl Future<Output = T>) -> (T, f64) {
    let mut future = pin!(future);
    let mut seconds = 0.0;
    let output = poll_fn(|context| {
        let begin = thread_seconds();
        let polled = future.as_mut().poll(context);
        seconds += thread_seconds() - begin;
        polled
    });
    let output = output.await;
    (output, seconds)
}

impl Metrics {
    /// Counts an ended attempt.
    pub fn attempt_ended(&self, end: AttemptEnd) {
        let kind = match end {
            AttemptEnd::Completed => "completed",
            AttemptEnd::Preempted => "preempted",
            AttemptEnd::InvalidHyperparameters => "invalid_hyperparameters",
            AttemptEnd::UserError => "user_error",
            AttemptEnd::Infrastructure => "infrastructure",
            AttemptEnd::RunnerLost => "runner_lost",
            AttemptEnd::NotStarted => "not_started",
        };
        self.ends.get_or_create(&Kind { kind }).inc();
    }

    /// Counts an ended trial.
    pub fn trial_ended(&self, phase: Phase) {
        self.trial_ends.get_or_create(&of_phase(phase)).inc();
    }

    /// Counts an ended job.
    pub fn job_ended(&self, phase: Phase) {
        self.job_ends.get_or_create(&of_phase(phase)).inc();
    }

    /// All metrics as text in the OpenMetrics format.
    pub fn render(&self) -> String {
        let mut text = String::new();
        match prometheus_client::encoding::text::encode(&mut text, &self.registry) {
            Ok(()) => text,
            Err(error) => format!("# {error}\n"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_work_counts_as_cpu_time() {
        let waiting = tokio::time::sleep(std::time::Duration::from_millis(200));
        let (_, waited) = with_cpu_seconds(waiting).await;
        let working = async {
            for _ in 0..5 {
                let begin = thread_seconds();
                while thread_seconds() < begin + 0.01 {}
                tokio::task::yield_now().await;
            }
        };
        let (_, worked) = with_cpu_seconds(working).await;
        assert!((0.05..0.1).contains(&worked) && waited < 0.01, "{worked} {waited}");
    }

    #[test]
    fn metric_names_and_labels_are_stable() {
        let metrics = Metrics::default();
        metrics.writes.get_or_create(&Kind::POD_CREATE).inc();
        metrics.attempts_started.inc();
        metrics.attempt_ended(AttemptEnd::NotStarted);
        metrics.trial_ended(Phase::Completed);
        metrics.report_seconds.observe(0.5);
        metrics.reports.get_or_create(&AnswerLabel { answer: Answer::Fenced }).inc();
        let text = metrics.render();
        for line in [
            "stoker_api_writes_total{kind=\"pod_create\"} 1",
            "stoker_attempts_started_total 1",
            "stoker_attempts_ended_total{kind=\"not_started\"} 1",
            "stoker_trials_ended_total{kind=\"completed\"} 1",
            "stoker_report_seconds_count 1",
            "stoker_reports_total{answer=\"Fenced\"} 1",
            "stoker_leader 0",
        ] {
            assert!(text.contains(line), "{line} in {text}");
        }
    }
}
